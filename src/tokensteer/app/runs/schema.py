"""The types of all values in the files of a run folder. Files may be damaged or hostile, so reading checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

LARGEST = 1e100
"""Numbers beyond this cannot be drawn."""


@dataclass(frozen=True)
class Kind:
    """A type of value: its description, and the test of a value."""

    words: str
    holds: Callable[[Any], bool]


def maybe(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


def listed(kind: Kind) -> Kind:
    return Kind(f"a list, each {kind.words}", lambda value: isinstance(value, list) and _all(kind, value))


def named(kind: Kind) -> Kind:
    """An object with any keys."""
    words = f"an object, each value {kind.words}"
    return Kind(words, lambda value: isinstance(value, dict) and _all(kind, cast("dict[str, Any]", value).values()))


def record(needed: Mapping[str, Kind], optional: Mapping[str, Kind]) -> Kind:
    """An object with these keys; other keys are ignored."""
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


def _all(kind: Kind, values: Any) -> bool:
    return all(map(kind.holds, values))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast("float", value)) <= LARGEST  # False for NaN


def _whole_from(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 2**63


TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", _is_number)
COUNT = Kind("a whole number, 0 or more", _whole_from(0))
SIZE = Kind("a whole number, 1 or more", _whole_from(1))
POSITIVE = Kind("a positive number", lambda value: _is_number(value) and value > 0)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
MEASURED = Kind("a mean and its standard error", lambda value: listed(maybe(NUMBER)).holds(value) and len(value) == 2)


def _of(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


JOB = {
    "method": TEXT,
    "particles": SIZE,
    "seed": COUNT,
    "budget": maybe(TEXT),
    "why": maybe(TEXT),
    "reward": maybe(TEXT),
    "kl": maybe(POSITIVE),
    "remask": SHARE,
    "order": maybe(TEXT),
    "extra": listed(TEXT),
}
RESOLVED = (
    {"steps": SIZE}
    | _of(COUNT, "seed", "draws", "goal")
    | _of(POSITIVE, "kl", "guidance", "clip", "learned_scale")
    | {"smoothing": SHARE}
    | _of(TEXT, "ramp", "trigger", "noise", "resample", "reward", "order")
)
CONFIG = _of(TEXT, "version", "command", "started", "weights", "device", "machine") | {
    "memory": maybe(TEXT),
    "versions": named(maybe(TEXT)),
    "jobs": listed(record({}, JOB)),
    "options": record({}, {}),
    "inputs": named(TEXT),
}
TRAINING = {"denoiser rows": COUNT, "seconds": NUMBER, "device": TEXT, "history": listed(named(maybe(NUMBER)))}
FAILED = _of(TEXT, "id", "error")
ROW = (
    _of(TEXT, "task", "method", "file")
    | _of(SIZE, "particles", "populations")
    | _of(COUNT, "seed")
    | _of(named(MEASURED), "metrics")
    | _of(maybe(NUMBER), "log_z", "log_z_error")
    | _of(named(COUNT), "rows", "saved")
    | _of(NUMBER, "seconds")
)
ROW_EXTRAS = (
    _of(TEXT, "about", "answer", "learned for", "picture")
    | _of(listed(TEXT), "dead prompts", "written")
    | _of(maybe(named(MEASURED)), "best")
    | {"job": record({}, JOB), "training": record(TRAINING, {}), "failed": listed(record(FAILED, {}))}
    | {"place": COUNT, "dead": COUNT, "seeds": SIZE, "plan": named(TEXT), "mask": COUNT, "pieces": named(TEXT)}
    | {"resolved": record({}, RESOLVED), "counts": named(SIZE)}
)
SAMPLE = _of(TEXT, "text", "prompt") | _of(maybe(NUMBER), "reward", "log_w", "judge", "weight")
