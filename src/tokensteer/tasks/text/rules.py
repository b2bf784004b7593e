"""The constraints of the command line on texts, as one automaton."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from tokensteer import files
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.building import both
from tokensteer.rewards.constraints.json_schema import Schema
from tokensteer.rewards.text.shape import json_of, of_characters, rhyming, without_letters
from tokensteer.rewards.text.words import Spells, forbidden, matching, required
from tokensteer.tasks.common.settings import Settings


def rule_of(settings: Settings, tokenizer: Spells) -> Automaton | None:
    """Texts that satisfy all rules of the settings; None if there are none."""
    makers: dict[str, Callable[[], Automaton]] = {}
    if settings.contains:
        makers["contains"] = lambda: required(settings.contains or (), tokenizer)
    if settings.avoids:
        makers["avoids"] = lambda: forbidden(settings.avoids or (), tokenizer)
    if settings.pattern is not None:
        makers["pattern"] = lambda: matching(settings.pattern or "", tokenizer)
    if settings.rhyme is not None:
        makers["rhyme"] = lambda: rhyming(settings.rhyme or "", tokenizer)
    if settings.without is not None:
        makers["without"] = lambda: without_letters(settings.without or "", tokenizer)
    if settings.characters is not None:
        makers["characters"] = lambda: of_characters(*character_range(settings.characters or ""), tokenizer)
    if settings.schema is not None:
        makers["schema"] = lambda: _json(settings, tokenizer)
    found: list[Automaton] = []
    for option, make in makers.items():
        try:
            found.append(make())
        except ValueError as error:
            raise ValueError(f"--{option}: {error}") from error
    return both(*found) if found else None


def character_range(text: str) -> tuple[int, int | None]:
    """The numbers of 80-200, 80- (at least) or -200 (at most)."""
    low, dash, high = text.partition("-")
    if not dash or not (low or high) or not all(part == "" or part.isdecimal() for part in (low, high)):
        raise ValueError(f"a length is a range such as 80-200, 80- or -200, got {text!r}")
    least, most = int(low or 0), int(high) if high else None
    if most is not None and most < least:
        raise ValueError(f"a length from {least} to {most} is none: swap the numbers")
    return least, most


def _json(settings: Settings, tokenizer: Spells) -> Automaton:
    assert settings.schema is not None, "there is a schema"
    if not settings.schema.is_file():
        raise ValueError(f"there is no file {settings.schema}: give a JSON schema in a file")
    return json_of(cast("Schema", files.read_json(settings.schema)), tokenizer)
