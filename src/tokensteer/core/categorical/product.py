"""Token laws made of other laws: products of their powers, and laws made to sum to one.

A product of models is as large as its models together, and its normaliser runs over all of the vocabulary. Neither is
computed until a law is read: tokens are drawn where sites open, and what is worth knowing of a token that is given is a
number of each model. Twins share their laws as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from tokensteer.core.categorical.forms import Categorical, HiddenLogits, draw_by_parts, score_by_parts
from tokensteer.core.categorical.sites import SiteDistributions, lines_of
from tokensteer.core.numerics.draws import NEVER


def product_of_powers(log_measures: Iterable[Tensor], powers: Sequence[float]) -> Tensor:
    """log prod_k m_k^a_k, where no mass of a measure with a positive power stays no mass. Measures are large, and may
    be made one after the other."""
    total = forbidden = None
    for log_m, power in zip(log_measures, powers, strict=True):
        part = power * log_m if power else torch.zeros_like(log_m)
        total = part if total is None else total + part
        if power > 0:
            forbidden = log_m == NEVER if forbidden is None else forbidden | (log_m == NEVER)
    assert total is not None, "nobody multiplies nothing"
    return total if forbidden is None else total.masked_fill_(forbidden, NEVER)


@dataclass(frozen=True)
class Powers:
    """The laws prod_k mu_k^a_k, unnormalised, of K laws each: a token has no mass where a law of positive power gives
    it none."""

    laws: tuple[Categorical, ...]
    powers: tuple[float, ...]
    normalised: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return self.laws[0].vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (law.dtype for law in self.laws))

    def rows(self, index: Tensor) -> Tensor:
        return product_of_powers((law.rows(index) for law in self.laws), self.powers)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return product_of_powers((law.entries(index, tokens) for law in self.laws), self.powers)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_by_parts(self.rows, self.vocab_size, index, u)


@dataclass(frozen=True)
class Normalised:
    """Laws divided by their mass. Where they have none any law will do, for the model gives no mass to what it draws:
    all tokens but the mask are equally likely."""

    law: Categorical
    mask_id: int
    normalised: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        return self.law.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.law.dtype

    def rows(self, index: Tensor) -> Tensor:
        return self._possible(index).log_softmax(-1)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        mass = score_by_parts(lambda part: self.law.rows(part).logsumexp(-1), self.vocab_size, index)
        nothing = mass == NEVER
        anything = torch.full_like(mass, -math.log(max(1, self.vocab_size - 1))).masked_fill(
            tokens == self.mask_id, NEVER
        )
        return torch.where(nothing, anything, self.law.entries(index, tokens) - mass.masked_fill(nothing, 0.0))

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_by_parts(self._possible, self.vocab_size, index, u)

    def _possible(self, index: Tensor) -> Tensor:
        """The laws with some mass each, whatever it is."""
        laws = self.law.rows(index)
        words = torch.arange(self.vocab_size, device=laws.device)
        anything = torch.zeros_like(words, dtype=laws.dtype).masked_fill(words == self.mask_id, NEVER)
        return torch.where(laws.amax(-1, keepdim=True) == NEVER, anything, laws)


@dataclass(frozen=True)
class Tilted:
    """The laws mu · exp(h), unnormalised, for K sites: mu is the law `site` (K,) of one store, h the line `line` (K,)
    of another."""

    law: Categorical
    site: Tensor
    h: Categorical
    line: Tensor
    normalised: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return self.law.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.law.dtype, self.h.dtype)

    def rows(self, index: Tensor) -> Tensor:
        return self.law.rows(self.site[index]) + self.h.rows(self.line[index])

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.law.entries(self.site[index], tokens) + self.h.entries(self.line[index], tokens)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_by_parts(self.rows, self.vocab_size, index, u)


def tilted(laws: SiteDistributions, h: SiteDistributions) -> SiteDistributions:
    """The laws mu · exp(h), unnormalised, where there is both."""
    both = (laws.index >= 0) & (h.index >= 0)
    return SiteDistributions(Tilted(laws.store, laws.index.flatten(), h.store, h.index.flatten()), lines_of(both))


def normal(laws: SiteDistributions, mask_id: int) -> SiteDistributions:
    """Laws that sum to one."""
    if laws.normalised:
        return laws
    one = _of_one_head(laws.store) if isinstance(laws.store, Powers) else None
    return SiteDistributions(Normalised(laws.store, mask_id) if one is None else one, laws.index)


def _of_one_head(product: Powers) -> HiddenLogits | None:
    """A product of softmaxes of one head, its powers adding up to one, is the softmax of that head on the states so
    added: guidance between two readings of one network costs no more than either. Sums in half precision would be
    another law, though one near to it."""
    first, *others = product.laws
    if (
        not isinstance(first, HiddenLogits)
        or first.states.dtype != first.dtype
        or abs(sum(product.powers) - 1.0) > 1e-9
    ):
        return None
    states = product.powers[0] * first.states
    for law, power in zip(others, product.powers[1:], strict=True):
        if not isinstance(law, HiddenLogits) or law.head is not first.head or law.mask_id != first.mask_id:
            return None
        states = states + power * law.states
    return replace(first, states=states)
