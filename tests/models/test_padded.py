"""Templates of different lengths in one call, with every masked kernel: each population is a sample of its own target.

The truth is that of each template alone, in a vocabulary that knows no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from checks import ROUNDING, answer
from extended import MaskGITExtended
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad
from toys import FORMS, in_form

import tokensteer as ts
from tokensteer.core.models.diffusion import clock
from tokensteer.core.twists.straight_through import takes_embeddings
from tokensteer.testing import TableDenoiser, enumerate_steering

TOKENS, PAD, MASK = 3, 3, 4
WORDS = [*range(TOKENS), MASK]  # the vocabulary of a template alone: its mask is 3
LENGTHS = (2, 3, 4)
PARTICLES, POPULATIONS = 8, 300  # for each template


def templates(mask_id: int) -> list[Tensor]:
    """Two differ in nothing but what they hold fixed, so that their particles meet in the same states."""
    kinds: list[tuple[int, dict[int, int]]] = [(2, {}), (3, {1: 2}), (3, {}), (4, {0: 1, 2: 0})]
    return [ts.template(n, mask_id, list(fixed.values()), at=list(fixed)) for n, fixed in kinds]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(length: int, seed: int) -> TableDenoiser:
    joint = torch.rand(*(TOKENS,) * length, generator=seeded(10 * seed + length), dtype=torch.float64) + 0.05
    return TableDenoiser(joint / joint.sum())


TABLES = [{n: table(n, seed) for n in LENGTHS} for seed in (0, 1)]


@dataclass(frozen=True)
class LooksPast:
    """The tables of all lengths as one denoiser, which tells a row's length by its padding and looks past it.

    At the padding it is as sure as can be: an order by confidence that did not know better would go there first.
    """

    which: int = 0
    ignores_time: bool = True

    def __call__(self, x: Tensor, t: Any) -> Tensor:
        hot = x if x.is_floating_point() else one_hot(x, MASK + 1).double()
        log_p = torch.full_like(hot, -torch.inf)
        log_p[..., 0] = 0.0
        lengths = (hot[..., PAD].detach() == 0).sum(-1)
        for n, alone in TABLES[self.which].items():
            own = (lengths == n).nonzero()
            if len(own):
                said = alone(hot[own.squeeze(-1), :n][..., WORDS], 0.0)[..., :TOKENS]
                log_p = log_p.index_put((own, torch.arange(n)), pad(said, (0, 2), value=-torch.inf))
        return log_p


def ageing(denoiser: ts.Denoiser, mask_id: int) -> ts.Denoiser:
    """The same denoiser, less sure of itself towards the end: it looks at the time, which may be each row's own."""
    return ts.from_logits(lambda x, t: denoiser(x, 0.0) * (0.3 + torch.as_tensor(t).view(-1, 1, 1)), mask_id)


WORTH = torch.randn(max(LENGTHS), MASK + 1, generator=seeded(5), dtype=torch.float64)
WORTH[:, PAD:] = 0.0


def reward(x: Tensor) -> Tensor:
    """What each token is worth at its site, and more for two alike at the start; of ids or one-hots."""
    hot = x if x.is_floating_point() else one_hot(x, MASK + 1).double()
    return (hot * WORTH[: x.shape[1], : hot.shape[-1]]).sum((-1, -2)) + (hot[:, 0] * hot[:, 1]).sum(-1)


TILT = ts.Tilt(reward, 1.0, draws=2)
WAYS: dict[str, tuple[ts.Tilt, ts.Proposal]] = {
    "model": (TILT, ts.FromModel()),
    "gradient": (replace(TILT, differentiable=True), ts.Gradient(clip=2.0)),
    "reinforce": (TILT, ts.Gradient(clip=2.0)),
}


