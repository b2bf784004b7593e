"""Repair: a Markov chain on finished samples, which leaves the target of a steering unchanged.

A sweep has two moves on the path (x_1, ..., x_0) of the current sample; each leaves p(path) · exp(r(x_0)/kl) unchanged.

1. **Noise.** Another path to the same x_0 is drawn from the forward process, in which sites are masked at random times
   whatever their tokens are. It is accepted by Metropolis-Hastings (Hastings, 1970) with the ratio of
   p(path) / q(path | x_0) = prod mu(x_0^l | x_t) over the sites l, each at the step that opens it. A denoiser whose
   conditionals belong to one joint distribution would accept always if sites opened one at a time.
2. **Denoise.** A conditional SMC sweep (Andrieu et al., 2010) from the path's own state at a given step to the end.

The second move changes only sites that are masked at that step, so a sample is improved piece by piece, and the chain
runs from any sequence: a finished sample or a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Generator, Tensor

from tokensteer.core.models.diffusion import Model
from tokensteer.core.models.forward import ForwardPaths
from tokensteer.core.numerics.domains import check_flag, check_number, check_whole
from tokensteer.core.particles.gibbs import Chain, Pinned, check_pinnable, pick
from tokensteer.core.particles.loop import check_generator, summarise, sweep
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.result import with_rows
from tokensteer.core.particles.resumed import Resumed
from tokensteer.core.particles.triggers import Trigger, ess_below
from tokensteer.core.steering.steering import Steering


@dataclass(frozen=True)
class Repaired(Chain):
    """The chain of `repair`: `samples[0]` is what it was given. `reward` (S + 1, B) of all samples, None without a
    tilt; `accepted` (S, B), whether the new path of each sweep was taken."""

    reward: Tensor | None
    accepted: Tensor

    @property
    def changed(self) -> Tensor:
        """The share of sites that differ from the start, (S + 1, B)."""
        return (self.samples != self.samples[0]).double().mean(-1)

    def best(self) -> Tensor:
        """The sample of highest reward of each chain, (B, L); no posterior draw."""
        if self.reward is None:
            raise ValueError("without a reward there is no best sample: give the steering a Tilt, or use samples[-1]")
        here = torch.arange(self.samples.shape[1], device=self.samples.device)
        return self.samples[self.reward.argmax(0), here]


@torch.no_grad()
def repair(
    x: Tensor,
    steering: Steering,
    *,
    share: float = 0.3,
    sweeps: int = 10,
    num_particles: int = 8,
    when: Trigger = ess_below(0.5),
    generator: Generator | None = None,
    progress: bool = False,
) -> Repaired:
    """Run `sweeps` moves from clean sequences x, (L,) or (B, L), each a chain of its own.

    A sweep masks about a `share` of the sites and denoises them by `num_particles` particles, one of which keeps the
    tokens there were. `share=1` starts from all masks: a whole sweep of particle Gibbs. The chain's stationary
    distribution is model(x_0) · exp(r(x_0)/kl), exactly, whatever these numbers and the denoiser are.
    """
    check_number("repair: share", share, "(0, 1]")
    check_whole("repair: sweeps", sweeps)
    check_whole("repair: num_particles", num_particles, 2, "one of them is pinned")
    check_flag("repair: progress", progress)
    model = steering.model
    forward = ForwardPaths.of(model)
    x = _checked(x, model)
    check_generator(generator, x.device)
    check_pinnable(steering, generator)
    before = steering.resources.spent()
    first = forward.step_at(share)
    path, log_ratio = forward.likely(x, num_particles, generator)
    samples, accepted, records = [x], list[Tensor](), list[Record]()
    for _ in _shown(sweeps, progress):
        path, log_ratio, taken = forward.renoise(path, log_ratio, generator)
        pinned = Pinned(Resumed(steering, first, path[first]), path[first:])
        system = sweep(pinned, num_particles, len(x), resample=pinned.resample, when=when, generator=generator)
        records = list(system)
        path = torch.cat([path[:first], _pick(records, generator)])
        log_ratio = torch.cat([log_ratio[:first], forward.log_ratios(path, first)])
        accepted.append(taken)
        samples.append(path[-1])
    chain = torch.stack(samples)
    tilt = steering.twist
    of = None if tilt is None else tilt.located(x)
    of = None if of is None else of.repeat(len(chain))
    reward = None if tilt is None else tilt.exact(chain.flatten(0, 1), of).view(chain.shape[:2])
    result = with_rows(summarise(records, generator, steering.resources.templates), before, steering.resources.spent())
    return Repaired(chain, result, reward, torch.stack(accepted))


def _pick(records: Sequence[Record], generator: Generator | None) -> Tensor:
    """A trajectory of each population by weight. Where all have died, the start has no mass under the target either:
    the chain stays with the pinned particle, the first."""
    last = records[-1]
    pinned = torch.zeros_like(last.log_w).index_fill(
        1, torch.arange(1, last.log_w.shape[1]).to(last.x.device), -math.inf
    )
    dead = last.log_w.amax(-1, keepdim=True) == -math.inf
    return pick([*records[:-1], replace(last, log_w=torch.where(dead, pinned, last.log_w))], generator)


def _shown(sweeps: int, progress: bool) -> Iterable[int]:
    if not progress:
        return range(sweeps)
    from rich.progress import track

    return track(range(sweeps), "repair")


def _checked(x: Tensor, model: Model) -> Tensor:
    """The sequences as (B, L), if they are what the model can return."""
    given, length, mask_id = cast("object", x), model.base.template.shape[-1], model.kernel.mask_id
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.dim() not in (1, 2) or not given.numel():
        kind = f"{x.dtype} {tuple(x.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"repair: x must be a tensor of int64 ids, (L,) or (B, L), got {kind}")
    x = x.view(-1, x.shape[-1])
    if x.shape[1] != length:
        raise ValueError(
            f"repair: x has {x.shape[1]} sites and the model {length}: pad x, or give the model a template of this size"
        )
    if x.device != model.device:
        raise ValueError(f"repair: x is on {x.device} and the model on {model.device}: use x.to(model.device)")
    if len(x) % model.populations:
        raise ValueError(
            f"repair: {len(x)} sequences for {model.populations} templates: give one for each template, or a multiple"
        )
    if (x == mask_id).any():
        raise ValueError(
            f"repair: x holds {int((x == mask_id).sum())} masks ({mask_id}) and must be clean: fill them by smc with x "
            "as the template, ts.smc(Steering(replace(model, template=x), tilt), ...), and repair the samples"
        )
    if int(x.min()) < 0 or int(x.max()) >= model.vocab_size:
        raise ValueError(
            f"repair: ids must lie in [0, {model.vocab_size}), got {int(x.min())} to {int(x.max())}: encode x by the "
            "model's own tokenizer"
        )
    canvas = model.base.canvas(len(x))
    differs = (canvas != mask_id) & (canvas != x)
    if differs.any():
        row, site = (int(i) for i in differs.nonzero()[0])
        raise ValueError(
            f"repair: x[{row}] has token {int(x[row, site])} at site {site}, where the template fixes "
            f"{int(canvas[row, site])}: change x, or free the site in the template"
        )
    return x
