"""The tables of docs/dna.md from run folders of `tokensteer compare dna`: means (standard deviations) over seeds.

python -m benchmarks.dna out/dna-16 out/dna-small out/dna-large

Methods at given numbers of particles have tables of their own, the last with the metrics of the paper for each N. Rows
of `--recipe kl`, `--budget` or `--match-rows` are listed together, each with its N.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from tokensteer.app.runs.folder import open_run
from tokensteer.app.runs.recipes import METHODS
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.dna import data as dna_data
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.dna import task as dna
from tokensteer.tasks.dna.model import NAME

Group = Sequence[Mapping[str, Any]]


def number(value: float, places: int) -> str:
    text = f"{abs(value):.{places}f}"
    minus = "−" if value < 0 and float(text) else ""
    return minus + (text[1:] if text.startswith("0.") else text)


def over_seeds(values: Sequence[float], places: int, centre: float | None = None) -> str:
    if not values:
        return ""
    found = number(mean(values) if centre is None else centre, places)
    return found + (f" ({number(stdev(values), places)})" if len(values) > 1 else "")


def metric(rows: Group, name: str, places: int, of: str = "metrics") -> str:
    return over_seeds([row[of][name][0] for row in rows if row[of] is not None and name in row[of]], places)


def cells(rows: Group, metrics: Mapping[str, int], of: str = "metrics") -> list[str]:
    return [metric(rows, name, places, of) for name, places in metrics.items()]


def log_z(rows: Group) -> str:
    """The log of the mean of Z, since the mean of the logs is too low; the deviation is that of the logs."""
    logs = [row["log_z"] for row in rows if row["log_z"] is not None]
    if not logs:
        return ""
    centre = max(logs) + math.log(mean(math.exp(value - max(logs)) for value in logs))
    return over_seeds(logs, 1, centre)


def spent(rows: Group) -> str:
    """Rows of one population: denoiser and proposal, and reward."""
    if not rows:
        return ""
    each = {name: mean(row["rows"].get(name, 0) / row["populations"] / 1000 for row in rows) for name in NETWORKS}
    return f"{each['denoiser'] + each['proposal']:.1f}k + {each['reward']:.1f}k"


def seconds(rows: Group) -> str:
    """Of all populations together, sampling alone."""
    return over_seeds([row["seconds"] for row in rows], 1)


def particles(rows: Group) -> str:
    return ", ".join(f"{n:,}" for n in dict.fromkeys(row["particles"] for row in rows))


NETWORKS = ("denoiser", "proposal", "reward")
PLACES = {"accuracy": 3, "reward accuracy": 3, "activity": 2, "3-mer correlation": 3, "motif correlation": 3}
PLACES_ANSWER = PLACES | {"log-likelihood": 1, "diversity": 3}
PAPER = {name: PLACES_ANSWER[name] for name in PLACES_ANSWER if name not in ("reward accuracy", "diversity")}
"""The judge's accuracy stands for that of ATAC."""
FRONT = {name: PLACES_ANSWER[name] for name in ("activity", "accuracy", "log-likelihood", "diversity")}
COST = ("denoiser + reward rows", "s")


def table(title: str, head: Sequence[str], lines: Mapping[str, Sequence[str]]) -> None:
    text = [f"\n{title}\n", f"| method | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    text += [f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items() if any(cells)]
    sys.stdout.write("\n".join(text) + "\n")


def real(cell: int = 0, groups: int = 3, size: int = 64) -> None:
    """Some of the best sites of a cell type in groups, as if each was what a method gave; and how far the judge agrees
    with the reward network on sites that neither has seen, chromosome 1."""
    task, found = dna.task(Setup(goal=cell)), dna_data.data()
    reward, judge = (Setup().load(NAME, role) for role in ("reward", "judge"))
    parts = (found.train, found.validation, found.test)
    sites = Examples(torch.cat([part.ids for part in parts]).long(), torch.cat([part.labels for part in parts]))
    best = dna_reference.best_sites(sites, in_parts(reward, sites.ids)[:, cell], cell)
    order = torch.randperm(len(best), generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    for group in best[order[: groups * size]].view(groups, size, 1, -1):
        alone = torch.zeros(size, 1, dtype=torch.float64)
        result = Result(group, alone, None, torch.ones(1, size), None, torch.zeros(1, size, 1).long(), {}, {})
        rows.append({"metrics": {name: (value.mean,) for name, value in task.metrics(result).items()}})
    names = PLACES_ANSWER | {"distinct 6-mers": 2, "novelty": 2, "MPRA": 2}
    table(f"{size} real sites", list(names), {"real": [metric(rows, name, places) for name, places in names.items()]})
    unseen = found.test.ids[found.test.labels == cell].long()
    liked, judged = (in_parts(net, unseen)[:, cell].exp() > 0.5 for net in (reward, judge))
    share = float(judged[liked].double().mean())
    error = (share * (1 - share) / int(liked.sum())) ** 0.5
    sys.stdout.write(f"\nOf {len(unseen)} unseen sites the reward network accepts {int(liked.sum())}, and the judge ")
    sys.stdout.write(f"{share:.3f} ± {error:.3f} of these\n")


def label(row: Mapping[str, Any]) -> str:
    """The method of a row with what was varied, and its reward if that was chosen."""
    reward = row["job"].get("reward")
    return row["method"] if reward is None else f"{row['method']}, {reward}"


def main(folders: Sequence[str]) -> None:
    groups: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    fronts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    found = [row for folder in folders for row in open_run(Path(folder)).rows]
    for row in sorted(
        found, key=lambda row: (list(METHODS).index(row["job"]["method"]), -(row["job"].get("kl") or 0.0))
    ):
        if row["job"]["extra"]:
            fronts[label(row)].append(row)
        else:
            groups[label(row)][row["particles"]][row["seed"]] = row
    if groups:
        at_sizes({name: {n: list(seeds.values()) for n, seeds in sizes.items()} for name, sizes in groups.items()})
    if fronts:
        lines = {
            name: [particles(rows), *cells(rows, FRONT), spent(rows), seconds(rows)] for name, rows in fronts.items()
        }
        table("Variants", ["N", *FRONT, *COST], lines)


def at_sizes(groups: Mapping[str, Mapping[int, Group]]) -> None:
    """The tables of methods at given numbers of particles."""
    sizes = sorted({size for group in groups.values() for size in group})

    def rows(method: str, size: int) -> Group:
        return groups[method].get(size, [])

    for size in sizes if len(sizes) == 1 else [16]:
        there = [name for name in groups if rows(name, size)]
        answers = {
            name: [*cells(rows(name, size), PLACES_ANSWER), log_z(rows(name, size)), spent(rows(name, size))]
            for name in there
        }
        table(f"N = {size}", [*PLACES_ANSWER, "log Z", COST[0]], answers)
        best = {name: cells(rows(name, size), PLACES, "best") for name in there}
        table(f"N = {size}, the best of each population by reward", list(PLACES), best)
    for name, places in (("accuracy", 2), ("activity", 1)):
        grown = {method: [metric(rows(method, size), name, places) for size in sizes] for method in groups}
        table(name, [str(size) for size in sizes], grown)
    head = [f"N = {size}: {name}" for size in sizes for name in (*PAPER, *COST)]
    five = {
        method: [cell for n in sizes for r in [rows(method, n)] for cell in (*cells(r, PAPER), spent(r), seconds(r))]
        for method in groups
    }
    table("The metrics of the paper", head, five)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    if sys.argv[1] == "real":
        real(*map(int, sys.argv[2:3]))
    else:
        main(sys.argv[1:])
