"""A few draws of a run in a terminal: pictures in half blocks, coloured letters, texts with their prompts dimmed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from rich.text import Text
from torch import Generator, Tensor

from tokensteer import files
from tokensteer.app.runs.folder import Run
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.runs.rows import answer_of
from tokensteer.app.words.numbers import number, plural
from tokensteer.core.particles.result import Result
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.looks import HeatMap, Image, Letters, Sheet
from tokensteer.tasks.common.sheets import read_sheet

SHOWN = 3
BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
COLOURS = {"A": "green", "C": "blue", "G": "yellow", "T": "red"}
GAP = "   "
MASKS = re.compile(r"\s*(?:(?:\[MASK\]|_{3,}\d*)\s*)+")
"""What stands for open places in a prompt."""


def draws(run: Run, width: int, colour: bool = True) -> list[Text]:
    """Lines with up to SHOWN draws of one row of each task: of the last method that is weighted, or of the last one.
    Tasks whose samples are points of a plane have none."""
    found: list[Text] = []
    for task in dict.fromkeys(row["task"] for row in run.rows):
        rows = [k for k, row in enumerate(run.rows) if row["task"] == task]
        weighted = [k for k in rows if run.rows[k].get("answer") == "weighted" and run.rows[k]["metrics"]]
        lines = _of_row(run, (weighted or rows)[-1], width, colour)
        found += [*lines, Text()] if lines else []
    return found


def _of_row(run: Run, index: int, width: int, colour: bool) -> list[Text]:
    row, look = run.rows[index], TASKS[run.rows[index]["task"]].look
    if isinstance(look, HeatMap):
        return []
    if isinstance(look, Sheet):
        return _of_sheet(run, index, look, width if colour else None)
    result = run.result(index)
    answer, kept = answer_of(recipe_of(row["job"]["method"]), result)
    if not len(answer.samples):
        return []
    drawn, populations = _drawn(answer)
    populations = kept.nonzero().squeeze(-1)[populations]
    title = Text(f"{plural(len(drawn), 'draw')} of {row['method']}, N = {row['particles']}:")
    match look:
        case Image(side):
            return [title, *pictures([x.view(side, side) == 1 for x in drawn], width)]
        case Letters():
            return [title, *(part for x in drawn for part in (letters(_ints(x), look), Text()))][:-1]
        case _:
            lines = [entry for file in run.written(index) for entry in _entries(file.suffix, files.read_lines(file))]
            texts = [entry for entry in lines if "error" not in entry]  # lines of prompts that failed
            particles = (result.samples[populations] == drawn.unsqueeze(1)).all(-1).int().argmax(-1)
            places = _ints(populations * result.samples.shape[1] + particles)
            if len(texts) != result.log_w.numel():
                return []
            return [title, *(part for place in places for part in (prompted(texts[place]), Text()))][:-1]


def _drawn(answer: Result) -> tuple[Tensor, Tensor]:
    """Up to SHOWN draws (K, L) from populations all over the answer, and the populations (K,). They are the same every
    time. A sample that was drawn from a population twice is shown once."""
    count = len(answer.samples)
    places = torch.linspace(0, count - 1, min(SHOWN, count)).long()
    each = -(-SHOWN // len(places))
    sampled = replace(answer, samples=answer.samples[places], log_w=answer.log_w[places])
    drawn = replace(sampled, generator=Generator().manual_seed(0)).sample(each)
    found, of = drawn.flatten(0, 1)[:SHOWN], places.repeat_interleave(each)[:SHOWN]
    same = (found.unsqueeze(0) == found.unsqueeze(1)).flatten(2).all(-1) & (of.unsqueeze(0) == of.unsqueeze(1))
    first = ~same.tril(-1).any(1)
    return found[first], of[first]


def _of_sheet(run: Run, index: int, look: Sheet, width: int | None) -> list[Text]:
    """Images from all over the picture of a row, or without a width, where there are no colours, its file."""
    if "picture" not in run.rows[index]:
        return []
    if width is None:
        return [Text(f"Draws: {run.picture(index)}")]
    images, _ = read_sheet(run.picture(index), look.side)
    some = images[torch.linspace(0, len(images) - 1, min(SHOWN, len(images))).long()]
    row = run.rows[index]
    title = Text(f"{plural(len(some), 'draw')} of {row['method']}, N = {row['particles']}:")
    fit = max(1, (width + len(GAP)) // (look.side + len(GAP)))
    lines: list[Text] = []
    for first in range(0, len(some), fit):
        beside = zip(*map(coloured, some[first : first + fit]), strict=True)
        lines += [*([Text()] if first else []), *(Text(GAP).join(line) for line in beside)]
    return [title, *lines]


def coloured(image: Tensor) -> list[Text]:
    """An image (3, H, W) of bytes with H even: a half block has the colour of one pixel above that of another."""
    lines: list[Text] = []
    pixels = cast("list[list[list[int]]]", image.permute(1, 2, 0).tolist())  # pyright: ignore[reportUnknownMemberType]
    for above, below in zip(pixels[::2], pixels[1::2], strict=True):
        line = Text()
        for top, bottom in zip(above, below, strict=True):
            line.append("▀", f"rgb({','.join(map(str, top))}) on rgb({','.join(map(str, bottom))})")
        lines.append(line)
    return lines


def pictures(inked: Sequence[Tensor], width: int) -> list[Text]:
    """Pictures (H, W) of booleans beside each other, two pixels in a character. Edges that are blank in all of them are
    cut off, and as many stand in a line as fit."""
    ink = torch.stack(list(inked)).any(0)
    rows, columns = (ink.any(axis).nonzero().squeeze(-1) for axis in (1, 0))
    if not len(rows):
        return [Text("(blank)")]
    cut = [x[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1] for x in inked]
    fit = max(1, (width + len(GAP)) // (cut[0].shape[1] + len(GAP)))
    found: list[Text] = []
    for first in range(0, len(cut), fit):
        lines = zip(*map(_half_blocks, cut[first : first + fit]), strict=True)
        found += [*([Text()] if first else []), *(Text(GAP.join(line).rstrip()) for line in lines)]
    return found


def _half_blocks(x: Tensor) -> list[str]:
    even = torch.cat([x, x.new_zeros(len(x) % 2, x.shape[1])])
    pixels = cast("list[list[bool]]", even.tolist())  # pyright: ignore[reportUnknownMemberType]
    pairs = zip(pixels[::2], pixels[1::2], strict=True)
    return ["".join(BLOCKS[pair] for pair in zip(above, below, strict=True)) for above, below in pairs]


def letters(ids: Sequence[int], look: Letters) -> Text:
    """Letters in their colours; ids beyond the alphabet are dots. Marks are reversed, and named behind."""
    spelt = look.spelt(ids)
    found = Text(overflow="fold")
    for letter in spelt:
        found.append(letter, COLOURS.get(letter))
    marks = look.marks(spelt)
    for mark in marks:
        found.stylize("reverse", mark.start, mark.stop)
    names = ", ".join(dict.fromkeys(mark.name for mark in marks))
    return found.append(f"  ({names})", "italic dim") if names else found


def prompted(entry: Mapping[str, Any]) -> Text:
    """A text with the parts that were its prompt dimmed, and its reward."""
    words = _printable(str(entry.get("text", "")))
    found, at = Text(words), 0
    for part in MASKS.split(_printable(str(entry.get("prompt", "")))):
        start = words.lower().find(part.strip().lower(), at) if part.strip() else -1
        if start >= 0:
            at = start + len(part.strip())
            found.stylize("dim", start, at)
    reward = entry.get("reward")
    return found if reward is None else found.append(f"  (reward {number(float(reward))})", "italic dim")


def _printable(text: str) -> str:
    """A text without control characters, which could move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)


def _entries(suffix: str, lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    if suffix == ".jsonl":
        yield from (cast("dict[str, Any]", json.loads(line)) for line in lines if line)


def _ints(x: Tensor) -> list[int]:
    return x.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
