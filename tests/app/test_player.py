"""The particle player: what --keep-states stores, what the page holds of it, and the page in a browser."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import small_texts
import torch
from browser import BROWSER, FLAGS
from narrow import some

import tokensteer as ts
from tokensteer.app import cli
from tokensteer.app.report import player, write
from tokensteer.app.runs import answers, prompts
from tokensteer.app.runs.folder import FORMAT, writing
from tokensteer.core.particles.resampling import weights
from tokensteer.tasks.common.wordpiece import MASK, WordPiece

TINY = ["--particles", "4", "--populations", "3", "--steps", "6"]
HOSTILE = "<img src=x onerror=\"parent.said.push('harm')\"><script>parent.said.push('harm')</script>&\"'"


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("player") / "digits"
    words = ("compare", "digits", "--methods", "smc-base", "pretrained", *TINY, "--trigger", "always", "--keep-states")
    assert tokensteer(*words, "--out", out) == 0
    return out


def random_result(particles: int = 5, steps: int = 7, populations: int = 3, length: int = 6, top: int = 5) -> ts.Result:
    """States that follow no kernel, with random ancestors at every other step; the mask is `top`."""
    generator = torch.Generator().manual_seed(1)
    shape = (populations, particles)
    here = torch.arange(particles).expand(shape)
    drawn = [torch.randint(particles, shape, generator=generator) if t % 2 else here for t in range(steps + 1)]
    states = torch.randint(top + 1, (steps + 1, *shape, length), generator=generator).to(torch.uint8)
    states[-1] %= top
    log_w = torch.randn(steps + 1, *shape, generator=generator, dtype=torch.float64)
    return ts.Result(
        samples=states[-1].long(),
        log_w=log_w[-1],
        reward=torch.zeros(shape),
        ess=torch.ones(steps + 1, populations),
        mean_reward=None,
        ancestors=torch.stack([here, *drawn[1:]]),
        rows={"denoiser": 10},
        states=states[:, :2],
        states_log_w=log_w[:, :2],
    )


def fill(folder: Path, task: str, result: ts.Result, **more: Any) -> Path:
    """A run folder with one row."""
    stored = {
        "task": task,
        "method": "smc-base",
        "particles": result.log_w.shape[1],
        "populations": len(result.log_w),
        "seed": 0,
        "metrics": {},
        "log_z": None,
        "log_z_error": None,
        "rows": dict(result.rows),
        "saved": {},
        "seconds": 1.5,
        **more,
    }
    with writing(folder, {"format": FORMAT, "command": "tokensteer compare"}) as writer:
        writer.add("row", stored, result, {})
    return folder


def held(page: str) -> dict[tuple[int, int], dict[str, Any]]:
    """What a page holds of each row and population."""
    pattern = r'class="states" data-row="(\d+)" data-population="(\d+)" data-colour="c\d+" data-states="([^"]*)"'
    return {(int(k), int(b)): json.loads(unescape(facts)) for k, b, facts in re.findall(pattern, page)}


def rebuilt(known: dict[str, Any]) -> torch.Tensor:
    """The states (T + 1, N, L) from their differences, as the script rebuilds them."""
    size, length, start = known["particles"], known["length"], known["start"]
    states = [torch.tensor([start[n % len(start)] for n in range(size)])]
    for parents, (gaps, tokens) in zip(known["parents"], known["changes"], strict=True):
        after = states[-1][parents if parents is not None else list(range(size))].flatten()
        after[torch.tensor(gaps, dtype=torch.long).cumsum(0)] = torch.tensor(tokens, dtype=torch.long)
        states.append(after.view(size, length))
    return torch.stack(states)


# ---- what is stored


def test_a_run_stores_the_states_of_two_populations(digits: Path) -> None:
    run = ts.open_run(digits)
    for index, row in enumerate(run.rows):
        result = run.result(index)
        assert some(result.states).shape == (7, 2, 4, 64)
        assert row["mask"] == 2
        assert row["job"]["keep_states"] is True
        assert (some(result.states)[0] == 2).all()
        assert torch.equal(some(result.states)[-1].long(), result.samples[:2])


@pytest.mark.parametrize("method", ["smc-base", "particle-gibbs"])
def test_the_option_changes_no_sample(method: str, tmp_path: Path) -> None:
    for name, option in (("with", ["--keep-states"]), ("without", [])):
        assert tokensteer("run", "digits", "--method", method, *TINY, *option, "--out", tmp_path / name) == 0
    kept, plain = (ts.open_run(tmp_path / name).result(0) for name in ("with", "without"))
    assert kept.states is not None
    assert plain.states is None
    assert torch.equal(kept.samples, plain.samples)
    assert torch.equal(kept.log_w, plain.log_w)
    assert torch.equal(kept.ancestors, plain.ancestors)


def test_a_method_without_particles_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", "dna", "--method", "sgdd", *TINY, "--keep-states", "--out", tmp_path / "x")
    assert tokensteer(*words) == 2
    assert "--keep-states stores the steps of particles, and sgdd has chains instead" in capsys.readouterr().err


def test_texts_store_the_pieces_that_occur(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("The movie\n")
    words = ("run", "text", "--method", "smc-base", "--prompts", tmp_path / "prompts.txt", *TINY, "--keep-states")
    weights = small_texts.write_task(tmp_path / "weights")
    assert tokensteer(*words, "--weights", weights, "--out", tmp_path / "run") == 0
    run = ts.open_run(tmp_path / "run")
    states, row = some(run.result(0).states), run.rows[0]
    assert {int(token) for token in states.unique()} - {row["mask"]} == {int(token) for token in row["pieces"]}
    assert row["mask"] in states[0]
    assert [row["pieces"][str(int(token))] for token in states[0, 0, 0, :2]] == [" the", " movie"]
    assert held(write(tmp_path / "run").read_text("utf-8"))[0, 0]["pieces"] == row["pieces"]


def test_pieces_are_written_with_their_spaces() -> None:
    vocabulary = WordPiece.of([MASK, "the", "film", "##s", ",", ".", "good"])
    ids = vocabulary.encode("The films, good.")
    assert "".join(map(vocabulary.written, ids)).strip() == vocabulary.decode(ids) == "the films, good."


def test_a_selection_of_populations_has_no_states() -> None:
    result = random_result()
    picked = answers.some(result, torch.tensor([1, 2]))
    assert picked.states is None
    assert picked.states_log_w is None


def test_prompts_run_one_by_one_keep_the_states_of_the_first(tmp_path: Path) -> None:
    first, second = random_result(), replace(random_result(), samples=1 - random_result().samples.clamp(max=1))
    joined = prompts.side_by_side([first, second])
    assert torch.equal(some(joined.states)[-1].long(), joined.samples[:2])
    joined.save(tmp_path / "joined.safetensors")
    assert ts.Result.load(tmp_path / "joined.safetensors").states is not None


# ---- what the page holds


def test_the_page_holds_every_state(digits: Path) -> None:
    known, run = held(write(digits).read_text("utf-8")), ts.open_run(digits)
    assert sorted(known) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (index, population), facts in known.items():
        result = run.result(index)
        assert torch.equal(rebuilt(facts), some(result.states)[:, population].long())
        assert torch.equal(
            torch.tensor(facts["weights"]), weights(some(result.states_log_w)[:, population]).float().round(decimals=4)
        )
        assert (facts["kind"], facts["side"], facts["mask"]) == ("image", 8, 2)
        resampled = [not torch.equal(line, torch.arange(4)) for line in result.ancestors[1:, population]]
        assert [parents is not None for parents in facts["parents"]] == resampled
    assert len(known[0, 0]["start"]) == 1  # all begin alike


def test_states_of_any_kernel_are_rebuilt() -> None:
    result = random_result()
    for population in range(2):
        assert torch.equal(rebuilt(player.facts(result, population)), some(result.states)[:, population].long())


def test_particles_without_weight_have_none() -> None:
    result = random_result()
    log_w = some(result.states_log_w).clone()
    log_w[3, 0], log_w[4, 0, 1] = -torch.inf, -torch.inf
    known = player.facts(replace(result, states_log_w=log_w), 0)["weights"]
    assert known[3] == [0.0] * 5
    assert known[4][1] == 0.0
    assert sum(known[4]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("task", "more", "kind"),
    [
        ("dna", {}, {"kind": "letters", "alphabet": "ACGT", "mask": 4}),
        ("text", {"pieces": {"0": " the"}, "mask": 5}, {"kind": "text", "pieces": {"0": " the"}, "mask": 5}),
        ("mog", {"mask": 5}, {"kind": "numbers", "mask": 5}),
        ("digits", {}, {"kind": "numbers", "mask": None}),  # six sites are no picture
        ("another", {}, {"kind": "numbers", "mask": None}),
    ],
)
def test_states_are_shown_as_the_task_looks(task: str, more: dict[str, Any], kind: dict[str, Any], tmp_path: Path):
    facts = held(write(fill(tmp_path / "run", task, random_result(), **more)).read_text("utf-8"))[0, 0]
    assert {name: facts[name] for name in kind} == kind


def test_a_page_without_states_has_no_player(tmp_path: Path) -> None:
    bare = replace(random_result(), states=None, states_log_w=None)
    page = write(fill(tmp_path / "run", "dna", bare)).read_text("utf-8")
    assert "particle player" not in page
    assert 'id="particles"' not in page


def test_too_many_particles_are_said(tmp_path: Path) -> None:
    page = write(fill(tmp_path / "run", "dna", random_result(particles=65))).read_text("utf-8")
    assert "1 row has more particles or sites than can be shown here." in page
    assert not held(page)


def test_markup_in_pieces_and_names_is_escaped(tmp_path: Path) -> None:
    pieces = {str(k): f" {HOSTILE}" for k in range(5)}
    folder = fill(tmp_path / "run", "text", random_result(), pieces=pieces, mask=5, method=HOSTILE)
    page = write(folder).read_text("utf-8")
    assert held(page)[0, 0]["pieces"] == pieces
    assert "<img src=x" not in page
    assert "<script>parent" not in page


def test_the_script_sets_text_as_text() -> None:
    script = (Path(player.__file__).with_name("player.js")).read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|https?:", script)


# ---- in a browser

PROBE = """<script>
const said = [];
addEventListener("error", (event) => said.push(event.message));
addEventListener("load", () => setTimeout(async () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, view = frame.contentWindow;
  const part = page.querySelector(".player"), slider = part.querySelector("input"), answers = {};
  const wait = (time) => new Promise((done) => setTimeout(done, time));
  const tiles = () => [...part.querySelectorAll(".tile")];
  const kin = () => tiles().flatMap((tile, n) => tile.classList.contains("kin") ? [n] : []);
  const key = (node, name) => node.dispatchEvent(new view.KeyboardEvent("keydown", { key: name, bubbles: true }));
  const go = (step) => { slider.value = step; slider.dispatchEvent(new view.Event("input", { bubbles: true })); };
  const steps = Number(slider.max), at = (step, what) => { go(step); return what(); };
  const every = (what) => Array.from({ length: steps + 1 }, (_, step) => at(step, what));
  answers.first = Number(slider.value);
  answers.texts = every(() => tiles().map((tile) => tile.querySelector("code").textContent));
  answers.marks = part.querySelectorAll(".marks i").length;
  answers.labels = tiles().map((tile) => tile.querySelector(".unseen").textContent);
  tiles()[1].click();
  answers.pressed = tiles().map((tile) => tile.getAttribute("aria-pressed"));
  answers.ancestors = every(kin);
  key(tiles()[1], "Escape");
  answers.released = kin();
  go(0);
  tiles()[2].click();
  answers.descendants = every(kin);
  answers.died = part.querySelector(".traced p").textContent;
  tiles()[0].focus();
  go(3);
  key(tiles()[0], "ArrowRight");
  answers.right = [Number(slider.value), slider.getAttribute("aria-valuetext")];
  key(tiles()[0], "ArrowLeft");
  answers.left = Number(slider.value);
  key(tiles()[0], "ArrowDown");
  answers.down = [tiles().indexOf(page.activeElement), tiles().map((tile) => tile.tabIndex)];
  go(steps);
  const button = part.querySelector(".play");
  button.click();
  answers.playing = [button.textContent, Number(slider.value)];
  await wait(1500);
  answers.moved = Number(slider.value);
  button.click();
  const rest = Number(slider.value);
  await wait(1500);
  answers.paused = [button.textContent, Number(slider.value) === rest];
  const pick = part.querySelector(".pick-population");
  pick.value = "1";
  pick.dispatchEvent(new view.Event("change"));
  answers.other = every(() => tiles().map((tile) => tile.querySelector("code").textContent));
  answers.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  answers.injected = page.querySelectorAll("main img, main script").length;
  answers.errors = said;
  document.body.innerHTML = "";
  document.body.textContent = JSON.stringify(answers);
}, 300));
</script>"""


def ask(folder: Path, width: int, tmp_path: Path) -> dict[str, Any]:
    assert BROWSER is not None
    probe = folder / "probe.html"
    probe.write_text(f'{PROBE}<iframe src="report.html" style="width:{width}px;height:800px;border:0"></iframe>')
    flags = [*FLAGS, "--allow-file-access-from-files", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=9000", "--dump-dom", probe.as_uri()]
    done = subprocess.run([BROWSER, *flags], capture_output=True, text=True, timeout=120)
    probe.unlink()
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(unescape(some(re.search(r"<body[^>]*>(.*)</body>", done.stdout, re.DOTALL))[1]))


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    pieces = {str(k): f" {'abcde'[k]}{HOSTILE if k == 2 else ''}" for k in range(5)}
    result = random_result()
    folder = fill(tmp_path / "run", "text", result, pieces=pieces, mask=5, method=HOSTILE)
    write(folder)
    answers = ask(folder, width, tmp_path)
    assert answers["errors"] == []
    assert answers["injected"] == 0
    assert answers["wide"] == 0
    assert answers["first"] == 7
    for name, population in (("texts", 0), ("other", 1)):
        states = some(result.states)[:, population].tolist()
        shown = [["".join(" ▒▒" if k == 5 else pieces[str(k)] for k in state) for state in step] for step in states]
        assert answers[name] == shown
    assert answers["marks"] == 4
    assert answers["labels"][0].startswith("Particle 0, weight ")
    assert answers["pressed"] == ["false", "true", "false", "false", "false"]
    line, ancestors = [[1]], result.ancestors[:, 0].tolist()
    for t in range(7, 0, -1):
        line.insert(0, [ancestors[t][line[0][0]]])
    assert answers["ancestors"] == line
    assert answers["released"] == []
    heirs = [[2]]
    for t in range(1, 8):
        heirs.append([n for n in range(5) if ancestors[t][n] in heirs[-1]])
    assert answers["descendants"] == heirs
    assert answers["died"].startswith("Pinned: particle 2 of step 0")
    assert ("died out" in answers["died"]) == (not heirs[-1])
    assert answers["right"] == [4, "Step 4 of 7"]
    assert answers["left"] == 3
    assert answers["down"] == [1, [-1, 0, -1, -1, -1]]
    assert answers["playing"] == ["Pause", 0]
    assert 0 < answers["moved"] < 7
    assert answers["paused"] == ["Play", True]
