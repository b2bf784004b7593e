"""Short texts in pieces of words: a denoiser of reviews, two classifiers of what their writers thought, and canvases.

The reward is log p(y | x) of a transformer for y = 1, praise, or y = 0, blame; a detector of n-grams that learned from
other reviews, and which nothing was steered by, judges the samples. A prompt is the beginning of a text or a text with
blanks, `___` or `___7`; whatever it does not say is free.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer import files
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import Denoiser, from_hidden
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.rewards.text import OfText, of_text
from tokensteer.tasks.common import learned
from tokensteer.tasks.common.metrics import Measured, in_parts, measured
from tokensteer.tasks.common.proposals import ProposalConfig
from tokensteer.tasks.common.task import Failure, Prompt, Prompted, Setup, Task
from tokensteer.tasks.nets import (
    AttentiveConfig,
    AttentiveReader,
    NgramConfig,
    NgramReader,
    Transformer,
    TransformerConfig,
    Trunk,
)
from tokensteer.tasks.nets import load as load_net
from tokensteer.tasks.text import prompts
from tokensteer.tasks.text.data import Reviews
from tokensteer.tasks.text.diversity import distinct, self_bleu
from tokensteer.tasks.text.fluency import Fluency
from tokensteer.tasks.text.wordpiece import WordPiece
from tokensteer.train import Plan

ROLES = ("denoiser", "reward", "judge")
CLASSES = ("blame", "praise")
BLANK = re.compile(r"_{3,}(\d*)")
HANDFUL = 5
"""Sites of a blank that does not say how many."""
KL, DRAWS, NUM_STEPS = 0.025, 4, 64


@dataclass(frozen=True)
class Recipe:
    """All that tells one of these tasks from another: its texts, its networks, how they are trained.

    Classifiers see windows with a share `dropped` of their tokens masked and a share `swapped` taken from another
    window: what steering finds must please them as a text, not by one word.
    """

    name: str
    data: Callable[[], Reviews]
    denoiser: TransformerConfig
    reward: AttentiveConfig
    judge: NgramConfig
    plans: tuple[Plan, Plan, Plan]
    course: ProposalConfig
    dropped: float
    swapped: float
    source: str

    @property
    def length(self) -> int:
        return self.denoiser.length


def file_of(recipe: Recipe, role: str, folder: Path) -> Path:
    return folder / f"{recipe.name}-{role}.safetensors"


def vocabulary_of(recipe: Recipe, folder: Path) -> Path:
    return folder / f"{recipe.name}-vocab.txt"


# ---- canvases


def canvas(prompt: str, vocabulary: WordPiece, length: int) -> Tensor:
    """The prompt's tokens and masks where it is blank and behind it, (length,)."""
    tokens: list[int] = []
    sites: list[int] = []
    site, blanks = 0, [*BLANK.finditer(prompt), None]
    start = 0
    for blank in blanks:
        ids = vocabulary.encode(prompt[start : len(prompt) if blank is None else blank.start()])
        tokens += ids
        sites += range(site, site + len(ids))
        site += len(ids)
        if blank is not None:
            start, site = blank.end(), site + int(blank[1] or HANDFUL)
    if site > length or len(tokens) == length:
        raise ValueError(f"the prompt {_shortened(prompt)} takes {site} of {length} sites, all there are: shorten it")
    return template(length, vocabulary.mask_id, tokens, at=sites)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


# ---- the model and what is asked of it


def as_denoiser(mask_id: int) -> Callable[[nn.Module], Denoiser]:
    """How a transformer is used as a denoiser: its head answers only where tokens are asked for."""

    def wrap(net: nn.Module) -> Denoiser:
        assert isinstance(net, Transformer)
        return from_hidden(Trunk(net), net.head, mask_id, ignores_time=True)

    return wrap


def model(setup: Setup, net: nn.Module, canvases: Sequence[Tensor], mask_id: int) -> Diffusion:
    """The denoiser as a sampler on canvases (L,), populations for each of them."""
    stacked = torch.stack(list(canvases)).to(setup.device)
    return Diffusion(
        as_denoiser(mask_id)(net),
        setup.kernel(mask_id),
        uniform_steps(setup.num_steps),
        stacked[0] if len(stacked) == 1 else stacked,
    )


def reader(recipe: Recipe, role: str, setup: Setup) -> AttentiveReader | NgramReader:
    """Of texts (P, L), log-probabilities of blame and praise; `role` is reward or judge."""
    return cast("AttentiveReader | NgramReader", load_net(file_of(recipe, role, setup.weights), setup.device))


@dataclass(frozen=True, eq=False)
class Opinion:
    """log p(goal | x), (P,), of ids (P, L), one-hots (P, L, V), or tokens embedded by the reader's own table."""

    reader: AttentiveReader | NgramReader
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


def tilt(reward: Opinion | OfText, kl: float | None = None, draws: int = DRAWS) -> Tilt:
    """The target p(x) · exp(reward/kl), which is p(x) · p(goal | x)^(1/kl) for an opinion."""
    return Tilt(reward, KL if kl is None else kl, linear_ramp, draws, differentiable=isinstance(reward, Opinion))


# ---- the task


