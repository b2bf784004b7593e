"""Constraints: automata against brute force, look-ahead and proposal against enumeration, and their cost."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from checks import POWERS, Largest, answer, trial
from hypothesis import given, settings
from hypothesis import strategies as st
from narrow import some, untyped
from torch.utils.flop_counter import FlopCounterMode
from toys import Toy, multilinear

import tokensteer as ts
from tokensteer.rewards import (
    Automaton,
    Constrained,
    LookAhead,
    Satisfies,
    avoids,
    both,
    constrain,
    contains,
    count,
    either,
    fixed,
    kept,
    negate,
    regex,
)
from tokensteer.testing import all_sequences, assert_proposal, assert_reward, enumerate_steering

torch.set_num_threads(1)

A, B, C = Toy("A"), Toy("B"), Toy("C")


def words(length: int, letters: int = 3) -> torch.Tensor:
    return all_sequences(letters, length)


def text(x: torch.Tensor, alphabet: str = "abc") -> list[str]:
    return ["".join(alphabet[i] for i in row) for row in x.tolist()]


def law(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


# ---- automata against brute force

PATTERNS = [
    "abc", "a*", "a+b", "a?b?c?", "(a|b)*c", "(ab|ba)+", "[ab]*c[ab]*", "[^a]*", ".*abc.*", "a{2}", "a{2,}", "a{,2}b",
    "a{1,3}b{2,4}", "(a|bc)*", "(a*)*b", "((a|b)(b|c)){1,2}", "(|a)b", "(a|b|)(c?){2}", "[a-b]{3}.", "(.a){0,3}", "",
    "(a(b(c|a)?)*)+", "a|b|cc", "(aa|aaa)*", ".{3}|.{5}", "[c-c]+", "(b*a){3}b*",
]  # fmt: skip


def assert_matches(pattern: str) -> None:
    automaton = regex(pattern, "abc")
    for length in range(1, 7):
        x = words(length)
        expected = [re.fullmatch(pattern, word) is not None for word in text(x)]
        assert automaton.accepts(x).tolist() == expected, (pattern, length)
        assert automaton.possible(length) == any(expected)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_against_re(pattern):
    assert_matches(pattern)


LEAVES = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^c]", "[b-c]", "(|b)"])


def _larger(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeat = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])
    return st.one_of(
        st.lists(part, min_size=1, max_size=3).map("".join),
        st.lists(part, min_size=2, max_size=3).map(lambda options: "(" + "|".join(options) + ")"),
        st.tuples(part, repeat).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


@given(st.recursive(LEAVES, _larger, max_leaves=6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_patterns_against_re(pattern):
    automaton = regex(pattern, "abc")
    for length in (1, 2, 4, 5):
        x = words(length)
        assert automaton.accepts(x).tolist() == [re.fullmatch(pattern, word) is not None for word in text(x)]


def test_minimal_and_classes():
    assert tuple(regex("(a|b)*(a|b)*c", "abc").step.shape) == (3, 2)  # two states and a dead one; a and b are alike
    many = regex(".*<end>", [f"t{i}" for i in range(999)] + ["end"])
    assert tuple(many.step.shape) == (2, 2)
    assert int(many.classes.max()) == 1


def test_names_escapes_and_ids_outside_the_alphabet():
    automaton = regex(r"<go>+\.x[<go>\-]", ["x", "go", ".", "-"], vocab_size=6)
    x = torch.tensor([[1, 2, 0, 1], [1, 2, 0, 3], [1, 1, 2, 0], [4, 2, 0, 1], [1, 5, 0, 1]])
    assert automaton.accepts(x).tolist() == [True, True, False, False, False]
    assert regex(".*", "ab", vocab_size=3).accepts(torch.tensor([[0, 1], [0, 2]])).tolist() == [True, False]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_substrings(substrings):
    x = words(6)
    found = [[bytes(w) in bytes(row) for w in substrings] for row in x.tolist()]
    assert avoids(substrings, 3).accepts(x).tolist() == [not any(row) for row in found]
    assert contains(substrings[0], 3).accepts(x).tolist() == [row[0] for row in found]


def test_counts_fixed_and_combinations():
    x = words(5)
    number = (x != 1).sum(-1)
    for low, high in itertools.product(range(5), (None, 0, 2, 5)):
        if high is None or high >= low:
            expected = (number >= low) & (number <= (5 if high is None else high))
            assert torch.equal(count([0, 2], 3, low, high).accepts(x), expected)
    sites = fixed({1: 2, 3: [0, 1]}, 5, 3)
    assert torch.equal(sites.accepts(x), (x[:, 1] == 2) & (x[:, 3] != 2))
    assert fixed({}, 5, 3).accepts(x).all()
    a, b, c = regex("a.*", "abc"), contains([1, 1], 3), count([2], 3, at_most=1)
    in_a, in_b, in_c = (m.accepts(x) for m in (a, b, c))
    assert torch.equal(both(a, b, c).accepts(x), in_a & in_b & in_c)
    assert torch.equal(either(a, b).accepts(x), in_a | in_b)
    assert torch.equal(both(negate(a), either(b, c)).accepts(x), ~in_a & (in_b | in_c))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: regex("a(bc", "abc"), r"unbalanced \( at position 1"),
        (lambda: regex("ab)c", "abc"), r"unbalanced \) at position 2"),
        (lambda: regex("a[bc", "abc"), r"unbalanced \[ at position 1"),
        (lambda: regex("a<bc", "abc"), r"unbalanced < at position 1"),
        (lambda: regex("abd", "abc"), r"unknown token 'd' at position 2"),
        (lambda: regex("a<dog>", ["a", "cat"]), r"unknown token 'dog' at position 1"),
        (lambda: regex("[c-a]", "abc"), r"bad range c-a at position 1"),
        (lambda: regex("a{3,1}", "abc"), r"bad range \{3,1\} at position 1"),
        (lambda: regex("a{x}", "abc"), r"a repeat that is not"),
        (lambda: regex("a{2", "abc"), r"a repeat that is not"),
        (lambda: regex("*a", "abc"), r"nothing to repeat at position 0"),
        (lambda: regex("a+?", "abc"), r"a repeat of a repeat"),
        (lambda: regex("[^abc]", "abc"), r"a set without tokens"),
        (lambda: regex("a\\", "abc"), r"a backslash"),
        (lambda: regex("a", "aa"), r"distinct"),
        (lambda: regex("a", "abc", vocab_size=2), r"smaller than the alphabet"),
        (lambda: regex("(.{999}){999}", "abc"), r"make it shorter"),
        (lambda: regex("(a|b)*a(a|b){20}", "ab"), r"more than 20000 states"),
        (lambda: contains([], 3), r"no empty one"),
        (lambda: avoids([[0, 3]], 3), r"token 3 is outside the vocabulary 0..2"),
        (lambda: count([0], 3, 2, 1), r"leave nothing"),
        (lambda: fixed({5: 0}, 5, 3), r"site 5 is outside"),
        (lambda: both(contains([0], 3), contains([0], 4)), r"one vocab_size"),
        (lambda: both(), r"both: give at least one automaton"),
        (lambda: either(), r"either: give at least one automaton"),
        (lambda: Automaton(torch.tensor([[1]]), torch.zeros(3).long(), torch.tensor([True])), r"0\.\.0"),
        (lambda: Constrained(contains([0], 4), kept(B.model("mdm")), defence=1.0), r"defence"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- the dynamic programme

EXAMPLES = {
    "regex": lambda v: regex("a.*(b|ca*)", "abcdef"[: v - 1], vocab_size=v),
    "contains": lambda v: contains([0, 1], v),
    "avoids": lambda v: avoids([[0, 0], [1, 2], [2, 1, 0]], v),
    "count": lambda v: count([1], v, 1, 2),
    "fixed": lambda v: fixed({1: [0, 2]}, 3, v),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_log_accept_against_enumeration(name):
    automaton, log_p, x = EXAMPLES[name](4), law(1, 5, 6, 4), words(6, 4)
    log_mass = log_p[:, torch.arange(6), x].sum(-1)
    expected = log_mass[:, automaton.accepts(x)].logsumexp(-1)
    torch.testing.assert_close(automaton.log_accept(log_p), expected, rtol=0, atol=1e-12)
    assert automaton.log_accept(log_p.float()).dtype == torch.float64


@pytest.mark.parametrize("name", EXAMPLES)
def test_sample_against_enumeration(name):
    automaton, log_p, x = EXAMPLES[name](4), law(2, 1, 4, 4), words(4, 4)
    draws = 160_000
    p = log_p[0, torch.arange(4), x].sum(-1).exp() * automaton.accepts(x)
    p = p / p.sum()
    drawn = automaton.sample(log_p.expand(draws, -1, -1), torch.Generator().manual_seed(3))
    assert automaton.accepts(drawn).all()
    seen = torch.bincount((drawn * 4 ** torch.arange(3, -1, -1)).sum(-1), minlength=256)
    often = draws * p >= 20
    z = (seen - draws * p)[often] / (draws * p * (1 - p))[often].sqrt()
    assert float(z.abs().max()) < 4.5
    chi_square, freedom = float((z**2 * (1 - p[often])).sum()), int(often.sum())
    assert (chi_square - freedom) / math.sqrt(2 * freedom) < 4.5


def test_impossible():
    automaton = regex("ab", "abc")
    assert not automaton.possible(3)
    assert automaton.possible(2)
    assert not automaton.possible(2, torch.tensor([True, False, True]))
    assert automaton.possible(2, torch.tensor([[True, False, False], [False, True, False]]))
    assert automaton.log_accept(law(0, 2, 3, 3)).tolist() == [-math.inf] * 2
    with pytest.raises(ValueError, match="nothing to draw from"):
        automaton.sample(law(0, 2, 3, 3), None)


def test_no_underflow():
    """1000 sites: 900 of a token of probability 0.1, and a fixed sequence of tokens of probability e^-30 each."""
    log_p = torch.tensor([0.1, 0.9], dtype=torch.float64).log().expand(1, 1000, 2)
    k = torch.arange(900, 1001, dtype=torch.float64)
    choose = math.lgamma(1001) - torch.lgamma(k + 1) - torch.lgamma(1001 - k)
    tail = (choose + k * math.log(0.1) + (1000 - k) * math.log(0.9)).logsumexp(0)
    assert float(tail) < -1700
    rare = count([0], 2, at_least=900)
    assert float(rare.log_accept(log_p)) == pytest.approx(float(tail), rel=1e-10)
    assert rare.accepts(rare.sample(log_p, torch.Generator().manual_seed(0))).all()
    log_p = torch.tensor([-30.0, 0.0], dtype=torch.float64).log_softmax(-1).expand(1, 1000, 2)
    assert float(regex("a*", "ab").log_accept(log_p)) == pytest.approx(1000 * float(log_p[0, 0, 0]), rel=1e-12)
    assert float(negate(regex("b*", "ab")).log_accept(log_p.float())) == pytest.approx(math.log(1000) - 30, rel=1e-3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradient_against_finite_differences(name):
    automaton = EXAMPLES[name](4)
    log_p = law(4, 2, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(automaton.log_accept, log_p)
    with torch.no_grad():
        zeros = law(4, 1, 4, 4).masked_fill(torch.arange(4) == 3, -math.inf)
    zeros.requires_grad_()
    assert torch.autograd.grad(automaton.log_accept(zeros).sum(), zeros)[0].isfinite().all()


# ---- steering: a denoiser that factorises


def factorised(length: int, sampler: str, *, seed: int = 5, steps: int = 5, tokens: tuple[int, ...] = ()):
    """Independent sites over three letters and the mask."""
    log_p = torch.cat([law(seed, length, 3), torch.full((length, 1), -torch.inf)], -1)
    kernels = {
        "mdm": ts.Ancestral(3),
        "remdm": ts.Ancestral(3, sigma=ts.Rescale(0.5)),
        "lowconf": ts.Ranked(3),
        "cursors": ts.LeftToRight(3),
    }
    return ts.Diffusion(
        lambda x, t: log_p.expand(len(x), -1, -1),
        kernels[sampler],
        ts.uniform_steps(steps),
        ts.template(length, 3, tokens),
    )


def mass(model: ts.Diffusion, automaton: Automaton, length: int) -> float:
    """log of the enumerated mass of a factorised model."""
    free = model.template == 3
    x = words(length)
    x = x[((x == model.template) | free).all(-1)]
    log_p = model.denoiser(x, 1.0).gather(-1, x.unsqueeze(-1)).squeeze(-1)
    return float(torch.where(free, log_p, 0.0).sum(-1)[automaton.accepts(x)].logsumexp(0))


@pytest.mark.parametrize("tokens", [(), (0, 1)], ids=["free", "prompt"])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf", "cursors"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_factorised_model_has_equal_weights(name, sampler, tokens):
    automaton = both(EXAMPLES[name](4), regex(".*", "abc", vocab_size=4))
    model = factorised(6, sampler, tokens=tokens)
    if name == "fixed" and tokens:
        with pytest.raises(ValueError, match="cannot be met"):
            constrain(model, automaton)
        return
    result = ts.smc(constrain(model, automaton), 8, 10, generator=torch.Generator().manual_seed(0))
    expected = mass(model, automaton, 6)
    assert float((result.log_z - expected).abs().max()) < 1e-9
    assert float((result.ess / 8 - 1).abs().max()) < 1e-9
    assert automaton.accepts(result.samples.flatten(0, 1)).all()
    assert (result.samples[..., : len(tokens)] == torch.tensor(tokens, dtype=torch.long)).all()


def test_factorised_model_samples_the_posterior():
    automaton, model = EXAMPLES["avoids"](4), factorised(4, "mdm")
    result = ts.smc(constrain(model, automaton), 10_000, generator=torch.Generator().manual_seed(1))
    x = words(4)
    p = model.denoiser(x, 1.0).gather(-1, x.unsqueeze(-1)).squeeze(-1).sum(-1).exp() * automaton.accepts(x)
    p = p / p.sum()
    seen = torch.bincount((result.samples[0] * 3 ** torch.arange(3, -1, -1)).sum(-1), minlength=81)
    z = (seen - 10_000 * p) / (10_000 * p * (1 - p)).sqrt()
    assert float(z[10_000 * p > 20].abs().max()) < 4.5


def test_remasking_a_factorised_model():
    automaton, model = EXAMPLES["regex"](4), factorised(3, "remdm")
    steering = constrain(model, automaton)
    assert trial(steering, answer(model, steering.twist), populations=1024).unbiased


@pytest.mark.slow
def test_large_canvas_stays_exact():
    """L = 60 with a word, a forbidden word and a count: all at once, without a denied or wasted particle."""
    log_p = torch.cat([law(6, 60, 4), torch.full((60, 1), -torch.inf)], -1)
    model = ts.Diffusion(
        lambda x, t: log_p.expand(len(x), -1, -1), ts.Ancestral(4), ts.uniform_steps(6), ts.template(60, 4)
    )
    automaton = both(contains([3, 0, 3, 0], 5), avoids([[2, 0, 0, 3, 3, 1]], 5), count([1, 2], 5, 20, 25))
    result = ts.smc(constrain(model, automaton), 32, generator=torch.Generator().manual_seed(0))
    assert automaton.accepts(result.samples[0]).all()
    assert float((result.ess / 32 - 1).abs().max()) < 1e-9
    assert float(result.log_z) == pytest.approx(float(automaton.log_accept(log_p[None])), abs=1e-9)


# ---- steering: models of the toys


def toy_automaton(toy: Toy) -> Automaton:
    """Not symmetric, met by about half of the sequences."""
    v = toy.tokens + 1
    return both(either(contains([0, 1], v), contains([2], v)), avoids([[1, 1], [2, 0]], v))


SAMPLERS = ("mdm", "remdm", "lowconf")


@pytest.mark.parametrize(
    ("sampler", "variant"),
    [
        *((sampler, variant) for sampler in SAMPLERS for variant in ("hard", "gradient")),
        ("remdm", "soft"),
        ("lowconf", "sampled"),
        ("mdm", "defended"),
    ],
)
def test_unbiased(sampler, variant):
    model, automaton = B.model(sampler), toy_automaton(B)
    tilt = {"hard": None, "sampled": B.tilt(sampler, estimator=ts.Sampled(), draws=2)}.get(variant, B.tilt(sampler))
    # Unclipped, a rare state has a weight of 100 where the most confident site opens first, and few runs meet it.
    base = ts.Gradient(clip=2.0 if sampler == "lowconf" else None) if variant == "gradient" else None
    steering = constrain(model, automaton, tilt, base)
    if variant == "defended":
        steering = replace(steering, proposal=Constrained(automaton, kept(model), defence=0.2))
    target = Satisfies(automaton, None if tilt is None else B.reward)
    truth = answer(model, ts.Tilt(target, 1.0 if tilt is None else B.kl))
    outcome = trial(steering, truth, populations=1024, seed=7)
    assert outcome.unbiased, str(outcome)
    if variant != "defended":
        result = ts.smc(steering, 8, 100, generator=torch.Generator().manual_seed(0))
        assert automaton.accepts(result.samples.flatten(0, 1)).all()


@pytest.mark.parametrize("sampler", ["mdm", "remdm"])
@pytest.mark.slow
def test_gradients_inside_constraints_may_be_rarer_or_of_fewer_draws(sampler):
    model, automaton = B.model(sampler), toy_automaton(B)
    tilt = B.tilt(sampler, estimator=ts.Sampled(), draws=4)
    truth = answer(model, ts.Tilt(Satisfies(automaton, B.reward), B.kl))
    asked = []
    for base in (ts.Gradient(clip=2.0), ts.Gradient(clip=2.0, every=2), ts.Gradient(clip=2.0, draws=1)):
        steering = constrain(model, automaton, tilt, base)
        result = ts.smc(steering, 8, 64, when=ts.triggers.every(2), generator=torch.Generator().manual_seed(0))
        asked.append(result.rows["reward"])
        if sampler == "mdm":  # with remasking, tails are too heavy to be judged by so few
            outcome = trial(steering, truth, populations=4096, seed=3)
            assert outcome.unbiased, str(outcome)
    assert max(asked[1:]) < 0.75 * asked[0]


class MaskedOnly(ts.FromModel):
    """The model's own moves, which say nothing of open sites, as those of proposals that bend laws may."""

    def __call__(self, x, evaluation, step, model, twist):
        q = untyped(super().__call__(x, evaluation, step, model, twist))
        return replace(q, log_x0=replace(q.log_x0, index=torch.where(q.masked, q.log_x0.index, -1)))


