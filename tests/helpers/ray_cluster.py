"""A Ray cluster on this machine, of nodes that `ray start` starts, as on many."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 60.0  # seconds for a node to start or to stop
STORE = str(100 * 2**20)


def children(process: int) -> list[int]:
    """The processes that one has started and that run, in any order."""
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it is gone
        return []


def descendants(process: int) -> list[int]:
    below = children(process)
    return below + [each for child in below for each in descendants(child)]


def named(process: int) -> str:
    """The command of a process, or the name that Ray gave it after what it does."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@dataclass
class Node:
    """A node as a process: `ray start --block`."""

    process: subprocess.Popen[str]
    said: Path

    def kill(self) -> None:
        """As if its machine lost power: all processes at once."""
        for each in [self.process.pid, *descendants(self.process.pid)]:
            _kill(each)
        self.process.wait(LIMIT)

    def stop(self) -> None:
        below = descendants(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for each in below:  # those that outlive it
            _kill(each)


def _kill(process: int) -> None:
    try:
        os.kill(process, 9)
    except ProcessLookupError:
        return


@dataclass
class Cluster:
    """Nodes of one CPU each, the first one the head. `environment` is that of commands that use it."""

    folder: Path
    environment: dict[str, str]
    nodes: list[Node] = field(default_factory=list[Node])
    address: str = ""

    def add(self) -> Node:
        """Start a node, and wait until it has joined."""
        said = self.folder / f"node-{len(self.nodes)}.txt"
        head = ["--head", "--port", "0", "--include-dashboard", "false", "--temp-dir", str(self.folder / "ray")]
        words = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus", "1"]
        words += ["--object-store-memory", STORE, *(["--address", self.address] if self.nodes else head)]
        with said.open("w") as out:
            process = subprocess.Popen(words, env=self.environment, stdout=out, stderr=subprocess.STDOUT, text=True)
        node = Node(process, said)
        self.nodes.append(node)
        until = time.monotonic() + LIMIT
        while "Ray runtime started" not in said.read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"a node does not start: {said.read_text()}")
            time.sleep(0.1)
        if not self.address:
            found = re.search(r"--address='([^']+)'", said.read_text())
            assert found is not None, said.read_text()
            self.address = found[1]
        return node


@contextmanager
def cluster(nodes: int, **environment: str) -> Iterator[Cluster]:
    """A cluster of so many nodes, which end with it. It has a token of its own, so that no other answers to it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need a short path
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    started = Cluster(folder, {**os.environ, "OMP_NUM_THREADS": "1", **own, **environment})
    try:
        for _ in range(nodes):
            started.add()
        yield started
    finally:
        for node in reversed(started.nodes):
            node.stop()
        shutil.rmtree(folder, ignore_errors=True)
