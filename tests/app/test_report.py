"""The report against the numbers it was made from; in a browser too, where there is one."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import BROWSER, FLAGS

import tokensteer as ts
from tokensteer.app import report
from tokensteer.app.report import figures, genealogy, intervals, samples, trades, write
from tokensteer.app.report.folder import read
from tokensteer.app.report.markup import most_within
from tokensteer.app.report.scatter import LETTER, label_places
from tokensteer.app.report.words import headlines
from tokensteer.app.runs import choices
from tokensteer.app.runs.folder import FORMAT, writing
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, prepare
from tokensteer.app.runs.recipes import METHODS
from tokensteer.app.runs.rows import resolved
from tokensteer.app.words.methods import DESCRIBED
from tokensteer.app.words.numbers import number, short, spread
from tokensteer.app.words.settings import meaning
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.metrics import Measured
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Setup, Task

HOSTILE = "<script>alert(1)</script>&\"'"
VOID = {"meta", "link", "img", "br"}


# ---- run folders


def row(task: str, method: str, result: ts.Result, metrics: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    log_z, error = result.pooled_log_z
    return {
        "task": task,
        "method": method,
        "particles": result.log_w.shape[1],
        "populations": len(result.log_w),
        "seed": 0,
        "about": f"{task}, a test",
        "metrics": metrics,
        "log_z": log_z,
        "log_z_error": None if error != error else error,
        "rows": dict(result.rows),
        "saved": dict(result.saved),
        "seconds": 1.5,
        **more,
    }


def fill(folder: Path, rows: list[tuple[dict[str, Any], ts.Result]], **config: Any) -> Path:
    known = {"format": FORMAT, "version": "0.1.0", "command": "tokensteer compare", "started": "2025-11-15T06:50:00"}
    with writing(folder, {**known, **config}) as writer:
        for k, (stored, result) in enumerate(rows):
            writer.add(f"row-{k}", stored, result, {".png": lambda file: file.touch()})
    return folder


def run(task: Task, methods: Mapping[str, ts.Method], particles: int, populations: int) -> list[Any]:
    done: list[Any] = []
    for name, method in methods.items():
        result = method(particles, populations, generator=torch.Generator().manual_seed(0))
        metrics = {key: [value.mean, value.error] for key, value in task.metrics(result).items()}
        done.append((row(task.name, name, result, metrics), result))
    return done


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = TASKS["digits"].make(Setup(steps=12))
    methods = {
        "pretrained": ts.pretrained(task.model),
        "smc-base": ts.smc_base(task.model, task.tilt),
        "smc-grad": ts.smc_grad(task.model, task.tilt),
        "smc-adaptive": ts.smc_base(task.model, replace(task.tilt, ramp=ts.Adaptive(0.9))),
    }
    return fill(tmp_path_factory.mktemp("digits") / "run", run(task, methods, 6, 3))


@pytest.fixture(scope="module")
def mog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = TASKS["mog"].make(Setup(steps=8))
    methods = {
        "smc-base": ts.smc_base(task.model, task.tilt),
        "smc-grad": ts.smc_grad(task.model, task.tilt, clip=None),
    }
    rows = run(task, methods, 8, 2) + run(task, methods, 80, 2)
    return fill(tmp_path_factory.mktemp("mog") / "run", rows)


def toy(particles: int, populations: int = 2, steps: int = 5, alive: bool = True) -> ts.Result:
    """Particles that are resampled at random in every other step."""
    generator = torch.Generator().manual_seed(1)
    shape = (populations, particles)
    here = torch.arange(particles).expand(shape)
    drawn = [torch.randint(particles, shape, generator=generator) if t % 2 else here for t in range(steps + 1)]
    log_w = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not alive:
        log_w[0] = -torch.inf
    return ts.Result(
        samples=torch.randint(50, (*shape, 9), generator=generator),
        log_w=log_w,
        reward=torch.randn(shape, generator=generator),
        ess=1 + torch.rand(steps + 1, populations, generator=generator) * (particles - 1),
        mean_reward=torch.rand(steps + 1, populations, generator=generator),
        ancestors=torch.stack([here, *drawn[1:]]),
        rows={"denoiser": 1234, "reward": 56},
        saved={"denoiser": 78},
    )


# ---- reading a page


@dataclass
class Node:
    name: str
    attributes: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    children: list[Node | str] = field(default_factory=list["Node | str"])

    def all(self) -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.all()

    def find(self, name: str, kind: str = "") -> list[Node]:
        wanted = set(kind.split())
        return [n for n in self.all() if n.name == name and wanted <= set((n.attributes.get("class") or "").split())]

    def words(self) -> str:
        return "".join(c if isinstance(c, str) else c.words() for c in self.children)


class Reader(HTMLParser):
    """A tree, and a complaint if an element is not closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Node("")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def page(folder: Path) -> Node:
    reader = Reader()
    reader.feed(write(folder).read_text("utf-8"))
    assert reader.open == [reader.root]
    return reader.root


def stored(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())


def cells(root: Node, place: int = 0) -> list[dict[str, str]]:
    """What a table sorts by, by heading; the first unless another is meant."""
    table = root.find("table")[place]
    headings = [" ".join(re.split(r"\W+", h.words())) for h in table.find("thead")[0].find("th")]
    return [
        dict(zip(headings, [c.attributes["data-v"] or "" for c in line.all() if c.name in ("th", "td")], strict=True))
        for line in table.find("tbody")[0].find("tr")
    ]


# ---- the page against its numbers


def test_table_holds_the_numbers(digits: Path) -> None:
    for cell, saved in zip(cells(page(digits)), stored(digits), strict=True):
        assert cell["method"] == saved["method"]
        assert float(cell["log Z"]) == saved["log_z"]
        assert float(cell["accuracy"]) == saved["metrics"]["accuracy"][0]
        assert int(cell["denoiserrows"]) == saved["rows"]["denoiser"]
        assert cell["rewardrows"] == str(saved["rows"].get("reward", ""))
        assert float(cell["seconds"]) == 1.5


