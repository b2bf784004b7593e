"""The genealogy of a population, drawn as a tree.

Particles are put in rows so that no two lines cross: siblings stand side by side, families in the order of their
parents, and in a family the particle with most of the final weight among its descendants goes straight on. Lines with
descendants at the end are survivors; a line is as thick as the share of the final weight that descends from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from tokensteer.app.report.charts import drawing
from tokensteer.app.report.lists import floats, ints
from tokensteer.app.report.markup import data
from tokensteer.core.particles.result import Result

MOST = 64  # with more particles than this, lines cannot be told apart
UNIT = 10  # of the drawing, for one step and one row
CLASSES = (0.05, 0.15, 0.35, 0.7)  # where a share of the final weight makes a line thicker


@dataclass(frozen=True)
class Tree:
    """One population. `events` are the steps that began with resampling; everything else is by event and *row*.

    parents[k] (N,) is the row before event k of each row after it. particles[k] (N,) is the particle in each row from
    event k on (k = 0 is the start); share[k] and heirs[k] are the final weight and particles that descend from it.
    """

    steps: int
    events: list[int]
    parents: list[list[int]]
    particles: list[list[int]]
    share: list[list[float]]
    heirs: list[list[int]]

    @property
    def size(self) -> int:
        return len(self.particles[0])

    @property
    def crowded(self) -> bool:
        """Whether resampling is so frequent that bends are drawn straight and events unmarked."""
        return 3 * len(self.events) > self.steps


def tree(result: Result, population: int) -> Tree:
    ancestors = result.ancestors[:, population].cpu()
    here = torch.arange(ancestors.shape[-1])
    events = [t for t in range(1, len(ancestors)) if not torch.equal(ancestors[t], here)]
    share, heirs = [result.weights[population].double().cpu()], [torch.ones_like(here)]
    for t in reversed(events):
        share.append(torch.zeros_like(share[-1]).index_add(0, ancestors[t], share[-1]))
        heirs.append(torch.zeros_like(here).index_add(0, ancestors[t], heirs[-1]))
    share, heirs = share[::-1], heirs[::-1]

    parents: list[list[int]] = []
    particles = [ints(here)]
    for k, t in enumerate(events, 1):
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(ints(ancestors[t])):
            children.setdefault(parent, []).append(child)
        worth = [(int(h > 0), s) for h, s in zip(ints(heirs[k]), floats(share[k]), strict=True)]
        rows: list[int] = []
        above: list[int] = []
        for row, parent in enumerate(particles[-1]):
            family = sorted(children.get(parent, ()), key=lambda child: worth[child], reverse=True)
            rows += _around(family, row - len(rows))
            above += [row] * len(family)
        particles.append(rows)
        parents.append(above)
    return Tree(
        steps=len(ancestors) - 1,
        events=events,
        parents=parents,
        particles=particles,
        share=[floats(s[rows]) for s, rows in zip(share, particles, strict=True)],
        heirs=[ints(h[rows]) for h, rows in zip(heirs, particles, strict=True)],
    )


def _around(family: list[int], place: int) -> list[int]:
    """The family in an order that puts its first members nearest to `place`."""
    nearest = sorted(range(len(family)), key=lambda slot: abs(slot - place))
    ordered = dict(zip(nearest, family, strict=True))
    return [ordered[slot] for slot in range(len(family))]


def ancestors_alive(result: Result) -> Tensor:
    """The number of particles of each step with descendants at the end, (T + 1, B)."""
    lines = result.lineages().sort(-1).values
    return 1 + (lines[..., 1:] != lines[..., :-1]).sum(-1)


def draw(tree: Tree) -> str:
    """Marks at resampling events, extinct lines, survivors over them, and a dot for each particle at the end."""
    size, width = tree.size, UNIT * max(tree.steps, 1)
    paths = _paths(tree)
    struck = "".join(f"M{UNIT * (t - 1)} 0v{UNIT * size}" for t in tree.events)
    dots: dict[str, str] = {}
    for row, share in enumerate(tree.share[-1]):
        kind = _kind(share, 1)
        dots[kind] = dots.get(kind, "") + f"M{width} {_y(row)}h0"
    content = f'<path class="struck" d="{struck}"/>' if struck and not tree.crowded else ""
    content += "".join(f'<path class="{kind}" d="{paths[kind]}"/>' for kind in sorted(paths))
    content += "".join(f'<path class="leaf {kind}" d="{dots[kind]}"/>' for kind in sorted(dots))
    content += '<path class="chosen" d=""/>'
    return drawing(content, width, UNIT * size, 'class="dense"' if tree.crowded else "")


def _y(row: int) -> int:
    return UNIT * row + UNIT // 2


def _kind(share: float, heirs: int) -> str:
    """The class of a line, in drawing order: extinct, then ever thicker."""
    return "g0" if not heirs else f"g{1 + sum(share >= least for least in CLASSES)}"


def _paths(tree: Tree) -> dict[str, str]:
    """The lines of each class. A line continues into its first child of the same class, which saves space."""
    done: dict[str, str] = {}
    ends = [*tree.events[1:], tree.steps + 1]
    kinds = [list(map(_kind, share, heirs)) for share, heirs in zip(tree.share, tree.heirs, strict=True)]
    first = tree.events[0] if tree.events else tree.steps + 1
    lines = [f"M0 {_y(row)}h{UNIT * (first - 1)}" for row in range(tree.size)]
    for k, (parents, event, end) in enumerate(zip(tree.parents, tree.events, ends, strict=False)):
        going = dict(enumerate(lines))
        new: list[str] = []
        for row, parent in enumerate(parents):
            goes_on = parent in going and kinds[k][parent] == kinds[k + 1][row]
            line = going.pop(parent) if goes_on else f"M{UNIT * (event - 1)} {_y(parent)}"
            new.append(line + _bend(UNIT * (row - parent), UNIT * (end - 1 - event), tree.crowded))
        for row, line in going.items():
            done[kinds[k][row]] = done.get(kinds[k][row], "") + line
        lines = new
    for line, kind in zip(lines, kinds[-1], strict=True):
        done[kind] = done.get(kind, "") + line
    return done


def _bend(rise: int, run: int, straight: bool) -> str:
    """From the row of the parent to that of the child in one step, then on for `run`."""
    half = UNIT // 2
    if not rise:
        return f"h{UNIT + run}"
    return (f"l{UNIT} {rise}" if straight else f"c{half} 0 {half} {rise} {UNIT} {rise}") + (f"h{run}" if run else "")


def facts(tree: Tree, result: Result, population: int) -> str:
    """What the page's script needs to describe any particle, as an attribute."""
    known = {"steps": tree.steps, "events": tree.events, "parents": tree.parents, "particles": tree.particles}
    reward = None if result.reward is None else _rounded(result.reward[population])
    return data({**known, "weight": _rounded(result.weights[population]), "reward": reward})


def _rounded(values: Tensor) -> list[float | str]:
    """Numbers for JSON, which has no infinities: huge ones are text."""
    return [round(value, 4) if abs(value) < 1e12 else str(value) for value in floats(values)]


def described(tree: Tree) -> str:
    """The tree in a sentence."""
    founders = sum(h > 0 for h in tree.heirs[0])
    times = len(tree.events)
    struck = "never resampled" if not times else f"resampled {'once' if times == 1 else f'{times} times'}"
    return escape(
        f"{tree.size} particles over {tree.steps} steps, {struck}; "
        f"{founders} of the {tree.size} at the start {'has' if founders == 1 else 'have'} descendants at the end"
    )
