"""The corpus of texts, written by SmolLM2 for `assignments`: lines of JSON with the mood and the words of each text.

    python -m tokensteer.tasks.text --part corpus --out FOLDER --device cuda --minutes 5

The model writes on the GPU while other processes clean what it wrote before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tokensteer import files
from tokensteer.tasks.common.arrays import to_lists
from tokensteer.tasks.common.training import say
from tokensteer.tasks.text.corpus import sampling
from tokensteer.tasks.text.corpus.assignments import END, Assignment, assignments
from tokensteer.tasks.text.corpus.byte_pairs import BytePairs
from tokensteer.tasks.text.corpus.cleaning import Seen, marks, spoken
from tokensteer.tasks.text.corpus.llama import Llama
from tokensteer.tasks.text.corpus.supply import Supply

FILE = "teacher-texts.jsonl"
CARD = "teacher-texts.json"
HOPELESS = 20  # batches without a text that is kept

Polished = list[tuple[int, str, list[int]]]
"""Moods, words with spaces between them, and marks of the texts that are kept."""


@dataclass(frozen=True)
class WritingPlan:
    """How much is written: up to `texts` that are kept, or for `seconds`. `rows` are written at once, `length` tokens
    each, some more than a window has, for prompts of at most `prompt` tokens. `workers` processes clean."""

    texts: int = 500_000
    seconds: float | None = None
    rows: int = 8192
    length: int = 120
    prompt: int = 64
    workers: int = 12
    top_p: float = 0.9


@dataclass
class Counts:
    """What was written and kept so far."""

    written: int = 0
    tokens: int = 0
    repeated: int = 0
    kept: int = 0


class _Cleaner:
    """Cleans in other processes, or at once without any."""

    def __init__(self, tokenizer: BytePairs, workers: int) -> None:
        told = (tokenizer.tokens, sorted(tokenizer.special), tokenizer.ids[END])
        self._pool = None
        if workers:
            context = get_context("spawn")  # a fork of a process that uses a GPU may hang
            self._pool = ProcessPoolExecutor(workers, context, _tell, told)
        else:
            _tell(*told)
        self._waiting: list[Future[Polished]] = []

    def give(self, rows: list[list[int]], asked: Sequence[Assignment]) -> None:
        moods, openings = [one.label for one in asked], [one.opening for one in asked]
        if self._pool is None:
            done: Future[Polished] = Future()
            done.set_result(polished(rows, moods, openings))
            self._waiting.append(done)
            return
        size = 256
        for k in range(0, len(rows), size):
            part = slice(k, k + size)
            self._waiting.append(self._pool.submit(polished, rows[part], moods[part], openings[part]))

    def take(self, everything: bool = False) -> Polished:
        """What is clean by now, or everything, in the order in which it was given."""
        found: Polished = []
        while self._waiting and (everything or self._waiting[0].done()):
            found += self._waiting.pop(0).result()
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_told: dict[str, Any] = {}


def _tell(tokens: list[str], special: list[int], end: int) -> None:
    """Give a process what `polished` needs."""
    with suppress(RuntimeError):
        torch.set_num_threads(1)
    _told.update(tokenizer=BytePairs(tokens, (), special), end=end)


def polished(rows: Sequence[Sequence[int]], moods: Sequence[int], openings: Sequence[str]) -> Polished:
    """The texts that are kept, of tokens that were written after their openings."""
    tokenizer, end = _told["tokenizer"], _told["end"]
    found: Polished = []
    for row, mood, opening in zip(rows, moods, openings, strict=True):
        ids = row[: row.index(end)] if end in row else row
        kept = spoken(opening + tokenizer.decode(ids))
        if kept is not None:
            found.append((mood, " ".join(kept), marks(kept)))
    return found


def write_corpus(net: Llama, tokenizer: BytePairs, out: Path, plan: WritingPlan, seed: int = 0) -> Counts:
    """Write `FILE` and a card of it to the folder. The same seed draws the same assignments."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    files.remove_strays(out)
    counts, seen, cleaner = Counts(), Seen(), _Cleaner(tokenizer, plan.workers)
    supply = Supply(assignments(sys.maxsize, seed), tokenizer, plan.rows, plan.prompt)
    writer = sampling.Writer(net, plan.rows, plan.prompt + plan.length, plan.top_p)
    began, kept = time.perf_counter(), list[str]()

    def over() -> bool:
        late = plan.seconds is not None and time.perf_counter() - began > plan.seconds
        return late or counts.kept >= plan.texts

    def collect(everything: bool = False) -> None:
        for mood, text, found in cleaner.take(everything):
            if seen.is_new(found):
                kept.append(json.dumps({"mood": mood, "text": text}) + "\n")
                counts.kept += 1
            else:
                counts.repeated += 1

    asked, batch = supply.next()
    while not over():
        written = writer.write(batch, plan.length)
        done, (asked, batch) = asked, supply.next()  # a GPU writes meanwhile
        rows = to_lists(written)
        cleaner.give(rows, done)
        counts.written += len(rows)
        counts.tokens += written.numel()
        collect(everything=not counts.kept and counts.written >= HOPELESS * plan.rows)  # processes are slow to start
        if not counts.kept and counts.written >= HOPELESS * plan.rows:
            cleaner.close()
            raise ValueError(f"none of {counts.written} texts can be kept: give the GGUF file of a model that writes")
        seconds = time.perf_counter() - began
        speed = counts.tokens / seconds
        say(f"corpus: {counts.kept} texts of {counts.written}, {speed:.0f} tokens/s, {seconds:.0f} s")
    collect(everything=True)
    cleaner.close()
    files.write_text(out / FILE, "".join(kept))
    files.write_json(out / CARD, {**asdict(counts), "plan": asdict(plan), "seed": seed})
    say(f"{out / FILE}: {counts.kept:,} texts of {counts.written:,}; {counts.repeated:,} repeated others")
    return counts


def read_corpus(file: Path) -> tuple[list[int], list[list[str]]]:
    """The moods and the words of texts that `write_corpus` wrote."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: write it by python -m tokensteer.tasks.text --part corpus")
    try:
        read = [json.loads(line) for line in files.read_lines(file) if line]
        return [int(one["mood"]) for one in read], [str(one["text"]).split(" ") for one in read]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): write it again by --part corpus") from error
