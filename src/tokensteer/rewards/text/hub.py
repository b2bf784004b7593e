"""Networks and tokenizers of the `transformers` library, loaded without running anybody's code.

Weights come from safetensors; a pickled checkpoint may run anything when it is read and needs `allow_pickle=True`, code
that comes with a model needs `trust_remote_code=True`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from tokensteer.rewards.text.strings import Decode


class Tokenizer(Protocol):
    """What is used of a tokenizer of `transformers`."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def cls_token_id(self) -> int | None: ...
    @property
    def sep_token_id(self) -> int | None: ...
    @property
    def model_max_length(self) -> int: ...
    def batch_decode(
        self, sequences: Any, *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool | None = ...
    ) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...
    def __len__(self) -> int: ...
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


def transformers() -> Any:
    """The library, or how to get it."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ImportError("this reward needs the transformers library: pip install 'tokensteer[hf]'") from error


def load_network(kind: str, source: str | Path, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> Any:
    """The network of a folder or hub name, as the class `kind` of transformers makes it; its weights all from there."""
    automatic = getattr(transformers(), kind)
    folder = Path(source)
    if not allow_pickle and folder.is_dir() and any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"the weights in {source} are pickled, and reading them may run any code: save them as safetensors, or say "
            "allow_pickle=True if you trust their maker"
        )
    try:
        network, loaded = automatic.from_pretrained(
            str(source),
            use_safetensors=None if allow_pickle else True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):  # it says itself how to go on
            raise
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"no {kind} could be read from {source} ({reason}): give a folder or hub name with config.json and "
            "model.safetensors; pickled weights need allow_pickle=True"
        ) from error
    if loaded["missing_keys"]:
        # transformers would go on with random numbers in their place
        raise ValueError(
            f"{source} lacks weights of {kind}, such as {min(loaded['missing_keys'])}: it was not trained for this"
        )
    return network


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a folder or hub name."""
    try:
        return transformers().AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except OSError as error:
        raise ValueError(f"no tokenizer could be read from {source}: give one as own=...") from error


def loaded(
    kind: str,
    source: Any,
    own: Tokenizer | None,
    device: torch.device | str | None,
    *,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> tuple[Any, Tokenizer]:
    """A network, ready to be used and without gradients of its own, and its tokenizer; `source` may be the network."""
    if isinstance(source, str | Path):
        network = load_network(kind, source, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
        own = load_tokenizer(source, trust_remote_code=trust_remote_code) if own is None else own
    else:
        network = source
    if own is None:
        raise ValueError("a network comes without its tokenizer: give the one it was trained with as own=...")
    network = network if device is None else network.to(device)
    return network.eval().requires_grad_(False), own


def decoder(tokenizer: Tokenizer) -> Decode:
    """Ids (P, L) to texts without special tokens."""
    return lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True)


def no_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a canvas that stand for no text: padding, and what marks its beginning, end and parts."""
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    return tuple(sorted({k for k in (tokenizer.pad_token_id, *marks) if k is not None}))


def same_words(canvas: Tokenizer, own: Tokenizer) -> bool:
    """Whether every token of the canvas has the same id for both; special ones need not, a clean text has none."""
    known, special = own.get_vocab(), set(canvas.all_special_ids)
    return all(known.get(token) == k for token, k in canvas.get_vocab().items() if k not in special)


def longest_input(network: Any, own: Tokenizer) -> int:
    """How many tokens the network can read."""
    return min(getattr(network.config, "max_position_embeddings", None) or own.model_max_length, own.model_max_length)
