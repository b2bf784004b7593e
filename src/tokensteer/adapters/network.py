"""A foreign network entered behind its embedding layer, so that it takes ids, one-hots and embeddings alike.

Where a token is looked up, E[x], a one-hot is multiplied, x·E: the same answer, linear in x. The network is called with
ids, as always, and what its embedding layer answers is replaced on the way; so it may read its ids elsewhere too, to
count positions or to see padding. These must then survive where only embeddings arrive (`Embedded`). So the table that
others see is wider than E: behind it stand whether a token is the mask, and its id in three digits, each of them exact
in half precision. No gradient flows through digits.

Logits over a large vocabulary are many. Where a network ends in a plain linear head, that head is left out (`Trunk`):
for the time of a call it answers with its input, so that the network gives hidden states, and the head is applied by
whoever reads them, at the sites that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensteer.core.models.denoiser import FromHidden, FromLogits, Time, from_hidden, from_logits
from tokensteer.core.numerics.draws import NEVER

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
        return self._allowed(self.answer(self.entry_of_embedded(embedded), None))

    def forward(self, x: Tensor, t: Time | None = None) -> Tensor:
        return self._allowed(self.answer(self.entry(x), t))

    def entry(self, x: Tensor) -> Entry:
        """Ids (P, L) or one-hots (P, L, V)."""
        weight = _weight(self.layer)
        if not x.is_floating_point():
            return Entry(weight[x], (x == self.mask_id).to(weight.dtype), x, self.real(x))
        x = x.to(weight.dtype)
        ids = x.argmax(-1)
        return Entry(x @ weight, x[..., self.mask_id], ids, self.real(ids))

    def entry_of_embedded(self, embedded: Tensor) -> Entry:
        """Rows of the wider table, (P, L, d + 8)."""
        behind = embedded[..., -EXTRA:]
        digits = behind[..., 1 : 1 + DIGITS].detach().long()
        ids = sum((digits[..., place] * DIGIT**place for place in range(DIGITS)), torch.zeros_like(digits[..., 0]))
        return Entry(embedded[..., :-EXTRA], behind[..., 0], ids, self.real(ids))

    def own(self, ids: Tensor, t: Time | None = None) -> Tensor:
        """What the network itself says of ids, entered by nobody."""
        return self._allowed(self.ask(self.net, ids, self.real(ids), t))

    def real(self, ids: Tensor) -> Tensor:
        """Which sites are no padding, (P, L)."""
        return torch.ones_like(ids, dtype=torch.bool) if self.pad_id is None else ids != self.pad_id

    def answer(self, entry: Entry, t: Time | None) -> Tensor:
        """What the network says of an entry, of all tokens."""
        entry = self.prepare(entry, _weight(self.layer))
        entered: list[Tensor] = []

        def replaced(*_: object) -> Tensor:
            entered.append(entry.embedded)
            return entry.embedded

        handle = self.layer.register_forward_hook(replaced)
        try:
            answer = self.ask(self.net, entry.ids, entry.real, t)
        finally:
            handle.remove()
        if len(entered) != 1:
            raise ValueError(
                f"{type(self.net).__name__} called its embedding layer {len(entered)} times where once was expected: "
                "name the layer that embeds its ids, or wrap it as from_logits(network, mask_id)"
            )
        return answer

    def _allowed(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(self.forbidden, NEVER)


class Trunk(nn.Module):
    """Hidden states (P, L, H) of a `Network` whose `head` is left out; `Embedded`, too. When it is first asked it sees
    to it that the head makes the network's logits of them: of a row, of the same with other sites masked, and at two
    times, for what a network does behind its head may depend on either."""

    def __init__(self, network: Network, head: nn.Linear) -> None:
        super().__init__()
        self.network, self.head, self.tried = network, head, False

    @property
    def embedding(self) -> Tensor:
        return self.network.embedding

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self._tried(self.network.entry_of_embedded(embedded), None)

    def forward(self, x: Tensor, t: Time | None = None) -> Tensor:
        return self._tried(self.network.entry(x), t)

    def _tried(self, entry: Entry, t: Time | None) -> Tensor:
        if not self.tried and len(entry.ids):
            time = t[:1] if isinstance(t, Tensor) and t.dim() else t
            for row in (entry.ids[:1], self._otherwise(entry.ids[:1])):
                for when in (time,) if time is None else (time, 0.37 * time):
                    self._try(self.network.entry(row), when)
            self.tried = True
        return self._states(entry, t, _as_it_came)

    def _otherwise(self, ids: Tensor) -> Tensor:
        """Every other site masked where it was not, and open where it was masked."""
        mask_id, word = self.network.mask_id, int((~self.network.forbidden).nonzero()[0])
        chosen = self.network.real(ids) & (torch.arange(ids.shape[1], device=ids.device) % 2 == 0)
        return torch.where(chosen, torch.where(ids == mask_id, word, mask_id), ids)

    def _states(self, entry: Entry, t: Time | None, stand_in: Callable[[Tensor], Tensor]) -> Tensor:
        """What the network answers while another function answers for its head."""
        cast("Any", self.head).forward = stand_in
        try:
            states = self.network.answer(entry, t)
        finally:
            del self.head.forward
        return states.to(self.head.weight.dtype)  # some networks give their logits in single precision

    @torch.no_grad()
    def _try(self, entry: Entry, t: Time | None) -> None:
        """An error unless head(states) is what the network says, and states of all sizes come out as they went in, to
        the bit: what a network does to its logits it does to them, and rounding must not hide what is little."""
        sizes = 2.0 ** torch.linspace(-8, 8, self.head.in_features, device=entry.ids.device).round()
        marks: list[Tensor] = []

        def marked(input: Tensor) -> Tensor:
            marks.append(input * sizes.to(input.dtype))
            return marks[-1].clone()  # which may be changed in place

        mend = (
            f"the logits of {type(self.network.net).__name__} are not its head's answer as it is: name the linear "
            "layer that it ends in, or no head, and logits are taken as the network gives them (in training mode "
            "dropout has the same effect: call eval())"
        )
        logits = self.network.answer(entry, t)
        try:
            states, found = self._states(entry, t, _as_it_came), self._states(entry, t, marked)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a bias (V,) behind the head, for one, does not fit states
            raise ValueError(mend) from error
        fits = len(marks) == 1 and states.shape == (*entry.ids.shape, self.head.in_features)
        if not fits or not _in_place(found, marks[0].to(found.dtype)) or not _alike(logits, self.head(states)):
            raise ValueError(mend)


def _as_it_came(input: Tensor) -> Tensor:
    return input


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


def _in_place(states: Tensor, given: Tensor) -> bool:
    """Whether each of the states (P, L, H) is the one given, or, as with Dream, that of the site before it."""
    own, shifted = (states == given).all(-1), (states == given.roll(1, 1)).all(-1)
    return bool((own | shifted).all())


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether logits are the same but for rounding; those of tokens that are never generated are -inf in both."""
    known = a > NEVER
    if not torch.equal(known, b > NEVER):
        return False
    close = 0.1 if a.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((a - b)[known].abs().max() <= close * (1.0 + a[known].abs().max()))


