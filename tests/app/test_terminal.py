"""What a run ends with in a terminal: draws to look at, one table that fits, and a bar with the time that is left."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_texts
import torch
from rich.console import Console

import tokensteer as ts
from tokensteer.app import cli
from tokensteer.app.runs.jobs import Job
from tokensteer.app.terminal import draws, progress, tables
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.looks import Letters
from tokensteer.tasks.common.settings import Settings

TINY = ["--particles", "2", "--populations", "2", "--steps", "3"]


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


# ---- draws


def test_pictures_have_two_pixels_in_a_character():
    plus = torch.zeros(6, 6, dtype=torch.bool)
    plus[1:4, 2] = plus[2, 1:4] = True
    dot = torch.zeros(6, 6, dtype=torch.bool)
    dot[3, 3] = True
    assert [str(line) for line in draws.pictures([plus, dot], 80)] == ["▄█▄", " ▀      ▀"]
    assert [str(line) for line in draws.pictures([plus, dot], 6)] == ["▄█▄", " ▀", "", "", "  ▀"]
    assert [str(line) for line in draws.pictures([torch.zeros(2, 2, dtype=torch.bool)], 6)] == ["(blank)"]


def test_three_pictures_of_mnist_fit_80_columns():
    inked = torch.zeros(3, 28, 28, dtype=torch.bool)
    inked[:, 4:24, 4:24] = True
    lines = [str(line) for line in draws.pictures(list(inked), 80)]
    assert len(lines) == 10
    assert max(map(len, lines)) == 66


def test_known_sites_of_dna_are_marked_and_named():
    ids = ["ACGT".index(letter) for letter in "CC" + "CTTATCT" + "GG" + "ATGCAAAT"]
    look = TASKS["dna"].look
    assert isinstance(look, Letters)
    line = draws.letters(ids, look)
    assert str(line) == "CCCTTATCTGGATGCAAAT  (GATA, OCT)"
    marked = [(span.start, span.end) for span in line.spans if span.style == "reverse"]
    assert marked == [(2, 9), (11, 19)]


def test_letters_have_colours():
    line = draws.letters([0, 1, 2, 3, 4], Letters("ACGT"))
    assert str(line) == "ACGT."
    assert [(span.start, span.style) for span in line.spans] == [(0, "green"), (1, "blue"), (2, "yellow"), (3, "red")]


@pytest.mark.parametrize(
    ("prompt", "text", "dimmed"),
    [
        ("The film", "the film is good", ["the film"]),
        ("The [MASK] [MASK] was good", "the new film was good, was it", ["the", "was good"]),
        ("The film was ___2 because", "the film was so good because", ["the film was", "because"]),
        ("Elsewhere", "the film", []),
        ("a\x1b[2J", "a\x1b[2J film", ["a [2J"]),
    ],
)
def test_prompts_are_dimmed(prompt: str, text: str, dimmed: list[str]):
    line = draws.prompted({"prompt": prompt, "text": text, "reward": None})
    assert "\x1b" not in str(line)
    assert [str(line)[span.start : span.end] for span in line.spans if span.style == "dim"] == dimmed
    assert str(draws.prompted({"prompt": "", "text": "x", "reward": -0.5})) == "x  (reward −0.500)"


@pytest.mark.parametrize(
    ("task", "looks"),
    [("digits", r"[▀▄█ ]+\n"), ("text", r"(?s)the film.*\(reward .*the film.*\(reward"), ("dna", "[ACGT]{80}\n")],
)
def test_a_run_ends_with_draws_and_a_table(task: str, looks: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("The film\n")
    words = ["--prompts", "p.txt", "--weights", small_texts.write_task(tmp_path / "w")] if task == "text" else []
    assert tokensteer("run", task, "--method", "smc-base", *TINY, *words, "--out", "x") == 0
    out = capsys.readouterr().out
    assert re.match(r"[23] draws of smc-base, N = 2:\n", out)  # two populations, of which one is asked twice
    assert re.search(looks, out)
    lines = out.splitlines()
    (at,) = (k for k, line in enumerate(lines) if line.lstrip().startswith("method"))
    assert max(map(len, lines[: at - 3] + lines[at : at + 3])) <= 80


def test_the_same_draw_is_shown_once(tmp_path: Path):
    words = ["--method", "smc-base", "--particles", "1", "--populations", "1", "--steps", "3"]
    assert tokensteer("run", "digits", *words, "--out", tmp_path / "x") == 0
    assert str(draws.draws(ts.open_run(tmp_path / "x"), 80)[0]) == "1 draw of smc-base, N = 1:"


def test_draws_are_of_the_answer(tmp_path: Path):
    """They are posterior draws of living populations, and come from the last weighted method."""
    words = ["--methods", "smc-base", "svdd-argmax", "--particles", "4", "--populations", "5", "--steps", "3"]
    assert tokensteer("compare", "digits", *words, "--out", tmp_path / "x") == 0
    run = ts.open_run(tmp_path / "x")
    assert str(draws.draws(run, 80)[0]) == "3 draws of smc-base, N = 4:"
    result = run.result(0)
    certain = torch.full_like(result.log_w, -torch.inf)
    certain[:, 2] = 0.0
    (run.folder / run.rows[0]["file"]).unlink()
    ts.Result(**{**vars(result), "log_w": certain, "generator": None}).save(run.folder / run.rows[0]["file"])
    chosen = [result.samples[k, 2].view(8, 8) == 1 for k in (0, 2, 4)]
    assert list(map(str, draws.draws(run, 80)[1:-1])) == list(map(str, draws.pictures(chosen, 80)))


def test_points_of_a_plane_have_no_draws(tmp_path: Path, capsys):
    assert tokensteer("run", "mog", "--method", "smc-base", *TINY, "--out", tmp_path / "x") == 0
    assert capsys.readouterr().out.startswith("mog: two tokens")


# ---- one table


def row(method: str, metrics: dict[str, list[float]], seed: int = 0) -> dict[str, Any]:
    who = {"task": "t", "about": "a test", "method": method, "particles": 4, "populations": 2, "seed": seed}
    cost = {"rows": {"denoiser": 10, "reward": 5}, "saved": {}, "seconds": 1.0}
    return {**who, **cost, "metrics": metrics, "best": None, "log_z": -1.0, "log_z_error": 0.1}


MANY = {f"metric {k}": [0.123, 0.045] for k in range(12)} | {"accuracy": [0.5, 0.1], "ess": [0.5, 0.1]}


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_there_is_one_table_that_fits(width: int):
    shown = tables.tables([row("smc-base", MANY), row("svdd", MANY)], width)
    (table,) = (part for part in shown if not isinstance(part, str))
    assert tables.plain_console(width=1000).measure(table).maximum <= width
    titles = [str(column.header) for column in table.columns]
    assert titles[:2] == ["method", "N"]
    assert "accuracy" in titles
    left = [part for part in shown if isinstance(part, str)][1:]
    assert left == [] if width == 300 else all(f"metric {k}" in left[0] or f"metric\n{k}" in titles for k in range(12))


def test_seeds_are_joined_in_the_table():
    shown = tables.tables([row("svdd", {"accuracy": [seed / 2, 0.1]}, seed) for seed in (0, 1)], 80)
    heading, table, left = shown
    assert "over 2 seeds" in str(heading)
    assert not isinstance(table, str)
    assert table.row_count == 1
    assert str(left).endswith("single seeds")


def test_long_names_are_broken_to_fit():
    shown = tables.tables([row("smc-base, " + "long words " * 9, {"accuracy": [0.5, 0.1]})], 80)
    console = Console(file=io.StringIO(), width=80)
    for part in shown[1:2]:
        console.print(part)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80  # type: ignore[attr-defined]


# ---- the bar


def test_the_bar_counts_steps_of_jobs(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    evaluation = ts.Evaluation(torch.zeros(1, 2), None)
    record: Any = SimpleNamespace(log_w=torch.zeros(1, 2), evaluation=evaluation)
    with progress.shown(3, 1, 3, 1) as watch:
        assert isinstance(watch, progress.Bars)
        job = Job("digits", "svdd", 2, 2, settings=Settings(steps=4))
        watch.begin(job)
        done = lambda: watch.bar.tasks[0].completed  # noqa: E731
        for _ in range(5):
            watch.see(record)
        assert 1.8 < done() < 2
        for _ in range(50):  # more sweeps than were expected
            watch.see(record)
        assert 1.8 < done() < 2
        watch.unit()
        watch.end(row("svdd", {"accuracy": [0.5, 0.1]}))
        assert done() == 2
        watch.shares([0.5, 0.25, 7.0])  # of units that other processes run
        assert 3.7 < done() < 3.75
        assert watch.bar.tasks[0].description == "3 workers at work"
    assert "left" in shown.getvalue()
