"""Trainings of tasks that are killed, started again, and started again with other options; files that are damaged."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from narrow import some, untyped
from small_digits import RECIPE, TAUGHT, TRIAL
from torch import nn

from tokensteer import files
from tokensteer import tensorfile as stored
from tokensteer.tasks import nets
from tokensteer.tasks.common import arrays
from tokensteer.tasks.common import proposals as learned
from tokensteer.tasks.common import training as common
from tokensteer.tasks.common.task import SHIPPED, Setup, Task, read_card
from tokensteer.tasks.common.training import Training, finished
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.images import digits
from tokensteer.tasks.images import train as pixels_train
from tokensteer.tasks.mog import trained as mog_trained
from tokensteer.tasks.text.corpus import windows as text_windows
from tokensteer.train import Plan, fit, load_adapter, lora, masked_loss, save_adapter

torch.set_num_threads(1)

ROLES = ("denoiser", "reward", "judge")


class KilledError(Exception):
    pass


def dies(*args: object, **options: object) -> None:
    raise KilledError


def weights_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def count_steps(monkeypatch) -> list[int]:
    """Updates that were made, of all networks."""
    from tokensteer.train.optim import Optimiser

    made, learn = [0], Optimiser.learn

    def counted(self, rate: float) -> None:
        made[0] += 1
        learn(self, rate)

    monkeypatch.setattr(Optimiser, "learn", counted)
    return made


# ---- killed, and started again with the same command


@pytest.mark.parametrize("where", ["_measure", "_steer", "picture"])
def test_a_training_that_was_killed_while_it_measured_goes_on_measuring(tmp_path, monkeypatch, where: str) -> None:
    training, cards = (
        Training(tmp_path),
        [tmp_path / f"digits-{role}.json" for role in ROLES],
    )
    with monkeypatch.context() as patch:
        patch.setattr(pixels_train, where, dies)
        with pytest.raises(KilledError):
            pixels_train.train(RECIPE, training, TRIAL)
    assert not finished(cards)
    before, made = weights_in(tmp_path), count_steps(monkeypatch)
    pixels_train.train(RECIPE, training, TRIAL)
    assert made == [0]  # nothing was trained again
    assert weights_in(tmp_path) == before
    assert finished(cards)
    assert read_card(cards[0])["steps"] == 3
    assert not training.checkpoints.exists()


def test_a_kill_between_cards_is_no_end(tmp_path, monkeypatch) -> None:
    """Every call that writes a card may be the last."""
    training, write, written = Training(tmp_path), common.write_json, 0
    cards = [tmp_path / f"digits-{role}.json" for role in ROLES]
    made = count_steps(monkeypatch)
    for last in range(8):

        def stops(file: Path, content: object, last: int = last) -> None:
            nonlocal written
            if written == last:
                raise KilledError
            written += 1
            write(file, content)

        written = 0
        monkeypatch.setattr(common, "write_json", stops)
        if last == 7:
            pixels_train.train(RECIPE, training, TRIAL)
        else:
            with pytest.raises(KilledError):
                pixels_train.train(RECIPE, training, TRIAL)
            if last < 7 and not all(card.is_file() for card in cards):
                continue
            assert not finished(cards)
    assert finished(cards)
    assert made == [9]  # three networks of three steps, once


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("twist", [False, True])
def test_proposals_that_were_killed_while_they_were_measured(tmp_path, monkeypatch, twist: bool) -> None:
    def teach(seed: int = 0) -> None:
        pixels_train.proposal(TAUGHT, 4, populations={2: 2}).train(Training(tmp_path, seed=seed), twist)

    with monkeypatch.context() as patch:
        patch.setattr(learned, "measure_methods", dies)
        with pytest.raises(KilledError):
            teach()
    card = tmp_path / ("digits-value-4.json" if twist else "digits-proposal-4.json")
    assert not finished([card])
    with pytest.raises(ValueError, match="seed was 0 and is now 3"):
        teach(seed=3)
    unfinished = read_card(card)
    other = Training(tmp_path).checkpoints / "digits-proposal-7.safetensors"
    other.write_bytes(b"of another goal")
    made = count_steps(monkeypatch)
    teach()
    assert made == [0]
    found = read_card(card)
    assert {name: value for name, value in found.items() if name != "quality"} == unfinished
    assert other.is_file()  # what others go on from stays


def test_tuning_in_two_ways_keeps_the_first_until_the_second_is_measured(tmp_path, monkeypatch) -> None:
    from tokensteer.tasks.dna import proposals as dna_taught
    from tokensteer.tasks.dna import task as dna
    from tokensteer.train import DrakesPlan

    def quick(setup: Setup) -> Task:
        return replace(dna.task(replace(setup, steps=2)), metrics=lambda result: {})

    plan = DrakesPlan(1, paths=2, last=1)
    tuned = {"drakes": dna_taught.Drakes(plan, 2), "drakes-kl": dna_taught.Drakes(replace(plan, kl=0.1), 2)}
    say, made = dna_taught.say, count_steps(monkeypatch)

    def dies_at_second(line: str) -> None:
        if line == "measuring drakes-kl":
            raise KilledError
        say(line)

    with monkeypatch.context() as patch:
        patch.setattr(dna_taught, "say", dies_at_second)
        with pytest.raises(KilledError):
            dna_taught.train_drakes(quick, Training(tmp_path), 0, SHIPPED, 2, tuned)
    dna_taught.train_drakes(quick, Training(tmp_path), 0, SHIPPED, 2, tuned)
    assert made == [2]
    assert not Training(tmp_path).checkpoints.exists()


def test_mog_goes_on_measuring(tmp_path, monkeypatch) -> None:
    training = Training(tmp_path, scale=0.001)
    with monkeypatch.context() as patch:
        patch.setattr(mog_trained, "_quality", dies)
        with pytest.raises(KilledError):
            mog_trained.train(training)
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        mog_trained.train(replace(training, seed=1))
    monkeypatch.setattr(mog_trained, "_quality", lambda training: {"none": 0})
    made = count_steps(monkeypatch)
    mog_trained.train(training)
    assert made == [0]
    assert finished([tmp_path / "mog-denoiser.json"])


# ---- other options


def test_a_task_is_not_gone_on_with_from_another_seed_or_length(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pixels_train, "_measure", dies)
        with pytest.raises(KilledError):
            pixels_train.train(RECIPE, Training(tmp_path), TRIAL)
    before = weights_in(tmp_path)
    for other, told in (
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"scale": 2.0}, "steps was 3 and is now 6"),
        ({"minutes": 1.0}, r"seconds was None and is now 45\.0"),
    ):
        with pytest.raises(ValueError, match=told) as refused:
            pixels_train.train(RECIPE, Training(tmp_path, **untyped(other)), TRIAL)
        assert "digits-denoiser.safetensors" in str(refused.value)
    assert weights_in(tmp_path) == before


def test_what_is_taught_is_not_mixed_with_other_networks(tmp_path) -> None:
    net = untyped(nets.load(SHIPPED / "digits-denoiser.safetensors"))
    with torch.no_grad():
        net.head.bias += 1
    nets.save(net, tmp_path / "digits-denoiser.safetensors", torch.bfloat16)
    with pytest.raises(ValueError, match=r"digits-denoiser\.safetensors is not the same as .*--weights"):
        pixels_train.proposal(TAUGHT, 4, populations={2: 2}).train(Training(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    files.copy(SHIPPED / "digits-denoiser.safetensors", other / "digits-proposal-4.safetensors")
    with pytest.raises(ValueError, match=r"digits-proposal-4\.safetensors is not the same"):
        pixels_train.proposal(TAUGHT, 4, populations={2: 2}).train(Training(other), twist=True)


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 2**63}, {"seed": 1.0}, {"scale": float("inf")},
    {"scale": float("nan")}, {"minutes": float("nan")}, {"minutes": float("inf")}])  # fmt: skip
def test_options_of_trainings(wrong) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Training(Path("x"), **wrong)


# ---- files that are damaged


def test_strays_are_cleaned_when_a_training_begins(tmp_path) -> None:
    training = Training(tmp_path)
    stray = f".digits-denoiser.safetensors.{2**22 + 1}-00000000{files.STRAY}"
    for folder in (tmp_path, training.checkpoints):
        folder.mkdir(exist_ok=True)
        (folder / stray).write_bytes(b"half")
    training.begin()
    assert not (tmp_path / stray).exists()
    assert not (training.checkpoints / stray).exists()


def test_a_full_disk_leaves_no_half_network(tmp_path, monkeypatch) -> None:
    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as half:
            half.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"digits-denoiser\.json could not be written"):
        learned.complete(Training(tmp_path), SHIPPED, "digits")
    assert not list(tmp_path.iterdir())


def test_a_damaged_card_is_named(tmp_path) -> None:
    for file in SHIPPED.glob("digits-*"):
        files.copy(file, tmp_path / file.name)
    for name, read in (
        ("digits-denoiser.json", lambda: digits.task(Setup(2, 4, weights=tmp_path))),
        ("digits-proposal-4.json", lambda: some(digits.task(Setup(2, 4, weights=tmp_path)).learned)()),
        ("digits-value-4.json", lambda: some(digits.task(Setup(2, 4, weights=tmp_path)).learned)()),
    ):
        whole = (tmp_path / name).read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", b"[1]", b"\xff"):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{name} is damaged.*again") as error:
                read()
            assert str(tmp_path / name) in str(error.value)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            read()
        (tmp_path / name).write_bytes(whole)


def test_vocabularies_are_parted_at_line_feeds_alone(tmp_path) -> None:
    words = WordPiece(("[MASK]", "a\u2028b", "c\u0085d", "e\x0cf"), (3, 2, 1, 0))
    words.write(tmp_path / "vocab.txt")
    assert WordPiece.read(tmp_path / "vocab.txt") == words
    for damaged in (b"[MASK]\t3\na", b"[MASK]\tx\n", b"\xff\t0\n", b"a\t0\na\t1\n"):
        (tmp_path / "vocab.txt").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"vocab\.txt is no vocabulary"):
            WordPiece.read(tmp_path / "vocab.txt")


def test_arrays_are_whole_or_refused(tmp_path) -> None:
    file = tmp_path / "x.npz"
    arrays.write(file, a=torch.arange(50).numpy())
    assert arrays.read(file, ("a",), "make it")["a"].tolist() == list(range(50))
    with pytest.raises(ValueError, match=r"x\.npz .*lacks b.*make it"):
        arrays.read(file, ("a", "b"), "make it")
    whole = file.read_bytes()
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x\.npz is damaged.*make it"):
            arrays.read(file, ("a",), "make it")
    with pytest.raises(ValueError, match=r"x\.npz is damaged.*--part windows"):
        text_windows.load(file)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)


def small_files(folder: Path) -> dict:
    """One file for each kind of reader."""
    body = nets.TransformerConfig(3, 2, width=4, depth=1, heads=2)
    nets.save(nets.Transformer(body), folder / "net.safetensors")
    value = nets.ValueConfig("transformer", asdict(body), width=4)
    nets.save(nets.ValueNet(value), folder / "value.safetensors")
    save_adapter(lora(Pair(), 1), folder / "adapter.safetensors")
    checkpoint = folder / "checkpoint.safetensors"

    def run() -> None:
        torch.manual_seed(0)
        net, g = nets.Transformer(body), torch.Generator().manual_seed(0)
        fit(net, masked_loss(2), torch.zeros(4, 2), plan=Plan(1, batch_size=2), generator=g, checkpoint=checkpoint)

    run()
    dna_reference.Reference(torch.rand(4, 64), torch.rand(4, 2), {"motifs": ["a", "b"]}).save(folder)
    return {
        "net": lambda: nets.load(folder / "net.safetensors"),
        "value": lambda: nets.load(folder / "value.safetensors"),
        "adapter": lambda: load_adapter(Pair(), folder / "adapter.safetensors"),
        "checkpoint": run,
        "dna-reference": lambda: dna_reference.load(folder),
    }


def edits(header: dict, chance: random.Random) -> list[dict]:
    """A header of safetensors with words of ours that are wrong in one place each."""
    ours = json.loads(header["__metadata__"][stored.KEY])
    odd = [None, [], {}, "x", -1, 0, 1.5, 10**12, True, [10**12]]
    wrong = [[], 3, "x", None, {}, {**ours, "values": []}]
    for name in ours:
        wrong += [{**ours, name: value} for value in chance.sample(odd, 5)]
        wrong.append({key: value for key, value in ours.items() if key != name})
    for inner in ("values", "plan"):
        for name in ours.get(inner, ()):
            wrong += [{**ours, inner: {**ours[inner], name: value}} for value in chance.sample(odd, 3)]
    return [{**header, "__metadata__": {stored.KEY: json.dumps(words)}} for words in wrong]


@pytest.mark.parametrize("kind", ["net", "value", "adapter", "checkpoint", "dna-reference"])
def test_damaged_files_are_refused_by_name(tmp_path, kind: str) -> None:
    """Whatever is wrong with a file, its reader answers, or raises a ValueError that names it."""
    if kind == "adapter":
        pytest.importorskip("peft")
    read = small_files(tmp_path)[kind]
    file, chance = tmp_path / f"{kind}.safetensors", random.Random(0)
    whole = file.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    mutants = [whole[:cut] for cut in (0, 1, 7, 8, 20, 8 + size, len(whole) - 1)] + [whole + b"x"]
    for _ in range(60):
        place, flipped = chance.randrange(8 + size), bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        mutants.append(bytes(flipped))
    for other in edits(header, chance):
        words = json.dumps(other).encode()
        mutants.append(struct.pack("<Q", len(words)) + words + whole[8 + size :])
    refused = []
    for mutant in mutants:
        file.write_bytes(mutant)
        try:
            read()
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > len(mutants) // 2
    assert all(str(file) in error for error in refused)
    file.write_bytes(whole)
    read()
