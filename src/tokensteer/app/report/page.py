"""The page: all parts in order, with their style and their script inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

from tokensteer import files
from tokensteer.app.report import charts, genealogy, learning, samples, sweeps, traces, trades
from tokensteer.app.report.folder import Row, Run, read
from tokensteer.app.report.markup import element, section, text
from tokensteer.app.report.table import best_table, table
from tokensteer.app.report.words import colours_of, naming, plural, verdict
from tokensteer.app.runs import folder as runs
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.looks import HeatMap

HERE = Path(__file__).parent
MISSING = 12
"""How many missing rows are named, at most."""
TREES = 8
"""How many populations of a row have their genealogy drawn, at most."""
TREE_BYTES = 1_100_000
"""What all genealogies together may take."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write(folder: Path) -> Path:
    """Make the report of a run folder, `report.html` in it: one file that needs nothing else."""
    run = read(folder)
    page = html(run)
    file = folder / runs.REPORT
    files.write_text(file, page)
    return file


def html(run: Run) -> str:
    tasks = run.tasks()
    parts = [part for task in tasks for part in _task(run, task, several=len(tasks) > 1)]
    links = "".join(text("a", title, f'href="#{escape(key)}"') for key, title, _ in parts)
    body = element("header", "", _header(run)) + element("nav", 'aria-label="Parts of this page"', links)
    body += element("main", "", *(content for _, _, content in parts))
    body += element("script", "", (HERE / "report.js").read_text("utf-8"))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
    )
    head += text("title", f"{', '.join(tasks)} · tokensteer") + element(
        "style", "", (HERE / "report.css").read_text("utf-8")
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


# ---- what was run


def _header(run: Run) -> str:
    config, tasks = run.config, run.tasks()
    about = "; ".join(dict.fromkeys(row.about or row.task for row in run.rows))
    title = about[:1].upper() + about[1:]
    goals = dict.fromkeys(_words(row.job["goal"]) for row in run.rows if row.job.get("goal") is not None)
    said = [verdict([row for row in run.joined if row.task == task]) for task in tasks]
    lead = " ".join(said if len(tasks) == 1 else [f"{task}: {words}" for task, words in zip(tasks, said, strict=True)])
    kind = "lead" if run.finished else "lead off"
    opening = text("p", lead if run.finished else _unfinished(run), f'class="{kind}"')
    facts = [
        ("Task", ", ".join(tasks)),
        ("Goal", ", ".join(goals) or None),
        ("Command", config.get("command")),
        ("Date", config.get("started")),
        ("Version", config.get("version")),
    ]
    rows = "".join(
        text("dt", key) + element("dd", "", element("code" if key == "Command" else "span", "", escape(_words(value))))
        for key, value in facts
        if value is not None
    )
    said_already = ("command", "started", "version", "jobs")
    rest = {key: value for key, value in config.items() if key not in said_already and value is not None}
    settings = "".join(text("dt", str(key)) + text("dd", _words(value)) for key, value in rest.items())
    more = element("details", "", text("summary", "All settings"), element("dl", "", settings)) if rest else ""
    eyebrow = text("p", "tokensteer report", 'class="eyebrow"')
    return eyebrow + text("h1", title) + opening + element("dl", 'class="facts"', rows) + more


def _unfinished(run: Run) -> str:
    """What is missing of a run, in place of a verdict."""
    there, missing = len(run.rows), len(run.missing)
    few = "; ".join(run.missing[:MISSING]) + (f"; and {missing - MISSING} more" if missing > MISSING else "")
    return f"Unfinished: {there} of {there + missing} rows are there, so no method is called best. Missing: {few}."


def _words(value: object) -> str:
    """A value of the config as text: a list of words is a command line."""
    if isinstance(value, str):
        return value.replace("T", " ") if value[:4].isdigit() and value[10:11] == "T" else value
    if isinstance(value, list) and all(isinstance(word, str) for word in cast("list[Any]", value)):
        return " ".join(cast("list[str]", value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(v)}" for key, v in cast("dict[str, Any]", value).items() if v is not None)
    return json.dumps(value, ensure_ascii=False)


# ---- one task after the other


def _task(run: Run, task: str, several: bool) -> list[tuple[str, str, str]]:
    """The parts of the page about a task: key, words for a link, markup."""
    rows, joined = ([row for row in some if row.task == task] for some in (run.rows, run.joined))
    colours, name = colours_of(run.rows), naming(rows)
    start, end = (f"{task}-", f", {task}") if several else ("", "")
    parts: list[tuple[str, str, str, str]] = [
        ("results", "Results", "", _results(rows, joined, colours, run.finished)),
        ("samples", "Samples", *_samples(task, rows, name, colours)),
        (
            "traces",
            "On the way",
            "Means over populations from the first step, all noise, to the last; the band is two standard errors. "
            "Point at a chart to read it, or at a name to see its line alone. "
            "ESS/N is the share of particles that count; resampling restores it.",
            traces.charts(rows, colours),
        ),
        (
            "weights",
            "Weights at the end",
            "The share of particles by N times their weight: all at 1 would be a perfect proposal, much at the left "
            "means that few particles carry the rest.",
            traces.weights(rows, colours),
        ),
        ("genealogy", "Genealogy", *_genealogy(rows, name, colours)),
        (
            "learning",
            "Learning",
            "How the proposal was trained before this run, report by report. A backward pass counts as two rows.",
            learning.charts(rows),
        ),
        (
            "cost",
            "Cost",
            "Network rows computed, and in a lighter tone those that were asked for but known already.",
            traces.cost(rows, name, colours),
        ),
    ]
    return [
        (start + key, title + end, section(start + key, title + end, note, content))
        for key, title, note, content in parts
        if content
    ]


def _results(rows: Sequence[Row], joined: Sequence[Row], colours: Mapping[str, int], finished: bool) -> str:
    best = best_table(joined, colours, finished)
    words = "Best of N by reward"
    note = "The one particle of highest reward in each population. It is no draw from the target."
    apart = text("h3", words) + text("p", note, 'class="note"') + best if best else ""
    single = text("h3", "Seed by seed") + table(rows, colours, finished) if len(joined) < len(rows) else ""
    trade = trades.chart(joined, colours) if finished else ""
    return table(joined, colours, finished) + sweeps.charts(joined, colours) + trade + single + apart


def _samples(task: str, rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> tuple[str, str]:
    look = TASKS[task].look if task in TASKS else None  # a folder may name a task of another version
    if isinstance(look, HeatMap) and all(row.result.samples.shape[-1] == 2 for row in rows):
        places = range(len(rows))
        names, marks = {k: name(rows[k]) for k in places}, {k: colours[rows[k].method] for k in places}
        maps = samples.heat_maps(look, rows, names, marks)
        return "All particles by weight, on the scale of the target; paler means rarer.", maps
    sheets = "".join(samples.sheet(row, look, name(row), colours[row.method]) for row in rows)
    note = (
        "Draws from the posterior are what the method says the target looks like. The best of a population by reward "
        "is no such draw, and is framed apart."
    )
    return note, element("div", 'class="cards"', sheets)


def _genealogy(rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> tuple[str, str]:
    many = [row for row in rows if row.particles > 1]
    if not many:
        return "", ""
    drawable = [row for row in many if row.particles <= genealogy.MOST]
    drawn = [[_tree(row, colours[row.method], b) for b in range(min(TREES, row.populations))] for row in drawable]
    shown = most_within(drawn, TREE_BYTES)
    kept = [(row, trees[: shown[k]]) for k, (row, trees) in enumerate(zip(drawable, drawn, strict=True)) if shown[k]]
    note = (
        ""
        if not kept
        else (
            "Time runs to the right and a line is a particle; children stand side by side, so that no lines cross. "
            "Coloured lines have descendants at the end, thicker ones more of the final weight; grey ones died out. "
            "Upright lines mark where resampling struck."
        )
    )
    if len(kept) < len(many):
        left = len(many) - len(kept)
        has = "has" if left == 1 else "have"
        note += f" {plural(left, 'row')} {has} too many lines to draw one by one: the chart of survivors shows them."
    worth = [any_resampling(row) * (2 if row.method.startswith("smc") else 1) for row, _ in kept]
    first = worth.index(max(worth)) if kept else 0
    trees = "".join(
        element(
            "div",
            f'class="tree c{colours[row.method]}" data-row="{k}" data-population="{b}"'
            f"{'' if k == first and b == 0 else ' hidden'}",
            drawing,
        )
        for k, (row, some) in enumerate(kept)
        for b, drawing in enumerate(some)
    )
    box = element("div", 'class="genealogy"', _controls(kept, name, first), trees) if kept else ""
    return note, box + traces.survival(many, colours)


def any_resampling(row: Row) -> bool:
    return bool((row.result.ancestors[1:] != row.result.ancestors[:1]).any())


def _tree(row: Row, colour: int, population: int) -> str:
    tree = genealogy.tree(row.result, population)
    height = min(560, max(150, 70 + 13 * tree.size if tree.size < 24 else 220 + 5 * tree.size))
    words = genealogy.described(tree)
    facts = genealogy.facts(tree, row.result, population)
    plot = element(
        "div",
        f'class="plot" style="height:{height}px" tabindex="0" role="img" aria-label="{words}" data-tree="{facts}"',
        genealogy.draw(tree),
    )
    marks = [(k / max(tree.steps, 1), str(k)) for k in charts.step_marks(tree.steps)]
    labels = "".join(text("span", label, f'class="{charts.edge(at)}" style="left:{at:.2%}"') for at, label in marks)
    return plot + element("div", 'class="x" aria-hidden="true"', labels) + f'<p class="note">{words}.</p>'


def most_within(drawn: Sequence[Sequence[str]], budget: int) -> list[int]:
    """How many of each list to keep, the first ones of all before the second ones of any, within so many characters."""
    shown = [0] * len(drawn)
    for place in range(max(map(len, drawn), default=0)):
        for k, trees in enumerate(drawn):
            if place < len(trees) and shown[k] == place and len(trees[place]) <= budget:
                shown[k] += 1
                budget -= len(trees[place])
    return shown


def _controls(kept: Sequence[tuple[Row, Sequence[str]]], name: Callable[[Row], str], first: int) -> str:
    methods = "".join(
        text("option", name(row), f'value="{k}" data-populations="{len(some)}"' + (" selected" if k == first else ""))
        for k, (row, some) in enumerate(kept)
    )
    most = len(kept[first][1])
    populations = "".join(text("option", str(b + 1), f'value="{b}"') for b in range(most))
    return element(
        "div",
        'class="controls"',
        element("label", "", "Method ", element("select", 'class="pick-row"', methods)),
        element("label", "", "Population ", element("select", 'class="pick-population"', populations)),
        element("output", 'aria-live="polite"', "Point at a line, or go there and use the arrow keys."),
    )
