"""What came out: images, heat maps, letters or numbers. Draws from the target and the best by reward stay apart."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from typing import Any

import torch
from torch import Generator, Tensor

from tokensteer.app.report.charts import swatch
from tokensteer.app.report.folder import Row
from tokensteer.app.report.lists import floats, ints
from tokensteer.app.report.markup import element, text
from tokensteer.app.report.words import plural
from tokensteer.app.runs.answers import some
from tokensteer.app.words.numbers import number, spread
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.looks import HeatMap, Image, Letters, Look
from tokensteer.tasks.common.png import shaded_png
from tokensteer.tasks.common.task import Setup

SHOWN = 16
"""How many samples of each kind are shown."""
TOKENS = 96
"""How many tokens of a sequence are shown as text."""
HEAT = (0x1F, 0x78, 0xC1)
"""The colour of a heat map, seen well on white and on black; how much of it is its opacity."""


def draws(answer: Result, count: int = SHOWN) -> Tensor:
    """Up to `count` draws (K, L), as many from each population; always the same ones."""
    if not len(answer.samples):
        return answer.samples[:, 0]
    each = min(answer.samples.shape[1], max(1, 8 // len(answer.samples)))
    return replace(answer, generator=Generator().manual_seed(0)).sample(each).flatten(0, 1)[:count]


def best(result: Result, count: int = SHOWN) -> tuple[Tensor, list[float]]:
    """The best by reward of up to `count` living populations (K, L), and its reward, or NaN."""
    alive = result.alive.nonzero().squeeze(-1)[:count]
    kept = some(result, alive)
    if kept.reward is None:
        return kept.best(), [math.nan] * len(alive)
    counted = torch.where(kept.log_w == -math.inf, -math.inf, kept.reward)
    return kept.best(), floats(counted.amax(-1))


Show = Callable[[Sequence[int], str], str]
"""A sample as markup, from its tokens and words that describe it."""


def image(side: int) -> Show:
    """Ink is drawn run by run along each line; what is still masked is grey."""

    def show(tokens: Sequence[int], words: str) -> str:
        ink, mask = (_runs(tokens, side, token) for token in (1, 2))
        parts = "".join(f'<path class="{kind}" d="{d}"/>' for kind, d in (("ink", ink), ("mask", mask)) if d)
        return element(
            "svg",
            f'class="glyph" viewBox="0 0 {side} {side}" role="img" aria-label="{escape(words)}" '
            'shape-rendering="crispEdges"',
            f"<title>{escape(words)}</title>",
            parts,
        )

    return show


def _runs(tokens: Sequence[int], side: int, token: int) -> str:
    path: list[str] = []
    for y in range(side):
        x = 0
        for value, group in groupby(tokens[y * side : (y + 1) * side]):
            length = len(list(group))
            if value == token:
                path.append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    return "".join(path)


def sequence(tokens: Sequence[int], words: str) -> str:
    """Tokens as text, the first of them if there are many."""
    more = f" … {len(tokens) - TOKENS} more" if len(tokens) > TOKENS else ""
    return text("code", " ".join(str(token) for token in tokens[:TOKENS]) + more, f'title="{escape(words)}"')


def letters(alphabet: str) -> Show:
    """Letters in colours that the style sheet gives them; what is still masked is a dot."""

    def show(tokens: Sequence[int], words: str) -> str:
        runs = (((alphabet + ".")[min(token, len(alphabet))], len(list(group))) for token, group in groupby(tokens))
        coloured = "".join(f'<i class="{letter}">{letter * count}</i>' for letter, count in runs)
        return element("code", f'class="letters" title="{escape(words)}"', coloured)

    return show


def shown_as(look: Look | None, length: int) -> tuple[Show, str]:
    """How a sample is shown, and whether samples make a grid or a list."""
    match look:
        case Image(side) if side * side == length:
            return image(side), "grid"
        case Letters(alphabet):
            return letters(alphabet), "list"
        case _:
            return sequence, "list"


# ---- texts


def written(row: Row, name: str, colour: int) -> str:
    """Texts of a row with their numbers: draws, and the best by reward, of populations from all over it."""
    count = len(row.answer.samples)
    some = torch.linspace(0, count - 1, min(SHOWN, count)).long()
    steered = row.result.reward is not None
    failed = [text("p", f"Prompt {entry['id']} failed: {entry['error']}", 'class="note"') for entry in row.failed]
    return element(
        "article",
        'class="card told"',
        element("h3", "", swatch(colour), escape(name)),
        *failed,
        dead(row),
        text("h4", kind_of_draws(row)),
        _listed(drawn_texts(row, some, max(1, 8 // max(1, len(some))))),
        text("h4", f"Best of {row.particles} by reward")
        + _listed([max(texts, key=_reward) for texts in _populations(row, some)])
        if steered
        else "",
    )


def drawn_texts(row: Row, some: Tensor, each: int) -> list[Mapping[str, Any]]:
    """Up to `each` draws from `some` of the living populations, as they were written down; always the same ones."""
    answer = replace(row.answer, samples=row.answer.samples[some], log_w=row.answer.log_w[some])
    if not len(some):
        return []
    each = min(each, answer.samples.shape[1])
    drawn = replace(answer, generator=Generator().manual_seed(0)).sample(each)
    all_there_are = row.result.samples[_alive(row)[some]]
    twin = (all_there_are.unsqueeze(1) == drawn.unsqueeze(2)).all(-1).int().argmax(-1)
    told = zip(_populations(row, some), twin, strict=True)
    return [texts[k] for texts, chosen in told for k in ints(chosen)]


def _alive(row: Row) -> Tensor:
    return row.result.alive.nonzero().squeeze(-1)


def dead(row: Row) -> str:
    """A note on the populations that died, if any did."""
    count = row.populations - len(_alive(row))
    said = f"{plural(count, 'population')} died: no particle kept any weight."
    return text("p", said, 'class="note"') if count else ""


def _populations(row: Row, some: Tensor) -> list[Sequence[Mapping[str, Any]]]:
    """The texts of `some` of the living populations."""
    particles = row.result.samples.shape[1]
    return [row.texts[b * particles : (b + 1) * particles] for b in ints(_alive(row)[some])]


def _reward(entry: Mapping[str, Any]) -> float:
    return -math.inf if entry["reward"] is None or entry["log_w"] is None else float(entry["reward"])


def _listed(entries: Sequence[Mapping[str, Any]]) -> str:
    """A table of texts, each with its reward, what the judge gives it, and its weight."""
    names = ("reward", "judge", "weight")
    head = element("tr", "", text("th", "text"), *(text("th", name) for name in names))
    rows = [
        element(
            "tr",
            "",
            text("td", entry["text"], f'title="{escape(entry["prompt"])}"'),
            *(text("td", number(entry[name]) if entry[name] is not None else "–", 'class="number"') for name in names),
        )
        for entry in entries
    ]
    return element("table", 'class="texts"', element("thead", "", head), element("tbody", "", *rows))


def kind_of_draws(row: Row) -> str:
    steered = row.result.reward is not None
    return "Draws from the posterior" if steered and row.weighted else "Draws, unweighted" if steered else "Draws"


def sheet(row: Row, look: Look | None, name: str, colour: int) -> str:
    """Both kinds of samples of a row."""
    if row.texts:
        return written(row, name, colour)
    result = row.result
    show, kind = shown_as(look, result.samples.shape[-1])
    drawn = draws(row.answer)
    top, rewards = best(result)
    posterior = [show(x, f"draw {k + 1} from the posterior, {name}") for k, x in enumerate(map(ints, drawn))]
    highest = [
        show(x, f"best of population {k + 1} by reward, {name}" + ("" if math.isnan(r) else f": {number(r)}"))
        for k, (x, r) in enumerate(zip(map(ints, top), rewards, strict=True))
    ]
    steered = result.reward is not None
    return element(
        "article",
        'class="card"',
        element("h3", "", swatch(colour), escape(name)),
        dead(row),
        text("h4", kind_of_draws(row)),
        element("div", f'class="{kind}"', *posterior),
        text("h4", f"Best of {row.particles} by reward") + element("div", f'class="{kind} best"', *highest)
        if steered
        else "",
    )


# ---- heat maps


def heat_maps(look: HeatMap, rows: Sequence[Row], names: Mapping[int, str], colours: Mapping[int, int]) -> str:
    """The exact targets and what each row made of it, on one scale. `names` and `colours` go by place in `rows`."""
    settings = {_setting(row): row for row in reversed(rows)}
    targets = {setting: look.target(_setup(row)) for setting, row in reversed(settings.items())}
    laws = [look.histogram(r.answer.samples.flatten(0, 1), r.answer.weights.double().flatten()) for r in rows]
    top = max(float(target.max()) for target in targets.values())
    cards = [
        _heat_card("exact target", "", setting if len(targets) > 1 else "by enumeration", target, top)
        for setting, target in targets.items()
    ]
    for k, (row, law) in enumerate(zip(rows, laws, strict=True)):
        mean, error = spread(row.metrics["emd"]) if "emd" in row.metrics else ("", "")
        note = f"EMD {mean}{error and f' ± {error}'}" if mean else ""
        cards.append(_heat_card(names[k], swatch(colours[k]), note, law, top))
    return element("div", 'class="heats"', *cards)


def _setting(row: Row) -> str:
    """All that the target depends on."""
    kl, remask, steps = row.job.get("kl"), row.job.get("remask"), len(row.result.ess) - 1
    return ", ".join([f"{steps} steps", *([f"remask {remask}"] if remask else []), *([f"kl {kl}"] if kl else [])])


def _setup(row: Row) -> Setup:
    """The setup of a row, with the shipped weights."""
    kl, remask = row.job.get("kl"), row.job.get("remask")
    return Setup(len(row.result.ess) - 1, kl=float(kl) if kl else None, remask=float(remask or 0.0))


def _heat_card(name: str, mark: str, note: str, law: Tensor, top: float) -> str:
    picture = shaded_png((law.T.flip(0) / top).clamp(0, 1).sqrt(), HEAT)  # the square root brings out what is faint
    source = "data:image/png;base64," + base64.b64encode(picture).decode()
    words = f"heat map of {name}, x to the right and y upwards"
    return element(
        "figure",
        'class="heat"',
        element("figcaption", "", mark, escape(name), text("small", note)),
        f'<img src="{source}" alt="{escape(words)}" width="64" height="64">',
    )
