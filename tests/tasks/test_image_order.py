"""The option `order` of `emoji` and `cifar`: the law against a recursion, weights against enumeration, and refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_cifar
import small_emoji
import torch
from checks import answer, trial
from torch import Tensor

import tokensteer as ts
from tokensteer.app.cli import main
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, prepare
from tokensteer.app.runs.recipes import METHODS
from tokensteer.app.words.settings import ORDERS
from tokensteer.core.kernels.ranked import Ranked, evenly
from tokensteer.core.steering.steering import Steering
from tokensteer.tasks.cifar import model as cifar_model
from tokensteer.tasks.cifar import task as cifar
from tokensteer.tasks.common.settings import CONFIDENT, RANDOM, Settings
from tokensteer.tasks.common.task import Prompt, Setup, Task
from tokensteer.tasks.emoji import model as emoji_model
from tokensteer.tasks.emoji import task as emoji
from tokensteer.tasks.nets.grid_transformer import adapted
from tokensteer.testing import enumerate_steering

CAPTION, LABEL, STEPS, GUIDANCE = "a red square", 4, 3, 1.5
COUNTS = (1, 1, 2)  # of four sites, by the cosine in three steps: the last two open together


def emoji_of(order: str | None, **settings: Any) -> tuple[emoji_model.Networks, Task]:
    """Drawings of four sites of three codes, and the task of one caption."""
    networks = small_emoji.networks(side=8, levels=(3,))
    setup = Setup(STEPS, order=order, guidance=GUIDANCE, **{"kl": 0.01, **settings})
    return networks, emoji.of_prompts(setup, networks, [Prompt(CAPTION, "it")])


def cifar_of(order: str | None, **settings: Any) -> tuple[cifar_model.Networks, Task]:
    """The same of images of a class. Blocks add nothing before training, and sites would not depend on one another."""
    networks = replace(small_cifar.networks(4, levels=(3,)), temperature=2.0)
    torch.manual_seed(1)
    for name, weight in networks.denoiser.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            torch.nn.init.normal_(weight)
    setup = Setup(STEPS, LABEL, order=order, guidance=GUIDANCE, **{"kl": 0.5, **settings})
    return networks, cifar.of_classes(setup, networks, [LABEL])


def guided(networks: emoji_model.Networks, x: Tensor) -> Tensor:
    """log p_g at each site, from the network itself."""
    told = networks.states([CAPTION])
    given, without = (networks.denoiser(x, states)[..., :-1].log_softmax(-1) for states in (told, 0 * told))
    return (GUIDANCE * given + (1 - GUIDANCE) * without).log_softmax(-1)


def of_class(networks: cifar_model.Networks, x: Tensor) -> Tensor:
    return (networks.denoiser(x, torch.tensor([LABEL]))[..., :-1] / networks.temperature).log_softmax(-1)


def confident_law(log_p: Callable[[Tensor], Tensor], mask: int) -> Tensor:
    """The law of all sequences, lexicographically: the surest sites open, and their tokens are independent."""
    laws = {(mask,) * 4: 1.0}
    for count in COUNTS:
        after: dict[tuple[int, ...], float] = {}
        for x, p in laws.items():
            here = log_p(torch.tensor([x]))[0]
            masked = [site for site in range(4) if x[site] == mask]
            best = sorted(masked, key=lambda site: -float(here[site].max()))[:count]
            for tokens in itertools.product(range(mask), repeat=count):
                y = list(x)
                for site, token in zip(best, tokens, strict=True):
                    y[site] = token
                own = sum(float(here[site, token]) for site, token in zip(best, tokens, strict=True))
                after[tuple(y)] = after.get(tuple(y), 0.0) + p * math.exp(own)
        laws = after
    return torch.tensor([laws[x] for x in itertools.product(range(mask), repeat=4)])


def confident_laws() -> dict[str, tuple[Task, Tensor]]:
    drawings, drawn = emoji_of(CONFIDENT)
    images, seen = cifar_of(CONFIDENT)
    return {
        "emoji": (drawn, confident_law(lambda x: guided(drawings, x), drawings.mask)),
        "cifar": (seen, confident_law(lambda x: of_class(images, x), images.mask)),
    }


@pytest.mark.parametrize("name", ["emoji", "cifar"])
def test_the_surest_sites_of_the_reference_open_first(name: str):
    """For emoji those of the guided sampler; and the random order is another law."""
    task, law = confident_laws()[name]
    left = zip(task.model.steps, (4, 3, 2), strict=True)
    assert tuple(int(evenly(step, torch.tensor(masked))) for step, masked in left) == COUNTS
    found = enumerate_steering(Steering(task.model))
    torch.testing.assert_close(found.target, law.to(found.target), atol=1e-5, rtol=1e-4)
    other = {"emoji": emoji_of, "cifar": cifar_of}[name](RANDOM)[1]
    assert (enumerate_steering(Steering(other.model)).target - law).abs().sum() > 0.1


@pytest.mark.parametrize("name", ["emoji", "cifar"])
@pytest.mark.parametrize("method", ["smc-base", "smc-grad"])
def test_weights_of_the_confident_order_are_exact(name: str, method: str):
    """The target is the law of the recursion times exp(r/kl), and estimates of its normaliser are unbiased."""
    task, law = confident_laws()[name]
    path = METHODS[method].make(task, task.tilt, 8).steering
    truth = answer(path.model, path.twist, path.proposal)
    tilted = law.double() * (task.tilt.exact(truth.clean).double() / task.tilt.kl).exp()
    torch.testing.assert_close(truth.target, tilted / tilted.sum(), atol=1e-5, rtol=1e-4)
    assert truth.log_z == pytest.approx(float(tilted.sum().log()), abs=1e-4)
    outcome = trial(path, truth, populations=1024)
    assert outcome.unbiased, str(outcome)


def test_a_learned_proposal_shares_the_sites_of_the_reference():
    """Its own confidence is another; its weights are those of the reference's order."""
    networks, task = emoji_of(CONFIDENT)
    net = adapted(networks.denoiser, 2)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.startswith("adapters."):
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    proposal = ts.Amortised(emoji_model.as_guided(GUIDANCE)(net))
    path = ts.smc_amot(task.model, task.tilt, proposal).steering
    x = torch.full((1, 4), networks.mask)
    log_q = proposal.denoiser(x, 1.0, *task.model.conditions)
    assert int(log_q.amax(-1).argmax()) != int(guided(networks, x).amax(-1).argmax())
    outcome = trial(path, answer(path.model, path.twist, path.proposal), populations=1024)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("made", [emoji_of, cifar_of])
