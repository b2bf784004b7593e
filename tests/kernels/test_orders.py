"""Orders used in practice: golden case 21, exact laws, and unbiased weights for every order and proposal."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from checks import POWERS, Answer, answer, judge, trial
from extended import MaskGITExtended
from narrow import some, untyped
from torch import Generator, Tensor
from toys import Toy, case

import tokensteer as ts
from tokensteer import testing
from tokensteer.core.categorical.sites import by_site
from tokensteer.core.kernels.blocks import Blocks
from tokensteer.core.kernels.choices import Ranking, Remasking, as_tensor
from tokensteer.core.kernels.masked import ConfidenceRemask, Window, carried_confidence, remdm_loop
from tokensteer.core.kernels.maskgit import MaskGIT, RankedReveal
from tokensteer.core.kernels.ranked import Ranked
from tokensteer.core.numerics.rows import support
from tokensteer.testing import TableDenoiser, enumerate_steering

A, B, C = Toy("A"), Toy("B"), Toy("C")
M = B.mask_id


def model_of(kernel: Any, num_steps: int = 3, toy: Toy = B, joint: str = "p1") -> ts.Diffusion:
    return replace(toy.model("mdm", joint), kernel=kernel, steps=ts.uniform_steps(num_steps))


def tilt_of(toy: Toy = B) -> ts.Tilt:
    return toy.tilt("mdm", ramp=ts.ramps.linear)


def check(path: ts.Steering, truth: Answer | None = None, **options: Any) -> None:
    outcome = trial(path, truth or answer(path.model, path.twist, path.proposal), **options)
    assert outcome.unbiased, str(outcome)


# ---- MaskGIT: golden case 21 and the law by brute force


def golden() -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
    """The case, the all-mask state, and the laws mu and mu_q there."""
    x = ts.template(B.length, M).unsqueeze(0)
    return case(21)["outputs"], x, B.model("mdm").predict(x, 1.0).laws().dense(), B.amortised().denoiser(x, 1.0)


STEP = ts.uniform_steps(2)[0]
KEEP_TWO = MaskGIT(M, count=ts.ranked.fixed(2))


def test_golden_maskgit() -> None:
    out, x, log_p, log_q = golden()
    own_p, own_q = KEEP_TWO(x, log_p, STEP), KEEP_TWO(x, log_q, STEP)
    shared = KEEP_TWO(x, log_p, STEP, own_q.sites)
    for entry in out["entries"]:
        y = x.index_put((torch.zeros(2).long(), torch.tensor(entry["kept"])), torch.tensor(entry["tokens"]))
        for measure, name in ((own_p, "p_own_conf"), (own_q, "q_own_conf"), (shared, "p_under_q_conf")):
            assert abs(float(measure.log_prob(y).exp()) - entry[name]) <= 1e-6
        assert abs(float(naive(shared, y).exp() / naive(own_q, y).exp()) - entry["naive_ratio_product"]) <= 1e-6
    total = shared.take(torch.zeros(len(B.states)).long()).log_prob(B.states).exp().sum()
    assert abs(float(total) - out["sum_p_under_q_conf"]) <= 1e-6


def naive(measure: RankedReveal, y: Tensor) -> Tensor:
    """What is often written: the probabilities of the tokens kept, as if their sites had not been chosen by them."""
    log_mu = measure.log_x0.dense().gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return torch.where(y == measure.mask_id, 0.0, log_mu).sum(-1)


def test_naive_ratio_is_far_off() -> None:
    """sum_y q(y) · naive ratio is a half where it should be one."""
    _, x, log_p, log_q = golden()
    rows, y = torch.zeros(len(B.states)).long(), B.states
    q = KEEP_TWO(x, log_q, STEP).take(rows)
    p = KEEP_TWO(x, log_p, STEP, some(q.sites)[rows[:1]]).take(rows)
    assert torch.isclose(
        (q.log_prob(y) + p.log_prob(y) - q.log_prob(y)).nan_to_num(-torch.inf).exp().sum(), torch.ones(()).double()
    )
    assert abs(float((q.log_prob(y) + naive(p, y) - naive(q, y)).exp().sum()) - 1) > 0.4


def brute_force(measure: RankedReveal, row: int) -> dict[tuple[int, ...], float]:
    """The law of one row: every draw at the candidate sites, sorted by score and then by index."""
    law: dict[tuple[int, ...], float] = {}
    sites = measure.candidates[row].nonzero().flatten().tolist()
    mu, scores = measure.log_x0.dense()[row].exp(), measure.sites.scores()[row]
    for tokens in itertools.product(range(mu.shape[-1]), repeat=len(sites)):
        drawn = dict(zip(sites, tokens, strict=True))
        best = sorted(sites, key=lambda l: (-float(scores[l, drawn[l]]), l))[: int(measure.count[row])]
        y = measure.x[row].tolist()
        for l in best:
            y[l] = drawn[l]
        p = math.prod(float(mu[l, v]) for l, v in drawn.items())
        law[tuple(y)] = law.get(tuple(y), 0.0) + p
    return law


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask_id", [0, 2, 3])
def test_maskgit_law_with_ties_and_impossible_tokens(mask_id: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(mask_id)
    rows, length, vocab_size = 12, 3, 4
    # Few different numbers make many ties, between sites and tokens, also at -inf.
    levels = torch.tensor([-torch.inf, 0.0, 1.0, 2.0], dtype=dtype)
    tokens = torch.arange(vocab_size) != mask_id

    def table() -> Tensor:
        picked = levels[torch.randint(4, (rows, length, vocab_size), generator=generator)]
        picked[..., (mask_id + 1) % vocab_size] = 0.0
        return torch.where(tokens, picked, -torch.inf).log_softmax(-1)

    x = torch.where(torch.rand(rows, length, generator=generator) < 0.8, mask_id, (mask_id + 1) % vocab_size)
    log_x0, conf = table(), table()
    for count in (0, 1, 2, 5):
        kernel = MaskGIT(mask_id, count=lambda step, masked, k=count: torch.full_like(masked, k))
        measure = kernel(x, log_x0, STEP, kernel.choose(x, conf, STEP))
        states = testing.all_sequences(vocab_size, length)
        for row in range(rows):
            law = brute_force(measure, row)
            ours = measure.take(torch.full((len(states),), row)).log_prob(states).exp()
            theirs = torch.tensor([law.get(tuple(y), 0.0) for y in states.tolist()], dtype=dtype)
            assert torch.allclose(ours, theirs, atol=1e-6 if dtype == torch.float32 else 1e-12)
        y = measure.sample(generator)
        assert (measure.log_prob(y) > -torch.inf).all()


# ---- every order with every proposal, against enumeration

COUNTS = {"evenly": ts.ranked.evenly, "fixed": ts.ranked.fixed(1), "cosine": ts.ranked.cosine_count}
CONFIDENCES = {"max": ts.ranked.max_probability, "entropy": ts.ranked.negative_entropy, "margin": ts.ranked.margin}
ANCESTRAL = ts.Ancestral(M)
REMASKING = ts.Ancestral(M, sigma=ts.Rescale(0.8))
LOOP = remdm_loop(M, t_on=0.75, t_off=0.25, alpha_on=0.5, sigma=ts.Cap(0.4))
ORDERS: dict[str, tuple[Any, int]] = {
    "entropy": (Ranked(M, ts.ranked.fixed(1), ts.ranked.negative_entropy), 2),
    "margin": (Ranked(M, ts.ranked.cosine_count, ts.ranked.margin), 2),
    "threshold": (Ranked(M, ts.ranked.fixed(1), threshold=math.log(0.5)), 3),
    "left to right": (ts.LeftToRight(M), 3),
    "cursors": (ts.LeftToRight(M), 2),
    "maskgit": (MaskGIT(M, count=ts.ranked.fixed(1)), 3),
    "maskgit-cosine": (MaskGIT(M), 2),
    "blocks": (Blocks(ANCESTRAL, size=1, length=3, num_steps=6), 6),
    "blocks-remasking": (Blocks(REMASKING, size=3, length=3, num_steps=3), 3),
    "loop": (LOOP, 4),
    "confidence": (ConfidenceRemask(REMASKING, carried=False), 4),
}
PROPOSALS: dict[str, ts.Proposal] = {
    "base": ts.FromModel(),
    "gradient": ts.Gradient(),
    "learned": B.amortised(),
    "own order": B.amortised(own_order=True),
}


@cache
def truth_of(name: str, chooses: str | None = None) -> Answer:
    """The target of an order, which depends on the proposal if that one chooses the sites."""
    return answer(model_of(*ORDERS[name]), tilt_of(), PROPOSALS[chooses] if chooses else None)


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_unbiased(name: str, proposal: str) -> None:
    # Steep gradients make heavy tails, which need more populations to be judged.
    populations = 4096 if proposal == "gradient" else 2048
    truth = truth_of(name, proposal if proposal == "own order" else None)
    path = ts.Steering(model_of(*ORDERS[name]), tilt_of(), PROPOSALS[proposal])
    check(path, truth, populations=populations)


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Guided(), ts.Optimal()], ids=["base", "cfg", "optimal"])
@pytest.mark.parametrize(
    "name", ["entropy", "left to right", "maskgit", "maskgit-cosine", "blocks", "loop", "confidence"]
)
def test_products_are_unbiased(name: str, proposal: ts.Proposal) -> None:
    kernel, num_steps = ORDERS[name]
    model = ts.Product((model_of(kernel, num_steps), model_of(kernel, num_steps, joint="p2")), POWERS)
    # Optimal is given x_t in steps that are corrected for remasking, which makes heavy tails.
    populations = 4096 if isinstance(proposal, ts.Optimal) else 1024
    check(ts.Steering(model, tilt_of(), proposal), populations=populations)


@pytest.mark.fast
@pytest.mark.parametrize("name", ORDERS)
def test_proposals_hold_their_laws(name: str) -> None:
    kernel, num_steps = ORDERS[name]
    for proposal in ("gradient", "learned"):
        testing.assert_proposal(ts.Steering(model_of(kernel, num_steps), tilt_of(), PROPOSALS[proposal]), rows=8)


def test_product_of_maskgit_by_hand() -> None:
    """Tokens kept count with the product's mass, those dropped with its normalised law."""
    kernel = MaskGIT(M, count=ts.ranked.fixed(1))
    model = ts.Product((model_of(kernel), model_of(kernel, joint="p2")), POWERS)
    x = ts.template(B.length, M).unsqueeze(0)
    prediction = model.predict(x, 1.0)
    combined = model.combined(prediction).dense()
    ranking = kernel.choose(x, prediction.laws(), model.steps[0])
    normalised = RankedReveal(x, by_site(combined.log_softmax(-1)), ranking, torch.tensor([1]), M)
    states, rows = B.states, torch.zeros(len(B.states)).long()
    log_p = model.log_prob(states, x[rows], prediction.take(rows), model.steps[0], ranking[rows])
    mass = combined.logsumexp(-1)[0]
    for y, ours in zip(states, log_p.exp(), strict=True):
        by_hand = brute_force(normalised, 0).get(tuple(y.tolist()), 0.0) * float(mass[y != M].sum().exp())
        assert abs(float(ours) - by_hand) < 1e-12


