"""Progress of a run on the standard error stream: a bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tokensteer.train.drakes import Tuning
from tokensteer.train.proposal_trainee import Progress
from tokensteer.train.rounds import Report

PAUSE = 5.0  # seconds between two lines


@contextmanager
def shown(title: str) -> Generator[Callable[[Report], None], None, None]:
    """A `watch` for `fit`, `fit_proposal` and `fit_drakes`."""
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    name, words = (TextColumn(text, markup=False) for text in ("{task.fields[title]}", "{task.description}"))
    with Progress(name, BarColumn(), TimeRemainingColumn(), words, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=1.0, title=title)
        yield lambda report: bar.update(task, completed=report.done, description=_words(report))


def _words(report: Report) -> str:
    words = f"step {report.step}, loss {report.loss:.4f}"
    if isinstance(report, Progress):
        words += f", ESS/N {report.ess:.3f}, reward/kl {report.reward:.2f}, KL {report.divergence:.2f}"
        if report.held_out is not None:
            words += f", held out: ESS/N {report.held_out.ess:.3f}, log Z {report.held_out.log_z:.2f}"
    if isinstance(report, Tuning):
        words += f", reward {report.reward:.2f}, KL {report.divergence:.2f}"
    return words


def _lines(title: str) -> Callable[[Report], None]:
    last = -PAUSE

    def watch(report: Report) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < PAUSE and report.done < 1.0:
            return
        last = now
        sys.stderr.write(f"{title}: {report.done:4.0%}, {_words(report)}, {report.seconds:.0f} s\n")
        sys.stderr.flush()

    return watch
