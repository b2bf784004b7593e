"""Rewards on DNA against plain loops over letters, gradients against differences, forbidden sites by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from checks import answer, trial
from narrow import untyped
from torch import Tensor

import tokensteer as ts
from tokensteer.rewards import Satisfies, constrain, weighted
from tokensteer.rewards.dna import (
    ENZYMES,
    GC,
    Absence,
    Hits,
    Motif,
    Network,
    Presence,
    Spacing,
    forbid,
    ids_of,
    letters,
    sites,
)
from tokensteer.testing import TableDenoiser, all_sequences, assert_reward

torch.set_num_threads(1)

LETTERS = "ACGT"
FIRST = Motif("first", torch.tensor([[9, 0, 1, 0], [0, 8, 0, 2], [5, 5, 0, 0], [0, 0, 10, 0]]))
SECOND = Motif("second", torch.tensor([[1, 1, 1, 9], [7, 1, 1, 1], [0, 9, 1, 0]]))
P = 0.02


def text(x: Tensor) -> list[str]:
    return ["".join(LETTERS[i] for i in row) for row in x.tolist()]


def reverse_complement(word: str) -> str:
    return word[::-1].translate(str.maketrans("ACGT", "TGCA"))


def bits(motif: Motif, word: str) -> list[tuple[float, float]]:
    """By hand: the bits above chance of the motif at each place, forwards and of the other strand read in its own
    direction."""
    scores = (motif.scores().double() / 64).tolist()
    width = len(scores)
    every = sorted((sum(s) for s in itertools.product(*scores)), reverse=True)  # all words, equally likely
    least = min(s for s in set(every) if sum(e >= s for e in every) <= P * len(every))

    def score(part: str) -> float:
        return sum(row[LETTERS.index(letter)] for row, letter in zip(scores, part, strict=True)) - least

    parts = [word[k : k + width] for k in range(len(word) - width + 1)]
    return [(score(part), score(reverse_complement(part))) for part in parts]


def log_sum_exp(values: list[float]) -> float:
    return math.log(sum(map(math.exp, values)))


def disjoint(worth: list[float], width: int) -> float:
    """The best of all sets of places at least `width` apart."""
    places = range(len(worth))
    sets = (c for size in range(4) for c in itertools.combinations(places, size))
    return max(sum(worth[i] for i in c) for c in sets if all(b - a >= width for a, b in itertools.pairwise(c)))


SEQUENCES = torch.randint(4, (40, 11), generator=torch.Generator().manual_seed(0))


def test_sites_by_hand():
    found = sites(FIRST, P)(SEQUENCES)
    assert found.shape == (40, 2, 8)
    expected = torch.tensor([bits(FIRST, word) for word in text(SEQUENCES)]).mT
    assert torch.allclose(found, expected.to(found), atol=1e-6)
    assert 0 < int((found >= 0).sum()) < found.numel() / 10


def test_presence_absence_and_hits_by_hand():
    motif = sites(FIRST, P)
    for word, here, gone, some, count in zip(
        text(SEQUENCES),
        Presence(motif, 0.5)(SEQUENCES),
        Absence(motif, 0.5)(SEQUENCES),
        Hits(motif, most=1.5, temperature=0.5)(SEQUENCES),
        Hits(motif, temperature=0)(SEQUENCES),
        strict=True,
    ):
        pairs = bits(FIRST, word)
        flat = [b for pair in pairs for b in pair]
        assert float(here) == pytest.approx(0.5 * log_sum_exp([b / 0.5 for b in flat]), abs=1e-4)
        assert float(gone) == pytest.approx(-0.5 * log_sum_exp([0.0, *(b / 0.5 for b in flat)]), abs=1e-4)
        chances = [[1 / (1 + math.exp(-b / 0.5)) for b in pair] for pair in pairs]
        soft = disjoint([1 - (1 - a) * (1 - b) for a, b in chances], 4)
        assert float(some) == pytest.approx(min(soft, 1.5), abs=1e-4)
        assert float(count) == disjoint([float(max(pair) >= 0) for pair in pairs], 4)
    assert not Hits(motif, temperature=0).differentiable


def test_hits_do_not_overlap():
    repeat = sites(Motif("AA", 10 * letters(torch.tensor([ids_of("AA")]))[0]), 0.1)
    words = torch.tensor([ids_of(word) for word in ("AAACCC", "AAAACC", "CCAATT", "CAACTT")])
    assert Hits(repeat, temperature=0)(words).tolist() == [1, 2, 2, 2]


def test_a_cold_presence_is_the_best_site_and_strands_are_alike():
    motif = sites(FIRST, P)
    best = motif(SEQUENCES).amax((1, 2))
    assert torch.allclose(Presence(motif, 0.01)(SEQUENCES), best, atol=0.01 * math.log(16) + 1e-5)
    other = 3 - SEQUENCES.flip(-1)
    for reward in (
        Presence(motif),
        Absence(motif),
        Hits(motif),
        Spacing(motif, sites(SECOND, P), range(4)),
        GC(0, 0.4),
    ):
        assert torch.allclose(reward(SEQUENCES), reward(other), atol=1e-4), type(reward).__name__


@pytest.mark.parametrize("ordered", [True, False])
def test_spacing_by_hand(ordered):
    gaps = (1, 3)
    found = Spacing(sites(FIRST, P), sites(SECOND, P), gaps, ordered)(SEQUENCES)
    for word, got in zip(text(SEQUENCES), found, strict=True):
        first, second = ([log_sum_exp(list(pair)) for pair in bits(m, word)] for m in (FIRST, SECOND))
        pairs = [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if j - (i + 4) in gaps]
        if not ordered:
            pairs += [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if i - (j + 3) in gaps]
        weaker = [-log_sum_exp([-a, -b]) for a, b in pairs]
        assert float(got) == pytest.approx(log_sum_exp(weaker), abs=1e-4)


def test_spacing_prefers_the_right_gap():
    pair = Spacing(sites(FIRST, P), sites(SECOND, P), [2], ordered=True)
    at = {gap: "CC" + "ACAG" + "C" * gap + "TAC" + "C" * (6 - gap) for gap in range(5)}
    marks = pair(torch.tensor([ids_of(word) for word in at.values()]))
    assert int(marks.argmax()) == 2
    assert float(marks[2] - marks[[0, 1, 3, 4]].max()) > 2


def test_gc_by_hand():
    for low, high, window in ((0.4, 0.6, None), (0.25, 0.5, 4)):
        for word, got in zip(text(SEQUENCES), GC(low, high, window)(SEQUENCES), strict=True):
            size = window or len(word)
            shares = [sum(c in "GC" for c in word[k : k + size]) / size for k in range(len(word) - size + 1)]
            assert float(got) == pytest.approx(
                -max(0.0, *(low - s for s in shares), *(s - high for s in shares)), abs=1e-6
            )


torch.manual_seed(0)
REWARDS = {
    "presence": Presence(sites(FIRST, P), 0.7),
    "absence": Absence(sites(FIRST, P)),
    "hits": Hits(sites(FIRST, P), most=30.0),
    "spacing": Spacing(sites(FIRST, P), sites(SECOND, P), range(3)),
    "gc": GC(0.5, 0.6, window=5),
    "network": Network(
        torch.nn.Sequential(torch.nn.Conv1d(4, 2, 3), torch.nn.AdaptiveMaxPool1d(1), torch.nn.Flatten()), 1
    ),
}


@pytest.mark.parametrize("name", REWARDS)
def test_gradients_are_differences(name):
    """On relaxed one-hots of five ids, the mask among them, in double precision."""
    reward = REWARDS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 9, 5, generator=generator, dtype=torch.float64).softmax(-1).requires_grad_()
    if isinstance(reward, Network):
        reward = Network(reward.network.double(), 1)
    assert torch.autograd.gradcheck(reward, (x,), eps=1e-6, atol=1e-6)
    slope = torch.autograd.grad(reward(x).sum(), x)[0]
    assert float(slope[..., :4].abs().max()) > 0
    assert float(slope[..., 4].abs().max()) == 0


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "network"])
def test_laws_of_rewards(name):
    assert_reward(REWARDS[name], 5, 10, mask_id=4, differentiable=True)


def test_weighted_sums_have_a_gradient_if_all_parts_do():
    soft, hard = Hits(sites(FIRST, P)), Hits(sites(FIRST, P), temperature=0)
    both = weighted({soft: 2.0, GC(0.4, 0.6): 5.0})
    assert both.differentiable
    assert not weighted({soft: 2.0, hard: 1.0}).differentiable
    assert torch.allclose(both(SEQUENCES), 2 * soft(SEQUENCES) + 5 * GC(0.4, 0.6)(SEQUENCES))


# ---- forbidden sites


@pytest.mark.parametrize("given", [("EcoRI",), ("BsaI", "GATC"), ("HincII",), ("RGY", "CNNG")])
def test_forbidden_sites_on_both_strands(given):
    options = dict(zip("ACGTRYN", ("A", "C", "G", "T", "AG", "CT", "ACGT"), strict=True))
    words = ["".join(word) for g in given for word in itertools.product(*(options[c] for c in ENZYMES.get(g) or g))]
    length = 200 if max(map(len, words)) > 4 else 12
    x = torch.randint(4, (600, length), generator=torch.Generator().manual_seed(3))
    for row, word in zip(x, words, strict=False):  # a rare site has to be put there
        row[3 : 3 + len(word)] = torch.tensor(ids_of(reverse_complement(word)))
    expected = [not any(w in s or w in reverse_complement(s) for w in words) for s in text(x)]
    assert 0 < sum(expected) < len(expected)
    assert forbid(*given).accepts(x).tolist() == expected


def test_lower_case_is_read_as_upper():
    assert ids_of("acgtACgt") == ids_of("ACGTACGT") == [0, 1, 2, 3] * 2
    x = all_sequences(4, 4)
    assert torch.equal(forbid("gary").accepts(x), forbid("GARY").accepts(x))


def small_model(length: int, seed: int, steps: int = 5) -> ts.Diffusion:
    joint = torch.rand([4] * length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).square()
    return ts.Diffusion(
        TableDenoiser(joint / joint.sum()), ts.Ancestral(4), ts.uniform_steps(steps), ts.template(length, 4)
    )


@pytest.mark.slow
def test_forbidden_sites_never_appear_and_log_z_is_right():
    """L = 4, a site of three letters, with and without a soft reward, and the whole law against enumeration."""
    model, rule = small_model(4, 0), forbid("GAY")
    motif = sites(SECOND, 0.05)
    for tilt in (None, ts.Tilt(Hits(motif), 0.5, draws=2)):
        truth = answer(model, ts.Tilt(Satisfies(rule, None if tilt is None else tilt.reward), 0.5))
        # Copies of a sequence in one population count once: with fewer populations rare ones have no normal scores.
        outcome = trial(constrain(model, rule, tilt), truth, populations=16_384, seed=4)
        assert outcome.unbiased, str(outcome)


def test_log_z_of_a_longer_sequence_without_correlations():
    """L = 7, a site of three letters: letters are independent, so every weight is the share of allowed sequences."""
    law = torch.rand(7, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
    log_p = torch.cat([(law / law.sum(-1, keepdim=True)).log(), torch.full((7, 1), -torch.inf)], -1)
    model = ts.Diffusion(
        lambda x, t: log_p.expand(len(x), -1, -1), ts.Ancestral(4), ts.uniform_steps(6), ts.template(7, 4)
    )
    rule, x = forbid("GAT"), all_sequences(4, 7)
    log_mass = log_p[torch.arange(7), x].sum(-1)
    allowed = torch.tensor([not any(w in word for w in ("GAT", "ATC")) for word in text(x)])
    exact = float(log_mass[allowed].logsumexp(0))
    result = ts.smc(constrain(model, rule), 500, 4, generator=torch.Generator().manual_seed(6))
    assert float((result.log_z - exact).abs().max()) < 1e-9
    assert not any(w in word for w in ("GAT", "ATC") for word in text(result.samples.flatten(0, 1)))


def test_a_gradient_and_a_forbidden_site_together():
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Conv1d(5, 16, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv1d(16, 5, 5, padding=2)
    )

    def logits(x: Tensor) -> Tensor:
        return net((x if x.is_floating_point() else torch.nn.functional.one_hot(x, 5).float()).mT).mT

    model = ts.Diffusion(
        ts.from_logits(logits, 4, ignores_time=True), ts.Ancestral(4), ts.uniform_steps(20), ts.template(30, 4)
    )
    motif = sites(Motif("EcoRI, all but a letter", 10 * letters(torch.tensor([ids_of("GAATT")]))[0]), 1e-3)
    tilt = ts.Tilt(Presence(motif), 0.5, draws=2, differentiable=True)
    for base in (None, ts.Gradient(clip=3.0)):
        steering = constrain(model, forbid("EcoRI"), tilt, base)
        result = ts.smc(steering, 32, 8, generator=torch.Generator().manual_seed(7))
        words = text(result.samples.flatten(0, 1))
        assert not any("GAATTC" in word for word in words)
        assert sum("GAATT" in word or "AATTC" in word for word in words) > len(words) / 2  # it wants to, all the same


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: forbid("BamH1"), "did you mean BamHI"),
        (lambda: forbid("ecori"), "did you mean EcoRI"),
        (lambda: forbid("HINDIII"), "did you mean HindIII"),
        (lambda: forbid("GAXTTC"), "letters ACGT"),
        (lambda: forbid(), "at least one"),
        (lambda: forbid("NNNNNNN"), "more than 4096"),
        (lambda: sites(FIRST, 1e-4), "larger p"),
        (lambda: sites(FIRST, 2.0), r"p must lie in \(0, 1\)"),
        (lambda: Presence(sites(FIRST, P), 0.0), "positive"),
        (lambda: Hits(sites(FIRST, P), most=0), "most must lie in"),
        (lambda: Spacing(sites(FIRST, P), sites(SECOND, P), []), "gaps"),
        (lambda: Spacing(sites(FIRST, P), sites(SECOND, P), [20])(SEQUENCES), "27 letters"),
        (lambda: Presence(sites(FIRST, P))(SEQUENCES[:, :3]), "4 places"),
        (lambda: GC(0.6, 0.4), "low <= high"),
        (lambda: GC(0.4, 0.6, window=12)(SEQUENCES), "12 letters"),
        (lambda: ids_of("GAUC"), "U"),
        (lambda: ids_of("gauc"), "has u"),
        (lambda: sites(Motif("HNF4A", torch.ones(4, 13))), r"HNF4A: counts must be \(W, 4\).*\(4, 13\).*counts\.T"),
        (lambda: sites(Motif("HNF4A", torch.ones(13, 5))), r"counts must be \(W, 4\).*\(13, 5\)$"),
        (lambda: Motif("HNF4A", untyped([[1.0, 0.0, 0.0, 0.0]])), "tensor .*got list"),
    ],
)
def test_what_cannot_be_is_said(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
