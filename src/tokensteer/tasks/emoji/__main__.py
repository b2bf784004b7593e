"""`python -m tokensteer.tasks.emoji`: one part of the making of `emoji`, in one run or in several.

    python -m tokensteer.tasks.emoji --part data --out FOLDER
    python -m tokensteer.tasks.emoji --part states --out FOLDER --device cuda
    python -m tokensteer.tasks.emoji --part tokeniser --out FOLDER --device cuda --minutes 4
    python -m tokensteer.tasks.emoji --part denoiser --out FOLDER --device cuda --minutes 8 --horizon 14
    python -m tokensteer.tasks.emoji --part denoiser --out FOLDER --device cuda --minutes 6 --horizon 14 \
        --resume FOLDER/checkpoints
    python -m tokensteer.tasks.emoji --part reward --out FOLDER --device cuda --minutes 2
    python -m tokensteer.tasks.emoji --part judge --out FOLDER --device cuda --minutes 2
    python -m tokensteer.tasks.emoji --part quality --out FOLDER --device cuda
    python -m tokensteer.tasks.emoji --part kid --out FOLDER

The first needs the packages of drawings, resvg and MiniLM; the others need what it wrote and LPIPS
(`python -m tokensteer.tasks.cifar --part lpips` writes it as one file). The reward also needs EfficientNet, the judge
and the last part Inception: docs/emoji.md names the files and their packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from tokensteer.core.numerics.domains import check_whole
from tokensteer.tasks.common.command import given, run_command
from tokensteer.tasks.common.part_training import Pieces
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.emoji.train import NAME, RECIPE, train_part


@dataclass(frozen=True)
class Command:
    """One part of the making of `emoji`."""

    part: str  # data, states, tokeniser, denoiser, reward, judge, quality or kid
    out: Path  # folder for weights, cards and checkpoints
    device: str = "cpu"  # cpu or cuda
    seed: int = 0  # of weights and batches
    minutes: float | None = None  # time of this run, measuring not counted
    scale: float = 1.0  # without --minutes: this many times the usual steps
    horizon: float | None = None  # minutes of all runs together, if others follow; the rate falls until then
    resume: Path | None = None  # folder with the checkpoint to continue from
    start: Path | None = None  # folder with a finished denoiser to train further
    weights: Path | None = None  # folder of the parts before, if it is not --out
    levels: tuple[int, ...] | None = None  # of the tokeniser's numbers, if not the usual: their product is the codes
    noise: float | None = None  # the largest share of a drawing's codes that are replaced to train the tokeniser
    dropout: float | None = None  # of the denoiser, if not the usual
    rate: float | None = None  # the highest learning rate, if not the usual
    batch_size: int | None = None  # if not the usual
    samples: int | None = None  # of quality, if not the usual
    exact: bool = False  # checkpoints in float32, three times as large


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(NAME, run, arguments)


def run(command: OmitArgPrefixes[Command]) -> None:
    if command.samples is not None:
        check_whole("--samples", command.samples, 2, "a sample is found among those of other captions")
    training = Training(command.out, command.device, command.seed, command.minutes, command.scale)
    changes = given(rate=command.rate, batch_size=command.batch_size)
    recipe = replace(
        RECIPE,
        tokeniser=replace(RECIPE.tokeniser, levels=command.levels or RECIPE.tokeniser.levels),
        denoiser=replace(RECIPE.denoiser, **given(dropout=command.dropout)),
        tokeniser_plan=replace(RECIPE.tokeniser_plan, **changes),
        denoiser_plan=replace(RECIPE.denoiser_plan, **changes),
        tower_plan=replace(RECIPE.tower_plan, **changes),
        **given(samples=command.samples, noise=command.noise),
    )
    pieces = Pieces(command.resume, command.horizon, command.weights, command.exact, start=command.start)
    train_part(command.part, training, pieces, recipe)


if __name__ == "__main__":
    main()
