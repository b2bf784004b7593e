"""Learned proposals: what their weights are like, and what each objective learns in the same time.

    python -m benchmarks.learned weights mnist --goal 4 --kl 0.5 --device cuda
    python -m benchmarks.learned objective digits likelihood --goal 8 --kl 1 --seconds 90 --device cuda
    python -m benchmarks.learned scales mnist --goal 4 --kl 0.5 --device cuda

The first measures a stored proposal. The second trains one, with a plan that is the same for all objectives, and
measures it. ESS/N is that of 16 particles without resampling. The third measures SMC_amot with four particles at
several scales, to choose one by the standard deviation of log Z: its seeds are not those of the first.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import tyro

import tokensteer as ts
from tokensteer.core.steering.methods import Method
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.objectives import OBJECTIVES, STATE, make_baseline
from tokensteer.tasks.common.proposals import STEPWISE
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.train import Likelihood, fit_proposal
from tokensteer.train.held_out import SCALES

PLAN = replace(
    STEPWISE,
    rounds=10**9,
    paths=256,
    on_policy=0.9,
    rate=6e-4,
    average=0.98,
    report_every=4,
    rows=16384,
    held_out=512,
)
SAMPLES = replace(PLAN, updates=50, replay=24, rate=3e-4)  # an update of Likelihood is one batch


def weights(
    task: tyro.conf.Positional[str],
    goal: int | None = None,
    kl: float | None = None,
    scale: float | None = None,
    steps: int = 100,
    populations: int = 64,
    seeds: tuple[int, ...] = (0, 1, 2),
    device: str = "cpu",
    reward: str | None = None,
    weights: Path = SHIPPED,
) -> None:
    """Measure a stored proposal, at the scale of its card unless given, beside the model and the gradient."""
    made = TASKS[task].make(Setup(steps, goal, kl, device=device, reward=reward, weights=weights))
    assert made.learned is not None, "the task has no learned proposal"
    own = made.learned().proposal
    if scale is not None:
        assert isinstance(own, ts.Amortised), "a head has no scale"
        own = replace(own, scale=scale)
    show(made, own, populations, seeds)


def scales(
    task: tyro.conf.Positional[str],
    goal: int | None = None,
    kl: float | None = None,
    tried: tuple[float, ...] = SCALES,
    particles: int = 4,
    steps: int = 100,
    populations: int = 128,
    seeds: tuple[int, ...] = (10, 11, 12),
    device: str = "cpu",
    weights: Path = SHIPPED,
) -> None:
    """Compare scales of a stored proposal in SMC_amot, on seeds kept for choosing."""
    made = TASKS[task].make(Setup(steps, goal, kl, device=device, weights=weights))
    assert made.learned is not None, "the task has no learned proposal"
    own = made.learned().proposal
    assert isinstance(own, ts.Amortised), "a head has no scale"
    for scale in tried:
        method = ts.smc_amot(made.model, made.tilt, replace(own, scale=scale))
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        results = [method(particles, populations, generator=generator) for generator in generators]
        spread = [float(result.log_z.std()) for result in results]
        pooled = ", ".join("{:.2f} ± {:.2f}".format(*result.pooled_log_z) for result in results)
        sys.stdout.write(
            f"{task}, SMC_amot at {scale:g}, N = {particles}: sd of log Z {statistics.fmean(spread):.3f} "
            f"({', '.join(f'{value:.3f}' for value in spread)}), log Z {pooled}\n"
        )
        sys.stdout.flush()


def objective(
    task: tyro.conf.Positional[str],
    name: tyro.conf.Positional[str],
    baseline: str = STATE,
    goal: int | None = None,
    kl: float | None = None,
    seconds: float = 90.0,
    steps: int = 50,
    populations: int = 64,
    device: str = "cpu",
) -> None:
    """Train a proposal by an objective for some seconds, and measure it."""
    made = TASKS[task].make(Setup(steps, goal, kl, device=device))
    course = TASKS[task].proposal
    assert course is not None, "the task has no learned proposal"
    taught, aim = course(goal, SHIPPED), OBJECTIVES[name]
    net = taught.copy_to_train(made.name, device)
    plan = replace(SAMPLES if isinstance(aim, Likelihood) else PLAN, seconds=seconds)
    torch.manual_seed(0)
    learned = fit_proposal(
        ts.Steering(made.model, made.tilt),
        net,
        taught.as_denoiser,
        plan=replace(plan, times=None) if aim.whole else plan,
        generator=torch.Generator(device).manual_seed(0),
        objective=aim,
        baseline=make_baseline(baseline, replace(taught.config.value, beside=False), made.model.steps).to(device),
    )
    last = learned.history[-1]
    sys.stdout.write(f"{name}, baseline {baseline}: {last.step} rounds, {learned.rows} rows, {last.seconds:.0f} s\n")
    show(made, ts.Amortised(learned.denoiser), populations, (0, 1))


def show(task: Task, own: ts.Amortised | ts.OtherHead, populations: int, seeds: tuple[int, ...]) -> None:
    """A line for each method, with standard errors over populations; twice as many of them with four particles."""
    scale = f" at {own.scale:g}" if isinstance(own, ts.Amortised) else ""
    alone = replace(ts.smc_base(task.model, task.tilt), when=ts.triggers.never)
    rows: Mapping[str, tuple[Method, int]] = {
        "model, no resampling": (alone, 16),
        f"learned{scale}, no resampling": (ts.prop_amot(task.model, task.tilt, own), 16),
        "SMC_amot": (ts.smc_amot(task.model, task.tilt, own), 4),
        "SMC_amot ": (ts.smc_amot(task.model, task.tilt, own), 16),
        "SMC_grad": (ts.smc_grad(task.model, task.tilt), 16),
    }
    for name, (method, particles) in rows.items():
        began, shares, log_z, judged = time.perf_counter(), [], [], []
        for seed in seeds:
            many = populations if particles == 16 else 2 * populations
            result = method(particles, many, generator=torch.Generator(task.model.device).manual_seed(seed))
            shares.append(result.ess[-1] / particles)
            log_z.append("{:.2f} ± {:.2f}".format(*result.pooled_log_z))
            judged.append(str(task.metrics(result)["accuracy"]))
        share = torch.cat(shares)
        sys.stdout.write(
            f"{task.name}, {name.strip()}, N = {particles}: ESS/N {float(share.mean()):.3f} ± "
            f"{float(share.std() / len(share) ** 0.5):.3f} (n = {len(share)}), log Z {', '.join(log_z)}, judge "
            f"{', '.join(judged)}, {time.perf_counter() - began:.1f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"weights": weights, "objective": objective, "scales": scales})
