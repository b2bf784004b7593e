"""Names are checked before torch is loaded, and the tables of names agree with what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokensteer.app import cli, options
from tokensteer.app.commands import completion
from tokensteer.app.runs import choices, jobs, recipes
from tokensteer.app.words import names
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common import objectives

PROGRAM = """
import sys
from pathlib import Path
from tokensteer.app.cli import main
code = main(sys.argv[1:])
assert not {"torch", "numpy"} & set(sys.modules)
sys.exit(code)
"""


@pytest.mark.fast
def test_a_reader_that_closes_the_pipe_is_no_error():
    command = [sys.executable, "-m", "tokensteer", "list", "methods"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as lister:
        assert lister.stdout is not None
        assert lister.stderr is not None
        lister.stdout.close()  # before anything is written
        assert lister.stderr.read() == ""
    assert lister.returncode == 141


def test_names_agree_with_what_there_is():
    assert list(names.TASKS) == list(TASKS)
    assert list(names.METHODS) == list(recipes.METHODS)
    assert list(names.RECIPES) == list(jobs.RECIPES)
    assert set(names.RAMPS) == set(choices.RAMPS)
    assert set(names.TRIGGERS) == set(choices.TRIGGERS)
    assert set(names.SCHEMES) == set(choices.SCHEMES)
    assert names.NOISES == choices.NOISES
    assert set(names.OBJECTIVES) == set(objectives.OBJECTIVES)
    assert set(names.TWISTS) == set(objectives.TWISTS)
    assert set(names.BASELINES) == set(objectives.BASELINES)
    for example in names.RAMPS_WITH_NUMBER.values():
        choices.ramp(example)
    for example in names.TRIGGERS_WITH_NUMBER.values():
        choices.trigger(example)
    assert {words.split()[0] for words in names.REWARDS} == set(TASKS)
    assert {name: set(known) for name, known in names.NAMED_REWARDS.items()} == {
        name: set(task.rewards) for name, task in TASKS.items() if task.rewards
    }


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("rnu digits", "Did you mean run?"),
        ("run digts", "no task called 'digts'. Did you mean digits?"),
        ("run digits --method smc_gard", "no method called 'smc_gard'. Did you mean smc-grad?"),
        ("run digits --particels 3", "--particles"),
        ("run digits --ramp linaer", "no ramp called 'linaer'. Did you mean linear?"),
        ("run digits --ramp clippd:3", "no ramp called 'clippd:3'. Did you mean clipped:3?"),
        ("run digits --trigger evry:3", "no trigger called 'evry:3'. Did you mean every:20?"),
        ("run digits --resample stratfied", "Did you mean stratified?"),
        ("run digits --noise shard", "Did you mean shared?"),
        ("run text --reward rudeness", "text has the rewards sentiment and toxicity: give one of them as --reward, or"),
        ("compare dna --reward odds", "dna has the rewards log-p and logit: give one of them as --reward, got odds"),
        ("run digits --kl 0", "--kl must be positive"),
        ("compare digits --methods smc-base svd", "no method called 'svd'. Did you mean svdd?"),
        ("compare digits --match-rows svd", "no method called 'svd'. Did you mean svdd?"),
        ("compare digits --recipe ramp", "no recipe called 'ramp'. Did you mean ramps?"),
        ("train digts", "no task called 'digts'. Did you mean digits?"),
        ("train digits --proposal --objective balnce", "no objective called 'balnce'. Did you mean balance?"),
        ("train digits --twist --objective contrast", "Did you mean contrastive?"),
        ("train digits --proposal --baseline sate", "no baseline called 'sate'. Did you mean state?"),
        ("train text --proposal --reward toxcity", "no reward called 'toxcity'. Did you mean toxicity?"),
        ("completion bsh", "no completion called 'bsh'. Did you mean bash?"),
        ("list method", "no list called 'method'. Did you mean methods?"),
    ],
)
def test_a_mistyped_name_is_answered_without_torch(words: str, says: str):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    "words", ["-V", "help", "help run", "list", "list methods", "list tasks", "list rewards", "completion bash"]
)
def test_what_there_is_is_said_without_torch(words: str):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_lists_have_a_line_for_each_name(capsys):
    for what, named in names.LISTS.items():
        assert cli.main(["list", what]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0].strip() for line in lines] == list(named)
        assert max(map(len, lines)) <= 120


def test_help_is_that_of_the_command(capsys):
    assert cli.main(["help", "run"]) == cli.main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: tokensteer run")
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    assert cli.main(["help"]) == cli.main(["-h"]) == 0
    assert capsys.readouterr().out == f"{options.HELP}\n" * 2
    assert cli.main(["-V"]) == cli.main(["--version"]) == 0
    assert len(set(capsys.readouterr().out.split("\n"))) == 2


def completed(*words: str) -> set[str]:
    """What bash offers for the last of the words."""
    script = """eval "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tokensteer; echo "${COMPREPLY[@]}" """
    known = ["bash", "-c", script, "-", completion.bash(), "tokensteer", *words]
    return set(subprocess.run(known, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_names():
    assert completed("") == {*options.COMMANDS, "help"}
    assert completed("run", "mn") == {"mnist"}
    assert completed("run", "digits", "--par") == {"--particles"}
    assert completed("run", "digits", "--method", "smc-g") == {"smc-grad"}
    assert completed("compare", "digits", "--re") == {"--recipe", "--remask", "--resample", "--resume", "--reward"}
    assert completed("list", "") == set(names.LISTS)
    assert completed("report", "x") == set()  # files


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_the_script_in_a_plain_shell(tmp_path: Path, capsys):
    assert cli.main(["completion", "zsh"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    asked = f"ZDOTDIR={tmp_path}; source {tmp_path}/script; print $_comps[tokensteer]"
    done = subprocess.run(["zsh", "-f", "-c", asked], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stderr == ""
    assert "_tokensteer" in done.stdout


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_options_and_names(tmp_path: Path):
    (tmp_path / "script").write_text(completion.fish())
    (tmp_path / "my-folder").mkdir()

    def found(words: str) -> set[str]:
        asked = f"source script; complete -C 'tokensteer {words}'"
        done = subprocess.run(["fish", "-N", "-c", asked], capture_output=True, text=True, check=True, cwd=tmp_path)
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    assert found("comp") == {"compare", "completion"}
    assert found("run mn") == {"mnist"}
    assert found("run digits --method smc-g") == {"smc-grad"}
    assert found("list m") == {"methods"}  # and no files
    assert found("run digits --out my") == found("report my") == {"my-folder/"}


def test_completions_have_every_option(capsys):
    for name, (kind, _) in options.COMMANDS.items():
        assert cli.main([name, "--help"]) == 0
        shown = set(re.findall(r"^\W{0,3}--([a-z][a-z-]+)", capsys.readouterr().out, re.MULTILINE))
        assert shown == set(completion.options_of(kind)), name
        assert all(f"-l {option}" in completion.fish() for option in shown)
