"""The networks of the task `cifar` as models: samplers of tokens given a class, guided ones, and their kernels.

The tokens of an image are its codes, row by row; the id after the last code is the mask. A population has a class, or
none: labels are the context of a `Diffusion`, one for each population, and the label `no class` gives the model of all
images. The target of guidance is p(x | c)^a · p(x)^(1 - a).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokensteer.core.kernels.maskgit import MaskGIT
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.guided_reference import guided_reference
from tokensteer.core.models.product import Convention, Product, denoiser_powers, guided
from tokensteer.core.numerics.domains import check_number
from tokensteer.tasks.cifar.data import CLASSES
from tokensteer.tasks.common.metrics import Classifier
from tokensteer.tasks.common.settings import RANDOM
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.common.tokenised_images import TokenisedImages, as_tokenised, load_roles

NAME = "cifar"
STEPS = 16
GUIDANCE = 1.5
TEMPERATURE = 0.9
"""By which the logits of a stored denoiser are divided: of 0.8, 0.9 and 1 it has the lowest FID (docs/cifar.md)."""
REMASK = 0.1
"""The cap of ReMDM in benchmarks."""
NOISE = 4.5
"""The temperature of MaskGIT's order, which is annealed to 0: that of its authors for images (Chang et al., 2022)."""
ROLES = ("tokeniser", "denoiser", "reward", "judge")


@dataclass(frozen=True, eq=False)
class Networks(TokenisedImages):
    """The four networks. A `temperature` divides the logits of the denoiser, which changes the model itself."""

    reward: Classifier
    judge: Classifier
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("temperature", self.temperature, "(0, inf)", "1 is the model as it was trained")
        if self.denoiser.config.num_classes != len(CLASSES):
            raise ValueError(f"the denoiser has {self.denoiser.config.num_classes} classes: train the denoiser again")

    def logits(self, x: Tensor, condition: Tensor) -> Tensor:
        found = super().logits(x, condition)
        return found if self.temperature == 1 else found.float() / self.temperature


def load_networks(setup: Setup) -> Networks:
    """The networks of a folder, at `TEMPERATURE`. Raises FileNotFoundError with the mend if one is not there."""
    tokeniser, denoiser, reward, judge = load_roles(setup, NAME, ROLES, 14)
    return Networks(*as_tokenised(NAME, setup.weights, tokeniser, denoiser), reward, judge, TEMPERATURE)


def labels_of(goal: int | None) -> list[int]:
    """The classes of a goal, all in turn if there is none."""
    if goal is None:
        return list(range(len(CLASSES)))
    if not 0 <= goal < len(CLASSES):
        known = ", ".join(f"{k} ({name})" for k, name in enumerate(CLASSES))
        raise ValueError(f"--goal must be a class of {NAME}, {known}: got {goal}")
    return [goal]


def model(
    networks: Networks, labels: Sequence[int], num_steps: int = STEPS, remask: float = 0.0, order: str = RANDOM
) -> Diffusion:
    """p(x | c) for populations of these classes."""
    return networks.model(torch.tensor(list(labels)), num_steps, remask, order)


def without_class(conditional: Diffusion) -> Diffusion:
    """p(x), from the same network."""
    return replace(conditional, context=torch.tensor([len(CLASSES)], device=conditional.device))


def product(
    conditional: Diffusion,
    guidance: float,
    convention: Convention = denoiser_powers,
    correct_remasking: bool = True,
    lookahead: bool | None = None,
) -> Product:
    """p(x | c)^a · p(x)^(1 - a)."""
    both = guided(conditional, without_class(conditional), guidance)
    return replace(both, convention=convention, correct_remasking=correct_remasking, lookahead=lookahead)


def confident(networks: Networks, labels: Sequence[int], num_steps: int, guidance: float = 1.0) -> Diffusion:
    """MaskGIT: the tokens of highest probability under the guided logits are kept, the others are masked again.

    Guidance is part of the model here, as its authors have it. It has no weights: for one particle."""
    kernel = MaskGIT(networks.mask, temperature=NOISE)
    conditional = networks.diffusion(torch.tensor(list(labels)), kernel, uniform_steps(num_steps))
    return guided_reference(conditional, without_class(conditional), guidance)
