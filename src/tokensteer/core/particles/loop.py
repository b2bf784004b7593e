"""Sequential Monte Carlo on a Feynman-Kac path (Del Moral, 2004; Chopin and Papaspiliopoulos, 2020;
docs/references.md).

A path starts, moves and evaluates particles. With psi the log-twist and q the proposal, a move from x_t to x_s
multiplies the weight by

    p(x_s | x_t) / q(x_s | x_t) · exp(psi_s(x_s) - psi_t(x_t)),

and the mean weight of a population is an unbiased estimate of the normaliser Z. Resampling keeps that mean, so
log Z is always the log-mean of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.capture import capturing
from tokensteer.core.numerics.domains import check_callable, check_flag, check_whole
from tokensteer.core.particles.path import FeynmanKac, Record, Resources, Step
from tokensteer.core.particles.resampling import Resampler, ess, systematic
from tokensteer.core.particles.result import Result, narrowed, with_rows
from tokensteer.core.particles.triggers import Trigger, ess_below, looks


def sweep(
    path: FeynmanKac,
    num_particles: int,
    populations: int = 1,
    *,
    resample: Resampler = systematic,
    when: Trigger = ess_below(0.5),
    generator: Generator | None = None,
) -> Iterator[Record]:
    """Run `populations` independent particle systems; yields a record of the start and of every step."""
    check_whole("num_particles", num_particles)
    check_whole("populations", populations)
    check_callable("resample", resample, "log-weights and a generator: resampling.systematic is one")
    check_callable("when", when, "log-weights and a step: triggers.ess_below(0.5) is one")
    templates = path.resources.templates
    if populations % templates:
        raise ValueError(
            f"the model has {templates} templates and {populations} populations were asked for: run one population for "
            f"each template, populations={templates} or a multiple"
        )
    check_generator(generator)
    x = path.start(populations * num_particles, generator)
    check_generator(generator, x.device)
    shape = (populations, num_particles)
    here = torch.arange(num_particles, device=x.device).expand(shape)
    first_row = num_particles * torch.arange(populations, device=x.device).unsqueeze(-1)

    looked_at = [looks(when, step) for step in path.steps] + [True]
    evaluation = path.evaluate(x, path.steps[0].t, generator, weighed=looked_at[0])
    log_w = evaluation.log_twist.double().view(shape)
    checks = _WeightCheck(64 if x.is_cuda else 1)
    checks.add(log_w, None, evaluation.log_twist, torch.zeros_like(log_w))
    yield Record(None, x.view(*shape, -1), log_w, log_w, here, evaluation)
    for step in path.steps:
        ancestors = here
        if looked_at[step.index]:
            now = _fires(when, log_w, step).unsqueeze(-1)
            parents, resampled_log_w = _resampled(resample, log_w, generator)
            ancestors = torch.where(now, parents, here)
            log_w = torch.where(now, resampled_log_w, log_w)
            rows = (ancestors + first_row).flatten()
            x, evaluation = x[rows], evaluation.take(rows)

        x_s, log_ratio, parent = path.move(x, evaluation, step, generator)
        change = log_ratio.double() - evaluation.log_twist
        # A dead particle stays dead: its own twist may be -inf, and the difference NaN.
        pending = torch.where(log_w == -math.inf, log_w, log_w + change.view(shape))
        parent = replace(parent, pending=pending)
        del evaluation
        evaluation = path.evaluate(x_s, step.s, generator, parent, weighed=looked_at[step.index + 1])
        del parent
        log_twist = evaluation.log_twist
        log_w = torch.where(pending == -math.inf, pending, pending + log_twist.view(shape))
        checks.add(log_w, step, log_twist, log_ratio, last=step.s == 0)
        x = x_s
        yield Record(step, x.view(*shape, -1), log_w, (change + log_twist).view(shape), ancestors, evaluation)


def _fires(when: Trigger, log_w: Tensor, step: Step) -> Tensor:
    """Which populations resample, (B,)."""
    now = cast("object", when(log_w, step))
    if not isinstance(now, Tensor) or now.shape != log_w.shape[:1] or now.dtype != torch.bool:
        raise ValueError(
            f"a trigger must return for each of {len(log_w)} populations whether it resamples, a tensor of bools "
            f"({len(log_w)},), got {described(now)}"
        )
    return now


def _resampled(resample: Resampler, log_w: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Ancestors and new log-weights, both (B, N). `testing.assert_resampler` checks their distribution."""
    found = cast("object", resample(log_w, generator))
    parts = cast("tuple[object, ...]", found if isinstance(found, tuple) else (found,))
    match parts:
        case Tensor(shape=log_w.shape, dtype=torch.int64) as ancestors, Tensor(shape=log_w.shape) as new_log_w:
            return ancestors, new_log_w
        case _:
            raise ValueError(
                f"a resampler must return ancestors, int64, and log-weights, both of shape {tuple(log_w.shape)}, got "
                + ", ".join(map(described, parts))
            )


