"""Measures on token sequences.

A step of a discrete diffusion is a measure on sequences that factorises over sites, m(y) = prod_l m^l(y^l). It may be
unnormalised: a product of models is. In a masked process a site either stays or moves, and only a masked site that
opens needs a token. `Reveal` keeps that structure, so that the vocabulary is read only where sites open; `Table` is a
dense table, for any other process and for enumeration.

Draws and `log_prob` use the same numbers: a draw inverts the cumulative sum of the probabilities that `log_prob` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.gradient_tilt import log_gradient_ratio, tilt_by_gradient, tilts_of_outcomes
from tokensteer.core.categorical.product import normalise_each, tilted
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions, by_site, map_rows, table_rows
from tokensteer.core.numerics.draws import NEVER, categorical, uniforms
from tokensteer.core.numerics.rows import same_rows, support
from tokensteer.core.particles.path import Measure, Sites

Indexed = TypeVar("Indexed", bound=Sites)


class Tilting(Protocol):
    """What a measure that is defined site by site has by its `tilt` and its `dense` table."""

    def tilt(self, h: Categoricals) -> SiteMeasure:
        """q ∝ m · exp(h), with h (P, L, V) over all tokens, the mask included."""
        ...

    def tilt_tokens(self, h: Categoricals) -> SiteMeasure:
        """Tilt the token given that a site opens, and not which sites open, if the measure tells these apart."""
        return self.tilt(h)

    def dense(self) -> Table: ...
    def support(self, limit: int) -> tuple[Tensor, Tensor]:
        """Every sequence that each particle can reach, listed as by `rows.support`; some may have no mass."""
        return support(self.dense().log_p, limit)


@runtime_checkable
class SiteMeasure(Tilting, Measure, Protocol):
    """A measure that is defined site by site, possibly unnormalised."""

    factorises: ClassVar[bool]
    """Whether sites are independent. If not, `dense` is a table that covers the measure and is not equal to it."""

    def take(self, rows: Tensor) -> SiteMeasure: ...
    def total(self) -> Tensor:
        """The log of the mass of all sequences, (P,)."""
        ...

    def covers(self, other: SiteMeasure) -> bool:
        """Whether this measure has mass wherever `other`, from the same state, has."""
        ...

    def normalise(self) -> SiteMeasure: ...
    def with_mass(self, log_mass: Tensor | None) -> SiteMeasure: ...
    def pin(self, fixed: Tensor) -> SiteMeasure:
        """The measure in which the sites `fixed` (P, L) do not move."""
        ...


@runtime_checkable
class Relative(Measure, Protocol):
    """A measure q whose ratio to p may be known without the probabilities of tokens."""

    of_draws: ClassVar[bool]
    """Whether the ratio is right only for y that were drawn from q, and not for all that q can reach."""

    def log_over(self, p: Reveal, y: Tensor) -> Tensor | None:
        """log q(y) - log p(y), (P,), with p from the same state; None if it takes both probabilities."""
        ...


@runtime_checkable
class ModelAware(Measure, Protocol):
    """A measure q that may hold the model's predictions for its next states, as well as its own."""

    def log_model(self, y: Tensor) -> Tensor | None:
        """log p(y | x_t) of the model at the sites of q, (P,), with x_t the state of q; None if q does not hold it."""
        ...


def draw(measure: Measure, generator: Generator | None) -> tuple[Tensor, Tensor | None]:
    """A draw from a measure and its log-probability, (P,); None if a ratio may do without it."""
    if isinstance(measure, Reveal):
        return measure.draw(generator)
    y = measure.sample(generator)
    return y, None if isinstance(measure, Relative) else measure.log_prob(y)


def _take(value: Indexed | None, rows: Tensor) -> Indexed | None:
    return None if value is None else value[rows]


@dataclass(frozen=True)
class Table(Tilting):
    """A measure that factorises, as a table of log-masses (P, L, V). x (P, L) is the state before the step."""

    log_p: Tensor
    sites: Sites | None = None
    log_mass: Tensor | None = None
    x: Tensor | None = None
    factorises: ClassVar[bool] = True

    def sample(self, generator: Generator | None) -> Tensor:
        return categorical(self.log_p, generator)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1).sum(-1)

    def take(self, rows: Tensor) -> Table:
        return Table(self.log_p[rows], _take(self.sites, rows), _take(self.log_mass, rows), _take(self.x, rows))

    def total(self) -> Tensor:
        return self.log_p.logsumexp(-1).sum(-1)

    def with_mass(self, log_mass: Tensor | None) -> Table:
        return replace(self, log_mass=log_mass)

    def normalise(self) -> Table:
        return replace(self, log_p=map_rows(lambda rows, log_p: _log_normalised(log_p), self.log_p))

    def tilt(self, h: Categoricals) -> Table:
        h = h.expand_as(self.log_p) if isinstance(h, Tensor) else h
        log_p = map_rows(lambda rows, log_p: _log_normalised(log_p + table_rows(h, rows)), self.log_p)
        return replace(self, log_p=log_p)

    def pin(self, fixed: Tensor) -> Table:
        if self.x is None:
            raise ValueError("a table without the state it leads on from cannot hold sites fixed: give it x")
        still = torch.full_like(self.log_p, NEVER).scatter(-1, self.x.unsqueeze(-1), 0.0)
        return replace(self, log_p=torch.where(fixed.unsqueeze(-1), still, self.log_p))

    def covers(self, other: SiteMeasure) -> bool:
        return bool(((self.log_p > NEVER) | (other.dense().log_p == NEVER)).all())

    def dense(self) -> Table:
        return self


