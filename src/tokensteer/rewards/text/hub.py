"""Networks and tokenizers of the `transformers` library, as rewards use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from tokensteer.hub import Source
from tokensteer.rewards.text.strings import Decode
from tokensteer.rewards.text.words import Spells


class Tokenizer(Spells, Protocol):
    """The members of a `transformers` tokenizer that are used."""

    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    cls_token_id: int | None
    sep_token_id: int | None
    model_max_length: int

    def get_vocab(self) -> dict[str, int]: ...
    def __call__(
        self,
        text: Any,
        *,
        add_special_tokens: bool = ...,
        padding: bool = ...,
        truncation: bool = ...,
        max_length: int | None = ...,
        return_tensors: str | None = ...,
    ) -> Any: ...


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a folder or hub name."""
    return Source(str(source), trust_remote_code).tokenizer()


def loaded(
    kind: str,
    source: Any,
    own: Tokenizer | None,
    device: torch.device | str | None,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> tuple[Any, Tokenizer]:
    """A frozen network in evaluation mode and its tokenizer; `source` may be the network itself."""
    if isinstance(source, str | Path):
        place = Source(str(source), trust_remote_code, allow_pickle)
        network = place.network(kind, place.config())
        own = load_tokenizer(source, trust_remote_code=trust_remote_code) if own is None else own
    else:
        network = source
    if own is None:
        raise ValueError("the network has no tokenizer: give the one it was trained with as own=...")
    network = network if device is None else network.to(device)
    return network.eval().requires_grad_(False), own


def decoder(tokenizer: Tokenizer) -> Decode:
    """Ids (P, L) to texts without special tokens."""
    return lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True)


def no_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a canvas that are not text: padding, and marks of its beginning, end and parts."""
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    return tuple(sorted({k for k in (tokenizer.pad_token_id, *marks) if k is not None}))


def same_words(canvas: Tokenizer, own: Tokenizer) -> bool:
    """Whether every token of the canvas but special ones, which no clean text has, has the same id for both."""
    known, special = own.get_vocab(), set(canvas.all_special_ids)
    return all(known.get(token) == k for token, k in canvas.get_vocab().items() if k not in special)


def longest_input(network: Any, own: Tokenizer) -> int:
    """The largest number of tokens the network takes."""
    return min(getattr(network.config, "max_position_embeddings", None) or own.model_max_length, own.model_max_length)
