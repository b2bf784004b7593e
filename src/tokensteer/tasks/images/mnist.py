"""MNIST, 28 x 28 binary pixels, black where the grey value is above 127.

    tokensteer train mnist --out FOLDER --device cuda --minutes 5

trains all its networks. The data does not come with the package; `binarise` makes it from MNIST's four files.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tokensteer.tasks.common import arrays as arrays_in
from tokensteer.tasks.common.proposals import STEPWISE, TWIST, ProposalConfig
from tokensteer.tasks.common.task import data_file, data_folder
from tokensteer.tasks.images import recipe
from tokensteer.tasks.images.recipe import CLASSES, VOCAB_SIZE, Data, Recipe
from tokensteer.tasks.nets import ConvConfig, PatchConfig, UNetConfig, ValueConfig
from tokensteer.train import Plan, StepVariance

SIDE = 28
THRESHOLD = 127
FILE = f"mnist_binary_thr{THRESHOLD}.npz"


def data() -> Data:
    """60,000 images to train on and 10,000 to test with."""
    command = "from tokensteer.tasks.images import mnist; mnist.binarise('FOLDER')"
    file = data_file(FILE, f', or make it from MNIST\'s own four files by python -c "{command}"')
    return recipe.unpack(file, SIDE * SIDE)


def binarise(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the file of `data` from train-images-idx3-ubyte and the other three files of MNIST, gzipped or not."""
    arrays: dict[str, Any] = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        grey = _idx(Path(folder), f"{stem}-images-idx3-ubyte")
        arrays[part] = np.packbits(grey.reshape(len(grey), -1) > THRESHOLD, axis=1)
        arrays[f"{part}_y"] = _idx(Path(folder), f"{stem}-labels-idx1-ubyte")
    file = (data_folder() if out is None else Path(out)) / FILE
    arrays_in.write(file, **arrays)
    return file


def _idx(folder: Path, name: str) -> Any:
    """The array of an idx file: two zero bytes, 8, the number of axes, their lengths, the bytes."""
    plain, zipped = folder / name, folder / f"{name}.gz"
    if not plain.is_file() and not zipped.is_file():
        raise FileNotFoundError(
            f"there is neither {plain} nor {zipped.name} beside it: give the folder of MNIST's files"
        )
    try:
        raw = plain.read_bytes() if plain.is_file() else gzip.decompress(zipped.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{zipped} is damaged ({error}): fetch it again") from error
    axes = raw[3] if raw[:3] == b"\0\0\x08" else 0
    shape = [int.from_bytes(raw[4 + 4 * k : 8 + 4 * k], "big") for k in range(axes)]
    if not axes or len(raw) != 4 + 4 * axes + int(np.prod(shape)):
        raise ValueError(f"{plain if plain.is_file() else zipped} is damaged, or no idx file of bytes")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


RECIPE = Recipe(
    name="mnist",
    side=SIDE,
    data=data,
    denoiser=UNetConfig(VOCAB_SIZE, SIDE, SIDE, channels=(48, 96, 144), blocks=2),
    reward=ConvConfig(VOCAB_SIZE, SIDE, SIDE, CLASSES, channels=(16, 32, 64)),
    judge=PatchConfig(VOCAB_SIZE, SIDE, SIDE, CLASSES, patch=4, hidden=64, depth=4, heads=4),
    plans=(
        Plan(10_000, batch_size=256, rate=1e-3, average=0.9995),
        Plan(4000, batch_size=256, rate=3e-3),
        Plan(8000, batch_size=256, rate=1e-3),
    ),
    proposal=ProposalConfig(
        STEPWISE,
        StepVariance(),
        ValueConfig("unet", asdict(UNetConfig(VOCAB_SIZE, SIDE, SIDE, channels=(24, 48, 96), blocks=1)), beside=True),
        kl=0.5,
        twist=TWIST,
    ),
    shift=2,
    flips=0.01,
    source=f"MNIST, ink where the grey value is above {THRESHOLD}",
)

task = partial(recipe.task, RECIPE)
