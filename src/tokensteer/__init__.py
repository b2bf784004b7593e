"""tokensteer steers discrete diffusion models at inference time with Sequential Monte Carlo."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokensteer.api import *  # noqa: F403
    from tokensteer.api import __all__ as __all__

__version__ = "0.1.0"


# All names but the version are loaded when the first of them is asked for, since torch takes seconds to import: the
# command line would otherwise take as long to say what it can do.
def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module("tokensteer.api")
    if name not in api.__all__ and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("tokensteer.api").__all__})
