"""Perplexity added to a run folder afterwards: what ran where SmolLM2 is not is measured where it is.

    python -m tokensteer.app.commands.fluency FOLDER

One draw of each population is read, and the mean stands among the metrics of its row, `results.json` in FOLDER.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tokensteer import files
from tokensteer.app.report.folder import read
from tokensteer.app.report.samples import drawn_texts
from tokensteer.app.runs import folder as runs
from tokensteer.app.runs.claims import claimed
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.text.fluency import NEEDED, PATTERN, Fluency


def measure(folder: Path, fluency: Fluency | None) -> None:
    """Write what the language model says of each row of a run folder into its results."""
    if fluency is None:
        raise FileNotFoundError(
            f"there is no {PATTERN} in {data_folder()}, or no {' and '.join(NEEDED)} to read it: set TOKENSTEER_DATA "
            f"to the folder that has it, and pip install {' '.join(NEEDED)}"
        )
    runs.open_run(folder)  # or say what is wrong with it
    with claimed(folder):
        _measure(folder, fluency)


def _measure(folder: Path, fluency: Fluency) -> None:
    rows = list(runs.open_run(folder).rows)
    for k, row in enumerate(read(folder).rows):
        if not row.texts:
            continue
        texts = [entry["text"] for entry in drawn_texts(row, torch.arange(len(row.answer.samples)), 1)]
        found = fluency.perplexity(texts)
        metrics = {**rows[k]["metrics"], "perplexity": list(found.numbers().values())}
        rows[k] = {**rows[k], "metrics": metrics}
        files.write_json(folder / runs.RESULTS, rows)
        print(f"{row.method}, N = {row.particles}: perplexity {found}")


def main(arguments: Sequence[str] | None = None) -> int:
    words = argparse.ArgumentParser(
        prog="python -m tokensteer.app.commands.fluency", description="Add perplexity to a run."
    )
    words.add_argument("folder", type=Path, help="what tokensteer run or compare wrote, of texts")
    try:
        measure(words.parse_args(arguments).folder, Fluency.found())
    except (OSError, ValueError) as error:
        print(f"fluency: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
