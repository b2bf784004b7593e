"""Tokens drawn from categorical distributions over a large vocabulary, in one pass over the logits.

A draw inverts the CDF in two levels. One pass computes the highest logit of each block of the vocabulary and the sum of
exp(logit - highest). The block of a draw is found on those sums, and only that block is read again to find the token.
No softmax or cumulative sum over the vocabulary is stored; from hidden states and a head's weight, not even the logits:
the first pass is a matrix product that keeps only the sums.

The log-probability of a token is its logit minus the log-normaliser of the sums it was drawn from. Plain torch is the
reference; on a GPU the same steps are Triton kernels (`triton_kernels`), without host synchronisation. No gradients
flow. A distribution of NaNs, or without mass, gives token 0 (1 where 0 is forbidden) and NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tokensteer.core.categorical.triton_kernels import kernels, programs
from tokensteer.core.numerics.draws import NEVER

BUDGET = 2**28  # bytes of temporaries in plain torch
BLOCK, TILE = 512, 4  # tokens in a block of logits, blocks that one program (a single warp) sums
HEAD_BLOCK, HEAD_ROWS, FIND_ROWS = 128, 128, 32  # tokens in a block of a head, rows beside it when summing and finding
HALF = (torch.bfloat16, torch.float16)  # tensor cores multiply these without rounding


class FusedTilt(NamedTuple):
    """A tilt by factors of low rank: scale · (drawn · rewarded[token] + entered · embedded[token] - here), clipped to
    ± clip, is added to the logits of k distributions. `rows` (k,) are lines of drawn (K, D) and entered (K, E);
    rewarded is (V, D), embedded (V, E); scale and here are (k,)."""

    drawn: Tensor
    rewarded: Tensor
    entered: Tensor
    embedded: Tensor
    rows: Tensor
    scale: Tensor
    here: Tensor
    clip: float


def fuses(*factors: Tensor) -> bool:
    """Whether the Triton kernels can multiply these factors."""
    return all(factor.is_cuda and factor.dtype in HALF for factor in factors) and kernels() is not None


@dataclass(frozen=True)
class LogitRows:
    """k distributions softmax(logits): the lines `rows` (k,) in [-1, K), -1 for none, of logits x (K, V), or with a
    `weight` (V, H) of x (K, H) @ weight^T + bias (V,), never stored whole. The token `forbidden` has no mass."""

    x: Tensor
    rows: Tensor
    forbidden: int | None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """M tokens from each distribution and their log-probabilities, both (k, M); 0 where rows is -1. u (k, M) are
        float64 uniforms in (0, 1]: the token is the smallest j with cdf_j >= u."""
        return _answer(self, u)

    def log_prob(self, tokens: Tensor) -> Tensor:
        """The log-probability of one token of each, (k,); 0 where rows is -1."""
        return _answer(self, tokens.unsqueeze(-1))[1].squeeze(-1)

    @property
    def vocab_size(self) -> int:
        return self.x.shape[-1] if self.weight is None else len(self.weight)

    @property
    def mask(self) -> int:
        return -1 if self.forbidden is None else self.forbidden

    def check(self, lines: int) -> None:
        x, weight, rows, V = self.x, self.weight, self.rows, self.vocab_size
        if weight is None and (x.ndim != 2 or (V > 1 and x.stride(1) != 1)):
            raise ValueError(
                f"logits must be (K, V) with the words of a row side by side in memory, got shape {tuple(x.shape)} and "
                f"strides {x.stride()}: reshape them, or call .contiguous()"
            )
        if weight is not None and (x.ndim != 2 or x.shape[1:] != weight.shape[1:] or x.dtype != weight.dtype):
            raise ValueError(
                f"states (K, H) and weight (V, H) must share H and dtype, got {tuple(x.shape)} of {x.dtype} and "
                f"{tuple(weight.shape)} of {weight.dtype}"
            )
        if rows.ndim != 1 or len(rows) != lines or (lines and not len(x)):
            shape = tuple(rows.shape)
            raise ValueError(
                f"rows (k,) must choose one of {len(x)} distributions for each of {lines} lines, got {shape}"
            )
        if V < 1 or (self.forbidden is not None and not (0 <= self.forbidden < V and V > 1)):
            raise ValueError(f"forbidden must be one of the {V} words and leave another, or None; got {self.forbidden}")

    def logits_at(self, tokens: Tensor) -> Tensor:
        """The logits of tokens (k, M), (k, M)."""
        x, weight, rows = self.x, self.weight, self.rows.clamp(min=0)
        if weight is None:
            return x[rows.unsqueeze(-1), tokens]
        step = max(1, BUDGET // (16 * tokens.shape[1] * x.shape[1]))
        logits = x.new_empty(tokens.shape, dtype=torch.float32)
        for part in (slice(start, start + step) for start in range(0, len(tokens), step)):
            logits[part] = (x[rows[part]].float().unsqueeze(1) * weight[tokens[part]].float()).sum(-1)
        return logits if self.bias is None else logits + self.bias[tokens].float()


@torch.no_grad()
def _answer(source: LogitRows, ask: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities; `ask` (k, M) are uniforms to invert the CDF at, or the tokens themselves."""
    x, weight, rows, V = source.x, source.weight, source.rows, source.vocab_size
    source.check(len(ask))
    if not ask.numel():
        return ask.long(), ask.to(_exact(x.dtype))
    on_gpu = x.is_cuda and x.dtype != torch.float64 and kernels() is not None
    if on_gpu and (weight is None or x.dtype != torch.float32):  # tensor cores would round float32
        with torch.cuda.device(x.device):
            return _fused(source, ask)
    step = max(1, BUDGET // (32 * V + 128 * ask.shape[1] * math.isqrt(V)))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(rows), step):
        own, some = rows[start : start + step], ask[start : start + step]
        lines = x[own.clamp(min=0)]
        logits = lines if weight is None else head_logits(lines, weight, source.bias)
        if on_gpu:
            own = torch.where(own < 0, -1, torch.arange(len(own), device=own.device))
            parts.append(_answer(LogitRows(logits, own, source.forbidden), some))
        else:
            parts.append(_plain(logits, own, some, source.mask))
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_p for _, log_p in parts])


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _score(x: Tensor, log_norm: Tensor, rows: Tensor, tokens: Tensor, mask: int) -> Tensor:
    """log p of tokens (k, M) with logits x (k, M) and log-normalisers (k,)."""
    log_p = x.double().masked_fill(tokens == mask, NEVER) - log_norm.unsqueeze(-1)
    return log_p.masked_fill(rows.unsqueeze(-1) < 0, 0.0).to(_exact(x.dtype))


