"""The benchmarks: the baseline is right, and found out where it is not; memory stays small; tables appear."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_emoji
import torch
import tyro
from torch import Tensor

import tokensteer as ts
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import Setup

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks do not come with the source distribution", allow_module_level=True)


def output(*command: str) -> str:
    """What a benchmark prints, run as its page says, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the baseline


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks.run, which is found from the root; what its package sets for its own processes is taken back."""
    monkeypatch.syspath_prepend(ROOT)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    with torch.random.fork_rng(devices=[]):
        yield import_module("benchmarks.run")


def checked(run: Any, runs: int) -> bool:
    return run.check(run.Console(file=io.StringIO(), width=120), runs)


@pytest.mark.slow
def test_the_baseline_is_right(run: Any) -> None:
    assert checked(run, 60)


@pytest.mark.slow
def test_a_baseline_without_p_over_q_is_found_out(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    move = run.Dense.move

    def unweighted(*where: Any) -> tuple[Tensor, Tensor]:
        y, log_ratio = move(*where)
        return y, torch.zeros_like(log_ratio)

    monkeypatch.setattr(run.Dense, "move", unweighted)
    assert not checked(run, 40)


# ---- memory


@pytest.mark.usefixtures("run")
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read as Linux tells it")
@pytest.mark.parametrize("kind", ["from_hidden", pytest.param("maskgit", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_logits_over_a_large_vocabulary_are_never_all_there(kind: str) -> None:
    """Beyond the network, less than a half of what all logits would take, with a budget of less than that."""
    sizes = {"particles": 24, "length": 256, "vocab": 50258}
    whole = math.prod(sizes.values()) * 4 / 2**30
    assert whole > 1
    options = [f"--{name}={size}" for name, size in sizes.items()]
    printed = output("benchmarks.memory", "--kind", kind, *options, "--memory", "256MiB")
    found = re.fullmatch(rf"{kind} +([\d.]+) GiB above what there was before, \d+ CPU seconds\n", printed)
    assert found, f"cannot read the peak from {printed!r}"
    peak = float(found[1])
    assert 0 < peak < whole / 2, f"{peak} GiB of {whole:.2f}"


# ---- the tables

# Seconds four times, the share outside, rows twice, ratios twice, and the ESS of our own.
ROW = re.compile(r" +\S.*?( +\d+\.\d\d){4} +-?\d+% +([\d,]+) +([\d,]+)( +\d+\.\d\d){2}( +\d\.\d\d)? *")


@pytest.mark.slow
def test_benchmarks_run_to_the_end(run: Any) -> None:
    sizes = {"particles": 4, "length": 8, "num-steps": 4, "vocab": 32, "draws": 2, "interval": 2, "dense-steps": 2}
    options = [word for name, size in sizes.items() for word in (f"--{name}", f"{size}")]
    printed = output("benchmarks.run", "--no-growth", *options)
    tables = re.split("SMC_(?=base:|grad:)", printed)[1:]
    assert [made[:4] for made in tables] == ["base", "grad"]
    for made, ways in zip(tables, (len(run.WAYS[gradient]) for gradient in (False, True)), strict=True):
        assert "N=4, L=8, T=4, V=32, M=2, every 2" in made
        rows = [row for line in made.splitlines() if (row := ROW.fullmatch(line))]
        assert len(rows) == ways + 2, f"cannot read the rows of {made}"  # ours, and the baseline twice
        assert [row[5] is not None for row in rows] == [True] * ways + [False] * 2
        for row in rows:
            asked, judged = (int(row[k].replace(",", "")) for k in (2, 3))
            assert 0 < asked <= 4 * 4
            assert judged > 0


# ---- tables of dna


def dna_row(method: str, particles: int, seed: int, activity: float, **job: Any) -> dict[str, Any]:
    metrics = {"activity": activity, "accuracy": 0.5, "3-mer correlation": 0.9, "motif correlation": 0.8}
    metrics |= {"log-likelihood": -260.0, "diversity": 0.75}
    return {
        "method": ", ".join((method, *job.get("extra", ()))),
        "particles": particles,
        "populations": 2,
        "seed": seed,
        "metrics": {name: [value, 0.1] for name, value in metrics.items()},
        "best": None,
        "log_z": None,
        "rows": {"denoiser": 2000 * particles, "reward": 4000 * particles},
        "seconds": 1.0 + seed,
        "job": {"method": method, "extra": [], "kl": None, "reward": None} | job,
    }


def dna_tables(monkeypatch: pytest.MonkeyPatch, capsys: Any, *rows: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The tables that benchmarks.dna prints by their titles, each as the cells of its lines."""
    monkeypatch.syspath_prepend(ROOT)
    dna = import_module("benchmarks.dna")
    monkeypatch.setattr(dna, "open_run", lambda folder: SimpleNamespace(rows=rows))
    dna.main(["folder"])
    parts = re.findall(r"\n(.+)\n\n((?:\|.*\n)+)", capsys.readouterr().out)
    return {title: [line.strip("| ").split(" | ") for line in lines.splitlines()] for title, lines in parts}


