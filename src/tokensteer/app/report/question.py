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
from tokensteer.app.report.words import listed, naming, recommended, verdict
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.words.numbers import plural, short
from tokensteer.app.words.settings import meaning
from tokensteer.tasks.catalogue import TASKS

MISSING = 12  # how many missing rows are named, at most
SHOWN = 8  # samples before and after
SETTINGS = ("steps", "seed", "draws", "noise", "smoothing", "ramp", "trigger", "resample", "order")
EVERY = ("steps", "seed")  # settings of which every value is listed
ALIKE = 1.2  # the most that network rows of methods at equal cost differ by
HOW = ("command", "started", "version")
TILT = "exp(r(x)/kl)"


def header(run: Run, colours: Mapping[str, int]) -> str:
    """The title, for each task what was asked and what came out, and how it was run."""
    tasks = run.by_task()
    alone = len(tasks) == 1
    about = next(iter(run.rows)).about or next(iter(tasks))
    methods = len({row.method for row in run.rows})
    title = about[:1].upper() + about[1:] if alone else f"{plural(methods, 'method')} on {listed(list(tasks))}"
    asked = [_asked(rows, joined, colours, run.finished, alone) for rows, joined in tasks.values()]
    return "".join(
        (
            text("p", "tokensteer report", 'class="eyebrow"'),
            text("h1", title),
            "" if run.finished else _unfinished(run),
            element("div", f'class="asked{" alone" if alone else ""}"', *asked),
            _how(run),
        )
    )


def _asked(rows: Sequence[Row], joined: Sequence[Row], colours: Mapping[str, int], finished: bool, alone: bool) -> str:
    """What was asked of a task, the recommendation, samples before and after, and the settings."""
    task, about = rows[0].task, rows[0].about or rows[0].task
    shown = _before_after(rows, joined, colours) if finished else ""
    words = [
        "" if alone else text("h2", f"{task}: {about}" if about != task else task),
        _goal(rows),
        text("p", verdict(joined), 'class="lead"') if finished else "",
    ]
    facts = element("dl", 'class="facts"', *(text("dt", k) + text("dd", v) for k, v in _facts(task, rows).items() if v))
    if alone:
        return element("div", "", *words, facts) + (element("div", "", shown) if shown else "")
    return element("article", "", *words, shown, facts)


def _goal(rows: Sequence[Row]) -> str:
    """The target: the tilted model, which may be a guided sampler, and with methods of guidance a product, which a
    reward may tilt too."""
    guided, others = _guided(rows)
    scale = _numbers("guidance", others, "a")
    model = "p_g(x | c)" if scale else "p(x)"
    formulas = [f"π(x) ∝ {model} · {TILT}{_numbers('kl', rows)}{scale}"] if others else []
    if guided:
        tilt = f" · {TILT}{_numbers('kl', guided)}" if _tilted(guided) else ""
        formulas.append(f"π(x) ∝ p(x | c)^a · p(x)^(1 − a){tilt}{_numbers('guidance', guided, 'a')}")
    spans = ", and with guidance of ".join(text("span", formula, 'class="formula"') for formula in formulas)
    names = ["p_g is the guided sampler"] * bool(scale) + ["p is the model"] * bool(guided or not scale)
    names += ["r is the reward"] * _tilted(rows)
    where = f", where {listed(names)}"
    return element("p", 'class="goal"', "Wanted: samples of ", spans, where)


