"""Tokens drawn from logits, and from hidden states and a head: the plain implementation against dense tables, the
kernels against the plain implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrow import untyped
from torch import Tensor

from tokensteer.core.categorical import fused
from tokensteer.core.categorical.forms import HiddenLogits, Logits, masked_log_softmax
from tokensteer.core.categorical.fused import LogitRows
from tokensteer.core.categorical.gradient_tilt import softmax_slope

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
GPU = pytest.mark.parametrize("device", DEVICES[1:])
BOTH = pytest.mark.parametrize("device", DEVICES)
NEVER = -math.inf
LOW = [torch.bfloat16, torch.float16, torch.float32]


def draw_from_logits(logits: Tensor, rows: Tensor, u: Tensor, forbidden: int | None) -> tuple[Tensor, Tensor]:
    return LogitRows(logits, rows, forbidden).draw(u)


def draw_from_head(
    states: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, u: Tensor, forbidden: int | None
) -> tuple[Tensor, Tensor]:
    return LogitRows(states, rows, forbidden, weight, bias).draw(u)


def log_prob_from_logits(logits: Tensor, rows: Tensor, tokens: Tensor, forbidden: int | None) -> Tensor:
    return LogitRows(logits, rows, forbidden).log_prob(tokens)


def log_prob_from_head(
    states: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, tokens: Tensor, forbidden: int | None
) -> Tensor:
    return LogitRows(states, rows, forbidden, weight, bias).log_prob(tokens)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniforms(k: int, M: int, seed: int) -> Tensor:
    return 1.0 - torch.rand(k, M, generator=generator(seed), dtype=torch.float64)


def law(K: int, V: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (scale * torch.randn(K, V, generator=generator(seed))).to(dtype)


def dense(logits: Tensor, forbidden: int | None = None) -> Tensor:
    """log p in double."""
    x = logits.double().clone()
    if forbidden is not None:
        x[:, forbidden] = NEVER
    return x.log_softmax(-1)


def plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """The reference: everything on the CPU."""
    return function(*(a.cpu() if isinstance(a, Tensor) else a for a in arguments))


def on(device: str, *arguments: Any) -> tuple[Any, ...]:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)


def same_draws(logits: Tensor, rows: Tensor, u: Tensor, forbidden: int | None, mine: Any, close: float) -> None:
    """Tokens invert the dense CDF of these logits at u: exactly, or at a point within `close` of u."""
    tokens, log_p = (x.cpu() for x in mine)
    log_q = dense(logits.cpu(), forbidden)[rows.clamp(min=0)]
    cdf = log_q.exp().cumsum(-1)
    skipped = (rows < 0).unsqueeze(1)
    low, high = (torch.searchsorted(cdf, at).clamp(max=logits.shape[1] - 1) for at in (u - close, u + close))
    assert (((low <= tokens) & (tokens <= high)) | skipped).all()
    assert not tokens.masked_fill(~skipped, 0).any()
    expected = log_q.gather(1, tokens).masked_fill(skipped, 0.0)
    torch.testing.assert_close(log_p.double(), expected, rtol=0, atol=1e-4 if close else 1e-12)


ROWS = torch.tensor([3, 0, -1, 3, 3, 6, -1, 1, 2])


@pytest.mark.parametrize("V", [1, 2, 7, 50, 1000, 5001])
@pytest.mark.parametrize("forbidden", [None, 0, "last"])
def test_plain_is_the_dense_law(V: int, forbidden: Any) -> None:
    forbidden = V - 1 if forbidden == "last" else forbidden
    if V == 1 and forbidden is not None:
        return
    u = uniforms(len(ROWS), 6, 1)
    logits = law(7, V, 2).double()
    same_draws(logits, ROWS, u, forbidden, draw_from_logits(logits, ROWS, u, forbidden), 0.0)
    for dtype in LOW:
        logits = law(7, V, 3, dtype)
        same_draws(logits, ROWS, u, forbidden, draw_from_logits(logits, ROWS, u, forbidden), 1e-6)


@BOTH
@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
@pytest.mark.parametrize("V", [1, 50, 1024, 4097, 9001])
def test_draws_and_scores(device: str, dtype: torch.dtype, V: int) -> None:
    logits, u, forbidden = law(7, V, 4, dtype), uniforms(len(ROWS), 5, 5), None if V == 1 else V // 3
    at = on(device, logits, ROWS, u, forbidden)
    tokens, log_p = draw_from_logits(*at)
    assert tokens.dtype == torch.int64
    assert log_p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    same_draws(logits, ROWS, u, forbidden, (tokens, log_p), 1e-5)
    score = log_prob_from_logits(at[0], at[1], tokens[:, 1], forbidden)
    torch.testing.assert_close(score, log_p[:, 1], rtol=0, atol=1e-6)
    again = draw_from_logits(*at)
    assert torch.equal(tokens, again[0])
    assert torch.equal(log_p, again[1])


@GPU
@pytest.mark.parametrize("dtype", LOW)
def test_kernels_draw_what_the_plain_implementation_draws(device: str, dtype: torch.dtype) -> None:
    logits, u = law(33, 50258, 6, dtype), uniforms(40, 16, 7)
    rows = torch.arange(40).remainder(35) - 2
    rows = rows.clamp(min=-1)
    mine = draw_from_logits(*on(device, logits, rows, u, 50257))
    same_draws(logits, rows, u, 50257, mine, 1e-5)
    theirs = plain(draw_from_logits, logits, rows, u, 50257)
    equal = mine[0].cpu() == theirs[0]
    assert equal.double().mean() > 0.98
    torch.testing.assert_close(mine[1].cpu()[equal], theirs[1][equal], rtol=0, atol=1e-4)


def head(K: int, V: int, H: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = generator(seed)
    states, weight = torch.randn(K, H, generator=g), torch.randn(V, H, generator=g) * 3 / math.sqrt(H)
    return states.to(dtype), weight.to(dtype), torch.randn(V, generator=g).to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
@pytest.mark.parametrize(
    ("V", "H", "biased"), [(50, 16, False), (300, 24, True), (1024, 64, True), (2049, 100, False), (2049, 128, False)]
)
def test_heads(device: str, dtype: torch.dtype, V: int, H: int, biased: bool) -> None:
    states, weight, bias = head(7, V, H, dtype, 8)
    u, forbidden = uniforms(len(ROWS), 5, 9), V // 2
    logits = states.double() @ weight.double().T + (bias.double() if biased else 0.0)
    at = on(device, states, weight, bias if biased else None, ROWS)
    tokens, log_p = untyped(draw_from_head)(*at, u.to(device), forbidden)
    assert tokens.dtype == torch.int64
    assert log_p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    same_draws(logits, ROWS, u, forbidden, (tokens, log_p), 1e-5)
    score = untyped(log_prob_from_head)(*at, tokens[:, 2], forbidden)
    torch.testing.assert_close(score, log_p[:, 2], rtol=0, atol=1e-5)
    again = untyped(draw_from_head)(*at, u.to(device), forbidden)
    assert torch.equal(tokens, again[0])
    assert torch.equal(log_p, again[1])


@GPU
@pytest.mark.parametrize("dtype", LOW)
def test_a_large_head(device: str, dtype: torch.dtype) -> None:
    """Many row blocks, several groups of them, half the rows skipped here and there, twins."""
    K, V, H = 9000, 5003, 192
    states, weight, bias = head(K, V, H, dtype, 10)
    rows = torch.randint(K, (9100,), generator=generator(11))
    rows[torch.rand(9100, generator=generator(12)) < 0.5] = -1
    u = uniforms(9100, 4, 13)
    tokens, log_p = draw_from_head(*on(device, states, weight, bias, rows, u, 7))
    some = torch.cat([torch.arange(150), torch.arange(8900, 9100)])
    logits = states[rows[some].clamp(min=0)].double() @ weight.double().T + bias.double()
    own = torch.where(rows[some] < 0, -1, torch.arange(len(some)))
    same_draws(logits, own, u[some], 7, (tokens.cpu()[some], log_p.cpu()[some]), 1e-5)
    assert not tokens.cpu()[rows < 0].any()
    assert not log_p.cpu()[rows < 0].any()
    every = log_prob_from_head(*on(device, states, weight, bias, rows, tokens[:, 3], 7))
    torch.testing.assert_close(every, log_p[:, 3], rtol=0, atol=1e-5)


@BOTH
def test_a_row_block_of_nothing(device: str) -> None:
    states, weight, _ = on(device, *head(3, 700, 64, torch.bfloat16, 14))
    rows, u = torch.full((400,), -1, device=device), uniforms(400, 2, 15).to(device)
    for tokens, log_p in (
        draw_from_head(states, weight, None, rows, u, None),
        draw_from_logits(states @ weight.T, rows, u, None),
    ):
        assert tokens.shape == log_p.shape == (400, 2)
        assert not tokens.any()
        assert not log_p.any()
    assert not log_prob_from_head(states, weight, None, rows, rows.clamp(min=0), None).any()


@BOTH
def test_no_draws_at_all(device: str) -> None:
    states, weight, _ = on(device, *head(3, 40, 16, torch.bfloat16, 16))
    rows, u = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, 4, dtype=torch.float64, device=device)
    tokens, log_p = draw_from_logits(states @ weight.T, rows, u, 3)
    assert tokens.shape == log_p.shape == (0, 4)
    assert tokens.dtype == torch.int64
    assert log_p.dtype == torch.float32
    assert draw_from_head(states, weight, None, rows, u, 3)[0].shape == (0, 4)
    assert log_prob_from_logits(states @ weight.T, rows, rows, 3).shape == (0,)
    assert log_prob_from_head(states, weight, None, rows, rows, 3).shape == (0,)


@BOTH
def test_a_huge_vocabulary(device: str) -> None:
    rows, u = torch.tensor([2, 0, -1, 1]), uniforms(4, 32, 41)
    logits = law(3, 300_001, 42)
    same_draws(logits, rows, u, 299_999, draw_from_logits(*on(device, logits, rows, u, 299_999)), 1e-5)
    states, weight, bias = head(3, 140_000, 16, torch.bfloat16, 43)
    logits = states.double() @ weight.double().T + bias.double()
    same_draws(logits, rows, u, 5, draw_from_head(*on(device, states, weight, bias, rows, u, 5)), 1e-5)


@BOTH
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("V", [2, 17])
def test_a_single_draw(device: str, dtype: torch.dtype, V: int) -> None:
    states, weight, bias = head(1, V, 16, dtype, 39)
    rows, u = torch.tensor([0]), uniforms(1, 1, 40)
    logits = states.float() @ weight.float().T + bias.float()
    for forbidden in (None, 1):
        drawn = draw_from_logits(*on(device, logits.to(dtype), rows, u, forbidden))
        same_draws(logits.to(dtype), rows, u, forbidden, drawn, 1e-5)
        drawn = draw_from_head(*on(device, states, weight, bias, rows, u, forbidden))
        same_draws(logits, rows, u, forbidden, drawn, 1e-5)


def chi_square(counts: Tensor, p: Tensor) -> float:
    """How many standard deviations the statistic lies above its mean, over cells that expect five or more."""
    expected = counts.sum() * p
    cells = expected >= 5
    counts, expected = (torch.cat([x[cells], x[~cells].sum().view(1)]) for x in (counts.double(), expected))
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    dof = int(kept.sum()) - 1
    return float((statistic - dof) / math.sqrt(2 * dof))


@BOTH
@pytest.mark.parametrize(("V", "group", "scale"), [(50, 1, 1.0), (50258, 64, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_law(device: str, V: int, group: int, scale: float, dtype: torch.dtype) -> None:
    logits = law(2, V, 17, dtype, scale)
    rows, u = torch.tensor([1, 1, 1, 1]), uniforms(4, 10_000, 18)
    tokens, _ = draw_from_logits(*on(device, logits, rows, u, 5))
    counts = torch.bincount(tokens.cpu().flatten() // group, minlength=-(-V // group))
    cells = torch.arange(V) // group
    p = torch.zeros(len(counts), dtype=torch.float64).index_add(0, cells, dense(logits, 5)[1].exp())
    assert chi_square(counts, p) < 4


@BOTH
def test_the_law_of_a_head(device: str) -> None:
    states, weight, bias = head(2, 700, 64, torch.bfloat16, 19)
    rows, u = torch.tensor([0, 1, 1]), uniforms(3, 10_000, 20)
    tokens, _ = draw_from_head(*on(device, states, weight, bias, rows, u, 600))
    p = dense(states.double() @ weight.double().T + bias.double(), 600).exp()
    assert chi_square(torch.bincount(tokens[0].cpu(), minlength=700), p[0]) < 4
    assert chi_square(torch.bincount(tokens[1:].cpu().flatten(), minlength=700), p[1]) < 4


@BOTH
@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
@pytest.mark.parametrize("V", [2, 65, 3000])
def test_what_has_no_mass_is_never_drawn(device: str, dtype: torch.dtype, V: int) -> None:
    logits = law(64, V, 21, dtype)
    kept = torch.rand(64, V, generator=generator(22)) < 3 / V
    kept[:, V // 2], kept[:, 0] = True, False
    logits = logits.masked_fill(~kept, NEVER)
    logits[:, V - 1 if V > 2 else 0] = 30.0  # the highest of all, and forbidden
    u = torch.tensor([1.0, 1e-300, 0.5, 1 - 2**-53, 1e-20, 5e-324], dtype=torch.float64).expand(64, -1)
    rows, forbidden = torch.arange(64), V - 1 if V > 2 else 0
    tokens, log_p = (x.cpu() for x in draw_from_logits(*on(device, logits, rows, u, forbidden)))
    assert kept.gather(1, tokens).all()
    assert (tokens != forbidden).all()
    torch.testing.assert_close(log_p.double(), dense(logits, forbidden).gather(1, tokens), rtol=0, atol=1e-5)
    nothing = log_prob_from_logits(*on(device, logits, rows, torch.full((64,), forbidden), forbidden))
    assert (nothing == NEVER).all()


@BOTH
@pytest.mark.parametrize("dtype", LOW)
def test_a_head_never_draws_what_has_no_mass(device: str, dtype: torch.dtype) -> None:
    V = 700
    states, weight, bias = head(64, V, 64, dtype, 23)
    kept = torch.rand(V, generator=generator(24)) < 0.01
    kept[400], kept[[0, 699]] = True, False
    bias = torch.where(kept, bias, NEVER).to(dtype)
    bias[699] = 50.0
    u = torch.tensor([1.0, 1e-300, 0.5, 1 - 2**-53, 5e-324], dtype=torch.float64).expand(64, -1)
    tokens, log_p = draw_from_head(*on(device, states, weight, bias, torch.arange(64), u, 699))
    assert kept[tokens.cpu()].all()
    assert log_p.isfinite().all()
    first, last = (f(kept.nonzero()) for f in (torch.min, torch.max))
    assert first <= tokens.min()
    assert tokens.max() <= last


@BOTH
@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
@pytest.mark.parametrize("forbidden", [None, 0, 1])
def test_a_law_that_is_none(device: str, dtype: torch.dtype, forbidden: int | None) -> None:
    """NaNs, no mass, an infinite logit: a token in range, and NaN; the sound law among them is not touched."""
    V = 3000
    logits = torch.stack([*law(6, V, 25, dtype)])
    logits[0], logits[1], logits[2, 1234], logits[3, 2] = math.nan, NEVER, math.nan, math.inf
    rows, u = torch.arange(6), uniforms(6, 3, 26)
    tokens, log_p = (x.cpu() for x in draw_from_logits(*on(device, logits, rows, u, forbidden)))
    assert log_p[:4].isnan().all()
    assert (tokens[:4] == int(forbidden == 0)).all()
    same_draws(logits[4:], rows[:2], u[4:], forbidden, (tokens[4:], log_p[4:]), 1e-5)
    assert log_prob_from_logits(*on(device, logits, rows, tokens[:, 0], forbidden))[:4].isnan().all()
    if dtype != torch.float64:
        states, weight, bias = head(6, V, 64, dtype, 27)
        states[0], states[2, 3] = math.nan, math.nan
        tokens, log_p = (x.cpu() for x in draw_from_head(*on(device, states, weight, bias, rows, u, forbidden)))
        assert log_p.isnan().all(1).tolist() == [True, False, True, False, False, False]
        assert (tokens[[0, 2]] == int(forbidden == 0)).all()
        nowhere = torch.full_like(bias, NEVER)
        tokens, log_p = draw_from_head(*on(device, states, weight, nowhere, rows, u, forbidden))
        assert log_p.isnan().all()
        assert (tokens == int(forbidden == 0)).all()


@BOTH
@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_logits_far_from_zero(device: str, shift: float) -> None:
    logits = (law(4, 3000, 28) + shift).float()
    u = uniforms(4, 8, 29)
    same_draws(logits, torch.arange(4), u, None, draw_from_logits(*on(device, logits, torch.arange(4), u, None)), 1e-5)


@BOTH
@pytest.mark.parametrize("dtype", LOW)
def test_rows_apart_in_memory(device: str, dtype: torch.dtype) -> None:
    """Views whose rows are not side by side, or begin anywhere; words that are not side by side are refused."""
    wide = law(6, 5000, 30, dtype).to(device)
    u, rows = uniforms(3, 8, 31), torch.tensor([2, 0, 1])
    for view in (wide[::2, 3:4801], wide[1:4, :4099], wide[:1, 1:].expand(3, -1), wide.flatten()[1:-2].view(3, -1)):
        same_draws(view, rows, u, 9, draw_from_logits(view, rows.to(device), u.to(device), 9), 1e-5)
    with pytest.raises(ValueError, match=r"call \.contiguous\(\)"):
        draw_from_logits(wide.T, rows.to(device), u.to(device), None)
    states, weight, _ = on(device, *head(6, 700, 64, dtype, 32))
    apart = draw_from_head(states.T.contiguous().T, weight.T.contiguous().T, None, rows.to(device), u.to(device), 9)
    assert torch.equal(apart[0], draw_from_head(states, weight, None, rows.to(device), u.to(device), 9)[0])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, bias = head(7, 500, 16, torch.bfloat16, 33)
    u = uniforms(len(ROWS), 4, 34)
    whole = draw_from_head(states, weight, bias, ROWS, u, 3)
    score = log_prob_from_head(states, weight, bias, ROWS, whole[0][:, 0], 3)
    monkeypatch.setattr(fused, "BUDGET", 40_000)
    parts = draw_from_head(states, weight, bias, ROWS, u, 3)
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        score, log_prob_from_head(states, weight, bias, ROWS, parts[0][:, 0], 3), rtol=0, atol=1e-5
    )


def test_errors_say_what_to_do() -> None:
    logits, u = law(2, 5, 35), uniforms(2, 1, 36)
    rows = torch.arange(2)
    with pytest.raises(ValueError, match="one of the 5 words"):
        draw_from_logits(logits, rows, u, 5)
    with pytest.raises(ValueError, match="leave another"):
        draw_from_logits(logits[:, :1], rows, u, 0)
    with pytest.raises(ValueError, match="share H and dtype"):
        draw_from_head(logits, logits.double(), None, rows, u, None)
    with pytest.raises(ValueError, match="one of 0 distributions"):
        draw_from_logits(logits[:0], rows, u, None)


@GPU
def test_the_host_never_waits(device: str) -> None:
    states, weight, bias = on(device, *head(300, 3000, 64, torch.bfloat16, 37))
    rows, u = (torch.arange(300) - 1).to(device), uniforms(300, 4, 38).to(device)
    logits = states @ weight.T

    def everything() -> None:
        tokens, _ = draw_from_logits(logits, rows, u, 3)
        log_prob_from_logits(logits, rows, tokens[:, 0], 3)
        tokens, _ = draw_from_head(states, weight, bias, rows, u, 3)
        log_prob_from_head(states, weight, bias, rows, tokens[:, 0], 3)

    everything()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- what is overwritten, and what is not


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_laws_that_are_read_stay_as_they_are(dtype: torch.dtype) -> None:
    logits, states, weight = law(6, 9, 0, dtype), law(6, 4, 1, dtype), law(9, 4, 2, dtype)
    before = [logits.clone(), states.clone(), weight.clone()]
    rows, u, tokens = torch.arange(6), uniforms(6, 2, 3), torch.full((6,), 5)
    draw_from_logits(logits, rows, u, 8)
    log_prob_from_logits(logits, rows, tokens, 8)
    draw_from_head(states, weight, None, rows, u, 8)
    log_prob_from_head(states, weight, None, rows, tokens, 8)
    assert all(torch.equal(now, then) for now, then in zip((logits, states, weight), before, strict=True))


def test_a_mask_beyond_the_vocabulary_forbids_nothing() -> None:
    logits, worth = law(3, 5, 0), law(3, 5, 1)
    for mask in (-1, 5, 99):
        assert torch.allclose(masked_log_softmax(logits.clone(), mask), logits.log_softmax(-1))
        mu = logits.softmax(-1)
        slope, means = softmax_slope(logits.clone(), worth.clone(), 5, mask)
        assert torch.allclose(means, (mu * worth).sum(-1))
        assert torch.allclose(slope, mu * (worth - means.unsqueeze(-1)))


def test_who_asks_for_nothing_may_name_no_token() -> None:
    found = log_prob_from_logits(law(2, 5, 0), torch.tensor([0, -1]), torch.tensor([1, -1]), None)
    assert torch.allclose(found, torch.stack([dense(law(2, 5, 0))[0, 1].float(), torch.tensor(0.0)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_head_is_multiplied_out_in_single_precision_under_autocast_too(dtype: torch.dtype, biased: bool) -> None:
    """Autocast rounds every product to half precision, to one part in 256, unless it is told not to."""
    states, weight = law(4, 8, 0, dtype), law(6, 8, 1, dtype)
    bias = 50 * law(1, 6, 2, dtype)[0] if biased else None
    with torch.autocast("cpu", torch.bfloat16):
        found = fused.head_logits(states, weight, bias)
        assert torch.is_autocast_enabled("cpu")  # as it was
    assert found.dtype == torch.float32
    exact = states.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_columns_are_the_rows_up_to_a_constant_for_each(dtype: torch.dtype, biased: bool) -> None:
    head = torch.nn.Linear(8, 6, bias=biased, dtype=dtype).requires_grad_(False)
    head.weight.copy_(law(6, 8, 1, dtype))
    index = torch.tensor([2, 0, 2])
    for store in (HiddenLogits(law(4, 8, 0, dtype), head, 5), Logits(law(4, 6, 0, dtype), 5)):
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = store.columns(index)
            assert found.dtype == store.dtype
            torch.testing.assert_close(found.T.log_softmax(-1), store.rows(index), rtol=0, atol=1e-5)
