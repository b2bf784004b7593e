"""A `Result` as HTML, for notebooks: what `repr` says, some draws, the ESS on the way, and who descends from whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from tokensteer.core.particles.result import Result

DRAWS, TOKENS, COLUMNS, LINES = 4, 48, 60, 64
WIDTH, HEIGHT = 480, 120


def result_html(result: Result, decode: Callable[[Tensor], Sequence[str]] | None = None) -> str:
    """One offline fragment without scripts. `decode` makes texts of ids (P, L); all texts are escaped."""
    parts = [
        f'<pre style="overflow-x:auto">{escape(repr(result))}</pre>',
        _draws(result, decode),
        _trace(result),
        _genealogy(result),
    ]
    return f"<div>{''.join(parts)}</div>"


def _draws(result: Result, decode: Callable[[Tensor], Sequence[str]] | None) -> str:
    if not bool(result.alive[0]):
        return "<p>The first population has died: it has no draws.</p>"
    seeded = Generator(result.log_w.device).manual_seed(0)  # showing a result must not change its later draws
    index = torch.multinomial(result.weights[0].float(), DRAWS, replacement=True, generator=seeded)
    ids = result.samples[0, index]
    texts = [_ids(row) for row in ids] if decode is None else [str(text) for text in decode(ids)]
    items = "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
    return f"<p>{DRAWS} draws from the first population, by weight</p><ol>{items}</ol>"


def _ids(row: Tensor) -> str:
    few = " ".join(str(int(token)) for token in row[:TOKENS])
    return few + (f" … ({len(row)} tokens)" if len(row) > TOKENS else "")


def _trace(result: Result) -> str:
    share = [float(step) for step in (result.ess / result.log_w.shape[1]).mean(1)]
    known = [(x, y) for x, y in zip(_across(len(share)), share, strict=True) if not math.isnan(y)]
    points = " ".join(f"{x:.1f},{(1.0 - y) * HEIGHT:.1f}" for x, y in known)
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return _picture("ESS/N from the first step to the last, mean over populations", line)


def _genealogy(result: Result) -> str:
    """The lines of the final particles of the first population, back to the start."""
    lines, weights = result.lineages()[:, 0].cpu(), result.weights[0].cpu()
    steps, particles = lines.shape
    columns = sorted({round(k * (steps - 1) / (COLUMNS - 1)) for k in range(COLUMNS)})
    kept = weights.argsort(descending=True)[:LINES]
    drawn = list[str]()
    for particle in map(int, kept):
        height = [(int(lines[step, particle]) + 0.5) / particles * HEIGHT for step in columns]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(_across(len(columns)), height, strict=True))
        opacity = 0.15 + 0.85 * float(weights[particle] / weights.max())
        drawn.append(f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-opacity="{opacity:.2f}"/>')
    words = "" if particles <= LINES else f", the {LINES} heaviest of {particles}"
    return _picture(
        f"Ancestors of the particles of the first population{words}, darker for more weight", "".join(drawn)
    )


def _across(count: int) -> list[float]:
    return [WIDTH * k / max(1, count - 1) for k in range(count)]


def _picture(title: str, content: str) -> str:
    size = f'viewBox="-4 -4 {WIDTH + 8} {HEIGHT + 8}" width="{WIDTH}" style="max-width:100%"'
    drawing = f'<svg {size} role="img" aria-label="{title}">{content}</svg>'
    return f"<figure>{drawing}<figcaption>{title}</figcaption></figure>"
