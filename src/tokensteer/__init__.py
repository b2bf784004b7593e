"""tokensteer steers discrete diffusion models at inference time with Sequential Monte Carlo."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokensteer.api import *  # noqa: F403

__version__ = "0.2.0"


# All names but the version are loaded when the first of them is asked for, since torch takes seconds to import: the
# command line would otherwise take as long to say what it can do.
def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_public())
    if not name.startswith("_") and (spec := find_spec(f"{__name__}.{name}")) is not None and spec.origin is not None:
        return import_module(spec.name)  # a module of the package: the api would import it in a circle
    if name.startswith("__") or name not in _public():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _public()[name]
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})


def _public() -> dict[str, Any]:
    return {name: value for name, value in vars(import_module("tokensteer.api")).items() if not name.startswith("_")}
