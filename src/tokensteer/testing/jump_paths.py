"""Paths in continuous time and their exact weights, to test kernels against rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.rates import time_of
from tokensteer.core.kernels.schedule import Schedule
from tokensteer.core.numerics.draws import categorical, uniforms

# From states (P, L) and times (P,): rates of changing a site to a token (P, L, V); log-densities (P,).
Rate = Callable[[Tensor, Tensor], Tensor]
LogDensity = Callable[[Tensor, Tensor], Tensor]


def reversed_rate(rate: Rate, log_pi: LogDensity) -> Rate:
    """The reverse rates by detailed balance, R'_t(x -> y) = R_t(y -> x) · pi_t(y)/pi_t(x).

    Evaluates `rate` at all L·V neighbours of a state: for small models or cheap rates.
    """

    def opposite(x: Tensor, t: Tensor) -> Tensor:
        length, size = x.shape[1], rate(x[:1], t[:1]).shape[-1]
        row, site, token = torch.ones(len(x), length, size, device=x.device).nonzero(as_tuple=True)
        y, times, each = x[row], t[row], torch.arange(len(row), device=x.device)
        y[each, site] = token
        back = rate(y, times)[each, site, x[row, site]]
        ratio = (log_pi(y, times) - log_pi(x, t)[row]).exp()
        # The rate is 0 where pi is 0, also if `rate` is not finite there.
        return torch.where(ratio > 0, back * ratio, 0.0).view(-1, length, size).scatter(-1, x.unsqueeze(-1), 0.0)

    return opposite


@dataclass(frozen=True)
class JumpPaths:
    """Piecewise constant paths: states (P, K, L), the k-th from times[:, k] down to times[:, k + 1]; times (P, K + 1).

    One site changes at a time. A path with fewer jumps repeats its last state for no time.
    """

    times: Tensor
    states: Tensor

    def __post_init__(self) -> None:
        if self.times.shape != (len(self.states), self.states.shape[1] + 1):
            raise ValueError(
                f"JumpPaths: {tuple(self.states.shape)} states need times of shape (P, K + 1), got "
                f"{tuple(self.times.shape)}: the beginning of each state and the end of the last"
            )
        if (self.times.diff(dim=1) > 0).any():
            raise ValueError("JumpPaths: times must fall, from noise at 1 towards data at 0")
        if (self.jumps.sum(-1) > 1).any():
            raise ValueError("JumpPaths: two sites change at once; split them into two jumps")

    @property
    def jumps(self) -> Tensor:
        """The site that changes at the end of each state but the last, (P, K - 1, L)."""
        return self.states[:, 1:] != self.states[:, :-1]


def _quadrature(start: Tensor, end: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre times and weights (..., nodes) for integrals from `end` up to `start`; in log t unless the end is
    0, since rates go like 1/t."""
    places, parts = np.polynomial.legendre.leggauss(nodes)
    z, w = torch.tensor(places).to(start) / 2 + 0.5, torch.tensor(parts).to(start) / 2
    start, end = start.unsqueeze(-1), end.unsqueeze(-1)
    ratio = torch.where(end > 0, start / end, 1.0)
    log_time, plain = end * ratio**z, end + (start - end) * z
    slope = torch.where(end > 0, log_time * ratio.log(), start - end)
    return torch.where(end > 0, log_time, plain), slope * w


def _integrated_exit(paths: JumpPaths, rate: Rate, nodes: int) -> Tensor:
    """∫ sum_y rate_t(x_t, y) dt along each path, (P,)."""
    times, weights = _quadrature(paths.times[:, :-1].double(), paths.times[:, 1:].double(), nodes)
    some = weights > 0
    path, held, _ = some.nonzero(as_tuple=True)
    exits = rate(paths.states[path, held], times[some]).double().sum((-1, -2))
    return exits.new_zeros(len(times)).index_add(0, path, exits * weights[some])


def _log_jumps(paths: JumpPaths, rate: Rate) -> Tensor:
    """The sum of log rate_t(x, y) over the jumps of each path, (P,)."""
    path, jump, site = paths.jumps.nonzero(as_tuple=True)
    rates = rate(paths.states[path, jump], paths.times[path, jump + 1].double())
    each, token = torch.arange(len(path), device=site.device), paths.states[path, jump + 1, site]
    log_rate = rates[each, site, token].double().log()
    return log_rate.new_zeros(len(paths.times)).index_add(0, path, log_rate)


def tilt_log_weight(paths: JumpPaths, model: Rate, proposal: Rate, log_twist: LogDensity, nodes: int = 32) -> Tensor:
    """The log-weight (P,) of paths drawn with rates Q, for targets p_t · exp(psi_t), p_t the distribution under R:

    log w = psi_s(x_s) - psi_t(x_t) + ∫ sum_y (Q - R)(x, y) dt + sum over jumps of log R/Q.
    """
    ramp = log_twist(paths.states[:, -1], paths.times[:, -1]) - log_twist(paths.states[:, 0], paths.times[:, 0])
    held = _integrated_exit(paths, proposal, nodes) - _integrated_exit(paths, model, nodes)
    return ramp + held + _log_jumps(paths, model) - _log_jumps(paths, proposal)


def balance_log_weight(paths: JumpPaths, proposal: Rate, log_pi: LogDensity, nodes: int = 32) -> Tensor:
    """The log-weight (P,) of paths drawn with rates Q, for known targets pi_t (LEAPS):

    log w = -∫ [∂_t log pi_t(x) + sum_y Q(y, x)·pi_t(y)/pi_t(x) - sum_y Q(x, y)] dt. The integral of ∂_t log pi_t is
    exact, from the ends of each state.
    """
    states = paths.states.flatten(0, 1)
    began, ended = paths.times[:, :-1].flatten(), paths.times[:, 1:].flatten()
    gained = (log_pi(states, ended) - log_pi(states, began)).double().view(paths.states.shape[:2]).sum(-1)
    arriving = _integrated_exit(paths, reversed_rate(proposal, log_pi), nodes)
    return gained - arriving + _integrated_exit(paths, proposal, nodes)


def jump_paths(
    x: Tensor, rates: Callable[[Tensor], Tensor], schedule: Schedule, t: float, s: float, generator: Generator | None
) -> JumpPaths:
    """Exact paths from x (P, L) at t down to s of a masked process with rates hazard(t) · rates(x).

    `rates` (P, L) -> (P, L, V) are 0 but at masked sites: mu for the model, a tilted mu for a proposal. With lambda(x)
    their sum, no jump comes before tau with probability ((1 - alpha_tau)/(1 - alpha_t))^lambda.
    """
    rows, length = x.shape
    now = torch.full((rows,), t, dtype=torch.float64, device=x.device)
    noise = torch.full_like(now, 1.0 - schedule.alpha(t))
    times, states = [now], [x]
    for _ in range(length):
        table = rates(x)
        total = table.sum((-1, -2)).double()
        noise = noise * torch.where(total > 0, uniforms((rows,), now, generator) ** (1.0 / total), 0.0)
        now = time_of(schedule, noise).clamp(s, t)
        jumping = (now > s).nonzero().squeeze(-1)
        cell = categorical(table[jumping].flatten(1).log(), generator)
        x = x.clone()
        x[jumping, cell // table.shape[-1]] = cell % table.shape[-1]
        times.append(now)
        states.append(x)
    return JumpPaths(torch.stack([*times, torch.full_like(now, s)], 1), torch.stack(states, 1))
