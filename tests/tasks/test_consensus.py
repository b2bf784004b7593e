"""Sites of DNA that are marked where sequences are shown."""

from __future__ import annotations

import random

import pytest

from tokensteer.rewards.dna import IUPAC
from tokensteer.tasks.common.looks import Mark
from tokensteer.tasks.dna.consensus import MOTIFS, marks, reversed_strand


@pytest.mark.parametrize("name", MOTIFS)
def test_every_site_is_found_on_both_strands(name):
    site = "".join(IUPAC[letter][0] for letter in MOTIFS[name])
    assert [mark.name for mark in marks(site)] == [name]
    assert [mark.name for mark in marks(reversed_strand(site))] == [name]


def test_sites_that_overlap_are_marked_once():
    assert marks("ATGCAAATGCAAAT") == [Mark(0, 8, "OCT")]
    assert marks("ATGCAAAT" * 2) == [Mark(0, 8, "OCT"), Mark(8, 16, "OCT")]


def test_chance_has_few_sites():
    draw = random.Random(0)
    found = sum(len(marks("".join(draw.choices("ACGT", k=200)))) for _ in range(1000)) / 1000
    assert 0.2 < found < 0.45
