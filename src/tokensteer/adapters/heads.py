"""Denoisers of foreign networks, with the linear head left out where there is one.

Logits over a large vocabulary take much memory. Where a network ends in a plain linear head, the head returns its input
during a call (`Trunk`), so that the network returns hidden states, and is applied later, at the sites that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensteer.adapters.network import Entry, Network, alike
from tokensteer.core.models.denoiser import FromHidden, FromLogits, Time, from_hidden, from_logits
from tokensteer.core.numerics.draws import NEVER


class Trunk(nn.Module):
    """Hidden states (P, L, H) of a `Network` whose `head` is left out. It is `Embedded`.

    The first call checks that head(states) are the network's logits: of a row, of the same row with other sites masked,
    and at two times, since what a network does behind its head may depend on either.
    """

    def __init__(self, network: Network, head: nn.Linear) -> None:
        super().__init__()
        self.network, self.head, self.checked = network, head, False

    @property
    def embedding(self) -> Tensor:
        return self.network.embedding

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self._run(self.network.entry_of_embedded(embedded), None)

    def forward(self, x: Tensor, t: Time | None = None) -> Tensor:
        return self._run(self.network.entry(x), t)

    def _run(self, entry: Entry, t: Time | None) -> Tensor:
        if not self.checked and len(entry.ids):
            time = t[:1] if isinstance(t, Tensor) and t.dim() else t
            for row in (entry.ids[:1], self._other_masks(entry.ids[:1])):
                for when in (time,) if time is None else (time, 0.37 * time):
                    self._check(self.network.entry(row), when)
            self.checked = True
        return self._states(entry, t)

    def _other_masks(self, ids: Tensor) -> Tensor:
        """Every other site masked where it was not, and open where it was masked."""
        mask_id, word = self.network.mask_id, int((~self.network.forbidden).nonzero()[0])
        chosen = self.network.real(ids) & (torch.arange(ids.shape[1], device=ids.device) % 2 == 0)
        return torch.where(chosen, torch.where(ids == mask_id, word, mask_id), ids)

    def _states(self, entry: Entry, t: Time | None, head: Callable[[Tensor], Tensor] = lambda input: input) -> Tensor:
        """The output of the network with another function in place of its head."""
        cast("Any", self.head).forward = head
        try:
            states = self.network.run(entry, t)
        finally:
            del self.head.forward
        return states.to(self.head.weight.dtype)  # some networks return their logits in single precision

    @torch.no_grad()
    def _check(self, entry: Entry, t: Time | None) -> None:
        """Raise unless head(states) are the network's logits and states of all magnitudes come out bit for bit: what a
        network does to its logits it would do to states, and rounding must not hide a small change."""
        sizes = 2.0 ** torch.linspace(-8, 8, self.head.in_features, device=entry.ids.device).round()
        marks: list[Tensor] = []

        def marked(input: Tensor) -> Tensor:
            marks.append(input * sizes.to(input.dtype))
            return marks[-1].clone()  # the network may change it in place

        mend = (
            f"the logits of {type(self.network.net).__name__} are not the unchanged output of its head: name the "
            "linear layer that it ends in, or no head, to use its logits (in training mode dropout has the same "
            "effect: call eval())"
        )
        logits = self.network.run(entry, t)
        try:
            states, found = self._states(entry, t), self._states(entry, t, marked)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # for example, a bias (V,) behind the head does not fit states
            raise ValueError(mend) from error
        fits = len(marks) == 1 and states.shape == (*entry.ids.shape, self.head.in_features)
        if not fits or not _in_place(found, marks[0].to(found.dtype)) or not alike(logits, self.head(states)):
            raise ValueError(mend)


def _in_place(states: Tensor, given: Tensor) -> bool:
    """Whether each of the states (P, L, H) is the one given, or, as in Dream, that of the site before it."""
    own, shifted = (states == given).all(-1), (states == given.roll(1, 1)).all(-1)
    return bool((own | shifted).all())


class Forbidding(nn.Linear):
    """A head that reads the weight and bias of another at every use, with a bias of -inf at forbidden tokens."""

    def __init__(self, head: nn.Linear, forbidden: Tensor) -> None:
        nn.Module.__init__(self)  # a linear layer without parameters of its own
        self.in_features, self.out_features, self.head = head.in_features, head.out_features, head
        self.forbidden: Tensor
        self.register_buffer("forbidden", forbidden, persistent=False)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.head.weight

    @property
    def bias(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        bias = cast("Tensor | None", self.head.bias)
        bias = self.head.weight.new_zeros(self.out_features) if bias is None else bias
        return bias.masked_fill(self.forbidden, NEVER)


def headed(network: Network, head: nn.Linear, *, ignores_time: bool) -> FromHidden:
    """A denoiser from a network and the linear layer that it ends in."""
    vocab_size = len(network.forbidden)
    plain = type(head) is nn.Linear and isinstance(head.weight, nn.Parameter) and "forward" not in vars(head)
    if not plain or head.out_features != vocab_size:
        raise ValueError(
            f"{type(head).__name__} is no plain linear head over {vocab_size} words, and only its weight would be "
            "used: name the linear layer that the network ends in, or no head, to use its logits"
        )
    own = Forbidding(head, network.forbidden) if network.forbidden.any() else head
    return from_hidden(Trunk(network, head), own, network.mask_id, ignores_time=ignores_time)


def choose_denoiser(network: Network, head: nn.Module | None, x: Tensor) -> FromLogits | FromHidden:
    """A denoiser of a network that ignores the time. It stores hidden states if they are smaller than logits and the
    head passes the check of `Trunk` on ids x (P, L), else logits."""
    if isinstance(head, nn.Linear) and head.out_features > head.in_features:
        with suppress(ValueError), torch.no_grad():
            denoiser = headed(network, head, ignores_time=True)
            denoiser.trunk(x)
            return denoiser
    return from_logits(network, network.mask_id, ignores_time=True)


def module(
    net: nn.Module,
    layer: nn.Module,
    mask_id: int,
    *,
    head: nn.Linear | None = None,
    never: Iterable[int] = (),
    ignores_time: bool = True,
) -> FromLogits | FromHidden:
    """A denoiser from any module that maps ids (P, L) to logits (P, L, V), as net(ids), or net(ids, t) unless it
    ignores the time. `layer` is its embedding layer: its output is replaced when one-hots are given, so that networks
    written for ids have gradients. Tokens `never` are not generated.

    With `head`, the linear layer that it ends in, hidden states are stored instead of logits, and the head is applied
    where tokens are needed. The first call checks that the network does end in it."""

    def call(net: nn.Module, ids: Tensor, real: Tensor, t: Time | None) -> Tensor:
        return net(ids) if ignores_time else net(ids, t)

    network = Network(net, layer, call, mask_id=mask_id, never=never)
    if head is not None:
        return headed(network, head, ignores_time=ignores_time)
    return from_logits(network, mask_id, ignores_time=ignores_time)
