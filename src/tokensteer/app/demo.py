"""Every method side by side on a mixture of Gaussians whose exact answer is known.

    python -m tokensteer.app.demo

prints a table and writes a picture and the numbers. Nothing is trained: the denoiser is exact, so all that differs is
how the particles are steered.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import tyro
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import tokensteer as ts
from tokensteer.tasks import mog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CANDIDATES = 5  # how many a group of SVDD and best of N has to choose from
FLOOR_REPEATS = 5
SCALE = 2.0  # of guidance
# The conditional model of the guidance, its modes by x and y: each third of the mass in one, two and three modes.
ARROW = ((0, 6, 0), (3, 0, 3), (2, 2, 2))

DESCRIPTION = """\
Run every method of tokensteer on a mixture of nine Gaussians (two tokens, 64 states each) and compare it with the exact
answer. The reward asks for y near 0, so of three rows of modes only the middle one should be left.

The table says for each method how far its samples are from the exact target (EMD, in cells of the grid), how well it
knows the normaliser log Z, how many particles still count (ESS/N), and what it spent. A picture and results.json go to
the folder --out. With the default settings it takes about a minute."""


@dataclass(frozen=True)
class Options:
    particles: int = 2000
    """How many samples each method answers with; a multiple of 5, the size of the groups of SVDD and best of N."""
    num_steps: int = 100
    """Denoising steps from all masked to clean."""
    seed: int = 0
    """Same seed, same numbers."""
    repeats: int = 1
    """Independent runs of each method; with more than one, EMD comes as mean ± standard error."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("out/demo")
    """Where demo.png and results.json go; those of an earlier demo are replaced."""


def problem(options: Options) -> str | None:
    """What keeps the demo from running, if anything."""
    missing = [name for name, module in (("POT", "ot"), ("matplotlib", "matplotlib")) if find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} must be installed: pip install 'tokensteer[eval,plot]'"
    if options.particles < 1 or options.particles % CANDIDATES:
        return f"--particles must be a positive multiple of {CANDIDATES}, got {options.particles}; try 2000"
    if options.num_steps < 1:
        return f"--num-steps must be at least 1, got {options.num_steps}; try 100"
    if options.repeats < 1:
        return f"--repeats must be at least 1, got {options.repeats}; try 1"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {options.out} cannot be made a folder: {error.strerror}"
    return None


# ---- who takes part


Answer = Callable[[ts.Result], tuple[Tensor, Tensor]]


def weighted(result: ts.Result) -> tuple[Tensor, Tensor]:
    """All particles with their weights."""
    return result.samples, result.weights


def unweighted(result: ts.Result) -> tuple[Tensor, Tensor]:
    """All particles as they are, as if there were no weights."""
    return result.samples, torch.ones_like(result.weights)


def one_draw(result: ts.Result) -> tuple[Tensor, Tensor]:
    """One posterior draw from each population."""
    return result.sample(1), torch.ones_like(result.weights[:, :1])


def best(result: ts.Result) -> tuple[Tensor, Tensor]:
    """The best by reward of each population, which is no posterior draw."""
    return result.best().unsqueeze(1), torch.ones_like(result.weights[:, :1])


@dataclass(frozen=True)
class Contender:
    """A method and how its answer is read off. With `group` each answer comes from a population of that size."""

    name: str
    method: ts.Method
    answer: Answer = weighted
    group: int | None = None
    traced: bool = False


