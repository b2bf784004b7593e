"""Tests of the tests: classic bugs as broken variants, each of which the check of test_unbiased.py must catch.

A sampler with weights G and proposal q has E[Z_hat] = sum over paths of prod q·G, so what a bug leads to can be
computed exactly, by pushing q·G through all moves of the enumeration. That prediction is written down apart from the
broken sampler; where the two agree, the mutant is the bug it is named after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from checks import POWERS, Answer, Trial, answer, steering, trial
from narrow import some, untyped
from torch import Tensor
from toys import Toy, case, numbers

import tokensteer as ts
from tokensteer.testing import Enumeration, enumerate_steering

A, B = Toy("A"), Toy("B")


@dataclass(frozen=True)
class Scene:
    """A right sampler of toy B, all its moves, and the check it passes."""

    sampler: str
    target: str
    proposal: str

    @property
    def path(self) -> ts.Steering:
        return steering(B, self.sampler, self.target, self.proposal)

    @property
    def lam(self) -> Tensor:
        """lambda from the start to the end."""
        return numbers(B.data["lam_lowconf" if self.sampler == "lowconf" else "lam"]).flip(0)

    def try_out(self, path: ts.Steering) -> Trial:
        return trial(path, truth(self), particles=32, populations=1024)


@cache
def truth(scene: Scene) -> Answer:
    path = scene.path
    return answer(path.model, path.twist)


@cache
def passes(scene: Scene) -> bool:
    return scene.try_out(scene.path).unbiased


def predict(scene: Scene, law: Callable[[Moves], Tensor]) -> float:
    """log E[Z_hat] for a log-weight `law` of every move, exactly."""
    exact = enumerate_steering(scene.path)
    mass = exact.log_law[0] + exact.log_twist[0]
    for index, moves in enumerate(exact.moves):
        possible = moves.log_q > -torch.inf
        log_g = law(Moves(scene, exact, index))
        flow = torch.where(possible, mass[moves.row] + moves.log_q + log_g, -torch.inf).exp()
        mass = torch.zeros_like(mass).index_add(0, moves.column, flow).log()
    return float(mass.logsumexp(0))


@dataclass(frozen=True)
class Moves:
    """What a law may need to know of all moves x -> y of one step."""

    scene: Scene
    exact: Enumeration
    index: int

    @property
    def row(self) -> Tensor:
        return self.exact.moves[self.index].row

    @property
    def column(self) -> Tensor:
        return self.exact.moves[self.index].column

    @property
    def log_ratio(self) -> Tensor:
        return self.exact.moves[self.index].log_p - self.exact.moves[self.index].log_q

    @property
    def psi(self) -> tuple[Tensor, Tensor]:
        """The log-twists of x and y."""
        return self.exact.log_twist[self.index][self.row], self.exact.log_twist[self.index + 1][self.column]

    @property
    def r(self) -> tuple[Tensor, Tensor]:
        """The estimates at x and y over kl, from the golden file."""
        r = numbers(B.data["rhat_lse"]) / B.kl
        return r[self.row], r[self.column]

    def lam(self, index: int) -> Tensor:
        return self.scene.lam[index]

    @property
    def last(self) -> bool:
        return self.index == len(self.exact.moves) - 1


# ---- twists gone wrong: as potentials that are kept up to the very end


@dataclass(frozen=True)
class ToTheEnd(ts.Steering):
    """Without the final correction: the potential also decides the last weight."""

    def evaluate(self, x, t, generator, parent=None, weighed=True):
        evaluation = super().evaluate(x, t, generator, parent, weighed)
        if t > 0:
            return evaluation
        twist = some(self.twist)
        log_twist, _ = twist.potential(twist.scale(0.0), some(evaluation.reward), parent)
        return replace(evaluation, log_twist=log_twist)


def _before(parent: ts.Evaluation | None, r: Tensor) -> tuple[Any, Any, Any]:
    """The log-twist, estimate and scale of the step before, the latter carried along."""
    return (0.0, r, torch.zeros_like(r)) if parent is None else (parent.log_twist, parent.reward, parent.carry)


def new_lambda(scale, r, parent):
    log_twist, r_before, _ = _before(parent, r)
    return log_twist + scale * (r - r_before), torch.full_like(r, scale)


def old_lambda(scale, r, parent):
    log_twist, r_before, scale_before = _before(parent, r)
    return log_twist + scale_before * (r - r_before), torch.full_like(r, scale)


def no_denominator(scale, r, parent):
    log_twist, _, _ = _before(parent, r)
    return log_twist + scale * r, torch.full_like(r, scale)


def late_lambda(scale, r, parent):
    _, _, scale_before = _before(parent, r)
    return scale_before * r, torch.full_like(r, scale)


def twisted(potential: Any) -> Callable[[ts.Steering], ts.Steering]:
    return lambda right: ToTheEnd(
        right.model, replace(some(right.twist), potential=ts.potentials.Potential(potential)), right.proposal
    )


@dataclass(frozen=True)
class LastWeightSkipped(ts.Steering):
    def evaluate(self, x, t, generator, parent=None, weighed=True):
        evaluation = super().evaluate(x, t, generator, parent, weighed)
        return replace(evaluation, log_twist=parent.log_twist) if t == 0 and parent is not None else evaluation

    def log_ratio(self, y, x, evaluation, step, q, log_q=None):
        return super().log_ratio(y, x, evaluation, step, q) * (step.s > 0)


# ---- ratios gone wrong


@dataclass(frozen=True)
class WrongRatio(ts.Steering):
    wrong: Callable[..., Tensor] = ts.Steering.log_ratio

    def log_ratio(self, y, x, evaluation, step, q, log_q=None):
        return self.wrong(self, y, x, evaluation, step, q)


def no_ratio(path, y, x, evaluation, step, q):
    return torch.zeros(len(y), dtype=path.model.dtype)


def inverted(path, y, x, evaluation, step, q):
    return -ts.Steering.log_ratio(path, y, x, evaluation, step, q)


def opened_only(path, y, x, evaluation, step, q):
    p = path.model.transition(x, evaluation.prediction, step, q.sites)
    sites = [m.dense().log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1) for m in (p, q)]
    opened = (x == path.model.kernel.mask_id) & (y != path.model.kernel.mask_id)
    return torch.where(opened, sites[0] - sites[1], 0.0).sum(-1)


def c_everywhere(path, y, x, evaluation, step, q):
    return path.model.transition(x, evaluation.prediction, step, q.sites).token_mass.sum(-1)


def own_sites(path, y, x, evaluation, step, q):
    return path.model.log_prob(y, x, evaluation.prediction, step, None) - q.log_prob(y)


def weighed(wrong: Callable[..., Tensor]) -> Callable[[ts.Steering], ts.Steering]:
    return lambda right: WrongRatio(right.model, right.twist, right.proposal, wrong)


def predicted_opened_only(m: Moves) -> Tensor:
    """The ratio p/q of a whole move but for its sites that stay: those are all that a move without openings has."""
    path, step = m.scene.path, m.scene.path.steps[m.index]
    x, y = m.exact.states[m.row], m.exact.states[m.column]
    evaluation = path.evaluate(m.exact.states, step.t, None)
    p = path.model.transition(m.exact.states, untyped(evaluation.prediction), step, None).dense().log_p.exp()
    q = untyped(path.propose(m.exact.states, evaluation, step)).dense().log_p.exp()
    ratio = torch.ones(len(x), dtype=p.dtype)
    for site in range(x.shape[1]):
        here = (m.row, site, y[:, site])
        ratio *= torch.where((x[:, site] == B.mask_id) & (y[:, site] != B.mask_id), p[here] / q[here], 1.0)
    return ratio.log() + m.psi[1] - m.psi[0]


def predicted_c(m: Moves) -> Tensor:
    mu1, mu2 = numbers(B.data["mu1"]), numbers(B.data["mu2"])
    c = (mu1 ** POWERS[0] * mu2 ** POWERS[1]).sum(-1)
    return torch.where(m.exact.states == B.mask_id, c, 1.0).prod(-1).log()[m.row]


@dataclass(frozen=True)
class Bug:
    target: str
    proposal: str
    broken: Callable[[ts.Steering], ts.Steering]
    law: Callable[[Moves], Tensor]
    samplers: tuple[str, ...] = ("mdm", "remdm")


def _right_but_last(m: Moves) -> Tensor:
    return torch.zeros_like(m.log_ratio) if m.last else m.log_ratio + m.psi[1] - m.psi[0]


ALL = ("mdm", "remdm", "lowconf")
BUGS = {
    "last weight skipped": Bug(
        "tilt",
        "gradient",
        lambda right: LastWeightSkipped(right.model, right.twist, right.proposal),
        _right_but_last,
    ),
    "p/q omitted": Bug("tilt", "gradient", weighed(no_ratio), lambda m: m.psi[1] - m.psi[0]),
    "new lambda for both": Bug("tilt", "base", twisted(new_lambda), lambda m: m.lam(m.index + 1) * (m.r[1] - m.r[0])),
    "old lambda for both": Bug("tilt", "base", twisted(old_lambda), lambda m: m.lam(m.index) * (m.r[1] - m.r[0])),
    "denominator omitted": Bug("tilt", "base", twisted(no_denominator), lambda m: m.lam(m.index + 1) * m.r[1]),
    "lambda one step late": Bug(
        "tilt",
        "base",
        twisted(late_lambda),
        lambda m: m.lam(m.index) * m.r[1] - m.lam(max(m.index - 1, 0)) * m.r[0],
    ),
    "ratio over opened sites only": Bug("tilt", "gradient", weighed(opened_only), predicted_opened_only),
    "unweighted guidance": Bug("product", "cfg", weighed(no_ratio), lambda m: torch.zeros_like(m.log_ratio), ALL),
    "c over all masked sites": Bug("product", "cfg", weighed(c_everywhere), predicted_c, ALL),
    "guidance weight inverted": Bug("product", "cfg", weighed(inverted), lambda m: -m.log_ratio, ALL),
}


@pytest.mark.parametrize(
    ("name", "sampler"), [(name, sampler) for name, bug in BUGS.items() for sampler in bug.samplers]
)
@pytest.mark.slow
def test_bugs_are_caught(name, sampler):
    bug = BUGS[name]
    scene = Scene(sampler, bug.target, bug.proposal)
    outcome = scene.try_out(bug.broken(scene.path))
    assert passes(scene)
    assert abs(outcome.z) > 4
    assert abs(outcome.z_against(predict(scene, bug.law) - truth(scene).log_z)) < 4


@pytest.mark.parametrize("sampler", ["mdm", "remdm"])
@pytest.mark.slow
def test_wrong_sign_of_a_power(sampler):
    """p1^a p2^-b, with the schedule to the sum of the powers: another measure, and known as such."""
    scene = Scene(sampler, "product", "cfg")
    a, b = POWERS
    model = B.product(sampler, a, -b, convention=ts.kernel_powers, correct_remasking=False)
    outcome = scene.try_out(ts.Steering(model, None, ts.Guided()))
    assert passes(scene)
    assert abs(outcome.z) > 4
    assert abs(outcome.z_against(answer(model).log_z - truth(scene).log_z)) < 4


@pytest.mark.slow
def test_naive_weights_of_a_remasking_product():
    """Sound SMC for the path measure of the paper, which is not the product's."""
    naive, corrected = (B.product("remdm", *POWERS, correct_remasking=correct) for correct in (False, True))
    for model, other in ((naive, corrected), (corrected, naive)):
        path = ts.Steering(model, None, ts.Guided())
        assert trial(path, answer(model), populations=4096).unbiased
        assert abs(trial(path, answer(other), populations=1024).z) > 4


