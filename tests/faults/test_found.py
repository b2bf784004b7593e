"""What the fuzzer has found, each with the smallest configuration that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from narrow import untyped
from torch import Tensor
from toys import Toy, seeded

import tokensteer as ts
from tokensteer import rewards
from tokensteer.testing import enumerate_steering

B = Toy("B")
MASK = B.mask_id
EXACT = B.tilt("mdm", estimator=ts.Exact())


def log_z_of(path: ts.FeynmanKac, exact: float) -> float:
    """The z-score of log Z."""
    log_z = ts.smc(path, 4, 2000, generator=seeded()).log_z
    ratio = (log_z - exact).exp()
    return float((ratio.mean() - 1.0) / ratio.std() * math.sqrt(len(ratio)))


def test_a_mixture_of_enumerations_is_no_missing_support() -> None:
    """Enumerations do not factorise, and were taken for proposals that cover nothing."""
    members = ts.Enumerated(), ts.Mixture((ts.Enumerated(), ts.Enumerated()))
    steering = ts.Steering(B.model("mdm"), EXACT, ts.Mixture(members, (0.3, 0.7)))
    assert abs(log_z_of(steering, enumerate_steering(replace(steering, proposal=ts.FromModel())).log_z)) < 5


def test_a_site_without_a_common_token_need_not_open() -> None:
    """Two models that share no token at a site: it stays masked until others open, and q need not open it."""

    def table(first: float, second: float) -> ts.Denoiser:
        def denoiser(x: Tensor, t: float) -> Tensor:
            alone = torch.tensor([first, second, 0.0], dtype=torch.float64).expand(*x.shape, 3)
            after = torch.tensor([0.4, 0.6, 0.0], dtype=torch.float64).expand(*x.shape, 3)
            return torch.where((x[:, 1] == 2).view(-1, 1, 1) & (torch.arange(2) == 0).unsqueeze(-1), alone, after).log()

        return denoiser

    base = ts.Diffusion(table(1.0, 0.0), ts.Ancestral(2), ts.uniform_steps(2), ts.template(2, 2))
    product = ts.Product((base, replace(base, denoiser=table(0.0, 1.0))), (0.5, 0.5), lookahead=False)
    steering = ts.Steering(product, None, ts.Optimal())
    exact = enumerate_steering(replace(steering, proposal=ts.FromModel())).log_z
    assert exact > -math.inf
    assert abs(log_z_of(steering, exact)) < 5


def test_a_confidence_may_have_another_precision() -> None:
    kernel = ts.Ranked(MASK, confidence=lambda log_p: log_p.amax(-1).float())
    assert isinstance(ts.Steering(base(kernel=kernel)), ts.Steering)


def test_enumeration_leaves_no_mask_where_a_product_of_ranked_tokens_has_no_mass() -> None:
    """MaskGIT lists masks too; with no mass anywhere, they were drawn as well, and left at the end."""

    def only(token: int) -> ts.Denoiser:
        return lambda x, t: torch.eye(3, dtype=torch.float64)[token].log().expand(*x.shape, 3)

    model = ts.Diffusion(only(0), ts.MaskGIT(2), ts.uniform_steps(1), ts.template(2, 2))
    product = ts.Product((model, replace(model, denoiser=only(1))), (0.5, 0.5), lookahead=False)
    result = ts.smc(ts.Steering(product, None, ts.Enumerated()), 8, generator=seeded())
    assert (result.samples != 2).all()
    assert not result.alive.any()


@pytest.mark.parametrize("proposal", [ts.Optimal(), ts.Enumerated(), ts.Mixture((ts.Optimal(), ts.FromModel()))])
def test_a_jump_without_a_common_token_kills_its_particle(proposal: ts.Proposal) -> None:
    """It was not made, a mask was left, and the kernel was said to open too few sites. The models disagree about the
    second site to open unless the first one is token 0, and agree again if it is never opened."""

    def prefers(token: int) -> ts.Denoiser:
        apart = torch.eye(3, dtype=torch.float64)[token]
        both = torch.tensor([0.7 - 0.4 * token, 0.3 + 0.4 * token, 0.0], dtype=torch.float64)

        def denoiser(x: Tensor, t: float) -> Tensor:
            disagree = (x == 1).any(-1) & (t > 0.4)
            return torch.where(disagree.view(-1, 1, 1), apart, both).log().expand(*x.shape, 3)

        return denoiser

    jumps = ts.FirstHitting(2)
    base = ts.Diffusion(prefers(0), jumps, ts.event_steps(ts.template(3, 2), 2), ts.template(3, 2))
    product = ts.Product((base, replace(base, denoiser=prefers(1))), (0.5, 0.5), lookahead=False)
    steering = ts.Steering(product, None, proposal)
    result = ts.smc(steering, 4, 2000, when=ts.triggers.never, generator=seeded())
    assert (result.samples != 2).all()
    dead = result.log_w == -math.inf
    assert 0.3 < float(dead.double().mean()) < 0.7
    exact = enumerate_steering(ts.Steering(product)).log_z
    ratio = (result.log_z - exact).exp()
    assert abs(float((ratio.mean() - 1.0) / ratio.std() * math.sqrt(len(ratio)))) < 4


def test_a_product_without_a_common_token_is_said_to_have_none() -> None:
    def only(token: int) -> ts.Denoiser:
        return lambda x, t: torch.eye(3, dtype=torch.float64)[token].log().expand(*x.shape, 3)

    base = ts.Diffusion(only(0), ts.FirstHitting(2), ts.uniform_steps(2), ts.template(2, 2))
    product = ts.Product((base, replace(base, denoiser=only(1))), (0.5, 0.5), lookahead=False)
    result = ts.smc(ts.Steering(product, None, ts.Optimal()), 4, generator=seeded())
    assert (result.samples != 2).all()
    with pytest.raises(ValueError, match=r"models that share no token at a site.*give every model full support"):
        result.sample()


def test_split_gibbs_keeps_a_template_without_a_free_site() -> None:
    """The site to change was the first one, free or not."""
    canvas = torch.tensor([[ts.NO_MASK, ts.NO_MASK], [0, 1]])
    model = ts.Diffusion(
        lambda x, t: torch.full((*x.shape, 3), 1.0 / 3.0, dtype=torch.float64).log(),
        ts.uniform_noise(3),
        ts.uniform_steps(2),
        canvas,
    )
    steering = ts.Steering(model, ts.Tilt(lambda x: x.double().sum(-1)))
    result = ts.SplitGibbs(3, 2, 5)(steering, 16, 2, generator=seeded())
    assert (result.samples[1] == canvas[1]).all()
    assert (result.samples[0] != result.samples[0, :1]).any()


def templates(*prompts: int) -> Tensor:
    return torch.stack([ts.template(B.length, MASK, [token]) for token in prompts])


def test_constraints_are_enumerated_for_several_templates() -> None:
    """Candidates of an enumeration are no whole populations, as the look-ahead of a constraint took them to be."""
    rule = rewards.contains([1], B.tokens + 1)
    model = replace(B.model("mdm"), template=templates(0, 1, 0))
    steering = replace(rewards.constrain(model, rule), proposal=ts.Enumerated())
    log_z = ts.smc(steering, 4, 3 * 500, generator=seeded()).log_z.view(3, -1).exp().mean(-1).log()
    for row, canvas in enumerate(model.template):
        exact = enumerate_steering(rewards.constrain(replace(model, template=canvas), rule)).log_z
        assert float(log_z[row]) == pytest.approx(exact, abs=0.1)


def test_a_look_ahead_that_differs_between_templates_says_so() -> None:
    canvas = torch.stack([ts.template(B.length, MASK, [0]), ts.template(B.length, MASK, [0], at=[1]), templates(1)[0]])
    steering = rewards.constrain(replace(B.model("remdm"), template=canvas), rewards.contains([1], B.tokens + 1))
    with pytest.raises(ValueError, match="needs one template here, or a kernel without remasking"):
        ts.smc(replace(steering, proposal=ts.Enumerated()), 4, 3, generator=seeded())


def first_is_zero(x: Tensor) -> Tensor:
    return torch.where(x[:, 0] == 0, 0.0, -math.inf).double()


@pytest.mark.parametrize("constrained", [True, False])
def test_repair_begins_at_a_sequence_that_the_proposal_never_draws(constrained: bool) -> None:
    """Enumerations and look-ahead have no mass where a constraint is broken: the given sequence has weight 0."""
    model = B.model("mdm")
    if constrained:
        steering = rewards.constrain(model, rewards.contains([0], B.tokens + 1))
    else:
        steering = ts.Steering(model, ts.Tilt(first_is_zero, estimator=ts.Exact()), ts.Enumerated())
    start = torch.full((B.length,), B.tokens - 1)
    chain = ts.repair(start, steering, share=1.0, sweeps=10, generator=seeded())
    assert chain.reward is not None
    assert chain.reward[0, 0] == -math.inf
    assert chain.reward[-1, 0] == 0


def test_a_reference_that_a_proposal_wrongly_misses_is_still_an_error() -> None:
    class Truncated(ts.FromModel):
        """The model without the token that is likeliest, once the probe of the steering is over."""

        probed = 0

        def __call__(self, *given: Any) -> Any:
            Truncated.probed += 1
            q = super().__call__(*given)
            tilt = torch.zeros(*given[0].shape, B.tokens + 1, dtype=torch.float64)
            tilt[..., 1] = -math.inf if Truncated.probed > 3 else 0.0
            return q.tilt_tokens(tilt)

    steering = ts.Steering(B.model("mdm"), ts.Tilt(B.reward), Truncated())
    with pytest.raises(FloatingPointError, match="no mass at a trajectory that the target can take"):
        ts.repair(torch.ones(B.length, dtype=torch.int64), steering, share=1.0, sweeps=3, generator=seeded())


def test_a_stored_result_is_shown_as_before(tmp_path: Path) -> None:
    """Files list counts by name, and runs listed them as the networks came: denoiser, reward, proposal."""
    other = ts.Amortised(B.model("mdm").base.denoiser)
    result = ts.smc(ts.Steering(B.model("mdm"), B.tilt("mdm"), other), 4, generator=seeded())
    result.save(tmp_path / "result.safetensors")
    again = ts.Result.load(tmp_path / "result.safetensors")
    assert (repr(again), again.html()) == (repr(result), result.html())
    assert list(again.rows) == list(result.rows) == ["denoiser", "proposal", "reward"]


def base(**changed: Any) -> ts.Diffusion:
    return replace(B.model("mdm"), **changed)


def run(**options: Any) -> ts.Result:
    return ts.smc(ts.Steering(B.model("mdm")), 4, **options)


HEAD = torch.nn.Linear(2, B.tokens + 1).requires_grad_(False)


def hidden_model() -> ts.Diffusion:
    return base(denoiser=ts.from_hidden(lambda x: torch.zeros(*x.shape, 2), HEAD, MASK, ignores_time=True))


def ranked(**options: Any) -> ts.Steering:
    return ts.Steering(base(kernel=ts.Ranked(MASK, **options)))


def with_rule(rule: Any) -> ts.Result:
    return ts.smc(ts.Steering(base(), ts.Tilt(B.reward, potential=ts.potentials.Potential(rule))), 4)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "sigma": (lambda: ts.Ancestral(MASK, sigma=untyped(0.1)), r"sigma must be a function of step and bound: Cap"),
    "what sigma returns": (
        lambda: ts.Steering(base(kernel=ts.Ancestral(MASK, sigma=lambda *_: untyped("3")))),
        "sigma at step 0 must be a number",
    ),
    "steps": (lambda: base(steps=untyped([0.5, 0.0])), "steps must be a list of steps"),
    "an empty template": (lambda: base(template=torch.zeros(2, 0, dtype=torch.int64)), "template has no site"),
    "a learned twist": (lambda: ts.LearnedTwist(untyped(3)), "LearnedTwist.value must be a function of x and t"),
    "a value": (lambda: ts.Value(untyped(None)), "Value.function must be a function of x and t"),
    "a count": (lambda: ts.Ranked(MASK, untyped(2)), "Ranked.count must be a function of step and masked"),
    "what a count returns": (lambda: ranked(count=lambda step, masked: masked.sum()), "how many sites open in each"),
    "numbers of a count": (
        lambda: ranked(count=lambda step, masked: masked / 2),
        r"int64 of shape \(1,\), got torch.f",
    ),
    "a count of MaskGIT": (
        lambda: ts.Steering(base(kernel=ts.MaskGIT(MASK, lambda step, masked: masked[:-1]))),
        "how many sites open in each",
    ),
    "a confidence": (lambda: ranked(confidence=lambda log_p: log_p.amax()), "one number for each of . sites"),
    "a head": (lambda: ts.OtherHead(untyped(len)), "is no plain linear head"),
    "a change of states": (
        lambda: ts.OtherHead(torch.nn.Linear(2, 2), untyped(0)),
        "OtherHead.change must be a function",
    ),
    "what a change of states returns": (
        lambda: ts.Steering(hidden_model(), None, ts.OtherHead(HEAD, lambda h: h.unsqueeze(-1))),
        "OtherHead.change must return a state for each that it is given",
    ),
    "the precision of changed states": (
        lambda: ts.Steering(hidden_model(), None, ts.OtherHead(HEAD, Tensor.half)),
        r"float32 \(.*as the head reads them, got torch.float16",
    ),
    "a convention": (lambda: ts.Product([base()], [1.0], untyped(3)), "Product.convention must be a function of"),
    "what a convention returns": (
        lambda: ts.Steering(ts.Product([base()], [1.0], lambda *_: untyped(None), False), None, ts.Optimal()),
        "leave the convention|must return the measure it changes",
    ),
    "a model of a product": (lambda: ts.Product(untyped([base(), 3.0]), [1.0, 1.0]), "every model must be a Diffusion"),
    "an average": (lambda: ts.Tilt(B.reward, average=untyped(3)), "Tilt.average must be a function of rewards"),
    "what an average returns": (
        lambda: ts.Steering(base(), ts.Tilt(B.reward, average=lambda r, log_v, kl: r.sum(), estimator=ts.Exact())),
        "Tilt.average must give one number for each",
    ),
    "a potential": (lambda: ts.potentials.Potential(untyped(3)), r"Potential\.rule must be a function of ramp"),
    "what a potential returns": (
        lambda: with_rule(lambda *_: untyped(None)),
        "and what they carry on or None, got None",
    ),
    "the log-twists of a potential": (
        lambda: with_rule(lambda scale, r, parent: ((scale * r).sum(), None)),
        r"for each of \d particles, shape \(\d,\), and what they carry on or None, got torch\.float64 \(\), None",
    ),
    "a look-ahead": (lambda: ts.Tilt(B.reward, log_lookahead=untyped(3)), "log_lookahead must be a function of a tilt"),
    "what a ramp returns": (lambda: ts.Tilt(B.reward, ramp=lambda t: untyped("3")), r"ramp\(0\) must be a number"),
    "a grid": (lambda: ts.Blocks(ts.Ancestral(MASK), 1, 2, 2, untyped(None)), "Blocks.grid must be a function of"),
    "what a grid returns": (
        lambda: ts.Blocks(ts.Ancestral(MASK), 1, 2, 2, lambda n: untyped(None)),
        "as many steps as it is given",
    ),
    "a resampler": (lambda: run(resample=untyped(None)), "resample must be a function of log-weights"),
    "a trigger": (lambda: run(when=untyped(3)), "when must be a function of log-weights and a step"),
    "a generator of noise": (
        lambda: ts.smc(
            ts.Steering(
                ts.Diffusion(
                    lambda x, t: torch.full((*x.shape, 2), 0.5).log(),
                    ts.uniform_noise(2),
                    ts.uniform_steps(2),
                    torch.tensor([ts.NO_MASK]),
                )
            ),
            2,
            generator=untyped(0),
        ),
        "generator must be a torch.Generator",
    ),
}


def test_constraints_with_a_kernel_that_opens_one_site_at_a_time() -> None:
    """Its sites do not open independently: a draw that took them so opened none or several, and q had no mass there."""
    model = replace(base(), kernel=ts.FirstHitting(MASK), steps=ts.event_steps(base().template, MASK))
    steering = rewards.constrain(model, rewards.contains([0], model.vocab_size))
    result = ts.smc(steering, 4, 2000, generator=seeded())
    assert bool((result.samples == 0).any(-1).all())
    assert abs(log_z_of(steering, float(enumerate_steering(steering).log_z))) < 4


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_values_are_refused_in_words_of_our_own(what: str) -> None:
    make, says = REFUSED[what]
    with pytest.raises((ValueError, TypeError), match=says):
        make()


def test_the_limit_of_enumeration_is_of_memory_and_not_of_particles() -> None:
    """Many particles of few completions each were refused."""
    model = B.model("mdm")
    few, many = (ts.Tilt(B.reward, B.kl, estimator=ts.Exact(limit=limit)) for limit in (B.tokens**B.length, 10**6))
    runs = [ts.smc(ts.Steering(model, tilt), 8, 40, generator=seeded()) for tilt in (few, many)]
    assert torch.equal(runs[0].samples, runs[1].samples)
    torch.testing.assert_close(runs[0].log_w, runs[1].log_w)
    with pytest.raises(ValueError, match="enumeration needs"):
        ts.smc(ts.Steering(model, ts.Tilt(B.reward, B.kl, estimator=ts.Exact(limit=3))), 2, generator=seeded())
