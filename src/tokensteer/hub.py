"""Networks and tokenizers of the `transformers` library, and parts of `diffusers` pipelines, by name or folder.

Weights are read from safetensors; pickles, which can run code, only with `allow_pickle=True`. Code that comes with a
model runs only with `trust_remote_code=True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)
"""What transformers raises for files that are missing, damaged or of another kind."""


@dataclass(frozen=True)
class Source:
    """Where a model is, what loading it may run, and where it goes. `dtype` None keeps the precision of the weights."""

    name: str
    trust_remote_code: bool = False
    allow_pickle: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | str = "cpu"

    def config(self) -> Any:
        if not Path(self.name).is_dir() and (self.name.count("/") > 1 or self.name.startswith((".", "/", "~"))):
            raise ValueError(f"{self.name} is no folder: give the one that holds config.json, or a name on the hub")
        try:
            return transformers().AutoConfig.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
        except _UNREADABLE as error:
            self._refuse_code(error)
            raise ValueError(
                f"{self.name} holds no model that transformers knows ({_first_line(error)}): give a folder with "
                "config.json, weights and tokenizer, or a name on the hub"
            ) from error

    def tokenizer(self) -> Any:
        try:
            return transformers().AutoTokenizer.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
        except _UNREADABLE as error:
            raise ValueError(
                f"{self.name} has no tokenizer that can be read ({_first_line(error)}): save it there with "
                "tokenizer.save_pretrained(folder)"
            ) from error

    def network(self, kind: str, config: Any) -> nn.Module:
        """The network as the class `kind` of transformers builds it, frozen. Every weight must be in the checkpoint."""
        try:
            net, loaded = getattr(transformers(), kind).from_pretrained(
                self.name,
                config=config,
                trust_remote_code=self.trust_remote_code,
                use_safetensors=None if self.allow_pickle else True,
                **({} if self.dtype is None else {"dtype": self.dtype}),
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ValueError(
                f"the weights in {self.name} are damaged ({_first_line(error)}): fetch them again"
            ) from error
        except _UNREADABLE as error:
            self._refuse_code(error)
            mend = (
                "give another folder"
                if self.allow_pickle
                else "convert pickled ones, which may run any code, or trust them with allow_pickle=True"
            )
            raise ValueError(f"{self.name} has no safetensors weights ({_first_line(error)}): {mend}") from error
        missing = sorted({name for name, _ in net.named_parameters()} & set(loaded["missing_keys"]))
        if missing:
            raise ValueError(
                f"{self.name} lacks weights ({missing[0]} and {len(missing) - 1} more), which would be random: give a "
                f"checkpoint that was trained as {kind}, not with another head"
            )
        return net.to(self.device).eval().requires_grad_(False)

    def _refuse_code(self, error: Exception) -> None:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{self.name} is a model with code of its own: read that code, then pass trust_remote_code=True"
            ) from error


def pipeline_part(library: Any, kind: str, name: str, part: str, **more: Any) -> Any:
    """One part of a pipeline folder or hub name, as the class `kind` of a library loads it; networks from safetensors
    alone."""
    try:
        return getattr(library, kind).from_pretrained(name, subfolder=part, **more)
    except _UNREADABLE as error:
        raise ValueError(
            f"{name} has no {part} that {kind} can load ({_first_line(error)}): give a folder as a pipeline's "
            "save_pretrained writes it, with weights as safetensors, or a name on the hub"
        ) from error


def named_modules(net: nn.Module) -> dict[str, nn.Module]:
    """All layers of a network by name."""
    return dict(cast("Any", net).named_modules())


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, without special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind a text."""
    whole, text = tokenizer("a")["input_ids"], encode(tokenizer, "a")
    start = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
    return whole[:start], whole[start + len(text) :]


def transformers() -> Any:
    return _imported("transformers")


def diffusers() -> Any:
    return _imported("diffusers")


def _imported(library: str) -> Any:
    _list_device_functions()
    try:
        return import_module(library)
    except ImportError as error:
        raise ImportError(f"models by name need {library}: pip install 'tokensteer[hf]'") from error


def _list_device_functions() -> None:
    """torch lists the functions that a device context affects when one is first used. transformers replaces
    torch.linspace while it loads a network; if that is the first use, linspace ignores device contexts from then on,
    and networks that are built under one fail. So a context is used before."""
    with torch.device("cpu"):
        torch.empty(0)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".:")
