"""How natural texts are to a language model that nobody here trained: SmolLM2-135M, from its GGUF file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tokensteer.hub import transformers
from tokensteer.tasks.metrics import Measured, measured
from tokensteer.tasks.task import data_folder

PATTERN = "SmolLM2-135M*.gguf"
NEEDED = ("transformers", "gguf")


@dataclass(frozen=True)
class Fluency:
    """Perplexity under the model of a GGUF file, which is loaded when the first text is read."""

    file: Path

    @classmethod
    def found(cls) -> Fluency | None:
        """The model of the data folder, or of a folder in it; None if it or a library to read it is not there."""
        if not all(find_spec(name) for name in NEEDED):
            return None
        files = (file for depth in ("", "*/", "*/*/") for file in sorted(data_folder().glob(depth + PATTERN)))
        file = next(files, None)
        return None if file is None else cls(file)

    def perplexity(self, texts: Sequence[str]) -> Measured:
        """exp of the mean over texts of their nats per token, each text read on its own; the error is over texts."""
        nats = measured(-_reader(self.file)(list(texts)))
        perplexity = math.exp(nats.mean)
        return Measured(perplexity, perplexity * nats.error)


@cache
def _reader(file: Path) -> Any:
    """Mean log-likelihoods per token, (P,), of texts."""
    from tokensteer.rewards.text.embedding import table_of
    from tokensteer.rewards.text.likelihood import Likelihood, LikelihoodOfText

    own = transformers().AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    network = transformers().AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    network.eval().requires_grad_(False)
    table, begin = table_of(network), own.bos_token_id
    start = table[begin : begin + 1]
    return LikelihoodOfText(Likelihood(network, table, start, (), network.config.max_position_embeddings), own)
