"""Networks for long sequences of few letters, such as DNA: a denoiser of dilated convolutions and two classifiers of
different architecture, one for the reward and one that judges its samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.parts import Conditioning, check_config, embed
from tokensteer.tasks.nets.transformer import Block


@dataclass(frozen=True)
class DilatedConfig:
    """One block for each of `dilations`: a dilated convolution of `kernel` sites, then one of a single site.

    `vocab_size` counts the mask. `timed` networks must be called with t; `num_classes` allows a label. `dropout` uses
    torch's own generator, so a resumed training is not the same bit for bit.
    """

    vocab_size: int
    length: int
    width: int = 96
    kernel: int = 5
    dilations: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    groups: int = 8
    dropout: float = 0.0
    timed: bool = False
    num_classes: int = 0

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("num_classes",))
        if self.width % self.groups or self.kernel % 2 == 0:
            raise ValueError(
                f"DilatedConfig: width {self.width} must be a multiple of {self.groups} groups, and the kernel "
                f"{self.kernel} odd"
            )


class DilatedBlock(nn.Module):
    """A dilated and a single-site convolution, each after a group norm, with `condition` (P, H) added in between."""

    def __init__(self, config: DilatedConfig, dilation: int) -> None:
        super().__init__()
        width, condition = config.width, config.timed or config.num_classes > 0
        self.norm_in, self.norm_out = nn.GroupNorm(config.groups, width), nn.GroupNorm(config.groups, width)
        around = dilation * (config.kernel // 2)
        self.mix = nn.Conv1d(width, width, config.kernel, padding=around, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)
        self.told = nn.Linear(width, width) if condition else None
        self.dropout = nn.Dropout1d(config.dropout)
        nn.init.zeros_(self.out.weight)  # a block starts as the identity

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        inner = self.mix(F.silu(self.norm_in(h)))
        if self.told is not None:
            inner = inner + self.told(condition).unsqueeze(-1)
        return h + self.out(self.dropout(F.silu(self.norm_out(inner))))


class Dilated(nn.Module):
    """Logits (P, L, V) of ids (P, L) or one-hots (P, L, V): head(hidden(x))."""

    def __init__(self, config: DilatedConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.conditioning = Conditioning(config.width, config.timed, config.num_classes)
        self.blocks = nn.ModuleList(DilatedBlock(config, dilation) for dilation in config.dilations)
        self.norm = nn.GroupNorm(config.groups, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)

    def hidden(self, x: Tensor, t: float | Tensor | None = None, label: Tensor | None = None) -> Tensor:
        """(P, L, H)."""
        if x.shape[1] != self.config.length:
            raise ValueError(f"this network was built for length {self.config.length}, got {x.shape[1]}")
        condition = self.conditioning(x, t, label)
        h = (embed(x, self.tokens) + self.places).transpose(1, 2)
        for block in self.blocks:
            h = block(h, condition)
        return F.silu(self.norm(h)).transpose(1, 2)

    def forward(self, x: Tensor, t: float | Tensor | None = None, label: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(x, t, label))


@dataclass(frozen=True)
class MotifConfig:
    """Convolutions of `kernels` sites with `channels` each, every one followed by max pooling of `pool` sites."""

    vocab_size: int
    length: int
    num_classes: int
    features: int = 8
    channels: tuple[int, ...] = (128, 96, 96)
    kernels: tuple[int, ...] = (15, 7, 5)
    pool: int = 4
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_config(self)
        if len(self.channels) != len(self.kernels) or self.length < self.pool ** len(self.channels):
            raise ValueError(
                f"MotifConfig: {len(self.channels)} channels and {len(self.kernels)} kernels, each of which leaves one "
                f"site in {self.pool} of {self.length}: give as many of both, and few enough"
            )


class MotifClassifier(nn.Module):
    """Log-probabilities of the classes, (P, K), of ids (P, L) or one-hots (P, L, V). It has no norms: norms over a
    whole sequence remove the amount of each feature in it, and with them it hardly learned."""

    def __init__(self, config: MotifConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.features)
        levels: list[nn.Module] = []
        before, length = config.features, config.length
        for channels, kernel in zip(config.channels, config.kernels, strict=True):
            conv = nn.Conv1d(before, channels, kernel, padding=kernel // 2)
            levels.append(nn.Sequential(conv, nn.SiLU(), nn.MaxPool1d(config.pool), nn.Dropout(config.dropout)))
            before, length = channels, length // config.pool
        self.levels = nn.Sequential(*levels)
        self.first, self.last = nn.Linear(before * length, config.width), nn.Linear(config.width, config.num_classes)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.levels(embed(x, self.tokens).transpose(1, 2))
        return self.last(self.dropout(F.silu(self.first(h.flatten(1))))).log_softmax(-1)


@dataclass(frozen=True)
class WordsConfig:
    """A transformer over overlapping words of `word` letters, one at every `stride` letters."""

    vocab_size: int
    length: int
    num_classes: int
    features: int = 8
    word: int = 12
    stride: int = 4
    width: int = 96
    depth: int = 3
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("depth",))
        if self.width % self.heads or not self.stride <= self.word <= self.length:
            raise ValueError(
                f"WordsConfig: width {self.width} must be a multiple of {self.heads} heads, and words of {self.word} "
                f"at every {self.stride} must cover a length of {self.length}"
            )


class WordsClassifier(nn.Module):
    """Log-probabilities of the classes, (P, K), of ids (P, L) or one-hots (P, L, V), from the mean and the maximum over
    words after attention."""

    def __init__(self, config: WordsConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.features)
        self.words = nn.Conv1d(config.features, 2 * config.width, config.word, stride=config.stride)
        self.into = nn.Linear(2 * config.width, config.width)
        count = (config.length - config.word) // config.stride + 1
        self.places = nn.Parameter(0.02 * torch.randn(count, config.width))
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(2 * config.width, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        words = F.silu(self.words(embed(x, self.tokens).transpose(1, 2))).transpose(1, 2)
        h = self.dropout(self.into(words) + self.places)
        for block in self.blocks:
            h = self.dropout(block(h))
        h = self.norm(h)
        return self.head(self.dropout(torch.cat([h.mean(1), h.amax(1)], -1))).log_softmax(-1)
