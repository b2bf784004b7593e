"""The task `emoji` at toy size: sources, captions, states, training part by part, rewards, prompts and sheets."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import small_emoji
import torch

import tokensteer as ts
from tokensteer import tensorfile
from tokensteer.app.cli import main
from tokensteer.core.steering.steering import Steering
from tokensteer.rewards.image import compressibility, mostly, share_of
from tokensteer.tasks.common import arrays
from tokensteer.tasks.common.part_training import Pieces
from tokensteer.tasks.common.sheets import read_sheet
from tokensteer.tasks.common.task import SHIPPED, Setup, read_card
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.common.training import Training, finished
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.emoji import (
    captions,
    data,
    denoiser,
    model,
    proposals,
    quality,
    rewards,
    sources,
    states,
    teachers,
    towers,
)
from tokensteer.tasks.emoji import task as emoji
from tokensteer.tasks.emoji import train as training_of
from tokensteer.tasks.emoji.__main__ import main as part_main
from tokensteer.tasks.emoji.sources import STYLES, Concept
from tokensteer.tasks.nets import ImageTextConfig, LinearConfig
from tokensteer.tasks.nets.grid_transformer import GridTransformer, adapted
from tokensteer.tasks.nets.image_text import as_image_text
from tokensteer.tasks.nets.store import build
from tokensteer.tasks.nets.text_encoder import PADDING, sentence_vectors
from tokensteer.tasks.quality.features import INCEPTION, Inception
from tokensteer.tasks.quality.imagenet import EfficientNetLite
from tokensteer.train.frozen import fingerprint

HEART = Concept("blue heart", ("blue", "heart", "love"), 0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def networks() -> model.Networks:
    return small_emoji.networks()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_emoji.save(tmp_path_factory.mktemp("weights"))


# ---- sources


def packages(folder: Path) -> Path:
    """Two packages as they are published, with hidden, toned, aliased and mirrored drawings."""
    names = [
        {"label": "blue heart", "hexcode": "1F499", "tags": ["blue", "love"], "group": 0},
        {"label": "flag: Antigua & Barbuda", "hexcode": "1F1E6-1F1EC", "tags": ["AG"], "group": 9},
        {"label": "waving hand", "hexcode": "1F44B", "group": 1},
        {"label": "backhand index pointing right", "hexcode": "1F449", "group": 1},
        {"label": "face with crossed-out eyes", "hexcode": "1F635", "group": 0},
    ]
    place = folder / "names" / "package" / "en"
    place.mkdir(parents=True)
    (place / "data.json").write_text(json.dumps(names))
    body = {"body": '<path fill="#00f" d="M0 0h8v8H0z"/>'}
    icons = {
        "blue-heart": {**body, "width": 32},
        "flag-for-antigua-and-barbuda": body,
        "waving-hand": body,
        "waving-hand-medium-dark": body,
        "person-light-skin-tone": body,
        "dizzy-face": body,
        "left-hand": body,
        "secret": {**body, "hidden": True},
    }
    aliases = {
        "backhand-index-pointing-right": {"parent": "left-hand", "hFlip": True},
        "knocked-out": {"parent": "dizzy-face"},
        "face-with-crossed-out-eyes": {"parent": "dizzy-face"},
    }
    for number, name in enumerate(STYLES.values()):
        place = folder / f"set-{number}" / "package"
        place.mkdir(parents=True)
        (place / "package.json").write_text(json.dumps({"name": f"@iconify-json/{name}"}))
        drawn = {} if number else {"icons": icons, "aliases": aliases}
        (place / "icons.json").write_text(json.dumps({"icons": {}, "width": 16, "height": 16, **drawn}))
    return folder


def test_drawings_have_the_names_of_emojibase_and_no_skin_tones(tmp_path: Path):
    found = {drawing.concept.name: drawing for drawing in sources.read(packages(tmp_path))}
    assert set(found) == {
        "blue heart",
        "flag: Antigua & Barbuda",
        "waving hand",
        "backhand index pointing right",
        "face with crossed-out eyes",
        "left hand",
    }
    assert found["blue heart"].concept.tags == ("blue", "love")
    assert found["backhand index pointing right"].mirrored
    assert 'viewBox="0 -8 32 32"' in found["blue heart"].svg  # wider than high: in the middle of a square
    assert found["left hand"].concept.group == -1


def test_packages_that_are_missing_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="npm pack @iconify-json/noto"):
        sources.read(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{ broken", '{"name": ["x"]}', '"@iconify-json/noto"'])
def test_other_manifests_do_not_matter(tmp_path: Path, content: str):
    place = packages(tmp_path) / "another"
    place.mkdir()
    (place / "package.json").write_text(content)
    (place / "folder" / "package.json").mkdir(parents=True)
    assert len(sources.read(tmp_path)) == 6


def test_drawings_are_rendered_on_white(tmp_path: Path):
    pytest.importorskip("resvg_py")
    found = {drawing.concept.name: drawing for drawing in sources.read(packages(tmp_path))}
    data.write(list(found.values()), tmp_path / data.FILE)
    drawings = data.read(tmp_path / data.FILE)
    place = [concept.name for concept in drawings.concepts].index("left hand")
    image = drawings.pixels[(drawings.concept == place).nonzero()[0, 0]]
    assert image[:, 0, 0].tolist() == [0, 0, 255]
    assert image[:, -1, -1].tolist() == [255, 255, 255]
    mirrored = [concept.name for concept in drawings.concepts].index("backhand index pointing right")
    assert torch.equal(drawings.pixels[mirrored], image.flip(-1))


# ---- captions and splits


def test_captions_tell_style_name_and_tags():
    found = captions.variants(HEART, "flat")
    assert len(found) == captions.VARIANTS
    assert found == captions.variants(HEART, "flat")
    assert found[0] == "flat emoji: blue heart; blue, heart, love"
    assert found[1:3] == ["flat emoji: blue heart", "a blue heart, flat style"]
    assert set(found[3].partition("; ")[2].split(", ")) <= set(HEART.tags)
    assert captions.phrase("eagle: red", "3d") == "an eagle red, 3d style"
    assert captions.variants(Concept("x"), "3d")[3:] == ["3d emoji: x", "a x, 3d style"]


def test_splits_depend_on_names_alone():
    names = [f"concept {k}" for k in range(400)]
    pairs = [(name, style) for name in names for style in STYLES]
    found = dict(zip(pairs, data.splits(pairs), strict=True))
    assert found == dict(zip(pairs[::-1], data.splits(pairs[::-1]), strict=True))
    unseen = {name for (name, _), split in found.items() if split == data.CONCEPT}
    assert len(unseen) == data.UNSEEN_CONCEPTS
    assert all(found[name, style] == data.CONCEPT for name in unseen for style in STYLES)
    held = [name for (name, _), split in found.items() if split == data.PAIR]
    assert len(held) == len(set(held))  # one style of a concept
    assert 0.3 < len(held) / 250 < 0.5
    rare = data.splits([("rare", "noto"), ("rare", "flat")])
    assert rare == [data.TRAIN, data.TRAIN]


def test_mirror_images_keep_sides_and_signs(tmp_path: Path):
    drawings = small_emoji.write_drawings(tmp_path / data.FILE)
    assert not drawings.mirrors.any()
    faces = [Concept("leftward bar" if k else "bar", (), 0) for k in range(len(drawings.concepts))]
    assert replace(drawings, concepts=faces).mirrors.sum() == len(STYLES)


# ---- states


def test_a_restricted_vocabulary_gives_captions_the_same_tokens():
    letters = [f"{inner}{c}" for inner in ("", "##") for c in "abcdehrtuvlo;:,"]
    whole = WordPiece.of(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, "heart", "blue", "##heart", "never", "love"])
    small = states.restricted(whole, ["blue heart; love"], most=0)
    assert "never" not in small.pieces
    assert [small.origin[k] for k in small.encode("blue heart; love")] == whole.encode("blue heart; love")
    assert small.encode("heard") != [small.ids["[UNK]"]]  # spelt by letters


def test_states_are_zero_behind_the_caption_and_of_it_alone():
    encoder = small_emoji.encoder()
    ids = encoder.ids(["a red square", "a blue heart, flat style and much more"])
    assert (ids[0] != PADDING).sum() == 5
    assert int(ids[1, -1]) == encoder.pieces.ids["[SEP]"]  # cut off, and framed
    together, alone = encoder(["a red square", "a blue heart"]), encoder(["a red square"])
    torch.testing.assert_close(together[:1], alone)
    assert (together[0, 5:] == 0).all()
    assert (together[0, :5] != 0).any(-1).all()
    torch.testing.assert_close(sentence_vectors(together).norm(dim=-1), torch.ones(2))
    assert (sentence_vectors(torch.zeros_like(alone)) == 0).all()
    assert not encoder.net(torch.full((1, 4), PADDING)).isnan().any()


def test_prompts_that_would_lose_words_are_refused(networks: model.Networks, weights: Path):
    """The style stands last: two prompts that differ in it alone would be the same to the encoder."""
    encoder = networks.encoder
    for text, lost in (
        ("a red square, flat style", ""),
        ("a red square, flat style, a heart", ", a heart"),
        ("a blue heart square qqqq, 3d style", "qqqq, 3d style"),
    ):
        assert encoder.cut(text) == lost
    asked = ("a blue heart", "a red square square square, flat style")
    with pytest.raises(
        ValueError, match=r"square square square.*lose its last words \(flat style\): shorten the prompt"
    ):
        emoji.task(Setup(2, weights=weights, prompt=asked))
    assert encoder(["a red square and much more"]).shape[1] == small_emoji.LENGTH  # captions to train on are cut off


def test_no_caption_is_the_same_whichever_way_it_is_given(networks: model.Networks):
    x = torch.full((2, 16), networks.mask)
    net, told = networks.denoiser, networks.states(["a red square", "a blue bar"])
    nothing = net(x)
    torch.testing.assert_close(net(x, torch.zeros_like(told)), nothing)
    torch.testing.assert_close(net(x, torch.zeros_like(told)[:, :3]), nothing)
    assert (net(x, told) - nothing).abs().max() > 0.1
    one_hots = torch.nn.functional.one_hot(x, 10).float()
    torch.testing.assert_close(net(one_hots, told), net(x, told))
    with pytest.raises(ValueError, match="states of a text"):
        net(x, torch.zeros(2, small_emoji.LENGTH + 1, small_emoji.WIDTH))


# ---- training


def test_all_parts_are_trained_stored_and_measured(tmp_path: Path, monkeypatch, capsys):
    """From the two files of `data`: states, four networks, a resumed denoiser, and samples with sheets."""
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path / "data"))
    small_emoji.write_drawings(tmp_path / "data" / data.FILE)
    states.store_encoder(small_emoji.encoder(), tmp_path / "data")
    out = tmp_path / "out"
    found = training_of.train(Training(out), small_emoji.RECIPE)
    assert list(found) == [*training_of.NETWORKS, "quality"]
    assert {"PSNR", "PSNR, before int8"} <= set(found["tokeniser"])
    assert f"{denoiser.NATS}, unseen concepts without caption" in found["denoiser"]
    assert "R@1, unseen pairs, of reconstructions" in found["judge"]
    assert set(found["quality"]["unseen pairs"]) >= {"drawings", "reconstructions", "samples, guidance 3"}
    images, columns = read_sheet(out / "emoji-unseen-pairs.png", small_emoji.SIDE, 1)
    assert columns == 7
    assert len(images) == 5 * 7
    near = quality.distances(out, Inception(lambda images: images.mean((2, 3))), block=7)
    assert list(near) == list(found["quality"]["unseen pairs"])[1:]
    assert finished(out.glob("emoji-[derjt]*.json"))
    card = json.loads((out / "emoji-reward.json").read_text())
    assert card["styles"] == list(teachers.STYLES_OF["reward"])
    assert "cosine with the teacher, unseen pairs" in card["quality"]
    taught = read_card(teachers.file_of(out, "judge").with_suffix(".json"))
    assert taught["features"] == teachers.FEATURES_OF["judge"]
    assert "R@1, unseen pairs" in taught["quality"]
    assert all(name in card["data"] for name in ("Twemoji", "EmojiOne", "Noto", "Fluent", "emojibase"))
    task = emoji.task(Setup(2, weights=out, prompt=("a red square, flat style",)))
    assert task.model.populations == 1
    longer = replace(small_emoji.RECIPE, denoiser_plan=replace(small_emoji.PLAN, steps=9))
    training_of.train_part("denoiser", Training(out), recipe=longer)
    training_of.train_part("denoiser", Training(out), Pieces(resume=out / "checkpoints"), longer)
    assert json.loads((out / "emoji-denoiser.json").read_text())["steps"] == 9
    small_emoji.write_drawings(out / data.FILE)
    other = replace(data.read(out / data.FILE), concepts=[Concept("x")] * 8)
    with pytest.raises(ValueError, match="states of other captions"):
        states.read_states(out / states.STATES, other)


def test_a_training_that_was_killed_in_its_last_part_goes_on(tmp_path: Path, monkeypatch):
    """Quality is measured of all networks. Killed there, a training is not finished, and trains nothing again."""
    small_emoji.write_drawings(tmp_path / data.FILE)
    states.store_encoder(small_emoji.encoder(), tmp_path)
    training, measure, updates = Training(tmp_path), quality.measure, []

    def killed(*arguments):
        raise KeyboardInterrupt

    def counted(self, *arguments):
        updates.append(self)
        return step(self, *arguments)

    step = denoiser.DenoiserTraining.step
    monkeypatch.setattr(denoiser.DenoiserTraining, "step", counted)
    monkeypatch.setattr(quality, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        training_of.train(training, small_emoji.RECIPE)
    assert not finished(tmp_path.glob("emoji-*.json"))
    before = [(tmp_path / f"emoji-{part}.safetensors").read_bytes() for part in training_of.NETWORKS]
    assert len(updates) == small_emoji.PLAN.steps
    monkeypatch.setattr(quality, "measure", measure)
    found = training_of.train(training, small_emoji.RECIPE)
    assert list(found) == [*training_of.NETWORKS, "quality"]
    assert len(updates) == small_emoji.PLAN.steps
    assert before == [(tmp_path / f"emoji-{part}.safetensors").read_bytes() for part in training_of.NETWORKS]
    assert finished(tmp_path.glob("emoji-[derjt]*.json"))
    assert not training.checkpoints.exists()


def test_distances_are_the_same_in_every_call(tmp_path: Path):
    draw = np.random.default_rng(0)
    names = ("drawings", "reconstructions", *(f"samples, guidance {guidance:g}" for guidance in quality.GUIDANCES))
    arrays.write(tmp_path / quality.SAMPLES, **{name: draw.integers(0, 255, (60, 3, 8, 8), "u1") for name in names})
    inception = Inception(lambda images: images.mean((2, 3)))
    assert quality.distances(tmp_path, inception, block=20) == quality.distances(tmp_path, inception, block=20)


def test_the_denoiser_learns_what_captions_say(tmp_path: Path):
    drawings = small_emoji.write_drawings(tmp_path / data.FILE)
    told = states.make_states(small_emoji.encoder(), drawings)
    made = small_emoji.networks()
    net = made.denoiser.requires_grad_(True)
    plan = replace(small_emoji.PLAN, steps=24, batch_size=32)
    trainee = denoiser.DenoiserTraining(net, made.tokeniser, drawings, told, seeded(), plan, copies=1)
    before = trainee.check()
    generator = seeded(1)
    for _ in range(plan.steps):
        trainee.step(plan.rate, 0.5, generator)
    after = trainee.check()
    assert after["unseen pairs"] < before["unseen pairs"] - 0.2
    ids, condition = trainee.batch(seeded(2))
    dropped = (condition == 0).flatten(1).all(1)
    assert ids.shape == (32, 16)
    assert 0 < int(dropped.sum()) < 16


def lessons_of(drawings: data.Drawings) -> tuple[teachers.Lessons, torch.Tensor]:
    told = states.make_states(small_emoji.encoder(), drawings)
    features = small_emoji.features("reward", "cpu")
    return teachers.prepare(small_emoji.networks(), drawings, told, features, seeded(), 5, copies=2), told.concepts


def test_lessons_are_drawings_reconstructions_and_samples(tmp_path: Path):
    """All of training alone: nothing that is held out, and as many samples as asked for at each guidance."""
    drawings = small_emoji.write_drawings(tmp_path / data.FILE)
    lessons, _ = lessons_of(drawings)
    seen = drawings.part(data.TRAIN)
    count = len(seen.pixels)
    assert len(lessons.images) == len(lessons.features) == 3 * count + 5 * len(teachers.GUIDANCES)
    assert torch.equal(lessons.images[:count], seen.pixels)
    tokeniser = small_emoji.networks().tokeniser
    assert torch.equal(lessons.images[2 * count : 3 * count], reconstructed(tokeniser, seen.pixels))
    assert torch.equal(lessons.style, seen.style.repeat(3))
    assert torch.equal(lessons.concept, seen.concept.repeat(3))
    assert torch.equal(lessons.features, small_emoji.features("reward", "cpu")(lessons.images))


def test_a_teacher_learns_captions_from_the_drawings_of_its_styles(tmp_path: Path):
    """Its drawings find their captions more often, and drawings of other styles and samples change nothing."""
    lessons, vectors = lessons_of(small_emoji.write_drawings(tmp_path / data.FILE))
    styles, plan = teachers.STYLES_OF["reward"], replace(small_emoji.PLAN, steps=300, batch_size=64)
    torch.manual_seed(0)
    found = teachers.learn(lessons, vectors, styles, 8, plan, seeded())
    own = torch.isin(lessons.style, torch.tensor([list(STYLES).index(name) for name in styles])).nonzero().squeeze(-1)
    seen = found.of_images(lessons.features[own])
    told = vectors[lessons.concept[own], lessons.style[own], 0].float()
    best = (seen @ found.of_texts(told).mT).argmax(-1)
    assert (lessons.concept[own][best] == lessons.concept[own]).double().mean() > 0.6  # by chance one in seven
    features = lessons.features.clone()
    others = torch.ones(len(features), dtype=torch.bool)
    others[own] = False
    features[others] = 7.0
    torch.manual_seed(0)
    again = teachers.learn(replace(lessons, features=features), vectors, styles, 8, plan, seeded())
    assert fingerprint(found.parameters()) == fingerprint(again.parameters())
    assert set().union(*teachers.STYLES_OF.values()) == set(STYLES)


def test_a_training_asks_for_published_networks_before_it_begins(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"efficientnet-lite0.*TOKENSTEER_DATA"):
        training_of.train(Training(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_scorer_goes_on_with_the_teacher_that_it_began_with(tmp_path: Path):
    """A teacher that learns again on a GPU is another one."""
    small_emoji.write_drawings(tmp_path / data.FILE)
    states.store_encoder(small_emoji.encoder(), tmp_path)
    training, recipe = Training(tmp_path), small_emoji.RECIPE
    for part in ("states", "tokeniser", "denoiser", "reward"):
        training_of.train_part(part, training, recipe=recipe)
    before = teachers.file_of(tmp_path, "reward").read_bytes()
    other = replace(
        recipe, teacher_plan=replace(small_emoji.PLAN, steps=3), tower_plan=replace(small_emoji.PLAN, steps=9)
    )
    training_of.train_part("reward", training, Pieces(resume=tmp_path / "checkpoints"), other)
    assert teachers.file_of(tmp_path, "reward").read_bytes() == before
    assert read_card(tmp_path / "emoji-reward.json")["steps"] == 9
    teachers.file_of(tmp_path, "reward").unlink()
    with pytest.raises(ValueError, match="was made with"):
        training_of.train_part("reward", training, Pieces(resume=tmp_path / "checkpoints"), other)


def test_features_of_published_networks_are_loaded_when_they_are_used(monkeypatch):
    teachers._network.cache_clear()
    net, calls = EfficientNetLite().eval(), []
    monkeypatch.setattr(teachers, "load_efficientnet", lambda device: calls.append(device) or net)
    features = teachers.published("reward", "cpu")
    assert calls == []
    images = torch.randint(256, (2, 3, 16, 16), generator=seeded(), dtype=torch.uint8)
    found = features(images)
    assert calls == ["cpu"]
    torch.testing.assert_close(found, net.features(images).detach())
    torch.testing.assert_close(net(images), net.layers[-1](found).log_softmax(-1))
    teachers._network.cache_clear()


def test_the_second_judge_is_the_teacher_where_its_features_are(weights: Path, tmp_path: Path, monkeypatch):
    """With its map and Inception's file alone; it reads pixels, and is a metric beside the judge."""
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    folder = shutil.copytree(weights, tmp_path / "weights")
    prompts = ("a red square", "a blue bar")
    setup = Setup(2, weights=folder, prompt=prompts)

    def metrics():
        task = emoji.task(setup)
        return task.metrics(ts.pretrained(task.model)(3, 4, generator=seeded())), task

    assert emoji.SECOND_JUDGE not in metrics()[0]
    config = ImageTextConfig("linear", asdict(LinearConfig(48, 8)), small_emoji.WIDTH)
    torch.manual_seed(0)
    net = teachers.store(as_image_text(build(config).eval()), folder, "judge", "cpu")
    assert emoji.SECOND_JUDGE not in metrics()[0]
    (tmp_path / INCEPTION[0]).touch()
    with pytest.raises(ValueError, match="SHA-256"):
        metrics()
    monkeypatch.setattr(teachers, "check_file", lambda file, sha256: None)
    monkeypatch.setattr(teachers, "published", small_emoji.features)
    found, task = metrics()
    result = ts.pretrained(task.model)(3, 4, generator=seeded())
    networks = model.load_networks(setup)
    pixels = networks.pixels(result.samples.flatten(0, 1))
    told = sentence_vectors(networks.states(prompts)).repeat_interleave(6, 0)
    expected = net(small_emoji.features("judge", "cpu")(pixels), told).mean()
    assert found[emoji.SECOND_JUDGE].mean == pytest.approx(float(expected), abs=1e-6)


