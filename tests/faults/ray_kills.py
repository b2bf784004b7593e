"""Runs on Ray workers, of which the process that was started or a worker is killed at random moments.

    PYTHONPATH=src python -m tests.faults.ray_kills --seed 0 --count 24

Runs have two workers, which Ray starts on this machine or which are on a cluster of two nodes (`ray start`). The moment
is uniform over the time a run takes. A run that loses a worker must go on by itself. One that is killed itself must
leave a folder that opens and no process, and is resumed with any number of workers. In the end every file must be that
of a run in one process that was not killed, bit for bit, but for times.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.kills import content, opens
from tests.helpers.ray_cluster import Cluster, cluster, descendants, named
from tokensteer.app.runs.claims import CLAIM

SIZE = ("--particles", "8", "--populations", "4", "--steps", "40", "--islands", "4")
COMMANDS = {
    "run": ("run", "digits", "--method", "smc-base", *SIZE),
    "compare": ("compare", "digits", "--methods", "smc-base", "svdd", "--seeds", "0", "1", *SIZE),
}
PLACES = ("this machine", "a cluster")
VICTIMS = ("the run", "a worker")
LIMIT = 300.0  # seconds for a run to end
LEAVE = 180.0  # seconds for workers to notice that the run is gone


def is_worker(process: int) -> bool:
    """Whether it is the process of an actor, at work or not yet. The command of a node names the script of workers too,
    and begins with another program."""
    command = named(process)
    starts = Path(command.split(" ")[0]).name.startswith("python") and "default_worker.py" in command
    return starts or command.startswith(("ray::Actor", "ray::IDLE"))


@dataclass
class RayBench:
    """Commands, how long they take, what they write if they are not killed, and what was found."""

    folder: Path
    random: random.Random
    cluster: Cluster
    started: int = 0
    kills: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])
    findings: list[str] = field(default_factory=list[str])
    expected: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    takes: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    longest: float = 0.0
    """Seconds until the last process of a killed run was gone, at most."""

    def start(self, name: str, out: Path, where: str | None, *more: str) -> subprocess.Popen[str]:
        """A command on two workers somewhere, or in one process."""
        spread = {"this machine": ("--workers", "2"), "a cluster": ("--workers", "2", "--ray", self.cluster.address)}
        words = (*COMMANDS[name], *(() if where is None else spread[where]), *more, "--out", str(out))
        return subprocess.Popen(
            [sys.executable, "-m", "tokensteer", *words],
            env=self.cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def uninterrupted(self, name: str, where: str) -> tuple[float, dict[str, Any]]:
        """How long a command takes there, and what it writes in one process."""
        if name not in self.expected:
            self._whole(name, None)
            self.expected[name] = content(self.folder / f"{name}-None")
        if (name, where) not in self.takes:
            self.takes[name, where] = self._whole(name, where)
        return self.takes[name, where], self.expected[name]

    def _whole(self, name: str, where: str | None) -> float:
        began = time.monotonic()
        process = self.start(name, self.folder / f"{name}-{where}", where)
        said, _ = process.communicate(timeout=LIMIT)
        if process.returncode:
            raise RuntimeError(f"{name} on {where} ends with {process.returncode} without being killed: {said}")
        return time.monotonic() - began

    def processes(self, run: int, where: str) -> list[int]:
        """Those of a run, or of the cluster it uses, without itself."""
        roots = [run] if where == "this machine" else [node.process.pid for node in self.cluster.nodes]
        return [each for root in roots for each in descendants(root)]

    def kill(self, name: str, where: str, victim: str) -> None:
        """Run a command in a new folder, kill one process at a random moment, let it end and compare."""
        takes, expected = self.uninterrupted(name, where)
        self.started += 1
        out, moment = self.folder / f"run-{self.started}", self.random.random() * takes
        process = self.start(name, out, where)
        time.sleep(moment)
        killed = self._kill_run(process, where, out) if victim == "the run" else self._kill_worker(process, where)
        wrong = None if killed is None else self._after(name, process, out, victim, expected)
        if killed is not None:
            self.kills[name, where, victim] += 1
            for what in filter(None, (killed, wrong)):
                self.findings.append(f"{name} on {where}, {victim} killed after {moment:.3f} s: {what}")

    def _kill_run(self, process: subprocess.Popen[str], where: str, out: Path) -> str | None:
        """What is wrong with what it leaves, or nothing; None if it was over."""
        below = descendants(process.pid)
        process.kill()
        process.communicate(timeout=LIMIT)
        if process.returncode != -signal.SIGKILL:
            return None
        began = time.monotonic()
        while left := [each for each in below if named(each)]:
            if time.monotonic() > began + LEAVE:
                return f"{len(left)} processes are left: {', '.join(map(named, left))[:200]}"
            time.sleep(0.1)
        self.longest = max(self.longest, time.monotonic() - began)
        return (opens(out) if out.is_dir() else None) or ""

    def _kill_worker(self, process: subprocess.Popen[str], where: str) -> str | None:
        while process.poll() is None:
            workers = [each for each in self.processes(process.pid, where) if is_worker(each)]
            if workers:
                os.kill(self.random.choice(workers), signal.SIGKILL)
                return ""
            time.sleep(0.01)
        return None

    def _after(
        self, name: str, process: subprocess.Popen[str], out: Path, victim: str, expected: dict[str, Any]
    ) -> str | None:
        """What is wrong in the end, if anything."""
        if victim == "the run":
            process = self.start(name, out, self.random.choice((None, *PLACES)), "--resume")
        try:
            said, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            return "it does not end"
        if process.returncode:
            return f"it ends with {process.returncode}: {said[-500:]}"
        if (out / CLAIM).exists():
            return "the folder is still claimed"
        found = content(out)
        differ = [file for file in sorted(expected | found) if expected.get(file) != found.get(file)]
        return f"these files are not as they were: {', '.join(differ)}" if differ else None

    def __str__(self) -> str:
        counts = "; ".join(f"{name} on {where}, {victim}: {n}" for (name, where, victim), n in self.kills.items())
        times = ", ".join(f"{name} on {where} {takes:.1f} s" for (name, where), takes in self.takes.items())
        found = f"{self.kills.total()} kills ({counts}), {len(self.findings)} findings"
        return f"{found}; processes gone within {self.longest:.1f} s; uninterrupted: {times}"


def kill_all(seed: int, count: int, say: Callable[[str], object]) -> RayBench:
    source = str(Path(__file__).parents[2] / "src")
    with tempfile.TemporaryDirectory() as folder, cluster(2, PYTHONPATH=source) as nodes:
        bench = RayBench(Path(folder), random.Random(seed), nodes)
        kinds = [(name, where, victim) for where in PLACES for victim in VICTIMS for name in COMMANDS]
        try:
            while bench.kills.total() < count:
                known = len(bench.findings)
                bench.kill(*min(kinds, key=lambda kind: bench.kills[kind]))
                for finding in bench.findings[known:]:
                    say(f"{finding}\n")
        except KeyboardInterrupt:
            say("stopped\n")
        say(f"seed {seed}: {bench}\n")
    return bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=24)
    options = parser.parse_args()
    return 1 if kill_all(options.seed, options.count, sys.stdout.write).findings else 0


if __name__ == "__main__":
    sys.exit(main())
