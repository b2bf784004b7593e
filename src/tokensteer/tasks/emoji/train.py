"""Training of the task `emoji`, part by part.

| part | makes | from |
|---|---|---|
| data | the drawings as one file, and the encoder of captions | packages and MiniLM in the folder of data |
| states | states of all captions | the two files of `data` |
| tokeniser | the autoencoder | drawings, LPIPS |
| denoiser | the masked transformer | drawings, states, tokeniser |
| reward | a scorer, and the map of its teacher | drawings, states, tokeniser, denoiser, EfficientNet |
| judge | the other | the same, with Inception |
| quality | retrieval and sheets of samples | all of these |
| kid | KID of these samples | Inception |

All is written to one folder. The first two files may also lie in the folder of data, TOKENSTEER_DATA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from tokensteer.files import write_json
from tokensteer.tasks.common import image_tokeniser as tokenising
from tokensteer.tasks.common import lpips
from tokensteer.tasks.common.grid_denoiser import untrained
from tokensteer.tasks.common.part_training import INT8, PartTraining, Pieces, train_parts
from tokensteer.tasks.common.task import data_folder, weights_file
from tokensteer.tasks.common.tokenised_images import TokenisedImages
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.emoji import data, quality, sources, states, teachers, towers
from tokensteer.tasks.emoji import denoiser as denoising
from tokensteer.tasks.emoji.data import PAIR, TRAIN, Drawings
from tokensteer.tasks.emoji.model import STEPS, as_grid
from tokensteer.tasks.emoji.states import CaptionEncoder, States
from tokensteer.tasks.emoji.teachers import Features, Lessons, Teacher
from tokensteer.tasks.nets import FSQ, FSQConfig, GridTransformerConfig, ImageTextConfig
from tokensteer.tasks.nets.image_text import as_image_text
from tokensteer.tasks.nets.store import build
from tokensteer.tasks.quality.features import load_inception
from tokensteer.train import Plan

NAME = states.NAME
NETWORKS = ("tokeniser", "denoiser", "reward", "judge")
PARTS = ("data", "states", *NETWORKS, "quality", "kid")
SHARES = {"tokeniser": 0.25, "denoiser": 0.6, "reward": 0.07, "judge": 0.08}
"""Of the minutes, if all parts are trained."""
MINILM = "all-MiniLM-L6-v2 (Apache-2.0), as it was published"
SOURCE = f"emoji of {'; '.join(sources.ATTRIBUTION.values())}; names and tags of {sources.NAMES}"


@dataclass(frozen=True)
class Recipe:
    """Networks and plans. `noise` is the largest share of a drawing's codes that are replaced before the tokeniser
    decodes them. The teachers of the scorers have the `features` of the part on a device, and see
    `samples_of_teachers` samples for each guidance; `check` raises, before the long parts, if features will be missing.
    `quality` compares samples of so many unseen pairs at most, drawn in so many steps."""

    tokeniser: FSQConfig = denoising.TOKENISER
    denoiser: GridTransformerConfig = denoising.CONFIG
    reward: ImageTextConfig = towers.REWARD
    judge: ImageTextConfig = towers.JUDGE
    tokeniser_plan: Plan = denoising.TOKENISER_PLAN
    denoiser_plan: Plan = denoising.PLAN
    teacher_plan: Plan = teachers.PLAN
    tower_plan: Plan = towers.PLAN
    features: Callable[[str, str], Features] = teachers.published
    check: Callable[[], None] = teachers.check_published
    samples_of_teachers: int = teachers.SAMPLES
    copies: int = denoising.COPIES
    perceptual: bool = True
    noise: float = denoising.NOISE
    samples: int = 600
    steps: int = STEPS


RECIPE = Recipe()
ALONE = Pieces()


def train(training: Training, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Do all parts but `data`. A killed training continues if it is called with the same options."""
    recipe.check()
    copy_encoder(training.out, training.out)
    if not (training.out / states.STATES).is_file():
        train_part("states", training, ALONE, recipe)

    def part(name: str, training: Training, pieces: Pieces) -> Any:
        return train_part(name, training, pieces, recipe)

    def last() -> dict[str, Any]:
        return {"quality": train_part("quality", training, ALONE, recipe)}

    return train_parts(NAME, SHARES, training, part, last)


