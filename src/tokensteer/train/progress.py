"""A run made visible: a bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tokensteer.train.drakes import Tuning
from tokensteer.train.fit import Report
from tokensteer.train.proposal import Progress

Entry = Report | Progress | Tuning
Shows = Callable[[Entry], None]
PAUSE = 5.0
"""Seconds between two lines."""


@contextmanager
def shown(title: str) -> Generator[Shows, None, None]:
    """What `fit`, `fit_proposal` and `fit_drakes` can be watched with, on the standard error stream."""
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    name, words = (TextColumn(said, markup=False) for said in ("{task.fields[title]}", "{task.description}"))
    with Progress(name, BarColumn(), TimeRemainingColumn(), words, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=1.0, title=title)

        def watch(report: Entry) -> None:
            bar.update(task, completed=report.done, description=_words(report))

        yield watch


def _words(report: Entry) -> str:
    said = f"step {report.step}, loss {report.loss:.4f}"
    if isinstance(report, Progress):
        said += f", ESS/N {report.ess:.3f}, reward/kl {report.reward:.2f}, KL {report.divergence:.2f}"
    if isinstance(report, Tuning):
        said += f", reward {report.reward:.2f}, KL {report.divergence:.2f}"
    return said


def _lines(title: str) -> Shows:
    last = -PAUSE

    def watch(report: Entry) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < PAUSE and report.done < 1.0:
            return
        last = now
        line = f"{title}: {report.done:4.0%}, {_words(report)}, {report.seconds:.0f} s"
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    return watch