@pytest.mark.parametrize("potential", [ts.potentials.maximum, ts.potentials.total])
@pytest.mark.slow
def test_potentials_without_their_final_correction(potential):
    right = ts.Steering(A.model("mdm"), A.tilt("mdm", potential=potential, ramp=ts.ramps.constant))
    target = answer(right.model, right.twist)
    assert trial(right, target, populations=4096).unbiased
    assert abs(trial(ToTheEnd(right.model, right.twist), target, populations=4096).z) > 4


# ---- random twists


@dataclass(frozen=True)
class Redrawn(ts.Steering):
    """The twist in the denominator is drawn anew."""

    def move(self, x, evaluation, step, generator):
        moved = super().move(x, evaluation, step, generator)
        again = evaluation.log_twist - self.evaluate(x, step.t, generator).log_twist
        return moved._replace(log_ratio=moved.log_ratio + again)


@dataclass(frozen=True)
class Unpermuted(ts.Evaluation):
    """The twist stays behind when its particle is resampled."""

    def take(self, index):
        return replace(super().take(index), log_twist=self.log_twist)


@dataclass(frozen=True)
class LeftBehind(ts.Steering):
    def evaluate(self, x, t, generator, parent=None, weighed=True):
        evaluation = super().evaluate(x, t, generator, parent, weighed)
        return Unpermuted(*(getattr(evaluation, f.name) for f in fields(evaluation)))