def _weight(layer: nn.Module) -> Tensor:
    """The table of an embedding layer, (V, d), its only parameter."""
    tables = list(layer.parameters())
    if len(tables) != 1 or tables[0].dim() != 2:
        raise ValueError(f"{type(layer).__name__} is no embedding layer: give the one whose weight is a table (V, d)")
    return tables[0]


def headed(network: Network, head: nn.Linear, *, ignores_time: bool) -> FromHidden:
    """A denoiser from a network and the layer that it ends in."""
    vocab_size = len(network.forbidden)
    plain = type(head) is nn.Linear and isinstance(head.weight, nn.Parameter) and "forward" not in vars(head)
    if not plain or head.out_features != vocab_size:
        raise ValueError(
            f"{type(head).__name__} is no plain linear head over {vocab_size} words, and its weight alone would be "
            "read: name the linear layer that the network ends in, or no head, and logits are taken as it gives them"
        )
    own = Forbidding(head, network.forbidden) if network.forbidden.any() else head
    return from_hidden(Trunk(network, head), own, network.mask_id, ignores_time=ignores_time)


class Forbidding(nn.Linear):
    """A head with the weight of another, and its bias but for -inf at forbidden tokens; whatever becomes of them."""

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


def denoiser_of(network: Network, head: nn.Module | None, x: Tensor) -> FromLogits | FromHidden:
    """A denoiser of a network that ignores the time: without logits where a linear head stands its trial on ids x
    (P, L), and logits are more numbers than the states they are made of; else with them."""
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
    ignores the time. `layer` is its embedding layer: what it answers is replaced where one-hots come instead of ids, so
    that gradients are to be had of a network that was not written for them. Tokens `never` are not generated.

    With `head`, the linear layer that it ends in, no logits are stored: the head is applied where tokens are asked for.
    Whether the network does end in it is tried when it is first called."""

    def ask(net: nn.Module, ids: Tensor, real: Tensor, t: Time | None) -> Tensor:
        return net(ids) if ignores_time else net(ids, t)

    network = Network(net, layer, ask, mask_id=mask_id, never=never)
    if head is not None:
        return headed(network, head, ignores_time=ignores_time)
    return from_logits(network, mask_id, ignores_time=ignores_time)