@dataclass(frozen=True)
class Case:
    """A kernel, from a mask id and a length, its steps on a canvas, and the templates it is for.

    `truth` has the same target, for kernels that cannot be enumerated themselves.
    """

    kernel: Callable[[int, int], ts.Kernel]
    steps: Callable[[Tensor, int], Any] = lambda canvas, mask_id: ts.uniform_steps(4)
    rows: tuple[int, ...] = (0, 1, 2, 3)
    truth: Callable[[int, int], ts.Kernel] | None = None
    ages: bool = False

    def of(self, denoiser: ts.Denoiser, canvas: Tensor, mask_id: int) -> ts.Diffusion:
        denoiser = ageing(denoiser, mask_id) if self.ages else denoiser
        return ts.Diffusion(denoiser, self.kernel(mask_id, canvas.shape[-1]), self.steps(canvas, mask_id), canvas)

    def together(self, form: str = "hidden", which: int = 0) -> ts.Diffusion:
        """All templates, those that are shorter padded."""
        denoiser = in_form(LooksPast(which), MASK + 1, form)
        return self.of(denoiser, ts.padded([templates(MASK)[row] for row in self.rows], PAD), MASK)

    def alone(self, row: int, which: int = 0) -> ts.Diffusion:
        canvas = templates(TOKENS)[row]
        return self.of(TABLES[which][len(canvas)], canvas, TOKENS)


def remasking(mask_id: int) -> ts.Ancestral:
    return ts.Ancestral(mask_id, sigma=ts.Rescale(0.8))


def by_block(canvas: Tensor, mask_id: int) -> Any:
    return ts.uniform_steps(canvas.shape[-1])  # two for each block of two sites


# ConfidenceRemask(carried=False) is not among them: it cannot tell padding from what it may mask again, and says so.
KERNELS = {
    "ancestral": Case(lambda m, n: ts.Ancestral(m)),
    "remasking": Case(lambda m, n: remasking(m)),
    "loop": Case(lambda m, n: ts.remdm_loop(m, 0.75, 0.25, 0.5, ts.Cap(0.4))),
    "low": Case(lambda m, n: ts.Ranked(m)),
    "entropy": Case(lambda m, n: ts.Ranked(m, ts.ranked.fixed(1), ts.ranked.negative_entropy)),
    "threshold": Case(lambda m, n: ts.Ranked(m, threshold=math.log(0.5))),
    "cursors": Case(lambda m, n: ts.LeftToRight(m)),
    "maskgit": Case(lambda m, n: ts.MaskGIT(m)),
    "extended": Case(lambda m, n: MaskGITExtended(ts.MaskGIT(m)), truth=lambda m, n: ts.MaskGIT(m)),
    "leaps": Case(lambda m, n: ts.TauLeap(m)),
    "jumps": Case(lambda m, n: ts.FirstHitting(m), ts.event_steps),
    "blocks": Case(lambda m, n: ts.Blocks(remasking(m), 2, n, n), by_block, (0, 3)),
    "maskgit blocks": Case(lambda m, n: ts.Blocks(ts.MaskGIT(m, ts.ranked.fixed(1)), 2, n, n), by_block, (0, 3)),
}
REMEMBERING = {
    "clocks": Case(lambda m, n: ts.TimedFirstHitting(m), ts.event_steps, (0, 2), ages=True),
    "noise": Case(lambda m, n: ts.MaskGIT(m, temperature=2.0)),
    "carried": Case(lambda m, n: ts.ConfidenceRemask(remasking(m), sharpness=5.0)),
}


# ---- one step, exactly


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", [name for name in (*KERNELS, *REMEMBERING) if name != "extended"])
def test_a_step_is_that_of_the_template_alone(kernel: str, form: str) -> None:
    """At states half open, of all templates in one batch: the same probability of the same move, whatever is behind."""
    case, generator, each = (KERNELS | REMEMBERING)[kernel], seeded(), 50
    together, apart = case.together(form), [case.alone(row) for row in case.rows]
    path, start = ts.Steering(together), together.start(each * len(case.rows), None)
    before = path.evaluate(start, 1.0, generator)
    half = (start == MASK) & (torch.rand(start.shape, generator=generator) < 0.5)
    x = torch.where(half, torch.randint(TOKENS, start.shape, generator=generator), start)
    for step in together.steps:
        known = path.evaluate(x, step.t, generator, before)
        p = path.propose(x, known, step)
        y = p.sample(generator)
        assert torch.equal(y[start != MASK], start[start != MASK])
        ours = p.log_prob(y).split(each)
        for place, row in enumerate(case.rows):
            alone, own = apart[place], slice(place * each, (place + 1) * each)
            if step.index >= len(alone.steps):  # its last block or jump is done
                continue
            here, there = (_without_padding(s[own], alone) for s in (x, y))
            memory = None if known.memory is None else known.memory[own]
            if memory is not None and memory.dim() > 1:  # kept for each site, and not a clock
                memory = memory[:, : here.shape[1]]
            theirs = alone.steps[step.index]
            seen = ts.Evaluation(torch.zeros(each), alone.predict(here, clock(alone, memory, theirs.t)), memory=memory)
            right = ts.FromModel()(here, seen, theirs, alone, None).log_prob(there)
            assert torch.allclose(ours[place], right, atol=1e-9), templates(MASK)[row].tolist()


