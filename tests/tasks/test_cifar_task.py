"""The task `cifar` with random networks of its own classes: labels by population, guidance, rewards, pictures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_cifar
import torch

import tokensteer as ts
from tokensteer.app.cli import main
from tokensteer.app.runs.recipes import METHODS
from tokensteer.app.terminal.draws import coloured, draws
from tokensteer.core.models.product import Product, paper_powers
from tokensteer.core.steering.steering import Steering
from tokensteer.tasks.cifar import model as models
from tokensteer.tasks.cifar import rewards
from tokensteer.tasks.cifar import task as cifar
from tokensteer.tasks.cifar.data import CLASSES
from tokensteer.tasks.common.png_reader import read_png
from tokensteer.tasks.common.sheets import read_sheet, sheet, write_sheet
from tokensteer.tasks.common.task import SHIPPED, Setup, read_card
from tokensteer.testing import enumerate_steering
from tokensteer.train.frozen import fingerprint


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar.save(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def networks() -> models.Networks:
    return small_cifar.networks()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def command(*words: object) -> int:
    return main([str(word) for word in words])


# ---- models


def test_each_population_has_its_class(networks: models.Networks):
    """A model of one class draws what the same class draws among others, and classes differ."""
    x = torch.full((3, 256), networks.mask)
    together = models.model(networks, [3, 5, 3], 2)
    log_x0 = together.denoiser(x, 0.5, together.conditions[0])
    alone = models.model(networks, [3], 2)
    expected = alone.denoiser(x[:1], 0.5, alone.conditions[0])
    torch.testing.assert_close(log_x0[0], expected[0])
    torch.testing.assert_close(log_x0[2], expected[0])
    assert (log_x0[1] - expected[0])[:, :-1].abs().max() > 0.1


def test_the_model_without_a_class_has_the_label_after_the_last(networks: models.Networks):
    product = models.product(models.model(networks, [1, 2], 2), 1.5)
    assert product.powers == (1.5, -0.5)
    assert product.models[1].conditions[0].tolist() == [len(CLASSES)]
    x = torch.full((1, 256), networks.mask)
    expected = networks.denoiser(x)[..., :-1].log_softmax(-1)
    found = product.models[1].denoiser(x, 0.5, product.models[1].conditions[0])
    torch.testing.assert_close(found[..., :-1], expected)


def test_guidance_on_images_of_one_site_matches_enumeration():
    """The weights are exact along the code path of the task: one site, with and without twist and remasking."""
    small = small_cifar.networks(side=2)
    cases: list[tuple[float, dict[str, Any]]] = [
        (0.0, {}),
        (0.0, {"lookahead": False}),
        (0.2, {}),
        (0.2, {"correct_remasking": False}),
    ]
    for remask, options in cases:
        conditional = models.model(small, [4], 3, remask)
        product = models.product(conditional, 1.5, **options)
        exact = enumerate_steering(Steering(product, None, ts.Guided()))
        result = ts.smc(Steering(product, None, ts.Guided()), 64, 40, generator=seeded())
        log_z, error = result.pooled_log_z
        assert abs(log_z - float(exact.log_z)) < 5 * error + 1e-6
    assert models.product(conditional, 1.5, paper_powers, False).convention is paper_powers


def test_a_temperature_divides_the_logits(networks: models.Networks):
    x, labels = torch.full((1, 256), networks.mask), torch.tensor([2])
    cold = replace(networks, temperature=0.5)
    torch.testing.assert_close(cold.logits(x, labels), 2 * networks.logits(x, labels))
    with pytest.raises(ValueError, match="temperature"):
        replace(networks, temperature=0.0)


def test_confident_sampling_draws_from_the_guided_logits(networks: models.Networks):
    x, guidance = torch.full((2, 256), networks.mask), 1.5
    guided = models.confident(networks, [0, 7], 2, guidance)
    product = models.product(models.model(networks, [0, 7], 2), guidance)
    log_p = [model.denoiser(x, 0.5, model.conditions[0].expand(2)) for model in product.models]
    expected = (1.5 * log_p[0] - 0.5 * log_p[1])[..., :-1].log_softmax(-1)
    torch.testing.assert_close(guided.denoiser(x, 0.5, *guided.conditions)[..., :-1], expected)
    result = ts.pretrained(guided)(1, 2, generator=seeded())
    assert (result.samples < networks.mask).all()


def test_the_steps_follow_the_cosine(networks: models.Networks):
    steps = models.model(networks, [0], 4).steps
    assert [step.t for step in steps] == pytest.approx([math.cos(math.pi / 2 * k / 4) for k in range(4)])


def test_networks_that_do_not_belong_together_are_refused(networks: models.Networks):
    with pytest.raises(ValueError, match="train the denoiser of this tokeniser"):
        replace(networks, tokeniser=small_cifar.networks(side=16).tokeniser)


# ---- rewards


def test_the_gradient_of_the_class_reward_passes_the_decoder(networks: models.Networks):
    ids = torch.randint(networks.mask, (2, 256), generator=seeded())
    one_hots = torch.nn.functional.one_hot(ids, networks.mask + 1).float().requires_grad_()
    alone, both = rewards.tilt(networks, [3]), rewards.tilt(networks, [1, 3])
    reward, labels = both.reward, both.conditions[0]
    torch.testing.assert_close(reward(one_hots, labels), reward(ids, labels))
    (gradient,) = torch.autograd.grad(reward(one_hots, labels).sum(), one_hots)
    assert gradient.isfinite().all()
    assert (gradient.abs().amax((1, 2)) > 0).all()
    log_p = networks.reward(networks.images(ids)).double()
    torch.testing.assert_close(alone.exact(ids), log_p[:, 3])
    torch.testing.assert_close(both.exact(ids), log_p[[0, 1], [1, 3]])


@pytest.mark.parametrize("proposal", [ts.Guided(), ts.Gradient(ts.Guided(), clip=1.0, tokens_only=True)])
def test_the_class_reward_is_that_of_the_class_of_the_population(networks: models.Networks, proposal: ts.Proposal):
    """Without a goal too, and so is the metric."""
    labels = [3, 8, 5]
    product = models.product(models.model(networks, labels, 3, 0.2), 1.5)
    result = ts.Method(Steering(product, rewards.tilt(networks, labels), proposal))(2, 6, generator=seeded())
    own = torch.tensor(labels).repeat_interleave(4)
    log_p = networks.reward(networks.images(result.samples.flatten(0, 1))).double()
    expected = log_p.gather(-1, own.unsqueeze(-1)).view(6, 2)
    assert result.reward is not None
    torch.testing.assert_close(result.reward, expected)
    assert (expected < log_p.amax(-1).view(6, 2)).any()  # not the most likely of all
    measured = cifar.assess(result, networks, labels)
    assert measured["class log p"].mean == pytest.approx(measured["reward"].mean)


def test_compressibility_is_the_size_of_the_deflated_pixels(networks: models.Networks):
    noisy = torch.randint(networks.mask, (1, 256), generator=seeded())
    plain = torch.zeros(1, 256, dtype=torch.long)
    both = rewards.tilt(networks, [0], rewards.COMPRESSIBILITY).reward(torch.cat([plain, noisy]))
    assert both[0] > both[1]
    assert -3.2 < both[1] < both[0] < 0
    assert not rewards.tilt(networks, [0], rewards.COMPRESSIBILITY).differentiable
    assert rewards.tilt(networks, [0], rewards.COMPRESSIBILITY).kl == rewards.KLS[rewards.COMPRESSIBILITY]


def test_a_tilt_steers_beside_the_product(weights: Path):
    """With a reward smc-cfg has both, and the gradient proposal can be built on guided tokens."""
    task = cifar.task(Setup(3, goal=2, weights=weights, reward="class", kl=0.2))
    assert task.tilts_guided
    assert task.guided is not None
    method = ts.Method(Steering(task.guided(), task.tilt, ts.Gradient(ts.Guided(), clip=1.0, tokens_only=True)))
    result = method(3, 2, generator=seeded())
    assert result.reward is not None
    assert result.log_w.isfinite().all()


def test_the_default_reward_is_the_tasks_own_if_it_is_named(weights: Path):
    task = cifar.task(Setup(2, weights=weights, reward=rewards.CLASS))
    assert task.reward is None
    assert task.tilts_guided
    assert task.tilt.populations == 10
    assert cifar.task(Setup(2, weights=weights, reward=rewards.COMPRESSIBILITY)).reward == rewards.COMPRESSIBILITY


def test_a_scale_of_one_asks_one_network(networks: models.Networks):
    conditional = models.model(networks, [2, 7], 3, 0.2)
    both = Product((conditional, models.without_class(conditional)), (1.0, 0.0))
    results = [
        ts.Method(Steering(product, None, ts.Guided()))(3, 4, generator=seeded())
        for product in (both, models.product(conditional, 1.0))
    ]
    assert torch.equal(results[0].samples, results[1].samples)
    torch.testing.assert_close(results[0].log_w, results[1].log_w)
    rows = [result.rows["denoiser"] + result.saved["denoiser"] for result in results]
    assert rows[0] == 2 * rows[1]


def test_guidance_without_weights_predicts_each_step_once(weights: Path):
    """With weights, steps that remask are predicted twice."""
    task = cifar.task(Setup(3, goal=2, weights=weights, remask=0.2))
    rows: list[int] = []
    for method in ("cfg", "smc-cfg"):
        found = METHODS[method].make(task, task.tilt, 2)(2, 1, generator=seeded())
        rows.append(found.rows["denoiser"] + found.saved["denoiser"])
    assert rows[0] == 2 * 3 * 2  # two networks, three steps, two particles
    assert rows[1] > rows[0]


# ---- the task


def test_the_task_counts_each_class_apart(weights: Path):
    task = cifar.task(Setup(2, weights=weights))
    result = ts.pretrained(task.model)(2, 20, generator=seeded())
    found = task.metrics(result)
    assert set(found) == {"accuracy", "reward accuracy", "class log p", "diversity", "ess"}
    assert task.prompted is not None
    assert [prompt.text for prompt in task.prompted.prompts] == list(CLASSES)
    alone = task.prompted.only([4], ())
    assert alone.model.conditions[0].tolist() == [4]
    assert alone.about.endswith("deer")
    ids = result.samples.flatten(0, 1)
    judged = small_cifar.networks().judge(small_cifar.networks().images(ids)).argmax(-1)
    wanted = torch.arange(10).repeat_interleave(4)
    assert found["accuracy"].mean == pytest.approx(float((judged == wanted).double().mean()))


def test_samples_are_decoded_once_to_be_measured(networks: models.Networks, monkeypatch):
    result = ts.pretrained(models.model(networks, [0, 4], 2))(3, 4, generator=seeded())
    decoded: list[int] = []

    def counted(self: models.Networks, x: torch.Tensor) -> torch.Tensor:
        decoded.append(len(x))
        return decode(self, x)

    decode = models.Networks.images
    monkeypatch.setattr(models.Networks, "images", counted)
    cifar.assess(result, networks, [0, 4])
    assert decoded == [12, 4]  # the second are draws by weight, for the diversity


def test_a_denoiser_of_another_tokeniser_is_refused(tmp_path: Path):
    small_cifar.save(tmp_path)
    setup, card = Setup(weights=tmp_path), tmp_path / "cifar-denoiser.json"
    found = models.load_networks(setup)
    card.write_text(json.dumps({"tokeniser": fingerprint(found.tokeniser.parameters())}))
    models.load_networks(setup)
    card.write_text(json.dumps({"tokeniser": "of others"}))
    with pytest.raises(ValueError, match="another tokeniser than the one beside it: train the denoiser again"):
        models.load_networks(setup)
    assert read_card(SHIPPED / card.name)["tokeniser"]  # or nothing would be compared


def test_wrong_settings_are_answered_with_the_mend(weights: Path, tmp_path: Path):
    for setup, words in (
        (Setup(weights=weights, goal=10), "0 .airplane"),
        (Setup(weights=weights, reward="size"), "class and compressibility"),
        (Setup(weights=weights, prompts=Path("x.txt")), "give --goal"),
    ):
        with pytest.raises(ValueError, match=words):
            cifar.task(setup)
    with pytest.raises(FileNotFoundError, match="tokensteer train cifar --device cuda --minutes 14 --out FOLDER"):
        cifar.task(Setup(weights=tmp_path))


def test_without_weights_the_commands_say_how_to_train_them(tmp_path: Path, capsys):
    assert command("run", "cifar", "--steps", 2, "--weights", tmp_path) == 2
    error = capsys.readouterr().err
    assert f"are not in {tmp_path}" in error
    assert "tokensteer train cifar --device cuda" in error


def test_the_judge_recognises_images_of_the_shipped_networks():
    made = cifar.task(Setup(6))
    assert made.guided is not None
    generator = torch.Generator().manual_seed(0)
    result = ts.Method(Steering(made.guided(), None, ts.Guided()))(1, 10, generator=generator)
    assert float(made.metrics(result)["accuracy"].mean) >= 0.5  # chance is .1


def test_stored_networks_are_sampled_at_the_temperature_of_the_task(weights: Path):
    stored = models.load_networks(Setup(weights=weights))
    x, labels = torch.full((1, 256), stored.mask), torch.tensor([3])
    torch.testing.assert_close(stored.logits(x, labels), replace(stored, temperature=1.0).logits(x, labels) / 0.9)
    sampled = cifar.task(Setup(2, goal=3, weights=weights)).model.denoiser(x, torch.ones(1), labels)
    expected = stored.logits(x, labels)[..., : stored.mask].log_softmax(-1)
    torch.testing.assert_close(sampled[..., : stored.mask], expected, check_dtype=False)


def test_there_is_no_proposal_to_train(tmp_path: Path, capsys):
    assert command("train", "cifar", "--proposal", "--out", tmp_path / "x") == 2
    assert "no proposal or twist to train" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_runs_leave_sheets_in_colour(weights: Path, tmp_path: Path, capsys):
    words = ("--weights", weights, "--steps", 2, "--particles", 2, "--populations", 2, "--guidance", 1.5)
    names = ("pretrained", "cfg", "smc-cfg", "smc-base")
    assert command("compare", "cifar", "--methods", *names, *words, "--remask", 0.1, "--out", tmp_path / "a") == 0
    assert "Draws: " in capsys.readouterr().out
    run = ts.open_run(tmp_path / "a")
    assert [row["method"] for row in run.rows] == list(names)
    assert {row["populations"] for row in run.rows} == {20}
    images, columns = read_sheet(run.picture(2), 32)
    assert len(images) % 20 == 0
    assert columns == len(images) // 10  # a line for each class
    assert command("report", tmp_path / "a") == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.count('<img class="sheet"') >= 4
    lines = draws(run, 80)
    assert "3 draws of smc-base, N = 2:" in str(lines[0])
    assert next(str(line) for line in draws(run, 80, colour=False)).startswith("Draws: ")
    assert command("run", "cifar", *words, "--goal", 3, "--reward", "class", "--out", tmp_path / "b") == 0
    row = ts.open_run(tmp_path / "b").rows[0]
    assert row["method"] == "smc-cfg"
    assert row["log_z"] is not None
    assert json.dumps(row["metrics"]).count("reward") == 2


def test_one_image_of_each_class_makes_one_line(weights: Path, tmp_path: Path):
    made = cifar.task(Setup(2, weights=weights))
    assert made.picture is not None
    made.picture(torch.zeros(10, 256, dtype=torch.long), str(tmp_path / "x.png"))  # names are paths too
    assert read_sheet(tmp_path / "x.png", 32)[1] == 10


def test_a_method_can_be_run_on_the_product_from_python(networks: models.Networks):
    product = models.product(models.model(networks, [0, 1], 3, 0.1), 1.25)
    assert isinstance(product, Product)
    result = ts.Method(Steering(product, None, ts.Guided()))(4, 2, generator=seeded())
    assert result.samples.shape == (2, 4, 256)
    assert float(result.ess.amin()) < 4  # classes differ, so weights do


# ---- sheets


def test_sheets_are_read_as_they_were_written(tmp_path: Path):
    images = torch.randint(256, (5, 3, 4, 4), generator=seeded(), dtype=torch.uint8)
    write_sheet(tmp_path / "x.png", images, 3)
    assert read_png(tmp_path / "x.png").shape == (22, 32, 3)
    found, columns = read_sheet(tmp_path / "x.png", 4)
    assert columns == 3
    assert torch.equal(found, images)
    assert sheet(images, 5).shape == (3, 6, 26)
    with pytest.raises(ValueError, match="no sheet of images of 7 x 7"):
        read_sheet(tmp_path / "x.png", 7)


def test_half_blocks_have_the_colours_of_two_pixels():
    image = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]], dtype=torch.uint8)
    (line,) = coloured(image)
    assert str(line) == "▀▀"
    assert [str(span.style) for span in line.spans] == ["rgb(1,5,9) on rgb(3,7,11)", "rgb(2,6,10) on rgb(4,8,12)"]
