"""What the files of a run folder must hold. They may be damaged or come from others, so all is checked on reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

LARGEST = 1e100
"""Numbers beyond this cannot be drawn."""


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words, and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]


def maybe(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


def listed(kind: Kind) -> Kind:
    return Kind(
        f"a list, each {kind.words}", lambda v: isinstance(v, list) and all(map(kind.holds, cast("list[Any]", v)))
    )


def named(kind: Kind) -> Kind:
    """An object with any keys."""
    return Kind(
        f"an object, each value {kind.words}",
        lambda v: isinstance(v, dict) and all(map(kind.holds, cast("dict[str, Any]", v).values())),
    )


def record(needed: Mapping[str, Kind], optional: Mapping[str, Kind]) -> Kind:
    """An object with these keys; others are not looked at."""
    return Kind("an object", lambda value: fault(value, needed, optional) is None)


def fault(value: object, needed: Mapping[str, Kind], optional: Mapping[str, Kind]) -> str | None:
    """What is wrong with an object, None if nothing is."""
    if not isinstance(value, dict):
        return f"should be an object, and is {_shown(value)}"
    stored = cast("dict[str, Any]", value)
    for name, kind in {**needed, **optional}.items():
        if name in needed and name not in stored:
            return f"lacks {name!r}"
        if name in stored and not kind.holds(stored[name]):
            return f"has {_shown(stored[name])} for {name!r}, which should be {kind.words}"
    return None


def _shown(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 40 else f"{words[:37]}..."


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast("float", value)) <= LARGEST  # not for NaN


def _whole_from(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 2**63


ANY = Kind("anything", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", _is_number)
COUNT = Kind("a whole number, 0 or more", _whole_from(0))
SIZE = Kind("a whole number, 1 or more", _whole_from(1))
POSITIVE = Kind("a positive number", lambda value: _is_number(value) and value > 0)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
MEASURED = Kind(
    "a mean and its standard error",
    lambda v: (
        isinstance(v, list) and len(cast("list[Any]", v)) == 2 and all(map(maybe(NUMBER).holds, cast("list[Any]", v)))
    ),
)

JOB = {
    "method": TEXT,
    "particles": SIZE,
    "seed": COUNT,
    "kl": maybe(POSITIVE),
    "remask": SHARE,
    "extra": listed(TEXT),
}
CONFIG = {
    "version": TEXT,
    "command": TEXT,
    "started": TEXT,
    "weights": TEXT,
    "device": TEXT,
    "memory": maybe(TEXT),
    "machine": TEXT,
    "versions": named(maybe(TEXT)),
    "jobs": listed(record({}, JOB)),
}
TRAINING = {
    "denoiser rows": COUNT,
    "seconds": NUMBER,
    "device": TEXT,
    "history": listed(named(maybe(NUMBER))),
}
FAILED = {"id": TEXT, "error": TEXT}
ROW = {
    "task": TEXT,
    "method": TEXT,
    "particles": SIZE,
    "populations": SIZE,
    "seed": COUNT,
    "metrics": named(MEASURED),
    "log_z": maybe(NUMBER),
    "log_z_error": maybe(NUMBER),
    "rows": named(COUNT),
    "saved": named(COUNT),
    "seconds": NUMBER,
    "file": TEXT,
}
ROW_EXTRAS = {
    "about": TEXT,
    "answer": TEXT,
    "best": maybe(named(MEASURED)),
    "job": record({}, JOB),
    "training": record(TRAINING, {}),
    "failed": listed(record(FAILED, {})),
    "dead": COUNT,
    "dead prompts": listed(TEXT),
    "seeds": SIZE,
    "picture": TEXT,
    "written": listed(TEXT),
}
SAMPLE = {
    "text": TEXT,
    "prompt": TEXT,
    "reward": maybe(NUMBER),
    "log_w": maybe(NUMBER),
    "judge": maybe(NUMBER),
    "weight": maybe(NUMBER),
}
