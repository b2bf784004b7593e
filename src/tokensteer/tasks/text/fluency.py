"""Perplexity of texts under a pretrained language model, SmolLM2-135M, read from its GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensteer.hub import transformers
from tokensteer.rewards.text.likelihood import LikelihoodOfText, of_texts
from tokensteer.tasks.common.metrics import Measured, measured
from tokensteer.tasks.common.task import data_folder

PATTERN = "SmolLM2-135M*.gguf"
NEEDED = ("transformers", "gguf")


@dataclass(frozen=True)
class Fluency:
    """Perplexity under a language model: `read` returns mean log-likelihoods per token, (P,), of texts."""

    read: Callable[[list[str]], Tensor]

    @classmethod
    def found(cls) -> Fluency | None:
        """SmolLM2 from the data folder or two levels below, loaded at first use; None if it or a library is missing."""
        if not all(find_spec(name) for name in NEEDED):
            return None
        files = (file for depth in ("", "*/", "*/*/") for file in sorted(data_folder().glob(depth + PATTERN)))
        file = next(files, None)
        return None if file is None else cls(lambda texts: _smollm(file)(texts))

    def perplexity(self, texts: Sequence[str]) -> Measured:
        """exp of the mean over texts of their nats per token; the error is over texts."""
        nats = measured(-self.read(list(texts)))
        perplexity = math.exp(nats.mean)
        return Measured(perplexity, perplexity * nats.error, nats.count)


@cache
def _smollm(file: Path) -> LikelihoodOfText:
    own = transformers().AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    network = transformers().AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return reader(network, own)


def reader(network: Any, own: Any) -> LikelihoodOfText:
    """The log-likelihood of texts under a causal language model, with its `own` tokenizer."""
    return of_texts(network.eval().requires_grad_(False), own, network.config.max_position_embeddings)