def test_towers_learn_the_vectors_of_their_teachers(tmp_path: Path):
    drawings = small_emoji.write_drawings(tmp_path / data.FILE)
    lessons, vectors = lessons_of(drawings)
    teacher = teachers.learn(lessons, vectors, teachers.STYLES_OF["reward"], 8, small_emoji.PLAN, seeded())
    net = small_emoji.networks().reward.requires_grad_(True)
    trainee = towers.TowerTraining(net, teacher, lessons, drawings, vectors, "reward", small_emoji.PLAN)
    generator = seeded()
    first = float(trainee.step(1e-2, 0.0, generator)["loss"].detach())
    for _ in range(40):
        last = trainee.step(1e-2, 0.5, generator)["loss"]
    assert float(last.detach()) < first - 0.3
    assert torch.equal(net.text.weight, teacher.text.weight)
    assert torch.equal(net.scale, teacher.scale)


def test_contrast_does_not_count_others_of_the_same_concept():
    images = torch.eye(3)
    alike = teachers.contrast(images, images, torch.tensor(10.0), torch.tensor([0, 1, 2]))
    twins = torch.stack([images[0], images[0], images[2]])
    same = teachers.contrast(twins, twins, torch.tensor(10.0), torch.tensor([0, 0, 2]))
    assert float(same) < float(alike) < 1e-3
    assert float(teachers.contrast(twins, twins, torch.tensor(10.0), torch.tensor([0, 1, 2]))) > 0.4


