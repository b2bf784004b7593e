"""What the command line says: text as it was given, and one line for whatever goes wrong."""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path

import pytest
import small_texts

import tokensteer as ts
from tokensteer import files
from tokensteer.app import cli
from tokensteer.app.report import write
from tokensteer.app.runs import match_rows, match_seconds, runner
from tokensteer.app.runs.jobs import Job
from tokensteer.app.terminal import progress
from tokensteer.app.terminal import tables as table
from tokensteer.tasks.common import prompts

TINY = ["--particles", "2", "--populations", "2", "--steps", "3"]
ODD = "odd[/x][red]y :smile: [/INST]"


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


# ---- text is text


def test_a_folder_may_be_called_anything(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("odd[/x]", "odd[red]y", ":smile:"):
        assert tokensteer("run", "digits", "--method", "pretrained", *TINY, "--out", name) == 0
        assert f"Run folder: {name}   (tokensteer report {name} makes" in capsys.readouterr().out
        assert tokensteer("report", name) == 0
        assert f"Report: {name}/report.html" in capsys.readouterr().out


def test_prompts_may_be_called_anything(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    long = {"prompt": "so " * 80, "id": ODD}
    Path("p.jsonl").write_text("\n".join(map(json.dumps, ({"prompt": "The film [/b]"}, long))))
    words = ["--method", "pretrained", "--prompts", "p.jsonl", *TINY, "--weights", small_texts.write_task(Path("w"))]
    assert tokensteer("run", "text", *words, "--out", "out") == 0
    assert f"prompt {ODD} failed: " in capsys.readouterr().out
    assert ODD in write(Path("out")).read_text("utf-8")


def test_tables_and_bars_print_text_as_it_is(tmp_path: Path, monkeypatch, capsys):
    row = {"task": ODD, "about": ODD, "method": ODD, "particles": 2, "populations": 2, "seed": 0, "best": None}
    row |= {"metrics": {"accuracy": [0.5, None]}, "log_z": None, "log_z_error": None, "rows": {}, "saved": {}}
    row |= {"seconds": 1.0}
    for part in table.tables([row], 500):
        table.say(part)
    assert capsys.readouterr().out.count(ODD) == 3

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    with progress.shown(1, 0, 1, 0) as watch:
        assert isinstance(watch, progress.Bars)
        watch.begin(Job(ODD, ODD, 2, 2))
        watch.end(row)
    assert f"{ODD} {ODD}, N = 2: accuracy 0.5000" in shown.getvalue()
    assert f"{ODD}: {ODD}, N = 2" in shown.getvalue()


# ---- lines end where they should


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_line_ends_end_lines(odd: str, tmp_path: Path):
    lines = [f"The{odd}film", "The book"]
    entries = [json.dumps({"prompt": line, "id": line}, ensure_ascii=False) for line in lines]
    for name, text, end in (("p.txt", lines, "\n"), ("p.txt", lines, "\r\n"), ("p.jsonl", entries, "\n")):
        file = tmp_path / name
        file.write_bytes(end.join([*text, ""]).encode())
        assert files.read_lines(file) == [*text, ""]
        assert [prompt.text for prompt in prompts.read(file)] == lines
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"p\.jsonl is no text in UTF-8"):
        prompts.read(file)


def test_texts_with_odd_line_ends_are_read_back(tmp_path: Path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "The film", "id": "a\u2028b\u0085c"}, ensure_ascii=False))
    words = ["--method", "pretrained", "--prompts", tmp_path / "p.jsonl", *TINY, "--out", tmp_path / "out"]
    assert tokensteer("run", "text", *words, "--weights", small_texts.write_task(tmp_path / "w")) == 0
    (file,) = ts.open_run(tmp_path / "out").written(0)
    assert [json.loads(line)["id"] for line in files.read_lines(file) if line] == ["a\u2028b\u0085c"] * 4
    write(tmp_path / "out")


def test_half_a_character_is_refused_before_the_run(tmp_path: Path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "The \\ud83d film"}')
    assert tokensteer("run", "text", "--prompts", tmp_path / "p.jsonl", *TINY, "--out", tmp_path / "out") == 2
    assert "line 1 of" in capsys.readouterr().err


# ---- one line for whatever goes wrong


