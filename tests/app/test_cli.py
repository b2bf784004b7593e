"""The command line: what it writes, what it says, and how it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import small_texts
import torch
from narrow import some, untyped

import tokensteer as ts
from tokensteer import files
from tokensteer.app import cli, options
from tokensteer.app.commands import demo
from tokensteer.app.runs import answers, choices, jobs, prepare, runner, seeds
from tokensteer.app.runs import recipes as methods
from tokensteer.app.runs import rows as rows_of
from tokensteer.app.runs.prepare import Environment
from tokensteer.app.terminal import tables as table
from tokensteer.app.words.environment import EXTRAS
from tokensteer.app.words.settings import meaning
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.metrics import Measured, measured
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import SHIPPED, Prompt, Prompted, Setup, Task
from tokensteer.tasks.mog import trained as mog_trained

TINY = ["--particles", "2", "--populations", "2", "--steps", "3"]


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    assert tokensteer("run", "digits", "--method", "smc-base", *TINY, "--out", out) == 0
    return out


@pytest.fixture
def run_folder(made: Path, tmp_path: Path) -> Path:
    """A copy of one run, to look at or to spoil."""
    return shutil.copytree(made, tmp_path / "run")


# ---- what a run leaves


@pytest.mark.fast
def test_a_run_can_be_opened_again(run_folder: Path):
    run = ts.open_run(run_folder)
    assert run.config["command"].startswith("tokensteer run digits --method smc-base")
    assert run.config["versions"]["torch"] == torch.__version__
    assert len(run.rows) == 1
    row = run.rows[0]
    assert (row["task"], row["method"], row["particles"], row["populations"], row["seed"]) == (
        "digits",
        "smc-base",
        2,
        2,
        0,
    )
    assert row["metrics"].keys() >= {"accuracy", "diversity", "reward"}
    assert all(len(value) == 2 for value in row["metrics"].values())
    assert row["best"]["reward"][0] >= row["metrics"]["reward"][0]
    assert row["rows"]["denoiser"] + row["saved"].get("denoiser", 0) == 2 * 2 * 3
    assert row["rows"]["reward"] > 0
    assert row["seconds"] > 0
    result = run.result(0)
    assert result.samples.shape == (2, 2, 64)
    assert result.ess.shape == (4, 2)
    assert result.pooled_log_z == pytest.approx((row["log_z"], row["log_z_error"]))
    assert run.picture(0).read_bytes().startswith(b"\x89PNG")
    assert not [file for file in run_folder.rglob("*") if file.name.startswith(".")]


def test_the_same_command_gives_the_same_samples(run_folder: Path, tmp_path: Path, capsys):
    assert tokensteer("run", "digits", "--method", "smc-base", *TINY, "--out", tmp_path / "again") == 0
    said = capsys.readouterr()
    assert "smc-base" in said.out
    assert f"Run folder: {tmp_path / 'again'}" in said.out
    assert said.err.startswith("1/1 digits smc-base, N = 2: accuracy")
    first, second = (ts.open_run(folder).result(0) for folder in (run_folder, tmp_path / "again"))
    assert torch.equal(first.samples, second.samples)
    assert torch.equal(first.log_w, second.log_w)


def test_compare_runs_every_method_size_and_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--particles", "2", "4", "--seeds", "0", "1", "--populations", "2", "--steps", "3"]
    assert tokensteer("compare", "digits", "--methods", "pretrained", "svdd", *words, "--out", tmp_path / "x") == 0
    rows = ts.open_run(tmp_path / "x").rows
    found = [(row["method"], row["particles"], row["seed"]) for row in rows]
    assert found == [(m, n, s) for m in ("pretrained", "svdd") for n in (2, 4) for s in (0, 1)]
    assert rows[0]["log_z"] is None  # there is nothing to normalise
    assert rows[0]["best"] is None
    out = capsys.readouterr().out
    assert "Means ± standard errors over 2 seeds" in out
    assert "the best of N by reward, single seeds\n" in out  # in the report


def test_compare_says_which_learned_methods_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--kl", "0.3", "--particles", "2", "--populations", "1", "--steps", "2", "--out", tmp_path / "x")
    assert tokensteer("compare", "digits", *words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Left out: smc-learned (the twist of digits was learned at kl = 1, and here it is 0.3: give --kl 1" in out
    assert "drakes" not in out  # digits has no place for it


SCHEMES = [
    (when, how)
    for when in ("ess:0.5", "always", "every:1")
    for how in ("systematic", "stratified", "residual", "multinomial")
]


def test_draws_are_varied_with_remasking_too():
    """The paper's figure has both."""
    varied = jobs.draws(jobs.Job("mnist", "smc-grad", 16, 30, settings=Settings(remask=0.1)))
    assert [(job.settings.draws, job.settings.remask) for job in varied] == [(m, 0.1) for m in (1, 2, 4, 8, 10, 25)]


