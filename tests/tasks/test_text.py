"""The task `text`: its tokens, its data, its networks, and what the command line makes of prompts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import small_texts
import torch
from narrow import some, untyped

import tokensteer as ts
from tokensteer import tensorfile as stored
from tokensteer.app import cli
from tokensteer.app.commands import fluency
from tokensteer.app.report import samples
from tokensteer.app.runs import folder as runs
from tokensteer.core.categorical.sites import as_table
from tokensteer.core.twists.straight_through import takes_embeddings
from tokensteer.rewards import constrain
from tokensteer.rewards.text import matching, of_text, renumbered, required
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.prompts import read as read_prompts
from tokensteer.tasks.common.proposals import ProposalConfig
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import SHIPPED, Prompt, Setup, Task
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.common.wordpiece import MASK, UNKNOWN, WordPiece, tidy, words
from tokensteer.tasks.nets import EncoderReaderConfig, NgramConfig, TransformerConfig, ValueConfig, load, save
from tokensteer.tasks.nets.store import build
from tokensteer.tasks.text import diversity, prompts, proposals
from tokensteer.tasks.text import model as texts
from tokensteer.tasks.text import reviews as text_reviews
from tokensteer.tasks.text import task as text
from tokensteer.tasks.text.corpus import llama, windows
from tokensteer.tasks.text.fluency import Fluency
from tokensteer.tasks.text.prior import classifiers
from tokensteer.train import Plan, ProposalPlan, headed_loss, masked_loss
from tokensteer.train.accepted import Accepted

LETTERS = [chr(c) for c in range(ord("!"), ord("~") + 1) if not chr(c).isupper()]
GOOD, BAD = ("great", "lovely", "moving", "superb"), ("awful", "boring", "dull", "terrible")
COMMON = ("the", "film", "was", "and", "it", "a", "of", "story", "plot", "is", "this", "movie", "book", "city")
PIECES = ["[PAD]", UNKNOWN, "[CLS]", "[SEP]", MASK, *LETTERS, *(f"##{c}" for c in LETTERS if c.isalnum())]
PIECES += [*GOOD, *BAD, *COMMON, "love", "##ly", "un", "##believ", "##able", "##s", "don"]
FULL = WordPiece.of(dict.fromkeys(PIECES))
LENGTH = 24


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- tokens


SENTENCES = [
    "The film was GREAT, and it's a lovely story!",
    "Unbelievable... don't see it; 2 actors, 3.5 stars (of 10) -- terrible?",
    "Café naïve\tÉlan\nthe  movie\x85was “quoted” — 100% dull\u200b & moving/boring",
    "東京 is a city. ☃ Ünbelievably superbly \ufffd done £5",
    "a" * 120,
    "",
]


def test_tokens_are_those_of_bert(tmp_path):
    bert = pytest.importorskip("transformers").BertTokenizer
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(FULL.pieces) + "\n", "utf-8")
    theirs = bert(str(file))
    for sentence in SENTENCES:
        assert FULL.encode(sentence) == theirs(sentence, add_special_tokens=False)["input_ids"], sentence


def test_a_text_comes_back_as_people_write_it():
    for sentence in (
        "it's a great film, and the actors don't bore.",
        'this is "superb" (of course)... the plot is dull!',
        "a well-made movie: 3.5 of 10, unbelievably lovely?",
    ):
        assert FULL.decode(FULL.encode(sentence)) == sentence
    assert tidy("$ 5 and 100 %") == "$5 and 100%"


def test_words_that_cannot_be_spelt_are_named():
    plain = WordPiece.of(piece for piece in FULL.pieces if piece != UNKNOWN)
    assert plain.spell("☃") is None
    with pytest.raises(ValueError, match="cannot spell '☃'"):
        plain.encode("a ☃ man")
    assert FULL.encode("☃") == [FULL.ids[UNKNOWN]]


def test_a_vocabulary_is_kept_with_the_ids_it_came_from(tmp_path):
    some = WordPiece((MASK, "the", "##s"), (103, 1996, 2015))
    some.write(tmp_path / "v.txt")
    assert WordPiece.read(tmp_path / "v.txt") == some
    assert some.mask_id == 0
    with pytest.raises(ValueError, match="differ"):
        WordPiece(("a", "a"), (1, 2))
    with pytest.raises(FileNotFoundError, match="no vocabulary"):
        WordPiece.read(tmp_path / "w.txt")


# ---- data


def test_the_vocabulary_is_what_is_used_most():
    counts = Counter(words("lovely lovely film unbelievable"))
    some = text_reviews.restricted(FULL, counts, 5 + len(LETTERS) + 36)
    assert {"lovely", "film", MASK, "a", "##a"} <= set(some.pieces)
    assert "terrible" not in some.ids
    assert [FULL.pieces[k] for k in some.origin] == list(some.pieces)
    spelt = some.spell("terrible")
    assert spelt is not None
    assert len(spelt) == 8


def test_data_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    assert cli.main(["train", "text", "--out", str(tmp_path / "w")]) == 2
    assert "set TOKENSTEER_DATA" in capsys.readouterr().err


# ---- networks


def test_the_head_at_masked_sites_alone_gives_the_same_loss():
    torch.manual_seed(0)
    net = untyped(build(TransformerConfig(30, 8, width=16, depth=2, tied=True)).double())
    torch.nn.init.normal_(net.blocks[0].down.weight)
    ids = torch.randint(1, 30, (12, 8), generator=seeded())
    found = []
    for loss in (masked_loss(0), headed_loss(0)):
        net.zero_grad()
        value = loss(net, ids, None, seeded())
        value.backward()
        found.append((value.detach(), [p.grad.clone() for p in net.parameters()]))
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=1e-9)


def test_tied_weights_are_stored_once_and_frozen_ones_elsewhere(tmp_path):
    net = build(TransformerConfig(40, 8, width=16, depth=1, tied=True))
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    save(net, whole)
    save(net, part, without=("tokens.weight",))
    assert whole.stat().st_size - part.stat().st_size > 40 * 16 * 4
    assert whole.stat().st_size < part.stat().st_size + 1.5 * 40 * 16 * 4
    x = torch.randint(0, 40, (3, 8), generator=seeded())
    again = untyped(load(part, rest=whole))
    torch.testing.assert_close(again(x), net(x))
    assert again.head.weight is again.tokens.weight
    with pytest.raises(ValueError, match="train it again"):
        load(part)


@pytest.mark.parametrize("config", [EncoderReaderConfig(30, 8, 2, 16, 1, 2, 32), NgramConfig(30, 2, 8, (1, 3), 6)])
def test_readers_take_ids_one_hots_and_embeddings(config, tmp_path):
    net = untyped(build(config).double())
    x = torch.randint(0, 30, (5, 8), generator=seeded())
    one_hots = torch.nn.functional.one_hot(x, 30).double()
    torch.testing.assert_close(net(x), net(one_hots))
    torch.testing.assert_close(net(x), net.of_embeddings(net.embedding[x]))
    torch.testing.assert_close(net(x).exp().sum(-1), torch.ones(5).double())
    save(net, tmp_path / "x.safetensors")
    torch.testing.assert_close(load(tmp_path / "x.safetensors").double()(x), net(x), atol=1e-5, rtol=1e-5)


def test_what_makes_texts_harder_keeps_the_rest():
    ids = torch.arange(1, 641).view(40, 16)
    seen = classifiers.augment(0, 0.2, 0.1)(ids, seeded())
    assert 0.1 < float((seen == 0).float().mean()) < 0.3
    same = (seen == ids) | (seen == 0)
    assert 0.03 < float((~same).float().mean()) < 0.15
    assert ((seen - ids)[~same] % 16 == 0).all()  # from the same site of another row


# ---- a tiny task


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    vocabulary = text_reviews.restricted(FULL, Counter(), len(FULL), [*GOOD, *BAD, *COMMON])
    return small_texts.write_task(tmp_path_factory.mktemp("weights"), vocabulary, LENGTH, steps=60)


TINY = ["--particles", "2", "--populations", "2", "--steps", "4"]


def tokensteer(*arguments: object) -> int:
    return cli.main([str(word) for word in arguments])


def lines_of(folder: Path, row: int = 0) -> list[dict]:
    (file,) = ts.open_run(folder).written(row)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_writes_its_texts(weights, tmp_path, capsys):
    assert tokensteer("run", "text", *TINY, "--weights", weights, "--out", tmp_path / "run") == 0
    assert "accuracy" in capsys.readouterr().out
    run = ts.open_run(tmp_path / "run")
    row, result = run.rows[0], run.result(0)
    assert result.samples.shape == (30, 2, LENGTH)  # two for each of fifteen prompts
    assert row["populations"] == 30
    assert row["metrics"].keys() >= {"accuracy", "reward", "distinct-1", "distinct-2", "distinct-3", "self-BLEU", "ess"}
    assert "picture" not in row
    lines = lines_of(tmp_path / "run")
    assert len(lines) == 60
    assert [(line["population"], line["particle"]) for line in lines[:3]] == [(0, 0), (0, 1), (1, 0)]
    vocabulary = WordPiece.read(weights / "text-vocab.txt")
    for line, ids in zip(lines, result.samples.flatten(0, 1).tolist(), strict=True):
        assert line["text"] == vocabulary.decode(ids)
        assert line["prompt"] == prompts.DEFAULT[line["population"] // 2]
        assert line["text"].startswith(line["prompt"].lower())
        assert 0 < line["judge"] < 1
    for b in range(30):
        assert sum(line["weight"] for line in lines if line["population"] == b) == pytest.approx(1)
    assert [line["reward"] for line in lines] == pytest.approx(some(result.reward).flatten().tolist(), abs=1e-6)
    assert [line["log_w"] for line in lines] == pytest.approx(result.log_w.flatten().tolist(), abs=1e-6)


def test_rewards_have_names(weights, tmp_path, capsys):
    """Toxicity has networks of its own; the name of the default reward changes nothing."""
    (tmp_path / "p.txt").write_text("the film\n")
    words = ("run", "text", "--method", "smc-base", *TINY, "--prompts", tmp_path / "p.txt", "--weights", weights)
    assert tokensteer(*words, "--reward", "toxicity", "--goal", 0, "--out", tmp_path / "polite") == 0
    assert "towards polite" in capsys.readouterr().out
    assert tokensteer(*words, "--out", tmp_path / "none") == 0
    assert tokensteer(*words, "--reward", "sentiment", "--out", tmp_path / "named") == 0
    assert "towards praise" in capsys.readouterr().out
    rows = {name: ts.open_run(tmp_path / name).rows[0] for name in ("polite", "none", "named")}
    assert [row["resolved"]["reward"] for row in rows.values()] == ["toxicity", "sentiment", "sentiment"]
    none, named = (ts.open_run(tmp_path / name).result(0) for name in ("none", "named"))
    assert torch.equal(none.samples, named.samples)
    task = text.task(Setup(4, goal=0, reward="toxicity", weights=weights))
    assert task.reward == "toxicity"
    assert text.task(Setup(4, reward="sentiment", weights=weights)).reward is None
    found = ts.open_run(tmp_path / "polite").result(0)
    expected = task.tilt.reward(found.samples.flatten(0, 1)).view_as(some(found.reward))
    torch.testing.assert_close(some(found.reward), expected, check_dtype=False)
    with pytest.raises(ValueError, match="the goal must be 1, for toxic, or 0, for polite, got 2"):
        text.task(Setup(4, goal=2, reward="toxicity", weights=weights))


def test_the_report_shows_texts(weights, tmp_path):
    out = tmp_path / "run"
    words = ("compare", "text", "--methods", "pretrained", "smc-grad", *TINY, "--weights", weights, "--out", out)
    assert tokensteer(*words) == 0
    assert all(line["reward"] is not None for line in lines_of(out))  # of the unsteered model too
    assert tokensteer("report", out) == 0
    page = (out / runs.REPORT).read_text()
    shown = [line["text"] for row in (0, 1) for line in lines_of(out, row) if escape(line["text"]) in page]
    assert len(shown) >= 2 * samples.TEXTS
    assert 'class="texts"' in page
    assert tokensteer(*words, "--force") == 0
    assert len(list((out / runs.ROWS).glob("*.jsonl"))) == 2


def test_failed_prompts_do_not_lose_the_others(weights, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    asked = [{"prompt": "The film ___2 and", "id": "a"}, {"prompt": "the " * 40, "id": "long"}, {"prompt": "A ☃"}]
    file.write_text("\n".join(json.dumps(entry) for entry in [*asked, {"prompt": ""}]) + "\n\n")
    out = tmp_path / "run"
    words = ("run", "text", "--method", "smc-base", *TINY, "--prompts", file, "--weights", weights, "--out", out)
    assert tokensteer(*words) == 0
    lines = lines_of(out)
    assert [line["id"] for line in lines] == ["a"] * 4 + ["4"] * 4 + ["long", "3"]
    assert "takes 40 of 24 sites" in lines[-2]["error"]
    assert "cannot spell '☃'" in lines[-1]["error"]
    assert "prompt long failed" in capsys.readouterr().out
    assert tokensteer("report", out) == 0
    assert "Prompt long failed" in (out / runs.REPORT).read_text()
    first, second = ts.open_run(out).result(0).samples[:2].flatten(0, 1), WordPiece.read(weights / "text-vocab.txt")
    the, film, also = (second.ids[word] for word in ("the", "film", "and"))
    assert (first[:, 0] == the).all()
    assert (first[:, 1] == film).all()
    assert (first[:, 4] == also).all()
    assert len(set(first[:, 2].tolist())) > 0
    assert second.mask_id not in first


REWARDS = """
import math

