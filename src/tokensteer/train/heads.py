"""A proposal that is a new head on the model's hidden states: p and q from one pass of the trunk."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from tokensteer.core.models.denoiser import FromHidden, Time, from_hidden
from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.proposals.amortised import OtherHead


class Change(nn.Module):
    """h + up(silu(down(norm(h)))) of hidden states h (..., H), with `width` units between: h itself at first."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(hidden), nn.Linear(hidden, width), nn.Linear(width, hidden)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(silu(self.down(self.norm(hidden))))


class NewHead(nn.Module):
    """logits = head(change(h)) for the hidden state h of each site, with a `Change` of so many units; without `width`,
    head(h). `head` is a copy of the one given, and the logits are its logits at first. If it is `frozen`, only the
    change is learned: few numbers, which err little where there is little to learn from.

    `on(p)` is what `fit_proposal` trains, `proposal()` what samples: the same distribution, but the trunk is evaluated
    once for both p and q. The trunk is not trained.
    """

    def __init__(self, head: nn.Linear, width: int = 0, *, frozen: bool = False) -> None:
        super().__init__()
        check_wholes("NewHead", 0, width=width)
        if frozen and not width:
            raise ValueError("NewHead: a frozen head without a change learns nothing: give a width, such as 4")
        self.last = deepcopy(head)
        for value in self.last.parameters():
            learns = not frozen and bool(value.isfinite().all())  # a bias of -inf would be averaged to NaN
            value.requires_grad_(learns)
        self.change = Change(head.in_features, width).to(head.weight.device, head.weight.dtype) if width else None

    def states(self, hidden: Tensor) -> Tensor:
        """The input of the last layer, from the trunk's states (..., H)."""
        return hidden if self.change is None else self.change(hidden)

    def on(self, p: FromHidden) -> FromHidden:
        """A denoiser with the trunk of p and this head."""

        def trunk(x: Tensor, t: Time = 0.0) -> Tensor:
            # Only one-hots need a gradient: the weights of the trunk are not trained.
            with torch.set_grad_enabled(torch.is_grad_enabled() and x.is_floating_point()):
                hidden = p.trunk(x) if p.ignores_time else p.trunk(x, t)
            return self.states(hidden)

        return from_hidden(trunk, self.last, p.mask_id, ignores_time=p.ignores_time)

    def proposal(self) -> OtherHead:
        """A proposal that reads the hidden states stored for p."""
        return OtherHead(self.last, self.states)
