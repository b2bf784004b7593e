"""Run folders: writing one and opening it again.

    config.json     the command, the planned jobs, versions
    results.json    a list of rows, one for each method, size and seed
    rows/           for each row its `Result` as safetensors, and its samples as a picture or texts
    units/          the results of units whose row is not finished yet

Every file is complete or absent, and a row is listed after its files are written, so a run that is stopped keeps its
finished rows and units. Rows may be finished in any order, and are listed in that of their jobs. Only one run writes to
a folder at a time. Reading checks everything: a folder may be damaged or hostile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tokensteer.files as files  # "from tokensteer import" would load the api, which loads this module
from tokensteer.app.runs import schema
from tokensteer.app.runs.claims import CLAIM, claimed

if TYPE_CHECKING:
    from tokensteer.core.particles.result import Result
    from tokensteer.workers.units import UnitFolder

FORMAT = 1
CONFIG, RESULTS, ROWS, REPORT, FIGURES = "config.json", "results.json", "rows", "report.html", "figures"
UNITS = "units"
PICTURE = ".png"
FIGURE_NAMES = ("traces", "weights", "metrics", "front", "break-even")
"""Figures of a task are called TASK-NAME.png."""


@dataclass(frozen=True)
class Run:
    """A run folder: its config and its rows as plain dictionaries. Results are read on demand."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def missing(self) -> list[Mapping[str, Any]]:
        """The jobs of the config that have no row yet."""
        done = places(self.rows)
        return [job for place, job in enumerate(self.config.get("jobs", ())) if place not in done]

    def file(self, index: int) -> Path:
        """The file of a row's `Result`."""
        return self._inside(index, self.rows[index]["file"])

    def result(self, index: int) -> Result:
        """The `Result` of a row."""
        from tokensteer.core.particles.result import Result

        file = self.file(index)
        if not file.is_file():
            raise FileNotFoundError(f"{self.folder / RESULTS} lists a result that is not there, {file}")
        try:
            return Result.load(file)
        except (ValueError, RuntimeError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{file} is damaged ({error})") from error

    def picture(self, index: int) -> Path:
        """The picture of a row's samples. Raises KeyError if the task draws none."""
        return self._inside(index, self.rows[index]["picture"])

    def written(self, index: int) -> list[Path]:
        """The other files of a row's samples, such as texts."""
        return [self._inside(index, name) for name in self.rows[index].get("written", ())]

    def _inside(self, index: int, name: str) -> Path:
        """The path of a file. Raises ValueError if it lies outside of the folder."""
        file = self.folder / name
        if "\0" in name or not file.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"row {index} of {self.folder / RESULTS} names a file outside of the folder, {name!r}")
        return file


def places(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the jobs that rows belong to. Runs of version 0.1 did jobs in order, and do not store them."""
    return [row.get("place", index) for index, row in enumerate(rows)]


def open_run(folder: str | Path) -> Run:
    """Open what `tokensteer run` or `compare` wrote, finished or not."""
    folder = Path(folder)
    config = _read(folder, CONFIG)
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{folder} is no run folder (its {CONFIG} does not say which format it has)")
    known = cast("dict[str, Any]", config)
    if known["format"] != FORMAT:
        raise ValueError(
            f"{folder} was written in format {known['format']!r:.40} and this tokensteer reads {FORMAT}: run it again "
            f"(its {CONFIG} has the command), or install the tokensteer that wrote it"
        )
    if fault := schema.fault(known, {}, schema.CONFIG):
        raise ValueError(f"{folder / CONFIG} is damaged: it {fault}")
    listed = (folder / RESULTS).exists()  # if not, the run was stopped before it wrote the list
    rows = _read(folder, RESULTS) if listed else list[object]()
    if not isinstance(rows, list):
        raise ValueError(f"{folder / RESULTS} is damaged: it should be a list of rows")
    for index, row in enumerate(cast("list[object]", rows)):
        if fault := schema.fault(row, schema.ROW, schema.ROW_EXTRAS):
            raise ValueError(f"{folder / RESULTS} is damaged: row {index} {fault}")
    return Run(folder, known, cast("list[dict[str, Any]]", rows))


def _read(folder: Path, name: str) -> object:
    file = folder / name
    if not file.is_file():
        other = "it is a file" if folder.exists() else "there is no such folder"
        raise FileNotFoundError(f"{folder} is no run folder ({f'it has no {name}' if folder.is_dir() else other})")
    return files.read_json(file)


# ---- writing


def check_free(folder: Path, force: bool) -> None:
    """Raise ValueError unless the folder is new or empty, or with `force` holds an earlier run."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file: give --out a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{there} cannot be written to: give --out another folder")
    if not folder.is_dir() or all(f.name == CLAIM or f.match(f".*{files.STRAY}") for f in folder.iterdir()):
        return
    if not force:
        raise ValueError(f"{folder} is not empty: give --out another folder, or --force to replace the run in it")
    if not _is_ours(folder / CONFIG):
        raise ValueError(f"{folder} holds no run that --force could replace: give --out another folder, or empty it")
    for part in (folder / ROWS, folder / FIGURES, folder / UNITS):
        if part.is_symlink() or (part.exists() and not part.is_dir()):
            raise ValueError(f"{part} is a link or a file, and no folder of a run: remove it, or give another --out")


def replaceable(folder: Path) -> bool:
    """Whether --force can replace the run in a folder."""
    try:
        check_free(folder, force=True)
    except ValueError:
        return False
    return True