def test_retrieval_counts_images_that_find_their_text(networks: model.Networks):
    told = torch.nn.functional.normalize(torch.randn(5, small_emoji.WIDTH, generator=seeded()), dim=-1)
    pixels = torch.randint(256, (5, 3, 16, 16), generator=seeded(), dtype=torch.uint8)
    seen = networks.judge.of_images(pixels.float() / 255) @ networks.judge.of_texts(told).mT
    expected = float((seen.argmax(-1) == torch.arange(5)).double().mean())
    assert towers.retrieval(networks.judge, pixels, told) == pytest.approx(expected)


# ---- rewards


def flat(colour: tuple[float, float, float], share: float = 0.5) -> torch.Tensor:
    """An image of which a share has the colour on white."""
    image = torch.ones(1, 3, 20, 20)
    image[:, :, : round(20 * share)] = torch.tensor(colour).view(1, 3, 1, 1)
    return image


def test_colours_are_told_by_hue_and_not_by_paper():
    blue, red, white = (0.1, 0.3, 0.9), (0.9, 0.1, 0.1), (1.0, 1.0, 1.0)
    for score in (mostly("blue"), share_of("blue")):
        pictures = (flat(blue), flat(blue, 0.9), flat(red), flat(white))
        found = [float(score(picture)) for picture in pictures]
        assert found[0] > 0.7
        assert found[1] > 0.7
        assert found[2] < 0.01
        assert found[3] < 0.01
    assert float(share_of("blue")(flat(blue))) == pytest.approx(1.0)
    image = flat((0.6, 0.4, 0.5)).requires_grad_()
    (gradient,) = torch.autograd.grad(mostly("pink")(image).sum(), image)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    with pytest.raises(ValueError, match="there is no colour 'beige'"):
        mostly("beige")


