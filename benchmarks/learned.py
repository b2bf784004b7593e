"""Learned proposals: what their weights are like, and what each objective learns in the same time.

    python -m benchmarks.learned weights mnist --goal 4 --kl 0.5 --device cuda
    python -m benchmarks.learned objective digits likelihood --goal 8 --kl 1 --seconds 90 --device cuda
    python -m benchmarks.learned twist digits contrastive --goal 8 --kl 1 --seconds 90 --device cuda
    python -m benchmarks.learned scales mnist --goal 4 --kl 0.5 --device cuda

The first measures a stored proposal. The second trains one, with a plan that is the same for all objectives, and
measures it. ESS/N is that of 16 particles without resampling. The third trains a twist for the model, or for a proposal
that it trains before, and measures SMC with and without it. The last measures SMC_amot with four particles at several
scales, to choose one by the standard deviation of log Z: its seeds are not those of the first.
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
from torch import nn

import tokensteer as ts
from tokensteer.core.steering.methods import Method
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.objectives import OBJECTIVES, STATE, TWISTS, Aim, make_baseline
from tokensteer.tasks.common.proposals import STEPWISE, ProposalTraining
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.tasks.nets import ValueNet
from tokensteer.train import Learned, Likelihood, ProposalPlan, fit_proposal
from tokensteer.train.accepted import Accepted
from tokensteer.train.held_out import SCALES

PLAN = replace(
    STEPWISE,
    rounds=1,
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
    show(made, learned_rows(made, own), populations, seeds)


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
    rounds: int | None = None,
    steps: int = 50,
    populations: int = 64,
    device: str = "cpu",
) -> None:
    """Train a proposal by an objective for some seconds or rounds, and measure it."""
    made, taught = made_and_taught(task, Setup(steps, goal, kl, device=device))
    learned = trained(made, taught, name, baseline, seconds, rounds)
    show(made, learned_rows(made, ts.Amortised(learned.denoiser)), populations, (0, 1))


def twist(
    task: tyro.conf.Positional[str],
    name: tyro.conf.Positional[str],
    beside: bool = False,
    after: str | None = None,
    rounds_before: int | None = None,
    goal: int | None = None,
    kl: float | None = None,
    seconds: float = 90.0,
    rounds: int | None = None,
    steps: int = 50,
    populations: int = 64,
    device: str = "cpu",
) -> None:
    """Train a twist by an objective for some seconds or rounds, in place of the tilt's estimates or `beside` them, and
    measure it. It is for the model, or for a proposal that is trained by the objective `after` before, for as many
    seconds or for `rounds_before`."""
    made, taught = made_and_taught(task, Setup(steps, goal, kl, device=device))
    assert taught.config.twist is not None, "the task learns its twist with its proposal"
    plan = lasting(taught.config.twist, seconds, rounds)
    net = taught.copy_to_train(made.name, device).requires_grad_(False)
    own, kind = None, "SMC_base"
    if after is None:
        plan = replace(plan, on_policy=0.0)  # the model's paths need no other network
    else:
        learned = trained(made, taught, after, STATE, seconds, rounds_before)
        net, own, kind = learned.net, ts.Amortised(learned.denoiser), "SMC_amot"
    torch.manual_seed(0)
    value = ValueNet(replace(taught.config.value, beside=beside)).to(device)
    learned = fitted(made, taught, net, plan, TWISTS[name](beside), value, name)
    lookahead = ts.LearnedTwist(learned.baseline, value.ignores_time)
    twisted = lookahead.beside(made.tilt) if beside else lookahead.on(made.tilt)
    alone = ts.smc_base(made.model, made.tilt) if own is None else ts.prop_amot(made.model, made.tilt, own)
    rows = {f"{kind}, no resampling": (replace(alone, when=ts.triggers.never), 16)}
    for words, tilt in ((kind, made.tilt), (f"{kind} with the twist", twisted)):
        method = ts.smc_base(made.model, tilt) if own is None else ts.smc_amot(made.model, tilt, own)
        rows |= {f"{words}{' ' * (particles == 16)}": (method, particles) for particles in (4, 16)}
    show(made, rows, populations, (0, 1))


def made_and_taught(task: str, setup: Setup) -> tuple[Task, ProposalTraining]:
    course = TASKS[task].proposal
    assert course is not None, "the task has no learned proposal"
    return TASKS[task].make(setup), course(setup.goal, SHIPPED)


def lasting(plan: ProposalPlan, seconds: float, rounds: int | None) -> ProposalPlan:
    """The plan for so many rounds, which every machine repeats, or seconds."""
    if rounds is None:
        return replace(plan, rounds=10**9, seconds=seconds)
    return replace(plan, rounds=rounds, seconds=None)


def trained(
    made: Task, taught: ProposalTraining, name: str, baseline: str, seconds: float, rounds: int | None
) -> Learned:
    """A proposal, by an objective and a baseline."""
    aim, net = OBJECTIVES[name], taught.copy_to_train(made.name, str(made.model.device))
    plan = lasting(SAMPLES if isinstance(aim, Likelihood) else PLAN, seconds, rounds)
    plan = replace(plan, times=None) if aim.whole else plan
    torch.manual_seed(0)
    value = make_baseline(baseline, replace(taught.config.value, beside=False), made.model.steps)
    return fitted(made, taught, net, plan, aim, value.to(made.model.device), f"{name}, baseline {baseline}")


def fitted(
    made: Task, taught: ProposalTraining, net: nn.Module, plan: ProposalPlan, aim: Aim, value: nn.Module, name: str
) -> Learned:
    """Train, and say how much it was."""
    assert not isinstance(aim, Accepted), "digits and its like have no sequences to accept"
    began = time.process_time()
    learned = fit_proposal(
        ts.Steering(made.model, made.tilt),
        net,
        taught.as_denoiser,
        plan=plan,
        generator=torch.Generator(made.model.device).manual_seed(0),
        objective=aim,
        baseline=value,
    )
    last = learned.history[-1]
    sys.stdout.write(
        f"{name}: {last.step} rounds, {learned.rows} rows, {last.seconds:.0f} s, {time.process_time() - began:.0f} s "
        "of processors\n"
    )
    sys.stdout.flush()
    return learned


def learned_rows(task: Task, own: ts.Amortised | ts.OtherHead) -> Mapping[str, tuple[Method, int]]:
    scale = f" at {own.scale:g}" if isinstance(own, ts.Amortised) else ""
    return {
        "model, no resampling": (replace(ts.smc_base(task.model, task.tilt), when=ts.triggers.never), 16),
        f"learned{scale}, no resampling": (ts.prop_amot(task.model, task.tilt, own), 16),
        "SMC_amot": (ts.smc_amot(task.model, task.tilt, own), 4),
        "SMC_amot ": (ts.smc_amot(task.model, task.tilt, own), 16),
        "SMC_grad": (ts.smc_grad(task.model, task.tilt), 16),
    }


def show(task: Task, rows: Mapping[str, tuple[Method, int]], populations: int, seeds: tuple[int, ...]) -> None:
    """A line for each method, with standard errors over populations; twice as many of them with four particles."""
    for name, (method, particles) in rows.items():
        began, shares, log_z, spread, judged = time.perf_counter(), [], [], [], []
        for seed in seeds:
            many = populations if particles == 16 else 2 * populations
            result = method(particles, many, generator=torch.Generator(task.model.device).manual_seed(seed))
            shares.append(result.ess[-1] / particles)
            log_z.append("{:.2f} ± {:.2f}".format(*result.pooled_log_z))
            spread.append(f"{float(result.log_z.std()):.2f}")
            judged.append(str(task.metrics(result)["accuracy"]))
        share = torch.cat(shares)
        sys.stdout.write(
            f"{task.name}, {name.strip()}, N = {particles}: ESS/N {float(share.mean()):.3f} ± "
            f"{float(share.std() / len(share) ** 0.5):.3f} (n = {len(share)}), log Z {', '.join(log_z)}, sd "
            f"{', '.join(spread)}, judge {', '.join(judged)}, {time.perf_counter() - began:.1f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"weights": weights, "objective": objective, "twist": twist, "scales": scales})
