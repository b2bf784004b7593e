"""Fine-tuning by the gradient of the reward through the sampler, as DRAKES does (Wang et al., 2024).

A masked sampler is walked with one-hots. Which sites move is drawn as always and has no gradient; a site that opens
takes its token y from log mu by the Gumbel-max trick, which is an exact draw, with the gradient of the softmax of
(log mu + g)/temperature in its place (straight through). What was open is carried over with its own gradient:

    x_s = x_t[tokens] + x_t[mask] · y     where a site opens,      x_s = x_t     where nothing moves.

So the reward of x_0, which must be differentiable, has a gradient in the weights at every step. The objective is

    E[r(x_0)] - kl · E[ sum_t KL(q(· | x_t) | p(· | x_t)) ],

each divergence exact. Its optimum over paths is p · exp(r/kl), the target of `Tilt(reward, kl)`; without `kl` nothing
holds the sampler near the model. The gradient is biased by the temperature, and the tuned denoiser by itself samples
from no target in particular: to have weights again, take it as an `Amortised` proposal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from tokensteer.train.optim import Optimiser, described_net, same_draws
from tokensteer.train.proposal import asked
from tokensteer.train.rounds import Gathers, run_rounds


@dataclass(frozen=True)
class DrakesPlan:
    """How long, how fast, and how freely.

    An update gathers the gradients of `parts` times `paths` paths, which go back through the `last` so many steps, all
    if None: a step before them learns from its own divergence alone. The temperature falls from `temperature` to
    `last_temperature` by equal factors.
    """

    rounds: int
    paths: int = 64
    parts: int = 1
    last: int | None = None
    kl: float = 0.0
    temperature: float = 1.0
    last_temperature: float = 0.3
    rate: float = 1e-3
    warmup: float = 0.02
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.99
    seconds: float | None = None
    report_every: int = 10
    save_every: int = 100

    def __post_init__(self) -> None:
        counts = {"rounds": self.rounds, "paths": self.paths, "parts": self.parts, "last": self.last}
        check_wholes("DrakesPlan", 1, **counts, report_every=self.report_every, save_every=self.save_every)
        check_numbers("DrakesPlan", "(0, inf)", temperature=self.temperature, last_temperature=self.last_temperature)
        check_numbers("DrakesPlan", "(0, inf)", rate=self.rate, seconds=self.seconds)
        check_numbers("DrakesPlan", "(0, inf]", clip=self.clip)
        check_numbers("DrakesPlan", "[0, inf)", kl=self.kl, weight_decay=self.weight_decay)
        check_numbers("DrakesPlan", "[0, 1)", warmup=self.warmup, average=self.average)

    def temperature_at(self, done: float) -> float:
        return self.temperature * (self.last_temperature / self.temperature) ** min(1.0, done)


@dataclass(frozen=True)
class Tuning:
    """Where a fine-tuning stands, by the means since the last report: the loss, the reward of exact draws of the
    sampler as it is, and KL(q | p) of their paths, nan if it was not asked for. The report of the end is of the
    averaged network, which is returned, on as many new paths as an update gathers."""

    step: int
    done: float
    loss: float
    seconds: float
    reward: float
    divergence: float


@dataclass(frozen=True)
class Tuned:
    """The averaged network as a denoiser, for `Diffusion` or `Amortised`, how it went, and the network rows it took."""

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

    Begin from a copy of the model's own network, or an adapter on it. A kernel that chooses its sites follows the order
    of the network that is tuned, and p is compared with it on the same sites. If the file `checkpoint` exists, the run
    goes on from there; one of another plan, seed or model is refused, and `about` is what else it must agree
    with. Processes may train `together` as for `fit_proposal`.
    """
    tuner = _Tuner(model, reward, as_denoiser, net, plan, generator)
    given = {"network": described_net(net), **asked(model), **(about or {})}
    learning = Optimiser(net.train(), asdict(plan) | given, generator, plan.weight_decay, plan.clip, plan.average)
    run_rounds(tuner, learning, plan, checkpoint=checkpoint, watch=watch, together=together)
    best = learning.average.module.eval().requires_grad_(False)
    return Tuned(best, as_denoiser(best), tuner.history, tuner.rows)


