"""Models: a denoiser, a kernel, a time grid and a template make a `Diffusion`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.forms import CategoricalStore, LogProbs, StoreBuffer
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions
from tokensteer.core.kernels.kernel import NO_MASK, Clocked, Kernel
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.kernels.noise import Interpolating, noise_of
from tokensteer.core.models.denoiser import Denoiser, Structured, Time, Timeless
from tokensteer.core.models.prediction import NewRows, Prediction, all_distinct, changed, updated
from tokensteer.core.models.validation import check_denoiser
from tokensteer.core.numerics.batching import Chunks, Meter
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.numerics.rows import distinct
from tokensteer.core.particles.path import Sites, Step


class Model(Protocol):
    """What steering needs of a model; `Diffusion` and `Product` are the two there are."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def populations(self) -> int:
        """How many different templates there are; populations come in multiples of it."""
        ...

    @property
    def base(self) -> Diffusion:
        """The model itself, or the first of a product."""
        ...

    @property
    def networks(self) -> Sequence[Diffusion]:
        """The models whose denoisers are asked."""
        ...

    def start(self, rows: int, generator: Generator | None) -> Tensor: ...
    def log_start(self, x: Tensor) -> Tensor:
        """The log-probability of starting at x, (P,), for a single template."""
        ...

    def predict(self, x: Tensor, t: Time, before: Prediction | None = None) -> Prediction:
        """Everything the networks say at (x, t), x ids (P, L), t one for all or (P,); `before` is what they said of the
        particles' parents."""
        ...

    @property
    def ignores_time(self) -> bool:
        """Whether what was said of a state is kept, since it holds at any time."""
        ...

    def relaxed(self, x: Tensor, t: Time) -> Tensor:
        """log p(x_0 | x_t), (P, L, V), from one-hots x (P, L, V), differentiable in them."""
        ...

    def clean(self, prediction: Prediction) -> SiteDistributions:
        """log p(x_0 | x_t): what clean samples are drawn from, and whose order low confidence follows."""
        ...

    def combined(self, prediction: Prediction) -> SiteDistributions:
        """The token law of the target at masked sites, perhaps unnormalised."""
        ...

    def step_with(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None) -> SiteMeasure:
        """The kernel with any token law, the template's sites pinned."""
        ...

    def transition(self, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> SiteMeasure:
        """The reference p(· | x_t), perhaps unnormalised."""
        ...

    def log_prob(self, y: Tensor, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> Tensor:
        """log p(y | x_t), (P,), as it stands in the weight."""
        ...


def clock(model: Model, memory: Tensor | None, t: float) -> Time:
    """The time at which a denoiser is asked: t, that of the step, or that of each particle where they have clocks."""
    kernel = model.kernel
    return kernel.times(memory).to(model.dtype) if memory is not None and isinstance(kernel, Clocked) else t


@dataclass(frozen=True)
class Diffusion:
    """A pretrained model as a sampler: p(x_s | x_t) = kernel(x_t, denoiser(x_t, t)) along `steps`.

    `template` is (L,), or (B, L) with one row for each population: mask where free, a token where fixed. One row of it
    goes through the denoiser at construction, so that what cannot work is said at once. With `sharing` the network is
    asked about distinct rows, and not again about rows that have not changed if it ignores time. Finding them makes the
    host wait for the device, which only large networks on a GPU are worth: by default it is done on a CPU alone.
    """

    denoiser: Denoiser
    kernel: Kernel
    steps: Sequence[Step]
    template: Tensor
    sharing: bool | None = None
    meter: Meter = field(default_factory=Meter, init=False, repr=False, compare=False)
    chunks: Chunks = field(default_factory=Chunks, init=False, repr=False, compare=False)
    vocab_size: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    _prompt: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _fixes: bool = field(default=True, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_tensor = isinstance(self.template, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_tensor or self.template.dtype != torch.int64 or self.template.dim() not in (1, 2):
            raise ValueError(f"template must be a tensor of int64 ids, (L,) or (B, L), got {_describe(self.template)}")
        if not isinstance(self.steps, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"steps must be a list of steps, got {self.steps!r}: uniform_steps(n) makes n of them")
        times = [step.t for step in self.steps] + [self.steps[-1].s] if self.steps else []
        joined = all(step.s == after.t for step, after in zip(self.steps, self.steps[1:], strict=False))
        if not times or not joined or times != sorted(times, reverse=True) or times[-1] != 0:
            raise ValueError("steps must run down to t = 0 without a gap: use uniform_steps(n) or cosine_steps(n)")
        if isinstance(self.kernel, Interpolating) and int(self.template.max()) >= len(self.kernel.prior):
            raise ValueError(f"the template holds ids outside the prior, which is over {len(self.kernel.prior)} tokens")
        # Without a mask a prompt is told by its place. Rows may be any particles, so that is where all templates are
        # fixed, (L, 1): what only some of them fix is pinned as they move, and not known to estimates.
        fixed = (self.template != NO_MASK).view(-1, self.template.shape[-1]).all(0).unsqueeze(-1)
        if self.kernel.mask_id == NO_MASK and fixed.any():
            object.__setattr__(self, "_prompt", fixed)
        # Known to the host, so that nothing is pinned, step after step, where nothing is fixed.
        object.__setattr__(self, "_fixes", bool((self.template != self.kernel.mask_id).any()))
        x = self.start(self.populations, torch.Generator(self.device).manual_seed(0))[:1]
        vocab_size, dtype = check_denoiser(self.denoiser, self.kernel, self.steps, self.template, x, kept=self.shares)
        if not (self.template == self.kernel.mask_id).any():
            raise ValueError(
                f"the template has no free site, none that holds {self.kernel.mask_id}: is mask_id right? A process "
                "without a mask marks its free sites by NO_MASK"
            )
        object.__setattr__(self, "vocab_size", vocab_size)
        object.__setattr__(self, "dtype", dtype)

    @property
    def device(self) -> torch.device:
        return self.template.device

    @property
    def populations(self) -> int:
        return 1 if self.template.dim() == 1 else len(self.template)

    @property
    def base(self) -> Diffusion:
        return self

    @property
    def networks(self) -> Sequence[Diffusion]:
        return (self,)

    def _rows(self, rows: int) -> Tensor:
        """The template for each of `rows` particles, population by population."""
        if self.template.dim() == 1:
            return self.template.expand(rows, -1)
        if rows % len(self.template):
            raise ValueError(
                f"the template has {len(self.template)} rows and there are {rows} particles: run one population for "
                "each row"
            )
        return self.template.repeat_interleave(rows // len(self.template), 0)

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return noise_of(self.kernel).begin(self._rows(rows), generator)

    def log_start(self, x: Tensor) -> Tensor:
        like = torch.empty((), dtype=self.dtype, device=self.device)
        return noise_of(self.kernel).log_begin(x, self._rows(len(x)), like)

    @property
    def ignores_time(self) -> bool:
        return self.shares and isinstance(self.denoiser, Timeless) and self.denoiser.ignores_time

    @property
    def shares(self) -> bool:
        return self.device.type == "cpu" if self.sharing is None else self.sharing

    def predict(self, x: Tensor, t: Time, before: Prediction | None = None) -> Prediction:
        return predict_all((self,), x, t, before if self.ignores_time else None)

    def laws(self, x: Tensor, t: Time, before: CategoricalStore | None = None) -> CategoricalStore:
        """The network's answer for rows x (D, L), D·L laws, in a form that can be joined with what it said before."""
        dense = isinstance(before, LogProbs)
        structured = isinstance(self.denoiser, Structured) and self.kernel.mask_id != NO_MASK and not dense

        def ask(rows: slice) -> CategoricalStore:
            time = t[rows] if isinstance(t, Tensor) else t
            if structured and isinstance(self.denoiser, Structured):
                return self.denoiser.laws(x[rows], time)
            return LogProbs(self._known(x[rows], self.denoiser(x[rows], time), time).flatten(0, 1).contiguous())

        shelf = StoreBuffer(x.numel())

        def answer(rows: slice) -> None:
            shelf.put(rows.start * x.shape[1], ask(rows), x[rows].numel())

        self.chunks.stretches(answer, len(x), self._row_bytes, x.device)
        return shelf.store

    @property
    def _row_bytes(self) -> int:
        """A guess of what a row takes: three tables of logits."""
        return 3 * 4 * self.template.shape[-1] * self.vocab_size

    def relaxed(self, x: Tensor, t: Time) -> Tensor:
        return self._known(x.argmax(-1), self.denoiser(x, t), t)

    def _known(self, ids: Tensor, log_x0: Tensor, t: Time) -> Tensor:
        """The network's answer made to agree with what x shows, where no mask tells what is known."""
        log_x0 = noise_of(self.kernel).condition(ids, log_x0, t)
        if self._prompt is None:
            return log_x0
        known = torch.full_like(log_x0, NEVER).scatter(-1, ids.unsqueeze(-1), 0.0)
        return torch.where(self._prompt, known, log_x0)

    def clean(self, prediction: Prediction) -> SiteDistributions:
        return prediction.laws()

    def combined(self, prediction: Prediction) -> SiteDistributions:
        return prediction.laws()

    def step_with(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None) -> SiteMeasure:
        return self.pin(self.kernel(x, log_x0, step, sites), len(x))

    def pin(self, measure: SiteMeasure, rows: int) -> SiteMeasure:
        """Hold fixed what the template fixes."""
        return measure.pin(self._rows(rows) != self.kernel.mask_id) if self._fixes else measure

    def transition(self, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> SiteMeasure:
        return self.step_with(x, prediction.laws(), step, sites)

    def log_prob(self, y: Tensor, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> Tensor:
        return self.transition(x, prediction, step, sites).log_prob(y)


def predict_all(
    models: Sequence[Diffusion],
    x: Tensor,
    t: Time,
    before: Prediction | None,
    news: NewRows | None = None,
    computed: tuple[CategoricalStore, ...] = (),
) -> Prediction:
    """The predictions of several models at x: the rows of `before` for particles that have not moved, new ones for the
    distinct states of the others. Every call of a denoiser goes through here.

    A gradient pass has found the new rows, `news`, and `computed` the stores of the first models for them.
    """
    before = before if before is not None and before.stores else None
    if news is None:
        news = distinct_rows(x, changed(x, before), t, models)
    stores = computed
    if len(news.distinct):
        rows, time = x[news.distinct], t[news.distinct] if isinstance(t, Tensor) else t
        known = [None] * len(models) if before is None else before.stores
        rest = list(zip(models, known, strict=True))[len(computed) :]
        stores = (*computed, *(model.laws(rows, time, store) for model, store in rest))
    for model in models:
        model.meter.count(len(news.distinct), len(x))
    return updated(x, news, stores, before)


def distinct_rows(x: Tensor, new: Tensor, t: Time, models: Sequence[Diffusion]) -> NewRows:
    """The distinct states among the particles `new`. Finding them synchronises with the device, so this is done only if
    the first model shares rows."""
    clocks = isinstance(t, Tensor) and not all(model.ignores_time for model in models)
    if clocks or not len(new) or not models[0].shares:
        return all_distinct(new)
    first, which = distinct(x[new])
    return NewRows(new, new[first], which)


def _describe(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
