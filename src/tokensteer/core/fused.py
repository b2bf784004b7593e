"""Tokens drawn from categorical laws over a large vocabulary, in one pass over the logits.

A draw inverts the CDF in two levels. The vocabulary is cut into blocks; one pass leaves of each block its highest logit
and the sum of exp(logit - highest). The block of a draw is found on those sums, and only that block is looked at again
to find the token in it. Neither a softmax nor a cumulative sum over the vocabulary is ever stored; from hidden states
and a head's weight, neither are the logits: the first pass is a matrix product that keeps the sums alone.

What comes with a token is its logit minus the log-normaliser of the very sums it was drawn from. Plain torch is the
reference; on a GPU the same steps are Triton kernels, which never make the host wait. No gradients flow.
A law of NaNs, or without mass, gives token 0 (1 where 0 is forbidden) and NaN.
"""

import math
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokensteer.core.draws import NEVER

BUDGET = 2**28  # bytes of temporaries in plain torch
BLOCK, TILE = 512, 4  # words in a block of logits, blocks that one program (a single warp) sums
HEAD_BLOCK, HEAD_ROWS, FIND_ROWS = 128, 128, 32  # words in a block of a head, rows beside it when summing and finding

constexpr = Any  # Triton looks for this word in its kernels' annotations


def draw_from_logits(logits: Tensor, rows: Tensor, u: Tensor, forbidden: int | None) -> tuple[Tensor, Tensor]:
    """M tokens from each of k laws, and their log-probabilities: both (k, M).

    logits is (K, V); rows (k,) in [-1, K) says whose law each line of u draws from, -1 for none (token 0, log_p 0);
    u (k, M) are float64 uniforms in (0, 1]: the token is the smallest j with cdf_j >= u. `forbidden` has no mass.
    """
    return _answer(logits, None, None, rows, u, forbidden)


def draw_from_head(
    states: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, u: Tensor, forbidden: int | None
) -> tuple[Tensor, Tensor]:
    """`draw_from_logits` for logits = states (K, H) @ weight (V, H)^T + bias (V,), never stored whole."""
    return _answer(states, weight, bias, rows, u, forbidden)


def log_prob_from_logits(logits: Tensor, rows: Tensor, tokens: Tensor, forbidden: int | None) -> Tensor:
    """log softmax(logits[rows])[tokens], (k,); 0 where rows is -1."""
    return _answer(logits, None, None, rows, tokens.unsqueeze(-1), forbidden)[1].squeeze(-1)


def log_prob_from_head(
    states: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, tokens: Tensor, forbidden: int | None
) -> Tensor:
    """`log_prob_from_logits` for logits = states (K, H) @ weight (V, H)^T + bias (V,), never stored whole."""
    return _answer(states, weight, bias, rows, tokens.unsqueeze(-1), forbidden)[1].squeeze(-1)


