"""DNA: letters and words, motifs, networks for long sequences, and the task from made-up sites to a run folder."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from narrow import some, untyped
from torch import nn

import tokensteer as ts
from tokensteer.app.cli import main
from tokensteer.app.runs import choices, jobs, prepare
from tokensteer.app.runs.recipes import METHODS, usual
from tokensteer.rewards import motifs
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.png import write_coloured_png
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.training import Training, Trial
from tokensteer.tasks.dna import data as dna_data
from tokensteer.tasks.dna import dragonn, output
from tokensteer.tasks.dna import kmers as dna_counts
from tokensteer.tasks.dna import metrics as dna_metrics
from tokensteer.tasks.dna import model as dna_model
from tokensteer.tasks.dna import proposals as dna_taught
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.dna import task as dna
from tokensteer.tasks.dna import train as dna_train
from tokensteer.tasks.dna.__main__ import main as dna_main
from tokensteer.tasks.dna.data import CELLS, LENGTH, MASK
from tokensteer.tasks.dna.output import read_fasta, write_fasta
from tokensteer.tasks.nets import DilatedConfig, MotifConfig, ValueConfig, WordsConfig, load, save
from tokensteer.tasks.nets.store import build
from tokensteer.train import DrakesPlan, ProposalPlan, masked_loss


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def letters(rows: int, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, (rows, length), generator=seeded(seed))


# ---- letters and words


def test_the_other_strand():
    assert dna_data.spelled(dna_data.reverse_complement(dna_data.read_letters(["AACGT", "GGGTT"]))) == [
        "ACGTT",
        "AACCC",
    ]
    ids = letters(5)
    assert torch.equal(dna_data.reverse_complement(dna_data.reverse_complement(ids)), ids)
    with pytest.raises(ValueError, match="got N"):
        dna_data.read_letters(["ACN"])


def test_either_strand_is_one_or_the_other():
    ids = letters(2000, 8)
    seen = dna_data.either_strand(ids, seeded(1))
    turned = (seen == dna_data.reverse_complement(ids)).all(-1)
    assert ((seen == ids).all(-1) | turned).all()
    assert abs(float(turned.double().mean()) - 0.5) < 4 * math.sqrt(0.25 / 2000)


def test_harder_sites_are_moved_and_misspelled():
    ids = letters(500, 40)
    moved = dna_data.harder(3, 0.0)(ids, seeded(1))
    both = [ids, dna_data.reverse_complement(ids)]
    inner = torch.stack(
        [(strand[:, 3 + k : 37 + k] == moved[:, 3:37]).all(-1) for strand in both for k in range(-3, 4)]
    )
    assert (inner.sum(0) >= 1).all()
    assert (inner.sum(1) > 0).all()  # all moves of both strands happen
    wrong = dna_data.harder(0, 0.2)(torch.zeros(500, 40, dtype=torch.long), seeded(2))
    strange = torch.minimum((wrong != 0).sum(-1), (wrong != 3).sum(-1)).double()  # all A, or all T
    assert float(strange.mean()) == pytest.approx(0.2 * 0.75 * 40, rel=0.1)


def test_halves_share_nothing():
    sites = Examples(torch.arange(11).unsqueeze(1), torch.arange(11))
    a, b = dna_data.halves(sites)
    assert sorted([*a.labels.tolist(), *b.labels.tolist()]) == list(range(11))
    assert torch.equal(a.ids[:, 0], a.labels)


def test_kmers_by_hand():
    ids = dna_data.read_letters(["ACGTA", "AAAAA"])
    assert dna_counts.kmers(ids, 2).tolist() == [[1, 6, 11, 12], [0, 0, 0, 0]]
    shares = dna_counts.kmer_shares(ids, 2, torch.tensor([3.0, 1.0]))
    assert shares[[0, 1, 6, 11, 12]].tolist() == [4 / 16, 3 / 16, 3 / 16, 3 / 16, 3 / 16]
    assert dna_counts.distinct_kmers(ids, 2) == 5 / 8


def test_correlation_with_real_sites_by_hand():
    ids, weights = letters(6, 30).view(2, 3, 30), torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]).double()
    reference = torch.rand(64, generator=seeded(3), dtype=torch.float64)
    counts = np.zeros(64)
    for row, weight in zip(ids.flatten(0, 1).tolist(), weights.flatten().tolist(), strict=True):
        for a, b, c in zip(row, row[1:], row[2:], strict=False):
            counts[16 * a + 4 * b + c] += weight
    found = dna_metrics.correlation(dna_metrics.kmer_tables(ids, weights, 3), reference)
    assert found.mean == pytest.approx(np.corrcoef(counts, reference.numpy())[0, 1])
    assert found.error > 0


def test_markov_chains_know_what_they_are_told():
    """A chain of order 1 in which a letter is followed by itself or the next: its entropy is one bit for all but the
    first letter, and a model of no memory finds two."""
    steps = torch.randint(2, (4000, 50), generator=seeded())
    ids = steps.cumsum(-1) % 4
    ids = (ids + torch.randint(4, (4000, 1), generator=seeded(1))) % 4
    train, test = ids[:3000], ids[3000:]
    assert dna_counts.markov_bits(train, test, 0).mean == pytest.approx(2.0, abs=0.002)
    for order in (1, 2):
        assert dna_counts.markov_bits(train, test, order).mean == pytest.approx((2 + 49) / 50, abs=0.002)


def test_auc_counts_pairs():
    scores, positive = torch.tensor([0.1, 0.4, 0.4, 0.9, 0.2]), torch.tensor([False, True, False, True, False])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert dna_counts.auc(scores, positive).mean == pytest.approx(float(sum(pairs)) / len(pairs))
    draws = [
        dna_counts.auc(torch.randn(60, generator=seeded(k)) + torch.arange(60) % 2, torch.arange(60) % 2 == 1)
        for k in range(200)
    ]
    spread = torch.tensor([found.mean for found in draws]).std()
    assert float(spread) == pytest.approx(float(np.mean([found.error for found in draws])), rel=0.2)


def test_medians_count_weights():
    values = torch.tensor([[1.0, 2.0], [10.0, 3.0]])
    assert dna_metrics.median(values, torch.tensor([[0.5, 0.5], [0.5, 0.5]])).mean == 2.0
    assert dna_metrics.median(values, torch.tensor([[0.1, 0.9], [0.9, 0.1]])).mean == 2.0
    assert dna_metrics.median(values, torch.tensor([[0.0, 1.0], [0.9, 0.1]])).mean == 2.0
    assert dna_metrics.median(values, torch.tensor([[0.0, 0.2], [0.9, 0.1]])).mean == 10.0


def test_the_nearest_site_is_found_on_either_strand():
    known = letters(300, 20)
    ids = torch.cat([known[7:8], dna_data.reverse_complement(known[9:10]), letters(3, 20, seed=5)])
    ids[0, 3] = (ids[0, 3] + 1) % 4
    found = dna_metrics.nearest(ids, known, rows=64)
    strands = torch.stack([ids, dna_data.reverse_complement(ids)])
    slow = (strands[:, :, None] != known[None, None]).double().mean(-1).amin(-1).amin(0)
    torch.testing.assert_close(found.double(), slow, atol=1e-6, rtol=0)
    assert found[:2].tolist() == pytest.approx([1 / 20, 0.0])


# ---- motifs

SHARP = motifs.Motif("sharp", torch.tensor([[9, 0, 1, 0], [0, 8, 0, 2], [5, 5, 0, 0], [0, 0, 10, 0]]))
LONG = motifs.Motif("long", torch.tensor([[7, 1, 1, 1], [1, 7, 1, 1], [1, 1, 7, 1], [1, 1, 1, 7], [4, 2, 2, 2]] * 2))


@pytest.mark.parametrize("background", [motifs.EVEN, (0.3, 0.2, 0.2, 0.3)])
@pytest.mark.parametrize("p", [0.3, 0.05, 0.01])
def test_thresholds_are_those_of_all_words(p: float, background: tuple[float, ...]):
    scores = SHARP.scores(background)
    words = torch.tensor(list(itertools.product(range(4), repeat=4)))
    score = scores[torch.arange(4), words].sum(-1)
    chance = torch.tensor(background, dtype=torch.float64)[words].prod(-1)
    lowest, law = motifs.score_law(scores, background)
    for value in score.unique().tolist():
        assert float(law[value - lowest]) == pytest.approx(float(chance[score == value].sum()))
    reached = [v for v in score.unique().tolist() if float(chance[score >= v].sum()) <= p + 1e-12]
    assert motifs.threshold(scores, p, background) == min(reached)


def test_a_motif_that_chance_makes_is_left_out():
    assert motifs.threshold(SHARP.scores(), 1e-4) is None  # one word in 256 is as good as can be
    assert motifs.scanner([SHARP, LONG], 1e-4).names == ("long",)
    with pytest.raises(ValueError, match="p must lie"):
        motifs.scanner([LONG], 0.0)


def test_scanning_is_what_a_loop_finds():
    scan, ids = motifs.scanner([SHARP, LONG, replace(SHARP, name="again")], 0.02), letters(9, 60)
    slow = torch.zeros(9, 3)
    for row in range(9):
        for m, motif in enumerate((SHARP, LONG, SHARP)):
            scores = motif.scores()
            least, width = motifs.threshold(scores, 0.02), len(scores)
            assert least is not None
            for strand in (ids[row], dna_data.reverse_complement(ids[row : row + 1])[0]):
                for start in range(60 - width + 1):
                    word = strand[start : start + width]
                    slow[row, m] += sum(int(scores[k, word[k]]) for k in range(width)) >= least
    assert torch.equal(scan(ids, rows=4), slow)
    assert slow[:, 0].sum() > 5
    assert scan(ids[:, :6]).shape == (9, 3)  # sequences that the long one does not fit into


def test_jaspar_brings_its_motifs():
    pytest.importorskip("pyjaspar")
    found = motifs.jaspar()
    assert len(found) > 800
    hnf4a = next(motif for motif in found if motif.name.endswith(" HNF4A"))
    assert hnf4a.counts.shape[1] == 4
    scan = motifs.scanner([hnf4a])
    best = "".join("ACGT"[int(i)] for i in hnf4a.counts.argmax(-1))
    text = dna_data.read_letters(["A" * 20 + best + "A" * 20])
    assert float(scan(text)[0, 0]) >= 1
    assert torch.equal(scan(dna_data.reverse_complement(text)), scan(text))


# ---- an independent axis


def keras_arrays() -> dict[str, np.ndarray]:
    rng = np.random.RandomState(0)
    arrays = {"dense_1/kernel:0": rng.randn(15960, 12) / 100, "dense_1/bias:0": rng.randn(12)}
    for k, channels in enumerate((4, 120, 120), 1):
        arrays[f"conv1d_{k}/kernel:0"] = rng.randn(5, channels, 120) / math.sqrt(5 * channels)
        arrays[f"conv1d_{k}/bias:0"] = 0.1 * rng.randn(120)
        for name in ("gamma", "beta", "moving_mean"):
            arrays[f"batch_normalization_{k}/{name}:0"] = 0.3 * rng.randn(120)
        arrays[f"batch_normalization_{k}/moving_variance:0"] = 0.1 + rng.rand(120)
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def by_numpy(arrays: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """What Keras does: channels last, valid convolutions, ReLU before the norm."""
    h = np.eye(4)[ids]
    for k in (1, 2, 3):
        kernel = arrays[f"conv1d_{k}/kernel:0"].astype(float)
        out = np.stack([np.einsum("pkc,kcf->pf", h[:, i : i + 5], kernel) for i in range(h.shape[1] - 4)], 1)
        out = np.maximum(out + arrays[f"conv1d_{k}/bias:0"], 0.0)
        norm = {name: arrays[f"batch_normalization_{k}/{name}:0"] for name in ("gamma", "beta", "moving_mean")}
        scale = norm["gamma"] / np.sqrt(arrays[f"batch_normalization_{k}/moving_variance:0"] + 1e-3)
        h = scale * (out - norm["moving_mean"]) + norm["beta"]
    return h.reshape(len(h), -1) @ arrays["dense_1/kernel:0"].astype(float) + arrays["dense_1/bias:0"]


def test_dragonn_is_the_network_that_keras_runs(tmp_path: Path, monkeypatch):
    arrays, ids = keras_arrays(), letters(4)
    net = dragonn.from_keras(arrays)
    exact = by_numpy(arrays, ids[:, 27:172].numpy())
    np.testing.assert_allclose(net(ids).numpy(), exact, atol=1e-4)
    torch.testing.assert_close(
        dragonn.activity(net, ids, "HepG2"), torch.tensor(exact[:, [8, 11]].mean(-1)).float(), atol=1e-4, rtol=0
    )
    with pytest.raises(ValueError, match="reads 145 letters"):
        net(ids[:, :100])
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    assert dragonn.find() is None
    with pytest.raises(SystemExit) as stopped:
        dragonn.main([])
    assert stopped.value.code == 2
    h5py = pytest.importorskip("h5py")
    (tmp_path / "mpra_dragonn").mkdir()
    with h5py.File(tmp_path / dragonn.KERAS, "w") as file:
        for name, value in arrays.items():
            file[f"{name.split('/')[0]}/{name}"] = value
    dragonn.main([])
    found = dragonn.find()
    assert found is not None
    assert torch.equal(found(ids), net(ids))


# ---- networks

CONFIGS = [
    DilatedConfig(5, 24, 16, 3, (1, 2), num_classes=4),
    DilatedConfig(4, 24, 16, 3, (1, 4), timed=True, dropout=0.5),
    MotifConfig(5, 24, 4, channels=(8, 8), kernels=(5, 3), pool=2, dropout=0.5),
    WordsConfig(5, 24, 4, word=6, stride=3, width=16, depth=1, heads=2, dropout=0.5),
    ValueConfig("dilated", {"vocab_size": 5, "length": 24, "width": 16, "dilations": [1, 2]}),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_one_hots_give_what_ids_give_and_files_what_was_saved(config, tmp_path: Path):
    torch.manual_seed(0)
    net = build(config)
    for parameter in net.parameters():  # those that start at zero hide what comes before them
        nn.init.normal_(parameter, std=0.3)
    save(net, tmp_path / "net.safetensors")
    net = load(tmp_path / "net.safetensors")
    timed = (0.3,) if isinstance(config, DilatedConfig) and config.timed else ()
    vocab = 4 if timed else 5
    x = torch.randint(vocab, (3, 24), generator=seeded())
    soft = torch.nn.functional.one_hot(x, vocab).float().requires_grad_()
    torch.testing.assert_close(net(soft, *timed), net(x, *timed))
    (slope,) = torch.autograd.grad(net(soft, *timed).square().sum(), soft)
    assert (slope.flatten(1).abs().amax(-1) > 0).all()
    torch.testing.assert_close(net(x[:1], *timed), net(x, *timed)[:1], atol=1e-5, rtol=1e-5)


def test_a_denoiser_hears_its_label_and_no_label():
    torch.manual_seed(0)
    net = build(CONFIGS[0]).eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randint(5, (4, 24), generator=seeded())
    told = [net(x, None, torch.tensor(k)) for k in range(-1, 4)]
    torch.testing.assert_close(told[0], net(x))
    assert all((a - b).abs().max() > 1e-3 for a, b in itertools.combinations(told, 2))


def test_wrong_configurations_say_so():
    with pytest.raises(ValueError, match="multiple of 8 groups"):
        DilatedConfig(5, 24, 12)
    with pytest.raises(ValueError, match="as many of both"):
        MotifConfig(5, 24, 4, channels=(8,), kernels=(3, 3))
    with pytest.raises(ValueError, match="4 heads"):
        WordsConfig(5, 24, 4, width=30)
    with pytest.raises(ValueError, match="built for length 24"):
        build(CONFIGS[0])(torch.zeros(1, 9, dtype=torch.long))


def test_labels_are_dropped_as_often_as_asked():
    seen: list[torch.Tensor] = []

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            seen.append(label)
            return torch.zeros(*x.shape, 5)

    labels = torch.arange(4000) % 4
    loss = dna_train.augmented(masked_loss(MASK, dna_train.UNLABELLED))
    assert float(loss(Spy(), letters(4000, 6), labels, seeded())) == pytest.approx(math.log(4), rel=1e-5)
    dropped = seen[0] == -1
    assert torch.equal(seen[0][~dropped], labels[~dropped])
    assert abs(float(dropped.double().mean()) - 0.5) < 4 * math.sqrt(0.25 / 4000)


# ---- FASTA and pictures


def result(populations: int = 2, particles: int = 3) -> ts.Result:
    generator = seeded(4)
    log_w = torch.randn(populations, particles, generator=generator, dtype=torch.float64)
    return ts.Result(
        letters(populations * particles).view(populations, particles, -1),
        log_w,
        reward=torch.randn(populations, particles, generator=generator),
        ess=torch.ones(1, populations),
        mean_reward=None,
        ancestors=torch.zeros(1, populations, particles, dtype=torch.long),
        rows={},
        generator=generator,
    )


def test_fasta_holds_all_particles_with_their_weights(tmp_path: Path):
    found = result()
    write_fasta(found, tmp_path / "x.fasta")
    headers, ids = read_fasta(tmp_path / "x.fasta")
    assert len(headers) == 6
    weights = {0: [], 1: []}
    for header, row in zip(headers, ids, strict=True):
        name, weight, reward = header.split()
        b, n = (int(number) for number in re.findall(r"\d+", name))
        assert torch.equal(row, found.samples[b, n])
        assert float(weight.removeprefix("weight=")) == pytest.approx(float(found.weights[b, n]), rel=1e-5)
        assert float(reward.removeprefix("reward=")) == pytest.approx(float(some(found.reward)[b, n]), rel=1e-5)
        weights[b].append(float(found.weights[b, n]))
    assert all(w == sorted(w, reverse=True) for w in weights.values())
    (tmp_path / "y.fasta").write_text(">a\nacg\nTTT\n\n>b\nGGGGGG\n")
    assert dna_data.spelled(read_fasta(tmp_path / "y.fasta")[1]) == ["ACGTTT", "GGGGGG"]
    for text, error in (("ACG\n", "no FASTA"), (">a\nAC\n>b\nA\n", "one length"), (">a\nNN\n", "got N")):
        (tmp_path / "z.fasta").write_text(text)
        with pytest.raises(ValueError, match=error):
            read_fasta(tmp_path / "z.fasta")


def test_pictures_have_a_colour_for_each_letter(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    dna.picture(torch.tensor([[0, 1, 2, 3], [3, 3, 0, 0]]), tmp_path / "x.png", zoom=2)
    back = (imread(tmp_path / "x.png")[..., :3] * 255).round().astype(int)
    assert back.shape == (14, 8, 3)
    assert [tuple(back[0, 2 * k]) for k in range(4)] == list(output.COLOURS[:4])
    assert tuple(back[6, 0]) == output.COLOURS[4]
    assert tuple(back[8, 7]) == output.COLOURS[0]
    write_coloured_png(tmp_path / "y.png", torch.zeros(1, 1, dtype=torch.long), [(1, 2, 3)])
    assert tuple((imread(tmp_path / "y.png")[0, 0, :3] * 255).round().astype(int)) == (1, 2, 3)


# ---- split Gibbs and greedy SVDD


def test_split_gibbs_keeps_its_joint_law():
    """Two independent sites, whose reverse process is exact in any number of steps: at a fixed time the chain must
    leave p(x) · sum_z q_t(z | x) exp(r(z)/kl) unchanged, whatever the reward ties together."""
    law, t, kl = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 0.4, 0.5
    reward = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, 0.3], [1.2, -0.4, 0.1]], dtype=torch.float64)
    kernel = ts.uniform_noise(3)

    def denoiser(x: torch.Tensor, time: float) -> torch.Tensor:
        alpha = kernel.schedule.alpha(time)
        likely = law * (alpha * torch.nn.functional.one_hot(x, 3) + (1.0 - alpha) / 3)
        return (likely / likely.sum(-1, keepdim=True)).log()

    model = ts.Diffusion(denoiser, kernel, ts.uniform_steps(2), torch.full((2,), ts.NO_MASK))
    steering = ts.Steering(model, ts.Tilt(lambda x: reward[x[:, 0], x[:, 1]], kl=kl))
    alpha = kernel.schedule.alpha(t)
    forward = alpha * torch.eye(3, dtype=torch.float64) + (1 - alpha) / 3
    exact = torch.einsum("a,b,ac,bd,cd->ab", law, law, forward, forward, (reward / kl).exp())
    exact = (exact / exact.sum()).flatten()
    count = 20_000
    found = ts.SplitGibbs(12, steps=2, flips=8, first=t, last=t)(steering, 1, count, generator=seeded(3))
    seen = torch.bincount(3 * found.samples[:, 0, 0] + found.samples[:, 0, 1], minlength=9) / count
    z = (seen - exact) / (exact * (1 - exact) / count).sqrt()
    assert float(z.abs().max()) < 4.0
    plain = law.outer(law).flatten()  # the reward must be felt at all
    assert float(((seen - plain) / (plain * (1 - plain) / count).sqrt()).abs().max()) > 10
    assert found.rows == {"denoiser": found.rows["denoiser"], "reward": 12 * 9 * count + count}
    assert torch.equal(some(found.reward)[:, 0], reward[found.samples[:, 0, 0], found.samples[:, 0, 1]])


def test_split_gibbs_keeps_what_is_fixed_and_says_what_it_needs():
    net = lambda x, t: torch.zeros(*x.shape, 3).log_softmax(-1)  # noqa: E731
    model = ts.Diffusion(net, ts.uniform_noise(3), ts.uniform_steps(2), torch.tensor([[-1, 2, -1], [0, -1, -1]]))
    tilt = ts.Tilt(lambda x: x.sum(-1).float(), kl=0.1)
    found = ts.SplitGibbs(3, steps=2, flips=20)(ts.Steering(model, tilt), 4, 2, generator=seeded())
    assert (found.samples[0, :, 1] == 2).all()
    assert (found.samples[1, :, 0] == 0).all()
    with pytest.raises(ValueError, match="needs a reward"):
        ts.SplitGibbs()(ts.Steering(model), 2)
    masked = ts.Diffusion(
        ts.from_logits(lambda x, t: torch.zeros(*x.shape, 3), 2), ts.Ancestral(2), model.steps, torch.full((3,), 2)
    )
    with pytest.raises(ValueError, match="uniform noise"):
        ts.SplitGibbs()(ts.Steering(masked, tilt), 2)
    with pytest.raises(ValueError, match="first to last"):
        ts.SplitGibbs(first=0.1, last=0.5)
    with pytest.raises(ValueError, match="at least 1"):
        ts.SplitGibbs(rounds=0)


def test_the_greedy_survivor_is_the_heaviest():
    log_w = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, -1.0]], dtype=torch.float64)
    ancestors, carried = ts.resampling.heaviest(log_w)
    assert ancestors.tolist() == [[1, 1, 1], [0, 0, 0]]
    torch.testing.assert_close(carried[:, 0], log_w.logsumexp(-1) - math.log(3))


# ---- the task, from made-up sites


def made_up(file: Path, each: int = 30) -> None:
    """Sites of four cell types, each with a word of its own in the middle, in three splits."""
    ids = letters(12 * each).numpy().astype(np.uint8)
    cell, split = np.arange(12 * each) % 4, np.arange(12 * each) // 4 % 3
    for k, word in enumerate(("ACGTACGT", "GGGGCCCC", "TTTTAAAA", "CACACACA")):
        ids[cell == k, 96:104] = ["ACGT".index(c) for c in word]
    names = ["GM12878", "HepG2", "K562", "hESCT0"]  # not in the order of goals
    np.savez(file, seq_ACGT=ids, cell=cell, split=split, cells=names, splits=["training", "validation", "test"])


def small(role: dna_train.Role) -> dna_train.Role:
    config = role.config
    if isinstance(config, DilatedConfig):
        config = replace(config, width=16, kernel=3, dilations=(1, 4))
    elif isinstance(config, MotifConfig):
        config = replace(config, channels=(8, 8), kernels=(9, 3), width=16)
    elif isinstance(config, WordsConfig):
        config = replace(config, width=16, depth=1, heads=2)
    return replace(role, config=config, plan=replace(role.plan, steps=4, batch_size=16))


ROLES = {name: small(role) for name, role in dna_train.ROLES.items()}
SCAN = motifs.scanner([SHARP, LONG], 0.01)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder of data and one of weights, trained on it."""
    folder = tmp_path_factory.mktemp("dna")
    made_up(folder / dna_data.FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENSTEER_DATA", str(folder))
        patch.setattr(dna_reference, "motif_scanner", lambda: SCAN)
        dna_train.train(Training(folder / "weights"), Trial(4, 2, 20, 3), ROLES, dna.task)
    return folder


@pytest.fixture
def weights(home: Path, monkeypatch) -> Path:
    monkeypatch.setenv("TOKENSTEER_DATA", str(home))
    monkeypatch.setattr(dna_reference, "motif_scanner", lambda: SCAN)
    return home / "weights"


def tokensteer(*words: object) -> int:
    return main([str(word) for word in words])


def test_cell_types_are_those_of_the_file(weights: Path):
    data = dna_data.data()
    assert [len(part.ids) for part in (data.train, data.validation, data.test)] == [120, 120, 120]
    word = dna_data.spelled(data.train.ids[data.train.labels == CELLS.index("HepG2")][:1])[0]
    assert word[96:104] == "GGGGCCCC"


def test_data_that_is_missing_or_strange_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="TOKENSTEER_DATA"):
        dna_data.data()
    assert tokensteer("train", "dna", "--out", tmp_path / "out") == 2
    for words in (["--reference"], ["--drakes", "--goal", "7"]):
        with pytest.raises(SystemExit) as stopped:
            dna_main(["--out", str(tmp_path / "out"), *words])
        assert stopped.value.code == 2
    assert not (tmp_path / "out").exists()
    np.savez(tmp_path / dna_data.FILE, seq_ACGT=np.zeros((2, 200), np.uint8))
    with pytest.raises(ValueError, match="lacks cell, cells, split"):
        dna_data.data()


