"""The settings of tasks and methods in one object: parsed by the command line, held by jobs, stored in config.json.
Importing this module does not load torch, so that --help is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

MOST = 10**6
"""The largest number of steps or draws."""
RANDOM, CONFIDENT = "random", "confident"
"""The orders in which sites open."""


def left(to: str, shown: str) -> object:
    """An option whose default is decided later, by the task or the method."""
    return arg(metavar=shown, help_behavior_hint=f"(default: {to})")


@dataclass(frozen=True)
class Settings:
    """The task or the method decides what is None."""

    steps: Annotated[int | None, left("100, 50 for text, 16 for cifar, 24 for emoji", "INT")] = None
    """Denoising steps from all noise to clean."""
    goal: Annotated[int | None, left("the task's", "INT")] = None
    """What to steer towards: the digit, for digits and mnist; 1 for praise and 0 for blame, for text, or with
    --reward toxicity 1 for toxic and 0 for polite; for dna the cell type, 0 (HepG2) to 3; for tfbind the number of the
    factor; for cifar the class, 0 (airplane) to 9 (truck), without it all classes, each with so many populations."""
    kl: Annotated[float | None, left("the task's", "FLOAT")] = None
    """The reward is divided by it: small steers hard."""
    prompts: Annotated[Path | None, left("the task's", "FILE")] = None
    """For text: prompts to begin with or to fill in; for emoji: captions of what to draw. A line each, or .jsonl with
    "prompt" and "id"."""
    prompt: Annotated[tuple[str, ...] | None, left("the task's", "PROMPT ...")] = None
    """The same in words: --prompt "a blue heart, flat style"."""
    draws: Annotated[int | None, left("the task's", "INT")] = None
    """Clean samples that the reward of a half-finished one is estimated from."""
    noise: Annotated[str | None, left("the task's", "STR")] = None
    """Of the draws: fresh, or shared by all particles at all times, often better where the reward is sharp."""
    ramp: Annotated[str | None, left("the task's", "STR")] = None
    """How much of the reward counts on the way: linear, constant, end, exponential, clipped:3, adaptive:0.9."""
    smoothing: Annotated[float | None, left("0, and 0.5 for smc-grad with fresh noise", "FLOAT")] = None
    """The share of a particle's last estimate of the reward that stays in its next one: averages over recent steps have
    less noise. It counts where each step makes an estimate, as with gradients. smc-grad has 0.5 on digits, mnist and
    others of long sequences and fresh noise, but for text."""
    trigger: Annotated[str | None, left("the method's", "STR")] = None
    """When to resample: ess:0.5, ess:0.5:10 (looking ten times in a run), every:20, always, never, observe (never, but
    look at the weights)."""
    reward: Annotated[str | None, left("the task's", "NAME")] = None
    """For dna: log-p (the default) or logit. For cifar: class (the default) or compressibility; for emoji:
    alignment (the default), compressibility or a colour as mostly-blue; if given, smc-cfg has it beside its product.
    For text: sentiment (the default), toxicity, or a function of your own as MODULE:FUNCTION, from a list of texts to a
    number for each; MODULE may be a file."""
    remask: float = 0.0
    """The cap of ReMDM, a probability that open sites are masked again; 0 for none."""
    order: Annotated[str | None, left("random", "NAME")] = None
    """For cifar and emoji, the masked sites that a step opens: random, or confident, about as many of those whose
    likeliest token is most probable (low-confidence order), without --remask. It changes the model that is steered."""
    resample: Annotated[str | None, left("the method's", "STR")] = None
    """How to resample: systematic, stratified, residual, multinomial or ssp, all exact. Systematic varies least; with
    multinomial every child draws its parent on its own."""
    clip: Annotated[float | None, left("1, 3 for prop-grad, 30 with --reward toxicity", "FLOAT")] = None
    """For smc-grad, prop-grad and the gradients that auto tries: the most that a gradient may add to a
    log-probability."""
    learned_scale: Annotated[float | None, left("what its training chose", "FLOAT")] = None
    """For smc-amot, prop-amot and smc-learned: how much of what was learned counts, 1 for all of it. More than 1, for
    text alone, may suit a kl that is smaller than that of the training."""
    guidance: Annotated[float | None, left("1.5, 3 for emoji", "FLOAT")] = None
    """For cfg and smc-cfg on dna, cifar and emoji: the scale s of p(x | goal)^s · p(x)^(1 - s). 1 is the model given
    the goal, more steers harder. For emoji also that of the guided sampler, which the other methods steer."""

    contains: Annotated[tuple[str, ...] | None, left("none", "WORD ...")] = None
    """For text: words that every sample must have, in any order. This and the rules below are hard constraints beside
    the reward, and all of them must hold."""
    avoids: Annotated[tuple[str, ...] | None, left("none", "WORD ...")] = None
    """For text: words that no sample may have."""
    pattern: Annotated[str | None, left("none", "PATTERN")] = None
    """For text: a regular expression that the whole text must match, such as "the .* was good \\."."""
    rhyme: Annotated[str | None, left("none", "WORD")] = None
    """For text: the last word rhymes with this one, by spelling."""
    without: Annotated[str | None, left("none", "LETTERS")] = None
    """For text: letters that must not occur."""
    characters: Annotated[str | None, left("any", "RANGE")] = None
    """For text: the length in characters, such as 80-200, 80- or -200."""
    schema: Annotated[Path | None, left("none", "FILE")] = None
    """For text: a file with a JSON schema; every text is JSON of that schema. Blank prompts such as ___100 leave it
    all of the text."""

    def check(self) -> None:
        """Raise if a number is out of its domain. Not called on creation: tyro would print such errors at length."""
        for name, example in (("steps", 100), ("draws", 10)):
            check_count(name, getattr(self, name), MOST, example)
        if self.kl is not None and not 0 < self.kl < math.inf:
            raise ValueError(f"--kl must be positive and finite, got {self.kl:g}: it divides the reward")
        if self.guidance is not None and not 0 < self.guidance < math.inf:
            raise ValueError(
                f"--guidance must be positive and finite, got {self.guidance:g}: 1 is the model given the goal"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"--clip must be positive and finite, got {self.clip:g}: 1 is cautious, 10 hardly a bound")
        if self.learned_scale is not None and not 0 < self.learned_scale < math.inf:
            raise ValueError(
                f"--learned-scale must be positive and finite, got {self.learned_scale:g}: 1 is all that was learned"
            )
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            raise ValueError(f"--smoothing must lie in [0, 1), got {self.smoothing:g}: 0 takes estimates as they are")
        if not 0 <= self.remask <= 1:
            raise ValueError(f"--remask must lie in [0, 1], got {self.remask:g}: it is a probability, 0 for none")
        if self.order is not None:
            check_order(self.order, self.remask)

    @property
    def rules(self) -> list[str]:
        """The options that are given and constrain texts."""
        names = ("contains", "avoids", "pattern", "rhyme", "without", "characters", "schema")
        return [name for name in names if getattr(self, name) not in (None, ())]

    def of_task(self) -> Settings:
        """The settings that a task reads: jobs in which these agree share a task."""
        read_later = ("draws", "noise", "ramp", "smoothing", "trigger", "resample", "clip", "learned_scale")
        return replace(self, **dict.fromkeys(read_later))


def check_count(name: str, count: int | None, most: int, example: int) -> None:
    """Raise unless an option is None or from 1 to `most`."""
    if count is not None and count < 1:
        raise ValueError(f"--{name} must be at least 1, got {count}; try {example}")
    if count is not None and count > most:
        raise ValueError(f"--{name} must be at most {most:,}, got {count:,}; try {example}")


def check_order(order: str, remask: float) -> None:
    """Raise unless there is such an order, and it goes with this cap on remasking."""
    if order not in (RANDOM, CONFIDENT):
        raise ValueError(f"--order must be {RANDOM} or {CONFIDENT}, got {order}")
    if order == CONFIDENT and remask:
        raise ValueError(
            f"--order {CONFIDENT} never masks a site again, got --remask {remask:g} too: leave one of them out (the "
            "recipe ramps remasks as well)"
        )
