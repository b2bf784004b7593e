"""Texts that a Llama writes for prompts of equal length, thousands at a time.

All prompts of a batch have equally many tokens (`supply`): no row is padded, and one position serves all. A step is a
CUDA graph on a GPU, captured once for each bound on the length that attention reads. Tokens are drawn from the most
likely ones that together have probability `top_p`, among the `MOST` most likely: a sort of the whole vocabulary would
take longer than the network. A run of `RUN` tokens is never written twice in a text, because small models fall into
loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensteer.tasks.common.training import say
from tokensteer.tasks.text.corpus.llama import Llama

MOST = 128
STRIDE = 64  # attention reads up to the next multiple of it
RUN = 5
ROWS = 1024  # prompts that are read at a time, before the writing


@dataclass(frozen=True)
class Batch:
    """Prompts of one length, (P, T), and a temperature for each, (P,)."""

    prompts: Tensor
    temperature: Tensor


def draw(logits: Tensor, temperature: Tensor, top_p: float, most: int = MOST) -> Tensor:
    """Tokens (P,) from logits (P, V) at temperatures (P,)."""
    scaled = logits.float() / temperature.unsqueeze(-1)
    top, ids = scaled.topk(min(most, scaled.shape[-1]))
    p = (top - scaled.logsumexp(-1, keepdim=True)).exp()
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    race = p / torch.empty_like(p).exponential_().clamp(min=1e-10)  # the largest is a draw from p
    return ids.gather(-1, race.argmax(-1, keepdim=True)).squeeze(-1)


def repeating(written: Tensor, at: Tensor, run: int = RUN) -> tuple[Tensor, Tensor]:
    """Tokens that would write a run a second time after position `at` (1,): candidates (P, C), and which of them are
    meant. Tokens written (P, T) are -1 where nothing is written yet."""
    places = (at + torch.arange(2 - run, 1, device=written.device)).clamp(min=0)
    last = written.index_select(1, places).unsqueeze(1)
    runs = written.unfold(1, run, 1)
    candidates = runs[..., -1]
    return candidates, ((runs[..., :-1] == last) & (last >= 0)).all(-1) & (candidates >= 0)


class Writer:
    """Writes `length` tokens after each prompt of a batch. The cache and graphs are made for `rows` and `longest`
    tokens in all, and used again by later batches. Draws are torch's own: seed them by torch.manual_seed."""

    def __init__(self, net: Llama, rows: int, longest: int, top_p: float = 0.9) -> None:
        self.net, self.top_p = net, top_p
        self.longest = -(-longest // STRIDE) * STRIDE
        if self.longest > net.config.longest:
            raise ValueError(
                f"texts of {longest} tokens do not fit into the model's {net.config.longest}: shorten them"
            )
        device = net.token_embd.weight.device
        self._cache = net.cache(rows, self.longest)
        self._ids = torch.zeros(rows, dtype=torch.long, device=device)
        self._written = torch.zeros(rows, self.longest, dtype=torch.long, device=device)
        self._at = torch.zeros(1, dtype=torch.long, device=device)
        self._temperature = torch.ones(rows, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._captures = device.type == "cuda"

    @torch.no_grad()
    def write(self, batch: Batch, length: int) -> Tensor:
        """Tokens (P, length) of the texts."""
        rows, start = batch.prompts.shape
        if rows > len(self._ids) or start + length > self.longest:
            raise ValueError(
                f"{rows} prompts and {start + length} tokens: the writer was made for {self._written.shape}"
            )
        device = self._ids.device
        self._temperature[:rows] = batch.temperature.to(device)
        for first in range(0, rows, ROWS):
            some = batch.prompts[first : first + ROWS].to(device)
            last = self.net(some, self._cache, first)[:, -1]
            drawn = draw(self.net.logits(last), self._temperature[first : first + len(some)], self.top_p)
            self._ids[first : first + len(some)] = drawn
        self._at.fill_(start)
        self._written.fill_(-1)
        self._written[:, start] = self._ids
        for position in range(start, start + length - 1):
            self._advance(min(self.longest, (position // STRIDE + 1) * STRIDE))
        return self._written[:rows, start : start + length].clone()

    def _advance(self, bound: int) -> None:
        if self._captures and bound not in self._graphs:
            self._capture(bound)
        if bound in self._graphs:
            self._graphs[bound].replay()
        else:
            self._step(bound)

    def _step(self, bound: int) -> None:
        """Read the last token, draw the next, and move on by one."""
        hidden = self.net.next(self._ids, self._cache, self._at, bound)
        candidates, meant = repeating(self._written, self._at)
        logits = self.net.logits(hidden).float().scatter_add_(1, candidates.clamp(min=0), meant * -1e4)
        self._ids.copy_(draw(logits, self._temperature, self.top_p))
        self._at += 1
        self._written.index_copy_(1, self._at, self._ids.unsqueeze(1))

    def _capture(self, bound: int) -> None:
        kept = [part.clone() for part in (self._ids, self._at)]
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # the first calls may allocate, which a capture must not
                self._step(bound)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(bound)
            self._graphs[bound] = graph
        except RuntimeError as error:
            say(f"no CUDA graph ({str(error).splitlines()[0]}), so that each step is launched kernel by kernel")
            self._captures = False
        for part, value in zip((self._ids, self._at), kept, strict=True):
            part.copy_(value)
        self._written.index_fill_(1, self._at + 1, -1)