def test_plain_images_are_smaller_files():
    noise = torch.rand(1, 3, 20, 20, generator=seeded())
    assert float(compressibility(flat((0.0, 0.0, 1.0)))) > float(compressibility(noise))


@pytest.mark.parametrize("reward", [rewards.ALIGNMENT, "mostly-blue"])
def test_gradients_of_rewards_pass_the_decoder(networks: model.Networks, reward: str):
    told = networks.states(["a red square", "a blue bar"])
    tilt = rewards.tilt(networks, told, reward)
    ids = torch.randint(networks.mask, (2, 16), generator=seeded())
    one_hots = torch.nn.functional.one_hot(ids, networks.mask + 1).float().requires_grad_()
    torch.testing.assert_close(tilt.reward(one_hots, *tilt.conditions), tilt.reward(ids, *tilt.conditions))
    (gradient,) = torch.autograd.grad(tilt.reward(one_hots, *tilt.conditions).sum(), one_hots)
    assert gradient.isfinite().all()
    assert (gradient.abs().amax((1, 2)) > 0).all()


def test_alignment_is_with_the_prompt_of_the_population(networks: model.Networks):
    told = networks.states(["a red square", "a blue bar", "a green heart"])
    steering = Steering(model.reference(networks.model(told, 2), 2.0), rewards.tilt(networks, told))
    result = ts.Method(steering)(3, 6, generator=seeded())
    vectors = sentence_vectors(told).repeat_interleave(6, 0)
    expected = networks.reward(networks.images(result.samples.flatten(0, 1)), vectors)
    assert result.reward is not None
    torch.testing.assert_close(result.reward.flatten().float(), expected)


