"""Add perplexity under SmolLM2 to a finished run folder, which may come from a machine without that model.

    python -m tokensteer.app.commands.fluency FOLDER

One draw of each population is scored, and the best of it by reward if there is one. The means are added to the metrics
of its row in FOLDER/results.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tokensteer import files
from tokensteer.app.report.folder import read
from tokensteer.app.report.samples import best_texts, drawn_texts
from tokensteer.app.runs import folder as runs
from tokensteer.app.runs.claims import claimed
from tokensteer.app.words.numbers import stored
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.text.fluency import PATTERN, Fluency


def measure(folder: Path, fluency: Fluency | None) -> None:
    """Add the perplexity of each row of a run folder to its results."""
    if fluency is None:
        raise FileNotFoundError(
            f"there is no {PATTERN} in {data_folder()}: set TOKENSTEER_DATA to the folder that has it"
        )
    runs.open_run(folder)  # raises if it is no run folder, before it is claimed
    with claimed(folder):
        rows = list(runs.open_run(folder).rows)
        for k, row in enumerate(read(folder).rows):
            if row.texts:
                every = torch.arange(len(row.answer.samples))
                chosen = {"metrics": drawn_texts(row, every, 1)}
                if rows[k]["best"]:
                    chosen["best"] = best_texts(row, every)
                for kind, entries in chosen.items():
                    found = fluency.perplexity([entry["text"] for entry in entries])
                    rows[k] = {**rows[k], kind: {**rows[k][kind], "perplexity": stored(found)}}
                    said = "" if kind == "metrics" else ", the best by reward"
                    print(f"{row.method}, N = {row.particles}{said}: perplexity {found}")
                files.write_json(folder / runs.RESULTS, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    name = "python -m tokensteer.app.commands.fluency"
    words = argparse.ArgumentParser(prog=name, description="Add perplexity to a run.")
    words.add_argument("folder", type=Path, help="what tokensteer run or compare wrote, of texts")
    try:
        measure(words.parse_args(arguments).folder, Fluency.found())
    except (OSError, ValueError) as error:
        print(f"fluency: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
