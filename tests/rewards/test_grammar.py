"""Grammars, JSON schemas and sparse passes over sites, against brute force and enumeration."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from narrow import some, untyped

import tokensteer as ts
from tokensteer.rewards import (
    Automaton,
    both,
    constrain,
    contains,
    ended,
    grammar,
    json_pattern,
    negate,
    read_json,
    regex,
)
from tokensteer.rewards.constraints import transitions as passes
from tokensteer.rewards.constraints.json_schema import natural_numbers
from tokensteer.rewards.constraints.masses import Masses
from tokensteer.rewards.constraints.transitions import Transitions
from tokensteer.rewards.text import json_of, lift
from tokensteer.tasks.common.task import SHIPPED
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.testing import all_sequences

torch.set_num_threads(1)


def law(seed: int, *shape: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


def texts(alphabet: str, length: int) -> list[str]:
    return ["".join(letters) for letters in itertools.product(alphabet, repeat=length)]


def accepted(automaton: Automaton, words: list[str], alphabet: str) -> list[bool]:
    return automaton.accepts(torch.tensor([[alphabet.index(c) for c in word] for word in words])).tolist()


# ---- grammars


def nesting(word: str) -> int:
    """How deep parentheses are nested, -1 if they do not balance."""
    depth = most = 0
    for c in word:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if depth < 0:
            return -1
        most = max(most, depth)
    return most if depth == 0 else -1


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "rules",
    [
        {"list": r"a*(<group>a*)*", "group": r"\(<list>\)"},
        {"list": r"(a|<group>)*", "group": r"\((a|<group>)*\)"},
    ],
    ids=["mutual", "of itself"],
)
def test_parentheses_to_a_depth(rules, depth):
    """In the first grammar the list is open once more than the group is."""
    most = depth - 1 if "<list>" in rules["group"] else depth
    automaton = grammar(rules, "()a", depth=depth)
    for length in range(1, 9):
        words = texts("()a", length)
        expected = [0 <= nesting(word) <= most for word in words]
        assert accepted(automaton, words, "()a") == expected, length


def test_recursion_on_the_left_on_the_right_and_through_empty_rules():
    words = [word for length in range(1, 8) for word in texts("ab", length)]
    left = grammar({"many": "<many>b|a"}, "ab", depth=4)
    right = grammar({"many": "b<many>|a"}, "ab", depth=4)
    empty = grammar({"some": "<none>*a(<none>b)?<none>", "none": "(<more>)*", "more": "b?<none>"}, "ab", depth=2)
    for automaton, pattern in ((left, "ab{0,3}"), (right, "b{0,3}a"), (empty, "b*ab*")):
        for word in words:
            expected = re.fullmatch(pattern, word) is not None
            if automaton is empty and word.count("b") > 2:
                continue  # how many are read depends on the depth
            assert accepted(automaton, [word], "ab") == [expected], (pattern, word)
    assert negate(empty).accepts(torch.tensor([[1, 1]])).all()


def test_json_of_any_shape_against_a_parser():
    """All words of up to five characters: those that Python parses and in which values are at most two deep."""
    alphabet = '[]{}",:1'
    rules = {
        "value": '<object>|<array>|""|1',
        "object": r'\{("":<value>(,"":<value>)*)?\}',
        "array": r"\[(<value>(,<value>)*)?\]",
    }
    automaton = grammar(rules, alphabet, depth=2)

    def deep(value) -> int:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + max(map(deep, parts), default=0)

    def expected(word: str) -> bool:
        if re.search(r'11|"[^"]+"', word) or word.count('"') % 2:
            return False
        try:
            return deep(json.loads(word)) <= 2
        except ValueError:
            return False

    for length in (1, 2, 3, 4, 5):
        words = texts(alphabet, length)
        assert accepted(automaton, words, alphabet) == [expected(word) for word in words], length
    longer = ['{"":[1]}', '{"":1,"":""}', "[[[]]]", "[1,[1]]", '{"":{},"":[]}']
    assert accepted(automaton, longer[1:2], alphabet) == [True]
    assert [accepted(grammar(rules, alphabet, depth=3), [word], alphabet)[0] for word in longer] == [True] * 5
    assert [accepted(automaton, [word], alphabet)[0] for word in longer] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grammar({}, "ab"), "give at least one rule"),
        (lambda: grammar({"x": "a"}, "ab"), "cannot be called 'x'"),
        (lambda: grammar({"list": "a<item>"}, "ab"), r"the rule list of the grammar.*unknown token 'item'"),
        (lambda: grammar({"list": "a("}, "ab"), "the rule list of the grammar"),
        (lambda: grammar({"list": r"a<list>"}, "ab"), "raise depth"),
        (lambda: grammar({"list": "a"}, "ab", depth=0), "depth"),
        (lambda: grammar({"list": "a"}, "aa"), "distinct"),
        (lambda: grammar({"list": "a"}, "ab", vocab_size=1), "smaller than the alphabet"),
        (lambda: ended(contains([0], 3), []), "ids of the tokens that end"),
        (lambda: ended(contains([0], 3), [3]), r"0\.\.2"),
    ],
)
def test_refusals_of_grammars(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_ended_by_padding():
    automaton, x = ended(regex("a+b?", "ab", vocab_size=4), [2, 3]), all_sequences(4, 5)
    words = ["".join("ab.$"[k] for k in row) for row in x.tolist()]
    assert automaton.accepts(x).tolist() == [re.fullmatch(r"a+b?[.$]*", word) is not None for word in words]


# ---- JSON schemas


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 9), (7, 7), (3, 1204), (10, 99), (95, 101), (999, 1000), (5, 4)])
def test_natural_numbers(low, high):
    pattern = re.compile("|".join(natural_numbers(low, high)) or "never")
    assert [k for k in range(1300) if pattern.fullmatch(str(k))] == list(range(low, min(high, 1299) + 1))
    assert not pattern.fullmatch("007")
    endless = re.compile("|".join(natural_numbers(low, None)))
    assert [k for k in range(1300) if endless.fullmatch(str(k))] == list(range(low, 1300))


FLAT = {"type": "object", "properties": {"a": {"type": "integer", "minimum": -3, "maximum": 12}}}
NESTED = {
    "type": "object",
    "title": "a film",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 4},
        "seen": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["good", "so-so", 7, None]}, "minItems": 1, "maxItems": 2},
        "by": {"type": "object", "properties": {"age": {"type": "integer", "minimum": 8}}, "required": ["age"]},
        "more": {"anyOf": [{"type": "null"}, {"const": "yes"}, {"type": "array", "items": FLAT}]},
    },
}
CHARACTERS = "".join(map(chr, range(32, 127)))


def satisfies(value, schema) -> bool:
    """A validator of the subset, written apart from the code that is tested."""
    if "anyOf" in schema:
        return any(satisfies(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        return any(value == option and type(value) is type(option) for option in options)
    match schema["type"]:
        case "object":
            keys = list(schema["properties"])
            fits = isinstance(value, dict) and list(value) == keys
            return fits and all(satisfies(value[key], schema["properties"][key]) for key in keys)
        case "array":
            fits = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
            return fits and all(satisfies(part, schema["items"]) for part in value)
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
        case "integer":
            fits = isinstance(value, int) and not isinstance(value, bool)
            return fits and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None


VALUES = [
    {"name": "ab", "seen": True, "tags": ["good"], "by": {"age": 8}, "more": None},
    {"name": "a, b", "seen": False, "tags": ["so-so", 7], "by": {"age": 100}, "more": [{"a": -3}, {"a": 12}]},
    {"name": "{{}}", "seen": False, "tags": [None, None], "by": {"age": 17}, "more": "yes"},
    {"name": "ab", "seen": False, "tags": [7], "by": {"age": 9}, "more": []},
]


def changed(value: dict, **other) -> dict:
    return {**value, **other}


@pytest.mark.parametrize("strict", [True, False])
def test_a_nested_schema(strict):
    automaton = regex(json_pattern(NESTED, CHARACTERS, strict), CHARACTERS)

    def accepts(text: str) -> bool:
        return accepted(automaton, [text], CHARACTERS)[0]

    for value in VALUES:
        assert satisfies(value, NESTED)
        for separators in ((",", ":"), (", ", ": "), (" , ", " : ")):
            text = json.dumps(value, separators=separators)
            assert accepts(text), text
            assert read_json(text, NESTED) == value
    wrong = [
        changed(VALUES[0], name="a"), changed(VALUES[0], name="abcde"), changed(VALUES[0], seen=1),
        changed(VALUES[0], tags=[]), changed(VALUES[0], tags=[7, 7, 7]), changed(VALUES[0], tags=["bad"]),
        changed(VALUES[0], by={"age": 7}), changed(VALUES[0], by={}), changed(VALUES[0], more=[{"a": 13}]),
        changed(VALUES[0], more="no"), changed(VALUES[0], extra=1), {"seen": True},
    ]  # fmt: skip
    for value in wrong:
        assert not satisfies(value, NESTED)
        assert not accepts(json.dumps(value)), value
    spaced = json.dumps(VALUES[1]).replace('"so-so"', '" so - so "').replace('"seen"', '" seen "')
    assert accepts(spaced) != strict
    assert read_json(spaced, NESTED) == VALUES[1]


def test_draws_of_a_nested_schema_parse_and_satisfy_it():
    automaton = regex(json_pattern(NESTED, CHARACTERS), CHARACTERS)
    for length in (70, 90):
        drawn = automaton.sample(law(1, 1, length, 95, scale=1.0).expand(60, -1, -1), torch.Generator().manual_seed(0))
        for row in drawn.tolist():
            text = "".join(CHARACTERS[k] for k in row)
            assert satisfies(read_json(text, NESTED), NESTED), text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "number"}, r"at \$ has the type 'number'"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, r"at \$\.a has the type 'text'"),
        ({"type": "string", "pattern": "a"}, "has 'pattern', which is not supported"),
        ({"type": "array"}, "has no items"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "raise maxItems"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum 3 above maximum 2"),
        ({"type": "integer", "minimum": 0.5}, "whole number as minimum"),
        ({"enum": []}, "at least one value"),
        ({"enum": [1.5]}, "enum takes texts"),
        ({"enum": ['a"b']}, "needs an escape"),
        (
            {"type": "object", "properties": {"ä": {"type": "null"}}},
            r"the character 'ä' that the schema needs at \$\.ä",
        ),
        ({"type": "object", "properties": {}, "required": ["a"]}, "requires 'a'"),
        ([], "must be an object"),
    ],
)
def test_refusals_of_schemas(schema, message):
    with pytest.raises(ValueError, match=message):
        json_pattern(untyped(schema), CHARACTERS)


# ---- tokens of several characters

PIECES = ["{", '{"a', '":', " 1", "2", "-", "}", '"', "a", " "]


def test_tokens_that_span_characters_against_a_parser():
    """All sequences of five tokens over ten pieces: accepted if and only if they parse and satisfy the schema."""
    number = {c: k for k, c in enumerate(sorted(set("".join(PIECES))))}
    characters = regex(r' ?\{ ?"a" ?: ?(\-?[12]|12) ?\} ?', list(number))
    automaton = lift(characters, [[number[c] for c in piece] for piece in PIECES])
    x = all_sequences(len(PIECES), 5)
    expected: list[bool] = []
    for row in x.tolist():
        text = "".join(PIECES[k] for k in row)
        try:
            value = json.loads(text) if "{" in text and "}" in text else None
        except ValueError:
            value = None
        number_of_a = value["a"] if isinstance(value, dict) and list(value) == ["a"] else None
        expected.append(type(number_of_a) is int and number_of_a in (-2, -1, 1, 2, 12) and "  " not in text)
    assert sum(expected) > 5
    assert automaton.accepts(x).tolist() == expected


# ---- passes over sites

RULES = {"list": r"\((<item>(,<item>)*)?\)", "item": "[ab]|<list>"}
LISTS = grammar(RULES, "(),ab", vocab_size=6, depth=2)  # the last token is the mask


def test_transitions_are_fewer_than_states_and_classes():
    sparse = LISTS.transitions
    states, classes = LISTS.step.shape
    assert len(sparse.target) < states * classes / 2
    wide = regex("[a-y]{0,40}z", "abcdefghijklmnopqrstuvwxyz").transitions
    assert tuple(wide.members.shape) == (2, 2)
    assert len(wide.target) == 40 + 41


def masses_of(automaton: Automaton, log_p: torch.Tensor, x: torch.Tensor, certain: torch.Tensor) -> Masses:
    labels = automaton.transitions.masses(automaton.class_mass(log_p))
    return Masses(labels, certain, automaton.classes[x])


def certain_law(log_p: torch.Tensor, x: torch.Tensor, certain: torch.Tensor) -> torch.Tensor:
    point = torch.full_like(log_p, -math.inf).scatter(-1, x.unsqueeze(-1), 0.0)
    return torch.where(certain.unsqueeze(-1), point, log_p)


@pytest.mark.parametrize("faint", [False, True], ids=["linear", "in logs"])
def test_chances_with_certain_sites_against_enumeration(faint, monkeypatch):
    if faint:
        monkeypatch.setattr(passes, "FAINT", 1e-4)  # some of the rows
    log_p, x = law(1, 24, 6, 6), torch.tensor([[0, 3, 2, 4, 1, 1]]).expand(24, -1)
    certain = torch.rand(24, 6, generator=torch.Generator().manual_seed(2)) < 0.3
    every = all_sequences(6, 6)
    table = certain_law(log_p, x, certain)
    expected = table[:, torch.arange(6), every[LISTS.accepts(every)]].sum(-1).logsumexp(-1)
    sparse, masses = LISTS.transitions, masses_of(LISTS, log_p, x, certain)
    torch.testing.assert_close(sparse.log_accept(masses), expected, rtol=0, atol=1e-11)
    messages = sparse.messages(masses)
    torch.testing.assert_close(messages.log_v, expected, rtol=0, atol=1e-11)
    assert messages.in_logs is not None  # of impossible rows, and of all faint ones
    assert (messages.in_logs.shape[-1] > int((expected == -math.inf).sum())) == faint
    order = torch.tensor([3, 3, 0, 23, 7])
    joined = messages.take(order).join(messages.take(order[:2]))
    again = torch.cat([order, order[:2]])
    torch.testing.assert_close(joined.log_v, expected[again])
    for rows, of in ((joined, again), (messages, torch.arange(24))):
        few = masses.take(of)
        labels = sparse.sample(few, rows, torch.Generator().manual_seed(4))
        assert labels.shape == (len(of), 6)


@pytest.mark.parametrize("faint", [False, True], ids=["linear", "in logs"])
def test_a_pass_that_begins_where_sites_changed(faint, monkeypatch):
    """Up to a site of each row tokens become certain; behind it, the messages from before hold."""
    if faint:
        monkeypatch.setattr(passes, "FAINT", 1e-4)
    generator = torch.Generator().manual_seed(3)
    log_p, x = law(1, 24, 6, 6), torch.tensor([[0, 3, 2, 4, 1, 1]]).expand(24, -1)
    certain, last = torch.rand(24, 6, generator=generator) < 0.3, torch.randint(6, (24,), generator=generator)
    opened = certain | ((torch.rand(24, 6, generator=generator) < 0.5) & (torch.arange(6) <= last.unsqueeze(-1)))
    row = torch.randperm(24, generator=generator)
    messages = LISTS.transitions.messages(masses_of(LISTS, log_p[row], x, certain[row]))
    after = masses_of(LISTS, log_p, x, opened)
    found = LISTS.transitions.log_accept_after(after, last, messages, row.argsort())
    torch.testing.assert_close(found, LISTS.transitions.log_accept(after), rtol=0, atol=1e-12)
    assert int(found.isfinite().sum()) > 5


@pytest.mark.parametrize("faint", [False, True], ids=["linear", "in logs"])
def test_draws_against_enumeration(faint, monkeypatch):
    if faint:
        monkeypatch.setattr(passes, "FAINT", 2.0)
    log_p, every, draws = law(5, 1, 7, 6, scale=1.0), all_sequences(6, 7), 60_000
    p = log_p[0, torch.arange(7), every].sum(-1).exp() * LISTS.accepts(every)
    p = p / p.sum()
    drawn = LISTS.sample(log_p.expand(draws, -1, -1), torch.Generator().manual_seed(6))
    assert LISTS.accepts(drawn).all()
    seen = torch.bincount((drawn * 6 ** torch.arange(6, -1, -1)).sum(-1), minlength=len(every))
    often = draws * p >= 20
    z = (seen - draws * p)[often] / (draws * p * (1 - p))[often].sqrt()
    assert int(often.sum()) > 10
    assert float(z.abs().max()) < 4.5


def test_labels_of_single_classes_where_little_is_shared():
    """A table without structure: the sparse form falls back to classes, and counts the same."""
    generator = torch.Generator().manual_seed(0)
    step = torch.randint(30, (30, 3), generator=generator)
    automaton = Automaton(step, torch.tensor([0, 1, 2]), torch.rand(30, generator=generator) < 0.3)
    sparse, log_p, every = Transitions.of(automaton.step, automaton.accept), law(7, 4, 6, 3), all_sequences(3, 6)
    expected = log_p[:, torch.arange(6), every[automaton.accepts(every)]].sum(-1).logsumexp(-1)
    torch.testing.assert_close(automaton.log_accept(log_p), expected, rtol=0, atol=1e-11)
    assert sparse.members.shape[0] == 3


# ---- steering


def test_lists_of_a_factorised_model_have_equal_weights():
    log_p = torch.cat([law(8, 7, 5), torch.full((7, 1), -math.inf)], -1)
    model = ts.Diffusion(
        lambda x, t: log_p.expand(len(x), -1, -1), ts.Ancestral(5), ts.uniform_steps(5), ts.template(7, 5)
    )
    every = all_sequences(5, 7)
    exact = float(log_p[torch.arange(7), every[LISTS.accepts(every)]].sum(-1).logsumexp(0))
    result = ts.smc(constrain(model, LISTS), 20, 3, generator=torch.Generator().manual_seed(0))
    assert LISTS.accepts(result.samples.flatten(0, 1)).all()
    assert float((result.log_z - exact).abs().max()) < 1e-9


class Mixed(torch.nn.Module):
    """A small network of each site's neighbours, and of time if it is asked to be."""

    def __init__(self, timed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.timed = torch.nn.Embedding(6, 8), torch.nn.Conv1d(8, 6, 5, padding=2), timed

    def forward(self, x, t):
        return self.mix(self.embed(x).mT).mT * (1.0 + (t if self.timed else 0.0))


@pytest.mark.parametrize("timed", [False, True], ids=["timeless", "timed"])
@pytest.mark.parametrize("tilted", [False, True], ids=["hard", "soft"])
def test_what_is_recalled_is_what_would_be_computed(timed, tilted):
    """Samples and weights are those without a memory, to the last bit but for rounding."""
    network = Mixed(timed)
    net = network if timed else lambda x: network(x, 0.0)
    denoiser = ts.from_logits(net, 5, ignores_time=not timed)
    canvas = torch.stack([ts.template(9, 5, [0]), ts.template(9, 5, [])])
    model = ts.Diffusion(denoiser, ts.Ancestral(5), ts.uniform_steps(6), canvas)
    tilt = ts.Tilt(lambda x: (x == 3).double().sum(-1), 1.0, draws=2) if tilted else None
    steering = constrain(model, LISTS, tilt)
    ahead = untyped(some(some(steering.twist).log_lookahead))
    proposal = untyped(steering.proposal)
    assert ahead.recall is proposal.recall
    forgetful = replace(
        steering,
        twist=replace(some(steering.twist), log_lookahead=replace(ahead, recall=None)),
        proposal=replace(proposal, recall=None),
    )
    found = [ts.smc(path, 8, 4, generator=torch.Generator().manual_seed(3)) for path in (steering, forgetful, steering)]
    for other in found[1:]:
        assert torch.equal(found[0].samples, other.samples)
        torch.testing.assert_close(found[0].log_w, other.log_w, rtol=0, atol=1e-4)
    assert LISTS.accepts(found[0].samples.flatten(0, 1)).all()


def test_json_in_the_shipped_vocabulary():
    """Pieces of words, with spaces before them: every draw parses, raw and tidied, and has the values of the schema."""
    vocabulary = WordPiece.read(SHIPPED / "text-vocab.txt")
    schema = {
        "type": "object",
        "properties": {
            "film": {"type": "string", "minLength": 1, "maxLength": 30},
            "rating": {"type": "integer", "minimum": 1, "maximum": 10},
            "genre": {"enum": ["comedy", "sci-fi"]},
        },
    }
    automaton = json_of(schema, vocabulary)
    log_p = torch.zeros(1, 1, 8000).masked_fill(torch.arange(8000) == vocabulary.mask_id, -math.inf).log_softmax(-1)
    ids = automaton.sample(log_p.expand(20, 32, -1), torch.Generator().manual_seed(0)).tolist()
    for raw, tidy in zip(
        vocabulary.batch_decode(ids, clean_up_tokenization_spaces=False), map(vocabulary.decode, ids), strict=True
    ):
        assert satisfies(read_json(raw, schema), schema), raw
        assert satisfies(read_json(tidy, schema), schema), tidy
    sparse = automaton.transitions
    assert len(sparse.target) < automaton.step.numel() / 5
    with pytest.raises(ValueError, match="cannot be met"):
        constrain(_uniform(vocabulary, 8), automaton)
    short = both(automaton, contains([vocabulary.ids["movie"]], 8000))
    assert short.possible(32)


def _uniform(vocabulary: WordPiece, length: int) -> ts.Diffusion:
    denoiser = ts.from_logits(lambda x: torch.zeros(*x.shape, len(vocabulary)), vocabulary.mask_id, ignores_time=True)
    canvas = ts.template(length, vocabulary.mask_id)
    return ts.Diffusion(denoiser, ts.Ancestral(vocabulary.mask_id), ts.uniform_steps(2), canvas)