@pytest.mark.parametrize(
    ("recipe", "labels"),
    [
        ("ramps", [f"smc-base, {kernel}, k = {k}" for kernel in ("MDM", "ReMDM") for k in range(1, 11)]),
        ("draws", [f"smc-base, M = {m}" for m in (1, 2, 4, 8, 10, 25)]),
        ("steps", [f"smc-base, T = {steps}" for steps in (10, 25, 50, 100, 200)]),
        ("kl", [f"smc-base, kl = {kl}" for kl in ("0.25", "0.5", "1", "2", "4")]),
        ("resampling", [*(f"smc-base, {when}, {how}" for when, how in SCHEMES), "smc-base, never"]),
        ("traces", ["smc-base, no resampling"]),
    ],
)
def test_recipes_vary_what_they_say(recipe: str, labels: list[str], tmp_path: Path):
    words = ["--methods", "smc-base", "--particles", "2", "--populations", "1", "--steps", "3", "--recipe", recipe]
    assert tokensteer("compare", "digits", *words, "--out", tmp_path / "x") == 0
    run = ts.open_run(tmp_path / "x")
    assert [row["method"] for row in run.rows] == labels
    if recipe == "traces":
        result = run.result(0)
        assert result.mean_reward is not None
        assert result.mean_reward[1:].isfinite().all()  # the weights are looked at in every step
        assert torch.equal(result.ancestors, torch.arange(2).expand_as(result.ancestors))


def test_recipes_have_sizes_of_their_own():
    planned = jobs.plan(options.Compare("digits", recipe="traces"), Settings(), ())
    assert [(job.method, job.particles, job.populations) for job in planned] == [
        ("smc-base", 16, 30),
        ("smc-grad", 16, 30),
    ]


def test_recipes_have_methods_of_their_own():
    def planned(recipe: str, **settings: float) -> list[jobs.Job]:
        return jobs.plan(options.Compare("dna", recipe=recipe), Settings(steps=50, **settings), ("pretrained",))  # type: ignore[arg-type]

    assert {job.method for job in planned("ramps")} == {"smc-grad"}  # the paper's
    assert [job.method for job in planned("methods")] == ["pretrained"]
    assert [job.settings.kl for job in planned("kl")[:5]] == pytest.approx([0.025, 0.05, 0.1, 0.2, 0.4])
    assert [job.settings.kl for job in planned("kl", kl=1.0)[:5]] == [0.25, 0.5, 1.0, 2.0, 4.0]
    chosen = [(job.settings.trigger, job.settings.resample) for job in planned("resampling")[:13]]
    assert chosen[-2:] == [("every:10", "multinomial"), ("never", None)]
    assert len({job.file for job in planned("resampling")}) == 26
    ready = prepare.prepare(planned("resampling")[:1] + planned("resampling")[11:13], prepare.Environment())
    assert [one.method.resample for one in ready] == [
        ts.resampling.systematic,
        ts.resampling.multinomial,
        ts.resampling.systematic,
    ]


@pytest.mark.parametrize("name", ["mog", "product", "digits", "mnist", "text", "dna"])
def test_the_catalogue_knows_the_kl_of_a_task(name: str):
    assert TASKS[name].make(Setup(steps=1)).tilt.kl == TASKS[name].kl


def test_rows_are_matched_to_those_of_a_reference(tmp_path: Path):
    """Each method spends what the reference does, within the rows of one more particle, and says so."""
    names = ("best-of-n", "svdd", "fk-difference", "prop-grad", "smc-base", "smc-grad")
    words = ["--methods", *names, "--particles", "4", "--populations", "2", "--steps", "10", "--draws", "3"]
    assert tokensteer("compare", "digits", *words, "--match-rows", "smc-grad", "--out", tmp_path / "x") == 0
    rows = {row["job"]["method"]: row for row in ts.open_run(tmp_path / "x").rows}
    budget = 4 * (10 + 3 * 10 + 1)  # denoiser, estimates, the end
    assert {row["method"] for row in rows.values()} == {f"{name}, rows = {budget}" for name in names}
    assert rows["best-of-n"]["particles"] == budget // (10 + 1)
    assert rows["fk-difference"]["particles"] == budget // (10 + 3 * 4 + 1)  # weights are looked at four times
    assert rows["smc-grad"]["particles"] == 4
    for row in rows.values():
        spent = sum(row["rows"].values()) / row["populations"]
        assert spent <= budget
        # Estimates of what has not moved are kept, so that a little may be left over.
        assert spent > 0.9 * (budget - budget / row["particles"])


def test_a_reference_must_exist(tmp_path: Path, capsys):
    words = ["compare", "digits", *TINY, "--methods", "smc-base", "--out", tmp_path / "x"]
    assert tokensteer(*words, "--match-rows", "smc") == 2
    assert "no method called 'smc'" in capsys.readouterr().err


def test_seeds_are_put_together():
    def row(seed: int, emd: float, log_z: float | None) -> dict[str, object]:
        same = {"task": "mog", "method": "smc-base", "particles": 8, "populations": 1, "best": None, "saved": {}}
        numbers = {"metrics": {"emd": [emd, None]}, "log_z": log_z, "log_z_error": None}
        return {**same, **numbers, "seed": seed, "rows": {"denoiser": 10 + seed}, "seconds": 1.0 + seed}

    first, second = math.log(1.0), math.log(3.0)
    (joined,) = seeds.over_seeds([row(0, 1.0, first), row(2, 2.0, second)])
    assert joined["metrics"]["emd"] == [1.5, pytest.approx(0.5)]
    assert joined["log_z"] == pytest.approx(math.log(2.0))  # the log of the mean, and its relative error
    assert joined["log_z_error"] == pytest.approx(0.5)
    assert (joined["seeds"], joined["rows"], joined["seconds"]) == (2, {"denoiser": 11}, 2.0)
    assert seeds.over_seeds([row(0, 1.0, None), row(2, 2.0, None)])[0]["log_z"] is None
    alone = [row(0, 1.0, first)]
    assert seeds.over_seeds(alone) == alone


