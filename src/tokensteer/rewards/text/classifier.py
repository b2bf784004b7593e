"""log p(label | text) of a classifier from the `transformers` library.

With the vocabulary of the canvas it takes ids, or one-hots through its embedding, and has a gradient. With another
vocabulary the canvas is decoded and tokenized again, and it has none. Either way its input is as in training: special
tokens around the text, padding behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tokensteer.hub import special_tokens
from tokensteer.rewards.text.embedding import check_length, embed, is_text, padding_last, reorder, resized, table_of
from tokensteer.rewards.text.hub import Tokenizer, decoder, loaded, longest_input, no_text, same_words
from tokensteer.rewards.text.strings import OfText

BATCH = 64  # rows read at a time
CLOSE = 1e-3  # largest difference between log-probabilities from ids and from their embeddings


@dataclass(frozen=True)
class Label:
    """One label of a network's logits (P, K)."""

    index: int
    exclusive: bool

    def log_prob(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = logits.log_softmax(-1) if self.exclusive else logsigmoid(logits)
        return log_p[:, self.index]


def _label(network: Any, label: str | int) -> Label:
    config = network.config
    labels: dict[str, int] = config.label2id or {}
    index = labels.get(label) if isinstance(label, str) else label
    if index is None or not 0 <= index < config.num_labels:
        raise ValueError(f"the classifier has no label {label!r}: its labels are {', '.join(map(repr, labels))}")
    exclusive = config.problem_type != "multi_label_classification"
    if exclusive and config.num_labels == 1:
        raise ValueError(
            "the classifier has a single output, which may or may not be a logit: set its "
            "config.problem_type = 'multi_label_classification' if it is one, or use it through of_text"
        )
    return Label(index, exclusive)


@dataclass(frozen=True, eq=False)
class Classifier:
    """log p(label | x0), (P,), for ids x0 (P, L) or one-hots (P, L, V) in the network's own vocabulary.

    `before` and `after` (·, d) are the embedded special tokens around a text. Special tokens in the canvas (`silent`),
    such as its padding, are moved behind the rest and masked.
    """

    network: Any
    label: Label
    embedding: Tensor
    before: Tensor
    after: Tensor
    silent: tuple[int, ...]
    longest: int
    differentiable: bool = field(default=True, init=False)

    def __call__(self, x0: Tensor) -> Tensor:
        # With a gradient all activations are kept anyway; without, small batches save memory.
        parts = (x0,) if torch.is_grad_enabled() and x0.requires_grad else torch.split(x0, BATCH)
        return torch.cat([self._log_prob(embed(x, self.embedding), is_text(x, self.silent)) for x in parts])

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        """The same for embedded tokens, (P, L, d)."""
        real = torch.ones_like(embedded[..., 0], dtype=torch.bool)
        for k in self.silent:
            real = real & (embedded.detach() != self.embedding[k]).any(-1)
        return self._log_prob(embedded, real)

    def _log_prob(self, embedded: Tensor, real: Tensor) -> Tensor:
        check_length(embedded.shape[1], len(self.before) + len(self.after), self.longest)
        before, after = (part.expand(len(embedded), -1, -1) for part in (self.before, self.after))
        whole = torch.cat([before, embedded, after], 1)
        read = torch.cat([real.new_ones(before.shape[:2]), real, real.new_ones(after.shape[:2])], 1)
        order = padding_last(read)
        found = self.network(inputs_embeds=reorder(whole, order), attention_mask=reorder(read, order).long())
        return self.label.log_prob(found.logits)


@dataclass(frozen=True, eq=False)
class ClassifiesText:
    """log p(label | text) for a list of texts, by the classifier's own tokenizer; long texts are truncated."""

    network: Any
    label: Label
    tokenizer: Tokenizer
    longest: int

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        # Without a padding token, texts of different lengths cannot share a batch.
        padded = self.tokenizer.pad_token_id is not None and self.network.config.pad_token_id is not None
        size, longest, found = BATCH if padded else 1, self.longest, list[Tensor]()
        for k in range(0, len(texts), size):
            part = list(texts[k : k + size])
            read = self.tokenizer(part, padding=padded, truncation=True, max_length=longest, return_tensors="pt")
            found.append(self.label.log_prob(self.network(**read.to(self.network.device)).logits))
        return torch.cat(found)


def classifier(
    source: str | Path | Any,
    label: str | int,
    tokenizer: Tokenizer,
    *,
    own: Tokenizer | None = None,
    vocab_size: int | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Classifier | OfText:
    """The reward log p(label | text) of a sequence classifier: a folder, a hub name, or the network with its `own`
    tokenizer. `tokenizer` is that of the canvas, of `vocab_size` tokens. `differentiable` tells which kind results."""
    network, own = loaded("AutoModelForSequenceClassification", source, own, device, allow_pickle, trust_remote_code)
    reads = ClassifiesText(network, _label(network, label), own, longest_input(network, own))
    if same_words(tokenizer, own):
        table = table_of(network)
        around = [torch.tensor(ids, dtype=torch.long, device=table.device) for ids in special_tokens(own)]
        before, after = (table[ids] for ids in around)
        table = resized(table, len(tokenizer) if vocab_size is None else vocab_size)
        direct = Classifier(network, reads.label, table, before, after, no_text(tokenizer), reads.longest)
        if _agrees(direct, around, set(tokenizer.all_special_ids)):
            return direct
    return OfText(reads, decoder(tokenizer))


@torch.no_grad()
def _agrees(direct: Classifier, around: Sequence[Tensor], special: set[int]) -> bool:
    """Whether ids and embeddings give the same log-probability for a padded text. They differ for networks that find
    their last token by its id."""
    word = next((k for k in range(len(direct.embedding)) if k not in special), 0)
    alone = torch.tensor([[word]], device=direct.embedding.device)
    canvas = torch.cat([alone, *(torch.full_like(alone, k) for k in direct.silent[:1])], 1)
    before, after = (ids.unsqueeze(0) for ids in around)
    expected = direct.label.log_prob(direct.network(input_ids=torch.cat([before, alone, after], 1)).logits)
    return bool((direct(canvas) - expected).abs().max() < CLOSE)
