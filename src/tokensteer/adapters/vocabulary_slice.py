"""Language models whose sequence holds a text and the codes of an image, as networks over the codes alone.

Image codes are ids [offset, offset + K) behind the text vocabulary. The network reads one long sequence,

    prompt, tokens before the image, codes (with a token at the end of each row, or none), tokens behind it,

of which only the codes are generated: everything else is fixed. So the diffusion has a vocabulary of K codes and the
mask, id K, and as many sites as codes; the prompt is its context. Logits are those of the slice, at the sites of codes.

Prompts of different lengths are run one length after the other, without padding, so the network needs no attention mask
and positions are those of a prompt that runs alone. Lengths are read on the host at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensteer.adapters.network import embedding_replaced, table_of
from tokensteer.core.models.denoiser import Time
from tokensteer.core.numerics.draws import NEVER

NO_TOKEN = -1  # fills rows of prompts on the left
Sequences = Callable[[Tensor], Tensor]
"""The network's logits (P, T, V) of ids (P, T)."""


@dataclass(frozen=True)
class CodeLayout:
    """Where the codes of an image are among the ids of a network, and in its sequence.

    `codes` codes begin at the id `offset`; `mask` is the network's mask. `before` and `behind` are the tokens between
    the prompt and the codes and behind them, and `row_end`, if any, the token at the end of each row.
    """

    grid: tuple[int, int]
    offset: int
    codes: int
    mask: int
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    row_end: int | None = None

    def __post_init__(self) -> None:
        if min(*self.grid, self.codes) < 1 or self.offset < 0:
            raise ValueError(f"{self} has no codes: grid and codes must be 1 or more, and offset 0 or more")
        fixed = (self.mask, *self.before, *self.behind, *(() if self.row_end is None else (self.row_end,)))
        within = [token for token in fixed if self.offset <= token < self.offset + self.codes]
        if within:
            raise ValueError(
                f"token {within[0]} is one of the codes {self.offset}..{self.offset + self.codes - 1}: give the offset "
                "of the first code, behind the text vocabulary and the special tokens"
            )

    def sequence(self) -> Tensor:
        """What follows the prompt, with masks for codes, (S,)."""
        end = [] if self.row_end is None else [self.row_end]
        rows = ([self.mask] * self.grid[1] + end) * self.grid[0]
        return torch.tensor([*self.before, *rows, *self.behind])

    def sites(self) -> Tensor:
        """The places of the codes in `sequence`, (h·w,)."""
        height, width = self.grid
        step = width + (self.row_end is not None)
        return (len(self.before) + torch.arange(height)[:, None] * step + torch.arange(width)).flatten()


