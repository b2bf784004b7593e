"""Drawings of emoji in six public styles with their names and tags, read from the packages that publish them.

A drawing set is a JSON file of Iconify: SVG bodies by name, and aliases, which are other names of a drawing or mirror
it. Names and tags are those of emojibase. The sets spell names differently, so that a concept is what emojibase calls
it if one of its names in any set is known there.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokensteer import files

STYLES: Mapping[str, str] = {
    "noto": "noto",
    "blob": "noto-v1",
    "flat": "fluent-emoji-flat",
    "3d": "fluent-emoji",
    "twemoji": "twemoji",
    "emojione": "emojione",
}
"""The word for each style in captions, and the name of its set."""
ATTRIBUTION: Mapping[str, str] = {
    "noto": "Noto Emoji, Google, Apache-2.0",
    "blob": "Noto Emoji v1, Google, Apache-2.0",
    "flat": "Fluent Emoji, flat, Microsoft Corporation, MIT",
    "3d": "Fluent Emoji, Microsoft Corporation, MIT",
    "twemoji": "Twemoji, Twitter, Inc and other contributors, CC-BY 4.0",
    "emojione": "EmojiOne 2 (emojione.com), CC-BY 4.0",
}
NAMES = "emojibase-data, Miles Johnson, MIT"
TONE = re.compile(r"(-(medium-light|medium-dark|light|medium|dark)(-skin-tone)?)+$|-tone[1-5]$")
FLAG = re.compile(r"^flag-for-(flag-)?")


@dataclass(frozen=True)
class Concept:
    """What is drawn. `group` counts the groups of emojibase, 9 for flags; -1 if it is not known there."""

    name: str
    tags: tuple[str, ...] = ()
    group: int = -1


@dataclass(frozen=True)
class Drawing:
    """A concept in a style, as an SVG file that is to be mirrored after rendering if `mirrored`."""

    concept: Concept
    style: str
    svg: str
    mirrored: bool = False


def read(folder: Path) -> list[Drawing]:
    """All drawings of a folder of unpacked packages, without skin tones, by concept and style."""
    packages = _packages(folder)
    sets = {style: _set(folder, packages, name) for style, name in STYLES.items()}
    concept_of = Concepts.of(_json(folder, packages, "emojibase-data", "en/data.json"), sets.values())
    found: dict[tuple[str, str], Drawing] = {}
    for style, icons in sets.items():
        for name, body, mirrored in _plain(icons):
            concept = concept_of[name]
            key = concept.name, style
            if key not in found or name == slug(concept.name):  # of several names, that of emojibase
                found[key] = Drawing(concept, style, body, mirrored)
    order = list(STYLES)
    return sorted(found.values(), key=lambda drawing: (drawing.concept.name, order.index(drawing.style)))


def _packages(folder: Path) -> dict[str, list[Path]]:
    """The places of packages by their names. Other files of the name package.json may be anything."""
    found: dict[str, list[Path]] = defaultdict(list)
    for manifest in sorted(folder.rglob("package.json")):
        with suppress(ValueError, OSError):
            said: Any = files.read_json(manifest)
            if isinstance(said, dict):
                found[str(cast("dict[str, Any]", said).get("name"))].append(manifest.parent)
    return found


def _set(folder: Path, packages: Mapping[str, Sequence[Path]], name: str) -> dict[str, Any]:
    icons = _json(folder, packages, f"@iconify-json/{name}", "icons.json")
    if not isinstance(icons, dict) or "icons" not in icons:
        raise ValueError(f"the package @iconify-json/{name} in {folder} is damaged: unpack it again")
    found = cast("dict[str, Any]", icons)
    try:
        found["chars"] = _json(folder, packages, f"@iconify-json/{name}", "chars.json")
    except FileNotFoundError:  # not every set has one
        found["chars"] = {}
    return found


def _json(folder: Path, packages: Mapping[str, Sequence[Path]], package: str, name: str) -> Any:
    """A JSON file of a package, which is known by its package.json or by the folder it was unpacked to."""
    for place in packages.get(package, ()):
        if (place / name).is_file():
            return files.read_json(place / name)
    unpacked = sorted(folder.rglob(f"package/{name}"))
    if package == "emojibase-data" and unpacked:
        return files.read_json(unpacked[0])
    raise FileNotFoundError(
        f"there is no {name} of the npm package {package} below {folder}: run `npm pack {package}`, unpack the archive "
        "there, and set TOKENSTEER_DATA to the folder"
    )


def slug(name: str) -> str:
    """A name as the sets spell it: lower case, no accents, words joined by hyphens, without "and"."""
    plain = unicodedata.normalize("NFD", name.lower().replace("’", "").replace("'", ""))
    words = re.findall(r"[a-z0-9#*]+", "".join(c for c in plain if unicodedata.category(c) != "Mn"))
    return "-".join(word for word in words if word != "and")


class Concepts:
    """The concept of each name of the sets."""

    def __init__(self, known: Mapping[str, Concept], others: Mapping[str, str]) -> None:
        self._known, self._others = known, others

    @classmethod
    def of(cls, entries: Any, sets: Any) -> Concepts:
        """From the entries of emojibase. Other names are known by their code points, and by aliases."""
        known: dict[str, Concept] = {}
        codes: dict[str, str] = {}
        for entry in entries:
            concept = Concept(entry["label"], tuple(entry.get("tags", ())), int(entry.get("group", -1)))
            known[slug(concept.name)] = concept
            codes[_code(entry["hexcode"])] = slug(concept.name)
        others: dict[str, str] = {}
        for icons in sets:
            for code, name in icons["chars"].items():
                if _code(code) in codes:
                    others.setdefault(slug(name), codes[_code(code)])
        for icons in sets:
            for alias, entry in icons.get("aliases", {}).items():
                if set(entry) <= {"parent", "hidden"}:  # another name, and not another drawing
                    pair = slug(alias), slug(entry["parent"])
                    for one, other in (pair, pair[::-1]):
                        if other in known:
                            others.setdefault(one, other)
        return cls(known, others)

    def __getitem__(self, name: str) -> Concept:
        key = slug(FLAG.sub("flag-", name))
        for spelt in (key, key.removeprefix("flag-")):  # "flag for black flag" is the black flag
            concept = self._known.get(spelt) or self._known.get(self._others.get(spelt, ""))
            if concept is not None:
                return concept
        return Concept(key.replace("-", " "))


def _code(code: str) -> str:
    """Code points without the selector of the emoji look, which some lists leave out."""
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def _plain(icons: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Name, SVG file and mirroring of the drawings of a set that are neither hidden nor of a skin tone."""
    bodies: Mapping[str, Any] = icons["icons"]
    aliases: Mapping[str, Any] = icons.get("aliases", {})
    named = {*bodies, *aliases}
    for name, entry in bodies.items():
        if not entry.get("hidden") and not _toned(name, named):
            yield name, _svg(entry, icons), False
    for name, entry in aliases.items():
        parent = bodies.get(entry["parent"])
        if set(entry) == {"parent", "hFlip"} and parent is not None and not _toned(name, named):
            yield name, _svg(parent, icons), True


def _toned(name: str, named: set[str]) -> bool:
    """Whether a name is that of another drawing and a skin tone."""
    tone = TONE.search(name)
    return "skin-tone" in name or (tone is not None and name[: tone.start()] in named)


def _svg(entry: Mapping[str, Any], icons: Mapping[str, Any]) -> str:
    """The drawing in a square, in the middle if it is not square itself."""
    width, height = (float(entry.get(name, icons.get(name, 16))) for name in ("width", "height"))
    left, top = (float(entry.get(name, 0)) for name in ("left", "top"))
    side = max(width, height)
    box = f"{left - (side - width) / 2:g} {top - (side - height) / 2:g} {side:g} {side:g}"
    space = "http://www.w3.org/2000/svg"
    links = "http://www.w3.org/1999/xlink"
    return f'<svg xmlns="{space}" xmlns:xlink="{links}" viewBox="{box}">{entry["body"]}</svg>'
