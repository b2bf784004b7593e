"""Tasks of short texts in word pieces: a denoiser of reviews and two classifiers of their sentiment.

The reward is log p(y | x) of a transformer for y = 1, praise, or y = 0, blame. The judge is a detector of n-grams that
was trained on other reviews and by which nothing is steered. A prompt is the beginning of a text, or a text with blanks
`___` or `___7`; all other sites are masked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer import files
from tokensteer.core.models.denoiser import Denoiser, from_hidden
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.rewards.text import OfText, of_text
from tokensteer.tasks.common import learned, prompts
from tokensteer.tasks.common.arrays import to_lists
from tokensteer.tasks.common.metrics import Measured, ess_share, in_parts, measured, weighted
from tokensteer.tasks.common.proposals import ProposalConfig
from tokensteer.tasks.common.task import Failure, Prompt, Prompted, Setup, Task
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import (
    AttentiveConfig,
    Encoder,
    EncoderConfig,
    EncoderReaderConfig,
    NgramConfig,
    Reader,
    Transformer,
    TransformerConfig,
    Trunk,
)
from tokensteer.tasks.text.data import Reviews
from tokensteer.tasks.text.diversity import distinct, self_bleu
from tokensteer.tasks.text.fluency import Fluency
from tokensteer.tasks.text.prompts import DEFAULT
from tokensteer.tasks.text.rules import rule_of
from tokensteer.train import Plan

CLASSES = ("blame", "praise")
BLANK = re.compile(r"_{3,}(\d*)")
HANDFUL = 5  # sites of a blank without a number
KL, DRAWS, NUM_STEPS = 0.1, 4, 64


@dataclass(frozen=True)
class Reading:
    """A reward of a task of texts: the names of the weights of its network and of the judge's, what both tell apart,
    and the kl."""

    reward: str
    judge: str
    classes: tuple[str, str]
    kl: float = KL


SENTIMENT = Reading("reward", "judge", CLASSES)


@dataclass(frozen=True)
class Recipe:
    """What differs between these tasks: texts, networks, plans for denoiser, reward and judge.

    Classifiers are trained on windows in which a share `dropped` of the tokens is masked and a share `swapped` comes
    from another window, so that steering cannot please them by a single word. `readings` are its rewards by name, the
    default one first.
    """

    name: str
    data: Callable[[], Reviews]
    denoiser: TransformerConfig | EncoderConfig
    reward: AttentiveConfig | EncoderReaderConfig
    judge: NgramConfig
    plans: tuple[Plan, Plan, Plan]
    proposal: ProposalConfig
    dropped: float
    swapped: float
    source: str
    readings: Mapping[str, Reading] = field(default_factory=lambda: {"sentiment": SENTIMENT})

    @property
    def length(self) -> int:
        return self.denoiser.length

    def reading(self, setup: Setup) -> Reading:
        """The reward that a setup names, or the default one."""
        if setup.reward is None or setup.reward_function is not None:
            return next(iter(self.readings.values()))
        if setup.reward not in self.readings:
            names = " or ".join(self.readings)
            raise ValueError(f"there is no reward {setup.reward}: give {names}, or a function as reward_function")
        return self.readings[setup.reward]

    def vocabulary_file(self, folder: Path) -> Path:
        return folder / f"{self.name}-vocab.txt"


def canvas(prompt: str, vocabulary: WordPiece, length: int) -> Tensor:
    """The tokens of a prompt, with masks at its blanks and after its end, (length,)."""
    tokens: list[int] = []
    sites: list[int] = []
    site = start = 0
    for blank in (*BLANK.finditer(prompt), None):
        ids = vocabulary.encode(prompt[start : len(prompt) if blank is None else blank.start()])
        tokens += ids
        sites += range(site, site + len(ids))
        site += len(ids)
        if blank is not None:
            start, site = blank.end(), site + int(blank[1] or HANDFUL)
    if site > length or len(tokens) == length:
        short = prompt if len(prompt) <= 40 else f"{prompt[:37]}..."
        raise ValueError(f"the prompt {short!r} takes {site} of {length} sites, all there are: shorten it")
    return template(length, vocabulary.mask_id, tokens, at=sites)


def as_denoiser(mask_id: int) -> Callable[[nn.Module], Denoiser]:
    """Makes a transformer a denoiser whose head is computed only at the sites that need it."""

    def wrap(net: nn.Module) -> Denoiser:
        assert isinstance(net, Transformer | Encoder)
        return from_hidden(Trunk(cast("Transformer", net)), net.head, mask_id, ignores_time=True)

    return wrap


def model(setup: Setup, net: nn.Module, canvases: Sequence[Tensor], mask_id: int) -> Diffusion:
    """The denoiser as a sampler on canvases (L,), with equally many populations each."""
    canvas = canvases[0] if len(canvases) == 1 else torch.stack(list(canvases))
    return setup.diffusion(as_denoiser(mask_id)(net), mask_id, canvas)


def reader(recipe: Recipe, role: str, setup: Setup) -> Reader:
    """Log-probabilities of two classes, (P, 2), of texts (P, L), by the name of the weights."""
    return cast("Reader", setup.load(recipe.name, role))


@dataclass(frozen=True, eq=False)
class Opinion:
    """log p(goal | x), (P,), of ids (P, L), one-hots (P, L, V), or embeddings of the reader's own table."""

    reader: Reader
    goal: int

    def __post_init__(self) -> None:
        if not 0 <= self.goal < len(CLASSES):
            raise ValueError(f"the goal must be 1, for praise, or 0, for blame, got {self.goal}")

    @property
    def embedding(self) -> Tensor:
        return self.reader.embedding

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.reader.of_embeddings(embedded)[:, self.goal]

    def __call__(self, x: Tensor) -> Tensor:
        return self.reader(x)[:, self.goal]


