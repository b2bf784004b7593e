"""Denoisers: what a network says of the clean data.

A denoiser gives log p(x_0 | x_t) at each site, (P, L, V), -inf at the mask. Only its answers at masked sites are read:
what is visible is carried over by this library, never by the network. For gradients it is called with one-hots instead
of ids, and carry-over must then be differentiable,  mu(x) = x[tokens] + x[mask] · exp(log_x0),  so that the effect of
a token on its own site is felt (`carry_over`). The time t is a number; kernels whose particles have clocks of their own
(`TimedFirstHitting`) call it with a tensor (P,) instead, one time for each row. A denoiser is any function; one that
says more of itself (`Timeless`, `Structured`) is asked less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tokensteer.core.categorical.forms import CategoricalStore, HiddenLogits, Logits, masked_log_softmax

Time = float | Tensor  # one for all, or (P,) where particles have clocks of their own


Denoiser = Callable[[Tensor, Any], Tensor]  # x and a `Time`


@runtime_checkable
class Timeless(Protocol):
    """A denoiser that says whether it ignores the time; if so, a particle that has not moved keeps its prediction."""

    @property
    def ignores_time(self) -> bool: ...


@runtime_checkable
class Structured(Protocol):
    """A denoiser that can keep its answer in the form the network gave it, (P·L) laws, instead of (P, L, V) logs."""

    def __call__(self, x: Tensor, t: Time) -> Tensor: ...
    def laws(self, x: Tensor, t: Time) -> CategoricalStore: ...


@dataclass(frozen=True)
class FromLogits:
    """A denoiser from a network's raw logits: see `from_logits`."""

    network: Callable[..., Tensor]
    mask_id: int
    ignores_time: bool

    def _ask(self, x: Tensor, t: Time) -> Tensor:
        logits = self.network(x) if self.ignores_time else self.network(x, t)
        return logits if logits.is_floating_point() else logits.to(torch.float32)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return masked_log_softmax(self._ask(x, t).clone(), self.mask_id)

    def laws(self, x: Tensor, t: Time) -> Logits:
        return self.kept(self._ask(x, t))

    def kept(self, answer: Tensor) -> Logits:
        """The laws of the network's answer (P, L, V)."""
        rows = answer.flatten(0, 1)  # a compiled network may leave gaps between its rows, which do no harm
        return Logits(rows if rows.stride(-1) == 1 else rows.contiguous(), self.mask_id)


def from_logits(network: Callable[..., Tensor], mask_id: int, *, ignores_time: bool = False) -> FromLogits:
    """A denoiser from a network's raw logits: the mask is forbidden and the rest normalised, in float32 at least.

    The network is called as network(x, t), or network(x) if it ignores time. Say so if it does: particles that have not
    moved are then not asked about again.
    """
    return FromLogits(network, mask_id, ignores_time)


def check_head(head: nn.Module) -> None:
    """A head is read by its weight and not called, so that one which does more than a linear layer would go unheard."""
    if type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"{type(head).__name__} is no plain linear head: its weight alone would be read, without its adapter. Use "
            "from_logits(network, mask_id), which calls it"
        )


@dataclass(frozen=True)
class FromHidden:
    """A denoiser from a network and its head: see `from_hidden`."""

    trunk: Callable[..., Tensor]
    head: nn.Linear
    mask_id: int
    ignores_time: bool

    def __post_init__(self) -> None:
        check_head(self.head)

    def _ask(self, x: Tensor, t: Time) -> Tensor:
        return self.trunk(x) if self.ignores_time else self.trunk(x, t)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return masked_log_softmax(self.head(self._ask(x, t)).clone(), self.mask_id)  # a hook may hold on to what it saw

    def laws(self, x: Tensor, t: Time) -> HiddenLogits:
        return self.kept(self._ask(x, t))

    def kept(self, answer: Tensor) -> HiddenLogits:
        """The laws of the trunk's answer (P, L, H)."""
        return HiddenLogits(answer.flatten(0, 1), self.head, self.mask_id)


def from_hidden(
    trunk: Callable[..., Tensor], head: nn.Linear, mask_id: int, *, ignores_time: bool = False
) -> FromHidden:
    """`from_logits` for a network whose logits are head(trunk(x, t)): the head is applied only where tokens are asked
    for, so that logits over a large vocabulary are never stored."""
    return FromHidden(trunk, head, mask_id, ignores_time)


def carry_over(x: Tensor, log_x0: Tensor, mask_id: int) -> Tensor:
    """mu(x) = x[tokens] + x[mask] · exp(log_x0), (P, L, V), differentiable in one-hots x (P, L, V)."""
    tokens = torch.arange(x.shape[-1], device=x.device) != mask_id
    return x * tokens + x[..., mask_id : mask_id + 1] * log_x0.exp()


@runtime_checkable
class Embedded(Protocol):
    """A network whose first layer is an embedding (V, d), and what it makes of embedded tokens (P, L, d)."""

    @property
    def embedding(self) -> Tensor: ...
    def of_embeddings(self, embedded: Tensor) -> Tensor: ...