@torch.no_grad()
def _answer(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, ask: Tensor, forbidden: int | None
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities, where `ask` (k, M) are uniforms to invert the CDF at, or the tokens themselves.

    x are logits, or states where there is a weight.
    """
    V = x.shape[-1] if weight is None else len(weight)
    _check(x, weight, rows, ask, V, forbidden)
    mask = -1 if forbidden is None else forbidden
    if not ask.numel():
        return ask.long(), ask.to(_exact(x.dtype))
    kernels = _kernels() if x.is_cuda and x.dtype != torch.float64 else None
    plain = kernels is None or (weight is not None and x.dtype == torch.float32)  # tensor cores would round float32
    if kernels is not None and not plain:
        with torch.cuda.device(x.device):
            return _fused(kernels, x, weight, bias, rows, ask, V, mask)
    step = max(1, BUDGET // (32 * V + 128 * ask.shape[1] * math.isqrt(V)))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(rows), step):
        own, some = rows[start : start + step], ask[start : start + step]
        if weight is None:
            parts.append(_plain(x, own, some, mask))
        else:
            logits = _head_logits(x[own.clamp(min=0)], weight, bias)
            own = torch.where(own < 0, -1, torch.arange(len(own), device=own.device))
            parts.append(_answer(logits, None, None, own, some, forbidden))
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_p for _, log_p in parts])


def _check(x: Tensor, weight: Tensor | None, rows: Tensor, ask: Tensor, V: int, forbidden: int | None) -> None:
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
    if rows.ndim != 1 or len(rows) != len(ask) or (len(rows) and not len(x)):
        raise ValueError(
            f"rows (k,) must choose one of {len(x)} laws for each of {len(ask)} lines of draws, got {tuple(rows.shape)}"
        )
    if V < 1 or (forbidden is not None and not (0 <= forbidden < V and V > 1)):
        raise ValueError(f"forbidden must be one of the {V} words and leave another, or None; got {forbidden}")


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _score(x: Tensor, log_norm: Tensor, rows: Tensor, tokens: Tensor, mask: int) -> Tensor:
    """log p of tokens (k, M) with logits x (k, M), for laws with these log-normalisers (k,)."""
    log_p = x.double().masked_fill(tokens == mask, NEVER) - log_norm.unsqueeze(-1)
    return log_p.masked_fill(rows.unsqueeze(-1) < 0, 0.0).to(_exact(x.dtype))


def _plain(logits: Tensor, rows: Tensor, ask: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    (k,), V = rows.shape, logits.shape[1]
    size = math.isqrt(V - 1) + 1  # of a block
    laws = rows.clamp(min=0)
    x = logits.new_full((k, -(-V // size) * size), NEVER, dtype=_exact(logits.dtype))
    x[:, :V] = logits[laws]
    if mask >= 0:
        x[:, mask] = NEVER
    top = x.amax(-1, keepdim=True)
    top = torch.where(top == NEVER, 0.0, top)
    weights = x.sub_(top).exp_().view(k, -1, size)
    sums = weights.sum(-1, dtype=torch.float64).unsqueeze(1)  # (k, 1, blocks)
    total = sums.sum(-1)
    tokens = ask
    if ask.is_floating_point():
        block, rest = _invert(sums, ask * total)
        inside = weights.gather(1, block.unsqueeze(-1).expand(-1, -1, size)).double()  # (k, M, size)
        tokens = torch.where(total > 0, block * size + _invert(inside, rest)[0], int(mask == 0))
        tokens = tokens.masked_fill(rows.unsqueeze(-1) < 0, 0)
    log_norm = total.log().squeeze(-1) + top.squeeze(-1)
    return tokens, _score(logits[laws.unsqueeze(-1), tokens], log_norm, rows, tokens, mask)


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first cell with mass where the sums of (..., n) weights reach target (...), and what is left of it there.

    Rounding may put the target out of reach: then it is the last cell with mass.
    """
    cells = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, cells, 0).amax(-1, keepdim=True)
    reached = (weights > 0) & (weights.cumsum(-1) >= target.unsqueeze(-1))
    cell = torch.where(reached, cells, last).amin(-1)
    return cell, target - torch.where(cells < cell.unsqueeze(-1), weights, 0.0).sum(-1)


