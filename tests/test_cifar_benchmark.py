"""The benchmark of `cifar` at toy size: every table is made, finished cells are skipped, classes are balanced."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import small_cifar
import torch

import tokensteer as ts
from tokensteer.tasks.common.sheets import read_sheet

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks do not come with the source distribution", allow_module_level=True)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark and its cells; what its package sets for its own processes is taken back."""
    monkeypatch.syspath_prepend(ROOT)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    with torch.random.fork_rng(devices=[]):
        yield import_module("benchmarks.cifar"), import_module("benchmarks.cifar_cells")


def bench_of(cifar: Any, folder: Path, *what: str, **options: Any) -> Any:
    """A bench at toy size."""
    small = cifar.smallest(cifar.Options(*what, tiny=True, **options), folder)
    return cifar.tiny(small, small_cifar.networks(8), 0.0)


NAMES = ("n1", "n2", "n1-beside-n2")
STEPS = ("step, mdm", "step, remdm")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("controls", "tilt")]  # more cells of the same kind


@pytest.mark.parametrize("what", ["floor", "grid", "gallery", "cost", *SLOW])
def test_every_table_is_made(modules: Any, what: str, capsys: Any):
    cifar, _ = modules
    cifar.main(cifar.Options(what, tiny=True))
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    expected = {"floor": 4, "grid": 8, "controls": 5 + 2, "tilt": 6, "gallery": -1, "cost": -1}[what]
    assert len(rows) == expected + 1
    if what == "floor":  # 40 and 60 images are twice the 20 from which FID is extrapolated
        assert "FID, n → ∞" in rows[0]
    if what == "gallery":
        assert [line.rpartition("samples-")[2] for line in printed.splitlines()] == [
            "remdm-a1-t2-n1.png",
            "remdm-a1.5-t2-n1.png",
            "remdm-a1.5-t2-n2.png",
            "remdm-a1.5-t2-n1-beside-n2.png",
        ]
    if what == "cost":
        assert "20 images" in printed
        steps = [line for line in printed.splitlines() if "times the two networks" in line]
        assert ["A step, mdm, " in steps[0], "A step, remdm, " in steps[1], len(steps)] == [True, True, 2]


def test_cells_that_are_there_are_skipped(modules: Any, tmp_path: Path, capsys: Any):
    cifar, cells = modules
    bench = bench_of(cifar, tmp_path, "grid", parts=("kernels",))
    planned = list(cifar.grid(replace(bench.options, seeds=(0, 1))))
    kernels = ("mdm", "confident")
    assert [(cell.kernel, cell.seed) for cell in planned] == [(name, seed) for seed in (0, 1) for name in kernels]
    file = tmp_path / "grid.jsonl"
    bench.cells(file, planned[:2])
    with file.open("a") as handle:
        handle.write('{"key": "cut o')  # of a process that was killed
    first = cells.finished(file)
    assert len(first) == 2
    capsys.readouterr()
    bench.cells(file, planned)
    assert capsys.readouterr().out.count("FID") == 2
    assert cells.finished(file)[:2] == first
    keys = {cells.key_of(asdict(cell), bench.made_by) for cell in planned}
    assert {row["key"] for row in cells.finished(file)} == keys
    late = replace(bench, options=replace(bench.options, minutes=1e-9))
    late.cells(tmp_path / "other.jsonl", planned)
    assert "the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "other.jsonl").exists()


def test_cells_of_other_networks_or_another_inception_are_made_again(modules: Any, tmp_path: Path):
    cifar, cells = modules
    bench = bench_of(cifar, tmp_path, "grid", parts=("kernels",))
    others = replace(bench, networks=small_cifar.networks(8, seed=5)), replace(bench, inception="another")
    assert bench.made_by == replace(bench, networks=small_cifar.networks(8)).made_by
    for count, one in enumerate((bench, *others), 1):
        for _ in range(2):
            one.cells(tmp_path / "grid.jsonl", [cells.Cell(1.5, 2, 1, images=20)])
            one.floor(tmp_path / "floor.jsonl")
        assert len(cells.finished(tmp_path / "grid.jsonl")) == count
        assert len(cells.finished(tmp_path / "floor.jsonl")) == 4 * count
    printed = cells.table(cells.finished(tmp_path / "grid.jsonl")).splitlines()
    assert [line.split(" | ")[2] for line in printed[2:]] == ["1"] * 3  # no mean over what is not alike


