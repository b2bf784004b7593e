"""Rewards and constraints on DNA: ids 0 to 3 are A, C, G, T, and others, such as the mask, come after them.

A motif's score at a site is linear in the one-hots of the letters, so smooth functions of scores have a gradient.
Scores are in bits above the threshold that random letters reach at a site with probability p: 0 and more is a hit. A
smooth maximum, temperature · log sum exp(·/temperature), exceeds that of n terms by at most temperature · log n.

    Presence    bits above the threshold of the best site on either strand
    Absence     minus the same where it is positive, near 0 elsewhere
    Hits        the number of hits that do not overlap, up to a maximum
    Spacing     bits above the threshold of the best pair of two motifs with an allowed gap between them
    GC          minus the distance of the share of G and C to an interval
    Network     the output of a network on one-hots
    forbid      no recognition site of restriction enzymes on either strand: a hard constraint, for `constrain`

All but `forbid` take ids (P, L) or one-hots (P, L, V), return (P,), and can be put into `weighted`.
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
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.token_rules import avoids
from tokensteer.rewards.motifs import EVEN, GRAIN, LETTERS, threshold
from tokensteer.rewards.motifs import Motif as Motif
from tokensteer.rewards.motifs import jaspar as jaspar


def ids_of(sequence: str) -> list[int]:
    """The ids of a sequence of A, C, G, T in upper or lower case (genomes have repeats in lower case)."""
    wrong = sorted(set(sequence) - set(LETTERS + LETTERS.lower()))
    if wrong:
        raise ValueError(f"a DNA sequence has only the letters {LETTERS}, and this one has {', '.join(wrong)}")
    return [LETTERS.index(letter) for letter in sequence.upper()]


def letters(x: Tensor) -> Tensor:
    """One-hots of the four letters, (P, L, 4), from ids (P, L) or from one-hots (P, L, V) of more."""
    if x.is_floating_point():
        return x[..., : len(LETTERS)]
    codes = torch.arange(len(LETTERS), device=x.device)
    return (x.unsqueeze(-1) == codes).to(torch.promote_types(torch.get_default_dtype(), torch.float32))


@dataclass(frozen=True, eq=False)
class Sites:
    """A motif scored at every site: `matrices` (2, 4, W) of bits for both strands, `least` the bits of a hit."""

    name: str
    matrices: Tensor
    least: float

    @property
    def width(self) -> int:
        return self.matrices.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        """Bits above the threshold of the motif that begins at each place, on each strand: (P, 2, L - W + 1)."""
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
    backward = forward.flip(0, 1)  # reverse complement: A pairs with T, C with G
    return Sites(motif.name, torch.stack([forward, backward]), least / GRAIN)


def _smooth_max(bits: Tensor, temperature: float) -> Tensor:
    return temperature * (bits / temperature).logsumexp(-1)


def _positive(name: str, temperature: float) -> None:
    check_number(f"{name}.temperature", temperature, "(0, inf)", "it is in bits, try 1")


@dataclass(frozen=True, eq=False)
class _Best:
    """A reward by the bits of the best site."""

    sites: Sites
    temperature: float = 1.0
    differentiable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _positive(type(self).__name__, self.temperature)


class Presence(_Best):
    """The smooth maximum over places and strands of the bits above the threshold: about 0 for the weakest hit."""

    def __call__(self, x0: Tensor) -> Tensor:
        return _smooth_max(self.sites(x0).flatten(1), self.temperature)


class Absence(_Best):
    """-temperature · log(1 + sum exp(bits/temperature)): near 0 without hits, else minus the bits of the best."""

    def __call__(self, x0: Tensor) -> Tensor:
        return -_smooth_max(F.pad(self.sites(x0).flatten(1), (0, 1)), self.temperature)


@dataclass(frozen=True, eq=False)
class Hits:
    """The number of places, up to `most`, that do not overlap and have the motif on either strand or both.

    A place counts as sigmoid(bits/temperature) on each strand, one half at the threshold; with `temperature` 0 as 1 or
    0, without a gradient. Of overlapping places, those with the largest sum are taken: a motif with an inner repeat
    would otherwise count twice.
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
    """The largest sum of values (P, K) of places, each `width` letters long, that do not overlap, (P,)."""
    best = [torch.zeros_like(worth[:, 0])]
    for place, own in enumerate(worth.unbind(-1)):
        best.append(torch.maximum(best[-1], best[max(0, place + 1 - width)] + own))
    return best[-1]


