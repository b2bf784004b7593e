"""`tokensteer report`: one HTML page of a run folder."""

from __future__ import annotations

from tokensteer.app.options import Report
from tokensteer.app.report import figures, write
from tokensteer.app.terminal.tables import say


def main(command: Report, words: str) -> int:
    made = figures(command.folder) if command.figures else []  # first: without matplotlib nothing is written
    say(f"Report: {write(command.folder)}")
    for file in made:
        say(f"Figure: {file}")
    return 0
