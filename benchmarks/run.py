"""What steering costs: tokensteer beside a plain dense implementation of the same algorithm, in one run.

python -m benchmarks.run --help
"""

from __future__ import annotations

import cProfile
import hashlib
import math
import platform
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tokensteer as ts
from benchmarks.dense import Dense
from benchmarks.nets import DenoiserNet, Timed, networks
from tokensteer.testing import TableDenoiser, enumerate_steering

DESCRIPTION = """\
Measure tokensteer against the paper's algorithm written the plain dense way (benchmarks/dense.py), on the same two
small random transformers (dim 128, 2 layers): a denoiser that ignores time, and a reward.

Everything runs in one thread, so that CPU seconds mean the same whatever else the machine does. Networks are wrapped
by a clock that also counts their rows; "outside" is the share of the CPU seconds that was not spent in them, forward
or backward. The dense runs cost the same at every step, so only their first steps are run and scaled up to all T; the
table says how many. Resampling is considered every --interval steps and done where ESS < N/2, in all of them.

  python -m benchmarks.run                  # the sizes of the goals, about twelve minutes
  python -m benchmarks.run --methods base   # one method only
  python -m benchmarks.run --quick          # small sizes, under a minute
  python -m benchmarks.run --seeds 20 --methods base  # only: rows and ESS of our runs over seeds
  python -m benchmarks.run --check          # only: is the dense baseline right? log Z against enumeration
  python -m benchmarks.run --profile --num-steps 25   # only: where our step spends its time"""


@dataclass(frozen=True)
class Options:
    particles: int = 16
    """N, in one population."""
    length: int = 100
    """L, tokens in a sequence."""
    num_steps: int = 100
    """T, denoising steps from all masked to clean."""
    vocab: int = 1000
    """V, the mask included."""
    draws: int = 4
    """M, clean samples for each estimate of the reward."""
    interval: int = 20
    """Resampling is considered every so many steps."""
    kl: float = 0.15
    """How hard to steer: the reward is divided by it. Small enough by default that resampling does happen."""
    dense_steps: int = 10
    """Steps the dense runs take before they are scaled up to T."""
    repeats: int = 1
    """How often the ratios are measured; each time has its own rows in the table, which show the spread."""
    seed: int = 0
    """Same seed, same samples."""
    methods: tuple[Literal["base", "grad"], ...] = ("base", "grad")
    """SMC_base, SMC_grad, or both."""
    quick: bool = False
    """Small sizes: N=8, L=32, T=32, V=256, resampling every 8 steps, one repeat."""
    growth: bool = True
    """Also measure how the cost grows with N, L, V, B and M, at quick sizes and T=8; left out by --quick."""
    seeds: int = 0
    """Only our own runs, with so many seeds: the mean of their rows and ESS, with its standard error, and leave."""
    check: bool = False
    """Only hold the dense baseline's log Z against enumeration on a toy, and leave."""
    profile: bool = False
    """Only profile our step, and leave."""


@dataclass(frozen=True)
class Cost:
    """Seconds and rows of one run; `ran` of its steps were run and the rest scaled."""

    cpu: float
    wall: float
    denoiser_cpu: float
    reward_cpu: float
    denoiser_rows: float
    reward_rows: float
    ran: int
    ess: float | None = None

    @property
    def outside(self) -> float:
        return 1 - (self.denoiser_cpu + self.reward_cpu) / self.cpu

    def scaled(self, factor: float) -> Cost:
        return Cost(
            self.cpu * factor,
            self.wall * factor,
            self.denoiser_cpu * factor,
            self.reward_cpu * factor,
            self.denoiser_rows * factor,
            self.reward_rows * factor,
            self.ran,
        )


def quick_sizes(options: Options) -> Options:
    return replace(options, particles=8, length=32, num_steps=32, vocab=256, interval=8, dense_steps=8, repeats=1)


def measure(run: Callable[[], object], denoiser: Timed, reward: Timed, ran: int) -> Cost:
    """Run once with all clocks at zero."""
    denoiser.reset()
    reward.reset()
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if cpu > 1.1 * wall:
        raise RuntimeError(
            f"{cpu:.2f} CPU seconds in {wall:.2f} s: more than one thread is at work, set OMP_NUM_THREADS=1"
        )
    return Cost(cpu, wall, denoiser.cpu, reward.cpu, denoiser.rows, reward.rows, ran)


def timed_networks(options: Options) -> tuple[Timed, Timed]:
    denoiser, reward = networks(options.vocab, options.length)
    return Timed(denoiser), Timed(reward)


