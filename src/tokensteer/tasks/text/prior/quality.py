"""How well the prior's samples read: perplexity under SmolLM2 and diversity, beside those of the held-out corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from tokensteer.core.steering.methods import pretrained
from tokensteer.tasks.common.arrays import to_lists
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets.encoder import Encoder
from tokensteer.tasks.text.diversity import distinct
from tokensteer.tasks.text.fluency import Fluency
from tokensteer.tasks.text.model import canvas, model
from tokensteer.tasks.text.prompts import DEFAULT

STEPS = 100
ROWS = 300  # texts whose tables over the vocabulary are in memory together


def samples(
    denoiser: Encoder, vocabulary: WordPiece, many: int, prompt: str, generator: Generator, steps: int = STEPS
) -> list[str]:
    """Texts that the denoiser writes after a prompt, which may be empty."""
    setup = Setup(steps, device=generator.device.type)
    length = denoiser.config.length
    prior = model(setup, denoiser, [canvas(prompt, vocabulary, length)], vocabulary.mask_id)
    found: list[str] = []
    while len(found) < many:
        rows = min(ROWS, many - len(found))
        ids = pretrained(prior)(1, rows, generator=generator).samples[:, 0]
        found += [vocabulary.decode(row) for row in to_lists(ids)]
    return found


def measure(texts: Sequence[str], fluency: Fluency) -> dict[str, Any]:
    """Perplexity and distinct bigrams of texts."""
    found = fluency.perplexity(texts)
    return {"perplexity": found.numbers(), "distinct-2": distinct(texts, 2), "texts": len(texts)}


def quality(
    denoiser: Encoder,
    vocabulary: WordPiece,
    unseen: Tensor,
    fluency: Fluency,
    generator: Generator,
    many: int = 300,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Perplexity and distinct bigrams of samples without a prompt, of samples after the paper's prompts, and of as many
    held-out texts (D, L). Samples with other numbers of steps show what limits them."""
    free = samples(denoiser, vocabulary, many, "", generator, steps)
    each = max(1, many // len(DEFAULT))
    prompted = [text for p in DEFAULT for text in samples(denoiser, vocabulary, each, p, generator, steps)]
    chosen = torch.linspace(0, len(unseen) - 1, min(many, len(unseen))).long()
    real = [vocabulary.decode(row) for row in to_lists(unseen[chosen].long())]
    found: dict[str, Any] = {"steps": steps}
    for name, texts in (("samples", free), ("samples after prompts", prompted), ("held-out texts", real)):
        found[name] = measure(texts, fluency)
    ours, theirs = found["samples"], found["held-out texts"]
    ratio = ours["perplexity"]["mean"] / theirs["perplexity"]["mean"]
    found["times the perplexity of held-out texts"] = ratio
    found["share of the distinct-2 of held-out texts"] = ours["distinct-2"] / theirs["distinct-2"]
    for count in (steps // 2, 2 * steps):
        some = samples(denoiser, vocabulary, many, "", generator, count)
        found[f"samples in {count} steps"] = measure(some, fluency)
    found["examples"] = free[:20] + prompted[::each]
    return found
