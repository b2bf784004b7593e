"""Tokens drawn from categorical laws over a large vocabulary, in one pass over the logits.

A draw inverts the CDF in two levels. The vocabulary is cut into blocks; one pass leaves of each block its highest logit
and the sum of exp(logit - highest). The block of a draw is found on those sums, and only that block is looked at again
to find the token in it. Neither a softmax nor a cumulative sum over the vocabulary is ever stored; from hidden states
and a head's weight, neither are the logits: the first pass is a matrix product that keeps the sums alone.

What comes with a token is its logit minus the log-normaliser of the very sums it was drawn from. Plain torch is the
reference; on a GPU the same steps are Triton kernels (`core.gpu`), which never make the host wait. No gradients flow.
A law of NaNs, or without mass, gives token 0 (1 where 0 is forbidden) and NaN.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from tokensteer.core.draws import NEVER
from tokensteer.core.gpu import kernels

BUDGET = 2**28  # bytes of temporaries in plain torch
BLOCK, TILE = 512, 4  # words in a block of logits, blocks that one program (a single warp) sums
HEAD_BLOCK, HEAD_ROWS, FIND_ROWS = 128, 128, 32  # words in a block of a head, rows beside it when summing and finding
HALF = (torch.bfloat16, torch.float16)  # what tensor cores multiply without rounding


@dataclass(frozen=True)
class Bend:
    """What k laws are multiplied by, as the log of a factor of low rank for each word:

    scale · (drawn · rewarded[word] + entered · embedded[word] - here), kept within ± clip.

    `rows` (k,) says which of drawn (K, D) and entered (K, E) is whose; rewarded is (V, D), embedded (V, E); scale and
    here are (k,).
    """

    drawn: Tensor
    rewarded: Tensor
    entered: Tensor
    embedded: Tensor
    rows: Tensor
    scale: Tensor
    here: Tensor
    clip: float

    @property
    def fuses(self) -> bool:
        """Whether the kernels can multiply it out."""
        factors = (self.drawn, self.rewarded, self.entered, self.embedded)
        return self.drawn.is_cuda and kernels() is not None and all(factor.dtype in HALF for factor in factors)


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
def draw_bent(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, u: Tensor, forbidden: int | None, bend: Bend
) -> tuple[Tensor, Tensor]:
    """`draw_from_logits`, or with a weight `draw_from_head`, from bent laws; on a GPU, in half precision."""
    return _on_gpu(x, weight, bias, rows, u, forbidden, bend)[:2]


@torch.no_grad()
def log_norms(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, forbidden: int | None, bend: Bend | None
) -> Tensor:
    """log sum exp of the logits of k laws, bent or not, (k,) in double; on a GPU, in half precision."""
    nothing = torch.empty(len(rows), 0, dtype=torch.float64, device=x.device)
    return _on_gpu(x, weight, bias, rows, nothing, forbidden, bend)[2]


def _on_gpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, u: Tensor, forbidden: int | None,
    bend: Bend | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    V = x.shape[-1] if weight is None else len(weight)
    _check(x, weight, rows, u, V, forbidden)
    programs = kernels()
    assert programs is not None
    assert x.dtype in HALF, "whoever asks knows what the kernels can do"
    with torch.cuda.device(x.device):
        return _fused(programs, x, weight, bias, rows, u, V, -1 if forbidden is None else forbidden, bend)


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
    programs = kernels() if x.is_cuda and x.dtype != torch.float64 else None
    plain = programs is None or (weight is not None and x.dtype == torch.float32)  # tensor cores would round float32
    if programs is not None and not plain:
        with torch.cuda.device(x.device):
            return _fused(programs, x, weight, bias, rows, ask, V, mask, None)[:2]
    step = max(1, BUDGET // (32 * V + 128 * ask.shape[1] * math.isqrt(V)))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(rows), step):
        own, some = rows[start : start + step], ask[start : start + step]
        if weight is None:
            parts.append(_plain(x, own, some, mask))
        else:
            logits = head_logits(x[own.clamp(min=0)], weight, bias)
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


def head_logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """states (k, H) @ weight (V, H)^T + bias, in single precision at least, without a copy of the whole weight."""
    exact = _exact(states.dtype)
    if states.is_cuda and states.dtype in HALF and torch.__version__ >= "2.8":
        logits = torch.mm(states, weight.T, out_dtype=exact)  # tensor cores add in float32 anyway
        return logits if bias is None else logits.add_(bias)
    logits = states.new_empty(len(states), len(weight), dtype=exact)
    step = max(1, BUDGET // (16 * weight.shape[1]))
    for start in range(0, len(weight), step):
        logits[:, start : start + step] = states.to(exact) @ weight[start : start + step].to(exact).T
    return logits if bias is None else logits.add_(bias.to(exact))


def _fused(
    programs: SimpleNamespace, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, ask: Tensor,
    V: int, mask: int, bend: Bend | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Tokens and their log-probabilities (k, M), and the log-normalisers of the laws (k,)."""
    (k, M), align, rows = ask.shape, 16 // x.itemsize, rows.contiguous()
    u = ask.contiguous() if ask.is_floating_point() else ask.new_empty(k, 0, dtype=torch.float64)
    tiled = weight is not None or bend is not None
    # Blocks of logits begin where memory is aligned, up to align - 1 words ahead of their row, so that loads are wide.
    tiles = -(-(V + align - 1) // (BLOCK * TILE))
    blocks = -(-V // HEAD_BLOCK) if tiled else tiles * TILE
    tops, sums = (x.new_empty(k, blocks, dtype=torch.float32) for _ in range(2))
    law, shape = (), ()
    if tiled:
        law, shape = _tiled(x, weight, bias, rows, bend)
        order = (rows < 0).byte().argsort()  # those to skip come last, where whole programs have nothing to do
        programs.tile_sums[(-(-k // HEAD_ROWS) * blocks,)](
            *law, order, rows, tops, sums, k, V, mask, blocks, *shape, HEAD_ROWS, 64, num_warps=4, num_stages=3
        )
    else:
        programs.logit_sums[(k * tiles,)](
            x, rows, tops, sums, V, x.stride(0), mask, tiles, align, TILE, BLOCK, num_warps=1
        )
    block = torch.full(u.shape, blocks, dtype=torch.int32, device=x.device)  # of each draw; `blocks` is none
    within = torch.empty_like(u)  # how far into its block, in (0, 1]
    log_norm = x.new_zeros(k, dtype=torch.float64)
    tokens = torch.zeros_like(u, dtype=torch.int64)
    log_p = torch.zeros_like(u, dtype=torch.float32)
    chosen = (rows, block, within, log_norm, tokens, log_p)
    padded = 1 << (blocks - 1).bit_length()
    programs.choose[(k,)](
        tops, sums, u, *chosen, u.shape[1], blocks, int(mask == 0), padded, num_warps=max(1, min(8, padded // 512))
    )
    if not ask.is_floating_point():
        return ask, _score(_logits_at(x, weight, bias, rows, ask), log_norm, rows, ask, mask), log_norm
    if not u.numel():
        return tokens, log_p, log_norm
    if tiled:
        # Draws from one block read its weights together. Short keys sort faster; if they overflow, only speed is lost.
        order = block.view(-1).short().argsort()
        programs.find_in_tiles[(-(-k * M // FIND_ROWS),)](
            *law, order, *chosen, k * M, M, V, mask, blocks, *shape, FIND_ROWS, num_warps=4, num_stages=3
        )
    else:
        programs.find_in_logits[(k * M,)](x, *chosen, M, V, x.stride(0), mask, blocks, align, BLOCK, num_warps=1)
    return tokens, log_p, log_norm


def _tiled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, bend: Bend | None
) -> tuple[tuple[Tensor | int | float, ...], tuple[int, ...]]:
    """What the tiled kernels want to know of the laws: arguments, and constants. What is absent is stood in for."""
    x = x if weight is None else x.contiguous()
    law = (x, x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous(), x.stride(0))
    bent, sizes = (x, x, x, x, rows, rows, rows, 0.0), (16, 16)
    if bend is not None:
        factors = (bend.drawn, bend.rewarded, bend.entered, bend.embedded, bend.rows, bend.scale, bend.here)
        bent, sizes = (
            (*(factor.contiguous() for factor in factors), bend.clip),
            (bend.drawn.shape[1], bend.entered.shape[1]),
        )
    shape = (x.shape[1] if weight is not None else 16, weight is not None, bias is not None, bend is not None)
    return (*law, *bent), (*(int(n) for n in shape), *sizes, 64, HEAD_BLOCK)  # depths are read in pieces of 64


def _logits_at(x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, tokens: Tensor) -> Tensor:
    """The logits of tokens (k, M), (k, M)."""
    (k, M), rows = tokens.shape, rows.clamp(min=0)
    if weight is None:
        return x[rows.unsqueeze(-1), tokens]
    step = max(1, BUDGET // (16 * M * x.shape[1]))
    logits = x.new_empty(k, M, dtype=torch.float32)
    for part in (slice(start, start + step) for start in range(0, k, step)):
        logits[part] = (x[rows[part]].float().unsqueeze(1) * weight[tokens[part]].float()).sum(-1)
    return logits if bias is None else logits + bias[tokens].float()


def softmax_slope(logits: Tensor, worth: Tensor, vocab_size: int, mask: int) -> tuple[Tensor, Tensor]:
    """The slope mu · (worth - <mu, worth>) in the logits of what is worth so much for each word, and <mu, worth>.

    mu = softmax(logits) without the mask; both tables are (k, V), or wider: what is beyond the vocabulary is not read.
    The logits are overwritten; the means (k,) are in single precision at least.
    """
    programs = kernels() if logits.is_cuda and logits.dtype in HALF and worth.dtype in HALF else None
    if programs is not None and logits.stride(1) == worth.stride(1) == 1:
        means = logits.new_empty(len(logits), dtype=torch.float32)
        if len(logits):
            with torch.cuda.device(logits.device):
                programs.jacobian[(len(logits),)](
                    logits, worth, means, vocab_size, logits.stride(0), worth.stride(0), mask, 4096, num_warps=8
                )
        return logits, means
    inside = logits[:, :vocab_size]
    mu = inside.to(_exact(logits.dtype)).index_fill(1, torch.tensor(mask, device=logits.device), NEVER).softmax(-1)
    worth = worth[:, :vocab_size].to(mu.dtype)
    means = (mu * worth).sum(-1)
    inside.copy_(mu.mul_(worth - means.unsqueeze(-1)))
    return logits, means