# ---- the task


def test_the_reference_is_the_normalised_guided_prediction(networks: model.Networks):
    conditional = networks.model(networks.states(["a red square"]), 2)
    x = torch.full((1, 16), networks.mask)
    both = conditional.conditions[0], None
    given, without = (networks.denoiser(x, told)[..., :-1].log_softmax(-1) for told in both)
    guided = model.reference(conditional, 3.0)
    found = guided.denoiser(x, 0.5, *guided.conditions)[..., :-1]
    torch.testing.assert_close(found, (3 * given - 2 * without).log_softmax(-1))
    product = model.product(conditional, 3.0)
    assert product.powers == (3.0, -2.0)
    assert (product.models[1].conditions[0] == 0).all()


def test_prompts_come_from_the_command_line(weights: Path, tmp_path: Path, capsys):
    asked = ["a blue heart, flat style", "a red bar, 3d style"]
    words = ["--weights", weights, "--steps", 2, "--particles", 2, "--populations", 2, "--out", tmp_path / "a"]
    command = ["compare", "emoji", "--methods", "smc-base", "smc-cfg", "--prompt", *asked, *words]
    assert main([str(word) for word in command]) == 0
    run = ts.open_run(tmp_path / "a")
    assert {row["populations"] for row in run.rows} == {4}
    assert {"judge", "alignment"} <= set(run.rows[0]["metrics"])
    assert [line["prompt"] for line in run.rows[0].get("prompts", [])] in ([], asked)
    images, _ = read_sheet(run.picture(0), small_emoji.SIDE)
    assert len(images)
    assert "heart" in (tmp_path / "a" / "config.json").read_text()
    capsys.readouterr()
    for options, says in (
        (["--goal", "1"], "has no goals"),
        (["--reward", "mostly-beige"], "mostly-blue"),
        (["--prompt", "x", "--prompts", "y.txt"], "give one of them"),
    ):
        assert main(["run", "emoji", "--weights", str(weights), *options]) == 2
        assert says in capsys.readouterr().err


