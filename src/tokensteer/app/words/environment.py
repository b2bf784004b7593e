"""Which packages are installed, in which versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import tokensteer

NEEDED = ("torch", "numpy", "safetensors", "rich", "tyro")
EXTRAS = (
    ("POT", "eval", "the distances of mog and product"),
    ("scipy", "eval", "metrics"),
    ("matplotlib", "plot", "figures"),
    ("transformers", "hf", "models and rewards from elsewhere"),
    ("diffusers", "hf", "image models from elsewhere"),
    ("peft", "hf", "adapters"),
    ("accelerate", "hf", "training in many processes"),
    ("pyjaspar", "bio", "the motifs of dna"),
    ("h5py", "bio", "weights that Keras wrote"),
    ("ray", "ray", "many workers and machines"),
)


def installed(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """The versions of everything that a result may depend on, which Ray is not."""
    found = {"tokensteer": tokensteer.__version__, "python": platform.python_version()}
    return found | {name: installed(name) for name in (*NEEDED, *(name for name, *_ in EXTRAS)) if name != "ray"}
