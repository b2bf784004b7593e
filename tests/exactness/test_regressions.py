"""Faults that an attack on version 0.1.0 found in the core. Each test failed before its fault was mended."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tokensteer as ts
from tokensteer import rewards
from tokensteer.core.numerics.draws import spread_uniforms
from tokensteer.rewards.text import of_text
from tokensteer.testing import TableDenoiser, enumerate_steering

Reward = Callable[[Tensor], Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def joint(tokens: int, length: int, seed: int = 0) -> Tensor:
    table = torch.rand((tokens,) * length, generator=seeded(seed), dtype=torch.float64) + 0.05
    return table / table.sum()


def toy(length: int = 3, tokens: int = 3, steps: int = 4) -> ts.Diffusion:
    denoiser = TableDenoiser(joint(tokens, length))
    return ts.Diffusion(denoiser, ts.Ancestral(tokens), ts.uniform_steps(steps), ts.template(length, tokens))


def total(x: Tensor) -> Tensor:
    """A multiple of 1/4, which every floating type holds exactly; of ids or of one-hots."""
    if x.is_floating_point():
        x = (x[..., :3] * torch.arange(3.0, dtype=x.dtype)).sum(-1)
    return 0.25 * x.sum(-1)


def same(a: ts.Result, b: ts.Result) -> None:
    assert torch.equal(a.samples, b.samples)
    torch.testing.assert_close(a.log_w, b.log_w, rtol=1e-9, atol=1e-9)


# ---- rewards


def in_own_memory(reward: Reward) -> Reward:
    """The reward with its answers in memory that it uses again."""
    kept: dict[int, Tensor] = {}

    def answer(x: Tensor) -> Tensor:
        memory = kept.setdefault(len(x), torch.zeros(len(x), dtype=torch.float64))
        return memory.copy_(reward(x))

    return answer


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient()])
def test_rewards_that_answer_in_their_own_memory(proposal: ts.Proposal) -> None:
    runs = []
    for reward in (total, in_own_memory(total)):
        steering = ts.Steering(toy(), ts.Tilt(reward, kl=0.3, draws=3), proposal)
        runs.append(ts.smc(steering, 8, 4, generator=seeded(), memory="2kB"))
    same(*runs)


def test_parts_of_a_combined_reward_that_share_memory() -> None:
    memory = torch.zeros(5)
    ones, twos = (lambda x: memory.fill_(1.0)), (lambda x: memory.fill_(2.0))
    found = rewards.weighted({ones: 1.0, twos: 1.0})(torch.zeros(5, 2, dtype=torch.int64))
    assert found.tolist() == [3.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_weights_are_r_over_kl_in_double_precision(dtype: torch.dtype) -> None:
    def reward(x: Tensor) -> Tensor:
        return ((x.sum(-1) % 2 == 0) if dtype == torch.bool else 3 - x.sum(-1)).to(dtype)

    kl = 0.03
    result = ts.smc(ts.Steering(toy(), ts.Tilt(reward, kl=kl)), 32, when=ts.triggers.never, generator=seeded())
    truth = reward(result.samples).double()
    assert result.reward is not None
    assert torch.equal(result.reward, truth)
    torch.testing.assert_close(result.log_w, truth / kl, rtol=1e-14, atol=1e-12)


def test_half_precision_rewards_do_not_kill_populations() -> None:
    def reward(x: Tensor) -> Tensor:
        return (-70 + 0.25 * x.sum(-1)).half()

    result = ts.smc(ts.Steering(toy(), ts.Tilt(reward, kl=1e-3)), 8, generator=seeded())
    assert result.alive.all()


def test_weights_do_not_depend_on_the_default_dtype() -> None:
    model, runs = toy(), []
    before = torch.get_default_dtype()
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            tilt = ts.Tilt(lambda x: 1000 + x.sum(-1), kl=1.0, draws=2)
            runs.append(ts.smc(ts.Steering(model, tilt), 8, 2, generator=seeded()))
        finally:
            torch.set_default_dtype(before)
    same(*runs)


def test_numbers_from_functions_of_text_are_in_double_precision() -> None:
    reward = of_text(lambda texts: [1e-9 + 1.0 for _ in texts], lambda x: [str(row.tolist()) for row in x])
    assert float(reward(torch.zeros(1, 2, dtype=torch.int64))[0]) == 1.0 + 1e-9


def test_a_reward_on_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"answers on meta and the sequences are on cpu.*r\.to\(x\.device\)"):
        ts.Steering(toy(), ts.Tilt(lambda x: torch.zeros(len(x), device="meta")))


# ---- domains

NAN, INF = math.nan, math.inf
DOMAINS: list[tuple[str, Callable[..., object], tuple[object, ...]]] = [
    ("kl", lambda v: ts.Tilt(total, kl=v), (NAN, INF, 0.0, -1.0, "1", True)),
    ("draws", lambda v: ts.Tilt(total, draws=v), (0, 1.5, 4.0, NAN)),
    ("floor", lambda v: ts.Tilt(total, floor=v), (NAN, INF, -INF)),
    ("ramp", lambda v: ts.Tilt(total, ramp=lambda t: v), (NAN, INF, 0.5)),
    ("share", ts.Adaptive, (NAN, 0.0, 1.0, 2.0)),
    ("eps", ts.LogLinear, (NAN, INF, -0.1, 1.0)),
    ("low", lambda v: ts.Geometric(v, 20.0), (NAN, INF, 0.0, -1.0)),
    ("high", lambda v: ts.Geometric(1e-5, v), (NAN, INF, 0.0, 1e-6)),
    ("power", ts.Polynomial, (NAN, INF, 0.0, -1.0)),
    ("num_steps", ts.uniform_steps, (0, 2.0, NAN, True)),
    ("num_steps", ts.cosine_steps, (0, 2.0)),
    ("base", lambda v: ts.ramps.exponential(10, v), (NAN, INF, 1.0)),
    ("k", ts.ramps.clipped, (NAN, 0.0, -1.0, 11.0, INF)),
    ("s", lambda v: ts.Step(0, 0.5, v), (NAN, -0.1, INF)),
    ("t", lambda v: ts.Step(0, v, 0.1), (NAN, INF, -1.0)),
    ("fraction", ts.triggers.ess_below, (NAN, 0.0, 1.1)),
    ("fraction", lambda v: ts.resampling.partial(ts.resampling.systematic, v), (NAN, 0.0, 1.1)),
    ("k", ts.triggers.every, (0, 1.5, NAN)),
    ("candidates", lambda v: ts.resampling.nested(ts.resampling.systematic, v), (0, 2.0)),
    ("eta", ts.Cap, (NAN, -0.1, 1.1)),
    ("eta", ts.Rescale, (NAN, -0.1, 1.1)),
    ("mask_id", ts.Ancestral, (-1, 1.0, NAN)),
    ("mask_id", ts.Ranked, (-1, 1.0)),
    ("mask_id", ts.Ranked, (-1, 1.0)),
    ("mask_id", ts.MaskGIT, (-1, 1.0)),
    ("mask_id", ts.TauLeap, (-1, 1.0)),
    ("mask_id", ts.FirstHitting, (-1, 1.0)),
    ("mask_id", ts.TimedFirstHitting, (-1, 1.0)),
    ("threshold", lambda v: ts.Ranked(3, threshold=v), (NAN,)),
    ("temperature", lambda v: ts.MaskGIT(3, temperature=v), (NAN, INF, -1.0)),
    ("number", ts.ranked.fixed, (0, 1.5)),
    ("size", lambda v: ts.Blocks(ts.Ancestral(3), v, 4, 4), (0, 2.0, NAN)),
    ("start", lambda v: ts.Blocks(ts.Ancestral(3), 1, 4, 4, start=v), (-1, 4, 1.0)),
    ("t_o", lambda v: ts.Window(ts.Cap(0.1), v, 0.1), (NAN, 0.05, 1.5)),
    ("alpha_on", lambda v: ts.remdm_loop(3, 0.6, 0.3, v, ts.Cap(0.1)), (NAN, 0.0, 1.0)),
    ("sharpness", lambda v: ts.ConfidenceRemask(ts.Ancestral(3), v), (NAN, INF)),
    ("prior", lambda v: ts.Interpolating((v, 0.5)), (NAN, -0.5, INF)),
    ("vocab_size", ts.uniform_noise, (0, 2.0)),
    ("temperature", ts.Relaxed, (NAN, INF, 0.0)),
    ("seed", ts.Sampled, (0.5, NAN, -1)),
    ("limit", ts.Exact, (0, 1.5)),
    ("limit", ts.Enumerated, (0, 1.5)),
    ("clip", lambda v: ts.Gradient(clip=v), (NAN, -1.0)),
    ("every", lambda v: ts.Gradient(every=v), (0, 1.5)),
    ("draws", lambda v: ts.Gradient(draws=v), (0, 2.0)),
    ("powers", lambda v: ts.Product((toy(), toy()), (1.0, v)), (NAN, INF)),
    ("first power", lambda v: ts.Product((toy(), toy()), (v, 1.0)), (0.0, -1.0)),
    ("interval", lambda v: ts.fk_steering(toy(), ts.Tilt(total), interval=v), (0, 1.5)),
    ("num_particles", lambda v: ts.smc(ts.Steering(toy()), v), (0, 16.0, NAN)),
    ("populations", lambda v: ts.smc(ts.Steering(toy()), 4, v), (0, 2.0)),
    ("sweeps", lambda v: ts.particle_gibbs(ts.Steering(toy()), v, 4), (0, 1.0)),
    ("num_particles", lambda v: ts.particle_gibbs(ts.Steering(toy()), 1, v), (1, 4.0)),
    ("rounds", lambda v: ts.SplitGibbs(rounds=v), (0, 2.0)),
    ("first", lambda v: ts.SplitGibbs(first=v), (NAN, 1.1)),
    ("budget", lambda v: ts.plan(ts.Steering(toy()), v), (0, 1e4)),
    ("share", lambda v: ts.plan(ts.Steering(toy()), 1000, share=v), (NAN, 0.0, 1.0)),
    ("length", lambda v: ts.template(v, 3), (0, 2.0)),
    ("count", lambda v: ts.smc(ts.Steering(toy()), 4).sample(v), (1.0, -1)),
    ("memory", lambda v: ts.smc(ts.Steering(toy()), 4, memory=v), (NAN, INF, 0, "-1GB")),
    ("weights", lambda v: rewards.weighted({total: v}), (NAN, INF, 0.0)),
]


@pytest.mark.parametrize(
    ("name", "make", "value"),
    [(name, make, value) for name, make, values in DOMAINS for value in values],
    ids=[f"{k}-{name}={value}" for k, (name, _, values) in enumerate(DOMAINS) for value in values],
)
def test_numbers_outside_their_domain_are_refused(name: str, make: Callable[..., object], value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        make(value)


# ---- runs are independent of one another


def test_threads_that_share_a_steering_count_their_own_rows_and_keep_their_limits() -> None:
    sizes: list[tuple[int, int]] = []

    def reward(x: Tensor) -> Tensor:
        sizes.append((threading.get_ident(), len(x)))
        return total(x)

    steering = ts.Steering(toy(steps=8), ts.Tilt(reward, kl=0.5, draws=4))
    budgets = ["2kB", None, "8kB", None]
    sizes.clear()
    alone = [ts.smc(steering, 64, 4, generator=seeded(), memory="2kB")]
    allowed = max(rows for _, rows in sizes)
    alone += [ts.smc(steering, 64, 4, generator=seeded(), memory=memory) for memory in budgets[1:]]
    ready, found, limited = threading.Barrier(4), dict[int, ts.Result](), list[int]()
    sizes.clear()

    def run(k: int) -> None:
        ready.wait()
        if k == 0:
            limited.append(threading.get_ident())
        found[k] = ts.smc(steering, 64, 4, generator=seeded(), memory=budgets[k])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, result in found.items():
        same(result, alone[k])
        assert result.rows == alone[k].rows
    assert max(rows for thread, rows in sizes if thread == limited[0]) <= allowed


def test_a_run_inside_a_reward_leaves_the_limit_of_the_run_around_it() -> None:
    model, sizes = toy(), list[int]()

    def reward(x: Tensor) -> Tensor:
        sizes.append(len(x))
        if len(sizes) == 12:
            ts.smc(around, 2, generator=seeded())
        return total(x)

    around = ts.Steering(model, ts.Tilt(reward, draws=4))
    sizes.clear()
    ts.smc(around, 64, generator=seeded(), memory="2kB")
    assert len(sizes) > 20
    assert max(sizes[20:]) <= sizes[0]


def test_a_steering_can_be_pickled() -> None:
    steering = ts.Steering(toy(), ts.Tilt(total, draws=2), ts.Gradient())
    again = pickle.loads(pickle.dumps(steering))
    same(ts.smc(steering, 8, generator=seeded()), ts.smc(again, 8, generator=seeded()))


def test_a_sweep_that_is_abandoned_leaves_nothing_behind() -> None:
    steering = ts.Steering(toy(), ts.Tilt(total, estimator=ts.Exact()), ts.Enumerated())
    path = ts.Auxiliary(steering)
    whole = ts.smc(path, 8, generator=seeded())
    before = pickle.dumps(path)
    for _ in range(3):
        next(iter(ts.sweep(path, 8, generator=seeded())))
    assert pickle.dumps(path) == before
    same(ts.smc(path, 8, generator=seeded()), whole)


# ---- valid input


@pytest.mark.parametrize("mask_id", [0, 3])
def test_gradients_of_exact_estimates_where_token_0_has_no_mass(mask_id: int) -> None:
    table = joint(3, 3)
    if mask_id == 0:
        inner = TableDenoiser(table)

        def denoiser(x: Tensor, t: float) -> Tensor:  # the tokens 1, 2, 3 and the mask 0
            return inner(x.roll(-1, -1) if x.is_floating_point() else (x - 1) % 4, t).roll(1, -1)
    else:
        table[0] = table[:, 0] = table[:, :, 0] = 0.0
        denoiser = TableDenoiser(table / table.sum())
    model = ts.Diffusion(denoiser, ts.Ancestral(mask_id), ts.uniform_steps(3), ts.template(3, mask_id))
    tilt = ts.Tilt(lambda x: 0.5 * (x.argmax(-1) if x.is_floating_point() else x).sum(-1), estimator=ts.Exact())
    steering = ts.Steering(model, tilt, ts.Gradient())
    result = ts.smc(steering, 16, 2000, generator=seeded())
    estimate, error = result.pooled_log_z
    assert abs(estimate - enumerate_steering(steering).log_z) < 4 * error


@pytest.mark.parametrize("estimator", [ts.Relaxed(), ts.Relaxed(hard=True), ts.Sampled()])
@pytest.mark.parametrize("proposal", [ts.Gradient(), ts.Gradient(draws=2), ts.FromModel()])
def test_samples_do_not_depend_on_the_memory(estimator: ts.core.twists.tilt.Estimator, proposal: ts.Proposal) -> None:
    tilt = ts.Tilt(total, kl=0.5, draws=3, estimator=estimator, differentiable=True)
    steering = ts.Steering(toy(length=4), tilt, proposal)
    runs = [ts.smc(steering, 4, 2, generator=seeded(), memory=memory) for memory in (None, "8kB", "1kB", "1B")]
    for run in runs[1:]:
        same(run, runs[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("estimator", [ts.Relaxed(), ts.Sampled()])
def test_samples_do_not_depend_on_the_memory_of_a_gpu(estimator: ts.core.twists.tilt.Estimator) -> None:
    denoiser = TableDenoiser(joint(3, 4).cuda())
    model = ts.Diffusion(denoiser, ts.Ancestral(3), ts.uniform_steps(4), ts.template(4, 3).cuda())

    def reward(x: Tensor) -> Tensor:
        return (x[..., 1] if x.is_floating_point() else (x == 1).double()).sum(-1)

    tilt = ts.Tilt(reward, kl=0.5, draws=3, estimator=estimator, differentiable=True)
    steering = ts.Steering(model, tilt, ts.Gradient())
    first, *others = (
        ts.smc(steering, 8, 4, generator=torch.Generator("cuda").manual_seed(0), memory=memory)
        for memory in (None, "64kB", "1B")
    )
    for run in others:
        same(run, first)


def test_uniforms_from_a_seed_are_uniform_and_independent() -> None:
    u = spread_uniforms(torch.rand(2000, generator=seeded(), dtype=torch.float64), 50)
    assert u.dtype == torch.float64
    assert ((u > 0) & (u <= 1)).all()
    cells = torch.histc(u, 100, 0, 1)
    chi2 = ((cells - 1000) ** 2 / 1000).sum()
    assert abs(chi2 - 99) < 4 * math.sqrt(2 * 99)
    z = (u - 0.5) * math.sqrt(12)
    pairs = (z.T @ z / math.sqrt(2000))[*torch.triu_indices(50, 50, 1)]
    assert pairs.abs().max() < 5
    assert abs(float(pairs.square().mean()) - 1) < 4 * math.sqrt(2 / len(pairs))


@pytest.mark.parametrize("proposal", [ts.Gradient(draws=2), ts.Gradient(), ts.FromModel()])
def test_denoisers_whose_answers_are_not_contiguous(proposal: ts.Proposal) -> None:
    plain, runs = toy(), []

    class Strided:
        ignores_time = True

        def __call__(self, x: Tensor, t: float) -> Tensor:
            return plain.denoiser(x, t).transpose(0, 2).contiguous().transpose(0, 2)

    for model in (plain, replace(plain, denoiser=Strided())):
        steering = ts.Steering(model, ts.Tilt(total, draws=3, differentiable=True), proposal)
        runs.append(ts.smc(steering, 8, 4, generator=seeded()))
    same(*runs)


@pytest.mark.parametrize("proposal", [ts.Gradient(), ts.FromModel()])
def test_models_made_and_run_in_inference_mode(proposal: ts.Proposal) -> None:
    denoiser, runs = toy().denoiser, []
    for mode in (True, False):
        with torch.inference_mode(mode):
            model = ts.Diffusion(denoiser, ts.Ancestral(3), ts.uniform_steps(4), ts.template(3, 3))
            tilt = ts.Tilt(total, draws=3, differentiable=True)
            runs.append(ts.smc(ts.Steering(model, tilt, proposal), 8, 4, generator=seeded()))
    same(*runs)


@pytest.mark.parametrize("powers", [(1.0, 1.0), (1.5, -0.5), (0.7, 0.7)])
def test_products_over_noise_of_one_token(powers: tuple[float, float]) -> None:
    """Noise that is always a token without clean mass is a mask by another name."""
    prior, steps = (0.0, 0.0, 0.0, 1.0), ts.uniform_steps(3)
    tables = [joint(3, 2, seed) for seed in (0, 1)]
    found = []
    for kernel in (ts.Interpolating(prior), ts.Ancestral(3)):
        free = ts.template(2, kernel.mask_id)
        models = [ts.Diffusion(TableDenoiser(table), kernel, steps, free) for table in tables]
        steering = ts.Steering(ts.Product(models, powers), None, ts.Optimal())
        found.append(enumerate_steering(steering).log_z)
        result = ts.smc(steering, 16, 500, generator=seeded())
        estimate, error = result.pooled_log_z
        assert abs(estimate - found[-1]) < 4 * max(error, 1e-9)
    assert found[0] == pytest.approx(found[1], abs=1e-9)


@pytest.mark.parametrize("powers", [(1.0, 1.0), (1.5, -0.5), (0.7, 0.7)])
def test_products_over_noise_of_one_token_that_may_be_clean(powers: tuple[float, float]) -> None:
    """With exact denoisers of one site Z is the sum of the product."""
    laws = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.5, 0.1]], dtype=torch.float64)

    def denoiser(law: Tensor) -> ts.Denoiser:
        def log_x0(x: Tensor, t: float) -> Tensor:  # token 2, the noise, is there for sure if it is clean
            hidden = law * torch.tensor([t, t, 1.0], dtype=torch.float64)
            return (hidden / hidden.sum()).log().expand(len(x), 1, 3)

        return log_x0

    def log_z(steps: int) -> float:
        kernel, free = ts.Interpolating((0.0, 0.0, 1.0)), ts.template(1, ts.NO_MASK)
        models = [ts.Diffusion(denoiser(law), kernel, ts.uniform_steps(steps), free) for law in laws]
        return enumerate_steering(ts.Steering(ts.Product(models, powers), None, ts.Optimal())).log_z

    truth = float((powers[0] * laws[0].log() + powers[1] * laws[1].log()).exp().sum().log())
    assert log_z(5) == pytest.approx(truth, abs=1e-12)


def test_a_vocabulary_of_one_token() -> None:
    kernel, free = ts.uniform_noise(1), ts.template(2, ts.NO_MASK)
    models = [ts.Diffusion(lambda x, t: torch.zeros(len(x), 2, 1), kernel, ts.uniform_steps(3), free)] * 2
    result = ts.smc(ts.Steering(ts.Product(models, (1.0, 1.0)), None, ts.Optimal()), 4, generator=seeded())
    assert result.log_z.tolist() == [0.0]


def coins() -> ts.Denoiser:
    logits = torch.tensor([0.3, 0.9, 0.0], dtype=torch.float64)
    return ts.from_logits(lambda x: logits.expand(*x.shape, 3), 2, ignores_time=True)


def test_enumerated_proposals_tell_templates_apart_by_what_they_fix() -> None:
    """With sigma = 1 an open site is masked if it is free and stays if it is fixed: one state each."""
    templates = torch.tensor([[2, 2], [2, 0]])
    model = ts.Diffusion(coins(), ts.Ancestral(2, sigma=ts.Rescale(1.0)), ts.uniform_steps(4), templates)
    tilt = ts.Tilt(lambda x: x.sum(-1).double(), estimator=ts.Exact())
    result = ts.smc(ts.Steering(model, tilt, ts.Enumerated()), 8, 2, generator=seeded(1))
    assert (result.samples[1, :, 1] == 0).all()


def test_enumerated_proposals_without_a_future_leave_no_masks() -> None:
    model = ts.Diffusion(coins(), ts.MaskGIT(2), ts.uniform_steps(2), ts.template(2, 2))
    tilt = ts.Tilt(lambda x: torch.where(x[:, 0] == 0, -torch.inf, 0.0).double(), estimator=ts.Exact())
    result = ts.smc(ts.Steering(model, tilt, ts.Enumerated()), 16, generator=seeded(3))
    assert (result.samples < 2).all()


# ---- saved results


def test_a_saved_result_whose_shapes_do_not_fit_is_refused(tmp_path) -> None:
    result = ts.smc(ts.Steering(toy(), ts.Tilt(total)), 4, 2, generator=seeded())
    file = tmp_path / "result.safetensors"
    result.save(file)
    same(ts.Result.load(file), result)
    wrong = {
        "samples": result.samples[0],
        "log_w": result.log_w[:1],
        "reward": torch.zeros(3),
        "ess": result.ess[:, :1],
        "mean_reward": torch.zeros(1, 2),
        "ancestors": result.ancestors[:-1],
        "ramp": torch.zeros(2),
        "templates": 3,
    }
    for name, value in wrong.items():
        replace(result, **{name: value}).save(file)
        with pytest.raises(ValueError, match=name):
            ts.Result.load(file)
    for name, value in {"samples": result.samples.double(), "ancestors": result.ancestors + 4}.items():
        replace(result, **{name: value}).save(file)
        with pytest.raises(ValueError, match=name):
            ts.Result.load(file)