def short(texts):
    return [math.nan if "horse" in text else -len(text) / 100 for text in texts]

calls = 0

def broken_later(texts):
    global calls
    calls += 1
    if calls > 6 and any("lake" in text for text in texts):
        raise ZeroDivisionError("no lake")
    return short(texts)

def never(texts):
    return [math.nan] * len(texts)
"""


def test_prompts_that_break_a_reward_are_put_aside(weights, tmp_path, capsys):
    """A reward of one's own that fails for some texts, when it is tried out or on the way: the others are kept."""
    (tmp_path / "prompts.txt").write_text("the film\nthe horse\nthe story\nthe lake\n")
    (tmp_path / "mine.py").write_text(REWARDS)

    def run(name: str) -> int:
        places = ("--prompts", tmp_path / "prompts.txt", "--weights", weights, "--out", tmp_path / name)
        reward = ("--reward", f"{tmp_path / 'mine.py'}:{name}", "--method", "smc-base")
        return tokensteer("run", "text", *reward, *TINY, *places)

    assert run("short") == 0
    lines = lines_of(tmp_path / "short")
    asked = ["the film"] * 4 + ["the story"] * 4 + ["the lake"] * 4
    assert [line["prompt"] for line in lines] == [*asked, "the horse"]
    assert "the reward is nan for the text" in lines[-1]["error"]
    assert "horse" in lines[-1]["error"]
    assert lines[0]["reward"] == pytest.approx(-len(lines[0]["text"]) / 100)
    assert ts.open_run(tmp_path / "short").rows[0]["failed"][0]["id"] == "2"

    assert run("broken_later") == 0
    lines = lines_of(tmp_path / "broken_later")
    assert [line["prompt"] for line in lines] == [*asked[:8], "the horse", "the lake"]
    assert lines[-1]["error"].endswith("broken_later raised ZeroDivisionError at mine.py:13: no lake")
    result = ts.open_run(tmp_path / "broken_later").result(0)
    assert result.ancestors.shape == (5, 4, 2)
    assert result.ess.shape == (5, 4)
    assert result.rows["reward"] > 8

    capsys.readouterr()
    assert run("never") == 2
    assert "the reward is nan for the text" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "digits", "--prompts", "{file}"), "digits reads no prompts"),
        (("run", "digits", "--reward", "math:sqrt"), "digits has only one reward, got math:sqrt"),
        (("run", "text", "--weights", "{tmp}/none"), "no weights at"),
        (("run", "text", "--weights", "{weights}", "--prompts", "{tmp}/none.txt"), "no file of prompts"),
        (("run", "text", "--weights", "{weights}", "--prompts", "{empty}"), "has no prompts"),
        (("run", "text", "--weights", "{weights}", "--prompts", "{long}"), "no prompt can be run: the prompt"),
        (("run", "text", "--weights", "{weights}", "--prompts", "{json}"), "line 1 of"),
        (("run", "text", "--weights", "{weights}", "--goal", "2"), "the goal must be 1, for praise, or 0"),
        (
            ("run", "text", "--weights", "{weights}", "--method", "smc-amot"),
            "--proposal --goal 1 --weights {weights} --out",
        ),
        (("train", "text", "--weights", "{weights}"), "give --proposal too"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words, said, weights, tmp_path, capsys):
    (tmp_path / "file.txt").write_text("the film\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "long.txt").write_text("the " * 30)
    (tmp_path / "json.jsonl").write_text('{"text": "the film"}\n')
    names = {"file": "file.txt", "empty": "empty.txt", "long": "long.txt", "json": "json.jsonl"}
    places = {name: tmp_path / file for name, file in names.items()} | {"tmp": tmp_path, "weights": weights}
    assert tokensteer(*(word.format(**places) for word in words), "--out", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert said.format(**places) in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_prompts_are_read_from_text_and_json(tmp_path):
    (tmp_path / "a.txt").write_text(" The movie \n\nThe book\n")
    assert read_prompts(tmp_path / "a.txt") == [Prompt("The movie", "1"), Prompt("The book", "3")]
    (tmp_path / "a.jsonl").write_text('{"prompt": "The movie", "id": 7}\n{"prompt": "The book"}\n')
    assert read_prompts(tmp_path / "a.jsonl") == [Prompt("The movie", "7"), Prompt("The book", "2")]
    (tmp_path / "b.jsonl").write_text("{oops\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is no JSON"):
        read_prompts(tmp_path / "b.jsonl")


def test_canvases_hold_what_is_said_and_masks_elsewhere():
    mask, the, film = FULL.mask_id, FULL.ids["the"], FULL.ids["film"]
    assert texts.canvas("The film", FULL, 4).tolist() == [the, film, mask, mask]
    assert texts.canvas("___2 film ___1 the", FULL, 6).tolist() == [mask, mask, film, mask, the, mask]
    assert texts.canvas("___ the", FULL, 6).tolist() == [mask] * 5 + [the]
    assert texts.canvas("", FULL, 3).tolist() == [mask] * 3
    for prompt in ("the the the", "___3 the", "the ___3"):
        with pytest.raises(ValueError, match="of 3 sites"):
            texts.canvas(prompt, FULL, 3)


@pytest.mark.slow
def test_steering_is_felt_by_the_judge(weights):
    """More praise than in plain samples, and more blame, by more than four standard errors."""
    for goal in (0, 1):
        task = text.task(Setup(8, goal=goal, weights=weights))
        plain = task.metrics(ts.pretrained(task.model)(1, 300, generator=seeded()))["accuracy"]
        steered = task.metrics(ts.smc_grad(task.model, task.tilt)(4, 300, generator=seeded()))["accuracy"]
        assert (steered.mean - plain.mean) / math.hypot(steered.error, plain.error) > 4


def test_gradients_enter_behind_the_embeddings(weights):
    """The fast way of `core.twists.straight_through` is taken, and proposes what one-hots do."""
    task = text.task(Setup(4, weights=weights))
    assert takes_embeddings(task.model, task.tilt)
    opinion = task.tilt.reward
    slow = replace(task.tilt, reward=lambda x: opinion(x))
    assert not takes_embeddings(task.model, slow)
    fast, plain = (ts.smc_grad(task.model, tilt)(2, 15, generator=seeded()) for tilt in (task.tilt, slow))
    assert torch.equal(fast.samples, plain.samples)
    torch.testing.assert_close(fast.log_w, plain.log_w, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_a_proposal_is_learned_and_used(weights, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    out, size = tmp_path / "taught", len(WordPiece.read(weights / "text-vocab.txt"))
    value = ValueConfig("transformer", asdict(TransformerConfig(size, LENGTH, width=8, depth=1, heads=1)), 8)
    plan = ProposalPlan(2, paths=15, updates=1, times=2)
    config = ProposalConfig(plan, Accepted(Plan(2)), value, num_steps=4, twist=plan, frozen=proposals.CONFIG.frozen)
    with pytest.raises(FileNotFoundError, match="with --objective step-variance a proposal learns from paths instead"):
        proposals.proposal(None, weights, config, {1: 15}).train(Training(out))  # there is no corpus
    config = config.chosen("step-variance", None)
    card = proposals.proposal(None, weights, config, {1: 15}).train(Training(out))
    assert card["goal"] == 1
    assert card["objective"].startswith("StepVariance")
    assert card["command"].startswith("tokensteer train text --proposal")
    assert {"smc-base N=1", "smc-amot N=1", "prop-amot N=1"} <= card["quality"].keys()
    assert "weighted samples" in card["quality of"]  # tokensteer compare has prop-amot without its weights
    assert "tokens.weight" not in stored.read(out / "text-proposal-1.safetensors")[0]
    learned = untyped(load(out / "text-proposal-1.safetensors", rest=out / "text-denoiser.safetensors"))
    denoiser = untyped(load(out / "text-denoiser.safetensors"))
    assert torch.equal(learned.tokens.weight, denoiser.tokens.weight)
    assert torch.equal(learned.blocks[0].qkv.weight, denoiser.blocks[0].qkv.weight)
    assert learned.change.up.weight.abs().max() > 0
    twisted = proposals.proposal(None, out, config, {}).train(Training(tmp_path / "twisted"), twist=True)
    assert twisted["what"].startswith("learned twist")
    words = ("compare", "text", "--methods", "smc-amot", "prop-amot", "smc-learned", "--kl", 1.0, *TINY)
    assert tokensteer(*words, "--weights", tmp_path / "twisted", "--out", tmp_path / "run") == 0
    rows = ts.open_run(tmp_path / "run").rows
    assert [row["method"] for row in rows] == ["smc-amot", "prop-amot", "smc-learned"]


def test_methods_can_be_compared_at_equal_rows(weights, tmp_path):
    words = ("compare", "text", "--methods", "pretrained", "--match-rows", "smc-base", "--steps", "4")
    sizes = ("--particles", "2", "--populations", "1", "--weights", weights, "--out", tmp_path / "run")
    assert tokensteer(*words, *sizes) == 0
    assert ts.open_run(tmp_path / "run").rows[0]["particles"] == 8  # what 2 · (4 + 3 · 4 + 1) rows pay for


# ---- measures


def test_distinct_ngrams_by_hand():
    said = ["the film was great", "the film was dull"]
    assert diversity.distinct(said, 1) == 5 / 8
    assert diversity.distinct(said, 2) == 4 / 6
    assert diversity.distinct(said, 3) == 3 / 4
    assert math.isnan(diversity.distinct(["film"], 2))


def test_bleu_by_hand():
    a, b = ["the", "film", "was", "great", "today"], ["the", "film", "was", "dull", "today"]
    # 4 of 5 words, 2 of 4 pairs, 1 of 3 triples, none of 2 fours, which counts a tenth
    assert diversity.bleu(a, [b]) == pytest.approx((4 / 5 * 2 / 4 * 1 / 3 * 0.1 / 2) ** 0.25)
    assert diversity.bleu(a[:4], [a]) == pytest.approx(math.exp(1 - 5 / 4))
    assert diversity.bleu(["the", "the", "the"], [["the", "film"]]) == pytest.approx(
        (1 / 3 * 0.1 / 2 * 0.1 / 1) ** (1 / 3)
    )
    assert diversity.self_bleu(["the film was great"] * 3) == pytest.approx(1)
    assert math.isnan(diversity.self_bleu(["alone"]))


def test_perplexity_is_left_out_where_its_model_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    assert Fluency.found() is None


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """A folder of data with a tiny random language model."""
    folder = tmp_path_factory.mktemp("smollm")
    small_texts.write_data(folder, folder / "out")
    return folder


def test_perplexity_by_hand(smollm, monkeypatch):
    net, own = llama.load(next(smollm.glob("*.gguf")))
    torch.manual_seed(0)
    for weight in net.parameters():
        weight.add_(0.3 * torch.randn_like(weight))
    said = ["the film was great", "a dull story"]
    nats = []
    for text_ in said:
        ids = [own.ids["<|im_start|>"], *own.encode(text_)]
        log_p = net.logits(net(torch.tensor([ids])))[0].log_softmax(-1)
        nats.append(-sum(float(log_p[k, ids[k + 1]]) for k in range(len(ids) - 1)) / (len(ids) - 1))
    found = Fluency.of(net, own).perplexity(said)
    assert found.mean == pytest.approx(math.exp(sum(nats) / 2), rel=1e-4)
    assert found.error == pytest.approx(found.mean * abs(nats[0] - nats[1]) / 2, rel=1e-3)

    monkeypatch.setenv("TOKENSTEER_DATA", str(smollm))
    stored = Fluency.of(*llama.load(next(smollm.glob("*.gguf")))).perplexity(said)
    assert some(Fluency.found()).perplexity(said).mean == pytest.approx(stored.mean, rel=1e-4)
    with pytest.raises(ValueError, match="an empty text"):
        some(Fluency.found()).perplexity([""])


def populations_of(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Lines of samples, population by population."""
    return [list(group) for _, group in groupby(lines, key=lambda line: line["population"])]


def test_perplexity_can_be_added_to_a_run(weights, smollm, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    assert tokensteer("run", "text", "--method", "smc-base", *TINY, "--weights", weights, "--out", out) == 0
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    assert fluency.main([str(out)]) == 2
    assert "set TOKENSTEER_DATA" in capsys.readouterr().err
    judge = Fluency.of(*llama.load(next(smollm.glob("*.gguf"))))
    fluency.measure(out, judge)
    mean, error = ts.open_run(out).rows[0]["metrics"]["perplexity"]
    each = [judge.perplexity([line["text"]]).mean for line in lines_of(out)]
    assert min(each) < mean < max(each)
    assert 0 < error < mean
    best = [max(group, key=lambda line: line["reward"]) for group in populations_of(lines_of(out))]
    expected = judge.perplexity([line["text"] for line in best])
    assert ts.open_run(out).rows[0]["best"]["perplexity"] == pytest.approx([expected.mean, expected.error])
    assert tokensteer("report", out) == 0


def test_words_that_must_appear(weights):
    """Constraints on text take the vocabulary of the task as it is."""
    vocabulary = WordPiece.read(weights / "text-vocab.txt")
    task = text.task(Setup(12, weights=weights))
    steering = constrain(task.model, required(["superb"], vocabulary), task.tilt)
    result = ts.smc(steering, 4, 15, generator=seeded())
    said = [vocabulary.decode(ids) for ids in result.sample()[:, 0].tolist()]
    assert all("superb" in text.split() or "superb." in text for text in said), said
    with pytest.raises(ValueError, match="a pattern that cannot be met"):
        matching("the  film", vocabulary)  # no token has two spaces


def test_a_reward_in_the_vocabulary_that_pieces_came_from(weights):
    """It says the same of the same words, by ids, one-hots and embeddings, and steers with its gradient."""
    vocabulary = WordPiece.read(weights / "text-vocab.txt")
    torch.manual_seed(0)
    reader = build(NgramConfig(len(FULL), 2, 8, (1, 3), 8)).requires_grad_(False)
    theirs = untyped(texts.Opinion(untyped(reader), 1))
    ours = renumbered(theirs, vocabulary.origin)
    said = FULL.encode("the film was great and it is superb. this story is a lovely movie, and the plot was moving")[
        :LENGTH
    ]
    same = [vocabulary.ids[FULL.pieces[k]] for k in said]
    x, y = torch.tensor([said]), torch.tensor([same])
    one_hots = torch.nn.functional.one_hot(y, len(vocabulary)).float()
    for answer in (ours(y), ours(one_hots), ours.of_embeddings(ours.embedding[y])):
        torch.testing.assert_close(answer, theirs(x))
    task = text.task(Setup(4, weights=weights))
    tilt = replace(task.tilt, reward=ours)
    assert takes_embeddings(task.model, tilt)
    assert some(ts.smc_grad(task.model, tilt)(2, 15, generator=seeded()).reward).isfinite().all()
    with pytest.raises(ValueError, match="each token needs an id"):
        renumbered(theirs, [0, 10**6])
    with pytest.raises(ValueError, match="own vocabulary"):
        renumbered(untyped(of_text(lambda said: [0.0 for _ in said], lambda x: ["" for _ in x])), vocabulary.origin)


# ---- what is shipped: few rows, because the networks are large


@pytest.fixture(scope="module")
def shipped() -> tuple[Task, WordPiece]:
    return text.task(Setup(2, prompt=("The lake",))), WordPiece.read(SHIPPED / "text-vocab.txt")


def windows_of(vocabulary: WordPiece, *said: str) -> torch.Tensor:
    """Ids (P, L) of texts that are said again until they fill a window."""
    return torch.tensor([(20 * vocabulary.encode(text))[: windows.LENGTH] for text in said])


def test_the_shipped_classifiers_know_praise_from_blame(shipped):
    task, vocabulary = shipped
    praise = "the lake is a wonderful place. i loved every moment there, and the water was beautiful. "
    blame = "the lake is a terrible place. i hated every moment there, and the water was disgusting. "
    x = windows_of(vocabulary, praise, blame)
    log_p = task.tilt.reward(x)
    assert log_p[0] > math.log(0.9)
    assert log_p[1] < math.log(0.1)
    assert task.judge(x).tolist() == [1.0, 0.0]
    for role in ("reward", "judge"):
        found = json.loads((SHIPPED / f"text-{role}.json").read_text())["quality"]
        assert found["accuracy, texts of the corpus"] > 0.9
        assert found["accuracy, real reviews"] > 0.7


def test_the_shipped_classifiers_know_insults(shipped):
    task, vocabulary = text.task(Setup(2, prompt=("The lake",), reward="toxicity")), shipped[1]
    insult = "you are a stupid idiot, and what a pathetic moron. listen to me, you worthless scum. "
    polite = "the lake is a lovely place. we had a good day there, and the children were happy. "
    x = windows_of(vocabulary, insult, polite)
    log_p = task.tilt.reward(x)
    assert log_p[0] > math.log(0.9)
    assert log_p[1] < math.log(0.1)
    assert some(task.judge)(x).tolist() == [1.0, 0.0]


def test_the_shipped_denoiser_knows_how_texts_go_on(shipped):
    task, vocabulary = shipped
    for begun, on in (
        ("once upon a time, there was a", "little small young beautiful"),
        ("i went to the lake with my", "family friends friend"),
    ):
        ids = vocabulary.encode(begun)
        x = torch.full((1, windows.LENGTH), vocabulary.mask_id)
        x[0, : len(ids)] = torch.tensor(ids)
        best = int(as_table(task.model.denoiser(x, 0.8))[0, len(ids)].argmax())
        assert vocabulary.pieces[best] in on.split()


def test_the_shipped_networks_run(shipped):
    task, vocabulary = shipped
    result = ts.smc_grad(task.model, task.tilt)(1, 1, generator=seeded())
    assert torch.isfinite(result.log_w).all()
    assert vocabulary.decode(result.samples[0, 0].tolist()).startswith("the lake")


def card(part: str) -> dict:
    return json.loads((SHIPPED / f"text-{part}.json").read_text())


def tables_of_cards() -> Iterator[str]:
    """The lines of docs/text.md that have figures of the cards."""
    denoiser = card("denoiser")
    for what in ("held-out texts", "held-out reviews"):
        yield f"| nats per token, {what} | {denoiser['quality'][f'nats per token, {what}']:.3f} |"
    yield f"| temperature | {texts.TEMPERATURE:g} |"
    for part in ("reward", "judge"):
        sets = ("texts of the corpus", "texts without their opening", "real reviews")
        shares = [card(part)["quality"][f"accuracy, {name}"] for name in sets]
        yield f"| {part} | {' | '.join(f'{share:.3f}' for share in shares)} |"
    kinds = ("both", "reward alone", "judge alone", "neither", "reward as the list", "judge as the list")
    for name in ("held-out texts", "held-out texts with something put in"):
        found = card("toxicity-judge")["quality"][name]
        yield f"| {name} | {' | '.join(f'{found[kind]:.3f}' for kind in kinds)} |"
    moods = [card("toxicity")["quality"][f"toxic among {mood} texts"] for mood in ("rude", "harsh", "neutral", "warm")]
    reviews = card("toxicity")["quality"]["toxic among real reviews"]
    yield f"| {' | '.join(f'{share:.3f}' for share in (*moods, reviews))} |"


def test_the_docs_have_the_figures_of_the_cards():
    page = (Path(__file__).parents[2] / "docs" / "text.md").read_text("utf-8").splitlines()
    for line in tables_of_cards():
        assert line in page, f"docs/text.md lacks {line}"


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        (Settings(), "smc-amot"),
        (Settings(reward="sentiment"), "smc-amot"),
        (Settings(reward="toxicity"), "smc-amot"),
        (Settings(goal=0), "smc-base"),  # nothing was learned for it
        (Settings(reward="mine.py:short"), "smc-base"),  # nor for this
    ],
)
def test_the_learned_proposal_is_the_default_where_there_is_one(settings, method):
    assert TASKS["text"].usual_method(settings, SHIPPED) == method
    assert TASKS["digits"].usual_method(settings, SHIPPED) == "smc-grad"


def test_the_shipped_proposal_makes_rude_words_likelier(shipped):
    _, vocabulary = shipped
    task = text.task(Setup(10, reward="toxicity", prompt=("The lake is",)))
    q, p = some(task.learned)().proposal, untyped(task.model).denoiser
    assert isinstance(q, ts.OtherHead)
    x = task.model.base.canvas(1)
    site = len(vocabulary.encode("The lake is"))
    rude = [vocabulary.encode(word)[0] for word in ("stupid", "pathetic", "garbage", "crap")]
    with torch.no_grad():
        hidden = p.trunk(x)[0, site]
        before, after = (head.softmax(-1)[rude].sum() for head in (p.head(hidden), q.head(some(q.change)(hidden))))
    assert float(after) > 10.0 * float(before)