NEEDY = ("cfg", "smc-cfg", "drakes", "drakes-kl", "sgdd", "sgdd-long")
"""Methods that need what few tasks have; tests/test_dna.py runs them."""


@pytest.mark.parametrize("method", NEEDY)
def test_methods_say_what_a_task_lacks(method: str, tmp_path: Path, capsys):
    assert tokensteer("run", "digits", "--method", method, *TINY, "--out", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert "digits" in error
    assert "needs one, as dna has" in error or "need one, as dna has" in error
    assert not (tmp_path / "x").exists()


@pytest.mark.fast
@pytest.mark.parametrize("method", [name for name in methods.METHODS if name not in ("auto", *NEEDY)])
def test_every_method_runs(method: str, tmp_path: Path):
    task = "mog" if method in ("smc-enumerated", "smc-learned") else "digits"
    words = ["--particles", "4", "--populations", "2", "--steps", "3", "--out", tmp_path / "x"]
    assert tokensteer("run", task, "--method", method, *words) == 0
    assert ts.open_run(tmp_path / "x").rows[0]["method"] == method


@pytest.mark.fast
def test_help_names_what_there_is():
    assert options.METHODS.split(", ") == list(methods.METHODS)
    for task in TASKS:
        assert task in options.HELP
    for recipe in jobs.RECIPES:
        assert recipe in options.COMPARE + str(options.Compare.__doc__) or recipe == "methods"


def test_choices_reach_the_steering(tmp_path: Path):
    words = ["--kl", "0.5", "--ramp", "clipped:5", "--draws", "3", "--remask", "0.2", "--goal", "7", "--trigger"]
    words += ["every:2", "--noise", "shared", "--seed", "6", "--resample", "residual"]
    assert tokensteer("run", "digits", *TINY, *words, "--memory", "1GiB", "--out", tmp_path / "x") == 0
    row = ts.open_run(tmp_path / "x").rows[0]
    stored = row["job"] | {"extra": ()}
    settings = Settings(**{field.name: stored.pop(field.name, field.default) for field in fields(Settings)})
    (ready,) = prepare.prepare([jobs.Job(**stored, settings=settings)], prepare.Environment())
    tilt, model = ready.method.steering.twist, ready.task.model
    assert tilt is not None
    assert (tilt.kl, tilt.draws, tilt.estimator) == (0.5, 3, ts.Sampled(seed=6))
    assert tilt.ramp(0.75) == pytest.approx(0.5)  # type: ignore[operator]
    assert model.kernel.sigma == ts.Cap(0.2)  # type: ignore[attr-defined]
    assert ready.method.resample is ts.resampling.residual
    assert "towards 7" in ready.task.about


def test_a_scheme_is_for_the_methods_that_have_one():
    """In a comparison the others keep theirs."""
    names = ("svdd", "fk-max", "smc-base", "prop-grad")
    settings = Settings(steps=2, resample="stratified")
    ready = prepare.prepare([jobs.Job("digits", m, 2, 1, settings=settings) for m in names], prepare.Environment())
    assert [one.method.resample is ts.resampling.stratified for one in ready] == [False, True, True, False]
    again = prepare.prepare(
        [jobs.Job("digits", "prop-grad", 2, 1, settings=replace(settings, trigger="always"))], prepare.Environment()
    )
    assert again[0].method.resample is ts.resampling.stratified  # with a trigger it resamples


def test_draws_replace_a_value_in_closed_form():
    task = TASKS["mog"].make(Setup(steps=2))
    assert isinstance(task.tilt.estimator, ts.Value)
    assert isinstance(choices.tilted(task, Settings(draws=5)).estimator, ts.Sampled)
    assert "smc-enumerated" in methods.usual(task, task.tilt)
    for noise in choices.NOISES:
        tilt = choices.tilted(task, Settings(draws=5, noise=noise), seed=4)
        assert tilt.estimator == ts.Sampled(4 if noise == "shared" else None)
        assert "smc-enumerated" not in methods.usual(task, tilt)  # that of draws would have to be asked for


def test_mog_is_held_to_the_target_of_its_own_kl():
    task = TASKS["mog"].make(Setup(steps=2, kl=3.0))
    method = ts.smc_base(task.model, task.tilt)
    log_z, error = method(500, 20, generator=torch.Generator().manual_seed(0)).pooled_log_z
    exact = task.metrics(method(2, generator=torch.Generator().manual_seed(0)))["exact log_z"].mean
    assert abs(log_z - exact) < 4 * error < 0.1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("linear", (0.0, 0.25, 0.5, 1.0)),
        ("constant", (1.0, 1.0, 1.0, 1.0)),
        ("end", (0.0, 0.0, 0.0, 1.0)),
        ("exponential", (0.0, 1.0, 1.0, 1.0)),
        ("clipped:5", (0.0, 0.5, 1.0, 1.0)),
    ],
)
def test_ramps_have_names(name: str, values: tuple[float, ...]):
    ramp = choices.ramp(name)
    assert callable(ramp)
    assert tuple(ramp(t) for t in (1.0, 0.75, 0.5, 0.0)) == values


def test_every_ramp_of_the_table_is_known_here_and_one_adapts():
    assert set(choices.RAMPS) == {"linear", "constant", "end", "exponential"}
    assert choices.ramp("adaptive:0.8") == ts.Adaptive(0.8)
    assert untyped(choices.ramp("exponential"))(0.95) == pytest.approx(1.05**5 - 1)  # 100 steps of 5 %


