"""Training of the prior of texts, part by part.

| part | makes | from |
|---|---|---|
| published | MiniLM and the classifier of toxicity as files of ours | the folder of data |
| corpus | texts that SmolLM2 writes | its GGUF file in the folder of data |
| windows | the vocabulary, and windows of tokens | the corpus, real reviews, BERT's vocabulary |
| denoiser, reward, labeller, judge | networks | the windows, MiniLM |
| toxicity, toxicity-judge | two classifiers | the published one; the windows |
| quality | perplexity and diversity of samples | the denoiser, SmolLM2 |

All is written to one folder, from which later parts read it. The folder of data is TOKENSTEER_DATA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokensteer.tasks.common.checkpoints import Checkpoints
from tokensteer.tasks.common.part_training import PartTraining, Pieces, finish_cards, go_on
from tokensteer.tasks.common.task import weights_file
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.text.corpus import windows, write
from tokensteer.tasks.text.model import vocabulary_file
from tokensteer.tasks.text.prior import parts, published
from tokensteer.tasks.text.prior.work import NAME, NETWORKS, PARTS, RECIPE, PriorRecipe, Work, described, made

SHARES = {"corpus": 0.22, "denoiser": 0.64, "labeller": 0.05, "reward": 0.03, "judge": 0.03, "toxicity-judge": 0.03}
"""Of the minutes, if all parts are trained."""
ALONE = Pieces()


def train(training: Training, recipe: PriorRecipe = RECIPE) -> dict[str, Any]:
    """Do all parts. A killed training continues if it is called with the same options."""
    training.begin()
    kept = {part: Checkpoints(training.checkpoints, f"{NAME}-{part}") for part in NETWORKS}
    cards = {part: weights_file(training.out, NAME, part).with_suffix(".json") for part in NETWORKS}
    products = {"published": published.TOXICITY, "corpus": write.CARD, "windows": windows.FILE}
    for part in PARTS:
        product = cards[part] if part in cards else made(products.get(part, ""), training)
        if product.is_file():
            say(f"{part}: done before")
            continue
        minutes = training.minutes
        if minutes is not None:
            minutes *= SHARES.get(part, 1.0)
        train_part(part, *go_on(training, kept.get(part), minutes), recipe)
    found = finish_cards(cards, kept.values())
    training.tidy()
    return found


def train_part(part: str, training: Training, pieces: Pieces = ALONE, recipe: PriorRecipe = RECIPE) -> Any:
    """Do one part, for `training.minutes` if it is a training; returns what was measured."""
    PartTraining(NAME, PARTS, part, training, pieces, "").begin()
    if part == "published":
        return published.convert(training.out)
    if part == "corpus":
        return parts.make_corpus(training, recipe)
    if part == "windows":
        return parts.make_windows(training, recipe)
    corpus = windows.load(made(windows.FILE, training))
    if len(corpus.vocabulary) != recipe.denoiser.vocab_size or corpus.length != recipe.denoiser.length:
        raise ValueError(
            f"the windows have {corpus.length} tokens of {len(corpus.vocabulary)}, and the networks "
            f"{recipe.denoiser.length} of {recipe.denoiser.vocab_size}: make the windows again"
        )
    corpus.vocabulary.write(vocabulary_file(training.out))
    makers: dict[str, Callable[[Work], Any]] = {
        "denoiser": parts.make_denoiser,
        "labeller": parts.make_labeller,
        "reward": parts.make_reward,
        "judge": parts.make_judge,
        "toxicity": parts.make_toxicity,
        "toxicity-judge": parts.make_toxicity_judge,
        "quality": parts.make_quality,
    }
    return makers[part](Work(NAME, PARTS, part, training, pieces, described(corpus), recipe, corpus))
