"""golden.json, number by number, through the public API: exact values from an independent implementation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from narrow import untyped
from torch import Tensor
from toys import CASES, FORMS, GOLDEN, Following, Toy, case, in_form, multilinear, numbers

import tokensteer as ts
from tokensteer.core.categorical.forms import HiddenLogits, Logits, LogProbs
from tokensteer.core.numerics.rows import support
from tokensteer.core.particles.path import Moved, Resources
from tokensteer.core.twists import estimators as estimates
from tokensteer.testing import Enumeration, TableDenoiser, enumerate_steering, score

pytestmark = pytest.mark.fast

TOLERANCE = 1e-6
SAMPLED = {name: c for name, c in CASES.items() if "sampler" in c}
in_every_form = pytest.mark.parametrize("form", FORMS)  # the numbers are the same however the network gives its answer


def close(ours: Tensor | float, golden: object) -> None:
    """Equal to the tolerance, with -inf in the same places."""
    theirs = numbers(golden)
    ours = torch.as_tensor(ours, dtype=torch.float64)
    assert ours.shape == theirs.shape
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.where(ours.isinf(), 0.0, ours - theirs).abs().max() <= TOLERANCE


def target_of(toy: Toy, sampler: str, target: str, a: float, b: float) -> tuple[ts.Model, ts.Tilt | None]:
    """The golden targets; their remasking products are path measures."""
    model = toy.model(sampler) if target == "tilt" else toy.product(sampler, a, b, correct_remasking=False)
    return model, toy.tilt(sampler) if "tilt" in target else None


def proposals_of(toy: Toy, target: str, a: float, b: float) -> dict[str, list[ts.Proposal]]:
    optimal: list[ts.Proposal] = [ts.Enumerated()]
    if target == "product":
        visible = [_log_visible(toy, joint) for joint in ("p1", "p2")]
        h = multilinear((a - 1) * visible[0] + b * visible[1], toy.tokens + 1, toy.length)
        gradient, optimal = Following(h), [*optimal, ts.Optimal()]
    else:
        gradient = ts.Gradient() if target == "tilt" else ts.Gradient(base=ts.Guided())
    learned: list[ts.Proposal] = [toy.amortised()] if "muq" in toy.data else []
    return {
        "base": [ts.FromModel()],
        "cfg": [ts.Guided()],
        "gradient": [gradient],
        "optimal": optimal,
        "learned": learned,
    }


def _log_visible(toy: Toy, joint: str) -> Tensor:
    """log of the marginal probability of the visible tokens, at every state."""
    table = toy.joint(joint)
    allowed = torch.nn.functional.one_hot(toy.states, toy.tokens + 1).double()
    allowed = allowed[..., :-1] + allowed[..., -1:]
    left = table.expand(len(toy.states), *table.shape)
    for site in range(toy.length):
        left = (left * allowed[:, site].view(len(toy.states), -1, *[1] * (left.dim() - 2))).sum(1)
    return left.log()


def test_forms_are_kept_as_they_are() -> None:
    """Each form has a store of its own, so that the numbers below are those of three ways of keeping a law."""
    for form, kind in zip(FORMS, (LogProbs, Logits, HiddenLogits), strict=True):
        for model in (Toy("B", form=form).model("mdm"), Toy("B", form=form).model("remdm", "p2")):
            (store,) = model.predict(model.start(1, None), 1.0).stores
            assert type(store) is kind
            assert store.dtype == torch.float64


@in_every_form
@pytest.mark.parametrize("name", ["A", "B"])
def test_toys(name: str, form: str) -> None:
    toy = Toy(name, form=form)
    for joint, mu in (("p1", "mu1"), ("p2", "mu2")):
        look = ts.NoisyState(toy.states, toy.model("mdm", joint).predict(toy.states, 0.5).laws(), 0.5, toy.mask_id)
        close(look.clean_probs()[..., :-1], toy.data[mu])
    close(toy.soft_reward, toy.data["rhat_lse"])


@in_every_form
@pytest.mark.parametrize("name", SAMPLED)
def test_laws_of_every_step(name: str, form: str) -> None:
    c, out = SAMPLED[name], SAMPLED[name]["outputs"]
    model, tilt = target_of(Toy(c["toy"], form=form), c["sampler"], c["target"], c["a"], c["b"])
    exact = enumerate_steering(ts.Steering(model, tilt))
    close(exact.log_z, out["logZ"])
    close(exact.target, out["terminal_target_clean"])
    if "model_terminal_clean" in out:
        close(exact.model_law, out["model_terminal_clean"])
    num_steps = len(model.steps)
    for t in range(num_steps + 1) if "rho_t_S" in out else ():
        close(exact.log_law[num_steps - t].exp(), out["rho_t_S"][str(t)])
        close(exact.log_targets[num_steps - t].exp(), out["intermediate_target_S"][str(t)])
        close(exact.log_value[num_steps - t], out["log_backward_value_S"][str(t)])


@in_every_form
@pytest.mark.parametrize(
    ("name", "proposal"), [(name, p) for name, c in SAMPLED.items() for p in c["outputs"]["trajectories"]]
)
def test_trajectories(name: str, proposal: str, form: str) -> None:
    c = SAMPLED[name]
    toy = Toy(c["toy"], form=form)
    model, tilt = target_of(toy, c["sampler"], c["target"], c["a"], c["b"])
    for q in proposals_of(toy, c["target"], c["a"], c["b"])[proposal]:
        steering = ts.Steering(model, tilt, q)
        trajectories = c["outputs"]["trajectories"][proposal]
        ours = score(steering, torch.tensor([golden["x"] for golden in trajectories]))
        for k, golden in enumerate(trajectories):
            x = torch.tensor(golden["x"])
            close(ours.log_p[k], golden["log_M"])
            close(ours.log_q[k], golden["log_q"])
            close(ours.log_increment[k], golden["log_inc"])
            close(ours.log_increment[k].sum(), golden["sum_log_inc"])
            if "log_normaliser" in golden:
                close(ours.log_increment[k] + ours.log_twist[k, :-1], golden["log_normaliser"])
            for step in steering.steps if "q_tokens" in golden else ():
                here = x[step.index].unsqueeze(0)
                measure = untyped(steering.propose(here, steering.evaluate(here, step.t, None), step))
                close(measure.dense().log_p[0].exp(), golden["q_tokens"][step.index])


@in_every_form
def test_low_confidence_in_the_order_of_q(form: str) -> None:
    out, toy = case(13)["outputs"], Toy(case(13)["toy"], form=form)
    model, q = toy.model("lowconf"), toy.amortised(own_order=True)
    steering = ts.Steering(model, toy.tilt("lowconf"), q)
    exact = enumerate_steering(steering)
    close(exact.log_z, out["logZ"])
    close(exact.target, out["terminal_target_clean"])
    close(exact.model_law, out["model_terminal_clean"])
    x, step = model.start(1, None), model.steps[0]
    for name, denoiser in (("p_order", model.denoiser), ("q_order", q.denoiser)):
        sites = model.kernel.choose(x, denoiser(x, step.t), step)
        assert isinstance(sites, torch.Tensor)
        assert sites[0].nonzero().flatten().tolist() == out["positions_all_mask"][name]
    for golden in out["trajectories"]:
        ours = score(steering, torch.tensor(golden["x"]).unsqueeze(0))
        close(ours.log_increment[0], golden["log_inc"])
        close((ours.log_p - ours.log_q)[0], golden["log_ratio"])


CONVENTIONS = {"paper": ts.paper_powers, "noZ": ts.kernel_powers, "clean": ts.denoiser_powers}


@in_every_form
@pytest.mark.parametrize("name", case(14)["outputs"])
def test_product_conventions(name: str, form: str) -> None:
    out, toy = case(14)["outputs"][name], Toy(case(14)["toy"], form=form)
    model = toy.product("mdm", out["a"], out["b"], convention=CONVENTIONS[out["variant"]])
    exact = enumerate_steering(ts.Steering(model, proposal=ts.Optimal()))
    close(exact.log_z, out["logZ"])
    close(exact.target, out["terminal_target_clean"])
    for step in model.steps:
        t = str(len(model.steps) - step.index)
        for key in ("allmask", "0m"):
            x = torch.full((1, toy.length), toy.mask_id)
            x[0, 0] = 0 if key == "0m" else toy.mask_id
            measure = model.transition(x, model.predict(x, step.t), step, None)
            close(measure.dense().log_p[0].exp(), out[f"M_tokens_from_{key}"][t])
            if key == "0m":
                close(measure.normalise().dense().log_p[0].exp(), out["optimal_q_tokens_from_0m"][t])


@in_every_form
def test_remasking_product_corrected(form: str) -> None:
    c = case(15)
    out, toy = c["outputs"], Toy(c["toy"], form=form)
    model = toy.product("remdm", c["a"], c["b"])
    steering = ts.Steering(model, proposal=ts.Guided())
    exact = enumerate_steering(steering)
    close(exact.log_z, out["logZ"])
    close(exact.target, out["terminal_target_clean"])
    step = model.steps[0]
    prediction = model.predict(toy.states, step.t)
    close(untyped(model.transition(toy.states, prediction, step, None)).token_mass.exp(), out["c_S"])
    for golden in out["trajectories"]:
        close(score(steering, torch.tensor(golden["x"]).unsqueeze(0)).log_increment[0], golden["log_inc"])


AVERAGES = {
    "mean": ts.estimators.mean,
    "lse": ts.estimators.log_mean_exp,
    "lse_inside": ts.estimators.log_mean_exp,
    "lse_outside": ts.estimators.log_mean_exp_outside,
}


@in_every_form
@pytest.mark.parametrize("kind", case(16)["outputs"]["increments"])
def test_estimate_from_given_draws(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c, toy = case(16), Toy(case(16)["toy"], form=form)
    num_steps = toy.num_steps("mdm")
    out, draws = c["outputs"]["increments"][kind], c["inputs"]["draws"]

    def given(look: ts.NoisyState, count: int, generator: object, seed: object) -> Tensor:
        return torch.tensor(draws[f"x{round(look.t * num_steps)}"]).unsqueeze(1)

    monkeypatch.setattr(estimates, "draw_clean", given)
    tilt = toy.tilt("mdm", draws=2, average=AVERAGES[kind], estimator=ts.Sampled())
    steering = ts.Steering(toy.model("mdm"), tilt)
    x = torch.tensor(c["inputs"]["trajectory"])
    ours = score(steering, x.unsqueeze(0))
    close(ours.log_increment[0], out["log_inc_base"])
    close(ours.log_twist[0], out["psi"])
    for i, golden in enumerate(out["rhat"][1:], 1):
        t = 1 - i / num_steps
        ours_r = steering.evaluate(x[i : i + 1], 0.0 if i == num_steps else t, None).reward
        assert ours_r is not None
        close(ours_r[0], golden)


@in_every_form
@pytest.mark.parametrize("kind", case(16)["outputs"]["moments"])
def test_moments_of_random_twists(kind: str, form: str) -> None:
    out, toy = case(16)["outputs"]["moments"][kind], Toy(case(16)["toy"], form=form)
    draws, average = int(kind[2]), AVERAGES[kind.split(",")[1]]
    model = toy.model("mdm")
    exact = enumerate_steering(ts.Steering(model, toy.tilt("mdm")))
    num_steps = len(model.steps)

    def moment(sign: float, t: int) -> Tensor:
        """E[exp(± psi_t)] at every state, over all M-tuples of clean completions."""
        look = ts.NoisyState(toy.states, model.predict(toy.states, 0.5).laws(), 0.5, toy.mask_id)
        law = look.clean_probs()
        row, x0 = support(law.log(), 10**6)
        log_p = law.log()[row].gather(-1, x0.unsqueeze(-1)).squeeze(-1).sum(-1)
        moments: list[Tensor] = []
        for state in range(len(toy.states)):
            mine = (row == state).nonzero().flatten().tolist()
            tuples = torch.tensor(list(itertools.product(mine, repeat=draws))).T
            r = average(toy.reward(x0[tuples.flatten()]).view_as(tuples), torch.zeros_like(log_p[tuples]), toy.kl)
            scale = toy.ramp("mdm")(t / num_steps) / toy.kl
            moments.append((log_p[tuples].sum(0).exp() * (sign * scale * r).exp()).sum())
        return torch.stack(moments)

    up = [moment(+1.0, t) for t in range(num_steps + 1)]
    for t in range(num_steps + 1):
        close(up[t], out["E_exp_psi_S"][str(t)])
        mass = exact.log_law[num_steps - t].exp() * up[t]
        close(mass / mass.sum(), out["intermediate_target_S"][str(t)])
    close(exact.log_z, out["logZ_carried"])
    law = exact.log_law[0].exp()
    for index, moves in enumerate(exact.moves):
        t = num_steps - index
        redrawn = law * up[t] * moment(-1.0, t)
        law = torch.zeros_like(law).index_add(0, moves.column, redrawn[moves.row] * moves.log_p.exp())
    close((law * up[0]).sum().log(), out["logZ_if_redrawn"])


@dataclass(frozen=True)
class DifferentiableToy:
    """The network and reward of golden case 18."""

    inputs: dict[str, Any] = field(default_factory=lambda: case(18)["inputs"])

    def logits(self, x: Tensor) -> Tensor:
        tokens = numbers(self.inputs["c"]) + torch.einsum("lkvw,pkw->plv", numbers(self.inputs["A"]), x)
        return torch.cat([tokens, torch.zeros_like(tokens[..., :1])], -1)

    @property
    def mask_id(self) -> int:
        return len(self.inputs["b"][0])

    def one_hots(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(x, self.mask_id + 1).double()

    def reward(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else self.one_hots(x)
        x, b, w = x[..., : self.mask_id], numbers(self.inputs["b"]), numbers(self.inputs["W"])
        upper = torch.ones(len(b), len(b), dtype=torch.float64).triu(1)
        return (b * x).sum((-1, -2)) + torch.einsum("plv,lkvw,lk,pkw->p", x, w, upper, x)


@in_every_form
@pytest.mark.parametrize("carry", ["soft", "where"])
@pytest.mark.parametrize("index", range(len(case(18)["outputs"])))
def test_gradients(index: int, carry: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, out = DifferentiableToy(), case(18)["outputs"][index][carry]
    ids = torch.tensor([case(18)["outputs"][index]["x"]])
    gumbel = torch.nn.functional.pad(numbers(toy.inputs["gumbel"]), (0, 1)).unsqueeze(1)
    given = torch.where(ids == toy.mask_id, torch.tensor(toy.inputs["x0_draws"]).unsqueeze(1), ids)
    monkeypatch.setattr(estimates, "_gumbel", lambda look, draws, generator: gumbel[:, look.hidden])
    monkeypatch.setattr(estimates, "draw_clean", lambda look, draws, generator, seed: given)
    x = toy.one_hots(ids).requires_grad_()
    denoiser = in_form(ts.from_logits(toy.logits, toy.mask_id, ignores_time=True), toy.mask_id + 1, form)

    def estimate(tilt: ts.Tilt) -> tuple[Tensor, Tensor]:
        # A constant x in the carry-over is the `where` convention: the direct effect of a token is lost.
        look = ts.NoisyState(x if carry == "soft" else x.detach(), denoiser(x, 0.5), 0.5, toy.mask_id)
        close(look.clean_probs()[0, :, : toy.mask_id], out["mu"])
        value = tilt.estimate(look, None)
        return value, torch.autograd.grad(value.sum(), x)[0][0]

    smooth = ts.Tilt(toy.reward, kl=0.5, draws=2, differentiable=True, estimator=ts.SoftInput())
    value, gradient = estimate(smooth)
    close(value[0], out["rhat_relaxed"])
    close(gradient, out["grad_relaxed"])
    for kind in ("mean", "lse"):
        relaxed = ts.Relaxed(toy.inputs["tau"])
        value, gradient = estimate(replace(smooth, estimator=relaxed, average=AVERAGES[kind]))
        close(value[0], out[f"rhat_gumbel_{kind}"])
        close(gradient, out[f"grad_gumbel_{kind}"])
        value, gradient = estimate(ts.Tilt(toy.reward, kl=0.5, draws=2, average=AVERAGES[kind]))
        close(gradient, out[f"reinforce_grad_{kind}"])
    close(toy.reward(given[:, 0]), out["reinforce_r"])


def survivor_law(exact: Enumeration) -> Tensor:
    """The exact law of SVDD with two candidates: pairs of moves from one survivor, chosen by weight."""
    law = exact.log_law[0].exp()
    for index, moves in enumerate(exact.moves):
        weight = (exact.log_twist[index + 1]).exp()
        after = torch.zeros_like(law)
        for state in law.nonzero().flatten():
            mine = moves.row == state
            y, p = moves.column[mine], moves.log_p[mine].exp()
            first = weight[y][:, None] / (weight[y][:, None] + weight[y][None, :])
            after.index_add_(0, y, law[state] * 2 * p * (first * p[None, :]).sum(1))
        law = after
    return law


@in_every_form
def test_baselines(form: str) -> None:
    c = case(20)
    out, inputs, toy = c["outputs"], c["inputs"], Toy(c["toy"], form=form)
    model, tilt = toy.model("mdm"), toy.tilt("mdm", ramp=ts.ramps.constant)
    exact = enumerate_steering(ts.smc_base(model, tilt).steering)
    close(exact.target, out["tilted_target_clean"])
    x = torch.tensor(inputs["trajectory"]).unsqueeze(0)
    for potential in ("difference", "max", "sum"):
        kind = {"difference": ts.potentials.difference, "max": ts.potentials.maximum, "sum": ts.potentials.total}[
            potential
        ]
        ours = score(ts.fk_steering(model, tilt, kind).steering, x)
        start = [] if potential == "difference" else [ours.log_twist[0, :1]]
        close(torch.cat([*start, ours.log_increment[0]]), out[f"fk_{potential}"])
        if potential == "difference":
            close(ours.log_twist[0], inputs["R"])
    log_twist = {tuple(s.tolist()): w for s, w in zip(toy.states, exact.log_twist[0], strict=True)}
    nested = inputs["nested"]
    weights = torch.stack([log_twist[tuple(y)] - log_twist[tuple(nested["x_t"])] for y in nested["candidates"]])
    close(ts.resampling.one_survivor(weights.unsqueeze(0))[1][0, 0], out["nested_log_weight"])
    close(survivor_law(exact)[exact.clean], out["svdd_K2_terminal_clean"])
    order = toy.reward(toy.clean).argsort()
    for n, law in out["bon_clean"].items():
        cdf = exact.model_law[order].cumsum(0) ** int(n)
        best = torch.zeros_like(cdf).scatter(0, order, cdf.diff(prepend=torch.zeros(1, dtype=torch.float64)))
        close(best, law)


@in_every_form
def test_baselines_run_as_their_laws_say(form: str) -> None:
    """The samplers themselves, against the exact laws of the test above."""
    toy = Toy(case(20)["toy"], form=form)
    model, tilt = toy.model("mdm"), toy.tilt("mdm", ramp=ts.ramps.constant)
    generator, populations = torch.Generator().manual_seed(7), 20_000
    result = ts.svdd(model, tilt)(2, populations, generator=generator)
    _agrees(toy, result.sample(1)[:, 0], case(20)["outputs"]["svdd_K2_terminal_clean"])
    result = ts.best_of_n(model, tilt)(4, populations, generator=generator)
    _agrees(toy, result.best(), case(20)["outputs"]["bon_clean"]["4"])


def _agrees(toy: Toy, samples: Tensor, law: object) -> None:
    p = numbers(law)
    share = (samples.unsqueeze(1) == toy.clean).all(-1).double().mean(0)
    assert ((share - p) / (p * (1 - p) / len(samples)).sqrt()).abs().max() < 4


@dataclass(frozen=True)
class Scripted:
    """A Feynman-Kac path whose log-weights are given."""

    log_increments: Tensor

    @property
    def steps(self) -> tuple[ts.Step, ...]:
        return ts.uniform_steps(len(self.log_increments))

    @property
    def resources(self) -> Resources:
        return Resources()

    def start(self, rows: int, generator: object) -> Tensor:
        return torch.zeros(rows, 1, dtype=torch.long)

    def evaluate(
        self, x: Tensor, t: float, generator: object, parent: ts.Evaluation | None = None, weighed: bool = True
    ) -> ts.Evaluation:
        return ts.Evaluation(torch.zeros(len(x), dtype=torch.float64))

    def move(self, x: Tensor, evaluation: ts.Evaluation, step: ts.Step, generator: object) -> Moved:
        return Moved(x, self.log_increments[step.index], evaluation)


def test_bookkeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, out = case(22)["inputs"], case(22)["outputs"]
    flags = [False, *inputs["resample"]]
    path = Scripted(numbers(inputs["log_inc"]))
    num_particles = path.log_increments.shape[1]
    when = lambda log_w, step: torch.tensor([flags[step.index]])  # noqa: E731
    for resample in (ts.resampling.multinomial, ts.resampling.systematic, ts.resampling.residual, ts.resampling.ssp):
        result = ts.smc(path, num_particles, resample=resample, when=when, generator=torch.Generator().manual_seed(0))
        close(result.log_z[0], out["logZ"])
        close(result.ess[1:, 0], out["ess"])
    log_w = numbers(inputs["W"]).log().unsqueeze(0)
    for resample, u in ((ts.resampling.systematic, [inputs["u0"]]), (ts.resampling.multinomial, inputs["u"])):
        monkeypatch.setattr(
            "tokensteer.core.particles.resampling.uniforms", lambda shape, like, generator, u=u: numbers([u])
        )
        assert resample(log_w)[0][0].tolist() == out[resample.__name__]


@in_every_form
def test_schedule_edges(form: str) -> None:
    out, toy = case(23)["outputs"], Toy(case(23)["toy"], form=form)
    model = toy.model("mdm")
    assert isinstance(model.kernel, ts.Ancestral)
    num_steps = len(model.steps)
    for t, golden in out["sigma_max"].items():
        close(model.kernel.bound(model.steps[num_steps - int(t)]), golden)

    def tokens(t: int, x: list[int], sigma: Any) -> Tensor:
        step, state = model.steps[num_steps - t], torch.tensor([x])
        kernel = replace(untyped(toy.kernels["mdm"]), sigma=sigma)
        return kernel(state, model.predict(state, step.t).laws(), step).dense().log_p[0].exp()

    m = toy.mask_id
    close(tokens(2, [0, m], ts.Rescale(1.0)), out["tokens_sigma_max_t2_from_0m"])
    close(tokens(1, [0, m], ts.Cap(0.0)), out["tokens_t1_from_0m_sigma0"])
    close(tokens(num_steps, [m, m], ts.Cap(0.6)), out["tokens_t3_from_mm_sigma0.6"])
    close(tokens(num_steps, [m, m], ts.Cap(0.0)), out["tokens_t3_from_mm_sigma0"])


@in_every_form
@pytest.mark.parametrize("name", case(24)["outputs"])
def test_larger_toy(name: str, form: str) -> None:
    c = case(24)
    sampler, target = name.split("/")
    model, tilt = target_of(Toy(c["toy"], form=form), sampler, target, c["a"], c["b"])
    exact = enumerate_steering(ts.Steering(model, tilt))
    close(exact.log_z, c["outputs"][name]["logZ"])
    close(exact.target, c["outputs"][name]["terminal_target_clean"])
    if "model_terminal_clean" in c["outputs"][name]:
        close(exact.model_law, c["outputs"][name]["model_terminal_clean"])


def test_every_case_is_here() -> None:
    """Case 17 is with continuous time and 21 with MaskGIT; 19 comes with training. All others are tested above."""
    tested = {int(name[:2]) for name in SAMPLED} | {13, 14, 15, 16, 18, 20, 22, 23, 24}
    assert {int(c["id"][:2]) for c in GOLDEN["cases"]} - tested == {17, 19, 21}


def test_exact_denoiser_ignores_what_it_is_asked_about() -> None:
    """The table denoiser answers at a visible site too, from the other sites alone: carry-over is the library's."""
    joint = Toy("A").joint("p1")
    answer = TableDenoiser(joint)(torch.tensor([[0, 1]]), 0.5)[0, :, :2].exp()
    close(answer[0], (joint[:, 1] / joint[:, 1].sum()).tolist())
    close(answer[1], (joint[0] / joint[0].sum()).tolist())
