"""The Triton kernels of `fused`, which explains them and has the reference in plain torch.

A distribution (`law`) is a row of logits, or of hidden states with a head (HEADED). It may be tilted (TILTED): the
clipped scale · (drawn · rewarded + entered · embedded - here) is added to its logits. A tile is a part of the logits,
ROWS distributions by WORDS tokens of the vocabulary, in float32 and never stored.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

constexpr = Any  # Triton recognises this name in the annotations of kernels


def programs() -> SimpleNamespace:
    """The Triton kernels, where they are known to be installed."""
    found = kernels()
    assert found is not None, "callers check that Triton is installed"
    return found


@cache
def kernels() -> SimpleNamespace | None:
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
        log_p: "Any", M: "Any", blocks: "Any", fallback: "Any", LINED: "constexpr", PADDED: "constexpr",
    ) -> None:  # fmt: skip
        i = tl.program_id(0).to(tl.int64)
        own = tl.load(rows + i)
        if own < 0:
            tl.store(log_norm + i, 0.0)
            for m in range(M):
                tl.store(block + i * M + m, blocks)
                tl.store(tokens + i * M + m, 0)
                tl.store(log_p + i * M + m, 0.0)
            return
        if not LINED:
            own = i
        b = tl.arange(0, PADDED)
        top = tl.load(tops + own * blocks + b, mask=b < blocks, other=float("-inf")).to(tl.float64)
        mass = tl.load(sums + own * blocks + b, mask=b < blocks, other=0.0).to(tl.float64)
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
            tl.store(block + draw, tl.where(total > 0, first, blocks))
            tl.store(tokens + draw, fallback)  # of no mass, or NaN; others are found
            tl.store(log_p + draw, float("nan"))

    @triton.jit
    def find_in_logits(
        logits: "Any", rows: "Any", block: "Any", within: "Any", log_norm: "Any", tokens: "Any", log_p: "Any",
        M: "Any", V: "Any", stride: "Any", mask: "Any", blocks: "Any", ALIGN: "constexpr", BLOCK: "constexpr",
    ) -> None:  # fmt: skip
        draw = tl.program_id(0).to(tl.int64)
        b = tl.load(block + draw).to(tl.int32)
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
    def product(
        x: "Any", left: "Any", right: "Any", row: "Any", word: "Any", H: "constexpr", DEPTH: "constexpr"
    ) -> "Any":
        h = tl.arange(0, DEPTH)[None, :]
        left += row[:, None] * H + h
        right += word[:, None] * H + h
        for start in range(0, H, DEPTH):
            if H % DEPTH == 0:
                x = tl.dot(tl.load(left + start), tl.load(right + start).T, x)
            else:
                inside = h + start < H
                x = tl.dot(tl.load(left + start, inside, 0.0), tl.load(right + start, inside, 0.0).T, x)
        return x

    @triton.jit
    def tile(
        law: "Any", weight: "Any", bias: "Any", stride: "Any", drawn: "Any", rewarded: "Any", entered: "Any",
        embedded: "Any", tilt: "Any", scale: "Any", here: "Any", clip: "Any", row: "Any", word: "Any", V: "Any",
        mask: "Any", H: "constexpr", HEADED: "constexpr", BIASED: "constexpr", TILTED: "constexpr", D: "constexpr",
        E: "constexpr", DEPTH: "constexpr", WORDS: "constexpr", ROWS: "constexpr",
    ) -> "Any":  # fmt: skip
        # The logits, and the tilt that is added to them.
        safe = tl.minimum(word, V - 1).to(tl.int64)
        h = tl.zeros((ROWS, WORDS), tl.float32)
        if TILTED:
            h = product(h, drawn, rewarded, tilt, safe, D, DEPTH)
            h = product(h, entered, embedded, tilt, safe, E, DEPTH)
            h = scale[:, None] * (h - here[:, None])
            h = tl.maximum(h, -clip, propagate_nan=tl.PropagateNan.ALL)
            h = tl.minimum(h, clip, propagate_nan=tl.PropagateNan.ALL)
        x = tl.zeros((ROWS, WORDS), tl.float32)
        if HEADED:
            x = product(x, law, weight, row, safe, H, DEPTH)
        else:
            x += tl.load(law + row[:, None] * stride + safe[None, :]).to(tl.float32)
        if BIASED:
            x += tl.load(bias + safe).to(tl.float32)[None, :]
        return tl.where(((word < V) & (word != mask))[None, :], x, float("-inf")), h

    @triton.jit
    def sum_up(x: "Any", tops: "Any", sums: "Any", place: "Any", kept: "Any") -> None:
        top = tl.max(x, 1)
        shift = tl.where(top == float("-inf"), 0.0, top)
        tl.store(tops + place, top, mask=kept)
        tl.store(sums + place, tl.sum(tl.exp(x - shift[:, None]), 1), mask=kept)

    @triton.jit
    def tile_sums(
        law: "Any", weight: "Any", bias: "Any", stride: "Any", drawn: "Any", rewarded: "Any", entered: "Any",
        embedded: "Any", tilts: "Any", scales: "Any", heres: "Any", clip: "Any", order: "Any", rows: "Any",
        tops: "Any", sums: "Any", tilted_tops: "Any", tilted_sums: "Any", k: "Any", V: "Any", mask: "Any",
        blocks: "Any", H: "constexpr",
        HEADED: "constexpr", BIASED: "constexpr", TILTED: "constexpr", D: "constexpr", E: "constexpr",
        DEPTH: "constexpr", WORDS: "constexpr", ROWS: "constexpr", GROUP: "constexpr",
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
        tilt, scale, here = tl.load(tilts + i), tl.load(scales + i), tl.load(heres + i)
        x, h = tile(
            law, weight, bias, stride, drawn, rewarded, entered, embedded, tl.maximum(tilt, 0), scale, here, clip,
            tl.maximum(row, 0), word, V, mask, H, HEADED, BIASED, TILTED, D, E, DEPTH, WORDS, ROWS,
        )  # fmt: skip
        sum_up(x, tops, sums, i * blocks + b, row >= 0)
        if TILTED:
            sum_up(x + h, tilted_tops, tilted_sums, i * blocks + b, row >= 0)

    @triton.jit
    def find_in_tiles(
        law: "Any", weight: "Any", bias: "Any", stride: "Any", drawn: "Any", rewarded: "Any", entered: "Any",
        embedded: "Any", tilts: "Any", scales: "Any", heres: "Any", clip: "Any", order: "Any", rows: "Any",
        lines: "Any", block: "Any", within: "Any", log_norm: "Any", tokens: "Any", log_p: "Any", draws: "Any",
        M: "Any", V: "Any", mask: "Any", blocks: "Any", H: "constexpr", HEADED: "constexpr", BIASED: "constexpr",
        TILTED: "constexpr", D: "constexpr", E: "constexpr", DEPTH: "constexpr", WORDS: "constexpr", ROWS: "constexpr",
        LINED: "constexpr",
    ) -> None:  # fmt: skip
        slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        draw = tl.load(order + slot, mask=slot < draws, other=0)
        own = tl.load(block + draw, mask=slot < draws, other=blocks).to(tl.int32)
        i = draw // M
        line = tl.maximum(tl.load(lines + i), 0) if LINED else i
        row = tl.maximum(tl.load(rows + line), 0)
        tilt, scale, here = tl.load(tilts + line), tl.load(scales + line), tl.load(heres + line)
        part = tl.load(within + draw).to(tl.float32)
        n = tl.arange(0, WORDS)
        b = tl.min(own, 0)
        while b < blocks:  # the few blocks that these draws, in order, fell into
            x, h = tile(
                law, weight, bias, stride, drawn, rewarded, entered, embedded, tl.maximum(tilt, 0), scale, here, clip,
                row, b * WORDS + n, V, mask, H, HEADED, BIASED, TILTED, D, E, DEPTH, WORDS, ROWS,
            )  # fmt: skip
            x += h
            mass = tl.exp(x - tl.max(x, 1)[:, None])
            reached = tl.cumsum(mass, 1) >= (part * tl.sum(mass, 1))[:, None]
            last = tl.max(tl.where(mass > 0, n[None, :], 0), 1)
            cell = tl.min(tl.where((mass > 0) & reached, n[None, :], last[:, None]), 1)
            logit = tl.sum(tl.where(n[None, :] == cell[:, None], x, 0.0), 1).to(tl.float64)
            tl.store(tokens + draw, b * WORDS + cell, mask=own == b)
            tl.store(log_p + draw, logit - tl.load(log_norm + i), mask=own == b)
            b = tl.min(tl.where(own > b, own, blocks), 0)

    @triton.jit
    def jacobian(
        logits: "Any", worth: "Any", means: "Any", V: "Any", stride: "Any", worth_stride: "Any", mask: "Any",
        BLOCK: "constexpr",
    ) -> None:  # fmt: skip
        i = tl.program_id(0).to(tl.int64)
        logits += i * stride
        worth += i * worth_stride
        n = tl.arange(0, BLOCK)
        # Every lane keeps its own sums, so that lanes wait for one another only once.
        top = tl.full((BLOCK,), -1e30, tl.float32)
        total, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            j = start + n
            x = tl.load(logits + j, mask=(j < V) & (j != mask), other=float("-inf")).to(tl.float32)
            s = tl.load(worth + j, mask=(j < V) & (j != mask), other=0.0).to(tl.float32)
            higher = tl.maximum(top, x)
            mass, shrink = tl.exp(x - higher), tl.exp(top - higher)
            total = total * shrink + mass
            mean = mean * shrink + mass * s
            top = higher
        highest = tl.max(top, 0)
        shrink = tl.exp(top - highest)
        norm = tl.sum(total * shrink, 0)
        middle = tl.sum(mean * shrink, 0) / norm
        tl.store(means + i, middle)
        for start in range(0, V, BLOCK):
            j = start + n
            x = tl.load(logits + j, mask=(j < V) & (j != mask), other=float("-inf")).to(tl.float32)
            s = tl.load(worth + j, mask=(j < V) & (j != mask), other=0.0).to(tl.float32)
            tl.store(logits + j, tl.exp(x - highest) / norm * (s - middle), mask=j < V)

    @triton.jit
    def dots(
        drawn: "Any", rewarded: "Any", entered: "Any", embedded: "Any", expected: "Any", index: "Any", tokens: "Any",
        answers: "Any", mask: "Any", D: "constexpr", E: "constexpr", WIDE: "constexpr",
    ) -> None:  # fmt: skip
        i = tl.program_id(0).to(tl.int64)
        row, token, n = tl.maximum(tl.load(index + i), 0), tl.load(tokens + i), tl.arange(0, WIDE)
        left = tl.load(drawn + row * D + n, mask=n < D, other=0.0).to(tl.float32)
        right = tl.load(rewarded + token * D + n, mask=n < D, other=0.0).to(tl.float32)
        worth = tl.where(token == mask, tl.load(expected + row), tl.sum(left * right, 0))
        left = tl.load(entered + row * E + n, mask=n < E, other=0.0).to(tl.float32)
        right = tl.load(embedded + token * E + n, mask=n < E, other=0.0).to(tl.float32)
        tl.store(answers + i, worth + tl.sum(left * right, 0))

    return SimpleNamespace(
        logit_sums=logit_sums,
        choose=choose,
        find_in_logits=find_in_logits,
        tile_sums=tile_sums,
        find_in_tiles=find_in_tiles,
        jacobian=jacobian,
        dots=dots,
    )
