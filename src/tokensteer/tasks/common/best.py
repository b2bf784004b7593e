"""The averaged weights of the best check of a training, so that a later stretch can make a network no worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tokensteer.train.frozen import changing, restore

_PREFIX = "best/"


@dataclass
class Best:
    """The lowest value of a check, None before the first, and the weights it was measured with. Matrices are kept in
    bfloat16, as files of weights are, so that a checkpoint grows by two bytes per weight."""

    value: float | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def see(self, value: float, net: nn.Module) -> None:
        """Keep the weights of `net` if the value is the lowest so far."""
        if self.value is None or value < self.value:
            self.value = value
            self.tensors = {
                name: (tensor.to(torch.bfloat16) if tensor.dim() > 1 else tensor).clone()
                for name, tensor in changing(net).items()
            }

    def put_into(self, net: nn.Module) -> None:
        """Give `net` the weights of the best check, if there was one."""
        if self.tensors:
            restore(changing(net), self.tensors)

    def stored(self) -> dict[str, Tensor]:
        """The weights by their names in a checkpoint."""
        return {_PREFIX + name: tensor for name, tensor in self.tensors.items()}

    @classmethod
    def of(cls, value: float | None, stored: Mapping[str, Tensor]) -> Best:
        """What `stored` returned, among other tensors of a checkpoint."""
        return cls(value, {n.removeprefix(_PREFIX): t for n, t in stored.items() if n.startswith(_PREFIX)})
