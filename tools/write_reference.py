"""Write docs/reference from the signatures and docstrings of the public names, one page for each room.

`python tools/write_reference.py`. Public are the names of `tokensteer/api.py`, those of the packages listed there
(`ts.rewards`), and what the modules listed there define (`ts.resampling`). A name that can be reached in two ways is
listed once, under the shorter one. Defaults and annotations are those of the source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
WIDTH = 100

ROOMS = {  # page: its part of the package, and what is there
    "steering": ("core/steering", "Steering, the named methods, the planner, CUDA graphs and repair"),
    "particles": ("core/particles", "The SMC loop and its result, resampling, triggers, particle Gibbs"),
    "twists": ("core/twists", "Targets: tilts, estimators of the reward at x_t, potentials, ramps"),
    "proposals": ("core/proposals", "What particles are moved by"),
    "models": ("core/models", "Denoisers, diffusions, products, templates"),
    "kernels": ("core/kernels", "Schedules, time grids and reverse processes"),
    "categorical": ("core/categorical", "Distributions over a vocabulary"),
    "rewards": ("rewards", "Rewards and constraints: automata, text, images, DNA"),
    "train": ("train", "Training of denoisers, classifiers, proposals and twists"),
    "adapters": ("adapters", "Networks of other libraries as denoisers"),
    "testing": ("testing", "Exact answers for small models, and assertions for your own parts"),
    "workers": ("workers", "Units of work on many processes and machines"),
    "runs": ("app/runs", "Run folders written by the command line"),
}
# packages and modules that nothing imports by itself
ON_REQUEST = ("rewards.text", "rewards.image", "rewards.dna", "rewards.motifs")
SHOWN = ("__call__", "__init__")  # of the methods with underscores, if they have a docstring


@dataclass(frozen=True)
class Name:
    """A public name, where it is defined, and under which name there."""

    public: str
    module: ModuleType
    defined: str

    @property
    def file(self) -> Path:
        return Path(str(self.module.__file__)).relative_to(ROOT)

    @property
    def room(self) -> str:
        place = self.file.as_posix().removeprefix("src/tokensteer/")
        return next(room for room, (part, _) in ROOMS.items() if place.startswith(part + "/"))


@cache
def tree(module: ModuleType) -> ast.Module:
    """The source of a module, parsed; every node knows its lines."""
    source = Path(str(module.__file__)).read_bytes()
    parsed, lines = ast.parse(source), source.splitlines(keepends=True)
    for node in ast.walk(parsed):
        vars(node)["lines"] = lines
    return parsed


def source_of(node: ast.expr) -> str:
    """An expression as it stands in the source, on one line."""
    lines: list[bytes] = vars(node)["lines"][node.lineno - 1 : node.end_lineno]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return on_one_line(b"".join(lines).decode())


def on_one_line(text: str) -> str:
    return re.sub(r"([(\[{]) ", r"\1", re.sub(r",? ([)\]}])", r"\1", " ".join(text.split())))


def defined(module: ModuleType) -> dict[str, ast.stmt]:
    """The statements that define the names of a module, in order."""
    found: dict[str, ast.stmt] = {}
    for node in tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {leaf.id: node for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return {name: node for name, node in found.items() if not name.startswith("_")}


def imported(module: ModuleType, prefix: str) -> Iterator[Name]:
    """The names that an `api.py` or an `__init__` imports; modules among them are opened last."""
    modules: list[tuple[str, ModuleType]] = []
    for node in tree(module).body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tokensteer"):
            continue
        for alias in node.names:
            value = getattr(module, alias.name)
            if isinstance(value, ModuleType):
                modules.append((f"{prefix}.{alias.name}", value))
            else:
                yield Name(f"{prefix}.{alias.name}", importlib.import_module(str(node.module)), alias.name)
    for public, value in modules:
        yield from opened(value, public)


def opened(module: ModuleType, public: str) -> Iterator[Name]:
    if Path(str(module.__file__)).name == "__init__.py":
        yield from imported(module, public)
        return
    for name in defined(module):
        if not isinstance(getattr(module, name), TypeVar):
            yield Name(f"{public}.{name}", module, name)


def public_names() -> list[Name]:
    """Every public name once, in the order of `api.py`."""
    found: dict[tuple[str, str], Name] = {}
    roots = [imported(importlib.import_module("tokensteer.api"), "ts")]
    roots += [opened(importlib.import_module(f"tokensteer.{name}"), f"ts.{name}") for name in ON_REQUEST]
    for names in roots:
        for name in names:
            found.setdefault((name.module.__name__, name.defined), name)
    return list(found.values())


def source_name(name: Name) -> str:
    """The class or function behind a name such as `from_logits`, which is one more name for `FromLogits`."""
    value = getattr(name.module, name.defined)
    own = inspect.isclass(value) or inspect.isfunction(value)
    return value.__name__ if own and value.__module__ == name.module.__name__ else name.defined


# ---- signatures


def wrapped(head: str, parameters: list[str], tail: str) -> str:
    line = f"{head}({', '.join(parameters)}){tail}"
    if len(line) <= WIDTH:
        return line
    return f"{head}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){tail}"


def of_function(node: ast.FunctionDef, name: str, method: bool = False) -> str:
    """name(parameters) -> type, as written."""
    args = node.args
    both = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(both) - len(args.defaults)) + list(args.defaults)
    parameters = [parameter(arg, default) for arg, default in zip(both, defaults, strict=True)]
    if args.posonlyargs:
        parameters.insert(len(args.posonlyargs), "/")
    if args.vararg:
        parameters.append("*" + parameter(args.vararg, None))
    elif args.kwonlyargs:
        parameters.append("*")
    parameters += [parameter(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parameters.append("**" + parameter(args.kwarg, None))
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    if method and not static:
        parameters = parameters[1:]
    return wrapped(name, parameters, f" -> {source_of(node.returns)}" if node.returns else "")


def parameter(arg: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {source_of(arg.annotation)}" if arg.annotation else ""
    if default is None:
        return arg.arg + annotation
    return f"{arg.arg}{annotation} = {source_of(default)}" if annotation else f"{arg.arg}={source_of(default)}"


def class_node(cls: type) -> ast.ClassDef | None:
    module = inspect.getmodule(cls)
    if module is None or not module.__name__.startswith("tokensteer"):
        return None
    classes = (node for node in tree(module).body if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == cls.__name__), None)


def field_text(cls: type, name: str) -> str:
    """A field as written in the class or the base that has it; `field(default_factory=f)` is shown as f()."""
    for base in cls.__mro__:
        node = class_node(base)
        for line in node.body if node else []:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name:
                text = f"{name}: {source_of(line.annotation)}"
                value = line.value
                if isinstance(value, ast.Call) and source_of(value.func) == "field":
                    given = {word.arg: word.value for word in value.keywords}
                    factory = given.get("default_factory")
                    return f"{text} = {source_of(factory)}()" if factory else with_default(text, given.get("default"))
                return with_default(text, value)
    raise LookupError(f"{cls.__name__} has no field {name} in its source")


def with_default(text: str, value: ast.expr | None) -> str:
    return text if value is None else f"{text} = {source_of(value)}"


def of_class(cls: type, name: str) -> str:
    node = class_node(cls)
    if getattr(cls, "_is_protocol", False):
        return f"class {name}(Protocol)"
    written = (
        next((line for line in node.body if isinstance(line, ast.FunctionDef) and line.name == "__init__"), None)
        if node
        else None
    )
    if written:
        return of_function(written, name, method=True).removesuffix(" -> None")
    if is_dataclass(cls):
        given = [field for field in fields(cls) if field.init]
        parameters = [field_text(cls, field.name) for field in given if not field.kw_only]
        named = [field_text(cls, field.name) for field in given if field.kw_only]
        return wrapped(name, [*parameters, *(["*", *named] if named else [])], "")
    if issubclass(cls, tuple):
        return wrapped(name, [field_text(cls, field) for field in getattr(cls, "_fields", ())], "")
    return f"class {name}"


# ---- pages


def prose(text: str | None) -> str:
    """A docstring as Markdown: what is not code is taken literally."""
    parts = re.split(r"(`[^`]+`)", inspect.cleandoc(text or ""))
    parts[::2] = [re.sub(r"(\*|\b_|_\b)", r"\\\1", re.sub(r"<(?=[\w/!])", "&lt;", part)) for part in parts[::2]]
    return "".join(parts)


def described(name: Name, node: ast.stmt) -> str:
    """The string below an assignment, or the comment behind it."""
    body = tree(name.module).body
    below = body[body.index(node) + 1 : body.index(node) + 2]
    if below and isinstance(below[0], ast.Expr) and isinstance(below[0].value, ast.Constant):
        return str(below[0].value.value)
    line = Path(str(name.module.__file__)).read_text("utf-8").splitlines()[(node.end_lineno or node.lineno) - 1]
    behind = re.search(r"#\s*(?!noqa|pyright)(.+)$", line)
    return behind[1] if behind else ""


def members(cls: type) -> Iterator[str]:
    """The public methods and properties written in the class itself, one paragraph each."""
    node = class_node(cls)
    for line in node.body if node else []:
        if not isinstance(line, ast.FunctionDef):
            continue
        text = ast.get_docstring(line)
        if line.name.startswith("_") and not (line.name in SHOWN and text):
            continue
        marks = {source_of(mark) for mark in line.decorator_list}
        if "property" in marks:
            signature = f".{line.name}" + (f": {source_of(line.returns)}" if line.returns else "")
        else:
            signature = of_function(line, f".{line.name}", method=True)
        yield f"- `{on_one_line(signature)}`" + (f"  \n{textwrap.indent(prose(text), '    ')}" if text else "")


def entry(name: Name) -> str:
    value: Any = getattr(name.module, name.defined)
    short = name.public.removeprefix("ts.").rpartition(".")[2]
    link = f"[{name.file.as_posix().removeprefix('src/')}](../../{name.file.as_posix()})"
    node = defined(name.module).get(source_name(name))
    if inspect.isclass(value) and source_name(name) in defined(name.module) and isinstance(node, ast.ClassDef):
        signature, text = of_class(value, short), prose(ast.get_docstring(node))
        listed = list(members(value))
    elif isinstance(node, ast.FunctionDef):
        signature, text, listed = of_function(node, short), prose(ast.get_docstring(node)), []
    else:
        assert node is not None, name
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else node
        shown = source_of(value)
        signature = f"{short} = {shown if len(shown) <= 200 else '…'}"
        text, listed = prose(described(name, node)), []
    parts = [
        f'<a id="{name.public}"></a>\n\n## {name.public}',
        f"```py\n{signature}\n```",
        text,
        *(["\n".join(listed)] if listed else []),
        f"Source: {link}",
    ]
    return "\n\n".join(part for part in parts if part)


def pages() -> dict[str, str]:
    """The text of every page of docs/reference by its file name."""
    names = public_names()
    written: dict[str, str] = {}
    rows: list[str] = []
    for room, (part, holds) in ROOMS.items():
        here = [name for name in names if name.room == room]
        head = f"# {room.capitalize()}\n\n{holds} (`{part}`)."
        written[f"{room}.md"] = "\n\n".join([head, *(entry(name) for name in here)]) + "\n"
        links = ", ".join(f"[{name.public.removeprefix('ts.')}]({room}.md#{name.public})" for name in here)
        rows.append(f"## [{room.capitalize()}]({room}.md)\n\n{holds}: {links}")
    intro = (
        "# API\n\nEvery public name with its signature and docstring, by the part of the package it is in; `ts` is "
        "`tokensteer`. These pages are\nwritten by `python tools/write_reference.py` from the source."
    )
    written["index.md"] = "\n\n".join([intro, *rows]) + "\n"
    return written


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for file, text in pages().items():
        (FOLDER / file).write_text(text, "utf-8")
