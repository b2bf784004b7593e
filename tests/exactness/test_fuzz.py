"""A thousand random configurations of `smc` on tiny exact models, and what must hold of each of them.

A configuration comes from its seed alone. A failure names the seed and what it stands for; `check(seed)` runs it again.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from extended import MaskGITExtended
from narrow import some
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

import tokensteer as ts
from tokensteer import rewards
from tokensteer.testing import TableDenoiser

torch.set_num_threads(1)  # many small operations: more threads only get into one another's way

CHUNKS, EACH, QUICK = 20, 50, 2  # the first few chunks always run, the others with the slow tests
LISTED = 100  # sequences at most, where all of them are listed
# What may be refused. Anything else that is refused is a failure.
REFUSALS = (
    r"Enumerated needs a log-twist that x_s alone determines",  # the estimate is random, or the potential remembers
    r"Gradient\.draws counts clean sequences",  # and the estimator draws none
    r"constraints need a masked process",  # whose sites move whatever their tokens
)


class Dice:
    """Choices from one seed, and what was chosen."""

    def __init__(self, seed: int) -> None:
        self.random, self.told = random.Random(seed), dict[str, Any](seed=seed)
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, name: str, *choices: Any) -> Any:
        chosen = self.random.choice(choices)
        self.told[name] = getattr(chosen, "__name__", chosen)
        return chosen

    def often(self, name: str, share: float) -> bool:
        happens = self.random.random() < share
        if happens:
            self.told[name] = True
        return happens

    def rand(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.generator, dtype=torch.float64)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.told.items())


# ---- models

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda a: a.contiguous(),
    "turned": lambda a: a.mT.contiguous().mT,
    "gaps": lambda a: pad(a, (0, 3))[..., :-3],
    "apart": lambda a: a.transpose(0, 1).contiguous().transpose(0, 1),
}


@dataclass(frozen=True)
class Table:
    """The exact denoiser of a joint law, its mask anywhere, or for noise of any law where there is no mask.

    Asked about what cannot be, it says anything. It may look at the time.
    """

    joint: Tensor
    mask_id: int
    prior: tuple[float, ...] = ()
    layout: str = "whole"
    ignores_time: bool = True

    @property
    def size(self) -> int:
        return len(self.joint) + (self.mask_id != ts.NO_MASK)

    def __call__(self, x: Tensor, t: Any) -> Tensor:
        return LAYOUTS[self.layout](self.log_law(x, t))

    def log_law(self, x: Tensor, t: Any) -> Tensor:
        hot = x if x.is_floating_point() else one_hot(x, self.size).to(self.joint.dtype)
        t = 0.5 if self.ignores_time else torch.as_tensor(t, dtype=hot.dtype).view(-1, 1, 1)
        if self.mask_id == ts.NO_MASK:
            noise = (hot * torch.tensor(self.prior).to(hot)).sum(-1, keepdim=True)
            likely = (1.0 - 0.9 * t) * hot + 0.9 * t * noise
            own = torch.where(likely > 0, likely, 1.0).log().masked_fill(likely == 0, -math.inf)
            log_p = TableDenoiser(self.joint)(pad(likely, (0, 1)), 0.0)[..., :-1] + own
        else:
            order = [*range(self.mask_id), *range(self.mask_id + 1, self.size), self.mask_id]
            log_p = TableDenoiser(self.joint)(hot[..., order], 0.0)[..., :-1]
        log_p = log_p if self.ignores_time else log_p * (0.3 + t)
        log_p = torch.where((log_p == -math.inf).all(-1, keepdim=True), 0.0, log_p).log_softmax(-1)
        if self.mask_id == ts.NO_MASK:
            return log_p
        never = torch.full_like(log_p[..., :1], -math.inf)
        return torch.cat([log_p[..., : self.mask_id], never, log_p[..., self.mask_id :]], -1)

    def in_form(self, form: str) -> ts.Denoiser:
        """Logs; or logits, neither normalised nor without the mask; or hidden states and a head that only moves them
        about, so that its sums are the same for any number of rows."""
        is_mask = torch.arange(self.size) == self.mask_id

        def logits(x: Tensor, t: Any = 0.5) -> Tensor:
            return LAYOUTS[self.layout](self.log_law(x, t).masked_fill(is_mask, 1.0) + 0.5)

        def hidden(x: Tensor, t: Any = 0.5) -> Tensor:
            return LAYOUTS[self.layout](-logits(x, t).clamp(min=-50.0).roll(-1, -1))

        head = nn.Linear(self.size, self.size, bias=False, dtype=self.joint.dtype).requires_grad_(False)
        head.weight.copy_(-torch.eye(self.size).roll(1, 0))
        match form:
            case "logits":
                return ts.from_logits(logits, self.mask_id, ignores_time=self.ignores_time)
            case "hidden":
                return ts.from_hidden(hidden, head, self.mask_id, ignores_time=self.ignores_time)
        return self


def joint_law(dice: Dice, length: int, tokens: int, barred: list[int], must: Tensor, full: bool) -> Tensor:
    """A random law of sequences, with zeros unless it is to be full, and some mass at those that `must` be possible."""
    joint = dice.rand(*(tokens,) * length) + 0.05
    if not full:
        joint[dice.rand(*joint.shape) < dice.pick("zeros", 0.0, 0.0, 0.3, 0.7)] = 0.0
    for site in range(length):
        joint.index_fill_(site, torch.tensor(barred, dtype=torch.long), 0.0)
    joint[tuple(must.unbind(-1))] += 0.2
    return joint / joint.sum()


def make_kernel(dice: Dice, kind: str, mask_id: int, length: int, canvas: Tensor) -> tuple[ts.Kernel, Any]:
    """A kernel of a masked process and its steps."""
    grid = dice.pick("grid", ts.uniform_steps, ts.cosine_steps)
    number = dice.pick("steps", *[1] * 4, *[2] * 8, 3, 3, 4, 5, 8)
    schedule = dice.pick("schedule", ts.Linear(), ts.Linear(), ts.Cosine(), ts.LogLinear(), ts.Polynomial(2.0))
    sigma = dice.pick("sigma", ts.Cap(0.3), ts.Rescale(0.5), ts.Rescale(1.0), ts.Window(ts.Cap(0.5), 0.8, 0.2))
    count = dice.pick("count", ts.ranked.evenly, ts.ranked.fixed(1), ts.ranked.fixed(2), ts.ranked.cosine_count)
    if kind == "Blocks":
        start = dice.pick("start", 0, length - 1)
        size = dice.pick("size", *(n for n in range(1, length + 1) if (length - start) % n == 0))
        blocks = (length - start) // size
        inner = dice.pick("inner", "Ancestral", "ReMDM", "Ranked", "MaskGIT", "ConfidenceRemask", "LowConfidence")
        number = blocks * dice.pick("each", 1, 1, 2)
        kernel, _ = make_kernel(dice, inner, mask_id, length, canvas)
        return ts.Blocks(kernel, size, length, number, grid, start), grid(number)
    if kind in ("FirstHitting", "TimedFirstHitting"):
        kernel = ts.FirstHitting(mask_id) if kind == "FirstHitting" else ts.TimedFirstHitting(mask_id, schedule)
        return kernel, ts.event_steps(canvas, mask_id)
    made: dict[str, Callable[[], ts.Kernel]] = {
        "Ancestral": lambda: ts.Ancestral(mask_id, schedule),
        "ReMDM": lambda: ts.Ancestral(mask_id, schedule, sigma),
        "LowConfidence": lambda: ts.Ranked(mask_id, count),
        "Ranked": lambda: ts.Ranked(
            mask_id,
            count,
            dice.pick("confidence", ts.ranked.max_probability, ts.ranked.negative_entropy, ts.ranked.margin),
            dice.pick("threshold", math.inf, -0.3),
        ),
        "MaskGIT": lambda: ts.MaskGIT(mask_id, count, dice.pick("temperature", 0.0, 1.5)),
        "MaskGITExtended": lambda: MaskGITExtended(ts.MaskGIT(mask_id, count)),
        "ConfidenceRemask": lambda: ts.ConfidenceRemask(
            ts.Ancestral(mask_id, schedule, sigma), 2.0, carried=dice.pick("carried", True, False)
        ),
        "TauLeap": lambda: ts.TauLeap(mask_id, schedule),
    }
    return made[kind](), grid(number)


MASKED = (
    "Ancestral",
    "Ancestral",
    "ReMDM",
    "ReMDM",
    "LowConfidence",
    "Ranked",
    "MaskGIT",
    "MaskGIT",
    "MaskGITExtended",
    "Blocks",
)
KERNELS = (*MASKED, "ConfidenceRemask", "TauLeap", "FirstHitting", "TimedFirstHitting", *["noise"] * 4)


@dataclass
class Made:
    """A model, which sequences of its ids are possible, (V,) * L, its templates (B, L), and another denoiser."""

    model: ts.Model
    support: Tensor
    canvas: Tensor
    other: ts.Denoiser
    reward: Reward | None = None
    rule: Any = None


def make_model(dice: Dice) -> Made:
    kind, length = dice.pick("kernel", *KERNELS), dice.pick("L", 1, *[2] * 5, 3, 3, 4, 5)
    tokens = dice.pick("V", *(n for n in (1, 2, 3, 4) if (n + 1) ** length <= 256))
    noisy = kind == "noise"
    tokens += noisy
    mask_id = ts.NO_MASK if noisy else dice.pick("mask_id", 0, tokens, tokens // 2)
    prior = ()
    if noisy:
        law = dice.rand(tokens) + 0.1
        prior = dice.pick(
            "prior",
            (1.0 / tokens,) * tokens,
            tuple((law / law.sum()).tolist()),
            (0.5, 0.5, *[0.0] * (tokens - 2)),
            (*[0.0] * (tokens - 1), 1.0),
        )
    combined = dice.pick("model", "Diffusion", "Diffusion", "Diffusion", "Product", "guided")
    # A negative power, or opening again what was masked, wants models that rule nothing out.
    full = combined != "Diffusion" and dice.pick("full", True, False)
    barred = dice.pick("barred", [], [], [0], [tokens - 1]) if tokens > 1 else []
    allowed = [token for token in range(tokens) if token not in barred]

    rows = dice.pick("templates", 1, 1, 1, 2, 3)
    free = dice.rand(rows, length) < dice.pick("free", 0.5, 1.0, 1.0)
    free[0, dice.random.randrange(length)] = True
    must = torch.tensor([[dice.random.choice(allowed) for _ in range(length)] for _ in range(rows)])
    if rows > 1 and len(allowed) > 1 and not noisy and dice.often("padded", 0.4):
        kept = [dice.random.randint(1, length) for _ in range(rows)]
        must[must == allowed[-1]] = allowed[0]
        for row, number in enumerate(kept):
            must[row, number:], free[row, number:] = allowed[-1], False
        free[0, 0] = True
    ids = must + (must >= mask_id) if not noisy else must
    canvas = torch.where(free, mask_id, ids)
    dice.told["template"] = canvas.tolist()
    laws = [joint_law(dice, length, tokens, barred, must, whole) for whole in (full, full, True)]

    if noisy:
        leaps = len(set(prior)) == 1 and dice.often("leap", 0.3)
        steps = dice.pick("grid", ts.uniform_steps, ts.cosine_steps)(dice.pick("steps", 1, 2, 2, 2, 3, 5))
        kernel = (ts.UniformLeap if leaps else ts.Interpolating)(prior, dice.pick("schedule", ts.Linear(), ts.Cosine()))
    else:
        kernel, steps = make_kernel(dice, kind, mask_id, length, canvas)
    dtype = dice.pick("dtype", torch.float64, torch.float64, torch.float64, torch.float32)
    layout, ages = dice.pick("layout", "whole", *LAYOUTS), dice.often("ages", 0.2)
    form = "logs" if noisy else dice.pick("form", "logs", "logits", "hidden")
    first, second, third = (Table(law.to(dtype), mask_id, prior, layout, not ages).in_form(form) for law in laws)
    one = canvas if rows > 1 or dice.often("stacked", 0.2) else canvas[0]
    model = ts.Diffusion(first, kernel, steps, one)
    if combined != "Diffusion":
        powers = dice.pick("powers", (0.5, 0.5), (1.0, 1.0), (0.7, 0.0), (1.5, 0.5), *[(2.0, -0.5)] * (2 * full))
        convention = dice.pick("convention", ts.denoiser_powers, ts.denoiser_powers, ts.kernel_powers, ts.paper_powers)
        raised = {ts.denoiser_powers: True, ts.kernel_powers: kind in ("Ancestral", "ReMDM", "LowConfidence", "noise")}
        convention = (
            convention if raised.get(convention, kind in ("Ancestral", "LowConfidence")) else ts.denoiser_powers
        )
        dice.told["convention"] = convention.__name__
        correct = full and convention is ts.denoiser_powers
        other = replace(model, denoiser=second)
        if combined == "guided" and correct:
            model = ts.guided(model, other, dice.pick("scale", 0.0001, 0.5, 1.0, 1.5, 3.0))
        else:
            ahead = dice.pick("look-ahead", True, False)
            model = ts.Product((model, other), powers, convention, correct_remasking=correct, lookahead=ahead)
    support = laws[0] * laws[1] > 0 if combined != "Diffusion" else laws[0] > 0
    if not noisy:  # as ids, with the mask among them
        for site in range(length):
            places = torch.tensor([token + (token >= mask_id) for token in range(tokens)])
            wider = torch.zeros(*support.shape[:site], tokens + 1, *support.shape[site + 1 :], dtype=torch.bool)
            support = wider.index_copy(site, places, support)
    return Made(model, support, canvas, third)


# ---- rewards, proposals, runs


@dataclass
class Reward:
    """A table of what sequences are worth, exact in any dtype; of one-hots too. It may answer in memory of its own."""

    worth: Tensor
    dtype: torch.dtype
    reuses: bool = False
    memory: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            left = self.worth.to(x.dtype).expand(len(x), *self.worth.shape)
            for site in range(x.shape[1]):
                left = torch.einsum("pv...,pv->p...", left, x[:, site])
            return left.to(self.dtype)
        found = self.worth[tuple(x.unbind(-1))].to(self.dtype)
        if not self.reuses:
            return found
        if self.memory is None or len(self.memory) < len(found) or self.memory.dtype != self.dtype:
            self.memory = torch.empty(max(64, len(found)), dtype=self.dtype)
        return self.memory[: len(found)].copy_(found)


FLOATS = (*[torch.float64] * 2, torch.float32, torch.bfloat16, torch.float16)


def make_reward(dice: Dice, size: int, length: int, differentiable: bool) -> Reward:
    scale = dice.pick("worth", 4, 4, 1, 0)
    dtypes = FLOATS if differentiable or scale == 4 else (*FLOATS, torch.int64, *[torch.bool] * 2 * (scale == 0))
    dtype = dice.pick("reward", *dtypes)
    noise = dice.rand(*(size,) * length)
    worth = (noise > 0.5).double() if scale == 0 else ((noise - 0.5) * 4 * scale).round() / scale
    if dtype.is_floating_point and not differentiable and dice.often("-inf", 0.4):
        worth[dice.rand(*worth.shape) < 0.3] = -math.inf
    return Reward(worth, dtype, reuses=not differentiable and dice.often("reuses", 0.3))


def value(x: Tensor, t: float) -> Tensor:
    """A known estimate of any reward, of ids or one-hots: how often id 1 is there."""
    return (x[..., 1] if x.is_floating_point() else (x == 1).double()).sum(-1)


def make_tilt(dice: Dice, made: Made, few: bool) -> ts.Tilt:
    differentiable = dice.often("differentiable", 0.4)
    made.reward = make_reward(dice, made.model.vocab_size, made.canvas.shape[1], differentiable)
    estimators = [ts.Sampled(), ts.Sampled(), ts.Sampled(seed=3), ts.Value(value)] + 3 * few * [ts.Exact()]
    if differentiable:
        estimators += [ts.SoftInput(), ts.Relaxed(), ts.Relaxed(0.5, hard=True)]
    ramps = (*(ts.ramps.linear, ts.ramps.constant, ts.ramps.end, ts.ramps.clipped(5)) * 2, ts.Adaptive(0.8))
    return ts.Tilt(
        made.reward,
        kl=dice.pick("kl", 0.05, 0.2, 0.7, 1.0, 5.0),
        ramp=dice.pick("ramp", *ramps),
        draws=dice.pick("draws", 1, 2, 3, 4),
        average=dice.pick(
            "average",
            ts.estimators.log_mean_exp,
            ts.estimators.log_mean_exp,
            ts.estimators.log_mean_exp_outside,
            ts.estimators.mean,
        ),
        estimator=dice.pick("estimator", *estimators),
        potential=dice.pick(
            "potential",
            ts.potentials.difference,
            ts.potentials.difference,
            ts.potentials.difference,
            ts.potentials.maximum,
            ts.potentials.total,
        ),
        differentiable=differentiable,
    )


def make_rule(dice: Dice, made: Made) -> rewards.Automaton | None:
    """A constraint that each template can meet, if one is soon found."""
    size, sequences = made.model.vocab_size, made.support.nonzero()
    for _ in range(6):
        words = [dice.random.randrange(size) for _ in range(2)]
        kind = dice.pick("rule", "contains", "avoids", "count")
        rules = {"contains": rewards.contains(words[:1], size), "avoids": rewards.avoids([words], size)}
        rule = rules.get(kind, rewards.count(words, size, at_least=1, at_most=2))
        accepted = sequences[rule.accepts(sequences)]
        hits = (made.canvas.unsqueeze(1) == accepted) | (made.canvas.unsqueeze(1) == made.model.kernel.mask_id)
        if hits.all(-1).any(-1).all():
            dice.told["words"] = words
            return rule
    return None


def make_steering(dice: Dice) -> tuple[ts.Steering, Made]:
    made = make_model(dice)
    model = made.model
    few = made.support.numel() <= LISTED
    tilt = make_tilt(dice, made, few) if dice.often("tilt", 0.9) else None
    random_twist = tilt is not None and (tilt.estimator.random or tilt.potential is not ts.potentials.difference)
    listed = few and not random_twist and not isinstance(model.kernel, MaskGITExtended)
    choices = ["FromModel", "FromModel", "Amortised", "Guided", "Optimal", "constrain"]
    chosen = dice.pick("proposal", *choices, *["Enumerated"] * 3 * listed, *["Gradient"] * 3 * (tilt is not None))
    base: Any = ts.Guided() if isinstance(model, ts.Product) and dice.often("guided base", 0.5) else ts.FromModel()
    if tilt is not None and (chosen == "Gradient" or (chosen == "constrain" and dice.often("gradient", 0.3))):
        base = ts.Gradient(
            base,
            clip=dice.pick("clip", None, 1.0, 5.0),
            tokens_only=dice.pick("tokens_only", False, False, True),
            every=dice.pick("every", 1, 1, 2, 3),
            draws=dice.pick("gradient draws", None, *[1, 2, 2] * tilt.drawn),
        )
    if chosen in ("FromModel", "Gradient", "Guided") and dice.often("mixture", 0.2):
        return ts.Steering(model, tilt, ts.Mixture((ts.FromModel(), ts.Guided() if chosen == "Guided" else base))), made
    plain = {"Guided": ts.Guided(), "Optimal": ts.Optimal(), "Enumerated": ts.Enumerated(), "Gradient": base}
    if chosen == "constrain" and model.kernel.mask_id != ts.NO_MASK:
        made.rule = make_rule(dice, made)
        if made.rule is not None:
            return rewards.constrain(model, made.rule, tilt, base), made
    if chosen == "Amortised":
        return ts.Steering(model, tilt, ts.Amortised(made.other)), made
    return ts.Steering(model, tilt, plain.get(chosen, ts.FromModel())), made


def make_run(dice: Dice, made: Made) -> dict[str, Any]:
    """What else `smc` takes."""
    particles = dice.pick("N", *range(1, 9), 13, 16)
    resamplers = [
        ts.resampling.systematic,
        ts.resampling.multinomial,
        ts.resampling.stratified,
        ts.resampling.residual,
        ts.resampling.ssp,
        ts.resampling.one_survivor,
        ts.resampling.heaviest,
    ]
    resampler = dice.pick("resampler", *resamplers, *["partial"] * 2, *["nested"] * 2 * (particles % 2 == 0))
    wrapped = {
        "partial": lambda: ts.resampling.partial(ts.resampling.ssp, 0.5),
        "nested": lambda: ts.resampling.nested(ts.resampling.stratified, 2),
    }
    triggers = {
        "ess": ts.triggers.ess_below(0.63),
        "always": ts.triggers.always,
        "every": ts.triggers.every(2),
        "all": ts.triggers.all_of(ts.triggers.every(2), ts.triggers.ess_below(0.93)),
        "any": ts.triggers.any_of(ts.triggers.every(3), ts.triggers.ess_below(0.37)),
        "never": ts.triggers.never,
        "observe": ts.triggers.observe,
    }
    return {
        "num_particles": particles,
        "populations": len(made.canvas) * dice.pick("populations", 1, 1, 1, 2),
        "resample": wrapped.get(resampler, lambda: resampler)(),
        "when": triggers[dice.pick("when", *triggers, "never")],
    }


# ---- what must hold


def same(a: ts.Result, b: ts.Result) -> bool:
    return torch.equal(a.samples, b.samples) and torch.allclose(a.log_w, b.log_w, rtol=1e-6, atol=1e-6)


def check(seed: int) -> bool:
    """Whether the configuration ran: it may be refused when it is made, and for reasons that are known."""
    dice = Dice(seed)
    try:
        return _check(dice)
    except Exception as error:
        error.add_note(f"the configuration: {dice}")
        raise


def _check(dice: Dice) -> bool:
    try:
        steering, made = make_steering(dice)
    except (ValueError, TypeError) as error:
        if any(re.search(known, str(error)) for known in REFUSALS):
            return False
        raise
    options, memory = make_run(dice, made), dice.pick("memory", *[None] * 6, *["2kB"] * 3, "64kB")
    reward, seed = made.reward, dice.told["seed"]

    def run(memory: str | None = memory) -> ts.Result:
        return ts.smc(steering, **options, memory=memory, generator=torch.Generator().manual_seed(seed))

    result = run()
    samples = result.samples
    assert ((0 <= samples) & (samples < steering.model.vocab_size)).all(), "ids in range"
    assert (samples != steering.model.kernel.mask_id).all(), "no mask is left"
    canvas = made.canvas.repeat_interleave(len(samples) // len(made.canvas), 0).unsqueeze(1)
    assert ((samples == canvas) | (canvas == steering.model.kernel.mask_id)).all(), "the template is kept"
    assert not result.log_w.isnan().any()
    if reward is not None:
        worth = reward.worth[tuple(samples.unbind(-1))]
        if made.rule is not None:
            worth = worth.masked_fill(~made.rule.accepts(samples.flatten(0, 1)).view_as(worth), -math.inf)
        assert torch.equal(some(result.reward).double(), worth), "the reward is that of the samples"
        plain = type(steering.proposal) is ts.FromModel and isinstance(steering.model, ts.Diffusion)
        if plain and options["when"] in (ts.triggers.never, ts.triggers.observe):
            exact = worth / some(steering.twist).kl
            assert torch.allclose(result.log_w, exact, rtol=1e-9, atol=1e-9), "log-weights are r/kl"
    if seed % 16 == 0:
        again = run()
        assert torch.equal(again.samples, samples), "the same seed, the same samples"
        assert torch.equal(again.log_w, result.log_w), "the same seed, the same weights"
    # Neither memory nor what the reward answers in may matter: every other seed looks. What does is told.
    reasons = [] if memory is None else ["memory"]
    if reward is not None:
        reasons += ["reuses"] * reward.reuses
        reasons += ["dtype"] * (reward.dtype != torch.float64 and not some(steering.twist).differentiable)
    if seed % 2 and reasons and not same(result, _without(reasons, run, reward)):
        guilty = [reason for reason in reasons if not same(result, _without([reason], run, reward))]
        raise AssertionError(f"another run without {' or '.join(guilty or reasons)}")
    return True


def _without(reasons: list[str], run: Callable[..., ts.Result], reward: Reward | None) -> ts.Result:
    kept = None if reward is None else (reward.dtype, reward.reuses)
    if reward is not None:
        reward.dtype = torch.float64 if "dtype" in reasons else reward.dtype
        reward.reuses = reward.reuses and "reuses" not in reasons
    try:
        return run(None) if "memory" in reasons else run()
    finally:
        if reward is not None and kept is not None:
            reward.dtype, reward.reuses = kept


@pytest.mark.parametrize(
    "chunk", [*range(QUICK), *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(QUICK, CHUNKS))]
)
def test_random_configurations(chunk: int) -> None:
    failures, ran = list[str](), 0
    for seed in range(chunk * EACH, (chunk + 1) * EACH):
        try:
            ran += check(seed)
        except Exception as error:
            failures.append("\n".join([f"{type(error).__name__}: {error}", *error.__notes__]))
    assert not failures, f"{len(failures)} of {EACH} configurations:\n" + "\n".join(failures)
    assert ran >= 0.7 * EACH, f"only {ran} of {EACH} configurations ran"
