"""Exact answers for small models.

`enumerate_steering` lists every state of a small `Steering` and computes without sampling: the model's distribution at
every step, the intermediate targets, log Z, the soft value. `score` weighs given trajectories. `TableDenoiser` is the
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
    """The exact denoiser of a joint distribution over clean sequences, a tensor with one axis for each site.

    p(x_0^l = v | x_t) at a masked site is the conditional given the visible tokens. It is multilinear in the one-hots
    of the other sites, hence differentiable. The mask is the last id.
    """

    joint: Tensor
    ignores_time: bool = field(default=True, init=False, repr=False)

    def __call__(self, x: Tensor, t: float) -> Tensor:
        length, tokens = self.joint.dim(), self.joint.shape[0]
        if not x.is_floating_point():
            x = torch.nn.functional.one_hot(x, tokens + 1).to(self.joint.dtype)
        allowed = x[..., :tokens] + x[..., tokens:]  # (P, L, V): the tokens each site may still become
        marginals: list[Tensor] = []
        for site in range(length):
            left = self.joint.movedim(site, -1).expand(len(x), *[tokens] * length)
            for other in (k for k in range(length) if k != site):
                weights = allowed[:, other].view(len(x), tokens, *[1] * (left.dim() - 2))
                left = (left * weights).sum(1)
            marginals.append(left)
        masses = torch.stack(marginals, 1)
        possible = masses > 0  # log 0 stays out of the graph: its gradient is NaN
        log_p = torch.where(possible, masses, 1.0).log() - masses.sum(-1, keepdim=True).log()
        return torch.nn.functional.pad(log_p.masked_fill(~possible, NEVER), (0, 1), value=NEVER)


def all_sequences(vocab_size: int, length: int, device: torch.device | None = None) -> Tensor:
    """Every sequence in lexicographic order, (vocab_size^length, length)."""
    return torch.cartesian_prod(*[torch.arange(vocab_size, device=device)] * length).view(-1, length)


@dataclass(frozen=True)
class Moves:
    """All possible moves of one step, (K,) each: from state `row` to state `column`, with log p and log q."""

    row: Tensor
    column: Tensor
    log_p: Tensor
    log_q: Tensor


@dataclass(frozen=True)
class Enumeration:
    """A small steering computed exactly. Times run from the start (index 0) to clean data (index -1).

    states (S, L); log_law, log_twist, log_value (T + 1, S): the distribution of the model (unnormalised for a product),
    the log-twist, and the soft value V_t = E[exp(r/kl) | x_t]; clean (S,) marks states without a mask.
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
        """log of the targets p_t · exp(psi_t), normalised at each time, (T + 1, S)."""
        return (self.log_law + self.log_twist).log_softmax(-1)

    @property
    def target(self) -> Tensor:
        """The final target over clean sequences in lexicographic order."""
        return self.log_targets[-1][self.clean].exp()

    @property
    def model_law(self) -> Tensor:
        """The model's own distribution over clean sequences in the same order (unnormalised for a product)."""
        return self.log_law[-1][self.clean].exp()

    @property
    def log_price(self) -> Tensor:
        """log of what multinomial resampling at each time adds to N · Var(Z_hat)/Z², (T + 1,): the relative variance of
        V_t/exp(psi_t) under the target there, 0 if the twist is the soft value."""
        log_gap = torch.where(self.log_targets > NEVER, self.log_value - self.log_twist, 0.0)
        mean, square = ((self.log_targets + k * log_gap).logsumexp(-1) for k in (1, 2))
        return (square - 2 * mean).expm1().clamp(min=0).log()

    def log_optimal(self, index: int) -> Tensor:
        """log q*(x_s | x_t) ∝ p(x_s | x_t) · exp(psi_s(x_s)) for each move of step `index`."""
        moves = self.moves[index]
        log_q = moves.log_p + self.log_twist[index + 1][moves.column]
        return log_q - _log_sum_by(log_q, moves.row, len(self.states))[moves.row]

    def log_proposed(self) -> Tensor:
        """The distribution of particles moved by the proposal without weights, (T + 1, S)."""
        return _pushed(self.log_law[0], [(moves.row, moves.column, moves.log_q) for moves in self.moves])

    def log_increment(self, index: int) -> Tensor:
        """The log-weight of each move of step `index`."""
        moves = self.moves[index]
        twist = self.log_twist[index + 1][moves.column] - self.log_twist[index][moves.row]
        return moves.log_p - moves.log_q + twist