def described(value: object) -> str:
    """What a user's function returned, for a message."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_generator(generator: object, device: torch.device | None = None) -> None:
    if generator is None:
        return
    if not isinstance(generator, Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}: torch.Generator().manual_seed(0)")
    if device is not None and generator.device.type != device.type:
        raise ValueError(
            f"the generator is on {generator.device} and the model on {device}: make it with "
            f"torch.Generator(device={str(device)!r})"
        )


@dataclass
class _WeightCheck:
    """Raises on weights that are NaN or +inf. Checks every `interval` steps, since on a GPU each check synchronises."""

    interval: int
    seen: list[tuple[Tensor, Step | None, Tensor, Tensor]] = field(default_factory=list[Any])

    def add(self, log_w: Tensor, step: Step | None, log_twist: Tensor, log_ratio: Tensor, last: bool = False) -> None:
        if capturing():  # a captured run is checked after each replay
            return
        self.seen.append((log_w, step, log_twist, log_ratio))
        if not last and len(self.seen) < self.interval:
            return
        log_ws = torch.stack([log_w for log_w, *_ in self.seen])
        bad = (log_ws.isnan() | (log_ws == math.inf)).flatten(1).any(-1)
        if bad.any():
            _raise_bad_weight(*self.seen[int(bad.int().argmax())])
        self.seen.clear()


def _raise_bad_weight(log_w: Tensor, step: Step | None, log_twist: Tensor, log_ratio: Tensor) -> NoReturn:
    bad = log_w.isnan() | (log_w == math.inf)
    population, particle = (int(i) for i in bad.nonzero()[0])
    row = population * log_w.shape[1] + particle
    twist, ratio = float(log_twist.flatten()[row]), float(log_ratio.flatten()[row])
    where = "at the start" if step is None else f"at step {step.index} (t = {step.t:.4g} to {step.s:.4g})"
    culprit = (
        f"the reward: its log-twist is {twist}. Make the reward finite, or -inf for a hard constraint"
        if math.isnan(twist) or twist == math.inf
        else f"the transition: log p - log q is {ratio}. The denoiser gave NaN, q has no mass at a state it drew, or "
        "a model with a negative power has no mass where the others do"
    )
    raise FloatingPointError(
        f"the weight of particle {particle} of population {population} is {float(log_w[population, particle])} "
        f"{where}. Culprit: {culprit}."
    )


def smc(
    path: FeynmanKac,
    num_particles: int,
    populations: int = 1,
    *,
    resample: Resampler = systematic,
    when: Trigger = ess_below(0.5),
    generator: Generator | None = None,
    memory: str | float | None = None,
    progress: bool = False,
    on_step: Callable[[Record], None] | None = None,
    keep_states: bool | int = False,
) -> Result:
    """Run `sweep` to the end. `progress` shows a bar with ESS and reward; `on_step` is called with every record,
    including the start. `keep_states` stores the particles and weights of every step in the result: True those of all
    populations, a number those of the first so many.

    With several templates, `populations` is a multiple of their number; the first populations belong to the first
    template, and so on. `memory`, such as "8GiB", limits the rows given to a network at once; the default is what the
    device has free.
    """
    resources = cast("Resources | None", getattr(path, "resources", None))
    if resources is None:
        raise TypeError(f"smc runs a Steering, got {type(path).__name__}: wrap a model as Steering(model, tilt)")
    check_flag("smc: progress", progress)
    before = resources.spent()
    records = sweep(path, num_particles, populations, resample=resample, when=when, generator=generator)
    with resources.limited(memory):
        shown = _bar(records, len(path.steps) + 1) if progress else records
        result = summarise(shown, generator, resources.templates, on_step, keep_states)
    return with_rows(result, before, resources.spent())


def summarise(
    records: Iterable[Record],
    generator: Generator | None = None,
    templates: int = 1,
    on_step: Callable[[Record], None] | None = None,
    keep_states: bool | int = False,
) -> Result:
    """The result of a sweep from its records, which are consumed one by one."""
    if not isinstance(keep_states, bool):
        check_whole("keep_states", keep_states, 0)
    kept = None if keep_states is True else int(keep_states)  # populations; None for all
    states: list[Tensor] = []
    log_w: list[Tensor] = []
    ancestors: list[Tensor] = []
    rewards: list[Tensor | None] = []
    ramps: list[Tensor | None] = []
    x: Tensor | None = None
    for record in records:  # tensors are collected without reading values: each read would synchronise
        if on_step is not None:
            on_step(record)
        x = record.x
        if kept != 0:
            states.append(narrowed(x[:kept]))
        log_w.append(record.log_w)
        ancestors.append(record.ancestors)
        rewards.append(record.evaluation.reward)
        ramps.append(record.evaluation.ramp)
        del record  # frees the predictions before the networks run again
    assert x is not None, "a sweep yields at least its start"
    reward = rewards[-1]
    return Result(
        samples=x,
        log_w=log_w[-1],
        reward=None if reward is None else reward.view_as(log_w[-1]),
        ess=ess(torch.stack(log_w)),
        mean_reward=None if reward is None else _stacked(rewards, log_w[-1], math.nan).mean(-1),
        ancestors=torch.stack(ancestors),
        rows={},
        generator=generator,
        ramp=None if ramps[-1] is None else _stacked(ramps, log_w[-1], 0.0)[..., 0],
        templates=templates,
        states=torch.stack(states) if states else None,
        states_log_w=torch.stack(log_w)[:, :kept] if states else None,
    )


def _stacked(values: Sequence[Tensor | None], like: Tensor, missing: float) -> Tensor:
    """Values (P,) of all times as (T + 1, B, N), `missing` where there are none."""
    absent = torch.full_like(like, missing)
    return torch.stack([absent if value is None else value.view_as(like).double() for value in values])


def _bar(records: Iterator[Record], total: int) -> Iterator[Record]:
    from rich.progress import Progress

    with Progress(*Progress.get_default_columns(), "{task.fields[note]}") as bar:
        task = bar.add_task("smc", total=total, note="")
        for record in records:
            note = f"ESS/N {float(ess(record.log_w).mean()) / record.log_w.shape[1]:.2f}"
            if record.evaluation.reward is not None:
                note += f"  reward {float(record.evaluation.reward.mean()):.3f}"
            bar.update(task, advance=1, note=note)
            yield record
            del record