# ---- the learned proposal


def test_an_adapter_begins_as_nothing_and_learns_alone(networks: model.Networks):
    x, captions = torch.full((3, 16), 9), networks.states(["a blue heart", "a red bar", "a bar"])
    dropping = GridTransformer(replace(networks.denoiser.config, dropout=0.5))
    dropping.load_state_dict(networks.denoiser.state_dict())
    net = adapted(dropping, 2).train()  # a proposal has one probability for a move, whenever it is asked
    assert torch.equal(net(x, captions), networks.denoiser(x, captions))
    named = dict(net.named_parameters())
    learns = {name for name in named if not name.startswith(proposals.CONFIG.frozen)}
    assert learns == {name for name in named if name.startswith("adapters.")} != set()
    with torch.no_grad():
        for name in learns:
            named[name].normal_(generator=seeded())
    assert not torch.allclose(net(x, captions), networks.denoiser(x, captions))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_proposal_begins_as_the_guided_sampler(networks: model.Networks, guidance: float):
    """With what was learned still zero all weights are those of the reference."""
    caption_states = networks.states(["a blue heart", "a red bar"])
    reference = model.reference(networks.model(caption_states, 3), guidance)
    q = ts.Amortised(model.as_guided(guidance)(adapted(networks.denoiser, 2)))
    for proposal in (q, ts.FromModel()):
        path = Steering(reference, rewards.tilt(networks, caption_states), proposal)
        result = ts.Method(path, when=ts.triggers.never)(4, 2, generator=seeded())
        assert result.reward is not None
        assert torch.allclose(result.log_w, (result.reward / rewards.KLS["alignment"]).to(result.log_w), atol=1e-3)


