"""Rewards of the images that tokens decode to, beside the product target of guidance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokensteer.core.twists.estimators import Sampled
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Reward, Tilt
from tokensteer.rewards.image import compressibility, of_images
from tokensteer.tasks.cifar.model import Networks
from tokensteer.train.optim import half_precision

CLASS, COMPRESSIBILITY = "class", "compressibility"
KLS = {CLASS: 0.5, COMPRESSIBILITY: 0.05}
"""The rewards, each with its default kl; the first is the default."""
DRAWS = 2


def tilt(networks: Networks, labels: Sequence[int], reward: str = CLASS, kl: float | None = None) -> Tilt:
    """exp(reward/kl). Gradients pass the decoder: one-hots have the expected codes of a site, which the decoder and
    the classifier turn into a number. Files have no gradient."""
    of_file = of_images(networks.images, compressibility, differentiable=False)
    made = certainty(networks, labels) if reward == CLASS else of_file
    chosen = KLS[reward] if kl is None else kl
    return Tilt(made, chosen, linear_ramp, DRAWS, estimator=Sampled(seed=0), differentiable=reward == CLASS)


def certainty(networks: Networks, labels: Sequence[int]) -> Reward:
    """log p(class | image) of the reward network, for one class. A reward reads images and not the population that
    they are of, so for several classes it is the log-probability of the most likely of them."""
    wanted = torch.tensor(list(labels), device=networks.device)

    def reward(x: Tensor) -> Tensor:
        with half_precision(networks.device):
            log_p = networks.reward(networks.images(x))
        return log_p.float()[:, wanted].amax(-1)

    return reward
