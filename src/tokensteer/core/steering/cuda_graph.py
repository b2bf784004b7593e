"""A whole run as one CUDA graph: recorded once, then replayed as often as you like.

A step of a run is a network and some hundred small operations, each of which the host has to launch. Where networks are
small, or compiled, the device waits for the host. A recorded run is launched as a whole, so that only the device's own
time is left. It is the same run: what is drawn comes from the same generator, and the same seed gives the same samples.
Networks may learn in between, if their weights stay where they are, as optimisers and `load_state_dict` leave them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.particles.loop import check_generator, summarise, sweep
from tokensteer.core.particles.result import Result, with_rows
from tokensteer.core.steering.methods import Method


@dataclass(frozen=True)
class CapturedRun:
    """A run of `method` with so many particles and populations, ready to be replayed; made by `captured`."""

    method: Method
    num_particles: int
    populations: int
    _graph: torch.cuda.CUDAGraph = field(repr=False)
    _noise: Generator = field(repr=False)
    _result: Result = field(repr=False)

    def __call__(self, *, generator: Generator | None = None) -> Result:
        """The method's result with this generator, or with noise of its own that goes on from run to run."""
        device = self._noise.device
        check_generator(generator, device)
        state = (self._noise if generator is None else generator).get_state()
        self._noise.set_state(state)
        with torch.cuda.device(device):
            self._graph.replay()
        result = self._own_copy(self._noise if generator is None else generator)
        if generator is not None:
            generator.set_state(self._noise.get_state())
        if self._failed(result):  # the host could not look while it ran: let it run again, and say what went wrong
            again = torch.Generator(device)
            again.set_state(state)
            self.method(self.num_particles, self.populations, generator=again)
            raise FloatingPointError("a recorded run has weights that are no numbers, or masks that were left over")
        return result

    def _own_copy(self, generator: Generator) -> Result:
        found = {f.name: getattr(self._result, f.name) for f in fields(self._result)}
        tensors = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
        rows, saved = dict(self._result.rows), dict(self._result.saved)
        return replace(self._result, **tensors, rows=rows, saved=saved, generator=generator)

    def _failed(self, result: Result) -> bool:
        log_w, mask_id = result.log_w, self.method.steering.model.kernel.mask_id
        return bool((log_w.isnan() | (log_w == math.inf)).any() | (result.samples == mask_id).any())


def captured(
    method: Method, num_particles: int, populations: int = 1, *, memory: str | float | None = None
) -> CapturedRun:
    """Record a run of a method on a GPU, after one run to warm up. Call what comes back for a `Result`.

    A run can be recorded if nothing on the way makes the host look at the device: no sharing of rows, which is the
    default there, no list of candidates or completions (`Enumerated`, `Exact`), no MaskGIT, no clocks of particles
    (`TimedFirstHitting`), and no reward that looks.
    """
    if not isinstance(method, Method):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"recorded takes a Method, got {type(method).__name__}: wrap a steering as Method(steering)")
    steering = method.steering
    device = steering.model.device
    if device.type != "cuda":
        raise ValueError(f"only a run on a GPU can be recorded, and the model is on {device}: call the method itself")
    if any(model.shares for model in steering.model.networks):
        raise ValueError(
            "finding equal rows makes the host look at the device, so that the run cannot be recorded: make the model "
            "with sharing=False"
        )
    noise = torch.Generator(device).manual_seed(int(torch.randint(2**63 - 1, ())))

    def run() -> Result:
        records = sweep(
            steering, num_particles, populations, resample=method.resample, when=method.when, generator=noise
        )
        return summarise(records, templates=steering.resources.templates)

    with steering.resources.limited(memory), torch.cuda.device(device):
        _aside(run)  # kernels are made, and memory is asked for
        before, graph = steering.resources.spent(), torch.cuda.CUDAGraph()
        graph.register_generator_state(noise)  # pyright: ignore[reportUnknownMemberType]
        result = _captured(run, graph)
    result = with_rows(result, before, steering.resources.spent())
    return CapturedRun(method, num_particles, populations, graph, noise, result)


def _aside(run: Callable[[], Result]) -> None:
    """Run on a stream of its own, as what is about to be captured should have been."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        run()
    here.wait_stream(aside)


def _captured(run: Callable[[], Result], graph: torch.cuda.CUDAGraph) -> Result:
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            return run()
    except torch.OutOfMemoryError as error:
        error.add_note("A recorded run keeps what it works in: give it fewer particles, or a smaller `memory`")
        raise
    except RuntimeError as error:
        raise ValueError(
            "the run cannot be recorded: most likely the host looks at the device on the way, and the first place "
            "where it does is named above. Call the method itself"
        ) from error