def task(recipe: Recipe, setup: Setup) -> Task:
    """Towards praise, or blame if `setup.goal` is 0: the prompts of the file `setup.prompts`, or fifteen of our own. If
    there is a `setup.reward_function`, texts are steered by that; the judge is asked about the goal all the same."""
    denoiser = cast("Transformer", load_net(file_of(recipe, "denoiser", setup.weights), setup.device))
    length = denoiser.config.length
    vocabulary = WordPiece.read(vocabulary_of(recipe, setup.weights))
    goal = 1 if setup.goal is None else setup.goal
    opinion, judge = (Opinion(reader(recipe, role, setup), goal) for role in ("reward", "judge"))
    fluency = Fluency.found()
    canvases: list[tuple[Prompt, Tensor]] = []
    failed: list[Failure] = []
    for prompt in prompts.numbered(prompts.DEFAULT) if setup.prompts is None else prompts.read(setup.prompts):
        try:
            canvases.append((prompt, canvas(prompt.text, vocabulary, length)))
        except ValueError as error:
            failed.append((prompt, str(error)))
    if not canvases:
        raise ValueError(f"no prompt can be run: {failed[0][1]}")

    def texts_of(ids: Tensor) -> list[str]:
        return [vocabulary.decode(row) for row in cast("list[list[int]]", cast("Any", ids).tolist())]

    steered = tilt(opinion if setup.reward_function is None else of_text(setup.reward_function, texts_of), setup.kl)

    def marks(ids: Tensor) -> Tensor:
        return (in_parts(judge, ids) > math.log(0.5)).double()

    wanted = CLASSES[goal] if setup.reward_function is None else "a reward of your own"
    about = f"texts of {length} tokens, towards {wanted}"

    def with_prompts(canvases: Sequence[tuple[Prompt, Tensor]], failed: Sequence[Failure]) -> Task:
        asked = [prompt for prompt, _ in canvases]

        def metrics(result: Result) -> Mapping[str, Measured]:
            return assess(result, len(asked), marks, texts_of, fluency)

        def write(result: Result, file: Path) -> None:
            flat = result.samples.flatten(0, 1)
            r = in_parts(steered.reward, flat).view_as(result.log_w) if result.reward is None else result.reward
            judged = in_parts(judge, flat).exp().view_as(result.log_w)
            lines = [*samples_of(result, asked, texts_of(flat), r, judged), *map(failure, failed)]
            files.write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

        def only(places: Sequence[int], more: Sequence[Failure]) -> Task:
            return with_prompts([canvases[k] for k in places], [*failed, *more])

        return Task(
            recipe.name,
            about,
            model(setup, denoiser, [canvas for _, canvas in canvases], vocabulary.mask_id),
            steered,
            metrics,
            None,
            marks,
            learned=lambda: learned.find(
                setup.weights, recipe.name, goal, as_denoiser(vocabulary.mask_id), setup.device
            ),
            written={".jsonl": write},
            prompted=Prompted(asked, failed, only),
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

    `accuracy` is the weighted share of samples that the judge finds to be what was asked for. From here on one draw of
    each population counts: `perplexity` is that of SmolLM2 (`Fluency`), `distinct-n` the share of n-grams of words that
    differ, `self-BLEU` how much draws of the same prompt repeat each other (`diversity`). `ess` is a share of N.
    """
    weights = result.weights.double()
    judged = marks(result.samples.flatten(0, 1)).view_as(weights)
    found = {"accuracy": measured((weights * judged).sum(-1))}
    if result.reward is not None:
        found["reward"] = measured((weights * result.reward).sum(-1))
    drawn = texts_of(result.sample()[:, 0])
    if fluency is not None:
        found["perplexity"] = fluency.perplexity(drawn)
    each = len(drawn) // num_prompts
    grouped = [drawn[k : k + each] for k in range(0, len(drawn), each)]
    for n in (1, 2, 3):
        found[f"distinct-{n}"] = measured(torch.tensor([distinct(group, n) for group in grouped]))
    found["self-BLEU"] = measured(torch.tensor([self_bleu(group) for group in grouped]))
    found["ess"] = measured(result.ess[-1] / weights.shape[1])
    return found


def samples_of(
    result: Result, asked: Sequence[Prompt], texts: Sequence[str], reward: Tensor, judged: Tensor
) -> Iterator[dict[str, Any]]:
    """A line for each particle, population by population; `judged` is the judge's probability of the goal."""
    populations, particles = result.log_w.shape
    columns = torch.stack([table.double().flatten() for table in (result.weights, result.log_w, reward, judged)], -1)
    numbers = cast("list[list[float]]", cast("Any", columns).tolist())
    for k, (text, (weight, log_w, r, p)) in enumerate(zip(texts, numbers, strict=True)):
        population, particle = divmod(k, particles)
        prompt = asked[population // (populations // len(asked))]
        yield {
            "prompt": prompt.text,
            "id": prompt.id,
            "text": text,
            "weight": weight,
            "log_w": log_w if math.isfinite(log_w) else None,  # a dead particle: JSON knows no -inf
            "reward": r if math.isfinite(r) else None,
            "judge": p,
            "population": population,
            "particle": particle,
        }


def failure(failed: Failure) -> dict[str, Any]:
    prompt, reason = failed
    return {"prompt": prompt.text, "id": prompt.id, "error": reason}


# ---- texts made harder


def augment(mask_id: int, dropped: float, swapped: float) -> Callable[[Tensor, Generator], Tensor]:
    """Take a share `swapped` of the tokens (P, L) from other rows of the batch, and mask a share `dropped`."""

    def harder(ids: Tensor, generator: Generator) -> Tensor:
        u = torch.rand(ids.shape, generator=generator, device=ids.device)
        other = ids[torch.randperm(len(ids), generator=generator, device=ids.device)]
        return torch.where(u < dropped, mask_id, torch.where(u < dropped + swapped, other, ids))

    return harder
