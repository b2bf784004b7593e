"""The page: all parts in order, with style sheet and script inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

from tokensteer import files
from tokensteer.app.report import charts, genealogy, learning, player, samples, sweeps, traces, trades
from tokensteer.app.report.folder import Row, Run, read
from tokensteer.app.report.markup import element, most_within, pickers, section, text
from tokensteer.app.report.table import best_table, table
from tokensteer.app.report.words import colours_of, most_telling, naming, plural, verdict
from tokensteer.app.runs import folder as runs
from tokensteer.app.words.plans import PILOTED, by_title
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.looks import HeatMap, Look

HERE = Path(__file__).parent
MISSING = 12  # how many missing rows are named, at most
TREES = 8  # how many populations of a row have their genealogy drawn, at most
TREE_BYTES = 1_100_000  # the size of all genealogies together, at most
HEAD = """\
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:"><meta name="color-scheme" content="light dark">\
<link rel="icon" href="data:,">"""
TRACES = (
    "Means over populations from the first step, all noise, to the last; the band is two standard errors. "
    "Point at a chart to read it, or at a name to see its line alone. "
    "ESS/N is the share of particles that count; resampling restores it."
)
WEIGHTS = (
    "The share of particles by N times their weight: all at 1 would be a perfect proposal, much at the left "
    "means that few particles carry the rest."
)
LEARNING = "How the proposal was trained before this run, report by report. A backward pass counts as two rows."
COST = "Network rows computed, and in a lighter tone those that were needed but known already."
BEST = "The one particle of highest reward in each population. It is no draw from the target."
CHOICES = f"What pilots or timing chose within the budget, and why. {PILOTED}"
HEAT_MAPS = "All particles by weight, on the scale of the target; paler means rarer."
SAMPLES = (
    "Draws from the posterior are the method's estimate of the target. The best of a population by reward "
    "is no such draw, and is framed apart."
)
GENEALOGY = (
    "Time runs to the right and a line is a particle; children stand side by side, so that no lines cross. "
    "Coloured lines have descendants at the end, thicker ones more of the final weight; grey ones died out. "
    "Upright lines mark where resampling struck."
)


def write(folder: Path) -> Path:
    """Write the report of a run folder, `report.html` in it: one file that needs nothing else."""
    file = folder / runs.REPORT
    files.write_text(file, html(read(folder)))
    return file


def html(run: Run) -> str:
    tasks = run.by_task()
    parts = [part for task, rows in tasks.items() for part in _task(run, task, *rows, several=len(tasks) > 1)]
    links = "".join(text("a", title, f'href="#{escape(key)}"') for key, title, _ in parts)
    body = element("header", "", _header(run)) + element("nav", 'aria-label="Parts of this page"', links)
    body += element("main", "", *(content for _, _, content in parts))
    scripts = ("report.js", "player.js") if 'class="player"' in body else ("report.js",)
    body += "".join(element("script", "", (HERE / script).read_text("utf-8")) for script in scripts)
    style = element("style", "", (HERE / "report.css").read_text("utf-8"))
    head = element("head", "", HEAD, text("title", f"{', '.join(tasks)} · tokensteer"), style)
    return f'<!doctype html>\n<html lang="en">{head}\n<body>{body}</body></html>\n'


def _header(run: Run) -> str:
    """What was run and the verdict, or what is missing."""
    config, tasks = run.config, run.by_task()
    about = "; ".join(dict.fromkeys(row.about or row.task for row in run.rows))
    goals = dict.fromkeys(_words(row.job["goal"]) for row in run.rows if row.job.get("goal") is not None)
    said = [(f"{task}: " if len(tasks) > 1 else "") + verdict(joined) for task, (_, joined) in tasks.items()]
    opening = text("p", " ".join(said), 'class="lead"') if run.finished else _unfinished(run)
    facts = {
        "Task": ", ".join(tasks),
        "Goal": ", ".join(goals) or None,
        "Command": config.get("command"),
        "Date": config.get("started"),
        "Version": config.get("version"),
    }
    rows = "".join(
        text("dt", name) + element("dd", "", text("code" if name == "Command" else "span", _words(value)))
        for name, value in facts.items()
        if value is not None
    )
    shown = ("command", "started", "version", "jobs")
    rest = {key: value for key, value in config.items() if key not in shown and value is not None}
    settings = "".join(text("dt", str(key)) + text("dd", _words(value)) for key, value in rest.items())
    more = element("details", "", text("summary", "All settings"), element("dl", "", settings)) if rest else ""
    title = text("p", "tokensteer report", 'class="eyebrow"') + text("h1", about[:1].upper() + about[1:])
    return title + opening + element("dl", 'class="facts"', rows) + more


def _unfinished(run: Run) -> str:
    """The missing rows of a run, in place of a verdict."""
    there, missing = len(run.rows), len(run.missing)
    few = "; ".join(run.missing[:MISSING]) + (f"; and {missing - MISSING} more" if missing > MISSING else "")
    said = f"Unfinished: {there} of {there + missing} rows are there, so no method is called best. Missing: {few}."
    return text("p", said, 'class="lead off"')


