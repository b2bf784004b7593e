"""Rules on the shape of texts against brute force: all sequences of a small vocabulary of word pieces."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import tokensteer as ts
from tokensteer.rewards import Automaton, both, constrain
from tokensteer.rewards.text import (
    following,
    json_of,
    of_characters,
    of_tokens,
    required,
    rhyme_of,
    rhyming,
    without_letters,
)
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.text.rules import character_range, rule_of
from tokensteer.testing import all_sequences

torch.set_num_threads(1)

VOCABULARY = WordPiece.of(["[MASK]", "[PAD]", "night", "l", "##ight", "##e", "café", "is", "a", ",", ".", "1"])
IDS = all_sequences(len(VOCABULARY), 4)
IDS = IDS[(IDS != VOCABULARY.mask_id).all(-1)]
TEXTS: list[str] = VOCABULARY.batch_decode(IDS.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def assert_judges(automaton: Automaton, expected: Callable[[str], bool]) -> None:
    wanted = [expected(text) for text in TEXTS]
    assert automaton.accepts(IDS).tolist() == wanted
    assert 0 < sum(wanted) < len(wanted)


@pytest.mark.parametrize(("least", "most"), [(0, 5), (4, 4), (7, 12), (12, None), (0, 0), (1, 1)])
def test_characters(least, most):
    automaton = of_characters(least, most, VOCABULARY)
    assert_judges(automaton, lambda text: least <= len(text) <= (99 if most is None else most))


def test_tokens_without_padding():
    automaton = of_tokens(2, 3, VOCABULARY)
    expected = [2 <= sum(k != VOCABULARY.ids["[PAD]"] for k in row) <= 3 for row in IDS.tolist()]
    assert automaton.accepts(IDS).tolist() == expected


def test_letters_left_out():
    assert_judges(without_letters("e", VOCABULARY), lambda text: "e" not in text and "é" not in text)
    assert_judges(without_letters("G1", VOCABULARY), lambda text: "g" not in text and "1" not in text)


RHYMES = {
    "night": "ight", "late": "ate", "happy": "appy", "tree": "ee", "go": "o", "potato": "ato", "station": "ion",
    "hmm": "hmm", "free": "ee", "Café": "afe", "be": "e", "day": "ay", "love": "ove",
}  # fmt: skip


def test_what_a_rhyme_ends_with():
    assert {word: rhyme_of(word) for word in RHYMES} == RHYMES


@pytest.mark.parametrize("word", ["night", "light"])
def test_rhymes(word):
    def rhymes(text: str) -> bool:
        last = re.findall(r"\w+", text)
        return bool(last) and last[-1].endswith("ight") and last[-1] != word

    assert_judges(rhyming(word, VOCABULARY), rhymes)


def test_a_grammar_over_pieces():
    rules = {"list": "<item>( ,<item>)*", "item": "( )?(a|is)"}
    assert_judges(following(rules, VOCABULARY), lambda text: re.fullmatch(r" ?(a|is)( , ?(a|is))*", text) is not None)


def test_rules_together():
    rule = both(required(["is"], VOCABULARY), without_letters("e", VOCABULARY), rhyming("night", VOCABULARY))
    assert_judges(rule, lambda text: bool(re.search(r"\bis\b", text)) and "é" not in text and "e" not in text
                  and bool(re.search(r"(?<!\w)l?ight\W*$|\w+(?<!\bn)ight\W*$", text)))  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of_characters(3, 2, VOCABULARY), "of_characters: most"),
        (lambda: of_tokens(-1, 2, VOCABULARY), "of_tokens: least"),
        (lambda: of_characters(1, 1, WordPiece.of(["word", "##word"])), "no text of 1 to 1 characters"),
        (lambda: without_letters(" ", VOCABULARY), "at least one letter"),
        (lambda: without_letters("ab", WordPiece.of(["a", "b", "ab"])), "every token has one of 'ab'"),
        (lambda: rhyming("two words", VOCABULARY), "one word in letters"),
        (lambda: rhyming("moon", VOCABULARY), "no word that ends in 'oon'"),
        (lambda: json_of({"type": "boolean"}, VOCABULARY), "no token has the character 'r'"),
        (lambda: character_range("80"), "80-200, 80- or -200"),
        (lambda: character_range("9-8"), "swap"),
        (lambda: rule_of(Settings(contains=("moon",)), VOCABULARY), "--contains: the tokenizer cannot spell"),
        (lambda: rule_of(Settings(characters="x"), VOCABULARY), "--characters: a length is a range"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_all_rules_of_the_settings_hold_together_on_top_of_a_reward():
    settings = Settings(contains=("is",), avoids=("a",), rhyme="night", without="e", characters="5-20", pattern="l.*")
    rule = rule_of(settings, VOCABULARY)
    assert rule is not None
    assert rule_of(Settings(), VOCABULARY) is None
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, len(VOCABULARY), generator=generator)
    mask = VOCABULARY.mask_id
    denoiser = ts.from_logits(lambda x: logits.expand(len(x), -1, -1), mask, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(mask), ts.uniform_steps(6), ts.template(6, mask))
    tilt = ts.Tilt(lambda x: (x == VOCABULARY.ids[","]).double().sum(-1), 0.5, draws=2)
    result = ts.smc(constrain(model, rule, tilt), 16, generator=generator)
    for text in VOCABULARY.batch_decode(result.samples.flatten(0, 1).tolist(), skip_special_tokens=True):
        words = re.findall(r"\w+", text)
        assert "is" in words
        assert "a" not in words
        assert "e" not in text
        assert words[-1].endswith("ight")
        assert words[-1] != "night"
        assert text.startswith("l")
