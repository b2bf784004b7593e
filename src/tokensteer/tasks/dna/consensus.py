"""Well-known binding sites in DNA, to mark them where sequences are shown.

Each is the consensus of a factor's motif in IUPAC letters, as in JASPAR, long enough to be rare by chance: 200 random
letters have a quarter of one, all factors and both strands together. Motifs themselves, with their counts and
thresholds, are in `rewards.motifs`.
"""

from __future__ import annotations

import re

from tokensteer.rewards.dna import IUPAC
from tokensteer.tasks.common.looks import Mark

MOTIFS = {
    "AP-1": "TGASTCA",
    "CEBP": "TTRYGCAA",
    "CTCF": "CCASYAGRKGGC",
    "ETS": "MCGGAAGT",
    "FOXA": "TRTTTRC",
    "GATA": "WGATAAG",
    "HNF1": "GTTAATNATTRA",
    "HNF4": "CAAAGTYCA",
    "KLF": "CCMCACCC",
    "NF-kB": "GGGAMTTYCC",
    "NRF1": "GCGCATGCGC",
    "OCT": "ATGCAAAT",
    "PU.1": "GAGGAAGT",
    "REST": "CAGCACCNNGGACAG",
    "RUNX": "TGTGGTTT",
    "SP": "GGGCGGGG",
    "TEAD": "ACATTCCA",
    "YY1": "AAGATGGC",
}
_COMPLEMENT = str.maketrans("ACGTRYSWKMN", "TGCAYRSWMKN")


def _pattern(letters: str) -> str:
    return "".join(f"[{IUPAC[letter]}]" for letter in letters)


def reversed_strand(letters: str) -> str:
    """The sequence of the other strand, in IUPAC letters."""
    return letters.translate(_COMPLEMENT)[::-1]


_EITHER = {
    name: re.compile(f"(?=({'|'.join(dict.fromkeys(map(_pattern, (letters, reversed_strand(letters)))))}))")
    for name, letters in MOTIFS.items()
}


def marks(sequence: str) -> list[Mark]:
    """Where a sequence has a site on either strand, from left to right; one that overlaps another is left out."""
    hits = sorted(
        (hit.start(), -len(hit[1]), name) for name, either in _EITHER.items() for hit in either.finditer(sequence)
    )
    found: list[Mark] = []
    for start, length, name in hits:
        if not found or start >= found[-1].stop:
            found.append(Mark(start, start - length, name))
    return found
