"""Rewards and denoisers that raise, hang, write to their input or return NaN at rare states: nothing is silently wrong,
and a steering works as before once they are well again."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Toy, seeded

import tokensteer as ts

B = Toy("B")


@dataclass
class Faulty:
    """A function of sequences with a fault that begins after `healthy` calls; None for never."""

    function: Callable[..., Tensor]
    fault: Callable[[Tensor], object]
    healthy: int | None = None
    calls: int = 0

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        found = self.function(x, *rest).clone()
        self.calls += 1
        if self.healthy is not None and self.calls > self.healthy:
            changed = self.fault(x)
            return changed if isinstance(changed, Tensor) else found
        return found


def hang(x: Tensor) -> None:
    time.sleep(60)


def crash(x: Tensor) -> None:
    raise ConnectionError("the judge does not answer")


METHODS: dict[str, Callable[[ts.Model, Any], ts.Steering]] = {
    "draws": lambda model, reward: ts.Steering(model, ts.Tilt(reward, B.kl, draws=2)),
    "exact estimates": lambda model, reward: ts.Steering(model, ts.Tilt(reward, B.kl, estimator=ts.Exact())),
    "the end alone": lambda model, reward: ts.Steering(model, ts.Tilt(reward, B.kl, ramp=ts.ramps.end)),
    "enumeration": lambda model, reward: ts.Steering(
        model, ts.Tilt(reward, B.kl, estimator=ts.Exact()), ts.Enumerated()
    ),
}


def run(steering: ts.Steering, **options: Any) -> ts.Result:
    return ts.smc(steering, 8, 2, generator=seeded(), **options)


def same(first: ts.Result, second: ts.Result) -> bool:
    return torch.equal(first.samples, second.samples) and torch.equal(first.log_w, second.log_w)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharing", [True, False])
def test_a_reward_that_writes_to_its_input_now_and_then_is_refused(method: str, sharing: bool) -> None:
    """The construction sees no write. Samples were what the reward had left of them, with weights of what they were."""
    reward = Faulty(B.reward, Tensor.zero_)
    steering = METHODS[method](replace(B.model("mdm").base, sharing=sharing), reward)
    healthy = run(steering)
    reward.healthy, reward.calls = 0, 0
    with pytest.raises(ValueError, match="the reward writes to the sequences it is given"):
        run(steering)
    reward.healthy = None
    assert same(run(steering), healthy)


@pytest.mark.parametrize("sharing", [True, False])
def test_a_denoiser_that_writes_to_its_input_now_and_then_is_refused(sharing: bool) -> None:
    model = B.model("mdm").base
    denoiser = Faulty(model.denoiser, Tensor.zero_)
    steering = ts.Steering(replace(model, denoiser=denoiser, sharing=sharing), ts.Tilt(B.reward, B.kl))
    denoiser.healthy, denoiser.calls = 1, 0
    with pytest.raises(ValueError, match="the denoiser writes to the sequences it is given"):
        run(steering)


@pytest.mark.parametrize("method", METHODS)
def test_errors_of_a_reward_pass_and_leave_nothing_behind(method: str) -> None:
    """Neither memory limits nor cached estimates nor counts of a run that failed are seen by the next one."""
    reward = Faulty(B.reward, crash)
    steering = METHODS[method](B.model("mdm"), reward)
    healthy = run(steering)
    for calls in range(2):
        reward.healthy, reward.calls = calls, 0
        with pytest.raises(ConnectionError, match="the judge does not answer"):
            run(steering, memory="2kB")
    reward.healthy = None
    again = run(steering)
    assert same(again, healthy)
    assert again.rows == healthy.rows


def test_a_reward_that_hangs_can_be_stopped() -> None:
    reward = Faulty(B.reward, hang)
    steering = METHODS["draws"](B.model("mdm"), reward)
    healthy = run(steering)

    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    reward.healthy, reward.calls = 1, 0
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(steering)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    reward.healthy = None
    assert same(run(steering), healthy)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_nan_at_a_rare_sequence_is_an_error_or_never_met(method: str, bad: float) -> None:
    """The sequence is so rare that a steering is made and most runs never see it."""
    rare = run(METHODS[method](B.model("mdm"), B.reward)).samples[0, 0]

    def reward(x: Tensor) -> Tensor:
        return torch.where((x == rare).all(-1) & spoiled[0], bad, B.reward(x))

    spoiled = [torch.tensor(False)]
    steering = METHODS[method](B.model("mdm"), reward)
    spoiled[0] = torch.tensor(True)
    raised = list[str]()
    for seed in range(8):
        try:
            result = ts.smc(steering, 4, 3, generator=seeded(seed))
        except (FloatingPointError, ValueError) as error:
            raised.append(str(error))
            continue
        assert result.log_w.isfinite().all()
        assert not (result.samples == rare).all(-1).any()
    assert raised
    assert all("the reward" in message for message in raised)
