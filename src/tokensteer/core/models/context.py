"""Conditions of a model: tensors with one row for each population, which its denoiser takes beside x and t."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tokensteer.core.models.denoiser import Time

Context = tuple[Tensor, ...]


class Query(NamedTuple):
    """The time of rows that networks predict, and the population of each row, (P,), where contexts differ. Without
    `of`, rows are all particles in order, equally many of each population."""

    t: Time
    of: Tensor | None = None

    def take(self, rows: Tensor | slice) -> Query:
        t = self.t[rows] if isinstance(self.t, Tensor) else self.t
        return Query(t, None if self.of is None else self.of[rows])


def as_query(t: Time | Query) -> Query:
    return t if isinstance(t, Query) else Query(t)


def population_of(x: Tensor, populations: int) -> Tensor:
    """The population of each of the particles x (P, L) in order, (P,)."""
    if len(x) % populations:
        raise ValueError(
            f"there are {len(x)} particles for {populations} contexts: run one population for each, or equally many"
        )
    return torch.arange(populations, device=x.device).repeat_interleave(len(x) // populations)


def joined(one: Context, other: Context) -> Context:
    """The tensors of two contexts one behind the other. A single row of either goes with all rows of the other."""
    counts = {len(part) for part in (*one, *other)} or {1}
    if len(counts - {1}) > 1:
        raise ValueError(
            f"there are contexts of {' and '.join(map(str, sorted(counts)))} rows: give one of either, or equally many"
        )
    return tuple(part.expand(max(counts), *part.shape[1:]) for part in (*one, *other))


def as_context(given: Tensor | Sequence[Tensor] | None, templates: Tensor) -> Context:
    """The tensors of a context, checked against the templates (B, L)."""
    parts = as_tensors(given)
    for part in parts:
        if part.device != templates.device:
            raise ValueError(
                f"context is on {part.device} and the template on {templates.device}: move it with .to(device)"
            )
    if parts and len({len(templates), len(parts[0])} - {1}) > 1:
        raise ValueError(
            f"there are {len(templates)} templates and contexts of {len(parts[0])} rows: give one of each, or as many "
            "of both"
        )
    return parts


def as_tensors(given: Tensor | Sequence[Tensor] | None) -> Context:
    """The tensors of a context, with equally many rows."""
    if given is None:
        return ()
    parts = (given,) if isinstance(given, Tensor) else tuple(given)
    for part in cast("Sequence[object]", parts):
        if not isinstance(part, Tensor) or not part.dim() or not len(part):
            raise ValueError(
                "context must be a tensor with one row for each population, or several: labels are (1,) or (B,), and "
                f"the states of a text (1, S, d) or (B, S, d); got {_describe(part)}"
            )
    lengths = {len(part) for part in parts}
    if len(lengths) > 1:
        raise ValueError(f"the tensors of a context have {sorted(lengths)} rows: give each one row for each population")
    return parts


def _describe(part: object) -> str:
    return f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__


def context_rows(context: Context, of: Tensor | None, rows: int) -> Context:
    """The context of each of so many rows, which belong to the populations `of`."""
    if not context or len(context[0]) == 1:
        return tuple(part.expand(rows, *part.shape[1:]) for part in context)
    assert of is not None, "rows of several contexts are located"
    return tuple(part[of] for part in context)