def test_best_is_marked(digits: Path) -> None:
    table = page(digits).find("table")[0]
    accuracy = {saved["method"]: saved["metrics"]["accuracy"][0] for saved in stored(digits)}
    lines = table.find("tbody")[0].find("tr")
    place = [h.words() for h in table.find("thead")[0].find("th")].index("accuracy")
    marked = [
        line for line in lines if [c for c in line.all() if c.name in ("th", "td")][place] in line.find("td", "first")
    ]
    assert [line.find("th")[0].words() for line in marked] == [max(accuracy, key=lambda m: accuracy[m])]


def test_header_says_what_was_run(digits: Path) -> None:
    words = page(digits).find("header")[0].words()
    for said in ("tokensteer compare", "2025-11-15 06:50:00", "0.1.0", "highest accuracy"):
        assert said in words


def test_header_asks_the_question(tmp_path: Path) -> None:
    results = [toy(4), toy(4)]
    resolved = {"steps": 12, "kl": 0.5, "draws": 10, "ramp": "linear", "trigger": "ess:0.5:10", "seed": 3}
    metrics = ({"accuracy": [0.1, 0.01]}, {"accuracy": [0.9, 0.01]})
    rows = [
        row("digits", name, result, measured, resolved=resolved, job={"method": name})
        for name, result, measured in zip(("pretrained", "smc-base"), results, metrics, strict=True)
    ]
    root = page(fill(tmp_path / "run", list(zip(rows, results, strict=True))))
    head = root.find("header")[0]
    facts = dict(zip([n.words() for n in head.find("dt")], [n.words() for n in head.find("dd")], strict=True))
    assert head.find("span", "formula")[0].words() == "π(x) ∝ p(x) · exp(r(x)/kl), kl = 0.5"
    assert facts["Reward r(x)"] == TASKS["digits"].rewarded
    assert (facts["Steps"], facts["Seed"]) == ("12", "3")
    assert facts["Draws"] == "10 clean sequences for each estimate of the reward"
    assert facts["Ramp"].startswith("linear: the share of the reward that counts rises")
    assert facts["Trigger"] == "ess:0.5:10: resample where ESS < 0.5 N, checked 10 times in a run"
    assert "Use smc-base" in head.words()
    assert "1.5 s and 1.3k network rows" in head.words()  # 1234 of the denoiser and 56 of the reward
    assert [n.words() for n in head.find("figcaption")] == ["Before: the model alone", "After: smc-base"]


PRODUCT = "π(x) ∝ p(x | c)^a · p(x)^(1 − a)"


@pytest.mark.parametrize(
    ("methods", "formulas", "rewarded"),
    [
        ({"pretrained": {"kl": 0.5}, "cfg": {"guidance": 1.5}}, [f"{PRODUCT}, a = 1.5"], False),
        ({"smc-cfg": {"guidance": 2.0, "kl": 0.1}}, [f"{PRODUCT} · exp(r(x)/kl), kl = 0.1, a = 2"], True),
        (
            {"smc-base": {"kl": 0.5}, "smc-cfg": {"guidance": 1.5}},
            ["π(x) ∝ p(x) · exp(r(x)/kl), kl = 0.5", f"{PRODUCT}, a = 1.5"],
            True,
        ),
        (
            {"pretrained": {"guidance": 3.0}, "smc-base": {"guidance": 3.0, "kl": 0.005}},
            ["π(x) ∝ p_g(x | c) · exp(r(x)/kl), kl = 0.005, a = 3"],
            True,
        ),
    ],
    ids=["alone", "with a reward", "beside a reward", "of the model itself"],
)
def test_header_names_the_target_of_guidance(methods, formulas, rewarded, tmp_path: Path) -> None:
    results = [toy(1) for _ in methods]
    rows = [
        row("dna", name, result, {"accuracy": [0.5, 0.01]}, resolved=resolved, job={"method": name})
        for (name, resolved), result in zip(methods.items(), results, strict=True)
    ]
    head = page(fill(tmp_path / "run", list(zip(rows, results, strict=True)))).find("header")[0]
    facts = dict(zip([n.words() for n in head.find("dt")], [n.words() for n in head.find("dd")], strict=True))
    assert [span.words() for span in head.find("span", "formula")] == formulas
    assert ("Reward r(x)" in facts, "r is the reward" in head.words()) == (rewarded, rewarded)
    assert ("p_g is the guided sampler" in head.words()) == any("p_g" in formula for formula in formulas)


def test_settings_are_stored_as_resolved() -> None:
    names = ("smc-base", "smc-grad", "fk-max", "svdd")
    asked = [Job("digits", name, 4, 2, settings=Settings(steps=12)) for name in names]
    asked.append(Job("mog", "smc-base", 4, 2, settings=Settings(trigger="every:3", ramp="clipped:3")))
    asked += [Job("digits", name, 4, 2, settings=Settings(steps=12, clip=2.5)) for name in ("smc-grad", "smc-base")]
    asked += [Job("digits", "smc-amot", 4, 2, settings=Settings(steps=12, learned_scale=s)) for s in (None, 0.5)]
    base, grad, fk, svdd, mog, clipped, not_clipped, amot, halved = map(resolved, prepare(asked, Environment()))
    same = {
        "steps": 12,
        "seed": 0,
        "kl": 1.0,
        "goal": 4,
        "draws": 10,
        "ramp": "exponential",
        "noise": "fresh",
        "smoothing": 0.0,
    }
    assert base == {**same, "trigger": "ess:0.5:10", "resample": "systematic"}
    assert grad == {**same, "trigger": "ess:0.5", "resample": "systematic", "clip": 1.0, "smoothing": 0.5}
    assert clipped == {**grad, "clip": 2.5}
    assert not_clipped == base
    assert amot == {**base, "learned_scale": 0.85}  # what its training chose
    assert halved == {**base, "learned_scale": 0.5}
    assert (fk["ramp"], fk["trigger"], fk["resample"]) == ("full at resampling", "every:2", "multinomial")
    assert (svdd["trigger"], svdd["resample"]) == ("always", "one survivor")
    assert (mog["steps"], mog["draws"], mog["ramp"], mog["trigger"]) == (100, 0, "clipped:3", "every:3")


