"""Every Python block of the README and the docs runs, block after block as a reader would type them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in page.read_text()
]


# by pages on optional dependencies
NEEDED = {
    "learned-more": ("peft", "accelerate"),
    "text-models": ("transformers",),
    "text-rewards": ("transformers",),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path) -> None:
    for module in NEEDED.get(page.stem, ()):
        pytest.importorskip(module)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    spec = importlib.util.spec_from_file_location("draw_rooms", ROOT / "tools" / "draw_rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text("utf-8") == module.draw(), "run python tools/draw_rooms.py"


def test_every_file_that_contributing_names_is_there() -> None:
    table = re.findall(r"^\| Where .* \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [
        name for row in table for name in re.findall(r"`([\w/]+(?:\.py|/))`", row) if "/" in name or name == "files.py"
    ]
    assert len(named) >= 10
    for name in named:
        assert (ROOT / "src" / "tokensteer" / name).exists(), name
