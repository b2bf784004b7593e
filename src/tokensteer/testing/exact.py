"""Exact answers for small models, and laws that users can hold their own parts to.

`enumerate_steering` lists every state of a small `Steering` and computes, without sampling: the law of the model at
every step, the targets on the way, log Z, the soft value. `score` weighs given trajectories. `TableDenoiser` is the
exact denoiser of a distribution given as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.numerics.rows import support
from tokensteer.core.particles.path import Step
from tokensteer.core.proposals.enumerated import reward_ahead
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.estimators import Exact
from tokensteer.core.twists.potentials import difference


@dataclass(frozen=True)
class TableDenoiser:
    """The exact denoiser of a joint distribution over clean sequences, given as a tensor with one axis for each site.

    p(x_0^l = v | x_t) at a masked site is the conditional given the visible tokens. One-hots are taken multilinearly in
    the other sites, so the answer is differentiable. The mask is the last id.
    """

    joint: Tensor
    ignores_time: bool = field(default=True, init=False, repr=False)

    def __call__(self, x: Tensor, t: float) -> Tensor:
        length, tokens = self.joint.dim(), self.joint.shape[0]
        if not x.is_floating_point():
            x = torch.nn.functional.one_hot(x, tokens + 1).to(self.joint.dtype)
        allowed = x[..., :tokens] + x[..., tokens:]  # (P, L, V): the tokens each site may still become
        answers: list[Tensor] = []
        for site in range(length):
            left = self.joint.movedim(site, -1).expand(len(x), *[tokens] * length)
            for other in (k for k in range(length) if k != site):
                weights = allowed[:, other].view(len(x), tokens, *[1] * (left.dim() - 2))
                left = (left * weights).sum(1)
            answers.append(left)
        masses = torch.stack(answers, 1)
        possible = masses > 0  # log 0 is kept out of the graph, where its gradient would be NaN
        log_p = torch.where(possible, masses, 1.0).log() - masses.sum(-1, keepdim=True).log()
        log_p = log_p.masked_fill(~possible, NEVER)
        return torch.cat([log_p, torch.full_like(log_p[..., :1], NEVER)], -1)


def all_sequences(vocab_size: int, length: int, device: torch.device | None = None) -> Tensor:
    """Every sequence, lexicographically, the last site running fastest: (vocab_size^length, length)."""
    return torch.cartesian_prod(*[torch.arange(vocab_size, device=device)] * length).view(-1, length)


@dataclass(frozen=True)
class Moves:
    """All possible moves of one step as a list: from state `row` to state `column`, with log p and log q."""

    row: Tensor
    column: Tensor
    log_p: Tensor
    log_q: Tensor


@dataclass(frozen=True)
class Enumeration:
    """Everything about a small steering, exactly. Times run from the start (index 0) to clean data (index -1).

    states (S, L); log_law, log_twist, log_value (T + 1, S): the law of the model (a measure, for a product), the
    log-twist, and the soft value V_t = E[exp(r/kl) | x_t].
    """

    states: Tensor
    clean: Tensor
    log_law: Tensor
    log_twist: Tensor
    log_value: Tensor
    moves: Sequence[Moves]

    @property
    def log_z(self) -> float:
        return float((self.log_law[-1] + self.log_twist[-1])[self.clean].logsumexp(0))

    @property
    def log_targets(self) -> Tensor:
        """log of law · exp(log-twist), normalised at each time, (T + 1, S)."""
        return (self.log_law + self.log_twist).log_softmax(-1)

    @property
    def target(self) -> Tensor:
        """The final target over clean sequences, lexicographically."""
        return self.log_targets[-1][self.clean].exp()

    @property
    def model_law(self) -> Tensor:
        """The model's own law of clean sequences, lexicographically (a measure, for a product)."""
        return self.log_law[-1][self.clean].exp()

    @property
    def log_price(self) -> Tensor:
        """The log of the part that choosing survivors has in N · Var(Z_hat)/Z², if resampled (multinomially) at each
        time, (T + 1,): the relative variance of V_t/exp(psi_t) under the target there, none for the soft value."""
        short = torch.where(self.log_targets > NEVER, self.log_value - self.log_twist, 0.0)
        mean, square = ((self.log_targets + k * short).logsumexp(-1) for k in (1, 2))
        return (square - 2 * mean).expm1().clamp(min=0).log()

    def log_optimal(self, index: int) -> Tensor:
        """log q*(x_s | x_t) ∝ p(x_s | x_t) · exp(psi_s(x_s)) for each of the moves of step `index`."""
        moves = self.moves[index]
        log_q = moves.log_p + self.log_twist[index + 1][moves.column]
        return log_q - _log_sum_by(log_q, moves.row, len(self.states))[moves.row]

    def log_proposed(self) -> Tensor:
        """The law of particles that the proposal moves without weights, (T + 1, S)."""
        law = [self.log_law[0]]
        for moves in self.moves:
            law.append(_log_sum_by(law[-1][moves.row] + moves.log_q, moves.column, len(self.states)))
        return torch.stack(law)

    def log_increment(self, index: int) -> Tensor:
        """The log-weight of each of the moves of step `index`."""
        moves = self.moves[index]
        twist = self.log_twist[index + 1][moves.column] - self.log_twist[index][moves.row]
        return moves.log_p - moves.log_q + twist


