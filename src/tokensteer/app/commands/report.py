"""`tokensteer report`: one HTML page of a run folder."""

from __future__ import annotations

from pathlib import Path

from tokensteer.app.options import Report
from tokensteer.app.terminal.tables import say


def report(command: Report) -> int:
    from tokensteer.app.report import figures  # as below

    made = figures(command.folder) if command.figures else []  # first: without matplotlib nothing is written
    say(f"Report: {write_report(command.folder)}")
    for file in made:
        say(f"Figure: {file}")
    return 0


def write_report(folder: Path) -> Path:
    from tokensteer.app.report import write  # its parts take a while to load

    return write(folder)