@pytest.mark.parametrize("objective", ["path-variance", "likelihood"])
def test_a_proposal_is_taught_stored_and_used(objective: str, weights: Path, tmp_path: Path, monkeypatch, capsys):
    drawings = small_emoji.write_drawings(tmp_path / data.FILE)
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    monkeypatch.setattr(emoji, "DEFAULT", ("a blue heart", "a red bar, 3d style"))  # the encoder reads six pieces
    plan = replace(proposals.PLAN, rounds=2, paths=8, report_every=1)
    sampled = replace(proposals.SAMPLED, rounds=2, paths=32, updates=2, report_every=1)
    small = replace(proposals.CONFIG, plan=plan, sampled=sampled, num_steps=2).chosen(objective, None)
    out = tmp_path / "taught"
    taught = replace(proposals.proposal(None, weights, small, {2: 6}), steps=2)
    card = taught.at(0.5).train(Training(out))
    assert card["prompts"] == 4
    assert card["kl"] == 0.5
    assert f"train emoji --proposal --objective {objective} --kl 0.5 --out" in card["command"]
    assert card["objective"].startswith({"path-variance": "PathVariance", "likelihood": "Likelihood"}[objective])
    assert set(card["quality"]) == {"smc-base N=2", "smc-grad N=2", "prop-amot N=2", "smc-amot N=2"}
    used = proposals.captions_of(drawings, 4, small_emoji.encoder())
    trained = {texts[k] for texts in drawings.part(data.TRAIN).captions() for k in range(len(texts))}
    assert len(set(used)) == 4
    assert set(used) <= trained
    assert not any(map(small_emoji.encoder().cut, used))  # a caption with all its tags is too long
    file = out / "emoji-proposal.safetensors"
    tensors, _ = tensorfile.read(file)
    assert tensors
    assert all(name.startswith("adapters.") for name in tensors)
    words = ["--weights", str(out), "--steps", "2", "--particles", "2", "--populations", "1", "--prompt", "a blue bar"]
    assert main(["run", "emoji", "--method", "smc-amot", *words, "--out", str(tmp_path / "run")]) == 0
    assert ts.open_run(tmp_path / "run").rows[0]["rows"]["proposal"] > 0
    capsys.readouterr()
    asked = ["--weights", str(weights), "--out", str(tmp_path / "other")]
    assert main(["train", "emoji", "--proposal", "--goal", "2", *asked]) == 2
    assert "has no goals" in capsys.readouterr().err
    assert main(["run", "emoji", "--method", "smc-amot", *words[2:], "--weights", str(weights)]) == 2
    assert "tokensteer train emoji --proposal" in capsys.readouterr().err
    for options, says in (
        (["--proposal", "--objective", "balance"], "is learned by path-variance or likelihood"),
        (["--twist"], "no twist to learn"),
    ):
        assert main(["train", "emoji", *options, *asked]) == 2
        assert says in capsys.readouterr().err


def test_guidance_is_of_all_methods(weights: Path, tmp_path: Path):
    """The model that rewards tilt is the guided sampler."""
    words = ["--weights", weights, "--steps", 2, "--particles", 2, "--populations", 1, "--prompt", "a blue bar"]
    command = ["compare", "emoji", "--methods", "pretrained", "smc-base", "--guidance", 2, *words, "--out", tmp_path]
    assert main([str(word) for word in command]) == 0
    rows = ts.open_run(tmp_path).rows
    assert [row["resolved"]["guidance"] for row in rows] == [2.0, 2.0]
    assert "diversity" not in rows[0]["metrics"]  # one drawing differs from nothing


