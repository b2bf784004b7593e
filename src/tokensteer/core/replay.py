"""A whole run as one CUDA graph: recorded once, then replayed as often as you like.

A step of a run is a network and some hundred small operations, each of which the host has to launch. Where networks are
small, or compiled, the device waits for the host. A recorded run is launched as a whole, so that only the device's own
time is left. It is the same run: what is drawn comes from the same generator, and the same seed gives the same samples.
Networks may change their weights in between, but not their shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.chunks import parse_memory
from tokensteer.core.smc import Result, check_generator, summarise, sweep, with_rows
from tokensteer.core.steering import Method


@dataclass(frozen=True)
class Recorded:
    """A run of `method` with so many particles and populations, ready to be replayed; made by `recorded`."""

    method: Method
    num_particles: int
    populations: int
    _graph: torch.cuda.CUDAGraph = field(repr=False)
    _noise: Generator = field(repr=False)
    _result: Result = field(repr=False)

    def __call__(self, *, generator: Generator | None = None) -> Result:
        """The method's result with this generator, or with noise of its own that goes on from run to run."""
        check_generator(generator, self._noise.device)
        state = (self._noise if generator is None else generator).get_state()
        self._noise.set_state(state)
        self._graph.replay()
        found = {f.name: getattr(self._result, f.name) for f in fields(self._result)}
        own = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
        result = replace(self._result, **own, generator=self._noise if generator is None else generator)
        if generator is not None:
            generator.set_state(self._noise.get_state())
        if self._failed(result):  # the host could not look while it ran: let it run again, and say what went wrong
            again = torch.Generator(self._noise.device)
            again.set_state(state)
            self.method(self.num_particles, self.populations, generator=again)
        return result

    def _failed(self, result: Result) -> bool:
        log_w, mask_id = result.log_w, self.method.steering.model.kernel.mask_id
        return bool((log_w.isnan() | (log_w == math.inf)).any() | (result.samples == mask_id).any())


def recorded(method: Method, num_particles: int, populations: int = 1, *, memory: str | int | None = None) -> Recorded:
    """Record a run of a method on a GPU, after one run to warm up. Call what comes back for a `Result`.

    A run can be recorded if nothing on the way makes the host look at the device: no sharing of rows, which is the
    default there, no list of candidates or completions (`Enumerated`, `Exact`), no MaskGIT, and no reward that looks.
    """
    steering = method.steering
    device = steering.model.device
    if device.type != "cuda":
        raise ValueError(f"only a run on a GPU can be recorded, and the model is on {device}: call the method itself")
    if any(model.shares for model in steering.model.networks):
        raise ValueError(
            "finding equal rows makes the host look at the device, so that the run cannot be recorded: make the model "
            "with sharing=False"
        )
    noise, graph = torch.Generator(device).manual_seed(torch.initial_seed()), torch.cuda.CUDAGraph()

    def run() -> Result:
        records = sweep(
            steering, num_particles, populations, resample=method.resample, when=method.when, generator=noise
        )
        return summarise(records)

    steering.limit(None if memory is None else parse_memory(memory))
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream(device).wait_stream(aside)
    before = steering.spent()
    graph.register_generator_state(noise)  # pyright: ignore[reportUnknownMemberType]
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()
    except RuntimeError as error:
        raise ValueError(
            "the run cannot be recorded, since the host looks at the device on the way: the first to do so is named "
            "above. Call the method itself"
        ) from error
    finally:
        steering.limit(None)
    return Recorded(method, num_particles, populations, graph, noise, with_rows(result, before, steering.spent()))
