"""Results in notebooks and in ArviZ."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from narrow import untyped
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.tasks.catalogue import TASKS

B = Toy("B")


def result() -> ts.Result:
    return ts.smc_base(B.model("mdm"), B.tilt("mdm"))(8, 3, generator=seeded())


def test_html_shows_draws_and_lines_and_changes_nothing() -> None:
    found = result()
    after = result().sample(5)
    page = found._repr_html_()
    tree = ElementTree.fromstring(page)  # well-formed, without scripts
    assert not tree.findall(".//script")
    lines = tree.findall(".//polyline")
    assert len(lines) == 1 + 8  # the ESS, and a line for each particle
    assert len(tree.findall(".//li")) == 4
    assert torch.equal(found.sample(5), after)


def test_texts_are_escaped() -> None:
    page = result().html(decode=lambda ids: ["<script>alert(1)</script>"] * len(ids))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_draws_are_particles_with_their_rewards() -> None:
    found, same = result(), result()
    index = found.draw(6)
    assert index.shape == (3, 6)
    picked = torch.stack([found.samples[b, index[b]] for b in range(3)])
    assert torch.equal(picked, same.sample(6))


@pytest.mark.parametrize("version", ["0.23.4", "1.0.0"])
def test_arviz_gets_a_chain_for_each_population(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    def from_dict(*args: Any, **groups: Any) -> dict[str, Any]:
        assert bool(args) == version.startswith("1")  # the argument of version 1 is one dictionary
        return args[0] if args else groups

    monkeypatch.setitem(sys.modules, "arviz", untyped(SimpleNamespace(__version__=version, from_dict=from_dict)))
    found = result()
    groups = untyped(found.to_arviz(draws=5))
    ids, reward = torch.tensor(groups["posterior"]["x"]), torch.tensor(groups["sample_stats"]["reward"])
    assert ids.shape == (3, 5, B.length)
    torch.testing.assert_close(reward.flatten(), B.reward(ids.flatten(0, 1)).to(reward.dtype))


def test_without_arviz_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", untyped(None))
    with pytest.raises(ImportError, match="pip install arviz"):
        result().to_arviz()


def test_load_finds_tasks_and_runs(tmp_path) -> None:
    assert len(ts.load("text").model.steps) == TASKS["text"].steps  # as on the command line
    task = ts.load("digits", goal=3, steps=4)
    assert "towards 3" in task.about
    assert len(task.model.steps) == 4
    with pytest.raises(ValueError, match="digits"):
        ts.load("digts")
    with pytest.raises(FileNotFoundError):
        ts.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="give a Path"):
        ts.load(str(tmp_path))
