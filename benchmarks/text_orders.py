"""In which order, and at which temperature, texts of the prior read best: perplexity against diversity.

    python -m benchmarks.text_orders --weights FOLDER --device cuda

One line for each order, number of steps and temperature, beside held-out texts. TOKENSTEER_DATA has the windows and
SmolLM2. A random order that is drawn anew in each step is no kernel to steer with, because p and q would choose
different sites, but it samples.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import tyro
from torch import Tensor

import tokensteer as ts
from tokensteer.tasks.common.arrays import to_lists
from tokensteer.tasks.common.task import weights_file
from tokensteer.tasks.common.training import say
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import Encoder, load
from tokensteer.tasks.text.corpus import llama, windows
from tokensteer.tasks.text.fluency import PATTERN, Fluency
from tokensteer.tasks.text.model import as_denoiser, sharpened
from tokensteer.tasks.text.prior import published, quality
from tokensteer.tasks.text.prior.parts import held_out
from tokensteer.tasks.text.prior.work import RECIPE


@dataclass(frozen=True)
class Options:
    weights: Path
    """A folder with text-denoiser and text-vocab."""
    device: str = "cpu"
    samples: int = 200
    seed: int = 0
    orders: tuple[str, ...] = ("usual", "random", "left to right")
    """usual is the ancestral sampler; random and left to right open equally many sites in each step."""
    steps: tuple[int, ...] = (100,)
    temperatures: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85)


def anywhere(log_x0: Tensor) -> Tensor:
    return torch.rand(log_x0.shape[0], device=log_x0.device)


def kernel(order: str, mask_id: int) -> ts.Kernel:
    if order == "usual":
        return ts.Ancestral(mask_id)
    return ts.LeftToRight(mask_id) if order == "left to right" else ts.Ranked(mask_id, confidence=anywhere)


def main(options: Options) -> None:
    file = weights_file(options.weights, "text", "denoiser")
    net = load(file, options.device)
    assert isinstance(net, Encoder)
    vocabulary = WordPiece.read(options.weights / "text-vocab.txt")
    fluency = Fluency.of(*llama.load(published.find(PATTERN), options.device))
    corpus = windows.load(published.find(windows.FILE))
    some = held_out(corpus, options.samples, RECIPE.real_share)
    texts = [vocabulary.decode(row) for row in to_lists(some.long())]
    say(json.dumps({"held-out texts": quality.measure(texts, fluency)}))
    length = net.config.length
    for order, steps in product(options.orders, options.steps):
        for temperature in options.temperatures:
            torch.manual_seed(options.seed)  # of the random order
            began, generator = time.perf_counter(), torch.Generator(options.device).manual_seed(options.seed)
            denoiser = as_denoiser(vocabulary.mask_id)(sharpened(net, temperature))
            canvas = ts.template(length, vocabulary.mask_id).to(options.device)
            model = ts.Diffusion(denoiser, kernel(order, vocabulary.mask_id), ts.uniform_steps(steps), canvas)
            ids = ts.pretrained(model)(1, options.samples, generator=generator).samples[:, 0]
            drawn = [vocabulary.decode(row) for row in to_lists(ids)]
            found = {"order": order, "steps": steps, "temperature": temperature, **quality.measure(drawn, fluency)}
            found["seconds"] = round(time.perf_counter() - began, 1)
            say(json.dumps(found | {"example": drawn[0]}))


if __name__ == "__main__":
    main(tyro.cli(Options))
