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
from torch.nn.functional import linear, pad

from tokensteer.core.categorical.triton_kernels import kernels
from tokensteer.core.numerics.draws import NEVER

BUDGET = 2**28  # bytes of temporaries in plain torch
BLOCK, TILE = 512, 4  # words in a block of logits, blocks that one program (a single warp) sums
HEAD_BLOCK, HEAD_ROWS, FIND_ROWS = 128, 128, 32  # words in a block of a head, rows beside it when summing and finding
HALF = (torch.bfloat16, torch.float16)  # what tensor cores multiply without rounding


@dataclass(frozen=True)
class FusedTilt:
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


def fuses(*factors: Tensor) -> bool:
    """Whether the kernels can multiply these out."""
    return all(factor.is_cuda and factor.dtype in HALF for factor in factors) and kernels() is not None


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


@dataclass(frozen=True)
class TileSums:
    """GradientTilted laws summed up on a GPU, block by block of the vocabulary: what is left to do of a draw is little.

    `gain` (k,) is by how much the log-normaliser of each law grew as it was bent, 0 where rows is -1.
    """

    gain: Tensor
    law: tuple[tuple[Tensor | int | float, ...], tuple[int, ...]]
    rows: Tensor
    sums: tuple[Tensor, Tensor]
    words: tuple[int, int]

    def draw(self, lines: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities (n, M) from the laws `lines` (n,), -1 for none (token 0, log_p 0)."""
        programs = kernels()
        assert programs is not None
        with torch.cuda.device(u.device):
            lines, u = lines.contiguous(), u.contiguous()
            chosen = _choose(programs, self.sums, lines, u, self.words[1], lined=True)
            return _find_in_tiles(programs, *self.law, self.rows, chosen, u.shape, *self.words, lined=True)


@torch.no_grad()
def sum_tiles(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, forbidden: int | None, bend: FusedTilt
) -> TileSums:
    """k laws, of logits x or with a weight of states x, bent and summed up; on a GPU, in half precision."""
    V = x.shape[-1] if weight is None else len(weight)
    nothing = torch.empty(len(rows), 0, dtype=torch.float64, device=x.device)
    _check(x, weight, rows, nothing, V, forbidden)
    programs, mask = kernels(), -1 if forbidden is None else forbidden
    assert programs is not None
    assert x.dtype in HALF, "whoever asks knows what the kernels can do"
    with torch.cuda.device(x.device):
        law, rows = _tiled(x, weight, bias, rows, bend), rows.contiguous()
        straight, bent = _sum_tiles(programs, *law, rows, V, mask, 2)
        before, after = (_choose(programs, sums, rows, nothing, mask)[3] for sums in (straight, bent))
        return TileSums(after - before, law, rows, bent, (V, mask))


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
            return _fused(programs, x, weight, bias, rows, ask, V, mask)
    step = max(1, BUDGET // (32 * V + 128 * ask.shape[1] * math.isqrt(V)))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(rows), step):
        own, some = rows[start : start + step], ask[start : start + step]
        laws = x[own.clamp(min=0)]
        logits = laws if weight is None else head_logits(laws, weight, bias)
        if programs is None:
            parts.append(_plain(logits, own, some, mask))
        else:
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
        block, rest = _invert(sums, ask * total)
        inside = weights.gather(1, block.unsqueeze(-1).expand(-1, -1, size)).double()  # (k, M, size)
        tokens = torch.where(total > 0, block * size + _invert(inside, rest)[0], int(mask == 0))
        tokens = tokens.masked_fill(rows.unsqueeze(-1) < 0, 0)
    log_norm = total.log().squeeze(-1) + top.squeeze(-1)
    return tokens, _score(logits.gather(1, tokens.clamp(min=0)), log_norm, rows, tokens, mask)


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
    if torch.is_autocast_enabled(states.device.type):  # which would round whatever is multiplied
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


def _fused(
    programs: SimpleNamespace, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, ask: Tensor,
    V: int, mask: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (k, M), align, rows = ask.shape, 16 // x.itemsize, rows.contiguous()
    u = ask.contiguous() if ask.is_floating_point() else ask.new_empty(k, 0, dtype=torch.float64)
    law = None if weight is None else _tiled(x, weight, bias, rows, None)
    # Blocks of logits begin where memory is aligned, up to align - 1 words ahead of their row, so that loads are wide.
    tiles = -(-(V + align - 1) // (BLOCK * TILE))
    if law is not None:
        (sums,) = _sum_tiles(programs, *law, rows, V, mask, 1)
    else:
        sums = (x.new_empty(k, tiles * TILE, dtype=torch.float32), x.new_empty(k, tiles * TILE, dtype=torch.float32))
        programs.logit_sums[(k * tiles,)](x, rows, *sums, V, x.stride(0), mask, tiles, align, TILE, BLOCK, num_warps=1)
    chosen = _choose(programs, sums, rows, u, mask)
    if not ask.is_floating_point():
        return ask, _score(_logits_at(x, weight, bias, rows, ask), chosen[3], rows, ask, mask)
    if law is not None:
        return _find_in_tiles(programs, *law, rows, chosen, u.shape, V, mask)
    programs.find_in_logits[(k * M,)](x, *chosen, M, V, x.stride(0), mask, tiles * TILE, align, BLOCK, num_warps=1)
    return chosen[4], chosen[5]


def _sum_tiles(
    programs: SimpleNamespace, law: tuple[Tensor | int | float, ...], shape: tuple[int, ...], rows: Tensor, V: int,
    mask: int, kinds: int,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """The highest logit and the sum of exp(logit - highest) of each block, (k, blocks): straight, and bent if asked."""
    k, blocks = len(rows), -(-V // HEAD_BLOCK)
    sums = torch.empty(kinds, 2, k, blocks, dtype=torch.float32, device=rows.device)
    found = [(kind[0], kind[1]) for kind in sums]
    order = (rows < 0).view(torch.uint8).argsort()  # those to skip come last, where whole programs have nothing to do
    programs.tile_sums[(-(-k // HEAD_ROWS) * blocks,)](
        *law, order, rows, *found[0], *found[-1], k, V, mask, blocks, *shape, HEAD_ROWS, 64,
        num_warps=4 * kinds, num_stages=3,
    )  # fmt: skip
    return found


def _choose(
    programs: SimpleNamespace, sums: tuple[Tensor, Tensor], rows: Tensor, u: Tensor, mask: int, lined: bool = False
) -> tuple[Tensor, ...]:
    """The block of each draw and how far into it, the log-normalisers (k,), and room for tokens and log-probabilities.
    Sums are by draws, or where they are `lined`, rows says which of them is whose."""
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
        programs.choose[(k,)](
            *sums, u, *chosen, u.shape[1], blocks, int(mask == 0), int(lined), padded,
            num_warps=max(1, min(8, padded // 512)),
        )  # fmt: skip
    return chosen


def _find_in_tiles(
    programs: SimpleNamespace, law: tuple[Tensor | int | float, ...], shape: tuple[int, ...], rows: Tensor,
    chosen: tuple[Tensor, ...], draws: tuple[int, ...], V: int, mask: int, lined: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (k, M), blocks = draws, -(-V // HEAD_BLOCK)
    order = chosen[1].view(-1).argsort()  # draws from one block read its weights together
    if k * M:
        programs.find_in_tiles[(-(-k * M // FIND_ROWS),)](
            *law, order, rows, *chosen, k * M, M, V, mask, blocks, *shape, FIND_ROWS, int(lined),
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return chosen[4], chosen[5]


def _tiled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, bend: FusedTilt | None
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


def entries_of(
    drawn: Tensor, rewarded: Tensor, entered: Tensor, embedded: Tensor, expected: Tensor, index: Tensor,
    tokens: Tensor, mask: int,
) -> Tensor:  # fmt: skip
    """drawn[index] · rewarded[tokens] + entered[index] · embedded[tokens], (k,) in float32, where of the mask the first
    term is expected[index]; on a GPU, without a copy of any of it."""
    programs = kernels()
    assert programs is not None
    factors = tuple(factor.contiguous() for factor in (drawn, rewarded, entered, embedded, expected, index, tokens))
    answers = torch.empty(len(index), dtype=torch.float32, device=index.device)
    sizes = (drawn.shape[1], entered.shape[1])
    if len(index):
        with torch.cuda.device(index.device):
            wide = 1 << (max(sizes) - 1).bit_length()
            programs.dots[(len(index),)](*factors, answers, mask, *sizes, wide, num_warps=max(1, min(4, wide // 256)))
    return answers


def softmax_slope(logits: Tensor, worth: Tensor, vocab_size: int, mask: int) -> tuple[Tensor, Tensor]:
    """The slope mu · (worth - <mu, worth>) in the logits of what is worth so much for each word, and <mu, worth>.

    mu = softmax(logits) without the mask; both tables are (k, V), or wider: what is beyond the vocabulary is not read.
    Both may be overwritten; the means (k,) are in single precision at least.
    """
    programs = kernels() if logits.is_cuda and logits.dtype in HALF and worth.dtype in HALF else None
    if programs is not None and logits.stride(1) == worth.stride(1) == 1:
        means = logits.new_empty(len(logits), dtype=torch.float32)
        if len(logits):
            with torch.cuda.device(logits.device):
                programs.jacobian[(len(logits),)](
                    logits, worth, means, vocab_size, logits.stride(0), worth.stride(0), mask, 2048, num_warps=4
                )
        return logits, means
    inside = logits[:, :vocab_size]
    if 0 <= mask < vocab_size:
        inside[:, mask] = NEVER
    mu = inside.to(_exact(logits.dtype)).softmax(-1)
    worth = worth[:, :vocab_size].to(mu.dtype)
    means = (mu * worth).sum(-1)
    inside.copy_(mu.mul_(worth.sub_(means.unsqueeze(-1))))
    return logits, means
