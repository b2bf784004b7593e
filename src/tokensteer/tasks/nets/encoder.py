"""Networks of BERT's layout, which can start from the weights of a published encoder.

In a layer of BERT the norm comes after each sum, in `Block` before each branch. A denoiser has `depth` layers of the
first kind, which a published encoder fills, and then `more` blocks, which start as the identity: at the beginning of
training the network is the encoder, and it has room for more than the encoder has. Deep stacks train better with the
norm before the branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.parts import check_config, embed
from tokensteer.tasks.nets.readers import Reader
from tokensteer.tasks.nets.transformer import Block
from tokensteer.train.heads import Change
from tokensteer.train.optim import half_precision

EPSILON = 1e-12  # BERT's


@dataclass(frozen=True)
class EncoderConfig:
    """A denoiser: `depth` layers of BERT with `inner` hidden units, then `more` blocks. The head shares the table of
    embeddings. `vocab_size` counts the mask. A learned proposal has a `change` of so many units before the head."""

    vocab_size: int
    length: int
    width: int = 384
    depth: int = 6
    more: int = 6
    heads: int = 12
    inner: int = 1536
    change: int = 0

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("depth", "more", "change"))
        if self.width % self.heads:
            raise ValueError(f"EncoderConfig: width {self.width} is no multiple of {self.heads} heads")


@dataclass(frozen=True)
class EncoderReaderConfig:
    """A classifier of `depth` layers of BERT. `framed` ones read the text between two vectors of their own, BERT's
    [CLS] and [SEP]. The answer is computed from the first vector if `first`, else from the mean over sites."""

    vocab_size: int
    length: int
    num_classes: int
    width: int = 384
    depth: int = 3
    heads: int = 12
    inner: int = 1536
    framed: bool = False
    first: bool = False

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("depth",))
        if self.width % self.heads:
            raise ValueError(f"EncoderReaderConfig: width {self.width} is no multiple of {self.heads} heads")
        if self.first and not self.framed:
            raise ValueError("EncoderReaderConfig: first needs framed, a vector before the text")


class Layer(nn.Module):
    """Attention and an MLP; a norm follows each sum with the input. With `seen`, a mask for (P, heads, L, L),
    queries attend to the keys where it is True."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.after_mix, self.after_mlp = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)

    def forward(self, h: Tensor, seen: Tensor | None = None) -> Tensor:
        rows, length, width = h.shape
        q, k, v = self.qkv(h).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).reshape(rows, length, width)
        h = self.after_mix(h + self.out(mixed))
        return self.after_mlp(h + self.down(F.gelu(self.up(h))))


class Encoder(nn.Module):
    """Logits (P, L, V) of ids (P, L) or one-hots (P, L, V): head(hidden(x)). It ignores the time and has no labels."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.tokens = nn.Embedding(config.vocab_size, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, width))
        self.enter = nn.LayerNorm(width, EPSILON)
        self.layers = nn.ModuleList(Layer(width, config.heads, config.inner) for _ in range(config.depth))
        self.blocks = nn.ModuleList(Block(width, config.heads) for _ in range(config.more))
        self.last, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocab_size)
        self.head.weight = self.tokens.weight
        nn.init.zeros_(self.head.bias)
        self.change = Change(width, config.change) if config.change else None

    def hidden(self, x: Tensor, t: object = None, label: None = None) -> Tensor:
        """(P, L, H)."""
        return self.within(embed(x, self.tokens))

    def within(self, embedded: Tensor, t: object = None, label: None = None) -> Tensor:
        """Hidden states of embedded tokens (P, L, H)."""
        if embedded.shape[1] != self.config.length:
            raise ValueError(f"this encoder was built for length {self.config.length}, got {embedded.shape[1]}")
        if label is not None:
            raise ValueError("this encoder has no labels: leave out the context")
        h = self.enter(embedded + self.places)
        for layer in self.layers:
            h = layer(h)
        for block in self.blocks:
            h = block(h)
        h = self.norm(F.gelu(self.last(h)))
        return h if self.change is None else self.change(h)

    def forward(self, x: Tensor, t: object = None, label: None = None) -> Tensor:
        return self.head(self.hidden(x))


class EncoderReader(Reader):
    """Log-probabilities of the classes, (P, K). On a GPU the layers run in half precision."""

    def __init__(self, config: EncoderReaderConfig) -> None:
        super().__init__(config.vocab_size, config.width)
        self.config = config
        width = config.width
        nn.init.normal_(self.tokens.weight, std=0.02)
        sites = config.length + 2 * config.framed
        self.places = nn.Parameter(0.02 * torch.randn(sites, width))
        self.frame = nn.Parameter(0.02 * torch.randn(2, width)) if config.framed else None
        self.enter = nn.LayerNorm(width, EPSILON)
        self.layers = nn.ModuleList(Layer(width, config.heads, config.inner) for _ in range(config.depth))
        self.last, self.head = nn.Linear(width, width), nn.Linear(width, config.num_classes)

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        if embedded.shape[1] != self.config.length:
            raise ValueError(f"this classifier was built for length {self.config.length}, got {embedded.shape[1]}")
        if self.frame is not None:
            before, after = (part.expand(len(embedded), 1, -1) for part in self.frame)
            embedded = torch.cat([before, embedded, after], 1)
        h = self.enter(embedded + self.places)
        with half_precision(h.device):
            for layer in self.layers:
                h = layer(h)
        read = (h[:, 0] if self.config.first else h.mean(1)).to(self.head.weight.dtype)
        return self.head(self.last(read).tanh()).log_softmax(-1)
