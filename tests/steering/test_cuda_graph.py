"""A whole run as a CUDA graph: the same run, number for number, and no word of the host on the way."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from narrow import some, untyped
from torch import Tensor, nn

import tokensteer as ts

MASK, LENGTH, LABELS = 6, 5, 3
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    """A small random network that can be entered behind its embedding: logits, or one number for each sequence."""

    def __init__(self, outputs: int, seed: int = 0, width: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.table = nn.Parameter(torch.randn(MASK + 1, width))
            self.mix = nn.Linear(width * LENGTH, width * LENGTH)
            self.head = nn.Linear(width, outputs)

    @property
    def embedding(self) -> Tensor:
        return self.table

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        said = self.head(self.mix(embedded.flatten(1)).view_as(embedded).tanh())
        return said.sum((-1, -2)) if self.head.out_features == 1 else said

    def forward(self, x: Tensor) -> Tensor:
        return self.of_embeddings(self.table[x])


class Labelled(nn.Module):
    """The same with a label for each row, by which states are multiplied."""

    def __init__(self, outputs: int, seed: int = 0) -> None:
        super().__init__()
        self.net = Net(outputs, seed)
        gains = torch.randn(LABELS, 1, 16, generator=torch.Generator().manual_seed(seed))
        self.gains = nn.Parameter(gains)

    @property
    def embedding(self) -> Tensor:
        return self.net.embedding

    def of_embeddings(self, embedded: Tensor, label: Tensor) -> Tensor:
        return self.net.of_embeddings(embedded * self.gains[label])

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.of_embeddings(self.embedding[x], label)


class Placed(nn.Module):
    """`Labelled` for 32 particles in order, equally many of each label."""

    def __init__(self, net: Labelled, labels: Tensor) -> None:
        super().__init__()
        self.net, self.labels = net, labels.repeat_interleave(32 // len(labels))

    @property
    def embedding(self) -> Tensor:
        return self.net.embedding

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        rows = len(embedded)  # several times as many for several draws of each particle
        return self.net.of_embeddings(embedded, self.labels.repeat(-(-rows // 32))[:rows])

    def forward(self, x: Tensor) -> Tensor:
        return self.of_embeddings(self.embedding[x])


PLAIN = {
    "kernel": ts.Ancestral(MASK),
    "steps": ts.uniform_steps(8),
    "canvas": ts.template(LENGTH, MASK, [2], at=[1]),
    "proposal": ts.FromModel(),
    "sharing": False,
    "form": "logits",
    "tilt": {},
    "when": ts.triggers.ess_below(0.5),
    "labels": None,
}


def method(device: str = "cuda", other: float | None = None, **options: Any) -> ts.Method:
    """A model of random networks, guided away from another one if `other` is how far. With `labels`, one for each
    population, the model and the reward have them as their context, and the other model has the last label."""
    parts = {**PLAIN, **options}
    labels = None if parts["labels"] is None else torch.tensor(parts["labels"], device=device)
    kind = Net if labels is None else Labelled
    nets: list[Any] = [kind(MASK + 1, seed).to(device).requires_grad_(False) for seed in (0, 1, 2)]
    if parts["form"] == "hidden":
        laws = [ts.from_hidden(lambda x, net=net: net.table[x], net.head, MASK, ignores_time=True) for net in nets]
    else:
        laws = [ts.from_logits(net, MASK, ignores_time=True) for net in nets]
    canvas = parts["canvas"].to(device)
    grid = parts["kernel"], parts["steps"], canvas, parts["sharing"]
    contexts = labels, None if labels is None else labels.new_tensor([LABELS - 1])
    models = [ts.Diffusion(law, *grid, context) for law, context in zip(laws[:2], contexts, strict=True)]
    reward = kind(1).to(device).requires_grad_(False)
    usual = {"draws": 3, "differentiable": True, "context": labels}
    tilt = None if parts["tilt"] is None else ts.Tilt(reward, 0.5, **{**usual, **parts["tilt"]})
    model = models[0] if other is None else ts.guided(models[0], models[1], other)
    proposal = ts.Amortised(laws[2]) if parts["proposal"] == "learned" else parts["proposal"]
    return ts.Method(ts.Steering(model, tilt, proposal), when=parts["when"])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


RUNS = {
    "base": {},
    "hidden": {"form": "hidden"},
    "rarely": {"when": ts.triggers.all_of(ts.triggers.every(3), ts.triggers.ess_below(0.9))},
    "shared noise": {"tilt": {"estimator": ts.Sampled(seed=1)}},
    "adaptive": {"tilt": {"ramp": ts.Adaptive(0.9)}},
    "total": {"tilt": {"potential": ts.potentials.total}},
    "prompts": {"canvas": torch.stack([ts.template(LENGTH, MASK, [k]) for k in (0, 1)])},
    "learned": {"proposal": "learned"},
    "remasking": {"kernel": ts.Ancestral(MASK, sigma=ts.Cap(0.2))},
    "confident": {"kernel": ts.Ranked(MASK)},
    "cursors": {"kernel": ts.LeftToRight(MASK)},
    "ranked": {"kernel": ts.Ranked(MASK, confidence=ts.ranked.negative_entropy)},
    "first hitting": {"kernel": ts.FirstHitting(MASK), "steps": ts.uniform_steps(LENGTH - 1)},
    "leaps": {"kernel": ts.TauLeap(MASK)},
    "sure ones stay": {"kernel": ts.ConfidenceRemask(ts.Ancestral(MASK, sigma=ts.Cap(0.3)))},
    "loop": {"kernel": ts.remdm_loop(MASK, 0.75, 0.25, 0.5, ts.Cap(0.4))},
    "blocks": {
        "kernel": ts.Blocks(ts.Ancestral(MASK), 2, LENGTH, 4, start=1),
        "steps": ts.uniform_steps(4),
        "canvas": ts.template(LENGTH, MASK, [2]),
    },
    "guided": {"other": 1.5, "proposal": ts.Guided()},
    "optimal": {"other": 1.5, "proposal": ts.Optimal()},
    "uniform": {"kernel": ts.uniform_noise(MASK + 1), "canvas": ts.template(LENGTH, ts.NO_MASK, [2], at=[1])},
    "gradient": {"proposal": ts.Gradient(clip=2.0)},
    "one draw": {"proposal": ts.Gradient(clip=2.0, draws=1)},
    "now and then": {"proposal": ts.Gradient(clip=2.0, every=3)},
}
CONTEXTS = {
    "labels": {"labels": [0, 1]},
    "labels and prompts": {
        "labels": [0, 1],
        "canvas": torch.stack([ts.template(LENGTH, MASK, tokens) for tokens in ([2], [2, 3])]),
    },
    "labels, shared noise": {"labels": [0, 1], "tilt": {"estimator": ts.Sampled(seed=1)}},
    "labels, gradient": {"labels": [0, 1], "proposal": ts.Gradient(clip=2.0)},
    "labels, learned": {"labels": [0, 1], "proposal": "learned"},
    "labels, guided": {"labels": [0, 1], "other": 1.5, "proposal": ts.Guided()},
    "labels, remasked": {
        "labels": [0, 1],
        "other": 1.5,
        "proposal": ts.Guided(),
        "kernel": ts.Ancestral(MASK, sigma=ts.Cap(0.2)),
        "tilt": None,
    },
}
RUNS |= CONTEXTS


@pytest.mark.parametrize("name", RUNS)
def test_all_runs_are_runs_of_a_cpu_too(name: str) -> None:
    result = method("cpu", **RUNS[name])(8, 4, generator=torch.Generator().manual_seed(1))
    assert result.log_w.isfinite().all()
    assert not (result.samples == MASK).any()


def without_context(plain: Any) -> ts.Method:
    """The same method with networks that find the label of a row by its place."""

    def placed(law: Any, context: Tensor) -> ts.Denoiser:
        return ts.from_logits(Placed(law.network, context), MASK, ignores_time=True)

    path = plain.steering
    models = [replace(m, denoiser=placed(m.denoiser, m.conditions[0]), context=None) for m in path.model.networks]
    model = models[0] if len(models) == 1 else replace(path.model, models=models)
    known = path.twist
    tilt = known and replace(known, reward=Placed(known.reward, known.conditions[0]), context=None)
    learned = isinstance(path.proposal, ts.Amortised)
    proposal = ts.Amortised(placed(path.proposal.denoiser, path.model.conditions[0])) if learned else path.proposal
    return replace(plain, steering=ts.Steering(model, tilt, proposal))


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_gives_each_row_its_label(name: str) -> None:
    """These runs call networks with all particles in order."""
    plain = method("cpu", **CONTEXTS[name])
    runs = (plain, without_context(plain))
    ours, theirs = (run(8, 4, generator=torch.Generator().manual_seed(1)) for run in runs)
    assert torch.equal(ours.samples, theirs.samples)
    torch.testing.assert_close(ours.log_w, theirs.log_w)
    torch.testing.assert_close(ours.log_z, theirs.log_z)


@gpu
@pytest.mark.parametrize("name", RUNS)
def test_replayed_runs_are_the_runs_of_the_method(name: str) -> None:
    plain = method(**RUNS[name])
    again = ts.captured(plain, 8, 4)
    for seed in (1, 2, 1):
        here, there = seeded(seed), seeded(seed)
        ours, theirs = again(generator=here), plain(8, 4, generator=there)
        assert torch.equal(ours.samples, theirs.samples)
        assert torch.equal(ours.ancestors, theirs.ancestors)
        assert torch.allclose(ours.log_w, theirs.log_w, atol=1e-5)
        assert torch.allclose(ours.ess, theirs.ess, rtol=1e-3)
        # The method reads the device to see that the first of these steps is known from the start; a replay cannot.
        more = 2 * 8 * 4 if name == "labels, remasked" else 0
        assert dict(ours.rows) == {**theirs.rows, "denoiser": theirs.rows["denoiser"] + more}
        assert torch.equal(here.get_state(), there.get_state())  # and what follows is drawn from the same noise
        assert torch.equal(ours.sample(3), theirs.sample(3))


@gpu
def test_results_outlive_the_next_replay() -> None:
    again = ts.captured(method(), 8)
    first = again(generator=seeded(1))
    kept = {f.name: v.clone() for f in fields(first) if isinstance(v := getattr(first, f.name), Tensor)}
    assert not torch.equal(again(generator=seeded(2)).samples, kept["samples"])
    for name, value in kept.items():
        torch.testing.assert_close(getattr(first, name), value, rtol=0, atol=0, equal_nan=True)


@gpu
def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="the generator is on cpu and the model on cuda"):
        ts.captured(method(), 8)(generator=torch.Generator())


@gpu
def test_noise_of_its_own_goes_on() -> None:
    again = ts.captured(method(), 8)
    assert not torch.equal(again().samples, again().samples)
    assert not torch.equal(ts.captured(method(), 8)().samples, ts.captured(method(), 8)().samples)


@gpu
def test_networks_may_learn_in_between() -> None:
    plain = method()
    again = ts.captured(plain, 8)
    before = again(generator=seeded(1))
    plain.steering.model.base.denoiser.network.head.weight.data.mul_(3.0)
    after, right = again(generator=seeded(1)), plain(8, generator=seeded(1))
    assert torch.equal(after.samples, right.samples)
    assert not torch.equal(after.samples, before.samples)


@gpu
def test_what_goes_wrong_is_said_after_the_replay() -> None:
    """The host cannot look at weights while it is not there; it runs the same run again to say what is wrong."""
    plain = method()
    again = ts.captured(plain, 8)
    again(generator=seeded(1))
    untyped(plain.steering.twist).reward.head.bias.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="Culprit: the reward"):
        again(generator=seeded(1))


def counted(x: Tensor) -> Tensor:
    """A reward that makes the host look."""
    return (x == 1).sum(-1).float() * int(x.sum() > 0)


LOOKING = {"reward": {"reward": counted, "differentiable": False}, "estimate": {"estimator": ts.Exact()}}


@gpu
@pytest.mark.parametrize("name", [*LOOKING, "maskgit", "clocks", "sharing"])
def test_a_run_that_makes_the_host_look_is_not_recorded(name: str) -> None:
    kernel = {"maskgit": ts.MaskGIT(MASK), "clocks": ts.TimedFirstHitting(MASK)}.get(name, ts.Ancestral(MASK))
    plain = method(kernel=kernel, steps=ts.uniform_steps(LENGTH - 1), sharing=name == "sharing")
    path = plain.steering
    looking = replace(plain, steering=replace(path, twist=replace(some(path.twist), **LOOKING.get(name, {}))))
    with pytest.raises(ValueError, match="sharing=False" if name == "sharing" else "reads the device on the host"):
        ts.captured(looking, 8)
    assert looking(8, generator=seeded(1)).log_w.isfinite().all()  # and nothing is broken by the attempt


@gpu
@pytest.mark.parametrize("name", ["base", "remasking"])
def test_no_step_makes_the_host_wait(name: str) -> None:
    """From the start to the step before the end, unrecorded: nothing on the way is looked at."""
    plain = method(**RUNS[name])
    plain(8, generator=seeded(1))  # kernels are made, and memory is asked for
    records = ts.sweep(plain.steering, 8, generator=seeded(1))
    next(records)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(len(plain.steering.steps) - 1):
            next(records)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_sharing_is_the_same_law_there() -> None:
    """Rows that are found equal on a GPU: the same estimates as without, number for number, where none is random."""
    runs = []
    for sharing in (True, False):
        plain = method(sharing=sharing)
        path = ts.Steering(plain.steering.model, replace(some(plain.steering.twist), estimator=ts.Sampled(seed=0)))
        runs.append(ts.smc(path, 8, 4, generator=seeded(3)))
    assert torch.equal(runs[0].samples, runs[1].samples)
    assert torch.allclose(runs[0].log_w, runs[1].log_w, atol=1e-5)
    assert runs[0].rows["denoiser"] < runs[1].rows["denoiser"]


def test_only_a_method_is_recorded() -> None:
    with pytest.raises(TypeError, match=r"wrap a steering as Method\(steering\)"):
        ts.captured(method("cpu").steering, 8)  # pyright: ignore[reportArgumentType]


def test_only_a_gpu_records() -> None:
    with pytest.raises(ValueError, match="only a run on a GPU can be captured, and the model is on cpu"):
        ts.captured(method("cpu"), 8)
