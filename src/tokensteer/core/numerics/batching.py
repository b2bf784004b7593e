"""How many rows a network is given at once, and what is kept of its answers: as much as memory allows.

A chunk is sized by a budget and a guess of what a row takes; if a network runs out of memory all the same, the chunk is
halved, reported once, and the work goes on, with the same random numbers. Nothing else changes: rows are independent.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.capture import capturing

Answer = TypeVar("Answer")

UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**k for ending, base in (("b", 1000), ("ib", 1024)) for k, letter in enumerate("kmgt", 1)
}
ON_CPU = 2**31


def parse_memory(memory: str | float) -> int:
    """Bytes from a number or from words such as "8GiB"."""
    words = f"{memory:.0f}" if type(memory) in (int, float) else str(memory)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", words.lower())
    unit = None if match is None else UNITS.get(match[2])
    if match is None or unit is None:
        raise ValueError(f"memory must read like '8GiB' or '500MB', or be a number of bytes, got {memory!r}")
    found = int(float(match[1]) * unit)
    if found <= 0:
        raise ValueError(f"memory must be positive, got {memory!r}")
    return found


@dataclass
class Meter(threading.local):
    """Counts rows given to a network, and rows asked for that need not be. Read by `Result` and never by a sampler.

    Each thread has counts of its own, so that runs which share a network do not count each other's rows."""

    rows: int = 0
    saved: int = 0
    calls: int = 0

    def count(self, rows: int, asked: int | None = None) -> None:
        self.rows += rows
        self.calls += rows > 0
        self.saved += 0 if asked is None else asked - rows

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()  # a copy has counts of its own too


@dataclass
class Chunks(threading.local):
    """The budget of one network: `memory` in bytes, None until it is known what the device has free; `most` rows at
    once, learned by running out of memory, for each use of the network: they differ in what a row takes.

    Each thread has a budget of its own, so that runs which share a network do not change each other's."""

    memory: int | None = None
    most: dict[int, int] = field(default_factory=dict[int, int])

    def __reduce__(self) -> tuple[type[Chunks], tuple[()]]:
        return Chunks, ()

    def size(self, row_bytes: int, device: torch.device) -> int:
        if self.memory is None and device.type == "cuda":  # asked once: it takes a while
            self.memory = torch.cuda.mem_get_info(device)[0] // 2
        rows = max(1, (ON_CPU if self.memory is None else self.memory) // max(1, row_bytes))
        return min(rows, self.most.get(row_bytes, rows))

    def holds(self, answers: int) -> bool:
        """Whether there is room for so many bytes of answers, for as many of the next step, and for both as one."""
        room = _physical() // 2 if self.memory is None else self.memory
        return 3 * answers <= room

    def run(self, network: Callable[[Tensor], Answer], rows: Tensor, row_bytes: int) -> list[Answer]:
        """network(rows[part]) for all parts of the rows (n, ...), at least one."""
        return self.stretches(lambda part: network(rows[part]), len(rows), row_bytes, rows.device)

    def stretches(
        self,
        network: Callable[[slice], Answer],
        count: int,
        row_bytes: int,
        device: torch.device,
        generator: Generator | None = None,
    ) -> list[Answer]:
        """network(part) for stretches of so many rows, at least one; `generator` is what it draws from."""
        answers: list[Answer] = []
        done, size = 0, self.size(row_bytes, device)
        size = -(-count // max(1, -(-count // size)))  # parts of a size: the largest is what memory is for
        while done < count or not answers:
            drawn = None if generator is None or capturing() else generator.get_state()
            try:
                answers.append(network(slice(done, done + size)))
            except (RuntimeError, MemoryError) as error:
                taken = min(size, count - done)
                if capturing() or not ran_out(error):
                    raise
                if taken <= 1:
                    self.most.pop(row_bytes, None)  # fewer did not help: something else is too large
                    error.add_note("One row alone does not fit: shorten the sequences, or take a smaller network.")
                    raise
                size = self._halve(taken, row_bytes)
                if generator is not None and drawn is not None:  # those who try again draw the same numbers
                    generator.set_state(drawn)
                torch.cuda.empty_cache()
            else:
                done += size
        return answers

    def _halve(self, size: int, row_bytes: int) -> int:
        if not self.most:
            warnings.warn(
                f"a network or reward ran out of memory with {size} rows at once: going on with fewer. A smaller "
                "memory=... spares the tries",
                stacklevel=2,
            )
        self.most[row_bytes] = size // 2
        return size // 2


def _physical() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**63


def ran_out(error: Exception) -> bool:
    """Whether it was memory that there was not enough of; on a CPU that is no error of torch's own kind."""
    said = ("can't allocate memory", "not enough memory")  # by torch on Linux, and elsewhere
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said)
