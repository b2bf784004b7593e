"""Mean log-likelihood per token under a causal language model: 1/L · sum_l log p(x_l | x_<l).

In the model's own vocabulary it takes ids or one-hots; otherwise the canvas is decoded and tokenized again. If the
tokenizer has a token for the beginning of a text, it is put first and the first token counts; if not, it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tokensteer.core.numerics.draws import NEVER
from tokensteer.rewards.text.embedding import check_length, embed, is_text, padding_last, reorder, resized, table_of
from tokensteer.rewards.text.hub import Tokenizer, decoder, loaded, longest_input, no_text, same_words
from tokensteer.rewards.text.strings import OfText

BATCH = 16  # rows read at a time: each has log-probabilities over the vocabulary at every site


@dataclass(frozen=True, eq=False)
class Likelihood:
    """Mean log-likelihood (P,) of ids x0 (P, L) or one-hots (P, L, V); -inf for rows without tokens that count."""

    network: Any
    table: Tensor
    start: Tensor  # the embedded beginning of a text, (1, d), or (0, d) without one
    silent: tuple[int, ...]
    longest: int
    differentiable: bool = field(default=True, init=False)

    def __call__(self, x0: Tensor) -> Tensor:
        check_length(x0.shape[1], len(self.start), self.longest)
        real = is_text(x0, self.silent)
        order = padding_last(real)
        x0, real = reorder(x0, order), reorder(real, order)
        if torch.is_grad_enabled() and x0.requires_grad:
            return self.mean(x0, real)
        parts = zip(torch.split(x0, BATCH), torch.split(real, BATCH), strict=True)
        return torch.cat([self.mean(*part) for part in parts])

    def mean(self, x: Tensor, real: Tensor) -> Tensor:
        """For rows whose `real` tokens (P, L) come first."""
        embedded = torch.cat([self.start.expand(len(x), -1, -1), embed(x, self.table)], 1)
        seen = torch.cat([real.new_ones(len(x), len(self.start)), real], 1)
        log_p = self.network(inputs_embeds=embedded, attention_mask=seen.long()).logits[:, :-1]
        log_p = log_p.to(torch.promote_types(log_p.dtype, torch.float32)).log_softmax(-1)
        given = 1 - len(self.start)
        x, real = x[:, given:], real[:, given:]
        if x.is_floating_point():
            words = min(x.shape[-1], log_p.shape[-1])
            log_likelihood = (x[..., :words] * log_p[..., :words]).sum(-1)
        else:
            log_likelihood = log_p.gather(-1, x.unsqueeze(-1)).squeeze(-1)
        count = real.sum(-1)
        mean = log_likelihood.masked_fill(~real, 0.0).sum(-1) / count.clamp(min=1)
        return mean.masked_fill(count == 0, NEVER)


@dataclass(frozen=True, eq=False)
class LikelihoodOfText:
    """The same for a list of texts, by the model's own tokenizer; long texts are truncated."""

    likelihood: Likelihood
    tokenizer: Tokenizer

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.cat([self._mean(list(texts[k : k + BATCH])) for k in range(0, len(texts), BATCH)])

    def _mean(self, texts: list[str]) -> Tensor:
        rows: list[list[int]] = self.tokenizer(texts, add_special_tokens=False).input_ids
        most, device = self.likelihood.longest - len(self.likelihood.start), self.likelihood.table.device
        read = [torch.tensor(row[:most], dtype=torch.long, device=device) for row in rows]
        # The extra row gives empty texts a site, which does not count.
        x = pad_sequence([*read, read[0].new_zeros(1)], batch_first=True)[:-1]
        length = torch.tensor([len(row) for row in read], device=device)
        return self.likelihood.mean(x, torch.arange(x.shape[1], device=device) < length.unsqueeze(-1))


def of_texts(network: Any, own: Tokenizer, longest: int) -> LikelihoodOfText:
    """The mean log-likelihood of texts under a causal language model, with its `own` tokenizer."""
    table, begin = table_of(network), own.bos_token_id
    start = table[:0] if begin is None else table[begin : begin + 1]
    return LikelihoodOfText(Likelihood(network, table, start, (), longest), own)


def likelihood(
    source: str | Path | Any,
    tokenizer: Tokenizer,
    *,
    own: Tokenizer | None = None,
    vocab_size: int | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Likelihood | OfText:
    """The mean log-likelihood per token under a causal language model: a folder, a hub name, or the network with its
    `own` tokenizer. `tokenizer` is that of the canvas, of `vocab_size` tokens."""
    network, own = loaded("AutoModelForCausalLM", source, own, device, allow_pickle, trust_remote_code)
    reads = of_texts(network, own, longest_input(network, own))
    if same_words(tokenizer, own):
        table = resized(reads.likelihood.table, len(tokenizer) if vocab_size is None else vocab_size)
        return replace(reads.likelihood, table=table, silent=no_text(tokenizer))
    return OfText(reads, decoder(tokenizer))
