"""Fine-tuning through the sampler: gradients and divergences against exact ones, and what comes of it."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from checks import answer, trial
from narrow import untyped
from torch import Tensor, nn
from torch.nn.functional import one_hot
from toys import Toy, multilinear, numbers

import tokensteer as ts
from tokensteer.core.categorical.forms import masked_log_softmax
from tokensteer.tasks.nets import Transformer, TransformerConfig
from tokensteer.testing import enumerate_steering
from tokensteer.train import DrakesPlan, fit_drakes
from tokensteer.train.drakes import Relaxation, gumbel_token

torch.set_num_threads(1)

A, B = Toy("A"), Toy("B")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reward_of(toy: Toy):
    """The toy's reward, of ids or of one-hots whose last entry, the mask, is worth nothing."""
    inner = multilinear(numbers(toy.data["r"]).to(toy.dtype), toy.tokens, toy.length)
    return lambda x: inner(x[..., : toy.tokens] if x.is_floating_point() else x)


class SoftTable(nn.Module):
    """Logits for each state, of ids, or of one-hots multilinearly; at first those of a toy's own denoiser."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.toy = toy
        log_mu = toy.model("mdm").denoiser(toy.states, 0.0)
        self.logits = nn.Parameter(log_mu.masked_fill(log_mu == -math.inf, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        sites = (x if x.is_floating_point() else one_hot(x, self.toy.tokens + 1).to(self.logits.dtype)).unbind(1)
        state = sites[0]
        for site in sites[1:]:
            state = (state.unsqueeze(-1) * site.unsqueeze(1)).flatten(1)
        return (state @ self.logits.flatten(1)).view(len(x), *self.logits.shape[1:])


def denoiser_of(toy: Toy):
    return lambda net: ts.from_logits(net, toy.mask_id, ignores_time=True)


def walked(sampler: Relaxation, rows: int, temperature: float, generator: torch.Generator, held: bool = False):
    x, divergence = sampler.start(rows), torch.zeros(rows, dtype=torch.float64)
    for step in sampler.model.steps:
        x, apart = sampler.step(x, step, temperature, generator, held)
        divergence = divergence + apart
    return x, divergence


def z_scores(estimates: Tensor, truth: Tensor) -> Tensor:
    return (estimates.mean(0) - truth) / (estimates.std(0) / math.sqrt(len(estimates)) + 1e-9)


# ---- one gradient


def soft_slope(logit: Tensor, temperature: float) -> Tensor:
    """d/da of E[sigmoid((a + noise)/temperature)] with logistic noise, by quadrature: two tokens' Gumbel-softmax."""
    u = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    s = torch.sigmoid((logit.unsqueeze(-1) + u.logit()) / temperature)
    return (s * (1 - s)).mean(-1) / temperature


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("sampler", ["one step", "mdm", "remdm", "lowconf"])
def test_the_gradient_has_the_right_mean(sampler: str, temperature: float) -> None:
    """Sites whose laws do not depend on the state are independent, whenever and however often they open; each learns
    from the mean difference that its token makes, times the slope of its softmax."""
    model = A.model("mdm" if sampler == "one step" else sampler)
    if sampler == "one step":
        model = replace(model, steps=ts.uniform_steps(1))
    logits = torch.tensor([[0.4, -0.7, 0.0], [-0.3, 0.9, 0.0]], dtype=torch.float64)
    leaf = logits.expand(40_000, 2, 3).clone().requires_grad_()  # a copy for each path, so that each has its gradient
    relaxation = Relaxation(model, lambda x, t: masked_log_softmax(leaf.clone(), A.mask_id))
    x, _ = walked(relaxation, len(leaf), temperature, seeded())
    law = masked_log_softmax(logits.clone(), A.mask_id).exp()[:, :2]
    frequencies = x.detach()[..., :2]
    assert z_scores(frequencies, law).abs().max() < 4  # exact draws, whatever the temperature
    (gradient,) = torch.autograd.grad(reward_of(A)(x).sum(), leaf)
    table = numbers(A.data["r"]).view(2, 2)
    worth = torch.stack([law[1] @ (table[1] - table[0]), law[0] @ (table[:, 1] - table[:, 0])])
    slope = worth * soft_slope(logits[:, 1] - logits[:, 0], temperature)
    assert z_scores(gradient[..., 1], slope).abs().max() < 4
    assert z_scores(gradient[..., 0], -slope).abs().max() < 4
    assert (gradient[..., A.mask_id] == 0).all()


