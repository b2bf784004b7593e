"""Constraints on texts from the command line, once with the shipped networks, else with small ones."""

from __future__ import annotations

import json

import pytest
import small_texts

from tokensteer.app.cli import main
from tokensteer.rewards import read_json


def run(tmp_path, *words: str) -> list[dict]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The movie\n", encoding="utf-8")
    out = tmp_path / "run"
    usual = ["--particles", "2", "--populations", "1", "--steps", "3", "--prompts", str(prompts), "--out", str(out)]
    assert main(["run", "text", *usual, *words]) == 0
    (file,) = (out / "rows").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def small(tmp_path) -> tuple[str, str]:
    return "--weights", str(small_texts.write_task(tmp_path / "weights", length=32))


def test_words_and_letters(tmp_path):
    rows = run(tmp_path, "--method", "smc-base", "--contains", "plot", "--without", "z", "--rhyme", "night")
    assert len(rows) == 2
    for row in rows:
        assert "plot" in row["text"]
        assert "z" not in row["text"]
        assert row["text"].rstrip(" .,!?\"'-)").endswith("ight")
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert config["options"]["contains"] == ["plot"]
    assert config["jobs"][0]["rhyme"] == "night"


def test_the_clip_of_a_gradient_is_stored_beside_a_rule(tmp_path):
    run(tmp_path, "--method", "smc-grad", "--without", "z", *small(tmp_path))
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert config["jobs"][0]["clip"] == 1.0


def test_json_of_a_schema(tmp_path):
    schema = tmp_path / "schema.json"
    wanted = {"type": "object", "properties": {"review": {"type": "string"}}}
    schema.write_text(json.dumps(wanted), encoding="utf-8")
    blank = tmp_path / "blank.txt"
    blank.write_text("___32\n", encoding="utf-8")
    rows = run(tmp_path, "--method", "pretrained", "--schema", str(schema), "--prompts", str(blank), *small(tmp_path))
    assert [list(read_json(row["text"], wanted)) for row in rows] == [["review"]] * 2
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert "reward" not in results[0]["metrics"]
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert "schema" in config["inputs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run digits --contains plot --steps 2", "digits has no texts: leave out --contains"),
        ("run text --schema nowhere.json --steps 2", "--schema: there is no file nowhere.json"),
        ("run text --budget 1s --without z --steps 2", "auto takes no constraints"),
        ("run text --method smc-base --pattern no --steps 2", "cannot be met"),
    ],
)
def test_refusals(tmp_path, capsys, words, message):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The movie\n", encoding="utf-8")
    given = ["--prompts", str(prompts), *small(tmp_path)] if "text" in words else []
    assert main([*words.split(), *given, "--out", str(tmp_path / "run")]) != 0
    assert message in capsys.readouterr().err