def tilt(reward: Opinion | OfText, kl: float = KL, draws: int = DRAWS) -> Tilt:
    """The target p(x) · exp(reward/kl), for an opinion p(x) · p(goal | x)^(1/kl)."""
    return Tilt(reward, kl, linear_ramp, draws, differentiable=isinstance(reward, Opinion))


def task(recipe: Recipe, setup: Setup | None = None) -> Task:
    """Towards praise, or blame if `setup.goal` is 0, for the prompts of the setup, or `DEFAULT`.
    `setup.reward_function` replaces the reward; the judge still marks the goal."""
    setup = Setup(NUM_STEPS) if setup is None else setup
    reading = recipe.reading(setup)
    denoiser = cast("Transformer", setup.load(recipe.name, "denoiser"))
    length = denoiser.config.length
    vocabulary = WordPiece.read(recipe.vocabulary_file(setup.weights))
    rule = rule_of(setup, vocabulary)
    goal = 1 if setup.goal is None else setup.goal
    opinion, judge = (Opinion(reader(recipe, role, setup), goal) for role in (reading.reward, reading.judge))
    fluency = Fluency.found()
    canvases: list[tuple[Prompt, Tensor]] = []
    failed: list[Failure] = []
    for prompt in prompts.given(setup, DEFAULT):
        try:
            canvases.append((prompt, canvas(prompt.text, vocabulary, length)))
        except ValueError as error:
            failed.append((prompt, str(error)))
    if not canvases:
        raise ValueError(f"no prompt can be run: {failed[0][1]}")

    def texts_of(ids: Tensor) -> list[str]:
        return [vocabulary.decode(row) for row in to_lists(ids)]

    steered = tilt(
        opinion if setup.reward_function is None else of_text(setup.reward_function, texts_of),
        reading.kl if setup.kl is None else setup.kl,
    )

    def marks(ids: Tensor) -> Tensor:
        return (in_parts(judge, ids) > math.log(0.5)).double()

    own = setup.reward if setup.reward_function is None else setup.reward or "of your own"
    wanted = reading.classes[goal] if setup.reward_function is None else "a reward of your own"
    wrap = as_denoiser(vocabulary.mask_id)

    def with_prompts(canvases: Sequence[tuple[Prompt, Tensor]], failed: Sequence[Failure]) -> Task:
        kept = [prompt for prompt, _ in canvases]

        def metrics(result: Result) -> Mapping[str, Measured]:
            return assess(result, len(kept), marks, texts_of, fluency)

        def write(result: Result, file: Path) -> None:
            flat = result.samples.flatten(0, 1)
            r = in_parts(steered.reward, flat).view_as(result.log_w) if result.reward is None else result.reward
            judged = in_parts(judge, flat).exp().view_as(result.log_w)
            lines = [*samples_of(result, kept, texts_of(flat), r, judged), *map(failure, failed)]
            files.write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

        def only(places: Sequence[int], more: Sequence[Failure]) -> Task:
            return with_prompts([canvases[k] for k in places], [*failed, *more])

        return Task(
            recipe.name,
            f"texts of {length} tokens, towards {wanted}",
            model(setup, denoiser, [canvas for _, canvas in canvases], vocabulary.mask_id),
            steered,
            metrics,
            None,
            marks,
            learned=lambda: learned.find(setup.weights, recipe.name, goal, wrap, setup.device),
            written={".jsonl": write},
            prompted=Prompted(kept, failed, only),
            reward=own,
            decode=texts_of,
            piece=vocabulary.written,
            goal=goal,
            rule=rule,
        )

    return with_prompts(canvases, failed)


