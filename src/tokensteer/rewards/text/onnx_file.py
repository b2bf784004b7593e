"""The graph of an ONNX file, read without the onnx library: nodes, and stored tensors by name.

ONNX is a protocol buffer: fields are a number and a kind, then a varint, 8 or 4 bytes, or a length and bytes. Of the
schema only what holds nodes and tensors is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TYPES = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8"}
_FIELDS = {"<f4": 4, "<i4": 5, "u1": 5, "i1": 5, "?": 5, "<i8": 7, "<f8": 10}  # where values are without raw bytes


@dataclass
class Attribute:
    name: str = ""
    i: int = 0


@dataclass
class Node:
    """What is read of a node."""

    op_type: str = ""
    input: Sequence[str] = ()
    output: Sequence[str] = ()
    attribute: Sequence[Any] = ()


def read(file: Path) -> tuple[list[Node], dict[str, Tensor]]:
    """The nodes of a file and its stored tensors. Raises ValueError naming the file if it is damaged."""
    if not file.is_file():
        raise FileNotFoundError(f"no ONNX file at {file}: check the path")
    try:
        nodes: list[Node] = []
        tensors: dict[str, Tensor] = {}
        for number, graph in fields(file.read_bytes()):
            if number != 7 or not isinstance(graph, bytes):
                continue
            for part, content in fields(graph):
                if part == 1 and isinstance(content, bytes):
                    nodes.append(_node(content))
                elif part == 5 and isinstance(content, bytes):
                    name, value = _tensor(content)
                    tensors[name] = value
        return nodes, tensors
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is damaged, or no ONNX file ({error}): copy it again") from error


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: their numbers, and whole numbers or bytes."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(content, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(content, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field has the kind {kind}")
        if place + size > len(content):
            raise ValueError("a field is cut off")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def _node(content: bytes) -> Node:
    node = Node()
    for number, value in fields(content):
        if not isinstance(value, bytes):
            continue
        if number in (1, 2):
            end = "input" if number == 1 else "output"
            setattr(node, end, [*getattr(node, end), value.decode()])
        elif number == 4:
            node.op_type = value.decode()
        elif number == 5:
            found = dict(fields(value))
            name, i = found.get(1, b""), found.get(3, 0)
            named = name.decode() if isinstance(name, bytes) else ""
            node.attribute = [*node.attribute, Attribute(named, int(i or 0))]
    return node


def _tensor(content: bytes) -> tuple[str, Tensor]:
    shape: list[int] = []
    name, kind, raw, values = "", 0, None, dict[int, list[int | bytes]]()
    for number, value in fields(content):
        if number == 1:
            shape += [value] if isinstance(value, int) else _varints(value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8 and isinstance(value, bytes):
            name = value.decode()
        elif number == 9 and isinstance(value, bytes):
            raw = value
        else:
            values.setdefault(number, []).append(value)
    dtype = _TYPES[kind]
    if raw is None:
        raw = _unpacked(values.get(_FIELDS.get(dtype, 0), []), dtype)
    return name, torch.from_numpy(np.frombuffer(raw, dtype).reshape(shape).copy())  # pyright: ignore[reportUnknownMemberType]


def _unpacked(values: list[int | bytes], dtype: str) -> bytes:
    """The bytes of numbers that are stored one by one, or as a run."""
    if dtype in ("<f4", "<f8"):
        return b"".join(value for value in values if isinstance(value, bytes))
    numbers = [k for value in values for k in ([value] if isinstance(value, int) else _varints(value))]
    signed = [k - (1 << 64) if k >> 63 else k for k in numbers]
    return np.array(signed, np.int64).astype(dtype).tobytes()


def _varints(content: bytes) -> list[int]:
    found: list[int] = []
    place = 0
    while place < len(content):
        value, place = _varint(content, place)
        found.append(value)
    return found
