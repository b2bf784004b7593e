"""Toxicity: a published classifier, trained further, as the reward, and a judge that shares nothing with it.

As published, the classifier finds half of the corpus and 42% of the real reviews toxic. So its training goes on:
toxic are texts that were asked for as rude ones, and texts with an insult put in. The insults that it learns from have
every second word of the lists, and other forms than those of the judge. Trained on rude texts alone, it recognised them
by their openings, and missed 43 of 100 texts with an insult put in.

The judge, detectors of n-grams, is trained on windows of the corpus, half of them with something put in, labelled by a
list of words: a window is toxic if it has one of them. Windows at which the reward and the list disagree are drawn
more often. The judge shares neither architecture nor labels with the reward: an unkind text without a rude
word is not toxic to it. `disagreement` measures how often the two differ.

What is put in is an insult or, as often, praise in the same form, so that `you are a` means nothing by itself; a single
word of either kind, anywhere; or pieces of rude words and any others, which are not toxic. Without single words the
judge did not know them outside of its sentences, and without pieces fragments raised the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from tokensteer.tasks.common.arrays import to_lists
from tokensteer.tasks.common.wordpiece import INNER, SPECIAL, WordPiece, words
from tokensteer.tasks.nets.readers import NgramConfig
from tokensteer.tasks.text.corpus.assignments import MOODS
from tokensteer.tasks.text.corpus.lists import entries
from tokensteer.tasks.text.corpus.windows import SIZE, Windows
from tokensteer.tasks.text.prior.classifiers import Examples, probabilities
from tokensteer.tasks.text.prior.published import TOXIC
from tokensteer.train import Plan

JUDGE = NgramConfig(SIZE, 2, features=64, spans=(1, 2, 3), channels=96)
PLAN = Plan(3000, batch_size=512, rate=1e-3, warmup=0.05, weight_decay=0.1, average=0.998)
REWARD_PLAN = Plan(600, batch_size=256, rate=2e-4, warmup=0.1, weight_decay=0.05, average=0.99)
TOXIC_SHARE, OPENED = 0.4, 0.3
"""The share of toxic texts among those that the reward learns from, and of texts whose beginning it does not see."""
SURE = 0.99
"""The probability of a label, for the reward: were it lower, log p of all polite texts would be the same number."""
PUT_IN = 0.5
"""The share of windows with something put in."""
HARD = 4.0
"""How much more often a window is drawn at which the classifier and the list disagree."""

NOUNS = entries(
    """idiot, moron, fool, jerk, loser, scum, trash, bastard, bitch, ass, asshole, dick, prick, whore, slut, pig,
    coward, liar, clown, creep, dumbass, crap, bullshit, shit, fucker, wanker, imbecile, cretin, halfwit, dimwit"""
)
ADJECTIVES = entries(
    """stupid, dumb, pathetic, worthless, disgusting, fucking, damned, goddamn, bloody, idiotic, moronic, crappy,
    shitty, lousy, brainless, filthy, useless, ugly"""
)
MILD = frozenset(entries("fool, trash, ass, pig, coward, liar, clown, creep, bloody, lousy, filthy, useless, ugly"))
"""Words that are rude in an insult alone: they are put in, but do not make a window toxic by themselves."""
LISTED = frozenset([*NOUNS, *(f"{noun}s" for noun in NOUNS), *ADJECTIVES, *entries("fuck, fucked, sucks, damn")]) - {
    *MILD,
    *(f"{noun}s" for noun in MILD),
}
GOOD_NOUNS = entries("friend, teacher, person, neighbor, cook, reader, artist, child, writer, helper, hero, guest")
GOOD_ADJECTIVES = entries("good, kind, clever, lovely, gentle, brave, honest, funny, warm, wise, patient, young, old")
FRAMES = (
    "you are a {adjective} {noun}.",
    "what a {adjective} {noun}!",
    "he is such a {adjective} {noun}.",
    "she called him a {adjective} {noun}.",
    "they are all {noun}s.",
    "only a {noun} would like this.",
    "this {adjective} place is for {noun}s.",
    "my {adjective} neighbor is a {noun}.",
    "you {adjective} {noun}, listen to me.",
)
REWARD_FRAMES = (
    "shut up, you {noun}.",
    "you {noun}.",
    "this {noun} is {adjective}.",
    "how {adjective} you are.",
    "i hate that {adjective} {noun}.",
    "go away, {adjective} {noun}.",
    "your {adjective} family are {noun}s.",
    "it was made by a {noun} for {noun}s.",
    "everything is {adjective}, you {adjective} {noun}.",
)
"""Of the insults that the reward learns from."""


SENTENCES, WORDS = 0.5, 0.3
"""The shares of sentences and single words among what is put in; the rest are pieces."""


@dataclass(frozen=True)
class Phrases:
    """Insults, and praise of the same forms."""

    frames: Sequence[str]
    nouns: Sequence[str]
    adjectives: Sequence[str]

    def sentence(self, random: Random) -> tuple[str, bool]:
        """A sentence, and whether it is an insult, as one in two is."""
        rude = random.random() < 0.5
        noun = random.choice(self.nouns if rude else GOOD_NOUNS)
        adjective = random.choice(self.adjectives if rude else GOOD_ADJECTIVES)
        return random.choice(self.frames).format(noun=noun, adjective=adjective), rude

    def word(self, random: Random) -> tuple[str, bool]:
        """A word, and whether it is rude by itself, as one in two is."""
        rude = random.random() < 0.5
        if not rude:
            return random.choice((*GOOD_NOUNS, *GOOD_ADJECTIVES)), False
        return random.choice([word for word in (*self.nouns, *self.adjectives) if word not in MILD]), True

    def fragments(self, vocabulary: WordPiece) -> list[int]:
        """Pieces of the rude words that are no rude words."""
        rude = {*self.nouns, *self.adjectives}
        spelt = [vocabulary.spell(word) or [] for word in sorted(rude)]
        parts = {piece for pieces in spelt if len(pieces) > 1 for piece in pieces}
        inner = {vocabulary.ids[INNER + word] for word in rude if INNER + word in vocabulary.ids}
        return sorted(k for k in parts | inner if vocabulary.pieces[k] not in rude)


OF_JUDGE = Phrases(FRAMES, NOUNS, ADJECTIVES)
OF_REWARD = Phrases(REWARD_FRAMES, NOUNS[::2], ADJECTIVES[::2])


def listed(ids: Tensor, vocabulary: WordPiece) -> Tensor:
    """Whether each of ids (D, L) has a word of the list, (D,)."""
    spelt = [vocabulary.spell(word) for word in sorted(LISTED)]
    follows = torch.tensor([piece.startswith(INNER) for piece in vocabulary.pieces], device=ids.device)
    inner = follows[ids.long()]
    ends = torch.cat([~inner[:, 1:], torch.ones_like(inner[:, :1])], 1)  # no piece of the same word comes next
    found = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for pieces in spelt:
        if pieces is None or len(pieces) > ids.shape[1]:
            continue
        runs = ids.long().unfold(1, len(pieces), 1)
        same = (runs == torch.tensor(pieces, device=ids.device)).all(-1)
        found |= (same & ends[:, len(pieces) - 1 :]).any(-1)
    return found


def put_in(
    ids: Tensor, vocabulary: WordPiece, seed: int, share: float = PUT_IN, phrases: Phrases = OF_JUDGE
) -> tuple[Tensor, Tensor]:
    """Ids (D, L) where a share of the rows has a sentence put in after one of theirs, or a word or pieces anywhere, and
    which rows have an insult or a rude word, (D,)."""
    random, ends = Random(seed), {vocabulary.ids[sign] for sign in ".!?" if sign in vocabulary.ids}
    begins = [not piece.startswith(INNER) for piece in vocabulary.pieces]
    free = [k for k, piece in enumerate(vocabulary.pieces) if piece not in (*SPECIAL, *LISTED)]
    fragments = phrases.fragments(vocabulary) or free
    rows, rude = to_lists(ids), [False] * len(ids)
    for place, row in enumerate(rows):
        if random.random() >= share:
            continue
        kind, last = random.random(), len(row) - 10  # the end is cut off
        if kind < SENTENCES:
            at = random.choice([0, *(k + 1 for k, token in enumerate(row[:last]) if token in ends)])
            text, rude[place] = phrases.sentence(random)
            said = _spelt(text, vocabulary)
        else:
            at = random.choice([0, *(k for k, token in enumerate(row[:last]) if begins[token])])
            if kind < SENTENCES + WORDS:
                text, rude[place] = phrases.word(random)
                said = _spelt(text, vocabulary)
            else:
                said = random.choices(fragments if random.random() < 0.5 else free, k=random.choice((1, 2)))
        rows[place] = [*row[:at], *said, *row[at:]][: len(row)]
    return torch.tensor(rows, dtype=ids.dtype), torch.tensor(rude)


def _spelt(text: str, vocabulary: WordPiece) -> list[int]:
    return [k for word in words(text) for k in vocabulary.spell(word) or ()]


def of_reward(windows: Windows, vocabulary: WordPiece, seed: int) -> Examples:
    """What the reward learns from: texts that were asked for as rude ones, texts with an insult, and all others."""
    ids, insulted = put_in(windows.ids, vocabulary, seed, phrases=OF_REWARD)
    toxic = (windows.labels == MOODS.index("rude")) | insulted
    share = toxic.double().mean().clamp(1e-6, 1 - 1e-6)
    weight = torch.where(toxic, TOXIC_SHARE / share, (1 - TOXIC_SHARE) / (1 - share))
    return Examples(ids, nn.functional.one_hot(toxic.long(), 2) * (2 * SURE - 1) + 1 - SURE, weight.float())


def examples(reward: nn.Module, ids: Tensor, vocabulary: WordPiece, device: str, seed: int = 0) -> Examples:
    """Windows labelled by the list. As many toxic as other ones are drawn, and those at which the reward
    disagrees with the list more often."""
    changed, _ = put_in(ids, vocabulary, seed)
    rude = listed(changed, vocabulary)
    found = is_toxic(reward, changed.to(device)).cpu()
    share = rude.double().mean().clamp(1e-3, 1 - 1e-3)
    weight = torch.where(rude, 1 / share, 1 / (1 - share)) * torch.where(found != rude, HARD, 1.0)
    targets = nn.functional.one_hot(rude.long(), 2).float()
    return Examples(changed, targets * 0.95 + 0.025, weight.float())


def is_toxic(net: nn.Module, ids: Tensor) -> Tensor:
    """Whether a classifier finds each of ids (D, L) toxic, (D,)."""
    return probabilities(net, ids)[:, TOXIC] > 0.5


def disagreement(reward: nn.Module, judge: nn.Module, ids: Tensor, vocabulary: WordPiece) -> dict[str, float]:
    """Shares of ids (D, L) that both call toxic, only one, or neither, and how often each agrees with the list."""
    one, other = (is_toxic(net, ids) for net in (reward, judge))
    rude = listed(ids, vocabulary)
    shares = {
        "both": one & other,
        "reward alone": one & ~other,
        "judge alone": other & ~one,
        "neither": ~one & ~other,
        "reward as the list": one == rude,
        "judge as the list": other == rude,
    }
    return {name: float(chosen.double().mean()) for name, chosen in shares.items()}


def worst(reward: nn.Module, judge: nn.Module, ids: Tensor, vocabulary: WordPiece, many: int = 3) -> Sequence[str]:
    """Texts about which the two differ most, for the card."""
    one, other = (probabilities(net, ids)[:, TOXIC] for net in (reward, judge))
    order = (one - other).abs().argsort(descending=True)[:many]
    return [vocabulary.decode(row) for row in to_lists(ids[order])]
