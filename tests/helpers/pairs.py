"""Parameters of tests whose product is too many: all pairs of values, and the rest of the product as slow tests."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(*axes: Mapping[str, Any]) -> list[Any]:
    """The product of named values. Rows that no pair of values needs are marked slow."""
    rows = list(product(*axes))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set[Any]().union(*pairs.values()), set[tuple[str, ...]]()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(axes, row, strict=True)),
            id="-".join(row),
            marks=[pytest.mark.slow] * (row not in chosen),
        )
        for row in rows
    ]
