"""`tokensteer check`: a user's own parts held to the laws of `tokensteer.testing`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from tokensteer.app.options import Check
from tokensteer.app.words.lookup import find
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
"""Of tokens and of sites: more than there is memory for."""


@runtime_checkable
class AnyKernel(Kernel, Protocol):
    """A kernel of a user's own, known by what it has."""


@dataclass(frozen=True)
class Law:
    """Something that must hold; `hold` raises an AssertionError where it does not."""

    what: str
    hold: Callable[[], None]


def check(command: Check) -> int:
    """0 if all laws hold. The first that is broken is said with its mend."""
    check_seed("--seed", command.seed)
    found = find(command.target)
    laws = list(laws_of(found, command))
    if not laws:
        raise ValueError(f"there is no law for what {command.target} is, a {type(found).__name__} of this kind")
    for law in laws:
        try:
            law.hold()
        except (AssertionError, ValueError) as error:
            raise ValueError(f"{command.target} breaks the law of the {law.what}: {error}") from error
        except (Exception, SystemExit) as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"{command.target} breaks down under the law of the {law.what}: {said}") from error
        print(f"holds: the law of the {law.what}")
    return 0


def laws_of(found: Any, given: Check) -> Iterator[Law]:
    """All laws for an object, by its type, or by what it takes."""
    match found:
        case type():  # before kernels, whose names it may have
            yield from _of_function(found, given)
        case Method():
            yield from laws_of(found.steering, given)
        case Steering():
            for model in found.model.networks:
                yield from _of_model(model, found.proposal.needs_gradient, given.seed)
            if found.twist is not None:
                base = found.model.base
                yield _of_reward(found.twist, base.vocab_size, base.template.shape[-1], base.kernel.mask_id, given.seed)
            yield Law("proposal", lambda: assert_proposal(found, seed=given.seed))
        case Diffusion():
            yield from _of_model(found, given.one_hots, given.seed)
        case Product():
            for model in found.networks:
                yield from _of_model(model, given.one_hots, given.seed)
        case Tilt():
            yield _of_reward(found, *_sizes(given, "Tilt"), given.seed)
        case AnyKernel():
            yield _of_kernel(found, _vocab(given, "kernel"), given.seed)
        case _ if callable(found):
            yield from _of_function(found, given)
        case _:
            raise ValueError(
                f"{given.target} is a {type(found).__name__}: give a Steering, Method, Diffusion, Tilt, kernel, "
                "denoiser or reward, or a function that makes one"
            )


def _of_function(found: Any, given: Check) -> Iterator[Law]:
    """Told apart by how many arguments they need: none makes something, one is a reward's, two are a denoiser's."""
    needed = _needed(found.forward if isinstance(found, nn.Module) else found)
    if needed and isinstance(found, type):
        raise ValueError(f"{given.target} is a class that takes {', '.join(needed)}: give an object of it")
    if not needed:
        yield from laws_of(_made(found, given), given)
    elif len(needed) == 1:
        vocab, length, mask = _sizes(given, "reward")
        yield _of_reward(Tilt(found, differentiable=given.one_hots), vocab, length, mask, given.seed)
    elif len(needed) == 2:
        _, length, mask = _sizes(given, "denoiser")
        model = Diffusion(found, Ancestral(mask), uniform_steps(4), template(length, mask))
        yield _of_denoiser(model, given.one_hots, given.seed)
    else:
        raise ValueError(
            f"{given.target} takes {len(needed)} arguments: a reward takes x, a denoiser x and t, and a kernel is an "
            "object with mask_id, choose, survival and remasks"
        )


def _needed(function: Callable[..., object]) -> list[str]:
    """The arguments that have to be given by their places."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.default is p.empty and p.kind in places]


def _made(make: Callable[[], object], given: Check) -> object:
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{given.target}() breaks down: {type(error).__name__}: {error}") from error


def _of_model(model: Diffusion, one_hots: bool, seed: int) -> Iterator[Law]:
    if model.kernel.mask_id != NO_MASK:  # the laws of denoisers and kernels are those of masked processes
        yield _of_denoiser(model, one_hots, seed)
        yield _of_kernel(model.kernel, model.vocab_size, seed)


def _of_denoiser(model: Diffusion, one_hots: bool, seed: int) -> Law:
    return Law("denoiser", lambda: assert_denoiser(model, one_hots=one_hots, seed=seed))


def _of_kernel(kernel: Any, vocab_size: int, seed: int) -> Law:
    return Law("kernel", lambda: assert_kernel(kernel, vocab_size, seed=seed))


def _of_reward(tilt: Tilt, vocab_size: int, length: int, mask: int, seed: int) -> Law:
    mask_id = None if mask == NO_MASK else mask

    def hold() -> None:
        assert_reward(tilt.reward, vocab_size, length, mask_id=mask_id, differentiable=tilt.differentiable, seed=seed)

    return Law("reward", hold)


def _vocab(given: Check, what: str) -> int:
    if given.vocab is None:
        raise ValueError(f"{given.target} is a {what}: say with --vocab how many tokens there are, the mask among them")
    if given.vocab < 2:
        raise ValueError(f"--vocab must be at least 2, a token and the mask, got {given.vocab}")
    if given.vocab > MOST:
        raise ValueError(f"--vocab must be at most {MOST:,}, got {given.vocab:,}")
    return given.vocab


def _sizes(given: Check, what: str) -> tuple[int, int, int]:
    vocab = _vocab(given, what)
    if given.length is None:
        raise ValueError(f"{given.target} is a {what}: say with --length how many sites a sequence has")
    if given.length < 1:
        raise ValueError(f"--length must be at least 1, got {given.length}")
    if given.length > MOST:
        raise ValueError(f"--length must be at most {MOST:,}, got {given.length:,}")
    mask = vocab - 1 if given.mask is None else given.mask
    if not 0 <= mask < vocab and (mask != NO_MASK or what == "denoiser"):
        raise ValueError(f"--mask must be one of the {vocab} tokens of --vocab, 0 to {vocab - 1}, got {mask}")
    return vocab, given.length, mask
