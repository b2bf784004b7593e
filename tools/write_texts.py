"""Write docs/results/texts.md, samples of texts by every method, from run folders of `tokensteer compare text`.

    python tools/write_texts.py PRAISE_FOLDER ... --toxic TOXIC_FOLDER ...

Rows are looked up by method, particles and goal in all folders. Needed are config.json, results.json and the JSON lines
of the rows, without tensors. Places and weights decide which texts are shown, so the same folders give the same page.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokensteer.app.runs.folder import open_run
from tokensteer.files import read_lines, write_text
from tokensteer.tasks.text.prior.toxicity import LISTED, MILD

PAGE = Path(__file__).parents[1] / "docs" / "results" / "texts.md"
METHODS = {
    "best-of-n": "best of N",
    "svdd": "SVDD",
    "fk-difference": "FK, difference",
    "smc-base": "SMC_base",
    "smc-grad": "SMC_grad",
    "smc-amot": "SMC_amot",
}
N, TEXTS = 8, 20
# Words, how words begin, what they have inside, and how they end: the model joins pieces to words that no list has.
WORDS = (
    "|".join(sorted({*LISTED, *MILD, *(f"{word}s" for word in MILD)})) + "|arse|boobs|butt|cock|hell|homo|pussy|twat"
)
BEGIN = "coward|crap|fool|jerk|loser|pathetic|piss|poop|scum|suck|trash|turd"
INSIDE = "bastard|bitch|cunt|damn|dumb|fag|fuck|idiot|moron|nigg|retard|shit|slut|stupid|wank|whore"
END = r"(?<![bclmprv])ass(?:es)?"  # not glass, grass, pass, mass
RUDE = re.compile(rf"\b(?:{WORDS}|(?:{BEGIN})\w*|\w*(?:{INSIDE})\w*|\w*{END})\b", re.IGNORECASE)
SPECIAL = re.compile(r"([\\`*_{}\[\]#])")
ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "~": "&#126;", "$": "&#36;"})

HEAD = """# Texts of every method

What the figures of the task [text](../text.md) look like in words. No text was chosen by hand: each part states its
rule. A text breaks off after 100 tokens, and the model knows no capitals. The prompt is in bold. `reward` is the
log p(goal) of the network that steers, `judge` the probability of the goal by the network that does not. Letters of
rude words are masked on this page; run folders have the texts as they are. SVDD had 10 populations of each prompt.

    tokensteer compare text --device cuda --particles 1 --populations 20 --methods pretrained --out out/alone
    tokensteer compare text --device cuda --particles {N} --populations 20 --methods {methods} --out out/praise
    tokensteer compare text --device cuda --particles {N} --populations 20 --methods {methods} {rude} --out out/toxic
    python tools/write_texts.py out/alone out/praise --toxic out/toxic
"""
ALONE = """## Twenty texts, not selected

The model without steering, N = 1. The rule: the first text of each of the {prompts} prompts in their order, then the
second text of the first prompts, until there are {texts}. Reward and judge are those of praise.

Look at how far a thought holds. Most sentences are well formed and keep to the subject of the prompt, but who does what
often changes from one sentence to the next, and some words are joined from pieces that do not belong together.
"""
RULE = """The rule: the first, the middle and the last of the prompts, the same for all methods; of each the first
population; of that the particle of highest weight.
"""
LOOK = {
    "praise": """Look for a reason to praise, and not only for kind words. All rewards are close to 0, so they do not
tell the methods apart. The judge learned from other texts, and does not always agree.
""",
    "toxic": """Few texts of the model are rude. With eight particles, methods whose proposal is the model rarely find
