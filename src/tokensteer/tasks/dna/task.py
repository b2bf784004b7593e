"""DNA of 200 bp that is accessible in one cell type, HepG2 unless the goal says another.

    python -m tokensteer.tasks.dna.task --out FOLDER --device cuda --minutes 6

trains all its networks; `--proposal`, `--twist` and `--drakes` teach what is there something for a goal, and
`--reference` counts anew what samples are compared with, where pyjaspar has motifs to count. The data,
`dhs200_4cell.npz`, does not come with the package; docs/dna.md says what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tokensteer.core.models.diffusion import Diffusion
from tokensteer.tasks.common import proposals as learned
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.tasks.common.training import Training, chosen, parser, say
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.dna import train as dna_train
from tokensteer.tasks.dna.data import CELLS, LENGTH, data
from tokensteer.tasks.dna.metrics import Metrics
from tokensteer.tasks.dna.model import (
    KL,
    NAME,
    as_denoiser,
    cell_of,
    classifier,
    file_of,
    model,
    of_cell,
    tilt,
    uniform_model,
)
from tokensteer.tasks.dna.output import picture, write_fasta
from tokensteer.tasks.dna.proposals import find_tuned, train_drakes, train_proposal
from tokensteer.tasks.nets import load as load_net


def task(setup: Setup | None = None) -> Task:
    """Towards the cell type `setup.goal`, HepG2 unless given."""
    setup = Setup() if setup is None else setup
    cell = cell_of(setup.goal)
    prior, reward, judge = model(setup), classifier("reward", setup), classifier("judge", setup)
    metrics = Metrics(cell, prior.denoiser, reward, judge, dna_reference.load(setup.weights))

    def conditional() -> Diffusion:
        net = load_net(file_of("denoiser", setup.weights), setup.device)
        return replace(prior, denoiser=of_cell(net, cell))

    return Task(
        NAME,
        f"DNA of {LENGTH} letters, towards sites open in {CELLS[cell]}",
        prior,
        tilt(reward, cell, kl=KL if setup.kl is None else setup.kl),
        metrics,
        picture,
        metrics.marks,
        learned=lambda: learned.find(setup.weights, NAME, cell, as_denoiser, setup.device),
        written={".fasta": write_fasta},
        conditional=conditional,
        uniform=lambda: uniform_model(setup),
        tuned=lambda name: find_tuned(setup.weights, name, cell, setup.device),
    )


def train(training: Training) -> None:
    """Make all its weights, with cards and figures."""
    dna_train.train(training, make=task)


learn = partial(train_proposal, task)


learn_twist = partial(train_proposal, task, twist=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the task's training."""
    words = parser("tokensteer.tasks.dna.task", f"Train and measure all networks of the task {NAME}.")
    words.add_argument("--samples", type=int, default=1000, help="unconditional samples to measure")
    words.add_argument("--populations", type=int, default=30, help="independent runs of each method")
    words.add_argument("--goal", type=int, default=0, help=f"the cell type, 0 to {len(CELLS) - 1}: {', '.join(CELLS)}")
    words.add_argument(
        "--sites", type=int, default=5000, help="sites of each part of the data to measure with, at most"
    )
    words.add_argument("--num-steps", type=int, default=100, help="steps of the sampler")
    words.add_argument("--weights", type=Path, default=SHIPPED, help="what is taught, or compared with")
    part = words.add_mutually_exclusive_group()
    part.add_argument("--proposal", action="store_true", help="teach a proposal for the goal instead")
    part.add_argument("--twist", action="store_true", help="teach the proposal a twist instead")
    part.add_argument("--drakes", action="store_true", help="tune the denoiser by DRAKES instead")
    part.add_argument("--reference", action="store_true", help="count the best real sites of --weights anew instead")
    given = words.parse_args(arguments)
    torch.backends.cudnn.benchmark = True  # the shapes hardly ever change
    try:
        training = chosen(given)
        cell_of(given.goal)  # before anything is trained for it
        if given.proposal or given.twist:
            train_proposal(task, training, given.goal, given.weights, twist=given.twist)
        elif given.drakes:
            train_drakes(task, training, given.goal, given.weights)
        elif given.reference:
            dna_reference.build(Setup(device=training.device, weights=given.weights), data()).save(training.out)
        else:
            trial = dna_train.Trial(given.samples, given.populations, given.goal, given.sites, given.num_steps)
            dna_train.train(training, trial, make=task)
    except (FileNotFoundError, ValueError) as error:
        say(f"{NAME}: {error}")
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