def test_enumerated_proposal() -> None:
    """The locally optimal proposal needs the law itself; then all weights at a state are equal."""
    path = ts.Steering(model_of(MaskGIT(M, count=ts.ranked.fixed(1))), tilt_of(), ts.Enumerated())
    exact = enumerate_steering(path)
    for index, moves in enumerate(exact.moves):
        weight = exact.log_increment(index)
        highest = torch.full((len(exact.states),), -torch.inf).double().scatter_reduce(0, moves.row, weight, "amax")
        assert torch.allclose(weight, highest[moves.row])
    check(path)


LARGE = {
    "entropy": Ranked(C.mask_id, ts.ranked.evenly, ts.ranked.negative_entropy),
    "maskgit": MaskGIT(C.mask_id),
    "blocks": Blocks(MaskGIT(C.mask_id), size=2, length=4, num_steps=4),
    "blocks-ranked": Blocks(Ranked(C.mask_id, ts.ranked.fixed(1)), size=2, length=4, num_steps=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient(clip=2.0)], ids=["base", "gradient"])
@pytest.mark.parametrize("name", LARGE)
def test_larger_toy(name: str, proposal: ts.Proposal) -> None:
    check(ts.Steering(model_of(LARGE[name], 4, C), tilt_of(C), proposal), populations=1024, particles=16)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_ranked_kernels(confidence: str, count: str) -> None:
    kernel = Ranked(4, COUNTS[count], CONFIDENCES[confidence])
    testing.assert_kernel(kernel, 5, num_steps=3)
    testing.assert_kernel(Blocks(kernel, 2, 4, 4), 5)
    testing.assert_kernel(Blocks(kernel, 1, 4, 4, start=2), 5)


