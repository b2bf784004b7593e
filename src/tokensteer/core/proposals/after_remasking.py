"""A step of a product that remasks, in two parts: sites are masked again first, then others open given what is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import ClassVar, NamedTuple

from torch import Generator, Tensor

from tokensteer.core.categorical.product import normalise_each
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions, by_site
from tokensteer.core.kernels.measure import Reveal, SiteMeasure, Table, Tilting
from tokensteer.core.models.context import Query
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.models.product import Product
from tokensteer.core.particles.path import Sites, Step


class Known(NamedTuple):
    """A next state, what the networks predict for the sites open before and after it, and its log-probability if it was
    drawn."""

    y: Tensor
    given: Prediction
    log_q: Tensor | None = None


@dataclass
class AfterRemasking(Tilting):
    """Which sites move is that of `first`; the tokens of sites that open are those of the product given the sites that
    are open before and after the step.

    Tokens that were drawn given x_t would be weighed given fewer sites, and the ratio of both, over all sites that
    open, makes weights useless where sequences are long. `tilts` are those of gradients, which `first` has as well.
    What the networks predict for the last state that was asked for is kept, since the weight needs it too: do not write
    into a draw. `prediction` is that at x_t, if it is known.
    """

    first: Reveal
    model: Product
    prediction: Prediction | None
    step: Step
    query: Query
    tilts: tuple[SiteDistributions, ...] = ()
    _known: Known | None = field(default=None, init=False, repr=False)
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
        self._known = Known(y, given, log_q)
        return y

    def log_prob(self, y: Tensor) -> Tensor:
        known = self._known_at(y)
        return self._opening(known.given).log_prob(y) if known.log_q is None else known.log_q

    def log_model(self, y: Tensor) -> Tensor:
        """log p(y | x_t) of the product, (P,): it has predicted for the sites that y leaves open."""
        return self.model.log_prob_given(y, self.first.x, self._known_at(y).given, self.step, self.sites)

    def _known_at(self, y: Tensor) -> Known:
        if self._known is None or self._known.y is not y:
            remasked = ~self.first.masked & (y == self.first.mask_id)
            self._known = Known(y, self.model.given_common(self.first.x, remasked, self.prediction, self.query))
        return self._known

    def _opening(self, given: Prediction) -> Reveal:
        """`first` with the tokens of this prediction."""
        opening = replace(self.first, log_x0=normalise_each(self.model.combined(given), self.first.mask_id))
        return reduce(Reveal.tilt_tokens, self.tilts, opening)

    def take(self, rows: Tensor) -> AfterRemasking:
        tilts = tuple(h.take(rows) for h in self.tilts)
        prediction = None if self.prediction is None else self.prediction.take(rows)
        return AfterRemasking(self.first.take(rows), self.model, prediction, self.step, self.query.take(rows), tilts)

    def tilt(self, h: Categoricals) -> AfterRemasking:
        return self._with(self.first.tilt(h), (*self.tilts, by_site(h)))

    def tilt_tokens(self, h: Categoricals) -> AfterRemasking:
        return self._with(self.first.tilt_tokens(h), (*self.tilts, by_site(h)))

    def _with(self, first: Reveal, tilts: tuple[SiteDistributions, ...]) -> AfterRemasking:
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
