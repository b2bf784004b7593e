"""JSON of a small schema as a pattern for `regex`.

The subset of JSON Schema: `object` with `properties` (all of them, in their order), `array` with `items`, `minItems`
and `maxItems`, `string` with `minLength` and `maxLength`, `integer` with `minimum` and `maximum`, `boolean`, `null`,
`enum`, `const` and `anyOf`. Strings have no escapes. Between tokens of JSON there is at most one space.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

Schema = Mapping[str, Any]

KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "integer": ("minimum", "maximum"),
    "boolean": (),
    "null": (),
}
NOTES = ("title", "description", "$schema", "$id", "default", "examples", "$comment")
SPACE = "\\ ?"


def json_pattern(schema: Schema, alphabet: Sequence[str], strict: bool = False) -> str:
    """A pattern of the texts that are JSON of this schema, over single characters.

    Many tokenizers put a space before every word and mark. So strings may begin and end with a space, and those of the
    schema may have one on either side of a mark; `read_json` takes these away. With `strict` they are as given."""
    written = SPACE + _Writer(frozenset(alphabet), strict).value(schema, "$") + SPACE
    return written if " " in alphabet else written.replace(SPACE, "")


@dataclass(frozen=True)
class _Writer:
    alphabet: frozenset[str]
    strict: bool

    def value(self, schema: object, at: str) -> str:
        """The pattern of a schema; `at` is its place in the whole, for errors."""
        if not isinstance(schema, Mapping):
            raise ValueError(f'the schema at {at} must be an object such as {{"type": "integer"}}, got {schema!r}')
        known = cast("Schema", schema)
        if "enum" in known or "const" in known:
            self._check(known, ("enum", "const", "type"), at)
            return self._one_of(_listed(known.get("enum", [known.get("const")]), at, "enum"), at)
        if "anyOf" in known:
            self._check(known, ("anyOf",), at)
            options = _listed(known["anyOf"], at, "anyOf")
            return "(" + "|".join(self.value(option, f"{at}.anyOf[{k}]") for k, option in enumerate(options)) + ")"
        kind = known.get("type")
        if kind not in KEYWORDS:
            raise ValueError(
                f"the schema at {at} has the type {kind!r}: there are {', '.join(KEYWORDS)}, and enum, const and anyOf "
                "(for others, and for schemas that contain themselves, write a grammar)"
            )
        self._check(known, ("type", *KEYWORDS[kind]), at)
        write: dict[str, Callable[[Schema, str], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "boolean": lambda _, at: self._one_of([True, False], at),
            "null": lambda _, at: self._one_of([None], at),
        }
        return write[kind](known, at)

    def _check(self, schema: Schema, keywords: Sequence[str], at: str) -> None:
        for keyword in schema:
            if keyword not in keywords and keyword not in NOTES:
                raise ValueError(f"the schema at {at} has {keyword!r}, which is not supported: leave it out")

    def _object(self, schema: Schema, at: str) -> str:
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            raise ValueError(f"the schema at {at} must have properties as an object, got {properties!r}")
        table = cast("Mapping[str, object]", properties)
        for name in schema.get("required", ()):
            if name not in table:
                raise ValueError(f"the schema at {at} requires {name!r}, which is not among its properties: add it")
        pairs = [
            self._quoted(name, f"{at}.{name}") + SPACE + self._mark(":", at) + SPACE + self.value(part, f"{at}.{name}")
            for name, part in table.items()
        ]
        inner = (SPACE + self._mark(",", at) + SPACE).join(pairs) if pairs else ""
        return self._mark("{", at) + SPACE + inner + SPACE + self._mark("}", at)

    def _array(self, schema: Schema, at: str) -> str:
        least, most = _bounds(schema, "minItems", "maxItems", at)
        if "items" not in schema:
            raise ValueError(f"the schema at {at} has no items: give the schema of an item")
        begin, end = self._mark("[", at) + SPACE, self._mark("]", at)
        item = self.value(schema["items"], f"{at}[]")
        if most == 0:
            return begin + end
        more = f"({SPACE}{self._mark(',', at)}{SPACE}{item}){_repeat(max(0, least - 1), most and most - 1)}"
        some = f"{item}{more}{SPACE}"
        return begin + (some if least else f"({some})?") + end

    def _string(self, schema: Schema, at: str) -> str:
        least, most = _bounds(schema, "minLength", "maxLength", at)
        never = sorted(c for c in self.alphabet if c in '"\\\ufffd' or ord(c[0]) < 32 or len(c) != 1)
        any_character = "[^" + "".join(map(_escaped, never)) + "]"
        quote = self._mark('"', at)
        if self.strict:
            return quote + any_character + _repeat(least, most) + quote
        if most == 0:
            return quote + SPACE + quote
        # The first and the last character are no spaces, so that lengths hold after `read_json`.
        edge = "[^" + "".join(map(_escaped, [*never, " "])) + "]" if " " in self.alphabet else any_character
        longer = f"({any_character}{_repeat(max(0, least - 2), most and most - 2)}{edge})"
        inner = edge + ("" if most == 1 else longer if least > 1 else longer + "?")
        return quote + SPACE + (inner + SPACE if least else f"({inner}{SPACE})?") + quote

    def _integer(self, schema: Schema, at: str) -> str:
        low, high = (_whole(schema, name, at) for name in ("minimum", "maximum"))
        if low is not None and high is not None and low > high:
            raise ValueError(f"the schema at {at} has minimum {low} above maximum {high}: swap them")
        options: list[str] = []
        if high is None or high >= 0:
            options += natural_numbers(max(0, 0 if low is None else low), high)
        if low is None or low < 0:
            below = natural_numbers(max(1, 1 if high is None else -high), None if low is None else -low)
            options += [_escaped("-") + option for option in below]
        usable = [option for option in options if self._spelt(option)]
        if not usable:
            raise ValueError(f"the alphabet lacks the digits of the integer at {at}")
        return "(" + "|".join(usable) + ")"

    def _spelt(self, option: str) -> bool:
        return ("-" in self.alphabet or not option.startswith("\\-")) and set("0123456789") <= self.alphabet

    def _one_of(self, values: Sequence[object], at: str) -> str:
        return "(" + "|".join(self._constant(value, at) for value in values) + ")"

    def _constant(self, value: object, at: str) -> str:
        if isinstance(value, str):
            return self._quoted(value, at)
        if value is None or isinstance(value, bool | int):
            return "".join(self._mark(c, at) for c in json.dumps(value))
        raise ValueError(f"the schema at {at} has the value {value!r}: enum takes texts, integers, booleans and null")

    def _quoted(self, text: str, at: str) -> str:
        """A text of the schema between quotes."""
        if any(c in '"\\' or ord(c) < 32 for c in text):
            raise ValueError(f"the text {text!r} at {at} needs an escape, and strings have none here: change it")
        if self.strict:
            inner = "".join(self._mark(c, at) for c in text)
        else:
            inner = SPACE + "".join(self._loose(text.strip(), at)) + SPACE
        return self._mark('"', at) + inner + self._mark('"', at)

    def _loose(self, text: str, at: str) -> list[str]:
        """The characters of a text, with a space allowed on either side of a mark."""
        found: list[str] = []
        for before, c in zip(("", *text), text, strict=False):
            beside_mark = before not in ("", " ") and c != " " and not (before.isalnum() and c.isalnum())
            optional = c == " " and not before.isalnum()
            found.append((SPACE if beside_mark else "") + (SPACE if optional else self._mark(c, at)))
        return found

    def _mark(self, c: str, at: str) -> str:
        if c not in self.alphabet:
            raise ValueError(f"no token has the character {c!r} that the schema needs at {at}: choose another text")
        return _escaped(c)


def _escaped(c: str) -> str:
    return "\\" + c


def _repeat(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else max(0, most)}}}"


def _listed(values: object, at: str, keyword: str) -> Sequence[object]:
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"the schema at {at} must have a list of at least one value as {keyword}, got {values!r}")
    return cast("Sequence[object]", values)


def _whole(schema: Schema, keyword: str, at: str) -> int | None:
    value = schema.get(keyword)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"the schema at {at} must have a whole number as {keyword}, got {value!r}")
    return value


def _bounds(schema: Schema, low: str, high: str, at: str) -> tuple[int, int | None]:
    least, most = _whole(schema, low, at) or 0, _whole(schema, high, at)
    if least < 0 or (most is not None and most < least):
        raise ValueError(f"the schema at {at} has {low} = {least} and {high} = {most}: raise {high}")
    return least, most


# ---- whole numbers in a range, without leading zeros


def natural_numbers(low: int, high: int | None) -> list[str]:
    """Patterns that together match the numbers from low >= 0 to high, or all from low."""
    if high is None:
        digits = len(str(low))
        return [*natural_numbers(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"]
    if low > high:
        return []
    found: list[str] = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        found += _same_length(str(least), str(min(high, 10**digits - 1)))
    return found


def _same_length(low: str, high: str) -> list[str]:
    """Patterns of the digit strings from low to high, of the same length."""
    if not low:
        return [""]
    if low == "0" * len(low) and high == "9" * len(high):
        return [f"[0-9]{{{len(low)}}}"]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _same_length(low[1:], high[1:])]
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    found = [low[0] + rest for rest in _same_length(low[1:], nines)]
    if int(high[0]) - int(low[0]) > 1:
        found.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{len(low) - 1}}}")
    return found + [high[0] + rest for rest in _same_length(zeros, high[1:])]


# ---- back to values


def read_json(text: str, schema: Schema) -> Any:
    """The value of a JSON text, without the spaces that a tokenizer has put at the ends of strings and beside marks."""
    return _tidied(json.loads(text), schema)


def _tidied(value: Any, schema: Schema) -> Any:
    if "anyOf" in schema:
        found = (_tidied(value, option) for option in schema["anyOf"])
        return next((tidy for tidy in found if tidy != value), value)
    if isinstance(value, dict):
        table, named = cast("dict[str, Any]", value), {_squeezed(name): name for name in schema.get("properties", {})}
        pairs = ((named.get(_squeezed(key), key), part) for key, part in table.items())
        return {key: _tidied(part, schema.get("properties", {}).get(key, {})) for key, part in pairs}
    if isinstance(value, list):
        return [_tidied(part, schema.get("items", {})) for part in cast("list[Any]", value)]
    if not isinstance(value, str):
        return value
    options = [option for option in schema.get("enum", [schema.get("const")]) if isinstance(option, str)]
    return next((option for option in options if _squeezed(option) == _squeezed(value)), value.strip())


def _squeezed(text: str) -> str:
    return "".join(text.split())