@pytest.mark.parametrize("count", COUNTS)
def test_left_to_right_is_a_kernel(count: str) -> None:
    testing.assert_kernel(ts.LeftToRight(4, COUNTS[count]), 5, num_steps=3)
    testing.assert_kernel(Blocks(ts.LeftToRight(4, COUNTS[count]), 2, 4, 4), 5)


@pytest.mark.fast
@pytest.mark.parametrize(("length", "num_steps"), [(12, 12), (12, 3), (12, 5), (13, 6), (7, 20), (1, 4)])
def test_cursors_open_the_first_sites_of_equal_parts(length: int, num_steps: int) -> None:
    """A site in three is given. All masked ones open, as many in each step as `evenly` says, from left to right."""
    kernel, x = ts.LeftToRight(0), torch.zeros(2, length).long()
    x[1, 1::3] = 1
    when = torch.full(x.shape, -1)
    for step in ts.uniform_steps(num_steps):
        masked = (x == 0).sum(-1)
        opens = kernel.choose(x, torch.zeros(2, length, 2), step)
        assert torch.equal(opens.sum(-1), ts.ranked.evenly(step, masked).clamp(max=masked))
        assert (x[opens] == 0).all()
        first = (x == 0).int().argmax(-1)[masked > 0]
        assert opens[masked > 0].gather(-1, first.unsqueeze(-1)).all()
        when[opens], x = step.index, x.masked_fill(opens, 1)
    assert (x == 1).all()
    if num_steps >= length:  # one cursor
        assert (when[0].diff() > 0).all()
    elif length % num_steps == 0:  # several, at equal distances
        assert torch.equal(when[0], torch.arange(length) % num_steps)


