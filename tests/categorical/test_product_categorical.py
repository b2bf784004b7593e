"""Products of laws that are computed where they are read: the same numbers as spelt out, and no more of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from checks import answer, trial
from small_nets import KERNELS, Entered, Logit
from torch import Tensor, nn
from toys import seeded

import tokensteer as ts
from tokensteer.core.categorical.forms import Categorical, HiddenLogits, Logits, LogProbs
from tokensteer.core.categorical.product import Normalised, Powers, normalise_each
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.kernels.measure import Reveal

V, MASK, LAWS = 7, 2, 6
NEVER = -math.inf


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def some_impossible(logits: Tensor, seed: int) -> Tensor:
    return logits.masked_fill(torch.rand(logits.shape, generator=seeded(100 + seed)) < 0.15, NEVER)


def logs(seed: int) -> LogProbs:
    """Unnormalised, the mask forbidden, and in the last law every token."""
    values = some_impossible(noise(LAWS, V, seed=seed), seed)
    values[:, MASK] = values[-1] = NEVER
    return LogProbs(values)


def logits(seed: int) -> Logits:
    return Logits(some_impossible(2 * noise(LAWS, V, seed=seed), seed), MASK)


def headed(seed: int) -> HiddenLogits:
    head = nn.Linear(4, V, dtype=torch.float64).requires_grad_(False)
    head.weight.copy_(noise(V, 4, seed=seed))
    head.bias.copy_(noise(V, seed=seed + 1))
    return HiddenLogits(noise(LAWS, 4, seed=seed + 2), head, MASK)


STORES: dict[str, Callable[[int], Categorical]] = {"logs": logs, "logits": logits, "headed": headed}
KINDS = [("logs",), ("headed",), ("logs", "logs"), ("logits", "headed"), ("headed", "logs"), ("logits", "logits")]
KINDS += [("logs", "logits", "headed"), ("logits", "logits", "logs")]
POWERS = [(1.0, 1.0, 1.0), (1.5, -0.5, 0.3), (0.7, 0.0, -0.4), (1.2, -0.6, -0.8), (2.0, 0.5, 0.0)]


def laws_of(kinds: tuple[str, ...]) -> tuple[Categorical, ...]:
    return tuple(STORES[kind](10 * k) for k, kind in enumerate(kinds))


def stacked(laws: tuple[Categorical, ...], powers: tuple[float, ...]) -> Tensor:
    """All of it at once, as a textbook would, (LAWS, V)."""
    tables = torch.stack([law.rows(torch.arange(LAWS)) for law in laws])
    a = torch.tensor(powers, dtype=tables.dtype).view(-1, 1, 1)
    forbidden = ((tables == NEVER) & (a > 0)).any(0)
    return torch.where(a == 0, 0.0, a * tables).sum(0).masked_fill(forbidden, NEVER)


def normalised(table: Tensor) -> Tensor:
    anything = torch.full((V,), -math.log(V - 1), dtype=table.dtype)
    anything[MASK] = NEVER
    mass = table.logsumexp(-1, keepdim=True)
    return torch.where(mass == NEVER, anything, table - mass.masked_fill(mass == NEVER, 0.0))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("powers", POWERS, ids=str)
def test_products_are_what_is_spelt_out(kinds: tuple[str, ...], powers: tuple[float, ...]) -> None:
    """Rows, entries and masses, unnormalised and normalised, wherever they are asked for and whatever is impossible."""
    laws, powers = laws_of(kinds), powers[: len(kinds)]
    product, table = Powers(laws, powers), stacked(laws, powers)
    index = torch.tensor([[0, 5, -1], [3, 3, 1], [2, -1, 4]])
    where = (index >= 0) & torch.tensor([True, True, False]).unsqueeze(-1)
    tokens = SiteDistributions(product, index)
    close(product.rows(torch.arange(LAWS)), table)
    close(tokens.dense()[index >= 0], table[index[index >= 0]])
    y = torch.tensor([[0, 1, 0], [MASK, 4, 5], [6, 0, 3]])
    close(tokens.entry(y, where), torch.where(where, table[index, y], 0.0))
    close(tokens.mass(where), torch.where(where, table[index].logsumexp(-1), 0.0))
    assert not tokens.normalised
    # A token that only a model of negative power rules out has infinite mass, which is no law and is for p to say.
    finite = ~(table == math.inf).any(-1)
    one, expected = SiteDistributions(Normalised(product, MASK), index), normalised(table)
    assert one.normalised
    close(one.store.rows(finite.nonzero().squeeze(-1)), expected[finite])
    close(one.store.rows(torch.arange(LAWS)).logsumexp(-1)[finite], torch.zeros(int(finite.sum()), dtype=table.dtype))
    here = where & finite[index]
    close(one.entry(y, here), torch.where(here, expected[index, y], 0.0))
    assert not one.mass(where).any()


def test_an_infinite_mass_is_never_hidden() -> None:
    """Only a law of negative power rules token 0 out: what is drawn from it, and what is said of it, is no number."""
    values = torch.zeros(1, V, dtype=torch.float64)
    zero, mask = torch.tensor([0]), torch.tensor([MASK])
    product = Powers(
        (LogProbs(values.index_fill(1, mask, NEVER)), LogProbs(values.index_fill(1, zero, NEVER))), (1.5, -0.5)
    )
    assert product.entries(zero, zero).tolist() == [math.inf]
    assert product.entries(zero, mask).tolist() == [NEVER]
    u = torch.full((1, 1), 0.5, dtype=torch.float64)
    assert product.draw(zero, u)[1].isnan().all()
    assert Normalised(product, MASK).draw(zero, u)[1].isnan().all()


@pytest.mark.parametrize("kinds", [("logs",), ("logits", "headed"), ("headed", "logs", "logits")], ids="-".join)
@pytest.mark.parametrize("wrapped", [False, True])
def test_draws_follow_the_law(kinds: tuple[str, ...], wrapped: bool) -> None:
    """Chi-square of many draws from each law; what is said of a draw is what the law says when it is read."""
    laws, powers, draws = laws_of(kinds), (1.3, 0.4, 0.2)[: len(kinds)], 20_000
    table = stacked(laws, powers)
    law = Normalised(Powers(laws, powers), MASK) if wrapped else Powers(laws, powers)
    whole = torch.arange(LAWS) if wrapped else (table.logsumexp(-1) > NEVER).nonzero().squeeze(-1)
    u = 1.0 - torch.rand(len(whole) + 1, draws, generator=seeded(5), dtype=torch.float64)
    drawn, log_p = law.draw(torch.cat([torch.tensor([-1]), whole]), u)
    assert not drawn[0].any()
    assert not log_p[0].any()
    expected = normalised(table)[whole]
    close(log_p[1:], expected.gather(1, drawn[1:]))
    if wrapped:
        close(log_p[1:, 0], law.entries(whole, drawn[1:, 0]))
    seen = torch.nn.functional.one_hot(drawn[1:], V).sum(1)
    assert not seen[expected == NEVER].any()
    chi = torch.where(expected > NEVER, (seen - draws * expected.exp()) ** 2 / (draws * expected.exp()), 0.0).sum(-1)
    free = (expected > NEVER).sum(-1) - 1
    assert ((chi - free) / (2 * free).clamp(min=1).sqrt()).max() < 4.5


def test_few_are_spelt_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spelt: list[int] = []
    rows = HiddenLogits.rows

    def watched(self: HiddenLogits, index: Tensor) -> Tensor:
        spelt.append(len(index))
        return rows(self, index)

    law = Normalised(Powers((headed(1), headed(2)), (1.5, -0.5)), MASK)
    index, u = torch.tensor([0, 1, -1, 2, 3, 4, 5, 0, 1]), torch.rand(9, 2, generator=seeded(), dtype=torch.float64)
    token = torch.tensor([0, 1, 3, 4, 5, 6, 0, 1, 3])
    at_once = (*law.draw(index, u), law.entries(index, token)[index >= 0])
    monkeypatch.setattr("tokensteer.core.categorical.forms.WORKING", 16 * V * 3)
    monkeypatch.setattr(HiddenLogits, "rows", watched)
    in_parts = (*law.draw(index, u), law.entries(index, token)[index >= 0])
    assert max(spelt) <= 3
    for ours, theirs in zip(in_parts, at_once, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def pair(form: str, kernel: str = "mdm", num_steps: int = 6) -> tuple[ts.Diffusion, ts.Diffusion]:
    """Two random networks, in one form, one in each, or with one head for both. They are gentle: the weights of sharp
    ones that are corrected for remasking have tails that no z-score can judge."""
    heads: list[nn.Linear] = []

    def denoiser(kind: str, seed: int) -> ts.Denoiser:
        net = (Logit if kind == "logits" else Entered)(4).requires_grad_(False)
        net.mix.weight.copy_(noise(*net.mix.weight.shape, seed=seed) / 2)
        net.head.weight.copy_(noise(*net.head.weight.shape, seed=seed + 1) / 2)
        if kind == "logits":
            return ts.from_logits(net, 3, ignores_time=True)
        heads.append(net.head)
        return ts.from_hidden(net, heads[0 if form == "one head" else -1], 3, ignores_time=True)

    kinds = {"mixed": ("hidden", "logits"), "one head": ("hidden", "hidden")}.get(form, (form, form))
    first, second = (
        ts.Diffusion(denoiser(kind, seed), KERNELS[kernel], ts.uniform_steps(num_steps), ts.template(3, 3))
        for seed, kind in enumerate(kinds)
    )
    return first, second


@pytest.mark.parametrize(
    ("form", "proposal"), [("logits", ts.Guided()), ("hidden", ts.Optimal()), ("mixed", ts.Guided())]
)
@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf"])
def test_products_of_networks_are_unbiased(form: str, kernel: str, proposal: ts.Proposal) -> None:
    """log Z and every state against enumeration, at powers that do not sum to one."""
    model = ts.Product(pair(form, kernel), (1.6, -0.4), lookahead=isinstance(proposal, ts.Guided))
    outcome = trial(ts.Steering(model, None, proposal), answer(model), 8, 2048)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf"])
@pytest.mark.parametrize("proposal", [ts.Guided(), ts.Optimal()], ids=["guided", "optimal"])
def test_guidance_with_one_head_is_unbiased(kernel: str, proposal: ts.Proposal) -> None:
    model = ts.guided(*pair("one head", kernel), 1.5)
    outcome = trial(ts.Steering(model, None, proposal), answer(model), 8, 2048)
    assert outcome.unbiased, str(outcome)


def test_a_product_with_one_head_is_that_head_on_the_states_added_up() -> None:
    first, second = headed(1), headed(2)
    second = HiddenLogits(second.states, first.head, MASK)
    product, index = Powers((first, second), (1.5, -0.5)), torch.arange(LAWS).view(2, 3)
    everywhere = torch.ones_like(index, dtype=torch.bool)
    ours, theirs = (
        normalise_each(SiteDistributions(product, index), MASK),
        SiteDistributions(Normalised(product, MASK), index),
    )
    assert isinstance(ours.store, HiddenLogits)
    close(ours.at(everywhere), theirs.at(everywhere))
    for other in (  # powers that do not add up to one, another head, another form
        Powers((first, second), (1.5, 0.5)),
        Powers((first, headed(2)), (1.5, -0.5)),
        Powers((first, logits(2)), (1.5, -0.5)),
    ):
        assert isinstance(normalise_each(SiteDistributions(other, index), MASK).store, Normalised)


@pytest.mark.parametrize(("form", "tokens_only"), [("logits", True), ("hidden", False), ("one head", True)])
@pytest.mark.slow
def test_gradients_on_top_of_guidance_are_unbiased(form: str, tokens_only: bool) -> None:
    model = ts.guided(*pair(form), 1.5)
    reward = ts.Tilt(lambda x: (x == 1).double().sum(-1) if x.dim() == 2 else x[..., 1].sum(-1), 1.0, draws=2)
    q = ts.Gradient(base=ts.Guided(), clip=1.0, tokens_only=tokens_only)
    outcome = trial(ts.Steering(model, reward, q), answer(model, reward), 8, 4096)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("form", ["logits", "hidden", "mixed"])
@pytest.mark.parametrize("kernel", ["mdm", "remdm"])
def test_a_guided_step_reads_the_sites_that_open(form: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each network one law for each site that opens, and with remasking for each that is masked again; and of a
    step whose sites all stay, none."""
    model = ts.guided(*pair(form, kernel, num_steps=8), 1.5)
    steering = ts.Steering(model, None, ts.Guided())
    read: list[int] = []
    for store in (Logits, HiddenLogits, LogProbs):
        rows = store.rows

        def watched(self: Categorical, index: Tensor, rows: Callable[..., Tensor] = rows) -> Tensor:
            read.append(len(index))
            return rows(self, index)

        monkeypatch.setattr(store, "rows", watched)
    generator, most = seeded(3), 0
    x = model.start(100, generator)
    for step in model.steps:
        evaluation = steering.evaluate(x, step.t, generator)
        read.clear()
        y = steering.move(x, evaluation, step, generator).x
        opened, masked_again = ((x == 3) & (y != 3)).sum(), ((x != 3) & (y == 3)).sum()
        assert sum(read) == 2 * int(opened + masked_again)
        most, x = max(most, sum(read)), y
    assert 0 < most < 2 * x.numel()


def test_normalising_asks_the_vocabulary_for_nothing_until_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its mass not at all; with it once, however often it is asked for."""
    first, second = pair("hidden")
    model = ts.Product((first, second), (1.6, -0.4))
    x = model.start(5, None)
    p = model.transition(x, model.predict(x, 1.0), model.steps[0], None)
    assert isinstance(p, Reveal)
    read: list[int] = []
    rows = HiddenLogits.rows
    monkeypatch.setattr(HiddenLogits, "rows", lambda self, index: (read.append(len(index)), rows(self, index))[1])
    q = p.normalise_tokens()
    assert q.normalise_tokens() is q
    assert not read
    normal, total = p.normalise(), p.total()
    assert sum(read) == 2 * x.numel()
    torch.testing.assert_close(normal.dense().total(), torch.zeros_like(total), rtol=0, atol=1e-12)
    torch.testing.assert_close(p.dense().total(), total, rtol=0, atol=1e-12)
