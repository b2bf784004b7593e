"""Networks that share weights: the weights of a large one are in memory once, whatever the number of its variants.

A variant is a module tree of its own, so that switches, hooks and modes of one do not affect another; some of its
parameters are those of the original. Frozen parameters are never copied and never written to a checkpoint.
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
    """A copy of `net` that shares the parameters `shared` with it."""
    return deepcopy(net, {id(parameter): parameter for parameter in shared})


def frozen(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in net.parameters() if not parameter.requires_grad]


def state(net: nn.Module) -> dict[str, Tensor]:
    """The state of a network, tied tensors under the first of their names."""
    held: dict[int, tuple[str, Tensor]] = {}
    for name, value in net.state_dict(keep_vars=True).items():
        held.setdefault(id(value), (name, value))
    return dict(held.values())


def changing(net: nn.Module) -> dict[str, Tensor]:
    """The state of a network without frozen parameters."""
    return {n: v.detach() for n, v in state(net).items() if not isinstance(v, nn.Parameter) or v.requires_grad}


@torch.no_grad()
def restore(to: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the tensors `to`. Raises ValueError if their names or shapes differ."""
    if {n: v.shape for n, v in state.items()} != {n: v.shape for n, v in to.items()}:
        raise ValueError("it holds tensors of other names or shapes")
    for name, value in to.items():
        value.copy_(state[name])


def fingerprint(values: Iterable[Tensor]) -> str:
    """A hash of up to 64 numbers of each tensor in bfloat16: the same on every device and in half precision."""
    digest = hashlib.sha256()
    for value in values:
        flat = value.detach().flatten()
        few = torch.linspace(0, max(0, len(flat) - 1), min(64, len(flat)), device=flat.device).long()
        numbers = cast("Any", flat[few].to(torch.bfloat16)).tolist()
        digest.update(repr((tuple(value.shape), numbers)).encode())
    return digest.hexdigest()[:16]
