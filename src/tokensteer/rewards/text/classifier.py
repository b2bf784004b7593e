"""log p(label | text) of a classifier from the `transformers` library.

If it reads the tokens of the canvas, it is asked about ids, or about one-hots through its embedding, and has a
gradient. If its vocabulary is another one, the canvas is decoded and read anew, and there is none. Either way it sees
what it was trained on: special tokens around the text, padding behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tokensteer.rewards.text.embedding import check_length, embed, is_text, padding_last, reorder, resized, table_of
from tokensteer.rewards.text.hub import Tokenizer, decoder, loaded, longest_input, no_text, same_words
from tokensteer.rewards.text.strings import OfText

BATCH = 64  # rows read at a time
CLOSE = 1e-3  # between what a network says of ids and of their embeddings


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
            "the classifier has a single output, and whether that is a probability is not said: set its "
            "config.problem_type = 'multi_label_classification' if it is a logit, or use it through of_text"
        )
    return Label(index, exclusive)


@dataclass(frozen=True, eq=False)
class Classifier:
    """log p(label | x0), (P,), for ids x0 (P, L) or one-hots (P, L, V) in the network's own vocabulary.

    `before` and `after` (·, d) are the embedded special tokens around a text. Those of the canvas itself (`silent`),
    its padding among them, are left out: moved behind all else, and masked.
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
        # With a gradient all is kept anyway; without, a few rows at a time take little memory.
        parts = (x0,) if torch.is_grad_enabled() and x0.requires_grad else torch.split(x0, BATCH)
        return torch.cat([self._log_prob(embed(x, self.embedding), is_text(x, self.silent)) for x in parts])

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        """The same for rows of the embedding, (P, L, d)."""
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
        answer = self.network(inputs_embeds=reorder(whole, order), attention_mask=reorder(read, order).long())
        return self.label.log_prob(answer.logits)


@dataclass(frozen=True, eq=False)
class ClassifiesText:
    """log p(label | text) for a list of texts, read by the classifier's own tokenizer; what is too long is cut off."""

    network: Any
    label: Label
    tokenizer: Tokenizer
    longest: int

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        # Without a padding token texts of different lengths cannot be read together.
        padded = self.tokenizer.pad_token_id is not None and self.network.config.pad_token_id is not None
        size = BATCH if padded else 1
        parts = [self._log_prob(list(texts[k : k + size]), padded) for k in range(0, len(texts), size)]
        return torch.cat(parts)

    def _log_prob(self, texts: list[str], padded: bool) -> Tensor:
        read = self.tokenizer(texts, padding=padded, truncation=True, max_length=self.longest, return_tensors="pt")
        return self.label.log_prob(self.network(**read.to(self.network.device)).logits)


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
    tokenizer. `tokenizer` is that of the canvas, of `vocab_size` tokens. Says by `differentiable` which kind it is."""
    network, own = loaded(
        "AutoModelForSequenceClassification",
        source,
        own,
        device,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    reads = ClassifiesText(network, _label(network, label), own, longest_input(network, own))
    if same_words(tokenizer, own):
        direct = _direct(reads, tokenizer, len(tokenizer) if vocab_size is None else vocab_size)
        if direct is not None:
            return direct
    return OfText(reads, decoder(tokenizer))


def _direct(reads: ClassifiesText, tokenizer: Tokenizer, vocab_size: int) -> Classifier | None:
    """The classifier on ids; None if it cannot be entered behind its embedding."""
    table = table_of(reads.network)
    before, after = (
        table[torch.tensor(ids, dtype=torch.long, device=table.device)] for ids in _around(reads.tokenizer)
    )
    direct = Classifier(
        reads.network, reads.label, resized(table, vocab_size), before, after, no_text(tokenizer), reads.longest
    )
    return direct if _agrees(direct, reads, tokenizer) else None


def _around(own: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that are put before and after a text."""
    whole: list[int] = own("a").input_ids
    bare: list[int] = own("a", add_special_tokens=False).input_ids
    start = next(k for k in range(len(whole)) if whole[k : k + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


@torch.no_grad()
def _agrees(direct: Classifier, reads: ClassifiesText, tokenizer: Tokenizer) -> bool:
    """Some networks look for their last token among the ids, and cannot find it among embeddings: ask both ways, about
    a text with padding behind it."""
    special = set(tokenizer.all_special_ids)
    word = next((k for k in range(len(direct.embedding)) if k not in special), 0)
    alone = torch.tensor([[word]], device=direct.embedding.device)
    canvas = torch.cat([alone, *(torch.full_like(alone, k) for k in direct.silent[:1])], 1)
    before, after = (alone.new_tensor([ids], dtype=torch.long) for ids in _around(reads.tokenizer))
    expected = reads.label.log_prob(reads.network(input_ids=torch.cat([before, alone, after], 1)).logits)
    return bool((direct(canvas) - expected).abs().max() < CLOSE)
