"""Trajectories to learn from: what was visited on the way, and all about it that no learning changes.

A path is x_1 ... x_0 without resampling, with the log-twist it had at each time and log p of each of its moves. Any
policy may have walked it; the log-probability that a proposal gives to the same moves is computed when it is wanted,
with the gradient of the network that says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.choices import as_tensor
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.denoiser import Denoiser, Time, Timeless
from tokensteer.core.models.diffusion import Meter, Model, clock
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.rows import distinct
from tokensteer.core.particles.loop import sweep
from tokensteer.core.particles.path import Evaluation, Step
from tokensteer.core.particles.triggers import never, observe
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.proposals.proposal import FromModel, chosen
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Paths:
    """P paths of T steps: x (T + 1, P, L), log_twist (T + 1, P), log_p (T, P), and of the policy that walked them
    log p/q of each move, log_ratio (T, P), and the log-weight log_w (P,) with which it arrived.

    `sites` (T, P, L) are those a kernel chose to open, or the scores (T, P, L, V) that rank them, `times` (T, P) the
    particles' own if they have clocks, `share` (P,) how much each path counts if not all count the same, `since` () the
    first step that counts.
    """

    x: Tensor
    log_twist: Tensor
    log_p: Tensor
    log_ratio: Tensor
    log_w: Tensor
    sites: Tensor | None = None
    times: Tensor | None = None
    share: Tensor | None = None
    since: Tensor | None = None

    def __len__(self) -> int:
        return self.x.shape[1]

    @property
    def num_steps(self) -> int:
        return len(self.log_p)

    def scaled(self, amount: float) -> Paths:
        """The same paths with a reward of so many times the size."""
        return replace(self, log_twist=amount * self.log_twist)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over paths of values (..., P)."""
        return values.mean(-1) if self.share is None else (values * self.share).sum(-1)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """By name, for a checkpoint."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {prefix + name: value for name, value in named.items() if value is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> Paths:
        """From what `tensors` gave."""
        found = {name.removeprefix(prefix): v.to(device) for name, v in tensors.items() if name.startswith(prefix)}
        return cls(**found)


@dataclass(frozen=True)
class Late:
    """The model's own moves before the time t and those of `base` from then on: so it is seen where the base alone
    would never go, and what comes of that."""

    base: Amortised
    t: float
    needs_gradient: bool = field(default=False, init=False, repr=False)

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.base.meters

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        return (FromModel() if step.t > self.t else self.base)(x, evaluation, step, model, twist)


def walk(steering: Steering, num_paths: int, generator: Generator | None, twists: bool = True) -> Paths:
    """Paths walked by the proposal of `steering`, as many for each of the model's templates. Without `twists` the
    reward is asked for at the end only, and the log-twists in between mean nothing."""
    model = steering.model
    each = max(1, num_paths // model.populations)
    x: list[Tensor] = []
    log_twist: list[Tensor] = []
    log_p: list[Tensor] = []
    log_ratio: list[Tensor] = []
    sites: list[Tensor] = []
    times: list[Tensor] = []
    log_w = torch.zeros(0)
    records = sweep(steering, each, model.populations, when=observe if twists else never, generator=generator)
    here = next(records)
    for there in records:
        step, prediction = there.step, here.evaluation.prediction
        assert step is not None, "only the start has no step"
        assert isinstance(prediction, Prediction), "particles are evaluated before they move"
        x_t, x_s = here.x.flatten(0, 1), there.x.flatten(0, 1)
        with torch.no_grad():
            opened = chosen(x_t, model.clean(prediction), here.evaluation, step, model)
            log_p.append(model.log_prob(x_s, x_t, prediction, step, opened))
        time = clock(model, here.evaluation.memory, step.t)
        if isinstance(time, Tensor):
            times.append(time)
        if opened is not None:
            sites.append(as_tensor(opened))
        x.append(x_t)
        log_twist.append(here.evaluation.log_twist)
        risen = (there.evaluation.log_twist - here.evaluation.log_twist).view_as(there.log_w)
        log_ratio.append((there.log_w - here.log_w - risen).flatten())
        here, log_w = there, there.log_w
    x.append(here.x.flatten(0, 1))
    log_twist.append(here.evaluation.log_twist)
    if (log_twist[-1] == -torch.inf).any():
        raise ValueError(
            "the reward of a path is -inf, and no proposal can learn from that by log-weights: train with a reward "
            "that is finite everywhere, and put the hard constraint into the Steering that samples"
        )
    return Paths(
        torch.stack(x),
        torch.stack(log_twist),
        torch.stack(log_p),
        torch.stack(log_ratio),
        log_w.flatten(),
        torch.stack(sites) if sites else None,
        torch.stack(times) if times else None,
    )


@dataclass(frozen=True)
class Transitions:
    """The moves of some steps of some paths, as a proposal's network sees them."""

    model: Model
    denoiser: Denoiser
    paths: Paths

    def measures(self, steps: list[int]) -> list[SiteMeasure]:
        """q(· | x_t) at each of `steps`, with the gradient of the network, which is asked once if it ignores time."""
        x, answers = self.paths.x, self.answers(self.denoiser, steps)
        return [
            self.model.step_with(
                x[k], answer, self.model.steps[k], None if self.paths.sites is None else self.paths.sites[k]
            )
            for k, answer in zip(steps, answers, strict=True)
        ]

    def answers(self, network: Denoiser, steps: Sequence[int]) -> list[Tensor]:
        """What a network says at the beginning of each of `steps`, (P, ...). If it ignores time it is asked once, on
        a CPU about distinct states: most paths stand still for most of the time."""
        x, timeless = self.paths.x, isinstance(network, Timeless) and network.ignores_time
        ask: Denoiser = network  # pyright: ignore[reportAssignmentType] (it does not forget that this is a function)
        if not timeless:
            return [ask(x[k], self.time(k)) for k in steps]
        states, t = x[list(steps)].flatten(0, 1), self.model.steps[steps[0]].t
        if states.is_cuda:
            together = ask(states, t)
        else:
            first, which = distinct(states)
            together = ask(states[first], t)[which]
        return list(together.view(len(steps), -1, *together.shape[1:]))

    def time(self, k: int) -> Time:
        return self.model.steps[k].t if self.paths.times is None else self.paths.times[k]

    def log_q(self, steps: list[int], measures: list[SiteMeasure] | None = None) -> Tensor:
        """log q of the moves that were made, (K, P)."""
        measures = self.measures(steps) if measures is None else measures
        return torch.stack([q.log_prob(self.paths.x[k + 1]) for k, q in zip(steps, measures, strict=True)])
