"""Lists of sequences: the support of a table, and the distinct rows of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokensteer.core.numerics.draws import NEVER


def support(log_p: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Every sequence with mass under a (P, L, V) table of logs: `rows` (K,) and `sequences` (K, L), ordered by row, the
    last site fastest. Raises if there are more than `limit`."""
    possible = log_p > NEVER
    count = possible.sum(-1)
    total = count.double().prod(-1)
    if total.sum() > limit:
        raise ValueError(
            f"enumeration needs {total.sum():.3g} sequences and the limit is {limit}: open fewer sites at a time, "
            "use a smaller vocabulary, or sample instead of enumerating"
        )
    total = total.long()
    rows = torch.arange(len(log_p), device=log_p.device).repeat_interleave(total)
    rank = torch.arange(len(rows), device=log_p.device) - (total.cumsum(0) - total)[rows]
    stride = total.unsqueeze(-1) // count.cumprod(-1).clamp(min=1)
    digit = (rank.unsqueeze(-1) // stride[rows]) % count[rows]
    tokens = possible.int().sort(dim=-1, descending=True, stable=True).indices
    return rows, tokens[rows.unsqueeze(-1), torch.arange(log_p.shape[1], device=log_p.device), digit]


def same_rows(x: Tensor) -> Tensor:
    """A number for each row of x >= 0, the same for two rows exactly if they are equal."""
    base = int(x.max()) + 1 if x.numel() else 1
    exact = base ** x.shape[1] < 2**62  # then one integer encodes the row
    places = torch.arange(x.shape[1], device=x.device)
    # Sorting integers is far faster than sorting rows, so long rows are compared by a hash, which is then checked.
    weights = base**places if exact else (places * 2 + 1) * 0x5851F42D4C957F2D ^ (places + 1) * 0x9E3779B97F4A7C1
    _, row = unique((x * weights).sum(-1))
    if exact:
        return row
    first = _first(row)
    return row if torch.equal(x[first[row]], x) else unique(x)[1]


def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of x in order, and the index among them of each row."""
    dim = None if x.dim() == 1 else 0
    return torch.unique(x, dim=dim, return_inverse=True)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _first(row: Tensor) -> Tensor:
    """The first index of each of the numbers 0, 1, ..., (D,)."""
    positions = torch.arange(len(row), device=row.device)
    return torch.full((int(row.max()) + 1,), len(row), device=row.device).scatter_reduce(0, row, positions, "amin")


def log_sum_runs(log_mass: Tensor, lengths: Tensor) -> Tensor:
    """The log-sum-exp of log_mass (K,) over consecutive runs of the given lengths."""
    highest = torch.segment_reduce(log_mass, "max", lengths=lengths)
    shift = torch.where(highest == NEVER, 0.0, highest)
    mass = (log_mass - shift.repeat_interleave(lengths)).exp()
    return torch.segment_reduce(mass, "sum", lengths=lengths).log() + shift


def distinct(x: Tensor) -> tuple[Tensor, Tensor]:
    """`first` (D,), one particle for each distinct row of x, and `row` (P,), the index of each particle's row in it."""
    row = same_rows(x)
    return _first(row), row
