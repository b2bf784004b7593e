"""Where parts meet: dead ends, templates, interleaved runs, and particles of no weight."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import answer, trial
from toys import Toy

import tokensteer as ts
from tokensteer.testing import TableDenoiser, enumerate_steering

B = Toy("B")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hard(x: torch.Tensor) -> torch.Tensor:
    """A reward that forbids token 0 at the first site."""
    return torch.where(x[:, 0] == 0, -math.inf, 0.3 * B.reward(x))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_enumerated_with_a_hard_constraint(sampler: str, first: bool) -> None:
    """States without a future have any proposal and no weight; they must not touch the lists of others."""
    steering = ts.Steering(B.model(sampler), ts.Tilt(hard, estimator=ts.Exact()), ts.Enumerated())
    path = ts.Auxiliary(steering) if first else steering
    outcome = trial(path, answer(steering.model, steering.twist))
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Guided(), ts.Optimal(), ts.Enumerated()])
def test_products_that_rule_everything_out(proposal: ts.Proposal) -> None:
    """Two tables whose zeros leave some states without any token: such particles die, and the others are right."""
    joints = [[[0.0, 0.3, 0.2], [0.3, 0.1, 0.1]], [[0.2, 0.0, 0.3], [0.2, 0.3, 0.0]]]
    tables = [torch.tensor(j, dtype=torch.float64) for j in joints]
    tables = [torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in tables]
    tables[0][2, 0], tables[1][2, 1] = 0.2, 0.2
    models = [
        ts.Diffusion(TableDenoiser(t / t.sum()), ts.Ancestral(3), ts.uniform_steps(3), ts.template(2, 3))
        for t in tables
    ]
    steering = ts.Steering(ts.Product((models[0], replace(models[0], denoiser=models[1].denoiser)), (0.5, 0.5)))
    outcome = trial(replace(steering, proposal=proposal), answer(steering.model, None))
    assert outcome.unbiased, str(outcome)


def test_runs_side_by_side_do_not_meet() -> None:
    path = ts.Auxiliary(ts.Steering(B.model("mdm"), B.tilt("mdm"), ts.Enumerated()))
    alone = [list(ts.sweep(path, 8, 16, when=ts.triggers.always, generator=seeded(s)))[-1].log_w for s in (1, 2)]
    sweeps = [ts.sweep(path, 8, 16, when=ts.triggers.always, generator=seeded(s)) for s in (1, 2)]
    for records in zip(*sweeps, strict=True):
        last = records
    for ours, theirs in zip(last, alone, strict=True):
        assert torch.equal(ours.log_w, theirs)


def test_each_template_has_its_own_populations() -> None:
    prompts = torch.stack([ts.template(3, 3, [0]), ts.template(3, 3, [2])])
    steering = ts.Steering(replace(B.model("mdm"), template=prompts), B.tilt("mdm"))
    with pytest.raises(ValueError, match="2 templates and 3 populations"):
        ts.smc(steering, 4, 3)
    result = ts.smc(steering, 4, 4, generator=seeded())
    assert result.samples[..., 0].unique(dim=1).flatten().tolist() == [0, 0, 2, 2]


def test_templates_with_enumeration_are_each_exact() -> None:
    """Exact and Enumerated share work between twins; prompts in one call must give what they give alone."""
    prompts = [ts.template(3, 3, [1]), ts.template(3, 3, [2], at=[2])]
    tilt = ts.Tilt(B.reward, B.kl, ramp=ts.ramps.constant, estimator=ts.Exact())
    for sampler in ("mdm", "remdm"):
        model = B.model(sampler)
        together = ts.Steering(replace(model, template=torch.stack(prompts)), tilt, ts.Enumerated())
        log_z = ts.smc(together, 16, 2000, when=ts.triggers.always, generator=seeded()).log_z.view(2, 1000)
        for mine, prompt in zip(log_z, prompts, strict=True):
            exact = enumerate_steering(ts.Steering(replace(model, template=prompt), tilt)).log_z
            ratio = (mine - exact).exp()
            assert abs((ratio.mean() - 1) / (ratio.std() / math.sqrt(1000) + 1e-12)) < 4


def test_the_best_has_weight() -> None:
    result = ts.Result(
        samples=torch.tensor([[[0], [1]]]),
        log_w=torch.tensor([[0.0, -math.inf]], dtype=torch.float64),
        reward=torch.tensor([[1.0, 9.0]]),
        ess=torch.ones(1, 1),
        mean_reward=None,
        ancestors=torch.zeros(1, 1, 2, dtype=torch.long),
        rows={},
    )
    assert result.best().tolist() == [[0]]
    assert "1.0000 best" in repr(result)


def test_conventions_do_not_count_what_is_fixed() -> None:
    toy = Toy("A")
    for convention in (ts.denoiser_powers, ts.kernel_powers, ts.paper_powers):
        models = [replace(toy.model("mdm", j), template=ts.template(2, 2, [1])) for j in ("p1", "p2")]
        product = ts.Product((models[0], replace(models[0], denoiser=models[1].denoiser)), (1.2, 0.6), convention)
        x = torch.tensor([[1, 2]])
        for step in product.steps:
            table = product.transition(x, product.predict(x, step.t), step, None).dense().log_p
            assert table[0, 0].tolist() == [-math.inf, 0.0, -math.inf]


def test_prompts_without_a_mask_are_never_redrawn() -> None:
    kernel = ts.uniform_noise(3)
    flat = torch.zeros(3).log_softmax(-1)
    canvas = torch.tensor([ts.NO_MASK, 1, ts.NO_MASK])
    model = ts.Diffusion(lambda x, t: flat.expand(len(x), 3, 3), kernel, ts.uniform_steps(4), canvas)
    x = model.start(50, seeded())
    look = ts.NoisyState(x, model.clean(model.predict(x, 0.5)), 0.5, ts.NO_MASK)
    clean = ts.core.twists.estimators.draw_clean(look, 20, seeded())
    assert (clean[..., 1] == 1).all()


@pytest.mark.parametrize("potential", [ts.potentials.maximum, ts.potentials.total])
def test_fk_counts_only_where_it_resamples(potential) -> None:
    toy = Toy("C")
    tilt = ts.Tilt(toy.reward, kl=2.0, draws=2)
    method = ts.fk_steering(toy.model("mdm"), tilt, potential, interval=4)
    result = method(8, 2, generator=seeded())
    assert result.rows["reward"] == 8 * 2 * (2 * 1 + 1)  # two draws at step 4 of 8, and the end
    outcome = trial(method.steering, answer(method.steering.model, method.steering.twist), populations=2048)
    assert abs(outcome.z) < 4


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_fk_resamples_by_the_reward_of_that_very_step(interval: int) -> None:
    """A reward that is let in one step beside the resampling is unbiased too, and steers nothing."""
    toy = Toy("C")
    method = ts.fk_steering(toy.model("mdm"), ts.Tilt(toy.reward, kl=2.0, draws=2), interval=interval)
    result = method(16, generator=seeded())
    counts = [k for k in range(1, 8) if k % interval == 0]
    moved = (result.ancestors[:, 0] != torch.arange(16)).any(-1)
    assert result.mean_reward is not None
    assert result.mean_reward[1:, 0].isfinite().nonzero().flatten().add(1).tolist() == [*counts, 8]
    assert [k for k in range(8) if moved[k + 1]] == counts  # those that move on from there are not all
    assert (result.ess[counts] < 15.9).all()


def test_particle_gibbs_refines_a_run() -> None:
    steering = ts.Steering(B.model("mdm"), replace(B.tilt("mdm"), kl=2.0))
    run = list(ts.sweep(steering, 4, 6, generator=seeded(1)))
    reference = ts.gibbs.pick(run, seeded(2))
    chain = ts.particle_gibbs(steering, 2, 4, 6, reference=reference, generator=seeded(3))
    assert torch.equal(chain.samples[0], reference[-1])
    assert chain.result.rows["denoiser"] + chain.result.saved["denoiser"] == 2 * 4 * 6 * len(steering.steps)
