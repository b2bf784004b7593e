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


# Numbers of examples that are there for their figures: what they run is the same with smaller ones.
SMALLER = {
    "choosing": {"populations=100": "populations=10", "600_000": "60_000"},
    "constraints": {"ts.uniform_steps(20)": "ts.uniform_steps(8)", "particles=16, populations=4": "particles=8"},
    "continuous": {"2000": "200", "ts.uniform_steps(64)": "ts.uniform_steps(16)"},
    "dna-rewards": {
        "ts.uniform_steps(40)": "ts.uniform_steps(20)",
        "num_particles=64, populations=2": "num_particles=32, populations=1",
        "steps=25": "steps=10",
    },
    "learned": {"rounds=20, paths=32": "rounds=5, paths=16"},
    "learned-more": {"rounds=8": "rounds=3"},
    "mog": {"Setup()": "Setup(5)", "sets = 4": "sets = 2", "sample(2000": "sample(500", "Setup(10": "Setup(3"},
    "moves": {
        "ts.uniform_steps(24)": "ts.uniform_steps(12)",
        "sweeps=10": "sweeps=3",
        "populations=20": "populations=5",
    },
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.fast] * (page.stem == "README"), id=page.stem) for page in PAGES]
)
def test_examples_run(page: Path) -> None:
    for module in NEEDED.get(page.stem, ()):
        pytest.importorskip(module)
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    for large, small in SMALLER.get(page.stem, {}).items():
        assert large in code, f"{page.name} has no {large} any more"
        code = code.replace(large, small)
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


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