def test_a_cold_softmax_has_the_exact_gradient() -> None:
    """What the mean tends to is the gradient of the expected reward itself."""
    logit = torch.tensor([-1.1, 1.2], dtype=torch.float64)
    exact = torch.sigmoid(logit) * torch.sigmoid(-logit)
    torch.testing.assert_close(soft_slope(logit, 0.02), exact, rtol=2e-3, atol=0.0)
    assert (soft_slope(logit, 1.0) / exact - 1).abs().max() > 0.05


def test_tokens_are_exact_draws_with_impossible_ones() -> None:
    log_mu = torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64).log().expand(20_000, 4).clone().requires_grad_()
    drawn = gumbel_token(log_mu, 0.5, seeded())
    assert z_scores(drawn.detach(), log_mu.detach()[0].exp()).abs().max() < 4
    assert ((drawn == 0) | (drawn == 1)).all()
    (gradient,) = torch.autograd.grad((drawn * torch.arange(4.0)).sum(), log_mu)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_later_tokens_hear_of_earlier_ones() -> None:
    """The reward of one site reaches the law of another that was open before, through what the network made of it."""
    kernel = ts.Ranked(A.mask_id, count=lambda step, masked: torch.ones_like(masked))
    model = replace(A.model("mdm"), kernel=kernel, steps=ts.uniform_steps(2))
    net = SoftTable(A)
    sampler = Relaxation(model, denoiser_of(A)(net))
    first, second = model.steps
    x, _ = sampler.step(sampler.start(50), first, 1.0, seeded(), False)
    opened = x.detach().argmax(-1) != A.mask_id
    y, _ = sampler.step(x, second, 1.0, seeded(), False)
    late = (y * torch.tensor([0.0, 1.0, 0.0]) * ~opened.unsqueeze(-1)).sum()
    (gradient,) = torch.autograd.grad(late, net.logits)
    start = (A.states == A.mask_id).all(-1)
    assert gradient[start].abs().max() > 1e-3  # the state in which the first token was chosen


@pytest.mark.parametrize("sampler", ["mdm", "remdm"])
def test_divergences_are_exact(sampler: str) -> None:
    """The mean over paths against the sum over all moves."""
    net = SoftTable(B)
    with torch.no_grad():
        net.logits.add_(0.7 * torch.randn(net.logits.shape, generator=seeded(), dtype=torch.float64))
    net.requires_grad_(False)
    model, denoiser = B.model(sampler), denoiser_of(B)(net)
    exact = enumerate_steering(ts.Steering(model, B.tilt(sampler), ts.Amortised(denoiser)))
    law, expected = exact.log_law[0].exp(), 0.0
    for moves in exact.moves:
        mass = law[moves.row] * moves.log_q.exp()
        gap = torch.where(mass > 0, moves.log_q - moves.log_p, 0.0)
        expected += float((mass * gap).sum())
        law = torch.zeros_like(law).index_add(0, moves.column, mass)
    _, divergence = walked(Relaxation(model, denoiser), 20_000, 1.0, seeded(1), held=True)
    assert z_scores(divergence, torch.tensor(expected)).abs() < 4
    assert expected > 0.1


# ---- training


def tuned(toy: Toy = B, sampler: str = "mdm", rounds: int = 60, checkpoint=None, watch=None, **options):
    settings = {"paths": 64, "rate": 0.1, "average": 0.9, "clip": 10.0, "report_every": 10, "save_every": 1}
    return fit_drakes(
        toy.model(sampler),
        reward_of(toy),
        SoftTable(toy),
        denoiser_of(toy),
        plan=DrakesPlan(rounds, **(settings | options)),
        generator=seeded(1),
        checkpoint=checkpoint,
        watch=watch,
    )