def _guided(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of methods of guidance, and the others. The model alone belongs to whichever there are."""
    guided = [row for row in rows if "guidance" in row.resolved and recipe_of(row.family).guides]
    others = [row for row in rows if row not in guided and (row.family != "pretrained" or not guided)]
    return guided, others


def _tilted(rows: Sequence[Row]) -> bool:
    guided, others = _guided(rows)
    return bool(others) or any("kl" in row.resolved for row in guided)


def _unfinished(run: Run) -> str:
    """The missing rows of a run, in place of a verdict."""
    there, missing = len(run.rows), len(run.missing)
    few = "; ".join(run.missing[:MISSING]) + (f"; and {missing - MISSING} more" if missing > MISSING else "")
    said = f"Unfinished: {there} of {there + missing} rows are there, so no method is called best. Missing: {few}."
    return text("p", said, 'class="lead off banner" role="status"')


def _facts(task: str, rows: Sequence[Row]) -> dict[str, str]:
    """The reward, and the settings as resolved of all rows of a task."""
    reward = next((row.job["reward"] for row in rows if row.job.get("reward")), None)
    known = TASKS[task].rewarded if task in TASKS else ""
    words = known if reward is None else f"your function {reward}" if ":" in reward else f"{known} ({reward})"
    goals = dict.fromkeys(_words(row.resolved["goal"]) for row in rows if "goal" in row.resolved)
    words = words if _tilted(rows) else ""
    facts = {"Task": task, "Reward r(x)": words, "Goal": ", ".join(goals), "Size": _sizes(rows)}
    best, differing = recommended(rows), list[str]()
    for name in SETTINGS:
        found = list(dict.fromkeys(_words(row.resolved[name]) for row in rows if name in row.resolved))
        if name in best.resolved and name not in EVERY:
            facts[name.capitalize()] = meaning(name, best.resolved[name])
            differing += [name] if len(found) > 1 else []
        elif found:
            facts[name.capitalize()] = listed(found)
    if differing:
        facts["By method"] = f"{listed(differing)}: of {best.method} here, of the others under Methods"
    return facts


def _sizes(rows: Sequence[Row]) -> str:
    """Populations and particles: "8 populations of 4 and 16 particles, 40 of 2"."""
    found: dict[int, set[int]] = {}
    for row in rows:
        found.setdefault(row.populations, set()).add(row.particles)
    spent = [sum(row.rows.values()) + sum(row.saved.values()) for row in rows]
    sizes = sorted({row.particles for row in rows})
    if len(found) == 1 and len(sizes) > 2 and max(spent) < ALIKE * min(spent):
        each = f"{plural(rows[0].populations, 'population')} of {sizes[0]:,} to {sizes[-1]:,} particles"
        rows_each = f"{short(min(spent))} to {short(max(spent))} network rows"
        return f"{each}, so that each method needs {rows_each}, computed or saved"
    words = [(many, listed([f"{n:,}" for n in sorted(sizes)])) for many, sizes in sorted(found.items())]
    first, *others = words
    kind = "particle" if first[1] == "1" else "particles"
    said = [f"{plural(first[0], 'population')} of {first[1]} {kind}", *(f"{many:,} of {n}" for many, n in others)]
    return ", ".join(said)


def _numbers(name: str, rows: Sequence[Row], symbol: str = "") -> str:
    found = sorted({float(row.resolved[name]) for row in rows if name in row.resolved})
    return f", {symbol or name} = {listed([f'{value:g}' for value in found])}" if found else ""


def _before_after(rows: Sequence[Row], joined: Sequence[Row], colours: Mapping[str, int]) -> str:
    """Draws of the model alone beside those of the recommended row; "" unless both are there."""
    best = recommended(joined)
    before = next((row for row in rows if row.family == "pretrained"), None)
    after = next(row for row in rows if (row.method, row.particles) == (best.method, best.particles))
    if before is None or before is after:
        return ""
    sides = [("Before: the model alone", before), (f"After: {naming(joined)(best)}", after)]
    return element("div", 'class="before-after"', *(_side(words, row, colours) for words, row in sides))


def _side(words: str, row: Row, colours: Mapping[str, int]) -> str:
    look = TASKS[row.task].look if row.task in TASKS else None
    title = element("figcaption", "", swatch(colours[row.method]), escape(words))
    return element("figure", "", title, samples.few(row, look, words, SHOWN))


def _how(run: Run) -> str:
    """Command, date and version in a line, and all other settings folded away."""
    config = run.config
    command, started, version = (config.get(key) for key in HOW)
    words = () if command is None else (text("span", word) for word in _words(command).split(" "))
    line = element("code", "", " ".join(words)) if command is not None else ""
    line += text("span", _words(started)) if started is not None else ""
    line += text("span", f"tokensteer {_words(version)}") if version is not None else ""
    rest = {k: v for k, v in config.items() if k not in (*HOW, "jobs") and v is not None}
    settings = "".join(text("dt", str(key)) + text("dd", _words(value)) for key, value in rest.items())
    more = element("details", "", text("summary", "All settings"), element("dl", "", settings)) if rest else ""
    return element("div", 'class="how"', element("p", "", line), more)


def _words(value: object) -> str:
    """A value of the config as text. A list of strings is a command line."""
    if isinstance(value, str):
        dated = value[:4].isdigit() and value[10:11] == "T"
        return value[:19].replace("T", " ") + value[19:].replace("+00:00", " UTC") if dated else value
    if isinstance(value, list) and all(isinstance(word, str) for word in cast("list[Any]", value)):
        return " ".join(cast("list[str]", value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(v)}" for key, v in cast("dict[str, Any]", value).items() if v is not None)
    return json.dumps(value, ensure_ascii=False)