def _log_normalised(log_p: Tensor) -> Tensor:
    empty = log_p.amax(-1, keepdim=True) == NEVER  # any distribution will do: p gives no mass to its draws
    return torch.where(empty, 0.0, log_p).log_softmax(-1)


@dataclass(frozen=True)
class Reveal(Tilting):
    """One step of a masked process: every site stays with mass exp(log_stay) or moves with mass exp(log_move).

    A masked site that moves opens, with token v at mass exp(log_x0[v]); an open site that moves is masked again.
    x, log_stay, log_move are (P, L); log_x0 is read at masked sites only and need not be normalised.
    """

    x: Tensor
    log_stay: Tensor
    log_move: Tensor
    log_x0: SiteDistributions
    mask_id: int
    sites: Sites | None = None
    log_mass: Tensor | None = None
    factorises: ClassVar[bool] = True
    of_draws: ClassVar[bool] = True

    @cached_property
    def masked(self) -> Tensor:
        return self.x == self.mask_id

    @cached_property
    def token_mass(self) -> Tensor:
        """log sum_v exp(log_x0[v]) at masked sites, 0 elsewhere: (P, L). Both `normalise` and `total` use it."""
        return self.log_x0.mass(self.masked)

    def sample(self, generator: Generator | None) -> Tensor:
        """A draw. The measure must be normalised, as every proposal is."""
        return self.draw(generator)[0]

    def draw(self, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """A draw and its log-probability, (P,), without a second pass over the vocabulary."""
        return self.filled(self.moving(generator), generator)

    def moving(self, generator: Generator | None) -> Tensor:
        """Which sites move, drawn, (P, L)."""
        u = torch.rand(self.x.shape, generator=generator, device=self.x.device, dtype=torch.float64)
        return u.log() < self.log_move

    def filled(self, moves: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """A draw in which these sites move, and its log-probability."""
        masked = self.masked
        token, log_token = self.log_x0.draw_one(moves & masked, self.mask_id, generator)
        y = torch.where(moves, torch.where(masked, token, self.mask_id), self.x)
        return y, torch.where(moves, self.log_move + log_token, self.log_stay).sum(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        masked, still = self.masked, y == self.x
        opened = masked & ~still
        token = self.log_x0.entry(y, opened)
        moved = self.log_move + token.masked_fill(~(masked | (y == self.mask_id)), NEVER)
        return torch.where(still, self.log_stay, moved).sum(-1)

    def log_over(self, p: Reveal, y: Tensor) -> Tensor | None:
        """None unless the tokens of q are p's, tilted by a gradient."""
        still = y == self.x
        token = log_gradient_ratio(self.log_x0, p.log_x0, y, self.masked & ~still)
        if token is None:
            return None
        return torch.where(still, self.log_stay - p.log_stay, self.log_move - p.log_move + token).sum(-1)

    def take(self, rows: Tensor) -> Reveal:
        return replace(
            self,
            x=self.x[rows],
            log_stay=self.log_stay[rows],
            log_move=self.log_move[rows],
            log_x0=self.log_x0.take(rows),
            sites=_take(self.sites, rows),
            log_mass=_take(self.log_mass, rows),
        )

    def total(self) -> Tensor:
        return torch.logaddexp(self.log_stay, self.log_move + self.token_mass).sum(-1)

    def with_mass(self, log_mass: Tensor | None) -> Reveal:
        return replace(self, log_mass=log_mass)

    def normalise(self) -> Reveal:
        return self.normalise_tokens(carry_mass=True)._normalise_outcomes()

    def normalise_tokens(self, carry_mass: bool = False) -> Reveal:
        """Normalise the token distributions at masked sites; their mass goes into `log_move`, or is dropped."""
        if self.log_x0.normalised:
            return self
        log_move = self.log_move + self.token_mass if carry_mass else self.log_move
        return replace(self, log_x0=normalise_each(self.log_x0, self.mask_id), log_move=log_move)

    def _normalise_outcomes(self) -> Reveal:
        total = torch.logaddexp(self.log_stay, self.log_move)
        empty = total == NEVER  # neither staying nor moving is possible: move, which has no mass under p
        log_stay = torch.where(empty, NEVER, self.log_stay - total)
        return replace(self, log_stay=log_stay, log_move=torch.where(empty, 0.0, self.log_move - total))

    def tilt(self, h: Categoricals) -> Reveal:
        h = by_site(h)
        stay, move = tilts_of_outcomes(h, self.x, self.mask_id)
        tilted = replace(self, log_stay=self.log_stay + stay, log_move=self.log_move + move)
        return tilted.tilt_each(h, carry_mass=True)._normalise_outcomes()

    def tilt_tokens(self, h: Categoricals) -> Reveal:
        return self.normalise().tilt_each(by_site(h), carry_mass=False)

    def tilt_each(self, h: SiteDistributions, carry_mass: bool) -> Reveal:
        """Token distributions ∝ exp(log_x0 + h), normalised; their mass goes into `log_move`, or is dropped."""
        by_gradient = tilt_by_gradient(self.log_x0, h, self.masked)
        if by_gradient is None:
            return replace(self, log_x0=tilted(self.log_x0, h)).normalise_tokens(carry_mass)
        log_x0, mass = by_gradient
        return replace(self, log_x0=log_x0, log_move=self.log_move + mass if carry_mass else self.log_move)

    def pin(self, fixed: Tensor) -> Reveal:
        log_stay, log_move = self.log_stay.masked_fill(fixed, 0.0), self.log_move.masked_fill(fixed, NEVER)
        return replace(self, log_stay=log_stay, log_move=log_move)

    def covers(self, other: SiteMeasure) -> bool:
        if not isinstance(other, Reveal):
            return self.dense().covers(other)
        stay = (self.log_stay > NEVER) | (other.log_stay == NEVER)
        moves = other.log_move > NEVER
        if bool((moves & (self.log_move == NEVER)).any()):  # a product may have no token left for a site that opens
            moves = moves & (other.token_mass > NEVER)
        move, opens = (self.log_move > NEVER) | ~moves, self.masked & moves
        return bool(stay.all() and move.all()) and all(
            bool(((self.log_x0.at(few) > NEVER) | (other.log_x0.at(few) == NEVER)).all())
            for few in self.log_x0.groups(opens)
        )

    def dense(self) -> Table:
        masked, log_x0 = self.masked.unsqueeze(-1), self.log_x0.dense()
        remask = torch.full_like(log_x0, NEVER)
        remask[..., self.mask_id] = self.log_move
        log_p = torch.where(masked, log_x0 + self.log_move.unsqueeze(-1), remask)
        return Table(log_p.scatter(-1, self.x.unsqueeze(-1), self.log_stay.unsqueeze(-1)), self.sites)


@dataclass(frozen=True)
class Listed:
    """A measure on a short list of sequences for each particle, for proposals that do not factorise.

    The lists are concatenated: candidates (K, L) with log_p (K,), normalised within each list, and `owner` (K,), the
    number of the list, ascending. Particle i has list row[i].
    """

    candidates: Tensor
    log_p: Tensor
    owner: Tensor
    row: Tensor
    sites: Sites | None = None
    log_mass: Tensor | None = None

    def sample(self, generator: Generator | None) -> Tensor:
        # Each list is one unit of the joint cumulative sum; the clamp keeps rounding from crossing its ends.
        cdf = self.log_p.double().exp().cumsum(0)
        start = torch.searchsorted(self.owner, self.row)
        end = torch.searchsorted(self.owner, self.row, right=True) - 1
        before = torch.where(start > 0, cdf[start - 1], 0.0)
        u = uniforms((len(self.row),), cdf, generator)
        index = torch.searchsorted(cdf, before + u * (cdf[end] - before))
        return self.candidates[torch.clamp(index, start, end)]

    def log_prob(self, y: Tensor) -> Tensor:
        listed = torch.cat([self.owner.unsqueeze(-1), self.candidates], -1)
        asked = torch.cat([self.row.unsqueeze(-1), y], -1)
        key = same_rows(torch.cat([listed, asked]))
        found = self.log_p.new_full((len(key),), NEVER).scatter(0, key[: len(listed)], self.log_p)
        return found[key[len(listed) :]]

    def take(self, rows: Tensor) -> Listed:
        sites, log_mass = _take(self.sites, rows), _take(self.log_mass, rows)
        return replace(self, row=self.row[rows], sites=sites, log_mass=log_mass)
