"""The laws of `tokensteer.testing`: what is right passes, and every deliberate bug is caught and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, one_hot
from toys import Toy

import tokensteer as ts
from tokensteer.testing import assert_denoiser, assert_kernel, assert_proposal, assert_resampler, assert_reward

DTYPES = [torch.float32, torch.float64]
MASK, VOCAB, LENGTH = 4, 5, 3
SAMPLERS = ["mdm", "remdm", "lowconf"]


@dataclass(frozen=True)
class Network:
    """Two layers on ids or one-hots; `middle` and `see` are where bugs go in."""

    dtype: torch.dtype = torch.float64
    length: int = LENGTH
    vocab_size: int = VOCAB
    middle: Callable[[Tensor], Tensor] = torch.tanh
    see: Callable[[Tensor], Tensor] = field(default=lambda one_hots: one_hots)

    def weight(self, rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(self.dtype) / math.sqrt(8)

    def __call__(self, x: Tensor, t: float) -> Tensor:
        x = self.see(x) if x.is_floating_point() else one_hot(x, self.vocab_size).to(self.dtype)
        size = self.length * self.vocab_size
        hidden = self.middle(x.flatten(1) @ self.weight(size, 8) + t)
        return (4.0 * hidden @ self.weight(8, size)).view(-1, self.length, self.vocab_size)


def diffusion(denoiser: ts.Denoiser, template: Tensor | None = None, num_steps: int = 4) -> ts.Diffusion:
    template = ts.template(LENGTH, MASK) if template is None else template
    return ts.Diffusion(denoiser, ts.Ancestral(MASK), ts.uniform_steps(num_steps), template)


def raises(match: str):
    return pytest.raises(AssertionError, match=match)


# ---- denoisers


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_network_is_a_denoiser(dtype: torch.dtype):
    denoiser = ts.from_logits(Network(dtype), MASK)
    assert_denoiser(diffusion(denoiser))
    assert_denoiser(diffusion(denoiser, torch.tensor([[MASK, 2, MASK], [1, MASK, MASK]])), seed=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", "ABC")
def test_the_exact_denoiser_is_a_denoiser(name: str, dtype: torch.dtype):
    assert_denoiser(Toy(name, dtype).model("mdm"))


def by_embedding(x: Tensor, t: float) -> Tensor:
    return embedding(x, Network().weight(VOCAB, VOCAB))


def cuts_gradient(x: Tensor, t: float) -> Tensor:
    return Network()(x.argmax(-1) if x.is_floating_point() else x, t)


@pytest.mark.parametrize(
    ("network", "match"),
    [
        (Network(middle=lambda h: dropout(h, 0.3, training=True)), "not deterministic.*network.eval()"),
        (Network(middle=lambda h: h - h.mean(0)), "mixes rows.*batch norm"),
        (Network(middle=lambda h: h + torch.arange(len(h))[:, None]), "mixes rows.*attention"),
        (Network(see=lambda x: 1.01 * x), "differs between ids and their one-hots by 0.0.*Embed"),
        (Network(see=lambda x: x + 0.0 * (1.0 - x).sqrt()), "gradient in its one-hots that is not finite.*where"),
        (by_embedding, r"fails on one-hots \(P, L, V\):.*embedding.weight"),
        (cuts_gradient, "zero everywhere.*argmax"),
    ],
)
def test_broken_networks_are_caught(network: Callable[..., Tensor], match: str):
    with raises(match):
        assert_denoiser(diffusion(ts.from_logits(network, MASK)))


def test_one_hots_are_asked_for_only_on_request():
    assert_denoiser(diffusion(ts.from_logits(by_embedding, MASK)), one_hots=False)


def test_half_precision_passes_with_a_tolerance():
    def rough(x: Tensor, t: float) -> Tensor:
        noise = torch.randn((len(x), 1, VOCAB), dtype=torch.float64, generator=torch.Generator().manual_seed(len(x)))
        return Network()(x, t) + 1e-3 * noise

    model = diffusion(ts.from_logits(rough, MASK))
    with raises("mixes rows"):
        assert_denoiser(model)
    assert_denoiser(model, tolerance=0.05)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda p: p + 1e-6, "do not sum to one: the log of the sum is off by 1e-06.*from_logits"),
        (lambda p: p.masked_fill(p < p.amax(-1, keepdim=True), math.nan), "gives NaN"),
        (lambda p: torch.where(torch.arange(VOCAB) == MASK, -9.0, p).log_softmax(-1), "gives mass 0.00012 to the mask"),
        (lambda p: p.float(), "gives torch.float32 of shape.*keep one precision"),
        (lambda p: p.squeeze(0), r"of shape \(3, 5\) at t = 0.25 for 1 sequences.*squeeze nothing"),
        (lambda p: p[:, :-1], r"It must give torch.float64 of shape \(8, 3, 5\)"),
    ],
)
def test_broken_predictions_are_caught(spoil: Callable[[Tensor], Tensor], match: str):
    good = ts.from_logits(Network(), MASK)
    # At the start and half-way all is well, or the model could not be made.
    with raises(match):
        assert_denoiser(diffusion(lambda x, t: good(x, t) if t >= 0.5 else spoil(good(x, t))))


# ---- kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_kernels_of_the_toys(sampler: str, dtype: torch.dtype):
    toy = Toy("B")
    steps = toy.num_steps(sampler)
    assert_kernel(toy.kernels[sampler], toy.tokens + 1, length=toy.length, num_steps=steps, dtype=dtype)


@pytest.mark.parametrize(
    "kernel",
    [
        ts.Ancestral(0, ts.Cosine()),
        ts.Ancestral(2, ts.Geometric()),
        ts.Ancestral(MASK, ts.LogLinear(), sigma=ts.Cap(0.3)),
        ts.Ancestral(MASK, sigma=ts.Rescale(1.0)),
        ts.Ranked(0),
        ts.LeftToRight(0),
    ],
)
def test_kernels_of_the_library(kernel: ts.Kernel):
    assert_kernel(kernel, VOCAB, num_steps=3)


def test_a_large_vocabulary():
    assert_kernel(ts.Ancestral(50_000, sigma=ts.Cap(0.1)), 50_001, length=2, num_steps=2, dtype=torch.float32)


@dataclass(frozen=True)
class Spoilt:
    """A kernel whose measures are changed."""

    change: Callable[[Any, ts.Step], ts.measure.Reveal]
    kernel: ts.Kernel = field(default_factory=lambda: ts.Ancestral(MASK, sigma=ts.Cap(0.1)))
    mask_id: int = MASK

    def choose(self, x: Tensor, log_x0: Tensor, step: ts.Step) -> Any:
        return self.kernel.choose(x, log_x0, step)

    def survival(self, step: ts.Step) -> float:
        return self.kernel.survival(step)

    def remasks(self, step: ts.Step) -> bool:
        return self.kernel.remasks(step)

    def __call__(self, x: Tensor, log_x0: Tensor, step: ts.Step, sites: Tensor | None = None) -> ts.measure.Reveal:
        return self.change(self.kernel(x, log_x0, step, sites), step)


class Reveals(ts.measure.Reveal):
    """A measure whose copies keep their bugs."""

    def take(self, rows: Tensor) -> ts.measure.Reveal:
        return remade(type(self), super().take(rows))


def remade(cls: type[ts.measure.Reveal], m: ts.measure.Reveal) -> ts.measure.Reveal:
    return cls(m.x, m.log_stay, m.log_move, m.log_x0, m.mask_id, m.sites)


class Flat(Reveals):
    def sample(self, generator: torch.Generator | None) -> Tensor:
        return replace(remade(ts.measure.Reveal, self), log_x0=self.log_x0.map(lambda law: 0.9 * law)).sample(generator)


class Wild(Reveals):
    def sample(self, generator: torch.Generator | None) -> Tensor:
        y = super().sample(generator)
        return torch.where((self.x != self.mask_id) & (y != self.mask_id), (y + 1) % self.mask_id, y)


class Doubled(Reveals):
    def log_prob(self, y: Tensor) -> Tensor:
        return 2.0 * super().log_prob(y)


def stays_longer(m: ts.measure.Reveal, step: ts.Step) -> ts.measure.Reveal:
    """Masked sites open a little less often than they should, with the rest put to staying."""
    opens = m.log_move + torch.where(m.masked, math.log(0.999), 0.0) * (step.s > 0)
    return replace(m, log_move=opens, log_stay=torch.log1p(-opens.exp()))


def never_ends(m: ts.measure.Reveal, step: ts.Step) -> ts.measure.Reveal:
    return stays_longer(m, replace(step, s=1.0))


def rounded(m: ts.measure.Reveal, step: ts.Step) -> ts.measure.Reveal:
    return replace(m, log_stay=m.log_stay.float(), log_move=m.log_move.float())


class Greedy(ts.Ancestral):
    """Remasks beyond the bound, and opens what it can in return."""

    def remasking(self, step: ts.Step) -> float:
        return min(1.0, self.bound(step) + 0.05) if step.s > 0 else 0.0


class Elsewhere(ts.Ranked):
    """Chooses a site that is open."""

    def choose(self, x: Tensor, log_x0: Tensor, step: ts.Step) -> Tensor | None:
        sites = super().choose(x, log_x0, step)
        return None if sites is None else sites | (x == 0)


class Headstrong(ts.Ranked):
    """Chooses anew, whatever sites it is given."""

    def __call__(self, x: Tensor, log_x0: Tensor, step: ts.Step, sites: Tensor | None = None) -> ts.measure.Reveal:
        return super().__call__(x, log_x0, step)


def without_sites(m: ts.measure.Reveal, step: ts.Step) -> ts.measure.Reveal:
    return replace(m, sites=None)


@pytest.mark.parametrize(
    ("kernel", "match"),
    [
        (Spoilt(lambda m, step: replace(m, log_stay=m.log_stay + 1e-6)), "step 0 does not sum to one.*stay and 1 - p"),
        (Spoilt(lambda m, step: replace(m, log_move=m.log_move * math.nan)), "step 0 does not sum to one"),
        (Spoilt(rounded), "float64 into masses in torch.float32.*like log_x0"),
        (Spoilt(stays_longer), "step 2 does not keep the forward marginal.*sigma within its bound"),
        (Greedy(MASK), "does not keep the forward marginal.*sigma within its bound"),
        (
            Spoilt(never_ends),
            "step 3 leaves sites masked at the end, with probability 0.001.*exactly 1 when step.s == 0",
        ),
        (ts.Ranked(MASK, lambda step, masked: torch.where(masked > 1, 1, 0)), "leaves sites masked at the end"),
        (Spoilt(lambda m, step: remade(Doubled, m)), "dense table differ in log_prob.*same numbers"),
        (Spoilt(lambda m, step: remade(Flat, m)), "does not sample what it evaluates: z-score.*same temperature"),
        (Spoilt(lambda m, step: remade(Wild, m)), "draws states whose own log_prob is not finite"),
        (Elsewhere(MASK), "not masked sites of x.*booleans"),
        (Headstrong(MASK), "does not keep to the sites it is given.*p and q share"),
        (Spoilt(without_sites, ts.Ranked(MASK)), "does not keep to the sites it is given.*in the measure"),
    ],
)
def test_broken_kernels_are_caught(kernel: ts.Kernel, match: str):
    with raises(match):
        assert_kernel(kernel, VOCAB)


# ---- proposals


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "proposal",
    [
        lambda toy: ts.Gradient(),
        lambda toy: ts.Enumerated(),
        lambda toy: toy.amortised(),
        lambda toy: ts.Gradient(toy.amortised(own_order=True), clip=1.0, tokens_only=True),
    ],
)
def test_proposals_for_a_tilt(proposal: Callable[[Toy], ts.Proposal], sampler: str, dtype: torch.dtype):
    toy = Toy("B", dtype)
    assert_proposal(ts.Steering(toy.model(sampler), toy.tilt(sampler), proposal(toy)), rows=8)


@pytest.mark.parametrize("proposal", [ts.Optimal(), ts.Guided(), ts.FromModel()])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_proposals_for_a_product(proposal: ts.Proposal, sampler: str):
    assert_proposal(ts.Steering(Toy("A").product(sampler, 1.5, -0.4), None, proposal), rows=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_proposals_of_a_network_with_a_prompt_and_a_random_twist(dtype: torch.dtype):
    model = diffusion(ts.from_logits(Network(dtype), MASK), ts.template(LENGTH, MASK, [2], at=[1]))
    tilt = ts.Tilt(lambda x: (x[:, 0] == x[:, 2]).to(dtype), 0.3, draws=2)
    assert_proposal(ts.Steering(model, tilt, ts.Gradient()))
    assert_proposal(ts.Steering(model, tilt, ts.Amortised(ts.from_logits(Network(dtype, middle=torch.sin), MASK))))


def large_model() -> ts.Diffusion:
    """More sequences within reach than can be listed."""
    network = Network(torch.float32, 8, 12)
    steps = ts.uniform_steps(2)
    return ts.Diffusion(ts.from_logits(network, 11), ts.Ancestral(11), steps, ts.template(8, 11))


def test_a_large_model_is_held_to_draws():
    assert_proposal(ts.Steering(large_model()), rows=4)
    with raises("does not sample what it evaluates"):
        assert_proposal(ts.Steering(large_model(), None, Changed(lambda q, x, step: remade(Flat, q))), rows=4)


def test_a_proposal_is_tested_for_one_template_at_a_time():
    model = diffusion(ts.from_logits(Network(), MASK), torch.full((2, LENGTH), MASK))
    with pytest.raises(ValueError, match="one template at a time"):
        assert_proposal(ts.Steering(model))


@dataclass(frozen=True)
class Changed:
    """A proposal whose measures are changed."""

    change: Callable[[Any, Tensor, ts.Step], ts.Measure]
    base: ts.Proposal = field(default_factory=ts.FromModel)
    needs_gradient: bool = False
    meters: tuple[()] = ()

    def __call__(self, x: Tensor, evaluation: ts.Evaluation, step: ts.Step, model: ts.Model, twist: ts.Tilt | None):
        return self.change(self.base(x, evaluation, step, model, twist), x, step)


@dataclass(frozen=True)
class Mine:
    """A user's own measure, which does not say what it is made of: mass · q, drawn from `drawn`."""

    q: Any
    drawn: Any
    mass: float = 1.0
    sites: Tensor | None = None
    log_mass: Tensor | None = None

    def sample(self, generator: torch.Generator | None) -> Tensor:
        return self.drawn.sample(generator)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.q.log_prob(y) + math.log(self.mass)

    def take(self, rows: Tensor) -> Mine:
        return replace(self, q=self.q.take(rows), drawn=self.drawn.take(rows))


