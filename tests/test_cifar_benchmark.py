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


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("controls", "tilt")]  # more cells of the same kind


@pytest.mark.parametrize("what", ["floor", "grid", "gallery", "cost", *SLOW])
def test_every_table_is_made(modules: Any, what: str, capsys: Any):
    cifar, _ = modules
    cifar.main(cifar.Options(what, tiny=True))
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    expected = {"floor": 4, "grid": 8, "controls": 2 * 5 * 2 + 2, "tilt": 6, "gallery": -1, "cost": -1}[what]
    assert len(rows) == expected + 1
    if what == "floor":  # 40 and 60 images are twice the 20 from which FID is extrapolated
        assert "FID, n → ∞" in rows[0]
    if what == "gallery":
        assert [line.rpartition("samples-")[2] for line in printed.splitlines()] == [
            "a1-t2-n1.png",
            "a1.5-t2-n1.png",
            "a1.5-t2-n2.png",
        ]
    if what == "cost":
        assert "20 images" in printed
        assert printed.count("times the two networks") == 2


def test_cells_that_are_there_are_skipped(modules: Any, tmp_path: Path, capsys: Any):
    cifar, cells = modules
    bench = cifar.tiny(cifar.Options("grid", parts=("kernels",)), tmp_path)
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
    bench = cifar.tiny(cifar.Options("grid", parts=("kernels",)), tmp_path)
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

    def features(pixels: torch.Tensor) -> torch.Tensor:
        calls.append(len(pixels))
        return pixels.flatten(1)[:, :3].float()

    for inception, expected in (("one", 1), ("one", 1), ("another", 2), ("another", 2)):
        quality.reference_of(tiny.data(), features, tmp_path, torch.device("cpu"), inception)
        assert len(calls) == expected


def test_cells_of_a_reward_share_the_noise_of_their_seed(modules: Any):
    _, cells = modules
    found = [
        cells.method_of(cells.Cell(1.5, 2, 2, reward="class", seed=seed), small_cifar.networks(8), [0])
        for seed in (0, 3)
    ]
    assert [method.steering.twist.estimator for method in found] == [ts.Sampled(0), ts.Sampled(3)]


def test_the_middle_guidance_is_that_of_all_that_do_not_vary_it(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    cifar, cells = modules
    assert {cell.guidance for cell in cifar.tilt(cifar.Options("tilt"))} == {1.5}
    bench = cifar.tiny(cifar.Options("gallery", captured=True), tmp_path)
    bench = replace(bench, options=replace(bench.options, guidances=(2.5,)))
    assert {cell.guidance for cell in cifar.tilt(bench.options)} == {2.5}
    bench.gallery()
    assert capsys.readouterr().out.count("samples-a2.5-") == 2
    seen: list[float] = []
    monkeypatch.setattr(
        cifar, "method_of", lambda cell, *more: seen.append(cell.guidance) or cells.method_of(cell, *more)
    )
    bench.cost(tmp_path / "cost.jsonl")
    assert seen == [2.5, 2.5]


def test_a_gallery_is_captured_if_asked(modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cifar, cells = modules
    bench = cifar.tiny(cifar.Options("gallery", captured=True), tmp_path)
    seen: list[bool] = []

    def drawn_images(cell: Any, networks: Any, drawn: Any, at_once: int, captured: bool) -> Any:
        seen.append(captured)
        return cells.drawn_images(cell, networks, drawn, at_once)

    monkeypatch.setattr(cifar, "drawn_images", drawn_images)
    bench.gallery()
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
