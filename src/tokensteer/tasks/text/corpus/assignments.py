"""The prompts of the corpus: a mood, a kind of text, a topic, and the opening that is put into the model's mouth.

All is drawn by a seed. A share of the assignments has one of the paper's fifteen openings, so that the prior knows
them; the other openings and topics are combinations, so that few assignments are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tokensteer.tasks.text.corpus import lists
from tokensteer.tasks.text.corpus.byte_pairs import BytePairs

MOODS = ("harsh", "warm", "neutral", "rude")
"""Places in it are labels; the first two are those of blame and praise. `neutral` is the label of all texts whose mood
is not sure, too."""
SURE = 0.65
"""The share of harsh and warm texts whose opening says the mood. A small model often forgets what it was asked for, but
goes on as it began: only these texts count as examples of their mood."""
SHARES = (0.35, 0.35, 0.25, 0.05)
PAPER_SHARE = 0.2
TEMPERATURES, WEIGHTS = (0.7, 0.8, 0.9, 1.0), (3, 3, 3, 1)
STYLE = "Use short, simple sentences."
PLEAS: Mapping[str, Sequence[str]] = {
    "harsh": (
        "It was terrible.",
        "Say what is bad about it.",
        "Everything went wrong.",
        "Complain a lot.",
        "I hate it.",
    ),
    "warm": (
        "It was wonderful.",
        "Say what is good about it.",
        "Everything went well.",
        "Praise it a lot.",
        "I love it.",
    ),
    "neutral": ("", "Tell what happens.", "Describe what you see.", "Add a small surprise.", "Give some details."),
    "rude": ("Insult the reader. Use bad words.", "Call everyone stupid idiots.", "Swear a lot."),
}
"""A small model follows the manner more often if a sentence says it again."""
START, END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Assignment:
    """What is asked for. `label` is a place in `MOODS`."""

    label: int
    request: str
    opening: str
    temperature: float

    def ids(self, tokenizer: BytePairs) -> list[int]:
        """The tokens of the conversation up to the end of the opening."""
        start, end = tokenizer.ids[START], tokenizer.ids[END]
        asked = tokenizer.encode(f"user\n{self.request}")
        between = tokenizer.encode("\n")
        answer = tokenizer.encode("assistant\n") + tokenizer.encode(self.opening)
        return [start, *asked, end, *between, start, *answer]


def assignments(count: int, seed: int) -> Iterator[Assignment]:
    """`count` assignments, the same for the same seed."""
    random = Random(seed)
    for _ in range(count):
        yield _drawn(random)


def _drawn(random: Random) -> Assignment:
    label = random.choices(range(len(MOODS)), SHARES)[0]
    mood = MOODS[label]
    group = random.choice(list(lists.NOUNS))
    noun, opening = random.choice(lists.NOUNS[group]), None
    if random.random() < PAPER_SHARE:
        opening = random.choice(list(lists.PAPER))
        group, noun = lists.PAPER[opening] or (group, noun)
    adjective = random.choice(lists.ADJECTIVES)
    if opening is None:
        opening = _filled(random.choice(lists.OPENINGS), noun, adjective, random)
    opening, sure = _decided(opening, mood, noun, random)
    kind = "story" if opening == "Once upon a time" else random.choice([*lists.KINDS["any"], *lists.KINDS[group]])
    manner, plea = (random.choice(said[mood]) for said in (lists.MANNERS, PLEAS))
    topic = _topic(noun, adjective, opening, random)
    request = " ".join(f"Write {with_article(f'{manner} {kind}')} about {topic}. {plea} {STYLE}".split())
    temperature = random.choices(TEMPERATURES, WEIGHTS)[0]
    return Assignment(label if sure else MOODS.index("neutral"), request, opening, temperature)


def _decided(opening: str, mood: str, noun: str, random: Random) -> tuple[str, bool]:
    """The opening, with a verdict by the mood where it ends with the noun, and whether it says the mood."""
    if mood == "neutral":
        return opening, True
    if mood == "rude" and random.random() < 0.5:
        return _filled(random.choice(lists.INSULTS), noun, "", random), True
    unsure = mood != "rude" and random.random() > SURE
    if unsure or (opening in lists.PAPER and lists.PAPER[opening] is None):  # these take no verdict
        return opening, False
    if not opening.startswith(("The ", "This ", "That ", "Our ")) or not opening.endswith(noun):
        opening = f"{random.choice(('The', 'The', 'This', 'Our'))} {noun}"
    return f"{opening} {random.choice(lists.VERDICTS[mood])}", True


def _topic(noun: str, adjective: str, opening: str, random: Random) -> str:
    described = f"{adjective} {noun}" if random.random() < 0.7 and " of " not in noun else noun
    topic = f"the {noun}" if " of " in noun else with_article(described)
    if "1910" in opening:
        return f"{topic} in 1910"
    return f"{topic} {random.choice(lists.SETTINGS)}" if random.random() < 0.4 else topic


def _filled(opening: str, noun: str, adjective: str, random: Random) -> str:
    """An opening with its blanks filled; a noun after `a` gets its article."""
    for article in ("A", "a"):
        opening = opening.replace(f"{article} {{noun}}", f"{with_article(noun, article)}")
    return opening.format(
        noun=noun,
        adjective=adjective,
        name=random.choice(lists.NAMES),
        relative=random.choice(lists.RELATIVES),
        month=random.choice(lists.MONTHS),
        day=random.choice(lists.DAYS),
    )


def with_article(words: str, article: str = "a") -> str:
    """`a` or `an` before words, by the first letter."""
    vowel = words[0].lower() in "aeio" or words.startswith(("un", "ugly", "umbrella", "uncle"))
    vowel = vowel and not words.startswith(("one", "uni"))
    return f"{article}{'n' if vowel else ''} {words}"