def judged(toy: Toy, model: ts.Diffusion, denoiser: ts.Denoiser) -> tuple[float, float]:
    """The mean reward of a denoiser as a model of its own, and KL from the base, both of exact draws."""
    own = replace(model, denoiser=denoiser)
    result = ts.pretrained(own)(2000, generator=seeded(3))
    _, divergence = walked(Relaxation(model, denoiser), 2000, 1.0, seeded(4), held=True)
    return float(toy.reward(result.samples[0]).mean()), float(divergence.mean())


@pytest.mark.parametrize("toy", [A, B], ids=lambda toy: toy.name)
def test_the_reward_goes_up_and_kl_holds_it_back(toy: Toy) -> None:
    model, kl = toy.model("mdm"), 1.0
    before, nothing = judged(toy, model, model.denoiser)
    assert nothing == pytest.approx(0, abs=1e-9)
    wild, learned = tuned(toy), tuned(toy, kl=kl)
    free = judged(toy, model, wild.denoiser)
    held = judged(toy, model, learned.denoiser)
    assert free[0] > held[0] > before + 0.1
    assert free[1] > 1.5 * held[1] > 0
    # Nothing exceeds the optimum kl log Z, and what was held comes near it.
    best = kl * enumerate_steering(ts.Steering(model, ts.Tilt(toy.reward, kl, estimator=ts.Exact()))).log_z
    assert before + 0.5 * (best - before) < held[0] - kl * held[1] < best + 0.05
    assert [entry.step for entry in learned.history] == [10, 20, 30, 40, 50, 60]
    assert wild.history[-1].reward > wild.history[0].reward
    assert math.isnan(wild.history[-1].divergence)
    assert learned.history[-1].divergence == pytest.approx(held[1], abs=0.15)
    assert learned.rows == 60 * 64 * len(model.steps) * 2


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_as_a_proposal_it_is_unbiased(sampler: str) -> None:
    denoiser = tuned(B, sampler, rounds=15).denoiser
    steering = ts.Steering(B.model(sampler), B.tilt(sampler), ts.Amortised(denoiser))
    outcome = trial(steering, answer(steering.model, steering.twist))
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("last", [1, None])
@pytest.mark.parametrize("kl", [0.0, 1.0])
def test_how_far_back_the_reward_is_felt(last: int | None, kl: float) -> None:
    """A low-confidence sampler leaves the start at its first step, so that what is said of it learns from the reward if
    all steps are gone back through, and from the divergence there in any case."""
    model, start = B.model("lowconf"), (B.states == B.mask_id).all(-1)
    net = SoftTable(B)
    with torch.no_grad():
        net.logits.add_(torch.randn(net.logits.shape, generator=seeded(), dtype=torch.float64))
    before = net.logits.detach().clone()
    plan = DrakesPlan(60, rate=0.05, last=last, kl=kl, average=0.0)
    learned = fit_drakes(model, reward_of(B), net, denoiser_of(B), plan=plan, generator=seeded())
    after = untyped(learned.net).logits
    assert torch.equal(after[start], before[start]) == (last == 1 and kl == 0)
    assert not torch.equal(after, before)
    if kl:
        assert learned.history[-1].divergence < 0.5 * learned.history[0].divergence


class KilledError(Exception):
    pass


