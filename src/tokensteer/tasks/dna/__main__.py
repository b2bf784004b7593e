"""`python -m tokensteer.tasks.dna`: what `tokensteer train dna` has no options for.

    python -m tokensteer.tasks.dna --drakes --goal 0 --out FOLDER --device cuda --minutes 7
    python -m tokensteer.tasks.dna --reference --weights FOLDER --out FOLDER

The first tunes two denoisers for a cell type by DRAKES. The second counts anew what samples are compared with, where
pyjaspar has motifs to count.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from tokensteer.tasks.common.task import SHIPPED, Setup
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.dna import reference
from tokensteer.tasks.dna.data import CELLS, data
from tokensteer.tasks.dna.model import NAME
from tokensteer.tasks.dna.proposals import train_drakes
from tokensteer.tasks.dna.task import task


def main(arguments: Sequence[str] | None = None) -> None:
    words = argparse.ArgumentParser(
        prog=f"python -m tokensteer.tasks.{NAME}", description="DRAKES and reference counts."
    )
    part = words.add_mutually_exclusive_group(required=True)
    part.add_argument("--drakes", action="store_true", help="tune the denoiser by DRAKES, without and with a KL term")
    part.add_argument("--reference", action="store_true", help="count the best real sites of --weights anew")
    words.add_argument("--out", type=Path, required=True, help="folder for what is made")
    words.add_argument("--weights", type=Path, default=SHIPPED, help="folder of the networks to tune or count with")
    words.add_argument("--device", default="cpu", help="cpu or cuda")
    words.add_argument("--goal", type=int, default=0, help=f"with --drakes: the cell type, {', '.join(CELLS)} from 0")
    words.add_argument("--seed", type=int, default=0, help="with --drakes")
    words.add_argument("--minutes", type=float, help="with --drakes: time for training, measuring not counted")
    words.add_argument("--scale", type=float, default=1.0, help="without --minutes: this many times the usual rounds")
    given = words.parse_args(arguments)
    torch.backends.cudnn.benchmark = True  # the shapes hardly ever change
    try:
        training = Training(given.out, given.device, given.seed, given.minutes, given.scale)
        if given.drakes:
            train_drakes(task, training, given.goal, given.weights)
        else:
            reference.build(Setup(device=given.device, weights=given.weights), data()).save(given.out)
    except (FileNotFoundError, ValueError) as error:
        say(f"{NAME}: {error}")
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