one. SMC_grad, whose proposal is tilted by the gradient of the reward, often does. Look at where its rude word stands:
it may be a name in a friendly text, which pleases the reward and insults nobody. SMC_amot learned from rude texts, and
nearly always writes one after prompts such as "The lake", but hardly after the three that the rule picks here.
""",
}
WARNING = "Warning: texts that are meant to be rude, with letters masked. Open to read them."
Row = dict[str, Any]
Line = dict[str, Any]


def mask(text: str) -> str:
    """The text with all letters of rude words but the first as asterisks. Its length stays the same."""
    return RUDE.sub(lambda word: word[0][0] + "*" * (len(word[0]) - 1), text)


def shown(line: Line) -> str:
    """A text for a cell of a Markdown table: masked, escaped, the words of the prompt in bold."""
    text, prompt = " ".join(line["text"].split()), line["prompt"]
    size = len(prompt) if text.lower().startswith(prompt.lower()) else 0  # 0: a prompt with blanks
    text = mask(text)
    first, rest = (SPECIAL.sub(r"\\\1", part).translate(ENTITIES) for part in (text[:size], text[size:]))
    return f"**{first}**{rest}" if first else rest


def number(value: float | None, places: int = 2) -> str:
    return "−∞" if value is None else f"{value:.{places}f}".replace("-", "−")  # JSON has no −∞


def table(kind: str, lines: Iterable[tuple[str, Line]]) -> str:
    rows = (f"| {name} | {shown(a)} | {number(a['reward'])} | {number(a['judge'])} |" for name, a in lines)
    return "\n".join([f"| {kind} | text | reward | judge |", "|---|---|---|---|", *rows, ""])


def find(folders: Sequence[Path], method: str, particles: int, goal: str) -> tuple[Row, list[list[Line]]]:
    """The row of a method and its texts, a list for each prompt."""
    wanted, found = (method, particles, f"towards {goal}"), list[tuple[Row, Path]]()
    for run in map(open_run, folders):
        for index, row in enumerate(run.rows):
            if (row["method"], row["particles"], row["about"].rpartition(", ")[2]) == wanted:
                found.append((dict(row), next(file for file in run.written(index) if file.suffix == ".jsonl")))
    if len(found) != 1:
        mend = "leave all folders but one out" if found else "run tokensteer compare text with it, and give its folder"
        raise SystemExit(f"{len(found)} rows of {method} with N = {particles} towards {goal}, not one: {mend}")
    [(row, file)], prompts = found, dict[str, list[Line]]()
    for line in map(json.loads, filter(None, read_lines(file))):
        if "error" not in line:
            prompts.setdefault(line["id"], []).append(line)
    share = " ± ".join(number(value, 3) for value in row["metrics"]["accuracy"])
    return row | {"accuracy": share}, list(prompts.values())


def alone(folders: Sequence[Path]) -> str:
    row, prompts = find(folders, "pretrained", 1, "praise")
    order = [lines[k] for k in range(max(map(len, prompts))) for lines in prompts if k < len(lines)][:TEXTS]
    judged = f"The judge assigns {row['accuracy']} of all {row['populations']} texts to praise.\n"
    texts = table("", ((str(k), line) for k, line in enumerate(order, 1)))
    return "\n".join([ALONE.format(prompts=len(prompts), texts=len(order)), judged, texts])


def steered(folders: Sequence[Path], goal: str) -> str:
    found = {name: find(folders, method, N, goal) for method, name in METHODS.items()}
    settings = {tuple(row["resolved"].get(key) for key in ("steps", "kl", "seed")) for row, _ in found.values()}
    if len(settings) > 1:
        raise SystemExit(f"rows towards {goal} differ in steps, kl or seed, {settings}: give folders of one setting")
    figures = "T = {}, kl = {}, seed {}. The judge's accuracy over all populations:\n".format(*settings.pop())
    figures += ";\n".join(f"{name} {row['accuracy']}" for name, (row, _) in found.items()) + ".\n"
    many, tables = min(len(prompts) for _, prompts in found.values()), list[str]()
    for place in sorted({0, many // 2, many - 1}):  # a prompt's first N lines are its first population
        lines = ((name, max(prompts[place][:N], key=lambda a: a["weight"])) for name, (_, prompts) in found.items())
        tables.append(table("method", lines))
    texts = "\n".join(tables)
    if goal == "toxic":
        texts = f"<details markdown>\n<summary>{WARNING}</summary>\n\n{texts}\n</details>\n"
    return "\n".join([f"## Towards {goal}, N = {N}\n", RULE, LOOK[goal], figures, texts])


def page(praise: Sequence[Path], toxic: Sequence[Path]) -> str:
    head = HEAD.format(N=N, methods=" ".join(METHODS), rude="--reward toxicity --clip 30")
    return "\n".join([head, alone(praise), steered(praise, "praise"), steered(toxic, "toxic")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("praise", nargs="+", type=Path, help="run folders towards praise, one of them with pretrained")
    parser.add_argument("--toxic", nargs="+", type=Path, required=True, help="run folders towards toxic")
    given = parser.parse_args()
    write_text(PAGE, page(given.praise, given.toxic))
