"""Commands killed with SIGKILL at random moments, resumed, and compared with uninterrupted ones.

    PYTHONPATH=src python -m tests.faults.kills --seed 0 --count 50

Each command runs in a child of a process that has everything imported. It is killed at a moment, uniform over the time
it takes, then started again with the same words, and perhaps killed again. In the end every file must be that
of a run that was not killed, bit for bit, but for times. A folder that is left must open, or say why not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tokensteer as ts
from tests.helpers import small_digits as small
from tokensteer.app import cli
from tokensteer.app.runs.claims import CLAIM
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.images import train as images
from tokensteer.train import Plan

TINY = ("--particles", "2", "--populations", "2", "--steps", "4")
METHODS = ("smc-base", "svdd")
TIMES = ("seconds", "started", "command", "date", "minutes", "per second")  # of names whose values are no results
AGAIN = 0.4  # the share of resumed commands that are killed too
PLAN = Plan(24, batch_size=8, report_every=4, save_every=4)
RECIPE = replace(small.RECIPE, plans=(PLAN, PLAN, PLAN))
ROUNDS = replace(small.PROPOSAL.plan, rounds=8, save_every=2)
TAUGHT = replace(small.TAUGHT, proposal=replace(small.PROPOSAL, plan=ROUNDS))


@dataclass(frozen=True)
class Command:
    """Words of the command line, without the folder, and those that go on with what is there."""

    words: tuple[str, ...]
    resume: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        return self.words[0] != "train"


COMMANDS = {
    "run": Command(("run", "digits", "--method", "smc-base", *TINY), ("--resume",)),
    "compare": Command(
        ("compare", "digits", "--methods", "smc-base", "svdd", "--seeds", "0", "1", *TINY), ("--resume",)
    ),
    "train": Command(("train", "digits")),
    "train --proposal": Command(("train", "digits", "--proposal", "--goal", "4")),
}


def shrink() -> None:
    """Make the trainings of digits small, in this process."""
    entry = TASKS["digits"]
    make = images.task
    images.task = lambda recipe, setup: make(recipe, replace(setup, steps=min(setup.num_steps(), 4)))
    TASKS["digits"] = replace(
        entry,
        train=partial(images.train, RECIPE, trial=small.TRIAL),
        proposal=partial(images.proposal, TAUGHT, populations={2: 2}),
    )


def start(words: tuple[str, ...], folder: Path) -> int:
    """The number of a new process that runs a command."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        shrink()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = cli.main([*words, "--out", str(folder)])
    except BaseException:
        (folder.parent / "traceback.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def plain(value: Any) -> Any:
    """A JSON value without times."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items() if not any(word in name for word in TIMES)}
    return [plain(part) for part in value] if isinstance(value, list) else value


def content(folder: Path) -> dict[str, Any]:
    """All files of a folder: JSON without times, others as they are."""
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        str(file.relative_to(folder)): plain(json.loads(file.read_text()))
        if file.suffix == ".json"
        else file.read_bytes()
        for file in found
    }


def opens(folder: Path) -> str | None:
    """None if the folder of a killed run opens as far as it came, or says why not; else what is wrong."""
    try:
        run = ts.open_run(folder)
        for k in range(len(run.rows)):
            run.result(k)
    except (ValueError, FileNotFoundError) as error:
        if (folder / "config.json").is_file():
            return f"a folder with a configuration does not open: {error}"
    except Exception as error:
        return f"opening the folder raises {type(error).__name__}: {error}"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.main(["report", str(folder)])
    lines = said.getvalue().count("\n")
    (folder / "report.html").unlink(missing_ok=True)
    return None if code == 0 or (code == 2 and lines == 1) else f"report ends with {code} and {lines} lines"


@dataclass
class Bench:
    """Commands, how long they take, and what they write if they are not killed."""

    folder: Path
    random: random.Random
    started: int = 0
    kills: Counter[str] = field(default_factory=Counter[str])
    findings: list[str] = field(default_factory=list[str])
    whole: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict[str, Any])

    def uninterrupted(self, name: str) -> tuple[float, dict[str, Any]]:
        if name not in self.whole:
            place, began = self.folder / f"whole-{name.replace(' ', '')}", time.monotonic()
            code = ended(start(COMMANDS[name].words, place))
            if code:
                raise RuntimeError(f"{name} ends with {code} without being killed")
            self.whole[name] = time.monotonic() - began, content(place)
        return self.whole[name]

    def kill(self, name: str, most: int) -> None:
        """Run a command in a new folder, kill it up to `most` times, and let it end."""
        command, (takes, expected) = COMMANDS[name], self.uninterrupted(name)
        self.started += 1
        place, moments = self.folder / f"run-{self.started}", list[str]()
        words = command.words
        while len(moments) < most and (not moments or self.random.random() < AGAIN):
            child, moment = start(words, place), self.random.random() * takes
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
            if ended(child) != -signal.SIGKILL:  # it was quicker this time
                break
            moments.append(f"{moment:.3f}")
            self.kills[name] += 1
            wrong = opens(place) if command.is_run and place.is_dir() else None
            if wrong is not None:
                self._add(name, moments, wrong)
            words = (*command.words, *command.resume)
        if not moments:
            return
        code = ended(start(words, place))
        if code == 2 and not command.is_run and content(place) == expected:
            return  # it was killed after the last file was written, and says that the weights are finished
        if code:
            self._add(name, moments, f"it cannot be resumed, and ends with {code}")
        elif (place / CLAIM).exists():
            self._add(name, moments, "the folder is still claimed")
        else:
            found = content(place)
            differ = [file for file in sorted(expected | found) if expected.get(file) != found.get(file)]
            if differ:
                self._add(name, moments, f"these files are not as they were: {', '.join(differ)}")

    def _add(self, name: str, moments: list[str], what: str) -> None:
        self.findings.append(f"{name}, killed after {' and then '.join(moments)} s: {what}")

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {number}" for name, number in self.kills.items())
        times = ", ".join(f"{name} {takes:.1f} s" for name, (takes, _) in self.whole.items())
        return f"{self.kills.total()} kills ({counts}), {len(self.findings)} findings; uninterrupted: {times}"


def kill_all(seed: int, count: int, names: list[str], say: Callable[[str], object]) -> Bench:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cli.main([*COMMANDS["run"].words, "--out", f"{folder}/first"])  # imports what is imported late
        bench = Bench(Path(folder), random.Random(seed))
        while bench.kills.total() < count:
            name = min(names, key=lambda name: bench.kills[name])
            known = len(bench.findings)
            bench.kill(name, count - bench.kills.total())
            for finding in bench.findings[known:]:
                say(f"{finding}\n")
    say(f"seed {seed}: {bench}\n")
    return bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", choices=COMMANDS, nargs="*", help="kill these commands alone")
    options = parser.parse_args()
    return 1 if kill_all(options.seed, options.count, options.only or list(COMMANDS), sys.stdout.write).findings else 0


if __name__ == "__main__":
    sys.exit(main())