def forbid_token_0(q: ts.measure.Reveal) -> ts.measure.Reveal:
    return replace(
        q, log_x0=q.log_x0.map(lambda law: law.index_fill(-1, torch.tensor(0), -torch.inf))
    ).normalise_tokens()


def halve_a_list(q: ts.measure.Listed, x: Tensor, step: ts.Step) -> ts.measure.Listed:
    """Every other candidate is left out, the lists still normalised."""
    kept = torch.arange(len(q.owner)) % 2 == 0
    lists = int(q.owner.max()) + 1
    mass = torch.zeros(lists, dtype=q.log_p.dtype).index_add(0, q.owner[kept], q.log_p[kept].exp())
    return replace(
        q, candidates=q.candidates[kept], owner=q.owner[kept], log_p=q.log_p[kept] - mass[q.owner[kept]].log()
    )


def flatter(q: ts.measure.Reveal) -> ts.measure.Reveal:
    return replace(q, log_x0=q.log_x0.map(lambda law: 0.9 * law)).normalise_tokens()


def test_a_measure_of_ones_own_passes():
    proposal = Changed(lambda q, x, step: Mine(flatter(q), flatter(q)))
    assert_proposal(ts.Steering(Toy("B").model("remdm"), None, proposal))


@pytest.mark.parametrize(
    ("proposal", "match"),
    [
        # sampled is not what is evaluated
        (Changed(lambda q, x, step: remade(Flat, q)), "does not sample what it evaluates: z-score"),
        (Changed(lambda q, x, step: Mine(q, flatter(q))), "does not sample what it evaluates: z-score"),
        (Changed(lambda q, x, step: Mine(q, forbid_token_0(q))), "does not sample what it evaluates: z-score"),
        (Changed(lambda q, x, step: remade(Wild, q)), "step . draws states where log q is not finite"),
        # missing support; Steering itself looks at the first step of a Reveal
        (
            Changed(lambda q, x, step: forbid_token_0(q) if step.index == 1 else q),
            "step 1 does not cover p: it never makes .* of the moves that p makes.*no top-k",
        ),
        (
            Changed(lambda q, x, step: forbid_token_0(q).dense() if step.index == 1 else q),
            "step 1 does not cover p: it never",
        ),
        (Changed(lambda q, x, step: Mine(forbid_token_0(q), forbid_token_0(q))), "step 0 does not cover p"),
        (Changed(halve_a_list, ts.Enumerated()), "step 0 does not cover p"),
        # mass
        (
            Changed(lambda q, x, step: replace(q, log_stay=q.log_stay + 1e-6)),
            r"step 0 does not sum to one.*measure.normalise\(\)",
        ),
        (Changed(lambda q, x, step: ts.measure.Table(q.dense().log_p - 1e-6)), "step 0 does not sum to one"),
        (
            Changed(lambda q, x, step: ts.measure.Table(q.dense().log_p * (math.nan if step.index == 1 else 1.0))),
            "step 1 does not sum to one.*NaN",
        ),
        (
            Changed(lambda q, x, step: replace(q, log_p=q.log_p + 1e-6), ts.Enumerated()),
            "step 0 does not sum to one",
        ),
        (Changed(lambda q, x, step: Mine(q, q, 1.0 + 1e-6)), "step 0 does not sum to one"),
        (Changed(lambda q, x, step: remade(Doubled, q)), "dense table differ in log_prob"),
    ],
)
def test_broken_proposals_are_caught(proposal: ts.Proposal, match: str):
    steering = ts.Steering(Toy("B").model("remdm"), None, proposal)
    with raises(match):
        assert_proposal(steering)


