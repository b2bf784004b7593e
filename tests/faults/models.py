"""Random models: kernels, schedules, templates, contexts, products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.networks import LAYOUTS, TableNet, random_table
from tests.helpers.extended import MaskGITExtended

STATES = 256  # at most, masks included: tables are small and enumeration is quick

MASKED = ("Ancestral", "Ancestral", "ReMDM", "ReMDM", "Ranked", "Ranked", "MaskGIT", "MaskGIT", "Blocks")
EVENTS = ("FirstHitting", "TimedFirstHitting")
KERNELS = (*MASKED, "MaskGITExtended", "ConfidenceRemask", "TauLeap", *EVENTS, "loop", *["noise"] * 4)
INNER = ("Ancestral", "ReMDM", "Ranked", "MaskGIT", "ConfidenceRemask", "TauLeap")


@dataclass(frozen=True)
class Made:
    """A model, the canvas (B, L) of each of its populations, its networks, and another denoiser of full support."""

    model: ts.Model
    canvas: Tensor
    nets: tuple[TableNet, ...]
    other: ts.Denoiser
    form: str
    full: bool

    def of_population(self, row: int) -> ts.Model:
        """The model of one population alone, which can be enumerated."""

        def alone(model: ts.Diffusion) -> ts.Diffusion:
            template = model.template if model.template.dim() == 1 else model.template[row % len(model.template)]
            context = tuple(part[row % len(part)].unsqueeze(0) for part in model.conditions)
            # The extended kernel has the target of its marginal one, and cannot be enumerated itself.
            kernel = model.kernel.marginal if isinstance(model.kernel, MaskGITExtended) else model.kernel
            return replace(model, kernel=kernel, template=template, context=context or None)

        if isinstance(self.model, ts.Product):
            return replace(self.model, models=[alone(model) for model in self.model.models])
        return alone(self.model.base)


def draw_kernel(choices: Choices, kind: str, mask_id: int, length: int, canvas: Tensor) -> tuple[ts.Kernel, Any]:
    """A kernel of a masked process and its steps."""
    pick = choices.pick
    grid = pick("grid", ts.uniform_steps, ts.cosine_steps)
    number = pick("steps", *[1] * 6, *[2] * 12, 3, 3, 5)
    schedule = pick(
        "schedule", *[ts.Linear()] * 3, ts.Cosine(), ts.LogLinear(), ts.Polynomial(2.0), ts.Geometric(1e-3, 5.0)
    )
    sigma = pick("sigma", ts.Cap(0.3), ts.Rescale(0.5), ts.Rescale(1.0), ts.Window(ts.Cap(0.5), 0.8, 0.2))
    count = pick("count", ts.ranked.evenly, ts.ranked.fixed(1), ts.ranked.fixed(2), ts.ranked.cosine_count)
    if kind == "Blocks":
        start = pick("start", 0, length - 1)
        size = pick("size", *(n for n in range(1, length + 1) if (length - start) % n == 0))
        number = (length - start) // size * pick("each", 1, 1, 2)
        kernel, _ = draw_kernel(choices, pick("inner", *INNER), mask_id, length, canvas)
        return ts.Blocks(kernel, size, length, number, grid, start), grid(number)
    if kind in EVENTS:
        kernel = ts.FirstHitting(mask_id) if kind == "FirstHitting" else ts.TimedFirstHitting(mask_id, schedule)
        return kernel, ts.event_steps(canvas, mask_id)
    made: dict[str, Callable[[], ts.Kernel]] = {
        "Ancestral": lambda: ts.Ancestral(mask_id, schedule),
        "ReMDM": lambda: ts.Ancestral(mask_id, schedule, sigma),
        "loop": lambda: ts.remdm_loop(mask_id, 0.7, 0.3, 0.6, ts.Cap(0.2)),
        "Ranked": lambda: ts.Ranked(
            mask_id,
            count,
            pick("confidence", ts.ranked.max_probability, ts.ranked.negative_entropy, ts.ranked.margin),
            pick("threshold", math.inf, math.inf, -0.3),
        ),
        "MaskGIT": lambda: ts.MaskGIT(mask_id, count, pick("temperature", 0.0, 0.0, 1.5)),
        "MaskGITExtended": lambda: MaskGITExtended(ts.MaskGIT(mask_id, count)),
        "ConfidenceRemask": lambda: ts.ConfidenceRemask(
            ts.Ancestral(mask_id, schedule, sigma), 2.0, carried=pick("carried", True, False)
        ),
        "TauLeap": lambda: ts.TauLeap(mask_id, schedule),
    }
    return made[kind](), grid(number)


def draw_noise(choices: Choices, tokens: int) -> tuple[ts.Kernel, Any]:
    """A kernel of a process without a mask and its steps."""
    law = choices.rand(tokens) + 0.1
    prior = choices.pick(
        "prior",
        *[(1.0 / tokens,) * tokens] * 2,
        tuple((law / law.sum()).tolist()),
        (0.5, 0.5, *[0.0] * (tokens - 2)) if tokens > 1 else (1.0,),
        (*[0.0] * (tokens - 1), 1.0),
    )
    leaps = len(set(prior)) == 1 and choices.often("leap", 0.4)
    schedule = choices.pick("schedule", ts.Linear(), ts.Cosine(), ts.LogLinear())
    steps = choices.pick("grid", ts.uniform_steps, ts.cosine_steps)(choices.pick("steps", 1, 2, 2, 2, 3))
    return (ts.UniformLeap if leaps else ts.Interpolating)(prior, schedule), steps


def draw_canvas(choices: Choices, length: int, tokens: int, mask_id: int) -> Tensor:
    """Templates (B, L) of tokens and free sites, with at least one free site in all."""
    rows = choices.pick("templates", 1, 1, 1, 2, 3)
    ids = [token for token in range(tokens + (mask_id != ts.NO_MASK)) if token != mask_id]
    fixed = torch.tensor([[choices.random.choice(ids) for _ in range(length)] for _ in range(rows)])
    free = choices.rand(rows, length) < choices.pick("free", 0.5, 1.0, 1.0)
    free[0, choices.random.randrange(length)] = True
    if rows > 1 and len(ids) > 1 and mask_id != ts.NO_MASK and choices.often("padded", 0.4):
        whole = fixed.masked_fill(fixed == ids[-1], ids[0]).masked_fill(free, mask_id)
        whole[0, 0] = mask_id
        lengths = [length, *(choices.random.randint(1, length) for _ in range(rows - 1))]
        canvas = ts.padded([row[:kept] for row, kept in zip(whole, lengths, strict=True)], ids[-1])
    else:
        canvas = fixed.masked_fill(free, mask_id)
    choices.made["template"] = canvas.tolist()
    return canvas


def draw_context(choices: Choices, rows: int, dtype: torch.dtype) -> tuple[int, tuple[Tensor, ...] | None]:
    """The number of labels, and the labels of one or all populations, perhaps with a number beside each."""
    if not choices.often("context", 0.3):
        return 1, None
    number = choices.pick("contexts", 1, rows if rows > 1 else 2, rows if rows > 1 else 3)
    parts = [torch.tensor([choices.random.randrange(3) for _ in range(number)])]
    if choices.often("second context", 0.3):
        parts.append((choices.rand(number) * 0.5).to(dtype))
    choices.made["labels"] = parts[0].tolist()
    return 3, tuple(parts)


def draw_model(choices: Choices) -> Made:
    pick = choices.pick
    kind, length = pick("kernel", *KERNELS), pick("L", 1, 1, *[2] * 10, *[3] * 4, 4, 5)
    tokens = pick("V", *(n for n in (1, 2, 3, 4) if (n + 1) ** length <= STATES))
    noisy = kind == "noise"
    mask_id = ts.NO_MASK if noisy else pick("mask_id", 0, tokens, tokens // 2)
    size = tokens + (not noisy)
    dtype = pick("dtype", *[torch.float64] * 3, torch.float32)
    canvas = draw_canvas(choices, length, tokens, mask_id)
    labels, context = draw_context(choices, len(canvas), dtype)
    combined = pick("model", "Diffusion", "Diffusion", "Diffusion", "Product", "guided")
    # A negative power, and the correction of remasking, need models of full support.
    full = pick("full", True, False)
    # A token that no state predicts, in any model: the first or the last of the vocabulary, if others are left.
    ends = [int(mask_id == 0), size - 1 - (mask_id == size - 1)]
    barred = [pick("barred token", *ends)] if tokens > 1 and choices.often("barred", 0.2) else []
    timely, layout = choices.often("timely", 0.25), pick("layout", "whole", "whole", *LAYOUTS)

    def net(whole: bool) -> TableNet:
        shape = (labels, size**length, length, size)
        zero = choices.rand(*shape) < (0.0 if whole else pick("zeros", 0.1, 0.4))
        return TableNet(random_table(choices.rand(*shape), zero, mask_id, barred).to(dtype), mask_id, timely, layout)

    nets = net(full), net(full), net(True)
    form = "logs" if noisy else pick("form", "logs", "logits", "hidden")
    first, second, third = (each.in_form(form) for each in nets)
    kernel, steps = draw_noise(choices, tokens) if noisy else draw_kernel(choices, kind, mask_id, length, canvas)
    template = canvas if len(canvas) > 1 or choices.often("stacked", 0.2) else canvas[0]
    base = ts.Diffusion(first, kernel, steps, template, pick("sharing", None, True, False), context)
    model: ts.Model = base
    if combined == "guided" and full:
        model = ts.guided(base, replace(base, denoiser=second), pick("scale", 0.0001, 0.5, 1.0, 1.5, 2.0))
    elif combined != "Diffusion":
        model = draw_product(choices, base, replace(base, denoiser=second), full)
    rows = model.populations // len(canvas)
    return Made(model, canvas.repeat_interleave(rows, 0), nets, third, form, full)


def draw_product(choices: Choices, first: ts.Diffusion, second: ts.Diffusion, full: bool) -> ts.Product:
    pick = choices.pick
    powers = pick("powers", (0.5, 0.5), (1.0, 1.0), (0.7, 0.0), (1.5, 0.5), *[(1.5, -0.5)] * (2 * full), (2.0,))
    raised = isinstance(first.kernel, ts.Ancestral | ts.Ranked) or choices.often("any convention", 0.1)
    convention = pick("convention", *[ts.denoiser_powers] * 3, *[ts.kernel_powers, ts.paper_powers] * raised)
    correct = full and convention is ts.denoiser_powers
    if first.conditions and choices.often("one context", 0.3):
        second = replace(second, context=tuple(part[:1] for part in first.conditions))
    models = (first, second)[: len(powers)]
    return ts.Product(models, powers, convention, correct, pick("look-ahead", None, True, False))
