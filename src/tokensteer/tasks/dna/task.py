"""DNA of 200 bp that is accessible in one cell type, HepG2 unless the goal is another.

    tokensteer train dna --out FOLDER --device cuda --minutes 6

trains all its networks. The data, `dhs200_4cell.npz`, does not come with the package; docs/dna.md says what is in it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tokensteer.core.models.product import Product, guided
from tokensteer.tasks.common import learned
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.dna import proposals, reference
from tokensteer.tasks.dna import train as dna_train
from tokensteer.tasks.dna.data import CELLS, LENGTH
from tokensteer.tasks.dna.metrics import Metrics
from tokensteer.tasks.dna.model import (
    KLS,
    LOG_P,
    NAME,
    as_denoiser,
    cell_of,
    model,
    of_cell,
    tilt,
    uniform_model,
)
from tokensteer.tasks.dna.output import picture, write_fasta

GUIDANCE = 1.5
"""The scale of classifier-free guidance."""


def task(setup: Setup) -> Task:
    """Towards the cell type `setup.goal`, HepG2 unless given."""
    cell, name = cell_of(setup.goal), setup.chosen_reward(NAME, KLS)
    other = None if name == LOG_P else name
    prior, reward, judge = model(setup), setup.load(NAME, "reward"), setup.load(NAME, "judge")
    metrics = Metrics(cell, prior.denoiser, reward, judge, reference.load(setup.weights))
    guidance = GUIDANCE if setup.guidance is None else setup.guidance

    def of_goal() -> Product:
        conditional = replace(prior, denoiser=of_cell(setup.load(NAME, "denoiser"), cell))
        return guided(conditional, prior, guidance)

    return Task(
        NAME,
        f"DNA of {LENGTH} letters, towards sites {'open' if name == LOG_P else 'active'} in {CELLS[cell]}",
        prior,
        tilt(reward, cell, name, setup.kl),
        metrics,
        picture,
        metrics.marks,
        learned=lambda: learned.find(setup.weights, NAME, cell, as_denoiser, setup.device, other),
        written={".fasta": write_fasta},
        guided=of_goal,
        uniform=lambda: uniform_model(setup),
        tuned=lambda name: proposals.find_tuned(setup.weights, name, cell, setup.device),
        reward=other,
        goal=cell,
        guidance=guidance,
    )


train = partial(dna_train.train, make=task)
proposal = partial(proposals.proposal, task)
