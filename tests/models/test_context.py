"""Conditions of a model by population: labels that the denoiser takes as an argument, against enumeration."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import product

import pytest
import torch
from labelled_toys import CLASSES, CODES, MASK, NET, NO_CLASS, SITES, TILT, model, reward
from torch import Tensor, nn

import tokensteer as ts
from tokensteer.core.kernels.masked import Cap
from tokensteer.core.models.forward import ForwardPaths
from tokensteer.core.twists.straight_through import takes_embeddings
from tokensteer.testing import enumerate_steering


class Embedding(nn.Module):
    """A network that is entered by embeddings, of tokens and a label for each row."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(CODES + 1, 8, generator=generator, dtype=torch.float64)
        self.places = torch.randn(SITES, 8, 8, generator=generator, dtype=torch.float64)
        self.head = torch.randn(8, CODES + 1, generator=generator, dtype=torch.float64)

    def of_embeddings(self, embedded: Tensor, label: Tensor) -> Tensor:
        h = torch.einsum("pld,ldh->plh", embedded, self.places)
        mixed = (h + h.flip(1) + NET.labels[label].unsqueeze(1)).tanh()
        return mixed @ self.head

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.of_embeddings(x @ self.embedding if x.is_floating_point() else self.embedding[x], label)


class EmbeddedReward:
    """`reward` as a function of embeddings, which are one-hots."""

    embedding = torch.eye(CODES + 1, dtype=torch.float64)

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return reward(embedded)

    def __call__(self, x: Tensor) -> Tensor:
        return reward(x)


def embedded(labels: tuple[int, ...], **options) -> ts.Steering:
    """Gradients through embeddings, which no one-hots are made for."""
    entered = replace(model(*labels, **options), denoiser=ts.from_logits(Embedding(), MASK, ignores_time=True))
    tilt = replace(TILT, reward=EmbeddedReward())
    assert takes_embeddings(entered, tilt)
    return ts.Steering(entered, tilt, ts.Gradient(clip=1.0))


def guided(*labels: int, scale: float = 1.5, **options) -> ts.Product:
    conditional = model(*labels, **options)
    return ts.guided(conditional, replace(conditional, context=torch.tensor([NO_CLASS])), scale)


