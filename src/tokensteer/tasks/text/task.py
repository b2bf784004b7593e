"""The task `text`: texts of 100 tokens after a prompt, towards praise or blame, toxic or polite ones, or a function of
one's own.

    tokensteer train text --out FOLDER --device cuda --minutes 24

trains all its networks (`prior.train`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tokensteer import files
from tokensteer.core.particles.result import Result
from tokensteer.rewards.text import of_text
from tokensteer.tasks.common import learned, prompts
from tokensteer.tasks.common.arrays import to_lists
from tokensteer.tasks.common.metrics import Measured, ess_share, in_parts, measured, weighted
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Failure, Prompt, Prompted, Setup, Task, weights_file
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import Reader
from tokensteer.tasks.text.diversity import distinct, self_bleu
from tokensteer.tasks.text.fluency import Fluency
from tokensteer.tasks.text.model import (
    NAME,
    READINGS,
    Opinion,
    Reading,
    as_head,
    canvas,
    load_denoiser,
    model,
    tilt,
    vocabulary_file,
)
from tokensteer.tasks.text.prompts import DEFAULT
from tokensteer.tasks.text.rules import rule_of


def task(setup: Setup) -> Task:
    """Towards the second class of the reward, praise unless another reward is named, or the first if `setup.goal` is 0,
    for the prompts of the setup, or `DEFAULT`. `setup.reward_function` replaces the reward; the judge of sentiment
    still marks the goal."""
    reading, goal = reading_of(setup), 1 if setup.goal is None else setup.goal
    if goal not in (0, 1):
        bad, good = reading.classes
        raise ValueError(f"the goal must be 1, for {good}, or 0, for {bad}, got {goal}")
    denoiser = load_denoiser(weights_file(setup.weights, NAME, "denoiser"), setup.device)
    length = denoiser.config.length
    vocabulary = WordPiece.read(vocabulary_file(setup.weights))
    rule = rule_of(setup, vocabulary)
    opinion, judge = (Opinion(cast("Reader", setup.load(NAME, role)), goal) for role in (reading.reward, reading.judge))
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
        reading.ramp,
    )

    def marks(ids: Tensor) -> Tensor:
        return (in_parts(judge, ids) > math.log(0.5)).double()

    own = None if reading is next(iter(READINGS.values())) else setup.reward
    if setup.reward_function is None:
        named, wanted = own, reading.classes[goal]
    else:
        named, wanted = setup.reward or "of your own", "a reward of your own"

    def with_prompts(canvases: Sequence[tuple[Prompt, Tensor]], failed: Sequence[Failure]) -> Task:
        kept = [prompt for prompt, _ in canvases]

        def metrics(result: Result) -> Mapping[str, Measured]:
            return assess(result, len(kept), marks, texts_of, fluency, reads=setup.reward_function is None)

        def write(result: Result, file: Path) -> None:
            flat = result.samples.flatten(0, 1)
            r = in_parts(steered.reward, flat).view_as(result.log_w) if result.reward is None else result.reward
            judged = in_parts(judge, flat).exp().view_as(result.log_w)
            lines = [*samples_of(result, kept, texts_of(flat), r, judged), *map(failure, failed)]
            files.write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

        def only(places: Sequence[int], more: Sequence[Failure]) -> Task:
            return with_prompts([canvases[k] for k in places], [*failed, *more])

        return Task(
            NAME,
            f"texts of {length} tokens, towards {wanted}",
            model(setup, denoiser, [canvas for _, canvas in canvases], vocabulary.mask_id),
            steered,
            metrics,
            None,
            marks,
            learned=lambda: learned.find(setup.weights, NAME, goal, as_head, setup.device, own),
            written={".jsonl": write},
            prompted=Prompted(kept, failed, only),
            reward=named,
            decode=texts_of,
            piece=vocabulary.written,
            goal=goal,
            rule=rule,
            clip=reading.clip,
        )

    return with_prompts(canvases, failed)


def usual_method(settings: Settings, weights: Path) -> str:
    """SMC with the learned proposal where there is one for the goal and the reward, else with the model."""
    own = None if settings.reward in (None, next(iter(READINGS))) else settings.reward
    goal = 1 if settings.goal is None else settings.goal
    taught = weights_file(weights, NAME, learned.named("proposal", own), goal)
    return "smc-amot" if (own is None or own in READINGS) and taught.is_file() else "smc-base"


def reading_of(setup: Setup) -> Reading:
    """The reward that a setup names, or the default one."""
    if setup.reward is None or setup.reward_function is not None:
        return next(iter(READINGS.values()))
    if setup.reward not in READINGS:
        known = " and ".join(READINGS)
        raise ValueError(
            f"{NAME} has the rewards {known}: give one of them as --reward, or a function as FILE.py:FUNCTION, got "
            f"{setup.reward}"
        )
    return READINGS[setup.reward]


def assess(
    result: Result,
    num_prompts: int,
    marks: Callable[[Tensor], Tensor],
    texts_of: Callable[[Tensor], list[str]],
    fluency: Fluency | None,
    reads: bool = True,
) -> dict[str, Measured]:
    """Means over populations, or over prompts where texts of the same prompt are compared.

    `accuracy` is the weighted share of samples that the judge assigns to the goal, and `reward accuracy`, if the reward
    `reads` log p(goal), that of samples that the reward assigns to it. One draw of each population gives
    `perplexity` under SmolLM2 (`Fluency`), `distinct-n`, the share of distinct n-grams of words, and `self-BLEU`, how
    much draws of the same prompt repeat each other (`diversity`). `ess` is a share of N.
    """
    found = {"accuracy": weighted(result, marks(result.samples.flatten(0, 1)))}
    if result.reward is not None:
        if reads:
            found["reward accuracy"] = weighted(result, (result.reward > math.log(0.5)).double())
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
