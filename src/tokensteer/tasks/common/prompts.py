"""Prompts of the command line, or of a file: one on each line, or JSON lines with `prompt` and optionally `id`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tokensteer import files
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Prompt


def numbered(texts: Sequence[str]) -> list[Prompt]:
    """Prompts with their places from 1 as ids."""
    return [Prompt(text, str(place)) for place, text in enumerate(texts, 1)]


def given(settings: Settings, default: Sequence[str]) -> list[Prompt]:
    """The prompts of the command line or of its file, else the `default`."""
    if settings.prompt and settings.prompts is not None:
        raise ValueError("there are both --prompt and --prompts: give one of them")
    if settings.prompts is not None:
        return read(settings.prompts)
    return numbered(settings.prompt or default)


def read(file: Path) -> list[Prompt]:
    """The prompts of a file, without empty lines."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file of prompts {file}: give one with a prompt on each line, or .jsonl")
    try:
        lines = files.read_lines(file)
    except ValueError as error:
        raise ValueError(f"{error}: give a file with a prompt on each line, or .jsonl") from error
    kept = [(place, line) for place, line in enumerate(lines, 1) if line.strip()]
    if not kept:
        raise ValueError(f"{file} has no prompts: write one on each line")
    if file.suffix == ".jsonl":
        return [_entry(file, place, line) for place, line in kept]
    return [Prompt(line.strip(), str(place)) for place, line in kept]


def _entry(file: Path, place: int, line: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {place} of {file} is no JSON: {error}") from error
    said = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    text = said.get("prompt")
    if not isinstance(text, str):
        raise ValueError(f'line {place} of {file} has no text under "prompt": write {{"prompt": "The movie"}}')
    name = str(said.get("id", place))
    if any("\ud800" <= c <= "\udfff" for c in text + name):
        raise ValueError(f"line {place} of {file} has half of a character (a lone surrogate): write all of it")
    return Prompt(text, name)
