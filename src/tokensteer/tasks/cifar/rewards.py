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
    """exp(reward/kl). `labels` are the classes of the populations, which certainty depends on. Gradients pass the
    decoder: one-hots have the expected codes of a site, which the decoder and the classifier turn into a number. Files
    have no gradient."""
    if reward == CLASS:
        made, context = certainty(networks), torch.tensor(list(labels), device=networks.device)
    else:
        made, context = of_images(networks.images, compressibility, differentiable=False), None
    chosen, smooth = KLS[reward] if kl is None else kl, reward == CLASS
    estimator = Sampled(seed=0)
    return Tilt(made, chosen, linear_ramp, DRAWS, estimator=estimator, differentiable=smooth, context=context)


def certainty(networks: Networks) -> Reward:
    """log p(class | image) of the reward network, for the class of the population of x, (P,)."""

    def score(images: Tensor, labels: Tensor) -> Tensor:
        with half_precision(networks.device):
            log_p = networks.reward(images)
        return log_p.float().gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    return of_images(networks.images, score)
