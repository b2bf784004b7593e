"""What each site ends as if all later steps draw from the current prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.numerics.draws import NEVER
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.masses import LOW, Masses

AT_ONCE = 64  # sites whose distributions over the vocabulary are held at a time
LOG2_E = 1 / math.log(2)


@dataclass(frozen=True, eq=False)
class FinalMasses:
    """The distribution of final tokens, as masses of labels of an automaton's transitions. A masked site ends as mu
    (P, L, K); an open one keeps its token with probability rho (P, L), or ends as mu."""

    automaton: Automaton
    mask_id: int
    rho: Tensor
    mu: Tensor

    def at(self, z: Tensor) -> Masses:
        """What the sites of a state z (P, L) end as."""
        open_sites, classes = z != self.mask_id, self.automaton.classes[z]
        changing = open_sites & (self.rho < 1)
        if not changing.any():
            return Masses(self.mu, open_sites, classes)
        rho = self.rho[changing].unsqueeze(-1).to(self.mu.dtype)
        token = self.automaton.transitions.members[classes[changing]].to(self.mu.dtype)
        labels = self.mu.index_put(changing.nonzero(as_tuple=True), rho * token + (1 - rho) * self.mu[changing])
        return Masses(labels, open_sites & ~changing, classes)

    def take(self, rows: Tensor) -> FinalMasses:
        return replace(self, rho=self.rho[rows], mu=self.mu[rows])


def final_masses(
    automaton: Automaton, rho: Tensor, log_x0: SiteDistributions, mask_id: int, masked: Tensor, moving: Tensor
) -> FinalMasses:
    """mu from a prediction, at sites that are `masked`, `moving` or may be masked later, (P, L) each.

    It is uniform over tokens at open sites where the prediction is missing, as after a proposal has tilted only the
    others, or leaves out a class: many networks just repeat the token there.
    """
    transitions, read = automaton.transitions, masked | moving | (rho < 1)
    mu = torch.zeros(*read.shape, transitions.members.shape[1], dtype=log_x0.dtype, device=read.device)
    known = read & (log_x0.index >= 0)
    tokens = torch.zeros(1, automaton.vocab_size, dtype=log_x0.dtype, device=read.device)
    tokens[:, mask_id] = NEVER
    uniform = automaton.class_mass(tokens.log_softmax(-1))
    index = log_x0.index[known]
    if len(index):
        mass = torch.cat([automaton.summed(_relative_mass(log_x0, part)) for part in torch.split(index, AT_ONCE)], 1).T
        total = mass.sum(-1, keepdim=True)
        mass = mass / total.masked_fill(total == 0, 1.0)
        incomplete = ~masked[known] & ~((mass > 0) | (uniform == 0)).all(-1)
        mu[known] = transitions.masses(torch.where(incomplete.unsqueeze(-1), uniform, mass))
    mu[read & ~known] = transitions.masses(uniform)
    return FinalMasses(automaton, mask_id, rho, mu)


def _relative_mass(log_x0: SiteDistributions, index: Tensor) -> Tensor:
    """Masses (V, k) relative to the highest of each."""
    log_p = log_x0.store.columns(index).detach()
    top = log_p.amax(0).clamp(min=LOW)
    # A softmax is computed for each call, so it can be overwritten; large tables cost more to allocate than to fill.
    log_p = log_p.sub_(top) if log_x0.normalised else log_p - top
    return log_p.mul_(LOG2_E).exp2_()  # faster than exp