def test_training_leaves_weights_cards_and_what_to_compare_with(weights: Path):
    for role in dna_train.ROLES:
        card = json.loads((weights / f"dna-{role}.json").read_text())
        assert card["steps"] == 4
        assert card["training sites"] == (60 if role in ("reward", "judge") else 120)
    quality = json.loads((weights / "dna-quality.json").read_text())
    assert set(quality["denoiser"]["bits per base"]) == {"train", "chromosome 2", "chromosome 1"}
    assert 1.5 < quality["denoiser"]["bits per base of chromosome 1, Markov chain"]["order 0"]["mean"] < 2.01
    assert 0 <= quality["reward"]["chromosome 1"]["AUC"]["HepG2"]["mean"] <= 1
    reference = dna_reference.load(weights)
    assert reference is not None
    assert reference.about["sites"] == [4] * 4
    torch.testing.assert_close(reference.shares.sum(-1), torch.ones(4, dtype=torch.float64))
    assert reference.motifs is not None
    assert reference.motifs.shape == (4, len(SCAN.names))
    assert not (weights / "checkpoints").exists()


def test_the_best_sites_are_those_that_score_highest():
    sites = Examples(torch.arange(20).unsqueeze(1), torch.arange(20) % 2)
    assert dna_reference.best_sites(sites, torch.arange(20.0), 1, 0.3)[:, 0].tolist() == [19, 17, 15]