def test_the_reference_is_that_of_its_inception(modules: Any, tmp_path: Path):
    tiny, quality = (import_module(f"benchmarks.{name}") for name in ("cifar_tiny", "cifar_quality"))
    calls: list[int] = []
    read: list[int] = []

    def features(pixels: torch.Tensor) -> torch.Tensor:
        calls.append(len(pixels))
        return pixels.flatten(1)[:, :3].float()

    def data() -> Any:
        read.append(len(calls))
        return tiny.data()

    for inception, expected in (("one", 1), ("one", 1), ("another", 2), ("another", 2)):
        quality.reference_of(data, features, tmp_path, torch.device("cpu"), inception)
        assert len(calls) == len(read) == expected  # images are not read where the reference is there


def test_cells_of_a_reward_share_the_noise_of_their_seed(modules: Any):
    _, cells = modules
    found = [
        cells.method_of(cells.Cell(1.5, 2, 2, reward="class", seed=seed), small_cifar.networks(8), [0])
        for seed in (0, 3)
    ]
    assert [method.steering.twist.estimator for method in found] == [ts.Sampled(0), ts.Sampled(3)]


def test_the_middle_guidance_is_that_of_all_that_do_not_vary_it(modules: Any):
    cifar, _ = modules
    for options, middle in ((cifar.Options("tilt"), 1.5), (cifar.Options("tilt", guidances=(2.5,)), 2.5)):
        assert {cell.guidance for cell in cifar.tilt(options)} == {middle}
        assert [cell.guidance for cell in cifar.gallery(options)] == [1.0, middle, middle]


def test_temperatures_are_of_the_guidances_and_the_kernel_asked_for(modules: Any):
    cifar, _ = modules
    some = cifar.Options("controls", parts=("temperatures",), seeds=(0,))
    assert len(list(cifar.controls(some))) == 3 * 5
    few = replace(some, guidances=(1.0, 1.5), temperatures=(0.7, 1.1), kernel="mdm")
    found = [(cell.guidance, cell.temperature, cell.kernel, cell.particles) for cell in cifar.controls(few)]
    assert found == [(a, temperature, "mdm", 1) for a in (1.0, 1.5) for temperature in (0.7, 1.1)]


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of data with nothing in it."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path / "data"))


@pytest.mark.usefixtures("empty")
def test_the_shipped_networks_need_no_data(modules: Any):
    cifar, _ = modules
    networks = cifar.networks_of(cifar.Options("gallery"))
    assert networks.pixels(torch.zeros(1, 256, dtype=torch.long)).shape == (1, 3, 32, 32)


@pytest.mark.usefixtures("empty")
def test_a_gallery_needs_networks_alone(modules: Any, tmp_path: Path, capsys: Any):
    """Images by weight and those of one particle are of the same classes, a line for each, on one sheet."""
    cifar, _ = modules
    weights = small_cifar.save(tmp_path / "weights")
    one_step: dict[str, Any] = {"steps": (1,), "particles": (1, 2), "guidances": (1.5,), "seeds": (4,)}
    cifar.main(cifar.Options("gallery", weights=weights, out=tmp_path, **one_step))
    files = [tmp_path / f"samples-remdm-a{name}.png" for name in ("1-t1-n1", *(f"1.5-t1-{n}" for n in NAMES))]
    assert capsys.readouterr().out.split() == list(map(str, files))
    (left, eight), (right, _), (together, seventeen) = (read_sheet(file, 32) for file in files[1:])
    assert (len(left), eight, len(together), seventeen) == (80, 8, 160, 17)  # the grey between is left out
    lines = together.view(10, 16, 3, 32, 32)
    assert torch.equal(lines[:, :8].flatten(0, 1), left)
    assert torch.equal(lines[:, 8:].flatten(0, 1), right)
    assert not torch.equal(left, right)


