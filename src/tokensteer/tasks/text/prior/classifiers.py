"""Training of the prior's classifiers on windows of tokens: sentiment twice, and toxicity.

- The reward, three layers of MiniLM, learns from texts of the corpus whose opening says their mood, and this mood.
- The labeller, all of MiniLM, learns from real reviews with the marks that people gave them. It is not shipped.
- The judge, detectors of n-grams, learns from the same reviews, and from texts of the corpus that the reward never saw:
  with their mood where the opening says it, else with the labeller's probabilities.

So reward and judge share neither architecture nor texts. The reward learns from the moods that were asked for, the
judge also from marks that people gave to films. The labeller is there because a window of a review often lacks the
verdict of the whole review, and most texts of the corpus have no mood. It is not enough: reviews of films do not teach
what praise of a lake looks like, and a judge that learned from the labeller alone was right on 74% of held-out texts.

In training a share of the tokens is masked or swapped, and often the whole beginning of a text is masked, which for
many texts of the corpus says everything: a classifier that read it alone would steer nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.timed_loop import Trainee
from tokensteer.tasks.nets.encoder import EncoderReaderConfig
from tokensteer.tasks.nets.readers import NgramConfig
from tokensteer.tasks.text.corpus.windows import LENGTH, SIZE, Corpus, Windows
from tokensteer.tasks.text.model import CLASSES
from tokensteer.tasks.text.reviews import PARTS
from tokensteer.train import Plan
from tokensteer.train.optim import half_precision

REWARD = EncoderReaderConfig(SIZE, LENGTH, len(CLASSES), depth=3)
LABELLER = EncoderReaderConfig(SIZE, LENGTH, len(CLASSES), depth=6, framed=True)
JUDGE = NgramConfig(SIZE, len(CLASSES), features=128, spans=(1, 2, 3, 4, 5), channels=192)
ENCODER_PLAN = Plan(3000, batch_size=256, rate=2e-4, warmup=0.1, weight_decay=0.05, average=0.998)
NGRAM_PLAN = Plan(4000, batch_size=512, rate=1e-3, warmup=0.05, weight_decay=0.1, average=0.998)
DROPPED, SWAPPED = 0.2, 0.05
OPENING, WITHOUT = 10, 0.6
"""Tokens of a beginning, and the share of rows in which they are masked."""
SMOOTHED = 0.05  # of the labels


@dataclass(frozen=True)
class Examples:
    """ids (D, L), probabilities of the classes (D, K), and how often each is drawn relative to others, (D,)."""

    ids: Tensor
    targets: Tensor
    weight: Tensor | None = None


def labelled(windows: Windows) -> Examples:
    """The windows whose label is one of the classes, with that label for almost certain."""
    some = windows.take(windows.labels < len(CLASSES))
    sure = nn.functional.one_hot(some.labels, len(CLASSES)).float()
    return Examples(some.ids, sure * (1 - SMOOTHED) + SMOOTHED / len(CLASSES))


def reviews(corpus: Corpus) -> Windows:
    """The real reviews of both training parts."""
    return Windows.joined(corpus.real[name] for name in PARTS[1:])


def distilled(labeller: nn.Module, corpus: Corpus, device: str) -> Examples:
    """What the judge learns from. Labels of reviews are the mean of people's and the labeller's, those of texts of the
    corpus their mood, and the labeller's where they have none."""
    marked, texts = labelled(reviews(corpus)), corpus.taught["judge"]
    sure, unsure = labelled(texts), texts.ids[texts.labels >= len(CLASSES)]
    said = [probabilities(labeller, ids.to(device)).cpu() for ids in (marked.ids, unsure)]
    ids = torch.cat([marked.ids, sure.ids, unsure])
    return Examples(ids, torch.cat([(marked.targets + said[0]) / 2, sure.targets, said[1]]))


def probabilities(net: nn.Module, ids: Tensor) -> Tensor:
    """Probabilities of the classes, (D, K)."""

    def read(part: Tensor) -> Tensor:
        with half_precision(ids.device):
            return net(part.long()).float().exp()

    return in_parts(read, ids)


class ClassifierTraining(Trainee):
    """Steps on `examples`; `unseen` windows by name are for checks. All is moved to the device of the network."""

    counted = "texts"

    def __init__(
        self,
        net: nn.Module,
        examples: Examples,
        unseen: Mapping[str, Windows],
        mask_id: int,
        plan: Plan,
        without: float = WITHOUT,
    ) -> None:
        self.device, self.batch_size = next(net.parameters()).device, plan.batch_size
        self.ids, self.targets = examples.ids.to(self.device), examples.targets.to(self.device)
        if not len(self.ids):
            raise ValueError("there is no example to learn from: write more texts (--part corpus)")
        self.weight = None if examples.weight is None else examples.weight.to(self.device)
        self.unseen = {name: windows.to(self.device) for name, windows in unseen.items()}
        self.mask_id, self.without = mask_id, without
        self.augment = augment(mask_id, DROPPED, SWAPPED)
        self.learner = Learner(net, plan)
        self.learners = {"classifier": self.learner}
        self.net = net  # not compiled: that would take as long as the training of a small network
        config: Any = net.config
        self.given = {"config": asdict(config), "batch size": plan.batch_size}

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        if self.weight is None:
            index = torch.randint(len(self.ids), (self.batch_size,), generator=generator, device=self.device)
        else:
            index = torch.multinomial(self.weight, self.batch_size, True, generator=generator)
        ids = self._spoilt(self.ids[index].long(), generator)
        with half_precision(self.device):
            log_p = self.net(ids)
        loss = -(self.targets[index] * log_p.float()).sum(-1).mean()
        torch.autograd.backward(loss)
        self.learner.learn(rate)
        return {"loss": loss}

    def _spoilt(self, ids: Tensor, generator: Generator) -> Tensor:
        """Ids with gaps, swaps and, in some rows, without their beginning."""
        ids = self.augment(ids, generator)
        chosen = torch.rand(len(ids), 1, generator=generator, device=ids.device) < self.without
        first = torch.arange(ids.shape[1], device=ids.device) < OPENING
        return torch.where(chosen & first, self.mask_id, ids)

    def check(self) -> dict[str, float]:
        return accuracies(self.learner.average, self.unseen)


def accuracies(net: nn.Module, unseen: Mapping[str, Windows]) -> dict[str, float]:
    """The share of windows whose most likely class is their label, for each set that has any."""
    found: dict[str, float] = {}
    for name, windows in unseen.items():
        known = windows.take(windows.labels < len(CLASSES))
        if len(known):
            right = probabilities(net, known.ids).argmax(-1) == known.labels
            found[name] = float(right.double().mean())
    return found


def without_opening(windows: Windows, mask_id: int) -> Windows:
    """The windows with their beginning masked, to see what a classifier finds in the rest."""
    ids = windows.ids.clone()
    ids[:, :OPENING] = mask_id
    return Windows(ids, windows.labels)


def augment(mask_id: int, dropped: float, swapped: float) -> Callable[[Tensor, Generator], Tensor]:
    """Replace a share `swapped` of the tokens (P, L) by those of other rows, and mask a share `dropped`."""

    def augmented(ids: Tensor, generator: Generator) -> Tensor:
        u = torch.rand(ids.shape, generator=generator, device=ids.device)
        other = ids[torch.randperm(len(ids), generator=generator, device=ids.device)]
        return torch.where(u < dropped, mask_id, torch.where(u < dropped + swapped, other, ids))

    return augmented
