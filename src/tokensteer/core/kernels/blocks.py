"""Semi-autoregressive decoding: any kernel, block by block from left to right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Laws, tokens_of
from tokensteer.core.kernels.kernel import Clocked, Kernel, PlainKernel, Stateful
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.kernels.ranked import Ranking
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites, Step

# ---- blocks


@dataclass(frozen=True)
class Blocks(PlainKernel):
    """Semi-autoregressive decoding: `kernel` inside one block of `size` sites after the other, from left to right.

    Each block takes an equal share of num_steps and sees its own time, from 1 to 0 along `grid`; sites outside stay as
    they are. Blocks are counted from `start`, behind a prompt; what is before it belongs to the first of them. Weights,
    particles and their resampling run on from block to block.
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
        for name in ("size", "length", "num_steps"):
            check_whole(f"Blocks.{name}", getattr(self, name))
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

    @property
    def number(self) -> int:
        return (self.length - self.start) // self.size

    @property
    def mask_id(self) -> int:
        return self.kernel.mask_id

    def within(self, step: Step) -> tuple[slice, Step]:
        """The sites of the block that this step works on, and the step in the block's own time."""
        if step.index >= self.num_steps or (step.s == 0) != (step.index == self.num_steps - 1):
            raise ValueError(
                f"Blocks was made for {self.num_steps} steps, and step {step.index} goes from t = {step.t:.4g} to "
                f"{step.s:.4g}: give the model as many steps"
            )
        each = self.num_steps // self.number
        block = step.index // each
        start = self.start + block * self.size
        return slice(start if block else 0, start + self.size), self.grid(each)[step.index % each]

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Sites | None:
        block, inner = self.within(step)
        part = self.kernel.choose(x[:, block], tokens_of(log_x0).columns(block), inner)
        return self._spread(part, x, log_x0, block)

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        return self.kernel.remember(x, before, log_x0, generator) if isinstance(self.kernel, Stateful) else None

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Sites | None:
        assert isinstance(self.kernel, Stateful), "there is no memory without a kernel that remembers"
        block, inner = self.within(step)
        part = self.kernel.recall(x[:, block], tokens_of(log_x0).columns(block), inner, memory[:, block])
        return self._spread(part, x, log_x0, block)

    def _spread(self, part: Sites | None, x: Tensor, log_x0: Laws, block: slice) -> Sites | None:
        """What was chosen inside the block, on the whole canvas."""
        if part is None:
            return None
        if isinstance(part, Ranking):
            return part.within(log_x0, block)
        nowhere = NEVER if part.is_floating_point() else False
        sites = torch.full((*x.shape, *part.shape[2:]), nowhere, dtype=part.dtype, device=part.device)
        sites[:, block] = part
        return sites

    def remasks(self, step: Step) -> bool:
        return self.kernel.remasks(self.within(step)[1])

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Sites | None = None) -> SiteMeasure:
        if x.shape[-1] != self.length:
            raise ValueError(f"Blocks was made for sequences of length {self.length}, got {x.shape[-1]}")
        block, inner = self.within(step)
        sites = self.choose(x, log_x0, step) if sites is None else sites
        outside = torch.ones_like(x, dtype=torch.bool)
        outside[:, block] = False
        return self.kernel(x, log_x0, inner, sites).pin(outside)