def tilt_contenders(model: ts.Diffusion) -> list[Contender]:
    """The methods for a reward. The twist is the exact value with the paper's linear ramp, unless it says otherwise."""
    exact = mog.tilt(estimator=mog.soft_value(model))
    constant = replace(exact, ramp=ts.constant_ramp)
    drawn = mog.tilt(draws=10)
    rarely = max(1, len(model.steps) // 5)
    return [
        Contender("pretrained", ts.pretrained(model), unweighted),
        Contender(f"best of {CANDIDATES}", ts.best_of_n(model, exact), best, CANDIDATES),
        Contender(f"SVDD, {CANDIDATES} candidates", ts.svdd(model, exact), one_draw, CANDIDATES),
        Contender("nested SVDD", ts.nested_svdd(model, exact, CANDIDATES)),
        Contender("FK, difference", ts.fk_steering(model, exact, ts.difference, rarely), traced=True),
        Contender("FK, max", ts.fk_steering(model, exact, ts.maximum, rarely)),
        Contender("Prop_grad", ts.prop_grad(model, exact, clip=None), unweighted),
        Contender("SMC_base", ts.smc_base(model, exact), traced=True),
        Contender("SMC_grad", ts.smc_grad(model, exact, clip=None), traced=True),
        Contender("SMC, enumerated", ts.Method(ts.Steering(model, constant, ts.Enumerated())), traced=True),
        Contender("SMC_base, 10 draws", ts.smc_base(model, drawn)),
    ]


def guidance_contenders(conditional: ts.Diffusion, unconditional: ts.Diffusion) -> list[Contender]:
    """p(x | c)^2 / p(x) three ways; all aim at the same target."""
    guided = ts.cfg(conditional, unconditional, SCALE)
    return [
        Contender("guidance alone", replace(guided, when=ts.never), unweighted),
        Contender("guidance with SMC", guided),
        Contender("product, optimal", ts.product((conditional, unconditional), (SCALE, 1.0 - SCALE))),
    ]


@dataclass(frozen=True)
class Challenge:
    """Methods that share a target, and the pmf they start from."""

    name: str
    contenders: Sequence[Contender]
    start: Tensor

    def target(self) -> mog.Target:
        return mog.target(self.contenders[-1].method.steering)


def challenges(num_steps: int) -> tuple[Challenge, Challenge]:
    unconditional, joint = mog.model(num_steps), mog.pmf(torch.tensor(ARROW))
    conditional = mog.model(num_steps, joint)
    return (
        Challenge("reward", tilt_contenders(unconditional), mog.pmf()),
        Challenge("guidance", guidance_contenders(conditional, unconditional), joint),
    )


# ---- the runs


@dataclass(frozen=True)
class Row:
    """One line of the table; None where a number has no meaning."""

    family: str
    method: str
    emd: float
    emd_error: float | None
    log_z: float | None
    log_z_error: float | None
    log_z_exact: float
    ess: float
    denoiser_rows: int
    reward_rows: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    row: Row
    pmf: Tensor
    ess: Tensor
    traced: bool


@dataclass(frozen=True)
class Family:
    """A challenge after its runs. `floor` is the EMD of exact draws, a few times."""

    challenge: Challenge
    target: mog.Target
    outcomes: Sequence[Outcome]
    floor: Tensor


def run(contender: Contender, target: mog.Target, family: str, options: Options) -> Outcome:
    generator = torch.Generator().manual_seed(options.seed)
    size = contender.group or options.particles
    populations = options.repeats * (options.particles if contender.group else 1)
    began = time.perf_counter()
    result = contender.method(size, populations, generator=generator)
    seconds = time.perf_counter() - began

    samples, weights = contender.answer(result)
    samples, weights = samples.reshape(options.repeats, -1, 2), weights.reshape(options.repeats, -1)
    pmfs = torch.stack([mog.histogram(x, w) for x, w in zip(samples, weights, strict=True)])
    distances = torch.tensor([mog.emd(pmf, target.pmf) for pmf in pmfs], dtype=torch.float64)
    error = float(distances.std() / len(distances) ** 0.5) if len(distances) > 1 else None
    steering = contender.method.steering
    plain = steering.twist is None and isinstance(steering.model, ts.Diffusion)
    log_z = None if plain else result.pooled_log_z[0]
    row = Row(
        family=family,
        method=contender.name,
        emd=float(distances.mean()),
        emd_error=error,
        log_z=log_z,
        log_z_error=None if log_z is None else log_z - target.log_z,
        log_z_exact=target.log_z,
        ess=float(result.ess[-1].mean()) / size,
        denoiser_rows=result.rows["denoiser"],
        reward_rows=result.rows.get("reward", 0),
        seconds=seconds,
    )
    return Outcome(row, pmfs.mean(0), result.ess.mean(-1) / size, contender.traced)


def run_all(challenge: Challenge, options: Options, tick: Callable[[str], None]) -> Family:
    """`tick` hears what comes next."""
    tick(f"{challenge.name}: the exact target")
    target = challenge.target()
    generator = torch.Generator().manual_seed(options.seed)
    floor = mog.floor(target, options.particles, FLOOR_REPEATS, generator)
    outcomes: list[Outcome] = []
    for contender in challenge.contenders:
        tick(f"{challenge.name}: {contender.name}")
        outcomes.append(run(contender, target, challenge.name, options))
    return Family(challenge, target, outcomes, floor)


# ---- the table


def table(family: Family) -> Table:
    view = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    view.add_column("method", no_wrap=True)
    for heading in ("EMD", "log Z", "error", "ESS/N", "denoiser\nrows", "reward\nrows", "seconds"):
        view.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for outcome in family.outcomes:
        view.add_row(*cells(outcome.row))
    return view


def cells(row: Row) -> list[str]:
    spread = "" if row.emd_error is None else f"±{row.emd_error:.2f}"
    return [
        row.method,
        f"{row.emd:.2f}{spread}",
        "-" if row.log_z is None else f"{row.log_z:.4f}",
        "-" if row.log_z_error is None else f"{round(row.log_z_error, 4) + 0.0:+.4f}",
        f"{row.ess:.2f}",
        short(row.denoiser_rows),
        short(row.reward_rows) if row.reward_rows else "-",
        f"{row.seconds:.1f}",
    ]


def short(count: int) -> str:
    """A count in few places: 950, 2.0k, 200k, 2.0M."""
    unit, size = ("M", 1e6) if count >= 999_500 else ("k", 1e3) if count >= 1000 else ("", 1.0)
    return f"{count / size:.{1 if unit and count < 10 * size else 0}f}{unit}"


def opening(family: Family, what: str, options: Options) -> str:
    floor = f"{float(family.floor.mean()):.2f} ± {float(family.floor.std()):.2f}"
    return (
        f"{what} Exact log Z = {family.target.log_z:.4f}. Floor: {options.particles:,} exact draws have an EMD of "
        f"{floor} (mean ± spread of {len(family.floor)} sets); --repeats tells chance from merit."
    )


def report(families: Sequence[Family], options: Options, console: Console) -> None:
    reward, guidance = families
    say = partial(console.print, highlight=False)
    say(opening(reward, "Reward: the target is the model's law times exp(reward).", options))
    say(
        "EMD: how far the samples must move to match the target, in cells of the 64 × 64 grid. error: log Z - exact. "
        "ESS/N: the share of particles that still count."
    )
    say(table(reward))
    say(opening(guidance, f"Guidance: the target is p(x | c)^{SCALE:g} · p(x)^{1 - SCALE:g}.", options))
    say(table(guidance))
    say(
        "The twist is the exact value of x_t in closed form (so the reward is asked at the end only) with a linear "
        "ramp; FK steering, five stages of it, and the enumerated proposal have a constant one. '10 draws' takes the "
        "value from 10 clean samples, as the paper does."
    )
    say(
        f"Best of {CANDIDATES} and SVDD give one sample from each of {options.particles:,} groups of {CANDIDATES}, at "
        f"{CANDIDATES} times the rows. Prop_grad and guidance alone ignore their weights, as is usual; their log Z and "
        "ESS/N are of the weights they ignore."
    )


# ---- the picture


def picture(families: Sequence[Family], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 11.2), layout="constrained")
    draw(figure, families)
    figure.savefig(file, dpi=110)  # pyright: ignore[reportUnknownMemberType]