@torch.no_grad()
def enumerate_steering(steering: Steering, limit: int = 2_000_000) -> Enumeration:
    """Compute a small steering exactly. A random estimate is replaced by its mean over all draws, a potential with
    memory by the difference, and averages over steps are left out; the final target and log Z do not depend on them."""
    model, twist = steering.model, steering.twist
    if model.populations > 1:
        raise ValueError("enumerate one template at a time: give the model a template of shape (L,)")
    if twist is not None:
        estimator = Exact(limit) if twist.estimator.random else twist.estimator
        steering = replace(steering, twist=replace(twist, estimator=estimator, potential=difference, smoothing=0.0))
    length, vocab_size, mask_id = model.start(1, None).shape[1], model.vocab_size, model.kernel.mask_id
    if vocab_size**length > limit:
        raise ValueError(f"{vocab_size}^{length} states are more than the limit of {limit}: enumerate a smaller model")
    states = all_sequences(vocab_size, length, model.device)
    clean = (states != mask_id).all(-1)
    found = [_moves(steering, states, step, limit) for step in steering.steps]
    log_twists, moves = [log_twist for log_twist, _ in found], [listed for _, listed in found]
    zeros, end = torch.zeros(len(states), dtype=model.dtype, device=states.device), steering.twist
    log_twists.append(zeros if end is None else end.scale(0.0) * reward_ahead(states, 0.0, model, end)[0])
    log_law = _pushed(model.log_start(states), [(listed.row, listed.column, listed.log_p) for listed in moves])
    back = [(listed.column, listed.row, listed.log_p) for listed in reversed(moves)]
    return Enumeration(states, clean, log_law, torch.stack(log_twists), _pushed(log_twists[-1], back).flip(0), moves)


def _moves(steering: Steering, states: Tensor, step: Step, limit: int) -> tuple[Tensor, Moves]:
    model = steering.model
    evaluation = steering.evaluate(states, step.t, None)
    if evaluation.memory is not None:
        raise ValueError("the kernel has a memory, so x_t is not the whole state: it cannot be enumerated")
    q = steering.propose(states, evaluation, step)
    prediction = evaluation.prediction
    assert isinstance(prediction, Prediction), "particles are evaluated before they move"
    # Any token at every site that may open: a corrected product can reach states that its transition at x_t excludes.
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


def _pushed(log_mass: Tensor, steps: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """log-masses (S,) pushed along the moves (from, to, log-weight) of each step, (T + 1, S)."""
    found = [log_mass]
    for start, end, log_weight in steps:
        found.append(_log_sum_by(found[-1][start] + log_weight, end, len(log_mass)))
    return torch.stack(found)


def _log_sum_by(log_mass: Tensor, to: Tensor, size: int) -> Tensor:
    """log of the sums of exp(log_mass) (K,) by destination `to` (K,), for destinations 0..size-1."""
    highest = log_mass.new_full((size,), NEVER).scatter_reduce(0, to, log_mass, "amax")
    shift = torch.where(highest == NEVER, 0.0, highest)
    return log_mass.new_zeros(size).index_add(0, to, (log_mass - shift[to]).exp()).log() + shift


@dataclass(frozen=True)
class Score:
    """For given trajectories, log p, log q and the log-weight of every step, (K, T); log-twists (K, T + 1)."""

    log_p: Tensor
    log_q: Tensor
    log_increment: Tensor
    log_twist: Tensor


def score(steering: Steering, trajectories: Tensor) -> Score:
    """Weigh trajectories (K, T + 1, L) from the start to clean data; only a random estimate is sampled."""
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
