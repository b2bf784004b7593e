"""A bidirectional transformer for grids of tokens, conditioned on a class or on the states of a text, or on nothing.

A class modulates every block: it scales and shifts what the block reads and scales what it adds to its input. Few
classes need no network for this: each block has a table with a row for each class and one for no class, all zero before
training. The states of a text are further tokens of the sequence, which all blocks mix with those of the grid. A
learned vector stands where there is no state, and no text is a text without states.

Positions enter twice. A learned embedding of every site tells sites of an all-mask canvas apart; rotations of queries
and keys by row and column make attention depend on distances too, which need not be learned for each pair of sites.

With `skips`, as in U-ViT (Bao et al., 2023), each block of the second half also reads what its counterpart in the first
half gave, the last block that of the first: details of the tokens need not pass through every block.

With `coarse`, so many blocks in the middle work on a grid of half the height and width, in which a site stands for
2 x 2, and so do about a quarter of the work. Their output is added to the states of the full grid, which the blocks
before and after them work on.

With `adapter`, each matrix of a block has a low-rank one beside it (Hu et al., 2022), which is zero before training:
what a proposal learns is small, and begins as the network that it adapts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.low_rank import BlockAdapter, added
from tokensteer.tasks.nets.parts import NO_LABEL, check_config, embed


@dataclass(frozen=True)
class GridTransformerConfig:
    """A grid of `height` x `width` sites, row by row. `vocab_size` counts the mask; `dropout` is of training alone. The
    condition is one of `num_classes`, or the states of a text, (context_length, context_width). Of the `depth` blocks
    so many in the middle are `coarse`. `adapter` is the rank of the matrices beside those of the blocks."""

    vocab_size: int
    height: int
    width: int
    hidden: int = 64
    depth: int = 4
    heads: int = 4
    num_classes: int = 0
    dropout: float = 0.0
    skips: bool = False
    context_length: int = 0
    context_width: int = 0
    coarse: int = 0
    adapter: int = 0

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("depth", "num_classes", "context_length", "context_width", "coarse", "adapter"))
        if self.coarse and (self.coarse > self.depth or (self.depth - self.coarse) % 2):
            raise ValueError(
                f"GridTransformerConfig: of {self.depth} blocks {self.coarse} cannot be in the middle: as many must "
                "come before them as after"
            )
        if self.coarse and (self.height % 2 or self.width % 2):
            raise ValueError(
                f"GridTransformerConfig: {self.height} x {self.width} sites are not whole squares of 2 x 2: give even "
                "numbers, or no coarse blocks"
            )
        if bool(self.context_length) != bool(self.context_width) or (self.context_length and self.num_classes):
            raise ValueError(
                "GridTransformerConfig: a text has a context_length and a context_width, and a network reads classes "
                "or texts: give both lengths, or num_classes"
            )
        if self.hidden % (4 * self.heads):
            raise ValueError(
                f"GridTransformerConfig: hidden {self.hidden} is no multiple of 4 times {self.heads} heads"
            )

    @property
    def length(self) -> int:
        return self.height * self.width


def rotations(height: int, width: int, size: int) -> Tensor:
    """Cosines and sines (2, L, size/2) of the angles by which pairs of numbers turn, half by row and half by column."""
    fall = 5 / max(1, size // 4 - 1)
    rates = torch.pi * 0.5 ** (fall * torch.arange(size // 4))  # half a turn per site down to one in 32 sites
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    angles = torch.cat([rows[:, None] * rates, columns[:, None] * rates], -1)
    return torch.stack([angles.cos(), angles.sin()])


def turns_of(config: GridTransformerConfig, part: int = 1) -> Tensor:
    """The rotations of the sites of a grid of 1/part the height and width, and none of the tokens of a text."""
    turns = rotations(config.height // part, config.width // part, config.hidden // config.heads)
    still = torch.tensor([1.0, 0.0])[:, None, None].expand(2, config.context_length, turns.shape[-1])
    return torch.cat([turns, still], 1)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (x[k], x[k + size/2]) of x (..., L, size)."""
    cos, sin = turns.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Modulation(nn.Module):
    """`count` tensors (P, 1, H) of the class of each row, (P,) in 0..num_classes; None if there are no classes."""

    def __init__(self, num_classes: int, count: int, hidden: int) -> None:
        super().__init__()
        self.count = count
        self.table = nn.Embedding(num_classes + 1, count * hidden) if num_classes else None
        if self.table is not None:
            nn.init.zeros_(self.table.weight)

    def forward(self, label: Tensor) -> tuple[Tensor, ...] | None:
        return None if self.table is None else self.table(label).unsqueeze(1).chunk(self.count, -1)


