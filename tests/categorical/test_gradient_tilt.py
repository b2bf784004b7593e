"""Laws bent by gradients of low rank: against the same spelt out over the vocabulary, on every device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checks import Answer, answer, judge
from narrow import untyped
from small_nets import KERNELS, Entered, Logit, Valued
from torch import Tensor, nn
from toys import Toy

import tokensteer as ts
from tokensteer.core.categorical.forms import HiddenLogits, Logits, LogProbs
from tokensteer.core.categorical.gradient_tilt import (
    GradientTilt,
    GradientTilted,
    LowRankGradient,
    gradient_tilt,
    softmax_slope,
)
from tokensteer.core.categorical.sites import SiteDistributions

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
BOTH = pytest.mark.parametrize("device", DEVICES)
MASK = 17
ASKED = torch.tensor([0, 1, -1, 3, 4, 5, 6, 2, -1])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def slopes(K: int, V: int, D: int, E: int, dtype: torch.dtype, device: str) -> LowRankGradient:
    tables = (normal(K, D, seed=1), normal(V, D, seed=2, scale=D**-0.5))
    more = (normal(K, E, seed=3), normal(V, E, seed=4, scale=E**-0.5))
    exact = torch.promote_types(dtype, torch.float32)
    drawn, rewarded, entered, embedded = (table.to(device, dtype) for table in (*tables, *more))
    return LowRankGradient(drawn, rewarded, entered, embedded, normal(K, seed=5).to(device, exact), MASK)


def example(
    form: str, V: int, H: int, dtype: torch.dtype, device: str, clip: float = 1.5, K: int = 5
) -> GradientTilted:
    g, exact = slopes(K, V, H, 24, dtype, device), torch.promote_types(dtype, torch.float32)
    if form == "logits":
        values = normal(K, V, seed=6, scale=2.0).to(device, dtype)
        values[:, 5::7] = -math.inf  # words that are never said
        law = Logits(values, MASK)
    else:
        head = nn.Linear(H, V, device=device, dtype=dtype).requires_grad_(False)
        head.weight.copy_(normal(V, H, seed=7, scale=2 / H**0.5))
        head.bias.copy_(normal(V, seed=8))
        head.bias[5::7] = -math.inf
        law = HiddenLogits(normal(K, H, seed=9).to(device, dtype), head, MASK)
    site, own = torch.tensor([0, 2, 4, 1, 3, 2, 0]), torch.tensor([4, 3, 2, 1, 0, 0, 1])
    scale, here = normal(7, seed=10).abs().to(device, exact), normal(7, seed=11).to(device, exact)
    return GradientTilted.make(
        law, own.to(device), GradientTilt(g, site.to(device), scale, here, clip), torch.arange(7, device=device)
    )


def spelt(law: GradientTilted) -> Tensor:
    """log mu + h in double, (7, V), all by hand."""
    g = law.gradient_tilt.base
    assert isinstance(g, LowRankGradient)
    drawn, rewarded, entered, embedded = (t.double() for t in (g.drawn, g.rewarded, g.entered, g.embedded))
    worth = drawn @ rewarded.T
    worth[:, MASK] = g.expected.double()
    slope = (worth + entered @ embedded.T)[law.gradient_tilt.site]
    h = law.gradient_tilt.scale.double().unsqueeze(-1) * (slope - law.gradient_tilt.here.double().unsqueeze(-1))
    if isinstance(law.base, Logits):
        logits = law.base.values.double()
    else:
        assert isinstance(law.base, HiddenLogits)
        logits = law.base.states.double() @ law.base.head.weight.double().T + law.base.head.bias.double()
    logits[:, MASK] = -math.inf
    return (logits.log_softmax(-1)[law.site] + h.clamp(-law.gradient_tilt.clip, law.gradient_tilt.clip)).cpu()


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_a_tilt_is_kept_within_its_clip(clip: float) -> None:
    """At a masked site log q - log p of each token, less that of the mask, is the tilt, and no more than the clip."""
    toy = Toy("B")
    x, step = ts.template(toy.length, toy.mask_id).unsqueeze(0), toy.model("mdm").steps[1]

    def tilt(most: float | None) -> Tensor:
        steering = ts.Steering(toy.model("mdm"), toy.tilt("mdm"), ts.Gradient(clip=most))
        evaluation = steering.evaluate(x, step.t, None)
        q = untyped(steering.propose(x, evaluation, step)).dense().log_p
        h = q - ts.FromModel()(x, evaluation, step, steering.model, None).dense().log_p
        return h[..., : toy.mask_id] - h[..., toy.mask_id :]

    straight = tilt(None)
    assert (straight > 0.2).any()
    assert (straight < -0.2).any()
    torch.testing.assert_close(tilt(clip), straight.clamp(-clip, clip), rtol=0, atol=1e-9)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize(("V", "H", "clip"), [(50, 16, 1.5), (700, 64, math.inf), (2049, 100, 0.3)])
def test_bent_laws_are_what_is_spelt_out(
    device: str, dtype: torch.dtype, form: str, V: int, H: int, clip: float
) -> None:
    """Rows, entries, draws and the mass: one and the same law, which sums to one."""
    law = example(form, V, H, dtype, device, clip)
    table, close = spelt(law), 1e-12 if dtype == torch.float64 else 2e-5
    gain, log_q = table.logsumexp(-1), table.log_softmax(-1)
    asked, lines = ASKED.to(device), ASKED.clamp(min=0)
    u = 1.0 - torch.rand(len(ASKED), 6, generator=seeded(12), dtype=torch.float64)
    tokens, log_p = (drawn.cpu() for drawn in law.draw(asked, u.to(device)))
    skipped = ASKED < 0
    assert not tokens[skipped].any()
    assert not log_p[skipped].any()
    cdf = log_q[lines].exp().cumsum(-1)
    low, high = (torch.searchsorted(cdf, u + by).clamp(max=V - 1) for by in (-close, close))
    assert ((low <= tokens) & (tokens <= high))[~skipped].all()
    expected = log_q[lines].gather(1, tokens)[~skipped]
    torch.testing.assert_close(log_p.double()[~skipped], expected, rtol=0, atol=close)
    gained = law.gain(asked).cpu().double()
    torch.testing.assert_close(gained[~skipped], gain[lines][~skipped], rtol=0, atol=close)
    entries = law.entries(asked.clamp(min=0), tokens[:, 0].to(device)).cpu().double()
    torch.testing.assert_close(entries[~skipped], expected.view(-1, 6)[:, 0], rtol=0, atol=close)
    rows = law.rows(torch.arange(7, device=device)).cpu().double()
    torch.testing.assert_close(rows.exp(), log_q.exp(), rtol=0, atol=close)
    torch.testing.assert_close(rows.logsumexp(-1), torch.zeros(7, dtype=torch.float64), rtol=0, atol=close)


@BOTH
def test_many_bent_laws(device: str) -> None:
    """Several blocks of rows and words, half of the lines skipped: the kernels against plain torch."""
    K, V, H = 1000, 5003, 192
    law = example("hidden", V, H, torch.bfloat16, device, K=K)
    line = torch.randint(7, (K,), generator=seeded(13))
    line[torch.rand(K, generator=seeded(14)) < 0.5] = -1
    u = 1.0 - torch.rand(K, 2, generator=seeded(15), dtype=torch.float64)
    tokens, log_p = (drawn.cpu() for drawn in law.draw(line.to(device), u.to(device)))
    log_q = spelt(law).log_softmax(-1)[line.clamp(min=0)]
    expected = log_q.gather(1, tokens).masked_fill((line < 0).unsqueeze(-1), 0.0)
    torch.testing.assert_close(log_p.double(), expected, rtol=0, atol=5e-5)


@BOTH
def test_a_slope_of_nan_is_not_clipped_away(device: str) -> None:
    law = example("hidden", 300, 64, torch.bfloat16, device)
    g = law.gradient_tilt.base
    assert isinstance(g, LowRankGradient)
    g.drawn[4] = math.nan
    law = GradientTilted.make(law.base, law.site, law.gradient_tilt, law.line)
    u = torch.full((7, 1), 0.5, dtype=torch.float64, device=device)
    log_p = law.draw(torch.arange(7, device=device), u)[1]
    assert log_p.isnan().squeeze(-1).tolist() == (law.gradient_tilt.site == 4).tolist()


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("V", [50, 5003])
def test_the_slope_of_a_softmax(device: str, dtype: torch.dtype, V: int) -> None:
    """mu · (worth - mean) is what automatic differentiation says; what is beyond the vocabulary is not looked at."""
    logits, worth = (normal(6, V + 14, seed=seed, scale=2.0).to(device, dtype) for seed in (16, 17))
    logits[:, 5::7] = -math.inf  # words that are never said
    seen = logits.double()[:, :V].clone().requires_grad_()
    mean = (seen.index_fill(1, torch.tensor(MASK, device=device), -math.inf).softmax(-1) * worth.double()[:, :V]).sum(
        -1
    )
    (expected,) = torch.autograd.grad(mean.sum(), seen)
    close = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 4e-3)
    slope, means = softmax_slope(logits, worth, V, MASK)
    torch.testing.assert_close(slope.double()[:, :V], expected, rtol=close, atol=close)
    torch.testing.assert_close(means.double(), mean.detach(), rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_slopes_are_kept_like_any_store() -> None:
    g = slopes(6, 30, 4, 3, torch.float64, "cpu")
    dense = g.rows(torch.arange(6))
    token = torch.tensor([3, MASK, 29, 0, MASK, 7])
    assert torch.allclose(g.entries(torch.arange(6), token), dense.gather(1, token.unsqueeze(-1)).squeeze(-1))
    some, others = torch.tensor([4, 1]), torch.tensor([0, 0, 5])
    joined = g.select(some).join(g.select(others))
    assert torch.equal(joined.rows(torch.arange(5)), dense[torch.cat([some, others])])
    where = torch.tensor([[True, False, True], [True, True, False]])
    scale, x = torch.rand(2, 3, dtype=torch.float64, generator=seeded(0)), torch.tensor([[MASK, 3, 4], [5, MASK, 9]])
    index = torch.arange(6).view(2, 3)
    lean, full = (
        gradient_tilt(SiteDistributions(store, index), where, scale, x, 0.5) for store in (g, LogProbs(dense))
    )
    assert not lean.entry(x, where).any()
    assert torch.allclose(lean.at(where), full.at(where))
    assert torch.allclose(lean.entry(index, where), full.entry(index, where))
    u = torch.rand(3, 2, dtype=torch.float64, generator=seeded(1))
    for store in (g, lean.store):
        tokens, log_p = store.draw(torch.tensor([0, 2, 3]), u)
        law = store.rows(torch.tensor([0, 2, 3])).log_softmax(-1)
        assert torch.allclose(log_p, law.gather(1, tokens))


@BOTH
@pytest.mark.parametrize(("form", "dtype"), [("logits", torch.float32), ("hidden", torch.bfloat16)])
@pytest.mark.parametrize(("kernel", "options"), [("mdm", {}), ("remdm", {}), ("mdm", {"tokens_only": True})])
@pytest.mark.slow
def test_following_a_gradient_in_low_precision_is_unbiased(
    device: str, form: str, kernel: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Networks in half precision, laws in float32: log Z and every state against enumeration of the same networks."""
    reward = Valued(1).requires_grad_(False).to(device, dtype)
    trunk, logits = (net(4).requires_grad_(False).to(device, dtype) for net in (Entered, Logit))
    hidden = ts.from_hidden(trunk, trunk.head, 3, ignores_time=True)
    denoiser = hidden if form == "hidden" else ts.from_logits(logits, 3, ignores_time=True)
    model = ts.Diffusion(denoiser, KERNELS[kernel], ts.uniform_steps(4), ts.template(3, 3).to(device))
    tilt = ts.Tilt(reward, 1.0, draws=3, differentiable=True)
    steering = ts.Steering(model, tilt, ts.Gradient(clip=1.0, **options))
    truth = answer(model, tilt)
    truth = Answer(truth.log_z, truth.target.cpu(), truth.clean.cpu())
    generator = torch.Generator(device).manual_seed(0)
    result = ts.smc(steering, 8, 2048, resample=ts.resampling.multinomial, when=ts.triggers.always, generator=generator)
    outcome = judge(result.samples.cpu(), result.log_w.cpu(), truth)
    assert outcome.unbiased, str(outcome)


