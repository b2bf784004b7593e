"""The networks of the task `cifar` as models: samplers of tokens given a class, guided ones, and their kernels.

The tokens of an image are its codes, row by row; the id after the last code is the mask. A population has a class, or
none: labels are the context of a `Diffusion`, one for each population, and the label `no class` gives the model of all
images. The target of guidance is p(x | c)^a · p(x)^(1 - a).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.masked import Ancestral, Cap
from tokensteer.core.kernels.maskgit import MaskGIT
from tokensteer.core.kernels.schedule import cosine_steps, uniform_steps
from tokensteer.core.models.denoiser import Denoiser, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.product import Convention, Product, denoiser_powers
from tokensteer.core.models.template import template
from tokensteer.core.numerics.domains import check_number
from tokensteer.core.particles.path import Step
from tokensteer.tasks.cifar.data import CLASSES
from tokensteer.tasks.common.metrics import Classifier, in_parts
from tokensteer.tasks.common.task import SHIPPED, Setup, weights_file
from tokensteer.tasks.nets import FSQ, GridTransformer, load
from tokensteer.train.optim import half_precision

NAME = "cifar"
STEPS = 16
GUIDANCE = 1.5
REMASK = 0.1
"""The cap of ReMDM in benchmarks."""
NOISE = 4.5
"""The temperature of MaskGIT's order, which is annealed to 0: that of its authors for images (Chang et al., 2022)."""
ROLES = ("tokeniser", "denoiser", "reward", "judge")


@dataclass(frozen=True, eq=False)
class Networks:
    """The four networks. A `temperature` divides the logits of the denoiser, which changes the model itself."""

    tokeniser: FSQ
    denoiser: GridTransformer
    reward: Classifier
    judge: Classifier
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "(0, inf)", "1 is the model as it was trained")
        codes, sites = self.tokeniser.config.num_codes, self.tokeniser.config.length
        config = self.denoiser.config
        if (config.vocab_size, config.length, config.num_classes) != (codes + 1, sites, len(CLASSES)):
            raise ValueError(
                f"the tokeniser has {sites} sites of {codes} codes, and the denoiser {config.length} sites of "
                f"{config.vocab_size - 1} codes and {config.num_classes} classes: train the denoiser of this tokeniser"
            )

    @property
    def mask(self) -> int:
        return self.tokeniser.config.num_codes

    @property
    def device(self) -> torch.device:
        return self.denoiser.places.device

    def logits(self, x: Tensor, labels: Tensor) -> Tensor:
        """(P, L, V) of ids or one-hots; on a GPU in half precision."""
        with half_precision(self.device):
            found = self.denoiser(x, labels)
        return found if self.temperature == 1 else found / self.temperature

    def images(self, x: Tensor) -> Tensor:
        """Images (P, 3, H, W) in [0, 1] of ids (P, L), or of one-hots (P, L, V), in which they are differentiable. Half
        precision would not do: its steps near 1 are a whole grey level."""
        return self.tokeniser.decode(x)

    def pixels(self, x: Tensor, rows: int = 500) -> Tensor:
        """The images of ids as bytes."""
        return in_parts(lambda part: (255 * self.images(part)).round().to(torch.uint8), x, rows)


def load_networks(setup: Setup) -> Networks:
    """The networks of a folder. Raises FileNotFoundError with the mend if one is not there."""
    missing = [role for role in ROLES if not weights_file(setup.weights, NAME, role).is_file()]
    if missing:
        where = "do not come with the package" if setup.weights == SHIPPED else f"are not in {setup.weights}"
        raise FileNotFoundError(
            f"the weights of {NAME} {where} ({', '.join(missing)}): train them by tokensteer train {NAME} --device "
            "cuda --minutes 40 --out FOLDER, and give --weights FOLDER"
        )
    tokeniser, denoiser, reward, judge = (load(weights_file(setup.weights, NAME, r), setup.device) for r in ROLES)
    if not isinstance(tokeniser, FSQ) or not isinstance(denoiser, GridTransformer):
        raise ValueError(f"the weights of {NAME} in {setup.weights} are of other networks: train them again")
    return Networks(tokeniser, denoiser, reward, judge)


def labels_of(goal: int | None) -> list[int]:
    """The classes of a goal, all in turn if there is none."""
    if goal is None:
        return list(range(len(CLASSES)))
    if not 0 <= goal < len(CLASSES):
        known = ", ".join(f"{k} ({name})" for k, name in enumerate(CLASSES))
        raise ValueError(f"--goal must be a class of {NAME}, {known}: got {goal}")
    return [goal]


def as_denoiser(net: nn.Module, mask: int) -> Denoiser:
    return from_logits(net, mask, ignores_time=True)


def model(
    networks: Networks, labels: Sequence[int], num_steps: int = STEPS, remask: float = 0.0, cosine: bool = True
) -> Diffusion:
    """p(x | c) for populations of these classes. By MaskGIT's cosine, few sites open at first and many at the end."""
    steps = cosine_steps(num_steps) if cosine else uniform_steps(num_steps)
    kernel = Ancestral(networks.mask, sigma=Cap(remask)) if remask else Ancestral(networks.mask)
    return diffusion(networks, networks.logits, kernel, steps, labels)


def diffusion(
    networks: Networks,
    logits: Callable[[Tensor, Tensor], Tensor],
    kernel: Kernel,
    steps: Sequence[Step],
    labels: Sequence[int],
) -> Diffusion:
    canvas = template(networks.tokeniser.config.length, networks.mask).to(networks.device)
    denoiser = from_logits(logits, networks.mask, ignores_time=True)
    return Diffusion(denoiser, kernel, steps, canvas, context=torch.tensor(list(labels), device=networks.device))


def without_class(conditional: Diffusion) -> Diffusion:
    """p(x), from the same network."""
    return replace(conditional, context=torch.tensor([len(CLASSES)], device=conditional.device))


def product(
    conditional: Diffusion,
    guidance: float,
    convention: Convention = denoiser_powers,
    correct_remasking: bool = True,
    lookahead: bool = True,
) -> Product:
    """p(x | c)^a · p(x)^(1 - a)."""
    powers = (guidance, 1.0 - guidance)
    return Product((conditional, without_class(conditional)), powers, convention, correct_remasking, lookahead)


def confident(networks: Networks, labels: Sequence[int], num_steps: int, guidance: float = 1.0) -> Diffusion:
    """MaskGIT: the tokens of highest probability under the guided logits are kept, the others are masked again.

    Guidance is part of the model here, as its authors have it. It has no weights: for one particle."""

    def guided(x: Tensor, labels: Tensor) -> Tensor:
        given = networks.logits(x, labels)
        if guidance == 1:
            return given
        return torch.lerp(networks.logits(x, torch.full_like(labels, len(CLASSES))), given, guidance)

    kernel = MaskGIT(networks.mask, temperature=NOISE)
    return diffusion(networks, guided, kernel, uniform_steps(num_steps), labels)
