"""`tokensteer report`: one HTML page of a run folder."""

from __future__ import annotations

import webbrowser

from tokensteer.app.options import Outcome, Report
from tokensteer.app.report import figures, write
from tokensteer.app.runs.folder import open_run
from tokensteer.app.terminal.tables import learned_elsewhere, plans, say


def main(command: Report, words: str) -> Outcome:
    made = figures(command.folder) if command.figures else []  # first: without matplotlib nothing is written
    page = write(command.folder)
    say(f"Report: {page}")
    for file in made:
        say(f"Figure: {file}")
    rows = open_run(command.folder).rows
    for line in [*plans(rows), *learned_elsewhere(rows)]:
        say(line)
    if command.open and not webbrowser.open(page.resolve().as_uri()):
        say(f"There is no browser here to open {page}")
    return {"report": str(page), "figures": [str(file) for file in made]}
