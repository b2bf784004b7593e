"""The tasks: their data, their shipped weights, and the command that makes them."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from narrow import some

import tokensteer as ts
from tokensteer.app.cli import main
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common import grid, metrics, png
from tokensteer.tasks.common.task import SHIPPED, Setup, Task, data_folder
from tokensteer.tasks.common.training import Training, Trial
from tokensteer.tasks.images import digits, mnist
from tokensteer.tasks.images import recipe as pixels
from tokensteer.tasks.images import train as pixels_train
from tokensteer.tasks.mog import exact as mog
from tokensteer.tasks.mog import trained as mog_trained

SMALL = ["digits", "mog", "product"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- metrics


def test_hamming_is_the_mean_over_pairs():
    ids = torch.randint(3, (7, 11), generator=seeded())
    slow = torch.tensor([[(a != b).double().mean() for b in ids] for a in ids]).sum(-1) / 6
    torch.testing.assert_close(metrics.hamming(ids), slow.double(), atol=1e-6, rtol=0)
    assert math.isnan(float(metrics.hamming(ids[:1])))


def test_accuracy_and_histogram():
    ids = torch.tensor([[0], [1], [1], [2]])
    known = lambda x: torch.nn.functional.one_hot(x[:, 0], 4).double().log()  # noqa: E731
    assert metrics.accuracy(known, ids, torch.tensor([0, 1, 2, 2])).mean == 0.75
    assert metrics.label_histogram(known, ids).tolist() == [0.25, 0.5, 0.25, 0.0]
    assert str(metrics.measured(torch.tensor([1.0, 3.0]))) == "2 ± 1"
    assert math.isnan(metrics.measured(torch.tensor([1.0])).error)


def test_nll_bound_of_the_exact_denoiser_is_the_entropy():
    joint = mog.pmf(torch.tensor([[0, 6, 0], [3, 0, 3], [2, 2, 2]]))
    ids = grid.Target(joint, 0.0).sample(4000, seeded())
    found = metrics.nll_bound(mog.denoiser(joint), ids, grid.MASK, draws=2, generator=seeded(1))
    entropy = float(-(joint * joint.log()).nan_to_num().sum()) / (2 * math.log(2))
    assert abs(found.mean - entropy) < 4 * found.error
    assert found.error < 0.05


# ---- data


def test_digits_are_what_their_readme_says():
    data = digits.data()
    assert data.train.ids.shape == (1497, 64)
    assert data.test.ids.shape == (300, 64)
    assert data.train.ids.unique().tolist() == [0, 1]
    assert data.train.labels.unique().tolist() == list(range(10))
    assert float(data.train.ids.float().mean()) == pytest.approx(0.323, abs=0.005)


def test_missing_mnist_says_where_to_put_it_and_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"TOKENSTEER_DATA.*binarise") as caught:
        mnist.data()
    assert "\n" not in str(caught.value)
    assert main(["train", "mnist", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return b"\0\0\x08" + bytes([array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def test_mnist_is_made_from_its_own_files(monkeypatch, tmp_path):
    grey = np.random.RandomState(0).randint(0, 256, (5, 28, 28))
    labels = np.arange(5)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(grey))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(grey[:2])))
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        mnist.binarise(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[:2]) + b"more")
    with pytest.raises(ValueError, match="damaged"):
        mnist.binarise(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[:2]))
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path / "new"))
    assert mnist.binarise(tmp_path) == tmp_path / "new" / mnist.FILE
    data = mnist.data()
    assert torch.equal(data.train.ids, torch.from_numpy(grey.reshape(5, -1) > 127).byte())
    assert data.test.labels.tolist() == [0, 1]


def test_the_cache_is_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("TOKENSTEER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "tokensteer"


def test_augment_moves_whole_images():
    image = torch.zeros(200, 16, dtype=torch.long)
    image[:, 5] = 1  # row 1, column 1
    moved = pixels.augment(4, 1, 0.0)(image, seeded())
    assert moved.sum(-1).unique().tolist() == [1]
    assert sorted(moved.argmax(-1).unique().tolist()) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    corner = torch.zeros(200, 16, dtype=torch.long)
    corner[:, 0] = 1
    assert sorted(pixels.augment(4, 1, 0.0)(corner, seeded()).sum(-1).unique().tolist()) == [0, 1]
    flipped = pixels.augment(4, 0, 0.25)(image, seeded())
    assert float((flipped != image).double().mean()) == pytest.approx(0.25, abs=0.03)


def test_png_files_are_readable(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    picture = torch.rand(5, 7, generator=seeded())
    png.write_png(tmp_path / "x.png", picture)
    back = torch.from_numpy(imread(tmp_path / "x.png"))
    torch.testing.assert_close(back, (picture * 255).round() / 255, atol=1e-6, rtol=0)
    sheet = png.tiled(torch.ones(3, 2, 2), columns=2, zoom=1)
    assert sheet.shape == (7, 7)
    assert sheet.sum() == pytest.approx(12 + 0.5 * 37)


# ---- shipped weights


def quality(name: str, role: str) -> dict:
    return json.loads((SHIPPED / f"{name}-{role}.json").read_text())


def shipped() -> list[str]:
    """Networks; what real sites look like (dna-reference) is none, and has its card in itself."""
    return sorted(file.name for file in SHIPPED.glob("*.safetensors") if not file.stem.endswith("-reference"))


def test_every_shipped_weight_is_small_and_has_a_card():
    assert {"mog-denoiser.safetensors", "digits-denoiser.safetensors"} <= set(shipped())
    for name in shipped():
        file = SHIPPED / name
        most = {"mnist": 6.0, "text": 24.0, "dna": 1.5, "cifar": 18.0, "emoji": 13.0}.get(name.partition("-")[0], 1.0)
        assert file.stat().st_size <= most * 2**20
        card = json.loads(file.with_suffix(".json").read_text())
        assert {"data", "command", "seed", "seconds", "device", "quality"} <= card.keys()


def test_every_task_can_be_trained():
    """But those that are tables and have no networks, and these say so."""
    assert {name for name, task in TASKS.items() if task.train is None} == {"product", "tfbind", "tfbind-fitted"}


@pytest.mark.parametrize("name", ["tfbind", "product"])
def test_tables_cannot_be_trained(name: str, tmp_path: Path, capsys):
    assert main(["train", name, "--out", str(tmp_path / "out")]) == 2
    assert "nothing to train" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SMALL)
def test_a_task_can_be_run_and_looked_at(name: str, tmp_path: Path):
    task = TASKS[name].make(Setup(steps=20))
    assert isinstance(task, Task)
    result = ts.smc_grad(task.model, task.tilt)(4, 3, generator=seeded())
    found = task.metrics(result)
    assert all(math.isfinite(value.mean) for value in found.values()), found
    some(task.picture)(result.sample()[:, 0], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    if task.judge is not None:
        marks = task.judge(result.samples.flatten(0, 1))
        assert marks.shape == (12,)
        assert set(marks.tolist()) <= {0.0, 1.0}


def test_digits_classifiers_are_as_good_as_their_cards_say():
    data = digits.data().test
    for role in ("reward", "judge"):
        found = metrics.accuracy(Setup().load("digits", role), data.ids.long(), data.labels)
        assert found.mean == pytest.approx(quality("digits", role)["quality"]["test accuracy"]["mean"], abs=0.005)
        assert found.mean > 0.93


def test_digits_denoiser_is_as_good_as_its_card_says():
    data, prior = digits.data().test, pixels.model(digits.RECIPE, Setup())
    found = metrics.nll_bound(prior.denoiser, data.ids[:150], pixels.MASK, draws=2, generator=seeded())
    said = quality("digits", "denoiser")["quality"]
    assert abs(found.mean - said["bits per pixel"]["mean"]) < 4 * math.hypot(
        found.error, said["bits per pixel"]["error"]
    )
    assert said["bits per pixel"]["mean"] < 0.45
    assert max(said["labels of samples"]) < 0.2
    assert min(said["labels of samples"]) > 0.04


def test_digits_are_steered():
    """The judge finds more sevens than in plain samples, by more than four standard errors."""
    task = digits.task(Setup(steps=30, goal=7))
    assert task.judge is not None
    plain = metrics.measured(task.judge(ts.pretrained(task.model)(1, 40, generator=seeded()).samples[:, 0]))
    steered = task.metrics(ts.smc_base(task.model, task.tilt)(8, 16, generator=seeded()))["accuracy"]
    assert (steered.mean - plain.mean) / (steered.error**2 + plain.error**2) ** 0.5 > 4


def test_trained_mog_is_near_the_data_and_steered_to_its_own_target():
    said = quality("mog", "denoiser")["quality"]
    assert said["divergence of the model from the data, nats"] < 0.05
    task = mog_trained.task(Setup(steps=20))
    x = torch.tensor([[64, 64], [3, 64], [64, 10], [5, 6]])
    one_hots = torch.nn.functional.one_hot(x, 65).double()
    torch.testing.assert_close(task.model.denoiser(x, 0.5), task.model.denoiser(one_hots, 0.5), atol=1e-5, rtol=1e-5)
    result = ts.smc_base(task.model, task.tilt)(200, 32, generator=seeded())
    found = task.metrics(result)
    z = (result.log_z - found["exact log_z"].mean).exp()
    assert abs(float((z.mean() - 1) / (z.std() / math.sqrt(32)))) < 4


@pytest.mark.slow
def test_small_populations_of_mog_are_measured_together():
    sizes = [(10, 2000), (4, 1000), (4000, 5), (3, 1000), (8, 16), (300, 1), (5000, 1), (1, 9000)]
    assert [grid.sets(*size) for size in sizes] == [10, 4, 40, 3, 8, 1, 10, 1]
    task = mog_trained.task(Setup(steps=5))
    small, large = (
        ts.prop_grad(task.model, task.tilt, clip=None)(*n, generator=seeded()) for n in ((2, 2000), (500, 8))
    )
    alone, together = task.metrics(large)["emd"], task.metrics(small)["emd"]
    assert math.isfinite(together.error)  # eight laws of 500 samples each
    assert together.mean == pytest.approx(alone.mean, abs=0.3)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: digits.task(Setup(goal=10)), ValueError, "digit from 0 to 9"),
        (lambda: digits.task(Setup(weights=Path("/nowhere"))), FileNotFoundError, "no weights at"),
        (lambda: mog_trained.task(Setup(device="meta")), ValueError, "CPU"),
        (lambda: Setup(device="toaster"), ValueError, "no device called toaster"),
        (lambda: Training(Path("x"), minutes=0.0), ValueError, "positive"),
        (lambda: Training(Path("x"), scale=-1.0), ValueError, "positive"),
        (lambda: Trial(samples=1), ValueError, "at least 2"),
        (lambda: Setup(steps=0), ValueError, "at least 1"),
    ],
)
def test_bad_choices_say_so(make, error, match):
    with pytest.raises(error, match=match):
        make()


# ---- the command


def test_training_makes_all_there_is(tmp_path):
    trial = Trial(samples=4, populations=2, examples=20, num_steps=3)
    pixels_train.train(digits.RECIPE, Training(tmp_path, scale=0.001), trial)
    names = [f"digits-{role}.{kind}" for role in ("denoiser", "reward", "judge") for kind in ("json", "safetensors")]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        [*names, "digits-quality.json", "digits-samples.png"]
    )
    card = json.loads((tmp_path / "digits-denoiser.json").read_text())
    assert card["command"].endswith("train digits --out FOLDER --device cpu --seed 0 --scale 0.001")
    digits.task(Setup(steps=3, weights=tmp_path))


@pytest.mark.slow
def test_mog_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)  # without POT one number is missing, and that is all
    assert main(["train", "mog", "--out", str(tmp_path), "--scale", "0.002"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mog-denoiser.json", "mog-denoiser.safetensors"]
    assert (
        json.loads((tmp_path / "mog-denoiser.json").read_text())["quality"][
            "distance of the model from the data, cells"
        ]
        is None
    )
    assert main(["train", "mog", "--out", str(tmp_path), "--minutes", "-1"]) == 2