class Holed(Mine):
    """The mass of the sequence 00..0 is moved to 11..1."""

    def log_prob(self, y: Tensor) -> Tensor:
        log_q, hole = super().log_prob(y), super().log_prob(torch.zeros_like(y))
        filled = torch.where((y == 1).all(-1), torch.logaddexp(log_q, hole), log_q)
        return torch.where((y == 0).all(-1), -torch.inf, filled)


def test_missing_support_too_rare_to_be_drawn_is_caught_by_listing():
    model = diffusion(ts.from_logits(Network(), MASK), num_steps=50)
    with raises(r"step 0 does not cover p: q·\(p/q\) is not p over all states"):
        assert_proposal(ts.Steering(model, None, Changed(lambda q, x, step: Holed(q, q))), rows=4)


def test_sites_of_its_own_that_p_does_not_share_are_caught():
    toy = Toy("B")
    reverse = Changed(lambda q, x, step: replace(q, sites=None), toy.amortised(own_order=True))
    steering = ts.Steering(toy.model("lowconf"), None, ts.FromModel())
    object.__setattr__(steering, "proposal", reverse)  # Steering itself refuses it, from the states it looks at
    with raises("does not cover p.*and the sites of p"):
        assert_proposal(steering)


class Forgetful(ts.Steering):
    """The classic: particles move by q and the weight forgets p/q."""

    def log_ratio(
        self, y: Tensor, x: Tensor, evaluation: ts.Evaluation, step: ts.Step, q: ts.Measure, log_q: Tensor | None = None
    ) -> Tensor:
        return torch.zeros(len(y), dtype=torch.float64)


