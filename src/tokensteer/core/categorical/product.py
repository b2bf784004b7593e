"""Distributions made of others: products of powers, tilts, and normalised distributions.

Nothing is computed until it is read. A product draws tokens only where sites open, and the log-mass of a given token
takes one number of each model. Equal particles still share their distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from tokensteer.core.categorical.forms import Categorical, Derived, DrawnByRows, HiddenLogits, score_by_parts
from tokensteer.core.categorical.sites import SiteDistributions, line_index
from tokensteer.core.numerics.draws import NEVER


def product_of_powers(log_measures: Iterable[Tensor], powers: Sequence[float]) -> Tensor:
    """log prod_k m_k^a_k. A token without mass in a measure of positive power has none in the product. The measures
    are large and may come from a generator, one at a time."""
    total = forbidden = None
    for log_m, power in zip(log_measures, powers, strict=True):
        part = power * log_m if power else torch.zeros_like(log_m)
        total = part if total is None else total + part
        if power > 0:
            forbidden = log_m == NEVER if forbidden is None else forbidden | (log_m == NEVER)
    assert total is not None, "a product has at least one factor"
    return total if forbidden is None else total.masked_fill_(forbidden, NEVER)


@dataclass(frozen=True)
class Powers(DrawnByRows):
    """The products prod_k mu_k^a_k, unnormalised, of K distributions each; zeros as in `product_of_powers`."""

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


@dataclass(frozen=True)
class Normalised(Derived):
    """Distributions divided by their mass. One without mass becomes uniform over all tokens but the mask: the model
    gives no mass to any draw from it, so any distribution will do."""

    mask_id: int
    normalised: ClassVar[bool] = True

    def rows(self, index: Tensor) -> Tensor:
        return self.masses(index).log_softmax(-1)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        mass = score_by_parts(lambda part: self.base.rows(part).logsumexp(-1), self.vocab_size, index)
        empty = mass == NEVER
        uniform = torch.full_like(mass, -math.log(max(1, self.vocab_size - 1)))
        uniform = uniform.masked_fill(tokens == self.mask_id, NEVER)
        return torch.where(empty, uniform, self.base.entries(index, tokens) - mass.masked_fill(empty, 0.0))

    def masses(self, index: Tensor) -> Tensor:
        log_p = self.base.rows(index)
        tokens = torch.arange(self.vocab_size, device=log_p.device)
        uniform = torch.zeros_like(tokens, dtype=log_p.dtype).masked_fill(tokens == self.mask_id, NEVER)
        return torch.where(log_p.amax(-1, keepdim=True) == NEVER, uniform, log_p)


@dataclass(frozen=True)
class Tilted(Derived):
    """mu · exp(h), unnormalised, for K sites: mu is line `site` (K,) of `base`, h line `line` (K,) of another store."""

    site: Tensor
    h: Categorical
    line: Tensor
    normalised: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.base.dtype, self.h.dtype)

    def rows(self, index: Tensor) -> Tensor:
        return self.base.rows(self.site[index]) + self.h.rows(self.line[index])

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.base.entries(self.site[index], tokens) + self.h.entries(self.line[index], tokens)


def tilted(laws: SiteDistributions, h: SiteDistributions) -> SiteDistributions:
    """mu · exp(h), unnormalised, at the sites that have both."""
    both = (laws.index >= 0) & (h.index >= 0)
    return SiteDistributions(Tilted(laws.store, laws.index.flatten(), h.store, h.index.flatten()), line_index(both))


@dataclass(frozen=True)
class Lines(Derived):
    """Lines `line` (K,) of another store."""

    line: Tensor
    normalised: ClassVar[bool] = False  # perhaps: `between` normalises its product in any case

    def rows(self, index: Tensor) -> Tensor:
        return self.base.rows(self.line[index])

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.base.entries(self.line[index], tokens)


def between(first: SiteDistributions, second: SiteDistributions, share: float) -> SiteDistributions:
    """first^(1 - share) · second^share, unnormalised, at the sites that have both."""
    both = (first.index >= 0) & (second.index >= 0)
    laws = tuple(Lines(laws.store, laws.index.flatten()) for laws in (first, second))
    return SiteDistributions(Powers(laws, (1.0 - share, share)), line_index(both))


def normalise_each(laws: SiteDistributions, mask_id: int) -> SiteDistributions:
    """The distributions, each normalised."""
    if laws.normalised:
        return laws
    one = _of_one_head(laws.store) if isinstance(laws.store, Powers) else None
    return SiteDistributions(Normalised(laws.store, mask_id) if one is None else one, laws.index)


def _of_one_head(product: Powers) -> HiddenLogits | None:
    """The product as one softmax, if its factors share a head and its powers add up to one: then it is the softmax of
    the head on the weighted sum of states, and guidance costs no more than one model. None in half precision, where
    that sum would be rounded."""
    first, *others = product.laws
    if not isinstance(first, HiddenLogits) or first.states.dtype != first.dtype:
        return None
    if abs(sum(product.powers) - 1.0) > 1e-9:
        return None
    states = product.powers[0] * first.states
    for law, power in zip(others, product.powers[1:], strict=True):
        if not isinstance(law, HiddenLogits) or law.head is not first.head or law.mask_id != first.mask_id:
            return None
        states = states + power * law.states
    return replace(first, states=states)
