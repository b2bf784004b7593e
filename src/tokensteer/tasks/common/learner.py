"""A network with its optimiser and its averaged weights, and all of that as tensors for a checkpoint.

Tensors are exact (float32), or compact: five bytes per weight instead of sixteen. Compact, the average is bfloat16; the
weights are int8 differences from it, which are small; first moments are int8, and second moments are 8-bit logarithms,
because a second moment that is rounded to zero would make the next update huge. Vectors are exact in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokensteer.tasks.common.muon import Muon
from tokensteer.tasks.nets import int8
from tokensteer.train.frozen import changing, restore
from tokensteer.train.optim import Pace, RunningMean

_NET, _AVERAGE, _FIRST, _SECOND = "net.", "average.", "first.", "second."
_RANGE = ".log2_range"


class Learner:
    """Applies the gradients of `net` by AdamW; `average` is its exponential moving average. Weight decay is of the
    matrices of linear and convolutional layers alone. With `muon`, those of linear layers are moved by Muon, but for a
    head that shares its matrix with an embedding."""

    def __init__(
        self, net: nn.Module, plan: Pace, betas: tuple[float, float] = (0.9, 0.98), muon: bool = False
    ) -> None:
        self.net, self.clip, self.updates = net, plan.clip, 0
        self._mean = RunningMean(net, plan.average)
        self.average = self._mean.module.eval()
        matrices = {id(layer.weight) for layer in net.modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
        named = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self._muon = Muon(_hidden(net, named) if muon else {}, plan.weight_decay)
        named = {name: p for name, p in named.items() if name not in self._muon.momenta}
        decayed = [name for name, p in named.items() if id(p) in matrices]
        others = [name for name in named if name not in decayed]
        self._trained = {name: named[name] for name in decayed + others}  # in the order of the optimiser
        groups: list[dict[str, Any]] = [
            {"params": [named[name] for name in decayed], "weight_decay": plan.weight_decay},
            {"params": [named[name] for name in others], "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, plan.rate, betas=betas, fused=next(net.parameters()).is_cuda)

    def learn(self, rate: float) -> None:
        """Apply the accumulated gradients and clear them."""
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self._muon.step(rate)
        self._optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        self.forget()
        self._mean.update(self.net)
        self.updates += 1

    def forget(self) -> None:
        """Clear the gradients."""
        self.net.zero_grad()

    def tensors(self, compact: bool) -> dict[str, Tensor]:
        """All that changes in training but the number of `updates`."""
        net, average = changing(self.net), changing(self.average)
        moments: dict[int, dict[str, Tensor]] = self._optimiser.state_dict()["state"]
        names = list(self._trained)
        first = {names[index]: state["exp_avg"] for index, state in moments.items()} | self._muon.momenta
        second = {names[index]: state["exp_avg_sq"] for index, state in moments.items()}
        if compact:
            average = {name: value.bfloat16() if value.dim() > 1 else value for name, value in average.items()}
            net = {name: value - average[name].float() if value.dim() > 1 else value for name, value in net.items()}
            net, first, second = _whole(net), _whole(first), _logarithms(second)
        parts = ((_NET, net), (_AVERAGE, average), (_FIRST, first), (_SECOND, second))
        return {prefix + name: value for prefix, tensors in parts for name, value in tensors.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], compact: bool, updates: int) -> None:
        """Continue from `tensors`. Raises ValueError if they are of another network."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}

        net, average, first, second = (part(prefix) for prefix in (_NET, _AVERAGE, _FIRST, _SECOND))
        if compact:
            net, first, second = int8.dequantise(net), int8.dequantise(first), _exponentials(second)
            matrices = {name: average[name].float() for name, value in net.items() if value.dim() > 1}
            net |= {name: net[name] + value for name, value in matrices.items()}
        restore(changing(self.net), net)
        restore(changing(self.average), average)
        momenta = self._muon.momenta
        if updates and not (set(first) == {*self._trained, *momenta} and set(second) == set(self._trained)):
            raise ValueError("it holds moments of other names")
        for name, value in momenta.items():
            value.copy_(first.get(name, torch.zeros_like(value)))  # before the first update there are none
        state = {
            index: {
                "step": torch.tensor(float(updates)),
                "exp_avg": torch.empty_like(weight).copy_(first[name]),  # the fused AdamW needs the weight's layout
                "exp_avg_sq": torch.empty_like(weight).copy_(second[name]),
            }
            for index, (name, weight) in enumerate(self._trained.items())
            if updates
        }
        self._optimiser.load_state_dict({"state": state, "param_groups": self._optimiser.state_dict()["param_groups"]})
        self._mean.n_averaged.fill_(updates)
        self.updates = updates


def _hidden(net: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The matrices of linear layers, by name."""
    linear = {id(layer.weight) for layer in net.modules() if isinstance(layer, nn.Linear)}
    tables = {id(layer.weight) for layer in net.modules() if isinstance(layer, nn.Embedding)}
    return {name: p for name, p in named.items() if id(p) in linear - tables}


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with scales, vectors as they are."""
    matrices = {name: value for name, value in tensors.items() if value.dim() > 1}
    return {**tensors, **int8.quantise(matrices)}


def _logarithms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of numbers that are not negative as uint8: 0 for 0, and 1 to 255 for the logarithms in equal steps."""
    out = dict(tensors)
    for name, value in tensors.items():
        if value.dim() < 2:
            continue
        logs, positive = value.log2(), value > 0
        low = torch.where(positive, logs, torch.inf).amin().nan_to_num(0.0, 0.0, 0.0)
        high = torch.where(positive, logs, -torch.inf).amax().nan_to_num(0.0, 0.0, 0.0)
        code = 1 + ((logs - low) / (high - low).clamp(min=1e-6) * 254).round()
        out[name] = torch.where(positive, code, 0.0).to(torch.uint8)
        out[name + _RANGE] = torch.stack([low, high])
    return out


def _exponentials(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_logarithms`."""
    out = {name: value for name, value in tensors.items() if not name.endswith(_RANGE)}
    for name, value in out.items():
        if name + _RANGE in tensors:
            low, high = tensors[name + _RANGE]
            out[name] = torch.where(value > 0, torch.exp2(low + (value.float() - 1) / 254 * (high - low)), 0.0)
    return out
