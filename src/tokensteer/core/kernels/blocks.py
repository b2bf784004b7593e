"""Semi-autoregressive decoding: any kernel, block by block from left to right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Categoricals, by_site
from tokensteer.core.kernels.choices import on_canvas
from tokensteer.core.kernels.kernel import Clocked, Kernel, Memory, PlainKernel, Stateful
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.numerics.domains import check_callable, check_whole, check_wholes
from tokensteer.core.particles.path import Sites, Step


@dataclass(frozen=True)
class Blocks(PlainKernel):
    """`kernel` inside one block of `size` sites after the other, from left to right.

    Each block takes an equal share of num_steps and has its own time, from 1 to 0 along `grid`; sites outside do not
    change. Blocks begin at `start`, behind a prompt; sites before it belong to the first block. Particles, weights and
    resampling continue from block to block.
    """

    kernel: Kernel
    size: int
    length: int
    num_steps: int
    grid: Callable[[int], Sequence[Step]] = uniform_steps
    start: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.kernel, Clocked):
            raise ValueError(
                "Blocks: a block has its own time, and so have the particles of this kernel: use FirstHitting"
            )
        check_wholes("Blocks", size=self.size, length=self.length, num_steps=self.num_steps)
        check_whole("Blocks.start", self.start, 0)
        if not 0 <= self.start < self.length:
            raise ValueError(f"Blocks: start must be a site of the {self.length} there are, got {self.start}")
        if (self.length - self.start) % self.size:
            behind = f" behind the first {self.start} sites" if self.start else ""
            raise ValueError(f"Blocks: size {self.size} does not divide the length {self.length - self.start}{behind}")
        if self.num_steps % self.number:
            raise ValueError(
                f"Blocks: {self.num_steps} steps cannot be shared equally by {self.number} blocks of {self.size} "
                f"sites: use a multiple of {self.number}"
            )

        check_callable("Blocks.grid", self.grid, "a number of steps: uniform_steps is one")
        each = self.num_steps // self.number
        made = cast("object", self.grid(each))
        steps = cast("Sequence[object]", made) if isinstance(made, Sequence) else ()
        if len(steps) != each or not all(isinstance(step, Step) for step in steps):
            raise ValueError(f"Blocks.grid must make as many steps as it is given: grid({each}) is {made!r}")

    @property
    def number(self) -> int:
        return (self.length - self.start) // self.size

    @property
    def mask_id(self) -> int:
        return self.kernel.mask_id

    def within(self, step: Step) -> tuple[slice, Step]:
        """The sites of this step's block, and the step in the block's own time."""
        if step.index >= self.num_steps or (step.s == 0) != (step.index == self.num_steps - 1):
            raise ValueError(
                f"Blocks was made for {self.num_steps} steps, and step {step.index} goes from t = {step.t:.4g} to "
                f"{step.s:.4g}: give the model as many steps"
            )
        each = self.num_steps // self.number
        block = step.index // each
        start = self.start + block * self.size
        return slice(start if block else 0, start + self.size), self.grid(each)[step.index % each]

    def choose(self, x: Tensor, log_x0: Categoricals, step: Step) -> Sites | None:
        (block, inner), laws = self.within(step), by_site(log_x0)
        part = self.kernel.choose(x[:, block], laws.columns(block), inner)
        return None if part is None else on_canvas(part, laws, block)

    def remember(self, x: Tensor, before: Memory, log_x0: Categoricals | None, generator: Generator | None) -> Memory:
        return self.kernel.remember(x, before, log_x0, generator) if isinstance(self.kernel, Stateful) else None

    def recall(self, x: Tensor, log_x0: Categoricals, step: Step, memory: Tensor) -> Sites | None:
        assert isinstance(self.kernel, Stateful), "only a Stateful kernel makes a memory"
        (block, inner), laws = self.within(step), by_site(log_x0)
        part = self.kernel.recall(x[:, block], laws.columns(block), inner, memory[:, block])
        return None if part is None else on_canvas(part, laws, block)

    def remasks(self, step: Step) -> bool:
        return self.kernel.remasks(self.within(step)[1])

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> SiteMeasure:
        if x.shape[-1] != self.length:
            raise ValueError(f"Blocks was made for sequences of length {self.length}, got {x.shape[-1]}")
        block, inner = self.within(step)
        sites = self.choose(x, log_x0, step) if sites is None else sites
        outside = torch.ones_like(x, dtype=torch.bool)
        outside[:, block] = False
        return self.kernel(x, log_x0, inner, sites).pin(outside)
