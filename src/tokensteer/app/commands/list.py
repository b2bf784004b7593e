"""`tokensteer list`: the names that the command line knows."""

from __future__ import annotations

from tokensteer.app.options import List, Outcome
from tokensteer.app.words.names import LISTS


def main(command: List, words: str) -> Outcome:
    chosen = LISTS if command.what is None else {command.what: LISTS[command.what]}
    for place, (title, named) in enumerate(chosen.items()):
        if len(chosen) > 1:
            print(("\n" if place else "") + f"{title}:")
        width = max(map(len, named))
        for name, about in named.items():
            print(f"{name:<{width}}  {about}")
    return {title: dict(named) for title, named in chosen.items()}