@pytest.mark.parametrize("when", [2, 5])
def test_killed_and_resumed_is_the_same_run(tmp_path, when: int) -> None:
    file = tmp_path / "half.safetensors"
    options = {"rounds": 7, "kl": 0.5, "parts": 2, "report_every": 3, "paths": 8}
    whole = tuned(**options)
    rounds = 0

    def dies(x: Tensor) -> Tensor:
        nonlocal rounds
        rounds += 1
        if rounds > 2 * when:
            raise KilledError
        return reward_of(B)(x)

    plan = DrakesPlan(**({"rate": 0.1, "average": 0.9, "clip": 10.0, "save_every": 1} | options))
    with pytest.raises(KilledError):
        fit_drakes(
            B.model("mdm"), dies, SoftTable(B), denoiser_of(B), plan=plan, generator=seeded(1), checkpoint=file
        )  # fmt: skip
    resumed = tuned(checkpoint=file, **options)
    assert torch.equal(untyped(whole.net).logits, untyped(resumed.net).logits)
    assert [replace(entry, seconds=0.0) for entry in whole.history] == [
        replace(entry, seconds=0.0) for entry in resumed.history
    ]
    assert whole.rows == resumed.rows


def test_plans_and_refusals() -> None:
    plan = DrakesPlan(10, temperature=2.0, last_temperature=0.5)
    assert [plan.temperature_at(done) for done in (0.0, 0.5, 1.0)] == pytest.approx([2.0, 1.0, 0.5])
    for wrong in ({"rounds": 0}, {"last": 0}, {"kl": -1.0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="DrakesPlan"):
            DrakesPlan(**untyped({"rounds": 1} | wrong))
    net, denoiser = SoftTable(B), denoiser_of(B)
    with pytest.raises(ValueError, match="differentiable"):
        fit_drakes(
            B.model("mdm"), lambda x: B.reward(x[..., :3].argmax(-1)), net, denoiser, plan=DrakesPlan(1),
            generator=seeded(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="one number for each"):
        fit_drakes(B.model("mdm"), lambda x: x.sum(), net, denoiser, plan=DrakesPlan(1), generator=seeded())
    uniform = ts.Diffusion(
        lambda x, t: torch.zeros(len(x), 2, 3).log_softmax(-1), ts.uniform_noise(3), ts.uniform_steps(2),
        torch.full((2,), ts.NO_MASK),
    )  # fmt: skip
    with pytest.raises(ValueError, match="masked process"):
        fit_drakes(uniform, lambda x: x.sum((-2, -1)), net, denoiser, plan=DrakesPlan(1), generator=seeded())


def test_prompts_stay() -> None:
    model = replace(B.model("mdm"), template=torch.tensor([[0, 3, 3], [3, 3, 1]]))
    x, _ = walked(Relaxation(model, denoiser_of(B)(SoftTable(B))), 8, 1.0, seeded())
    ids = x.argmax(-1)
    assert (ids[:4, 0] == 0).all()
    assert (ids[4:, 2] == 1).all()
    assert (ids != B.mask_id).all()
    learned = fit_drakes(
        model, reward_of(B), SoftTable(B), denoiser_of(B), plan=DrakesPlan(2, paths=8), generator=seeded()
    )
    assert math.isfinite(learned.history[-1].loss)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("timed", [False, True])
def test_a_network_on_every_device(device: str, timed: bool) -> None:
    """A transformer in float32, with an adapter's worth of its weights frozen."""
    torch.manual_seed(0)
    net = Transformer(TransformerConfig(4, B.length, width=16, depth=1, timed=timed)).to(device)
    net.tokens.requires_grad_(False)
    base = deepcopy(net).requires_grad_(False)

    def as_denoiser(net: nn.Module) -> ts.Denoiser:
        return ts.from_logits(net, B.mask_id, ignores_time=not timed)

    template = ts.template(B.length, B.mask_id).to(device)
    model = ts.Diffusion(as_denoiser(base), ts.Ancestral(B.mask_id), ts.uniform_steps(4), template)
    worth = torch.tensor([0.0, 1.0, 0.5, 0.0], device=device)
    plan = DrakesPlan(30, kl=0.1, last=3, rate=0.01, average=0.5)
    learned = fit_drakes(
        model, lambda x: (x * worth).sum((-2, -1)), net, as_denoiser, plan=plan,
        generator=torch.Generator(device).manual_seed(0),
    )  # fmt: skip
    assert learned.history[-1].reward > learned.history[0].reward + 0.1
    assert untyped(learned.net).tokens.weight is net.tokens.weight