def test_methods_have_the_settings_of_each_task(tmp_path: Path) -> None:
    ramps = {"digits": "exponential", "mog": "constant"}
    rows = [
        (
            row(task, "smc-base", toy(4), {}, resolved={"ramp": ramp, "trigger": "never"}, job={"method": "smc-base"}),
            toy(4),
        )
        for task, ramp in ramps.items()
    ]
    both = page(fill(tmp_path / "both", rows)).find("dl", "described")[0].words()
    assert "digits: Ramp exponential: the full reward counts after 14% of the time. Trigger never" in both
    assert "mog: Ramp constant: the full reward counts from the start. Trigger never" in both
    one = page(fill(tmp_path / "one", rows[:1])).find("dl", "described")[0].words()
    assert "digits:" not in one
    assert "Ramp exponential" in one


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("trigger", "every:20", "every:20: resample every 20 steps"),
        ("trigger", "ess:0.5", "ess:0.5: resample where ESS < 0.5 N"),
        ("ramp", "clipped:3", "clipped:3: the full reward counts after 30% of the time"),
        ("ramp", "adaptive:0.9", "adaptive:0.9: chosen in the run, so that a step keeps 90% of the ESS"),
        ("ramp", "the method's own", "the method's own"),
        ("draws", 0, "none, the estimate has a closed form"),
        ("smoothing", 0.0, "none, each estimate counts as it is"),
        ("smoothing", 1 - 25 / 30, "0.167: this share of a particle's last estimate stays in its next"),
        ("draws", 1, "1 clean sequence for each estimate of the reward"),
        ("resample", "systematic", "systematic"),
    ],
)
def test_settings_have_words(name: str, value: object, said: str) -> None:
    assert meaning(name, value) == said


def test_every_ramp_and_trigger_has_words() -> None:
    for name in (*choices.RAMPS, choices.RARELY):
        assert meaning("ramp", name) != name
    for name in choices.TRIGGERS:
        assert meaning("trigger", name) != name
    reached = next(k for k in range(101) if choices.RAMPS["exponential"](1 - k / 100) == 1.0)
    assert f"after {reached - 1}%" in meaning("ramp", "exponential")  # 14.2%


def test_metrics_of_prompts_have_their_own_n(tmp_path: Path) -> None:
    values = {"accuracy": [0.5, 0.1], "self-BLEU": [0.4, 0.1], "distinct-1": [0.2, 0.1]}
    result = toy(4, populations=6)
    stored = row("text", "smc-base", result, values, counts={"self-BLEU": 3, "distinct-1": 3})
    root = page(fill(tmp_path / "run", [(stored, result)]))
    assert "n = 6 populations of 4 particles. For self-BLEU and distinct-1 n = 3." in root.words()
    shown = root.find("table")[0].find("tbody")[0].words()
    assert "0.43" in shown  # 4.303 standard errors for n = 3
    assert "0.26" in shown  # 2.571 for n = 6


def test_two_tasks_are_told_apart(tmp_path: Path) -> None:
    """Names of regions are unique, each task has its own sentence, and sizes stand beside their populations."""
    values = {"accuracy": [0.5, 0.1]}
    rows = [
        (row(task, name, result, values, best=values), result)
        for task in ("digits", "mnist")
        for name, result in (("smc-base", toy(4, populations=3)), ("best-of-n", toy(2, populations=6)))
    ]
    root = page(fill(tmp_path / "run", rows))
    regions = [n.attributes["aria-label"] for n in root.find("div", "box")]
    assert len(regions) == len(set(regions)) == 4
    (head,) = root.find("header")
    assert head.find("h1")[0].words() == "2 methods on digits and mnist"
    for task, card in zip(("digits", "mnist"), head.find("article"), strict=True):
        assert card.find("h2")[0].words() == f"{task}: {task}, a test"
        assert len(card.find("p", "lead")) == 1
        assert "3 populations of 4 particles, 6 of 2" in card.words()


def test_no_best_by_reward(tmp_path: Path) -> None:
    values = {"accuracy": [0.5, 0.1], "reward": [-1.0, 0.1], "reward accuracy": [0.5, 0.1], "activity": [1.0, 0.1]}
    rows = [(row("dna", f"method {k}", toy(4), values, best=values), toy(4)) for k in range(2)]
    tables = page(fill(tmp_path / "run", rows)).find("table")
    assert [len(table.find("span", "star")) for table in tables] == [2, 0]  # accuracy; none in the best of N


def test_many_metrics_leave_one_column_for_all_networks(tmp_path: Path) -> None:
    values = {name: [0.5, 0.1] for name in "abcdefgh"}
    result = toy(4)
    few, many = (
        cells(page(fill(tmp_path / str(k), [(row("dna", "smc-base", result, dict(list(values.items())[:k])), result)])))
        for k in (7, 8)
    )
    assert {"denoiserrows", "rewardrows"} <= set(few[0])
    assert many[0]["networkrows"] == str(sum(result.rows.values()))
    assert "denoiserrows" not in many[0]


def test_the_best_is_never_hidden(tmp_path: Path) -> None:
    """Of many methods some are shown first, the one with the star among them even if its weights are not exact."""
    names = ["pretrained", "best-of-n", "svdd", "fk-difference", "smc-base", "smc-grad", "smc-amot", "prop-grad"]
    rows = [
        (
            row(
                "mog", name, toy(4), {"emd": [9.0 - k, 0.1]}, answer="unweighted" if name == "prop-grad" else "weighted"
            ),
            toy(4),
        )
        for k, name in enumerate(names)
    ]
    shown = headlines(read(fill(tmp_path / "run", rows)).rows)
    assert shown == ["smc-amot", "pretrained", "best-of-n", "smc-base", "smc-grad", "prop-grad"]


def test_exact_draws_are_a_row(tmp_path: Path) -> None:
    values = {"emd": [3.0, 0.1], "emd floor": [1.0, 0.05], "tv": [0.5, 0.01]}
    rows = [(row("product", name, toy(4), values), toy(4)) for name in ("smc-base", "smc-grad")]
    found = cells(page(fill(tmp_path / "run", rows)))
    assert [(line["method"], line["EMD"]) for line in found][2:] == [("exact draws", "1.0")]
    assert found[2]["TV"] == found[2]["seconds"] == ""
    counted = [(row("product", "smc-base", toy(4), values, counts={"emd floor": 4}), toy(4))]
    whole = page(fill(tmp_path / "counted", counted))
    assert "1.00 ± 0.16" in whole.find("tbody")[0].words()  # 3.182 standard errors for n = 4
    assert "as many independent draws, n = 4." in whole.words()
    assert "EMD floor" not in found[0]


