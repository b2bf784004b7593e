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

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.draws import NEVER, inverse_cdf, uniforms
from tokensteer.core.numerics.rows import distinct

LOW = -1e30  # log 0, where the gradient of -inf would be NaN
FAINT = 1e-280
BLOCK = 2**17  # entries of a (transitions, rows) table held at a time, so that it stays in the cache


def safe_log(mass: Tensor) -> Tensor:
    """log, with LOW for zero and a finite gradient there; NaN stays NaN."""
    empty = mass == 0
    return torch.where(empty, 1.0, mass).log().masked_fill(empty, LOW)


@dataclass(frozen=True, eq=False)
class Masses:
    """What each site ends as. `labels` (P, L, K) has the masses of labels, at most 1 each. At the sites `certain`
    (P, L) the class is `classes` (P, L) for sure, and the masses are not read."""

    labels: Tensor
    certain: Tensor
    classes: Tensor

    def take(self, rows: Tensor) -> Masses:
        return Masses(self.labels[rows], self.certain[rows], self.classes[rows])

    def join(self, other: Masses) -> Masses:
        """These rows followed by the others."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("labels", "certain", "classes"))
        return Masses(*(torch.cat(pair) for pair in pairs))


class Edges(NamedTuple):
    """Transitions by ascending source: target (E,), label (E,), and those of state s are offsets[s]..offsets[s + 1]."""

    target: Tensor
    label: Tensor
    offsets: Tensor

    def sum(self, b: Tensor, mass: Tensor) -> Tensor:
        """sum over transitions of mass[label] · b[target], (S, P), from b (S, P) and masses of labels (K, P)."""
        weight = b.index_select(0, self.target).mul_(mass.index_select(0, self.label))
        return torch.segment_reduce(weight, "sum", offsets=self.offsets, axis=0)


@dataclass(frozen=True, eq=False)
class Transitions:
    """Transitions e from state source[e] to target[e] (E,), by ascending source; those of state s are
    offsets[s]..offsets[s + 1]. members (C, K) tells the classes of each label. `out` (S, D) lists the transitions of
    each state, and is E where there are no more."""

    step: Tensor
    accept: Tensor
    source: Tensor
    target: Tensor
    label: Tensor
    offsets: Tensor
    members: Tensor
    out: Tensor
    _at_sites: dict[int, list[Edges]] = field(default_factory=dict[int, "list[Edges]"], repr=False)

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
        offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
        place = torch.arange(int(count.max()) if len(source) else 1, device=step.device)
        out = torch.where(place < count.unsqueeze(-1), offsets[:-1].unsqueeze(-1) + place, len(source))
        return cls(step, accept, source, target, label, offsets, members, out)

    def masses(self, classes: Tensor) -> Tensor:
        """The masses of labels (..., K) from those of classes (..., C)."""
        return classes @ self.members.to(classes.dtype)

    def at_sites(self, length: int) -> list[Edges]:
        """The transitions at each site that runs of this length can use: those from states that the sites before can
        reach to states from which the sites after can reach acceptance."""
        if length not in self._at_sites:
            after = [self.accept]
            for _ in range(length):
                after.append(torch.zeros_like(self.accept).index_fill(0, self.source[after[-1][self.target]], True))
            reached, found = torch.zeros_like(self.accept), list[Edges]()
            reached[0] = True
            for coming in after[-2::-1]:
                used = rows_of(reached[self.source] & coming[self.target])
                count = torch.bincount(self.source[used], minlength=len(reached))
                offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
                found.append(Edges(self.target[used], self.label[used], offsets))
                reached = torch.zeros_like(reached).index_fill(0, self.target[reached[self.source]], True)
            self._at_sites[length] = found
        return self._at_sites[length]

    def at_once(self, length: int) -> int:
        """Rows whose passes are computed together."""
        mean = sum(len(edges.target) for edges in self.at_sites(length)) / max(1, length)
        return max(1, int(BLOCK / max(1.0, mean)))

    # ---- backwards

    def log_accept(self, masses: Masses) -> Tensor:
        """log P(accept), (P,), in double precision."""
        rows = torch.arange(len(masses.certain), device=masses.certain.device)
        parts = torch.split(rows, self.at_once(masses.certain.shape[1]))
        return torch.cat([self._log_accept(masses.take(part)) for part in parts]) if parts else rows.double()

    def _log_accept(self, masses: Masses) -> Tensor:
        *_, b = self._linear(masses)
        log_v, faint = b[0].log(), (b[0] < FAINT).nonzero().squeeze(-1)
        if len(faint):
            log_v = log_v.index_copy(0, faint, self.log_accept_in_logs(self.log_labels(masses.take(faint))))
        return log_v

    def messages(self, masses: Masses) -> Messages:
        """b_l for all l, and log P(accept)."""
        rows = torch.arange(len(masses.certain), device=masses.certain.device)
        parts = torch.split(rows, self.at_once(masses.certain.shape[1]))
        return reduce(Messages.join, [self._messages(masses.take(part)) for part in parts])

    def _messages(self, masses: Masses) -> Messages:
        b = torch.stack([*list(self._linear(masses))[::-1], self._start(masses)])
        log_v, faint = b[0, 0].log(), (b[0, 0] < FAINT).nonzero().squeeze(-1)
        if not len(faint):
            return Messages(b, log_v)
        in_logs = torch.stack(list(self._log(self.log_labels(masses.take(faint))))[::-1])
        log_v = log_v.index_copy(0, faint, _with_never(in_logs[0, 0]))
        return Messages(b, log_v, place_in(faint, len(log_v)), in_logs)

    def _start(self, masses: Masses) -> Tensor:
        return self.accept.double().unsqueeze(-1).repeat(1, len(masses.certain))

    def _linear(self, masses: Masses) -> Iterator[Tensor]:
        """b_l (S, P) for l = L - 1, ..., 0. Rows are the last axis, so that a gather copies whole lines."""
        b = self._start(masses)
        labels, step = masses.labels.permute(1, 2, 0).contiguous(), self.step.T.contiguous()
        edges = self.at_sites(masses.certain.shape[1])
        for site, free, sure in _by_site(masses.certain):
            if not len(sure):
                b = edges[site].sum(b, labels[site])
            else:
                to = step.index_select(0, masses.classes[:, site].index_select(0, sure)).T
                moved = b.index_select(1, sure).gather(0, to)
                if len(free):
                    summed = edges[site].sum(b.index_select(1, free), labels[site].index_select(1, free))
                    b = torch.empty_like(b).index_copy_(1, sure, moved).index_copy_(1, free, summed)
                else:
                    b = moved
            yield b

    # ---- backwards in logs, differentiable

    def log_labels(self, masses: Masses) -> Tensor:
        """Log-masses of labels (P, L, K), LOW for log 0, those of certain sites among them."""
        certain = self.members[masses.classes].double()
        return safe_log(torch.where(masses.certain.unsqueeze(-1), certain, masses.labels.double()))

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

    def sample(self, masses: Masses, messages: Messages, generator: Generator | None) -> Tensor:
        """The labels (P, L) of a run given acceptance, 0 at certain sites; meaningless for rows that are never
        accepted."""
        rows, length = masses.certain.shape
        u = uniforms((rows, length), masses.certain, generator)
        state = torch.zeros_like(masses.classes[:, 0])
        target = torch.cat([self.target, self.target.new_zeros(1)])
        label = torch.cat([self.label, self.label.new_zeros(1)])
        drawn = torch.zeros_like(masses.classes)
        for site in range(length):
            free = (~masses.certain[:, site]).nonzero().squeeze(-1)
            moved = self.step[state, masses.classes[:, site]]
            if len(free):
                edges = self.out[state[free]]
                mass = masses.labels[free, site].gather(1, label[edges]).double()
                mass = mass.masked_fill(edges == len(self.target), 0.0)
                weight = messages.weigh(site + 1, free, target[edges], mass)
                pick = edges.gather(1, inverse_cdf(weight, u[free, site, None])).squeeze(-1)
                drawn[free, site] = label[pick]
                moved[free] = target[pick]
            state = moved
        return drawn


@dataclass(frozen=True, eq=False)
class Messages:
    """b (L + 1, S, P) and log P(accept) (P,). Faint rows have log b too, (L + 1, S, n), at their `place` (P,), which is
    -1 for all others."""

    b: Tensor
    log_v: Tensor
    place: Tensor | None = None
    in_logs: Tensor | None = None

    def take(self, rows: Tensor) -> Messages:
        """The messages of a selection of rows."""
        b, log_v = self.b[:, :, rows], self.log_v[rows]
        if self.place is None or self.in_logs is None:
            return Messages(b, log_v)
        place = self.place[rows]
        used = place[place >= 0]
        if not len(used):
            return Messages(b, log_v)
        places = place_in(rows_of(place >= 0), len(rows))
        return Messages(b, log_v, places, self.in_logs[:, :, used])

    def join(self, other: Messages) -> Messages:
        """These rows followed by the others."""
        b, log_v = torch.cat([self.b, other.b], -1), torch.cat([self.log_v, other.log_v])
        if self.place is None and other.place is None:
            return Messages(b, log_v)
        ours, theirs = (torch.full_like(m.log_v, -1).long() if m.place is None else m.place for m in (self, other))
        logs = [m.in_logs for m in (self, other) if m.in_logs is not None]
        theirs = torch.where(theirs < 0, -1, theirs + (0 if self.in_logs is None else self.in_logs.shape[-1]))
        return Messages(b, log_v, torch.cat([ours, theirs]), torch.cat(logs, -1))

    def weigh(self, site: int, rows: Tensor, target: Tensor, mass: Tensor) -> Tensor:
        """mass · b_site[target], (n, D), up to a factor for each of the rows (n,)."""
        weight = mass * self.b[site][target, rows.unsqueeze(-1)]
        if self.in_logs is None or self.place is None:
            return weight
        place = self.place[rows]
        faint = place >= 0
        log_w = safe_log(mass[faint]) + self.in_logs[site][target[faint], place[faint].unsqueeze(-1)]
        weight[faint] = (log_w - log_w.amax(-1, keepdim=True)).exp()
        return weight


def _by_site(certain: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """From the last site to the first: its number, the rows that are free there, and those that are certain."""
    rows, sites = certain.shape
    count = cast("list[int]", certain.sum(0).tolist())  # pyright: ignore[reportUnknownMemberType]
    sure = torch.split(certain.T.nonzero()[:, 1], count)
    free = torch.split((~certain).T.nonzero()[:, 1], [rows - n for n in count])
    for site in range(sites - 1, -1, -1):
        yield site, free[site], sure[site]


def rows_of(where: Tensor) -> Tensor:
    """The rows at which a mask (P,) is true."""
    return where.nonzero().squeeze(-1)


def _with_never(log_v: Tensor) -> Tensor:
    return torch.where(log_v < LOW / 2, NEVER, log_v)


def place_in(chosen: Tensor, size: int) -> Tensor:
    """The place in `chosen` (n,) of each of 0, ..., size - 1, and -1 for those that are not there."""
    places = torch.full((size,), -1, device=chosen.device)
    return places.index_copy(0, chosen, torch.arange(len(chosen), device=chosen.device))


def live(step: Tensor, accept: Tensor) -> Tensor:
    """Whether an accepting state can be reached from each state, (S,)."""
    alive = accept.clone()
    while True:
        rest = (~alive).nonzero().squeeze(-1)
        found = rest[alive[step[rest]].any(-1)]
        if not len(found):
            return alive
        alive[found] = True
