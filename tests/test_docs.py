"""Every Python block of the README and the docs runs, block after block as a reader would type them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tokensteer as ts
from tokensteer.rewards import image, text

ROOT = Path(__file__).parents[1]
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in page.read_text()
]


# by pages on optional dependencies
NEEDED = {
    "image-rewards": ("transformers", "PIL"),
    "learned-more": ("peft", "accelerate"),
    "text-models": ("transformers",),
    "text-rewards": ("transformers",),
}


# Numbers of examples that are there for their figures: what they run is the same with smaller ones.
SMALLER = {
    "README": {
        "kl=0.5, steps=25": "kl=0.5, steps=2",
        "num_particles=8": "num_particles=2",
        "num_particles=4": "num_particles=2",
    },
    "choosing": {"populations=100": "populations=10", "600_000": "60_000"},
    "constraints": {"ts.uniform_steps(20)": "ts.uniform_steps(8)", "particles=16, populations=4": "particles=8"},
    "continuous": {"2000": "200", "ts.uniform_steps(64)": "ts.uniform_steps(16)"},
    "dna-rewards": {
        "ts.uniform_steps(40)": "ts.uniform_steps(20)",
        "num_particles=64, populations=2": "num_particles=32, populations=1",
        "steps=25": "steps=10",
    },
    "guidance": {"ts.uniform_steps(50)": "ts.uniform_steps(10)", "populations=40": "populations=8"},
    "learned": {"rounds=20, paths=32": "rounds=5, paths=16"},
    "learned-more": {"rounds=8": "rounds=3"},
    "mog": {"Setup()": "Setup(5)", "sets = 4": "sets = 2", "sample(2000": "sample(500", "Setup(10": "Setup(3"},
    "moves": {
        "ts.uniform_steps(24)": "ts.uniform_steps(12)",
        "sweeps=10": "sweeps=3",
        "populations=20": "populations=5",
    },
    "start": {"range(300)": "range(100)", "(2.0, 1.0, 0.5, 0.25, 0.1)": "(0.5, 0.1)"},
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


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.fast
def test_links_lead_somewhere_and_pages_are_listed() -> None:
    assert tool("build_site").faults() == []


def test_broken_links_and_pages_that_are_not_listed_are_found(tmp_path: Path) -> None:
    site = tool("build_site")
    site.ROOT, site.DOCS, site.STAGE = tmp_path, tmp_path / "docs", tmp_path / "build"
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[here](docs/a.md#a-b) [nowhere](docs/c.md)")
    (tmp_path / "CONTRIBUTING.md").write_text("[web](https://example.org)\n```md\n[in code](d.md)\n```\n")
    (tmp_path / "docs" / "a.md").write_text("# A `b`\n\n[self](#a-b) [other](b.md#nothing) [source](../code.py)")
    (tmp_path / "docs" / "b.md").write_text('# B\n\n<a id="c"></a> <a id="c"></a> <a id="d"></a>\n')
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: x\nnav:\n  - A: a.md\n  - More:\n      - C: c.md\n      - A: a.md\n"
    )
    assert site.faults() == [
        "docs/a.md: b.md#nothing has no such heading",
        "docs/b.md: the id c is there twice",
        "README.md: docs/c.md leads nowhere",
        "docs/b.md is not in the navigation of mkdocs.yml",
        "mkdocs.yml lists c.md, which is not in docs/",
        "mkdocs.yml lists a.md more than once",
    ]
    site.stage()
    assert "[source](repository/code.py.md)" in (tmp_path / "build" / "a.md").read_text()
    assert "x = 1" in (tmp_path / "build" / "repository" / "code.py.md").read_text()


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_the_outputs_of_notebooks_are_those_of_their_code() -> None:
    runner = tool("run_notebooks")
    assert len(NOTEBOOKS) >= 3
    for file in NOTEBOOKS:
        notebook = json.loads(file.read_text("utf-8"))
        mend = f"run python tools/run_notebooks.py {file.stem}"
        assert notebook["metadata"].get(runner.FINGERPRINT) == runner.fingerprint(notebook), mend
        assert file.stat().st_size < 100_000, f"{file.name} shows too much"


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_run(file: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "run_notebooks.py"), file.stem, "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_cell_shows_what_it_prints_and_its_last_value_and_a_cell_that_raises_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = tool("run_notebooks")
    runner.FOLDER = tmp_path
    file = tmp_path / "small.ipynb"

    def write(*cells: str) -> None:
        code = [{"cell_type": "code", "source": cell, "outputs": [], "metadata": {}} for cell in cells]
        file.write_text(json.dumps({"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))

    write("x = 2\nprint('<b>')", "x + 1", "x;\ny = x")
    assert runner.main(["small"]) == 0
    done = json.loads(file.read_text())
    printed, value, nothing = (cell["outputs"] for cell in done["cells"])
    assert printed == [{"name": "stdout", "output_type": "stream", "text": ["<b>\n"]}]
    assert value[0]["data"] == {"text/plain": ["3"]}
    assert nothing == []
    page = tool("build_site").as_markdown(
        {**done, "cells": [{"cell_type": "markdown", "source": "# A"}, *done["cells"]]}, "a"
    )
    assert "```text\n<b>\n```" in page
    write("x = 1", "1 / 0")
    before = file.read_bytes()
    assert runner.main([]) == 1
    assert "small.ipynb, cell 2" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_the_reference_is_that_of_the_docstrings() -> None:
    reference = tool("write_reference")
    kept = {page.name: page.read_text("utf-8") for page in reference.FOLDER.glob("*.md")}
    assert kept == reference.pages(), "run python tools/write_reference.py"


def test_the_reference_has_every_public_name_once() -> None:
    names = [name.public for name in tool("write_reference").public_names()]
    pages = [page.read_text("utf-8") for page in (ROOT / "docs" / "reference").glob("*.md") if page.stem != "index"]
    headings = re.findall(r"^## (ts\.\S+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(headings) == sorted(set(names))
    packages = {f"ts.{name}": getattr(ts, name) for name in ("adapters", "rewards", "testing", "train")}
    public = {"ts": ts, **packages, "ts.rewards.text": text, "ts.rewards.image": image}
    for prefix, package in public.items():
        for name in ts.__all__ if package is ts else vars(package):
            if not name.startswith("_") and not isinstance(getattr(package, name), ModuleType):
                assert f"{prefix}.{name}" in headings
    for entry in "\n".join(pages).split("\n## ")[1:]:
        described = re.sub(r"```py\n.*?\n```|^Source: .*$", "", entry, flags=re.DOTALL | re.MULTILINE)
        assert len(described.split("\n", 1)[1].strip()) > 0, f"{entry.splitlines()[0]} has no docstring"


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    module = tool("draw_rooms")
    assert module.FILE.read_text("utf-8") == module.draw(), "run python tools/draw_rooms.py"


def test_every_file_that_contributing_names_is_there() -> None:
    table = re.findall(r"^\| Where .* \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [
        name for row in table for name in re.findall(r"`([\w/]+(?:\.py|/))`", row) if "/" in name or name == "files.py"
    ]
    assert len(named) >= 10
    for name in named:
        assert (ROOT / "src" / "tokensteer" / name).exists(), name
