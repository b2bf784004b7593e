"""HTML and SVG as strings. All text from elsewhere passes through `escape`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape


def element(name: str, attributes: str = "", *content: str) -> str:
    """An element; its attributes and content are markup already."""
    return f"<{name}{' ' + attributes if attributes else ''}>{''.join(content)}</{name}>"


def text(name: str, content: str, attributes: str = "") -> str:
    """An element that holds plain text."""
    return element(name, attributes, escape(content))


def section(key: str, title: str, note: str, *content: str, of: str = "") -> str:
    """A part of the page with a heading, whose paler end says what it is `of`, and a line that explains how to read
    it."""
    paler = text("span", f", {of}") if of else ""
    head = element("h2", f'id="{escape(key)}"', escape(title), paler)
    head += text("p", note, 'class="note"') if note else ""
    return element("section", f'aria-labelledby="{escape(key)}"', head, *content)


def pickers(names: Sequence[str], populations: Sequence[int], first: int) -> str:
    """Lists to pick a row and one of its populations from."""
    rows = "".join(
        text("option", name, f'value="{k}" data-populations="{count}"' + (" selected" if k == first else ""))
        for k, (name, count) in enumerate(zip(names, populations, strict=True))
    )
    places = "".join(text("option", str(b + 1), f'value="{b}"') for b in range(populations[first]))
    return element("label", "", "Method ", element("select", 'class="pick-row"', rows)) + element(
        "label", "", "Population ", element("select", 'class="pick-population"', places)
    )


def most_within(drawn: Sequence[Sequence[str]], budget: int) -> list[int]:
    """How many of each list to keep within a total number of characters, all first items before any second one."""
    shown = [0] * len(drawn)
    for place in range(max(map(len, drawn), default=0)):
        for k, trees in enumerate(drawn):
            if place < len(trees) and shown[k] == place and len(trees[place]) <= budget:
                shown[k] += 1
                budget -= len(trees[place])
    return shown


def data(value: object) -> str:
    """A value as JSON for an attribute in double quotes."""
    return escape(json.dumps(value, separators=(",", ":"), ensure_ascii=False), quote=True)
