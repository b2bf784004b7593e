"""Rewards and constraints on DNA, ids 0 to 3 for A, C, G, T and any others, such as the mask, behind them.

A motif's score at a site is a sum over its places, linear in the letters' one-hots, so all that is made of scores by
smooth functions has a gradient. Scores are read in bits above the one that random letters reach at a site with
probability p: 0 and more is a hit. A smooth maximum, temperature · log sum exp(·/temperature), is above the maximum by
at most temperature · log(number of terms), and the colder the nearer.

    Presence    how far the best site, of any place on either strand, stands above chance
    Absence     minus the same where it is above chance, near 0 where nothing is
    Hits        how many places, which do not overlap, are hits, up to as many as are wanted
    Spacing     how far the best pair of two motifs stands above chance, among pairs with the right gap between them
    GC          minus how far the share of G and C leaves what is allowed
    Network     what a network says of one-hots
    forbid      no recognition site of restriction enzymes on either strand: a hard constraint, for `constrain`

All but `forbid` take ids (P, L) or one-hots (P, L, V), give (P,), and can be put into `weighted`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.rewards.constraints.automaton import Automaton, avoids
from tokensteer.rewards.motifs import EVEN, GRAIN, LETTERS, Motif, jaspar, threshold

__all__ = [
    "ENZYMES",
    "GC",
    "Absence",
    "Hits",
    "Motif",
    "Network",
    "Presence",
    "Sites",
    "Spacing",
    "forbid",
    "ids_of",
    "jaspar",
    "letters",
    "sites",
]


def ids_of(sequence: str) -> list[int]:
    """The ids of a sequence of A, C, G, T, in upper or lower case, as genomes have their repeats."""
    wrong = sorted(set(sequence) - set(LETTERS + LETTERS.lower()))
    if wrong:
        raise ValueError(f"a sequence of DNA has the letters {LETTERS} alone, and this one has {', '.join(wrong)}")
    return [LETTERS.index(letter) for letter in sequence.upper()]


def letters(x: Tensor) -> Tensor:
    """One-hots of the four letters, (P, L, 4), from ids (P, L) or from one-hots (P, L, V) of more."""
    if x.is_floating_point():
        return x[..., : len(LETTERS)]
    codes = torch.arange(len(LETTERS), device=x.device)
    return (x.unsqueeze(-1) == codes).to(torch.promote_types(torch.get_default_dtype(), torch.float32))


# ---- motifs


@dataclass(frozen=True, eq=False)
class Sites:
    """A motif looked for at every site: `matrices` (2, 4, W) of bits for both strands, `least` the bits of a hit."""

    name: str
    matrices: Tensor
    least: float

    @property
    def width(self) -> int:
        return self.matrices.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        """Bits above chance of the motif that begins at each place, on each strand: (P, 2, L - W + 1)."""
        seen = letters(x)
        if seen.shape[1] < self.width:
            raise ValueError(f"{self.name} has {self.width} places and the sequences only {seen.shape[1]} letters")
        return F.conv1d(seen.mT, self.matrices.to(seen)) - self.least


def sites(motif: Motif, p: float = 1e-4, background: Sequence[float] = EVEN) -> Sites:
    """The motif with the threshold that random letters reach at a site with probability at most p."""
    check_number("sites: p", p, "(0, 1)", "try 1e-4")
    scores = motif.scores(background)
    least = threshold(scores, p, background)
    if least is None:
        raise ValueError(f"{motif.name} is too short or too vague to be rarer than p = {p:g} by chance: try a larger p")
    forward = scores.T.double() / GRAIN
    return Sites(
        motif.name, torch.stack([forward, forward.flip(0, 1)]), least / GRAIN
    )  # flip: A pairs with T, C with G


def _smooth_max(bits: Tensor, temperature: float) -> Tensor:
    return temperature * (bits / temperature).logsumexp(-1)


def _positive(name: str, temperature: float) -> None:
    check_number(f"{name}.temperature", temperature, "(0, inf)", "it is in bits, try 1")


@dataclass(frozen=True, eq=False)
class Presence:
    """The smooth maximum over places and strands of the bits above chance: about 0 at a hit that is just one."""

    sites: Sites
    temperature: float = 1.0
    differentiable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _positive("Presence", self.temperature)

    def __call__(self, x0: Tensor) -> Tensor:
        return _smooth_max(self.sites(x0).flatten(1), self.temperature)


@dataclass(frozen=True, eq=False)
class Absence:
    """-temperature · log(1 + sum exp(bits/temperature)): near 0 without hits, minus the bits of the best with some."""

    sites: Sites
    temperature: float = 1.0
    differentiable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _positive("Absence", self.temperature)

    def __call__(self, x0: Tensor) -> Tensor:
        return -_smooth_max(F.pad(self.sites(x0).flatten(1), (0, 1)), self.temperature)


@dataclass(frozen=True, eq=False)
class Hits:
    """The number of places with the motif, on either strand or on both, that do not overlap; up to `most`, since more
    earn nothing.

    A place counts as sigmoid(bits/temperature) on each strand, one half at the threshold. With `temperature` 0 it
    counts in full or not at all, and there is no gradient. Of places that overlap those are taken that count most
    together: a motif with a repeat in it would else be hit twice by little more than itself.
    """

    sites: Sites
    most: float = math.inf
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_number("Hits.most", self.most, "(0, inf]")
        check_number("Hits.temperature", self.temperature, "[0, inf)")

    @property
    def differentiable(self) -> bool:
        return self.temperature > 0

    def __call__(self, x0: Tensor) -> Tensor:
        bits = self.sites(x0)
        found = (bits / self.temperature).sigmoid() if self.temperature else (bits >= 0).to(bits.dtype)
        return _disjoint(1.0 - (1.0 - found).prod(1), self.sites.width).clamp(max=self.most)


def _disjoint(worth: Tensor, width: int) -> Tensor:
    """The most that places (P, K), each `width` letters long, are worth together without overlapping, (P,)."""
    best = [torch.zeros_like(worth[:, 0])]
    for place, own in enumerate(worth.unbind(-1)):
        best.append(torch.maximum(best[-1], best[max(0, place + 1 - width)] + own))
    return best[-1]


@dataclass(frozen=True, eq=False)
class Spacing:
    """How far the best pair stands above chance, a pair being as good as the weaker of the two (smooth minimum).

    `gaps` are the numbers of letters that may lie between the motifs, each on either strand; the first of them comes
    first, or either one unless `ordered`.
    """

    first: Sites
    second: Sites
    gaps: Sequence[int]
    ordered: bool = False
    temperature: float = 1.0
    differentiable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _positive("Spacing", self.temperature)
        for gap in self.gaps:
            check_whole("Spacing.gaps", gap, 0)
        if not self.gaps:
            raise ValueError(
                f"Spacing.gaps must be numbers of letters between the motifs, got {self.gaps}: try range(11)"
            )

    def __call__(self, x0: Tensor) -> Tensor:
        first, second = (_smooth_max(motif(x0).mT, self.temperature) for motif in (self.first, self.second))
        pairs = self._pairs(first, self.first.width, second)
        if not self.ordered:
            pairs += self._pairs(second, self.second.width, first)
        if not pairs:
            least = self.first.width + self.second.width + min(self.gaps)
            raise ValueError(f"Spacing: the shortest pair has {least} letters, and the sequences {x0.shape[1]}")
        return _smooth_max(torch.cat(pairs, -1), self.temperature)

    def _pairs(self, left: Tensor, width: int, right: Tensor) -> list[Tensor]:
        """The weaker of left[i] and right[i + width + gap], for all i and each gap that fits."""
        found: list[Tensor] = []
        for gap in self.gaps:
            behind = right[:, width + gap :]
            both = min(left.shape[1], behind.shape[1])
            if both > 0:
                found.append(-_smooth_max(-torch.stack([left[:, :both], behind[:, :both]], -1), self.temperature))
        return found


# ---- letters


@dataclass(frozen=True, eq=False)
class GC:
    """0 where the share of G and C in every stretch of `window` letters lies between `low` and `high`, else minus the
    largest distance to them; the whole sequence is one stretch unless a window is given."""

    low: float
    high: float
    window: int | None = None
    differentiable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"GC: low and high must be shares with low <= high, got {self.low} and {self.high}")
        if self.window is not None:
            check_whole("GC.window", self.window)

    def share(self, x0: Tensor) -> Tensor:
        """The share of G and C in each stretch, (P, L - window + 1)."""
        strong = letters(x0)[..., 1:3].sum(-1)
        window = strong.shape[1] if self.window is None else self.window
        if window > strong.shape[1]:
            raise ValueError(f"GC.window is {window} letters and the sequences have only {strong.shape[1]}")
        return F.avg_pool1d(strong.unsqueeze(1), window, stride=1).squeeze(1)

    def __call__(self, x0: Tensor) -> Tensor:
        share = self.share(x0)
        return -torch.maximum(self.low - share, share - self.high).amax(-1).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Network:
    """A network of one-hots (P, 4, L), as most of genomics are: what it says (P,), or its `output` of (P, K)."""

    network: Callable[[Tensor], Tensor]
    output: int | None = None
    differentiable: bool = field(default=True, init=False)

    def __call__(self, x0: Tensor) -> Tensor:
        said = self.network(letters(x0).mT)
        return said if self.output is None else said[:, self.output]


# ---- restriction enzymes

ENZYMES = {
    "AgeI": "ACCGGT",
    "ApaI": "GGGCCC",
    "AscI": "GGCGCGCC",
    "BamHI": "GGATCC",
    "BbsI": "GAAGAC",
    "BglII": "AGATCT",
    "BsaI": "GGTCTC",
    "BsmBI": "CGTCTC",
    "ClaI": "ATCGAT",
    "DpnII": "GATC",
    "EcoRI": "GAATTC",
    "EcoRV": "GATATC",
    "HincII": "GTYRAC",
    "HindIII": "AAGCTT",
    "KpnI": "GGTACC",
    "MfeI": "CAATTG",
    "NcoI": "CCATGG",
    "NdeI": "CATATG",
    "NheI": "GCTAGC",
    "NotI": "GCGGCCGC",
    "PacI": "TTAATTAA",
    "PstI": "CTGCAG",
    "SacI": "GAGCTC",
    "SalI": "GTCGAC",
    "SapI": "GCTCTTC",
    "SfiI": "GGCCNNNNNGGCC",
    "SmaI": "CCCGGG",
    "SpeI": "ACTAGT",
    "XbaI": "TCTAGA",
    "XhoI": "CTCGAG",
}
"""What common restriction enzymes recognise, in the letters of IUPAC."""

IUPAC = {
    **{letter: letter for letter in LETTERS},
    "R": "AG",
    "Y": "CT",
    "S": "CG",
    "W": "AT",
    "K": "GT",
    "M": "AC",
    "B": "CGT",
    "D": "AGT",
    "H": "ACT",
    "V": "ACG",
    "N": "ACGT",
}
MOST_WORDS = 4096


def forbid(*recognised: str, vocab_size: int = len(LETTERS) + 1) -> Automaton:
    """Sequences without the recognition sites, on either strand, of enzymes by name or of sites in letters of IUPAC,
    upper or lower case.

    Give it to `constrain`: then the reward is -inf where a site stands, and the proposal never makes one.
    """
    if not recognised:
        raise ValueError("forbid: give at least one enzyme or site, such as 'EcoRI' or 'GAATTC'")
    found = {word for site in recognised for word in _spelt(site)}
    return avoids(sorted(found | {_reverse_complement(word) for word in found}), vocab_size)


def _spelt(site: str) -> list[tuple[int, ...]]:
    """All words that a site stands for."""
    pattern = ENZYMES.get(site, site.upper())
    if not pattern or not set(pattern) <= set(IUPAC):
        names = {name.lower(): name for name in ENZYMES}
        near = difflib.get_close_matches(site.lower(), names, 1)
        mend = f"did you mean {names[near[0]]}?" if near else f"give its site in the letters {''.join(IUPAC)}"
        raise ValueError(f"forbid: {site!r} is neither a known enzyme nor a site: {mend}")
    options = [IUPAC[letter] for letter in pattern]
    if math.prod(map(len, options)) > MOST_WORDS:
        raise ValueError(
            f"forbid: {site!r} stands for more than {MOST_WORDS} words: leave out some of its open letters"
        )
    return [tuple(ids_of("".join(word))) for word in product(*options)]


def _reverse_complement(word: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(LETTERS) - 1 - letter for letter in reversed(word))
