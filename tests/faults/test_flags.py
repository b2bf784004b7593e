"""Flags: what is declared as a bool is refused if it is neither True nor False."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, make_dataclass, replace
from inspect import isclass, ismodule
from typing import Any

import pytest
import torch
from toys import Toy

import tokensteer as ts
from tokensteer.core.numerics.domains import check_flags

B = Toy("B")
MODEL = B.model("mdm")
STEERING = ts.Steering(MODEL)
HEAD = torch.nn.Linear(2, B.tokens + 1)

PARTS: tuple[Any, ...] = (
    MODEL,
    ts.Product([MODEL], [1.0]),
    ts.from_logits(lambda x: x, B.mask_id, ignores_time=True),
    ts.from_hidden(lambda x: x, HEAD, B.mask_id, ignores_time=True),
    ts.ConfidenceRemask(ts.Ancestral(B.mask_id)),
    ts.Tilt(B.reward),
    ts.Relaxed(),
    ts.Value(lambda x, t: x.sum(-1)),
    ts.LearnedTwist(lambda x, t: x.sum(-1)),
    ts.potentials.difference,
    ts.Amortised(MODEL.base.denoiser),
    ts.Gradient(),
    ts.gibbs.Pinned(STEERING, torch.zeros(1, 1, B.length)),
)
"""One of each class of the public interface that has flags."""

WRONG = (1, 0, "3", "False", math.nan, [], torch.tensor(True))
CALLS: dict[str, Callable[[Any], object]] = {
    "smc: progress": lambda flag: ts.smc(STEERING, 2, progress=flag),
    "particle_gibbs: ancestor_sampling": lambda flag: ts.particle_gibbs(STEERING, 1, 2, ancestor_sampling=flag),
    "repair: progress": lambda flag: ts.repair(torch.zeros(B.length).long(), STEERING, progress=flag),
}


def flags(kind: Any) -> list[str]:
    return [f.name for f in fields(kind) if f.init and f.type in ("bool", "bool | None")]


def public_classes() -> Iterator[type]:
    rooms = [ts, *(part for part in (getattr(ts, name) for name in dir(ts)) if ismodule(part))]
    for room in rooms:
        yield from (part for part in (getattr(room, name) for name in dir(room)) if isclass(part))


@pytest.mark.parametrize(("part", "flag"), [(part, flag) for part in PARTS for flag in flags(part)])
def test_a_field_that_is_no_flag_is_refused(part: Any, flag: str) -> None:
    # Without `sharing` the device decides, without `lookahead` the powers.
    optional = next(f.type == "bool | None" for f in fields(part) if f.name == flag)
    says = rf"^{type(part).__name__}\.{flag} must be True{', False or None' if optional else ' or False'}, got "
    for value in (*WRONG, *[None] * (not optional)):
        with pytest.raises(ValueError, match=says):
            replace(part, **{flag: value})
    for value in (True, False, *[None] * optional):
        assert getattr(replace(part, **{flag: value}), flag) is value


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_no_flag_is_refused(name: str) -> None:
    for value in (*WRONG, None):
        with pytest.raises(ValueError, match=f"^{name} must be True or False, got "):
            CALLS[name](value)


def test_all_public_parts_of_the_core_with_flags_are_here() -> None:
    """A class that is added, or gets a flag, must be listed above, and so refuse what is none."""
    found = {
        part
        for part in public_classes()
        if part.__module__.startswith("tokensteer.core.") and is_dataclass(part) and flags(part)
    }
    assert found == {type(part) for part in PARTS}


def test_flags_are_found_by_types_as_well_as_by_their_names() -> None:
    """A module without postponed annotations declares the types themselves."""
    other = make_dataclass("Other", [("quick", bool), ("maybe", bool | None), ("number", int)])
    check_flags(other(True, None, "3"))
    with pytest.raises(ValueError, match=r"Other\.quick must be True or False, got 1"):
        check_flags(other(1, None, 3))
    with pytest.raises(ValueError, match=r"Other\.maybe must be True, False or None, got 0"):
        check_flags(other(True, 0, 3))
