"""Fine-tuning by the gradient of the reward through the sampler, as in DRAKES (Wang et al., 2024).

A masked sampler runs on one-hots. Which sites move is drawn as usual and has no gradient. A site that opens takes its
token y from log mu by the Gumbel-max trick, an exact draw, with the gradient of the softmax of (log mu + g)/temperature
(straight through). Sites that were open keep their value and its gradient:

    x_s = x_t[tokens] + x_t[mask] · y     where a site opens,      x_s = x_t     where nothing moves.

So the reward of x_0, which must be differentiable, has a gradient in the weights at every step. The objective is

    E[r(x_0)] - kl · E[ sum_t KL(q(· | x_t) | p(· | x_t)) ],

each divergence exact. Its optimum over paths is p · exp(r/kl), the target of `Tilt(reward, kl)`; without `kl` nothing
keeps the sampler near the model. The gradient is biased by the temperature, and the tuned denoiser alone samples from
no known target: use it as an `Amortised` proposal to have weights again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import one_hot

from tokensteer.core.kernels.kernel import NO_MASK, Stateful
from tokensteer.core.kernels.measure import Reveal
from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Step
from tokensteer.core.twists.tilt import Reward
from tokensteer.train.optim import Pace, described_model, described_net, half_precision, same_draws
from tokensteer.train.rounds import Gathers, Report, Trainee, run_rounds


@dataclass(frozen=True)
class DrakesPlan(Pace):
    """How long, how fast, and how freely to tune.

    An update accumulates the gradients of `parts` times `paths` paths, through their `last` steps, all if None: earlier
    steps learn from their own divergence alone. The temperature falls geometrically from `temperature` to
    `last_temperature`.
    """

    rounds: int
    paths: int = 64
    parts: int = 1
    last: int | None = None
    kl: float = 0.0
    temperature: float = 1.0
    last_temperature: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wholes("DrakesPlan", 1, rounds=self.rounds, paths=self.paths, parts=self.parts, last=self.last)
        check_numbers("DrakesPlan", "(0, inf)", temperature=self.temperature, last_temperature=self.last_temperature)
        check_numbers("DrakesPlan", "[0, inf)", kl=self.kl)

    @property
    def total(self) -> int:
        return self.rounds

    def temperature_at(self, done: float) -> float:
        return self.temperature * (self.last_temperature / self.temperature) ** min(1.0, done)


@dataclass(frozen=True)
class Tuning(Report):
    """The state of a fine-tuning, with means since the last report: the loss, the reward of exact draws of the sampler,
    and KL(q | p) of their paths, nan if the plan's kl is 0. The last report is of the averaged network, on as many new
    paths as an update has."""

    reward: float
    divergence: float


@dataclass(frozen=True)
class Tuned:
    """The averaged network, the same as a denoiser for `Diffusion` or `Amortised`, the reports, and the network rows
    that were computed."""

    net: nn.Module
    denoiser: Denoiser
    history: Sequence[Tuning]
    rows: int


def fit_drakes(
    model: Diffusion,
    reward: Reward,
    net: nn.Module,
    as_denoiser: Callable[[nn.Module], Denoiser],
    *,
    plan: DrakesPlan,
    generator: Generator,
    checkpoint: Path | None = None,
    watch: Callable[[Tuning], None] | None = None,
    together: Gathers | None = None,
    about: Mapping[str, Any] | None = None,
) -> Tuned:
    """Tune `net`, which as_denoiser(net) makes a denoiser of one-hots, for a reward of one-hots (P, L, V) -> (P,).

    Begin with a copy of the model's network, or an adapter on it. A kernel that chooses its sites follows the order of
    the tuned network, and p is compared with it on the same sites. If the file `checkpoint` exists, the run resumes
    from it; ValueError if it was written with another plan, seed, model or `about`. Processes may train `together` as
    in `fit_proposal`.
    """
    trainee = _Relaxed(model, reward, as_denoiser, net, plan, generator)
    given = {"network": described_net(net), **described_model(model), **(about or {})}
    best = run_rounds(trainee, net, plan, given, generator, checkpoint=checkpoint, watch=watch, together=together)
    best.requires_grad_(False)
    return Tuned(best, as_denoiser(best), trainee.history, trainee.rows)


@dataclass(frozen=True)
class Relaxation:
    """A sampler with a gradient: the model's kernel with the tokens of `denoiser`."""

    model: Diffusion
    denoiser: Denoiser

    def __post_init__(self) -> None:
        kernel = self.model.kernel
        if kernel.mask_id == NO_MASK or isinstance(kernel, Stateful):
            raise ValueError(
                f"fit_drakes cannot differentiate through {type(kernel).__name__}: use a masked process whose kernel "
                "keeps no state, such as Ancestral or Ranked"
            )

    def start(self, rows: int) -> Tensor:
        """One-hots (P, L, V)."""
        return one_hot(self.model.start(rows, None), self.model.vocab_size).to(self.model.dtype)

    def step(
        self, x: Tensor, step: Step, temperature: float, generator: Generator | None, held: bool
    ) -> tuple[Tensor, Tensor]:
        """x_s from one-hots x_t (P, L, V), and KL(q(· | x_t) | p(· | x_t)), (P,), zeros unless `held`."""
        ids, log_mu = x.detach().argmax(-1), self.denoiser(x, step.t)
        fixed = log_mu.detach()
        measure = self.model.step_with(ids, fixed, step, self.model.kernel.choose(ids, fixed, step))
        if not isinstance(measure, Reveal) or not measure.factorises:
            raise ValueError(f"{type(self.model.kernel).__name__} does not open its sites one by one: use Ancestral")
        moves = measure.log_move.exp()
        divergence = self._divergence(x, log_mu, step, moves * measure.masked) if held else x.new_zeros(len(x))
        u = torch.rand(ids.shape, generator=generator, device=ids.device, dtype=torch.float64)
        moved = u < moves.double()
        opens, closes = moved & measure.masked, moved & ~measure.masked
        y = x.new_zeros(x.shape).index_put(
            opens.nonzero(as_tuple=True), gumbel_token(log_mu[opens], temperature, generator).to(x.dtype)
        )
        mask_id = self.model.kernel.mask_id
        mask = one_hot(torch.full_like(ids, mask_id), x.shape[-1]).to(x.dtype)
        opened = x * (1 - mask) + x[..., mask_id, None] * y
        x = torch.where(opens.unsqueeze(-1), opened, x)
        return torch.where(closes.unsqueeze(-1), mask, x), divergence

    def _divergence(self, x: Tensor, log_mu: Tensor, step: Step, opening: Tensor) -> Tensor:
        """Sum over sites of P(it opens) · KL(mu of the denoiser | mu of the model): p and q differ in tokens alone."""
        log_base = self.model.relaxed(x, step.t)
        possible = (log_mu > NEVER) & (opening > 0).unsqueeze(-1)  # what cannot happen is kept out of the graph
        gap = torch.where(possible, log_mu, 0.0) - torch.where(possible, log_base, 0.0)
        return (opening.unsqueeze(-1) * torch.where(possible, log_mu, NEVER).exp() * gap).sum((-2, -1))