def test_every_method_and_metric_is_described(digits: Path, mog: Path) -> None:
    assert set(DESCRIBED) == set(METHODS)
    for folder in (digits, mog):
        root = page(folder)
        shown = {n.words() for table in root.find("table") for n in table.find("thead")[0].find("th")}
        defined = {n.words() for n in root.find("dl", "defined")[0].find("dt")} | {"method", "N", "log\u00a0Z"}
        assert {name for name in shown if "rows" not in name} - defined <= {"rewardaccuracy"}


@pytest.mark.parametrize(
    ("level", "df", "t"),
    [(0.05, 1, 12.7062), (0.05, 4, 2.776445), (0.05, 7, 2.364624), (0.001, 10, 4.586894), (0.01, 30, 2.749996)],
)
def test_student(level: float, df: int, t: float) -> None:
    assert intervals.student(level, df) == pytest.approx(t, rel=1e-5)


def test_equal_means_differ_at_the_stated_level() -> None:
    tables, k, n = 2000, 6, 4
    values = torch.randn(tables, k, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, error = values.mean(-1).tolist(), (values.std(-1) / n**0.5).tolist()
    found = 0
    for means, errors in zip(mean, error, strict=True):
        rows = [Measured(m, e) for m, e in zip(means, errors, strict=True)]
        found += any(intervals.differ(a, n, b, n, 15) for i, a in enumerate(rows) for b in rows[:i])
    assert 0 < found / tables < 0.05


def test_images_are_the_samples(digits: Path) -> None:
    root = page(digits)
    results = {s["method"]: ts.Result.load(digits / s["file"]) for s in stored(digits)}
    for card in root.find("article", "card"):
        result = results[card.find("h3")[0].words()]
        known = {painted(ids) for ids in result.samples.flatten(0, 1).tolist()}
        assert {glyph(svg) for svg in card.find("svg", "glyph")} <= known
        best = card.find("div", "best")
        assert len(best) == (result.reward is not None)
        if best:
            assert [glyph(svg) for svg in best[0].find("svg")] == [painted(ids) for ids in result.best().tolist()]


def painted(ids: list[int]) -> frozenset[tuple[int, int]]:
    return frozenset((k % 8, k // 8) for k, token in enumerate(ids) if token == 1)


def glyph(svg: Node) -> frozenset[tuple[int, int]]:
    runs = re.findall(r"M(\d+) (\d+)h(\d+)v1", "".join(p.attributes["d"] or "" for p in svg.find("path", "ink")))
    return frozenset((int(x) + k, int(y)) for x, y, n in runs for k in range(int(n)))


def test_traces_are_means_over_populations(digits: Path) -> None:
    charts = page(digits).find("svg", "trace")
    ess, reward, ramp, alive = (json.loads(svg.attributes["data-series"] or "") for svg in charts)
    results = [ts.Result.load(digits / s["file"]) for s in stored(digits)]
    assert ess == [pytest.approx((r.ess.mean(-1) / 6).tolist(), abs=1e-4) for r in results]
    steered = [r.mean_reward for r in results if r.mean_reward is not None]
    assert len(reward) == len(steered) == 3
    for line, known in zip(reward, steered, strict=True):
        assert [v for v in line if v is not None] == pytest.approx(
            known.mean(-1)[~known.isnan().any(-1)].tolist(), abs=1e-4
        )
    assert results[3].ramp is not None
    assert ramp == [pytest.approx(results[3].ramp.mean(-1).tolist(), abs=1e-4)]
    assert len(alive) == 4


def test_everything_has_words_for_those_who_cannot_see_it(digits: Path) -> None:
    root = page(digits)
    for node in root.all():
        if node.attributes.get("role") in ("img", "region"):
            assert node.attributes.get("aria-label"), node
        if node.name == "svg":
            assert node.attributes.get("aria-hidden") == "true" or node.attributes.get("aria-label")
    assert root.find("html")[0].attributes["lang"] == "en"
    keys = [n.attributes["id"] for n in root.all() if "id" in n.attributes]
    assert len(keys) == len(set(keys))
    parts = {f"#{key}" for key in keys if not (key or "").startswith("method-")}
    assert {a.attributes["href"] for a in root.find("nav")[0].find("a")} == parts
    assert {a.attributes["href"] for a in root.find("a")} <= {f"#{key}" for key in keys}


def test_nothing_comes_from_elsewhere(digits: Path, mog: Path) -> None:
    for folder in (digits, mog):
        text = write(folder).read_text("utf-8")
        assert not re.search(r'(?:src|href)="(?!data:|#)|url\(|@import|https?:', text)


def test_heat_maps_and_the_exact_answer(mog: Path) -> None:
    root = page(mog)
    names = [f.find("figcaption")[0].words() for f in root.find("figure", "heat")]
    assert names[0].startswith("exact target")
    assert len(names) == 5
    assert f"The exact log Z is {number(stored(mog)[0]['metrics']['exact log_z'][0], 5)}" in root.words()
    assert "EMD against N" in root.words()
    assert "exact log_z" not in cells(root)[0]


def test_an_estimate_far_from_the_exact_answer_is_marked(tmp_path: Path) -> None:
    result = toy(4, populations=8)
    log_z, error = result.pooled_log_z
    edge = 2.8412  # of Student's t with 7 degrees of freedom at 5% over two rows
    exact = {name: {"exact log_z": [log_z + far * edge * error, 0.0]} for name, far in (("near", 0.99), ("far", 1.01))}
    rows = [(row("text", name, result, metrics), result) for name, metrics in exact.items()]
    root = page(fill(tmp_path / "run", rows))
    lines = root.find("tbody")[0].find("tr")
    assert [line.find("th")[0].words() for line in lines if line.find("span", "off")] == ["far"]
    assert "≠ differs from it at the 5% level over the whole table" in root.words()


def test_an_estimate_that_another_outdoes_is_marked(tmp_path: Path) -> None:
    def estimated(method: str, log_z: float, error: float, kl: float) -> tuple[dict[str, Any], ts.Result]:
        result, numbers = toy(3, populations=8), {"log_z": log_z, "log_z_error": error}
        return row("dna", method, result, {"accuracy": [0.5, 0.1]}, job={"kl": kl, "method": method}) | numbers, result

    rows = [
        estimated("high", -2.0, 0.1, kl=1.0),
        estimated("low", -5.0, 0.3, kl=1.0),
        estimated("unsure", -1.0, 0.9, kl=1.0),
        estimated("other target", -9.0, 0.1, kl=2.0),
    ]
    root = page(fill(tmp_path / "run", rows))
    marked = [line.words() for line in root.find("table")[0].find("tr") if line.find("span", "off")]
    assert len(marked) == 1
    assert "low" in marked[0]
    assert "Believe the higher one" in root.words()


def test_seeds_come_together_before_they_come_apart(tmp_path: Path) -> None:
    done = [toy(3), toy(3)]
    values = ([0.5, None], [0.7, None])
    rows = [row("dna", "a", done[k], {"accuracy": values[k]}, seed=k) for k in range(2)]
    root = page(fill(tmp_path / "run", list(zip(rows, done, strict=True))))
    joined, single = (len(table.find("tbody")[0].find("tr")) for table in root.find("table")[:2])
    assert (joined, single) == (1, 2)
    assert "n = 2 seeds" in root.words()
    assert float(cells(root)[0]["accuracy"]) == pytest.approx(0.6)
    regions = [n.attributes["aria-label"] for n in root.find("div", "box")]
    assert len(regions) == len(set(regions)) == 2
    assert len(root.find("article", "card")) == len(root.find("figure", "bars")[0].find("li")) == 1


def test_methods_at_equal_rows_are_drawn_against_rows(tmp_path: Path) -> None:
    def matched(family: str, particles: int, budget: int) -> tuple[dict[str, Any], ts.Result]:
        result, job = toy(particles), {"method": family, "extra": [f"rows = {budget}"]}
        return row("dna", f"{family}, rows = {budget}", result, {"accuracy": [0.5, 0.1]}, job=job), result

    small = [matched("smc-base", 2, 100), matched("best-of-n", 8, 100)]
    assert "against" not in page(fill(tmp_path / "one", small)).words()  # N differs, and means nothing
    large = [*small, matched("smc-base", 4, 200), matched("best-of-n", 16, 200)]
    assert "accuracy against rows" in page(fill(tmp_path / "two", large)).words()


def test_many_particles_have_a_summary_instead_of_a_tree(mog: Path) -> None:
    root = page(mog)
    options = [o.words() for o in root.find("select", "pick-row")[0].find("option")]
    assert [o.replace("\u00a0", " ") for o in options] == ["smc-base, N = 8"]  # smc-grad never resampled
    assert "1 row has too many lines to draw." in root.words()
    assert len(root.find("svg", "trace")) == 2 * 2 + 2  # ESS, reward and survival, for both sizes


def test_methods_of_different_sizes_share_a_chart(tmp_path: Path) -> None:
    """Charts are apart by N only where a method has several; methods that never resample have no tree."""
    still = replace(toy(4), ancestors=torch.arange(4).expand(6, 2, 4))
    rows = [(row("digits", "best-of-n", still, {}), still)]
    rows += [(row("digits", f"smc-{k}", toy(k), {}), toy(k)) for k in (6, 8)]
    root = page(fill(tmp_path / "run", rows))
    assert [len(json.loads(svg.attributes["data-series"] or "")) for svg in root.find("svg", "trace")] == [3, 3, 3]
    options = [o.words().split(",")[0] for o in root.find("select", "pick-row")[0].find("option")]
    assert options == ["smc-6", "smc-8"]


def test_labels_of_dots_avoid_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    names = [f"method {k}" for k in range(14)]
    spots = [(x, y, name) for (x, y), name in zip(torch.rand(14, 2, generator=generator).tolist(), names, strict=True)]
    found = label_places(spots)
    boxes = [
        (x if side == "right" else x - LETTER[0] * len(name), low, LETTER[0] * len(name))
        for (x, _, name), (side, (_, low)) in zip(spots, found, strict=True)
        if side
    ]
    assert len(boxes) > 7
    for k, (left, low, wide) in enumerate(boxes):
        for other_left, other_low, other_wide in boxes[:k]:
            apart = left >= other_left + other_wide or other_left >= left + wide
            assert apart or abs(low - other_low) >= LETTER[1]
    crowd = [(0.5, 0.5, name) for name in "abcdef"]
    assert [side for side, _ in label_places(crowd)] == ["right", "left", "right", "left", "", ""]


def test_other_tasks_show_tokens(tmp_path: Path) -> None:
    result = toy(4)
    folder = fill(tmp_path / "run", [(row("text", "smc-base", result, {}), result)])
    shown = [code.words() for code in page(folder).find("div", "list")[0].find("code")]
    known = {" ".join(map(str, ids)) for ids in result.samples.flatten(0, 1).tolist()}
    assert shown
    assert set(shown) <= known


def test_text_cards_can_be_scrolled_with_the_keyboard(tmp_path: Path) -> None:
    result = toy(2)
    line = {"text": "a", "prompt": "b", "reward": 0.0, "log_w": 0.0, "judge": 0.5, "weight": 0.5}
    config = {"format": FORMAT, "version": "0.1.0", "command": "tokensteer run", "started": "2025-11-15T06:50:00"}

    def written(file: Path) -> None:
        file.write_text("\n".join([json.dumps(line)] * 4))

    with writing(tmp_path / "run", config) as writer:
        writer.add("a", row("text", "smc-base", result, {}), result, {".jsonl": written})
    (card,) = page(tmp_path / "run").find("article", "told")
    assert (card.attributes["tabindex"], card.attributes["aria-label"]) == ("0", "smc-base")


def test_dna_is_shown_in_letters(tmp_path: Path) -> None:
    result = toy(4)
    result = replace(result, samples=result.samples % 4)
    folder = fill(tmp_path / "run", [(row("dna", "smc-base", result, {}), result)])
    shown = {code.words() for code in page(folder).find("div", "list")[0].find("code")}
    assert shown
    assert shown <= {"".join("ACGT"[k] for k in ids) for ids in result.samples.flatten(0, 1).tolist()}


def test_known_sites_of_dna_have_their_names(tmp_path: Path) -> None:
    result, site = toy(8), torch.tensor(["ACGT".index(letter) for letter in "ATGCAAAT"])
    result = replace(result, samples=site.expand(*result.samples.shape[:2], -1))
    folder = fill(tmp_path / "run", [(row("dna", "smc-base", result, {}), result)])
    found = page(folder).find("div", "list")[0].find("mark")
    assert {(mark.words(), mark.attributes["title"]) for mark in found} == {("ATGCAAAT", "OCT")}


def test_those_beaten_in_neither_of_two_metrics_are_the_front(tmp_path: Path) -> None:
    places = {"a": (1.0, 0.9), "b": (2.0, 0.8), "c": (1.5, 0.7), "d": (2.0, 0.6), "e": (3.0, 0.1)}
    rows = []
    for name, (activity, correlation) in places.items():
        result = toy(4)
        metrics = {"activity": [activity, 0.1], "3-mer correlation": [correlation, None]}
        rows.append((row("dna", name, result, metrics), result))
    root = page(fill(tmp_path / "run", rows))
    (chart,) = [figure for figure in root.find("figure") if "3-mer correlation against activity" in figure.words()]
    assert "On the front: a, b and e" in chart.words()
    dots = chart.find("path", "dot")
    assert [dot.words() for dot in dots] == [f"{n}: {x:.2f}, {y:.2f}" for n, (x, y) in places.items()]
    along = chart.find("path", "line")[0].attributes["d"] or ""
    assert along.count("L") == 2
    at = {
        n: (dot.attributes["d"] or "").removesuffix("h0").removeprefix("M") for n, dot in zip(places, dots, strict=True)
    }
    assert along == f"M{at['a']}L{at['b']}L{at['e']}"
    fewer = page(fill(tmp_path / "fewer", rows[:2]))
    assert not any("against activity" in figure.words() for figure in fewer.find("figure"))


def test_all_that_comes_from_files_is_escaped(tmp_path: Path) -> None:
    result = toy(4)
    metrics = {HOSTILE: [1.0, 0.1], "accuracy": [0.5, None]}
    rows = [(row(HOSTILE, HOSTILE + name, result, metrics, about=HOSTILE), result) for name in "ab"]
    text = write(fill(tmp_path / "run", rows, command=HOSTILE, **{HOSTILE: HOSTILE})).read_text("utf-8")
    assert "<script>alert" not in text
    assert text.count("<script>") == 1
    root = page(tmp_path / "run")
    assert root.find("h1")[0].words() == HOSTILE
    assert HOSTILE in root.find("header")[0].find("code")[0].words()


def test_a_dead_population_is_said(tmp_path: Path) -> None:
    result = toy(4, alive=False)
    folder = fill(tmp_path / "run", [(row("text", "smc-base", result, {}) | {"log_z": None}, result)])
    assert "1 population died" in page(folder).words()


@pytest.mark.parametrize("particles", [1, 4, 64])
def test_any_size(tmp_path: Path, particles: int) -> None:
    result = toy(particles, populations=1, steps=3)
    root = page(fill(tmp_path / "run", [(row("text", "smc-base", result, {"accuracy": [0.5, None]}), result)]))
    assert bool(root.find("div", "tree")) == (particles > 1)


def test_several_tasks_and_seeds_share_a_page(tmp_path: Path) -> None:
    result = toy(4)
    rows = [
        (row(task, "smc-base", result, {"accuracy": [0.5, 0.1]}, seed=seed), result) for task in "ab" for seed in (0, 1)
    ]
    root = page(fill(tmp_path / "run", rows))
    assert len(root.find("table")) == 4  # for each task, over seeds and seed by seed
    assert cells(root, 1)[1]["seed"] == "1"


def test_a_page_stays_small(tmp_path: Path) -> None:
    result = toy(16, populations=8, steps=100)
    rows = [(row("text", f"method {k}", result, {"accuracy": [0.5, 0.1]}), result) for k in range(6)]
    assert write(fill(tmp_path / "run", rows)).stat().st_size < 2_000_000


def test_first_trees_come_before_second_ones() -> None:
    assert most_within([["aaa", "aaa"], ["bb", "bb"], ["c" * 50]], 7) == [1, 2, 0]


# ---- genealogy


@pytest.mark.parametrize("particles", [2, 5, 16])
def test_tree_is_the_ancestry(particles: int) -> None:
    result = toy(particles, steps=9)
    lines = result.lineages()
    for population in range(2):
        tree = genealogy.tree(result, population)
        for k, event in enumerate(tree.events):
            above, below = tree.particles[k], tree.particles[k + 1]
            assert sorted(below) == list(range(particles))
            assert tree.parents[k] == sorted(tree.parents[k])  # no lines cross
            found = {below[r]: above[p] for r, p in enumerate(tree.parents[k])}
            assert [found[i] for i in range(particles)] == result.ancestors[event, population].tolist()
        alive = {tree.particles[0][r] for r, h in enumerate(tree.heirs[0]) if h}
        assert alive == set(lines[0, population].tolist())
        assert sum(tree.heirs[0]) == particles
        assert sum(tree.share[0]) == pytest.approx(1.0)
        assert len(alive) == int(genealogy.ancestors_alive(result)[0, population])


@pytest.mark.parametrize("often", [True, False])
def test_every_line_of_the_tree_is_drawn_once(often: bool) -> None:
    """From each step to the next there are N lines."""
    result, steps = toy(6, steps=9), 9
    if not often:  # few bends are drawn as curves
        still = result.ancestors[:1].expand(20, -1, -1)
        result, steps = replace(result, ancestors=torch.cat([result.ancestors, still])), 29
    drawn = genealogy.draw(genealogy.tree(result, 0))
    paths = [d for kind, d in re.findall(r'<path class="(\S+)" d="([^"]*)"', drawn) if kind.startswith("g")]
    across = 0
    for d in paths:
        across += sum(int(n) for n in re.findall(r"h(\d+)", d)) + sum(int(n) for n in re.findall(r"l(\d+)", d))
        across += sum(int(n) for n in re.findall(r"c\S+ \S+ \S+ \S+ (\d+) ", d))
    assert across == genealogy.UNIT * 6 * steps


# ---- small parts


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.00"),
        (-0.5, "−0.500"),
        (1234.0, "1,234"),
        (float("nan"), "–"),
        (float("-inf"), "−∞"),
        (3e-7, "3.00e−07"),
    ],
)
def test_numbers(value: float, shown: str) -> None:
    assert number(value) == shown


def test_errors_set_the_places() -> None:
    assert spread(Measured(0.98765, 0.0123)) == ("0.988", "0.012")
    assert spread(Measured(-12.3456, 1.2)) == ("−12.3", "1.2")
    assert spread(Measured(0.5, float("nan"))) == ("0.5000", "")
    assert [short(n) for n in (0, 950, 2000, 200_000, 2_000_000)] == ["0", "950", "2.0k", "200k", "2.0M"]


def test_draws_are_the_same_every_time() -> None:
    result = toy(8, populations=3)
    assert torch.equal(samples.draws(result), samples.draws(result))


# ---- colours

SEEN_BY = {  # Machado, Oliveira and Fernandes (2009), full severity
    "all three cones": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def light(colour: str) -> torch.Tensor:
    """Linear red, green and blue."""
    c = torch.tensor([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)], dtype=torch.float64)
    return torch.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(light(c) @ light("#ffffff").new_tensor([0.2126, 0.7152, 0.0722])) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: torch.Tensor) -> torch.Tensor:
    to_xyz = rgb.new_tensor([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])
    x, y, z = ((v ** (1 / 3)) if v > 0.008856 else 7.787 * v + 16 / 116 for v in to_xyz @ rgb.clamp(0, 1))
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(theme: int) -> None:
    css = (Path(report.__file__).parent / "report.css").read_text()
    found = dict(re.findall(r"--(\w+): (#\w{6});", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[theme]))
    for paper in (found["paper"], found["card"]):
        assert min(contrast(found[name], paper) for name in ("ink", "muted", "accent", "warn")) >= 4.5
        assert min(contrast(found[f"c{k}"], paper) for k in range(7)) >= 3.0
    for name, eye in SEEN_BY.items():
        seen = [lab(light("#ffffff").new_tensor(eye) @ light(found[f"c{k}"])) for k in range(7)]
        nearest = min(float((a - b).norm()) for k, a in enumerate(seen) for b in seen[:k])
        assert nearest > 18, name  # 2.3 is a just noticeable difference


