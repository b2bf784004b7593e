"""Denoisers: functions of x (P, L) and t that return log p(x_0 | x_t) at each site, (P, L, V), -inf at the mask.

Only values at masked sites are read; visible tokens are carried over by this library. For gradients a denoiser is
called with one-hots (P, L, V), and visible tokens are carried over differentiably (`carry_over`). The time is a number,
or a tensor (P,) for kernels with one clock for each particle (`TimedFirstHitting`). If the model has a context, such as
class labels, a denoiser takes its rows as further arguments. A denoiser that is `Timeless` or `Structured` is called
less often, or costs less memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tokensteer.core.categorical.forms import CategoricalStore, HiddenLogits, Logits, masked_log_softmax
from tokensteer.core.numerics.domains import check_flags

Time = float | Tensor  # one for all particles, or one for each, (P,)
Denoiser = Callable[..., Tensor]  # x, a `Time` and the rows of the context, if the model has one


@runtime_checkable
class Timeless(Protocol):
    """A denoiser or estimator with `ignores_time`; if True, a particle that has not moved keeps its prediction."""

    @property
    def ignores_time(self) -> bool: ...


def ignores_time(network: object) -> bool:
    return isinstance(network, Timeless) and network.ignores_time


@runtime_checkable
class Structured(Protocol):
    """A denoiser that can return its P·L distributions in the form the network gave them, not as (P, L, V) logs."""

    def __call__(self, x: Tensor, t: Time, *context: Tensor) -> Tensor: ...
    def laws(self, x: Tensor, t: Time, *context: Tensor) -> CategoricalStore: ...


@dataclass(frozen=True)
class FromLogits:
    """A denoiser from a network's raw logits, with the mask excluded and the rest normalised, in float32 at least.

    The network is called as network(x, t), or as network(x) if it `ignores_time`; then particles that have not moved
    are not computed again. The rows of a context follow: network(x, t, labels), or network(x, labels).
    """

    network: Callable[..., Tensor]
    mask_id: int
    ignores_time: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_flags(self)

    def logits(self, x: Tensor, t: Time, *context: Tensor) -> Tensor:
        """What the network returns, (P, L, V)."""
        logits = self.network(x, *context) if self.ignores_time else self.network(x, t, *context)
        return logits if logits.is_floating_point() else logits.to(torch.float32)

    def __call__(self, x: Tensor, t: Time, *context: Tensor) -> Tensor:
        return masked_log_softmax(self.logits(x, t, *context).clone(), self.mask_id)

    def laws(self, x: Tensor, t: Time, *context: Tensor) -> Logits:
        return self.kept(self.logits(x, t, *context))

    def kept(self, answer: Tensor) -> Logits:
        """The distributions of logits (P, L, V)."""
        rows = answer.flatten(0, 1)  # rows of a compiled network may have gaps between them
        return Logits(rows if rows.stride(-1) == 1 else rows.contiguous(), self.mask_id)


def check_head(head: nn.Module) -> None:
    """Raise unless the head is a plain linear layer: its weight is read and it is never called."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"{type(head).__name__} is no plain linear head: only its weight would be read, not its adapter. Use "
            "from_logits(network, mask_id), which calls it"
        )


@dataclass(frozen=True)
class FromHidden:
    """`FromLogits` for a network whose logits are head(trunk(x, t)). The head is applied only where tokens are needed,
    so that logits over a large vocabulary are never stored."""

    trunk: Callable[..., Tensor]
    head: nn.Linear
    mask_id: int
    ignores_time: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_head(self.head)
        check_flags(self)

    def _hidden(self, x: Tensor, t: Time, *context: Tensor) -> Tensor:
        return self.trunk(x, *context) if self.ignores_time else self.trunk(x, t, *context)

    def __call__(self, x: Tensor, t: Time, *context: Tensor) -> Tensor:
        logits = self.head(self._hidden(x, t, *context))
        return masked_log_softmax(logits.clone(), self.mask_id)  # a hook may keep the logits

    def laws(self, x: Tensor, t: Time, *context: Tensor) -> HiddenLogits:
        return self.kept(self._hidden(x, t, *context))

    def kept(self, answer: Tensor) -> HiddenLogits:
        """The distributions of hidden states (P, L, H)."""
        return HiddenLogits(answer.flatten(0, 1), self.head, self.mask_id)


from_logits, from_hidden = FromLogits, FromHidden  # the public names


def carry_over(x: Tensor, log_x0: Tensor, mask_id: int) -> Tensor:
    """mu(x) = x[tokens] + x[mask] · exp(log_x0), (P, L, V), differentiable in one-hots x (P, L, V)."""
    tokens = torch.arange(x.shape[-1], device=x.device) != mask_id
    return x * tokens + x[..., mask_id : mask_id + 1] * log_x0.exp()


@runtime_checkable
class Embedded(Protocol):
    """A network whose first layer is `embedding` (V, d); `of_embeddings` runs the rest on embedded tokens (P, L, d)
    and the rows of the context."""

    @property
    def embedding(self) -> Tensor: ...
    @property
    def of_embeddings(self) -> Callable[..., Tensor]: ...