def test_a_forgotten_ratio_is_caught():
    toy = Toy("B")
    with raises(r"q·\(p/q\) is not p over all states"):
        assert_proposal(Forgetful(toy.model("mdm"), toy.tilt("mdm"), ts.Gradient()))


# ---- rewards


def smooth(x: Tensor) -> Tensor:
    """Differentiable, on ids or one-hots."""
    x = x if x.is_floating_point() else one_hot(x, VOCAB).double()
    return (x[:, :-1] * x[:, 1:]).sum((1, 2)) + x[..., 1].sum(-1)


def forbidden(x: Tensor) -> Tensor:
    return torch.where(x[:, 0] == 0, -torch.inf, smooth(x))


def never_masked(x: Tensor) -> Tensor:
    assert not (x == 1).any()
    return x.float().mean(-1)


def test_rewards():
    assert_reward(smooth, VOCAB, LENGTH, differentiable=True)
    assert_reward(forbidden, VOCAB, LENGTH, rows=64)
    assert_reward(lambda x: smooth(x).float(), VOCAB, LENGTH, differentiable=True)
    assert_reward(never_masked, VOCAB, LENGTH, mask_id=1, rows=64)
    assert_reward(Toy("B").reward, 3, 3)
    with pytest.raises(AssertionError):
        never_masked(torch.tensor([[1]]))


