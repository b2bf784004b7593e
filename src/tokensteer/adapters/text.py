"""Texts to canvases and back.

A masked language model fills a canvas of `length` sites: the tokenizer's special tokens, the text, and masks. A text
with blanks is filled in, one without is continued. A chat model answers: its canvas is the prompt, in its format, and
`length` masks behind it. Prompts of different lengths are padded on the left there, so that answers and their blocks
begin at the same site; elsewhere texts are padded on the right, since positions are counted from the left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokensteer.core.kernels.blocks import Blocks
from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import FromHidden, FromLogits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import padded, template
from tokensteer.hub import encode, special_tokens

BLANK = re.compile(r"(_{3,})(\d*)")

Prompt = Callable[[Any, str], list[int]]
"""The ids of a prompt, from the tokenizer and the text."""


def plain(tokenizer: Any, text: str) -> list[int]:
    """The text behind the tokenizer's leading special tokens: for base models, which continue a text."""
    check_known(tokenizer, text)
    return [*special_tokens(tokenizer)[0], *encode(tokenizer, text)]


def chat(tokenizer: Any, text: str) -> list[int]:
    """The text as a user's message, in the format of the tokenizer's chat template: for models that answer."""
    check_known(tokenizer, text)
    message = [{"role": "user", "content": text}]
    return encode(tokenizer, tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))


def check_known(tokenizer: Any, text: str) -> None:
    """Raise ValueError for words that become the unknown token, since they would be lost. That token may be given by
    name; in some vocabularies it also ends texts."""
    unknown: int | None = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return
    rest = text.replace(tokenizer.unk_token, " ")
    if unknown in encode(tokenizer, rest):
        lost = [word for word in dict.fromkeys(rest.split()) if unknown in encode(tokenizer, word)]
        named = ", ".join(map(excerpt, lost)) or "some of it"
        raise ValueError(
            f"the tokenizer cannot spell {named} in {excerpt(text)}: leave it out, or use words that the model knows"
        )


class Format(Protocol):
    """How a text lies on a canvas."""

    def canvas(self, text: str) -> Tensor: ...
    def stack(self, canvases: Sequence[Tensor], pad_id: int) -> Tensor: ...
    def written(self, ids: Tensor) -> Tensor:
        """The part of one row of ids (L,) that is the text."""
        ...


@dataclass(frozen=True)
class Filled:
    """[CLS] text masks [SEP]. Each underscore of a run of three or more is one mask, unless the number of masks follows
    the run (`___9`); the mask token itself is one, too. A text without either is continued to `length` sites."""

    tokenizer: Any
    mask_id: int
    length: int

    def canvas(self, text: str) -> Tensor:
        before, behind = special_tokens(self.tokenizer)
        check_known(self.tokenizer, BLANK.sub(" ", text))
        first, *rest = BLANK.split(text)  # rest: underscores, number and text behind, for each blank
        # A token after a blank carries its own space; a space left before the blank would be a token.
        ids = encode(self.tokenizer, first.rstrip() if rest else first)
        for blank, number, piece in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            masks = int(number or len(blank))
            if masks > self.length:
                raise ValueError(f"{excerpt(text)} has a blank of {masks} of {self.length} sites: raise length")
            ids = [*ids, *[self.mask_id] * masks, *encode(self.tokenizer, piece.rstrip())]
        tokens = [*before, *ids, *behind]
        free = self.length - len(tokens)
        if self.mask_id in ids and free >= 0:
            return torch.tensor(tokens)
        if free <= 0:
            raise ValueError(f"{excerpt(text)} takes {len(tokens)} of {self.length} sites: shorten it, or raise length")
        at = [*range(len(before) + len(ids)), *range(self.length - len(behind), self.length)]
        return template(self.length, self.mask_id, tokens, at=at)

    def stack(self, canvases: Sequence[Tensor], pad_id: int) -> Tensor:
        return padded(canvases, pad_id)

    def written(self, ids: Tensor) -> Tensor:
        return ids


@dataclass(frozen=True)
class Answered:
    """A prompt and `length` masks behind it. The text is the answer, up to the first of the tokens `ends`."""

    tokenizer: Any
    mask_id: int
    length: int
    prompt: Prompt
    ends: frozenset[int]

    def canvas(self, text: str) -> Tensor:
        ids = self.prompt(self.tokenizer, text)
        return template(len(ids) + self.length, self.mask_id, ids)

    def stack(self, canvases: Sequence[Tensor], pad_id: int) -> Tensor:
        return padded([canvas.flip(0) for canvas in canvases], pad_id).flip(1)

    def written(self, ids: Tensor) -> Tensor:
        answer = ids[-self.length :]
        ended = torch.isin(answer, torch.tensor(sorted(self.ends), device=ids.device)).long()
        return answer[ended.cumsum(0) == 0]


@dataclass(frozen=True)
class TextModel:
    """A language model as a masked diffusion over texts. `limit` is the longest canvas of the network, in sites."""

    denoiser: FromLogits | FromHidden
    tokenizer: Any
    mask_id: int
    pad_id: int | None
    format: Format
    kernel: Kernel
    limit: int
    device: torch.device

    def template(self, texts: str | Sequence[str]) -> Tensor:
        """The canvas of a text, (L,), or of several, (B, L), the shorter ones padded."""
        several = [texts] if isinstance(texts, str) else list(texts)
        if not several:
            raise ValueError("there is no text: give one or several, or an empty one, '', for a canvas of masks alone")
        canvases = [self.format.canvas(text) for text in several]
        for text, canvas in zip(several, canvases, strict=True):
            if len(canvas) > self.limit:
                raise ValueError(
                    f"{excerpt(text)} makes a canvas of {len(canvas)} sites, and the model reads {self.limit} at most: "
                    "shorten it, or lower length"
                )
        if isinstance(texts, str):
            return canvases[0].to(self.device)
        if len({len(canvas) for canvas in canvases}) == 1:
            return torch.stack(canvases).to(self.device)
        if self.pad_id is None:
            raise ValueError("texts of different lengths need padding, which this model cannot ignore: run them apart")
        return self.format.stack(canvases, self.pad_id).to(self.device)

    def diffusion(
        self, texts: str | Sequence[str], *, steps: int = 64, kernel: Kernel | None = None, block: int | None = None
    ) -> Diffusion:
        """The model on the canvas of one text, or of several, each of which is a population. With `block`, blocks of
        that many sites are decoded one after the other, in `steps` in all."""
        canvas, kernel = self.template(texts), self.kernel if kernel is None else kernel
        if block is not None:
            kernel = self._blocks(kernel, canvas, block, steps)
        return Diffusion(self.denoiser, kernel, uniform_steps(steps), canvas)

    def _blocks(self, kernel: Kernel, canvas: Tensor, size: int, steps: int) -> Blocks:
        """Blocks from the first free site to the end; the first takes the remainder."""
        length, free = canvas.shape[-1], (canvas == self.mask_id).view(-1, canvas.shape[-1]).any(0)
        behind = length - int(free.long().argmax())
        start = length - behind // size * size if 0 < size < behind else 0
        return Blocks(kernel, size if start else length, length, steps, start=start)

    def decode(self, ids: Tensor) -> list[str]:
        """The texts of ids (..., L) as a flat list, without special tokens; of a chat model, its answers."""
        rows = [self.format.written(row) for row in ids.reshape(-1, ids.shape[-1])]
        kept = [row if self.pad_id is None else row[row != self.pad_id] for row in rows]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in kept]


def excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