def test_the_words_of_ramps_are_true():
    """`app.words.settings` states when the full reward counts, and does not load the ramps."""
    exponential = choices.RAMPS["exponential"]
    assert exponential(1 - 0.15) == 1 > exponential(1 - 0.14)
    assert "14%" in meaning("ramp", "exponential")
    clipped = untyped(choices.ramp("clipped:3"))
    assert clipped(0.7) == 1 > clipped(0.71)
    assert "30%" in meaning("ramp", "clipped:3")


def test_triggers_have_names():
    log_w = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    step = ts.uniform_steps(4)[2]
    fires = {name: choices.trigger(name)(log_w, step).tolist() for name in ("ess:0.5", "every:2", "every:3", "always")}
    assert fires == {"ess:0.5": [False, True], "every:2": [True, True], "every:3": [False, False], "always": [True] * 2}
    assert choices.trigger("observe") is ts.triggers.observe
    assert choices.trigger("never") is ts.triggers.never


def test_the_best_and_a_draw_are_populations_of_one():
    samples = torch.tensor([[[0, 1], [1, 1]], [[2, 0], [0, 0]]])
    log_w = torch.tensor([[0.0, -50.0], [-50.0, 0.0]])
    reward = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    result = ts.Result(samples, log_w, reward, torch.full((3, 2), 1.0), None, torch.zeros(3, 2, 2).long(), {})
    top, drawn = answers.best(result), answers.one_draw(result)
    assert top.samples.tolist() == [[[1, 1]], [[0, 0]]]
    assert top.reward is not None
    assert top.reward.tolist() == [[2.0], [4.0]]
    assert drawn.samples.tolist() == [[[0, 1]], [[0, 0]]]
    assert drawn.ess[-1].tolist() == [0.5, 0.5]
    assert answers.unweighted(result).weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


# ---- populations that die


HARD = """
def first(texts):
    return [0.0 if text.startswith("a good movie") else -float("inf") for text in texts]

def nothing(texts):
    return [-float("inf") for text in texts]
"""


@pytest.fixture
def hard(tmp_path: Path, monkeypatch) -> list[str]:
    """Options for a reward that populations die of."""
    (tmp_path / "hard.py").write_text(HARD)
    (tmp_path / "two.txt").write_text("A good movie\nThe film\n")
    monkeypatch.chdir(tmp_path)
    return [
        "--prompts",
        "two.txt",
        *TINY,
        "--weights",
        str(small_texts.write_task(tmp_path / "weights")),
        "--out",
        "out",
    ]


def test_a_prompt_whose_populations_died_does_not_lose_the_others(hard: list[str], capsys):
    assert tokensteer("run", "text", "--method", "smc-base", "--reward", "hard.py:first", *hard) == 0
    said = capsys.readouterr()
    assert "2 of 4 populations died, all of prompt 2: no particle kept any weight" in said.out
    assert "2 of 4 populations died" in said.err
    run = ts.open_run("out")
    row = run.rows[0]
    assert (row["populations"], row["dead"], row["dead prompts"]) == (4, 2, ["2"])
    assert row["metrics"]["reward"] == row["best"]["reward"] == [0.0, 0.0]  # of the living
    assert row["metrics"]["ess"][0] == 1.0
    assert row["log_z"] == pytest.approx(math.log(0.5), abs=1e-4)  # the dead count here
    assert run.result(0).alive.tolist() == [True, True, False, False]
    assert tokensteer("report", "out") == 0
    assert "2 populations died" in Path("out/report.html").read_text()


def test_methods_whose_populations_all_died_do_not_lose_the_others(hard: list[str], capsys):
    words = ["--methods", "pretrained", "smc-base", "svdd", "--reward", "hard.py:nothing", "--seeds", "0", "1"]
    assert tokensteer("compare", "text", *words, *hard) == 0
    assert "svdd, N = 2, seed 1: 4 of 4 populations died, all of prompt 1, 2" in capsys.readouterr().out
    rows = ts.open_run("out").rows
    assert [row.get("dead") for row in rows] == [None, None, 4, 4, 4, 4]
    assert rows[0]["metrics"]["accuracy"][0] is not None
    assert all((row["metrics"], row["best"], row["log_z"]) == ({}, None, None) for row in rows[2:])
    assert [row.get("dead") for row in seeds.over_seeds(rows)] == [None, 8, 8]
    assert tokensteer("report", "out") == 0