def assess(
    result: Result,
    num_prompts: int,
    marks: Callable[[Tensor], Tensor],
    texts_of: Callable[[Tensor], list[str]],
    fluency: Fluency | None,
) -> dict[str, Measured]:
    """Means over populations, or over prompts where texts of the same prompt are compared.

    `accuracy` is the weighted share of samples that the judge assigns to the goal. One draw of each population gives
    `perplexity` under SmolLM2 (`Fluency`), `distinct-n`, the share of distinct n-grams of words, and `self-BLEU`, how
    much draws of the same prompt repeat each other (`diversity`). `ess` is a share of N.
    """
    found = {"accuracy": weighted(result, marks(result.samples.flatten(0, 1)))}
    if result.reward is not None:
        found["reward"] = weighted(result, result.reward)
    drawn = texts_of(result.sample()[:, 0])
    if fluency is not None:
        found["perplexity"] = fluency.perplexity(drawn)
    each = len(drawn) // num_prompts
    grouped = [drawn[k : k + each] for k in range(0, len(drawn), each)]
    for n in (1, 2, 3):
        found[f"distinct-{n}"] = measured(torch.tensor([distinct(group, n) for group in grouped]))
    found["self-BLEU"] = measured(torch.tensor([self_bleu(group) for group in grouped]))
    found["ess"] = ess_share(result)
    return found


def samples_of(
    result: Result, kept: Sequence[Prompt], texts: Sequence[str], reward: Tensor, judged: Tensor
) -> Iterator[dict[str, Any]]:
    """A row for each particle, by population; `judged` is the judge's probability of the goal."""
    populations, particles = result.log_w.shape
    columns = torch.stack([table.double().flatten() for table in (result.weights, result.log_w, reward, judged)], -1)
    for k, (text, (weight, log_w, r, p)) in enumerate(zip(texts, to_lists(columns), strict=True)):
        population, particle = divmod(k, particles)
        prompt = kept[population // (populations // len(kept))]
        yield {
            "prompt": prompt.text,
            "id": prompt.id,
            "text": text,
            "weight": weight,
            "log_w": log_w if math.isfinite(log_w) else None,  # a dead particle: JSON has no -inf
            "reward": r if math.isfinite(r) else None,
            "judge": p,
            "population": population,
            "particle": particle,
        }


def failure(failed: Failure) -> dict[str, Any]:
    prompt, reason = failed
    return {"prompt": prompt.text, "id": prompt.id, "error": reason}


def augment(mask_id: int, dropped: float, swapped: float) -> Callable[[Tensor, Generator], Tensor]:
    """Replace a share `swapped` of the tokens (P, L) by those of other rows, and mask a share `dropped`."""

    def augmented(ids: Tensor, generator: Generator) -> Tensor:
        u = torch.rand(ids.shape, generator=generator, device=ids.device)
        other = ids[torch.randperm(len(ids), generator=generator, device=ids.device)]
        return torch.where(u < dropped, mask_id, torch.where(u < dropped + swapped, other, ids))

    return augmented
