"""`python -m tokensteer.tasks.cifar`: one part of the training of `cifar`, in one run or in several.

    python -m tokensteer.tasks.cifar --part tokeniser --out FOLDER --device cuda --minutes 2.4
    python -m tokensteer.tasks.cifar --part denoiser --out FOLDER --device cuda --minutes 9 --horizon 18
    python -m tokensteer.tasks.cifar --part denoiser --out FOLDER --device cuda --minutes 9 --horizon 18 \
        --resume FOLDER/checkpoints
    python -m tokensteer.tasks.cifar --part denoiser --out OTHER --device cuda --minutes 9 --weights FOLDER \
        --start FOLDER
    python -m tokensteer.tasks.cifar --part judge --out FOLDER --device cuda --minutes 3.6
    python -m tokensteer.tasks.cifar --part lpips --out FOLDER

The third continues the second, and the fourth trains what they made further. The last writes LPIPS in a file of 15 MB,
for a machine that has only this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from tokensteer.tasks.cifar.train import NAME, RECIPE, train_part
from tokensteer.tasks.common import lpips
from tokensteer.tasks.common.command import given, run_command
from tokensteer.tasks.common.part_training import Pieces
from tokensteer.tasks.common.training import Training


@dataclass(frozen=True)
class Command:
    """Training of one network of `cifar`."""

    part: str  # tokeniser, denoiser, reward, judge or lpips
    out: Path  # folder for weights, cards and checkpoints
    device: str = "cpu"  # cpu or cuda
    seed: int = 0  # of weights and batches
    minutes: float | None = None  # time of this run, measuring not counted
    scale: float = 1.0  # without --minutes: this many times the usual steps
    horizon: float | None = None  # minutes of all runs together, if others follow; the rate falls until then
    resume: Path | None = None  # folder with the checkpoint to continue from
    start: Path | None = None  # folder with a finished denoiser to train further
    weights: Path | None = None  # folder of the tokeniser, if it is not --out
    adversarial: bool = False  # train the tokeniser with a discriminator too
    noise: float | None = None  # the largest share of an image's codes that are replaced to train the tokeniser
    dropout: float = 0.0  # of the denoiser
    rate: float | None = None  # the highest learning rate, if not the usual
    batch_size: int | None = None  # if not the usual
    levels: tuple[int, ...] | None = None  # of the tokeniser's numbers, if not the usual: their product is the codes
    exact: bool = False  # checkpoints in float32, three times as large


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(NAME, run, arguments)


def run(command: OmitArgPrefixes[Command]) -> None:
    if command.part == "lpips":
        lpips.convert(command.out / lpips.FILE)
        return
    training = Training(command.out, command.device, command.seed, command.minutes, command.scale)
    changes = given(rate=command.rate, batch_size=command.batch_size)
    recipe = replace(
        RECIPE,
        tokeniser=replace(RECIPE.tokeniser, levels=command.levels or RECIPE.tokeniser.levels),
        adversarial=command.adversarial,
        denoiser=replace(RECIPE.denoiser, dropout=command.dropout),
        tokeniser_plan=replace(RECIPE.tokeniser_plan, **changes),
        denoiser_plan=replace(RECIPE.denoiser_plan, **changes),
        reward_plan=replace(RECIPE.reward_plan, **changes),
        judge_plan=replace(RECIPE.judge_plan, **changes),
        **given(noise=command.noise),
    )
    pieces = Pieces(command.resume, command.horizon, command.weights, command.exact, start=command.start)
    train_part(command.part, training, pieces, recipe)


if __name__ == "__main__":
    main()
