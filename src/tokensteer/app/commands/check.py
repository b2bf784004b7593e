"""`tokensteer check`: the assertions of `tokensteer.testing` on a user's own parts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from tokensteer.app.options import Check, Outcome
from tokensteer.app.words.lookup import find, raised
from tokensteer.core.kernels.kernel import NO_MASK, Kernel
from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.product import Product
from tokensteer.core.models.template import template
from tokensteer.core.numerics.domains import check_seed
from tokensteer.core.steering.methods import Method
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.tilt import Tilt
from tokensteer.testing import assert_denoiser, assert_kernel, assert_proposal, assert_reward

MOST = 10**8
"""The most tokens and sites: more than any machine has memory for."""


@runtime_checkable
class AnyKernel(Kernel, Protocol):
    """A user's kernel, recognised by its members."""


Law = tuple[str, Callable[[], None]]
"""The name of a part, and a function that raises an AssertionError unless the part is as it must be."""


def main(command: Check, words: str) -> Outcome:
    """The laws that hold, if all do. Raises a ValueError with the mend for the first that is broken."""
    check_seed("--seed", command.seed)
    found = find(command.target)
    laws, source = list(laws_of(found, command)), _source(command.target)
    if not laws:
        raise ValueError(f"there is no law for what {command.target} is, a {type(found).__name__} of this kind")
    for what, hold in laws:
        try:
            hold()
        except (AssertionError, ValueError) as error:
            raise ValueError(f"{command.target} breaks the law of the {what}: {error}") from error
        except (Exception, SystemExit) as error:
            said = raised(error, source)
            raise ValueError(f"{command.target} breaks down under the law of the {what}: {said}") from error
        print(f"holds: the law of the {what}")
    return {"target": command.target, "holds": [what for what, _ in laws]}


def _source(target: str) -> str | None:
    """The file that a target is from."""
    module = target.rpartition(":")[0]
    return getattr(sys.modules.get(Path(module).stem if module.endswith(".py") else module), "__file__", None)


def laws_of(found: Any, given: Check) -> Iterator[Law]:
    """All laws for an object, by its type or by its arguments."""
    match found:
        case type():  # before kernels: a class may have their members
            yield from _of_function(found, given)
        case Method():
            yield from laws_of(found.steering, given)
        case Steering():
            for model in found.model.networks:
                yield from _of_model(model, found.proposal.needs_gradient, given.seed)
            if found.twist is not None:
                base = found.model.base
                yield _of_reward(found.twist, base.vocab_size, base.template.shape[-1], base.kernel.mask_id, given.seed)
            yield "proposal", partial(assert_proposal, found, seed=given.seed)
        case Diffusion():
            yield from _of_model(found, given.one_hots, given.seed)
        case Product():
            for model in found.networks:
                yield from _of_model(model, given.one_hots, given.seed)
        case Tilt():
            yield _of_reward(found, *_sizes(given, "Tilt"), given.seed)
        case AnyKernel():
            yield "kernel", partial(assert_kernel, found, _vocab(given, "kernel"), seed=given.seed)
        case _ if callable(found):
            yield from _of_function(found, given)
        case _:
            raise ValueError(
                f"{given.target} is a {type(found).__name__}: give a Steering, Method, Diffusion, Tilt, kernel, "
                "denoiser or reward, or a function that makes one"
            )


def _of_function(found: Any, given: Check) -> Iterator[Law]:
    """Laws by the number of arguments that must be given by position: a reward has one, a denoiser two, and a function
    without any makes the object to check."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = inspect.signature(found.forward if isinstance(found, nn.Module) else found).parameters.values()
    needed = [p.name for p in named if p.default is p.empty and p.kind in places]
    if needed and isinstance(found, type):
        raise ValueError(f"{given.target} is a class that takes {', '.join(needed)}: give an object of it")
    if not needed:
        try:
            made = found()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{given.target}() breaks down: {raised(error, _source(given.target))}") from error
        yield from laws_of(made, given)
    elif len(needed) == 1:
        vocab, length, mask = _sizes(given, "reward")
        yield _of_reward(Tilt(found, differentiable=given.one_hots), vocab, length, mask, given.seed)
    elif len(needed) == 2:
        _, length, mask = _sizes(given, "denoiser")
        model = Diffusion(found, Ancestral(mask), uniform_steps(4), template(length, mask))
        yield "denoiser", partial(assert_denoiser, model, one_hots=given.one_hots, seed=given.seed)
    else:
        raise ValueError(
            f"{given.target} takes {len(needed)} arguments: a reward takes x, a denoiser x and t, and a kernel is an "
            "object with mask_id, choose, survival and remasks"
        )


def _of_model(model: Diffusion, one_hots: bool, seed: int) -> Iterator[Law]:
    if model.kernel.mask_id != NO_MASK:  # the assertions on denoisers and kernels are about masked processes
        yield "denoiser", partial(assert_denoiser, model, one_hots=one_hots, seed=seed)
        yield "kernel", partial(assert_kernel, model.kernel, model.vocab_size, seed=seed)


def _of_reward(tilt: Tilt, vocab_size: int, length: int, mask: int, seed: int) -> Law:
    mask_id, soft = None if mask == NO_MASK else mask, tilt.differentiable
    return "reward", partial(
        assert_reward, tilt.reward, vocab_size, length, mask_id=mask_id, differentiable=soft, seed=seed
    )


def _vocab(given: Check, what: str) -> int:
    if given.vocab is None:
        raise ValueError(f"{given.target} is a {what}: say with --vocab how many tokens there are, the mask among them")
    _check_size("--vocab", given.vocab, 2, ", a token and the mask")
    return given.vocab


def _sizes(given: Check, what: str) -> tuple[int, int, int]:
    """--vocab, --length and --mask, checked."""
    vocab = _vocab(given, what)
    if given.length is None:
        raise ValueError(f"{given.target} is a {what}: say with --length how many sites a sequence has")
    _check_size("--length", given.length, 1)
    mask = vocab - 1 if given.mask is None else given.mask
    if not 0 <= mask < vocab and (mask != NO_MASK or what == "denoiser"):
        raise ValueError(f"--mask must be one of the {vocab} tokens of --vocab, 0 to {vocab - 1}, got {mask}")
    return vocab, given.length, mask


def _check_size(option: str, size: int, least: int, reason: str = "") -> None:
    if size < least:
        raise ValueError(f"{option} must be at least {least}{reason}, got {size}")
    if size > MOST:
        raise ValueError(f"{option} must be at most {MOST:,}, got {size:,}")
