"""ONNX files, written field by field as protocol buffers: a number and a kind, then a varint, or a length and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tokensteer.rewards.text.onnx_file import Node

TYPES = {torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int64: 7}


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def write(file: Path, nodes: Iterable[Node], stored: Mapping[str, Tensor]) -> None:
    """A model with these nodes and stored tensors."""
    graph = b"".join(field(1, _node(node)) for node in nodes)
    graph += b"".join(field(5, _tensor(name, value)) for name, value in stored.items())
    file.write_bytes(field(1, 8) + field(7, graph))


def _node(node: Node) -> bytes:
    ends = [(1, name) for name in node.input] + [(2, name) for name in node.output] + [(4, node.op_type)]
    attributes = b"".join(field(5, field(1, one.name.encode()) + field(3, one.i)) for one in node.attribute)
    return b"".join(field(number, text.encode()) for number, text in ends) + attributes


def _tensor(name: str, value: Tensor) -> bytes:
    shape = b"".join(field(1, size) for size in value.shape)
    return (
        shape + field(2, TYPES[value.dtype]) + field(8, name.encode()) + field(9, value.contiguous().numpy().tobytes())
    )