def _head_logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In single precision at least, without a copy of the whole weight."""
    exact = _exact(states.dtype)
    logits = states.new_empty(len(states), len(weight), dtype=exact)
    step = max(1, BUDGET // (16 * weight.shape[1]))
    for start in range(0, len(weight), step):
        logits[:, start : start + step] = states.to(exact) @ weight[start : start + step].to(exact).T
    return logits if bias is None else logits.add_(bias.to(exact))


def _fused(
    kernels: SimpleNamespace, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, ask: Tensor,
    V: int, mask: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (k, M), align, rows = ask.shape, 16 // x.itemsize, rows.contiguous()
    u = ask.contiguous() if ask.is_floating_point() else ask.new_empty(k, 0, dtype=torch.float64)
    # Blocks of logits begin where memory is aligned, up to align - 1 words ahead of their row, so that loads are wide.
    tiles = -(-(V + align - 1) // (BLOCK * TILE))
    blocks = tiles * TILE if weight is None else -(-V // HEAD_BLOCK)
    tops, sums = (x.new_empty(k, blocks, dtype=torch.float32) for _ in range(2))
    head, shape = (), ()
    if weight is None:
        kernels.logit_sums[(k * tiles,)](
            x, rows, tops, sums, V, x.stride(0), mask, tiles, align, TILE, BLOCK, num_warps=1
        )
    else:
        head = (x.contiguous(), weight.contiguous(), (weight if bias is None else bias).contiguous())
        shape = (x.shape[1], int(bias is not None), 64, HEAD_BLOCK)  # H is read in pieces of 64
        order = (rows < 0).byte().argsort()  # those to skip come last, where whole programs have nothing to do
        kernels.head_sums[(-(-k // HEAD_ROWS) * blocks,)](
            *head, order, rows, tops, sums, k, V, mask, blocks, *shape, HEAD_ROWS, 64, num_warps=4, num_stages=3
        )
    block = torch.full(u.shape, blocks, dtype=torch.int32, device=x.device)  # of each draw; `blocks` is none
    within = torch.empty_like(u)  # how far into its block, in (0, 1]
    log_norm = x.new_zeros(k, dtype=torch.float64)
    tokens = torch.zeros_like(u, dtype=torch.int64)
    log_p = torch.zeros_like(u, dtype=torch.float32)
    chosen = (rows, block, within, log_norm, tokens, log_p)
    padded = 1 << (blocks - 1).bit_length()
    kernels.choose[(k,)](
        tops, sums, u, *chosen, u.shape[1], blocks, int(mask == 0), padded, num_warps=max(1, min(8, padded // 512))
    )
    if not u.numel():
        if weight is None:
            logits = x[rows.clamp(min=0).unsqueeze(-1), ask]
        else:
            step = max(1, BUDGET // (16 * M * x.shape[1]))
            logits = x.new_empty(k, M, dtype=torch.float32)
            for part in (slice(start, start + step) for start in range(0, k, step)):
                logits[part] = (x[rows[part].clamp(min=0)].float().unsqueeze(1) * weight[ask[part]].float()).sum(-1)
            logits = logits if bias is None else logits + bias[ask].float()
        return ask, _score(logits, log_norm, rows, ask, mask)
    if weight is None:
        kernels.find_in_logits[(k * M,)](x, *chosen, M, V, x.stride(0), mask, blocks, align, BLOCK, num_warps=1)
    else:
        # Draws from one block read its weights together. Short keys sort faster; if they overflow, only speed is lost.
        order = block.view(-1).short().argsort()
        kernels.find_in_head[(-(-k * M // FIND_ROWS),)](
            *head, order, *chosen, k * M, M, V, mask, blocks, *shape, FIND_ROWS, num_warps=4, num_stages=3
        )
    return tokens, log_p


@cache
def _kernels() -> SimpleNamespace | None:
    """The Triton kernels, or None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")

    @triton.jit
    def logit_sums(
        logits: "Any", rows: "Any", tops: "Any", sums: "Any", V: "Any", stride: "Any", mask: "Any", tiles: "Any",
        ALIGN: "constexpr", TILE: "constexpr", BLOCK: "constexpr",
    ) -> None:  # fmt: skip
        i, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        row = tl.load(rows + i)
        if row < 0:
            return
        start = row * stride // ALIGN * ALIGN
        begin = tile * (TILE * BLOCK)
        cell = tl.arange(0, TILE)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        source = logits + start + begin + cell
        low = begin - (row * stride - start).to(tl.int32)  # the tile's first word
        if (low >= 0) & (low + TILE * BLOCK <= V) & ((mask < low) | (mask >= low + TILE * BLOCK)):
            x = tl.load(source).to(tl.float32)
        else:
            j = low + cell
            x = tl.load(source, mask=(j >= 0) & (j < V) & (j != mask), other=float("-inf")).to(tl.float32)
        top = tl.max(x, 1)
        shift = tl.where(top == float("-inf"), 0.0, top)
        target = i.to(tl.int64) * (tiles * TILE) + tile * TILE + tl.arange(0, TILE)
        tl.store(tops + target, top)
        tl.store(sums + target, tl.sum(tl.exp(x - shift[:, None]), 1))

    @triton.jit
    def choose(
        tops: "Any", sums: "Any", u: "Any", rows: "Any", block: "Any", within: "Any", log_norm: "Any", tokens: "Any",
        log_p: "Any", M: "Any", blocks: "Any", fallback: "Any", PADDED: "constexpr",
    ) -> None:  # fmt: skip
        i = tl.program_id(0).to(tl.int64)
        if tl.load(rows + i) < 0:
            return
        b = tl.arange(0, PADDED)
        top = tl.load(tops + i * blocks + b, mask=b < blocks, other=float("-inf")).to(tl.float64)
        mass = tl.load(sums + i * blocks + b, mask=b < blocks, other=0.0).to(tl.float64)
        highest = tl.max(top, 0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        mass *= tl.exp(top - shift)
        total = tl.sum(mass, 0)
        tl.store(log_norm + i, shift + tl.log(total))
        cdf = tl.cumsum(mass, 0)
        last = tl.max(tl.where(mass > 0, b, 0), 0)
        for m in range(M):
            draw = i * M + m
            target = tl.load(u + draw) * total
            first = tl.min(tl.where((mass > 0) & (cdf >= target), b, last), 0)
            before = tl.sum(tl.where(b < first, mass, 0.0), 0)
            tl.store(within + draw, (target - before) / tl.sum(tl.where(b == first, mass, 0.0), 0))
            tl.store(block + draw, first, mask=total > 0)
            tl.store(tokens + draw, fallback, mask=(total > 0) == 0)  # no mass, or NaN
            tl.store(log_p + draw, float("nan"), mask=(total > 0) == 0)

    @triton.jit
    def find_in_logits(
        logits: "Any", rows: "Any", block: "Any", within: "Any", log_norm: "Any", tokens: "Any", log_p: "Any",
        M: "Any", V: "Any", stride: "Any", mask: "Any", blocks: "Any", ALIGN: "constexpr", BLOCK: "constexpr",
    ) -> None:  # fmt: skip
        draw = tl.program_id(0).to(tl.int64)
        b = tl.load(block + draw)
        if b == blocks:
            return
        start = tl.load(rows + draw // M) * stride
        n = tl.arange(0, BLOCK)
        low = b * BLOCK - (start % ALIGN).to(tl.int32)
        j = low + n
        x = tl.load(logits + start + j, mask=(j >= 0) & (j < V) & (j != mask), other=float("-inf")).to(tl.float32)
        mass = tl.exp(x - tl.max(x, 0)).to(tl.float64)
        reached = tl.cumsum(mass, 0) >= tl.load(within + draw) * tl.sum(mass, 0)
        last = tl.max(tl.where(mass > 0, n, 0), 0)
        cell = tl.min(tl.where((mass > 0) & reached, n, last), 0)
        logit = tl.sum(tl.where(n == cell, x, 0.0), 0).to(tl.float64)
        tl.store(tokens + draw, low + cell)
        tl.store(log_p + draw, logit - tl.load(log_norm + draw // M))

    @triton.jit
    def head_logits(
        states: "Any", weight: "Any", bias: "Any", row: "Any", word: "Any", V: "Any", mask: "Any",
        H: "constexpr", BIASED: "constexpr", DEPTH: "constexpr", WORDS: "constexpr", ROWS: "constexpr",
    ) -> "Any":  # fmt: skip
        h = tl.arange(0, DEPTH)[None, :]
        safe = tl.minimum(word, V - 1).to(tl.int64)
        left, right = states + row[:, None] * H + h, weight + safe[:, None] * H + h
        x = tl.zeros((ROWS, WORDS), tl.float32)
        for start in range(0, H, DEPTH):
            if H % DEPTH == 0:
                x = tl.dot(tl.load(left + start), tl.load(right + start).T, x)
            else:
                inside = h + start < H
                x = tl.dot(tl.load(left + start, inside, 0.0), tl.load(right + start, inside, 0.0).T, x)
        if BIASED:
            x += tl.load(bias + safe).to(tl.float32)[None, :]
        return tl.where(((word < V) & (word != mask))[None, :], x, float("-inf"))

    @triton.jit
    def head_sums(
        states: "Any", weight: "Any", bias: "Any", order: "Any", rows: "Any", tops: "Any", sums: "Any", k: "Any",
        V: "Any", mask: "Any", blocks: "Any", H: "constexpr", BIASED: "constexpr", DEPTH: "constexpr",
        WORDS: "constexpr", ROWS: "constexpr", GROUP: "constexpr",
    ) -> None:  # fmt: skip
        # Row blocks run fastest, in groups whose states stay in cache: weights come from memory once a group.
        group, place = tl.program_id(0) // (GROUP * blocks), tl.program_id(0) % (GROUP * blocks)
        wide = tl.minimum(tl.cdiv(k, ROWS) - group * GROUP, GROUP)
        slot = (group * GROUP + place % wide) * ROWS + tl.arange(0, ROWS)
        b = place // wide
        i = tl.load(order + slot, mask=slot < k, other=0)
        row = tl.load(rows + i, mask=slot < k, other=-1)
        if tl.max(row, 0) < 0:
            return
        word = b * WORDS + tl.arange(0, WORDS)
        x = head_logits(states, weight, bias, tl.maximum(row, 0), word, V, mask, H, BIASED, DEPTH, WORDS, ROWS)
        top = tl.max(x, 1)
        shift = tl.where(top == float("-inf"), 0.0, top)
        tl.store(tops + i * blocks + b, top, mask=row >= 0)
        tl.store(sums + i * blocks + b, tl.sum(tl.exp(x - shift[:, None]), 1), mask=row >= 0)

    @triton.jit
    def find_in_head(
        states: "Any", weight: "Any", bias: "Any", order: "Any", rows: "Any", block: "Any", within: "Any",
        log_norm: "Any", tokens: "Any", log_p: "Any", draws: "Any", M: "Any", V: "Any", mask: "Any", blocks: "Any",
        H: "constexpr", BIASED: "constexpr", DEPTH: "constexpr", WORDS: "constexpr", ROWS: "constexpr",
    ) -> None:  # fmt: skip
        slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        draw = tl.load(order + slot, mask=slot < draws, other=0)
        own = tl.load(block + draw, mask=slot < draws, other=blocks)
        row = tl.maximum(tl.load(rows + draw // M), 0)
        part = tl.load(within + draw).to(tl.float32)
        n = tl.arange(0, WORDS)
        b = tl.min(own, 0)
        while b < blocks:  # the few blocks that these draws, in order, fell into
            x = head_logits(states, weight, bias, row, b * WORDS + n, V, mask, H, BIASED, DEPTH, WORDS, ROWS)
            mass = tl.exp(x - tl.max(x, 1)[:, None])
            reached = tl.cumsum(mass, 1) >= (part * tl.sum(mass, 1))[:, None]
            last = tl.max(tl.where(mass > 0, n[None, :], 0), 1)
            cell = tl.min(tl.where((mass > 0) & reached, n[None, :], last[:, None]), 1)
            logit = tl.sum(tl.where(n[None, :] == cell[:, None], x, 0.0), 1).to(tl.float64)
            tl.store(tokens + draw, b * WORDS + cell, mask=own == b)
            tl.store(log_p + draw, logit - tl.load(log_norm + draw // M), mask=own == b)
            b = tl.min(tl.where(own > b, own, blocks), 0)

    sums = {"logit_sums": logit_sums, "head_sums": head_sums}
    return SimpleNamespace(**sums, choose=choose, find_in_logits=find_in_logits, find_in_head=find_in_head)
