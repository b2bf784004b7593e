"""Chunked network calls within a memory budget, and counts of their rows.

The size of a chunk follows from a budget and an estimate of the bytes of a row. If a network still runs out of memory,
the chunk is halved, with one warning, and retried with the same random numbers. On a CPU a process that asks for too
much is killed instead, so for backward passes the activations of a first, small chunk are counted. Results do not
depend on the chunks.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Generator, Tensor
from torch.autograd.graph import saved_tensors_hooks

from tokensteer.core.numerics.capture import capturing

Answer = TypeVar("Answer")

UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**k for ending, base in (("b", 1000), ("ib", 1024)) for k, letter in enumerate("kmgt", 1)
}
ON_CPU = 2**31
FIRST = 32
"""Rows of the chunk whose activations are counted."""


def parse_memory(memory: str | float) -> int:
    """Bytes, from a number or a string such as "8GiB"."""
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
    """Counts the rows and calls of a network, and the rows `saved` by sharing results; `Result` reports them.

    Each thread has its own counts, so that runs which share a network do not count each other's rows."""

    rows: int = 0
    saved: int = 0
    calls: int = 0

    def count(self, rows: int, asked: int | None = None) -> None:
        self.rows += rows
        self.calls += rows > 0
        self.saved += 0 if asked is None else asked - rows

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()  # a copy starts from zero


@dataclass
class Chunks(threading.local):
    """The budget of one network: `memory` in bytes, None until the free memory of the device is known, the `most` rows
    at once, by bytes of a row, found by running out of memory, and the bytes of a row that were `counted`, by the
    estimate of them. Each thread has its own budget."""

    memory: int | None = None
    most: dict[int, int] = field(default_factory=dict[int, int])
    counted: dict[int, int] = field(default_factory=dict[int, int])

    def __reduce__(self) -> tuple[type[Chunks], tuple[()]]:
        return Chunks, ()

    def size(self, row_bytes: int, device: torch.device) -> int:
        if self.memory is None and device.type == "cuda":  # once: this call is slow
            self.memory = torch.cuda.mem_get_info(device)[0] // 2
        found = max(1, row_bytes, self.counted.get(row_bytes, 0))
        rows = max(1, (ON_CPU if self.memory is None else self.memory) // found)
        return min(rows, self.most.get(row_bytes, rows))

    def holds(self, answers: int) -> bool:
        """Whether results of so many bytes fit three times: those of this step, of the next, and a joined copy."""
        room = physical_memory() // 2 if self.memory is None else self.memory
        return 3 * answers <= room

    def run(self, network: Callable[[Tensor], Answer], rows: Tensor, row_bytes: int) -> list[Answer]:
        """network(rows[part]) for all chunks of the rows (n, ...), at least one."""
        return self.stretches(lambda part: network(rows[part]), len(rows), row_bytes, rows.device)

    def stretches(
        self,
        network: Callable[[slice], Answer],
        count: int,
        row_bytes: int,
        device: torch.device,
        generator: Generator | None = None,
        backward: bool = False,
    ) -> list[Answer]:
        """network(part) for all chunks of `count` rows, at least one; `generator` is what the network draws from, and
        `backward` says that it keeps activations for a backward pass."""
        answers: list[Answer] = []
        done, size = 0, self._equal(count, row_bytes, device)
        counts = backward and device.type == "cpu" and row_bytes not in self.counted and count > FIRST
        if counts:
            size = min(size, FIRST)
        while done < count or not answers:
            drawn = None if generator is None or capturing() else generator.get_state()
            try:
                kept = Kept() if counts else None
                with kept or nullcontext():
                    answers.append(network(slice(done, done + size)))
            except (RuntimeError, MemoryError) as error:
                taken = min(size, count - done)
                if capturing() or not ran_out(error):
                    raise
                if taken <= 1:
                    self.most.pop(row_bytes, None)  # a smaller chunk did not help
                    error.add_note("One row alone does not fit: shorten the sequences, or take a smaller network.")
                    raise
                if not self.most:
                    warnings.warn(
                        f"a network or reward ran out of memory with {taken} rows at once: going on with fewer. A "
                        "smaller memory=... spares the tries",
                        stacklevel=2,
                    )
                size = self.most[row_bytes] = taken // 2
                if generator is not None and drawn is not None:  # draw the same numbers again
                    generator.set_state(drawn)
                torch.cuda.empty_cache()
            else:
                done += size
                if kept is not None:
                    counts, self.counted[row_bytes] = False, sum(kept.sizes.values()) // size
                    size = self._equal(count - done, row_bytes, device)
        return answers

    def _equal(self, count: int, row_bytes: int, device: torch.device) -> int:
        """Rows of each chunk if all are of equal size."""
        return max(1, -(-count // max(1, -(-count // self.size(row_bytes, device)))))


class Kept(saved_tensors_hooks):
    """The bytes of all that autograd keeps for a backward pass while this is on, by address."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        super().__init__(self._count, lambda kept: kept)

    def _count(self, kept: Tensor) -> Tensor:
        storage = kept.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return kept.detach()  # itself would refer to the graph that keeps it


def physical_memory() -> int:
    """Bytes of memory of this machine; unlimited on Windows, where it is not known."""
    return 2**63 if sys.platform == "win32" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ran_out(error: Exception) -> bool:
    """Whether the error is lack of memory. Some are RuntimeErrors that only their text tells apart: those of a CPU on
    Linux and elsewhere, and those of a GPU where another process has taken what was free."""
    texts = (
        "can't allocate memory",
        "not enough memory",
        "CUDA error: out of memory",
        "ALLOC_FAILED",
        "[CUDA]: out of",
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)
