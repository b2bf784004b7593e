"""HTML and SVG as strings. All text from elsewhere passes through `escape`."""

from __future__ import annotations

import json
from html import escape


def element(name: str, attributes: str = "", *content: str) -> str:
    """An element; its attributes and content are markup already."""
    return f"<{name}{' ' + attributes if attributes else ''}>{''.join(content)}</{name}>"


def text(name: str, content: str, attributes: str = "") -> str:
    """An element that holds plain text."""
    return element(name, attributes, escape(content))


def section(key: str, title: str, note: str, *content: str) -> str:
    """A part of the page with a heading and a line that explains how to read it."""
    head = text("h2", title, f'id="{escape(key)}"') + (text("p", note, 'class="note"') if note else "")
    return element("section", f'aria-labelledby="{escape(key)}"', head, *content)


def data(value: object) -> str:
    """A value as JSON for an attribute in double quotes."""
    return escape(json.dumps(value, separators=(",", ":"), ensure_ascii=False), quote=True)