@pytest.mark.fast
def test_left_to_right_is_one_site_blocks() -> None:
    """With as many steps as sites it is `FirstHitting` in blocks of one site."""
    length, x = 4, torch.tensor([[3, 3, 3, 3], [1, 3, 3, 3], [1, 2, 3, 3], [1, 2, 0, 3]])
    log_p = torch.randn(4, length, 4, generator=torch.Generator().manual_seed(0)).double()
    log_p[..., 3] = -torch.inf
    log_p = log_p.log_softmax(-1)
    blocks = Blocks(ts.FirstHitting(3), 1, length, length)
    states = testing.all_sequences(4, length)
    for row, step in enumerate(ts.uniform_steps(length)):
        ours, theirs = (
            kernel(x[row : row + 1], log_p[row : row + 1], step).take(torch.zeros(len(states)).long()).log_prob(states)
            for kernel in (ts.LeftToRight(3), blocks)
        )
        assert torch.equal(ours.exp(), theirs.exp())


def test_remdm_loop_keeps_the_marginals() -> None:
    testing.assert_kernel(remdm_loop(4, 0.7, 0.3, 0.6, ts.Cap(0.2)), 5, num_steps=10)
    assert [LOOP.remasks(step) for step in ts.uniform_steps(4)] == [False, True, True, False]


def test_a_window_holds_only_steps_that_lie_within() -> None:
    """Steps of a tenth: those that cross an edge are plain, on either side."""
    steps = ts.uniform_steps(10)
    window = Window(lambda step, bound: 0.1, t_on=0.75, t_off=0.25)
    assert [step.index for step in steps if window(step, 1.0) > 0] == [3, 4, 5, 6]  # from 0.7 to 0.3
    whole = Window(lambda step, bound: 0.1, t_on=1.0, t_off=0.0)
    assert all(whole(step, 1.0) == 0.1 for step in steps)


def test_the_cosine_pace_by_hand() -> None:
    """Of 100 sites a share sin(pi/2 · t) is masked at t: 0.924, 0.707, 0.383, 0 of all, and no site is half open."""
    left, opened = torch.tensor([100, 1, 0]), []
    for step in ts.uniform_steps(4):
        count = ts.ranked.cosine_count(step, left)
        opened.append(int(count[0]))
        assert count[1] == 1  # at least one
        left = torch.cat([left[:1] - count[:1], left[1:]])
    assert opened == [8, 22, 33, 37]


def test_low_confidence_is_a_special_case() -> None:
    laws = [enumerate_steering(ts.Steering(model_of(kernel(M), 2))).log_law for kernel in (Ranked, ts.Ranked)]
    assert torch.equal(*laws)


def test_single_precision() -> None:
    """A model in float32 samples and weighs by the same float32 numbers; the truth is that of float64."""
    single = Toy("B", torch.float32)
    path = ts.Steering(model_of(MaskGIT(M), 3, single), tilt_of(single), single.amortised())
    assert path.model.dtype == torch.float32
    check(path, answer(model_of(MaskGIT(M), 3), tilt_of()))


@pytest.mark.parametrize("name", ["margin", "maskgit", "blocks", "confidence"])
def test_prompts(name: str) -> None:
    kernel, num_steps = ORDERS[name]
    prompt = ts.template(B.length, M, [2], at=[1])
    path = ts.Steering(replace(model_of(kernel, num_steps), template=prompt), tilt_of(), B.amortised())
    check(path)
    for record in ts.sweep(path, 64, generator=torch.Generator().manual_seed(0)):
        assert (record.x[..., 1] == 2).all()


# ---- MaskGIT: the naive weight, the extended state, the noise


@dataclass(frozen=True)
class NaiveReveal:
    """The mutant: the right draw with the naive weight."""

    ranked: RankedReveal

    @property
    def sites(self) -> Ranking:
        return self.ranked.sites

    def sample(self, generator: Generator | None) -> Tensor:
        return self.ranked.sample(generator)

    def log_prob(self, y: Tensor) -> Tensor:
        opened = y.masked_fill(~self.ranked.candidates, M)
        return naive(self.ranked, opened)

    def pin(self, fixed: Tensor) -> NaiveReveal:
        return NaiveReveal(self.ranked.pin(fixed))


@dataclass(frozen=True)
class NaiveMaskGIT:
    marginal: MaskGIT
    mask_id: int = M

    def choose(self, x: Tensor, log_x0: Tensor, step: ts.Step) -> Ranking:
        return self.marginal.choose(x, log_x0, step)

    def __call__(self, x: Tensor, log_x0: Tensor, step: ts.Step, sites: Ranking | None = None) -> NaiveReveal:
        return NaiveReveal(self.marginal(x, log_x0, step, sites))


