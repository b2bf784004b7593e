"""Bad input is refused at once, with the mend in the message."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrow import untyped
from torch import Tensor
from toys import Toy

import tokensteer as ts

LENGTH, TOKENS, MASK = 4, 3, 3


def uniform(x: Tensor, t: float) -> Tensor:
    """A denoiser that knows nothing."""
    rows = x.shape[0]
    log_p = torch.full((rows, LENGTH, TOKENS + 1), -math.log(TOKENS))
    log_p[..., MASK] = -math.inf
    return log_p


def model(denoiser=uniform, mask_id: int = MASK, template: Tensor | None = None, steps=None) -> ts.Diffusion:
    canvas = ts.template(LENGTH, MASK) if template is None else template
    return ts.Diffusion(denoiser, ts.Ancestral(mask_id), ts.uniform_steps(3) if steps is None else steps, canvas)


class Clocked:
    """It says that it ignores the time, and does not."""

    ignores_time = True

    def __call__(self, x: Tensor, t: float) -> Tensor:
        return (uniform(x, t) + torch.arange(TOKENS + 1) * t).log_softmax(-1)


class Reusing:
    """It writes all its answers into the same memory."""

    def __init__(self) -> None:
        self.answer = torch.empty(0)

    def __call__(self, x: Tensor, t: float) -> Tensor:
        said = (uniform(x, t) + (x == 0).unsqueeze(-1) * torch.arange(TOKENS + 1)).log_softmax(-1)
        self.answer = said if self.answer.shape != said.shape else self.answer.copy_(said)
        return self.answer


def ones(x: Tensor) -> Tensor:
    return (x == 1).sum(-1).float()


def test_the_right_thing_works() -> None:
    ts.smc(ts.Steering(model(), ts.Tilt(ones)), 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: model(mask_id=7), "mask_id 7 is outside the vocabulary of 4.*add a column"),
        (lambda: model(mask_id=-1), "mask_id must be at least 0, got -1"),
        (lambda: model(lambda x, t: uniform(x, t).exp()), "mass 1 to the mask token 3.*from_logits"),
        (lambda: model(lambda x, t: uniform(x, t) + 1), "do not sum to one.*from_logits"),
        (lambda: model(lambda x, t: uniform(x, t) * math.nan), "NaN"),
        (lambda: model(lambda x, t: uniform(x, t) * (math.nan if t < 0.7 else 1.0)), "NaN"),
        (lambda: model(template=untyped([3, 3, 3, 3])), "int64 ids.*got list"),
        (lambda: model(template=torch.full((4,), 3, dtype=torch.int32)), "int64 ids.*got int32"),
        (lambda: model(mask_id=2), "no free site, none that holds 2: is mask_id right"),
        (lambda: model(template=torch.tensor([[3, 3, 3, 3], [9, 3, 3, 3]])), "ids outside 0..3"),
        (lambda: model(lambda x: uniform(x, 0.0)), "ignores_time=True"),
        (lambda: ts.Tilt(ones, ramp=untyped(0.5)), "ramp must be a function of t"),
        (lambda: ts.Steering(model(), ts.Tilt(untyped(lambda x: [0.0] * len(x)))), "must return a tensor.*got list"),
        (
            lambda: ts.Steering(
                model(), ts.Tilt(ones, ramp=ts.ramps.constant, estimator=ts.Value(lambda x, t: ones(x)[:, None]))
            ),
            "one number for each",
        ),
        (lambda: ts.Steering(model(), proposal=ts.Amortised(lambda x, t: uniform(x, t) + 1)), "do not sum to one"),
        (lambda: ts.Steering(model(), proposal=ts.Amortised(lambda x, t: uniform(x, t).exp().log_softmax(-1))), "mask"),
        (lambda: ts.Steering(model(), proposal=ts.Amortised(truncated_later)), "no mass to states that the model"),
        (lambda: ts.fk_steering(model(), ts.Tilt(ones), interval=0), "at least 1"),
        (
            lambda: ts.Product((maskgit(), maskgit()), (1.2, 0.6), ts.kernel_powers),
            "for Ancestral and Ranked ones, not MaskGIT",
        ),
        (
            lambda: ts.Steering(maskgit(), proposal=ts.Amortised(truncated)),
            "no mass to states that the model can reach",
        ),
        (lambda: model(lambda x, t: uniform(x, t).half()), "float32 or float64.*from_logits"),
        (lambda: model(template=ts.template(9, MASK)), "template of length 9.*longer than the model"),
        (lambda: model(lambda x, t: uniform(x[:, :0], t).gather(1, x + 50)), "fails on a template.*shorten"),
        (lambda: model(template=torch.tensor([0, 1, 2, 9])), "ids outside 0..3"),
        (lambda: model(template=torch.zeros(4)), "int64 ids"),
        (lambda: model(steps=ts.uniform_steps(3)[:2]), "down to t = 0"),
        (lambda: model(steps=()), "down to t = 0"),
        (lambda: ts.uniform_steps(0), "at least 1"),
        (lambda: ts.template(4, MASK, [0, 1, 2, 0, 1]), "outside a canvas of length 4: shorten the prompt"),
        (lambda: ts.template(4, MASK, [0, 1], at=[2]), "one site for each token"),
        (lambda: ts.Cap(1.5), "eta must lie in"),
        (lambda: ts.Tilt(ones, kl=0.0), "kl must be positive"),
        (lambda: ts.Tilt(ones, draws=0), "draws must be at least 1"),
        (lambda: ts.Tilt(ones, ramp=lambda t: 0.95), r"ramp\(0\) must be 1, got 0.95: the final target"),
        (lambda: ts.Tilt(ones, ramp=ts.ramps.exponential(5)), r"ramp\(0\) must be 1"),
        (lambda: ts.Tilt(ones, estimator=ts.SoftInput()), "differentiable=True"),
        (lambda: ts.Product((model(), model()), (1.0,)), "2 models and 1 powers"),
        (lambda: ts.Product((), ()), "0 models"),
        (lambda: ts.Product((model(), model(steps=ts.uniform_steps(5))), (1.5, -0.5)), "model 1 differs.*replace"),
        (lambda: ts.Product((model(), model()), (-0.5, 1.5)), "first power must be positive"),
        (
            lambda: ts.Product((model(), model()), (1.0, -2.0), ts.paper_powers, correct_remasking=False),
            "powers sum to -1.*leave the convention at denoiser_powers",
        ),
        (lambda: ts.Steering(model(), proposal=ts.Gradient()), "give Steering a Tilt"),
        (lambda: ts.Steering(model(), ts.Tilt(lambda x: ones(x).sum())), "one number for each of"),
        (lambda: ts.Steering(model(), ts.Tilt(lambda x: ones(x)[:, None])), "one number for each of.*squeeze"),
        (lambda: ts.Steering(model(), ts.Tilt(ones), ts.Enumerated()), "not random, such as Exact"),
        (lambda: ts.Steering(model(), proposal=ts.Amortised(truncated)), "no mass to states that the model can reach"),
        (
            lambda: ts.Steering(model(), ts.Tilt(ones, ramp=ts.ramps.constant, estimator=ts.Exact(limit=5))),
            "limit is 5: open fewer",
        ),
        (lambda: ts.Tilt(ones, kl=math.inf), "positive and finite"),
        (lambda: model(lambda x, t: uniform(x.zero_(), t)), "denoiser writes to the sequences.*clone"),
        (lambda: model(Clocked()), "declares that it ignores the time.*let ignores_time be False"),
        (lambda: model(ts.from_logits(Reusing(), MASK)), "into the same memory.*clone"),
        (lambda: model(Reusing()), "into the same memory.*clone"),
        (lambda: ts.padded([], 0), "one or more templates"),
        (lambda: ts.padded(untyped([[1, 2]]), 0), "each a tensor of ids"),
        (
            lambda: ts.Steering(model(), ts.Tilt(lambda x: ones(x) + x.zero_().sum(-1))),
            "reward writes to the sequences",
        ),
        (lambda: ts.Steering(ids_only(), ts.Tilt(ones), ts.Gradient()), "one-hots.*adapters.module"),
        (lambda: run(when=lambda log_w, step: True), r"a trigger must return for each of 2.*bools \(2,\), got bool"),
        (lambda: run(when=lambda log_w, step: log_w > 0), r"bools \(2,\), got torch.bool \(2, 4\)"),
        (
            lambda: run(resample=lambda log_w, generator: log_w.argsort()),
            r"ancestors, int64.*got torch.int64 \(2, 4\)$",
        ),
        (lambda: run(resample=lambda log_w, generator: (log_w, log_w)), "got torch.float64.*, torch.float64"),
        (lambda: ts.smc(ts.Steering(model()), 0), "num_particles must be at least 1, got 0"),
        (lambda: ts.smc(ts.Steering(model()), 2, 0), "populations must be at least 1, got 0"),
    ],
)
def test_refused_with_the_mend(broken, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        broken()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: ts.smc(untyped(model()), 4), r"smc runs a Steering, got Diffusion.*Steering\(model, tilt\)"),
        (lambda: ts.Steering(model(), untyped(ones)), r"must be a Tilt, got function.*Tilt\(reward\)"),
        (lambda: ts.Steering(model(), None, untyped(ones)), "the proposal must be an object.*FromModel"),
        (lambda: ts.Tilt(untyped(3)), "reward must be a function"),
        (lambda: ts.smc(ts.Steering(model()), 4, generator=untyped(0)), r"torch.Generator\(\).manual_seed"),
        (lambda: model(steps=5), r"uniform_steps\(n\)"),
    ],
)
def test_what_is_of_another_kind_is_refused_with_the_mend(broken, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        broken()


def run(**options) -> ts.Result:
    return ts.smc(ts.Steering(model(), ts.Tilt(ones)), 4, 2, **options)


def ids_only() -> ts.Diffusion:
    table = torch.nn.Embedding(TOKENS + 1, TOKENS + 1).requires_grad_(False)
    return model(ts.from_logits(table, MASK, ignores_time=True))


def test_answers_that_others_hold_are_not_written_to() -> None:
    table, seen = torch.randn(1, LENGTH, TOKENS + 1), []
    held = table.clone()
    steering = ts.Steering(model(ts.from_logits(lambda x, t: table.expand(len(x), -1, -1), MASK)), ts.Tilt(ones))
    ts.smc(steering, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(table, held)
    model(ts.from_logits(lambda x, t: torch.nn.Parameter(table.expand(len(x), -1, -1)), MASK))
    model(ts.from_logits(lambda x, t: torch.ones(len(x), LENGTH, TOKENS + 1, dtype=torch.int64), MASK))
    head = torch.nn.Linear(2, TOKENS + 1).requires_grad_(False)
    head.register_forward_hook(lambda layer, given, answer: seen.append(answer))
    denoiser = ts.from_hidden(lambda x, t: torch.ones(*x.shape, 2), head, MASK)
    denoiser(torch.full((1, LENGTH), MASK), 1.0)
    assert torch.isfinite(seen[0]).all()


def test_support_is_looked_at_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few sites at a time, and the fault may be in any of them."""
    monkeypatch.setattr("tokensteer.core.categorical.forms.WORKING", 16 * (TOKENS + 1))  # one law

    def last_cut(x: Tensor, t: float) -> Tensor:
        log_p = uniform(x, t).clone()
        log_p[:, -1, 0] = -math.inf
        return log_p.log_softmax(-1)

    with pytest.raises(ValueError, match="no mass to states that the model can reach"):
        ts.Steering(model(), proposal=ts.Amortised(last_cut))


