"""Tensors as typed lists."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def floats(values: Tensor) -> list[float]:
    return cast("list[float]", values.double().tolist())  # pyright: ignore[reportUnknownMemberType]


def ints(values: Tensor) -> list[int]:
    return cast("list[int]", values.long().tolist())  # pyright: ignore[reportUnknownMemberType]
