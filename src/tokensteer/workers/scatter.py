"""`ts.scatter`: many units of SMC, by one process or many workers, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator as RandomGenerator
from torch import Tensor

from tokensteer import files
from tokensteer.core.numerics.domains import check_callable, check_seed, check_wholes
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.result import Result
from tokensteer.core.steering.methods import Method
from tokensteer.core.steering.steering import Steering
from tokensteer.workers.pool import Workers, pool_of
from tokensteer.workers.units import UnitFolder, seeds_of

Steered = Steering | Method
MakeSteering = Callable[[], Steered | Callable[[Any], Steered]]
SETTINGS = "scatter.json"


@dataclass(frozen=True)
class Call:
    """A unit for a worker. `value` is what the unit stands for."""

    name: str
    value: Any
    seed: int

    def __str__(self) -> str:
        return f"the unit {self.name!r}"


@dataclass
class SteeringWorker:
    """Runs units. The steering is made by the first of them."""

    make_steering: MakeSteering
    num_particles: int
    populations: int
    memory: str | float | None
    made: Any = None
    share: float = 0.0

    def __call__(self, call: Call) -> Result:
        self.share, self.made = 0.0, self.made or self.make_steering()
        try:
            return on_device(self._run(call), "cpu")
        except Exception as error:
            error.add_note(f"in {call}")
            raise

    def _run(self, call: Call) -> Result:
        made: object = self.made
        if callable(made) and not isinstance(made, Steered):
            made = made(call.value)
        method = _method(made, call)
        steps = len(method.steering.steps) + 1

        def see(record: Record) -> None:
            self.share += 1 / steps

        generator = RandomGenerator(method.steering.model.base.template.device).manual_seed(call.seed)
        return method(self.num_particles, self.populations, generator=generator, memory=self.memory, on_step=see)


def _method(steered: object, call: Call) -> Method:
    if isinstance(steered, Steering):
        return Method(steered)
    if not isinstance(steered, Method):
        raise TypeError(
            f"make_steering() must return a Steering, a method such as smc_base(model, tilt), or a function from a "
            f"unit to one of them; for {call} it gave {type(steered).__name__}"
        )
    return steered


def on_device(result: Result, device: str | torch.device) -> Result:
    """A result on another device, without its generator."""
    moved = {name: value.to(device) for name, value in vars(result).items() if isinstance(value, Tensor)}
    return replace(result, **moved, generator=None)


def scatter(
    make_steering: MakeSteering,
    units: Sequence[str] | Mapping[str, Any],
    num_particles: int = 16,
    populations: int = 1,
    *,
    seed: int = 0,
    workers: int | None = None,
    ray: str | None = None,
    gpus_per_worker: float = 0.0,
    folder: str | Path | None = None,
    memory: str | float | None = None,
    progress: bool = False,
) -> dict[str, Result]:
    """Run SMC for each unit, on `workers` processes of this machine or on the Ray cluster at the address `ray` ("auto"
    finds a running one). The results by unit, in the order of `units`, on the CPU.

    make_steering() is called once in every worker, and loads what units share. It returns a `Steering` or `Method` for
    all units, or a function from a unit to one: from its name, or from its value if `units` is a mapping from names to
    values. A unit has `populations` populations of `num_particles`, and a seed made from `seed` and its name, so
    results do not depend on the number of workers, on the order of units, or on workers that died.

    With a `folder` each result is stored there when it is done, and units that are there are not run again. An error
    of a unit ends the call, and the folder keeps what was finished.
    """
    check_callable("make_steering", make_steering, "no arguments that returns a Steering")
    check_wholes("scatter", 1, num_particles=num_particles, populations=populations)
    check_seed("scatter: seed", seed)
    where = Workers(workers, ray, gpus_per_worker)
    values = _values(units)
    seeds = seeds_of(seed, values)
    settings = {"seed": seed, "num_particles": num_particles, "populations": populations}
    stored = None if folder is None else _unit_folder(Path(folder), settings)
    found: dict[str, Result] = {}
    for name in values if stored is not None else ():
        if stored is not None and (known := stored.read(name, populations, num_particles)) is not None:
            found[name] = known[0]
    missing = [Call(name, value, seeds[name]) for name, value in values.items() if name not in found]
    make_worker = partial(SteeringWorker, make_steering, num_particles, populations, memory)
    with _bar(len(values), len(found), progress) as shown:
        if missing:
            with pool_of(where, make_worker, shown if progress else None) as pool:
                for call in missing:
                    pool.submit(call)
                for call, result in pool.finished():
                    if stored is not None:
                        stored.write(call.name, result, {"seed": call.seed})
                    found[call.name] = result
                    shown([], len(found))
    return {name: found[name] for name in values}


def _values(units: object) -> dict[str, Any]:
    """The units by name, with what they stand for."""
    if isinstance(units, Mapping):
        values = dict(cast("Mapping[Any, Any]", units))
    elif isinstance(units, str) or not isinstance(units, Sequence):
        raise TypeError(f"units must be a list of names or a mapping from names to values, got {units!r:.60}")
    else:
        names = list(cast("Sequence[Any]", units))
        seeds_of(0, map(str, names))  # raises if two are called the same
        values = {name: name for name in names}
    if other := [name for name in values if not isinstance(name, str) or not name]:
        raise TypeError(f"the name of a unit must be a text, got {other[0]!r}: use f'{{goal}}', or a mapping")
    return values


def _unit_folder(folder: Path, settings: Mapping[str, Any]) -> UnitFolder:
    """The units in a folder. Raises ValueError if they were run with other settings."""
    file = folder / SETTINGS
    now = {**settings, "tokensteer": import_module("tokensteer").__version__, "torch": str(torch.__version__)}
    if file.is_file():
        if (was := files.read_json(file)) != now:
            raise ValueError(f"{folder} has units of other settings, {was}, and these are {now}: use another folder")
    elif folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and has no {SETTINGS}: use a new folder")
    else:
        files.write_json(file, now)
    files.remove_strays(folder)
    return UnitFolder(folder)


@contextmanager
def _bar(total: int, done: int, visible: bool) -> Generator[Callable[..., None], None, None]:
    """A function that shows the shares of units that are under way, and the number of those that are done."""
    from rich.progress import Progress

    with Progress(disable=not visible) as bar:
        task, count = bar.add_task("units", total=total, completed=done), [done]

        def show(shares: Sequence[float], finished: int | None = None) -> None:
            count[0] = count[0] if finished is None else finished
            bar.update(task, completed=count[0] + sum(min(share, 1.0) for share in shares))

        yield show
