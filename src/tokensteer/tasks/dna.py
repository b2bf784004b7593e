"""DNA of 200 bp that is accessible in one cell type, HepG2 unless the goal says another.

    python -m tokensteer.tasks.dna --out FOLDER --device cuda --minutes 6

trains all its networks. The data, `dhs200_4cell.npz`, does not come with the package; docs/dna.md says what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Generator, Tensor

from tokensteer.core.smc import Result
from tokensteer.tasks import dna_reference, dna_train
from tokensteer.tasks.dna_counts import distinct_kmers
from tokensteer.tasks.dna_data import CELLS, LETTERS, MASK
from tokensteer.tasks.dna_metrics import correlation, kmer_tables, median
from tokensteer.tasks.dna_model import KL, NAME, cell_of, classifier, logit, model, tilt
from tokensteer.tasks.metrics import Measured, hamming, in_parts, measured, nll_bound
from tokensteer.tasks.png import write_coloured_png
from tokensteer.tasks.task import Setup, Task
from tokensteer.tasks.training import Training


def task(setup: Setup | None = None) -> Task:
    """Towards the cell type `setup.goal`, HepG2 unless given."""
    setup = Setup() if setup is None else setup
    cell = cell_of(setup.goal)
    prior, reward, judge = model(setup), classifier("reward", setup), classifier("judge", setup)
    reference = dna_reference.load(setup.weights)

    def marks(ids: Tensor) -> Tensor:
        return (in_parts(judge, ids)[:, cell].exp() > 0.5).double()

    def metrics(result: Result) -> Mapping[str, Measured]:
        weights, ids = result.weights.double(), result.samples
        log_p = in_parts(reward, ids.flatten(0, 1))
        activity = logit(log_p, cell).view_as(weights)
        draws = result.sample()[:, 0]
        generator = Generator(draws.device).manual_seed(0)
        bits = nll_bound(prior.denoiser, draws, MASK, generator=generator)
        nats = -draws.shape[1] * torch.tensor(2.0).log().item()
        found = {
            "activity": median(activity, weights),
            "accuracy": measured((weights * marks(ids.flatten(0, 1)).view_as(weights)).sum(-1)),
            "reward accuracy": measured((weights * (activity > 0).double()).sum(-1)),
            "log-likelihood": Measured(nats * bits.mean, -nats * bits.error),
            "diversity": measured(hamming(draws)),
            "distinct 6-mers": Measured(distinct_kmers(draws, 6), float("nan")),
            "ess": measured(result.ess[-1] / weights.shape[1]),
        }
        if reference is not None:
            found["3-mer correlation"] = correlation(kmer_tables(ids, weights, 3), reference.shares[cell])
        if result.reward is not None:
            found["reward"] = measured((weights * result.reward).sum(-1))
        return found

    return Task(
        NAME,
        f"DNA of 200 letters, towards sites open in {CELLS[cell]}",
        prior,
        tilt(reward, cell, kl=KL if setup.kl is None else setup.kl),
        metrics,
        picture,
        marks,
    )


COLOURS = ((46, 125, 50), (21, 101, 192), (239, 157, 0), (198, 40, 40), (255, 255, 255))
"""Of A, C, G, T as sequencers draw them, and of the paper between the sequences."""


def picture(ids: Tensor, file: Path, zoom: int = 4) -> None:
    """Sequences (P, L) below each other, each letter a coloured square."""
    gap = torch.full((len(ids), 1, ids.shape[1]), len(LETTERS))
    strips = torch.cat([ids.cpu().unsqueeze(1).expand(-1, 3, -1), gap], 1).flatten(0, 1)[:-1]
    write_coloured_png(file, strips.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1), COLOURS)


def train(training: Training) -> None:
    """Make all its weights, with cards and figures."""
    dna_train.train(training, make=task)


if __name__ == "__main__":
    dna_train.main(task)
