"""DNA motifs as score matrices, found on both strands where a score is too high to be chance.

A motif is a table of letter counts at each of its places. Its score at a site of a sequence is the sum over places of
log2(p(letter)/background(letter)), the log-odds of being a motif. Scores are integers in steps of 1/GRAIN bits: the
distribution of the score of random letters is then an exact table of convolutions, from which the threshold for a given
probability is read, and scores computed by `conv1d` are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F

from tokensteer.core.numerics.domains import check_number

GRAIN = 64  # scores are integers in steps of 1/GRAIN bits
LETTERS = "ACGT"  # the letter of each token id
EVEN = (0.25, 0.25, 0.25, 0.25)  # all letters equally likely


@dataclass(frozen=True)
class Motif:
    """counts (W, 4) of A, C, G, T at each place."""

    name: str
    counts: Tensor

    def __post_init__(self) -> None:
        if not torch.is_tensor(self.counts):
            raise ValueError(f"{self.name}: counts must be a tensor (W, 4), got {type(self.counts).__name__}")
        shape = tuple(self.counts.shape)
        if len(shape) != 2 or shape[1] != len(LETTERS):
            turned = "; JASPAR writes a row for each letter, so give counts.T" if shape[:1] == (len(LETTERS),) else ""
            raise ValueError(
                f"{self.name}: counts must be (W, 4), a row for each place and in it {', '.join(LETTERS)}, "
                f"got {shape}{turned}"
            )
        if not self.counts.isfinite().all() or (self.counts < 0).any():
            raise ValueError(f"{self.name}: counts must be finite and not negative")

    def scores(self, background: Sequence[float] = EVEN, pseudocount: float = 1.0) -> Tensor:
        """The log-odds in steps of 1/GRAIN bits, (W, 4) integers. `pseudocount` letters with the background's
        frequencies are added to each place, so that no letter is impossible."""
        check_number("Motif.scores: pseudocount", pseudocount, "(0, inf)")
        random = torch.tensor(background, dtype=torch.float64)
        seen = self.counts.double() + pseudocount * random
        return (GRAIN * (seen / seen.sum(-1, keepdim=True) / random).log2()).round().long()


def score_law(scores: Tensor, background: Sequence[float] = EVEN) -> tuple[int, Tensor]:
    """The distribution of the sum of scores (W, 4) over random letters: its lowest value, and the probabilities of all
    values from there on."""
    lowest, p = 0, torch.ones(1, dtype=torch.float64)
    for place in scores:
        shifts = [int(score) for score in place]
        low, high = min(shifts), max(shifts)
        wider = torch.zeros(len(p) + high - low, dtype=torch.float64)
        for score, chance in zip(shifts, background, strict=True):
            wider[score - low : score - low + len(p)] += chance * p
        lowest, p = lowest + low, wider
    return lowest, p


def threshold(scores: Tensor, p: float, background: Sequence[float] = EVEN) -> int | None:
    """The lowest score that random letters reach with probability at most p; None if even the highest is too common."""
    lowest, probability = score_law(scores, background)
    rare = probability.flip(0).cumsum(0).flip(0) <= p * (1.0 + 1e-12)  # for rounding errors
    reached = rare & (probability > 0)
    return lowest + int(reached.int().argmax()) if reached.any() else None


@dataclass(frozen=True)
class Scanner:
    """Counts of motifs in sequences. Motifs too short or too vague to be rarer than chance are left out."""

    names: tuple[str, ...]
    groups: tuple[tuple[Tensor, Tensor, Tensor], ...]
    """For each width W: indices of motifs (m,), their scores on both strands (2m, 4, W), their thresholds (m,)."""

    def __call__(self, ids: Tensor, rows: int = 64) -> Tensor:
        """The number of sites of each motif in ids (P, L), on either strand: (P, M)."""
        return torch.cat([self._count(ids[start : start + rows]) for start in range(0, len(ids), rows)])

    @torch.no_grad()
    def _count(self, ids: Tensor) -> Tensor:
        seen = F.one_hot(ids.long(), len(LETTERS)).transpose(1, 2).float()
        counts = torch.zeros(len(ids), len(self.names), device=ids.device)
        for which, scores, least in self.groups:
            if scores.shape[-1] > ids.shape[1]:
                continue
            reached = F.conv1d(seen, scores.to(ids.device)) >= least.to(ids.device).repeat(2).unsqueeze(-1)
            counts[:, which.to(ids.device)] = reached.sum(-1).view(len(ids), 2, -1).sum(1).float()
        return counts


def scanner(motifs: Sequence[Motif], p: float = 1e-4, background: Sequence[float] = EVEN) -> Scanner:
    """A scanner whose thresholds random letters reach at a site with probability at most p."""
    check_number("scanner: p", p, "(0, 1)", "try 1e-4")
    if len(background) != len(LETTERS) or not math.isclose(sum(background), 1.0, abs_tol=1e-9) or min(background) <= 0:
        raise ValueError(f"scanner: the background must be a distribution over {LETTERS}, got {tuple(background)}")
    scored = [(motif.name, motif.scores(background)) for motif in motifs]
    known = [(name, scores, threshold(scores, p, background)) for name, scores in scored]
    found = [(name, scores, least) for name, scores, least in known if least is not None]
    groups: list[tuple[Tensor, Tensor, Tensor]] = []
    for width in sorted({len(scores) for _, scores, _ in found}):
        here = [i for i, (_, scores, _) in enumerate(found) if len(scores) == width]
        forward = torch.stack([found[i][1] for i in here]).transpose(1, 2)
        backward = forward.flip(1, 2)  # reverse complement: A pairs with T, C with G
        least = torch.tensor([found[i][2] for i in here])
        groups.append((torch.tensor(here), torch.cat([forward, backward]).float(), least.float()))
    return Scanner(tuple(name for name, _, _ in found), tuple(groups))


def jaspar(release: str = "JASPAR2024", group: str = "vertebrates") -> list[Motif]:
    """All motifs of JASPAR's CORE collection for a group of species, from the data of the pyjaspar package."""
    try:
        pyjaspar = import_module("pyjaspar")
    except ImportError as error:
        raise ImportError("JASPAR's motifs come with pyjaspar: pip install 'tokensteer[bio]'") from error
    database = pyjaspar.jaspardb(release=release)
    try:
        found = database.fetch_motifs(collection="CORE", tax_group=[group])
    except AttributeError as error:  # pyjaspar prints the releases it has, and has no database
        raise ValueError(f"this pyjaspar has no release {release}: pip install --upgrade pyjaspar") from error
    return [
        Motif(f"{motif.matrix_id} {motif.name}", torch.tensor([motif.counts[letter] for letter in LETTERS]).T)
        for motif in sorted(found, key=lambda motif: motif.matrix_id)
    ]