def gumbel_token(log_mu: Tensor, temperature: float, generator: Generator | None) -> Tensor:
    """One-hots drawn from exp(log_mu), (K, V), with the gradient of the Gumbel-softmax that they are the argmax of."""
    noise = torch.empty_like(log_mu).exponential_(generator=generator).clamp_(min=torch.finfo(log_mu.dtype).tiny)
    soft = ((log_mu - noise.log()) / temperature).softmax(-1)
    hard = one_hot(soft.detach().argmax(-1), soft.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())


@dataclass(eq=False)
class _Relaxed(Trainee[Tuning]):
    """A round is one update through a relaxed sampler. `losses` hold the loss, the reward and the divergence, (3,)."""

    model: Diffusion
    reward: Reward
    as_denoiser: Callable[[nn.Module], Denoiser]
    net: nn.Module
    plan: DrakesPlan
    generator: Generator
    entry: type[Tuning] = field(default=Tuning, init=False)

    def __post_init__(self) -> None:
        self.sampler = Relaxation(self.model, self.as_denoiser(self.net))

    def round(self, done: float, update: Callable[[], None]) -> None:
        temperature = self.plan.temperature_at(done)
        for _ in range(self.plan.parts):
            with torch.enable_grad():
                self.losses.append(self._backward(temperature))
        update()

    def _backward(self, temperature: float) -> Tensor:
        """Accumulate the gradients of some paths; their loss, reward and divergence, (3,)."""
        model, held = self.model, self.plan.kl > 0
        first = 0 if self.plan.last is None else max(0, len(model.steps) - self.plan.last)
        x = self.sampler.start(max(1, self.plan.paths // model.populations) * model.populations)
        self.rows += len(x) * len(model.steps) * (2 if held else 1)
        divergence = before = x.new_zeros(len(x))
        with half_precision(x.device):
            for k, step in enumerate(model.steps):
                with torch.set_grad_enabled(k >= first or held):
                    x, apart = self.sampler.step(x, step, temperature, self.generator, held)
                if k >= first:
                    divergence = divergence + apart
                    continue
                x, before = x.detach(), before + apart.detach()
                if held:  # at once, so that memory does not grow with these steps
                    torch.autograd.backward(self.plan.kl * apart.mean() / self.plan.parts)
            r = self.reward(x)
        if r.shape != (len(x),):
            raise ValueError(f"the reward must give one number for each of {len(x)} sequences, got {tuple(r.shape)}")
        if x.requires_grad and not r.requires_grad:
            raise ValueError("the reward has no gradient in one-hots (P, L, V): it must be differentiable in them")
        loss = self.plan.kl * divergence.mean() - r.mean()
        if loss.requires_grad:  # unless all sites opened before the steps with a gradient
            torch.autograd.backward(loss / self.plan.parts)
        apart = (divergence.detach() + before).mean()
        loss = loss.detach() + self.plan.kl * before.mean()
        return torch.stack([loss.double(), r.detach().mean().double(), apart.double()])

    def report(self, average: nn.Module, step: int, done: float, seconds: float) -> Tuning:
        loss, reward, divergence = (float(value) for value in torch.stack(self.losses).mean(0))
        return Tuning(step, done, loss, seconds, reward, divergence if self.plan.kl else math.nan)

    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Tuning:
        best = replace(self, net=average, generator=same_draws(self.generator))
        best.round(done, average.zero_grad)  # measured, not trained
        return best.report(average, step, done, seconds)