def test_naive_weight_is_caught() -> None:
    path = ts.Steering(model_of(NaiveMaskGIT(MaskGIT(M)), 2), None, B.amortised())
    outcome = trial(path, answer(model_of(MaskGIT(M), 2)))
    assert not outcome.unbiased
    assert abs(outcome.z) > 10


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_extended_state(proposal: str, blocks: bool) -> None:
    """The same target as with the marginal weight."""
    marginal: Any = MaskGIT(M, count=ts.ranked.fixed(1))
    extended: Any = MaskGITExtended(marginal)
    num_steps = 3
    if blocks:
        marginal, extended = (Blocks(k, size=3, length=3, num_steps=3) for k in (marginal, extended))
    q = PROPOSALS[proposal]
    truth = answer(model_of(marginal, num_steps), tilt_of(), q)
    check(ts.Steering(model_of(extended, num_steps), tilt_of(), q), truth)


def test_extended_state_of_a_product() -> None:
    truth = answer(ts.Product((model_of(MaskGIT(M)), model_of(MaskGIT(M), joint="p2")), POWERS), tilt_of())
    kernel = MaskGITExtended(MaskGIT(M))
    model = ts.Product((model_of(kernel), model_of(kernel, joint="p2")), POWERS)
    check(ts.Steering(model, tilt_of(), ts.Guided()), truth)


def test_marginal_weights_vary_less() -> None:
    def spread(kernel: Any) -> float:
        path = ts.Steering(model_of(kernel), None, B.amortised())
        return float(ts.smc(path, 20_000, when=ts.triggers.never, generator=seeded(0)).log_w.exp().var())

    kernel = MaskGIT(M, count=ts.ranked.fixed(1))
    assert spread(kernel) < spread(MaskGITExtended(kernel))


def test_extended_state_does_not_weigh_what_it_did_not_draw() -> None:
    _, x, log_p, _ = golden()
    measure = MaskGITExtended(KEEP_TWO)(x, log_p, STEP)
    with pytest.raises(ValueError, match="only weighs moves that it drew"):
        measure.log_prob(x)
    y = measure.sample(seeded(0))
    assert measure.log_prob(y) > -torch.inf
    assert measure.log_prob((y + 1) % 3) == -torch.inf


def seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def maskgit_by_hand(temperature: float, num_steps: int, rows: int) -> Tensor:
    """The shares of clean sequences when MaskGIT is written out: a token for every masked site, and the one of highest
    log-probability + temperature · s · Gumbel noise is kept in each step."""
    generator, denoiser, here = seeded(2), TableDenoiser(B.joint("p1")), torch.arange(rows)
    x = torch.full((rows, B.length), M)
    for k in range(num_steps):
        s = 1 - (k + 1) / num_steps
        p = denoiser(x, 0.0).exp()
        tokens = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(x.shape)
        noise = -torch.empty(x.shape, dtype=p.dtype).exponential_(generator=generator).log()
        score = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log() + temperature * s * noise
        best = score.masked_fill(x != M, -torch.inf).argmax(-1)
        x[here, best] = tokens[here, best]
    place = B.tokens ** torch.arange(B.length - 1, -1, -1)
    return torch.bincount((x * place).sum(-1), minlength=len(B.clean)).double() / rows


@pytest.mark.parametrize("proposal", [ts.FromModel(), B.amortised()], ids=["base", "learned"])
@pytest.mark.parametrize("wrap", [lambda k: k, MaskGITExtended], ids=["marginal", "extended"])
@pytest.mark.slow
def test_noise_is_shared(wrap: Any, proposal: ts.Proposal) -> None:
    """With annealed noise: log Z = 0 without a tilt, and any proposal has the law of MaskGIT as it is written."""
    rows, p = 50_000, maskgit_by_hand(2.0, 3, 50_000)
    model = model_of(wrap(MaskGIT(M, count=ts.ranked.fixed(1), temperature=2.0)))
    result = ts.smc(ts.Steering(model, None, proposal), 8, 4096, when=ts.triggers.always, generator=seeded(4))
    outcome = judge(result.samples, result.log_w, Answer(0.0, p, B.clean))
    assert abs(outcome.z) < 4
    error = (outcome.masses.var(0) / len(result.log_w) + p * (1 - p) / rows).sqrt()
    assert ((outcome.masses.mean(0) - p) / error).abs().max() < 4.5
    still = enumerate_steering(ts.Steering(model_of(MaskGIT(M, count=ts.ranked.fixed(1))))).model_law
    assert (p - still).abs().sum() / 2 > 0.02  # the noise does something