def test_a_hard_constraint_may_be_differentiable_where_it_is_met():
    def reward(x: Tensor) -> Tensor:
        r = smooth(x)
        return torch.where(r > 0.5, r, -torch.inf)

    assert_reward(reward, VOCAB, LENGTH, differentiable=True, rows=32)


def of_ids(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x if x.is_floating_point() else one_hot(x, VOCAB).double())


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        (lambda x: smooth(x).unsqueeze(-1), r"each of 8 sequences, shape \(8,\), got \(8, 1\)"),
        (lambda x: smooth(x).sum(), r"each of 8 sequences, shape \(8,\), got \(\)"),
        (lambda x: smooth(x).squeeze(), r"each of 1 sequences, shape \(1,\), got \(\): sum or squeeze"),
        (lambda x: 1.0, r"a tensor of shape \(8,\), got float"),
        (lambda x: x.sum(-1), "gives torch.int64.*use .float()"),
        (lambda x: (smooth(x) - 1.5).sqrt(), "gives NaN or \\+inf for .* of 8 .*-inf for a hard constraint"),
        (lambda x: -forbidden(x % 2), "gives NaN or \\+inf"),
        (lambda x: smooth(x) + 1e-3 * torch.rand(len(x)), "reward is not deterministic.*network.eval()"),
        (lambda x: smooth(x) - smooth(x).mean(), "reward mixes rows"),
        (lambda x: smooth(x).cumsum(0), "reward mixes rows"),
        (lambda x: smooth(x) + 1e-3 * x.is_floating_point(), "differs between ids and their one-hots"),
        (lambda x: smooth(x).expand(2, -1).T if x.is_floating_point() else smooth(x), r"fails on one-hots.*\(8, 2\)"),
        (lambda x: x.double().mean((1, 2)) if x.dim() == 3 else smooth(x), "differs between ids and their one-hots"),
        (of_ids(lambda x: smooth(x.round().detach())), "zero everywhere"),
        (of_ids(lambda x: smooth(x) + x.prod(-1).sqrt().sum(-1)), "not finite.*`where`"),
    ],
)
def test_broken_rewards_are_caught(reward: Callable[[Tensor], Tensor], match: str):
    with raises(match):
        assert_reward(reward, VOCAB, LENGTH, differentiable=True)


