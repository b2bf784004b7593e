"""Paths to learn from, and what a proposal's network computes on them.

A path is x_1 ... x_0 without resampling, with the log-twist at each time and log p of each move. Any policy may have
walked it. log q of the same moves, with the gradient of the proposal's network, is computed by `Transitions`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.choices import as_tensor
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.denoiser import Denoiser, Time, ignores_time
from tokensteer.core.models.diffusion import Meter, Model, clock, located
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
    log p/q of each move, log_ratio (T, P), and the final log-weight log_w (P,).

    `sites` (T, P, L) are those a kernel chose to open, or the scores (T, P, L, V) that rank them, `times` (T, P) the
    times of particles that have clocks, `share` (P,) the weights of paths that do not all count the same, `since` ()
    the first step that counts.
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
        """The same paths with the reward multiplied by `amount`."""
        return replace(self, log_twist=amount * self.log_twist)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over paths of values (..., P)."""
        return values.mean(-1) if self.share is None else (values * self.share).sum(-1)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """All tensors by name, for a checkpoint."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {prefix + name: value for name, value in named.items() if value is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> Paths:
        """The inverse of `tensors`."""
        return cls(**{name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)})


@dataclass(frozen=True)
class Late:
    """The model's moves before the time t and those of `base` from then on: this visits states that the base alone
    would not reach, and continues from them with the base."""

    base: Amortised
    t: float
    needs_gradient: bool = field(default=False, init=False, repr=False)

    @property
    def parts(self) -> tuple[Amortised]:
        return (self.base,)

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.base.meters

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        return (FromModel() if step.t > self.t else self.base)(x, evaluation, step, model, twist)


def walk(steering: Steering, num_paths: int, generator: Generator | None, twists: bool = True) -> Paths:
    """Paths walked by the proposal of `steering`, equally many for each of the model's templates. Without `twists` the
    reward is computed at the end only, and the log-twists in between are not meaningful.

    Raises ValueError if the reward of a path is -inf.
    """
    model = steering.model
    each = max(1, num_paths // model.populations)
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    records = sweep(steering, each, model.populations, when=observe if twists else never, generator=generator)
    here = next(records)
    for there in records:
        step, prediction = there.step, here.evaluation.prediction
        assert step is not None, "only the start has no step"
        assert isinstance(prediction, Prediction), "particles are evaluated before they move"
        x_t, x_s = here.x.flatten(0, 1), there.x.flatten(0, 1)
        with torch.no_grad():
            opened = chosen(x_t, model.clean(prediction), here.evaluation, step, model)
            found["log_p"].append(model.log_prob(x_s, x_t, prediction, step, opened))
        time = clock(model, here.evaluation.memory, step.t)
        if isinstance(time, Tensor):
            found["times"].append(time)
        if opened is not None:
            found["sites"].append(as_tensor(opened))
        found["x"].append(x_t)
        found["log_twist"].append(here.evaluation.log_twist)
        risen = (there.evaluation.log_twist - here.evaluation.log_twist).view_as(there.log_w)
        found["log_ratio"].append((there.log_w - here.log_w - risen).flatten())
        here = there
    found["x"].append(here.x.flatten(0, 1))
    found["log_twist"].append(here.evaluation.log_twist)
    if (here.evaluation.log_twist == -torch.inf).any():
        raise ValueError(
            "the reward of a path is -inf, and log-weights of -inf teach a proposal nothing: train with a reward that "
            "is finite everywhere, and put the hard constraint into the Steering that samples"
        )
    return Paths(log_w=here.log_w.flatten(), **{name: torch.stack(values) for name, values in found.items()})


@dataclass(frozen=True)
class Transitions:
    """The moves of paths under a proposal's denoiser."""

    model: Model
    denoiser: Denoiser
    paths: Paths

    def measures(self, steps: Sequence[int]) -> list[SiteMeasure]:
        """q(· | x_t) at each of `steps`, with the gradient of the network."""
        sites, outputs = self.paths.sites, self.outputs(self.denoiser, steps, conditioned=True)
        return [
            self.model.step_with(self.paths.x[k], output, self.model.steps[k], None if sites is None else sites[k])
            for k, output in zip(steps, outputs, strict=True)
        ]

    def outputs(self, network: Denoiser, steps: Sequence[int], conditioned: bool = False) -> list[Tensor]:
        """The output of a network at the beginning of each of `steps`, (P, ...), with the context of each path's
        population if it is `conditioned`. A network that ignores time is called once, on a CPU with distinct states
        only: most paths stand still most of the time."""
        x, count = self.paths.x, len(steps)
        query = located(self.model.networks, self.model.steps[steps[0]].t, x[0])
        context = self.model.base.given(query, x.shape[1]) if conditioned else ()
        if not ignores_time(network):
            return [network(x[k], self.time(k), *context) for k in steps]
        states, t = x[list(steps)].flatten(0, 1), self.model.steps[steps[0]].t
        rows = tuple(part.repeat(count, *[1] * (part.dim() - 1)) for part in context)
        if states.is_cuda:
            together = network(states, t, *rows)
        else:
            of = query.of if conditioned else None
            known = states if of is None else torch.cat([states, of.repeat(count).unsqueeze(-1)], -1)
            first, which = distinct(known)
            together = network(states[first], t, *(part[first] for part in rows))[which]
        return list(together.view(count, -1, *together.shape[1:]))

    def time(self, k: int) -> Time:
        return self.model.steps[k].t if self.paths.times is None else self.paths.times[k]

    def log_q(self, steps: Sequence[int], measures: Sequence[SiteMeasure] | None = None) -> Tensor:
        """log q of the moves that were made, (K, P)."""
        measures = self.measures(steps) if measures is None else measures
        return torch.stack([q.log_prob(self.paths.x[k + 1]) for k, q in zip(steps, measures, strict=True)])
