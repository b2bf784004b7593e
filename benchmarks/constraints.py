"""What a hard constraint costs: JSON of a small schema from the shipped text model, beside the same runs without it.

python -m benchmarks.constraints --help
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import tokensteer as ts
from tokensteer.rewards import Automaton, constrain, read_json
from tokensteer.rewards.text import json_of
from tokensteer.tasks.common.task import SHIPPED, Setup
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.text.task import task as text_task

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 40},
        "rating": {"type": "integer", "minimum": 1, "maximum": 10},
        "good": {"type": "boolean"},
        "genre": {"enum": ["comedy", "drama", "horror"]},
        "tags": {"type": "array", "items": {"enum": ["funny", "sad", "long", "short"]}, "maxItems": 3},
        "review": {"type": "string", "minLength": 20, "maxLength": 250},
    },
}


@dataclass(frozen=True)
class Options:
    particles: int = 16
    populations: int = 2
    steps: int = 64
    repeats: int = 3
    """The best of so many runs counts."""
    reward: bool = True
    """Whether runs with a reward are timed too."""


@dataclass(frozen=True)
class Timed:
    seconds: float
    rows: int
    samples: list[list[int]]


def timed(run: Callable[[torch.Generator], ts.Result], repeats: int) -> Timed:
    """CPU seconds of the fastest run, its denoiser rows and the samples of all."""
    best, rows, samples = float("inf"), 0, list[list[int]]()
    for seed in range(repeats):
        began = time.process_time()
        result = run(torch.Generator().manual_seed(seed))
        seconds = time.process_time() - began
        samples += result.samples.flatten(0, 1).tolist()
        if seconds < best:
            best, rows = seconds, result.rows["denoiser"]
    return Timed(best, rows, samples)


def denoiser_call(model: ts.Diffusion, rows: int, repeats: int) -> float:
    """CPU milliseconds for a row of the network with the log-probabilities of all sites."""
    generator, best = torch.Generator().manual_seed(0), float("inf")
    tokens = torch.randint(1, model.vocab_size, (rows, model.template.shape[-1]), generator=generator)
    x = torch.where(torch.rand(tokens.shape, generator=generator) < 0.5, tokens, model.kernel.mask_id)
    for _ in range(repeats):
        began = time.process_time()
        with torch.no_grad():
            laws = model.predict(x, 1.0).laws()
            laws.store.rows(laws.index.flatten())
        best = min(best, time.process_time() - began)
    return 1e3 * best / rows


def parse(vocabulary: WordPiece, samples: list[list[int]]) -> int:
    """How many samples parse, decoded with and without usual spaces, and have the keys of the schema."""
    found = 0
    raw = vocabulary.batch_decode(samples, clean_up_tokenization_spaces=False)
    for texts in zip(raw, map(vocabulary.decode, samples), strict=True):
        try:
            found += all(list(read_json(text, SCHEMA)) == list(SCHEMA["properties"]) for text in texts)
        except ValueError:
            continue
    return found


def main(options: Options) -> None:
    vocabulary = WordPiece.read(SHIPPED / "text-vocab.txt")
    began = time.process_time()
    rule: Automaton = json_of(SCHEMA, vocabulary)
    built = time.process_time() - began
    task = text_task(Setup(options.steps))
    model = replace(task.model, template=ts.template(task.model.template.shape[-1], vocabulary.mask_id))
    sizes = options.particles, options.populations
    tilt = task.tilt

    def smc(steering: ts.Steering, when: ts.Trigger) -> Callable[[torch.Generator], ts.Result]:
        return lambda generator: ts.smc(steering, *sizes, when=when, generator=generator)

    observe, usual = ts.triggers.observe, ts.triggers.ess_below(0.5)
    pairs: list[tuple[str, Callable[[torch.Generator], ts.Result], str | None]] = [
        ("the model alone", smc(ts.Steering(model), ts.triggers.never), None),
        ("JSON, weights without resampling", smc(constrain(model, rule), observe), "the model alone"),
        ("JSON, resampled", smc(constrain(model, rule), usual), "the model alone"),
    ]
    if options.reward:
        pairs += [
            ("reward, without resampling", smc(ts.Steering(model, tilt), observe), None),
            ("JSON and reward", smc(constrain(model, rule, tilt), observe), "reward, without resampling"),
        ]
    states, classes = rule.step.shape
    console = Console(width=120)
    console.print(
        f"{states} states, {classes} classes of {rule.vocab_size} tokens, {len(rule.transitions.target)} transitions "
        f"with {rule.transitions.members.shape[1]} labels; built in {built:.1f} CPU seconds"
    )
    call = denoiser_call(model, 16, 3)
    console.print(f"a row of the denoiser with all of its log-probabilities: {call:.1f} ms")
    table = Table(box=box.SIMPLE, title=f"N = {sizes[0]}, {sizes[1]} populations, T = {options.steps}: CPU seconds")
    for title in ("", "s", "denoiser rows", "ms a row", "ratio", "beyond, in denoiser calls", "parse"):
        table.add_column(title)
    known: dict[str, Timed] = {}
    for name, run, against in pairs:
        known[name] = found = timed(run, options.repeats)
        each = 1e3 * found.seconds / found.rows
        ratio = beyond = parsed = ""
        if against is not None:
            before = 1e3 * known[against].seconds / known[against].rows
            ratio, beyond = f"{each / before:.2f}", f"{(each - before) / call:.2f}"
            parsed = f"{parse(vocabulary, found.samples)} of {len(found.samples)}"
        table.add_row(name, f"{found.seconds:.1f}", str(found.rows), f"{each:.1f}", ratio, beyond, parsed)
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