def test_noise_is_part_of_the_state() -> None:
    """It is drawn anew for the children of a step, the same for twins; and what hides a state cannot be enumerated."""
    path = ts.Steering(model_of(MaskGIT(M, temperature=1.0)))
    records = list(ts.sweep(path, 16, when=ts.triggers.always, generator=seeded(0)))
    memories = [some(r.evaluation.memory) for r in records[:-1]]
    assert all(m.shape == (16, 3) for m in memories)
    assert not torch.equal(memories[0], memories[1])
    with pytest.raises(ValueError, match="has a memory"):
        enumerate_steering(path)
    with pytest.raises(ValueError, match="cannot pin a kernel with a memory"):
        ts.particle_gibbs(path, 1, 4, generator=seeded(0))


def test_noise_is_annealed_by_the_time_that_a_step_leads_to() -> None:
    """temperature · s · noise at masked sites: none at the last step, which keeps the likeliest tokens."""
    _, _, log_p, _ = golden()
    kernel, x = MaskGIT(M, temperature=2.0), torch.tensor([[M, 1, M]])
    noise = torch.tensor([[0.3, 5.0, -0.7]], dtype=torch.float64)
    for step, scale in zip(ts.uniform_steps(4), (1.5, 1.0, 0.5, 0.0), strict=True):
        lift = kernel.recall(x, log_p, step, noise).lift
        assert lift.tolist() == [[pytest.approx(0.3 * scale), -math.inf, pytest.approx(-0.7 * scale)]]


