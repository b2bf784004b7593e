"""A foreign network that takes ids, one-hots or embeddings, through a hook on its embedding layer.

Ids are looked up, E[x]; one-hots are multiplied, x·E, which gives the same output and is linear in x. The network is
called with ids as usual, and a hook replaces the output of its embedding layer, so that it may read its ids elsewhere
too, to count positions or to find padding. Ids must then be known where only embeddings are given (`Embedded`): the
table that others see has extra columns behind E, with whether a token is the mask, and its id in three digits, each of
them exact in half precision. No gradient flows through the digits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tokensteer.core.models.denoiser import Time
from tokensteer.core.numerics.draws import NEVER

DIGIT, DIGITS = 256, 3  # integers up to 256 are exact in bfloat16
EXTRA = 8  # columns behind the embedding: the mask, the digits, and zeros that keep rows aligned

Forward = Callable[[nn.Module, Tensor, Tensor, Time | None], Tensor]
"""A network's logits (P, L, V) of ids (P, L), given which sites are not padding (P, L), and the time."""


@dataclass(frozen=True)
class Entry:
    """Embedded tokens (P, L, d), and (P, L) each: the mass of the mask, the ids, and which are not padding."""

    embedded: Tensor
    masked: Tensor
    ids: Tensor
    real: Tensor


Prepare = Callable[[Entry, Tensor], Entry]
"""What a network does with ids besides looking them up, applied to an entry, given the embedding table (V, d)."""


@dataclass(frozen=True)
class MaskDropout:
    """ESM embeds masks as 0 and scales up the other tokens by the number of mask ids. Here the mass of the mask is used
    instead, which has a gradient; the network gets ids with `word` in place of masks, and so counts none."""

    mask_id: int
    word: int

    def __call__(self, entry: Entry, table: Tensor) -> Entry:
        visible = entry.embedded - entry.masked.unsqueeze(-1) * table[self.mask_id]
        share = entry.masked.sum(-1, dtype=torch.promote_types(visible.dtype, torch.float32)) / entry.real.sum(-1)
        scaled = visible / (1.0 - share)[:, None, None]
        ids = entry.ids.masked_fill(entry.ids == self.mask_id, self.word)
        return replace(entry, embedded=scaled.to(visible.dtype), ids=ids)


@contextmanager
def embedding_replaced(net: nn.Module, layer: nn.Module, embedded: Tensor) -> Generator[None, None, None]:
    """While it lasts, the embedding layer of a network returns `embedded` in place of its output, in the output's
    shape. Raises ValueError at the end unless the layer was called exactly once."""
    calls: list[Tensor] = []

    def replaced(layer: nn.Module, given: object, output: Tensor) -> Tensor:
        calls.append(output)
        return embedded.reshape(output.shape)

    handle = layer.register_forward_hook(replaced)
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ValueError(
            f"{type(net).__name__} called its embedding layer {len(calls)} times where once was expected: name the "
            "layer that embeds its ids, or wrap it as from_logits(network, mask_id)"
        )


