"""Runs in threads, in forked processes and beside an event loop are those of one thread."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Toy, seeded

import tokensteer as ts

B = Toy("B")


def zeros(x: Tensor) -> Tensor:
    """How often token 0 is there, in ids or one-hots."""
    return (x[..., 0] if x.is_floating_point() else (x == 0).double()).sum(-1)


def steering(kind: str) -> ts.Steering:
    if kind == "gradient":
        soft = ts.Tilt(zeros, B.kl, estimator=ts.SoftInput(), differentiable=True)
        return ts.Steering(B.model("mdm"), soft, ts.Gradient())
    return ts.Steering(B.model("remdm"), ts.Tilt(B.reward, B.kl, draws=2))


def run(path: ts.Steering, seed: int, **options: Any) -> ts.Result:
    return ts.smc(path, 8, 2, generator=seeded(seed), **options)


def same(first: ts.Result, second: ts.Result) -> bool:
    return (
        torch.equal(first.samples, second.samples)
        and torch.equal(first.log_w, second.log_w)
        and first.rows == second.rows
    )


@pytest.mark.parametrize("kind", ["draws", "gradient"])
def test_threads_that_share_a_steering(kind: str) -> None:
    path, memory = steering(kind), [None, "2kB"] * 4
    alone = [run(path, seed, memory=memory[seed]) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: run(path, seed, memory=memory[seed]), range(8)))
    assert all(same(first, second) for first, second in zip(alone, together, strict=True))


@pytest.mark.parametrize("kind", ["draws", "gradient"])
def test_runs_beside_an_event_loop(kind: str) -> None:
    path = steering(kind)

    async def gather() -> list[ts.Result]:
        return await asyncio.gather(*(asyncio.to_thread(run, path, seed) for seed in range(4)))

    assert all(same(found, run(path, seed)) for seed, found in enumerate(asyncio.run(gather())))


def test_runs_in_a_forked_process(tmp_path: Path) -> None:
    path = steering("draws")
    before = run(path, 0)
    children = list[int]()
    for number in range(2):
        child = os.fork()
        if not child:
            code = 1
            try:
                run(path, number).save(tmp_path / f"{number}.safetensors")
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert same(ts.Result.load(tmp_path / "0.safetensors"), before)
    assert same(ts.Result.load(tmp_path / "1.safetensors"), run(path, 1))
