"""`Diffusion`: a denoiser, a kernel, a time grid and a template (Austin et al., 2021; docs/references.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.forms import CategoricalStore, LogProbs, StoreBuffer
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions
from tokensteer.core.kernels.kernel import NO_MASK, Clocked, Kernel
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.kernels.noise import noise_of
from tokensteer.core.models.context import Context, Query, as_context, as_query, context_rows, population_of
from tokensteer.core.models.denoiser import Denoiser, Structured, Time, ignores_time
from tokensteer.core.models.prediction import NewRows, Prediction, all_distinct, changed, updated
from tokensteer.core.models.validation import check_denoiser, check_shape, unwritten
from tokensteer.core.numerics.batching import Chunks, Meter
from tokensteer.core.numerics.domains import check_flags
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.numerics.rows import distinct
from tokensteer.core.particles.path import Sites, Step


class Predicting(Protocol):
    """What a `Diffusion` and a `Product` do alike."""

    @property
    def networks(self) -> Sequence[Diffusion]:
        """The models whose denoisers are called."""
        ...

    @property
    def ignores_time(self) -> bool:
        """Whether a prediction holds at any time, so that it is reused."""
        return all(model.ignores_time for model in self.networks)

    def predict(self, x: Tensor, t: Time | Query, before: Prediction | None = None) -> Prediction:
        """The predictions of all networks at x (P, L) and t; `before` are those of the particles' parents."""
        return predict_all(self.networks, x, as_query(t), before if self.ignores_time else None)

    def clean(self, prediction: Prediction) -> SiteDistributions:
        """log p(x_0 | x_t): clean samples are drawn from it, and low-confidence kernels order sites by it."""
        return prediction.laws()

    @property
    def looks_ahead(self) -> bool:
        """Whether the log-twist before the end has a term of the model's, `log_lookahead`."""
        return False

    def log_lookahead(self, prediction: Prediction) -> Tensor:
        """The log of the mass that the model has yet to count, as far as the prediction tells, (P,)."""
        return torch.zeros_like(prediction.x[:, 0], dtype=torch.float64)


