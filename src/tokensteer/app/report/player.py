"""The particle player: the stored states of a population, step by step.

The page holds differences, from which its script rebuilds every state: the particles at the start, and for each step
the sites where a particle differs from its parent. A site that opens once is then written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokensteer.app.report.folder import Row
from tokensteer.app.report.lists import floats, ints
from tokensteer.app.report.markup import data, element, most_within, pickers, text
from tokensteer.app.report.words import most_telling
from tokensteer.app.words.numbers import plural
from tokensteer.core.particles.resampling import weights
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.looks import Image, Letters, Look

MOST = 64  # with more particles than this, tiles cannot be told apart
BYTES = 2_000_000  # the size of all populations together, at most
NOTE = (
    "The particles of one population at every step, before any resampling there. A bar is a weight, as a share of the "
    "heaviest; ticks above the track mark where resampling struck. Press a particle to pin it and see its ancestors "
    "and descendants. Among the particles, left and right arrows change the step, up and down the particle; "
    "Enter pins, Escape unpins."
)


def part(
    rows: Sequence[Row], look: Look | None, name: Callable[[Row], str], colours: Mapping[str, int]
) -> tuple[str, str]:
    """The note and the markup of the player; "" if no states were stored."""
    stored = [row for row in rows if row.result.states is not None]
    small = [row for row in stored if row.particles <= MOST]
    drawn = [_populations(row, look) for row in small]
    kept = [(row, some[:most]) for row, some, most in zip(small, drawn, most_within(drawn, BYTES), strict=True) if most]
    left = len(stored) - len(kept)
    said = f"{plural(left, 'row')} {'has' if left == 1 else 'have'} more particles or sites than can be shown here."
    if not kept:
        return "", text("p", said, 'class="note"') if left else ""
    first = most_telling([row for row, _ in kept])
    holders = ""
    for k, (row, some) in enumerate(kept):
        for b, facts in enumerate(some):
            kind = f'class="states" data-row="{k}" data-population="{b}" data-colour="c{colours[row.method]}"'
            holders += element("div", f'{kind} data-states="{facts}" hidden')
    picks = pickers([name(row) for row, _ in kept], [len(some) for _, some in kept], first)
    controls = element("div", 'class="controls"', picks)
    return f"{NOTE} {said}" if left else NOTE, element("div", 'class="player"', controls, _transport(), holders)


def _transport() -> str:
    """The slider with its buttons, a line that describes the step, and the places that the script fills."""
    slider = '<input type="range" min="0" max="0" value="0" step="1" aria-label="Step">'
    return (
        element(
            "div",
            'class="transport"',
            text("button", "Play", 'type="button" class="play"'),
            element("div", 'class="slide"', '<div class="marks" aria-hidden="true"></div>', slider),
            text("button", "Unpin", 'type="button" class="unpin" disabled'),
        )
        + '<p class="said" aria-live="polite"></p>'
        + '<div class="traced"></div>'
        + '<div class="tiles" role="group" aria-label="Particles"></div>'
        + element("noscript", "", text("p", "The player needs JavaScript.", 'class="note"'))
    )


def _populations(row: Row, look: Look | None) -> list[str]:
    """The facts of each stored population, as attributes."""
    assert row.result.states is not None
    kind = _kind(row, look)
    return [data({**kind, **facts(row.result, b)}) for b in range(row.result.states.shape[1])]


def _kind(row: Row, look: Look | None) -> dict[str, Any]:
    """How the script shows a state: as an image, letters, pieces of text or numbers."""
    match look:
        case Image(side) if side * side == row.result.samples.shape[-1]:
            return {"kind": "image", "side": side, "mask": 2 if row.mask is None else row.mask}
        case Letters(alphabet=alphabet):
            return {"kind": "letters", "alphabet": alphabet, "mask": len(alphabet) if row.mask is None else row.mask}
        case _ if row.pieces:
            return {"kind": "text", "pieces": row.pieces, "mask": row.mask}
        case _:
            return {"kind": "numbers", "mask": row.mask}


def facts(result: Result, population: int) -> dict[str, Any]:
    """`start` has the distinct first states, one if all are equal. `parents` are null where nothing was resampled.
    `changes` has for each step the places particle · L + site that differ from the parent, each as its distance from
    the one before, and their tokens. `weights` are normalised."""
    assert result.states is not None
    assert result.states_log_w is not None
    states, log_w = result.states[:, population].cpu(), result.states_log_w[:, population].cpu()
    ancestors = result.ancestors[:, population].cpu()
    here = torch.arange(ancestors.shape[-1])
    before = states[:-1].gather(1, ancestors[1:].unsqueeze(-1).expand_as(states[1:]))
    same = bool((states[0] == states[0, :1]).all())
    share = torch.where(log_w == -math.inf, 0.0, weights(log_w.double()))
    return {
        "particles": states.shape[1],
        "length": states.shape[2],
        "start": [ints(state) for state in (states[0, :1] if same else states[0])],
        "parents": [None if torch.equal(line, here) else ints(line) for line in ancestors[1:]],
        "changes": [_changes(old, new) for old, new in zip(before, states[1:], strict=True)],
        "weights": [[round(value, 4) for value in floats(line)] for line in share],
    }


def _changes(old: Tensor, new: Tensor) -> list[list[int]]:
    places = (old != new).flatten().nonzero().squeeze(-1)
    return [ints(places.diff(prepend=places.new_zeros(1))), ints(new.flatten()[places])]