def _words(value: object) -> str:
    """A value of the config as text. A list of strings is a command line."""
    if isinstance(value, str):
        return value.replace("T", " ") if value[:4].isdigit() and value[10:11] == "T" else value
    if isinstance(value, list) and all(isinstance(word, str) for word in cast("list[Any]", value)):
        return " ".join(cast("list[str]", value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(v)}" for key, v in cast("dict[str, Any]", value).items() if v is not None)
    return json.dumps(value, ensure_ascii=False)


def _task(run: Run, task: str, rows: Sequence[Row], joined: Sequence[Row], several: bool) -> list[tuple[str, str, str]]:
    """The parts of the page about a task: key, title, markup."""
    colours, name = colours_of(run.rows), naming(rows)
    start, end = (f"{task}-", f", {task}") if several else ("", "")
    parts = [
        ("results", "Results", "", _results(rows, joined, colours, run.finished)),
        ("choices", "Choices", CHOICES, _choices(rows)),
        ("samples", "Samples", *_samples(task, rows, name, colours)),
        ("particles", "Particles", *player.part(rows, _look(task), name, colours)),
        ("traces", "On the way", TRACES, traces.charts(rows, colours)),
        ("weights", "Weights at the end", WEIGHTS, traces.weights(rows, colours)),
        ("genealogy", "Genealogy", *_genealogy(rows, name, colours)),
        ("learning", "Learning", LEARNING, learning.charts(rows)),
        ("cost", "Cost", COST, traces.cost(rows, name, colours)),
    ]
    return [
        (start + key, title + end, section(start + key, title + end, note, content))
        for key, title, note, content in parts
        if content
    ]


def _results(rows: Sequence[Row], joined: Sequence[Row], colours: Mapping[str, int], finished: bool) -> str:
    best = best_table(joined, colours, finished)
    apart = text("h3", "Best of N by reward") + text("p", BEST, 'class="note"') + best if best else ""
    single = text("h3", "Seed by seed") + table(rows, colours, finished) if len(joined) < len(rows) else ""
    trade = trades.chart(joined, colours) if finished else ""
    return table(joined, colours, finished) + sweeps.charts(joined, colours) + trade + single + apart


def _choices(rows: Sequence[Row]) -> str:
    """What was chosen for each method within a budget, with the reasons; "" where nothing was."""
    return "".join(
        text("h3", title)
        + element("dl", "", *(text("dt", name) + text("dd", reason) for name, reason in reasons.items()))
        for title, reasons in by_title((row.method, row.seed, row.plan) for row in rows).items()
    )


def _look(task: str) -> Look | None:
    return TASKS[task].look if task in TASKS else None  # a folder may name a task of another version


def _samples(task: str, rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> tuple[str, str]:
    look = _look(task)
    if isinstance(look, HeatMap) and all(row.result.samples.shape[-1] == 2 for row in rows):
        return HEAT_MAPS, samples.heat_maps(look, rows, name, colours)
    sheets = [samples.sheet(row, look, name(row), colours[row.method]) for row in rows]
    return SAMPLES, element("div", 'class="cards"', *sheets)


def _genealogy(rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> tuple[str, str]:
    many = [row for row in rows if row.particles > 1]
    if not many:
        return "", ""
    drawable = [row for row in many if row.particles <= genealogy.MOST]
    drawn = [[_tree(row, b) for b in range(min(TREES, row.populations))] for row in drawable]
    shown = most_within(drawn, TREE_BYTES)
    kept = [(row, trees[:most]) for row, trees, most in zip(drawable, drawn, shown, strict=True) if most]
    note = GENEALOGY if kept else ""
    if left := len(many) - len(kept):
        has = "has" if left == 1 else "have"
        note += f" {plural(left, 'row')} {has} too many lines to draw one by one: the chart of survivors shows them."
    survival = traces.survival(many, colours)
    if not kept:
        return note, survival
    first = most_telling([row for row, _ in kept])
    trees = ""
    for k, (row, some) in enumerate(kept):
        for b, drawing in enumerate(some):
            hidden = "" if k == first and b == 0 else " hidden"
            kind = f'class="tree c{colours[row.method]}" data-row="{k}" data-population="{b}"{hidden}'
            trees += element("div", kind, drawing)
    return note, element("div", 'class="genealogy"', _controls(kept, name, first), trees) + survival


def _tree(row: Row, population: int) -> str:
    tree = genealogy.tree(row.result, population)
    height = min(560, max(150, 70 + 13 * tree.size if tree.size < 24 else 220 + 5 * tree.size))
    words, facts = genealogy.described(tree), genealogy.facts(tree, row.result, population)
    kind = f'class="plot" style="height:{height}px" tabindex="0" role="img" aria-label="{words}" data-tree="{facts}"'
    plot = element("div", kind, genealogy.draw(tree))
    return plot + charts.x_axis(charts.step_labels(tree.steps)) + f'<p class="note">{words}.</p>'


def _controls(kept: Sequence[tuple[Row, Sequence[str]]], name: Callable[[Row], str], first: int) -> str:
    return element(
        "div",
        'class="controls"',
        pickers([name(row) for row, _ in kept], [len(some) for _, some in kept], first),
        element("output", 'aria-live="polite"', "Point at a line, or go there and use the arrow keys."),
    )
