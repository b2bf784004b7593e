"""A foreign network entered behind its embedding layer, so that it takes ids, one-hots and embeddings alike.

Where a token is looked up, E[x], a one-hot is multiplied, x·E: the same answer, linear in x. The network is called with
ids, as always, and what its embedding layer answers is replaced on the way; so it may read its ids elsewhere too, to
count positions or to see padding. These must then survive where only embeddings arrive (`Embedded`). So the table that
others see is wider than E: behind it stand whether a token is the mask, and its id in three digits, each of them exact
in half precision. No gradient flows through digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tokensteer.core.denoiser import FromLogits, Time, from_logits
from tokensteer.core.draws import NEVER

DIGIT, DIGITS = 256, 3  # integers up to 256 are exact in bfloat16
EXTRA = 8  # columns behind the embedding: the mask, the digits, and zeros that keep rows aligned

Ask = Callable[[nn.Module, Tensor, Tensor, Time | None], Tensor]
"""A network's logits (P, L, V) of ids (P, L), given which sites are no padding (P, L), and the time."""


@dataclass(frozen=True)
class Entry:
    """Tokens on their way in: embedded (P, L, d), how much of each is the mask, their ids, and which are no padding."""

    embedded: Tensor
    masked: Tensor
    ids: Tensor
    real: Tensor


Prepare = Callable[[Entry, Tensor], Entry]
"""What a network does with ids beside looking them up, done to what was looked up in its table (V, d)."""


def as_they_are(entry: Entry, table: Tensor) -> Entry:
    return entry


@dataclass(frozen=True)
class MaskDropout:
    """ESM embeds masks as 0 and scales the other tokens up for them, by counting ids. Here that is done by the mass of
    the mask, which has a gradient; the network itself is shown ids with a `word` in place of masks, and counts none."""

    mask_id: int
    word: int

    def __call__(self, entry: Entry, table: Tensor) -> Entry:
        visible = entry.embedded - entry.masked.unsqueeze(-1) * table[self.mask_id]
        share = entry.masked.sum(-1, dtype=torch.promote_types(visible.dtype, torch.float32)) / entry.real.sum(-1)
        scaled = visible / (1.0 - share)[:, None, None]
        ids = entry.ids.masked_fill(entry.ids == self.mask_id, self.word)
        return replace(entry, embedded=scaled.to(visible.dtype), ids=ids)


