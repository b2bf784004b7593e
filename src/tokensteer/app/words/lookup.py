"""Looking up names that users type. An unknown name raises an error that lists the known ones."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


def choose(name: str, known: Mapping[str, Value], what: str) -> Value:
    """known[name]. Raises ValueError with the nearest spelling and all known names."""
    if name not in known:
        raise ValueError(unknown(name, known, what))
    return known[name]


def check_known(name: str | None, known: Iterable[str], what: str) -> None:
    """Raise ValueError unless a name is None or known."""
    if name is not None and name not in known:
        raise ValueError(unknown(name, known, what))


def unknown(name: str, known: Iterable[str], what: str) -> str:
    near = get_close_matches(name.lower().replace("_", "-"), list(known), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"there is no {what} called {name!r}.{hint} There are: {', '.join(known)}"


def find(target: str, mend: str = "give what to check as module:attribute, such as mymodel:steering") -> object:
    """The object at module:attribute or file.py:attribute; the attribute may have dots."""
    module, colon, attribute = target.rpartition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"{mend}, got {target!r}")
    found: Any = _load(module)
    for name in attribute.split("."):
        known = [word for word in dir(found) if not word.startswith("_")]
        if name not in known:
            raise ValueError(f"{module}: {unknown(name, known, 'attribute')}")
        found = getattr(found, name)
    return found


def _load(module: str) -> object:
    here = str(Path.cwd())
    if here not in sys.path:  # a script has its own folder first, not the user's
        sys.path.insert(0, here)
    file = Path(module)
    if file.suffix == ".py" and not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    try:
        if file.suffix != ".py":
            return import_module(module)
        spec = spec_from_file_location(file.stem, file)
        assert spec is not None, "a file that ends in .py has a loader"
        assert spec.loader is not None
        loaded = module_from_spec(spec)
        sys.modules[file.stem] = loaded  # dataclasses look their module up
        spec.loader.exec_module(loaded)
        return loaded
    except (Exception, SystemExit) as error:
        place = str(file) if file.suffix == ".py" else None
        raise ValueError(f"{module} cannot be imported: {raised(error, place)}") from error


def raised(error: BaseException, file: str | None) -> str:
    """An error of a user's code, with the last line of the user's file in its traceback, or the last line of all if the
    file is not in it. An error of our own, or of Python's imports, is given without a line."""
    places = traceback.extract_tb(error.__traceback__)
    place = [place for place in places if place.filename == file][-1:] or places[-1:]
    at = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in place if not _is_ours(frame.filename))
    return f"{type(error).__name__}{at}: {error}"


def file_of(function: Any) -> str | None:
    """The file of a function, or of the module of an object."""
    code = getattr(function, "__code__", None)
    return (
        code.co_filename if code is not None else getattr(sys.modules.get(type(function).__module__), "__file__", None)
    )


def _is_ours(file: str) -> bool:
    return file.startswith((str(Path(__file__).parents[2]), "<frozen"))
