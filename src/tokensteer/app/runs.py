"""Run folders: what a run leaves behind, and how it is opened again.

    config.json     the command, what each row was to do, versions
    results.json    a list of rows, one for each method, size and seed
    rows/           for each row its `Result` as safetensors, and its samples for people: a picture, or texts

Every file is written beside its place and then moved there, and a row is listed once its files are complete, so that a
run that is stopped leaves what was finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokensteer.core.result import Result

FORMAT = 1
CONFIG, RESULTS, ROWS, REPORT, FIGURES = "config.json", "results.json", "rows", "report.html", "figures"
PICTURE = ".png"


@dataclass(frozen=True)
class Run:
    """A run folder: its config, its rows as plain dictionaries, and their results, each read when it is asked for."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def result(self, index: int) -> Result:
        """What `ts.smc` gave for a row: samples, log-weights, ESS and reward at every step, ancestors."""
        from tokensteer.core.result import Result

        file = self.folder / self.rows[index]["file"]
        if not file.is_file():
            raise FileNotFoundError(f"{self.folder} lists a result that is not there, {file}")
        try:
            return Result.load(file)
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error})") from error

    def picture(self, index: int) -> Path:
        """The picture of a row's samples, where they can be drawn."""
        return self.folder / self.rows[index]["picture"]

    def written(self, index: int) -> list[Path]:
        """The files of a row's samples that are no pictures, such as texts."""
        return [self.folder / name for name in self.rows[index].get("written", ())]


def open_run(folder: str | Path) -> Run:
    """What `tokensteer run` or `compare` left in a folder, finished or not."""
    folder = Path(folder)
    config = _read(folder, CONFIG)
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{folder} is no run folder (its {CONFIG} does not say which format it has)")
    written: Any = config["format"]  # pyright: ignore[reportUnknownVariableType]
    if written != FORMAT:
        raise ValueError(
            f"{folder} was written in format {written} and this tokensteer reads {FORMAT}: run it again (its {CONFIG} "
            "has the command), or install the tokensteer that wrote it"
        )
    rows = _read(folder, RESULTS)
    if not isinstance(rows, list):
        raise ValueError(f"{folder / RESULTS} is damaged (it should be a list of rows)")
    return Run(folder, config, rows)  # pyright: ignore[reportUnknownArgumentType]


def _read(folder: Path, name: str) -> object:
    file = folder / name
    if not file.is_file():
        other = "it is a file" if folder.exists() else "there is no such folder"
        raise FileNotFoundError(f"{folder} is no run folder ({f'it has no {name}' if folder.is_dir() else other})")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error})") from error


# ---- writing


def whole(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file beside its place, then move it there: it is complete or as it was before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        write(unfinished)
        unfinished.chmod(0o644)  # safetensors lets nobody else read what it writes
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(file: Path, content: object) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    whole(file, lambda place: place.write_text(text))


def check_free(folder: Path, force: bool) -> None:
    """Say so unless a run may be written there: in a new or empty folder, or with `force` over an earlier run."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file: give --out a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{there} cannot be written to: give --out another folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not force:
        raise ValueError(f"{folder} is not empty: give --out another folder, or --force to replace the run in it")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds no run that --force could replace: give --out another folder, or empty it")


@dataclass
class Writer:
    """Fills a run folder row by row. Nothing is written, and nothing of an earlier run replaced, before the first."""

    folder: Path
    config: Mapping[str, Any]
    force: bool = False
    rows: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    def __post_init__(self) -> None:
        check_free(self.folder, self.force)

    def add(
        self, name: str, row: Mapping[str, Any], result: Result, samples: Mapping[str, Callable[[Path], None]]
    ) -> None:
        """A finished row; its files are called after `name`. `samples` says by their suffixes which files are made for
        people to look at, and how."""
        if not self.rows:
            self._clear()
            write_json(self.folder / RESULTS, [])
            write_json(self.folder / CONFIG, self.config)
        stem = f"{ROWS}/{len(self.rows):03d}-{name}"
        files: dict[str, Any] = {"file": f"{stem}.safetensors"}
        whole(self.folder / files["file"], result.save)
        for suffix, write in samples.items():
            whole(self.folder / f"{stem}{suffix}", write)
        if PICTURE in samples:
            files["picture"] = f"{stem}{PICTURE}"
        written = [f"{stem}{suffix}" for suffix in samples if suffix != PICTURE]
        self.rows.append({**row, **files} | ({"written": written} if written else {}))
        write_json(self.folder / RESULTS, self.rows)

    def _clear(self) -> None:
        """Remove an earlier run, and nothing else that may be in its folder."""
        for name in (CONFIG, RESULTS, REPORT):
            (self.folder / name).unlink(missing_ok=True)
        rows = list((self.folder / ROWS).glob("*"))
        ours = {file.stem for file in rows if file.suffix == ".safetensors"}
        made = [file for file in rows if file.stem in ours]
        for file in [*made, *(self.folder / FIGURES).glob(f"*{PICTURE}")]:
            file.unlink()
