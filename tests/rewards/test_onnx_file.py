"""ONNX files, read without the onnx library."""

from __future__ import annotations

import struct

import pytest
from onnx_writer import field, varint

from tokensteer.rewards.text import onnx_file


def test_an_onnx_file_is_read(tmp_path):
    numbers = struct.pack("<3f", 1.5, -2.0, 0.25)
    raw = field(1, 3) + field(2, 1) + field(8, b"raw") + field(9, numbers)
    one_by_one = field(1, 2) + field(1, 1) + field(2, 3) + field(8, b"listed") + field(5, 7) + field(5, (1 << 64) - 5)
    run_of = field(1, varint(1) + varint(2)) + field(2, 7) + field(8, b"packed") + field(7, varint(300) + varint(4))
    node = (
        field(1, b"x")
        + field(1, b"raw")
        + field(2, b"y")
        + field(4, b"Gemm")
        + field(5, field(1, b"transB") + field(3, 1))
    )
    graph = field(1, node) + b"".join(field(5, tensor) for tensor in (raw, one_by_one, run_of))
    file = tmp_path / "a.onnx"
    file.write_bytes(field(1, 8) + field(7, graph))
    (found,), stored = onnx_file.read(file)
    assert (found.op_type, found.input, found.output) == ("Gemm", ["x", "raw"], ["y"])
    assert [(one.name, one.i) for one in found.attribute] == [("transB", 1)]
    assert {name: value.tolist() for name, value in stored.items()} == {
        "raw": [1.5, -2.0, 0.25],
        "listed": [[7], [-5]],
        "packed": [[300, 4]],
    }
    file.write_bytes((field(1, 8) + field(7, graph))[:-3])
    with pytest.raises(ValueError, match="is damaged"):
        onnx_file.read(file)
