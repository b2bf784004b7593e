"""Names that people type: looked up, and if there is no such name, told what there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

Value = TypeVar("Value")


def choose(name: str, known: Mapping[str, Value], what: str) -> Value:
    """known[name], or an error that lists what exists, the nearest spelling first."""
    if name not in known:
        raise ValueError(unknown(name, known, what))
    return known[name]


def unknown(name: str, known: Iterable[str], what: str) -> str:
    near = get_close_matches(name.lower().replace("_", "-"), list(known), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"there is no {what} called {name!r}.{hint} There are: {', '.join(known)}"