def test_metrics_need_neither_data_nor_motifs(weights: Path, tmp_path: Path, monkeypatch):
    task = dna.task(Setup(3, weights=weights))
    full = task.metrics(result())
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    monkeypatch.setattr(dna_reference, "motif_scanner", lambda: None)
    fewer = task.metrics(result())
    assert set(full) - set(fewer) == {"novelty", "motif correlation"}
    for name in set(fewer) - {"distinct 6-mers"}:
        assert fewer[name].mean == pytest.approx(full[name].mean), name
    (tmp_path / "w").mkdir()
    for file in weights.glob("dna-*"):
        if "reference" not in file.name:
            (tmp_path / "w" / file.name).write_bytes(file.read_bytes())
    assert "3-mer correlation" not in dna.task(Setup(3, weights=tmp_path / "w")).metrics(result())


def test_marks_and_activity_are_those_of_the_networks(weights: Path):
    task, found = dna.task(Setup(3, 2, weights=weights)), result(1, 1)
    reward, judge = (load(weights / f"dna-{role}.safetensors") for role in ("reward", "judge"))
    p = reward(found.samples[0]).exp()[0, 2].double()
    assert task.metrics(found)["activity"].mean == pytest.approx(float((p / (1 - p)).log()), abs=1e-4)
    assert task.judge is not None
    assert float(task.judge(found.samples[0])) == float(judge(found.samples[0]).exp()[0, 2] > 0.5)
    assert "GM12878" in task.about
    assert "MPRA" not in task.metrics(found)


