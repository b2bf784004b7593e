"""Running the jobs of a run: units go to a pool of workers, and are written to the run folder as they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from tokensteer.app.runs.folder import Writer
from tokensteer.app.runs.prepare import Environment, PreparedJob
from tokensteer.app.runs.runner import FinishedRow, Measure, RowWorker, Watch, WholeRow, remote_worker
from tokensteer.app.runs.units import Part, Unit, file_of, units_of
from tokensteer.workers.pool import Pool, Workers, pool_of


@dataclass
class Rows:
    """The rows of a run that are still to be finished: their units, and the outcomes of those that are done."""

    ready: Sequence[PreparedJob]
    units: dict[int, list[Unit]]
    parts: dict[int, dict[Unit, Part]] = field(default_factory=dict[int, dict[Unit, Part]])

    def names(self, row: int) -> list[str]:
        """The names of the files of a row's units."""
        units = self.units.get(row, [])
        return [file_of(unit, self.ready[row].job) for unit in units if not unit.is_row]

    @property
    def missing(self) -> list[Unit]:
        """The units that are not done."""
        return [unit for row, units in self.units.items() for unit in units if unit not in self.parts.get(row, {})]


def rows_of(ready: Sequence[PreparedJob], writer: Writer) -> Rows:
    """What is to be done for a folder: the rows that it does not have, without the units that it has."""
    rows = Rows(ready, {row: units_of(row, one) for row, one in enumerate(ready)})
    for row in writer.done:  # it may have been killed before it removed them
        writer.remove_units(rows.names(row))
        rows.units.pop(row, None)
    for row, units in rows.units.items():
        rows.parts[row] = {}
        for unit in units:
            templates = 1 if unit.prompt is not None else ready[row].method.steering.resources.templates
            size = unit.job.populations * templates, unit.job.particles
            own = writer.begun and not unit.is_row  # before, units are those of a run that is to be replaced
            known = None if not own else writer.units.read(file_of(unit, ready[row].job), *size)
            if known is not None and isinstance(seconds := known[1].get("seconds"), float):
                rows.parts[row][unit] = Part(unit, known[0], seconds)
    return rows


def workers_for(
    workers: Workers, ready: Sequence[PreparedJob], place: Environment, watch: Watch
) -> AbstractContextManager[Pool]:
    """A pool that runs the units of jobs."""
    make: Callable[[], RowWorker] = partial(RowWorker, ready.__getitem__, place.here, watch)
    if workers.remote:
        make = partial(remote_worker, [one.job for one in ready], place)
    return pool_of(workers, make, watch.shares)


def run_all(rows: Rows, writer: Writer, watch: Watch, pool: Pool) -> None:
    """Run what is missing. Results depend neither on the pool nor on the order in which it does its calls."""
    for row, units in rows.units.items():
        for unit in units:
            if unit not in rows.parts[row]:
                pool.submit(WholeRow(row) if unit.is_row else unit)
        _measure_if_done(rows, row, pool)
    for call, value in pool.finished():
        if isinstance(value, Part):
            unit, job = value.unit, rows.ready[value.unit.row].job
            if value.result is not None:
                writer.add_unit(file_of(unit, job), value.result, value.seconds)
            rows.parts[unit.row][unit] = value
            watch.unit()
            _measure_if_done(rows, unit.row, pool)
        elif isinstance(value, FinishedRow):
            writer.add(value.name, value.entry, value.result, value.samples, call.row)
            writer.remove_units(rows.names(call.row))
            rows.parts[call.row].clear()
            if isinstance(call, WholeRow):
                watch.unit()
            watch.end(value.entry)


def _measure_if_done(rows: Rows, row: int, pool: Pool) -> None:
    units, parts = rows.units[row], rows.parts[row]
    if all(unit in parts for unit in units):
        pool.submit(Measure(row, [parts[unit] for unit in units]), first=True)
