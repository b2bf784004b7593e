"""Hard constraints on the shape of a text, as automata over tokens: its length, its rhyme, the letters it leaves out,
and JSON of a schema. They are exact for the text that the tokenizer decodes without cleaning up spaces."""

from __future__ import annotations

import unicodedata

from tokensteer.core.numerics.domains import check_whole
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.building import both, negate
from tokensteer.rewards.constraints.json_schema import Schema, json_pattern
from tokensteer.rewards.constraints.regex import regex
from tokensteer.rewards.constraints.token_rules import count
from tokensteer.rewards.text.words import Spells, can_be_met, lift, over_characters, spellings

VOWELS = "aeiouy"


def of_tokens(least: int, most: int | None, tokenizer: Spells, vocab_size: int | None = None) -> Automaton:
    """Texts of `least` to `most` tokens; special tokens, such as padding, do not count."""
    _check_range("of_tokens", least, most)
    size = len(tokenizer) if vocab_size is None else vocab_size
    special = set(tokenizer.all_special_ids) | set(range(len(tokenizer), size))
    return count([k for k in range(size) if k not in special], size, least, most)


def of_characters(least: int, most: int | None, tokenizer: Spells, vocab_size: int | None = None) -> Automaton:
    """Texts of `least` to `most` characters, spaces among them, without a space at their beginning."""
    _check_range("of_characters", least, most)
    repeat = f"{{{max(0, least - 1)},{'' if most is None else max(0, most - 1)}}}"
    some = f"( )?x(.{repeat})" if most != 0 else ""
    characters = regex(some if least else f"({some})?", ["x", " "])
    spelt = [[int(c == " ") for c in spelling] for spelling in spellings(tokenizer, vocab_size)]
    automaton = lift(characters, spelt)
    if not can_be_met(automaton, tokenizer):
        raise ValueError(f"a length that cannot be met: the tokenizer spells no text of {least} to {most} characters")
    return automaton


def _check_range(name: str, least: int, most: int | None) -> None:
    check_whole(f"{name}: least", least, 0)
    if most is not None:
        check_whole(f"{name}: most", most, least)


def without_letters(letters: str, tokenizer: Spells, vocab_size: int | None = None) -> Automaton:
    """Texts in which none of the letters occurs, in any case and with any accent: a lipogram."""
    missing = frozenset(c for c in _plain(letters) if not c.isspace())
    if not missing:
        raise ValueError("without_letters: give at least one letter, such as e")
    spelt = spellings(tokenizer, vocab_size)
    has = [k for k, spelling in enumerate(spelt) if not missing.isdisjoint(_plain(spelling))]
    special = set(tokenizer.all_special_ids)
    if all(k in special or not spelt[k] for k in set(range(len(spelt))) - set(has)):
        raise ValueError(f"letters that cannot be left out: every token has one of {letters!r}")
    return count(has, len(spelt), 0, 0)


def rhyme_of(word: str) -> str:
    """The letters that a rhyme of a word ends with, by spelling alone.

    They begin with the last group of vowels (a, e, i, o, u, y), a silent e at the end not counted: night -> ight,
    late -> ate. If that leaves one vowel at the end, they begin one group earlier, if there is one: happy -> appy."""
    letters = _plain(word.strip())
    if not letters or not letters.isalpha():
        raise ValueError(f"a rhyme is of one word in letters, got {word!r}")
    starts = [k for k, c in enumerate(letters) if c in VOWELS and (k == 0 or letters[k - 1] not in VOWELS)]
    if len(starts) > 1 and letters.endswith("e") and starts[-1] == len(letters) - 1:
        starts.pop()  # silent
        return letters[starts[-1] :]
    if len(starts) > 1 and starts[-1] == len(letters) - 1:
        starts.pop()
    return letters[starts[-1] :] if starts else letters


def rhyming(word: str, tokenizer: Spells, vocab_size: int | None = None) -> Automaton:
    """Texts whose last word rhymes with `word` by spelling: it ends with rhyme_of(word) and is another word. Marks and
    spaces may follow it."""
    ending, own = rhyme_of(word), _plain(word.strip())
    named = sorted(set(own))
    alphabet = [*named, "letter", "gap"]
    number = {c: k for k, c in enumerate(alphabet)}
    letter = f"[{''.join(named)}<letter>]"
    ends = regex(f"(.*<gap>)?{letter}*{ending}<gap>*", alphabet)
    same = regex(f"(.*<gap>)?{own}<gap>*", alphabet)

    def kind(c: str) -> int:
        return number[c if c in number else "letter" if c.isalnum() else "gap"]

    characters = both(ends, negate(same))
    spelt = spellings(tokenizer, vocab_size)
    automaton = lift(characters, [[kind(c) for c in _plain(spelling)] for spelling in spelt])
    if not can_be_met(automaton, tokenizer):
        raise ValueError(f"the tokenizer spells no word that ends in {ending!r}, as a rhyme of {word!r} does")
    return automaton


def _plain(text: str) -> str:
    """Lower case without accents."""
    return "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")


def json_of(schema: Schema, tokenizer: Spells, vocab_size: int | None = None, strict: bool = False) -> Automaton:
    """Texts that are JSON of a small schema (see `json_pattern`). `read_json` reads them."""

    def characters(alphabet: list[str]) -> Automaton:
        return regex(json_pattern(schema, alphabet, strict), alphabet)

    return over_characters(characters, "is JSON of this schema", tokenizer, vocab_size)
