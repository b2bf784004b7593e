"""Scores by which sites, or the tokens drawn for them, are ranked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokensteer.core.draws import NEVER
from tokensteer.core.tokens import Laws, Tokens, tokens_of


def entry_at(table: Tensor, y: Tensor) -> Tensor:
    """table[..., y], (P, L)."""
    return table.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def possible(scores: Tensor) -> Tensor:
    """Scores with -inf made the lowest number, so that -inf is left to say "takes no part"."""
    return scores.clamp(min=torch.finfo(scores.dtype).min)


def best_sites(scores: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The `count` (P,) sites of highest score among those allowed, (P, L); ties go to the lowest index."""
    order = possible(scores).masked_fill(~among, NEVER).sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    return among & (rank < count.unsqueeze(-1))


@dataclass(frozen=True)
class Ranking:
    """The score of each token at each site: log mu^l(token) + lift^l, with lift (P, L) -inf at sites that take no part.

    All scores are a table (P, L, V), which is large: they are spelt out a few rows at a time, whoever asks for them,
    so that all see the same numbers.
    """

    laws: Tokens
    lift: Tensor

    @classmethod
    def of(cls, scores: Ranking | Tensor) -> Ranking:
        """A ranking, or a table of scores (P, L, V) as one."""
        if isinstance(scores, Ranking):
            return scores
        if scores.dim() != 3 or not scores.is_floating_point():
            raise ValueError(
                f"tokens are ranked by scores (P, L, V), -inf at sites that take no part, or by a Ranking; got "
                f"{str(scores.dtype).removeprefix('torch.')} of shape {tuple(scores.shape)}"
            )
        return cls(tokens_of(scores), torch.zeros_like(scores[..., 0]).masked_fill(scores[..., 0] == NEVER, NEVER))

    @property
    def candidates(self) -> Tensor:
        return self.lift != NEVER

    def __getitem__(self, rows: Tensor | slice) -> Ranking:
        return Ranking(replace(self.laws, index=self.laws.index[rows]), self.lift[rows])

    def pin(self, fixed: Tensor) -> Ranking:
        return replace(self, lift=self.lift.masked_fill(fixed, NEVER))

    def within(self, laws: Laws, block: slice) -> Ranking:
        """This ranking of a block of sites, on the canvas that the laws are of."""
        laws = tokens_of(laws)
        lift = torch.full(laws.index.shape, NEVER, dtype=self.lift.dtype, device=self.lift.device)
        lift[:, block] = self.lift
        return Ranking(laws, lift)

    def orders(self, laws: Tokens) -> bool:
        """Whether these very laws are what it ranks by."""
        return self.laws.store is laws.store and self.laws.index is laws.index

    def spelt(self, laws: Tensor | None = None) -> Tensor:
        """All scores, (P, L, V), from laws (P, L, V) where they have been spelt out already."""
        lift = self.lift.unsqueeze(-1)
        return possible((self.laws.dense() if laws is None else laws) + lift).masked_fill_(lift == NEVER, NEVER)