@torch.no_grad()
def enumerate_steering(steering: Steering, limit: int = 2_000_000) -> Enumeration:
    """Compute a small steering exactly. A random estimate is replaced by its mean over all draws, a potential with a
    memory by the difference: the final target and log Z do not depend on them."""
    model, twist = steering.model, steering.twist
    if model.populations > 1:
        raise ValueError("enumerate one template at a time: give the model a template of shape (L,)")
    if twist is not None:
        estimator = Exact(limit) if twist.estimator.random else twist.estimator
        steering = replace(steering, twist=replace(twist, estimator=estimator, potential=difference))
    length, vocab_size, mask_id = model.start(1, None).shape[1], model.vocab_size, model.kernel.mask_id
    if vocab_size**length > limit:
        raise ValueError(f"{vocab_size}^{length} states are more than the limit of {limit}: enumerate a smaller model")
    states = all_sequences(vocab_size, length, model.device)
    clean = (states != mask_id).all(-1)

    log_twists: list[Tensor] = []
    moves: list[Moves] = []
    for step in steering.steps:
        psi, listed = _moves(steering, states, step, limit)
        log_twists.append(psi)
        moves.append(listed)
    zeros = torch.zeros(len(states), dtype=model.dtype, device=states.device)
    end = steering.twist
    log_twists.append(zeros if end is None else end.scale(0.0) * reward_ahead(states, 0.0, model, end)[0])

    log_law = [model.log_start(states)]
    for listed in moves:
        log_law.append(_log_sum_by(log_law[-1][listed.row] + listed.log_p, listed.column, len(states)))
    log_value = [log_twists[-1]]
    for listed in reversed(moves):
        log_value.append(_log_sum_by(log_value[-1][listed.column] + listed.log_p, listed.row, len(states)))
    return Enumeration(
        states, clean, torch.stack(log_law), torch.stack(log_twists), torch.stack(log_value[::-1]), moves
    )


def _moves(steering: Steering, states: Tensor, step: Step, limit: int) -> tuple[Tensor, Moves]:
    model = steering.model
    evaluation = steering.evaluate(states, step.t, None)
    if evaluation.memory is not None:
        raise ValueError("the kernel has a memory, so x_t alone is not the whole state: it cannot be enumerated")
    q = steering.propose(states, evaluation, step)
    prediction = evaluation.prediction
    assert isinstance(prediction, Prediction), "particles are evaluated before they move"
    # Every token at every site that may open: a corrected product can reach what its transition at x_t rules out.
    anything = torch.zeros(*states.shape, model.vocab_size, dtype=model.dtype, device=states.device)
    if model.kernel.mask_id != NO_MASK:
        anything[..., model.kernel.mask_id] = NEVER
    row, y = support(model.step_with(states, anything, step, q.sites).dense().log_p, limit)
    sites = None if q.sites is None else q.sites[row]
    place = model.vocab_size ** torch.arange(states.shape[1] - 1, -1, -1, device=states.device)
    log_p = model.log_prob(y, states[row], prediction.take(row), step, sites)
    log_q = q.take(row).log_prob(y)
    some = (log_p > NEVER) | (log_q > NEVER)
    return evaluation.log_twist, Moves(row[some], (y * place).sum(-1)[some], log_p[some], log_q[some])


def _log_sum_by(log_mass: Tensor, to: Tensor, size: int) -> Tensor:
    """log of the sums of exp(log_mass) (K,) by destination `to` (K,), for destinations 0..size-1."""
    highest = log_mass.new_full((size,), NEVER).scatter_reduce(0, to, log_mass, "amax")
    shift = torch.where(highest == NEVER, 0.0, highest)
    return log_mass.new_zeros(size).index_add(0, to, (log_mass - shift[to]).exp()).log() + shift


@dataclass(frozen=True)
class Score:
    """What a steering says of given trajectories, each (K, T): log p, log q and the log-weight of every step."""

    log_p: Tensor
    log_q: Tensor
    log_increment: Tensor
    log_twist: Tensor


def score(steering: Steering, trajectories: Tensor) -> Score:
    """Weigh trajectories (K, T + 1, L) from the start to clean data; no sampling but that of a random estimate."""
    x = trajectories[:, 0]
    evaluation = steering.evaluate(x, steering.steps[0].t, None)
    log_p: list[Tensor] = []
    log_q: list[Tensor] = []
    log_twists = [evaluation.log_twist]
    for step in steering.steps:
        y = trajectories[:, step.index + 1]
        q = steering.propose(x, evaluation, step)
        log_q.append(q.log_prob(y))
        log_p.append(steering.log_ratio(y, x, evaluation, step, q) + log_q[-1])
        x, evaluation = y, steering.evaluate(y, step.s, None, parent=evaluation)
        log_twists.append(evaluation.log_twist)
    p, q_, twists = torch.stack(log_p, 1), torch.stack(log_q, 1), torch.stack(log_twists, 1)
    return Score(p, q_, p - q_ + twists.diff(dim=1), twists)