@pytest.mark.parametrize("method", ["smc-grad", "cfg", "smc-cfg", "sgdd", "sgdd-long", "svdd-argmax"])
def test_methods_run_from_the_command_line(method: str, weights: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tokensteer.app.runs.recipes.METHODS", _short_of_sgdd())
    words = ["--particles", 2, "--populations", 2, "--steps", 3, "--weights", weights, "--out", tmp_path / "x"]
    assert tokensteer("run", "dna", "--method", method, "--goal", 1, *words) == 0
    run = ts.open_run(tmp_path / "x")
    row = run.rows[0]
    assert "K562" in row["about"]
    assert {"accuracy", "activity", "3-mer correlation", "motif correlation", "novelty"} <= set(row["metrics"])
    (file,) = run.written(0)
    assert torch.equal(read_fasta(file)[1].sort(0).values, run.result(0).samples.flatten(0, 1).sort(0).values)
    assert run.picture(0).is_file()
    assert (row["log_z"] is None) == (method != "smc-grad")
    assert tokensteer("report", tmp_path / "x") == 0


def _short_of_sgdd() -> dict:
    quick = ts.SplitGibbs(2, steps=2, flips=3)
    return {name: replace(recipe, split=quick) if recipe.split else recipe for name, recipe in METHODS.items()}


def test_split_gibbs_has_two_lengths(weights: Path):
    short, long = (some(METHODS[name].split) for name in ("sgdd", "sgdd-long"))
    assert (short.rounds, short.steps, short.flips) == (20, 5, 40)
    assert (long.rounds, long.steps, long.flips) == (50, 32, 200)
    task = dna.task(Setup(2, weights=weights))
    assert {"sgdd", "sgdd-long"} & set(usual(task, task.tilt)) == {"sgdd"}


# ---- the second reward


def test_the_logit_is_the_log_odds_of_the_classifier_and_not_bounded():
    probabilities = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01]], dtype=torch.float64)
    for cell in range(4):
        p = probabilities[:, cell]
        logit = dna_model.tilt(lambda x: probabilities.log(), cell, "logit", kl=0.5)
        assert (logit.kl, logit.differentiable) == (0.5, True)
        torch.testing.assert_close(logit.reward(letters(2)), (p / (1 - p)).log())
        torch.testing.assert_close(dna_model.tilt(lambda x: probabilities.log(), cell).reward(letters(2)), p.log())


