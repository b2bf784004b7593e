"""Noise other than masks: the interpolating process, uniform noise, and the mask as its special case."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from narrow import some
from toys import Listed, Toy, seeded
from uniform_toys import SCHEDULE, NoisyDenoiser, known_tilt, model, uniform_denoiser

import tokensteer as ts
from tokensteer.testing import enumerate_steering


def check(steering: ts.Steering, populations: int = 1000, particles: int = 8, seed: int = 5) -> None:
    """log Z and the law of clean sequences against enumeration, as z-scores."""
    exact = enumerate_steering(steering)
    result = ts.smc(
        steering,
        particles,
        populations,
        resample=ts.resampling.multinomial,
        when=ts.triggers.always,
        generator=seeded(seed),
    )
    here = (result.samples.unsqueeze(2) == exact.states).all(-1)
    mass = (result.log_w.exp().unsqueeze(-1) * here).mean(1) / math.exp(exact.log_z)
    ratio, often = mass.sum(-1), exact.log_targets[-1].exp() >= 1e-3
    error = ratio.std() / math.sqrt(populations)
    assert abs(ratio.mean() - 1) <= 4 * error + 1e-12
    z = (mass.mean(0) - exact.log_targets[-1].exp()) / (mass.std(0) / math.sqrt(populations))
    assert z[often].abs().max() < 4.5


def test_kernels_are_bayes_rule() -> None:
    """p(x_s | x_t) from a one-hot prediction is q(x_s | x_t, x_0), and moves the forward marginal from t to s."""
    prior = (0.5, 0.2, 0.3)
    kernel = ts.Interpolating(prior, ts.Cosine())
    v = torch.tensor(prior, dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    for step in ts.uniform_steps(4):
        alpha_t = kernel.schedule.alpha(step.t)
        alpha_s = 1.0 if step.s == 0 else kernel.schedule.alpha(step.s)
        for clean in range(3):
            log_x0 = eye[clean].log().expand(3, 1, 3)
            table = kernel(torch.arange(3).unsqueeze(1), log_x0, step).log_p[:, 0].exp()  # from z (rows) to w
            assert (table.sum(-1) - 1).abs().max() < 1e-12
            at_t, at_s = (a * eye[clean] + (1 - a) * v for a in (alpha_t, alpha_s))
            assert (at_t @ table - at_s).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize(
    ("powers", "convention"),
    [
        (None, ts.denoiser_powers),
        ((1.5, -0.5), ts.denoiser_powers),
        ((1.2, 0.6), ts.denoiser_powers),
        ((0.4, 0.3), ts.denoiser_powers),
        ((1.2, 0.6), ts.kernel_powers),
    ],
)
def test_the_mask_is_a_special_case(name: str, powers: tuple[float, ...] | None, convention) -> None:
    """v = mask gives the numbers of the masked kernel: laws, values and log Z, for a tilt and for products."""
    toy = Toy(name)
    prior = (*[0.0] * toy.tokens, 1.0)
    kernel = ts.Interpolating(prior, Listed(tuple(toy.data["alpha"])))

    def general(joint: str) -> ts.Diffusion:
        masked = toy.model("mdm", joint)
        return replace(masked, kernel=kernel, template=torch.full_like(masked.template, ts.NO_MASK))

    masked_models = [toy.model("mdm", joint) for joint in ("p1", "p2")]
    models = [general(joint) for joint in ("p1", "p2")]
    # To the general process the mask is a token like any other, and enumeration asks for its reward too.
    tilt = ts.Tilt(lambda x: toy.reward(x.clamp(max=toy.tokens - 1)), toy.kl, estimator=ts.Exact())
    pairs = [
        (models[0], masked_models[0])
        if powers is None
        else (ts.Product(m, powers, convention, lookahead=False) for m in (models, masked_models))
    ]
    for ours, theirs in pairs:
        a, b = (enumerate_steering(ts.Steering(m, tilt if powers is None else None)) for m in (ours, theirs))
        assert abs(a.log_z - b.log_z) < 1e-12
        assert (a.log_law.exp() - b.log_law.exp()).abs().max() < 1e-12
        reached = b.log_law > -math.inf
        assert (a.log_twist - b.log_twist)[reached].abs().max() < 1e-12


@pytest.mark.fast
@pytest.mark.parametrize(
    "proposal",
    [ts.FromModel(), ts.Gradient(clip=0.5), ts.Enumerated(), ts.Gradient(clip=0.5, tokens_only=True)],
    ids=["base", "gradient", "optimal", "tokens"],
)
@pytest.mark.parametrize("name", ["A", "B"])
def test_tilt_is_unbiased(name: str, proposal: ts.Proposal) -> None:
    toy = Toy(name)
    check(ts.Steering(model(toy), known_tilt(toy, kl=1.0), proposal))


def test_learned_proposals() -> None:
    toy = Toy("B")
    q = ts.Amortised(uniform_denoiser(toy.joint("p2"), SCHEDULE))
    check(ts.Steering(model(toy), known_tilt(toy, kl=1.0), q))


@pytest.mark.parametrize("estimator", [ts.Sampled(), ts.Exact()])
def test_estimates_look_through_the_noise(estimator: ts.core.twists.tilt.Estimator) -> None:
    toy = Toy("A")
    check(ts.Steering(model(toy), ts.Tilt(toy.reward, 1.0, draws=2, estimator=estimator)))
    gentle = ts.Gradient(clip=1.0)
    check(ts.Steering(model(toy), ts.Tilt(toy.reward, 1.0, draws=2, estimator=estimator), gentle))


@pytest.mark.parametrize(
    "proposal", [ts.FromModel(), ts.Optimal(), ts.Guided(), ts.Enumerated()], ids=["base", "optimal", "cfg", "listed"]
)
@pytest.mark.parametrize(("tilted", "powers"), [(True, (1.5, -0.5)), (False, (1.2, 0.6))])
def test_products_are_unbiased(proposal: ts.Proposal, tilted: bool, powers: tuple[float, ...]) -> None:
    toy = Toy("B")
    product = ts.Product((model(toy), model(toy, "p2")), powers)
    check(ts.Steering(product, known_tilt(toy, kl=1.0) if tilted else None, proposal))


def test_products_follow_a_gradient_too() -> None:
    toy = Toy("B")
    product = ts.Product((model(toy), model(toy, "p2")), (1.2, 0.6))
    check(ts.Steering(product, known_tilt(toy, kl=1.0), ts.Gradient(ts.Guided(), clip=0.5)))


@pytest.mark.parametrize("prior", [(1 / 3, 1 / 3, 1 / 3), (0.6, 0.1, 0.3)], ids=["uniform", "uneven"])
@pytest.mark.parametrize("powers", [(1.5, -0.5), (1.2, 0.6), (0.4, 0.3)])
def test_products_of_exact_models_reach_the_product_of_the_data(
    powers: tuple[float, ...], prior: tuple[float, ...]
) -> None:
    """In many steps log Z is log sum_x prod_k p_k(x)^a_k and the law is that product, at first order, for any noise."""
    joints = [torch.rand(3, 3, generator=seeded(k), dtype=torch.float64) + 0.1 for k in (1, 2)]
    joints = [joint / joint.sum() for joint in joints]
    goal = (joints[0] ** powers[0] * joints[1] ** powers[1]).flatten()
    gaps, misses = [], []
    for num_steps in (16, 64):
        exact = enumerate_steering(
            ts.Steering(
                ts.Product(
                    [
                        ts.Diffusion(
                            NoisyDenoiser(joint, SCHEDULE, prior),
                            ts.Interpolating(prior, SCHEDULE),
                            ts.uniform_steps(num_steps),
                            torch.full((2,), ts.NO_MASK),
                        )
                        for joint in joints
                    ],
                    powers,
                )
            )
        )
        gaps.append(abs(exact.log_z - math.log(goal.sum())))
        misses.append(float((exact.log_law[-1].softmax(0) - goal / goal.sum()).abs().sum() / 2))
    assert misses[1] < 0.35 * misses[0] < 0.01
    assert gaps[1] < 0.01


def test_what_is_fixed_is_not_counted() -> None:
    """All but one site fixed, at powers that do not sum to one: a fixed site neither moves nor weighs."""
    toy = Toy("B")
    canvas = torch.tensor([0, 2, ts.NO_MASK])
    one = ts.Product((model(toy, canvas=canvas), model(toy, "p2", canvas)), (1.2, 0.6))
    x = torch.tensor([[0, 2, 1]])
    measure = one.transition(x, one.predict(x, 0.5), one.steps[1], None)
    assert (measure.dense().log_p[0, :2].gather(-1, x[:, :2].T) == 0).all()


def test_conventions_without_a_mask() -> None:
    toy = Toy("A")
    models = (model(toy), model(toy, "p2"))
    step, x = models[0].steps[1], toy.clean
    raised = ts.Product(models, (1.2, 0.6), ts.kernel_powers)
    tables = [m.transition(x, m.predict(x, step.t), step, None).dense().log_p for m in models]
    ours = raised.transition(x, raised.predict(x, step.t), step, None).dense().log_p
    assert (ours - (1.2 * tables[0] + 0.6 * tables[1])).abs().max() < 1e-12
    with pytest.raises(ValueError, match="paper_powers for Ancestral"):
        ts.Product(models, (1.2, 0.6), ts.paper_powers)


def test_prompts_stay_and_are_known() -> None:
    toy = Toy("B")
    canvas = torch.tensor([ts.NO_MASK, 2, ts.NO_MASK])
    steering = ts.Steering(model(toy, canvas=canvas), ts.Tilt(toy.reward, 1.0, estimator=ts.Exact()))
    for record in ts.sweep(steering, 32, generator=seeded()):
        assert (record.x[..., 1] == 2).all()
    check(steering)


def check_prompts(uniform: ts.Diffusion, populations: int = 1000) -> None:
    """Every prompt keeps its tokens, and has the log Z that it has by itself."""
    toy, prompts = Toy("B"), uniform.template
    tilt = ts.Tilt(toy.reward, 1.0, estimator=ts.Exact())
    truth = [enumerate_steering(ts.Steering(model(toy, canvas=prompt), tilt)).log_z for prompt in prompts]
    everyone = len(prompts) * populations
    steering = ts.Steering(uniform, tilt)
    result = ts.smc(
        steering, 8, everyone, resample=ts.resampling.multinomial, when=ts.triggers.always, generator=seeded(1)
    )
    canvas = prompts.repeat_interleave(populations, 0).unsqueeze(1)
    assert ((result.samples == canvas) | (canvas == ts.NO_MASK)).all()
    ratio = (result.log_z.view(-1, populations) - torch.tensor(truth).unsqueeze(-1)).exp()
    assert ((ratio.mean(-1) - 1).abs() < 4 * ratio.std(-1) / math.sqrt(populations)).all()


def test_many_prompts_stay_and_are_known() -> None:
    """Rows may be any particles of any population: what is fixed is read off x, and where is the same for all."""
    toy, free = Toy("B"), ts.NO_MASK
    prompts = torch.tensor([[free, 2, free], [free, 0, free], [free, 1, free]])
    uniform = model(toy, canvas=prompts)
    x = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 1, 1], [2, 2, 0]])
    log_x0 = uniform.clean(uniform.predict(x, 0.5)).dense()
    hot = torch.nn.functional.one_hot(x, toy.tokens).double()
    assert torch.equal(log_x0[:, 1], hot[:, 1].log())
    assert (log_x0[:, [0, 2]] > -math.inf).all()
    assert torch.equal(uniform.relaxed(hot, 0.5), log_x0)
    check_prompts(uniform)
    # The estimates are those that each prompt has by itself.
    tilt = ts.Tilt(toy.reward, 1.0, estimator=ts.Exact())
    starts = uniform.start(6, seeded(2))
    both = some(ts.Steering(uniform, tilt).evaluate(starts, 0.5, None).reward)
    alone = [ts.Steering(model(toy, canvas=prompt), tilt) for prompt in prompts]
    each = [some(path.evaluate(rows, 0.5, None).reward) for path, rows in zip(alone, starts.split(2), strict=True)]
    assert torch.allclose(both, torch.cat(each), atol=1e-12)


def test_of_prompts_at_different_places_what_they_share_is_known() -> None:
    """Whose row it is is not told, so no more can be; the weights are right all the same."""
    toy, free = Toy("B"), ts.NO_MASK
    prompts = torch.tensor([[0, 2, free], [1, free, free]])
    uniform, x = model(toy, canvas=prompts), torch.tensor([[0, 2, 1], [1, 2, 1]])
    possible = uniform.clean(uniform.predict(x, 0.5)).dense() > -math.inf
    assert possible.sum(-1).tolist() == [[1, 3, 3]] * 2
    check_prompts(uniform)


def test_an_exact_denoiser_in_many_steps_finds_the_data() -> None:
    toy = Toy("A")
    gaps = []
    for num_steps in (4, 16, 64):
        law = enumerate_steering(ts.Steering(replace(model(toy), steps=ts.uniform_steps(num_steps)))).model_law
        gaps.append(float((law - toy.joint("p1").flatten()).abs().sum() / 2))
    assert gaps[0] > 2.5 * gaps[1] > 6 * gaps[2]


def test_tau_leaping_converges_at_first_order_and_is_unbiased() -> None:
    """Many leaps lead where the exact kernel leads in many steps: to the data, for an exact denoiser."""
    toy = Toy("A")
    kernel = ts.UniformLeap((1 / toy.tokens,) * toy.tokens, SCHEDULE)
    sizes, gaps = (16, 32, 64, 128), []
    for num_steps in sizes:
        leaps = replace(model(toy), kernel=kernel, steps=ts.uniform_steps(num_steps))
        law = enumerate_steering(ts.Steering(leaps)).model_law
        gaps.append(float((law - toy.joint("p1").flatten()).abs().sum() / 2))
    order = (math.log(gaps[0]) - math.log(gaps[-1])) / (math.log(sizes[-1]) - math.log(sizes[0]))
    assert order >= 0.9, gaps
    leaps = replace(model(toy), kernel=kernel, steps=ts.uniform_steps(5))
    check(ts.Steering(leaps, known_tilt(toy, kl=1.0), ts.Gradient(clip=0.5)))
    with pytest.raises(ValueError, match="uniform noise"):
        ts.UniformLeap((0.2, 0.8))


def test_a_bad_prior_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a distribution"):
        ts.Interpolating((0.5, 0.6))