def _plain(logits: Tensor, rows: Tensor, ask: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """`_answer` in plain torch, from the logits (k, V) of each line, which are overwritten; rows is -1 for none."""
    k, V = logits.shape
    size = math.isqrt(V - 1) + 1  # of a block
    if mask >= 0:
        logits[:, mask] = NEVER
    x = pad(logits.to(_exact(logits.dtype)), (0, -V % size), value=NEVER)
    top = x.amax(-1, keepdim=True)
    top = torch.where(top == NEVER, 0.0, top)
    weights = x.sub_(top).exp_().view(k, -1, size)
    sums = weights.sum(-1, dtype=torch.float64).unsqueeze(1)  # (k, 1, blocks)
    total = sums.sum(-1)
    tokens = ask
    if ask.is_floating_point():
        block = _invert(sums, ask * total)
        before = torch.arange(sums.shape[-1], device=x.device) < block.unsqueeze(-1)
        rest = ask * total - torch.where(before, sums, 0.0).sum(-1)
        inside = weights.gather(1, block.unsqueeze(-1).expand(-1, -1, size)).double()  # (k, M, size)
        tokens = torch.where(total > 0, block * size + _invert(inside, rest), int(mask == 0))
        tokens = tokens.masked_fill(rows.unsqueeze(-1) < 0, 0)
    log_norm = total.log().squeeze(-1) + top.squeeze(-1)
    return tokens, _score(logits.gather(1, tokens.clamp(min=0)), log_norm, rows, tokens, mask)


def _invert(weights: Tensor, target: Tensor) -> Tensor:
    """The first cell with mass where the cumulative sums of (..., n) weights reach target (...). If rounding puts the
    target out of reach, it is the last cell with mass."""
    cells = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, cells, 0).amax(-1, keepdim=True)
    reached = (weights > 0) & (weights.cumsum(-1) >= target.unsqueeze(-1))
    return torch.where(reached, cells, last).min(-1).values  # amin of integers is slower on a CPU