@dataclass(frozen=True)
class Way:
    """One of our ways to run a method. `gumbel` takes the baseline's own gradient, through Gumbel-softmax draws and
    one-hots; else it is straight through and behind the embeddings, taken at each `every`-th step, of the estimate's
    own draws or of so many others."""

    name: str
    gradient: bool
    gumbel: bool = False
    every: int = 1
    draws: int | None = None


BASE = Way("tokensteer", False)
GRAD = Way("straight through", True)
WAYS = {
    False: (BASE,),
    True: (
        Way("Gumbel-softmax", True, gumbel=True),
        GRAD,
        Way("of one draw", True, draws=1),
        Way("every 2nd step", True, every=2),
        Way("every 4th step", True, every=4),
    ),
}


def ours(options: Options, way: Way, denoiser: Timed, reward: Timed, populations: int = 1) -> Callable[[], ts.Result]:
    """Our run, ready to go. Unless the way is `gumbel`, the head is applied where it is needed, outside the clock."""
    mask_id = options.vocab - 1
    network = denoiser.network
    assert isinstance(network, DenoiserNet)
    if way.gumbel:
        law = ts.from_logits(denoiser, mask_id, ignores_time=True)
    else:
        denoiser.network = network.body
        law = ts.from_hidden(denoiser, network.head, mask_id, ignores_time=True)
    canvas = ts.template(options.length, mask_id)
    model = ts.Diffusion(law, ts.Ancestral(mask_id), ts.uniform_steps(options.num_steps), canvas)
    estimator = ts.Relaxed(hard=True) if way.gumbel else ts.Sampled()
    tilt = ts.Tilt(
        reward, options.kl, draws=options.draws, average=ts.estimators.mean, estimator=estimator, differentiable=True
    )
    proposal = ts.Gradient(every=way.every, draws=way.draws) if way.gradient else ts.FromModel()
    when = ts.triggers.all_of(ts.triggers.every(options.interval), ts.triggers.ess_below(0.5))
    method = ts.Method(ts.Steering(model, tilt, proposal), when=when)
    return lambda: method(options.particles, populations, generator=torch.Generator().manual_seed(options.seed))


def measure_ours(options: Options, way: Way, populations: int = 1) -> Cost:
    denoiser, reward = timed_networks(options)
    results: list[ts.Result] = []
    run = ours(options, way, denoiser, reward, populations)
    cost = measure(lambda: results.append(run()), denoiser, reward, options.num_steps)
    return replace(cost, ess=float(results[0].ess[-1].mean()) / options.particles)


def measure_dense(options: Options, gradient: bool, batched: bool) -> Cost:
    """The first steps of the dense baseline, scaled up to all of them."""
    denoiser, reward = timed_networks(options)
    dense = Dense(
        denoiser,
        reward,
        options.vocab,
        options.length,
        options.num_steps,
        mask_id=options.vocab - 1,
        draws=options.draws,
        kl=options.kl,
        gradient=gradient,
        batched=batched,
        interval=options.interval,
    )
    torch.manual_seed(options.seed)
    steps = min(options.dense_steps, options.num_steps)
    # After k steps short of the end, k + 1 states have been looked at, the start among them; a whole run looks at T.
    looks = steps + (steps < options.num_steps)
    cost = measure(lambda: dense.run(options.particles, steps), denoiser, reward, steps)
    return cost.scaled(options.num_steps / looks)


# ---- tables


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left")
    return made


COLUMNS = ("CPU s", "wall s", "denoiser s", "reward s", "outside", "denoiser rows", "reward rows")


def cells(cost: Cost) -> list[str]:
    return [
        f"{cost.cpu:.2f}",
        f"{cost.wall:.2f}",
        f"{cost.denoiser_cpu:.2f}",
        f"{cost.reward_cpu:.2f}",
        f"{cost.outside:.0%}",
        f"{cost.denoiser_rows:,.0f}",
        f"{cost.reward_rows:,.0f}",
    ]


def compare(options: Options, gradient: bool, console: Console) -> None:
    """One method, ours and dense; the ratios of each repeat are taken within it."""
    name = "SMC_grad" if gradient else "SMC_base"
    costs = table(
        f"{name}: N={options.particles}, L={options.length}, T={options.num_steps}, V={options.vocab}, "
        f"M={options.draws}, every {options.interval}",
        "",
        *COLUMNS,
        "loop/",
        "batched/",
        "ESS/N",
    )
    for repeat in range(options.repeats):
        if repeat:
            costs.add_section()
        batched, loop = measure_dense(options, gradient, True), measure_dense(options, gradient, False)
        mine = [(way.name, measure_ours(options, way)) for way in WAYS[gradient]]
        for label, cost in (*mine, ("dense, batched", batched), ("dense, loop", loop)):
            ratios = f"{loop.cpu / cost.cpu:.2f}", f"{batched.cpu / cost.cpu:.2f}"
            costs.add_row(label, *cells(cost), *ratios, "" if cost.ess is None else f"{cost.ess:.2f}")
        default = GRAD if gradient else BASE
        own = dict(mine)[default.name]
        costs.caption = (
            f"{default.name}: {own.denoiser_rows / (options.particles * options.num_steps):.3f}·N·T denoiser rows, "
            f"{own.reward_rows / loop.reward_rows:.3f} of dense reward rows. "
            f"Dense: {loop.ran} of {options.num_steps} steps were run and scaled."
        )
    console.print(costs)