def test_the_reward_is_chosen_with_its_own_kl(weights: Path):
    made = {name: dna.task(Setup(2, 1, reward=name, weights=weights)) for name in (None, "log-p", "logit")}
    assert made[None].tilt.kl == made["log-p"].tilt.kl == dna_model.KLS["log-p"] == 0.1
    assert made["logit"].tilt.kl == dna_model.KLS["logit"] != 0.1
    assert dna.task(Setup(2, 1, 3.0, reward="logit", weights=weights)).tilt.kl == 3.0
    assert [made[name].reward for name in (None, "log-p", "logit")] == [None, None, "logit"]
    x = letters(3)
    p = made[None].tilt.reward(x).double().exp()
    torch.testing.assert_close(made["log-p"].tilt.reward(x), made[None].tilt.reward(x))
    torch.testing.assert_close(made["logit"].tilt.reward(x).double(), (p / (1 - p)).log(), rtol=0, atol=1e-4)
    middle = {jobs.kls(jobs.Job("dna", "smc-base", 2, 1, settings=Settings(reward=r)))[2].settings.kl for r in made}
    assert middle == set(dna_model.KLS.values())


def test_a_run_with_the_logit_is_stored_and_reported(weights: Path, tmp_path: Path, monkeypatch):
    words = ["--populations", 2, "--steps", 3, "--weights", weights, "--reward", "logit"]
    assert tokensteer("run", "dna", *words, "--particles", 2, "--out", tmp_path / "one") == 0
    assert tokensteer("run", "dna", *words, "--budget", 4000, "--draws", 1, "--out", tmp_path / "auto") == 0
    several = ["compare", "dna", "--methods", "smc-base", "svdd-argmax", "--particles", 2, "--out", tmp_path / "both"]
    assert tokensteer(*several, *words) == 0
    for folder in ("one", "auto", "both"):
        run, config = ts.open_run(tmp_path / folder), json.loads((tmp_path / folder / "config.json").read_text())
        assert {job["reward"] for job in config["jobs"]} == {"logit"}
        assert {row["job"]["reward"] for row in run.rows} == {"logit"}
        found = run.result(0)
        task = dna.task(Setup(3, reward="logit", weights=weights))
        expected = task.tilt.reward(found.samples.flatten(0, 1)).view_as(some(found.reward))
        torch.testing.assert_close(some(found.reward), expected, check_dtype=False)
        assert tokensteer("report", tmp_path / folder) == 0