# ---- what is no run folder


def one_line(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError, match=r"again|the --out of a run") as caught:
        write(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert not (folder / "report.html").exists()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    result = toy(4)
    return fill(tmp_path / "run", [(row("text", "smc-base", result, {}), result)])


def test_no_folder(tmp_path: Path) -> None:
    one_line(tmp_path / "nowhere", "no run folder (there is no such folder): give the --out of a run")
    (tmp_path / "file").write_text("")
    one_line(tmp_path / "file", "no run folder (it is a file): give the --out of a run")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    one_line(tmp_path, "no run folder", "config.json")


def test_another_format(small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "format": 99}))
    one_line(small, "99")


def test_a_missing_result(small: Path) -> None:
    next(small.glob("rows/*.safetensors")).unlink()
    one_line(small, "not there", "run it again with --force")


def test_a_damaged_result(small: Path) -> None:
    next(small.glob("rows/*.safetensors")).write_bytes(b"no tensors")
    one_line(small, "damaged")


@pytest.mark.parametrize("content", ["[]", "{}", "[", '[{"task": "text"}]', "[3]", '[{"file": "../../etc/passwd"}]'])
def test_damaged_rows(small: Path, content: str) -> None:
    (small / "results.json").write_text(content)
    one_line(small)


# ---- figures


