"""Drawings of 64 x 64 pixels from captions: the task `emoji`.

    tokensteer train emoji --out FOLDER --device cuda --minutes 25
    tokensteer run emoji --weights FOLDER --prompt "a blue heart, flat style" --particles 4

Methods of rewards tilt the guided sampler, p_g(x | caption) · exp(r/kl), with `--guidance`. The target of cfg and
smc-cfg is the product p(x | caption)^a · p(x)^(1 - a), times exp(r/kl) if a reward is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokensteer.core.particles.result import Result
from tokensteer.rewards.image import share_of
from tokensteer.tasks.common import learned, prompts
from tokensteer.tasks.common.metrics import Measured, diversity, ess_share, in_parts, weighted
from tokensteer.tasks.common.settings import RANDOM
from tokensteer.tasks.common.task import Failure, Prompt, Prompted, Setup, Task
from tokensteer.tasks.emoji import teachers
from tokensteer.tasks.emoji.model import GUIDANCE, NAME, STEPS, Networks, as_guided, load_networks, product, reference
from tokensteer.tasks.emoji.rewards import ALIGNMENT, KLS, MOSTLY, agreement, tilt
from tokensteer.tasks.emoji.states import CaptionEncoder
from tokensteer.tasks.emoji.teachers import Teacher
from tokensteer.tasks.nets.text_encoder import sentence_vectors

DEFAULT = (
    "a blue heart, flat style",
    "a cat with heart eyes, noto style",
    "a red bicycle, twemoji style",
    "a pizza, 3d style",
    "a sad face with a hat, emojione style",
    "a green dragon, blob style",
)
"""Prompts unless others are given; some of them are of no drawing."""
PICTURED = 200
SECOND_JUDGE = "Inception judge"
"""The metric of the judge's teacher, measured where Inception's file lies in the data folder."""


def task(setup: Setup) -> Task:
    """Drawings of the prompts of the setup, each with as many populations."""
    if setup.goal is not None:
        raise ValueError(f"{NAME} draws what prompts say and has no goals: leave out --goal, and give --prompt")
    setup.chosen_reward(NAME, KLS)  # raises before networks are loaded
    asked = prompts.given(setup, DEFAULT)
    return of_prompts(setup, load_networks(setup), asked)


def of_prompts(setup: Setup, networks: Networks, asked: Sequence[Prompt], failed: Sequence[Failure] = ()) -> Task:
    """The task for some prompts."""
    for prompt in asked:
        check_whole_prompt(networks.encoder, prompt.text)
    caption_states = networks.states([prompt.text for prompt in asked])
    guidance = GUIDANCE if setup.guidance is None else setup.guidance
    order = setup.order or RANDOM
    second_judge = teachers.find_judge(setup.weights, networks.device)
    conditional = networks.model(caption_states, setup.num_steps(STEPS), setup.remask, order)
    reward = setup.chosen_reward(NAME, KLS)

    def only(places: Sequence[int], more: Sequence[Failure]) -> Task:
        return of_prompts(setup, networks, [asked[k] for k in places], [*failed, *more])

    def metrics(result: Result) -> Mapping[str, Measured]:
        return assess(result, networks, sentence_vectors(caption_states), reward, second_judge)

    def marks(ids: Tensor) -> Tensor:
        """The judge's agreement with the caption, with the best of them if there are several, from 0 to 1."""
        return in_parts(lambda x: best_agreement(networks, x, sentence_vectors(caption_states)), ids, 500)

    side = networks.tokeniser.config.side
    other = None if reward == ALIGNMENT else reward
    named = asked[0].text if len(asked) == 1 else f"{len(asked)} prompts"
    return Task(
        NAME,
        f"drawings of {side} x {side} pixels, of {named}",
        reference(conditional, guidance),
        tilt(networks, caption_states, reward, setup.kl),
        metrics,
        lambda ids, file: networks.picture(ids, file, len(asked)),
        marks,
        pictured=PICTURED,
        learned=lambda: learned.find(setup.weights, NAME, None, as_guided(guidance), setup.device, other),
        prompted=Prompted(list(asked), failed, only),
        guided=lambda: product(conditional, guidance),
        tilts_guided=setup.reward is not None,
        guided_reference=True,
        reward=other,
        guidance=guidance,
        order=order,
    )


def check_whole_prompt(encoder: CaptionEncoder, prompt: str) -> None:
    """Raise if the encoder would cut words off, such as the style, which often stands last."""
    if lost := encoder.cut(prompt):
        raise ValueError(
            f"the prompt {prompt!r} is longer than the {encoder.net.config.length - 2} word pieces that are read, and "
            f"would lose its last words ({lost}): shorten the prompt"
        )


def best_agreement(networks: Networks, ids: Tensor, vectors: Tensor) -> Tensor:
    """The highest cosine of each image with one of the vectors (B, width), as a number from 0 to 1."""
    seen, described = networks.judge.of_images(networks.images(ids)), networks.judge.of_texts(vectors)
    return (seen @ described.mT).amax(-1).clamp(0, 1).double()


def assess(
    result: Result, networks: Networks, vectors: Tensor, reward: str, second_judge: Teacher | None = None
) -> dict[str, Measured]:
    """Means over populations: the judge's and the reward network's agreement of weighted samples with the caption of
    their population, that of the second judge if there is one, the share of pixels of the colour if one is wanted, and
    how draws of a prompt differ."""
    populations, count = result.samples.shape[:2]
    ids = result.samples.flatten(0, 1)
    own = vectors.repeat_interleave(populations // len(vectors) * count, 0)
    colours = [reward.removeprefix(MOSTLY)] if reward.startswith(MOSTLY) else []

    def seconded(rows: Tensor) -> Tensor:
        assert second_judge is not None
        return second_judge(networks.pixels(ids[rows]), own[rows]).double()

    table = scores(networks, ids, own, colours)
    names = ["judge", "alignment", *(f"share of {colour}" for colour in colours)]
    found = {name: weighted(result, values) for name, values in zip(names, table.T, strict=True)}
    if second_judge is not None:
        found[SECOND_JUDGE] = weighted(result, in_parts(seconded, torch.arange(len(ids), device=ids.device), 500))
    found |= diversity(networks.pixels(result.sample()[:, 0]), len(vectors))
    if result.reward is not None:
        found["reward"] = weighted(result, result.reward)
    return {**found, "ess": ess_share(result)}


def scores(networks: Networks, ids: Tensor, vectors: Tensor, colours: Sequence[str] = ()) -> Tensor:
    """Of each drawing (P, L) the agreement with its own sentence vector (P, width) by the judge and by the reward
    network, and the shares of the colours; (P, 2 + colours)."""

    def of_rows(rows: Tensor) -> Tensor:
        images = networks.images(ids[rows])
        cosines = [agreement(tower, images, vectors[rows]) for tower in (networks.judge, networks.reward)]
        return torch.stack([*cosines, *(share_of(colour)(images) for colour in colours)], -1)

    return in_parts(of_rows, torch.arange(len(ids), device=ids.device), 500).double()
