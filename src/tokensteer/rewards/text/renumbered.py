"""A reward on one vocabulary for a canvas that has some of its tokens under other ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tokensteer.core.models.denoiser import Embedded
from tokensteer.core.twists.tilt import Reward
from tokensteer.rewards.text.embedding import embed


@runtime_checkable
class EmbeddedReward(Embedded, Protocol):
    """A reward that takes ids, or tokens embedded by its own table (V, d), such as `Classifier`."""

    def __call__(self, x0: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Renumbered:
    """The reward of ids x0 (P, L) or one-hots (P, L, K), where token k is token origin[k] of `reward`."""

    reward: EmbeddedReward
    origin: Tensor
    differentiable: bool = field(default=True, init=False)

    @property
    def embedding(self) -> Tensor:
        return self.reward.embedding[self.origin]

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.reward.of_embeddings(embedded)

    def __call__(self, x0: Tensor) -> Tensor:
        if x0.is_floating_point():
            return self.reward.of_embeddings(embed(x0, self.embedding))
        return self.reward(self.origin[x0])


def renumbered(reward: Reward, origin: Sequence[int]) -> Renumbered:
    """`reward` for a canvas of fewer tokens; `origin` holds the id of each in the reward's vocabulary."""
    if not isinstance(reward, EmbeddedReward):
        raise ValueError(
            f"renumbered: {type(reward).__name__} takes no embedded tokens. A classifier does if it is made for its "
            "own vocabulary, classifier(network, label, tokenizer, own=tokenizer); other rewards need no gradient: use "
            "lambda x: reward(origin[x])"
        )
    known = len(reward.embedding)
    if not origin or not 0 <= min(origin) <= max(origin) < known:
        raise ValueError(f"renumbered: each token needs an id from 0 to {known - 1}, in the reward's own vocabulary")
    return Renumbered(reward, torch.tensor(list(origin), device=reward.embedding.device))
