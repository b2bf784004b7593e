"""What the sites behind each boundary contribute to acceptance, kept from a pass backwards over sites."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tokensteer.rewards.constraints.masses import place_in, rows_of, safe_log


@dataclass(frozen=True, eq=False)
class Messages:
    """b (R, P), the lines of a trellis, and log P(accept) (P,). Faint rows have log b too, (R, n), at their `place`
    (P,), which is -1 for all others."""

    b: Tensor
    log_v: Tensor
    place: Tensor | None = None
    in_logs: Tensor | None = None

    def take(self, rows: Tensor) -> Messages:
        """The messages of a selection of rows."""
        b, log_v = self.b.index_select(1, rows), self.log_v[rows]
        if self.place is None or self.in_logs is None:
            return Messages(b, log_v)
        place = self.place[rows]
        used = place[place >= 0]
        if not len(used):
            return Messages(b, log_v)
        return Messages(b, log_v, place_in(rows_of(place >= 0), len(rows)), self.in_logs[:, used])

    def join(self, other: Messages) -> Messages:
        """These rows followed by the others."""
        b, log_v = torch.cat([self.b, other.b], -1), torch.cat([self.log_v, other.log_v])
        if self.place is None and other.place is None:
            return Messages(b, log_v)
        ours, theirs = (torch.full_like(m.log_v, -1).long() if m.place is None else m.place for m in (self, other))
        logs = [m.in_logs for m in (self, other) if m.in_logs is not None]
        theirs = torch.where(theirs < 0, -1, theirs + (0 if self.in_logs is None else self.in_logs.shape[-1]))
        return Messages(b, log_v, torch.cat([ours, theirs]), torch.cat(logs, -1))

    def weigh(self, lines: Tensor, mass: Tensor) -> Tensor:
        """mass · b[lines], (P, D), up to a factor for each row."""
        weight = mass * self._by_row.gather(1, lines)
        if self.in_logs is None or self.place is None:
            return weight
        faint = self.place >= 0
        log_w = safe_log(mass[faint]) + self.in_logs[lines[faint], self.place[faint].unsqueeze(-1)]
        weight[faint] = (log_w - log_w.amax(-1, keepdim=True)).exp()
        return weight

    @cached_property
    def _by_row(self) -> Tensor:
        return self.b.T.contiguous()
