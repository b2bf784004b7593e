"""The live transitions of an automaton as a sparse list, and the passes over sites that use them.

A transition joins two states that an accepting run can visit, and its label is the set of token classes that lead from
the one to the other. Many transitions share a label: inside a string of bounded length every state moves on by k
characters on the same tokens. The mass of each label is summed once for a site, and a pass over sites then costs one
multiplication for each transition, whatever the vocabulary.

Backwards over sites, with m_l the masses of labels at site l,

    b_L[s] = accept[s],    b_l[s] = sum over transitions s -> s' of m_l[label] · b_{l+1}[s'],    P(accept) = b_0[0].

Probabilities of states differ by many orders of magnitude. All masses are at most 1, so what double precision rounds to
zero adds at most the smallest normal number for each site and state. A P(accept) far above that is therefore right as
it is, and only the rows below `FAINT` are computed again in logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import cast

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.draws import NEVER, inverse_cdf, uniforms
from tokensteer.core.numerics.rows import distinct
from tokensteer.rewards.constraints.masses import LOW, Masses, place_in, rows_of, safe_log
from tokensteer.rewards.constraints.messages import Messages
from tokensteer.rewards.constraints.trellis import Trellis

FAINT = 1e-280
BLOCK = 2**17  # entries of a (transitions, rows) table held at a time, so that it stays in the cache


@dataclass(frozen=True, eq=False)
class Transitions:
    """Transitions e from state source[e] to target[e] (E,), by ascending source; members (C, K) tells the classes of
    each label. `out_target` and `out_label` (S + 1, D) list the transitions of each state; where there are no more, the
    target is S, from which none leads on."""

    step: Tensor
    accept: Tensor
    source: Tensor
    target: Tensor
    label: Tensor
    members: Tensor
    out_target: Tensor
    out_label: Tensor
    _trellises: dict[int, Trellis] = field(default_factory=dict[int, Trellis], repr=False)

    @classmethod
    def of(cls, step: Tensor, accept: Tensor) -> Transitions:
        """Those of a table of states (S, C) and its accepting states (S,)."""
        states, classes = step.shape
        source, c = live(step, accept)[step].nonzero(as_tuple=True)
        target = step[source, c]
        pair, which = distinct((source * states + target).unsqueeze(-1))
        order = (source * states + target)[pair].argsort()
        pair, which = pair[order], order.argsort()[which]
        # The set of classes of each pair of states, told apart by a sum of random numbers.
        codes = torch.randint(2**62, (classes,), generator=Generator().manual_seed(0)).to(step.device)
        kept, label = distinct(torch.zeros_like(pair).index_add(0, which, codes[c]).unsqueeze(-1))
        if len(kept) > 4 * classes:  # little is shared: single classes as labels
            return cls._listed(step, accept, source, target, c, torch.eye(classes, device=step.device))
        members = torch.zeros(len(kept), classes, device=step.device)
        example = place_in(kept, len(pair))[which]
        members[example[example >= 0], c[example >= 0]] = 1.0
        return cls._listed(step, accept, source[pair], target[pair], label, members.T.contiguous())

    @classmethod
    def _listed(
        cls, step: Tensor, accept: Tensor, source: Tensor, target: Tensor, label: Tensor, members: Tensor
    ) -> Transitions:
        count = torch.bincount(source, minlength=len(step))
        count = torch.cat([count, count.new_zeros(1)])
        place = torch.arange(int(count.max()) if len(source) else 1, device=step.device)
        out = torch.where(place < count.unsqueeze(-1), (count.cumsum(0) - count).unsqueeze(-1) + place, len(source))
        targets, labels = torch.cat([target, target.new_tensor([len(step)])]), torch.cat([label, label.new_zeros(1)])
        return cls(step, accept, source, target, label, members, targets[out], labels[out])

    def masses(self, classes: Tensor) -> Tensor:
        """The masses of labels (..., K) from those of classes (..., C)."""
        return classes @ self.members.to(classes.dtype)

    def trellis(self, length: int) -> Trellis:
        """The transitions that runs of this length can use."""
        if length not in self._trellises:
            self._trellises[length] = Trellis.of(self.source, self.target, self.label, self.accept, length)
        return self._trellises[length]

    def at_once(self, length: int) -> int:
        """Rows whose passes are computed together."""
        return max(1, int(BLOCK / max(1.0, self.trellis(length).mean_edges)))

    # ---- backwards

    def log_accept(self, masses: Masses) -> Tensor:
        """log P(accept), (P,), in double precision."""
        return torch.cat([self._log_accept(masses.take(part)) for part in self._parts(masses)])

    def log_accept_after(self, masses: Masses, last: Tensor, messages: Messages, row: Tensor) -> Tensor:
        """log P(accept), (P,), of masses that behind the sites `last` (P,) are those of the messages' rows `row` (P,):
        a pass begins there."""
        order, found = last.argsort(descending=True, stable=True), torch.empty_like(messages.log_v[row])
        for part in self._parts(masses):
            of = order[part]
            known = messages.b.index_select(1, row[of])
            found[of] = self._log_accept(masses.take(of), known, last[of])
        return found

    def _log_accept(self, masses: Masses, known: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        *_, b = self._linear(masses, known, last)
        log_v, faint = b[0].log(), rows_of(b[0] < FAINT)
        if len(faint):
            log_v = log_v.index_copy(0, faint, self.log_accept_in_logs(safe_log(self._labels(masses.take(faint)))))
        return log_v

    def messages(self, masses: Masses) -> Messages:
        """b_l for all l, and log P(accept)."""
        return reduce(Messages.join, [self._messages(masses.take(part)) for part in self._parts(masses)])

    def _messages(self, masses: Masses) -> Messages:
        b = torch.cat(list(self._linear(masses))[::-1])
        log_v, faint = b[0].log(), rows_of(b[0] < FAINT)
        if not len(faint):
            return Messages(b, log_v)
        in_logs = torch.stack(list(self._log(safe_log(self._labels(masses.take(faint)))))[::-1])
        log_v = log_v.index_copy(0, faint, _with_never(in_logs[0, 0]))
        lines = self.trellis(masses.certain.shape[1]).flat(in_logs)
        return Messages(b, log_v, place_in(faint, len(log_v)), lines)

    def _parts(self, masses: Masses) -> Sequence[Tensor]:
        """The rows that are computed together; one part even if there are none."""
        rows, length = masses.certain.shape
        return torch.split(torch.arange(rows, device=masses.certain.device), self.at_once(length))

    def _linear(self, masses: Masses, known: Tensor | None = None, last: Tensor | None = None) -> Iterator[Tensor]:
        """b_l (S_l + 1, P) for l = L, ..., 0. With the lines `known` (R, P) of a trellis, row i enters them at the site
        last[i], which must descend, and b has those that have entered. Rows are the last axis, so that a gather copies
        whole lines."""
        (rows, length), trellis = masses.certain.shape, self.trellis(masses.certain.shape[1])
        labels, entered = self._labels(masses).permute(1, 2, 0).contiguous(), [rows] * length
        b = labels.new_ones(len(trellis.states[-1]) + 1, rows)
        b[-1] = 0.0
        if known is not None and last is not None:
            b, sites = b[:, :0], torch.arange(length, device=last.device).unsqueeze(-1)
            entered = cast("list[int]", (last >= sites).sum(-1).tolist())  # pyright: ignore[reportUnknownMemberType]
        yield b
        for site in range(length - 1, -1, -1):
            if known is not None and entered[site] > b.shape[1]:
                b = torch.cat([b, known[trellis.block(site + 1), b.shape[1] : entered[site]]], 1)
            b = trellis.edges[site].sum(b, labels[site][:, : entered[site]])
            yield b

    def _labels(self, masses: Masses) -> Tensor:
        """Masses of labels (P, L, K), those of certain sites among them. Few calls for each site are faster than to
        treat certain rows apart."""
        labels, sites = masses.labels.double(), masses.certain.nonzero(as_tuple=True)
        return labels.index_put(sites, self.members[masses.classes[sites]].double())

    # ---- backwards in logs, differentiable

    def log_accept_in_logs(self, log_labels: Tensor) -> Tensor:
        """log P(accept), (P,), from log-masses of labels (P, L, K)."""
        *_, b = self._log(log_labels)
        return _with_never(b[0])

    def _log(self, log_labels: Tensor) -> Iterator[Tensor]:
        """log b_l (S, P) for l = L, ..., 0, LOW for log 0."""
        b = torch.where(self.accept, 0.0, LOW).double().unsqueeze(-1).expand(-1, len(log_labels))
        yield b
        source = self.source.unsqueeze(-1).expand(-1, len(log_labels))
        for log_mass in reversed(log_labels.permute(1, 2, 0).unbind()):
            term = b.index_select(0, self.target) + log_mass.index_select(0, self.label)
            top = torch.full_like(b, LOW).scatter_reduce(0, source, term.detach(), "amax")
            total = torch.zeros_like(b).index_add(0, self.source, (term - top.index_select(0, self.source)).exp())
            b = (top + safe_log(total)).clamp(min=LOW)
            yield b

    # ---- forwards

    def sample(
        self,
        masses: Masses,
        messages: Messages,
        generator: Generator | None,
        row: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """The labels (P, L) of a run given acceptance, arbitrary at certain sites and behind the sites
        `last` (P,), and for rows that are never accepted. Row i has the messages row[i], by default its own."""
        rows, length = masses.certain.shape
        trellis, u = self.trellis(length), uniforms((rows, length), masses.certain, generator).T.contiguous()
        labels, own = self._labels(masses).unbind(1), messages if row is None else messages.take(row)
        state, drawn = torch.zeros_like(masses.classes[:, 0]), list[Tensor]()
        for site in range(length if last is None else int(last.max()) + 1):
            label, target = self.out_label.index_select(0, state), self.out_target.index_select(0, state)
            weight = own.weigh(trellis.line[site + 1].take(target), labels[site].gather(1, label))
            pick = inverse_cdf(weight, u[site].unsqueeze(-1))
            drawn.append(label.gather(1, pick))
            state = target.gather(1, pick).squeeze(-1)
        return torch.nn.functional.pad(torch.cat(drawn, 1), (0, length - len(drawn)))


def _with_never(log_v: Tensor) -> Tensor:
    return torch.where(log_v < LOW / 2, NEVER, log_v)


def live(step: Tensor, accept: Tensor) -> Tensor:
    """Whether an accepting state can be reached from each state, (S,)."""
    alive = accept.clone()
    while True:
        rest = (~alive).nonzero().squeeze(-1)
        found = rest[alive[step[rest]].any(-1)]
        if not len(found):
            return alive
        alive[found] = True