def test_the_metrics_of_the_paper_stand_beside_each_other_for_each_size(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    rows = [dna_row("smc-base", n, seed, n + seed) for n in (1, 4) for seed in (0, 2)]
    rows.append(dna_row("pretrained", 4, 0, -2.5))
    head, _, *lines = dna_tables(monkeypatch, capsys, *rows)["The metrics of the paper"]
    names = ["accuracy", "activity", "3-mer correlation", "motif correlation", "log-likelihood"]
    assert head == ["method", *(f"N = {n}: {name}" for n in (1, 4) for name in (*names, "denoiser + reward rows", "s"))]
    few = [".500 (.000)", "2.00 (1.41)", ".900 (.000)", ".800 (.000)", "−260.0 (.0)", "1.0k + 2.0k", "2.0 (1.4)"]
    more = [few[0], "5.00 (1.41)", *few[2:5], "4.0k + 8.0k", few[6]]
    alone = [".500", "−2.50", ".900", ".800", "−260.0", "4.0k + 8.0k", "1.0"]
    assert lines == [["pretrained", *[""] * 7, *alone], ["smc-base", *few, *more]]


def test_a_front_over_kl_at_equal_seconds_has_a_line_for_each_kl(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    rows = [
        dna_row("smc-base", n, seed, 1.0 / kl, kl=kl, extra=[f"kl = {kl:g}", "20s"], reward="logit")
        for kl, n in ((0.5, 40), (1.0, 50))
        for seed in (0, 2)
    ]
    rows.append(dna_row("svdd-argmax", 90, 0, 7.0, extra=["20s"]))
    found = dna_tables(monkeypatch, capsys, *rows)
    head, _, *lines = found.pop("Variants")
    assert not found
    assert head == ["method", "N", "activity", "accuracy", "log-likelihood", "diversity", "denoiser + reward rows", "s"]
    assert [line[:3] for line in lines] == [
        ["svdd-argmax, 20s", "90", "7.00"],
        ["smc-base, kl = 1, 20s, logit", "50", "1.00 (.00)"],
        ["smc-base, kl = 0.5, 20s, logit", "40", "2.00 (.00)"],
    ]


def test_scaling_without_losses_is_the_closed_form():
    """Four workers, eight units each: the queue has no other time than starting, working and handing out."""
    scaling = import_module("benchmarks.scaling")
    calm = scaling.Options(prompts=64, prompt_seconds=1.0, fixed_seconds=0.5, spread=0.0, head=0.0, kilobytes=0.0)
    calm = replace(calm, failed=0.0, start=10.0)
    found = scaling.simulate(calm, unit=2, gpus=4)
    assert 10.0 + 8 * 2.5 <= found.seconds <= 11.0 + 8 * 2.5  # workers start within a second
    assert found.head_busy == 0
    assert found.busy == pytest.approx(32 * 2.5 / (4 * found.seconds))
    slow = scaling.simulate(replace(calm, head=1.0), unit=2, gpus=32)
    assert slow.seconds >= 10.0 + 32 * 1.0 + 2.5  # one head hands out 32 units
    lost = scaling.simulate(replace(calm, failed=0.5), unit=2, gpus=4)
    assert lost.seconds > found.seconds


# ---- proposals


@pytest.fixture
def proposals(run: Any) -> Any:
    return import_module("benchmarks.proposals")


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """What a function of a module returns from now on."""
    function, seen = getattr(module, name), list[Any]()

    def recording(*words: Any) -> Any:
        seen.append(function(*words))
        return seen[-1]

    monkeypatch.setattr(module, name, recording)
    return seen


SMALL: dict[str, Any] = {"goals": (), "seeds": 2, "particles": 2, "populations": 3, "steps": 2, "proposals": ("base",)}


def test_each_prompt_has_as_many_populations_and_the_scatter_is_within_prompts(
    proposals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Prompts differ in their normalisers, which are neither spread of a proposal nor to be averaged."""
    weights = small_emoji.save(tmp_path)
    given = {"prompt": ("a red square", "a blue bar, noto style"), "reward": "mostly-red", "weights": weights}
    make, seen = TASKS["emoji"].make, recorded(monkeypatch, proposals, "steered")
    entry = replace(TASKS["emoji"], make=lambda setup: make(replace(setup, **given)))
    monkeypatch.setattr(proposals, "TASKS", {"emoji": entry})
    proposals.main(proposals.Options("emoji", kl=0.01, **SMALL))
    assert [(result.templates, len(result.log_w)) for result in seen] == [(2, 6), (2, 6)]
    printed = capsys.readouterr().out
    assert ", ".join(f"{result.scatter:.3f}" for result in seen) in printed
    assert "±" not in printed


def test_tasks_without_goals_have_none(proposals: Any, capsys: Any):
    command_line = ["--task", "product", "--goals", "--seeds", "1", "--particles", "2", "--populations", "2"]
    options = tyro.cli(proposals.Options, args=[*command_line, "--steps", "2", "--proposals", "base"])
    assert options.goals == ()
    proposals.main(options)
    assert "±" in capsys.readouterr().out


def test_noise_is_that_of_the_task_with_the_seed_of_the_run(proposals: Any, monkeypatch: pytest.MonkeyPatch):
    seen = recorded(monkeypatch, proposals, "tilted")
    task = TASKS["digits"].make(Setup(steps=2))
    fresh, shared = [None, None], [0, 1]
    for own, usual in ((None, fresh), (0, shared)):
        made = replace(task, tilt=replace(task.tilt, estimator=ts.Sampled(own)))
        entry = replace(TASKS["digits"], make=lambda setup, made=made: made)
        monkeypatch.setattr(proposals, "TASKS", {"digits": entry})
        for noise, expected in ((None, usual), ("fresh", fresh), ("shared", shared)):
            proposals.main(proposals.Options("digits", noise=noise, **SMALL))
            assert [tilt.estimator.seed for tilt in seen[-2:]] == expected


def test_an_unknown_proposal_is_refused_by_its_name(proposals: Any):
    with pytest.raises(ValueError, match=r"no proposal called 'gradient, clip 2'\. Did you mean gradient, clip "):
        proposals.main(proposals.Options(proposals=("gradient, clip 2",)))
    assert proposals.PROPOSALS["gradient, clip 1, tokens only, scale 0.7"].scale == 0.7


# ---- learned


@pytest.mark.parametrize("after", [None, "step-variance"])
def test_a_twist_is_trained_for_the_model_or_a_proposal(
    after: str | None, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    learned = import_module("benchmarks.learned")
    monkeypatch.setattr(learned, "PLAN", replace(learned.PLAN, paths=4, updates=1, replay=0, held_out=16))
    learned.twist("digits", "contrastive", after=after, rounds=1, rounds_before=1, steps=2, populations=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("step-variance, baseline state: 1 rounds") for line in lines[:-6]] == [True] * bool(after)
    assert lines[-6].startswith("contrastive: 1 rounds")
    kind = "SMC_amot" if after else "SMC_base"
    names = [re.split(r", N = |:", line.removeprefix("digits, "))[0] for line in lines[-5:]]
    assert names == [f"{kind}, no resampling", kind, kind, f"{kind} with the twist", f"{kind} with the twist"]


# ---- products


def test_products_are_measured_beside_the_floor(run: Any, capsys: Any):
    products = import_module("benchmarks.products")
    products.near_floor(particles=16, populations=8, sets=2, seeds=(0, 1), toys=("2x8",))
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [
        ["2 × 8", kernel, ", ".join(f"{power:g}" for power in powers)]
        for powers in products.POWERS
        for kernel in products.KERNELS
    ]
    for _, _, _, far, floor, ratio, *_ in lines:
        assert float(far) / float(floor) == pytest.approx(float(ratio.split(" ")[0]), abs=0.1)
