"""Networks that answer with one number: how much a noisy sequence is worth. For learned twists and baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tokensteer.core.numerics.domains import check_wholes
from tokensteer.tasks.nets.dilated import Dilated, DilatedConfig
from tokensteer.tasks.nets.transformer import Transformer, TransformerConfig
from tokensteer.tasks.nets.unet import UNet, UNetConfig

Body = TransformerConfig | UNetConfig | DilatedConfig
_BODIES: dict[str, type[Body]] = {"transformer": TransformerConfig, "unet": UNetConfig, "dilated": DilatedConfig}


@dataclass(frozen=True)
class ValueConfig:
    """The body of a denoiser, "transformer", "unet" or "dilated" with its own configuration, and a readout of its mean
    site. `beside` says that it is no value by itself, but what goes beside an estimate of it."""

    kind: str
    body: dict[str, Any]
    width: int = 128
    beside: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _BODIES:
            raise ValueError(f"ValueConfig.kind must be one of {', '.join(_BODIES)}, got {self.kind!r}")
        check_wholes("ValueConfig", 1, width=self.width)

    @property
    def of_body(self) -> Body:
        return _BODIES[self.kind](**self.body)


class ValueNet(nn.Module):
    """A value (P,) of ids (P, L) or one-hots (P, L, V); zero before it is trained."""

    def __init__(self, config: ValueConfig) -> None:
        super().__init__()
        self.config = config
        match config.of_body:
            case TransformerConfig() as body:
                self.body = Transformer(body)
            case UNetConfig() as body:
                self.body = UNet(body)
            case DilatedConfig() as body:
                self.body = Dilated(body)
        hidden = self.body.head.in_features
        self.body.add_module("head", nn.Identity())  # no tokens are wanted
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
