"""A proposal that is a new head on the model's own hidden states: p and q out of one pass of the trunk."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from tokensteer.core.models.denoiser import FromHidden, Time, from_hidden
from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.proposals.amortised import OtherHead


class NewHead(nn.Module):
    """logits = head(h + up(silu(down(norm(h))))) for the hidden state h of each site, with a copy of the head given;
    without `width` the states are taken as they are. It begins as the head that it was copied from.

    `on(p)` is what `fit_proposal` trains, `proposal()` what samples: the same law, but the trunk is passed once for
    both p and q. The trunk learns nothing.
    """

    def __init__(self, head: nn.Linear, width: int = 0) -> None:
        super().__init__()
        check_wholes("NewHead", 0, width=width)
        self.last = deepcopy(head)
        like = head.weight
        for value in self.last.parameters():
            value.requires_grad_(bool(value.isfinite().all()))  # of words never said, no average of -inf is a number
        self.change: nn.Module | None = None
        if width:
            hidden = head.in_features
            layers = (nn.LayerNorm(hidden), nn.Linear(hidden, width), nn.SiLU(), nn.Linear(width, hidden))
            nn.init.zeros_(layers[-1].weight)
            nn.init.zeros_(layers[-1].bias)
            self.change = nn.Sequential(*layers).to(like.device, like.dtype)

    def states(self, hidden: Tensor) -> Tensor:
        """What the last layer reads, from the trunk's states (..., H)."""
        return hidden if self.change is None else hidden + self.change(hidden)

    def on(self, p: FromHidden) -> FromHidden:
        """A denoiser of its own, behind the trunk of p."""

        def trunk(x: Tensor, t: Time = 0.0) -> Tensor:
            with torch.set_grad_enabled(
                torch.is_grad_enabled() and x.is_floating_point()
            ):  # its weights stay as they are
                hidden = p.trunk(x) if p.ignores_time else p.trunk(x, t)
            return self.states(hidden)

        return from_hidden(trunk, self.last, p.mask_id, ignores_time=p.ignores_time)

    def proposal(self) -> OtherHead:
        """A proposal that reads the states which p has kept."""
        return OtherHead(self.last, self.states)