@pytest.mark.usefixtures("empty")
def test_cost_needs_networks_alone_and_the_others_say_what_they_lack(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    cifar, cells = modules
    sampling = import_module("benchmarks.cifar_sampling")
    monkeypatch.setattr(sampling, "PARTICLES", 2)
    weights = small_cifar.save(tmp_path / "weights")
    asked = cifar.Options("cost", weights=weights, out=tmp_path, steps=(2,), images=10, at_once=20, guidances=(2.5,))
    seen: list[Any] = []
    monkeypatch.setattr(sampling, "method_of", lambda cell, *more: seen.append(cell) or cells.method_of(cell, *more))
    cifar.main(asked)
    assert [(cell.guidance, cell.kernel) for cell in seen] == [(2.5, "mdm"), (2.5, "remdm")]
    assert capsys.readouterr().out.count("times the two networks") == 2
    found = cells.finished(tmp_path / "cost.jsonl")
    assert [(row["name"], row["device"]) for row in found] == [(name, "CPU") for name in ("images", *STEPS)]
    # Once in each step, and all particles of a class share the first prediction.
    assert [row["eager predictions"] for row in found[1:]] == [(10 + 20) / (2 * 20)] * 2
    with pytest.raises(FileNotFoundError, match="set TOKENSTEER_DATA"):
        cifar.main(replace(asked, what="floor"))


def test_galleries_have_the_seed_and_the_kernel_asked_for(modules: Any):
    cifar, _ = modules
    found = cifar.gallery(cifar.Options("gallery", seeds=(3, 4), kernel="mdm"))
    assert {(cell.seed, cell.kernel, cell.steps) for cell in found} == {(3, "mdm", 16)}
    assert [(cell.guidance, cell.particles) for cell in found] == [(1.0, 1), (1.5, 1), (1.5, 16)]
    assert len(cifar.gallery(cifar.Options("gallery", particles=(1,)))) == 2  # none is drawn twice


def test_a_gallery_is_captured_if_asked(modules: Any, monkeypatch: pytest.MonkeyPatch):
    cifar, cells = modules
    sampling = import_module("benchmarks.cifar_sampling")
    seen: list[bool] = []

    def drawn_images(cell: Any, networks: Any, drawn: Any, at_once: int, captured: bool) -> Any:
        seen.append(captured)
        return cells.drawn_images(cell, networks, drawn, at_once)

    monkeypatch.setattr(sampling, "drawn_images", drawn_images)
    cifar.main(cifar.Options("gallery", tiny=True, captured=True))
    assert seen == [True] * 3


def test_batches_hold_all_classes_equally(modules: Any, tmp_path: Path):
    """Seven batches of ten populations, the last one cut, and the same draws whatever is drawn beside them."""
    _, cells = modules
    networks = small_cifar.networks(8)
    for reward in (None, "class"):
        cell, drawn = cells.Cell(1.5, 2, 2, images=60, reward=reward), cells.Drawn()
        found = list(cells.drawn_images(cell, networks, drawn, at_once=20))
        labels = torch.cat([labels for _, labels in found])
        assert labels.bincount().tolist() == [6] * 10
        assert sum(len(images) for images, _ in found) == 60
        assert {images.dtype for images, _ in found} == {torch.uint8}
        assert (drawn.populations, drawn.reward is None) == (60, reward is None)
        assert 0 < drawn.least_ess <= drawn.ess <= 1
        assert drawn.rows > 60 * 2 * 2


def test_conventions_weigh_differently_and_one_particle_not_at_all(modules: Any):
    _, cells = modules
    networks = small_cifar.networks(8)
    generator = torch.Generator()
    found = {}
    for name in cells.CONVENTIONS:
        method = cells.method_of(cells.Cell(1.75, 4, 4, convention=name), networks, [0, 1])
        found[name] = method(4, 2, generator=generator.manual_seed(0)).log_z
    assert all(value.isfinite().all() for value in found.values())
    assert not torch.allclose(found["corrected"], found["paper"])
    alone = cells.method_of(cells.Cell(1.75, 4, 1), networks, [0, 1])
    assert not alone.steering.model.correct_remasking  # tokens are drawn given all open sites, as samplers usually do
    proposal = cells.method_of(cells.Cell(1.75, 4, 1, kernel="proposal"), networks, [0, 1])
    assert proposal.steering.model.correct_remasking
    unguided = cells.method_of(cells.Cell(1.0, 4, 1), networks, [0, 1])
    assert len(unguided.steering.model.networks) == 1
    with pytest.raises(ValueError, match="one particle"):
        cells.method_of(cells.Cell(1.5, 4, 2, kernel="confident"), networks, [0])


def test_tables_have_means_and_deviations_over_seeds(modules: Any, tmp_path: Path, capsys: Any):
    cifar, cells = modules
    rows = [{"name": "x", "images": 1000, "fid": fid, "kid": [fid / 1000, 0.1], "rows": 2000} for fid in (10.0, 12.0)]
    for row in rows:
        cells.add(tmp_path / "grid.jsonl", row)
    other = {**rows[0], "fid": 90.0}
    more = [{**other, "images": 500}, {**other, "key": json.dumps({"version": cells.VERSION - 1})}]
    for row in more:
        cells.add(tmp_path / "grid.jsonl", row)
    cifar.main(cifar.Options("table", out=tmp_path))
    printed = capsys.readouterr().out
    assert "| x | 1,000 | 2 | 11 (1.4) | 11 (1.4) | 2,000 |" in printed  # not of another version
    assert "| x | 500 | 1 | 90 |" in printed  # nor of another number of images
    assert [json.loads(line) for line in (tmp_path / "grid.jsonl").read_text().splitlines()] == rows + more
