"""Automata for rules on tokens: substrings, counts, and tokens at given sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.building import minimal, negate


def _classes(ids: Iterable[int], vocab_size: int) -> tuple[Tensor, dict[int, int]]:
    """Classes (V,), one for each of the ids, from 1, and 0 for all other tokens; and the class of each id."""
    number = {token: k for k, token in enumerate(sorted(set(ids)), 1)}
    for token in number:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary 0..{vocab_size - 1}")
    classes = torch.zeros(vocab_size, dtype=torch.long)
    classes[list(number)] = torch.tensor(list(number.values()), dtype=torch.long)
    return classes, number


def _finds(words: Sequence[Sequence[int]], vocab_size: int) -> Automaton:
    """Sequences with at least one of the words as a substring (Aho and Corasick)."""
    if not words or not all(words):
        raise ValueError("give at least one substring, and no empty one")
    classes, number = _classes((token for word in words for token in word), vocab_size)
    trie, ends = [dict[int, int]()], [False]
    for word in words:
        node = 0
        for token in word:
            if number[token] not in trie[node]:
                trie[node][number[token]] = len(trie)
                trie.append({})
                ends.append(False)
            node = trie[node][number[token]]
        ends[node] = True
    step = [[0] * (len(number) + 1) for _ in trie]
    fail, queue = [0] * len(trie), [0]
    for node in queue:  # breadth first, so that the row of the shorter suffix is complete
        ends[node] |= ends[fail[node]]
        for c in range(len(number) + 1):
            back = step[fail[node]][c] if node else 0
            step[node][c] = child = trie[node].get(c, back)
            if c in trie[node]:
                fail[child] = back
                queue.append(child)
    for node, end in enumerate(ends):
        if end:
            step[node] = [node] * (len(number) + 1)
    return minimal(Automaton(torch.tensor(step), classes, torch.tensor(ends)))


def contains(ids: Sequence[int], vocab_size: int) -> Automaton:
    """Sequences with `ids` as a substring."""
    return _finds([ids], vocab_size)


def avoids(words: Sequence[Sequence[int]], vocab_size: int) -> Automaton:
    """Sequences with none of the words as a substring."""
    return negate(_finds(words, vocab_size))


def count(ids: Iterable[int], vocab_size: int, at_least: int = 0, at_most: int | None = None) -> Automaton:
    """Sequences with between `at_least` and `at_most` tokens among `ids`."""
    if at_least < 0 or (at_most is not None and at_most < at_least):
        raise ValueError(f"count: at_least = {at_least} and at_most = {at_most} leave nothing to count: raise at_most")
    classes, _ = _classes(ids, vocab_size)
    last = at_least if at_most is None else at_most + 1
    states = torch.arange(last + 1)
    accept = states >= at_least if at_most is None else (states >= at_least) & (states <= at_most)
    return Automaton(torch.stack([states, (states + 1).clamp(max=last)], -1), classes.clamp(max=1), accept)


def fixed(sites: Mapping[int, int | Sequence[int]], length: int, vocab_size: int) -> Automaton:
    """Sequences with a given token, or one of several, at each of the given sites. It has as many states as the last
    of these sites; for one token per site a template is cheaper."""
    options = {site: {ids} if isinstance(ids, int) else set(ids) for site, ids in sites.items()}
    for site in options:
        if not 0 <= site < length:
            raise ValueError(f"fixed: site {site} is outside a sequence of length {length}")
    classes, number = _classes((token for ids in options.values() for token in ids), vocab_size)
    end = max(options, default=-1) + 1
    dead = end + 1
    step = torch.arange(1, end + 3).clamp(max=end).unsqueeze(-1).repeat(1, len(number) + 1)
    step[dead] = dead
    for site, ids in options.items():
        step[site] = dead
        step[site, [number[token] for token in ids]] = site + 1
    return Automaton(step, classes, torch.arange(end + 2) == end)