def test_the_warning_of_a_network_that_trains_points_at_its_user() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(TOKENS + 1, TOKENS + 1), torch.nn.Dropout(0.1))
    with pytest.warns(UserWarning, match="training mode") as caught:
        model(ts.from_logits(net, MASK, ignores_time=True))
    assert caught[0].filename == __file__


def test_a_network_that_trains_is_noticed() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
    with pytest.warns(UserWarning, match=r"training mode and has dropout.*\.eval\(\)"):
        model(ts.from_logits(net.requires_grad_(False), MASK, ignores_time=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ts.from_logits(net.eval(), MASK, ignores_time=True))
        untyped(net.train())[1].p = 0.0
        model(ts.from_logits(net, MASK, ignores_time=True))


@pytest.mark.parametrize("average", [ts.estimators.log_mean_exp, ts.estimators.mean])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_reward_of_a_draw_is_found_at_once(bad: float, average: ts.core.twists.estimators.Average) -> None:
    def reward(x: Tensor) -> Tensor:
        return torch.where((x == 2).any(-1), bad, 0.0)

    tilt = ts.Tilt(reward, draws=4, ramp=ts.ramps.constant, average=average)
    with pytest.raises(FloatingPointError, match=r"at the start.*Culprit: the reward"):
        ts.smc(ts.Steering(model(), tilt), 8, generator=torch.Generator().manual_seed(0))


def truncated(x: Tensor, t: float) -> Tensor:
    """A proposal network cut to its two likeliest tokens."""
    log_p = torch.full((len(x), LENGTH, TOKENS + 1), -math.inf)
    log_p[..., :2] = -math.log(2)
    return log_p


def truncated_later(x: Tensor, t: float) -> Tensor:
    """The same, once anything is open."""
    return truncated(x, t) if bool((x != MASK).any()) else uniform(x, t)


def maskgit() -> ts.Diffusion:
    return replace(model(), kernel=ts.MaskGIT(MASK))


def test_remasking_beyond_its_bound() -> None:
    eager = replace(model(), kernel=ts.Ancestral(MASK, sigma=lambda step, bound: 1.0))
    with pytest.raises(ValueError, match=r"sigma at step 1 is 1 and must lie in \[0, 1.*cap|sigma at step 2"):
        ts.smc(ts.Steering(eager), 2)


def test_masks_left_at_the_end() -> None:
    lazy = replace(model(), kernel=ts.Ranked(MASK, count=lambda step, masked: torch.ones_like(masked)))
    with pytest.raises(ValueError, match="masked sites are left"):
        ts.smc(ts.Steering(lazy), 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_weight_names_step_particle_and_culprit(bad: float) -> None:
    def reward(x: Tensor) -> Tensor:
        return torch.where((x == 2).all(-1), bad, 0.0)

    prompt = torch.tensor([[3, 3, 3, 3], [2, 2, 2, 2]])
    tilt = ts.Tilt(reward, ramp=ts.ramps.end)
    with pytest.raises(FloatingPointError, match=r"particle 0 of population 1 .* step 2 .*Culprit: the reward"):
        ts.smc(ts.Steering(model(template=prompt), tilt), 3, 2, generator=torch.Generator().manual_seed(0))


def test_a_denoiser_that_fails_later_is_named() -> None:
    late = model(lambda x, t: uniform(x, t) * (math.nan if t < 0.4 else 1.0))
    with pytest.raises(FloatingPointError, match=r"step 2 .*Culprit: the transition.*denoiser gave NaN"):
        ts.smc(ts.Steering(late), 32, generator=torch.Generator().manual_seed(0))


def test_a_negative_power_over_nothing_is_named() -> None:
    half = replace(model(), denoiser=truncated)
    product = ts.Product((model(), half), (1.5, -0.5))
    with pytest.raises(FloatingPointError, match="negative power"):
        ts.smc(ts.Steering(product), 64, generator=torch.Generator().manual_seed(0))


def test_dead_populations() -> None:
    """All particles break a hard constraint: log Z is -inf, nothing can be drawn, and the others go on."""

    def never_two(x: Tensor) -> Tensor:
        return torch.where((x == 2).any(-1), -math.inf, 0.0)

    prompts = torch.tensor([[3, 3, 3, 3], [2, 3, 3, 3]])
    steering = ts.Steering(model(template=prompts), ts.Tilt(never_two, draws=2))
    result = ts.smc(steering, 32, 2, generator=torch.Generator().manual_seed(0))
    assert result.log_z[1] == -math.inf
    assert result.log_z[0] > -math.inf
    assert result.ess[-1, 1] == 0
    assert result.alive.tolist() == [True, False]
    with pytest.raises(ValueError, match=r"a population has died, 1 of 2 \(1\).*more particles"):
        result.sample()
    assert "log Z" in repr(result)
    assert "died     1 of 2 populations" in repr(result)


def test_generator_on_another_device() -> None:
    meta = replace(model())
    if not torch.cuda.is_available():
        pytest.skip("needs two devices")
    with pytest.raises(ValueError, match=r"torch\.Generator"):
        ts.smc(ts.Steering(meta), 2, generator=torch.Generator(device="cuda"))


def test_a_gradient_that_cannot_be_had() -> None:
    tilt = ts.Tilt(ones, estimator=ts.Value(lambda x, t: torch.zeros(len(x))))
    with pytest.raises(ValueError, match="take one-hots"):
        ts.Steering(model(), tilt, ts.Gradient())


def test_templates_need_a_population_each() -> None:
    two = model(template=ts.template(LENGTH, MASK).repeat(2, 1))
    with pytest.raises(ValueError, match="one population for each template, populations=2"):
        ts.smc(ts.Steering(two), 3, 1)


def test_enumeration_is_for_small_models() -> None:
    with pytest.raises(ValueError, match="more than the limit"):
        ts.testing.enumerate_steering(ts.Steering(Toy("C").model("mdm")), limit=100)


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not what you think")
    with pytest.raises(ValueError, match="no saved Result, nor any safetensors file"):
        ts.Result.load(file)


def test_a_reopened_result_is_drawn_from_by_a_generator(tmp_path: Path) -> None:
    run(generator=torch.Generator().manual_seed(0)).save(tmp_path / "run.safetensors")
    drawn = [
        ts.Result.load(tmp_path / "run.safetensors").sample(5, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