@pytest.mark.parametrize(
    ("task", "name", "says"),
    [
        ("dna", "odds", "dna has the rewards log-p and logit: give one of them as --reward, got odds"),
        ("dna", "mine.py:short", "dna has the rewards log-p and logit"),
        ("digits", "logit", "digits has only one reward, got logit: leave out --reward (dna has log-p and logit"),
        ("mog", "logit", "mog has only one reward"),
        ("product", "logit", "product has only one reward"),
        ("tfbind", "logit", "tfbind has only one reward"),
        ("text", "logit", "text has the rewards sentiment and toxicity: give one of them as --reward, or a function"),
    ],
)
def test_a_reward_that_a_task_lacks_is_refused(task: str, name: str, says: str, tmp_path: Path, capsys):
    assert tokensteer("run", task, "--reward", name, "--out", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1, error
    assert not (tmp_path / "x").exists()


def test_networks_learned_for_the_other_reward_are_named_or_refused(tmp_path: Path, capsys):
    """The shipped ones were learned for log-p."""
    words = ["--reward", "logit", "--kl", 0.1, "--particles", 2, "--populations", 1, "--steps", 2]
    assert tokensteer("run", "dna", "--method", "smc-learned", *words, "--out", tmp_path / "x") == 2
    assert "learned for the task's own reward, and here it is the reward logit: use smc-amot" in capsys.readouterr().err
    methods = ["--methods", "smc-amot", "prop-amot", "smc-base"]
    assert tokensteer("compare", "dna", *methods, *words, "--out", tmp_path / "both") == 0
    lines = (
        "smc-amot: its networks were learned for the task's own reward; its weights correct for that\n"
        "prop-amot: its networks were learned for the task's own reward; no weights correct for that\n"
    )
    assert lines in capsys.readouterr().out
    assert [row.get("learned for") for row in ts.open_run(tmp_path / "both").rows] == ["the task's own reward"] * 2 + [
        None
    ]
    assert tokensteer("report", tmp_path / "both") == 0
    assert lines in capsys.readouterr().out
    page = (tmp_path / "both" / "report.html").read_text("utf-8")
    assert "It was for the task&#x27;s own reward, not for the reward of this run." in page
    assert tokensteer("run", "dna", "--method", "smc-amot", *words[2:], "--out", tmp_path / "own") == 0
    assert "its networks were learned for" not in capsys.readouterr().out


def test_guidance_asks_two_models_and_the_plain_sampler_one(weights: Path):
    task = dna.task(Setup(3, weights=weights))
    assert task.guided is not None
    told, model = task.guided().models
    assert model is task.model
    x = torch.full((1, LENGTH), MASK)
    assert not torch.allclose(told.denoiser(x, 0.5).exp(), task.model.denoiser(x, 0.5).exp())
    run = ts.smc_cfg(told, task.model, 1.5)(2, 2, generator=seeded())
    assert run.rows["denoiser"] == 2 * ts.pretrained(task.model)(2, 2, generator=seeded()).rows["denoiser"]


def test_the_scale_of_guidance_is_given(weights: Path):
    for given, scale in ((None, 1.5), (2.5, 2.5)):
        job = jobs.Job("dna", "smc-cfg", 2, 1, settings=Settings(2, guidance=given))
        (ready,) = prepare.prepare([job], prepare.Environment(weights))
        model = ready.method.steering.model
        assert isinstance(model, ts.Product)
        assert model.powers == (scale, 1.0 - scale)
    mixed = [replace(job, method=name) for name in ("smc-base", "cfg")]
    assert len(prepare.prepare(mixed, prepare.Environment(weights))) == 2


def test_a_run_shares_the_noise_of_its_seed_unless_it_is_asked_not_to(weights: Path):
    made = dna.task(Setup(2, weights=weights))
    assert choices.tilted(made, Settings(), seed=3).estimator == ts.Sampled(seed=3)
    assert choices.tilted(made, Settings(draws=8), seed=3).estimator == ts.Sampled(seed=3)
    assert choices.tilted(made, Settings(noise="fresh"), seed=3).estimator == ts.Sampled()
    common = {"task": "dna", "particles": 2, "populations": 1, "seed": 3}
    for name, noise, seed in (("smc-base", None, 3), ("fk-sum", None, None), ("fk-sum", "shared", 3)):
        job = jobs.Job(method=name, settings=Settings(2, noise=noise), **common)
        (ready,) = prepare.prepare([job], prepare.Environment(weights))
        assert ready.method.steering.twist is not None
        assert ready.method.steering.twist.estimator == ts.Sampled(seed)


@pytest.mark.slow
def test_what_is_shipped_does_what_its_cards_say():
    task = dna.task(Setup(15))
    assert task.judge is not None
    found = {}
    for name in ("pretrained", "prop-amot", "drakes"):
        found[name] = METHODS[name].make(task, task.tilt, 16)(16, generator=seeded()).samples[0]
    judged = {name: float(task.judge(ids).mean()) for name, ids in found.items()}
    assert judged["pretrained"] < 0.5  # 0.20 in docs/dna.md
    assert judged["prop-amot"] > 0.7  # 0.92
    assert judged["drakes"] > 0.9  # 1.00
    values = METHODS["smc-learned"].make(task, task.tilt, 2)(2, generator=seeded())  # its twist fits the rest
    assert values.log_w.isfinite().all()


def test_wrong_goals_list_the_cell_types(weights: Path, tmp_path: Path, capsys):
    assert tokensteer("run", "dna", "--goal", 4, "--weights", weights, "--out", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert "0 (HepG2), 1 (K562), 2 (GM12878), 3 (hESCT0)" in error
    assert not (tmp_path / "x").exists()


def test_a_student_draws_with_what_it_is_weighed_by(weights: Path):
    file = weights / "dna-denoiser.safetensors"
    net, known = dna_taught.without_dropout(file, "cpu").train(), load(file)
    assert untyped(known.config).dropout > 0
    torch.testing.assert_close(net(letters(2)), known(letters(2)))
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.slow
def test_a_proposal_is_taught_for_the_other_reward(weights: Path, tmp_path: Path, capsys):
    made: list[Setup] = []

    def quick(setup: Setup) -> Task:
        made.append(setup)
        return dna.task(replace(setup, steps=3))

    value = ValueConfig("dilated", {"vocab_size": 5, "length": LENGTH, "width": 16, "dilations": [1]})
    config = replace(dna_taught.PROPOSAL, plan=ProposalPlan(1, paths=4, times=2), value=value, num_steps=3)
    taught = dna_taught.proposal(quick, 0, weights, {1: 2}, config).rewarded("logit", dna_model.KLS["logit"])
    card = taught.train(Training(tmp_path / "w"))
    assert {(setup.reward, setup.kl) for setup in made} == {("logit", 0.5)}
    assert (card["reward"], card["kl"]) == ("logit", 0.5)
    assert "train dna --proposal --goal 0 --reward logit" in card["command"]
    words = ["--method", "smc-amot", "--particles", 2, "--populations", 2, "--steps", 3, "--weights", tmp_path / "w"]
    assert tokensteer("run", "dna", "--reward", "logit", *words, "--out", tmp_path / "logit") == 0
    assert ts.open_run(tmp_path / "logit").rows[0].get("learned for") is None
    assert tokensteer("run", "dna", *words, "--out", tmp_path / "log-p") == 2
    assert "no dna-proposal-0.safetensors in the weights (there: dna-logit-proposal-0)" in capsys.readouterr().err
    (tmp_path / "w" / "dna-logit-proposal-0.safetensors").rename(tmp_path / "w" / "dna-proposal-0.safetensors")
    (tmp_path / "w" / "dna-logit-proposal-0.json").rename(tmp_path / "w" / "dna-proposal-0.json")
    for reward, other in (("logit", None), ("log-p", "the reward logit")):
        out = tmp_path / f"renamed {reward}"
        assert tokensteer("run", "dna", "--reward", reward, *words, "--out", out) == 0
        assert ts.open_run(out).rows[0].get("learned for") == other


@pytest.mark.slow
def test_what_is_taught_is_found_again(weights: Path, tmp_path: Path, capsys):
    words = ["--particles", 2, "--populations", 2, "--steps", 3]
    for method in ("drakes", "smc-amot"):
        assert tokensteer("run", "dna", "--method", method, *words, "--weights", weights, "--out", tmp_path / "no") == 2
    error = capsys.readouterr().err
    assert "python -m tokensteer.tasks.dna --drakes --goal 0" in error
    assert "tokensteer train dna --proposal --goal 0" in error
    out = Training(tmp_path / "w")
    quick = lambda setup: dna.task(replace(setup, steps=3))  # noqa: E731 (what is measured would take 100)
    plan = DrakesPlan(2, paths=2, last=2, report_every=1)
    tuned = {name: dna_taught.Drakes(replace(plan, kl=kl), 3) for name, kl in (("drakes", 0.0), ("drakes-kl", 0.1))}
    dna_taught.train_drakes(quick, out, 0, weights, 2, tuned)
    short = ProposalPlan(2, paths=4, times=2, report_every=1)
    value = ValueConfig("dilated", {"vocab_size": 5, "length": LENGTH, "width": 16, "dilations": [1]})
    config = replace(dna_taught.PROPOSAL, plan=short, value=value, num_steps=3, twist=short)
    dna_taught.proposal(quick, 0, weights, {1: 2}, config).train(out)
    dna_taught.proposal(quick, 0, tmp_path / "w", {1: 2}, config).train(out, twist=True)
    assert {"dna-drakes-0.json", "dna-drakes-kl-0.json", "dna-proposal-0.json", "dna-value-0.json"} <= {
        file.name for file in (tmp_path / "w").iterdir()
    }
    methods = ["drakes", "drakes-kl", "smc-amot", "smc-learned"]
    words += ["--weights", tmp_path / "w", "--out", tmp_path / "x"]
    assert tokensteer("compare", "dna", "--methods", *methods, *words) == 0
    rows = ts.open_run(tmp_path / "x").rows
    assert [row["method"] for row in rows] == methods
    assert all(row["training"]["denoiser rows"] > 0 for row in rows)
    once = {row["method"]: row["training"]["denoiser rows"] for row in rows}
    assert once["smc-learned"] > once["smc-amot"]
    assert tokensteer("report", tmp_path / "x") == 0  # whatever each training kept an eye on
    page = (tmp_path / "x" / "report.html").read_text()
    for names in ("drakes", "drakes-kl", "smc-amot", "smc-learned"):
        assert f"Training for {names} took" in page
