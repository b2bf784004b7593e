"""The page: all parts in order, with style sheet and script inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from tokensteer import files
from tokensteer.app.report import charts, genealogy, learning, player, question, samples, sweeps, traces, trades
from tokensteer.app.report.charts import swatch
from tokensteer.app.report.folder import Row, Run, read
from tokensteer.app.report.markup import element, most_within, pickers, section, text
from tokensteer.app.report.table import best_table, legend, note, table
from tokensteer.app.report.words import anchor, colours_of, headlines, listed, most_telling, naming, resampled
from tokensteer.app.runs import folder as runs
from tokensteer.app.words.methods import DESCRIBED
from tokensteer.app.words.numbers import plural
from tokensteer.app.words.plans import PILOTED, by_title, compared
from tokensteer.app.words.settings import meaning
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.looks import HeatMap, Look

HERE = Path(__file__).parent
TREES = 8  # how many populations of a row have their genealogy drawn, at most
TREE_BYTES = 1_100_000  # the size of all genealogies together, at most
HEAD = """\
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:"><meta name="color-scheme" content="light dark">\
<link rel="icon" href="data:,">"""
TRACES = (
    "Means over populations from the first step, all noise, to the last; the band is the 95% interval by Student's t. "
    "Point at a chart to read it; click a name to see its line alone. "
    "ESS/N is the share of particles that count; resampling restores it, and leaves fewer particles with descendants."
)
WEIGHTS = (
    "The share of particles by N times their weight at the end: all at 1 would be a perfect proposal, much at the left "
    "means that few particles carry the rest."
)
LEARNING = "Training was done before this run. The charts show its progress; a backward pass counts as two rows."
COST = "Network rows computed, and in a lighter tone those that were needed but known already."
BEST = "The one particle of highest reward in each population. It is no draw from the target."
CHOICES = "What pilots or timing chose within the budget."
HEAT_MAPS = "All particles by weight, on the scale of the target; paler means rarer."
SAMPLES = (
    "Draws from the posterior are the method's estimate of the target. The best of a population by reward "
    "is no such draw, and is framed apart."
)
GENEALOGY = (
    "Time runs to the right and a line is a particle; children stand side by side, so that no lines cross. "
    "Coloured lines have descendants at the end, thicker ones more of the final weight; grey ones died out. "
    "Upright lines mark where resampling struck. Methods that never resample have no tree."
)


def write(folder: Path) -> Path:
    """Write the report of a run folder, `report.html` in it: one file that needs nothing else."""
    file = folder / runs.REPORT
    files.write_text(file, html(read(folder)))
    return file


def html(run: Run) -> str:
    tasks, colours = run.by_task(), colours_of(run.rows)
    groups = {task: _task(run, task, *rows, several=len(tasks) > 1) for task, rows in tasks.items()}
    described = section("methods", "Methods", "", _methods(run.rows, colours))
    shown, methods = headlines(run.rows), list(dict.fromkeys(row.method for row in run.rows))
    hidden = [colours[method] for method in methods if method not in shown]
    nav = "".join(_links(task if len(tasks) > 1 else "", parts) for task, parts in groups.items())
    nav += _links("", [("methods", "Methods", "")])
    if hidden:
        box = '<input type="checkbox" id="all">'
        nav += element("label", 'class="all"', box, f" Show all {len(methods)} methods")
    body = element("header", "", question.header(run, colours)) + element("nav", 'aria-label="Parts of this page"', nav)
    body += element("main", "", *(content for parts in groups.values() for _, _, content in parts), described)
    scripts = ("report.js", "player.js") if 'class="player"' in body else ("report.js",)
    body += "".join(element("script", "", (HERE / script).read_text("utf-8")) for script in scripts)
    style = element("style", "", (HERE / "report.css").read_text("utf-8"), _hiding(hidden))
    head = element("head", "", HEAD, text("title", f"{', '.join(tasks)} · tokensteer"), style)
    return f'<!doctype html>\n<html lang="en">{head}\n<body>{body}</body></html>\n'


def _links(task: str, parts: Sequence[tuple[str, str, str]]) -> str:
    """Links to the parts of a task, after its name."""
    links = (text("a", title, f'href="#{escape(key)}"') for key, title, _ in parts)
    return element("span", "", text("b", task) if task else "", *links)


def _hiding(colours: Sequence[int]) -> str:
    """Rules that hide methods by their colours unless all are asked for."""
    if not colours:
        return ""
    few, some = "body:not(:has(#all:checked))", f":is({','.join(f'.c{k}' for k in colours)})"
    marks = f"{few} :is(.line, .band, .dot, .span, .label){some}:not(.kept)"
    whole = f"{few} :is(main tr, main li:not(.kept), article):has(.swatch{some})"
    named = f"{few} .one:has(> :is(dt, figcaption) > .swatch{some})"
    return f"{few} .many .band {{ display: inline }} {marks}, {whole}, {named} {{ display: none }}"