AVERAGES = {"lse": ts.estimators.log_mean_exp, "mean": ts.estimators.mean}
MOMENTS = case(16)["outputs"]["moments"]


@pytest.mark.parametrize("name", MOMENTS)
def test_twists_that_are_not_carried(name):
    """The golden file says what redrawn twists lead to; `name` reads like "M=2,lse"."""
    draws, average = name.removeprefix("M=").split(",")
    tilt = A.tilt("mdm", draws=int(draws), average=AVERAGES[average], estimator=ts.Sampled())
    # The golden numbers are for twists drawn at every step, so nothing may be kept of particles that have not moved.
    table = A.model("mdm").denoiser
    right = ts.Steering(replace(A.model("mdm"), denoiser=lambda x, t: table(x, t)), tilt)
    target = answer(right.model, tilt)
    carried, redrawn, left = (
        trial(cls(right.model, tilt), target, 16, 4096) for cls in (ts.Steering, Redrawn, LeftBehind)
    )
    assert carried.unbiased
    assert abs(redrawn.z) > 4
    assert abs(redrawn.z_against(MOMENTS[name]["logZ_if_redrawn"] - target.log_z)) < 4
    assert abs(left.z) > 4


def test_the_scale_outside_is_no_bug():
    """log E[exp(r)] without 1/kl inside is another twist on the way to the same target."""
    tilt = B.tilt("mdm", estimator=ts.Exact(), average=ts.estimators.log_mean_exp_outside)
    inside = replace(tilt, average=ts.estimators.log_mean_exp)
    exact, other = (enumerate_steering(ts.Steering(B.model("mdm"), twist)) for twist in (tilt, inside))
    assert not torch.allclose(exact.log_twist[1:-1], other.log_twist[1:-1])
    assert exact.log_z == pytest.approx(other.log_z)
    assert trial(ts.Steering(B.model("mdm"), tilt), answer(B.model("mdm"), tilt)).unbiased


