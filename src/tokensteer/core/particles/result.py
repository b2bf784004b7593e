"""The result of a run: weighted samples, diagnostics and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import inverse_cdf, uniforms
from tokensteer.core.particles.resampling import log_mean_weight, weights
from tokensteer.files import write_whole

AXES = {
    "samples": "BNL",
    "log_w": "BN",
    "reward": "BN",
    "ess": "TB",
    "mean_reward": "TB",
    "ancestors": "TBN",
    "ramp": "TB",
    "states": "TKNL",
    "states_log_w": "TKN",
    "pooled_from": "I",
}  # of the tensors of a result; T counts the start too, K the populations whose states are stored, I those pooled
WHOLE = ("samples", "ancestors", "states", "pooled_from")


def pooled(log_z: Tensor, sizes: Tensor | None = None) -> tuple[float, float]:
    """The log of the mean of exp(log_z) over independent estimates (B,), with its standard error (delta method). An
    estimate counts by its number of particles, `sizes` (B,), equal if not given.

    The mean of exp(log_z) is unbiased; the mean of log_z is biased low. With heavy-tailed weights both the mean and its
    error miss rare large values.
    """
    share = weights(torch.zeros_like(log_z) if sizes is None else sizes.to(log_z).log())
    mean = (log_z + share.log()).logsumexp(-1)
    off = share * ((log_z - mean).exp() - 1.0)
    # Where variances are 1/size, this is unbiased; for equal sizes it is the usual variance of a mean.
    return float(mean), float((off.square().sum() / (1.0 - share.square().sum())).sqrt()) if len(off) > 1 else math.nan


@dataclass(frozen=True)
class Result:
    """Weighted samples, diagnostics and costs. `sample` draws from the target; `best` is no posterior draw.

    samples (B, N, L), log_w and reward (B, N), log_z (B,); ess and mean_reward (T + 1, B), at steps without a reward
    the ESS of the last weights and NaN; ancestors (T + 1, B, N); `ramp` (T + 1, B), chosen by an adaptive ramp;
    `templates`, their number: the first B / templates populations belong to the first, and so on; `rows` counts the
    network rows computed, `saved` those reused. With `keep_states`, `states` (T + 1, K, N, L) and `states_log_w`
    (T + 1, K, N) are the particles and log-weights of the first K populations at every step, before any resampling
    there. `pooled_from` (I,) is set by `merge` and `pooled`: each population then is I independent ones of these sizes,
    side by side, and errors are over them.
    """

    samples: Tensor
    log_w: Tensor
    reward: Tensor | None
    ess: Tensor
    mean_reward: Tensor | None
    ancestors: Tensor
    rows: Mapping[str, int]
    saved: Mapping[str, int] = field(default_factory=dict[str, int])
    generator: Generator | None = None
    ramp: Tensor | None = None
    templates: int = 1
    states: Tensor | None = None
    states_log_w: Tensor | None = None
    pooled_from: Tensor | None = None

    @property
    def log_z(self) -> Tensor:
        """Estimates of the log-normaliser, one per population; exp of each is unbiased."""
        return log_mean_weight(self.log_w)

    @property
    def pooled_log_z(self) -> tuple[float, float]:
        """The log of the mean of exp(log_z) over populations, with its standard error (delta method). With several
        templates the normalisers differ: use `log_z`."""
        log_z, sizes = self._independent()
        return pooled(log_z.flatten(), sizes.repeat(self.templates))

    @property
    def scatter(self) -> float:
        """The standard deviation of log_z over populations of a template: how far off a single population is. Above 1,
        most populations miss a part of the target that a few have found. NaN for a single population."""
        log_z, _ = self._independent()
        return float(log_z.var(-1).mean().sqrt()) if log_z.shape[-1] > 1 else math.nan

    def _independent(self) -> tuple[Tensor, Tensor]:
        """log_z of the independent populations of each template, (templates, I), and their numbers of particles."""
        if self.pooled_from is None:
            log_z = self.log_z.view(self.templates, -1)
            return log_z, torch.full((log_z.shape[1],), self.log_w.shape[1], device=log_z.device)
        ends = [int(end) for end in self.pooled_from.cumsum(0)]
        parts = [self.log_w[:, start:end] for start, end in pairwise([0, *ends])]
        return torch.stack([log_mean_weight(part) for part in parts], -1), self.pooled_from

    @staticmethod
    def merge(results: Sequence[Result]) -> Result:
        """The results of several runs of one target, with any numbers of particles and populations, as one: all
        populations of a template become one, each counted by its size and its Z, so that Z is the mean over all
        particles and draws are from the target even if single populations have missed parts of it. `pooled_log_z` has
        the standard error over those populations. ESS and reward before the end are NaN. Every run needs a seed of its
        own."""
        from tokensteer.core.particles.merging import merged

        return merged(results)

    def pooled(self) -> Result:
        """All populations of a template as one: `Result.merge` of this result alone."""
        return Result.merge([self])

    @property
    def weights(self) -> Tensor:
        """Weights normalised within each population, (B, N)."""
        return weights(self.log_w)

    @property
    def alive(self) -> Tensor:
        """The populations with a particle of positive weight, (B,)."""
        return self.log_w.amax(-1) > -math.inf

    def sample(self, count: int = 1, generator: Generator | None = None) -> Tensor:
        """`count` draws from the target for each population, (B, count, L), with this generator or that of the run."""
        return self.pick(self.draw(count, generator))

    def draw(self, count: int = 1, generator: Generator | None = None) -> Tensor:
        """The particles that `sample` returns, by their numbers, (B, count)."""
        if not self.alive.all():
            dead = [k for k, alive in enumerate(self.alive) if not alive]
            raise ValueError(
                f"a population has died, {len(dead)} of {len(self.log_w)} ({_some(dead)}): all its particles "
                "have weight 0, so there is nothing to draw from. They violate a hard constraint, or the model has no "
                "mass where they are, as a product of models that share no token at a site. Use more particles, "
                "resample earlier, soften the constraint, or give every model full support; `result.alive` marks the "
                "other populations"
            )
        check_whole("Result.sample: count", count, 0)
        u = uniforms((len(self.log_w), count), self.log_w, self.generator if generator is None else generator)
        return inverse_cdf(self.weights, u)

    def best(self) -> Tensor:
        """The particle of highest reward of each population, (B, L); of highest weight if there is no reward."""
        score = self.log_w if self.reward is None else self._counted_reward(self.reward)
        return self.pick(score.argmax(-1, keepdim=True)).squeeze(1)

    def _counted_reward(self, reward: Tensor) -> Tensor:
        """The reward; -inf for particles of weight 0, which are no samples of the target."""
        return torch.where(self.log_w == -math.inf, -math.inf, reward)

    def pick(self, index: Tensor) -> Tensor:
        """The particles of these numbers (B, K), as `draw` gives them: (B, K, L)."""
        return self.samples.gather(1, index.unsqueeze(-1).expand(-1, -1, self.samples.shape[-1]))

    def lineages(self) -> Tensor:
        """The index at every time of the ancestor of each final particle, (T + 1, B, N)."""
        line = [torch.arange(self.log_w.shape[1], device=self.log_w.device).expand(self.log_w.shape)]
        for ancestors in self.ancestors.flip(0)[:-1]:
            line.append(ancestors.gather(-1, line[-1]))
        return torch.stack(line[::-1])

    def save(self, file: str | Path) -> None:
        """Write all but the generator to one safetensors file; `Result.load` reads it back."""
        tensors = {name: value.contiguous() for name, value in vars(self).items() if isinstance(value, Tensor)}
        counts = {"rows": self.rows, "saved": self.saved}
        counted = {f"{of}.{name}": torch.tensor(n) for of, rows in counts.items() for name, n in rows.items()}
        whole = {**tensors, **counted, "templates": torch.tensor(self.templates)}
        write_whole(Path(file), lambda place: save_file(whole, str(place)))

    @classmethod
    def load(cls, file: str | Path) -> Result:
        if Path(file).is_dir():
            raise IsADirectoryError(f"{file} is a folder, and no saved Result: open_run opens the folder of a run")
        try:
            stored = load_file(str(file))
        except SafetensorError as error:
            raise ValueError(f"{file} is no saved Result, nor any safetensors file: {error}") from error
        missing = {"samples", "log_w", "ess", "ancestors"} - stored.keys()
        if missing:
            raise ValueError(f"{file} is no saved Result: it lacks {', '.join(sorted(missing))}")
        for name, value in stored.items():
            if (name == "templates" or name.startswith(("rows.", "saved."))) and (value.dim() or value.is_complex()):
                raise ValueError(f"{file} is a damaged Result: its {name} is no number")
        rows, saved = (
            {name.removeprefix(of): int(n) for name, n in sorted(stored.items()) if name.startswith(of)}
            for of in ("rows.", "saved.")
        )
        tensors = cast("dict[str, Any]", {name: stored.get(name) for name in AXES})
        result = cls(**tensors, rows=rows, saved=saved, templates=int(stored.get("templates", 1)))
        fault = _fault(result)
        if fault is not None:
            raise ValueError(f"{file} is a damaged Result: {fault}")
        return result

    def to_arviz(self, draws: int | None = None) -> object:
        """ArviZ's InferenceData: a chain for each population, of `draws` by weight (N unless given), with the reward of
        each draw as a statistic. Needs arviz."""
        from tokensteer.core.particles.to_arviz import to_arviz

        return to_arviz(self, draws)

    def html(self, decode: Callable[[Tensor], Sequence[str]] | None = None) -> str:
        """A picture for notebooks; `decode` makes texts of ids (P, L)."""
        from tokensteer.core.particles.result_html import result_html

        return result_html(self, decode)

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        populations, particles, length = self.samples.shape
        log_z, sizes = self._independent()
        known = self.ess[~self.ess.isnan()]  # before the end, that of pooled populations is not
        lines = [
            f"Result: {populations} × {particles} particles of {length} tokens, {len(self.ess) - 1} steps"
            + ("" if self.pooled_from is None else f", pooled from {len(self.pooled_from)} populations"),
            f"  log Z    {_some([_with_error(*pooled(part, sizes)) for part in log_z])}"
            + ("" if math.isnan(self.scatter) else f"; one population ± {self.scatter:.2f}"),
            f"  ESS/N    {float(self.ess[-1].mean()) / particles:.3f} at the end, "
            f"{float(known.min()) / particles:.3f} at worst",
        ]
        if not self.alive.all():
            lines.append(f"  died     {int((~self.alive).sum())} of {populations} populations")
        if self.reward is not None:
            counted = torch.where(self.weights > 0, self.reward, 0.0)[self.alive]
            posterior = (self.weights[self.alive] * counted).sum(-1).mean()
            best = self._counted_reward(self.reward).max()
            lines.append(f"  reward   {float(posterior):.4f} weighted mean, {float(best):.4f} best")
        saved = {name: f" ({n:,} saved)" for name, n in self.saved.items() if n}
        lines.append("  rows     " + ", ".join(f"{n:,} {name}{saved.get(name, '')}" for name, n in self.rows.items()))
        return "\n".join(lines)


def _fault(result: Result) -> str | None:
    """What is wrong with a stored result, None if nothing is."""
    populations, particles, length = result.samples.shape if result.samples.dim() == 3 else (0, 0, 0)
    sizes = {"B": populations, "N": particles, "L": length, "T": len(result.ess) if result.ess.dim() else 0}
    states = result.states
    if (states is None) != (result.states_log_w is None):
        return "it has only one of states and states_log_w"
    sizes["K"] = min(populations, states.shape[1]) if states is not None and states.dim() == 4 else 0
    parts = result.pooled_from
    sizes["I"] = 0 if parts is None or parts.dim() != 1 else len(parts)
    for name, axes in AXES.items():
        tensor = cast("Tensor | None", getattr(result, name))
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(sizes[axis] for axis in axes) or not tensor.numel():
            return f"its {name} has the shape {tuple(tensor.shape)}, which does not fit the others"
        if tensor.is_complex() or tensor.is_floating_point() == (name in WHOLE):
            return f"its {name} is of type {tensor.dtype}"
    if not bool((result.log_w < math.inf).all()):
        return "its log_w has NaN or infinity"
    if bool((result.samples < 0).any()) or not bool(((result.ancestors >= 0) & (result.ancestors < particles)).all()):
        return "it has samples or ancestors that do not exist"
    if states is not None and (
        bool((states < 0).any()) or not bool((states[-1] == result.samples[: sizes["K"]]).all())
    ):
        return "its states do not end in its samples"
    if parts is not None and (int(parts.min()) < 1 or int(parts.sum()) != particles):
        return f"its pooled_from does not share {particles} particles"
    if result.templates < 1 or populations % result.templates:
        return f"its templates, {result.templates}, do not share {populations} populations"
    return "it has counts below 0" if min([0, *result.rows.values(), *result.saved.values()]) < 0 else None


def narrowed(tokens: Tensor) -> Tensor:
    """A copy of tokens in the smallest type that holds them: uint8, int16 or int32."""
    top = int(tokens.max())
    return tokens.to(next(kind for kind in (torch.uint8, torch.int16, torch.int32) if top <= torch.iinfo(kind).max))


def _some(things: Sequence[int | str]) -> str:
    return ", ".join(str(thing) for thing in things[:8]) + (", ..." if len(things) > 8 else "")


def _with_error(value: float, error: float) -> str:
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"


def with_rows(result: Result, before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Result:
    """The result with the network rows computed and saved since `before`, by name as in a stored result."""
    since = {name: (n - before[name][0], saved - before[name][1]) for name, (n, saved) in sorted(after.items())}
    rows, saved = ({name: counts[k] for name, counts in since.items()} for k in (0, 1))
    return replace(result, rows=rows, saved={name: n for name, n in saved.items() if n})
