"""Pictures and times of `emoji`, with networks of toy size."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import small_emoji
import torch

import tokensteer as ts
from tokensteer.app.cli import main
from tokensteer.tasks import nets
from tokensteer.tasks.common.sheets import read_sheet
from tokensteer.tasks.emoji import data
from tokensteer.tasks.nets.grid_transformer import adapted
from tokensteer.tasks.nets.text_encoder import sentence_vectors

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks do not come with the source distribution", allow_module_level=True)

METHODS = ("pretrained", "best-of-n", "smc-grad")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark; what its package sets for its own processes is taken back."""
    monkeypatch.syspath_prepend(ROOT)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    return import_module("benchmarks.emoji")


def test_pictures_have_a_row_for_each_prompt(bench, tmp_path: Path, monkeypatch):
    drawings = small_emoji.write_drawings(tmp_path / data.FILE).part(data.PAIR)
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    captions = [texts[bench.PHRASE] for texts in drawings.captions()]
    (tmp_path / "prompts.txt").write_text("\n".join(captions[:3]) + "\n")
    options = bench.Options(
        "gallery",
        small_emoji.save(tmp_path),
        tmp_path / "out",
        methods=METHODS,
        particles=(2,),
        steps=2,
        rows=2,
        prompts=tmp_path / "prompts.txt",
    )
    bench.main(options)
    images, columns = read_sheet(tmp_path / "out" / "gallery.png", small_emoji.SIDE, 1)
    assert (len(images), columns) == (2 * (1 + len(METHODS)), 1 + len(METHODS))
    assert (images[::columns] == drawings.pixels[:2]).all()  # the drawings come first
    again = replace(options, what="strips")
    bench.main(again)
    images, columns = read_sheet(tmp_path / "out" / "strips.png", small_emoji.SIDE, 1)
    assert (len(images), columns) == (2 * len(bench.KLS), len(bench.KLS))


def test_a_gallery_shows_the_samples_of_a_run(bench, options):
    out = options.out.parent / "run"
    run = ["--prompts", str(options.prompts), "--weights", str(options.weights), "--steps", "2", "--populations", "1"]
    assert (
        main(["compare", "emoji", *run, "--methods", "pretrained", "smc-base", "--particles", "2", "--out", str(out)])
        == 0
    )
    shown = replace(options, methods=("smc-base",), run=out)
    bench.main(shown)
    images, _ = read_sheet(options.out / "gallery.png", small_emoji.SIDE, 1)
    row = next(one.row for one in bench.read_all([out]) if one.row.family == "smc-base")
    made = (
        small_emoji.networks()
        .pixels(row.result.samples.flatten(0, 1))
        .view(2, 2, 3, small_emoji.SIDE, small_emoji.SIDE)
    )
    for image, population in zip(images, made, strict=True):
        assert (image == population).flatten(1).all(1).any()
    with pytest.raises(ValueError, match="no smc-grad with N = 2, seed 0 and a population for each of the 2 prompts"):
        bench.main(replace(shown, methods=("smc-grad",)))


