"""What each site ends as if all later steps draw from the current prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.numerics.draws import NEVER
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.transitions import LOW, Masses

AT_ONCE = 128  # sites whose distributions over the vocabulary are held at a time


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
    index, sites = log_x0.index[known], known.nonzero(as_tuple=True)
    still_open = ~masked[known]
    for part in torch.split(torch.arange(len(index), device=index.device), AT_ONCE):
        mass = automaton.summed(_relative_mass(log_x0, index[part]))
        total = mass.sum(-1, keepdim=True)
        mass = mass / total.masked_fill(total == 0, 1.0)
        incomplete = still_open[part] & ~((mass > 0) | (uniform == 0)).all(-1)
        mass = torch.where(incomplete.unsqueeze(-1), uniform, mass)
        mu[sites[0][part], sites[1][part]] = transitions.masses(mass)
    mu[read & ~known] = transitions.masses(uniform)
    return FinalMasses(automaton, mask_id, rho, mu)


def _relative_mass(log_x0: SiteDistributions, index: Tensor) -> Tensor:
    """Masses (k, V) relative to the highest of each."""
    log_p = log_x0.store.shifted(index).detach()
    top = log_p.amax(-1, keepdim=True).clamp(min=LOW)
    # A softmax is computed for each call, so it can be overwritten; large tables cost more to allocate than to fill.
    return log_p.sub_(top).exp_() if log_x0.normalised else (log_p - top).exp_()
