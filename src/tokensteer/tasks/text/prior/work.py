"""What the parts of the prior's training share: the recipe, the run of a training, files and cards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from tokensteer.tasks.common.part_training import PartTraining
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.nets.encoder import EncoderConfig, EncoderReaderConfig
from tokensteer.tasks.nets.readers import NgramConfig
from tokensteer.tasks.text.corpus import windows, write
from tokensteer.tasks.text.model import NAME as NAME
from tokensteer.tasks.text.prior import classifiers, quality
from tokensteer.tasks.text.prior import denoiser as denoising
from tokensteer.tasks.text.prior import toxicity as toxic
from tokensteer.train import Plan

NETWORKS = ("denoiser", "labeller", "reward", "judge", "toxicity", "toxicity-judge")
PARTS = ("published", "corpus", "windows", *NETWORKS, "quality")


@dataclass(frozen=True)
class PriorRecipe:
    """Networks and plans. With `muon`, the denoiser's matrices are moved by Muon."""

    denoiser: EncoderConfig = denoising.CONFIG
    labeller: EncoderReaderConfig = classifiers.LABELLER
    reward: EncoderReaderConfig = classifiers.REWARD
    judge: NgramConfig = classifiers.JUDGE
    toxicity_judge: NgramConfig = toxic.JUDGE
    writing: write.WritingPlan = field(default_factory=write.WritingPlan)
    denoiser_plan: Plan = denoising.PLAN
    encoder_plan: Plan = classifiers.ENCODER_PLAN
    ngram_plan: Plan = classifiers.NGRAM_PLAN
    toxicity_plan: Plan = toxic.PLAN
    toxicity_reward_plan: Plan = toxic.REWARD_PLAN
    real_share: float = denoising.REAL
    muon: bool = True
    samples: int = 300
    steps: int = quality.STEPS


RECIPE = PriorRecipe()


@dataclass(frozen=True)
class Work(PartTraining):
    """The training of a part, and what it needs."""

    recipe: PriorRecipe
    corpus: windows.Corpus

    @property
    def origin(self) -> tuple[int, ...]:
        return self.corpus.vocabulary.origin

    @property
    def mask_id(self) -> int:
        return self.corpus.vocabulary.mask_id

    def unseen(self, most: int | None = None) -> dict[str, windows.Windows]:
        """Held-out windows by name, with and without their openings."""
        taught, real = (source["test"] for source in (self.corpus.taught, self.corpus.real))
        hidden = classifiers.without_opening(taught, self.mask_id)
        sets = {"texts of the corpus": taught, "texts without their opening": hidden, "real reviews": real}
        return {name: part.take(spread(len(part), most)).to(self.device) for name, part in sets.items() if len(part)}


def described(corpus: windows.Corpus) -> str:
    """The data in words, for cards."""
    taught, real = (sum(map(len, source.values())) for source in (corpus.taught, corpus.real))
    return (
        f"{taught:,} texts that SmolLM2-135M-Instruct wrote for prompts of tasks.text.corpus.assignments, and {real:,} "
        f"windows of reviews of IMDB and Rotten Tomatoes, in {len(corpus.vocabulary):,} of BERT's word pieces"
    )


def made(name: str, training: Training) -> Path:
    """A file of the output folder, or of the folder of data."""
    file = training.out / name
    return file if file.is_file() or not (data_folder() / name).is_file() else data_folder() / name


def spread(count: int, most: int | None) -> torch.Tensor:
    """At most `most` places of `count`, at equal distances."""
    return torch.arange(count) if most is None or most >= count else torch.linspace(0, count - 1, most).long()