# ---- bookkeeping


def reset(log_w, generator):
    """Not resampled, and yet the weights start anew: nothing is banked."""
    return torch.arange(log_w.shape[-1]).expand(log_w.shape), torch.zeros_like(log_w)


def levelled(log_w, generator):
    """Resampled where the effective size is low, but elsewhere too every particle gets the mean weight."""
    ancestors, even = ts.resampling.multinomial(log_w, generator)
    low = ts.resampling.ess(log_w) < log_w.shape[-1] / 2
    return torch.where(low.unsqueeze(-1), ancestors, torch.arange(log_w.shape[-1])), even


@pytest.mark.slow
def test_weights_lost_when_resampling_is_skipped():
    scene = Scene("mdm", "tilt", "base")
    right = trial(scene.path, truth(scene), when=ts.triggers.ess_below(0.5))
    lost, level = (trial(scene.path, truth(scene), resample=resample) for resample in (reset, levelled))
    assert right.unbiased
    assert abs(lost.z) > 4
    only_last = predict(scene, lambda m: m.psi[1] - m.psi[0] if m.last else torch.zeros_like(m.log_ratio))
    assert abs(lost.z_against(only_last - truth(scene).log_z)) < 4
    assert abs(level.z) > 4


@pytest.mark.slow
def test_sites_that_are_not_shared():
    """Where p and q open different sites all particles die; sharing q's sites is sound, for q's reference."""
    right = ts.Steering(B.model("lowconf"), B.tilt("lowconf"), B.amortised(own_order=True))
    target = answer(right.model, right.twist, right.proposal)
    assert trial(right, target).unbiased
    broken = ts.smc(weighed(own_sites)(right), 32, 64, generator=torch.Generator().manual_seed(0))
    assert (broken.log_z == -torch.inf).all()