@pytest.mark.parametrize("base", [MaskedOnly(), ts.Gradient()], ids=["masked only", "gradient"])
def test_a_proposal_does_not_depend_on_other_particles(base):
    """Where sites are masked again, the laws of open ones are read, and there may be none."""
    steering = constrain(B.model("remdm"), toy_automaton(B), B.tilt("remdm"), base)
    step, generator = steering.steps[1], torch.Generator().manual_seed(0)
    x = torch.tensor([[0, 3, 1], [3, 3, 3], [2, 1, 3], [0, 1, 2]])

    def log_q(rows):
        evaluation = steering.evaluate(x[rows], step.t, generator)
        y = words(3, 4)
        index = torch.arange(len(rows)).repeat_interleave(len(y))
        return steering.propose(x[rows], evaluation, step).take(index).log_prob(y.repeat(len(rows), 1)).view(-1, len(y))

    alone = torch.cat([log_q(torch.tensor([row])) for row in range(len(x))])
    assert torch.allclose(log_q(torch.arange(len(x))), alone)
    assert torch.allclose(alone.exp().sum(-1), torch.ones(len(x), dtype=alone.dtype))
    if isinstance(base, MaskedOnly):
        truth = answer(steering.model, ts.Tilt(Satisfies(toy_automaton(B), B.reward), B.kl))
        outcome = trial(steering, truth, populations=1024, seed=7)
        assert outcome.unbiased, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_unbiased_on_the_larger_toy(sampler):
    model, automaton = C.model(sampler), toy_automaton(C)
    steering = constrain(model, automaton)
    truth = answer(model, ts.Tilt(Satisfies(automaton)))
    outcome = trial(steering, truth, particles=8, populations=1024, seed=8)
    assert outcome.unbiased, str(outcome)
    assert float(outcome.ratio.std()) < 1.0