def draw(figure: Figure, families: Sequence[Family]) -> None:
    """Three rows of five for the reward, the last three places for the traces; one row for guidance."""
    reward, guidance = families
    places = figure.add_gridspec(4, 5)  # pyright: ignore[reportUnknownMemberType]
    for k, (title, pmf) in enumerate([("exact target", reward.target.pmf), *titled(reward)]):
        heat_map(figure.add_subplot(places[k // 5, k % 5]), title, pmf, reward.target)
    traces(figure.add_subplot(places[2, 2:]), reward.outcomes)
    given = [("conditional model", guidance.challenge.start), ("exact guided target", guidance.target.pmf)]
    for k, (title, pmf) in enumerate([*given, *titled(guidance)]):
        heat_map(figure.add_subplot(places[3, k]), title, pmf, guidance.target)


def titled(family: Family) -> list[tuple[str, Tensor]]:
    return [(f"{outcome.row.method}\nEMD {outcome.row.emd:.2f}", outcome.pmf) for outcome in family.outcomes]


def heat_map(axes: Axes, title: str, pmf: Tensor, target: mog.Target) -> None:
    """One colour scale for all that share a target; the square root brings out what is faint."""
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0.0, vmax=float(target.pmf.max()), clip=True)
    axes.imshow(pmf.T.numpy(), origin="lower", cmap="magma", norm=norm)  # pyright: ignore[reportUnknownMemberType]
    axes.set_title(title, fontsize=10)  # pyright: ignore[reportUnknownMemberType]
    axes.set(xticks=[], yticks=[])


def traces(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.traced:
            done = torch.linspace(0, 1, len(outcome.ess)).numpy()
            axes.plot(done, outcome.ess.numpy(), label=outcome.row.method, linewidth=1.5)  # pyright: ignore[reportUnknownMemberType]
    axes.set(xlim=(0, 1), ylim=(0, 1.05), xticks=[])
    axes.yaxis.tick_right()  # on the left they would push the columns apart
    axes.set_title("ESS/N from the first step to the last", fontsize=10)  # pyright: ignore[reportUnknownMemberType]
    axes.legend(fontsize=9, frameon=False, loc="lower left")  # pyright: ignore[reportUnknownMemberType]


# ---- all together


def demo(options: Options, console: Console) -> None:
    drawing, numbers = options.out / "demo.png", options.out / "results.json"
    todo = challenges(options.num_steps)
    with progress_bar() as bar:
        task = bar.add_task("", total=1 + sum(1 + len(challenge.contenders) for challenge in todo))

        def tick(what: str) -> None:
            bar.update(task, advance=1, description=what)

        families = [run_all(challenge, options, tick) for challenge in todo]
        tick("the picture")
        picture(families, drawing)
    rows = [asdict(outcome.row) for family in families for outcome in family.outcomes]
    numbers.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
    report(families, options, console)
    console.print(f"Picture: {drawing}\nNumbers: {numbers}", highlight=False, soft_wrap=True)


def progress_bar() -> Progress:
    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, prog="python -m tokensteer.app.demo", description=DESCRIPTION)
    wrong = problem(options)
    if wrong is not None:
        print(f"demo: {wrong}", file=sys.stderr)
        raise SystemExit(2)
    demo(options, Console())


if __name__ == "__main__":
    main()