def test_populations_that_died_are_left_out_of_what_is_measured():
    """As many of each prompt are measured together; otherwise each prompt is, and their means are."""
    seen: list[list[float]] = []

    def metrics(result: ts.Result) -> dict[str, Measured]:
        seen.append(result.samples[:, 0, 0].tolist())
        reward = (result.weights * some(result.reward)).sum(-1)
        return {"mean": measured(result.samples[:, 0, 0]), "reward": measured(reward)}

    def task(prompts: list[str]) -> Task:
        asked = [Prompt(name, name) for name in prompts]
        prompted = Prompted(asked, (), lambda places, failed: task([prompts[k] for k in places]))
        return replace(TASKS["mog"].make(Setup(1)), metrics=metrics, prompted=prompted)

    def found(*lives: bool) -> dict[str, Measured]:
        alive = torch.tensor(lives)
        reward = torch.tensor([[1.0, -math.inf]]).expand(len(lives), 2)
        log_w = torch.where(alive[:, None], reward.clamp(max=0.0), -math.inf)
        samples = torch.arange(float(len(lives)))[:, None, None].expand(-1, 2, 1)
        result = ts.Result(samples, log_w, reward, torch.ones(2, len(lives)), None, torch.zeros(2, len(lives), 2), {})
        recipe = methods.recipe_of("smc-base")
        answer, kept = rows_of.answer_of(recipe, result)
        assert kept.tolist() == list(lives)
        return rows_of.measure(task(["a", "b"]), answer, kept)

    assert found(True, True, True, True)["reward"].mean == 1.0  # 0 · -inf is no number
    assert found(True, False, False, True)["mean"].mean == 1.5
    assert found(False, False, True, True)["mean"].mean == 2.5
    assert seen == [[0.0, 1.0, 2.0, 3.0], [0.0, 3.0], [2.0, 3.0]]
    uneven = found(True, False, True, True)["mean"]
    assert (uneven.mean, uneven.error) == pytest.approx((1.25, 1.25))
    assert seen[3:] == [[0.0], [2.0, 3.0]]
    assert found(False, False, False, False) == {}


# ---- stopped, refused


def test_what_was_finished_is_kept_when_it_is_stopped(tmp_path: Path, monkeypatch, capsys):
    run_one, done = runner.run_one, []

    def stopped(*given):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return run_one(*given)

    monkeypatch.setattr(runner, "run_one", stopped)
    words = ["--methods", "pretrained", "best-of-n", "smc-base", *TINY]
    assert tokensteer("compare", "digits", *words, "--out", tmp_path / "x") == 130
    run = ts.open_run(tmp_path / "x")
    assert [row["method"] for row in run.rows] == ["pretrained", "best-of-n"]
    assert len(run.config["jobs"]) == 3
    assert run.result(1).samples.shape == (2, 2, 64)
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "tokensteer: stopped; what was finished is kept"
    assert "best-of-n" in said.out


def test_a_run_that_fails_at_once_leaves_nothing(tmp_path: Path, monkeypatch, capsys):
    def broken(*given):
        raise FloatingPointError("the weight of particle 0 is NaN")

    monkeypatch.setattr(runner, "run_one", broken)
    assert tokensteer("run", "digits", *TINY, "--out", tmp_path / "x") == 2
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "tokensteer: the weight of particle 0 is NaN\n"


def test_a_folder_is_only_replaced_by_force(run_folder: Path, capsys):
    (run_folder / "notes.txt").write_text("mine")
    before = (run_folder / "results.json").read_text()
    words = ["run", "digits", "--method", "pretrained", *TINY, "--out", run_folder]
    assert tokensteer(*words) == 2
    assert "--force" in capsys.readouterr().err
    assert (run_folder / "results.json").read_text() == before
    assert tokensteer(*words, "--force") == 0
    assert ts.open_run(run_folder).rows[0]["method"] == "pretrained"
    assert len(list((run_folder / "rows").iterdir())) == 2
    assert (run_folder / "notes.txt").read_text() == "mine"


