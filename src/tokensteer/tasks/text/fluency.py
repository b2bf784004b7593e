"""Perplexity of texts under a pretrained language model, SmolLM2-135M, which a Llama of our own reads from its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from tokensteer.tasks.common.metrics import Measured, measured
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.text.corpus import llama
from tokensteer.tasks.text.corpus.assignments import START
from tokensteer.tasks.text.corpus.byte_pairs import BytePairs

PATTERN = "SmolLM2-135M*.gguf"


@dataclass(frozen=True)
class Fluency:
    """Perplexity under a language model: `read` returns the nats per token of each text, (P,)."""

    read: Callable[[Sequence[str]], Tensor]

    @classmethod
    def found(cls) -> Fluency | None:
        """SmolLM2 from the data folder or two levels below, loaded at first use; None if it is not there."""
        files = (file for depth in ("", "*/", "*/*/") for file in sorted(data_folder().glob(depth + PATTERN)))
        file = next(files, None)
        return None if file is None else cls(lambda texts: _smollm(file)(texts))

    @classmethod
    def of(cls, net: llama.Llama, tokenizer: BytePairs) -> Fluency:
        return cls(partial(nats, net, tokenizer))

    def perplexity(self, texts: Sequence[str]) -> Measured:
        """exp of the mean over texts of their nats per token; the error is over texts."""
        mean = measured(self.read(texts))
        perplexity = math.exp(mean.mean)
        return Measured(perplexity, perplexity * mean.error, mean.count)


@torch.no_grad()
def nats(net: llama.Llama, tokenizer: BytePairs, texts: Sequence[str]) -> Tensor:
    """Nats per token of each text, (P,), after the token for the beginning."""
    found: list[Tensor] = []
    device = net.token_embd.weight.device
    for text in texts:
        ids = torch.tensor([[tokenizer.ids[START], *tokenizer.encode(text)]], device=device)
        if ids.shape[1] < 2:
            raise ValueError("an empty text has no perplexity: leave it out")
        log_p = net.logits(net(ids[:, :-1])).float().log_softmax(-1)
        found.append(-log_p.gather(-1, ids[:, 1:, None]).mean())
    return torch.stack(found).cpu()


@cache
def _smollm(file: Path) -> Callable[[Sequence[str]], Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return partial(nats, *llama.load(file, device, torch.float32))
