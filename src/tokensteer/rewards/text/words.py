"""Hard constraints on text as automata over tokens, for `constrain`: required words, forbidden words, a pattern, a
grammar.

Tokens spell a text in many ways ("good", "go ##od", " Good"), and a sampler finds them all. So the constraint is an
automaton over characters, and a token moves it as its characters do: it is exact for the decoded text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from tokensteer.core.numerics.rows import unique
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.building import both, minimal, negate
from tokensteer.rewards.constraints.grammar import DEPTH, grammar
from tokensteer.rewards.constraints.regex import regex
from tokensteer.rewards.text.strings import checked_words, is_letter, letters_of

LETTER, SPACE, MARK = "letter", "space", "mark"  # classes of characters that are in no word


class Spells(Protocol):
    """A tokenizer that can decode, such as those of `transformers`."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...
    def batch_decode(
        self, sequences: Any, *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool | None = ...
    ) -> Any: ...
    def __len__(self) -> int: ...


def spellings(tokenizer: Spells, vocab_size: int | None = None) -> list[str]:
    """The characters that each token adds to a text, with the spaces before it; "" for special tokens."""
    size = len(tokenizer) if vocab_size is None else vocab_size
    special = set(tokenizer.all_special_ids) | set(range(len(tokenizer), size))
    ordinary = [k for k in range(size) if k not in special]
    alone = dict(zip(ordinary, _decoded(tokenizer, [[k] for k in ordinary]), strict=True))
    # Many tokenizers drop the space before the first token, so each token is decoded after an anchor.
    anchor = next((k for k in ordinary if alone[k].isalnum()), None)
    if anchor is None:
        raise ValueError("the tokenizer has no token that is a word by itself: its texts cannot be read")
    found = [""] * size
    for k, both_tokens in zip(ordinary, _decoded(tokenizer, [[anchor, k] for k in ordinary]), strict=True):
        after = both_tokens.startswith(alone[anchor])
        found[k] = both_tokens[len(alone[anchor]) :] if after else " " + alone[k]
    return found


def _decoded(tokenizer: Spells, rows: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def lift(characters: Automaton, spelt: Sequence[Sequence[int]]) -> Automaton:
    """An automaton over characters as one over tokens; token k has the characters spelt[k], given as ids."""
    states = torch.arange(len(characters.step))
    of_class = cast("list[int]", characters.classes.tolist())  # pyright: ignore[reportUnknownMemberType]
    read_by_class = [tuple(of_class[c] for c in spelling) for spelling in spelt]
    kinds = {spelling: k for k, spelling in enumerate(dict.fromkeys(read_by_class))}
    longest, stay = max(map(len, kinds)), characters.step.shape[1]
    read = torch.tensor([[*spelling, *[stay] * (longest - len(spelling))] for spelling in kinds]).long()
    step = torch.cat([characters.step, states.unsqueeze(-1)], 1)
    state = states.unsqueeze(-1).expand(-1, len(kinds))
    for place in range(longest):
        state = step[state, read[:, place]]
    classes = torch.tensor([kinds[spelling] for spelling in read_by_class])
    return minimal(Automaton(state.contiguous(), classes, characters.accept))


def required(words: Iterable[str], tokenizer: Spells, vocab_size: int | None = None) -> Automaton:
    """Texts with all of the words, whole and in any case. `vocab_size` is the model's, by default the tokenizer's."""
    spelt = spellings(tokenizer, vocab_size)
    automata: list[Automaton] = []
    for word in checked_words(words):
        automata.append(_with_one_of([word], spelt))
        if not can_be_met(automata[-1], tokenizer):
            raise ValueError(f"the tokenizer cannot spell the word {word!r}: its vocabulary has no tokens for it")
    return both(*automata)


def forbidden(words: Iterable[str], tokenizer: Spells, vocab_size: int | None = None) -> Automaton:
    """Texts with none of the words, whole and in any case."""
    return negate(_with_one_of(checked_words(words), spellings(tokenizer, vocab_size)))


def matching(pattern: str, tokenizer: Spells, vocab_size: int | None = None) -> Automaton:
    """Texts that match the pattern (see `regex`) as a whole, up to a space at their beginning."""

    def characters(alphabet: list[str]) -> Automaton:
        try:
            return regex(f"( )?({pattern})" if " " in alphabet else pattern, alphabet)
        except ValueError:
            regex(pattern, alphabet)  # for positions in the given pattern
            raise

    return over_characters(characters, f"matches {pattern!r}", tokenizer, vocab_size)


def following(
    rules: Mapping[str, str], tokenizer: Spells, vocab_size: int | None = None, depth: int = DEPTH
) -> Automaton:
    """Texts of the first rule of a grammar over characters (see `grammar`), up to a space at their beginning. No rule
    is open within itself more than `depth` times."""

    def characters(alphabet: list[str]) -> Automaton:
        if " " not in alphabet or not rules:
            return grammar(rules, alphabet, depth=depth)
        return grammar({"the text": f"( )?<{next(iter(rules))}>", **rules}, alphabet, depth=depth)

    return over_characters(characters, "follows the grammar", tokenizer, vocab_size)


def over_characters(
    make: Callable[[list[str]], Automaton], what: str, tokenizer: Spells, vocab_size: int | None
) -> Automaton:
    """The automaton that make(alphabet) gives for the characters of a tokenizer, lifted to its tokens. `what` is what
    a text does that is accepted, for the error if there is none."""
    spelt = spellings(tokenizer, vocab_size)
    number = {c: k for k, c in enumerate(sorted(set("".join(spelt))))}
    automaton = lift(make(list(number)), [[number[c] for c in spelling] for spelling in spelt])
    if not can_be_met(automaton, tokenizer):
        raise ValueError(f"a pattern that cannot be met: the tokenizer spells no text that {what}")
    return automaton


def _with_one_of(words: list[str], spelt: list[str]) -> Automaton:
    """Texts with at least one of the words."""
    named = sorted({c for word in words for c, _ in letters_of(word)})
    alphabet = [*named, LETTER, SPACE, MARK]
    number = {c: k for k, c in enumerate(alphabet)}
    gap = f"[<{SPACE}><{MARK}>" + "".join("\\" + c for c in named if not is_letter(c)) + "]"
    spaces = {"": "", "*": f"<{SPACE}>*", "+": f"<{SPACE}>+"}
    choice = "|".join("".join(spaces[before] + "\\" + c for c, before in letters_of(word)) for word in words)

    def kind(c: str) -> int:
        return number[c if c in number else LETTER if is_letter(c) else SPACE if c.isspace() else MARK]

    characters = regex(f"(.*{gap})?({choice})({gap}.*)?", alphabet)
    return lift(characters, [[kind(c) for c in spelling.lower()] for spelling in spelt])


def can_be_met(automaton: Automaton, tokenizer: Spells) -> bool:
    """Whether some sequence of ordinary tokens, of any length, is accepted."""
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([k for k in range(automaton.vocab_size) if k not in special])
    step = automaton.step[:, unique(automaton.classes[ordinary])[0]]
    reached = torch.zeros_like(automaton.accept)
    reached[0] = True
    for _ in range(len(reached)):
        more = reached.index_fill(0, step[reached].flatten(), True)
        if torch.equal(more, reached):
            break
        reached = more
    return bool((reached & automaton.accept).any())
