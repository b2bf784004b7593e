"""Rewards of drawings: agreement with the caption of their population, a colour, and the size of the file."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tokensteer.core.twists.estimators import Sampled
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.rewards.image import HUES, compressibility, mostly, of_images
from tokensteer.tasks.emoji.model import Networks
from tokensteer.tasks.nets import ImageText
from tokensteer.tasks.nets.text_encoder import sentence_vectors
from tokensteer.train.optim import half_precision

ALIGNMENT, COMPRESSIBILITY, MOSTLY = "alignment", "compressibility", "mostly-"
KLS = {ALIGNMENT: 0.02, COMPRESSIBILITY: 0.05} | {f"{MOSTLY}{colour}": 0.03 for colour in HUES}
"""The rewards, each with its default kl; the first is the default."""
DRAWS = 1


def tilt(networks: Networks, states: Tensor, reward: str = ALIGNMENT, kl: float | None = None) -> Tilt:
    """exp(reward/kl). `states` (B, tokens, width) are those of the captions of the populations; alignment depends on
    them. Gradients pass the decoder; files have none."""
    chosen = KLS[reward] if kl is None else kl
    if reward == ALIGNMENT:
        made, context = of_images(networks.images, partial(agreement, networks.reward)), sentence_vectors(states)
    elif reward == COMPRESSIBILITY:
        made, context = of_images(networks.images, compressibility, differentiable=False), None
    else:
        made, context = of_images(networks.images, mostly(reward.removeprefix(MOSTLY))), None
    smooth = reward != COMPRESSIBILITY
    estimator = Sampled(seed=0)
    return Tilt(made, chosen, linear_ramp, DRAWS, estimator=estimator, differentiable=smooth, context=context)


def agreement(tower: ImageText, images: Tensor, vectors: Tensor) -> Tensor:
    """The cosine of each image and the sentence vector of its population's caption, (P, width)."""
    with half_precision(images.device):
        found = tower(images, vectors)
    return found.float()
