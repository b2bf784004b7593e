"""What the parts of the prior's training share: the recipe, the run of a training, files and cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokensteer.files import write_json
from tokensteer.tasks.common import part_training
from tokensteer.tasks.common.part_training import INT8, SO_FAR, run_stretch
from tokensteer.tasks.common.task import data_folder, weights_file
from tokensteer.tasks.common.timed_loop import Progress, Trainee
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.nets import load, save
from tokensteer.tasks.nets.encoder import EncoderConfig, EncoderReaderConfig
from tokensteer.tasks.nets.readers import NgramConfig
from tokensteer.tasks.nets.store import Config
from tokensteer.tasks.text.corpus import windows, write
from tokensteer.tasks.text.prior import classifiers, quality
from tokensteer.tasks.text.prior import denoiser as denoising
from tokensteer.tasks.text.prior import toxicity as toxic
from tokensteer.train import Plan

NAME = "text"
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
    real_share: float = denoising.REAL
    muon: bool = True
    samples: int = 300
    steps: int = quality.STEPS


RECIPE = PriorRecipe()


@dataclass(frozen=True)
class Pieces(part_training.Pieces):
    """A training in several runs. `unfinished` cards are those of a training whose other parts follow."""

    unfinished: bool = False


@dataclass(frozen=True)
class Work:
    """What a part needs."""

    part: str
    training: Training
    pieces: Pieces
    recipe: PriorRecipe
    corpus: windows.Corpus

    @property
    def device(self) -> str:
        return self.training.device

    @property
    def compiled(self) -> bool:
        return self.device.startswith("cuda")

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

    def stored(self, part: str) -> nn.Module:
        """A network that was trained before."""
        return load(weights_file(self.training.out, NAME, part), self.device)

    def run(self, trainee: Trainee, plan: Plan) -> Progress:
        generator = self.training.generator(PARTS.index(self.part))
        return run_stretch(trainee, plan, generator, f"{NAME}-{self.part}", self.training, self.pieces)

    def finish(
        self, net: nn.Module, config: Config, plan: Plan | None, progress: Progress | None, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the card of a network."""
        command = f"python -m tokensteer.tasks.{NAME} --part {self.part}"
        card = {
            **self.training.card(f"{self.part} of the task {NAME}", command, described(self.corpus)),
            "stored": INT8,
            "parameters": sum(p.numel() for p in net.parameters()),
            "config": asdict(config),
        }
        if plan is not None and progress is not None:
            last = {name: round(value, 5) for name, value in progress.shown.items()}
            more = {"steps": progress.step, "seconds": round(progress.seconds, 1), "last": last, "plan": asdict(plan)}
            card |= more
        card[SO_FAR if self.pieces.unfinished else "quality"] = dict(found)
        write_json(weights_file(self.training.out, NAME, self.part).with_suffix(".json"), card)
        say(f"{self.part}: {json.dumps(dict(found))}")
        return dict(found)

    def store(self, net: nn.Module) -> nn.Module:
        """Write a network, and read it as it was written."""
        save(net, weights_file(self.training.out, NAME, self.part), torch.int8)
        return self.stored(self.part)


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
