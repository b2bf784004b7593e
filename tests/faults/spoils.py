"""Wrong values: one field of one part is replaced, and the library must refuse it in its own words or run as ever."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.invariants import demand
from tests.faults.steerings import Aim

NUMBERS = (0, -1, 1, 2, 0.5, 1.5, math.nan, math.inf, -math.inf, True, "3", 37, torch.tensor(1.0))
NO_FLAGS = (0, 1, -1, 0.5, math.nan, "3", "False", [], torch.tensor(True))
OURS = str(Path(ts.__file__).parent)


def is_ours(error: BaseException) -> bool:
    """Whether a `raise` statement of the library raised it, with a text: no operation that went wrong. What a function
    given by the user raises itself is passed on, and counts too."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        return True
    if trace is None or not isinstance(error, ValueError | TypeError | FloatingPointError) or len(str(error)) < 20:
        return False
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(OURS) and linecache.getline(file, trace.tb_lineno).strip().startswith("raise ")


def wrong_tensors(x: Tensor) -> list[Any]:
    """What a tensor may be mistaken for."""
    return [
        x.to(torch.int32),
        x.double(),
        x.unsqueeze(0).unsqueeze(0),
        x[..., :0],
        x[:0],
        x + 1000,
        torch.full_like(x, -7),
        x.tolist(),
        None,
        torch.zeros_like(x),
        torch.cat([x, x]),
        torch.cat([x, x], -1),
    ]


def wrong_functions(function: Callable[..., Any]) -> list[Any]:
    """Functions that return something else than they should."""

    def changed(change: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda *given: change(function(*given))

    return [
        changed(lambda found: found * math.nan),
        changed(lambda found: found - 5),
        changed(lambda found: found + 5),
        changed(lambda found: found * math.inf),
        changed(lambda found: found[:-1] if isinstance(found, Tensor) else None),
        changed(lambda found: found.unsqueeze(-1) if isinstance(found, Tensor) else "3"),
        changed(lambda found: found.sum() if isinstance(found, Tensor) else [found]),
        changed(lambda found: found.float() if isinstance(found, Tensor) else torch.tensor(found)),
        None,
        3,
    ]


def wrong_values(value: Any) -> list[Any]:
    """Wrong values in place of one of this kind; none for what is duck-typed."""
    if isinstance(value, Tensor):
        return wrong_tensors(value)
    if value is None or isinstance(value, int | float):
        return list(NUMBERS)
    if isinstance(value, tuple):
        return [(), (*value, *value), value[:1], tuple(0.0 for _ in value), tuple(math.nan for _ in value)]
    return wrong_functions(value) if callable(value) and not is_dataclass(value) else []


def spoiled(choices: Choices, part: Any) -> Any:
    """A part, one field of which is wrong. A flag is set, rightly or not; or it is no flag, which must be refused."""
    flags = {f.name for f in fields(part) if f.init and f.type in ("bool", "bool | None")}
    wrong = {
        f.name: [True, False, *NO_FLAGS] if f.name in flags else wrong_values(getattr(part, f.name))
        for f in fields(part)
        if f.init
    }
    names = [name for name, options in wrong.items() if options]
    if not names:
        return part
    name = choices.pick("field", *names)
    value = wrong[name][choices.random.randrange(len(wrong[name]))]
    choices.made["spoiled"] = f"{type(part).__name__}.{name} = {value!r}"
    changed = replace(part, **{name: value})
    demand(name not in flags or isinstance(value, bool), "a flag that is neither True nor False is refused")
    return changed


def spoil(choices: Choices, aim: Aim) -> ts.Steering:
    """The steering of an aim with one wrong value."""
    steering = aim.steering
    model, tilt, proposal = steering.model, steering.twist, steering.proposal
    kinds = ["model", "kernel", "proposal", *["tilt", "estimator", "potential"] * (tilt is not None)]
    kinds += ["denoiser"] * isinstance(model.base.denoiser, ts.from_logits | ts.from_hidden)
    match choices.pick("part", *kinds):
        case "model":
            model = spoiled(choices, model)
        case "denoiser":
            base = replace(model.base, denoiser=spoiled(choices, model.base.denoiser))
            model = replace(model, models=[base, *model.models[1:]]) if isinstance(model, ts.Product) else base
        case "kernel":
            if isinstance(model, ts.Product):
                kernel = spoiled(choices, model.kernel)
                model = replace(model, models=[replace(each, kernel=kernel) for each in model.models])
            else:
                model = replace(model.base, kernel=spoiled(choices, model.kernel))
        case "proposal":
            proposal = spoiled(choices, proposal)
        case "tilt":
            tilt = spoiled(choices, tilt)
        case "potential":
            assert tilt is not None
            tilt = replace(tilt, potential=spoiled(choices, tilt.potential))
        case _:
            assert tilt is not None
            tilt = replace(tilt, estimator=spoiled(choices, tilt.estimator))
    return ts.Steering(model, tilt, proposal)


def spoil_options(choices: Choices, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a run with one wrong value."""
    pools: dict[str, list[Any]] = {
        "num_particles": list(NUMBERS[:-2]),
        "populations": list(NUMBERS[:-2]),
        "memory": [*NUMBERS, "12 bananas", "", "-1GiB", "0"],
        "keep_states": list(NUMBERS),
        "generator": [0, "seed", torch.Generator],
        "resample": [*wrong_functions(ts.resampling.systematic)[-2:], lambda log_w, generator: log_w],
        "when": [*wrong_functions(ts.triggers.always), lambda log_w, step: True],
    }
    name = choices.pick("option", *pools)
    value = pools[name][choices.random.randrange(len(pools[name]))]
    choices.made["spoiled"] = f"{name} = {value!r}"
    return {**options, name: value}