def test_images_are_decoded_in_full_precision_under_autocast(networks: model.Networks):
    ids = torch.randint(9, (4, 16), generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        within, halved = networks.images(ids), networks.tokeniser.decode(ids).float()
    assert torch.equal(within, networks.images(ids))
    assert not torch.equal(within, halved)


def test_a_prompt_can_be_colourful_instead(weights: Path):
    task = emoji.task(Setup(2, weights=weights, reward="mostly-blue", prompt=("a blue heart",)))
    result = ts.Method(Steering(task.model, task.tilt))(2, 2, generator=seeded())
    assert "share of blue" in task.metrics(result)
    assert task.reward == "mostly-blue"
    assert task.judge is not None
    marks = task.judge(result.samples.flatten(0, 1))
    assert ((marks >= 0) & (marks <= 1)).all()


def test_without_weights_the_commands_say_how_to_train_them(capsys, tmp_path: Path, monkeypatch):
    none, out = str(tmp_path / "none"), str(tmp_path / "run")
    assert main(["run", "emoji", "--prompt", "a heart", "--weights", none, "--out", out]) == 2
    assert "tokensteer train emoji --device cuda --minutes 25" in capsys.readouterr().err
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    for words, says in (
        ("tokeniser", "--part data"),
        ("data", "npm pack"),
        ("other", "data or states"),
        ("quality --samples 1", "--samples must be at least 2, got 1"),
        ("denoiser --horizon 3", "give those of this run as --minutes"),
        ("denoiser --horizon 0 --minutes 1", "--horizon must be positive and finite"),
    ):
        with pytest.raises(SystemExit):
            part_main(["--part", *words.split(), "--out", str(tmp_path / "out")])
        assert says in capsys.readouterr().err


def test_the_default_reward_is_the_tasks_own_if_it_is_named(weights: Path):
    """Its learned proposal then counts as one for this reward, and smc-cfg has the reward beside its product."""
    task = emoji.task(Setup(2, weights=weights, reward=rewards.ALIGNMENT, prompt=("a blue heart",)))
    assert task.reward is None
    assert task.tilts_guided


def test_samples_are_decoded_once_to_be_measured(networks: model.Networks, monkeypatch):
    told = networks.states(["a red square", "a blue bar"])
    steering = Steering(model.reference(networks.model(told, 2), 2.0), rewards.tilt(networks, told, "mostly-blue"))
    result = ts.Method(steering)(3, 4, generator=seeded())
    ids, vectors = result.samples.flatten(0, 1), sentence_vectors(told).repeat_interleave(6, 0)
    images = networks.images(ids)
    expected = {
        "judge": networks.judge(images, vectors),
        "alignment": networks.reward(images, vectors),
        "share of blue": share_of("blue")(images),
    }
    decoded: list[int] = []

    def counted(self: model.Networks, x: torch.Tensor) -> torch.Tensor:
        decoded.append(len(x))
        return decode(self, x)

    decode = model.Networks.images
    monkeypatch.setattr(model.Networks, "images", counted)
    found = emoji.assess(result, networks, sentence_vectors(told), "mostly-blue")
    assert decoded == [12, 4]  # the second are draws by weight, for the diversity
    for name, values in expected.items():
        mean = (result.weights.double() * values.double().view(4, 3)).sum(-1).mean()
        assert found[name].mean == pytest.approx(float(mean), abs=1e-6)


@pytest.mark.slow
def test_the_shipped_networks_draw_what_captions_say():
    """The judge finds the captions of most samples among eight; by chance it finds one."""
    prompts = ("a blue heart", "a pizza", "a black cat", "an umbrella", "a red apple", "a house", "a candle", "a tiger")
    asked = [
        f"{prompt}, {style} style" for prompt, style in zip(prompts, 2 * ("noto", "3d", "blob", "flat"), strict=True)
    ]
    found = model.load_networks(Setup())
    caption_states = found.states(asked)
    drawn = ts.pretrained(model.reference(found.model(caption_states, 12), 3.0))(1, len(asked), generator=seeded())
    pixels, vectors = found.pixels(drawn.samples[:, 0]), sentence_vectors(caption_states)
    assert towers.retrieval(found.judge, pixels, vectors) >= 0.5


def test_networks_that_do_not_belong_together_are_refused(networks: model.Networks):
    wide = small_emoji.nets.GridTransformerConfig(10, 4, 4, hidden=16, heads=2, context_length=4, context_width=8)
    with pytest.raises(ValueError, match="train the denoiser with this encoder"):
        replace(networks, denoiser=small_emoji.nets.GridTransformer(wide))
    with pytest.raises(ValueError, match="compares no images"):
        as_image_text(networks.tokeniser)
    with pytest.raises(ValueError, match="classes or texts"):
        replace(small_emoji.GRID, num_classes=3)


def test_a_denoiser_of_another_tokeniser_is_refused(tmp_path: Path, monkeypatch):
    small_emoji.save(tmp_path)
    setup, card = Setup(weights=tmp_path), tmp_path / "emoji-denoiser.json"
    monkeypatch.setattr(states, "load", None)  # the encoder is one of the networks, and not read again
    found = model.load_networks(setup)
    card.write_text(json.dumps({"tokeniser": fingerprint(found.tokeniser.parameters())}))
    model.load_networks(setup)
    card.write_text(json.dumps({"tokeniser": "of others"}))
    with pytest.raises(ValueError, match="another tokeniser than the one beside it: train the denoiser again"):
        model.load_networks(setup)
    assert read_card(SHIPPED / card.name)["tokeniser"]  # or nothing would be compared


def test_images_are_read_whole_or_not_at_all(tmp_path: Path):
    none = np.zeros(2, np.uint8)
    arrays.write(
        tmp_path / data.FILE,
        images=np.zeros((2, 4, 4, 3)),
        style=none,
        concept=none,
        split=none,
        names=np.array(["a"]),
        tags=np.array([""]),
        groups=none[:1],
    )
    with pytest.raises(ValueError, match="write it again"):
        data.read(tmp_path / data.FILE)
