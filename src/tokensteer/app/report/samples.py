"""Samples as images, heat maps, letters, texts or numbers. Draws and the best by reward are shown apart."""

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
from tokensteer.app.report.intervals import interval
from tokensteer.app.report.lists import floats, ints
from tokensteer.app.report.markup import element, text
from tokensteer.app.runs.answers import some
from tokensteer.app.words.numbers import loaded, number, plural, with_error
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.looks import HeatMap, Image, Letters, Look, Sheet
from tokensteer.tasks.common.png import shaded_png
from tokensteer.tasks.common.sheets import read_sheet, sheet_png
from tokensteer.tasks.common.task import Setup

SHOWN = 16  # how many samples of each kind are shown
TEXTS, BEST_TEXTS = 6, 3  # how many texts of each kind are shown
SPELT = 800  # how many letters of draws a card has
TOKENS = 96  # how many tokens of a sequence are shown as text
HEAT = (0x1F, 0x78, 0xC1)  # the colour of a heat map, visible on white and on black; its opacity shows the probability


def draws(answer: Result, count: int = SHOWN) -> Tensor:
    """Up to `count` draws (K, L), as many from each population. Seeded: they are the same every time."""
    if not len(answer.samples):
        return answer.samples[:, 0]
    each = min(answer.samples.shape[1], max(1, min(8, count) // len(answer.samples)))
    return replace(answer, generator=Generator().manual_seed(0)).sample(each).flatten(0, 1)[:count]


def best(result: Result, count: int = SHOWN) -> tuple[Tensor, list[float]]:
    """The best by reward of up to `count` living populations, (K, L), and their rewards, NaN without a reward."""
    alive = result.alive.nonzero().squeeze(-1)[:count]
    kept = some(result, alive)
    if kept.reward is None:
        return kept.best(), [math.nan] * len(alive)
    counted = torch.where(kept.log_w == -math.inf, -math.inf, kept.reward)
    return kept.best(), floats(counted.amax(-1))


def sheet(row: Row, look: Look | None, name: str, colour: int) -> str:
    """A card with draws of a row and the best by reward of its populations."""
    if row.texts:
        count = len(row.answer.samples)
        some = torch.linspace(0, count - 1, min(TEXTS, count)).long()  # populations from all over the row
        drawn = _text_table(drawn_texts(row, some, max(1, TEXTS // max(1, len(some)))))
        top = _text_table(best_texts(row, some[:BEST_TEXTS]))
    elif isinstance(look, Sheet):
        drawn, top = colour_sheet(row, look, name), ""  # the file has draws, and not the best by reward
    else:
        length = row.result.samples.shape[-1]
        show, kind = shown_as(look, length)
        most = SHOWN if kind == "grid" else min(SHOWN, max(2, SPELT // length))
        found = enumerate(map(ints, draws(row.answer, most)), 1)
        drawn = element("div", f'class="{kind}"', *(show(x, f"draw {k} from the posterior, {name}") for k, x in found))
        highest: list[str] = []
        for k, (x, reward) in enumerate(zip(*best(row.result, most if kind == "grid" else most // 2), strict=True), 1):
            words = f"best of population {k} by reward, {name}" + ("" if math.isnan(reward) else f": {number(reward)}")
            highest.append(show(ints(x), words))
        top = element("div", f'class="{kind} best"', *highest)
    steered = row.result.reward is not None
    notes = [f"Prompt {entry['id']} failed: {entry['error']}" for entry in row.failed]
    if dead := row.populations - len(_alive(row)):
        notes.append(f"{plural(dead, 'population')} died: no particle kept any weight.")
    kind = "Draws" if not steered else "Draws from the posterior" if row.weighted else "Draws, unweighted"
    return element(
        "article",
        f'class="card told" tabindex="0" aria-label="{escape(name)}"' if row.texts else 'class="card"',
        element("h3", "", swatch(colour), escape(name)),
        *(text("p", words, 'class="note"') for words in notes),
        text("h4", kind) + drawn,
        text("h4", f"Best of {row.particles} by reward") + top if steered and top else "",
    )


def few(row: Row, look: Look | None, name: str, count: int) -> str:
    """Some draws of a row, without their numbers."""
    if row.texts:
        places = torch.arange(min(3, len(row.answer.samples)))
        return element("ul", "", *(text("li", entry["text"]) for entry in drawn_texts(row, places, 1)))
    if isinstance(look, HeatMap) and row.result.samples.shape[-1] == 2:
        found = look.histogram(row.answer.samples.flatten(0, 1), row.answer.weights.double().flatten())
        return _picture(found, float(found.max()), name)
    if isinstance(look, Sheet):
        return colour_sheet(row, look, name, count)
    show, kind = shown_as(look, row.result.samples.shape[-1])
    some = map(ints, draws(row.answer, count if kind == "grid" else 3))
    return element("div", f'class="{kind}"', *(show(x, f"draw {k}, {name}") for k, x in enumerate(some, 1)))


def colour_sheet(row: Row, look: Sheet, name: str, count: int | None = None) -> str:
    """The draws of a row's picture, or `count` from all over it; "" if there is no picture."""
    if row.picture is None or not row.picture.is_file():
        return ""
    images, columns = read_sheet(row.picture, look.side)
    if count is not None and count < len(images):
        images, columns = images[torch.linspace(0, len(images) - 1, count).long()], 8
    columns = min(columns, len(images))
    source = "data:image/png;base64," + base64.b64encode(sheet_png(images, columns)).decode()
    width, height = ((look.side + 1) * number + 1 for number in (columns, -(-len(images) // columns)))
    alt = escape(f"{len(images)} draws of {name}")
    size = f'width="{width}" height="{height}" style="max-width:{4 * width}px"'
    return f'<img class="sheet" src="{source}" alt="{alt}" {size}>'


def _alive(row: Row) -> Tensor:
    """The indices of the living populations."""
    return row.result.alive.nonzero().squeeze(-1)


# ---- tokens

Show = Callable[[Sequence[int], str], str]
"""A function from the tokens of a sample, and words that describe it, to markup."""


def shown_as(look: Look | None, length: int) -> tuple[Show, str]:
    """How a sample is shown, and whether samples make a grid or a list."""
    match look:
        case Image(side) if side * side == length:
            return lambda tokens, words: image(tokens, side, words), "grid"
        case Letters():
            return lambda tokens, words: letters(tokens, look, words), "list"
        case _:
            return sequence, "list"


def image(tokens: Sequence[int], side: int, words: str) -> str:
    """Pixels, drawn run by run along each line; masked ones are grey."""
    paths = {"ink": "", "mask": ""}
    for y in range(side):
        x = 0
        for value, group in groupby(tokens[y * side : (y + 1) * side]):
            length = len(list(group))
            if value in (1, 2):
                paths["ink" if value == 1 else "mask"] += f"M{x} {y}h{length}v1h-{length}z"
            x += length
    drawn = "".join(f'<path class="{kind}" d="{d}"/>' for kind, d in paths.items() if d)
    box = f'class="glyph" viewBox="0 0 {side} {side}" role="img" aria-label="{escape(words)}"'
    return element("svg", f'{box} shape-rendering="crispEdges"', text("title", words), drawn)


def sequence(tokens: Sequence[int], words: str) -> str:
    """Token ids as text, the first TOKENS of them."""
    more = f" … {len(tokens) - TOKENS} more" if len(tokens) > TOKENS else ""
    return text("code", " ".join(str(token) for token in tokens[:TOKENS]) + more, f'title="{escape(words)}"')


def letters(tokens: Sequence[int], look: Letters, words: str) -> str:
    """Letters in the colours of the style sheet; masked ones are dots. Marks have their names."""
    spelt, at, shown = look.spelt(tokens), 0, ""
    for mark in look.marks(spelt):
        shown += _coloured(spelt[at : mark.start])
        shown += element("mark", f'title="{escape(mark.name)}"', _coloured(spelt[mark.start : mark.stop]))
        at = mark.stop
    return element("code", f'class="letters" title="{escape(words)}"', shown + _coloured(spelt[at:]))


def _coloured(spelt: str) -> str:
    runs = ((letter, len(list(group))) for letter, group in groupby(spelt))
    return "".join(f'<i class="{letter}">{letter * count}</i>' for letter, count in runs)


# ---- texts


def drawn_texts(row: Row, some: Tensor, each: int) -> list[Mapping[str, Any]]:
    """Up to `each` draws from `some` of the living populations, as their entries in the file of texts. Seeded: they
    are the same every time."""
    if not len(some):
        return []
    answer = replace(row.answer, samples=row.answer.samples[some], log_w=row.answer.log_w[some])
    each = min(each, answer.samples.shape[1])
    drawn = replace(answer, generator=Generator().manual_seed(0)).sample(each)
    particles = row.result.samples[_alive(row)[some]]
    twin = (particles.unsqueeze(1) == drawn.unsqueeze(2)).all(-1).int().argmax(-1)
    return [texts[k] for texts, chosen in zip(_populations(row, some), twin, strict=True) for k in ints(chosen)]


def _populations(row: Row, some: Tensor) -> list[Sequence[Mapping[str, Any]]]:
    """The texts of `some` of the living populations."""
    particles = row.result.samples.shape[1]
    return [row.texts[b * particles : (b + 1) * particles] for b in ints(_alive(row)[some])]


def best_texts(row: Row, some: Tensor) -> list[Mapping[str, Any]]:
    """The text of the highest reward of each of `some` of the living populations."""
    return [max(texts, key=_text_reward) for texts in _populations(row, some)]


def _text_reward(entry: Mapping[str, Any]) -> float:
    return -math.inf if entry["reward"] is None or entry["log_w"] is None else float(entry["reward"])


def _text_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Texts, each with its reward, the judge's mark and its weight."""
    names = ("reward", "judge", "weight")
    head = element("tr", "", *(text("th", name) for name in ("text", *names)))
    rows: list[str] = []
    for entry in entries:
        numbers = (text("td", number(loaded(entry[name])), 'class="number"') for name in names)
        rows.append(element("tr", "", text("td", entry["text"], f'title="{escape(entry["prompt"])}"'), *numbers))
    return element("table", 'class="texts"', element("thead", "", head), element("tbody", "", *rows))


# ---- heat maps


def heat_maps(look: HeatMap, rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> str:
    """The exact targets and the distribution that each row found, on one scale."""
    targets = {setup: look.target(setup) for setup in dict.fromkeys(map(_setup, rows))}
    top = max(float(target.max()) for target in targets.values())
    cards: list[str] = []
    for setup, target in targets.items():
        words = f"{setup.steps} steps" + (f", remask {setup.remask}" if setup.remask else "")
        words += f", kl {setup.kl}" if setup.kl else ""
        cards.append(_heat_card("exact target", "", words if len(targets) > 1 else "by enumeration", target, top))
    for row in rows:
        found = look.histogram(row.answer.samples.flatten(0, 1), row.answer.weights.double().flatten())
        note = f"EMD {with_error(interval(row, 'emd'))}" if "emd" in row.metrics else ""
        cards.append(_heat_card(name(row), swatch(colours[row.method]), note, found, top))
    return element("div", 'class="heats"', *cards)


def _setup(row: Row) -> Setup:
    """Everything that the target of a row depends on, with the shipped weights."""
    kl, remask = row.job.get("kl"), row.job.get("remask")
    return Setup(len(row.result.ess) - 1, kl=float(kl) if kl else None, remask=float(remask or 0.0))


def _heat_card(name: str, mark: str, note: str, pmf: Tensor, top: float) -> str:
    caption = element("figcaption", "", mark, escape(name), text("small", note))
    return element("figure", 'class="heat one"', caption, _picture(pmf, top, name))


def _picture(pmf: Tensor, top: float, name: str) -> str:
    picture = shaded_png((pmf.T.flip(0) / top).clamp(0, 1).sqrt(), HEAT)  # the square root makes small values visible
    source = "data:image/png;base64," + base64.b64encode(picture).decode()
    alt = escape(f"heat map of {name}, x to the right and y upwards")
    return f'<img src="{source}" alt="{alt}" width="64" height="64">'