def test_agreement_is_that_of_samples_of_the_same_prompt(bench, options, capsys, monkeypatch):
    """The correlation of what is left of both scores without the mean of each prompt."""
    out = options.out.parent / "run"
    given = {"prompts": options.prompts, "weights": options.weights, "steps": 2, "populations": 1, "particles": 6}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert main(["compare", "emoji", *words, "--methods", "pretrained", "--seeds", "0", "1", "--out", str(out)]) == 0
    capsys.readouterr()

    def darkness(pixels: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        return -pixels.float().mean((1, 2, 3))

    monkeypatch.setattr(bench, "find_judge", lambda folder, device: darkness)
    bench.main(replace(options, what="agreement", particles=(6,), run=out))
    said = capsys.readouterr().err
    networks = small_emoji.networks()
    scores: dict[str, torch.Tensor] = {}
    rows = [one.row.result.samples for one in bench.read_all([out])]
    told = sentence_vectors(networks.states(["a red square", "a blue bar"])).repeat_interleave(6, 0)
    for name in ("judge", "reward"):
        marks = [getattr(networks, name)(networks.images(row.flatten(0, 1)), told) for row in rows]
        table = torch.cat([mark.view(2, 6) for mark in marks], 1)
        scores[name] = table - table.mean(1, keepdim=True)
    expected = torch.corrcoef(torch.stack([value.flatten() for value in scores.values()]))[0, 1]
    best = [part.argmax(1) for part in scores["reward"].split(6, 1)]
    gained = torch.stack([part[range(2), k] for part, k in zip(scores["judge"].split(6, 1), best, strict=True)]).mean()
    line = next(line for line in said.splitlines() if line.startswith("judge: "))
    assert f"correlation with the reward {expected:.2f}, best of 6 by reward " in line
    assert float(line.split("by reward ")[1].split(" ±")[0]) == pytest.approx(float(gained), abs=1e-3)
    dark = torch.cat([darkness(networks.pixels(row.flatten(0, 1)), told).view(2, 6) for row in rows], 1)
    dark = dark - dark.mean(1, keepdim=True)
    expected = torch.corrcoef(torch.stack([dark.flatten(), scores["reward"].flatten()]))[0, 1]
    assert f"{bench.SECOND_JUDGE}: correlation with the reward {expected:.2f}, " in said
    with pytest.raises(ValueError, match="give --run FOLDER"):
        bench.main(replace(options, what="agreement"))


def save_proposal(folder: Path) -> None:
    """A learned proposal with random adapters, beside the networks of a folder, and its card."""
    torch.manual_seed(3)
    net = adapted(small_emoji.networks().denoiser, 2)
    for name, weight in net.named_parameters():
        if name.startswith("adapters."):
            torch.nn.init.normal_(weight, std=0.1)
    file = folder / "emoji-proposal.safetensors"
    nets.save(net, file)
    file.with_suffix(".json").write_text(json.dumps({"scale": 0.5}))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cost.jsonl").read_text().splitlines()]


def test_seconds_of_all_sizes_and_methods_are_one_call(bench, options):
    """A line for each cell, the model alone with one particle, and a figure."""
    pytest.importorskip("matplotlib")
    save_proposal(options.weights)
    methods = ("pretrained", "best-of-n", "svdd", "fk-difference", "smc-base", "smc-grad", "smc-amot")
    bench.main(replace(options, what="cost", particles=(1, 3), images=(2,), methods=methods))
    found = lines_of(options.out)
    assert [(line["particles"], line["method"]) for line in found] == [
        (1, "pretrained"),
        *product((1, 3), methods[1:]),
    ]
    for line in found:
        assert (line["steps"], line["device"], line["captured"]) == (2, "CPU", False)
        assert len(line["runs"]) == 3
        assert line["seconds"] == min(line["runs"]) / 2 > 0
    assert (options.out / "seconds.png").read_bytes().startswith(b"\x89PNG")


def test_images_at_once_are_of_as_many_prompts(bench, options, monkeypatch: pytest.MonkeyPatch):
    seconds = import_module("benchmarks.seconds")
    seen: list[tuple[int, int, int]] = []

    def measure(cells: Any, make: Any, device: Any, file: Path) -> None:
        for cell in cells:
            templates = make(cell).steering.resources.templates
            seen.append((cell.particles, cell.images, templates))
        file.parent.mkdir(parents=True)
        seconds.add(file, {"method": "svdd", "particles": 1, "steps": 1, "images": 1, "captured": False} | TIMED)

    monkeypatch.setattr(bench, "measure", measure)
    bench.main(replace(options, what="cost", particles=(), images=(2, 1), methods=("svdd",)))
    assert seen == [(n, images, images) for images in (2, 1) for n in (1, 2, 4, 8, 16)]
    with pytest.raises(ValueError, match=r"has 2 prompts, too few for --images 3"):
        bench.main(replace(options, what="cost", images=(3,)))
    for images in ((), (0,)):
        with pytest.raises(ValueError, match="--images must be at least 1, got 0"):
            bench.main(replace(options, what="cost", images=images))


TIMED = {"device": "CPU", "seconds": 1.0, "runs": [1.0]}


def test_seconds_are_kept_without_matplotlib(bench, options, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bench.main(replace(options, what="cost", methods=("best-of-n",)))
    assert [line["method"] for line in lines_of(options.out)] == ["best-of-n"]
    assert not (options.out / "seconds.png").exists()
    said = capsys.readouterr().err
    assert "tokensteer[plot]" in said
    assert f"python -m benchmarks.figures seconds {options.out / 'cost.jsonl'}" in said


def test_a_graph_is_captured_once_and_replayed(bench, options, monkeypatch: pytest.MonkeyPatch, capsys):
    seconds = import_module("benchmarks.seconds")
    calls: list[Any] = []

    def captured(method: Any, particles: int, images: int) -> Any:
        calls.append((method, particles, images))
        return lambda: calls.append("replay")

    monkeypatch.setattr(ts, "captured", captured)
    method = object()
    cell = seconds.Cell("smc-base", 4, 2, 3, captured=True)
    seconds.measure([cell], lambda cell: method, torch.device("cpu"), options.out / "cost.jsonl")
    assert calls == [(method, 4, 3), "replay", "replay", "replay"]
    assert "smc-base, captured, N = 4, T = 2, 3 images at once: " in capsys.readouterr().err


def test_pictures_have_one_number_of_particles(bench, options):
    for what in ("gallery", "strips"):
        with pytest.raises(ValueError, match=r"has one number of particles, got --particles 1 2: give one"):
            bench.main(replace(options, what=what, particles=(1, 2)))
    assert replace(options, particles=()).size == 8
    with pytest.raises(ValueError, match="--particles must be at least 1, got 0"):
        bench.main(replace(options, what="cost", particles=(4, 0)))


@pytest.fixture
def options(bench, tmp_path: Path) -> Any:
    (tmp_path / "prompts.txt").write_text("a red square\na blue bar\n")
    sizes = {"particles": (2,), "steps": 2, "rows": 2, "prompts": tmp_path / "prompts.txt"}
    return bench.Options("gallery", small_emoji.save(tmp_path), tmp_path / "out", methods=METHODS, **sizes)


def test_networks_are_loaded_once(bench, options, monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []

    def load(*where: Any) -> Any:
        loaded.append("networks")
        return bench_load(*where)

    bench_load = bench.load_networks
    for module in (bench, import_module("tokensteer.tasks.emoji.task")):
        monkeypatch.setattr(module, "load_networks", load)
    for count, what in enumerate(("gallery", "strips", "cost"), 1):
        bench.main(replace(options, what=what))
        assert len(loaded) == count


def test_settings_are_chosen_by_the_judge(bench, options, capsys, monkeypatch):
    """By the mean of two methods, on the prompts kept for choosing alone."""
    monkeypatch.setattr(bench, "CHOSEN", options.prompts)
    monkeypatch.setattr(bench, "REPORTED", options.prompts.parent / "must not be read")
    asked = {"guidances": (1.0, 3.0), "kls": (0.5, 0.05), "draws": (1, 2), "populations": 2}
    asking = replace(options, what="choose", prompts=options.prompts.parent / "must not be read", **asked)
    bench.main(asking)
    cells = [json.loads(line) for line in (options.out / "choose.jsonl").read_text().splitlines()]
    found = [(cell["guidance"], cell["kl"], cell["draws"]) for cell in cells]
    assert found == list(product(asked["guidances"], asked["kls"], asked["draws"]))
    for cell in cells:
        judged = [cell["methods"][name]["mean"] for name in ("smc-base", "smc-grad")]
        assert cell["judge"] == pytest.approx(sum(judged) / 2)
    best = max(cells, key=lambda cell: cell["judge"])
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"best: guidance {best['guidance']:g}, kl {best['kl']:g}, {best['draws']} draws: ")
    assert sum("correlation within a prompt" in line for line in said) == 2  # the model of each guidance
    task = bench._task(options, bench._networks(options), ["a red square", "a blue bar"], 0.05, 3.0)
    method = bench.method_of(task, "smc-grad", 2, options.seed, 2)
    drawn = method(2, 4, generator=torch.Generator().manual_seed(0))
    cell = next(cell for cell in cells if (cell["guidance"], cell["kl"], cell["draws"]) == (3.0, 0.05, 2))
    assert cell["methods"]["smc-grad"]["mean"] == pytest.approx(task.metrics(drawn)["judge"].mean)


def test_settings_are_chosen_by_a_metric_that_is_there(bench, options, monkeypatch):
    monkeypatch.setattr(bench, "CHOSEN", options.prompts)
    asking = replace(options, what="choose", guidances=(1.0,), kls=(0.05,), by=bench.SECOND_JUDGE)
    with pytest.raises(FileNotFoundError, match=r"default_1\.pt.*TOKENSTEER_DATA"):
        bench.main(asking)
    with pytest.raises(ValueError, match="--by must be one of judge, alignment"):
        bench.main(replace(asking, by="reward"))
    bench.main(replace(asking, by="alignment"))
    (line,) = (options.out / "choose.jsonl").read_text().splitlines()
    cell = json.loads(line)
    judged = [cell["methods"][name]["mean"] for name in ("smc-base", "smc-grad")]
    assert cell["alignment"] == pytest.approx(sum(judged) / 2)


def test_drawings_are_those_of_prompts_or_refused(bench, options, monkeypatch, capsys):
    monkeypatch.setenv("TOKENSTEER_DATA", str(options.out.parent))
    with pytest.raises(FileNotFoundError, match=r"emoji\.npz"):
        bench.main(replace(options, what="drawings"))
    drawings = small_emoji.write_drawings(options.out.parent / data.FILE).part(data.PAIR)
    with pytest.raises(ValueError, match="captions of unseen pairs"):
        bench.main(replace(options, what="drawings"))
    captions = [texts[bench.PHRASE] for texts in drawings.captions()]
    options.prompts.write_text("\n".join(captions[:3]) + "\n")
    bench.main(replace(options, what="drawings"))
    networks = bench._networks(options)
    told = sentence_vectors(networks.states(captions[:3]))
    judged = networks.judge(drawings.pixels[:3].float() / 255, told).mean()
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("3 drawings: judge "))
    assert float(line.split()[3]) == pytest.approx(float(judged), abs=1e-3)


@pytest.mark.parametrize("name", ["auto", "particle-gibbs"])
def test_methods_that_are_more_than_smc_are_refused(bench, options, name: str):
    """They were run as SMC under their names."""
    for what in ("gallery", "cost"):
        with pytest.raises(ValueError, match=f"{name} is more than a run of SMC.*leave it out of --methods"):
            bench.main(replace(options, what=what, methods=(name,)))
    asked = replace(options, what="cost", methods=("best-of-n", name))
    with pytest.raises(ValueError, match=name):
        bench.main(asked)
    assert not (options.out / "cost.jsonl").exists()  # before anything was timed


def test_methods_have_the_noise_of_the_command_line(bench, options):
    """Shared, with the seed of the run, but for methods that add estimates up."""
    task = bench._task(options, bench._networks(options), ["a red square"])
    for name, seed in (("smc-base", 7), ("fk-sum", None), ("fk-max", None)):
        method = bench.method_of(task, name, 2, 7)
        assert method.steering.twist.estimator == ts.Sampled(seed)


def test_no_rows_are_refused(bench, options):
    for what in ("gallery", "strips", "cost"):
        with pytest.raises(ValueError, match="--rows must be at least 1, got 0"):
            bench.main(replace(options, what=what, rows=0))


def test_prompts_are_of_unseen_pairs_and_not_the_same(bench, tmp_path: Path, monkeypatch):
    reported, chosen = (file.read_text("utf-8").splitlines() for file in (bench.REPORTED, bench.CHOSEN))
    assert (len(set(reported)), len(set(chosen))) == (48, 24)
    assert not set(reported) & set(chosen)
    small_emoji.write_drawings(tmp_path / data.FILE)
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    monkeypatch.setattr(bench, "GROUPS", (8,))
    monkeypatch.setattr(bench, "REPORTED", tmp_path / "a.txt")
    monkeypatch.setattr(bench, "CHOSEN", tmp_path / "b.txt")
    bench.main(bench.Options("prompts"))
    unseen = {texts[bench.PHRASE] for texts in data.read().part(data.PAIR).captions()}
    assert set((tmp_path / "a.txt").read_text().splitlines()) == unseen
