"""Functions of short words as differentiable tables; the exact denoiser and tilt of distributions given as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.twists.estimators import Value
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True, eq=False)
class Multilinear:
    """A table with an axis of K entries for each site, as a function of ids (P, L) or relaxed one-hots (P, L, K), in
    which it is linear at each site. For ids and exact one-hots the value and the gradient are lookups."""

    table: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return self.table[tuple(x.unbind(-1))]
        ids = _ids(x)
        if ids is None:
            return (self._each_relaxed(x)[:, 0] * x[:, 0]).sum(-1)
        return self(ids).to(x.dtype) + (self.each(ids).to(x.dtype) * (x - x.detach())).sum((-2, -1))

    def each(self, x: Tensor) -> Tensor:
        """The value with each site set to each of its K entries, (P, L, K): the gradient."""
        if x.is_floating_point():
            ids = _ids(x)
            return self._each_relaxed(x) if ids is None else cast("Tensor", _Each.apply(x, ids, self))  # pyright: ignore[reportUnknownMemberType]
        length, size = self.table.dim(), self.table.shape[0]
        place = size ** torch.arange(length - 1, -1, -1, device=x.device)
        index = (x * place).sum(-1).view(-1, 1, 1) - (x * place).unsqueeze(-1)
        return self.table.flatten()[index + place.unsqueeze(-1) * torch.arange(size, device=x.device)]

    def _each_relaxed(self, x: Tensor) -> Tensor:
        """`each` for relaxed one-hots: the table as a matrix, with an axis for each half of the sites."""
        first, second = x.tensor_split((x.shape[1] // 2,), 1)
        left, right = _products(first), _products(second)
        matrix = self.table.reshape(left.shape[1], -1).to(left.dtype)
        return torch.cat([_but_one(right @ matrix.T, first), _but_one(left @ matrix, second)], 1)


class _Each(torch.autograd.Function):
    """`Multilinear.each` at exact one-hots: a lookup forward, sums backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, of: Multilinear) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.of = of
        return of.each(ids).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            x = cast("Tensor", ctx.saved_tensors[0]).detach().requires_grad_()
            return torch.autograd.grad(ctx.of._each_relaxed(x), x, slope)[0], None, None


def _ids(x: Tensor) -> Tensor | None:
    """The ids (P, L) of exact one-hots (P, L, K), None if some are relaxed."""
    ids = x.detach().argmax(-1)
    return ids if torch.equal(one_hot(ids, x.shape[-1]).to(x.dtype), x.detach()) else None


def _products(rows: Tensor) -> Tensor:
    """All products of one entry of each of rows (P, h, K), (P, K^h)."""
    out = torch.ones_like(rows[:, 0, :1])
    for row in rows.unbind(1):
        out = (out.unsqueeze(-1) * row.unsqueeze(1)).flatten(1)
    return out


def _but_one(grid: Tensor, rows: Tensor) -> Tensor:
    """A grid (P, K^h) summed with weights rows (P, h, K) over all axes but one, for each axis, (P, h, K)."""
    count, sites, size = rows.shape
    out: list[Tensor] = []
    for site in range(sites):
        left = grid.view(count, *[size] * sites).movedim(site + 1, -1)
        for other in (k for k in range(sites) if k != site):
            left = (left * rows[:, other].view(count, size, *[1] * (left.dim() - 2))).sum(1)
        out.append(left)
    return torch.stack(out, 1)


def with_masks(table: Tensor) -> Tensor:
    """A table with one more entry on each axis, the mask: the sum over all others."""
    for axis in range(table.dim()):
        table = torch.cat([table, table.sum(axis, keepdim=True)], axis)
    return table


@dataclass(frozen=True, eq=False)
class TableDenoiser:
    """The exact denoiser of a positive distribution over words, given as a table: `testing.TableDenoiser`, but a lookup
    for ids, and fast enough for thousands of one-hots."""

    masses: Multilinear
    ignores_time: bool = True

    def __call__(self, x: Tensor, t: float) -> Tensor:
        masses = self.masses.each(x)[..., :-1]
        log_p = masses.log() - masses.sum(-1, keepdim=True).log()
        return torch.cat([log_p, torch.full_like(log_p[..., :1], NEVER)], -1)


def soft_value(prior: Tensor, score: Tensor, kl: float) -> Value:
    """kl · log E[exp(score/kl) | x_t] for all x_t, exactly."""
    value = Multilinear(kl * (with_masks(prior * (score / kl).exp()).log() - with_masks(prior).log()))
    return Value(lambda x, t: value(x), ignores_time=True)


def tilt(prior: Tensor, score: Tensor, kl: float) -> Tilt:
    """Towards high scores. The soft value is exact, so the ramp is constant."""
    reward = Multilinear(pad(score, (0, 1) * score.dim()))  # for one-hots, which have a mask too
    return Tilt(reward, kl, constant_ramp, estimator=soft_value(prior, score, kl), differentiable=True)