def spread(options: Options, gradient: bool, console: Console) -> None:
    """Rows and ESS of our runs over seeds: what one run says of them is mostly luck."""
    found = table(
        f"{'SMC_grad' if gradient else 'SMC_base'} over {options.seeds} seeds: mean ± standard error",
        "",
        "denoiser rows / N·T",
        "reward rows / M·N·T",
        "ESS/N",
        "CPU s",
    )
    asked = options.particles * options.num_steps
    for way in WAYS[gradient]:
        costs = [measure_ours(replace(options, seed=seed), way) for seed in range(options.seeds)]
        columns = (
            [cost.denoiser_rows / asked for cost in costs],
            [cost.reward_rows / (options.draws * asked) for cost in costs],
            [cost.ess or 0.0 for cost in costs],
            [cost.cpu for cost in costs],
        )
        found.add_row(way.name, *(_mean(torch.tensor(column, dtype=torch.float64)) for column in columns))
    console.print(found)


def _mean(values: Tensor) -> str:
    return f"{float(values.mean()):.3f} ± {float(values.std()) / math.sqrt(len(values)):.3f}"


GROWTH: dict[str, tuple[int, ...]] = {
    "N": (4, 8, 16, 32),
    "L": (16, 32, 64, 128),
    "V": (128, 512, 2048, 8192),
    "B": (1, 2, 4, 8),
    "M": (1, 2, 4, 8),
}


def sized(options: Options, axis: str, size: int) -> Options:
    match axis:
        case "N":
            return replace(options, particles=size)
        case "L":
            return replace(options, length=size)
        case "V":
            return replace(options, vocab=size)
        case "M":
            return replace(options, draws=size)
        case _:
            return options


def grow(options: Options, axis: str, console: Console) -> list[tuple[float, float]]:
    """Our cost as one size grows, the best of three runs. The exponent is the slope of log CPU over log size at the
    large end: 1 is linear."""
    small = replace(quick_sizes(options), num_steps=8, interval=4)
    costs = table(f"SMC_base and SMC_grad as {axis} grows", axis, "base CPU s", "outside", "grad CPU s", "outside")
    points: list[tuple[float, float]] = []
    for size in GROWTH[axis]:
        chosen, populations = sized(small, axis, size), size if axis == "B" else 1
        base, grad = (
            min((measure_ours(chosen, way, populations) for _ in range(3)), key=lambda cost: cost.cpu)
            for way in (BASE, GRAD)
        )
        costs.add_row(f"{size}", f"{base.cpu:.3f}", f"{base.outside:.0%}", f"{grad.cpu:.3f}", f"{grad.outside:.0%}")
        points.append((base.cpu, grad.cpu))
    ratio = math.log(GROWTH[axis][-1] / GROWTH[axis][-2])
    base, grad = (math.log(points[-1][i] / points[-2][i]) / ratio for i in (0, 1))
    costs.caption = f"exponent at the large end: base {base:.2f}, grad {grad:.2f}"
    console.print(costs)
    return points