def train_part(part: str, training: Training, pieces: Pieces = ALONE, recipe: Recipe = RECIPE) -> Any:
    """Do one part, for `training.minutes` if it is a training; returns what was measured."""
    work = PartTraining(NAME, PARTS, part, training, pieces, SOURCE)
    work.begin()
    if part == "data":
        return make_data(training.out)
    if part == "kid":
        return quality.distances(pieces.weights or training.out, load_inception(device=training.device))
    before = pieces.weights or training.out
    drawings = data.read(before / data.FILE if (before / data.FILE).is_file() else None)
    if part == "states":
        encoder = copy_encoder(before, training.out, training.device)
        return states.write_states(states.make_states(encoder, drawings), drawings, training.out / states.STATES)
    drawings = drawings.to(training.device)
    makers: dict[str, Callable[[PartTraining, Recipe, Drawings], Any]] = {
        "tokeniser": make_tokeniser,
        "denoiser": make_denoiser,
        "reward": make_tower,
        "judge": make_tower,
        "quality": make_quality,
    }
    return makers[part](work, recipe, drawings)


def make_data(out: Path) -> None:
    """Render all drawings of the folder of data, and take MiniLM from it."""
    found = sources.read(data_folder())
    say(f"{len(found)} drawings of {len({drawing.concept for drawing in found})} concepts are rendered")
    data.write(found, out / data.FILE)
    captions = (text for texts in data.read(out / data.FILE).captions() for text in texts)
    encoder = states.make_encoder(captions, out)
    say(f"captions have {len(encoder.pieces)} pieces")


def copy_encoder(before: Path, out: Path, device: str = "cpu") -> CaptionEncoder:
    """The encoder of captions, which also goes to `out`, since prompts are read with it."""
    folder = before if weights_file(before, NAME, states.ENCODER).is_file() else data_folder()
    encoder = states.load_encoder(folder, device)
    if folder != out:
        states.store_encoder(encoder, out)
    return encoder


def _states(work: PartTraining, drawings: Drawings) -> States:
    return states.read_states((work.pieces.weights or work.training.out) / states.STATES, drawings)


def _tokeniser(work: PartTraining) -> FSQ:
    net = work.stored("tokeniser")
    if not isinstance(net, FSQ):
        raise ValueError(f"{work.file('tokeniser')} is no tokeniser: train it again")
    return net


def make_tokeniser(work: PartTraining, recipe: Recipe, drawings: Drawings) -> dict[str, float]:
    net, plan = FSQ(recipe.tokeniser).to(work.device), recipe.tokeniser_plan
    distance = lpips.load(work.device) if recipe.perceptual else None
    seen, unseen = drawings.part(TRAIN), drawings.part(PAIR)
    trainee = tokenising.TokeniserTraining(
        net, seen, unseen, distance, plan, compiled=work.compiled, noise=recipe.noise
    )
    progress = work.run(trainee, plan)
    trainee.best.put_into(trainee.learner.average)
    stored = work.store(trainee.learner.average)
    found = tokenising.measure(stored, unseen, distance)
    found["PSNR, before int8"] = tokenising.measure(trainee.learner.average, unseen, None)["PSNR"]
    return work.finish(progress, stored, recipe.tokeniser, plan, found, {"noise": recipe.noise, "stored": INT8})


def make_denoiser(work: PartTraining, recipe: Recipe, drawings: Drawings) -> dict[str, float]:
    first, encoded, plan = _tokeniser(work), _states(work, drawings), recipe.denoiser_plan
    config = replace(recipe.denoiser, vocab_size=first.config.num_codes + 1)
    net, earlier = untrained(work, config, first)
    places = work.training.generator(len(PARTS))
    trainee = denoising.DenoiserTraining(net, first, drawings, encoded, places, plan, work.compiled, recipe.copies)
    progress = work.run(trainee, plan)
    trainee.best.put_into(trainee.learner.average)
    stored = work.store(trainee.learner.average)
    nats = denoising.measure(stored, trainee.unseen, trainee.mask)
    before = denoising.measure(trainee.learner.average, trainee.unseen, trainee.mask)
    nats["unseen pairs, before int8"] = before["unseen pairs"]
    found = {f"{denoising.NATS}, {name}": value for name, value in nats.items()}
    more = {"tokeniser": trainee.given["tokeniser"], "stored": INT8, **earlier}
    return work.finish(progress, stored, config, plan, found, more)