def _without_padding(x: Tensor, alone: ts.Diffusion) -> Tensor:
    x = x[:, : alone.template.shape[-1]]
    return torch.where(x == MASK, TOKENS, x)


# ---- whole runs


def run(path: ts.Steering, seed: int = 0, each: int = POPULATIONS) -> Tensor:
    """Of each population of each template: its estimate of Z, and Z times the probability of each token at each site,
    (rows, populations, 1 + L·tokens). What is fixed is watched on the way."""
    canvas = torch.atleast_2d(path.model.base.template)
    fixed = (canvas != path.model.kernel.mask_id).unsqueeze(1)
    populations = len(canvas) * each
    for record in ts.sweep(path, PARTICLES, populations, when=ts.triggers.always, generator=seeded(seed)):
        x = record.x.view(len(canvas), -1, canvas.shape[-1])
        assert torch.where(fixed, x == canvas.unsqueeze(1), True).all()
    w = record.log_w.exp() / PARTICLES
    there = one_hot(record.x, MASK + 1)[..., :TOKENS].flatten(2).double()  # padding is none of these
    masses = torch.cat([w.sum(-1, keepdim=True), (w.unsqueeze(-1) * there).sum(1)], -1)
    return masses.view(len(canvas), each, -1)


@cache
def truth(kernel: str, row: int) -> Tensor:
    """What `run` estimates, by enumeration of one template alone."""
    case = KERNELS[kernel]
    exact = answer(replace(case, kernel=case.truth or case.kernel).alone(row), TILT)
    return expected(exact.log_z, exact.target, exact.clean)


def expected(log_z: float, target: Tensor, clean: Tensor) -> Tensor:
    return math.exp(log_z) * torch.cat([torch.ones(1), target @ one_hot(clean, TOKENS).double().flatten(1)])


def agree(masses: Tensor, right: Tensor, spread: Tensor | float = 0.0) -> bool:
    """Z, and each token at each site that is not too rare for it, as z-scores; and never what cannot be. `spread` is
    the variance of the truth, if that was estimated too."""
    masses = masses[:, : len(right)]  # the sites behind are padding
    z = (masses.mean(0) - right) / ((masses.var(0) / len(masses) + spread).sqrt() + ROUNDING)
    never, heavy = right == 0, right >= 0.02 * right[0]
    return abs(float(z[0])) < 4 and float(z[heavy].abs().max()) < 4.5 and not bool(masses[:, never].any())


@pytest.mark.parametrize(("kernel", "way"), list(zip(KERNELS, cycle(WAYS), strict=False)))
@pytest.mark.slow
def test_each_population_has_the_law_of_its_own_template(kernel: str, way: str) -> None:
    case = KERNELS[kernel]
    for masses, row in zip(run(ts.Steering(case.together(), *WAYS[way])), case.rows, strict=True):
        assert agree(masses, truth(kernel, row)), templates(MASK)[row].tolist()


@pytest.mark.parametrize(("kernel", "way"), list(zip(REMEMBERING, WAYS, strict=True)))
@pytest.mark.slow
def test_kernels_with_a_memory_run_as_they_do_alone(kernel: str, way: str) -> None:
    """They cannot be enumerated, so two runs are compared."""
    case = REMEMBERING[kernel]
    for masses, row in zip(run(ts.Steering(case.together(), *WAYS[way])), case.rows, strict=True):
        path = ts.Steering(case.alone(row), *WAYS[way])
        with pytest.raises(ValueError, match="has a memory"):
            enumerate_steering(path)
        alone = run(path, 1)[0]
        assert agree(masses, alone.mean(0), alone.var(0) / len(alone)), templates(MASK)[row].tolist()


