"""The proposal that conditions a base on acceptance: q(y) = base(y) · V_s(y; mu) / sum_z base(z) · V_s(z; mu).

To draw from it, draw the run of an accepted clean sequence x_0, then each site of y given x_t and the tokens that the
run may read there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.measure import Reveal
from tokensteer.core.models.diffusion import Model
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.numerics.domains import check_number
from tokensteer.core.numerics.draws import NEVER, uniforms
from tokensteer.core.particles.path import Evaluation, Measure, Sites, Step
from tokensteer.core.proposals.proposal import FromModel, SiteProposal
from tokensteer.core.twists.tilt import Tilt
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.final_masses import FinalMasses, final_masses
from tokensteer.rewards.constraints.masses import Masses, rows_of
from tokensteer.rewards.constraints.messages import Messages
from tokensteer.rewards.constraints.recall import Recall
from tokensteer.rewards.constraints.staying import Kept, as_reveal


@dataclass(frozen=True)
class Conditioned:
    """q(y) = base(y) · V_s(y)/V(x_t), with V(x_t) the sum of the numerator over y; the base where that is zero.

    `final` is for states y; `here` and log_v (P,) are the masses from x_t and its V. `known` has the messages of a
    look-ahead and the row in them of each particle, (P,), if there are any. A share `defence` of moves is the base's.
    """

    base: Reveal
    final: FinalMasses
    here: Masses
    log_v: Tensor
    known: tuple[Messages, Tensor] | None = None
    defence: float = 0.0
    log_mass: None = None  # the next weight is unknown: the look-ahead at y uses another prediction
    of_draws: ClassVar[bool] = False

    @property
    def sites(self) -> Sites | None:
        return self.base.sites

    @property
    def _lasting(self) -> bool:
        """Whether no open site moves, now or later: then V(y) is V(x_t) where nothing opens."""
        return not bool(((self.base.log_move > NEVER) & ~self.base.masked).any() or (self.final.rho < 1).any())

    def sample(self, generator: Generator | None) -> Tensor:
        """Draw x_0 given acceptance, then each site of y given x_t and x_0."""
        lasting, moved = self._lasting, self.log_v > NEVER
        if lasting and self.base.factorises and self.defence == 0 and bool(moved.all()):
            y = self._moves(generator)  # the base's tokens would all be replaced
        else:
            y = self.base.sample(generator)
        u = uniforms((2, *y.shape), y, generator)
        if self.defence > 0:
            moved = moved & (u[1, :, 0] >= self.defence)
        if lasting:
            moved = moved & (y != self.base.x).any(-1)
        rows = rows_of(moved)
        if not len(rows):
            return y
        q = self.take(rows)
        labels = q._labels(generator, _last(y[rows] != q.base.x) if lasting else None)
        opened = q._open(y[rows], labels, u[0, rows], generator)
        if (q.base.log_move > NEVER)[~q.base.masked].any():
            opened = torch.where(q.base.masked, opened, q._remask(labels, u[0, rows]))
        return y.index_copy(0, rows, opened)

    def _moves(self, generator: Generator | None) -> Tensor:
        """A state in which the sites that the base opens hold some token."""
        u = uniforms(tuple(self.base.x.shape), self.base.x, generator)
        opens = self.base.masked & (u.log() < self.base.log_move)
        return self.base.x.masked_fill(opens, 1 if self.base.mask_id == 0 else 0)

    def _labels(self, generator: Generator | None, last: Tensor | None) -> Tensor:
        """Labels (P, L) of the run of an accepted x_0, as far as the sites `last` (P,)."""
        transitions, found = self.final.automaton.transitions, list[Tensor]()
        rows, length = torch.arange(len(self.log_v), device=self.log_v.device), self.here.certain.shape[1]
        for part in torch.split(rows, transitions.at_once(length)):
            here, end = self.here.take(part), None if last is None else last[part]
            messages, row = (transitions.messages(here), None) if self.known is None else self.known
            found.append(transitions.sample(here, messages, generator, None if row is None else row[part], end))
        return torch.cat(found)

    def _open(self, y: Tensor, labels: Tensor, u: Tensor, generator: Generator | None) -> Tensor:
        """At sites that the base opens, a token that the run reads if it stays open, else the base's."""
        opens = self.base.masked & (y != self.base.mask_id) & (u < self.final.rho)
        log_p = self.base.log_x0.store.columns(self.base.log_x0.index[opens]).T.contiguous()
        tokens = self.final.automaton.sample_tokens(labels[opens], log_p, generator)
        y = y.clone()
        # As in `Reveal`: only probabilities of NaN yield the mask, and `log_prob` is then NaN.
        y[opens] = torch.where(tokens == self.base.mask_id, y[opens], tokens)
        return y

    def _remask(self, labels: Tensor, u: Tensor) -> Tensor:
        """Open sites stay or are masked again, given that they end in what the run reads there."""
        pick, members = labels.unsqueeze(-1), self.final.automaton.transitions.members
        mu = self.final.mu.gather(-1, pick).squeeze(-1).double()
        token = members[self.final.automaton.classes[self.base.x], labels].double()
        stay = self.base.log_stay.double().exp() * (self.final.rho * token + (1 - self.final.rho) * mu)
        move = self.base.log_move.double().exp() * mu
        masked_again = (u * (stay + move) < move) & ~self.here.certain
        return self.base.x.masked_fill(masked_again, self.base.mask_id)

    def log_prob(self, y: Tensor) -> Tensor:
        log_base = self.base.log_prob(y)
        log_q = torch.where(self.log_v == NEVER, log_base, log_base + self._gain(y).to(log_base.dtype))
        if self.defence > 0:
            log_q = torch.logaddexp(log_q + math.log1p(-self.defence), log_base + math.log(self.defence))
        return log_q

    def log_over(self, p: Reveal, y: Tensor) -> Tensor | None:
        """None unless the tokens of the base are p's."""
        ours, theirs = self.base.log_x0, p.log_x0
        if self.defence > 0 or ours.store is not theirs.store or not torch.equal(ours.index, theirs.index):
            return None
        log_stay, log_move = self.base.log_stay - p.log_stay, self.base.log_move - p.log_move
        gain = self._gain(y).masked_fill(self.log_v == NEVER, 0.0)
        return gain + torch.where(y == self.base.x, log_stay, log_move).sum(-1)

    def _gain(self, y: Tensor) -> Tensor:
        """log V_s(y) - log V(x_t), (P,)."""
        rows = torch.arange(len(y), device=y.device)
        if self._lasting:
            rows = rows_of((y != self.base.x).any(-1))
        transitions, there = self.final.automaton.transitions, self.final.take(rows).at(y[rows])
        if self.known is None:
            log_v = transitions.log_accept(there)
        else:
            messages, row = self.known
            log_v = transitions.log_accept_after(there, _last((y != self.base.x)[rows]), messages, row[rows])
        return torch.zeros_like(self.log_v).index_copy(0, rows, log_v - self.log_v[rows])

    def take(self, rows: Tensor) -> Conditioned:
        known = None if self.known is None else (self.known[0], self.known[1][rows])
        base, final, here = self.base.take(rows), self.final.take(rows), self.here.take(rows)
        return Conditioned(base, final, here, self.log_v[rows], known, self.defence)


