"""The head of the page: the question, the recommendation, and samples before and after steering."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, cast

from tokensteer.app.report import samples
from tokensteer.app.report.charts import swatch
from tokensteer.app.report.folder import Row, Run
from tokensteer.app.report.markup import element, text
from tokensteer.app.report.words import listed, naming, plural, recommended, verdict
from tokensteer.tasks.catalogue import TASKS

MISSING = 12  # how many missing rows are named, at most
SHOWN = 8  # samples before and after
SETTINGS = ("steps", "seed", "draws", "noise", "ramp", "trigger", "resample")
EVERY = ("steps", "seed")  # settings of which every value is listed
CLOSED = "none, the estimate has a closed form"


def header(run: Run, colours: Mapping[str, int]) -> str:
    tasks = run.by_task()
    about = "; ".join(dict.fromkeys(row.about or row.task for row in run.rows))
    said = [(f"{task}: " if len(tasks) > 1 else "") + verdict(joined) for task, (_, joined) in tasks.items()]
    title = text("p", "tokensteer report", 'class="eyebrow"') + text("h1", about[:1].upper() + about[1:])
    opening = "".join(text("p", words, 'class="lead"') for words in said) if run.finished else _unfinished(run)
    asked = [_question(task, rows) for task, (rows, _) in tasks.items()]
    pairs = tasks.values() if run.finished else ()
    shown = [_before_after(rows, joined, colours, len(tasks) > 1) for rows, joined in pairs]
    return title + opening + "".join(asked) + "".join(shown) + _how(run)


def _unfinished(run: Run) -> str:
    """The missing rows of a run, in place of a verdict."""
    there, missing = len(run.rows), len(run.missing)
    few = "; ".join(run.missing[:MISSING]) + (f"; and {missing - MISSING} more" if missing > MISSING else "")
    said = f"Unfinished: {there} of {there + missing} rows are there, so no method is called best. Missing: {few}."
    return text("p", said, 'class="lead off banner" role="status"')


def _question(task: str, rows: Sequence[Row]) -> str:
    """The target, the reward and the settings as resolved, of all rows of a task."""
    reward = next((row.job["reward"] for row in rows if row.job.get("reward")), None)
    known = TASKS[task].rewarded if task in TASKS else ""
    words = known if reward is None else f"your function {reward}" if ":" in reward else f"{known} ({reward})"
    facts = {"Task": task, "Target": f"π(x) ∝ p(x) · exp(r(x)/kl){_kl(rows)}", "Reward r(x)": words}
    facts["Size"] = _sizes(rows)
    best = recommended(rows)
    for name in SETTINGS:
        found = list(dict.fromkeys(_words(row.resolved[name]) for row in rows if name in row.resolved))
        if name in best.resolved and name not in EVERY:
            usual = CLOSED if (name, best.resolved[name]) == ("draws", 0) else _words(best.resolved[name])
            facts[name.capitalize()] = usual + (f" ({best.method}; others below)" if len(found) > 1 else "")
        elif found:
            facts[name.capitalize()] = listed(found)
    goals = dict.fromkeys(_words(row.resolved["goal"]) for row in rows if "goal" in row.resolved)
    facts |= {"Goal": ", ".join(goals)} if goals else {}
    return element("dl", 'class="facts wide"', *(text("dt", k) + text("dd", v) for k, v in facts.items() if v))


def _sizes(rows: Sequence[Row]) -> str:
    """Populations and particles: "8 populations of 4 and 16 particles, 40 of 2"."""
    found: dict[int, set[int]] = {}
    for row in rows:
        found.setdefault(row.populations, set()).add(row.particles)
    words = [(many, listed([f"{n:,}" for n in sorted(sizes)])) for many, sizes in sorted(found.items())]
    first, *others = words
    said = [f"{plural(first[0], 'population')} of {first[1]} particles", *(f"{many:,} of {n}" for many, n in others)]
    return ", ".join(said)


def _kl(rows: Sequence[Row]) -> str:
    found = sorted({float(row.resolved["kl"]) for row in rows if "kl" in row.resolved})
    return f", kl = {listed([f'{kl:g}' for kl in found])}" if found else ""


def _before_after(rows: Sequence[Row], joined: Sequence[Row], colours: Mapping[str, int], several: bool) -> str:
    """Draws of the model alone beside those of the recommended row; "" unless both are there. With `several` tasks the
    titles name the task."""
    best = recommended(joined)
    before = next((row for row in rows if row.family == "pretrained"), None)
    after = next(row for row in rows if (row.method, row.particles) == (best.method, best.particles))
    if before is None or before is after:
        return ""
    name, of = naming(joined), f", {best.task}" if several else ""
    sides = [(f"Before{of}: the model alone", before), (f"After{of}: {name(best)}", after)]
    return element("div", 'class="before-after"', *(_side(words, row, colours) for words, row in sides))


def _side(words: str, row: Row, colours: Mapping[str, int]) -> str:
    look = TASKS[row.task].look if row.task in TASKS else None
    title = element("figcaption", "", swatch(colours[row.method]), escape(words))
    return element("figure", "", title, samples.few(row, look, words, SHOWN))


def _how(run: Run) -> str:
    """Command, date and version, and all other settings folded away."""
    config = run.config
    first = {"Command": "command", "Date": "started", "Version": "version"}
    facts = {name: config[key] for name, key in first.items() if config.get(key) is not None}
    rows = "".join(
        text("dt", name) + element("dd", "", text("code" if name == "Command" else "span", _words(value)))
        for name, value in facts.items()
    )
    rest = {k: v for k, v in config.items() if k not in (*first.values(), "jobs") and v is not None}
    settings = "".join(text("dt", str(key)) + text("dd", _words(value)) for key, value in rest.items())
    more = element("details", "", text("summary", "All settings"), element("dl", "", settings)) if rest else ""
    return element("dl", 'class="facts"', rows) + more


def _words(value: object) -> str:
    """A value of the config as text. A list of strings is a command line."""
    if isinstance(value, str):
        return value.replace("T", " ") if value[:4].isdigit() and value[10:11] == "T" else value
    if isinstance(value, list) and all(isinstance(word, str) for word in cast("list[Any]", value)):
        return " ".join(cast("list[str]", value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(v)}" for key, v in cast("dict[str, Any]", value).items() if v is not None)
    return json.dumps(value, ensure_ascii=False)
