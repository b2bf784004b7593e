"""Functions of short words as tables, exact and differentiable, and the exact denoiser of a law that is a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tokensteer.core.numerics.draws import NEVER


@dataclass(frozen=True, eq=False)
class Multilinear:
    """A table with an axis of K entries for each site, as a function of ids (P, L), or of one-hots (P, L, K), in which
    it is linear site by site. At ids, and at one-hots that are some, it is a lookup, and so is its gradient there."""

    table: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return self.table[tuple(x.unbind(-1))]
        ids = _ids(x)
        if ids is None:
            return (self._each_relaxed(x)[:, 0] * x[:, 0]).sum(-1)
        return self(ids).to(x.dtype) + (self.each(ids).to(x.dtype) * (x - x.detach())).sum((-2, -1))

    def each(self, x: Tensor) -> Tensor:
        """What the function is with each site set to each of its K entries in turn, (P, L, K): its gradient."""
        if x.is_floating_point():
            ids = _ids(x)
            return self._each_relaxed(x) if ids is None else cast("Tensor", _Each.apply(x, ids, self))  # pyright: ignore[reportUnknownMemberType]
        length, size = self.table.dim(), self.table.shape[0]
        place = size ** torch.arange(length - 1, -1, -1, device=x.device)
        index = (x * place).sum(-1).view(-1, 1, 1) - (x * place).unsqueeze(-1)
        return self.table.flatten()[index + place.unsqueeze(-1) * torch.arange(size, device=x.device)]

    def _each_relaxed(self, x: Tensor) -> Tensor:
        """The first half of the sites is one axis of a matrix, the second the other."""
        first, second = x.tensor_split((x.shape[1] // 2,), 1)
        left, right = _products(first), _products(second)
        matrix = self.table.reshape(left.shape[1], -1).to(left.dtype)
        return torch.cat([_but_one(right @ matrix.T, first), _but_one(left @ matrix, second)], 1)


class _Each(torch.autograd.Function):
    """`Multilinear.each` at one-hots that are ids: a lookup forward, and the sums only for who wants its gradient."""

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
    """The ids (P, L) that one-hots (P, L, K) are, None if some are in between."""
    ids = x.detach().argmax(-1)
    return ids if torch.equal(one_hot(ids, x.shape[-1]).to(x.dtype), x.detach()) else None


def _products(rows: Tensor) -> Tensor:
    """All products of entries of rows (P, h, K), one from each: (P, K^h)."""
    out = torch.ones_like(rows[:, 0, :1])
    for row in rows.unbind(1):
        out = (out.unsqueeze(-1) * row.unsqueeze(1)).flatten(1)
    return out


def _but_one(grid: Tensor, rows: Tensor) -> Tensor:
    """A grid (P, K^h) summed with the weights of rows (P, h, K) over all of its axes but one, for each: (P, h, K)."""
    count, sites, size = rows.shape
    out: list[Tensor] = []
    for site in range(sites):
        left = grid.view(count, *[size] * sites).movedim(site + 1, -1)
        for other in (k for k in range(sites) if k != site):
            left = (left * rows[:, other].view(count, size, *[1] * (left.dim() - 2))).sum(1)
        out.append(left)
    return torch.stack(out, 1)


def with_masks(table: Tensor) -> Tensor:
    """A table with one more entry on each axis, the mask, which stands for the sum over all others."""
    for axis in range(table.dim()):
        table = torch.cat([table, table.sum(axis, keepdim=True)], axis)
    return table


@dataclass(frozen=True, eq=False)
class TableDenoiser:
    """The exact denoiser of a law of words without zeros, given as a table: `testing.TableDenoiser`, but for ids a
    lookup, and for one-hots cheap enough for thousands of them."""

    masses: Multilinear
    ignores_time: bool = True

    def __call__(self, x: Tensor, t: float) -> Tensor:
        masses = self.masses.each(x)[..., :-1]
        log_p = masses.log() - masses.sum(-1, keepdim=True).log()
        return torch.cat([log_p, torch.full_like(log_p[..., :1], NEVER)], -1)