def test_figures_are_drawn_on_request_and_replaced_with_their_run(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    words = ("compare", "digits", *TINY, "--methods", "smc-base", "--out", folder)
    assert tokensteer(*words) == 0
    assert tokensteer("report", folder) == 0
    assert not (folder / "figures").exists()
    assert tokensteer("report", folder, "--figures") == 0
    made = [folder / "figures" / f"digits-{name}.png" for name in ("traces", "weights")]
    assert all(f"Figure: {file}" in capsys.readouterr().out for file in made[:1])
    assert sorted((folder / "figures").iterdir()) == made
    assert tokensteer(*words, "--force") == 0
    assert not list((folder / "figures").iterdir())

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert tokensteer("report", folder, "--figures") == 2
    assert "tokensteer[plot]" in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def test_force_replaces_runs_and_nothing_else(tmp_path: Path, capsys):
    (tmp_path / "thesis.txt").write_text("all of it")
    assert tokensteer("run", "digits", *TINY, "--out", tmp_path, "--force") == 2
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    assert "holds no run" in capsys.readouterr().err


def damaged(folder: Path) -> Path:
    """The weights of digits with the middle of one file missing."""
    folder.mkdir()
    for file in SHIPPED.glob("digits-*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "digits-denoiser.safetensors").write_bytes((SHIPPED / "digits-denoiser.safetensors").read_bytes()[:5000])
    return folder


RUN = ["run", "digits", *TINY, "--out", "OUT"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu"], "no command called 'rnu'. Did you mean run?"),
        (["run", "digist", "--out", "OUT"], "no task called 'digist'. Did you mean digits? There are: mog, product"),
        (["compare", "chess", "--out", "OUT"], "no task called 'chess'"),
        (["train", "digist", "--out", "OUT"], "no task called 'digist'"),
        (
            [*RUN, "--method", "smc_grad"],
            "no method called 'smc_grad'. Did you mean smc-grad? There are: auto, pretrained",
        ),
        (["compare", "digits", "--methods", "smc-base", "xyz", "--out", "OUT"], "no method called 'xyz'"),
        (["compare", "digits", "--recipe", "ramp", "--out", "OUT"], "no recipe called 'ramp'. Did you mean ramps?"),
        ([*RUN, "--particles", "0"], "--particles must be at least 1, got 0; try 16"),
        (["compare", "digits", "--particles", "4", "0", "--out", "OUT"], "--particles must be at least 1"),
        (["compare", "digits", "--populations", "0", "--out", "OUT"], "--populations must be at least 1"),
        (["compare", "digits", "--seeds", "--out", "OUT"], "--seeds lists nothing: give one or more"),
        (["compare", "digits", "--particles", "--out", "OUT"], "--particles lists nothing: give one or more"),
        (["compare", "digits", "--methods", "--out", "OUT"], "--methods lists nothing: give one or more"),
        ([*RUN, "--populations", "-1"], "--populations must be at least 1"),
        ([*RUN, "--steps", "0"], "--steps must be at least 1"),
        ([*RUN, "--draws", "0"], "--draws must be at least 1"),
        ([*RUN, "--seed", "-1"], "--seed must be"),
        ([*RUN, "--kl", "0"], "kl must be positive"),
        ([*RUN, "--remask", "2"], "remask must lie in [0, 1]"),
        ([*RUN, "--goal", "12"], "digit from 0 to 9"),
        ([*RUN, "--device", "toaster"], "no device called toaster"),
        ([*RUN, "--device", "meta"], "the device meta cannot be used here: there are cpu"),
        ([*RUN, "--memory", "lots"], "memory must read like '8GiB'"),
        ([*RUN, "--ramp", "linaer"], "no ramp called 'linaer'. Did you mean linear?"),
        ([*RUN, "--ramp", "clipped:x"], "takes a number"),
        ([*RUN, "--ramp", "clipped:0"], "takes a positive number"),
        ([*RUN, "--ramp", "clipped:11"], "--ramp clipped:k takes tenths of the time, above 0 and up to 10, got 11"),
        ([*RUN, "--noise", "loud"], "no noise called 'loud'"),
        (["run", "mog", "--noise", "shared"], "give --draws too"),
        ([*RUN, "--trigger", "sometimes"], "no trigger called 'sometimes'"),
        ([*RUN, "--resample", "stratfied"], "no resampling scheme called 'stratfied'. Did you mean stratified?"),
        ([*RUN, "--resample", "residual", "--method", "svdd"], "and svdd has none or one of its own: leave it out"),
        ([*RUN, "--resample", "residual", "--method", "pretrained"], "and pretrained has none or one of its own"),
        (
            [*RUN, "--resample", "residual", "--method", "particle-gibbs"],
            "and particle-gibbs has none or one of its own",
        ),
        ([*RUN, "--guidance", "2"], "digits has no model that takes the goal as a label: leave out --guidance 2"),
        ([*RUN, "--clip", "0"], "--clip must be positive and finite, got 0"),
        ([*RUN, "--smoothing", "1"], "--smoothing must lie in [0, 1), got 1"),
        ([*RUN, "--method", "pretrained", "--smoothing", "0.5"], "--smoothing is that of the reward"),
        (
            [*RUN, "--method", "smc-base", "--clip", "2"],
            "the gradient of smc-grad, prop-grad and auto, not of smc-base",
        ),
        ([*RUN, "--learned-scale", "0"], "--learned-scale must be positive and finite, got 0"),
        ([*RUN, "--method", "smc-base", "--learned-scale", "1"], "--learned-scale is that of smc-amot, prop-amot and"),
        ([*RUN, "--method", "smc-amot", "--learned-scale", "2"], "--learned-scale must lie in (0, 1] on digits, got 2"),
        ([*RUN, "--guidance", "0"], "--guidance must be positive and finite, got 0"),
        (["run", "dna", "--steps", "2", "--guidance", "2"], "--guidance is the scale of cfg and smc-cfg, and smc-grad"),
        ([*RUN, "--trigger", "ess:2"], "ess_below: fraction must lie in (0, 1]"),
        ([*RUN, "--trigger", "ess:0.5:1"], "takes a number of looks from 2, got '1'"),
        ([*RUN, "--trigger", "ess:0.5:x"], "takes a number of looks from 2, got 'x'"),
        ([*RUN, "--trigger", "every:0"], "every: k must be at least 1"),
        ([*RUN, "--method", "smc-enumerated"], "enumeration needs"),
        ([*RUN, "--method", "particle-gibbs", "--particles", "1"], "at least two particles"),
        ([*RUN, "--weights", "NOWHERE"], "no weights at"),
        ([*RUN, "--weights", "DAMAGED"], "is damaged, or no safetensors file"),
        (["run", "digits", *TINY, "--out", __file__], "is a file"),
        (["run", "digits", *TINY, "--out", f"{__file__}/deeper"], "is a file"),
        (["run", "digits", *TINY, "--out", str(Path(__file__).parent)], "is not empty"),
        (["report", "NOWHERE"], "nowhere is no run folder (there is no such folder): give the --out of a run\n"),
        (["report", __file__], "is no run folder (it is a file): give the --out of a run\n"),
        (["train", "mog", "--minutes", "-1", "--out", "OUT"], "--minutes must be positive"),
        (["train", "dna", "--reward", "logit", "--out", "OUT"], "give --proposal or --twist too"),
        (["train", "dna", "--kl", "0.5", "--out", "OUT"], "--kl is that of the reward of a proposal or a twist"),
        (["train", "mog", "--proposal", "--kl", "0", "--out", "OUT"], "--kl must be positive and finite, got 0"),
        (["train", "dna", "--proposal", "--reward", "logits", "--out", "OUT"], "Did you mean logit?"),
        (["train", "mog", "--proposal", "--reward", "logit", "--out", "OUT"], "mog has only one reward to train for"),
    ],
)
def test_bad_input_gives_one_line_and_exit_2(words: list[str], says: str, tmp_path: Path, capsys):
    if "DAMAGED" in words:
        damaged(tmp_path / "weights")
    places = {"OUT": tmp_path / "out", "NOWHERE": tmp_path / "nowhere", "DAMAGED": tmp_path / "weights"}
    assert tokensteer(*(places.get(word, word) for word in words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert says in said.err
    assert not (tmp_path / "out").exists()


def test_options_that_are_none_exit_with_2(capsys):
    assert tokensteer("run", "digits", "--particels", "3") == 2
    assert "--particles" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_gpu_that_is_not_there_is_said(device: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tokensteer("run", "digits", *TINY, "--device", device, "--out", tmp_path / "x") == 2
    assert capsys.readouterr().err == f"tokensteer: torch sees no GPU here, so the device cannot be {device}: use cpu\n"


def test_a_run_folder_of_another_format_is_refused(run_folder: Path, capsys):
    config = json.loads((run_folder / "config.json").read_text())
    (run_folder / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(ValueError, match="format 99 and this tokensteer reads 1"):
        ts.open_run(run_folder)
    capsys.readouterr()
    assert tokensteer("report", run_folder) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "99" in said.err
    assert not (run_folder / "report.html").exists()


@pytest.mark.parametrize(
    ("harm", "error", "match"),
    [
        (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{}"), ValueError, "which format"),
        (lambda folder: (folder / "results.json").write_text("[{"), ValueError, "damaged"),
        (lambda folder: (folder / "results.json").write_text("{}"), ValueError, "list of rows"),
        (lambda folder: next((folder / "rows").glob("*.safetensors")).unlink(), FileNotFoundError, "not there"),
        (lambda folder: next((folder / "rows").glob("*.safetensors")).write_bytes(b"x"), ValueError, "damaged"),
    ],
)
def test_damaged_run_folders_say_so(run_folder: Path, harm, error, match):
    harm(run_folder)
    with pytest.raises(error, match=match) as caught:
        ts.open_run(run_folder).result(0)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ts.open_run(run_folder / "deeper")


def test_nothing_is_half_written(tmp_path: Path):
    file = tmp_path / "x.json"
    files.write_json(file, [1])
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(file, [float("nan")])

    def fails(place: Path) -> None:
        place.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write_whole(file, fails)
    assert [found.name for found in tmp_path.iterdir()] == ["x.json"]
    assert json.loads(file.read_text()) == [1]


# ---- check


PARTS = """
import torch
import tokensteer as ts
from tokensteer.testing import TableDenoiser

joint = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 1.0], [2.0, 2.0, 5.0]], dtype=torch.float64)
denoiser = TableDenoiser(joint / joint.sum())
kernel = ts.Ancestral(3)
model = ts.Diffusion(denoiser, kernel, ts.uniform_steps(4), ts.template(2, 3))


def reward(x):
    return -x.sum(-1).double()


def wide(x):
    return torch.zeros(len(x), 1)


def mixed(x):
    return x.sum(-1).double() - x.double().mean()


def breaks(x):
    return x[:, 7].double()


def drowsy(x, t):
    return denoiser(x, t).exp()


def steering():
    return ts.Steering(model, ts.Tilt(reward, draws=2))


method = ts.smc_base(model, ts.Tilt(reward, draws=2))
tilt = ts.Tilt(reward)
number = 3


class Sum(torch.nn.Module):
    def forward(self, x):
        return reward(x)


class Scaled(Sum):
    def __init__(self, scale):
        super().__init__()


module = Sum()


def failing():
    return Scaled()
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    return tmp_path


SIZES = ["--vocab", "4", "--length", "2"]


@pytest.mark.parametrize(
    ("words", "laws"),
    [
        (["my_parts:steering"], ["denoiser", "kernel", "reward", "proposal"]),
        (["my_parts.py:method"], ["denoiser", "kernel", "reward", "proposal"]),
        (["my_parts:model"], ["denoiser", "kernel"]),
        (["my_parts:model.kernel", "--vocab", "4"], ["kernel"]),
        (["my_parts:denoiser", *SIZES], ["denoiser"]),
        (["my_parts:reward", *SIZES], ["reward"]),
        (["my_parts:tilt", *SIZES], ["reward"]),
        (["my_parts:module", *SIZES], ["reward"]),
        (["my_parts:Sum", *SIZES], ["reward"]),
        (["my_parts:reward", *SIZES, "--mask", "-1"], ["reward"]),
    ],
)
def test_check_holds_parts_to_their_laws(words: list[str], laws: list[str], parts, capsys):
    assert tokensteer("check", *words) == 0
    said = capsys.readouterr()
    assert re.findall(r"holds: the law of the (\w+)", said.out) == laws
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["my_parts:wide", *SIZES], r"law of the reward: the reward must give .* got \(8, 1\).*squeeze"),
        (["my_parts:mixed", *SIZES], "law of the reward: the reward mixes rows"),
        (["my_parts:breaks", *SIZES], "breaks down under the law of the reward: IndexError"),
        (["my_parts:reward", *SIZES, "--one-hots"], "law of the reward"),
        (["my_parts:drowsy", *SIZES], "from_logits"),
        (["my_parts:reward"], "--vocab"),
        (["my_parts:reward", "--vocab", "4"], "--length"),
        (["my_parts:reward", *SIZES, "--mask", "4"], "--mask must be one of the 4 tokens of --vocab, 0 to 3, got 4"),
        (["my_parts:denoiser", *SIZES, "--mask", "-1"], "--mask must be one of the 4 tokens"),
        (
            ["my_parts:reward", "--vocab", "0", "--length", "2"],
            "--vocab must be at least 2, a token and the mask, got 0",
        ),
        (["my_parts:kernel", "--vocab", "1"], "--vocab must be at least 2"),
        (["my_parts:reward", "--vocab", "4", "--length", "0"], "--length must be at least 1, got 0"),
        (["my_parts:Scaled", *SIZES], "Scaled is a class that takes scale: give an object of it"),
        (["my_parts:failing", *SIZES], r"failing\(\) breaks down: TypeError"),
        (["my_parts:number"], "is a int: give a Steering"),
        (["my_parts:rewrad"], "no attribute called 'rewrad'. Did you mean reward?"),
        (["my_parts"], "module:attribute"),
        (["no_such_parts:x"], "cannot be imported"),
        (["no_such_parts.py:x"], "there is no file"),
    ],
)
def test_check_names_the_law_that_broke(words: list[str], says: str, parts, capsys):
    assert tokensteer("check", *words) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    assert re.search(says, said.err), said.err


# ---- the rest


def test_doctor_says_what_is_there(capsys, monkeypatch):
    assert {name for name, *_ in EXTRAS} >= {"transformers", "peft", "h5py", "pyjaspar"}
    monkeypatch.setattr("tokensteer.app.commands.doctor.EXTRAS", (("no-such-package", "eval", "nothing"),))
    assert tokensteer("doctor") == 0
    out = capsys.readouterr().out
    assert f"tokensteer   {ts.__version__}" in out
    assert "pip install 'tokensteer[eval]'" in out
    assert re.search(r"digits +ready, \d", out)
    assert re.search(r"product +ready, needs no weights", out)


def test_training_leaves_weights_that_can_be_run(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(mog_trained, "_quality", lambda training: {})  # measured in test_tasks.py
    assert tokensteer("train", "mog", "--scale", "0.002", "--out", tmp_path / "w") == 0
    words = ["--method", "smc-base", *TINY, "--weights", tmp_path / "w", "--out", tmp_path / "run"]
    assert tokensteer("run", "mog", *words) == 0
    assert ts.open_run(tmp_path / "run").config["weights"] == str(tmp_path / "w")
    capsys.readouterr()
    assert tokensteer("train", "mog", "--scale", "0.002", "--out", tmp_path / "w") == 2
    assert "--force" in capsys.readouterr().err


def test_demo_compares_two_tasks_and_writes_a_report(tmp_path: Path, monkeypatch, capsys):
    two = ("pretrained", "svdd")
    sizes = (demo.Size("mog", 10, 2, 3, demo.MOG, alone=5), demo.Size("digits", 4, 2, 3, two))
    monkeypatch.setattr(demo, "SIZES", sizes)
    assert tokensteer("demo", "--out", tmp_path / "demo") == 0
    rows = ts.open_run(tmp_path / "demo").rows
    assert {row["particles"] * row["populations"] for row in rows if row["task"] == "mog"} == {20}
    assert [row["method"] for row in rows if row["task"] == "mog"] == list(demo.MOG)
    assert [row["method"] for row in rows if row["task"] == "digits"] == list(two)
    report = tmp_path / "demo" / "report.html"
    assert report.is_file()
    assert str(report) in capsys.readouterr().out
    equal = demo.Size("digits", 4, 1, 2, ("best-of-n", "smc-grad"), as_many_rows_as="smc-grad")
    plenty, given = demo.jobs_of(equal, 0, Environment())
    assert (given.particles, given.extra) == (4, ())
    assert plenty.particles > 8  # its particles need no reward on the way
    monkeypatch.setattr(demo, "SIZES", (demo.Size("digits", 2, 1, 1, ("pretrained",)),))
    assert tokensteer("demo", "--out", tmp_path / "demo", "--force") == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.2345, 0.0321], "1.234±0.032"),
        ([-12.0, 3.0], "−12.0±3.0"),
        ([0.5, None], "0.5000"),
        ([None, None], "–"),
        (None, "–"),
    ],
)
def test_numbers_have_the_places_their_errors_bear(value, text: str):
    assert table.spread(value) == text


def test_help_loads_nothing_heavy():
    """--help is to take less than half a second, and torch alone takes more."""
    program = "import sys; from tokensteer.app.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for words in ([], ["--help"], ["run", "--help"], ["compare", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "tokensteer" in done.stdout


def test_every_command_can_be_the_first_that_is_loaded():
    """In a new process the command's module is imported before `tokensteer.api`."""
    program = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(f"tokensteer.app.{name}")
    for loaded in [word for word in sys.modules if word.startswith("tokensteer")]:
        del sys.modules[loaded]
"""
    names = [f"commands.{name}" for name in options.COMMANDS] + ["runs.claims", "runs.folder"]
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_all_there():
    program = "import sys, tokensteer as ts; assert 'torch' not in sys.modules; from tokensteer import *; print(smc)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert set(ts.__all__) <= set(dir(ts))
    assert all(getattr(ts, name) is not None for name in ts.__all__)
    with pytest.raises(AttributeError, match="no attribute 'smcc'"):
        _ = ts.smcc