RUN = ["run", "digits", *TINY, "--out", "OUT"]
HUGE = "1" + "0" * 12


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*RUN, "--particles", HUGE], "--particles must be at most 1,000,000,000, got 1,000,000,000,000; try 16"),
        ([*RUN, "--populations", HUGE], "--populations must be at most"),
        ([*RUN, "--particles", "100000", "--populations", "100000"], "--particles times --populations must be at most"),
        ([*RUN, "--steps", HUGE], "--steps must be at most"),
        ([*RUN, "--draws", HUGE], "--draws must be at most"),
        ([*RUN, "--kl", "nan"], "--kl must be positive and finite, got nan"),
        ([*RUN, "--kl", "inf"], "--kl must be positive and finite, got inf"),
        ([*RUN, "--kl", "-1"], "--kl must be positive and finite, got -1"),
        ([*RUN, "--remask", "nan"], "--remask must lie in [0, 1], got nan"),
        ([*RUN, "--remask", "-0.1"], "--remask must lie in [0, 1]"),
        ([*RUN, "--seed", str(2**63)], "--seed must be a number from 0 to 2^63 - 1"),
        ([*RUN, "--memory", "9" * 400], "--memory is more than there can be"),
        ([*RUN, "--memory", "nan"], "memory must read like '8GiB'"),
        ([*RUN, "--memory", "0GiB"], "memory must be positive"),
        ([*RUN, "--ramp", "clipped:nan"], "--ramp clipped: takes a number after the colon, got 'nan'"),
        ([*RUN, "--ramp", "adaptive:inf"], "--ramp adaptive: takes a number after the colon, got 'inf'"),
        ([*RUN, "--ramp", "adaptive:1"], "share must lie in (0, 1)"),
        ([*RUN, "--trigger", "every:1.5"], "--trigger every:k takes a whole number of steps, got 1.5"),
        ([*RUN, "--trigger", "every:inf"], "--trigger every: takes a number after the colon, got 'inf'"),
        ([*RUN, "--trigger", "ess:nan"], "--trigger ess: takes a number after the colon, got 'nan'"),
        (["compare", "digits", "--seeds", "0", "-1", "--out", "OUT"], "--seed must be a number from 0"),
        (["train", "mog", "--scale", "inf", "--out", "OUT"], "--scale must be positive and finite, got inf"),
        (["train", "mog", "--scale", "nan", "--out", "OUT"], "--scale must be positive and finite, got nan"),
        (["train", "mog", "--minutes", "nan", "--out", "OUT"], "--minutes must be positive and finite, got nan"),
        (["train", "mog", "--minutes", "inf", "--out", "OUT"], "--minutes must be positive and finite, got inf"),
        (["train", "mog", "--seed", "-1", "--out", "OUT"], "--seed must be a number from 0"),
        (["demo", "--seed", "-1", "--out", "OUT"], "--seed must be a number from 0"),
        (["check", "math:sin", "--seed", "-1"], "--seed must be a number from 0"),
        (["check", "math:sin", "--vocab", HUGE, "--length", "2"], "--vocab must be at most 100,000,000"),
        (["check", "math:sin", "--vocab", "3", "--length", HUGE], "--length must be at most 100,000,000"),
    ],
)
def test_numbers_are_checked_before_anything_runs(words: list[str], says: str, tmp_path: Path, monkeypatch, capsys):
    for module in (runner, match_rows, match_seconds):
        monkeypatch.setattr(module, "run_one", lambda *given: pytest.fail("it ran"))
    assert tokensteer(*(str(tmp_path / "out") if word == "OUT" else word for word in words)) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    assert says in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("Storage size calculation overflowed with sizes=[8, 1000000000, 64]"),
    ],
)
def test_too_little_memory_is_said(error: Exception, tmp_path: Path, monkeypatch, capsys):
    def full(*given):
        raise error

    monkeypatch.setattr(runner, "run_one", full)
    assert tokensteer("run", "digits", *TINY, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith("tokensteer: there is not enough memory (")
    assert said.endswith("): use fewer --particles or --populations, or a smaller --memory\n")


JUDGES = """
import sys

def helper(texts):
    return texts[0].nothing

def short(texts):
    if texts:
        raise ValueError("no idea")

def deep(texts):
    return helper(texts)

def gone(texts):
    sys.exit(0)

number = 3

def words(texts):
    return ["good" for text in texts]

def nothing(texts):
    return None

class Judge:
    def __init__(self, name):
        self.name = name
"""


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (
            "judges.py",
            "text has the rewards sentiment and toxicity: give one of them as --reward, or a function as FILE",
        ),
        ("judges.py:", "--reward takes module:function, such as mine.py:short, or a name, got 'judges.py:'"),
        ("judges.py:number", "--reward judges.py:number is of type int: give a function from a list of texts to a"),
        ("judges.py:Judge", "--reward judges.py:Judge is a class: give a function"),
        ("judges.py:words", "--reward judges.py:words gives 'good', which is no number: give a number for each text"),
        ("judges.py:nothing", "--reward judges.py:nothing gives None, which is no number"),
        ("judges.py:short", "--reward judges.py:short raised ValueError at judges.py:9: no idea"),
        ("judges.py:deep", "--reward judges.py:deep raised AttributeError at judges.py:5: 'str' object has no"),
        ("judges.py:gone", "--reward judges.py:gone raised SystemExit at judges.py:15: 0"),
    ],
)
def test_rewards_that_cannot_judge_are_refused(reward: str, says: str, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "one.txt").write_text("The film\n")
    monkeypatch.chdir(tmp_path)
    words = ["--method", "smc-base", "--prompts", "one.txt", *TINY, "--weights", small_texts.write_task(Path("w"))]
    words += ["--out", "out"]
    assert tokensteer("run", "text", "--reward", reward, *words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert says in said
    assert not Path("out").exists()


def test_a_module_that_exits_is_no_success(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    assert tokensteer("check", "exits.py:x") == 2
    assert "exits.py cannot be imported: SystemExit at exits.py:1: 0" in capsys.readouterr().err


# ---- what SECURITY.md says


def test_nothing_that_is_read_can_run_code():
    source = Path(ts.__file__).parent
    called = [
        f"{file.relative_to(source)}:{node.lineno}"
        for file in source.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("eval", "exec", "torch.load", "pickle.load")
        and "weights_only=True" not in ast.unparse(node)
    ]
    imported = [
        f"{file.relative_to(source)}:{node.lineno}"
        for file in source.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and re.search(r"\b(pickle|marshal|dill|shelve)\b", ast.unparse(node))
    ]
    # LPIPS is read by an unpickler that knows arrays alone, which a test feeds a harmful pickle; the weights of
    # EfficientNet, and those of published scores of images, are read with weights_only=True.
    assert called == []
    # The latter name only an error of pickle.
    files = sorted(name.partition(":")[0] for name in imported)
    assert files == ["rewards/image/networks.py", "tasks/common/lpips.py"]