def head_logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """states (k, H) @ weight (V, H)^T + bias in float32 or wider, without a converted copy of the whole weight."""
    if torch.is_autocast_enabled(states.device.type):  # autocast would round the factors
        with torch.autocast(states.device.type, enabled=False):
            return head_logits(states, weight, bias)
    exact = _exact(states.dtype)
    if states.dtype == exact:
        return linear(states, weight, bias)
    if states.is_cuda and states.dtype in HALF and torch.__version__ >= "2.8":
        logits = torch.mm(states, weight.T, out_dtype=exact)  # tensor cores add in float32 anyway
        return logits if bias is None else logits.add_(bias)
    logits = states.new_empty(len(states), len(weight), dtype=exact)
    step = max(1, BUDGET // (16 * weight.shape[1]))
    for start in range(0, len(weight), step):
        logits[:, start : start + step] = states.to(exact) @ weight[start : start + step].to(exact).T
    return logits if bias is None else logits.add_(bias.to(exact))


def _fused(source: LogitRows, ask: Tensor) -> tuple[Tensor, Tensor]:
    x, mask, rows, V = source.x, source.mask, source.rows.contiguous(), source.vocab_size
    (k, M), align = ask.shape, 16 // x.itemsize
    u = ask.contiguous() if ask.is_floating_point() else ask.new_empty(k, 0, dtype=torch.float64)
    tiles = None if source.weight is None else _Tiles.make(source, None)
    # Blocks of logits begin where memory is aligned, up to align - 1 tokens before their row, so that loads are wide.
    count = -(-(V + align - 1) // (BLOCK * TILE))
    if tiles is not None:
        sums = tiles.sum(1)[0]
    else:
        tops, totals = torch.empty(2, k, count * TILE, dtype=torch.float32, device=x.device)
        sums, sizes = (tops, totals), (V, x.stride(0), mask, count, align, TILE, BLOCK)
        programs().logit_sums[(k * count,)](x, rows, *sums, *sizes, num_warps=1)
    chosen = _choose(sums, rows, u, mask)
    if not ask.is_floating_point():
        return ask, _score(source.logits_at(ask), chosen[3], rows, ask, mask)
    if tiles is not None:
        return tiles.find(chosen, u)
    sizes = (M, V, x.stride(0), mask, count * TILE, align, BLOCK)
    programs().find_in_logits[(k * M,)](x, *chosen, *sizes, num_warps=1)
    return chosen[4], chosen[5]


def _choose(sums: tuple[Tensor, Tensor], rows: Tensor, u: Tensor, mask: int, lined: bool = False) -> tuple[Tensor, ...]:
    """rows, the block of each draw, its place in the block, the log-normalisers (k,), and uninitialised tokens and
    log-probabilities. There is a line of sums for each draw; if `lined`, rows are the lines of the draws."""
    k, blocks = len(rows), sums[0].shape[1]
    short = torch.int16 if blocks < 2**15 else torch.int32  # short keys sort faster
    block = torch.empty(u.shape, dtype=short, device=u.device)  # of each draw; `blocks` is none
    within = torch.empty_like(u)  # how far into its block, in (0, 1]
    log_norm = torch.empty(k, dtype=torch.float64, device=u.device)
    tokens = torch.empty_like(u, dtype=torch.int64)
    log_p = torch.empty_like(u, dtype=torch.float32)
    chosen = (rows, block, within, log_norm, tokens, log_p)
    padded = 1 << (blocks - 1).bit_length()
    if k:
        sizes, warps = (u.shape[1], blocks, int(mask == 0), int(lined), padded), max(1, min(8, padded // 512))
        programs().choose[(k,)](*sums, u, *chosen, *sizes, num_warps=warps)
    return chosen


@dataclass(frozen=True)
class _Tiles:
    """The arguments that the tiled kernels share: tensors and strides, constants, and the k distributions."""

    arguments: tuple[Tensor | int | float, ...]
    constants: tuple[int, ...]
    rows: Tensor
    vocab_size: int
    mask: int

    @classmethod
    def make(cls, source: LogitRows, tilt: FusedTilt | None) -> _Tiles:
        """Absent tensors are replaced by others, which are not read."""
        weight, bias, rows = source.weight, source.bias, source.rows.contiguous()
        x = source.x if weight is None else source.x.contiguous()
        law = (x, x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous(), x.stride(0))
        tilting, sizes = (x, x, x, x, rows, rows, rows, 0.0), (16, 16)
        if tilt is not None:
            *tensors, clip = tilt
            tilting = (*(tensor.contiguous() for tensor in tensors), clip)
            sizes = (tilt.drawn.shape[1], tilt.entered.shape[1])
        shape = (16 if weight is None else x.shape[1], weight is not None, bias is not None, tilt is not None)
        constants = (*map(int, shape), *sizes, 64, HEAD_BLOCK)  # depths are read in pieces of 64
        return cls((*law, *tilting), constants, rows, source.vocab_size, source.mask)

    @property
    def blocks(self) -> int:
        return -(-self.vocab_size // HEAD_BLOCK)

    def sum(self, kinds: int) -> list[tuple[Tensor, Tensor]]:
        """The highest logit and the sum of exp(logit - highest) of each block, (k, blocks): without the tilt and, if
        `kinds` is 2, with it."""
        k, blocks = len(self.rows), self.blocks
        sums = torch.empty(kinds, 2, k, blocks, dtype=torch.float32, device=self.rows.device)
        found = [(kind[0], kind[1]) for kind in sums]
        order = (self.rows < 0).view(torch.uint8).argsort()  # rows of -1 come last, where whole programs skip them
        programs().tile_sums[(-(-k // HEAD_ROWS) * blocks,)](
            *self.arguments, order, self.rows, *found[0], *found[-1], k, self.vocab_size, self.mask, blocks,
            *self.constants, HEAD_ROWS, 64, num_warps=4 * kinds, num_stages=3,
        )  # fmt: skip
        return found

    def find(self, chosen: tuple[Tensor, ...], u: Tensor, lined: bool = False) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of the draws that `_choose` found the blocks of."""
        count, order = u.numel(), chosen[1].view(-1).argsort()  # draws from one block read its weights together
        if count:
            programs().find_in_tiles[(-(-count // FIND_ROWS),)](
                *self.arguments, order, self.rows, *chosen, count, u.shape[1], self.vocab_size, self.mask, self.blocks,
                *self.constants, FIND_ROWS, int(lined), num_warps=4, num_stages=3,
            )  # fmt: skip
        return chosen[4], chosen[5]


@dataclass(frozen=True)
class TileSums:
    """Sums of tilted distributions on a GPU by blocks of the vocabulary, from which draws are quick.

    `gain` (k,) is the log-normaliser with the tilt minus the one without, 0 where rows is -1.
    """

    gain: Tensor
    sums: tuple[Tensor, Tensor]
    tiles: _Tiles

    def draw(self, lines: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (n, M) from the distributions `lines` (n,), -1 for none (token 0, log_p 0)."""
        with torch.cuda.device(u.device):
            lines, u = lines.contiguous(), u.contiguous()
            return self.tiles.find(_choose(self.sums, lines, u, self.tiles.mask, lined=True), u, lined=True)


@torch.no_grad()
def sum_tiles(source: LogitRows, tilt: FusedTilt) -> TileSums:
    """The sums of k tilted distributions; on a GPU, in half precision."""
    assert source.x.dtype in HALF, "callers check that the kernels can run"
    source.check(len(source.rows))
    no_draws = torch.empty(len(source.rows), 0, dtype=torch.float64, device=source.x.device)
    with torch.cuda.device(source.x.device):
        tiles = _Tiles.make(source, tilt)
        plain, tilted = tiles.sum(2)
        before, after = (_choose(sums, tiles.rows, no_draws, tiles.mask)[3] for sums in (plain, tilted))
        return TileSums(after - before, tilted, tiles)