def make_teacher(
    work: PartTraining, recipe: Recipe, drawings: Drawings, encoded: States, width: int
) -> tuple[Teacher, Lessons]:
    """A teacher of vectors of so many numbers, stored with its card, and what a scorer learns from it."""
    began, part, plan = perf_counter(), work.part, recipe.teacher_plan
    vectors, styles = encoded.concepts.to(work.device), teachers.STYLES_OF[work.part]
    networks = TokenisedImages(_tokeniser(work), as_grid(work.stored("denoiser")))
    features, generator = recipe.features(part, work.device), work.training.generator(len(PARTS) + PARTS.index(part))
    lessons = teachers.prepare(networks, drawings, encoded, features, generator, recipe.samples_of_teachers)
    if work.pieces.resume is not None and teachers.file_of(work.training.out, part).is_file():
        net = teachers.load_teacher(work.training.out, part, work.device)  # that of the run before
        return Teacher(net, features), lessons
    learned = teachers.learn(lessons, vectors, styles, width, plan, generator)
    teacher = Teacher(teachers.store(learned, work.training.out, part, work.device), features)
    found = towers.measure_teacher(teacher, drawings, vectors)
    card = {
        **work.training.card(f"teacher of the {part} of the task {NAME}", _command(part), SOURCE),
        "steps": plan.steps,
        "seconds": round(perf_counter() - began, 1),
        "parameters": sum(p.numel() for p in teacher.net.parameters()),
        "config": asdict(teacher.net.config),
        "plan": asdict(plan),
        "styles": list(styles),
        "features": teachers.FEATURES_OF[part],
        "stored": INT8,
        "quality": found,
    }
    write_json(teachers.file_of(work.training.out, part).with_suffix(".json"), card)
    say(f"teacher of the {part}, of {teachers.FEATURES_OF[part]}: {found}")
    return teacher, lessons


def make_tower(work: PartTraining, recipe: Recipe, drawings: Drawings) -> dict[str, float]:
    """A scorer, and first its teacher."""
    part, plan, config = work.part, recipe.tower_plan, recipe.reward if work.part == "reward" else recipe.judge
    encoded = _states(work, drawings)
    teacher, lessons = make_teacher(work, recipe, drawings, encoded, config.of_body.num_classes)
    net, vectors = as_image_text(build(config).to(work.device)), encoded.concepts.to(work.device)
    trainee = towers.TowerTraining(net, teacher.net, lessons, drawings, vectors, part, plan, work.compiled)
    progress = work.run(trainee, plan)
    stored = as_image_text(work.store(trainee.learner.average))
    found = towers.measure(stored, drawings, vectors)
    decoded = towers.measure(stored, drawings, vectors, _tokeniser(work))
    found |= {f"{name}, of reconstructions": value for name, value in decoded.items()}
    found |= towers.likeness(teacher, stored, drawings)
    more = {"styles": list(teachers.STYLES_OF[part]), "features": teachers.FEATURES_OF[part], "stored": INT8}
    return work.finish(progress, stored, config, plan, found, more)


def make_quality(work: PartTraining, recipe: Recipe, drawings: Drawings) -> dict[str, Any]:
    folder, encoded = work.pieces.weights or work.training.out, _states(work, drawings)
    found = quality.measure(folder, work.training, drawings, encoded, recipe.samples, recipe.steps)
    write_encoder_card(work)
    return found


def write_encoder_card(work: PartTraining) -> None:
    """The card of the encoder, written last: a folder whose cards all have a quality is that of a finished training."""
    encoder = copy_encoder(work.pieces.weights or work.training.out, work.training.out)
    card = {
        **work.training.card(f"encoder of the task {NAME}", _command("data"), MINILM),
        "seconds": 0.0,
        "parameters": sum(p.numel() for p in encoder.net.parameters()),
        "config": asdict(encoder.net.config),
        "stored": "int8 by output channel, vectors bfloat16",
        "quality": {"word pieces": len(encoder.pieces)},
    }
    write_json(weights_file(work.training.out, NAME, states.ENCODER).with_suffix(".json"), card)


def _command(part: str) -> str:
    return f"python -m tokensteer.tasks.{NAME} --part {part}"
