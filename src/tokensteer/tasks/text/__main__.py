"""`python -m tokensteer.tasks.text`: one part of the prior of texts, in one run or in several.

    python -m tokensteer.tasks.text --part published --out FOLDER
    python -m tokensteer.tasks.text --part corpus --out FOLDER --device cuda --minutes 5
    python -m tokensteer.tasks.text --part windows --out FOLDER
    python -m tokensteer.tasks.text --part denoiser --out FOLDER --device cuda --minutes 8 --horizon 15
    python -m tokensteer.tasks.text --part denoiser --out FOLDER --device cuda --minutes 8 --horizon 15 \
        --resume FOLDER/checkpoints
    python -m tokensteer.tasks.text --part all --out FOLDER --device cuda --minutes 24

The fifth continues the fourth. `tasks.text.prior.train` lists the parts and what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from tokensteer.tasks.common.command import given, run_command
from tokensteer.tasks.common.part_training import Pieces
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.text.prior.train import train, train_part
from tokensteer.tasks.text.prior.work import NAME, RECIPE


@dataclass(frozen=True)
class Command:
    """One part of the prior of texts."""

    part: str  # published, corpus, windows, denoiser, labeller, reward, judge, toxicity, toxicity-judge, quality or all
    out: Path  # folder for the corpus, weights, cards and checkpoints
    device: str = "cpu"  # cpu or cuda
    seed: int = 0  # of prompts, weights and batches
    minutes: float | None = None  # time of this run, measuring not counted
    scale: float = 1.0  # without --minutes: this many times the usual steps or texts
    horizon: float | None = None  # minutes of all runs together, if others follow; the rate falls until then
    resume: Path | None = None  # folder with the checkpoint to continue from
    start: Path | None = None  # folder with a finished denoiser to train further
    rate: float | None = None  # the highest learning rate of the denoiser, if not the usual
    batch_size: int | None = None  # of the denoiser, if not the usual
    more: int | None = None  # blocks of the denoiser after MiniLM's layers, if not the usual
    rows: int | None = None  # texts of the corpus that are written at once, if not the usual
    workers: int | None = None  # processes that clean and split texts, if not the usual
    adam: bool = False  # move all weights of the denoiser by AdamW, none by Muon
    exact: bool = False  # checkpoints in float32, three times as large


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(NAME, run, arguments)


def run(command: OmitArgPrefixes[Command]) -> None:
    training = Training(command.out, command.device, command.seed, command.minutes, command.scale)
    recipe = replace(
        RECIPE,
        muon=not command.adam,
        denoiser=replace(RECIPE.denoiser, **given(more=command.more)),
        denoiser_plan=replace(RECIPE.denoiser_plan, **given(rate=command.rate, batch_size=command.batch_size)),
        writing=replace(RECIPE.writing, **given(rows=command.rows, workers=command.workers)),
    )
    if command.part == "all" and command.start is not None:
        raise ValueError("--start is of one part: give --part denoiser")
    if command.part == "all":
        train(training, recipe)
    else:
        pieces = Pieces(command.resume, command.horizon, exact=command.exact, start=command.start)
        train_part(command.part, training, pieces, recipe)


if __name__ == "__main__":
    main()