@pytest.mark.parametrize("base", [ts.FromModel(), ts.Guided(), ts.Optimal()], ids=["first", "guided", "optimal"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.slow
def test_products(sampler, base):
    model, automaton = B.product(sampler, *POWERS, correct_remasking=False), toy_automaton(B)
    truth = answer(model, ts.Tilt(Satisfies(automaton)))
    outcome = trial(constrain(model, automaton, base=base), truth, populations=1024, seed=9)
    assert outcome.unbiased, str(outcome)


def test_products_that_correct_remasking():
    model, automaton = B.product("remdm", *POWERS), toy_automaton(B)
    truth = answer(model, ts.Tilt(Satisfies(automaton)))
    outcome = trial(constrain(model, automaton, base=ts.Guided()), truth, populations=1024, seed=9)
    assert outcome.unbiased, str(outcome)


def test_guided_model_with_a_differentiable_tilt():
    model, automaton = ts.guided(A.model("mdm"), A.model("mdm", "p2"), 1.5), contains([1], 3)
    reward = multilinear(A.soft_reward, A.tokens + 1, A.length)
    tilt = ts.Tilt(reward, A.kl, estimator=ts.SoftInput(), differentiable=True)
    steering = constrain(model, automaton, tilt, ts.Gradient(base=ts.Guided()))
    truth = answer(model, ts.Tilt(Satisfies(automaton, reward), A.kl))
    outcome = trial(steering, truth, populations=1024)
    assert outcome.unbiased, str(outcome)


def test_remasking_with_a_network_that_repeats_open_sites():
    """What a network says of open sites is no part of the contract: here it repeats their tokens, or says NaN."""
    automaton, truth = toy_automaton(B), None
    for odd in (0.0, math.nan):
        inner = B.model("remdm")

        def repeats(x, t, odd=odd, inner=inner):
            certain = torch.nn.functional.one_hot(x, 4).double().log() + odd
            return torch.where((x == 3).unsqueeze(-1), inner.denoiser(x, t), certain)

        model = replace(inner, denoiser=repeats)
        truth = truth or answer(inner, ts.Tilt(Satisfies(automaton)))
        outcome = trial(constrain(model, automaton), truth, populations=1024, seed=10)
        assert outcome.unbiased, str(outcome)


def test_look_ahead_alone_is_a_twist():
    """With the model as proposal: unbiased, and far better than judging at the end."""
    model, automaton = B.model("mdm"), contains([0, 1], 4)
    truth = answer(model, ts.Tilt(Satisfies(automaton)))
    lookahead = ts.Tilt(Satisfies(automaton), ramp=ts.ramps.end, log_lookahead=LookAhead(automaton, kept(model)))
    spread = []
    for twist in (lookahead, ts.Tilt(Satisfies(automaton), ramp=ts.ramps.end)):
        outcome = trial(ts.Steering(model, twist), truth, populations=1024)
        assert outcome.unbiased, str(outcome)
        spread.append(float(outcome.ratio.std()))
    assert spread[0] < 0.8 * spread[1]


def test_ramps_scale_the_soft_reward_only():
    model, automaton = B.model("mdm"), toy_automaton(B)
    steering = constrain(model, automaton, B.tilt("mdm"))
    exact, hard = enumerate_steering(steering), enumerate_steering(constrain(model, automaton))
    soft = enumerate_steering(ts.Steering(model, B.tilt("mdm")))
    hope = hard.log_twist[1] > -100
    assert hope.any()
    for k in (1, 2, 3):
        expected = (hard.log_twist + soft.log_twist)[k][hope]
        torch.testing.assert_close(exact.log_twist[k][hope], expected, rtol=0, atol=1e-9)
    assert float(exact.log_twist[:-1].min()) > -math.inf
    # At the start each site is drawn on its own, from what the model says of an empty canvas.
    marginals = [B.joint("p1").sum([k for k in range(B.length) if k != l]) for l in range(B.length)]
    alone = torch.stack([marginals[l][B.clean[:, l]] for l in range(B.length)]).prod(0)
    assert float(hard.log_twist[0][-1].exp()) == pytest.approx(float(alone[automaton.accepts(B.clean)].sum()), abs=1e-9)


@pytest.mark.parametrize(
    "potential",
    [ts.potentials.difference, ts.potentials.maximum, ts.potentials.total],
    ids=["difference", "max", "total"],
)
@pytest.mark.parametrize("ramp", [ts.ramps.linear, ts.Adaptive(0.8)], ids=["linear", "adaptive"])
@pytest.mark.slow
def test_any_ramp_and_potential(ramp, potential):
    """The look-ahead is a term of its own, so a potential gathers rewards and no chances, and a ramp may adapt."""
    model, automaton = B.model("mdm"), toy_automaton(B)
    tilt = replace(B.tilt("mdm"), kl=2.0, ramp=ramp, potential=potential)
    steering = constrain(model, automaton, tilt)
    outcome = trial(steering, answer(model, steering.twist), 3, populations=2000, seed=12)
    assert outcome.unbiased, str(outcome)


def test_a_look_ahead_does_not_hold_an_adaptive_ramp_back():
    """A reward of nothing is let in at once, whatever the chances of the particles."""
    steering = constrain(B.model("mdm"), toy_automaton(B), ts.Tilt(lambda x: x[:, 0] * 0.0, ramp=ts.Adaptive(0.9)))
    result = ts.smc(steering, 8, 20, generator=torch.Generator().manual_seed(0))
    assert result.ramp is not None
    assert (result.ramp[1:] == 1).all()


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_the_optimal_proposal_looks_ahead_too(soft):
    model, automaton = B.model("mdm"), toy_automaton(B)
    steering = replace(constrain(model, automaton, B.tilt("mdm") if soft else None), proposal=ts.Enumerated())
    exact = enumerate_steering(steering)
    for k, moves in enumerate(exact.moves):
        there = exact.log_optimal(k)
        alive = there > -50
        torch.testing.assert_close(moves.log_q[alive], there[alive], rtol=0, atol=1e-9)
    outcome = trial(ts.Auxiliary(steering), answer(model, steering.twist), populations=1024, seed=13)
    assert outcome.unbiased, str(outcome)


def test_chances_are_asked_only_where_weights_are_looked_at():
    asked = []
    model, automaton = factorised(6, "mdm", steps=6), EXAMPLES["avoids"](4)
    steering = constrain(model, automaton)
    constrained = some(steering.twist)
    lookahead = some(constrained.log_lookahead)
    twist = replace(constrained, log_lookahead=lambda tilt, look: asked.append(look.t) or lookahead(tilt, look))
    steering = replace(steering, twist=twist)
    asked.clear()
    result = ts.smc(steering, 4, 3, when=ts.triggers.every(3), generator=torch.Generator().manual_seed(0))
    assert len(asked) == 2  # the start, and the third step
    assert float((result.log_z - mass(model, automaton, 6)).abs().max()) < 1e-9


def test_reward_rows_are_counted():
    asked = []
    tilt = ts.Tilt(lambda x: asked.append(len(x)) or B.reward(x), B.kl, draws=3)
    steering = constrain(B.model("mdm"), toy_automaton(B), tilt)
    asked.clear()
    result = ts.smc(steering, 10, generator=torch.Generator().manual_seed(0))
    assert result.rows["reward"] == sum(asked)
    assert sum(asked) < 10 + 3 * 30  # the end, and three steps at which only those that have moved ask


# ---- laws and refusals


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_laws(sampler):
    """With a defence q covers p. Without, it covers what has hope: all of it, if everything is accepted."""
    automaton = toy_automaton(A) if sampler == "mdm" else contains([1], 3)
    steering = constrain(A.model(sampler), automaton, A.tilt(sampler))
    for base in (ts.FromModel(), ts.Gradient()):
        q = Constrained(automaton, kept(steering.model), base, defence=0.1)
        assert_proposal(replace(steering, proposal=q))
    assert_proposal(constrain(A.model(sampler), regex(".*", "ab", vocab_size=3), A.tilt(sampler)))
    assert_reward(Satisfies(automaton, A.reward), 2, A.length)


@pytest.mark.parametrize("base", [ts.FromModel(), ts.Gradient()], ids=["model", "gradient"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_proposal_is_normalised_and_covers_what_has_hope(sampler, base):
    automaton = toy_automaton(B)
    steering = constrain(B.model(sampler), automaton, B.tilt(sampler), base)
    exact = enumerate_steering(steering)
    hope = torch.tensor([  # by brute force: some way to fill the masks is accepted
        bool(automaton.accepts(B.clean[((B.clean == z) | (z == 3)).all(-1)]).any()) for z in exact.states
    ])  # fmt: skip
    for moves in exact.moves:
        total = torch.zeros(len(exact.states), dtype=torch.float64).index_add(0, moves.row, moves.log_q.exp())
        torch.testing.assert_close(total[total > 0], torch.ones_like(total[total > 0]), rtol=0, atol=1e-9)
        wanted = hope[moves.column] & (moves.log_p > -math.inf)
        assert (moves.log_q[wanted] > -math.inf).all()
        if sampler != "remdm":  # where nothing is masked again, what is lost is lost
            lost = hope[moves.row] & ~hope[moves.column]
            assert (moves.log_q[lost] == -math.inf).all()


@pytest.mark.parametrize("base", [ts.FromModel(), ts.Gradient()], ids=["model", "gradient"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_ratio_of_a_move_is_that_of_its_probabilities(sampler, base):
    """Where the tokens are the model's, a move takes the ratio of two chances; where they are tilted, it cannot."""
    steering = constrain(B.model(sampler), toy_automaton(B), B.tilt(sampler), base)
    model = steering.model
    x, step = model.start(40, None), model.steps[0]
    evaluation = steering.evaluate(x, step.t, torch.Generator().manual_seed(0))
    moved = steering.move(x, evaluation, step, torch.Generator().manual_seed(1))
    q = steering.propose(x, evaluation, step)
    p = model.transition(x, untyped(evaluation.prediction), step, q.sites)
    assert (untyped(q).log_over(p, moved.x) is None) == isinstance(base, ts.Gradient)
    expected = steering.log_p(moved.x, x, evaluation, step, q) - q.log_prob(moved.x)
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(moved.log_ratio, expected, rtol=0, atol=1e-9)


def test_refusals():
    model = factorised(6, "mdm")
    with pytest.raises(ValueError, match="a pattern that cannot be met: no sequence of length 6"):
        constrain(model, regex("a{7}", "abc", vocab_size=4))
    with pytest.raises(ValueError, match="cannot be met"):  # only with masks
        constrain(model, contains([3], 4))
    with pytest.raises(ValueError, match="make it with vocab_size=4"):
        constrain(model, regex("a*", "abc"))
    prompted = factorised(6, "mdm", tokens=(0, 1))
    with pytest.raises(ValueError, match="keeps the template satisfies"):
        constrain(prompted, regex("b.*", "abc", vocab_size=4))
    noise = ts.Diffusion(
        lambda x, t: torch.full((len(x), 2, 3), 1 / 3).log(),
        ts.Interpolating((0.5, 0.25, 0.25)),
        ts.uniform_steps(2),
        torch.full((2,), -1),
    )
    with pytest.raises(ValueError, match="no mask"):
        constrain(noise, contains([0], 3))
    rows = replace(model, template=torch.stack([model.template, prompted.template]))
    with pytest.raises(ValueError, match="row 1"):
        constrain(rows, regex("b.*", "abc", vocab_size=4))
    result = ts.smc(constrain(rows, regex("a.*c", "abc", vocab_size=4)), 4, 6, generator=torch.Generator())
    assert set(text(result.samples.flatten(0, 1)[:, [0, 5]])) == {"ac"}


def test_single_precision():
    log_p = factorised(4, "mdm").denoiser(torch.zeros(1, 4).long(), 1.0)[0].float()
    model = ts.Diffusion(
        lambda x, t: log_p.expand(len(x), -1, -1), ts.Ancestral(3), ts.uniform_steps(4), ts.template(4, 3)
    )
    automaton = EXAMPLES["regex"](4)
    result = ts.smc(constrain(model, automaton), 64, generator=torch.Generator().manual_seed(0))
    assert float((result.ess / 64 - 1).abs().max()) < 1e-6
    assert float(result.log_z) == pytest.approx(mass(model, automaton, 4), abs=1e-5)


# ---- cost


@pytest.mark.slow
def test_look_ahead_costs_less_than_a_denoiser_call():
    """L = 200, 30 states, V = 1000, 64 particles, against a transformer of width 128 and 2 layers: what is multiplied,
    of the network that of the head alone, and the largest table beside the laws, which are read."""
    vocab_size, length, rows = 1000, 200, 64
    automaton = contains(list(range(29)), vocab_size)
    assert tuple(automaton.step.shape) == (30, 30)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    parts = torch.nn.Embedding(vocab_size, 128), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(128, vocab_size)
    denoiser = ts.from_logits(torch.nn.Sequential(*parts).eval(), vocab_size - 1, ignores_time=True)
    canvas = ts.template(length, vocab_size - 1)
    model = ts.Diffusion(denoiser, ts.Ancestral(vocab_size - 1), ts.uniform_steps(2), canvas)
    x = canvas.repeat(rows, 1)
    lookahead, tilt = LookAhead(automaton, kept(model)), ts.Tilt(Satisfies(automaton))

    with torch.no_grad():
        look = ts.NoisyState(x, denoiser(x, 0.5), 0.5, vocab_size - 1)
        with FlopCounterMode(display=False) as spent, Largest() as largest:
            lookahead(tilt, look)
        with FlopCounterMode(display=False) as network:
            denoiser(x, 0.5)
    assert 0 < spent.get_total_flops() <= 2 * rows * length * vocab_size * 31
    assert spent.get_total_flops() < network.get_total_flops() / 4
    made = {name: size for name, size in largest.numel.items() if name not in ("index", "view", "detach")}
    assert max(made.values()) <= rows * length * 62, made  # two labels for each class, at most