@pytest.mark.parametrize("kernel", ["ancestral", "remasking", "low", "maskgit", "jumps"])
def test_enumerated_proposals_tell_templates_apart(kernel: str) -> None:
    """Particles in the same state share a list of where to go, unless one holds fixed what others do not."""
    case = KERNELS[kernel]
    path = ts.Steering(case.together(), replace(TILT, estimator=ts.Exact()), ts.Enumerated())
    for masses, row in zip(run(path), case.rows, strict=True):
        assert agree(masses, truth(kernel, row)), templates(MASK)[row].tolist()


@pytest.mark.parametrize("kernel", ["ancestral", "remasking", "low"])
def test_products_of_padded_models(kernel: str) -> None:
    case, powers = KERNELS[kernel], (1.4, -0.4)
    product = ts.Product([case.together(which=k) for k in (0, 1)], powers)
    for masses, row in zip(run(ts.Steering(product, TILT, ts.Guided())), case.rows, strict=True):
        exact = answer(ts.Product([case.alone(row, k) for k in (0, 1)], powers), TILT)
        assert agree(masses, expected(exact.log_z, exact.target, exact.clean)), templates(MASK)[row].tolist()


class Entered(nn.Module):
    """A random network that can be entered behind its embedding, and looks past padding, whose embedding is zero: a
    state for each site, from its token and the sum of all, or, for a reward, one number."""

    def __init__(self, words: list[int], outputs: int | None) -> None:
        super().__init__()
        width, generator = 4, seeded(outputs or 1)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        table = draw(MASK + 1, width).index_fill(0, torch.tensor(PAD), 0.0)
        self.table, self.own, self.all = table[words], draw(width, width), draw(width, width)
        self.pools, self.head = outputs is None, nn.Linear(width, len(words), dtype=torch.float64).requires_grad_(False)
        self.head.weight.copy_(draw(MASK + 1, width)[words])
        self.head.bias.copy_(torch.tensor([-1e4 if word == PAD else 0.0 for word in words]))

    @property
    def embedding(self) -> Tensor:
        return self.table

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        if self.pools:
            return (embedded @ self.own).sum(1).tanh().sum(-1)
        return (embedded @ self.own + (embedded @ self.all).sum(1, keepdim=True)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.of_embeddings(x @ self.table if x.is_floating_point() else self.table[x])


@pytest.mark.parametrize("kernel", ["ancestral", "remasking", "low"])
def test_gradients_through_embeddings_look_past_padding(kernel: str) -> None:
    case = KERNELS[kernel]

    def parts(words: list[int], canvas: Tensor) -> tuple[ts.Diffusion, ts.Tilt]:
        trunk, mask_id = Entered(words, MASK + 1), words.index(MASK)
        denoiser = ts.from_hidden(trunk, trunk.head, mask_id, ignores_time=True)
        tilt = ts.Tilt(Entered(words, None), 0.5, draws=2, differentiable=True)
        return case.of(denoiser, canvas, mask_id), tilt

    model, tilt = parts(list(range(MASK + 1)), ts.padded(templates(MASK), PAD))
    assert takes_embeddings(model, tilt)
    for masses, canvas in zip(run(ts.Steering(model, tilt, ts.Gradient(clip=2.0))), templates(TOKENS), strict=True):
        exact = answer(*parts(WORDS, canvas))
        assert agree(masses, expected(exact.log_z, exact.target, exact.clean)), canvas.tolist()


# ---- populations that differ in their labels, too


PAIRS = ((2, 0), (0, 0), (0, 1), (0, 2), (1, 2), (1, 3))  # of a label and a template: neighbours share one of them
NO_LABEL = 3


class Labelled(nn.Module):
    """`Entered` with a label for each row, by which its states or its number are multiplied."""

    def __init__(self, words: list[int], outputs: int | None) -> None:
        super().__init__()
        self.entered = Entered(words, outputs)
        self.head = self.entered.head
        gains = [[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 1.0, 1.0], [0.2, -1.0, -1.0, 1.0], [0.5, 0.5, -0.5, 0.5]]
        self.gains = 0.7 * torch.tensor(gains, dtype=torch.float64)

    @property
    def embedding(self) -> Tensor:
        return self.entered.embedding

    def of_embeddings(self, embedded: Tensor, label: Tensor) -> Tensor:
        found = self.entered.of_embeddings(embedded)
        return found * (self.gains[label].unsqueeze(1) if found.dim() > 1 else self.gains[label, 0])

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.of_embeddings(x @ self.embedding if x.is_floating_point() else self.embedding[x], label)


@dataclass(frozen=True)
class Populations:
    """Labels and the canvas of their templates, in a vocabulary with padding or without."""

    kernel: str
    labels: list[int]
    canvas: Tensor
    words: list[int]
    sharing: bool = True

    @classmethod
    def together(cls, kernel: str, sharing: bool) -> Populations:
        canvas = ts.padded([templates(MASK)[row] for _, row in PAIRS], PAD)
        return cls(kernel, [label for label, _ in PAIRS], canvas, list(range(MASK + 1)), sharing)

    @classmethod
    def alone(cls, kernel: str, label: int, row: int) -> Populations:
        return cls(kernel, [label], templates(TOKENS)[row], WORDS)

    def model(self, labels: list[int] | None = None) -> ts.Diffusion:
        trunk, mask_id = Labelled(self.words, MASK + 1), self.words.index(MASK)
        denoiser = ts.from_hidden(trunk, trunk.head, mask_id, ignores_time=True)
        kernel, steps = KERNELS[self.kernel].kernel(mask_id, self.canvas.shape[-1]), ts.uniform_steps(4)
        context = torch.tensor(self.labels if labels is None else labels)
        return ts.Diffusion(denoiser, kernel, steps, self.canvas, self.sharing, context)

    def steering(self, way: str) -> ts.Steering:
        """One of `LABELLED`. The reward has the label, too."""
        model, context = self.model(), torch.tensor(self.labels)
        tilt = ts.Tilt(Labelled(self.words, None), 2.0, draws=2, differentiable=True, context=context)
        match way:
            case "gradient":
                assert takes_embeddings(model, tilt)
                return ts.Steering(model, tilt, ts.Gradient(clip=2.0))
            case "enumerated":
                return ts.Steering(model, replace(tilt, estimator=ts.Exact()), ts.Enumerated())
            case "guided":
                return ts.Steering(ts.guided(model, self.model([NO_LABEL]), 1.4), None, ts.Guided())
            case "guided and tilted":
                return ts.Steering(ts.guided(model, self.model([NO_LABEL]), 1.4), tilt, ts.Guided())
            case _:
                return ts.Steering(model, tilt)


LABELLED = ("model", "gradient", "enumerated", "guided", "guided and tilted")


@cache
def labelled_truth(kernel: str, way: str, label: int, row: int) -> Tensor:
    path = Populations.alone(kernel, label, row).steering(way)
    exact = answer(path.model, path.twist)
    return expected(exact.log_z, exact.target, exact.clean)


@pytest.mark.parametrize("kernel", ["ancestral", "remasking"])
@pytest.mark.parametrize("way", LABELLED)
@pytest.mark.parametrize("sharing", [True, False])
def test_each_population_has_the_target_of_its_label_and_its_template(way: str, kernel: str, sharing: bool) -> None:
    """And of no other label: all that are not its own are told apart."""
    path = Populations.together(kernel, sharing).steering(way)
    for masses, (label, row) in zip(run(path, each=100), PAIRS, strict=True):
        found = [agree(masses, labelled_truth(kernel, way, other, row)) for other in range(NO_LABEL)]
        assert found == [other == label for other in range(NO_LABEL)], (label, row)


@pytest.mark.parametrize("sharing", [True, False])
def test_predictions_are_those_of_the_label_and_the_template_alone(sharing: bool) -> None:
    together, generator = Populations.together("ancestral", sharing).model(), seeded()
    start = together.start(50 * len(PAIRS), generator)
    half = (start == MASK) & (torch.rand(start.shape, generator=generator) < 0.5)
    x = torch.where(half, torch.randint(TOKENS, start.shape, generator=generator), start)
    for own, (label, row) in zip(torch.arange(len(x)).split(50), PAIRS, strict=True):
        alone = Populations.alone("ancestral", label, row).model()
        right = alone.predict(_without_padding(x[own], alone), 0.5).laws().dense()
        found = together.predict(x, 0.5).take(own).laws().dense()[:, : right.shape[1]]
        torch.testing.assert_close(found[..., :TOKENS], right[..., :TOKENS], rtol=0, atol=1e-12)