@pytest.mark.parametrize("proposal", ["base", "gradient", "learned"])
@pytest.mark.slow
def test_noise_inside_blocks_and_with_a_tilt(proposal: str) -> None:
    """Two proposals that must agree on log Z, one the model itself."""
    kernel = Blocks(MaskGIT(M, count=ts.ranked.fixed(1), temperature=1.0), 3, 3, 3)
    log_z = [
        ts.smc(
            ts.Steering(model_of(kernel), tilt_of(), q), 16, 2000, when=ts.triggers.always, generator=seeded(9)
        ).log_z.exp()
        for q in (ts.FromModel(), PROPOSALS[proposal])
    ]
    gap = log_z[0].mean() - log_z[1].mean()
    error = (log_z[0].var() / 2000 + log_z[1].var() / 2000).sqrt()
    assert abs(gap / error) < 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MaskGIT(M, untyped(2)), "count must be a function"),
        (lambda: MaskGIT(M, temperature=-1.0), "finite and not negative"),
        (lambda: MaskGIT(M, temperature=math.nan), "finite and not negative"),
        (lambda: KEEP_TWO(*golden()[1:3], STEP, golden()[1] == M), r"scores \(P, L, V\)"),
    ],
)
def test_what_maskgit_cannot_mean_is_refused(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()


def test_a_choice_by_another_kind_of_kernel_is_refused() -> None:
    _, x, log_p, _ = golden()
    ranking, remasking, opened = (
        kernel.choose(x, log_p, STEP) for kernel in (KEEP_TWO, ConfidenceRemask(REMASKING), Ranked(M))
    )
    for kernel, wrong in ((Ranked(M), ranking), (Ranked(M), remasking), (ConfidenceRemask(REMASKING), ranking)):
        with pytest.raises(TypeError, match="chosen by another kind of kernel"):
            kernel(x, log_p, STEP, wrong)
    with pytest.raises(TypeError, match=r"scores \(P, L, V\).*got Remasking"):
        KEEP_TWO(x, log_p, STEP, remasking)
    assert isinstance(remasking, Remasking)
    for kernel, sites in ((KEEP_TWO, ranking), (ConfidenceRemask(REMASKING), remasking), (Ranked(M), opened)):
        given = [kernel(x, log_p, STEP, form).dense().log_p for form in (sites, as_tensor(sites))]
        assert torch.equal(*given)


# ---- blocks


def test_blocks_of_one_site_are_autoregressive() -> None:
    """One step for each site from left to right is the chain rule: exact for an exact denoiser."""
    for inner in (ANCESTRAL, Ranked(M), MaskGIT(M)):
        exact = enumerate_steering(ts.Steering(model_of(Blocks(inner, 1, 3, 3), 3)))
        assert torch.allclose(exact.model_law, B.joint("p1").flatten())


@pytest.mark.parametrize(
    "inner", [ANCESTRAL, REMASKING, Ranked(M), MaskGIT(M), ConfidenceRemask(REMASKING, carried=False)], ids=type
)
def test_one_block_is_the_kernel_itself(inner: Any) -> None:
    laws = [enumerate_steering(ts.Steering(model_of(k, 4), tilt_of())).log_law for k in (inner, Blocks(inner, 3, 3, 4))]
    assert torch.equal(*laws)


CONFIDENT = ConfidenceRemask(ts.Ancestral(4, sigma=ts.Cap(0.5)), carried=False)


@pytest.mark.parametrize("inner", [ts.Ancestral(4), Ranked(4), MaskGIT(4), CONFIDENT], ids=type)
def test_blocks_open_from_left_to_right(inner: Any) -> None:
    path = ts.Steering(model_of(Blocks(inner, 2, 4, 6), 6, C), tilt_of(C))
    for record in ts.sweep(path, 256, generator=seeded(0)):
        done = 0 if record.step is None else record.step.index + 1
        masked = record.x == C.mask_id
        assert done < 3 or not masked[..., :2].any()
        assert done > 3 or masked[..., 2:].all()


def test_block_law_is_that_of_its_blocks() -> None:
    """Two blocks by hand: the second block's kernel runs on a canvas with the first filled in."""
    inner = MaskGIT(4, count=ts.ranked.fixed(1))
    exact = enumerate_steering(ts.Steering(model_of(Blocks(inner, 2, 4, 4), 4, C)))
    grid, x = ts.uniform_steps(2), C.clean
    predict = C.model("mdm").predict
    log_law = torch.zeros(len(x)).double()
    for lo in (0, 2):
        start = x.clone()
        start[:, lo:] = 4
        ways = []
        for first in (lo, lo + 1):  # which of the two sites opens first
            middle = start.clone()
            middle[:, first] = x[:, first]
            log_way = torch.zeros(len(x)).double()
            for step, here, there in zip(grid, (start, middle), (middle, None), strict=True):
                there = there if there is not None else torch.cat([x[:, : lo + 2], start[:, lo + 2 :]], -1)
                measure = inner(here[:, lo : lo + 2], predict(here, 1.0).laws().columns(slice(lo, lo + 2)), step)
                log_way = log_way + measure.log_prob(there[:, lo : lo + 2])
            ways.append(log_way)
        log_law = log_law + torch.stack(ways).logsumexp(0)
    assert torch.allclose(exact.model_law, log_law.exp())


def test_what_is_before_the_start_belongs_to_the_first_block() -> None:
    kernel = Blocks(ANCESTRAL, 2, 7, 4, start=3)
    assert [kernel.within(step)[0] for step in ts.uniform_steps(4)] == [slice(0, 5)] * 2 + [slice(5, 7)] * 2


@pytest.mark.slow
def test_blocks_behind_a_prompt_keep_their_weights_right() -> None:
    path = ts.Steering(model_of(Blocks(MaskGIT(4), 1, 4, 4, start=2), 4, C), tilt_of(C), ts.Gradient(clip=2.0))
    check(path, populations=8192, particles=16)  # so many that its rare sequences are hit often enough for a z-score


def test_block_errors() -> None:
    with pytest.raises(ValueError, match="start must be a site"):
        Blocks(ANCESTRAL, 1, 3, 3, start=3)
    with pytest.raises(ValueError, match="behind the first 2 sites"):
        Blocks(ANCESTRAL, 2, 5, 4, start=2)
    with pytest.raises(ValueError, match="does not divide"):
        Blocks(ANCESTRAL, 2, 3, 4)
    with pytest.raises(ValueError, match="multiple of 3"):
        Blocks(ANCESTRAL, 1, 3, 4)
    with pytest.raises(ValueError, match="made for 6 steps"):
        ts.pretrained(model_of(Blocks(ANCESTRAL, 1, 3, 6), 3))(2)
    with pytest.raises(ValueError, match="length 4"):
        ts.pretrained(model_of(Blocks(ANCESTRAL, 2, 4, 4), 4))


# ---- ReMDM


def test_confidence_remasking_by_hand() -> None:
    kernel = ConfidenceRemask(REMASKING, carried=False)
    x, step = torch.tensor([[0, M, 2]]), ts.uniform_steps(4)[1]
    log_x0 = B.model("mdm").predict(x, step.t).laws().dense()
    psi = log_x0[0, [0, 2], [0, 2]].exp()
    sigma = REMASKING.remasking(step) * torch.softmax(-psi, 0)
    table = kernel(x, log_x0, step).dense().log_p[0].exp()
    assert torch.allclose(table[[0, 2], M], sigma)
    assert torch.allclose(table[1], ANCESTRAL(x, log_x0, step).dense().log_p[0, 1].exp())
    assert torch.allclose(table.sum(-1), torch.ones(3).double())


def carried_law(num_steps: int, eta: float, sharpness: float, kl: float) -> Answer:
    """By hand, with the prediction alone from elsewhere: every site of a state (x, psi), which is Markov, opens, stays
    or is masked again on its own. alpha = 1 - t and sigma = eta · min(1, (1 - alpha_s)/alpha_t)."""
    denoiser = TableDenoiser(B.joint("p1"))
    mu = dict(zip(map(tuple, B.states.tolist()), denoiser(B.states, 0.0).exp().tolist(), strict=True))
    law: dict[tuple[Any, ...], float] = {((M, None),) * 3: 1.0}  # sites as (token, psi)
    for k in range(num_steps):
        alpha_t, alpha_s = k / num_steps, (k + 1) / num_steps
        sigma = eta * min(1.0, (1 - alpha_s) / alpha_t) if k else 0.0
        opens, after = (alpha_s - alpha_t) / (1 - alpha_t), {}
        for state, mass in law.items():
            said = mu[tuple(token for token, _ in state)]
            total = sum(math.exp(-sharpness * psi) for _, psi in state if psi is not None)
            ways = []
            for (token, psi), likely in zip(state, said, strict=True):
                if psi is None:
                    new = [((v, likely[v]), opens * likely[v]) for v in range(M)]
                    ways.append([((M, None), 1 - opens), *new])
                else:
                    masks = sigma * math.exp(-sharpness * psi) / total
                    ways.append([((token, psi), 1 - masks), ((M, None), masks)])
            for sites in itertools.product(*ways):
                share = mass * math.prod(p for _, p in sites)
                if share > 0:
                    name = tuple(site for site, _ in sites)
                    after[name] = after.get(name, 0.0) + share
        law = after
    clean = torch.zeros(len(B.clean)).double()
    for state, mass in law.items():
        clean[sum(token * B.tokens ** (2 - l) for l, (token, _) in enumerate(state))] += mass
    clean = clean * (B.reward(B.clean) / kl).exp()
    return Answer(float(clean.sum().log()), clean / clean.sum(), B.clean)


def test_the_law_of_carried_confidence() -> None:
    """The kernel's own steps, state by state, lead to the law by hand; the memory of a state is what it says it is."""
    kernel = ConfidenceRemask(REMASKING, sharpness=20.0)
    model = model_of(kernel, 4)
    law: dict[tuple[float, ...], float] = {(M,) * 3 + (math.nan,) * 3: 1.0}
    for step in model.steps:
        rows, weight = torch.tensor(list(law), dtype=torch.float64), torch.tensor(list(law.values())).double()
        x, psi = rows[:, :3].long(), rows[:, 3:]
        prediction = model.predict(x, step.t).laws().dense()
        p = model.step_with(x, prediction, step, kernel.recall(x, prediction, step, psi))
        row, y = support(p.dense().log_p, 10**6)
        after = torch.cat([y.double(), carried_confidence(y, M, psi[row], prediction[row])], -1)
        law = {}
        for key, m in zip(after.tolist(), (weight[row] * p.take(row).log_prob(y).exp()).tolist(), strict=True):
            name = tuple(math.nan if math.isnan(v) else v for v in key)
            law[name] = law.get(name, 0.0) + m
    found = torch.zeros(len(B.clean)).double()
    for key, m in law.items():
        found[int(sum(v * B.tokens ** (2 - l) for l, v in enumerate(key[:3])))] += m
    assert torch.allclose(found, carried_law(4, 0.8, 20.0, math.inf).target, atol=1e-12)


@pytest.mark.parametrize("proposal", ["base", "learned"])
def test_carried_confidence(proposal: str) -> None:
    kernel = ConfidenceRemask(REMASKING, sharpness=20.0)
    path = ts.Steering(model_of(kernel, 4), tilt_of(), PROPOSALS[proposal])
    truth = carried_law(4, 0.8, 20.0, B.kl)
    outcome = trial(path, truth)
    assert outcome.unbiased, str(outcome)
    now = answer(model_of(replace(kernel, carried=False), 4), path.twist)
    assert (now.target - truth.target).abs().sum() / 2 > 1e-3  # another sampler than that without a memory


def test_prompts_are_not_remembered_as_opened() -> None:
    start = torch.tensor([[1, M, M]])
    psi = carried_confidence(start, M, None, None)
    prediction = B.model("mdm").predict(start, 1.0).laws().dense()
    kernel, step = ConfidenceRemask(REMASKING), ts.uniform_steps(4)[1]
    assert (kernel.recall(start, prediction, step, psi).log_p == -torch.inf).all()
    psi = carried_confidence(torch.tensor([[1, M, 2]]), M, psi, prediction)
    assert psi[0, 0] == torch.inf
    assert psi[0, 1].isnan()
    assert psi[0, 2] == prediction[0, 2, 2].exp()
    later = B.model("mdm").predict(torch.tensor([[1, 0, 2]]), 0.5).laws()
    assert carried_confidence(torch.tensor([[1, 0, 2]]), M, psi, later)[0, 2] == psi[0, 2]


def test_loop_errors() -> None:
    with pytest.raises(ValueError, match="t_off < t_on"):
        remdm_loop(M, 0.2, 0.5, 0.5, ts.Cap(0.1))
    with pytest.raises(ValueError, match="at least"):
        ts.ranked.fixed(0)