@pytest.mark.parametrize(("methods", "panels"), [(4, 1), (12, 2)])
def test_a_crowd_on_the_front_is_drawn_closer_too(methods: int, panels: int, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    drawing = import_module("tokensteer.app.report.figures")
    rows = []
    for k in range(methods):
        result = toy(4)
        metrics = {"activity": [100.0 if k == 0 else k, 0.1], "3-mer correlation": [1 - 0.01 * k, None]}
        rows.append((row("dna", f"method {k}", result, metrics), result))
    found = trades.trade(read(fill(tmp_path / "run", rows)).rows)
    assert found is not None
    drawing._front(figure, found, {row.method: k for k, row in enumerate(found.rows)})
    whole, *closer = figure.axes
    assert 1 + len(closer) == panels
    assert whole.get_xlim()[1] > 100
    for axes in closer:  # the outermost is outside, and the middle half inside
        low, high = axes.get_xlim()
        assert low < 4
        assert 8 < high < 100


def test_figures(mog: Path) -> None:
    pytest.importorskip("matplotlib")
    made = figures(mog)
    assert [file.name for file in made] == ["mog-traces.png", "mog-weights.png", "mog-metrics.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in made)


# ---- in a browser

PROBE = """<script>
const said = [];
addEventListener("error", (event) => said.push(event.message));
addEventListener("load", () => setTimeout(() => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, answers = {};
  const headings = [...page.querySelectorAll("table.methods")[0].tHead.rows[0].cells];
  const body = page.querySelectorAll("table.methods")[0].tBodies[0];
  const column = (k) => [...body.rows].map((row) => row.cells[k].dataset.v);
  const k = headings.findIndex((head) => head.textContent === "accuracy");
  headings[k].querySelector("button").click();
  answers.down = [headings[k].getAttribute("aria-sort"), column(k)];
  headings[k].querySelector("button").click();
  answers.up = [headings[k].getAttribute("aria-sort"), column(k)];
  answers.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  const pick = page.querySelector(".pick-population");
  pick.value = "1";
  pick.dispatchEvent(new frame.contentWindow.Event("change"));
  const tree = page.querySelector(".tree:not([hidden])");
  answers.tree = [tree.dataset.row, tree.dataset.population, page.querySelectorAll(".tree:not([hidden])").length];
  const plot = tree.querySelector(".plot"), key = (name) =>
    plot.dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", { key: name, bubbles: true }));
  key("ArrowRight");
  answers.end = page.querySelector("output").textContent;
  key("ArrowLeft");
  answers.before = page.querySelector("output").textContent;
  answers.line = tree.querySelector(".chosen").getAttribute("d").length;
  const trace = page.querySelector("svg.trace").parentElement, box = trace.getBoundingClientRect();
  trace.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", { clientX: box.left + 1, clientY: box.top }));
  answers.at = page.querySelector(".at").textContent;
  answers.errors = said.concat(frame.contentWindow.said ?? []);
  document.body.innerHTML = "";
  document.body.textContent = JSON.stringify(answers);
}, 300));
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_in_a_browser(digits: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    write(digits)
    probe = digits / "probe.html"
    probe.write_text(f'{PROBE}<iframe src="report.html" style="width:390px;height:800px;border:0"></iframe>')
    flags = [*FLAGS, "--allow-file-access-from-files", "--enable-logging=stderr"]
    done = subprocess.run(
        [BROWSER, *flags, f"--user-data-dir={tmp_path}", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    probe.unlink()
    assert "CONSOLE" not in done.stderr, done.stderr
    answers = json.loads(re.sub(r"<[^>]*>", "", re.search(r"<body.*</body>", done.stdout, re.DOTALL)[0]))  # type: ignore[index]
    assert answers["errors"] == []
    accuracies = sorted(saved["metrics"]["accuracy"][0] for saved in stored(digits))
    assert answers["up"] == ["ascending", [repr(a) for a in accuracies]]
    assert answers["down"] == ["descending", [repr(a) for a in reversed(accuracies)]]
    assert answers["wide"] == 0
    assert answers["tree"] == ["0", "1", 1]  # the first that resampled, its second population, alone
    assert re.match(r"Step 12, particle \d.* · weight [\d.]+ · reward", answers["end"])
    assert answers["before"].startswith("Step 11, particle")
    assert answers["line"] > 10
    assert answers["at"] == "at step 0"


CROWD = """<script>
addEventListener("load", () => setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument, table = page.querySelector("table.methods");
  const seen = () => [...table.tBodies[0].rows].filter((row) => row.offsetHeight).length;
  const lines = () => [...page.querySelector("svg.trace").querySelectorAll(".line")]
    .filter((line) => page.defaultView.getComputedStyle(line).display !== "none").length;
  const answers = { few: [seen(), lines()], tall: page.documentElement.scrollHeight / 800 };
  answers.cut = table.scrollWidth - table.parentElement.clientWidth;
  page.querySelector("#all").click();
  answers.all = [seen(), lines()];
  const button = page.querySelector("svg.trace").closest("figure").querySelector(".key button");
  button.click();
  answers.alone = page.querySelector("svg.trace").querySelectorAll(".line:not(.faded)").length;
  button.click();
  answers.again = page.querySelector("svg.trace").querySelectorAll(".faded").length;
  document.body.textContent = JSON.stringify(answers);
}, 300));
</script>"""


def probed(folder: Path, script: str, width: int) -> dict[str, Any]:
    """The answers of a script about the report of a folder, in a frame of so many pixels."""
    assert BROWSER is not None
    probe = folder / "probe.html"
    probe.write_text(f'{script}<iframe src="report.html" style="width:{width}px;height:800px;border:0"></iframe>')
    flags = [*FLAGS, "--allow-file-access-from-files", "--window-size=1400,900"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", probe.as_uri()]
    done = subprocess.run([BROWSER, *flags], capture_output=True, text=True, timeout=120)
    return json.loads(re.sub(r"<[^>]*>", "", re.search(r"<body.*</body>", done.stdout, re.DOTALL)[0]))  # type: ignore[index]


PAGE = """<script>
addEventListener("load", () => setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const answers = { tall: root.scrollHeight, wide: root.scrollWidth - root.clientWidth };
  answers.empty = [...page.querySelectorAll("svg.trace")].filter((svg) => ![...svg.querySelectorAll(".line")]
    .some((line) => page.defaultView.getComputedStyle(line).display !== "none")).length;
  answers.top = [...page.querySelectorAll("header .formula, header .lead, header .before-after")]
    .map((node) => node.getBoundingClientRect().bottom);
  document.body.textContent = JSON.stringify(answers);
}, 300));
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_report_like_that_of_the_demo_in_a_browser(tmp_path: Path) -> None:
    """Two tasks with eight methods of different sizes: eight screens at most, the answer on the first, no empty chart,
    and no scrolling sideways on a phone."""
    rows = []
    for task in ("digits", "mnist"):
        for k, name in enumerate([name for name in METHODS if name != "auto"][:8]):
            result = toy(4 + 3 * k, populations=4, steps=12)
            values = {
                "accuracy": [0.8 + 0.01 * k, 0.02],
                "diversity": [1.1, 0.03],
                "ess": [0.5, 0.1],
                "reward": [-1.0, 0.1],
            }
            resolved = {"steps": 12, "kl": 1.0, "draws": 10, "ramp": "linear", "trigger": "ess:0.5"}
            rows.append((row(task, name, result, values, job={"method": name}, resolved=resolved), result))
    folder = fill(tmp_path / "run", rows)
    write(folder)
    wide, phone = probed(folder, PAGE, 1280), probed(folder, PAGE, 390)
    assert wide["tall"] <= 8 * 900
    assert wide["empty"] == phone["empty"] == 0
    assert len(wide["top"]) == 6
    assert max(wide["top"]) < 900
    assert wide["wide"] == phone["wide"] == 0


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_many_methods_in_a_browser(tmp_path: Path) -> None:
    names = ("accuracy", "reward accuracy", "diversity", "ess", "reward")
    values = {name: [-0.4321, 0.0321] for name in names}
    result = toy(16, populations=4, steps=12)
    methods = [name for name in METHODS if name != "auto"][:13]
    rows = [(row("text", name, result, values, job={"method": name}), result) for name in methods]
    folder = fill(tmp_path / "run", rows)
    write(folder)
    answers = probed(folder, CROWD, 1280)
    assert answers["few"] == [5, 5]
    assert answers["all"] == [13, 13]
    assert answers["cut"] <= 0
    assert answers["tall"] <= 8
    assert (answers["alone"], answers["again"]) == (1, 0)