def _methods(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """Each method in a line, with its settings as resolved, by task where they differ."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    found: list[str] = []
    for family, some in families.items():
        used = {row.task: _settings(row) for row in reversed(some)}
        same = len(set(used.values())) == 1
        lines = list(used.values())[:1] if same else [f"{task}: {words}" for task, words in reversed(used.items())]
        name = element("dt", f'id="{escape(anchor(family))}"', swatch(colours[some[0].method]), escape(family))
        notes = (text("dd", line, 'class="note"') for line in lines if line)
        found.append(element("div", 'class="one"', name, text("dd", DESCRIBED.get(family, "")), *notes))
    return element("dl", 'class="described"', *found)


def _settings(row: Row) -> str:
    """The ramp and the resampling of a row: "Ramp constant: …. Trigger ess:0.5: …. Resample systematic."."""
    used = [(name, row.resolved[name]) for name in ("ramp", "trigger", "resample") if name in row.resolved]
    return " ".join(f"{name.capitalize()} {meaning(name, value)}." for name, value in used)


def _task(run: Run, task: str, rows: Sequence[Row], joined: Sequence[Row], several: bool) -> list[tuple[str, str, str]]:
    """The parts of the page about a task: key, title, markup."""
    colours, name = colours_of(run.rows), naming(rows)
    start, of = (f"{task}-", task) if several else ("", "")
    parts = [
        ("results", "Results", "", _results(rows, joined, colours, run.finished)),
        ("samples", "Samples", *_samples(task, joined, naming(joined), colours)),
        ("particles", "Particles", *player.part(rows, _look(task), name, colours)),
        ("traces", "On the way", TRACES, traces.charts(rows, colours)),
        ("weights", "Weights", WEIGHTS, traces.weights(rows, colours)),
        ("genealogy", "Genealogy", *_genealogy(rows, name, colours)),
        ("cost", "Cost", COST, traces.cost(joined, naming(joined, briefly=True), colours) + _learning(rows)),
    ]
    return [
        (start + key, title, section(start + key, title, note, content, of=of))
        for key, title, note, content in parts
        if content
    ]


def _results(rows: Sequence[Row], joined: Sequence[Row], colours: Mapping[str, int], finished: bool) -> str:
    best = best_table(joined, colours)
    trade = trades.chart(joined, colours) if finished else ""
    several = len(joined) < len(rows)
    return "".join(
        (
            table(joined, colours, finished),
            legend(joined, finished, trade),
            sweeps.charts(joined, colours),
            _folded("Seed by seed", _by_seed(rows, colours, finished) if several else ""),
            _folded("Best of N by reward", text("p", BEST, 'class="note"') + best if best else ""),
            _choices(rows),
        )
    )


def _by_seed(rows: Sequence[Row], colours: Mapping[str, int], finished: bool) -> str:
    return table(rows, colours, finished) + text("p", note(rows, finished), 'class="note"')


def _folded(title: str, content: str, opened: bool = False) -> str:
    return element("details", "open" if opened else "", text("summary", title), content) if content else ""


def _choices(rows: Sequence[Row]) -> str:
    """What was chosen for each method within a budget, with the reasons; "" where nothing was."""
    chosen = by_title((row.method, row.seed, row.plan) for row in rows)
    said = CHOICES + (f" {PILOTED}" if any(map(compared, chosen.values())) else "")
    content = "".join(
        text("h3", title)
        + element("dl", "", *(text("dt", name) + text("dd", reason) for name, reason in reasons.items()))
        for title, reasons in chosen.items()
    )
    title = f"What was chosen for {listed(list(dict.fromkeys(row.method for row in rows if row.plan)))}"
    alone = len({row.method for row in rows}) == 1
    return _folded(title, text("p", said, 'class="note"') + content if content else "", opened=alone)


def _learning(rows: Sequence[Row]) -> str:
    curves = learning.charts(rows)
    return _folded("How the proposal was trained", text("p", LEARNING, 'class="note"') + curves if curves else "")


def _look(task: str) -> Look | None:
    return TASKS[task].look if task in TASKS else None  # a folder may name a task of another version


def _samples(task: str, rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> tuple[str, str]:
    look = _look(task)
    if isinstance(look, HeatMap) and all(row.result.samples.shape[-1] == 2 for row in rows):
        return HEAT_MAPS, samples.heat_maps(look, rows, naming(rows, briefly=True), colours)
    sheets = [samples.sheet(row, look, name(row), colours[row.method]) for row in rows]
    return SAMPLES, element("div", 'class="cards"', *sheets)


def _genealogy(rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> tuple[str, str]:
    many = [row for row in rows if resampled(row.result.ancestors)]
    drawable = [row for row in many if row.particles <= genealogy.MOST]
    drawn = [[_tree(row, b) for b in range(min(TREES, row.populations))] for row in drawable]
    shown = most_within(drawn, TREE_BYTES)
    kept = [(row, trees[:most]) for row, trees, most in zip(drawable, drawn, shown, strict=True) if most]
    if not kept:
        return "", ""
    note = GENEALOGY
    if left := len(many) - len(kept):
        note += f" {plural(left, 'row')} {'has' if left == 1 else 'have'} too many lines to draw."
    first = most_telling([row for row, _ in kept])
    trees = ""
    for k, (row, some) in enumerate(kept):
        for b, drawing in enumerate(some):
            hidden = "" if k == first and b == 0 else " hidden"
            kind = f'class="tree c{colours[row.method]}" data-row="{k}" data-population="{b}"{hidden}'
            trees += element("div", kind, drawing)
    return note, element("div", 'class="genealogy"', _controls(kept, name, first), trees)


def _tree(row: Row, population: int) -> str:
    tree = genealogy.tree(row.result, population)
    height = min(560, max(150, 70 + 13 * tree.size if tree.size < 24 else 220 + 5 * tree.size))
    words, facts = genealogy.described(tree), genealogy.facts(tree, row.result, population)
    kind = f'class="plot" style="height:{height}px" tabindex="0" role="img" aria-label="{words}" data-tree="{facts}"'
    plot = element("div", kind, genealogy.draw(tree))
    return plot + charts.x_axis(charts.step_labels(tree.steps), "step") + f'<p class="note">{words}.</p>'


def _controls(kept: Sequence[tuple[Row, Sequence[str]]], name: Callable[[Row], str], first: int) -> str:
    return element(
        "div",
        'class="controls"',
        pickers([name(row) for row, _ in kept], [len(some) for _, some in kept], first),
        element("output", 'aria-live="polite"', "Point at a line, or go there and use the arrow keys."),
    )
