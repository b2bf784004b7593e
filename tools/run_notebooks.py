"""Run the notebooks of docs/notebooks and store what their cells print and show.

    python tools/run_notebooks.py                     # all of them
    python tools/run_notebooks.py first-steps --dry   # one of them, and write nothing

Cells run in one namespace and without Jupyter, so the notebooks need nothing that the library does not need. A cell
shows what it prints and the value of its last expression: as a picture or as HTML if the value has one, else its repr.
A notebook stores the fingerprint of the code that its outputs are from, so that a test can see outputs that are old.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import sys
import traceback
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
FINGERPRINT = "fingerprint of the code"


def source(cell: dict[str, Any]) -> str:
    """The text of a cell, which is stored as a string or as a list of lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def fingerprint(notebook: dict[str, Any]) -> str:
    """Of the code of a notebook; the text between the cells does not count."""
    code = json.dumps([source(cell).strip() for cell in code_cells(notebook)])
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def shown(value: object) -> dict[str, Any]:
    """A value by kind of output, as Jupyter would store it."""
    found: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if (html := getattr(value, "_repr_html_", None)) is not None:
        found["text/html"] = str(html()).splitlines(keepends=True)
    if (png := getattr(value, "_repr_png_", None)) is not None:
        found["image/png"] = base64.b64encode(png()).decode()
    return found


def run_cell(code: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the code of a cell; the outputs of the cell."""
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    tree.body = tree.body if last is None else tree.body[:-1]
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs = list[dict[str, Any]]()
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        outputs.append({"data": shown(value), "metadata": {}, "output_type": "execute_result"})
    return outputs


def run(notebook: dict[str, Any], name: str) -> None:
    """Run all cells of a notebook and put their outputs into it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate(code_cells(notebook), start=1):
        outputs = run_cell(source(cell), f"{name}, cell {count}", namespace)
        cell["execution_count"] = count
        cell["outputs"] = [
            output | ({"execution_count": count} if output["output_type"] == "execute_result" else {})
            for output in outputs
        ]
    notebook["metadata"][FINGERPRINT] = fingerprint(notebook)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks of docs/notebooks.")
    parser.add_argument("names", nargs="*", help="all of them unless given")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args(words)
    files = [FOLDER / f"{name}.ipynb" for name in given.names] or sorted(FOLDER.glob("*.ipynb"))
    for file in files:
        notebook = json.loads(file.read_text("utf-8"))
        try:
            run(notebook, file.name)
        except Exception:
            traceback.print_exc()
            return 1
        if not given.dry:
            file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        sys.stderr.write(f"{file.name} ran\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
