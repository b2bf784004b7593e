"""A whole run as one CUDA graph, captured once and replayed.

A step is a network and about a hundred small operations. With small or compiled networks, launching them from the host
takes longer than running them; a graph is launched as a whole. A replay draws from the same generator, so the same seed
gives the same samples. Weights may be updated in place between replays, as optimisers and `load_state_dict` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Generator, Tensor

from tokensteer.core.particles.loop import check_generator, summarise, sweep
from tokensteer.core.particles.result import Result, with_rows
from tokensteer.core.steering.methods import Method


@dataclass(frozen=True)
class CapturedRun:
    """A run of `method` with fixed numbers of particles and populations, made by `captured`; call it to replay it."""

    method: Method
    num_particles: int
    populations: int
    _graph: torch.cuda.CUDAGraph = field(repr=False)
    _noise: Generator = field(repr=False)
    _result: Result = field(repr=False)

    def __call__(self, *, generator: Generator | None = None) -> Result:
        """The method's result with this generator, or with the run's own, whose state carries over between calls."""
        device = self._noise.device
        check_generator(generator, device)
        state = (generator or self._noise).get_state()
        self._noise.set_state(state)
        with torch.cuda.device(device):
            self._graph.replay()
        tensors = {name: value.clone() for name, value in vars(self._result).items() if isinstance(value, Tensor)}
        rows, saved = dict(self._result.rows), dict(self._result.saved)
        result = replace(self._result, **tensors, rows=rows, saved=saved, generator=generator or self._noise)
        if generator is not None:
            generator.set_state(self._noise.get_state())
        log_w, mask_id = result.log_w, self.method.steering.model.kernel.mask_id
        if (log_w.isnan() | (log_w == math.inf)).any() | (result.samples == mask_id).any():
            again = torch.Generator(device)  # a replay checks nothing; the same run without a graph raises
            again.set_state(state)
            self.method(self.num_particles, self.populations, generator=again)
            raise FloatingPointError("a captured run has weights of NaN or infinity, or masks left at t = 0")
        return result


def captured(
    method: Method, num_particles: int, populations: int = 1, *, memory: str | float | None = None
) -> CapturedRun:
    """Capture a run of a method on a GPU, after one run to warm up.

    Nothing in the run may synchronise the host with the device: no sharing of rows (the default on a GPU), no
    `Enumerated`, `Exact`, MaskGIT or `TimedFirstHitting`, and no reward that reads values.
    """
    given = cast("object", method)
    if not isinstance(given, Method):
        raise TypeError(f"captured takes a Method, got {type(given).__name__}: wrap a steering as Method(steering)")
    steering = method.steering
    device = steering.model.device
    if device.type != "cuda":
        raise ValueError(f"only a run on a GPU can be captured, and the model is on {device}: call the method itself")
    if any(model.shares for model in steering.model.networks):
        raise ValueError("finding equal rows reads the device, which a captured run cannot: set sharing=False")
    noise = torch.Generator(device).manual_seed(int(torch.randint(2**63 - 1, ())))

    def run() -> Result:
        records = sweep(
            steering, num_particles, populations, resample=method.resample, when=method.when, generator=noise
        )
        return summarise(records, templates=steering.resources.templates)

    with steering.resources.limited(memory), torch.cuda.device(device):
        _warm_up(run)  # compiles kernels and allocates memory
        before, graph = steering.resources.spent(), torch.cuda.CUDAGraph()
        graph.register_generator_state(noise)  # pyright: ignore[reportUnknownMemberType]
        result = _capture(run, graph)
    result = with_rows(result, before, steering.resources.spent())
    return CapturedRun(method, num_particles, populations, graph, noise, result)


def _warm_up(run: Callable[[], Result]) -> None:
    """Run on a side stream, as CUDA graphs require before a capture."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        run()
    here.wait_stream(side)


def _capture(run: Callable[[], Result], graph: torch.cuda.CUDAGraph) -> Result:
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            return run()
    except torch.OutOfMemoryError as error:
        error.add_note("A captured run keeps its working memory: use fewer particles, or a smaller `memory`")
        raise
    except RuntimeError as error:
        raise ValueError(
            "the run cannot be captured: most likely it reads the device on the host, first at the place named above. "
            "Call the method itself"
        ) from error
