"""A tokeniser of images and a denoiser of its tokens as models of sequences.

The tokens of an image are its codes, row by row; the id after the last code is the mask. A condition of the denoiser, a
class or the states of a caption, is the context of a `Diffusion`, one for each population.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.masked import Ancestral, Cap
from tokensteer.core.kernels.ranked import Ranked
from tokensteer.core.kernels.schedule import cosine_steps
from tokensteer.core.models.denoiser import from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.path import Step
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.settings import CONFIDENT, RANDOM, check_order
from tokensteer.tasks.common.sheets import write_sheet
from tokensteer.tasks.common.task import SHIPPED, Setup, read_card, weights_file
from tokensteer.tasks.nets import FSQ, GridTransformer, load
from tokensteer.train.frozen import fingerprint
from tokensteer.train.optim import half_precision


@dataclass(frozen=True, eq=False)
class TokenisedImages:
    """The two networks, which belong together."""

    tokeniser: FSQ
    denoiser: GridTransformer

    def __post_init__(self) -> None:
        codes, sites = self.tokeniser.config.num_codes, self.tokeniser.config.length
        config = self.denoiser.config
        if (config.vocab_size, config.length) != (codes + 1, sites):
            raise ValueError(
                f"the tokeniser has {sites} sites of {codes} codes, and the denoiser {config.length} sites of "
                f"{config.vocab_size - 1} codes: train the denoiser of this tokeniser"
            )

    @property
    def mask(self) -> int:
        return self.tokeniser.config.num_codes

    @property
    def device(self) -> torch.device:
        return self.denoiser.places.device

    def logits(self, x: Tensor, condition: Tensor) -> Tensor:
        """(P, L, V) of ids or one-hots; on a GPU in half precision."""
        with half_precision(self.device):
            return self.denoiser(x, condition)

    def images(self, x: Tensor) -> Tensor:
        """Images (P, 3, H, W) in [0, 1] of ids (P, L), or of one-hots (P, L, V), in which they are differentiable. Half
        precision would not do: its steps near 1 are a whole grey level. So autocast, which training uses, is off."""
        with torch.autocast(self.device.type, enabled=False):
            return self.tokeniser.decode(x)

    def pixels(self, x: Tensor, rows: int = 500) -> Tensor:
        """The images of ids as bytes."""
        return in_parts(lambda part: (255 * self.images(part)).round().to(torch.uint8), x, rows)

    def diffusion(self, context: Tensor, kernel: Kernel, steps: Sequence[Step]) -> Diffusion:
        """A sampler of tokens for populations of these conditions."""
        canvas = template(self.tokeniser.config.length, self.mask).to(self.device)
        denoiser = from_logits(self.logits, self.mask, ignores_time=True)
        return Diffusion(denoiser, kernel, steps, canvas, context=context.to(self.device))

    def model(self, context: Tensor, num_steps: int, remask: float = 0.0, order: str = RANDOM) -> Diffusion:
        """p(x | condition). By MaskGIT's cosine, few sites open at first and many at the end: random ones, or those of
        highest confidence, as many as open at random in the mean."""
        check_order(order, remask)
        random = Ancestral(self.mask, sigma=Cap(remask)) if remask else Ancestral(self.mask)
        return self.diffusion(context, Ranked(self.mask) if order == CONFIDENT else random, cosine_steps(num_steps))

    def picture(self, ids: Tensor, file: str | Path, groups: int = 1, columns: int = 16) -> None:
        """Images of ids (P, L) as a sheet. Each of several groups of equal size, 2 or more, has a line."""
        even = groups > 1 and len(ids) % groups == 0 and 1 < len(ids) // groups <= 2 * columns
        write_sheet(file, self.pixels(ids), len(ids) // groups if even else min(columns, len(ids)))


def reconstructed(tokeniser: FSQ, pixels: Tensor) -> Tensor:
    """Images (D, 3, H, W) of bytes as the tokeniser gives them back."""

    def there_and_back(part: Tensor) -> Tensor:
        return (255 * tokeniser.decode(tokeniser.encode(part.float() / 255))).round().to(torch.uint8)

    return in_parts(there_and_back, pixels, 500)


def load_roles(setup: Setup, task: str, roles: Sequence[str], minutes: int) -> list[nn.Module]:
    """The networks of a folder by their roles. Raises FileNotFoundError with the mend if one is not there."""
    missing = [role for role in roles if not weights_file(setup.weights, task, role).is_file()]
    if missing:
        where = "do not come with the package" if setup.weights == SHIPPED else f"are not in {setup.weights}"
        raise FileNotFoundError(
            f"the weights of {task} {where} ({', '.join(missing)}): train them by tokensteer train {task} --device "
            f"cuda --minutes {minutes} --out FOLDER, and give --weights FOLDER"
        )
    return [load(weights_file(setup.weights, task, role), setup.device) for role in roles]


def as_tokenised(task: str, folder: Path, tokeniser: nn.Module, denoiser: nn.Module) -> tuple[FSQ, GridTransformer]:
    """The networks of a folder, if they are a tokeniser and a denoiser that was trained with it. A denoiser without a
    card, which says that, is taken as it is."""
    if not isinstance(tokeniser, FSQ) or not isinstance(denoiser, GridTransformer):
        raise ValueError(f"the weights of {task} in {folder} are of other networks: train them again")
    card = weights_file(folder, task, "denoiser").with_suffix(".json")
    known = read_card(card).get("tokeniser") if card.is_file() else None
    if known not in (None, fingerprint(tokeniser.parameters())):
        raise ValueError(
            f"the denoiser of {task} in {folder} was trained with another tokeniser than the one beside it: train the "
            "denoiser again"
        )
    return tokeniser, denoiser