class Network(nn.Module):
    """Logits (P, L, V) of ids (P, L) or one-hots (P, L, V), -inf at the tokens `never`. It is `Embedded`."""

    def __init__(
        self,
        net: nn.Module,
        layer: nn.Module,
        call: Forward,
        *,
        mask_id: int,
        pad_id: int | None = None,
        never: Iterable[int] = (),
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__()
        self.net, self.layer = net, layer
        self.call, self.prepare, self.mask_id, self.pad_id = call, prepare, mask_id, pad_id
        forbidden = torch.zeros(len(table_of(layer)), dtype=torch.bool)
        forbidden[list(never)] = True
        self.forbidden: Tensor
        self.register_buffer("forbidden", forbidden.to(table_of(layer).device), persistent=False)

    @property
    def embedding(self) -> Tensor:
        """E and the extra columns, (V, d + 8)."""
        weight = table_of(self.layer)
        ids = torch.arange(len(weight), device=weight.device)
        extra = weight.new_zeros(len(weight), EXTRA)
        extra[self.mask_id, 0] = 1.0
        for place in range(DIGITS):
            extra[:, 1 + place] = (ids // DIGIT**place % DIGIT).to(weight.dtype)
        return torch.cat([weight, extra], -1)

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self._allowed(self.run(self.entry_of_embedded(embedded), None))

    def forward(self, x: Tensor, t: Time | None = None) -> Tensor:
        return self._allowed(self.run(self.entry(x), t))

    def entry(self, x: Tensor) -> Entry:
        """From ids (P, L) or one-hots (P, L, V)."""
        weight = table_of(self.layer)
        if not x.is_floating_point():
            return Entry(weight[x], (x == self.mask_id).to(weight.dtype), x, self.real(x))
        x = x.to(weight.dtype)
        ids = x.argmax(-1)
        return Entry(x @ weight, x[..., self.mask_id], ids, self.real(ids))

    def entry_of_embedded(self, embedded: Tensor) -> Entry:
        """From rows of `embedding`, (P, L, d + 8)."""
        behind = embedded[..., -EXTRA:]
        digits = behind[..., 1 : 1 + DIGITS].detach().long()
        ids = sum((digits[..., place] * DIGIT**place for place in range(DIGITS)), torch.zeros_like(digits[..., 0]))
        return Entry(embedded[..., :-EXTRA], behind[..., 0], ids, self.real(ids))

    def own(self, ids: Tensor, t: Time | None = None) -> Tensor:
        """Logits of ids without the hook."""
        return self._allowed(self.call(self.net, ids, self.real(ids), t))

    def real(self, ids: Tensor) -> Tensor:
        """Which sites are not padding, (P, L)."""
        return torch.ones_like(ids, dtype=torch.bool) if self.pad_id is None else ids != self.pad_id

    def run(self, entry: Entry, t: Time | None) -> Tensor:
        """The output of the network for an entry, with no token forbidden."""
        entry = entry if self.prepare is None else self.prepare(entry, table_of(self.layer))
        with embedding_replaced(self.net, self.layer, entry.embedded):
            return self.call(self.net, entry.ids, entry.real, t)

    def _allowed(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(self.forbidden, NEVER)


def check_embeddings(network: Network, x: Tensor) -> None:
    """Raise ValueError unless the logits of ids x (P, L) and of their embeddings are the same."""
    vocab_size = len(network.forbidden)
    with torch.no_grad():
        own, entered = network.own(x), network(x)
    if own.shape != (*x.shape, vocab_size):
        raise ValueError(
            f"the network returns {tuple(own.shape)} for ids {tuple(x.shape)}, and its embedding layer has "
            f"{vocab_size} words: it must return logits (P, L, V) over the tokens that it reads"
        )
    if not alike(own, entered):
        raise ValueError(
            f"{type(network.net).__name__} returns other logits for embeddings than for their ids: name the layer that "
            "only looks ids up, or wrap it as from_logits(network, mask_id) and do without gradients"
        )


def ignores_padding(network: Network, alone: Tensor, padded: Tensor) -> bool:
    """Whether a row of ids (L,) has the same logits with padding as without. Networks that mix sites by anything but
    attention fail, and so do those that count positions from the wrong end."""
    with torch.no_grad():
        one, other = network.own(alone[None])[0], network.own(padded[None])[0]
    return alike(one, other[padded != network.pad_id])


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether logits are equal up to rounding, and -inf at the same tokens."""
    known = a > NEVER
    if not torch.equal(known, b > NEVER):
        return False
    close = 0.1 if a.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((a - b)[known].abs().max() <= close * (1.0 + a[known].abs().max()))


def table_of(layer: nn.Module) -> Tensor:
    """The table of an embedding layer, (V, d), its only parameter."""
    tables = list(layer.parameters())
    if len(tables) != 1 or tables[0].dim() != 2:
        raise ValueError(f"{type(layer).__name__} is no embedding layer: give the one whose weight is a table (V, d)")
    return tables[0]