class VocabularySlice(nn.Module):
    """Logits (P, h·w, K + 1) of ids (P, h·w), 0 to K - 1 for codes and K for the mask, or of one-hots, given rows of
    prompts (P, M), filled with -1 on the left; -inf at the mask.

    `call` maps ids (P, T) to the network's logits (P, T, V). One-hots, for gradients, replace the output of `layer`,
    the network's table of token embeddings, at the sites of codes, by their product with the slice of the table.
    With `head`, the plain linear layer that the network ends in, only the logits of the slice are computed, at the
    sites of codes; the network may do the same to each logit behind it.
    """

    def __init__(
        self, net: nn.Module, call: Sequences, layout: CodeLayout, layer: nn.Module, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        words, last = len(table_of(layer)), max(layout.offset + layout.codes - 1, int(layout.sequence().max()))
        if last >= words:
            raise ValueError(
                f"{type(net).__name__} reads {words} ids, and the layout has ids up to {last}: it is the layout of "
                "another model, or the vocabulary was not enlarged for images"
            )
        plain = type(head) is nn.Linear and head.out_features == words
        self.net, self.call, self.layout, self.layer = net, call, layout, layer
        self.head = cast("nn.Linear", head) if plain else None
        self.around: Tensor
        self.sites: Tensor
        device = table_of(layer).device
        self.register_buffer("around", layout.sequence().to(device), persistent=False)
        self.register_buffer("sites", layout.sites().to(device), persistent=False)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of codes."""
        return self.layout.grid

    @property
    def length(self) -> int:
        return len(self.sites)

    def prompts(self, rows: Sequence[Sequence[int]], length: int) -> Tensor:
        """Prompts as rows of context, (B, length)."""
        for ids in rows:
            if len(ids) > length:
                raise ValueError(f"a prompt takes {len(ids)} of {length} tokens: shorten it, or raise text_length")
            wrong = [token for token in ids if token == self.layout.mask or not 0 <= token < len(table_of(self.layer))]
            if wrong or not ids:
                what = f"token {wrong[0]}, the mask or no token of the network" if wrong else "no token"
                raise ValueError(f"a prompt has {what}: give texts, with the tokenizer of this model")
        filled = [[*[NO_TOKEN] * (length - len(ids)), *ids] for ids in rows]
        return torch.tensor(filled, device=self.sites.device)

    def forward(self, x: Tensor, *given: Time) -> Tensor:
        return self.widened(self.codes(x, *given))

    def widened(self, codes: Tensor) -> Tensor:
        """Logits with a column of -inf for the mask."""
        return torch.nn.functional.pad(codes, (0, 1), value=NEVER)

    def codes(self, x: Tensor, *given: Time) -> Tensor:
        """Logits over the codes alone, (P, h·w, K)."""
        (prompts,) = cast("tuple[Tensor]", given)
        if x.shape[1] != self.length or (x.is_floating_point() and x.shape[-1] != self.layout.codes + 1):
            raise ValueError(
                f"x is {tuple(x.shape)}, and {self.grid[0]} × {self.grid[1]} codes of {self.layout.codes} are ids "
                f"(P, {self.length}) or one-hots (P, {self.length}, {self.layout.codes + 1})"
            )
        lengths = (prompts != NO_TOKEN).sum(1)
        known = sorted(set(cast("list[int]", cast("Any", lengths).tolist())))
        if len(known) == 1:
            return self._of_length(x, prompts[:, prompts.shape[1] - known[0] :])
        groups = [(lengths == count).nonzero().squeeze(-1) for count in known]
        parts = [
            self._of_length(x[rows], prompts[rows, prompts.shape[1] - count :])
            for rows, count in zip(groups, known, strict=True)
        ]
        return torch.cat(parts)[torch.cat(groups).argsort()]

    def _of_length(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Logits (P, h·w, K) for prompts of one length, (P, M)."""
        layout, places = self.layout, prompts.shape[1] + self.sites
        codes = x.argmax(-1) if x.is_floating_point() else x
        ids = torch.cat([prompts, self.around.expand(len(x), -1)], 1)
        ids[:, places] = torch.where(codes == layout.codes, layout.mask, codes + layout.offset)
        entered = nullcontext()
        if x.is_floating_point():
            table = table_of(self.layer)
            own = torch.cat([table[layout.offset : layout.offset + layout.codes], table[layout.mask : layout.mask + 1]])
            embedded = table[ids].index_copy(1, places, x.to(table.dtype) @ own)
            entered = embedding_replaced(self.net, self.layer, embedded)
        with entered, self._sliced(places):
            logits = self.call(ids)
        if self.head is None:
            if logits.dim() != 3 or logits.shape[:2] != ids.shape or logits.shape[-1] < layout.offset + layout.codes:
                raise ValueError(
                    f"{type(self.net).__name__} returns {tuple(logits.shape)} for ids {tuple(ids.shape)}: expected "
                    f"(P, T, V) with V >= {layout.offset + layout.codes}"
                )
            return logits[:, places, layout.offset : layout.offset + layout.codes]
        if logits.shape != (*x.shape[:2], layout.codes):
            raise ValueError(
                f"{type(self.net).__name__} returns {tuple(logits.shape)} where its head gave "
                f"{(*x.shape[:2], layout.codes)}: it does more behind its head than the same to each logit, so pass no "
                "head"
            )
        return logits

    @contextmanager
    def _sliced(self, places: Tensor) -> Generator[None, None, None]:
        """While it lasts, the head computes the logits of the slice at these places alone."""
        if self.head is None:
            yield
            return
        head, codes = self.head, slice(self.layout.offset, self.layout.offset + self.layout.codes)

        def forward(states: Tensor) -> Tensor:
            bias = cast("Tensor | None", head.bias)
            return nn.functional.linear(states[:, places], head.weight[codes], None if bias is None else bias[codes])

        cast("Any", head).forward = forward
        try:
            yield
        finally:
            del cast("Any", head).forward