@pytest.mark.parametrize("reward", [None, True])
def test_products_are_exact_in_the_order_of_their_first_model(made: Callable[..., Any], reward: bool | None):
    names = {emoji_of: "alignment", cifar_of: "class"}
    _, task = made(CONFIDENT, reward=names[made] if reward else None)
    path = METHODS["smc-cfg"].make(task, task.tilt, 8).steering
    assert isinstance(path.model.kernel, Ranked)
    outcome = trial(path, answer(path.model, path.twist, path.proposal), populations=1024)
    assert outcome.unbiased, str(outcome)


# ---- the option


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_emoji.save(small_cifar.save(tmp_path_factory.mktemp("weights")))


def command(*words: object) -> int:
    return main([str(word) for word in words])


TINY = ("--steps", 2, "--particles", 2, "--populations", 1)


@pytest.mark.parametrize(("task", "more"), [("emoji", ("--prompt", "a blue bar")), ("cifar", ("--goal", 3))])
def test_a_run_is_run_again_in_its_order(task: str, more: tuple[object, ...], weights: Path, tmp_path: Path):
    words = (task, "--weights", weights, *TINY, *more, "--methods", "smc-base", "smc-cfg")
    assert command("compare", *words, "--order", "confident", "--out", tmp_path / "a") == 0
    assert command("compare", "--config", tmp_path / "a" / "config.json", "--out", tmp_path / "b") == 0
    assert command("compare", *words, "--out", tmp_path / "c") == 0
    assert command("compare", *words, "--order", "random", "--out", tmp_path / "d") == 0
    first, again, usual, named = (ts.open_run(tmp_path / name) for name in "abcd")
    assert first.config["jobs"] == again.config["jobs"]
    assert [job["order"] for job in first.config["jobs"]] == ["confident"] * 2
    assert [job["order"] for job in usual.config["jobs"]] == ["random"] * 2
    assert [row["resolved"]["order"] for row in first.rows] == ["confident"] * 2
    for row in range(2):
        assert first.result(row).samples.equal(again.result(row).samples)
        assert usual.result(row).samples.equal(named.result(row).samples)
        assert not first.result(row).samples.equal(usual.result(row).samples)


def test_the_report_says_what_the_order_is(weights: Path, tmp_path: Path):
    words = ("--weights", weights, *TINY, "--goal", 3, "--order", "confident", "--out", tmp_path / "a")
    assert command("run", "cifar", *words) == command("report", tmp_path / "a") == 0
    assert f"confident: {ORDERS['confident']}" in (tmp_path / "a" / "report.html").read_text()


def test_the_order_is_a_setting_of_load(weights: Path):
    for order, kernel in ((None, ts.Ancestral), ("random", ts.Ancestral), ("confident", Ranked)):
        task = ts.load("emoji", prompt=("a bar",), weights=weights, order=order)
        assert isinstance(task.model.kernel, kernel)
        assert task.order == (order or RANDOM)


def test_orders_that_there_are_not_are_refused(weights: Path, tmp_path: Path, capsys):
    for words, says in (
        (("run", "digits", *TINY, "--order", "confident"), "digits has one order, and cifar and emoji a choice"),
        (("run", "mog", *TINY, "--order", "random"), "leave out --order random"),
        (("run", "emoji", *TINY, "--order", "sure", "--weights", weights), "--order must be random or confident, got"),
        (
            ("run", "cifar", *TINY, "--order", "confident", "--remask", 0.1, "--weights", weights),
            "--order confident never masks a site again, got --remask 0.1 too: leave one of them out",
        ),
        (("compare", "emoji", "--recipe", "ramps", "--order", "confident"), "the recipe ramps remasks as well"),
    ):
        assert command(*words) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(ValueError, match="text has one order"):
        prepare([Job("text", "smc-base", 2, 1, settings=Settings(order=RANDOM))], Environment())
    with pytest.raises(ValueError, match="never masks a site again"):
        small_cifar.networks(4).model(torch.tensor([1]), 2, 0.1, CONFIDENT)
    words = ("--order", "random", "--remask", 0.1, "--weights", weights, "--out", tmp_path / "x")
    assert command("run", "cifar", *TINY, *words) == 0
