"""The page of texts: rude words are masked, texts are shown as they are, and a rule decides which."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
PROMPTS = ("The lake", "The road", "A | b", "The *city*")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    import write_texts  # pyright: ignore[reportMissingImports]

    return write_texts


def run_folder(folder: Path, goal: str, methods: dict[str, int], kl: float = 0.1) -> Path:
    """A run folder as `compare text` writes it, without tensors: two populations for each prompt; the last particle
    of a population has the highest weight."""
    (folder / "rows").mkdir(parents=True)
    rows: list[dict[str, object]] = []
    for place, (method, particles) in enumerate(methods.items()):
        file = f"rows/{place:03}-{method}.jsonl"
        lines = [{"prompt": "x" * 200, "id": "0", "error": "too long"}] + [
            {
                "prompt": prompt,
                "id": str(number),
                "text": f"{prompt.lower()} of {method} {population} {particle}, you stupid <b>pig</b>",
                "weight": (1 + particle) / 36,
                "log_w": -0.5,
                "reward": None if particle == 0 else -0.25,
                "judge": 0.875,
                "population": 2 * number + population,
                "particle": particle,
            }
            for number, prompt in enumerate(PROMPTS)
            for population in range(2)
            for particle in range(particles)
        ]
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        row = {"task": "text", "method": method, "file": f"rows/{place}.safetensors", "particles": particles}
        row |= {"populations": 8, "seed": 0, "about": f"texts of 9 tokens, towards {goal}", "written": [file]}
        row |= {"metrics": {"accuracy": [0.5, 0.125]}, "log_z": None, "log_z_error": None, "rows": {}, "saved": {}}
        rows.append(row | {"seconds": 1.0, "resolved": {"steps": 50, "kl": kl, "seed": 0}})
    (folder / "config.json").write_text('{"format": 1}')
    (folder / "results.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def folders(tmp_path: Path, tool: ModuleType) -> tuple[list[Path], list[Path]]:
    methods = dict.fromkeys(tool.METHODS, 8)
    alone = run_folder(tmp_path / "alone", "praise", {"pretrained": 1, "prop-grad": 1})
    praise = run_folder(tmp_path / "praise", "praise", methods)
    return [praise, alone], [run_folder(tmp_path / "toxic", "toxic", methods, kl=0.05)]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("You IDIOT, an idiotic dumbass.", "You I****, an i****** d******."),
        ("a pig, two pigs and some horseass", "a p**, two p*** and some h*******"),  # p**: rude in an insult alone
        ("fuckingah! bullshit's end", "f********! b*******'s end"),
        ("a glass of grass, a mass in class", "a glass of grass, a mass in class"),
        ("hello, foot; assemble the pigment", "hello, foot; assemble the pigment"),
    ],
)
def test_letters_of_rude_words_are_masked_and_no_others(tool: ModuleType, text: str, masked: str) -> None:
    assert tool.mask(text) == masked


def test_every_word_of_the_task_is_masked(tool: ModuleType) -> None:
    for word in (*tool.LISTED, *tool.MILD):
        assert tool.mask(f"a {word}.") == f"a {word[0]}{'*' * (len(word) - 1)}."


def test_the_page_follows_its_rules_and_is_the_same_again(tool: ModuleType, folders) -> None:
    page = tool.page(*folders)
    assert page == tool.page(*folders) == tool.page(folders[0][::-1], folders[1])
    first, praise, toxic = re.split(r"^## .*\n", page, flags=re.MULTILINE)[1:]
    # Alone: all first texts, then the second ones; prop-grad has as many particles and is not shown.
    shown = re.findall(r"^\| (\d+) \| \*\*(.+?)\*\* of pretrained (\d) 0,.*\| −∞ \| 0\.88 \|$", first, re.MULTILINE)
    names = ("the lake", "the road", "a &#124; b", r"the \*city\*")
    assert shown == [(str(4 * k + j + 1), name, str(k)) for k in range(2) for j, name in enumerate(names)]
    # Steered: the heaviest particle of the first population, of the first, the middle and the last prompt.
    for part, kl in ((praise, 0.1), (toxic, 0.05)):
        assert f"kl = {kl}, seed 0" in part
        shown = re.findall(r"^\| (.+?) \| \*\*(.+?)\*\* of (\S+) 0 7,.*\| −0\.25 \| 0\.88 \|$", part, re.MULTILINE)
        chosen = (names[0], names[2], names[3])
        assert shown == [(tool.METHODS[method], prompt, method) for prompt in chosen for method in tool.METHODS]
        assert len(re.findall("^[|] ", part, re.MULTILINE)) == 3 * (1 + len(tool.METHODS))
    assert not re.search("stupid|pig|<b>", page)
    assert page.count(r"you s\*\*\*\*\* &lt;b&gt;p\*\*&lt;/b&gt;") == 8 + 2 * 3 * len(tool.METHODS)
    opened, closed = toxic.index("<details markdown>"), toxic.index("</details>")
    assert "you" not in toxic[:opened] + toxic[closed:]
    assert "<details" not in first + praise


def test_rows_that_are_missing_or_there_twice_or_of_other_settings_are_errors(
    tool: ModuleType, folders, tmp_path: Path
) -> None:
    praise, toxic = folders
    with pytest.raises(SystemExit, match=r"0 rows of pretrained with N = 1 towards praise.*run tokensteer compare"):
        tool.page(praise[:1], toxic)
    with pytest.raises(SystemExit, match="0 rows of best-of-n with N = 8 towards toxic"):
        tool.page(praise, praise)
    with pytest.raises(SystemExit, match=r"2 rows of pretrained.*leave all folders but one out"):
        tool.page([*praise, praise[1]], toxic)
    some, others = list(tool.METHODS)[:2], list(tool.METHODS)[2:]
    mixed = [
        run_folder(tmp_path / "a", "toxic", dict.fromkeys(some, 8)),
        run_folder(tmp_path / "b", "toxic", dict.fromkeys(others, 8), kl=0.2),
    ]
    with pytest.raises(SystemExit, match="differ in steps, kl or seed"):
        tool.page(praise, mixed)