@dataclass(frozen=True)
class Relaxation:
    """A sampler with a gradient: the model's kernel with the tokens of `denoiser`."""

    model: Diffusion
    denoiser: Denoiser

    def __post_init__(self) -> None:
        kernel = self.model.kernel
        if kernel.mask_id == NO_MASK or isinstance(kernel, Stateful):
            raise ValueError(
                "the gradient goes through sites that open, one token each: use a masked process whose kernel "
                "remembers nothing, such as Ancestral or Ranked"
            )

    def start(self, rows: int) -> Tensor:
        """One-hots (P, L, V)."""
        return one_hot(self.model.start(rows, None), self.model.vocab_size).to(self.model.dtype)

    def step(
        self, x: Tensor, step: Step, temperature: float, generator: Generator | None, held: bool
    ) -> tuple[Tensor, Tensor]:
        """x_s and, if it is `held`, KL(q(· | x_t) | p(· | x_t)), (P,), from one-hots x_t (P, L, V)."""
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
        """sum over sites of P(it opens) · KL(mu of the denoiser | mu of the model): p and q differ in tokens alone."""
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


class _Tuner:
    """What learns: a relaxed sampler, and how it is doing."""

    def __init__(
        self,
        model: Diffusion,
        reward: Reward,
        as_denoiser: Callable[[nn.Module], Denoiser],
        net: nn.Module,
        plan: DrakesPlan,
        generator: Generator,
    ) -> None:
        self.sampler, self.as_denoiser = Relaxation(model, as_denoiser(net)), as_denoiser
        self.reward, self.plan, self.generator = reward, plan, generator
        self.seen: list[Tensor] = []
        self.history: list[Tuning] = []
        self.rows = 0

    def round(self, done: float, update: Callable[[], None]) -> None:
        self.gather(done)
        update()

    def gather(self, done: float) -> None:
        """Gather the gradients of one update."""
        temperature = self.plan.temperature_at(done)
        for _ in range(self.plan.parts):
            with torch.enable_grad():
                self.seen.append(self._gather(temperature))

    def _gather(self, temperature: float) -> Tensor:
        """Gather the gradients of some paths: their loss, reward and divergence."""
        model, held = self.sampler.model, self.plan.kl > 0
        first = 0 if self.plan.last is None else max(0, len(model.steps) - self.plan.last)
        x = self.sampler.start(max(1, self.plan.paths // model.populations) * model.populations)
        self.rows += len(x) * len(model.steps) * (2 if held else 1)
        divergence = before = x.new_zeros(len(x))
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            for k, step in enumerate(model.steps):
                with torch.set_grad_enabled(k >= first or held):
                    x, apart = self.sampler.step(x, step, temperature, self.generator, held)
                if k >= first:
                    divergence = divergence + apart
                    continue
                x, before = x.detach(), before + apart.detach()
                if held:  # at once, so that memory does not grow with the steps that are not gone back through
                    _backward(self.plan.kl * apart.mean() / self.plan.parts)
            r = self.reward(x)
        _check(r, x)
        loss = self.plan.kl * divergence.mean() - r.mean()
        if loss.requires_grad:  # unless all sites were open before the steps that are gone back through
            _backward(loss / self.plan.parts)
        apart = (divergence.detach() + before).mean()
        loss = loss.detach() + self.plan.kl * before.mean()
        return torch.stack([loss.double(), r.detach().mean().double(), apart.double()])

    def report(self, step: int, done: float, seconds: float) -> Tuning:
        loss, reward, divergence = (float(value) for value in torch.stack(self.seen).mean(0))
        self.seen.clear()
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} by round {step}: lower the rate, {self.plan.rate}")
        known = divergence if self.plan.kl else math.nan
        self.history.append(Tuning(step, done, loss, seconds, reward, known))
        return self.history[-1]

    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Tuning:
        draws, model = same_draws(self.generator), self.sampler.model
        best = _Tuner(model, self.reward, self.as_denoiser, average, self.plan, draws)
        best.gather(done)
        average.zero_grad()  # nothing is learned from this
        self.history.append(best.report(step, done, seconds))
        return self.history[-1]

    def tensors(self) -> dict[str, Tensor]:
        return {"seen": torch.stack(self.seen)} if self.seen else {}

    def words(self) -> dict[str, Any]:
        return {"history": [asdict(entry) for entry in self.history], "rows": self.rows}

    def recall(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        self.history = [Tuning(**entry) for entry in header.get("history", ())]
        self.rows = header.get("rows", 0)
        self.seen = list(tensors["seen"].to(self.sampler.model.device)) if "seen" in tensors else []


def _check(r: Tensor, x: Tensor) -> None:
    if r.shape != (len(x),):
        raise ValueError(f"the reward must give one number for each of {len(x)} sequences, got {tuple(r.shape)}")
    if x.requires_grad and not r.requires_grad:
        raise ValueError("the reward has no gradient in one-hots (P, L, V): it must be differentiable in them")


def _backward(loss: Tensor) -> None:
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