@dataclass(frozen=True, eq=False)
class Spacing:
    """The bits above the threshold of the best pair; a pair has those of its weaker motif (smooth minimum).

    `gaps` are the allowed numbers of letters between the motifs. Each may be on either strand; `first` comes first if
    `ordered`, else either one.
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
            raise ValueError("Spacing.gaps must be numbers of letters between the motifs, got none: try range(11)")

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


@dataclass(frozen=True, eq=False)
class GC:
    """Minus the largest distance of the share of G and C to [`low`, `high`], over all stretches of `window` letters
    (without a window, the whole sequence)."""

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
    """A network on one-hots (P, 4, L), as in most of genomics: its value (P,), or its `output` of (P, K)."""

    network: Callable[[Tensor], Tensor]
    output: int | None = None
    differentiable: bool = field(default=True, init=False)

    def __call__(self, x0: Tensor) -> Tensor:
        found = self.network(letters(x0).mT)
        return found if self.output is None else found[:, self.output]


# ---- restriction enzymes

MOST_WORDS = 4096  # words that one recognition site may stand for


def _table(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


ENZYMES = _table("""
    AgeI ACCGGT    ApaI GGGCCC    AscI GGCGCGCC    BamHI GGATCC    BbsI GAAGAC    BglII AGATCT    BsaI GGTCTC
    BsmBI CGTCTC   ClaI ATCGAT    DpnII GATC       EcoRI GAATTC    EcoRV GATATC   HincII GTYRAC   HindIII AAGCTT
    KpnI GGTACC    MfeI CAATTG    NcoI CCATGG      NdeI CATATG     NheI GCTAGC    NotI GCGGCCGC   PacI TTAATTAA
    PstI CTGCAG    SacI GAGCTC    SalI GTCGAC      SapI GCTCTTC    SmaI CCCGGG    SpeI ACTAGT     SfiI GGCCNNNNNGGCC
    XbaI TCTAGA    XhoI CTCGAG
""")
"""The recognition sites of common restriction enzymes, in IUPAC letters."""
IUPAC = _table("A A  C C  G G  T T  R AG  Y CT  S CG  W AT  K GT  M AC  B CGT  D AGT  H ACT  V ACG  N ACGT")
"""The letters that each IUPAC code stands for."""


def forbid(*recognised: str, vocab_size: int = len(LETTERS) + 1) -> Automaton:
    """Sequences without the given recognition sites on either strand: enzymes by name, or sites in IUPAC letters of
    upper or lower case. For `constrain`, whose proposal then never makes such a site."""
    if not recognised:
        raise ValueError("forbid: give at least one enzyme or site, such as 'EcoRI' or 'GAATTC'")
    found = {word for site in recognised for word in _words(site)}
    other_strand = {tuple(len(LETTERS) - 1 - letter for letter in reversed(word)) for word in found}
    return avoids(sorted(found | other_strand), vocab_size)


def _words(site: str) -> list[tuple[int, ...]]:
    """All words in A, C, G, T that a site stands for."""
    pattern = ENZYMES.get(site, site.upper())
    if not pattern or not set(pattern) <= set(IUPAC):
        names = {name.lower(): name for name in ENZYMES}
        near = difflib.get_close_matches(site.lower(), names, 1)
        mend = f"did you mean {names[near[0]]}?" if near else f"give its site in the letters {''.join(IUPAC)}"
        raise ValueError(f"forbid: {site!r} is neither a known enzyme nor a site: {mend}")
    options = [IUPAC[letter] for letter in pattern]
    if math.prod(map(len, options)) > MOST_WORDS:
        raise ValueError(f"forbid: {site!r} stands for more than {MOST_WORDS} words: leave out some open letters")
    return [tuple(ids_of("".join(word))) for word in product(*options)]