def modulated(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return h * (1 + scale) + shift


class GridBlock(nn.Module):
    """Attention with normalised queries and keys, then an MLP; each after a layer norm, modulated by the class."""

    def __init__(self, config: GridTransformerConfig) -> None:
        super().__init__()
        hidden, self.heads, self.dropout = config.hidden, config.heads, config.dropout
        self.modulation = Modulation(config.num_classes, 6, hidden)
        self.before_mix, self.before_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        size = hidden // config.heads
        self.norm_q, self.norm_k = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)  # logits cannot grow large
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        for last in (self.out, self.down):  # a block starts as the identity
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, h: Tensor, label: Tensor, turns: Tensor, adapter: BlockAdapter | None = None) -> Tensor:
        by_class = self.modulation(label)
        if by_class is None:
            h = h + self._mixed(self.before_mix(h), turns, adapter)
            return h + self._mlp(self.before_mlp(h), adapter)
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = by_class
        h = h + (1 + gate) * self._mixed(modulated(self.before_mix(h), scale, shift), turns, adapter)
        return h + (1 + mlp_gate) * self._mlp(modulated(self.before_mlp(h), mlp_scale, mlp_shift), adapter)

    def _mixed(self, h: Tensor, turns: Tensor, adapter: BlockAdapter | None) -> Tensor:
        qkv, out = (None, None) if adapter is None else (adapter.qkv, adapter.out)
        q, k, v = added(self.qkv, h, qkv).view(*h.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (self._placed(norm, part, turns) for norm, part in ((self.norm_q, q), (self.norm_k, k)))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self._dropped(added(self.out, mixed, out))

    @staticmethod
    def _placed(norm: nn.RMSNorm, part: Tensor, turns: Tensor) -> Tensor:
        """Normalised in the precision of the weights and turned, in that of autocast again."""
        return rotate(norm(part.to(turns.dtype)), turns).to(part.dtype)

    def _mlp(self, h: Tensor, adapter: BlockAdapter | None) -> Tensor:
        up, down = (None, None) if adapter is None else (adapter.up, adapter.down)
        return self._dropped(added(self.down, F.gelu(added(self.up, h, up), approximate="tanh"), down))

    def _dropped(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.dropout, self.training) if self.dropout else h


class TextStates(nn.Module):
    """The states of texts (P, S, W) as tokens (P, length, H). Rows of zeros, and those that are missing, are no state
    and all alike."""

    def __init__(self, config: GridTransformerConfig) -> None:
        super().__init__()
        self.length, self.width = config.context_length, config.context_width
        self.norm, self.project = nn.LayerNorm(self.width), nn.Linear(self.width, config.hidden)
        self.absent = nn.Parameter(0.02 * torch.randn(config.hidden))

    def forward(self, states: Tensor | None, rows: int) -> Tensor:
        if states is None:
            return self.absent.expand(rows, self.length, -1)
        if states.dim() != 3 or states.shape[1] > self.length or states.shape[2] != self.width:
            raise ValueError(
                f"this network reads the states of a text, (P, {self.length}, {self.width}) or fewer of them, got "
                f"{tuple(states.shape)}"
            )
        states = F.pad(states.to(self.absent.dtype), (0, 0, 0, self.length - states.shape[1])).expand(rows, -1, -1)
        present = (states != 0).any(-1, keepdim=True)
        return torch.where(present, self.project(self.norm(states)), self.absent)


class Skip(nn.Module):
    """Joins the states of an earlier block to those of a later one, which are all it gives before training."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            self.join.weight.copy_(torch.eye(hidden, 2 * hidden))

    def forward(self, h: Tensor, earlier: Tensor) -> Tensor:
        return self.join(torch.cat([h, earlier], -1))


class Coarse(nn.Module):
    """The states of a grid as those of one of half the height and width, and back. Further tokens, behind those of the
    grid, are not changed by either. `turns` are the rotations of the coarse grid."""

    turns: Tensor

    def __init__(self, config: GridTransformerConfig) -> None:
        super().__init__()
        self.register_buffer("turns", turns_of(config, 2), persistent=False)
        self.length, self.sides = config.length, (config.height // 2, config.width // 2)
        self.join = nn.Linear(4 * config.hidden, config.hidden, bias=False)
        self.part = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        nn.init.zeros_(self.part.weight)  # coarse blocks begin without effect

    def forward(self, h: Tensor) -> Tensor:
        """(P, L, H) to (P, L/4, H)."""
        height, width = self.sides
        sites = h[:, : self.length].reshape(len(h), height, 2, width, 2, -1)
        squares = sites.transpose(2, 3).flatten(3).flatten(1, 2)
        return torch.cat([self.join(squares), h[:, self.length :]], 1)

    def back(self, h: Tensor, full: Tensor) -> Tensor:
        """The states `full` (P, L, H) with those of the coarse grid, (P, L/4, H), added."""
        height, width = self.sides
        squares, further = h.tensor_split([height * width], 1)
        sites = self.part(squares).view(len(h), height, width, 2, 2, -1).transpose(2, 3)
        return torch.cat([full[:, : self.length] + sites.flatten(1, 4), further], 1)


class GridTransformer(nn.Module):
    """Logits (P, L, V) of ids (P, L) or one-hots (P, L, V): head(hidden(x, condition)). The head's matrix is the
    embedding table. The condition is labels (P,), which count from 0, with `num_classes` or -1 for no class; or states
    (P, S, W), with zeros for no text; None in place of all is no condition."""

    turns: Tensor

    def __init__(self, config: GridTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.hidden))
        self.blocks = nn.ModuleList(GridBlock(config) for _ in range(config.depth))
        pairs = (config.depth - 1) // 2 if config.skips else 0  # a block's own input is no news to it
        self.skips = nn.ModuleList(Skip(config.hidden) for _ in range(pairs))
        self.norm = nn.LayerNorm(config.hidden)
        self.modulation = Modulation(config.num_classes, 2, config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size)
        nn.init.normal_(self.tokens.weight, std=0.02)  # logits start near 0
        nn.init.zeros_(self.head.bias)
        self.head.weight = self.tokens.weight
        self.context = TextStates(config) if config.context_length else None
        self.coarse = Coarse(config) if config.coarse else None
        ranks = [config.adapter] * config.depth if config.adapter else []
        self.adapters = nn.ModuleList(BlockAdapter(config.hidden, rank) for rank in ranks)
        self.register_buffer("turns", turns_of(config), persistent=False)

    def hidden(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """(P, L, H)."""
        return self.within(embed(x, self.tokens), condition)

    def within(self, embedded: Tensor, condition: Tensor | None = None) -> Tensor:
        """Hidden states of embedded tokens (P, L, H)."""
        if embedded.shape[1] != self.config.length:
            raise ValueError(f"this transformer was built for {self.config.length} sites, got {embedded.shape[1]}")
        h = embedded + self.places
        if self.context is not None:
            h = torch.cat([h, self.context(condition, len(h))], 1)
        row_label = self._labels(None if self.context is not None else condition, embedded)
        earlier: list[Tensor] = []
        first, outer = len(self.blocks) - len(self.skips), (self.config.depth - self.config.coarse) // 2
        full, turns = h, self.turns
        for k, block in enumerate(self.blocks):
            if self.coarse is not None and k == outer:
                full, h, turns = h, self.coarse(h), self.coarse.turns
            h = self.skips[k - first](h, earlier.pop()) if k >= first else h
            adapter = cast("BlockAdapter", self.adapters[k]) if len(self.adapters) else None
            h = block(h, row_label, turns, adapter)
            if k < len(self.skips):
                earlier.append(h)
            if self.coarse is not None and k == outer + self.config.coarse - 1:
                h, turns = self.coarse.back(h, full), self.turns
        h, by_class = self.norm(h[:, : self.config.length]), self.modulation(row_label)
        return h if by_class is None else modulated(h, *by_class)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(x, condition))

    def _labels(self, label: Tensor | None, rows: Tensor) -> Tensor:
        none = self.config.num_classes
        if label is None:
            return torch.full((len(rows),), none, device=rows.device)
        if not none:
            raise ValueError("this network knows no classes: build it with num_classes, or leave out the label")
        return torch.where(label == NO_LABEL, none, label).expand(len(rows))


def adapted(net: GridTransformer, rank: int) -> GridTransformer:
    """The same network with an adapter that can learn, which adds nothing at first. It has no dropout: a proposal must
    have one probability for a move, whenever it is asked."""
    found = GridTransformer(replace(net.config, adapter=rank, dropout=0.0)).to(net.places.device)
    found.load_state_dict(net.state_dict(), strict=False)
    return found.eval()
