"""Language models from GGUF files: metadata, and tensors of the formats F32, F16, Q8_0 and Q4_1 as float32.

A file has a header, key-value pairs, a list of tensors, and their data, aligned. Dimensions are listed from the
innermost one, so torch's shape is their reverse. The quantised formats store blocks of 32 numbers of a row:

    Q8_0: a scale (float16) and 32 int8               x = scale · q
    Q4_1: a scale, a minimum (float16) and 16 bytes   x = scale · q + minimum, q of the low halves first
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
BLOCK = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_Q8_0 = np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("q", "u1", BLOCK // 2)])
_FORMATS = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 3: _Q4_1, 8: _Q8_0}


@dataclass(frozen=True)
class GGUF:
    """The metadata and the tensors of a file."""

    metadata: dict[str, Any]
    tensors: dict[str, NDArray[np.float32]]

    def number(self, name: str) -> Any:
        """An entry of the metadata, without the name of the architecture before it."""
        key = f"{self.metadata.get('general.architecture')}.{name}"
        if key not in self.metadata:
            raise ValueError(f"the file has no entry {key}: give a GGUF file of a Llama")
        return self.metadata[key]


class _Bytes:
    """Reads values one after the other."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self.content, self.place)
        self.place += struct.calcsize(letter)
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.place += length
        return self.content[self.place - length : self.place].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _SCALARS:
                letter = _SCALARS[inner]
                found = struct.unpack_from(f"<{count}{letter}", self.content, self.place)
                self.place += count * struct.calcsize(letter)
                return list(found)
            return [self.value(inner) for _ in range(count)]
        return self.number(_SCALARS[kind])


def read(file: Path) -> GGUF:
    """The metadata and tensors of a file. Raises ValueError naming the file if it is damaged or of another format."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}: give a GGUF file of a language model")
    content = file.read_bytes()
    try:
        return _parsed(content)
    except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is damaged, or no GGUF file that can be read ({error}): copy it again") from error


def _parsed(content: bytes) -> GGUF:
    if content[:4] != MAGIC:
        raise ValueError("it does not begin with GGUF")
    reader = _Bytes(content)
    reader.place = 4
    version = reader.number("I")
    if version not in VERSIONS:
        raise ValueError(f"it has version {version}, and versions {VERSIONS} can be read")
    count, entries = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        name = reader.text()
        metadata[name] = reader.value(reader.number("I"))
    listed: list[tuple[str, list[int], int, int]] = []
    for _ in range(count):
        name = reader.text()
        shape = [reader.number("Q") for _ in range(reader.number("I"))][::-1]
        listed.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    start = -(-reader.place // alignment) * alignment
    return GGUF(metadata, {name: _tensor(content, start + at, shape, kind) for name, shape, kind, at in listed})


def _tensor(content: bytes, start: int, shape: list[int], kind: int) -> NDArray[np.float32]:
    if kind not in _FORMATS:
        raise ValueError(f"a tensor has the format {kind}, and F32, F16, Q8_0 and Q4_1 can be read")
    size, stored = int(np.prod(shape)), _FORMATS[kind]
    if stored.fields is None:
        return np.frombuffer(content, stored, size, start).astype(np.float32).reshape(shape)
    if shape[-1] % BLOCK:
        raise ValueError(f"a row of {shape[-1]} numbers is not made of blocks of {BLOCK}")
    blocks: Any = np.frombuffer(content, stored, size // BLOCK, start)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == 8:
        return (blocks["q"] * scale).astype(np.float32).reshape(shape)
    q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], 1)
    return (q * scale + blocks["minimum"].astype(np.float32)[:, None]).astype(np.float32).reshape(shape)
