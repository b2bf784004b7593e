"""Files of others, damaged and hostile ones: each is read, or refused by its name with a ValueError or OSError."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tokensteer as ts
from tokensteer import files, tensorfile
from tokensteer.tasks.common import prompts

OLD = Path(__file__).parent / "folders" / "0.1.0"
WHOLE = next((OLD / "rows").glob("*.safetensors")).read_bytes()
DEEP = b"[" * 200_000


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


FOREIGN: dict[str, bytes] = {
    "nothing": b"",
    "a picture": next((OLD / "rows").glob("*.png")).read_bytes(),
    "JSON": (OLD / "config.json").read_bytes(),
    "deep JSON": DEEP,
    "text": b"Ein Gedicht\n" * 100,
    "a pickle": pickle.dumps({"log_w": [0.0], "samples": [0]}),
    "a header longer than the file": struct.pack("<Q", 2**63 - 1) + b"{}",
    "a deep header": struct.pack("<Q", len(DEEP)) + DEEP,
    "no tensors": with_header({}),
    "a tensor beyond the file": with_header({"log_w": {"dtype": "F64", "shape": [2, 2], "data_offsets": [0, 32]}}),
    "tensors that overlap": with_header(
        {
            name: {"dtype": "F64", "shape": [1, 1], "data_offsets": [0, 8]}
            for name in ("samples", "log_w", "ess", "ancestors")
        },
        bytes(8),
    ),
    "a size of 2^63": with_header({"log_w": {"dtype": "F64", "shape": [2**63, 2], "data_offsets": [0, 0]}}),
}


@pytest.mark.parametrize("read", [ts.Result.load, tensorfile.read, files.read_json])
@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_files(what: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "given.file"
    file.write_bytes(FOREIGN[what])
    if what == "JSON" and read is files.read_json:
        assert read(file)
        return
    try:
        read(file)
    except (ValueError, OSError) as error:
        raised = error
    else:
        assert (what, read) == ("no tensors", tensorfile.read), "it was read"
        return
    assert "given.file" in str(raised)


@pytest.mark.parametrize("read", [ts.Result.load, tensorfile.read, files.read_json, prompts.read, ts.open_run])
def test_folders_and_files_that_are_not_there(read: Callable[[Path], Any], tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere.file", tmp_path):
        with pytest.raises((ValueError, OSError), match=place.name):
            read(place)


def test_a_result_that_was_cut_or_changed_is_refused_or_whole(tmp_path: Path) -> None:
    """What loads has shapes that fit, and weights that are finite or -inf."""
    chance, file, loaded = random.Random(0), tmp_path / "cut.safetensors", 0
    for number in range(300):
        content = bytearray(WHOLE)
        if number % 3 == 0:
            content = content[: chance.randrange(len(content))]
        else:
            for _ in range(chance.choice([1, 1, 4, 32])):
                content[chance.randrange(len(content) if number % 3 == 1 else 900)] = chance.randrange(256)
        file.write_bytes(content)
        try:
            result = ts.Result.load(file)
        except (ValueError, OSError) as error:
            message = str(error)
        else:
            loaded += 1
            assert not (result.log_w.isnan() | (result.log_w == torch.inf)).any()
            assert repr(result)
            assert result.html()
            continue
        assert "cut.safetensors" in message
    assert 10 < loaded < 200


PROMPTS: dict[str, tuple[str, bytes]] = {
    "deep JSON": ("jsonl", DEEP),
    "no text": ("jsonl", b'{"prompt": 3}\n'),
    "a list": ("jsonl", b'["The movie"]\n'),
    "half a character": ("jsonl", b'{"prompt": "\\ud83d"}\n'),
    "not UTF-8": ("txt", b"caf\xe9\n"),
    "UTF-16": ("txt", "The movie\n".encode("utf-16")),
    "nothing": ("txt", b"\n\n  \n"),
    "a picture": ("txt", FOREIGN["a picture"]),
    "a number that is too long": ("jsonl", b"1" * 10_000),
}


@pytest.mark.parametrize("what", PROMPTS)
def test_prompts_that_are_none(what: str, tmp_path: Path) -> None:
    kind, content = PROMPTS[what]
    file = tmp_path / f"given.{kind}"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=file.name):
        prompts.read(file)


def test_prompts_with_markup_and_control_characters_are_texts(tmp_path: Path) -> None:
    given = ["<script>alert(1)</script>", "\x1b[31mred", "[bold]rich[/bold]", "../../etc/passwd", "a\u2028b", "{0} %s"]
    file = tmp_path / "given.txt"
    file.write_text("\n".join(given) + "\n", "utf-8")
    assert [prompt.text for prompt in prompts.read(file)] == given