def plot(growth: dict[str, list[tuple[float, float]]], file: Path) -> None:
    """A small picture for each size: CPU seconds beside a straight line."""
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, len(growth), figsize=(2.6 * len(growth), 2.6), sharey=True)
    for place, (axis, points) in zip(places, growth.items(), strict=True):
        sizes = GROWTH[axis]
        for i, name in enumerate(("SMC_base", "SMC_grad")):
            (line,) = place.loglog(sizes, [point[i] for point in points], marker="o", label=name)
            linear = [points[-1][i] * size / sizes[-1] for size in sizes]
            place.loglog(sizes, linear, linestyle=":", color=line.get_color(), label=None if i else "linear")
        place.set_xlabel(axis)
        place.set_xticks(sizes, [f"{size}" for size in sizes])
        place.minorticks_off()
    places[0].set_ylabel("CPU seconds")
    places[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


# ---- where our time goes


def profile(options: Options, gradient: bool, console: Console, top: int = 14) -> None:
    """torch's operations by their own time, and tokensteer's functions by the time below them: two runs."""
    denoiser, reward = timed_networks(options)
    run = ours(options, GRAD if gradient else BASE, denoiser, reward)
    name = "SMC_grad" if gradient else "SMC_base"
    console.print(operations(run, f"{name}: torch operations, own time, networks included", top))
    console.print(functions(run, f"{name}: functions, with all they call", 2 * top))


def operations(run: Callable[[], object], title: str, top: int) -> Table:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    made = table(title, "operation", "calls", "s", "share")
    for event in events[:top]:
        seconds = event.self_cpu_time_total
        made.add_row(event.key, f"{event.count:,}", f"{seconds / 1e6:.2f}", f"{seconds / total:.1%}")
    return made


def functions(run: Callable[[], object], title: str, top: int) -> Table:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    stats: Any = pstats.Stats(profiler)  # its figures are in no signature
    rows = [(where, calls, below) for where, (_, calls, _, below, _) in stats.stats.items()]
    mine = [row for row in rows if "tokensteer" in row[0][0] or row[0][0].endswith("nets.py")]
    made = table(title, "function", "calls", "s", "share")
    for where, calls, below in sorted(mine, key=lambda row: -row[2])[:top]:
        made.add_row(_short(where), f"{calls:,}", f"{below:.2f}", f"{below / stats.total_tt:.1%}")
    return made


def _short(where: tuple[str, int, str]) -> str:
    file, line, name = where
    return f"{Path(file).name}:{line} {name}"


# ---- is the baseline right?


def toy_reward(x: Tensor) -> Tensor:
    """Sites that agree with their right neighbour, counted; ids (P, L) or one-hots (P, L, V)."""
    hot = x if x.is_floating_point() else torch.nn.functional.one_hot(x, 4).double()
    return (hot[:, 1:] * hot[:, :-1]).sum((-1, -2))


def check(console: Console, runs: int = 150) -> bool:
    """log Z of the dense baseline on a toy, as a z-score against tokensteer's enumeration."""
    joint = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    denoiser = TableDenoiser(joint / joint.sum())
    model = ts.Diffusion(denoiser, ts.Ancestral(3), ts.uniform_steps(6), ts.template(3, mask_id=3))
    exact = enumerate_steering(ts.Steering(model, ts.Tilt(toy_reward, 0.5))).log_z
    results = table(
        f"dense log Z against enumeration ({runs} runs of 16 particles)", "", "log Z", "exact", "error", "z"
    )
    right = True
    for gradient in (False, True):
        for batched in (True, False):
            dense = Dense(
                lambda x: denoiser(x, 0.0),
                toy_reward,
                vocab=4,
                length=3,
                num_steps=6,
                mask_id=3,
                draws=2,
                kl=0.5,
                gradient=gradient,
                batched=batched,
                interval=2,
                dtype=torch.float64,
            )
            torch.manual_seed(0)
            log_z = torch.stack([dense.run(16)[1].logsumexp(-1) - math.log(16) for _ in range(runs)])
            ratio = (log_z - exact).exp()
            error = float(ratio.std()) / math.sqrt(runs)
            z = (float(ratio.mean()) - 1) / error
            right = right and abs(z) < 4
            label = f"{'SMC_grad' if gradient else 'SMC_base'}, {'batched' if batched else 'row by row'}"
            results.add_row(label, f"{exact + math.log(ratio.mean()):.4f}", f"{exact:.4f}", f"{error:.4f}", f"{z:+.2f}")
    console.print(results)
    console.print("the baseline is right: all |z| < 4" if right else "[red]the baseline is WRONG: some |z| >= 4")
    return right


# ---- the command


def machine() -> str:
    """What was measured, and on what: the digest tells whether two runs saw the same source, committed or not."""
    folder = Path(ts.__file__).parent
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))).hexdigest()[:8]
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread; "
        f"tokensteer source {digest} in {folder}"
    )


def bench(options: Options, console: Console) -> None:
    sizes = quick_sizes(options) if options.quick else options
    measure_ours(replace(quick_sizes(options), num_steps=2), GRAD)  # the first call of everything is slow
    for method in options.methods:
        compare(sizes, method == "grad", console)
    if options.growth and not options.quick:
        plot({axis: grow(options, axis, console) for axis in GROWTH}, Path(__file__).parent / "growth.png")


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks.run", description=DESCRIPTION)
    torch.set_num_threads(1)
    console = Console(width=120)
    console.print(machine(), highlight=False)
    if options.check:
        raise SystemExit(0 if check(console) else 1)
    if options.seeds:
        for method in options.methods:
            spread(quick_sizes(options) if options.quick else options, method == "grad", console)
        return
    if options.profile:
        sizes = quick_sizes(options) if options.quick else options
        for method in options.methods:
            profile(sizes, method == "grad", console)
        return
    bench(options, console)


if __name__ == "__main__":
    main()
