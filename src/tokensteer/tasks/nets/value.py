"""Networks that return one number for a noisy sequence, for learned twists and baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tokensteer.tasks.nets.dilated import Dilated, DilatedConfig
from tokensteer.tasks.nets.parts import check_config
from tokensteer.tasks.nets.transformer import Transformer, TransformerConfig
from tokensteer.tasks.nets.unet import UNet, UNetConfig

Body = TransformerConfig | UNetConfig | DilatedConfig
_BODIES: dict[str, tuple[type[Body], Callable[[Any], Transformer | UNet | Dilated]]] = {
    "transformer": (TransformerConfig, Transformer),
    "unet": (UNetConfig, UNet),
    "dilated": (DilatedConfig, Dilated),
}


@dataclass(frozen=True)
class ValueConfig:
    """The body of a denoiser, "transformer", "unet" or "dilated" with its own configuration, and a readout of its mean
    over sites. With `beside` the value is added to an estimate, and is none by itself."""

    kind: str
    body: dict[str, Any]
    width: int = 128
    beside: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _BODIES:
            raise ValueError(f"ValueConfig.kind must be one of {', '.join(_BODIES)}, got {self.kind!r}")
        check_config(self)

    @property
    def of_body(self) -> Body:
        return _BODIES[self.kind][0](**self.body)


class ValueNet(nn.Module):
    """A value (P,) of ids (P, L) or one-hots (P, L, V); zero before training."""

    def __init__(self, config: ValueConfig) -> None:
        super().__init__()
        self.config = config
        self.body = _BODIES[config.kind][1](config.of_body)
        hidden = self.body.head.in_features
        self.body.add_module("head", nn.Identity())  # logits are not needed
        self.norm = nn.LayerNorm(hidden)
        self.first, self.last = nn.Linear(hidden, config.width), nn.Linear(config.width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    @property
    def ignores_time(self) -> bool:
        return not self.config.of_body.timed

    def forward(self, x: Tensor, t: float | Tensor | None = None) -> Tensor:
        pooled = self.norm(self.body.hidden(x, t).mean(1))
        return self.last(nn.functional.silu(self.first(pooled))).squeeze(-1)