def test_a_reward_in_low_precision_passes_with_a_tolerance():
    def reward(x: Tensor) -> Tensor:
        return smooth(x) + 1e-3 * len(x)

    with raises("mixes rows"):
        assert_reward(reward, VOCAB, LENGTH)
    assert_reward(reward, VOCAB, LENGTH, tolerance=0.1)


# ---- resamplers


@pytest.mark.parametrize("name", ["multinomial", "stratified", "systematic", "residual", "ssp"])
def test_resamplers_hold(name: str) -> None:
    assert_resampler(getattr(ts.resampling, name))
    assert_resampler(ts.resampling.partial(getattr(ts.resampling, name), 0.5))


@pytest.mark.parametrize(
    ("resampler", "match"),
    [
        (lambda w, g: (ts.resampling.systematic(w, g)[0], torch.zeros_like(w)), "z-score.*mean weight"),
        (lambda w, g: (ts.resampling.systematic(w, g)[0] - 1, ts.resampling.systematic(w, g)[1]), r"outside 0\.\.5"),
        (lambda w, g: (ts.resampling.systematic(w, g)[0][:, 0], w), "Both must be"),
        (ts.resampling.heaviest, "z-score"),
    ],
)
def test_broken_resamplers_are_caught(resampler, match: str) -> None:
    with raises(match):
        assert_resampler(resampler)


def test_writing_to_what_is_given_is_caught() -> None:
    with raises("writes to the sequences"):
        assert_reward(lambda x: x.double().sum(-1) + 0 * x.zero_().sum(-1), VOCAB, LENGTH)


# ---- all of them


def test_laws_leave_the_global_generator_alone_and_repeat_themselves():
    toy = Toy("A")
    asked: list[Tensor] = []

    def reward(x: Tensor) -> Tensor:
        asked.append(x)
        return x.double().sum(-1)

    before = torch.get_rng_state()
    for _ in range(2):
        assert_reward(reward, 3, 2, seed=3)
    assert_denoiser(toy.model("mdm"))
    assert_kernel(ts.Ranked(2), 3, num_steps=2)
    assert_proposal(ts.Steering(toy.model("mdm"), toy.tilt("mdm"), ts.Gradient()), rows=2)
    assert torch.equal(before, torch.get_rng_state())
    half = len(asked) // 2
    assert all(torch.equal(a, b) for a, b in zip(asked[:half], asked[half:], strict=True))
    assert_reward(reward, 3, 2, seed=4)
    assert not torch.equal(asked[-half], asked[0])