@dataclass(frozen=True)
class Constrained:
    """The base proposal conditioned on acceptance; optimal for a denoiser that factorises.

    `kept` is kept(model). q has no mass where the base's token distribution rules out acceptance, which is right if it
    has full support, as a softmax has. For a truncated one, a share `defence` of moves is the base's, and q covers p.
    `recall` is what the look-ahead of the same steering shares.
    """

    automaton: Automaton
    kept: Kept
    base: SiteProposal = field(default_factory=FromModel)
    defence: float = 0.0
    recall: Recall | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_number("Constrained.defence", self.defence, "[0, 1)")

    @property
    def parts(self) -> tuple[SiteProposal]:
        return (self.base,)

    @property
    def needs_gradient(self) -> bool:
        return self.base.needs_gradient

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.base.meters

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> Measure:
        q = as_reveal(self.base(x, evaluation, step, model, twist))
        rho, moving = self.kept.at(step.s, len(x)), q.log_move > NEVER
        lasting = not bool((rho < 1).any() or (moving & ~q.masked).any())
        known = self.recall.recalled(x, q.log_x0) if self.recall is not None and lasting else None
        if known is not None:
            masses, messages, row = known
            here = masses.take(row)
            final = FinalMasses(self.automaton, q.mask_id, rho, here.labels)
            return Conditioned(q, final, here, messages.log_v[row], (messages, row), self.defence)
        final = final_masses(self.automaton, rho, q.log_x0, q.mask_id, q.masked, moving)
        here = final.at(q.x) if lasting else _from_here(q, final)
        return Conditioned(q, final, here, self.automaton.transitions.log_accept(here), None, self.defence)


def _last(where: Tensor) -> Tensor:
    """The last site of each row at which a mask (P, L) is true, (P,); 0 if there is none."""
    return (where * torch.arange(where.shape[1], device=where.device)).amax(-1)


def _from_here(q: Reveal, final: FinalMasses) -> Masses:
    """The masses from x_t: a mean over the base's moves. A masked site ends as mu, moved or not."""
    here = final.at(q.x)
    moves = (q.log_move > NEVER) & ~q.masked
    token = final.automaton.transitions.members[here.classes].to(here.labels.dtype)
    labels = torch.where(here.certain.unsqueeze(-1), token, here.labels)
    stay, move = (log.exp().unsqueeze(-1).to(labels.dtype) for log in (q.log_stay, q.log_move))
    labels = torch.where(moves.unsqueeze(-1), stay * labels + move * final.mu, labels)
    return Masses(labels, here.certain & ~moves, here.classes)
