"""Assignments in batches of equally many tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokensteer.tasks.text.corpus.assignments import Assignment
from tokensteer.tasks.text.corpus.byte_pairs import BytePairs
from tokensteer.tasks.text.corpus.sampling import Batch


class Supply:
    """Draws assignments until `rows` of them have prompts of the same length, at most `longest` tokens; the others wait
    for their turn."""

    def __init__(self, asked: Iterator[Assignment], tokenizer: BytePairs, rows: int, longest: int) -> None:
        self._asked, self._tokenizer, self._rows, self._longest = asked, tokenizer, rows, longest
        self._groups: dict[int, list[tuple[Assignment, list[int]]]] = {}

    def next(self) -> tuple[list[Assignment], Batch]:
        """The next full batch. Raises ValueError if the assignments end before it is full."""
        for one in self._asked:
            ids = one.ids(self._tokenizer)
            if len(ids) > self._longest:
                continue
            group = self._groups.setdefault(len(ids), [])
            group.append((one, ids))
            if len(group) == self._rows:
                del self._groups[len(ids)]
                prompts = torch.tensor([ids for _, ids in group])
                temperature = torch.tensor([one.temperature for one, _ in group])
                return [one for one, _ in group], Batch(prompts, temperature)
        raise ValueError(f"there are too few assignments for a batch of {self._rows}: write fewer at once")
