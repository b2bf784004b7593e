"""Random configurations of all parts: `tests/faults/fuzz.py` draws and checks them."""

from __future__ import annotations

import os

import pytest

from tests.faults.fuzz import fuzz

QUICK = 2000  # configurations in `make test`: 100 s of processor time
LONG, CHUNKS = int(os.environ.get("TOKENSTEER_FUZZ", "100000")), 20  # in `make slow`
SEED = int(os.environ.get("TOKENSTEER_FUZZ_SEED", "1"))


def demand_no_findings(seed: int, indices: range) -> None:
    report = fuzz(seed, indices)
    assert not report.findings, "\n".join([f"{len(report.findings)} findings:", *report.findings[:5]])
    assert report.outcomes["ran"] >= 0.6 * len(indices), f"too few configurations ran: {report}"


def test_random_configurations_hold_or_are_refused() -> None:
    demand_no_findings(0, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_random_configurations(chunk: int) -> None:
    each = LONG // CHUNKS
    demand_no_findings(SEED, range(chunk * each, (chunk + 1) * each))
