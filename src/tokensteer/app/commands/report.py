"""`tokensteer report`: one HTML page of a run folder."""

from __future__ import annotations

from tokensteer.app.options import Report
from tokensteer.app.report import figures, write
from tokensteer.app.runs.folder import open_run
from tokensteer.app.terminal.tables import learned_elsewhere, plans, say


def main(command: Report, words: str) -> int:
    made = figures(command.folder) if command.figures else []  # first: without matplotlib nothing is written
    say(f"Report: {write(command.folder)}")
    for file in made:
        say(f"Figure: {file}")
    rows = open_run(command.folder).rows
    for line in [*plans(rows), *learned_elsewhere(rows)]:
        say(line)
    return 0