class Network(nn.Module):
    """Logits (P, L, V) of ids (P, L) or one-hots (P, L, V), -inf at the tokens `never`; `Embedded`, too."""

    def __init__(
        self,
        net: nn.Module,
        layer: nn.Module,
        ask: Ask,
        *,
        mask_id: int,
        pad_id: int | None = None,
        never: Iterable[int] = (),
        prepare: Prepare = as_they_are,
    ) -> None:
        super().__init__()
        self.net, self.layer = net, layer
        self.ask, self.prepare, self.mask_id, self.pad_id = ask, prepare, mask_id, pad_id
        forbidden = torch.zeros(len(_weight(layer)), dtype=torch.bool)
        forbidden[list(never)] = True
        self.forbidden: Tensor
        self.register_buffer("forbidden", forbidden.to(_weight(layer).device), persistent=False)

    @property
    def embedding(self) -> Tensor:
        """E and what stands behind it, (V, d + 8)."""
        weight = _weight(self.layer)
        ids = torch.arange(len(weight), device=weight.device)
        extra = weight.new_zeros(len(weight), EXTRA)
        extra[self.mask_id, 0] = 1.0
        for place in range(DIGITS):
            extra[:, 1 + place] = (ids // DIGIT**place % DIGIT).to(weight.dtype)
        return torch.cat([weight, extra], -1)

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        behind = embedded[..., -EXTRA:]
        digits = behind[..., 1 : 1 + DIGITS].detach().long()
        ids = sum((digits[..., place] * DIGIT**place for place in range(DIGITS)), torch.zeros_like(digits[..., 0]))
        return self._logits(embedded[..., :-EXTRA], behind[..., 0], ids, None)

    def forward(self, x: Tensor, t: Time | None = None) -> Tensor:
        weight = _weight(self.layer)
        if not x.is_floating_point():
            return self._logits(weight[x], (x == self.mask_id).to(weight.dtype), x, t)
        x = x.to(weight.dtype)
        return self._logits(x @ weight, x[..., self.mask_id], x.argmax(-1), t)

    def own(self, ids: Tensor, t: Time | None = None) -> Tensor:
        """What the network itself says of ids, entered by nobody."""
        return self.ask(self.net, ids, self.real(ids), t).masked_fill(self.forbidden, NEVER)

    def real(self, ids: Tensor) -> Tensor:
        """Which sites are no padding, (P, L)."""
        return torch.ones_like(ids, dtype=torch.bool) if self.pad_id is None else ids != self.pad_id

    def _logits(self, embedded: Tensor, masked: Tensor, ids: Tensor, t: Time | None) -> Tensor:
        entry = self.prepare(Entry(embedded, masked, ids, self.real(ids)), _weight(self.layer))
        entered: list[Tensor] = []

        def replaced(*_: object) -> Tensor:
            entered.append(entry.embedded)
            return entry.embedded

        handle = self.layer.register_forward_hook(replaced)
        try:
            logits = self.ask(self.net, entry.ids, entry.real, t)
        finally:
            handle.remove()
        if len(entered) != 1:
            raise ValueError(
                f"{type(self.net).__name__} called its embedding layer {len(entered)} times where once was expected: "
                "name the layer that embeds its ids, or wrap it as from_logits(network, mask_id)"
            )
        return logits.masked_fill(self.forbidden, NEVER)


def checked(network: Network, x: Tensor, t: Time | None = None) -> Network:
    """`network` if it says the same of ids x (P, L) and of their embeddings, else an error."""
    vocab_size = len(_weight(network.layer))
    with torch.no_grad():
        own = network.own(x, t)
        entered = network(x, t)
    if own.shape != (*x.shape, vocab_size):
        raise ValueError(
            f"the network answers {tuple(own.shape)} for ids {tuple(x.shape)}, its embedding layer has {vocab_size} "
            "words: it must give logits (P, L, V) over the tokens that it reads"
        )
    if not _alike(own, entered):
        raise ValueError(
            f"{type(network.net).__name__} says one thing of ids and another of their embeddings: name the layer that "
            "looks them up and does no more, or wrap it as from_logits(network, mask_id) and do without gradients"
        )
    return network


def looks_past_padding(network: Network, alone: Tensor, padded: Tensor) -> bool:
    """Whether the network says the same of a row of ids (L,) with padding as without. Those that mix sites by anything
    but attention do not, nor do those that count positions from the wrong end."""
    with torch.no_grad():
        answers = network.own(alone[None])[0], network.own(padded[None])[0]
    return _alike(answers[0], answers[1][padded != network.pad_id])


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether logits are the same but for rounding; those of tokens that are never generated are -inf in both."""
    known = (a > NEVER) & (b > NEVER)
    close = 0.1 if a.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((a - b)[known].abs().max() <= close * (1.0 + a[known].abs().max()))


def _weight(layer: nn.Module) -> Tensor:
    """The table of an embedding layer, (V, d), its only parameter."""
    tables = list(layer.parameters())
    if len(tables) != 1 or tables[0].dim() != 2:
        raise ValueError(f"{type(layer).__name__} is no embedding layer: give the one whose weight is a table (V, d)")
    return tables[0]


def module(
    net: nn.Module,
    layer: nn.Module,
    mask_id: int,
    *,
    never: Iterable[int] = (),
    ignores_time: bool = True,
) -> FromLogits:
    """A denoiser from any module that maps ids (P, L) to logits (P, L, V), as net(ids), or net(ids, t) unless it
    ignores the time. `layer` is its embedding layer: what it answers is replaced where one-hots come instead of ids, so
    that gradients are to be had of a network that was not written for them. Tokens `never` are not generated."""

    def ask(net: nn.Module, ids: Tensor, real: Tensor, t: Time | None) -> Tensor:
        return net(ids) if ignores_time else net(ids, t)

    network = Network(net, layer, ask, mask_id=mask_id, never=never)
    return from_logits(network, mask_id, ignores_time=ignores_time)
