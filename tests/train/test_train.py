"""The bounds against entropies that are known, and the trainer against itself, killed and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrow import untyped
from torch import Tensor
from uniform_toys import uniform_denoiser

import tokensteer as ts
from tokensteer import tensorfile as stored
from tokensteer import train
from tokensteer.tasks import nets
from tokensteer.testing import TableDenoiser, all_sequences

ROWS = 40_000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_joint(tokens: int, length: int) -> Tensor:
    joint = torch.rand([tokens] * length, generator=seeded(3), dtype=torch.float64).pow(3) + 0.01
    return joint / joint.sum()


def draws(joint: Tensor, rows: int = ROWS) -> Tensor:
    index = torch.multinomial(joint.flatten(), rows, replacement=True, generator=seeded(1))
    return all_sequences(joint.shape[0], joint.dim())[index]


def entropy(joint: Tensor) -> float:
    return float(-(joint * joint.log()).sum())


def predict_masked(joint: Tensor) -> train.Predict:
    denoiser = TableDenoiser(joint)
    return lambda x, t: denoiser(x, 0.5)


def predict_uniform(joint: Tensor) -> train.Predict:
    """The exact posterior at the time of each row."""

    def predict(x: Tensor, t: Tensor) -> Tensor:
        tokens, alpha = joint.shape[0], (1 - t.double())[:, None, None]
        likelihood = alpha * torch.nn.functional.one_hot(x, tokens) + (1 - alpha) / tokens
        both = torch.einsum("pi,pj,ij->pij", likelihood[:, 0], likelihood[:, 1], joint)
        masses = torch.stack([both.sum(2), both.sum(1)], 1)
        return masses.log() - masses.sum(-1, keepdim=True).log()

    return predict


def z_score(samples: Tensor, expected: float) -> float:
    return float((samples.mean() - expected) / (samples.std() / math.sqrt(len(samples))))


def even(rows: int) -> Tensor:
    """Independent times: strata would make the standard error too large, and the z-score too kind."""
    return torch.rand(rows, generator=seeded(7))


def masked(predict: train.Predict, x0: Tensor, tokens: int) -> Tensor:
    return train.masked_bound(predict, x0, tokens, seeded(2), even(len(x0)))


def test_masked_bound_of_the_exact_denoiser_is_the_entropy():
    joint = some_joint(4, 3)
    assert abs(z_score(masked(predict_masked(joint), draws(joint), 4), entropy(joint))) < 4


def test_masked_bound_of_another_denoiser_is_above_the_entropy():
    joint = some_joint(4, 3)
    marginals = [joint.sum([d for d in range(3) if d != site]) for site in range(3)]
    independent = torch.einsum("i,j,k->ijk", *marginals)
    bound = masked(predict_masked(independent), draws(joint), 4)
    assert abs(z_score(bound, entropy(independent))) < 4
    assert entropy(independent) > entropy(joint) + 0.02


def test_masked_bound_of_one_sequence_is_an_average_over_orders():
    """-log p(x_0) is the same in every order for the exact denoiser, so the bound is too, on average."""
    joint = some_joint(3, 3)
    x0 = torch.tensor([[2, 0, 1]]).expand(ROWS, 3)
    assert abs(z_score(masked(predict_masked(joint), x0, 3), -float(joint[2, 0, 1].log()))) < 4


def test_the_time_of_a_masked_sequence_is_the_right_one():
    """Among sequences weighted as in the bound, those with k of L masked have E[t] = k/(L + 1)."""
    times: list[Tensor] = []
    counts: list[Tensor] = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        times.append(t)
        counts.append((x == 4).sum(-1))
        return torch.zeros(*x.shape, 5)

    masked(predict, draws(some_joint(4, 3)), 4)
    for k in (1, 2, 3):
        t = times[0][counts[0] == k]
        assert len(t) == pytest.approx(ROWS / 3, rel=0.05)
        assert abs(z_score(t, k / 4)) < 4


def test_uniform_bound_of_the_exact_denoiser_is_the_entropy():
    joint = some_joint(3, 2)
    predict = predict_uniform(joint)
    exact = uniform_denoiser(joint, ts.Linear())
    x = all_sequences(3, 2)
    torch.testing.assert_close(predict(x, torch.full((9,), 0.3)), exact(x, 0.3), atol=1e-6, rtol=1e-5)
    bound = train.uniform_bound(predict, draws(joint), 3, seeded(2), even(ROWS))
    assert abs(z_score(bound, entropy(joint))) < 4


def test_uniform_bound_of_another_denoiser_is_above_the_entropy():
    joint = some_joint(3, 2)
    independent = joint.sum(1, keepdim=True) * joint.sum(0)
    bound = train.uniform_bound(predict_uniform(independent), draws(joint), 3, seeded(2), even(ROWS))
    assert z_score(bound, entropy(joint)) > 10
    assert abs(z_score(bound, entropy(independent))) < 4


def broken_weight(predict: train.Predict, x0: Tensor) -> Tensor:
    return masked(predict, x0, 4) * 0.9


def broken_sign(predict: train.Predict, x0: Tensor) -> Tensor:
    return -masked(predict, x0, 4)


def broken_sites(predict: train.Predict, x0: Tensor) -> Tensor:
    return masked(lambda x, t: predict(x, t).nan_to_num(neginf=-20.0) / 2, x0, 4)


@pytest.mark.parametrize("broken", [broken_weight, broken_sign, broken_sites])
def test_mistakes_would_be_seen(broken: Callable[[train.Predict, Tensor], Tensor]):
    joint = some_joint(4, 3)
    assert abs(z_score(broken(predict_masked(joint), draws(joint)), entropy(joint))) > 10


def test_strata_calm_the_loss():
    joint = some_joint(4, 3)
    x0, g = draws(joint, 64), seeded(5)
    uneven = lambda x, t: torch.zeros(*x.shape, 5) + torch.arange(5.0)  # noqa: E731
    spread = {
        kind: torch.stack([train.masked_bound(uneven, x0, 4, g, u()).mean() for _ in range(200)]).std()
        for kind, u in {"strata": lambda: None, "free": lambda: torch.rand(64, generator=g)}.items()
    }
    assert spread["strata"] < spread["free"]


# ---- the trainer


CONFIG = nets.TransformerConfig(5, 3, width=16, depth=1, heads=2, num_classes=2)
PLAN = train.Plan(20, batch_size=32, rate=1e-2, report_every=5, save_every=5, average=0.9)
DATA = draws(some_joint(4, 3), 200)
LABELS = (DATA.sum(-1) > 4).long()


class Killed(Exception):  # noqa: N818
    pass


def fresh() -> nets.Transformer:
    torch.manual_seed(0)
    return nets.Transformer(CONFIG)


def trained(
    file: Path | None, kill_at: int | None = None, plan: train.Plan = PLAN
) -> tuple[nets.Transformer, train.Fitted]:
    def watch(report: train.Report) -> None:
        if report.step == kill_at:
            raise Killed

    net = fresh()
    loss = train.masked_loss(4)
    return net, train.fit(net, loss, DATA, LABELS, plan=plan, generator=seeded(), checkpoint=file, watch=watch)


def test_resumed_training_is_the_same_bit_for_bit(tmp_path):
    file = tmp_path / "checkpoint.safetensors"
    net, whole = trained(None)
    with pytest.raises(Killed):
        trained(file, kill_at=10)
    assert stored.read(file)[1]["step"] == 10
    torch.manual_seed(99)  # what the process did in between must not matter
    again, resumed = trained(file)
    assert resumed.last.step == whole.last.step == 20
    assert resumed.last.loss == whole.last.loss
    for one, other in ((net, again), (whole.net, resumed.net)):
        for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
            assert torch.equal(a, b), name
    assert not torch.equal(net.head.weight, fresh().head.weight)


def test_killed_between_checkpoints_goes_back_to_the_last(tmp_path):
    file, plan = tmp_path / "checkpoint.safetensors", replace(PLAN, save_every=7)
    with pytest.raises(Killed):
        trained(file, kill_at=10, plan=plan)
    assert stored.read(file)[1]["step"] == 7
    again, _ = trained(file, plan=plan)
    net, _ = trained(None, plan=plan)
    assert torch.equal(net.head.weight, again.head.weight)


def test_checkpoints_that_do_not_fit(tmp_path):
    file = tmp_path / "checkpoint.safetensors"
    trained(file)
    with pytest.raises(ValueError, match="another plan"):
        trained(file, plan=replace(PLAN, steps=30))
    other = nets.Transformer(replace(CONFIG, width=32))
    with pytest.raises(ValueError, match=r"network was .*width=16.*is now .*width=32"):
        train.fit(other, train.masked_loss(4), DATA, LABELS, plan=PLAN, generator=seeded(), checkpoint=file)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged"):
        trained(file)


def test_a_time_budget_ends_a_run_and_brings_the_rate_down():
    plan = replace(PLAN, steps=10**9, seconds=0.3)
    _, fitted = trained(None, plan=plan)
    assert fitted.last.done >= 1.0
    assert 0.3 <= fitted.last.seconds < 5.0
    assert plan.rate_at(1.0) == pytest.approx(0.0, abs=1e-12)
    assert plan.rate_at(plan.warmup) == pytest.approx(plan.rate)
    assert plan.rate_at(0.0) < 0.01 * plan.rate


@pytest.mark.parametrize("loss", ["masked", "uniform"])
def test_training_comes_near_the_entropy(loss):
    joint = some_joint(3, 2)
    x0 = draws(joint)
    torch.manual_seed(0)
    net = nets.Transformer(nets.TransformerConfig(4, 2, width=16, depth=1, heads=2, timed=loss == "uniform"))
    make = train.masked_loss(3) if loss == "masked" else train.uniform_loss(4)
    plan = train.Plan(200, batch_size=128, rate=1e-2, report_every=80)
    fitted = train.fit(net, make, x0, plan=plan, generator=seeded())
    assert entropy(joint) - 0.1 < 2 * fitted.last.loss < entropy(joint) + 0.4  # it starts near log 16 = 2.8


def test_labels_are_learned_and_can_be_left_out():
    """Each class has its own token: a network told the class knows it all, one that is not is unsure."""
    labels = torch.randint(2, (500,), generator=seeded())
    net = nets.Transformer(nets.TransformerConfig(3, 2, width=16, depth=1, heads=2, num_classes=2))
    plan = train.Plan(150, batch_size=64, rate=1e-2, average=0.9)
    fitted = train.fit(
        net, train.masked_loss(2, 0.3), labels[:, None].expand(-1, 2), labels, plan=plan, generator=seeded()
    )
    blank = torch.full((2, 2), 2)
    told = fitted.net(blank, None, torch.tensor([0, 1]))[..., :2].softmax(-1)
    assert told[0, :, 0].min() > 0.95
    assert told[1, :, 1].min() > 0.95
    assert (fitted.net(blank)[..., :2].softmax(-1) - 0.5).abs().max() < 0.2


def test_what_cannot_work_says_so():
    with pytest.raises(ValueError, match="at least 1"):
        train.Plan(0)
    with pytest.raises(ValueError, match="seconds must be positive and finite"):
        train.Plan(1, seconds=0.0)
    conv = nets.ConvClassifier(nets.ConvConfig(5, 2, 2, 2, channels=(8,)))
    with pytest.raises(ValueError, match="labels"):
        train.fit(conv, train.classifier_loss(), DATA, plan=PLAN, generator=seeded())
    nan = lambda net, x, y, g: next(net.parameters()).sum() * math.nan  # noqa: E731
    with pytest.raises(RuntimeError, match="loss is nan by step 5"):
        train.fit(fresh(), nan, DATA, plan=PLAN, generator=seeded())


def test_progress_is_a_few_lines_where_there_is_no_terminal(capsys):
    with train.shown("digits denoiser") as watch:
        for step in range(100):
            watch(train.Report(step, (step + 1) / 100, 0.5, 1.0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1] == "digits denoiser: 100%, step 99, loss 0.5000, 1 s"


def test_the_title_of_a_bar_is_no_markup(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with train.shown("[bold]{odd}[/nothing]") as watch:
        watch(train.Report(1, 1.0, 0.5, 1.0))
    assert "[bold]{odd}[/nothing]" in capsys.readouterr().err


def test_a_short_training_returns_what_it_reports():
    """The average of few steps has left the start, and the report of the end is of the average."""
    found = {}
    for average in (0.999, 0.0):
        _, fitted = trained(None, plan=replace(PLAN, steps=120, report_every=40, average=average))
        g, net = seeded(9), fitted.net
        with torch.no_grad():
            losses = [train.masked_loss(4)(net, DATA, LABELS, g) for _ in range(40)]
        found[average] = float(torch.stack(losses).mean())
        assert fitted.last.loss == pytest.approx(found[average], rel=0.05)
    assert found[0.999] == pytest.approx(found[0.0], rel=0.05)


def test_the_callers_generator_is_not_moved_by_the_last_report():
    after = []
    for every in (5, 20):
        g = seeded()
        train.fit(fresh(), train.masked_loss(4), DATA, plan=replace(PLAN, report_every=every), generator=g)
        after.append(g.get_state())
    assert torch.equal(*after)


def test_a_finished_run_is_reported_again_as_it_was(tmp_path):
    file = tmp_path / "checkpoint.safetensors"
    _, whole = trained(file)
    _, again = trained(file)
    assert whole.last == again.last


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"generator": seeded(1)}, "seed was 0 and is now 1"),
        ({"loss": train.masked_loss(4, 0.5)}, r"loss was .*label_dropout=0\.1\).*label_dropout=0\.5\)"),
        ({"ids": DATA.flip(0)}, r"data was \(200, 3\) \w+ and is now \(200, 3\)"),
        ({"labels": 1 - LABELS}, "data was"),
        ({"plan": replace(PLAN, rate=0.5)}, r"rate was 0\.01 and is now 0\.5"),
        ({"net": nets.Transformer(replace(CONFIG, heads=4))}, "heads=2.*heads=4"),
    ],
)
def test_a_run_that_was_given_something_else_does_not_go_on(tmp_path, given, told):
    file = tmp_path / "checkpoint.safetensors"
    trained(file)
    before = file.read_bytes()
    options = {"net": fresh(), "loss": train.masked_loss(4), "ids": DATA, "labels": LABELS, "plan": PLAN}
    options |= {"generator": seeded()} | given
    net, loss, ids, labels = (options.pop(name) for name in ("net", "loss", "ids", "labels"))
    with pytest.raises(ValueError, match=told) as refused:
        train.fit(net, loss, ids, labels, checkpoint=file, **options)
    assert str(file) in str(refused.value)
    assert "delete it" in str(refused.value)
    assert file.read_bytes() == before


NUMBERS = (math.nan, math.inf, -math.inf, -1, "1")


@pytest.mark.parametrize("bad", [*NUMBERS, True])
def test_domains_of_plans(bad):
    for make, counts, numbers in (
        (lambda **o: train.Plan(**{"steps": 5} | o), ("steps", "batch_size", "report_every", "save_every"),
         ("rate", "warmup", "weight_decay", "average", "seconds")),
        (lambda **o: train.ProposalPlan(**{"rounds": 5} | o),
         ("rounds", "paths", "updates", "replay", "times", "last", "rows", "report_every", "save_every"),
         ("on_policy", "anneal", "entropy", "kl", "rate", "baseline_rate", "warmup", "weight_decay", "average",
          "seconds")),
        (lambda **o: train.DrakesPlan(**{"rounds": 5} | o),
         ("rounds", "paths", "parts", "last", "report_every", "save_every"),
         ("kl", "temperature", "last_temperature", "rate", "warmup", "weight_decay", "average", "seconds")),
    ):  # fmt: skip
        for name in (*counts, *numbers):
            with pytest.raises(ValueError, match=rf"Plan\.{name} must"):
                make(**{name: bad})
        for name in counts:
            with pytest.raises(ValueError, match=f"{name} must be a whole number"):
                make(**{name: 2.0})
        with pytest.raises(ValueError, match=r"clip must lie in \(0, inf\]"):
            make(clip=0)
        assert make(clip=math.inf).clip == math.inf
    for wrong in (lambda: train.masked_loss(-1), lambda: train.masked_loss(1, 1.5), lambda: train.uniform_loss(0)):
        with pytest.raises(ValueError, match="must"):
            wrong()
    for wrong in (train.OfTime, lambda width: train.OfState(3, 2, width), lambda n: train.Balance(ends=n)):
        with pytest.raises(ValueError, match="must"):
            wrong(bad)
    for name in ("rows", "entropy", "kl"):
        with pytest.raises(ValueError, match=rf"Batch\.{name} must"):
            train.Batch(untyped(None), untyped(None), (), **{name: bad})