MAKERS = {
    "model": lambda labels, **o: ts.Steering(model(*labels, **o), TILT),
    "gradient": lambda labels, **o: ts.Steering(model(*labels, **o), TILT, ts.Gradient(clip=1.0)),
    "gradient of embeddings": embedded,
    "enumerated": lambda labels, **o: ts.Steering(
        model(*labels, **o), replace(TILT, estimator=ts.Exact()), ts.Enumerated()
    ),
    "learned": lambda labels, **o: ts.Steering(
        model(*labels, **o), TILT, ts.Amortised(ts.from_logits(NET, MASK, ignores_time=True))
    ),
    "guided": lambda labels, **o: ts.Steering(guided(*labels, **o), None, ts.Guided()),
    "guided and tilted": lambda labels, **o: ts.Steering(guided(*labels, **o), TILT, ts.Guided()),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("sharing", [True, False])
def test_each_population_has_the_target_of_its_label(name: str, sharing: bool):
    """Z of each class by 40 populations of it, within four standard errors of enumeration."""
    labels, each, particles = (2, 0, 1), 40, 16
    steering = MAKERS[name](labels, sharing=sharing)
    assert steering.model.populations == CLASSES
    result = ts.smc(steering, particles, CLASSES * each, generator=torch.Generator().manual_seed(1))
    for label, log_z in zip(labels, result.log_z.view(CLASSES, each), strict=True):
        exact = enumerate_steering(MAKERS[name]((label,))).log_z
        ratio = (log_z - exact).exp()
        assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / each**0.5 + 1e-9, (name, label)


def test_labels_make_different_targets():
    found = [enumerate_steering(ts.Steering(model(label), TILT)).log_z for label in range(CLASSES)]
    assert max(found) - min(found) > 0.1


def test_predictions_are_those_of_one_label_each():
    labels = (0, 1, 2)
    canvas = ts.template(SITES, MASK).repeat(CLASSES, 1)
    together = replace(model(*labels), template=canvas)
    x = torch.tensor([[MASK, MASK], [MASK, 1], [2, MASK]])
    prediction = together.predict(x, 0.5)
    for k, label in enumerate(labels):
        alone = model(label).predict(x[k : k + 1], 0.5)
        assert torch.equal(prediction.take(torch.tensor([k])).laws().dense(), alone.laws().dense())


def test_equal_states_of_different_labels_are_not_shared():
    x = torch.full((2 * CLASSES, SITES), MASK)
    several = model(0, 1, 2, sharing=True)
    before = several.meter.rows
    several.predict(x, 0.5)
    assert several.meter.rows - before == CLASSES


def test_moves_and_repair_keep_the_label():
    """Forward paths predict rows of several steps at once."""
    labels = (0, 1)
    x = torch.tensor([[0, 1], [0, 1]])
    paths = ForwardPaths.of(model(*labels))
    path = paths.draw(x, torch.Generator().manual_seed(0))
    together = paths.log_ratios(path)
    for k, label in enumerate(labels):
        alone = ForwardPaths.of(model(label)).log_ratios(path[:, k : k + 1])
        assert torch.allclose(together[:, k : k + 1], alone)


@pytest.mark.parametrize(
    ("context", "says"),
    [
        (torch.tensor(3), "one row for each population"),
        ([torch.zeros(2), torch.zeros(3)], "one row for each population"),
        (["cat"], "one row for each population"),
    ],
)
def test_a_context_that_cannot_be_is_refused(context, says):
    with pytest.raises(ValueError, match=says):
        replace(model(0), context=context)


def test_templates_and_contexts_come_in_equal_numbers():
    with pytest.raises(ValueError, match="2 templates and contexts of 3 rows"):
        replace(model(0, 1, 2), template=ts.template(SITES, MASK).repeat(2, 1))
    with pytest.raises(ValueError, match=r"contexts of \[2, 3\] rows"):
        ts.Product((model(0, 1), model(0, 1, 2)), (1.0, 0.5))


def test_a_network_that_reads_the_first_label_for_all_is_found():
    def first_only(x: Tensor, label: Tensor) -> Tensor:
        return NET(x, label[:1].expand(len(x)))

    denoiser = ts.from_logits(first_only, MASK, ignores_time=True)
    with pytest.raises(ValueError, match="wrong with a context for each row"):
        replace(model(0, 1), denoiser=denoiser)


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("sizes", [(0.02, 0.02), (0.002, 0.1)], ids=["alike", "of one row larger"])
def test_rounding_of_another_kernel_is_no_fault_of_the_network(sizes, first_only):
    """A GPU may compute two rows by another kernel than one."""

    def rounded(x: Tensor, label: Tensor) -> Tensor:
        logits = NET(x, label[:1].expand(len(x)) if first_only else label)
        size = torch.tensor(sizes)[label.clamp(max=1)].view(-1, 1, 1)
        return logits + size * torch.cos(100 * logits) if len(x) > 1 else logits

    denoiser = ts.from_logits(rounded, MASK, ignores_time=True)
    with pytest.raises(ValueError, match="wrong with a context") if first_only else contextlib.nullcontext():
        replace(model(0, 1), denoiser=denoiser)


def test_particles_that_no_context_divides_are_refused():
    with pytest.raises(ValueError, match="2 populations were asked for"):
        ts.smc(ts.Steering(model(0, 1, 2), TILT), 4, 2)


@pytest.mark.parametrize("powers", [(1.5, -0.5), (1.0, 0.5)])
def test_remasking_is_corrected_for_each_label(powers):
    """`Product.log_prob` predicts again where sites are masked anew."""
    kernel = ts.Ancestral(MASK, sigma=Cap(0.3))
    for labels in product(range(CLASSES), repeat=2):
        conditional = model(*labels, kernel=kernel)
        other = replace(conditional, context=torch.tensor([NO_CLASS]))
        both = ts.Product((conditional, other), powers)
        x, y = torch.tensor([[0, MASK]] * 2), torch.tensor([[MASK, 1]] * 2)
        step = both.steps[1]
        found = both.log_prob(y, x, both.predict(x, step.t), step, None)
        for k, label in enumerate(labels):
            one = replace(conditional, context=torch.tensor([label]))
            alone = ts.Product((one, other), powers)
            assert torch.allclose(found[k], alone.log_prob(y[:1], x[:1], alone.predict(x[:1], step.t), step, None)[0])


# ---- rewards with a context


WORTH = 0.5 * torch.tensor([[1.0, 0.0, -1.0, 0.5], [-1.0, 1.5, 0.0, 0.0], [0.0, 0.0, 0.3, 2.0]], dtype=torch.float64)


def prompted(x: Tensor, worth: Tensor) -> Tensor:
    """What the population's context says the tokens are worth, (P, CODES), summed over sites."""
    one_hots = x if x.is_floating_point() else nn.functional.one_hot(x, CODES + 1).double()
    return (one_hots[..., :CODES] * worth.unsqueeze(1)).sum((-2, -1))


class EmbeddedPrompted:
    """`prompted` as a function of embeddings, which are one-hots."""

    embedding = torch.eye(CODES + 1, dtype=torch.float64)

    def of_embeddings(self, embedded: Tensor, worth: Tensor) -> Tensor:
        return prompted(embedded, worth)

    def __call__(self, x: Tensor, worth: Tensor) -> Tensor:
        return prompted(x, worth)


def of_prompt(name: str, rows: list[int], same_model: bool) -> ts.Steering:
    """A steering whose reward has these rows of `WORTH`, of a model that differs between populations too or not."""
    canvas = ts.template(SITES, MASK)
    same = replace(model(0), template=canvas.repeat(len(rows), 1) if len(rows) > 1 else canvas)
    made = same if same_model else model(*rows)
    tilt = ts.Tilt(prompted, 0.5, draws=4, differentiable=True, context=WORTH[rows])
    match name:
        case "model":
            return ts.Steering(made, tilt)
        case "shared noise":
            return ts.Steering(made, replace(tilt, estimator=ts.Sampled(seed=1)), ts.Gradient(clip=1.0))
        case "soft":
            return ts.Steering(made, replace(tilt, estimator=ts.SoftInput()), ts.Gradient(clip=1.0))
        case "embeddings":
            entered = replace(made, denoiser=ts.from_logits(Embedding(), MASK, ignores_time=True))
            return ts.Steering(entered, replace(tilt, reward=EmbeddedPrompted()), ts.Gradient(clip=1.0))
        case _:
            return ts.Steering(made, replace(tilt, estimator=ts.Exact()), ts.Enumerated())


@pytest.mark.parametrize("same_model", [False, True])
@pytest.mark.parametrize("name", ["model", "shared noise", "soft", "embeddings", "enumerated"])
def test_each_population_has_the_reward_of_its_context(name: str, same_model: bool):
    """Z of each prompt within four standard errors of enumeration, also where all prompts have one model, whose
    predictions populations then share."""
    rows, each, particles = [2, 0, 1], 40, 32
    result = ts.smc(of_prompt(name, rows, same_model), particles, 3 * each, generator=torch.Generator().manual_seed(2))
    worth = WORTH[rows].repeat_interleave(each * particles, 0)
    assert result.reward is not None
    torch.testing.assert_close(result.reward.flatten(), prompted(result.samples.flatten(0, 1), worth))
    exact = [float(enumerate_steering(of_prompt(name, [row], same_model)).log_z) for row in rows]
    assert max(exact) - min(exact) > 0.3
    for log_z, value in zip(result.log_z.view(3, each), exact, strict=True):
        ratio = (log_z - value).exp()
        assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / each**0.5 + 1e-9, (name, value)


def test_a_reward_of_more_contexts_than_the_model_is_refused():
    with pytest.raises(ValueError, match=r"contexts of 3 rows and the model is of 2 population"):
        ts.Steering(model(0, 1), ts.Tilt(prompted, context=WORTH))
    with pytest.raises(ValueError, match="one row for each population"):
        ts.Tilt(prompted, context=torch.tensor(1.0))


def test_combined_and_constrained_rewards_get_the_context():
    x, worth = torch.tensor([[0, 1], [3, 2]]), WORTH[:2]
    both = ts.rewards.weighted({prompted: 2.0, lambda x, worth: worth[:, 0]: 1.0})
    torch.testing.assert_close(both(x, worth).double(), 2 * prompted(x, worth) + worth[:, 0], rtol=1e-6, atol=1e-6)


def test_repair_rewards_each_chain_by_its_context():
    tilt = ts.Tilt(prompted, 0.5, context=WORTH[:2])
    start, generator = torch.tensor([[0, 1], [0, 1]]), torch.Generator().manual_seed(0)
    found = ts.repair(start, ts.Steering(model(0, 1), tilt), sweeps=2, generator=generator)
    assert found.reward is not None
    for samples, rewards in zip(found.samples, found.reward, strict=True):
        torch.testing.assert_close(rewards, prompted(samples, WORTH[:2]))
