"""Differences prompt by prompt, and figures of several run folders, with networks of toy size."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import small_emoji
import small_texts
import torch

import tokensteer as ts
from tokensteer.app.cli import main as tokensteer
from tokensteer.app.report.folder import read
from tokensteer.tasks.common.task import SHIPPED

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks do not come with the source distribution", allow_module_level=True)

METHODS = ("pretrained", "best-of-n", "svdd", "smc-base")


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    return bench("paired", monkeypatch)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    return bench("figures", monkeypatch)


def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A benchmark; what its package sets for its own processes is taken back."""
    monkeypatch.syspath_prepend(ROOT)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")
    return import_module(f"benchmarks.{name}")


def compare(task: str, out: Path, *words: Any) -> Path:
    command = ["compare", task, "--steps", 2, *words, "--out", out]
    assert tokensteer(list(map(str, command))) == 0
    return out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks, prompts, and two run folders of them: two sizes of all methods, and a third of some."""
    home = tmp_path_factory.mktemp("emoji")
    small_emoji.save(home)
    (home / "prompts.txt").write_text("a red square\na blue bar\na black heart\n")
    shared = ["--weights", home, "--prompts", home / "prompts.txt", "--seeds", 0, 1]
    compare("emoji", home / "a", *shared, "--populations", 2, "--particles", 2, 3, "--methods", *METHODS)
    compare("emoji", home / "b", *shared, "--populations", 2, "--particles", 4, "--methods", *METHODS[1:2], "smc-base")
    return home


def test_differences_of_an_example_are_exact(paired):
    """Prompts differ by hundreds and methods by 2, 1 and 4: the first cancels. What only one of the two has, here a
    prompt and a seed, does not count."""
    apart = {"a": (1.0, 3.0), "b": (0.0, 2.0), "c": (3.0, 5.0)}
    theirs = {prompt: {(0, 0): at, (1, 0): at + 7} for prompt, at in (("a", 100.0), ("b", -50.0), ("c", 300.0))}
    ours = {p: {place: theirs[p][place] + d for place, d in zip(theirs[p], apart[p], strict=True)} for p in apart}
    ours["a"][2, 0] = 1e6
    theirs["d"] = {(0, 0): 1e6}
    found = paired.difference(ours, theirs)
    assert found.mean == pytest.approx(7 / 3)
    assert found.error == pytest.approx(math.sqrt(7) / 3)  # of 2, 1 and 4: variance 7/3, over three prompts
    assert found.same_prompts == pytest.approx(math.sqrt(3) / 3)  # each of the three has a variance of 2 over two seeds
    assert (found.prompts, found.pairs) == (3, 6)
    assert found.ours - found.theirs == pytest.approx(found.mean)
    assert found.theirs == pytest.approx((103.5 - 46.5 + 303.5) / 3)
    once = paired.difference({"a": {(0, 0): 2.0}}, {"a": {(0, 0): 1.0}})
    assert once.mean == 1.0
    assert math.isnan(once.error)
    assert math.isnan(once.same_prompts)
    with pytest.raises(ValueError, match="no prompt and seed in common"):
        paired.difference({"a": {(0, 0): 2.0}}, {"a": {(1, 0): 1.0}})


def test_errors_are_those_of_repeated_experiments(paired):
    """Over a thousand experiments, the difference over its error has a variance of t with 11 degrees of freedom for
    further prompts, and over the error for these prompts, about 1 beside the fixed effects of prompts."""
    noise = torch.Generator().manual_seed(0)
    prompts, seeds, count = 12, 3, 1000
    effect = torch.randn(prompts, generator=noise, dtype=torch.float64)
    z: list[tuple[float, float]] = []
    for _ in range(count):
        own = torch.randn(prompts, generator=noise, dtype=torch.float64)
        each = torch.randn(prompts, seeds, generator=noise, dtype=torch.float64)
        pair = []
        for fixed in (own, effect):
            values = {str(p): {(s, 0): float(fixed[p] + each[p, s]) for s in range(seeds)} for p in range(prompts)}
            zero = {str(p): {(s, 0): 0.0 for s in range(seeds)} for p in range(prompts)}
            pair.append(paired.difference(values, zero))
        z.append((pair[0].mean / pair[0].error, (pair[1].mean - float(effect.mean())) / pair[1].same_prompts))
    for found, freedom in zip(torch.tensor(z).T, (prompts - 1, prompts * (seeds - 1)), strict=True):
        expected = freedom / (freedom - 2)
        assert abs(float((found**2).mean()) - expected) / float((found**2).std() / count**0.5) < 4


def test_values_of_populations_are_those_of_the_table(paired, home: Path):
    """Their mean is the metric that the run has stored, for weighted particles and for equal ones."""
    folders = import_module("benchmarks.run_folders")
    found = folders.read_all([home / "a", home / "b"])
    assert len(found) == 2 * (2 * 4 + 2)
    for one in found:
        if one.row.family == "svdd":  # of one draw, which is another here
            continue
        values = paired.values_of(one, None, "cpu")
        assert list(values) == ["1: a red square", "2: a blue bar", "3: a black heart"]
        assert [list(places) for places in values.values()] == [[0, 1]] * 3
        for metric in ("judge", "alignment"):
            every = [metrics[metric] for places in values.values() for metrics in places.values()]
            assert sum(every) / 6 == pytest.approx(one.row.metrics[metric].mean, abs=1e-6)


def test_methods_are_compared_at_their_size(paired, home: Path, capsys):
    out = home / "paired.jsonl"
    paired.main(paired.Options((home / "a", home / "b"), metric=("judge", "alignment"), out=out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    met = [(line["method"], line["particles"], line["its particles"]) for line in lines if line["metric"] == "judge"]
    assert sorted(met) == [
        *(("pretrained", n, n) for n in (2, 3)),
        *(("smc-base", n, n) for n in (2, 3, 4)),
        *(("svdd", n, n) for n in (2, 3)),
    ]
    assert {line["against"] for line in lines} == {"best-of-n"}
    for line in lines:
        if line["method"] != "svdd":
            rows = [row for folder in ("a", "b") for row in read(home / folder).rows]
            ours, theirs = (
                [row.metrics[line["metric"]].mean for row in rows if (row.method, row.particles) == which]
                for which in ((line["method"], line["particles"]), ("best-of-n", line["its particles"]))
            )
            assert line["mean"] == pytest.approx(sum(ours) / 2 - sum(theirs) / 2, abs=1e-6)
        assert (line["prompts"], line["pairs"]) == (3, 12)
    printed = capsys.readouterr()
    assert printed.out.count("\n| ") == len(lines)
    paired.main(paired.Options((home / "a", home / "b"), particles=4))
    assert printed.err.count("populations") == 2 * 9 + 2  # each row is measured once, for both metrics
    printed = capsys.readouterr().out
    assert "| smc-base, N = 2 | best-of-n, N = 4 | judge |" in printed
    paired.main(paired.Options((home / "a", home / "b"), against="pretrained"))
    said = capsys.readouterr()
    assert "Left out: smc-base, N = 4. pretrained has N = 2, 3: give --particles" in said.err
    assert "| smc-base, N = 3 | pretrained, N = 3 | judge |" in said.out


def test_a_method_of_one_size_is_compared_with_all(paired, home: Path, capsys):
    paired.main(paired.Options((home / "b",), against="smc-base"))
    assert "| best-of-n, N = 4 | smc-base, N = 4 |" in capsys.readouterr().out
    run = read(home / "a").rows
    one = next(row for row in run if row.family == "pretrained")
    groups = {(row.method, row.particles): [paired.Found(home, {}, row)] for row in run}
    del groups["pretrained", 3]
    met = dict(paired._partners(groups, paired.Options((home,), against="pretrained")))
    assert met["smc-base", 3] == met["smc-base", 2] == ("pretrained", one.particles)


def test_networks_and_prompts_are_those_of_the_run(paired, home: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    for file in home.glob("emoji-*"):
        (other / file.name).write_bytes(file.read_bytes())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square\na blue bar\n")
    words = ["--prompts", prompts, "--populations", 1, "--particles", 2, "--methods", "best-of-n", "smc-base"]
    run = compare("emoji", tmp_path / "run", "--weights", other, *words)
    paired.main(paired.Options((run,)))
    (other / "emoji-judge.safetensors").unlink()
    with pytest.raises(ValueError, match=r"files of --weights are not those of .*: bring them back, or give --weights"):
        paired.main(paired.Options((run,)))
    paired.main(paired.Options((run,), weights=home))
    prompts.write_text("a red square\na blue heart\n")
    with pytest.raises(ValueError, match=r"files of --prompts are not those of .*: bring them back$"):
        paired.main(paired.Options((run,), weights=home))


def test_wishes_that_cannot_be_met_are_refused(paired, home: Path, tmp_path: Path):
    for options, says in (
        (paired.Options((home / "a",), against="cfg"), "no run of cfg: give --against one of pretrained, best-of-n"),
        (paired.Options((home / "a",), metric=("diversity",)), "has no diversity of a single population: .* judge"),
        (paired.Options(()), "no run folder is given"),
        (paired.Options((home / "a", home / "a")), "is in .* too: leave one of them out"),
    ):
        with pytest.raises(ValueError, match=says):
            paired.main(options)
    shared = ["--weights", home, "--prompts", home / "prompts.txt", "--particles", 5]
    other = compare("emoji", tmp_path / "kl", *shared, "--populations", 1, "--kl", 0.5, "--methods", "smc-base")
    with pytest.raises(ValueError, match=r"runs differ in kl: .* Give folders of one target"):
        paired.main(paired.Options((home / "a", other)))
    methods = ["--methods", "best-of-n", "smc-base"]
    digits = compare("digits", tmp_path / "digits", "--populations", 2, "--particles", 2, *methods)
    with pytest.raises(ValueError, match="digits reads no prompts"):
        paired.main(paired.Options((digits,)))


def test_texts_are_compared_too(paired, tmp_path: Path, capsys):
    """Also where a prompt has failed: there are two seeds of one prompt, and the long one is left out."""
    weights = small_texts.write_task(tmp_path / "weights")
    prompts = ["--prompt", "the film", "the story " * 30, "we are"]
    words = ["--particles", 2, "--populations", 1, "--seeds", 0, 1, "--methods", "best-of-n", "smc-base"]
    command = ["compare", "text", "--steps", 2, "--weights", weights, *prompts, *words, "--out", tmp_path / "run"]
    tokensteer(list(map(str, command)))
    (row, *_) = ts.open_run(tmp_path / "run").rows
    assert len(row["failed"]) == 1
    paired.main(paired.Options((tmp_path / "run",), metric=("reward",), out=tmp_path / "paired.jsonl"))
    (line,) = [json.loads(text) for text in (tmp_path / "paired.jsonl").read_text().splitlines()]
    assert (line["method"], line["prompts"], line["pairs"]) == ("smc-base", 2, 4)
    rows = {(row["method"], row["seed"]): row["metrics"]["reward"][0] for row in ts.open_run(tmp_path / "run").rows}
    apart = sum(rows["smc-base", seed] - rows["best-of-n", seed] for seed in (0, 1)) / 2
    assert line["mean"] == pytest.approx(apart, abs=1e-6)
    assert "| smc-base, N = 2 | best-of-n, N = 2 | reward |" in capsys.readouterr().out


# ---- figures


def drawn(figures: Any, monkeypatch: pytest.MonkeyPatch, draw: Any) -> Any:
    """The axes of a figure, which is written too."""
    kept: list[Any] = []
    legend = figures.legend
    monkeypatch.setattr(figures, "legend", lambda figure: (kept.append(figure), legend(figure)))
    draw()
    return kept[-1].axes


def test_metrics_are_drawn_against_n(figures, home: Path, tmp_path: Path, monkeypatch):
    """Means over seeds, as the report has them, of both folders; the model alone at every N."""
    pytest.importorskip("matplotlib")
    folders, out = (home / "a", home / "b"), tmp_path / "sizes.png"
    axes = drawn(figures, monkeypatch, lambda: figures.sizes(folders, ("judge", "alignment"), out))
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [one.get_title(loc="left") for one in axes] == ["judge", "alignment"]
    joined = [row for folder in folders for row in read(folder).joined]
    for one, metric in zip(axes, ("judge", "alignment"), strict=True):
        assert [label.get_text() for label in one.get_xticklabels()] == ["2", "3", "4"]
        lines = dict(zip(one.get_legend_handles_labels()[1], one.containers, strict=True))
        assert list(lines) == list(METHODS)
        for method, line in lines.items():
            means = [row.metrics[metric].mean for row in joined if row.method == method]
            if method == "pretrained":
                means = [*means, means[-1]]
            assert line.lines[0].get_ydata().tolist() == pytest.approx(means)
    with pytest.raises(ValueError, match="no row has the metric fid: give --metrics of judge, alignment"):
        figures.sizes(folders, ("fid",), out)
    with pytest.raises(ValueError, match=r"all rows have the same N: .* --particles 2 4 8"):
        figures.sizes((home / "b",), ("judge",), out)


def test_the_course_of_a_training_is_that_of_its_card(figures, tmp_path: Path, monkeypatch):
    pytest.importorskip("matplotlib")
    card, out = SHIPPED / "mnist-proposal-4.json", tmp_path / "training.png"
    axes = drawn(figures, monkeypatch, lambda: figures.training(card, out=out))
    assert out.read_bytes().startswith(b"\x89PNG")
    history = json.loads(card.read_text())["history"]
    for one, name in zip(axes, ("loss", "reward"), strict=True):
        (line,) = one.lines
        assert line.get_xdata().tolist() == [entry["step"] for entry in history]
        assert line.get_ydata().tolist() == [entry[name] for entry in history]
        assert one.get_xlabel() == "round, 2.2M rows of the denoiser in all"
    (tmp_path / "card.json").write_text(json.dumps({"history": [{"step": 1, "loss": 1.0, "reward": None}]}))
    with pytest.raises(ValueError, match="has no reward: give --curves of loss, ess, reward, divergence"):
        figures.training(tmp_path / "card.json", out=out)
    with pytest.raises(ValueError, match="has no history: give the card of a learned proposal"):
        figures.training(SHIPPED / "digits-judge.json", out=out)


def test_seconds_are_drawn_against_n(figures, tmp_path: Path, monkeypatch):
    """The last line of a cell counts, and lines of earlier versions and those that were cut off do not."""
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "cost.jsonl", tmp_path / "seconds.png"
    cells = [
        ("svdd", 2, 5.0, 1),
        ("svdd", 1, 2.0, 1),
        ("pretrained", 1, 1.0, 1),
        ("svdd", 2, 3.0, 1),
        ("svdd", 2, 0.5, 8),
    ]
    lines = [
        {"method": m, "particles": n, "steps": 4, "images": i, "captured": False, "device": "CPU", "seconds": s}
        for m, n, s, i in cells
    ]
    written = [{"particles": 8, "steps": 24, "device": "cpu", "svdd": 9.0}, *lines, {**lines[1], "captured": True}]
    file.write_text("".join(json.dumps(line) + "\n" for line in written) + '{"method": "cut o')
    single, several = drawn(figures, monkeypatch, lambda: figures.seconds(file, out))
    assert out.read_bytes().startswith(b"\x89PNG")
    assert single.get_title(loc="left") == "seconds of an image, T = 4, one image, CPU"
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in single.lines}
    assert found["svdd"] == ([1, 2], [2.0, 3.0])
    assert found["svdd, captured"] == ([1], [2.0])
    assert found["pretrained"][1] == [1.0, 1.0]  # a level line
    assert several.get_title(loc="left") == "seconds of an image, T = 4, 8 images at once, CPU"
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has no seconds: write them by python -m benchmarks\.emoji cost"):
        figures.seconds(tmp_path / "none.jsonl", out)