class Model(Predicting, Protocol):
    """A `Diffusion` or a `Product`. The members with a body are those of a product, taken from its first model."""

    @property
    def base(self) -> Diffusion:
        """The model itself, or the first of a product."""
        ...

    @property
    def kernel(self) -> Kernel:
        return self.base.kernel

    @property
    def steps(self) -> Sequence[Step]:
        return self.base.steps

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def populations(self) -> int:
        """The number of templates and contexts; populations come in multiples of it."""
        return self.base.populations

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.base.start(rows, generator)

    def log_start(self, x: Tensor) -> Tensor:
        """The log-probability of starting at x, (P,), for a single template."""
        return self.base.log_start(x)

    def relaxed(self, x: Tensor, t: Time | Query) -> Tensor:
        """log p(x_0 | x_t), (P, L, V), from one-hots x (P, L, V), differentiable in them."""
        return self.base.relaxed(x, t)

    def combined(self, prediction: Prediction) -> SiteDistributions:
        """The token distribution of the target at masked sites, perhaps unnormalised."""
        ...

    def step_with(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None) -> SiteMeasure:
        """The kernel with any token distribution, the template's sites pinned."""
        return self.base.step_with(x, log_x0, step, sites)

    def transition(self, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> SiteMeasure:
        """The reference p(· | x_t), perhaps unnormalised."""
        ...

    def log_prob(self, y: Tensor, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> Tensor:
        """log p(y | x_t), (P,), as it enters the weight."""
        ...


def clock(model: Model, memory: Tensor | None, t: float) -> Time:
    """The time that a denoiser is called with: t, or the particles' own times, (P,), if the kernel is `Clocked`."""
    kernel = model.kernel
    return kernel.times(memory).to(model.dtype) if memory is not None and isinstance(kernel, Clocked) else t


@dataclass(frozen=True)
class Diffusion(Predicting):
    """A pretrained model as a sampler: p(x_s | x_t) = kernel(x_t, denoiser(x_t, t)) along `steps`.

    `template` is (L,), or (B, L) with one row for each population: mask where free, a token where fixed. `context` is
    what the denoiser is conditioned on, such as class labels: a tensor, or several, with one row for all populations or
    (B, ...), one for each; the denoiser is called with its particles' rows as further arguments. Construction runs the
    denoiser on one row, so that errors raise at once. With `sharing` the network is given distinct rows only,
    and if it ignores time only rows that have changed. Finding them synchronises with the device, which pays on a GPU
    for large networks only; the default is to share on a CPU alone.
    """

    denoiser: Denoiser
    kernel: Kernel
    steps: Sequence[Step]
    template: Tensor
    sharing: bool | None = None
    context: Tensor | Sequence[Tensor] | None = None
    meter: Meter = field(default_factory=Meter, init=False, repr=False, compare=False)
    chunks: Chunks = field(default_factory=Chunks, init=False, repr=False, compare=False)
    vocab_size: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    _prompt: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _fixes: bool = field(default=True, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_flags(self)
        check_shape(self.template, self.steps, self.kernel)
        # Without a mask a prompt is known by its sites. A row may belong to any template, so only sites that all
        # templates fix count, (L, 1); the others are pinned during moves and not known to estimates.
        fixed = (self.template != NO_MASK).view(-1, self.template.shape[-1]).all(0).unsqueeze(-1)
        if self.kernel.mask_id == NO_MASK and fixed.any():
            object.__setattr__(self, "_prompt", fixed)
        object.__setattr__(self, "context", as_context(self.context, self._templates))
        # Stored on the host, so that steps skip pinning without reading the device.
        object.__setattr__(self, "_fixes", bool((self.template != self.kernel.mask_id).any()))
        x = self.start(self.populations, torch.Generator(self.device).manual_seed(0))[:1]
        vocab_size, dtype = check_denoiser(
            self.denoiser, self.kernel, self.steps, self.template, x, self.conditions, kept=self.shares
        )
        if not (self.template == self.kernel.mask_id).any():
            raise ValueError(
                f"the template has no free site, none that holds {self.kernel.mask_id}: is mask_id right? A process "
                "without a mask marks free sites by NO_MASK"
            )
        object.__setattr__(self, "vocab_size", vocab_size)
        object.__setattr__(self, "dtype", dtype)

    @property
    def device(self) -> torch.device:
        return self.template.device

    @property
    def conditions(self) -> Context:
        """The tensors of the context."""
        return cast("Context", self.context)

    @property
    def _templates(self) -> Tensor:
        return self.template.view(-1, self.template.shape[-1])

    @property
    def populations(self) -> int:
        return max(len(self._templates), *(len(part) for part in self.conditions), 1)

    @property
    def base(self) -> Diffusion:
        return self

    @property
    def networks(self) -> Sequence[Diffusion]:
        return (self,)

    def canvas(self, rows: int) -> Tensor:
        """The template of each of `rows` particles, population by population."""
        if rows % self.populations:
            raise ValueError(
                f"there are {rows} particles for {self.populations} templates or contexts: run one population for each"
            )
        count = len(self._templates)
        return self._templates.expand(rows, -1) if count == 1 else self.template.repeat_interleave(rows // count, 0)

    def given(self, query: Query, rows: int) -> Context:
        """The context of each of `rows` particles."""
        return context_rows(self.conditions, query.of, rows)

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return noise_of(self.kernel).begin(self.canvas(rows), generator)

    def log_start(self, x: Tensor) -> Tensor:
        like = torch.empty((), dtype=self.dtype, device=self.device)
        return noise_of(self.kernel).log_begin(x, self.canvas(len(x)), like)

    @property
    def ignores_time(self) -> bool:
        return self.shares and ignores_time(self.denoiser)

    @property
    def shares(self) -> bool:
        return self.device.type == "cpu" if self.sharing is None else self.sharing

    def run_denoiser(self, x: Tensor, query: Query, before: CategoricalStore | None = None) -> CategoricalStore:
        """The D·L distributions at rows x (D, L), in a form that can be joined with `before`."""
        structured = self.kernel.mask_id != NO_MASK and not isinstance(before, LogProbs)
        buffer = StoreBuffer(x.numel())

        def run(rows: slice) -> None:
            part, at = x[rows], query.take(rows)
            context, net = self.given(at, len(part)), self.denoiser
            if structured and isinstance(net, Structured):
                store = unwritten("the denoiser", lambda x: net.laws(x, at.t, *context), part)
            else:
                found = unwritten("the denoiser", lambda x: net(x, at.t, *context), part)
                log_x0 = self._known(part, found, at.t)
                store = LogProbs(log_x0.flatten(0, 1).contiguous())
            buffer.put(rows.start * x.shape[1], store, part.numel())

        row_bytes = 3 * 4 * self.template.shape[-1] * self.vocab_size  # a guess: three tables of logits
        self.chunks.stretches(run, len(x), row_bytes, x.device)
        return buffer.store

    def relaxed(self, x: Tensor, t: Time | Query) -> Tensor:
        query = as_query(t)
        return self._known(x.argmax(-1), self.denoiser(x, query.t, *self.given(query, len(x))), query.t)

    def _known(self, ids: Tensor, log_x0: Tensor, t: Time) -> Tensor:
        """The prediction corrected, for a process without a mask, by what x and the prompt determine."""
        log_x0 = noise_of(self.kernel).condition(ids, log_x0, t)
        if self._prompt is None:
            return log_x0
        known = torch.full_like(log_x0, NEVER).scatter(-1, ids.unsqueeze(-1), 0.0)
        return torch.where(self._prompt, known, log_x0)

    def combined(self, prediction: Prediction) -> SiteDistributions:
        return prediction.laws()

    def step_with(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None) -> SiteMeasure:
        return self.pin(self.kernel(x, log_x0, step, sites), len(x))

    def pin(self, measure: SiteMeasure, rows: int) -> SiteMeasure:
        """Fix the sites that the template fixes."""
        return measure.pin(self.canvas(rows) != self.kernel.mask_id) if self._fixes else measure

    def transition(self, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> SiteMeasure:
        return self.step_with(x, prediction.laws(), step, sites)

    def log_prob(self, y: Tensor, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> Tensor:
        return self.transition(x, prediction, step, sites).log_prob(y)


def predict_all(
    models: Sequence[Diffusion],
    x: Tensor,
    query: Query,
    before: Prediction | None,
    news: NewRows | None = None,
    computed: tuple[CategoricalStore, ...] = (),
) -> Prediction:
    """The predictions of several models at x: rows of `before` for particles that have not moved, new ones for the
    distinct states of the others. Every call of a denoiser goes through here. A gradient pass gives the new rows,
    `news`, and `computed`, the stores of the first models for them.
    """
    before = before if before is not None and before.stores else None
    query = located(models, query, x)
    if news is None:
        news = distinct_rows(x, changed(x, before), query, models)
    stores = computed
    if len(news.distinct):
        rows, at = x[news.distinct], query.take(news.distinct)
        known = [None] * len(models) if before is None else before.stores
        rest = list(zip(models, known, strict=True))[len(computed) :]
        stores = (*computed, *(model.run_denoiser(rows, at, store) for model, store in rest))
    for model in models:
        model.meter.count(len(news.distinct), len(x))
    return updated(x, news, stores, before)


def located(models: Sequence[Diffusion], t: Time | Query, x: Tensor, contexts: int = 1) -> Query:
    """A query that knows the population of each of the particles x in order, if contexts differ between populations:
    those of the models, or those of a reward, of which there are `contexts`."""
    query = as_query(t)
    if query.of is not None or (contexts == 1 and all(len(part) == 1 for m in models for part in m.conditions)):
        return query
    return Query(query.t, population_of(x, max(model.populations for model in models)))


def distinct_rows(x: Tensor, new: Tensor, query: Query, models: Sequence[Diffusion]) -> NewRows:
    """The distinct states among the particles `new`, apart where contexts differ. Finding them synchronises with the
    device, so this is done only if the first model shares rows."""
    clocks = isinstance(query.t, Tensor) and not all(model.ignores_time for model in models)
    if clocks or not len(new) or not models[0].shares:
        return all_distinct(new)
    states = x[new] if query.of is None else torch.cat([x, query.of.unsqueeze(-1)], -1)[new]
    first, which = distinct(states)
    return NewRows(new, new[first], which)
