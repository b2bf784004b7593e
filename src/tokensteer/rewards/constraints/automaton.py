"""Finite automata over tokens, the form of all hard constraints on a sequence.

A deterministic automaton reads a sequence site by site, s <- step[s, class of the token], and accepts it if it ends in
an accepting state. Tokens with the same transitions share a class, so its table is states × classes whatever the size
of the vocabulary. If sites are independent, the probability of acceptance is one pass backwards over sites, and a draw
given acceptance one pass forwards (`transitions`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.fused import LogitRows
from tokensteer.core.numerics.draws import NEVER, uniforms
from tokensteer.rewards.constraints.masses import Masses, safe_log
from tokensteer.rewards.constraints.transitions import Transitions

CHUNK = 2**20  # entries of a (rows, V) table held at a time


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over token ids: step (S, C), classes (V,), accept (S,) bool; state 0 is the start."""

    step: Tensor
    classes: Tensor
    accept: Tensor

    def __post_init__(self) -> None:
        states, classes = self.step.shape
        if not states or self.accept.shape != (states,) or self.accept.dtype != torch.bool or self.classes.dim() != 1:
            raise ValueError("Automaton needs step (S, C), classes (V,) and boolean accept (S,)")
        for name, table, size in (("step", self.step, states), ("classes", self.classes, classes)):
            if table.numel() and not (0 <= int(table.min()) and int(table.max()) < size):
                raise ValueError(f"Automaton.{name} must hold numbers in 0..{size - 1}")

    @property
    def vocab_size(self) -> int:
        return len(self.classes)

    @cached_property
    def transitions(self) -> Transitions:
        """The transitions that accepting runs use."""
        return Transitions.of(self.step, self.accept)

    def to(self, device: torch.device) -> Automaton:
        if self.step.device == device:
            return self
        return replace(self, step=self.step.to(device), classes=self.classes.to(device), accept=self.accept.to(device))

    def accepts(self, x: Tensor) -> Tensor:
        """Whether each sequence of ids (P, L) is accepted, (P,)."""
        state = torch.zeros_like(x[:, 0])
        for c in self.classes[x].unbind(-1):
            state = self.step[state, c]
        return self.accept[state]

    def log_accept(self, log_p: Tensor) -> Tensor:
        """log P(accept) for independent sites with log-probabilities (P, L, V), (P,) in double precision."""
        labels = self.transitions.masses(self.class_mass(log_p).double())
        if labels.requires_grad:
            return self.transitions.log_accept_in_logs(safe_log(labels))
        return self.transitions.log_accept(_uncertain(labels))

    def sample(self, log_p: Tensor, generator: Generator | None) -> Tensor:
        """A draw (P, L) from independent sites with log-probabilities (P, L, V), given acceptance."""
        masses = _uncertain(self.transitions.masses(self.class_mass(log_p).double()))
        messages = self.transitions.messages(masses)
        if (messages.log_v == NEVER).any():
            raise ValueError("no sequence of positive probability is accepted: there is nothing to draw from")
        return self.sample_tokens(self.transitions.sample(masses, messages, generator), log_p, generator)

    def possible(self, length: int, allowed: Tensor | None = None) -> bool:
        """Whether some sequence of this length, of the tokens `allowed` (V,) or (L, V), is accepted."""
        allowed = torch.ones_like(self.classes, dtype=torch.bool) if allowed is None else allowed
        of_class = allowed.new_zeros(*allowed.shape[:-1], self.step.shape[1], dtype=torch.int32)
        of_class = of_class.index_add(-1, self.classes, allowed.int()).bool().expand(length, -1)
        alive = self.accept
        for some in reversed(of_class.unbind()):
            alive = (alive[self.step] & some).any(-1)
        return bool(alive[0])

    def class_mass(self, log_p: Tensor) -> Tensor:
        """Masses of the classes (..., C) from log-probabilities of the tokens (..., V), in the same precision."""
        rows = log_p.reshape(-1, self.vocab_size)
        parts = torch.split(rows, max(1, CHUNK // max(1, self.vocab_size)))
        found = [self.summed(part.exp().T).T for part in parts]
        return torch.cat(found).view(*log_p.shape[:-1], self.step.shape[1])

    def summed(self, mass: Tensor) -> Tensor:
        """Masses of the classes (C, k) from those of the tokens (V, k)."""
        return mass.new_zeros(self.step.shape[1], mass.shape[1]).index_add(0, self.classes, mass)

    def sample_tokens(self, label: Tensor, log_p: Tensor, generator: Generator | None) -> Tensor:
        """Tokens (...) drawn from log-masses (..., V), given labels (...) of transitions."""
        outside = self.transitions.members.T[label][..., self.classes] == 0
        rows, u = torch.arange(label.numel(), device=label.device), uniforms((label.numel(), 1), label, generator)
        masses = log_p.masked_fill(outside, NEVER).reshape(-1, self.vocab_size)
        return LogitRows(masses, rows, None).draw(u)[0].view(label.shape)


def _uncertain(labels: Tensor) -> Masses:
    classes = torch.zeros(labels.shape[:2], dtype=torch.long, device=labels.device)
    return Masses(labels, torch.zeros_like(classes, dtype=torch.bool), classes)
