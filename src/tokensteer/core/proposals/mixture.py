"""Mixtures of proposals over whole transitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.measure import ModelAware, SiteMeasure
from tokensteer.core.models.diffusion import Model
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.numerics.domains import check_number
from tokensteer.core.particles.path import Evaluation, Measure, Sites, Step
from tokensteer.core.proposals.proposal import Proposal
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class MixedMeasure:
    """sum_m share_m · q_m(y), the members being normalised. It does not factorise over sites."""

    members: Sequence[Measure]
    shares: Sequence[float]
    log_mass: Tensor | None = field(default=None, init=False)

    @property
    def sites(self) -> Sites | None:
        return self.members[0].sites

    def sample(self, generator: Generator | None) -> Tensor:
        # All members draw for all particles: selecting rows first would synchronise with the device.
        drawn = torch.stack([member.sample(generator) for member in self.members])
        u = torch.rand(drawn.shape[1], generator=generator, device=drawn.device, dtype=torch.float64)
        which = torch.stack([u >= share for share in accumulate(self.shares[:-1])]).sum(0)
        return drawn.gather(0, which.view(1, -1, 1).expand_as(drawn[:1])).squeeze(0)

    def log_prob(self, y: Tensor) -> Tensor:
        terms = [
            member.log_prob(y).double() + math.log(share)
            for member, share in zip(self.members, self.shares, strict=True)
        ]
        return torch.stack(terms).logsumexp(0)

    def log_model(self, y: Tensor) -> Tensor | None:
        known = (member.log_model(y) for member in self.members if isinstance(member, ModelAware))
        return next((log_p for log_p in known if log_p is not None), None)

    def take(self, rows: Tensor) -> MixedMeasure:
        return MixedMeasure([member.take(rows) for member in self.members], self.shares)

    def covers(self, other: SiteMeasure) -> bool:
        """Whether a member has mass wherever `other` has. One that does not factorise, such as an enumeration, is not
        checked, as where it is the whole proposal."""
        return any(
            not isinstance(member, SiteMeasure | MixedMeasure) or member.covers(other) for member in self.members
        )


@dataclass(frozen=True)
class Mixture:
    """q = sum_m share_m · q_m: a member is drawn for each particle, and the weight has the whole mixture's probability.

    With the model as a member of share a, no step multiplies a weight by more than 1/a, whatever the others propose
    (defensive importance sampling; Hesterberg, 1995). Members share the sites that a low-confidence kernel opens.
    Shares are equal unless given, and are normalised.
    """

    members: Sequence[Proposal]
    shares: Sequence[float] = ()

    def __post_init__(self) -> None:
        shares = self.shares or (1.0,) * len(self.members)
        if len(self.members) < 2 or len(shares) != len(self.members):
            raise ValueError(
                f"Mixture: {len(self.members)} members and {len(shares)} shares; give two or more, and a share to each"
            )
        for k, share in enumerate(shares):
            check_number(f"Mixture: shares[{k}]", share, "(0, inf)", "leave out a member that has no share")
        object.__setattr__(self, "shares", tuple(share / sum(shares) for share in shares))

    @property
    def parts(self) -> Sequence[Proposal]:
        return self.members

    @property
    def needs_gradient(self) -> bool:
        return any(member.needs_gradient for member in self.members)

    @property
    def meters(self) -> tuple[Meter, ...]:
        return tuple(meter for member in self.members for meter in member.meters)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> MixedMeasure:
        return MixedMeasure([member(x, evaluation, step, model, twist) for member in self.members], self.shares)
