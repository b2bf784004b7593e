"""A convolutional autoencoder whose latent numbers are rounded: images as sequences of tokens.

Finite scalar quantisation has no codebook to learn. Each site has a few numbers; tanh bounds number k and rounding
leaves levels[k] values, so that a site is one of prod(levels) codes, and a token is the code's place in mixed radix. In
training, the gradient passes the rounding as if it were the identity.

With l levels the bounded number is u = (l - 1)/2 · (1 + tanh(z + s)), from 0 to l - 1. Without the shift s, z = 0 is
the middle (l - 1)/2, which is a level only if l is odd; for even l it lies where rounding jumps, and noise around 0,
where training begins, would decide between two codes. s = atanh(1/(l - 1)) moves it to the level l/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokensteer.tasks.nets.parts import check_config
from tokensteer.tasks.nets.unet import Residual

MOST_CODES = 2**16


@dataclass(frozen=True)
class FSQConfig:
    """Colour images of `side` x `side` pixels. Encoder and decoder have so many channels and residual blocks at full
    resolution, at half of it, and so on: with two numbers each there is a code for each 2 x 2 pixels, with three for
    each 4 x 4."""

    side: int = 32
    levels: tuple[int, ...] = (8, 5, 5, 5)
    encoder_channels: tuple[int, ...] = (64, 128)
    encoder_blocks: tuple[int, ...] = (1, 2)
    decoder_channels: tuple[int, ...] = (96, 128)
    decoder_blocks: tuple[int, ...] = (2, 3)
    groups: int = 8

    def __post_init__(self) -> None:
        check_config(self)
        if self.side % self.patch:
            raise ValueError(
                f"FSQConfig: images of {self.side} pixels have no patches of {self.patch}: give a multiple as side"
            )
        if any(levels < 2 for levels in self.levels) or math.prod(self.levels) > MOST_CODES:
            raise ValueError(f"FSQConfig: levels {self.levels} must be 2 or more, with a product up to {MOST_CODES}")
        for name in ("encoder_channels", "encoder_blocks", "decoder_channels", "decoder_blocks"):
            if len(getattr(self, name)) != len(self.encoder_channels):
                depth = len(self.encoder_channels)
                raise ValueError(f"FSQConfig: {name} must have {depth} numbers, one for each resolution")
        if any(c % self.groups for c in (*self.encoder_channels, *self.decoder_channels)):
            raise ValueError(f"FSQConfig: channels must be multiples of {self.groups} groups")

    @property
    def num_codes(self) -> int:
        """The size of the vocabulary without the mask, whose id follows."""
        return math.prod(self.levels)

    @property
    def patch(self) -> int:
        """The side of the pixels of one code."""
        return 2 ** (len(self.encoder_channels) - 1)

    @property
    def grid(self) -> int:
        """The number of codes in a row."""
        return self.side // self.patch

    @property
    def length(self) -> int:
        """The number of sites, row by row."""
        return self.grid**2


class Rounding(nn.Module):
    """Numbers (..., K) to levels and codes. Codes (..., K) lie in [-1, 1]; ids (...) count them in mixed radix."""

    levels: Tensor
    shift: Tensor
    radix: Tensor
    table: Tensor

    def __init__(self, levels: tuple[int, ...]) -> None:
        super().__init__()
        counts = torch.tensor(levels, dtype=torch.float32)
        shift = [math.atanh(1 / (count - 1 + 1e-3)) if count % 2 == 0 else 0.0 for count in levels]  # 2 levels: not inf
        radix = [math.prod(levels[:k]) for k in range(len(levels))]
        ids = torch.arange(math.prod(levels))
        places = [(ids // base) % count for base, count in zip(radix, levels, strict=True)]
        codes = 2 * torch.stack(places, -1) / (counts - 1) - 1
        buffers = {
            "levels": counts,
            "shift": torch.tensor(shift),
            "radix": torch.tensor(radix),
            "table": torch.cat([codes, torch.zeros(1, len(levels))]),  # the mask is the middle of everything
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def bounded(self, z: Tensor) -> Tensor:
        """Each number between 0 and its highest level."""
        return (self.levels - 1) / 2 * (1 + torch.tanh(z.float() + self.shift))

    def forward(self, z: Tensor) -> Tensor:
        """Codes, with the gradient of the numbers before rounding."""
        u = self.bounded(z)
        rounded = u + (u.round() - u).detach()
        return 2 * rounded / (self.levels - 1) - 1

    def ids(self, z: Tensor) -> Tensor:
        return (self.bounded(z).round().long() * self.radix).sum(-1)

    def codes(self, x: Tensor) -> Tensor:
        """Codes of ids (...), or the expected codes of one-hots (..., V) with or without a column for the mask."""
        if not x.is_floating_point():
            return self.table[x]
        codes = len(self.table) - 1
        if x.shape[-1] not in (codes, codes + 1):
            raise ValueError(f"one-hots must have {codes} or {codes + 1} columns, got {x.shape[-1]}")
        return x @ self.table[: x.shape[-1]].to(x.dtype)


class Level(nn.Sequential):
    """Residual blocks of one resolution."""

    def __init__(self, channels: int, blocks: int, groups: int) -> None:
        super().__init__(*(Residual(channels, channels, groups, condition=0) for _ in range(blocks)))


def _read_out(channels: int, numbers: int, groups: int) -> list[nn.Module]:
    return [nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv2d(channels, numbers, 3, padding=1)]


class FSQ(nn.Module):
    """Images (P, 3, side, side) in [0, 1] as ids (P, L), and back."""

    def __init__(self, config: FSQConfig) -> None:
        super().__init__()
        self.config = config
        numbers, groups = len(config.levels), config.groups
        layers: list[nn.Module] = []
        before = 3
        for channels, blocks in zip(config.encoder_channels, config.encoder_blocks, strict=True):
            kernel, stride = (4, 2) if layers else (3, 1)
            layers += [nn.Conv2d(before, channels, kernel, stride, padding=1), Level(channels, blocks, groups)]
            before = channels
        self.encoder = nn.Sequential(*layers, *_read_out(before, numbers, groups))
        self.rounding = Rounding(config.levels)
        layers, before = [], numbers
        for channels, blocks in reversed(list(zip(config.decoder_channels, config.decoder_blocks, strict=True))):
            layers += [nn.Upsample(scale_factor=2.0)] if layers else []
            layers += [nn.Conv2d(before, channels, 3, padding=1), Level(channels, blocks, groups)]
            before = channels
        self.decoder = nn.Sequential(*layers, *_read_out(before, 3, groups))

    def numbers(self, images: Tensor) -> Tensor:
        """The numbers of each site before rounding, (P, grid, grid, K)."""
        if images.shape[1:] != (3, self.config.side, self.config.side):
            side = self.config.side
            raise ValueError(f"this tokeniser was built for images (P, 3, {side}, {side}), got {tuple(images.shape)}")
        return self.encoder(2 * images - 1).permute(0, 2, 3, 1)

    def images(self, codes: Tensor) -> Tensor:
        """Images of codes (P, grid, grid, K), which may exceed [0, 1]."""
        return (self.decoder(codes.permute(0, 3, 1, 2)) + 1) / 2

    def forward(self, images: Tensor) -> Tensor:
        """Images as they come back, which may exceed [0, 1]; differentiable through the rounding."""
        return self.images(self.rounding(self.numbers(images)))

    def encode(self, images: Tensor) -> Tensor:
        """Ids (P, L)."""
        return self.rounding.ids(self.numbers(images)).flatten(1)

    def decode(self, x: Tensor) -> Tensor:
        """Images in [0, 1] of ids (P, L) or one-hots (P, L, V), in which V may or may not count the mask.

        Of one-hots it is differentiable. A masked site has the middle of all codes.
        """
        if x.shape[1] != self.config.length:
            raise ValueError(f"this tokeniser was built for {self.config.length} sites, got {x.shape[1]}")
        grid = self.config.grid
        return self.images(self.rounding.codes(x).view(len(x), grid, grid, -1)).clamp(0, 1)
