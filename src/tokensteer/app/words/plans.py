"""What was chosen for a row and why, by pilots (`auto`) or by timing (`compare --budget`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Reasons = Mapping[str, str]
"""The reason of each choice, such as that of "particles"."""
PILOTED = "In brackets what the others cost for the same error."


def by_title(rows: Iterable[tuple[str, int, Reasons]]) -> dict[str, Reasons]:
    """The reasons of rows (method, seed, reasons) by method and seeds. Seeds for which all is the same are joined, and
    rows without reasons left out."""
    seeds: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, None]] = {}
    for method, seed, reasons in rows:
        if reasons:
            seeds.setdefault((method, tuple(reasons.items())), {})[seed] = None
    return {
        f"{method}, seed{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}": dict(reasons)
        for (method, reasons), of in seeds.items()
    }


def compared(reasons: Reasons) -> bool:
    """Whether some reason has in brackets what others cost."""
    return any(reason.endswith(")") for reason in reasons.values())
