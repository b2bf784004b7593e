"""Random choices from one seed, with a record of what was chosen."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor


class Choices:
    """The choices of number `index` for `what`; they depend on these three alone."""

    def __init__(self, seed: int, index: int, what: str = "run") -> None:
        self.random = random.Random(f"{seed}/{what}/{index}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))
        self.seed, self.index, self.made = seed, index, dict[str, Any]()

    def pick(self, name: str, *options: Any) -> Any:
        """One of the options, each with equal probability: list one twice to choose it more often."""
        chosen = self.random.choice(options)
        self.made[name] = getattr(chosen, "__name__", chosen)
        return chosen

    def often(self, name: str, share: float) -> bool:
        happens = self.random.random() < share
        if happens:
            self.made[name] = True
        return happens

    def rand(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.generator, dtype=torch.float64)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.made.items())
