"""Context-free grammars of bounded depth as automata.

A grammar nests its rules, and a finite automaton can follow nesting to a bounded depth only. A state is the set of
stacks of rules that may be open after what was read, so its number grows with the stacks that texts really use, and
not with the size of an unrolled pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from tokensteer.core.numerics.domains import check_whole
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.building import build
from tokensteer.rewards.constraints.regex import Parser, Part, Places, checked_alphabet, classes_of
from tokensteer.rewards.constraints.transitions import live

DEPTH = 4

Stack = tuple[int, ...]
"""The places of the rules that are open, and on top the place that has read the last token; () before the first."""


def grammar(
    rules: Mapping[str, str], alphabet: Sequence[str], vocab_size: int | None = None, depth: int = DEPTH
) -> Automaton:
    r"""Sequences of the first rule. A rule is a pattern as in `regex`, in which `<name>` is the rule of that name, such
    as {"list": r"\((<item>(,<item>)*)?\)", "item": "[ab]|<list>"}. No rule is open within itself more than `depth`
    times: here, lists are nested at most so deep."""
    check_whole("grammar: depth", depth)
    ids, vocab_size = checked_alphabet("grammar", alphabet, vocab_size)
    _check_names(rules, ids)
    net = _Net(rules, ids, depth)
    classes, readers = classes_of(net.sets, vocab_size)

    def move(state: frozenset[Stack], c: int) -> frozenset[Stack]:
        return frozenset(to for stack in state for to in net.after(stack)[0] if net.set_of[to[-1]] in readers[c])

    def accepts(state: frozenset[Stack]) -> bool:
        return any(net.after(stack)[1] for stack in state)

    found = build(frozenset({()}), move, accepts, classes, len(readers))
    if not bool(live(found.step, found.accept)[0]):
        raise ValueError(f"the grammar has no sequence in which rules are nested at most {depth} deep: raise depth")
    return found


def _check_names(rules: Mapping[str, str], ids: Mapping[str, int]) -> None:
    if not rules:
        raise ValueError("grammar: give at least one rule, the first of which is the whole sequence")
    for name in rules:
        if len(name) < 2 or name in ids or ">" in name:
            raise ValueError(f"grammar: a rule cannot be called {name!r}: use a name of two letters or more")


class _Net:
    """The places of all rules, and the stacks that may follow a stack."""

    def __init__(self, rules: Mapping[str, str], ids: Mapping[str, int], depth: int) -> None:
        self.depth, self.places = depth, Places()
        number = {name: k for k, name in enumerate(rules)}
        self.parts: list[Part] = []
        self.rule_of: list[int] = []
        for name, pattern in rules.items():
            try:
                self.parts.append(Parser(pattern, ids, self.places, number).parse()())
            except ValueError as error:
                raise ValueError(f"the rule {name} of the grammar: {error}") from error
            self.rule_of += [number[name]] * (len(self.places.leaves) - len(self.rule_of))
        self.sets = list(dict.fromkeys(leaf for leaf in self.places.leaves if leaf))
        index = {leaf: k for k, leaf in enumerate(self.sets)}
        self.set_of = [index.get(leaf, -1) for leaf in self.places.leaves]
        self.after = cache(self._after)

    def _after(self, stack: Stack) -> tuple[frozenset[Stack], bool]:
        """The stacks that may read the next token, and whether the sequence may end."""
        seen: set[tuple[str, Stack]] = set()
        begin = self._enter((), 0, seen) if not stack else self._read(stack, seen)
        found = list(begin)
        return frozenset(to for to in found if to), () in found

    def _enter(self, open_rules: Stack, rule: int, seen: set[tuple[str, Stack]]) -> Iterator[Stack]:
        """The first places of a rule; () if the whole sequence may end."""
        part = self.parts[rule]
        for place in part.first:
            yield from self._at((*open_rules, place), seen)
        if part.nullable:
            yield from self._read(open_rules, seen) if open_rules else ((),)

    def _at(self, stack: Stack, seen: set[tuple[str, Stack]]) -> Iterator[Stack]:
        """A place that is about to read: itself, or the first places of the rule that it stands for."""
        if ("at", stack) in seen:
            return
        seen.add(("at", stack))
        rule = self.places.calls.get(stack[-1])
        if rule is None:
            yield stack
        elif self._open(stack[:-1], rule) < self.depth:
            yield from self._enter(stack, rule, seen)

    def _read(self, stack: Stack, seen: set[tuple[str, Stack]]) -> Iterator[Stack]:
        """What may follow a place that has read."""
        if ("read", stack) in seen:
            return
        seen.add(("read", stack))
        *below, place = stack
        for following in self.places.follow[place]:
            yield from self._at((*below, following), seen)
        if place in self.parts[self.rule_of[place]].last:
            yield from self._read(tuple(below), seen) if below else ((),)

    def _open(self, stack: Stack, rule: int) -> int:
        """How often a rule is open: the first rule always is."""
        return sum(self.places.calls[place] == rule for place in stack) + (rule == 0)
