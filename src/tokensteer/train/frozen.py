"""Networks that share weights: large ones are in memory once, however many variants of them there are.

A variant is a module tree of its own, so that no switch, hook or mode of one is felt by another, whose parameters are
in part the very ones of the original. What does not learn is never copied and never written to a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

Net = TypeVar("Net", bound=nn.Module)


def copy_sharing(net: Net, shared: Iterable[nn.Parameter]) -> Net:
    """A copy of `net` that has the parameters `shared` in common with it."""
    return deepcopy(net, {id(parameter): parameter for parameter in shared})


def frozen(net: nn.Module) -> list[nn.Parameter]:
    """The parameters that do not learn."""
    return [parameter for parameter in net.parameters() if not parameter.requires_grad]


def changing(net: nn.Module) -> dict[str, Tensor]:
    """The state of a network without what is frozen, each tensor under the first of its names."""
    held: dict[int, tuple[str, Tensor]] = {}
    for name, value in net.state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter) or value.requires_grad:
            held.setdefault(id(value), (name, value))
    return {name: value.detach() for name, value in held.values()}


def restore(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `changing` gave, or raise ValueError if it is of another network."""
    expected = changing(net)
    if {n: v.shape for n, v in state.items()} != {n: v.shape for n, v in expected.items()}:
        raise ValueError("tensors of other names or shapes")
    with torch.no_grad():
        for name, value in expected.items():
            value.copy_(state[name])


def fingerprint(values: Iterable[Tensor]) -> str:
    """By what weights are known again, on any device and in half precision too: a digest of some of their numbers."""
    digest = hashlib.sha256()
    for value in values:
        flat = value.detach().flatten()
        few = torch.linspace(0, max(0, len(flat) - 1), min(64, len(flat)), device=flat.device).long()
        numbers = cast("Any", flat[few].to(torch.bfloat16)).tolist()
        digest.update(repr((tuple(value.shape), numbers)).encode())
    return digest.hexdigest()[:16]
