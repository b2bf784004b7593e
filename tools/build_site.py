"""Check the pages of docs/, and build the site from them into build/site.

`python tools/build_site.py`. Every page is listed once in the `nav` of mkdocs.yml, and every relative link leads to a
file, and to a heading of it if it names one. Pages may link to files of the repository outside docs/, as a reader of
the repository would: the site has a page for each of them, under `repository/`. A notebook becomes a page with its
stored outputs, and `nav` lists it as notebooks/NAME.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS, STAGE, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]*)((?:#[^)\s]*)?)(?=\))")
FENCED = re.compile(r"^( *)(`{3,})[^`]*?^\1\2`*$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    return sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")])


def text_of(file: Path) -> str:
    """A page as Markdown."""
    text = file.read_text("utf-8")
    return as_markdown(json.loads(text), file.name) if file.suffix == ".ipynb" else text


def as_markdown(notebook: dict[str, Any], name: str) -> str:
    """The cells of a notebook and their outputs. Below the title is a link to the notebook itself."""
    parts = list[str]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [shown(output) for output in cell.get("outputs", ())]
    title, _, rest = parts[0].partition("\n")
    itself = f'<a href="{name}" download>Download this notebook</a>'
    return "\n\n".join([title, itself, rest.strip(), *parts[1:]]) + "\n"


def shown(output: dict[str, Any]) -> str:
    """An output of a cell: as a picture or HTML where it has one, else as text."""
    data = output.get("data", {})
    if "image/png" in data:
        text = "".join(data["text/plain"])
        return f'<img src="data:image/png;base64,{data["image/png"].strip()}" alt="{escape(text)}">'
    if "text/html" in data:
        return re.sub(r"\n\s*\n", "\n", "".join(data["text/html"])).strip()  # an empty line would end the HTML
    return "```text\n" + "".join(output.get("text", data.get("text/plain", ""))).rstrip() + "\n```"


def listed() -> list[str]:
    """The pages in the navigation of mkdocs.yml, in order."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    return re.findall(r"- [^:\n]+: (\S+\.md)$", nav, re.MULTILINE)


@cache
def anchors(file: Path) -> set[str]:
    """The names that a link may have behind its #: headings, as sites and repository hosts write them, and ids."""
    text = FENCED.sub("", text_of(file))
    found = set(re.findall(r'\bid="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


def links(file: Path) -> Iterator[tuple[str, Path, str]]:
    """The relative links of a page: as written, the file they lead to, and the heading there."""
    for place, heading in LINK.findall(FENCED.sub("", text_of(file))):
        yield place + heading, Path(os.path.normpath(file.parent / place)) if place else file, heading[1:]


def faults() -> list[str]:
    """What is wrong with the pages: links that lead nowhere, ids that occur twice, pages that are not listed, entries
    without a page."""
    found: list[str] = []
    for page in [*pages(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        ids = re.findall(r'<a id="([^"]+)">', FENCED.sub("", text_of(page)))
        twice = sorted({name for name in ids if ids.count(name) > 1})
        found += [f"{page.relative_to(ROOT)}: the id {name} is there twice" for name in twice]
        for link, file, heading in links(page):
            if not file.exists():
                found.append(f"{page.relative_to(ROOT)}: {link} leads nowhere")
            elif heading and file.suffix in (".md", ".ipynb") and heading not in anchors(file):
                found.append(f"{page.relative_to(ROOT)}: {link} has no such heading")
    there = {page.relative_to(DOCS).with_suffix(".md").as_posix() for page in pages()}
    named = listed()
    found += [f"docs/{page} is not in the navigation of mkdocs.yml" for page in sorted(there - set(named))]
    found += [f"mkdocs.yml lists {page}, which is not in docs/" for page in sorted(set(named) - there)]
    return found + [
        f"mkdocs.yml lists {page} more than once" for page in sorted({p for p in named if named.count(p) > 1})
    ]


def staged_as(file: Path) -> Path:
    """Where a file of the repository is put for the site."""
    if file.is_relative_to(DOCS):
        place = STAGE / file.relative_to(DOCS)
        return place.with_suffix(".md") if file.suffix == ".ipynb" else place
    place = STAGE / "repository" / file.relative_to(ROOT)
    return place.with_name(place.name + ".md") if file.suffix in (".py", ".toml", ".cff", "") else place


def stage() -> None:
    """Copy docs/ to build/docs with every file that its pages lead to, and mend their links."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(DOCS, STAGE)
    waiting, done = pages(), set[Path]()
    while waiting:
        file = waiting.pop()
        if file in done or not file.is_file():
            continue
        done.add(file)
        place = staged_as(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".md", ".ipynb"):
            waiting += [target for _, target, _ in links(file) if target.is_relative_to(ROOT)]
            place.write_text(mended(file), "utf-8")
        elif place.suffix == ".md":
            name, kind = file.relative_to(ROOT).as_posix(), file.suffix[1:]
            head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{kind}\n"
            place.write_text(head + file.read_text("utf-8") + "````\n", "utf-8")
        elif not place.exists():
            shutil.copy(file, place)


def mended(file: Path) -> str:
    """The text of a page with links as they are on the site; links to folders are left out."""
    text, here = text_of(file), staged_as(file).parent

    def place(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(file.parent / match[1]))
        return os.path.relpath(staged_as(target), here) + match[2] if match[1] and target.is_file() else match[0]

    return LINK.sub(place, text)


def outside() -> list[str]:
    """The scripts, styles and pictures that pages of the site would load from elsewhere."""
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*\bsrc=.?(https?:[^\"' >]+)|<link[^>]*\bhref=.?(https?:[^\"' >]+)")
    texts = ((page, page.read_text("utf-8")) for page in sorted(SITE.rglob("*.html")))
    return [f"{page.relative_to(SITE)} loads {a or b}" for page, text in texts for a, b in loaded.findall(text)]


def build() -> list[str]:
    """Build the site; what is wrong with it."""
    if wrong := faults():
        return wrong
    stage()
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return [f"zensical failed with {code}"] if code else outside()


if __name__ == "__main__":
    sys.exit("\n".join(build()) or None)