@BOTH
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf", "entropy", "jumps"])
@pytest.mark.parametrize("tokens_only", [False, True])
def test_the_ratio_of_a_draw_needs_no_look_at_the_model(
    device: str, form: str, kernel: str, tokens_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log p/q of a draw from a bent law is what bent it: the same number as from both laws, without reading p's."""
    reward = Valued(1).requires_grad_(False).to(device)
    trunk, logits = (net(4).requires_grad_(False).to(device) for net in (Entered, Logit))
    hidden = ts.from_hidden(trunk, trunk.head, 3, ignores_time=True)
    denoiser = hidden if form == "hidden" else ts.from_logits(logits, 3, ignores_time=True)
    model = ts.Diffusion(denoiser, KERNELS[kernel], ts.uniform_steps(4), ts.template(3, 3).to(device))
    tilt = ts.Tilt(reward, 1.0, draws=3, differentiable=True)
    steering = ts.Steering(model, tilt, ts.Gradient(clip=1.0, tokens_only=tokens_only))
    generator = torch.Generator(device).manual_seed(0)
    x, largest = model.start(200, generator), 0.0
    for step in model.steps[:2]:
        evaluation = steering.evaluate(x, step.t, generator)
        q = untyped(steering.propose(x, evaluation, step))
        y, log_q = q.draw(generator)
        both = steering.log_ratio(y, x, evaluation, step, q)
        with monkeypatch.context() as patch:
            for store in (Logits, HiddenLogits):
                patch.setattr(store, "entries", lambda *asked: pytest.fail("the model's law was read"))
            alone = steering.log_ratio(y, x, evaluation, step, q, log_q)
        assert torch.allclose(alone, both, atol=1e-5)
        largest = max(largest, float(alone.abs().max()))
        x = y
    assert largest > 0.01


def test_weights_hold_on_to_no_graph() -> None:
    """Not even where networks learn: a run is no place for gradients in their parameters."""
    trunk, reward = Entered(4), Valued(1)
    denoiser = ts.from_hidden(trunk, trunk.head, 3, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(3), ts.uniform_steps(3), ts.template(3, 3))
    steering = ts.Steering(model, ts.Tilt(reward, draws=2, differentiable=True), ts.Gradient())
    assert not ts.smc(steering, 4, generator=seeded(0)).log_w.requires_grad
