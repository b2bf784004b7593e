"""One site at a time with a clock: exact in continuous time for a denoiser that looks at the time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from checks import Answer, trial
from torch import Tensor
from toys import Toy

import tokensteer as ts
from tokensteer.testing import TableDenoiser, enumerate_steering


@dataclass(frozen=True)
class Fading:
    """A denoiser that looks at the time: of one law at t = 0 and of another at t = 1, geometrically in between."""

    late: TableDenoiser
    early: TableDenoiser

    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        late, early = (d(x, 0.0)[..., :-1] for d in (self.late, self.early))
        share = torch.as_tensor(t, dtype=late.dtype).view(-1, 1, 1)
        log_p = ((1 - share) * late + share * early).log_softmax(-1)
        return torch.cat([log_p, torch.full_like(log_p[..., :1], -torch.inf)], -1)


def fading(toy: Toy) -> Fading:
    """The mean of two tables with the uniform law, so that no token is impossible; one turned around."""
    joint, even = toy.joint("p1"), 1 / toy.tokens**toy.length
    turned = joint.flip(list(range(toy.length)))
    return Fading(*(TableDenoiser(0.8 * p + 0.2 * even) for p in (joint, turned)))


def model(toy: Toy, kernel: ts.Kernel, steps=None, denoiser=None, canvas: Tensor | None = None) -> ts.Diffusion:
    canvas = ts.template(toy.length, toy.mask_id) if canvas is None else canvas
    steps = ts.event_steps(canvas, toy.mask_id) if steps is None else steps
    return ts.Diffusion(denoiser or fading(toy), kernel, steps, canvas)


@cache
def continuous_law(toy: Toy, schedule: ts.Schedule, denoiser: Callable | None = None, nodes: int = 12) -> Tensor:
    """p(x_0) in continuous time by quadrature: each site opens on its own, at a time of density -alpha', so the law is
    the integral over all orders and falling times of the product of mu at these times."""
    places, parts = np.polynomial.legendre.leggauss(nodes)
    z, w = (places + 1) / 2, parts / 2
    shares = np.stack(np.meshgrid(*[z] * toy.length, indexing="ij"), -1).reshape(-1, toy.length)
    weight = np.stack(np.meshgrid(*[w] * toy.length, indexing="ij"), -1).reshape(-1, toy.length).prod(-1)
    times = torch.tensor(shares.cumprod(-1))  # t_k = t_{k-1} · z, and dt_k = t_{k-1} dz
    density = -torch.tensor([[schedule.derivative(t) for t in row] for row in times.tolist()], dtype=torch.float64)
    weight = torch.tensor(weight) * times[:, :-1].prod(-1) * density.prod(-1)
    ask = denoiser or fading(toy)
    law = torch.zeros(len(toy.clean), dtype=torch.float64)
    for row, x0 in enumerate(toy.clean):
        for order in itertools.permutations(range(toy.length)):
            x, mass = torch.full((len(weight), toy.length), toy.mask_id), weight
            for k, site in enumerate(order):
                mass = mass * ask(x, times[:, k])[:, site, x0[site]].exp()
                x = x.clone()
                x[:, site] = x0[site]
            law[row] += mass.sum()
    return law


def tilted(toy: Toy, law: Tensor, kl: float) -> Answer:
    mass = law * (toy.reward(toy.clean) / kl).exp()
    return Answer(math.log(float(mass.sum())), mass / mass.sum(), toy.clean)


SCHEDULES = [ts.Linear(), ts.Polynomial(2.0)]
A, B = Toy("A"), Toy("B")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_the_oracle_is_the_limit_of_many_steps(schedule: ts.Schedule) -> None:
    law = continuous_law(A, schedule)
    assert abs(float(law.sum()) - 1) < 1e-9
    assert (law - continuous_law(A, schedule, nodes=9)).abs().max() < 1e-8
    fine = [
        enumerate_steering(
            ts.Steering(model(A, ts.Ancestral(A.mask_id, schedule), ts.uniform_steps(n), fading(A)))
        ).model_law
        for n in (128, 256)
    ]
    assert (2 * fine[1] - fine[0] - law).abs().max() < 2e-5  # one order beyond the first


@pytest.mark.parametrize(("toy", "schedule"), [(A, SCHEDULES[0]), (A, SCHEDULES[1]), (B, SCHEDULES[0])])
@pytest.mark.slow
def test_unsteered_it_is_continuous_time(toy: Toy, schedule: ts.Schedule) -> None:
    law = continuous_law(toy, schedule, nodes=9)
    rows = 20_000

    def largest_z(kernel: ts.Kernel) -> float:
        result = ts.pretrained(model(toy, kernel))(1, rows, generator=torch.Generator().manual_seed(5))
        share = Answer(0.0, law, toy.clean).masses(result.samples, result.weights).mean(0)
        return float(((share - law) / (law * (1 - law) / rows).sqrt()).abs().max())

    assert largest_z(ts.TimedFirstHitting(toy.mask_id, schedule)) < 4
    assert largest_z(ts.FirstHitting(toy.mask_id)) > 8  # the clock matters


PROPOSALS = {
    "base": ts.FromModel(),
    "gradient": ts.Gradient(clip=1.0),
    "tokens": ts.Gradient(clip=1.0, tokens_only=True),
    "learned": ts.Amortised(fading(A)),
    "optimal": ts.Enumerated(),
    "first": ts.Enumerated(),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", PROPOSALS)
def test_steered_without_bias(name: str) -> None:
    truth = tilted(A, continuous_law(A, ts.Linear()), A.kl)
    kernel = ts.TimedFirstHitting(A.mask_id)
    estimator = ts.Exact() if name in ("optimal", "first") else ts.Sampled()
    path = ts.Steering(model(A, kernel), ts.Tilt(A.reward, A.kl, draws=2, estimator=estimator), PROPOSALS[name])
    outcome = trial(ts.Auxiliary(path) if name == "first" else path, truth)
    assert outcome.unbiased, str(outcome)


def test_twins_are_judged_by_their_own_clocks() -> None:
    """An estimate that is shared by equal rows would tie populations together that are independent."""
    tilt, x = ts.Tilt(A.reward, A.kl, estimator=ts.Exact()), torch.full((2, A.length), A.mask_id)
    log_x0 = fading(A)(x, torch.tensor([0.9, 0.1]))
    together = tilt.estimate(ts.NoisyState(x, log_x0, 1.0, A.mask_id), None)
    apart = [tilt.estimate(ts.NoisyState(x[i : i + 1], log_x0[i : i + 1], 1.0, A.mask_id), None) for i in range(2)]
    assert (together - torch.cat(apart)).abs().max() < 1e-12
    assert (together[0] - together[1]).abs() > 1e-3


def test_without_the_clock_log_z_is_another() -> None:
    tilt = ts.Tilt(A.reward, A.kl)
    truth = tilted(A, continuous_law(A, ts.Linear()), A.kl)
    blind = enumerate_steering(ts.Steering(model(A, ts.FirstHitting(A.mask_id)), tilt))
    assert abs(blind.log_z - truth.log_z) > 0.005
    outcome = trial(ts.Steering(model(A, ts.FirstHitting(A.mask_id)), tilt), truth, populations=6000)
    assert not outcome.unbiased


def test_products_with_a_clock() -> None:
    """The limit of the discrete products: where a site opens, its unnormalised law at that time counts."""
    powers = (1.3, -0.5)
    other = TableDenoiser(0.8 * A.joint("p2") + 0.2 / A.tokens**A.length)

    def product(kernel: ts.Kernel, steps=None) -> ts.Product:
        return ts.Product([model(A, kernel, steps, d) for d in (fading(A), other)], powers)

    def combined(x: Tensor, t: Tensor) -> Tensor:
        return powers[0] * fading(A)(x, t) + powers[1] * other(x, 0.0).clamp(min=-1e6)

    mass = continuous_law(A, ts.Linear(), combined)
    truth = Answer(math.log(float(mass.sum())), mass / mass.sum(), A.clean)
    fine = enumerate_steering(ts.Steering(product(ts.Ancestral(A.mask_id), ts.uniform_steps(256))))
    assert abs(fine.log_z - truth.log_z) < 4e-3
    for proposal in (ts.Optimal(), ts.Guided()):
        outcome = trial(ts.Steering(product(ts.TimedFirstHitting(A.mask_id)), proposal=proposal), truth)
        assert outcome.unbiased, str(outcome)


def test_times_fall_and_calls_are_as_many_as_free_sites() -> None:
    canvas = torch.tensor([[0, B.mask_id, B.mask_id], [B.mask_id] * 3])
    asked: list[Tensor] = []

    def watched(x: Tensor, t: float | Tensor) -> Tensor:
        if isinstance(t, Tensor):
            asked.append(t)
        return fading(B)(x, t)

    steering = ts.Steering(model(B, ts.TimedFirstHitting(B.mask_id), denoiser=watched, canvas=canvas))
    asked.clear()
    ts.smc(steering, 1000, 2, when=ts.triggers.never, generator=torch.Generator().manual_seed(0))
    times = torch.stack(asked, 1)  # (P, calls)
    assert times.shape == (2000, 3)
    assert (times.diff(dim=1) <= 0).all()
    assert (times[1000:].diff(dim=1) < 0).all()
    assert torch.equal(times[:1000, 1], times[:1000, 2])  # done early, and the clock stands still
    for rows, n in ((times[:1000], 2), (times[1000:], 3)):  # the k-th largest of n uniforms, under alpha = 1 - t
        means = torch.tensor([(n - k) / (n + 1) for k in range(n)], dtype=times.dtype)
        assert (rows[:, :n].mean(0) - means).abs().max() < 0.04


@pytest.mark.parametrize(
    ("denoiser", "says"),
    [
        (lambda x, t: fading(A)(x, float(t)), "fails with a time for each row"),
        (lambda x, t: fading(A)(x, t if isinstance(t, float) else float(t[0])), "is wrong with a time"),
    ],
)
def test_denoisers_that_cannot_take_times_are_refused(denoiser, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model(A, ts.TimedFirstHitting(A.mask_id), denoiser=denoiser)
    model(A, ts.FirstHitting(A.mask_id), denoiser=denoiser)  # which asks at one time for all
    with pytest.raises(ValueError, match=says):
        ts.Steering(model(A, ts.TimedFirstHitting(A.mask_id)), proposal=ts.Amortised(denoiser))


def test_what_a_clock_rules_out() -> None:
    steering = ts.Steering(model(A, ts.TimedFirstHitting(A.mask_id)))
    with pytest.raises(ValueError, match="cannot be enumerated"):
        enumerate_steering(steering)
    with pytest.raises(ValueError, match="a block has its own time"):
        ts.Blocks(ts.TimedFirstHitting(A.mask_id), 1, 2, 2)


def test_networks_of_single_precision() -> None:
    toy = Toy("A", torch.float32)
    denoiser = Fading(*(TableDenoiser(d.joint.float()) for d in (fading(toy).late, fading(toy).early)))
    single = model(toy, ts.TimedFirstHitting(toy.mask_id), denoiser=denoiser)
    assert single.dtype == torch.float32
    seen: list[torch.dtype] = []
    spy = replace(
        single, denoiser=lambda x, t: (seen.append(t.dtype) if isinstance(t, Tensor) else None, denoiser(x, t))[1]
    )
    ts.smc(ts.Steering(spy), 4, generator=torch.Generator().manual_seed(0))
    assert set(seen) == {torch.float32}
