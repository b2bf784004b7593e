"""The tools that pack training data into small files, run as they are used."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokensteer.tasks.quality.features import INCEPTION
from tokensteer.tasks.quality.imagenet import EFFICIENTNET
from tokensteer.tasks.quality.published import find_file

TOOLS = Path(__file__).parents[2] / "tools"
EMOJI = ("emoji.npz", "emoji-encoder.safetensors", "emoji-vocab.txt", "lpips-vgg16.safetensors")
EMOJI_TEACHERS = (EFFICIENTNET[0], INCEPTION[0])


def tool(name: str, *arguments: str | Path, plain: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a tool; `plain` is Python without installed packages."""
    command = [sys.executable, *["-S"] * plain, TOOLS / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(TOOLS)
    import pieces  # pyright: ignore[reportMissingImports]

    return pieces


def test_pieces_are_put_together_again(tmp_path, pieces):
    contents = {"a.csv": b"text,label\n" * 300, "b.gguf": bytes(range(256)) * 40, "c.txt": b""}
    written = pieces.cut(pieces.archive(contents), tmp_path / "pieces", "text-data", 3000)
    assert len(written) > 3
    assert all(piece.stat().st_size == 3000 for piece in written[:-1])
    assert tool("pack_text.py", "unpack", tmp_path / "pieces", tmp_path / "data", plain=True).returncode == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir()} == contents
    written[1].unlink()
    with pytest.raises(ValueError, match="copy them again"):
        pieces.join(tmp_path / "pieces", "text-data")


def test_the_hash_is_that_of_the_joined_pieces(tmp_path, pieces):
    data = bytes(range(256)) * 20
    written = pieces.cut(data, tmp_path, "inception_half.pt", 2000)
    assert b"".join(piece.read_bytes() for piece in written) == pieces.join(tmp_path, "inception_half.pt") == data
    hashed = (tmp_path / "inception_half.pt.sha256").read_text()
    assert hashed == f"{hashlib.sha256(data).hexdigest()}  inception_half.pt\n"


def test_emoji_are_packed_and_unpacked_by_plain_python(tmp_path):
    failed = tool("pack_emoji.py", "pack", tmp_path, tmp_path / "pieces")
    assert f"lacks {', '.join(EMOJI + EMOJI_TEACHERS)}: make them" in failed.stderr
    package = tmp_path / "package" / "models"
    package.mkdir(parents=True)
    contents = {name: bytes([k]) * 1000 for k, name in enumerate(EMOJI + EMOJI_TEACHERS)}
    for name, content in contents.items():
        (tmp_path / name if name in EMOJI else package / name).write_bytes(content)
    for arguments in (("pack", tmp_path, tmp_path / "pieces"), ("unpack", tmp_path / "pieces", tmp_path / "there")):
        assert tool("pack_emoji.py", *arguments, plain=True).returncode == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "there").iterdir()} == contents


def test_images_are_packed_without_loss_and_the_scores_if_they_are_there(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    (tmp_path / "cifar").mkdir()
    arrays = {
        f"{part}_{what}": random.integers(0, 256, (count, *shape), np.uint8)
        for part, count in (("train", 9), ("test", 5))
        for what, shape in (("images", (32, 32, 3)), ("labels", ()))
    }
    for name, array in arrays.items():
        np.save(tmp_path / "cifar" / f"{name}.npy", array)
    said = tool("pack_cifar.py", "pack", tmp_path, tmp_path / "pieces").stdout
    assert f"has no {EFFICIENTNET[0]}" in said
    assert tool("pack_cifar.py", "unpack", tmp_path / "pieces", tmp_path / "there").returncode == 0
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.load(tmp_path / "there" / "cifar" / f"{name}.npy"), array)
    assert not (tmp_path / "there" / EFFICIENTNET[0]).exists()

    package, content = tmp_path / "package" / "weights", bytes(range(256)) * 9
    package.mkdir(parents=True)
    (package / EFFICIENTNET[0]).write_bytes(content)
    for arguments in (("pack", tmp_path, tmp_path / "more"), ("unpack", tmp_path / "more", tmp_path / "there")):
        ran = tool("pack_cifar.py", *arguments)
        assert (ran.returncode, ran.stdout) == (0, "")
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path / "there"))
    assert find_file(EFFICIENTNET[0], "any").read_bytes() == content  # where the benchmark looks


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pack_cifar.py", ("pack", "a")),
        ("pack_emoji.py", ("unpack", "a", "b", "c")),
        ("pack_text.py", ("mix", "a", "b")),
        ("pack_text.py", ()),
    ],
)
def test_other_arguments_show_the_usage(name: str, arguments: tuple[str, ...]):
    shown = tool(name, *arguments)
    assert shown.returncode == 1
    assert f"python tools/{name} unpack PIECES FOLDER" in shown.stderr