def _is_ours(config: Path) -> bool:
    """Whether a config was written by any version of tokensteer."""
    try:
        known = cast("Any", files.read_json(config))
        return type(known["format"]) is int and str(known["command"]).startswith("tokensteer ")
    except (OSError, ValueError, TypeError, LookupError):
        return False


@contextmanager
def writing(folder: Path, config: Mapping[str, Any], force: bool = False) -> Generator[Writer, None, None]:
    """Claim a folder and write a run to it, with `force` over an earlier one. Before the first unit, only the claim is
    written and nothing of an earlier run is replaced."""
    check_free(folder, force)
    with claimed(folder):
        check_free(folder, force)  # again: another run may just have ended
        yield Writer(folder, config)


@contextmanager
def going_on(
    folder: Path, earlier: Callable[[], Run | None], config: Mapping[str, Any]
) -> Generator[Writer, None, None]:
    """Claim a folder and go on with its unfinished run, or write a new one if there is none. earlier() finds the run,
    and raises if its rows cannot be kept."""
    earlier()  # raises before anything is written
    with claimed(folder):
        run = earlier()  # again: another process may just have ended
        if run is not None and run.missing:
            _remove_strays(folder)
            (folder / REPORT).unlink(missing_ok=True)
        writer = Writer(folder, config) if run is None else Writer(folder, run.config, list(run.rows), begun=True)
        if writer.begun and not writer.rows:
            writer.clear()  # it may have been killed while it removed an earlier run
        if run is not None and not run.missing:
            writer.clear_units()  # or its last units
        yield writer


def _remove_strays(folder: Path) -> None:
    for part in (folder, folder / ROWS, folder / FIGURES, folder / UNITS):
        files.remove_strays(part)


@dataclass
class Writer:
    """Writes a run folder row by row and unit by unit; made by `writing`. It has `begun` if the folder holds this run
    already."""

    folder: Path
    config: Mapping[str, Any]
    rows: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    begun: bool = False

    @property
    def done(self) -> list[int]:
        """The numbers of the jobs that have a row."""
        return places(self.rows)

    @property
    def units(self) -> UnitFolder:
        """The results of units whose row is not finished."""
        from tokensteer.workers.units import UnitFolder

        return UnitFolder(self.folder / UNITS)

    def add_unit(self, name: str, result: Result, seconds: float) -> None:
        """Write a finished unit."""
        self._begin()
        self.units.write(name, result, {"seconds": seconds})

    def remove_units(self, names: Sequence[str]) -> None:
        """Remove units whose row is written."""
        self.units.remove(names)
        with suppress(OSError):  # there are others, or there was none
            (self.folder / UNITS).rmdir()

    def add(
        self,
        name: str,
        row: Mapping[str, Any],
        result: Result,
        samples: Mapping[str, Callable[[Path], None]],
        place: int | None = None,
    ) -> None:
        """Write the finished row of job number `place`, the next unless given; `name` is part of its files' names.
        `samples` has a function for each suffix that writes the samples to a file."""
        self._begin()
        place = len(self.rows) if place is None else place
        stem = f"{ROWS}/{place:03d}-{name}"
        made: dict[str, Any] = {"file": f"{stem}.safetensors"}
        result.save(self.folder / made["file"])
        for suffix, write in samples.items():
            files.write_whole(self.folder / f"{stem}{suffix}", write)
        if PICTURE in samples:
            made["picture"] = f"{stem}{PICTURE}"
        written = [f"{stem}{suffix}" for suffix in samples if suffix != PICTURE]
        self._settle(place, row.get("resolved", {}))
        self.rows.append({**row, "place": place, **made} | ({"written": written} if written else {}))
        self.rows.sort(key=lambda row: row.get("place", 0))
        files.write_json(self.folder / RESULTS, self.rows)

    def _settle(self, place: int, resolved: Mapping[str, Any]) -> None:
        """Add to the config what job number `place` left open and its run has resolved, as what pilots choose. Before
        its row is written: a row that is there has its settings in the config."""
        jobs = list(self.config.get("jobs", ()))
        if place < len(jobs) and resolved.keys() - jobs[place].keys():
            jobs[place] = {**resolved, **jobs[place]}
            self.config = {**self.config, "jobs": jobs}
            files.write_json(self.folder / CONFIG, self.config)

    def _begin(self) -> None:
        """Write the config and remove the earlier run, once. If this is interrupted, the folder is a run without rows.
        Units of the earlier run are removed first: under the new config they would be taken for its own."""
        if self.begun:
            return
        self.begun, results = True, self.folder / RESULTS
        self.clear_units()
        if results.exists():
            files.write_json(results, [])
        files.write_json(self.folder / CONFIG, self.config)
        files.write_json(results, [])
        _remove_strays(self.folder)
        self.clear()

    def clear_units(self) -> None:
        """Remove all units, of this run or an earlier one."""
        for kind in ("safetensors", "json"):
            for file in (self.folder / UNITS).glob(f"[0-9][0-9][0-9]*-*.{kind}"):
                file.unlink()
        self.remove_units([])

    def clear(self) -> None:
        """Remove the files of an earlier run and no others. The result of a row is removed last: the other files of the
        row are recognised by it."""
        (self.folder / REPORT).unlink(missing_ok=True)
        numbered = list((self.folder / ROWS).glob("[0-9][0-9][0-9]*-*"))
        ours = {file.stem for file in numbered if file.suffix == ".safetensors"}
        made = [file for file in numbered if file.stem in ours]
        made += [file for name in FIGURE_NAMES for file in (self.folder / FIGURES).glob(f"*-{name}{PICTURE}")]
        for file in sorted(made, key=lambda file: file.suffix == ".safetensors"):
            if file.is_file() or file.is_symlink():
                file.unlink()
