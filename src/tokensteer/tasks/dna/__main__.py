"""`python -m tokensteer.tasks.dna`: training that `tokensteer train dna` has no options for.

    python -m tokensteer.tasks.dna --drakes --goal 0 --out FOLDER --device cuda --minutes 7
    python -m tokensteer.tasks.dna --reference --weights FOLDER --out FOLDER

The first tunes two denoisers for a cell type by DRAKES. The second computes the statistics of the best real sites anew,
with motifs if pyjaspar is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tyro.conf import OmitArgPrefixes

from tokensteer.tasks.common.command import run_command
from tokensteer.tasks.common.task import SHIPPED, Setup
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.dna.data import data
from tokensteer.tasks.dna.proposals import train_drakes
from tokensteer.tasks.dna.task import task


@dataclass(frozen=True)
class Command:
    """DRAKES and reference counts."""

    out: Path  # folder for the files
    drakes: bool = False  # tune the denoiser by DRAKES, without and with a KL term
    reference: bool = False  # count the best real sites of --weights anew
    weights: Path = SHIPPED  # folder of the networks to tune or count with
    device: str = "cpu"  # cpu or cuda
    goal: int = 0  # with --drakes: the cell type, 0 to 3 for HepG2, K562, GM12878, hESCT0
    seed: int = 0  # with --drakes
    minutes: float | None = None  # with --drakes: time for training, measuring not counted
    scale: float = 1.0  # without --minutes: this many times the usual rounds


def run(command: OmitArgPrefixes[Command]) -> None:
    if command.drakes == command.reference:
        raise ValueError("give either --drakes or --reference")
    torch.backends.cudnn.benchmark = True  # the shapes hardly ever change
    if command.drakes:
        training = Training(command.out, command.device, command.seed, command.minutes, command.scale)
        train_drakes(task, training, command.goal, command.weights)
    else:
        setup = Setup(device=command.device, weights=command.weights)
        dna_reference.build(setup, data()).save(command.out)


def main(arguments: Sequence[str] | None = None) -> None:
    run_command("dna", run, arguments)


if __name__ == "__main__":
    main()
