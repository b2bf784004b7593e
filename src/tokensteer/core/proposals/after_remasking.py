"""A step of a product that remasks, in two parts: sites are masked again first, then others open given what is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from torch import Generator, Tensor

from tokensteer.core.categorical.product import normalise_each
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions, by_site
from tokensteer.core.kernels.measure import Reveal, SiteMeasure, Table, Tilting
from tokensteer.core.models.context import Query
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.models.product import Product
from tokensteer.core.particles.path import Sites, Step


class Drawn(NamedTuple):
    """A draw, its log-probability, and what the networks predict for the sites open before and after it."""

    y: Tensor
    log_q: Tensor
    given: Prediction


@dataclass
class AfterRemasking(Tilting):
    """Which sites move is that of `first`; the tokens of sites that open are those of the product given the sites that
    are open before and after the step.

    Tokens that were drawn given x_t would be weighed given fewer sites, and the ratio of both, over all sites that
    open, makes weights useless where sequences are long. `tilts` are those of a gradient. What the networks predict for
    a draw is kept, since the weight needs it too.
    """

    first: Reveal
    model: Product
    prediction: Prediction
    step: Step
    query: Query
    tilts: SiteDistributions | None = None
    _drawn: Drawn | None = field(default=None, init=False, repr=False)
    factorises: ClassVar[bool] = False

    @property
    def sites(self) -> Sites | None:
        return self.first.sites

    @property
    def log_mass(self) -> Tensor | None:
        return self.first.log_mass

    def sample(self, generator: Generator | None) -> Tensor:
        moves = self.first.moving(generator)
        given = self.model.given_common(self.first.x, moves & ~self.first.masked, self.prediction, self.query)
        y, log_q = self._opening(given).filled(moves, generator)
        self._drawn = Drawn(y, log_q, given)
        return y

    def log_prob(self, y: Tensor) -> Tensor:
        if self._drawn is not None and self._drawn.y is y:
            return self._drawn.log_q
        return self._opening(self._given(y)).log_prob(y)

    def log_p(self, y: Tensor) -> Tensor:
        """log p(y | x_t) of the product, (P,)."""
        return self.model.log_prob_given(y, self.first.x, self._given(y), self.step, self.sites)

    def _given(self, y: Tensor) -> Prediction:
        if self._drawn is not None and self._drawn.y is y:
            return self._drawn.given
        remasked = ~self.first.masked & (y == self.first.mask_id)
        return self.model.given_common(self.first.x, remasked, self.prediction, self.query)

    def _opening(self, given: Prediction) -> Reveal:
        """`first` with the tokens of this prediction."""
        opening = replace(self.first, log_x0=normalise_each(self.model.combined(given), self.first.mask_id))
        return opening if self.tilts is None else opening.tilt_tokens(self.tilts)

    def take(self, rows: Tensor) -> AfterRemasking:
        tilts = None if self.tilts is None else self.tilts.take(rows)
        prediction, query = self.prediction.take(rows), self.query.take(rows)
        return AfterRemasking(self.first.take(rows), self.model, prediction, self.step, query, tilts)

    def tilt(self, h: Categoricals) -> AfterRemasking:
        return self._with(self.first.tilt(h), by_site(h))

    def tilt_tokens(self, h: Categoricals) -> AfterRemasking:
        return self._with(self.first, by_site(h))

    def _with(self, first: Reveal, tilts: SiteDistributions | None) -> AfterRemasking:
        return AfterRemasking(first, self.model, self.prediction, self.step, self.query, tilts)

    def normalise(self) -> AfterRemasking:
        return self

    def with_mass(self, log_mass: Tensor | None) -> AfterRemasking:
        return self._with(self.first.with_mass(log_mass), self.tilts)

    def pin(self, fixed: Tensor) -> AfterRemasking:
        return self._with(self.first.pin(fixed), self.tilts)

    def total(self) -> Tensor:
        return self.first.total()

    def covers(self, other: SiteMeasure) -> bool:
        return self.first.covers(other)

    def dense(self) -> Table:
        return self.first.dense()
