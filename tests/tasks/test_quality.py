"""Metrics of images: closed forms, brute force, and parts against wholes. Inception itself if its file is there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tokensteer import tensorfile
from tokensteer.tasks.common.metrics import measured
from tokensteer.tasks.quality import features
from tokensteer.tasks.quality.classes import class_accuracy, class_score
from tokensteer.tasks.quality.extrapolate import extrapolate, fit_line
from tokensteer.tasks.quality.features import Inception, load_inception, resize
from tokensteer.tasks.quality.frechet import Frechet, fid
from tokensteer.tasks.quality.imagenet import EfficientNetLite, SameConv, load_efficientnet
from tokensteer.tasks.quality.kernel_distance import kid, squared_mmd
from tokensteer.tasks.quality.manifold import in_support, precision_recall
from tokensteer.tasks.quality.moments import Moments

torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian(mean: Tensor, covariance: Tensor, count: int = 1000) -> Moments:
    return Moments(count, mean, covariance * (count - 1))


# ---- moments


def test_moments_in_parts_are_those_of_the_whole():
    """Parts of any size, in any order of merging, against numpy; the mean is far from 0, where sums of squares fail."""
    x = 1e4 + normal(57, 5) @ normal(5, 5, seed=1)
    parts = x.split([1, 20, 3, 33])
    streamed = Moments.of_parts(parts)
    tree = (Moments.of(parts[3]) + Moments.of(parts[0])) + (Moments.of(parts[2]) + Moments.of(parts[1]))
    for moments in (Moments.of(x), streamed, tree):
        assert moments.count == 57
        np.testing.assert_allclose(moments.mean, np.mean(x.numpy(), 0), rtol=1e-14)
        np.testing.assert_allclose(moments.covariance, np.cov(x.numpy(), rowvar=False), rtol=1e-11)


def test_moments_in_single_precision_are_summed_in_double():
    x = (1e3 + normal(400, 3)).float()
    np.testing.assert_allclose(Moments.of(x).covariance, np.cov(x.double().numpy(), rowvar=False), rtol=1e-12)


def test_moments_as_a_file(tmp_path):
    moments = Moments.of(normal(30, 6))
    moments.save(tmp_path / "moments.safetensors", "30 normal vectors", side=8)
    loaded, card = Moments.load(tmp_path / "moments.safetensors")
    assert loaded.count == 30
    assert torch.equal(loaded.mean, moments.mean)
    assert torch.equal(loaded.scatter, moments.scatter.triu() + moments.scatter.triu(1).mT)
    assert (card["count"], card["source"], card["side"]) == (30, "30 normal vectors", 8)


def test_moments_refuse(tmp_path):
    with pytest.raises(ValueError, match="measure two"):
        _ = Moments.of(normal(1, 3)).covariance
    with pytest.raises(ValueError, match="P >= 1"):
        Moments.of(normal(0, 3))
    with pytest.raises(ValueError, match="at least one part"):
        Moments.of_parts([])
    tensorfile.write(tmp_path / "other", {"mean": normal(3)}, {"kind": "weights"})
    with pytest.raises(ValueError, match=r"Moments\.save"):
        Moments.load(tmp_path / "other")


# ---- Fréchet distance


def test_frechet_distance_of_commuting_gaussians_is_closed():
    """With covariances U diag(a) Uᵀ and U diag(b) Uᵀ: |m - m'|² + sum (√a - √b)²."""
    basis = torch.linalg.qr(normal(6, 6)).Q
    a, b = normal(6, seed=1).square() + 0.1, normal(6, seed=2).square() + 0.1
    shift = normal(6, seed=3)
    one = gaussian(shift, basis @ a.diag() @ basis.mT)
    other = gaussian(torch.zeros(6, dtype=torch.float64), basis @ b.diag() @ basis.mT, 500)
    exact = float(shift.square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    found = fid(one, other)
    assert math.isclose(found.value, exact, rel_tol=1e-10)
    assert (found.count, found.reference_count) == (1000, 500)
    assert str(found).endswith("(1,000 images against 500)")
    assert math.isclose(fid(other, one).value, exact, rel_tol=1e-10)


def test_frechet_distance_in_two_dimensions_is_closed():
    """Covariances that do not commute: tr (S S')^½ = √(tr S S' + 2 √(det S det S')) for two by two."""
    s, other = (m @ m.mT for m in (normal(2, 2), normal(2, 2, seed=1)))
    overlap = (torch.trace(s @ other) + 2 * (s.det() * other.det()).sqrt()).sqrt()
    zero = torch.zeros(2, dtype=torch.float64)
    exact = float(s.trace() + other.trace() - 2 * overlap)
    assert math.isclose(fid(gaussian(zero, s), gaussian(zero, other)).value, exact, rel_tol=1e-10)


@pytest.mark.parametrize("counts", [(9, 14), (14, 9), (60, 9), (9, 60)])
def test_frechet_distance_with_fewer_images_than_features(counts):
    """Singular covariances: tr (S S')^½ is the sum of singular values of X X'ᵀ, X the scaled deviations."""
    x, y = normal(counts[0], 20), normal(counts[1], 20, seed=1) * 1.5 + 0.3
    x0, y0 = ((rows - rows.mean(0)) / math.sqrt(len(rows) - 1) for rows in (x, y))
    overlap = torch.linalg.svdvals(x0 @ y0.mT).sum()
    exact = (x.mean(0) - y.mean(0)).square().sum() + x0.square().sum() + y0.square().sum() - 2 * overlap
    assert math.isclose(Frechet(Moments.of(y)).of(x), float(exact), rel_tol=1e-7)


def test_frechet_distance_of_a_set_from_itself_is_zero():
    moments = Moments.of(normal(40, 12))
    assert abs(fid(moments, moments).value) < 1e-9
    with pytest.raises(ValueError, match="12 features and the reference 3"):
        fid(moments, Moments.of(normal(40, 3)))


def test_a_line_in_one_over_n_is_recovered():
    line = fit_line([10, 20, 40, 50], [3 + 7 / n for n in (10, 20, 40, 50)])
    assert math.isclose(line.intercept.mean, 3, rel_tol=1e-12)
    assert math.isclose(line.slope, 7, rel_tol=1e-12)
    assert line.intercept.error < 1e-12


def test_extrapolation_takes_the_bias_from_fid():
    """The sample is of the reference's distribution, so the distance is 0; that of 2,000 images is not."""
    zero, one = torch.zeros(16, dtype=torch.float64), torch.eye(16, dtype=torch.float64)
    frechet = Frechet(gaussian(zero, one))
    x = normal(2000, 16)
    line = extrapolate(frechet.of, x, least=200, generator=torch.Generator().manual_seed(1))
    assert line.counts[0] == 200
    assert line.counts[-1] == 2000
    assert line.values[-1] == pytest.approx(frechet.of(x))
    assert frechet.of(x) > 0.03
    assert abs(line.intercept.mean) < 0.3 * frechet.of(x)
    with pytest.raises(ValueError, match="lower least"):
        extrapolate(frechet.of, x)


# ---- KID


def test_squared_mmd_is_the_sum_over_pairs():
    x, y = normal(5, 4), normal(7, 4, seed=1) + 0.5

    def k(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / 4 + 1) ** 3

    within = sum(k(x[i], x[j]) for i in range(5) for j in range(5) if i != j) / 20
    beyond = sum(k(y[i], y[j]) for i in range(7) for j in range(7) if i != j) / 42
    across = sum(k(a, b) for a in x for b in y) / 35
    assert math.isclose(float(squared_mmd(x, y)), within + beyond - 2 * across, rel_tol=1e-12)


def test_kid_is_unbiased():
    """Over every pair of samples of two from a set of three values, the mean is that of the distributions."""
    support = normal(3, 2)
    p, q = torch.tensor([0.2, 0.3, 0.5]).double(), torch.tensor([0.6, 0.3, 0.1]).double()
    table = (support @ support.mT / 2 + 1) ** 3
    exact = (p - q) @ table @ (p - q)
    mean = torch.zeros((), dtype=torch.float64)
    for code in range(81):
        a, b, c, d = code // 27, code // 9 % 3, code // 3 % 3, code % 3
        mean += p[a] * p[b] * q[c] * q[d] * squared_mmd(support[[a, b]], support[[c, d]])
    assert torch.allclose(mean, exact)


def test_kid_over_blocks():
    """Disjoint blocks of both, against the blocks themselves."""
    x, y = normal(25, 3), normal(31, 3, seed=1) + 1
    generator = torch.Generator().manual_seed(5)
    shuffled = [rows[torch.randperm(len(rows), generator=generator)] for rows in (x, y)]
    blocks = [squared_mmd(shuffled[0][at : at + 8], shuffled[1][at : at + 8]) for at in (0, 8, 16)]
    found = kid(x, y, block=8, generator=torch.Generator().manual_seed(5))
    assert found == measured(torch.stack(blocks))
    small = kid(x, y)
    assert math.isnan(small.error)
    assert small.mean > 0.1
    with pytest.raises(ValueError, match="the same network"):
        kid(x, normal(5, 4))
    with pytest.raises(ValueError, match="two images"):
        kid(x, y[:1])


# ---- precision and recall


def test_support_on_a_line():
    """Centres 0, 1, 3: with one neighbour their radii are 1, 1 and 2."""
    centres = torch.tensor([[0.0], [1.0], [3.0]])
    points = torch.tensor([[-1.0], [-1.01], [0.5], [2.5], [5.0], [5.01]])
    assert in_support(points, centres, 1).tolist() == [True, False, True, True, True, False]


def test_precision_and_recall_tell_dropped_modes_from_added_ones(monkeypatch):
    """Two clusters against one of them: all of the one is real, half of the real is covered. In parts as at once."""
    left, right = normal(60, 3), normal(60, 3, seed=1) + 100
    both = torch.cat([left, right])
    found = precision_recall(left[:30], both)
    assert found.precision.mean == 1.0
    assert found.recall.mean < 0.5
    again = precision_recall(both, left[:30])
    assert again.precision.mean == found.recall.mean
    assert again.recall.mean == 1.0
    assert (again.count, again.reference_count) == (120, 30)
    monkeypatch.setattr("tokensteer.tasks.quality.manifold.ROWS", 7)
    assert precision_recall(left[:30], both) == found


def test_precision_and_recall_against_brute_force():
    x, y = normal(40, 2), normal(50, 2, seed=1) * 0.7
    found = precision_recall(x, y, neighbours=2)

    def share(points: Tensor, centres: Tensor) -> float:
        radii = [sorted(float((c - other).norm()) for other in centres)[2] for c in centres]
        inside = [any(float((p - c).norm()) <= r for c, r in zip(centres, radii, strict=True)) for p in points]
        return sum(inside) / len(points)

    assert found.precision.mean == pytest.approx(share(x, y))
    assert found.recall.mean == pytest.approx(share(y, x))
    with pytest.raises(ValueError, match="fewer than the images"):
        precision_recall(x, y, neighbours=40)
    limited = precision_recall(x, y, most=20, generator=torch.Generator().manual_seed(0))
    assert (limited.count, limited.reference_count) == (20, 20)


# ---- classes


def test_class_score():
    """Sure and even over K classes: K. The same answer for every image: 1."""
    sure = torch.where(torch.eye(4, dtype=torch.bool), 0.0, -math.inf).repeat(6, 1)
    assert class_score(sure, parts=3).mean == pytest.approx(4.0)
    assert class_score(normal(1, 4).expand(24, 4), parts=3).mean == pytest.approx(1.0)
    p = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=torch.float64)
    exact = math.exp(float((p * (p / p.mean(0)).log()).sum(-1).mean()))
    assert class_score(p.log(), parts=1).mean == pytest.approx(exact)
    with pytest.raises(ValueError, match="one image for each part"):
        class_score(p.log())


def test_class_accuracy():
    log_p = torch.tensor([[0.0, -1.0], [-2.0, 0.0], [0.0, -1.0], [0.0, -3.0]])
    assert class_accuracy(log_p, torch.tensor([0, 1, 1, 0])).mean == 0.75
    with pytest.raises(ValueError, match="one label to each"):
        class_accuracy(log_p, torch.tensor([0]))


# ---- Inception


def test_resize_reads_as_tensorflow_1_did():
    """Pixel i reads i · size / side: by hand, and as a shifted grid of `grid_sample`."""
    row = torch.tensor([1.0, 5.0]).view(1, 1, 1, 2)
    assert resize(row, 4)[0, 0].tolist() == [[1.0, 3.0, 5.0, 5.0]] * 4
    images, side = normal(2, 3, 6, 9).float(), 13
    shift = torch.eye(2, 3)
    shift[0, 2], shift[1, 2] = 1 / 9 - 1 / side, 1 / 6 - 1 / side
    grid = torch.nn.functional.affine_grid(shift.repeat(2, 1, 1), [2, 3, side, side], align_corners=False)
    expected = torch.nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    assert torch.allclose(resize(images, side), expected, atol=1e-5)
    assert torch.equal(resize(images[..., :6], 6), images[..., :6])


def test_images_reach_the_network_scaled_and_in_parts():
    seen: list[Tensor] = []

    def network(x: Tensor) -> Tensor:
        seen.append(x)
        return x.mean((2, 3))

    images = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 3, 1, 1).repeat(5, 1, 4, 4)
    found = Inception(network, rows=2)(images)
    assert [x.shape for x in seen] == [(2, 3, 299, 299), (2, 3, 299, 299), (1, 3, 299, 299)]
    assert torch.allclose(found, torch.tensor([-1.0, 0.0, 127 / 128]).repeat(5, 1))
    with pytest.raises(ValueError, match=r"round to 0\.\.255"):
        Inception(network)(images.float())


def test_inception_is_loaded_only_if_it_is_the_known_file(tmp_path, monkeypatch):
    """The check comes before the file is run: one that is no TorchScript at all is refused by its hash."""
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set TOKENSTEER_DATA"):
        load_inception()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / features.INCEPTION[0]).write_bytes(b"anything")
    with pytest.raises(ValueError, match="can run code"):
        load_inception()
    with pytest.raises(ValueError, match="float16 on cuda"):
        load_inception(dtype=torch.float16)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_inception(Path("nowhere.pt"))


@pytest.mark.slow
def test_inception():
    """Real features: not negative, 2,048 of them, the same in any batch, and nearer for alike images."""
    try:
        inception = load_inception(rows=3)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    smooth = (torch.linspace(0, 255, 32).view(1, 1, 1, 32) * torch.rand(4, 3, 1, 1)).byte().expand(4, 3, 32, 32)
    noise = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    images = torch.cat([smooth, noise])
    found = inception(images)
    assert found.shape == (6, 2048)
    assert (found >= 0).all()
    assert torch.allclose(inception(images[3:5]), found[3:5], atol=1e-4)
    distance = torch.cdist(found, found)
    assert distance[0, 1] < distance[0, 4]
    assert math.isfinite(fid(Moments.of(found[:3]), Moments.of(found[3:])).value)


# ---- EfficientNet-Lite0


def test_convolutions_are_padded_as_in_tensorflow():
    """At stride 2, four pixels and a kernel of three: one pixel of padding, behind the last. Five pixels: one each."""
    conv = SameConv(1, 1, 3, 2, bias=False)
    torch.nn.init.ones_(conv.weight)
    with torch.no_grad():
        assert conv(torch.ones(1, 1, 4, 4))[0, 0].tolist() == [[9.0, 6.0], [6.0, 4.0]]
        assert conv(torch.ones(1, 1, 5, 5))[0, 0].tolist() == [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]


def test_efficientnet_has_the_published_shape(tmp_path, monkeypatch):
    """4.65 million weights, and log-probabilities of a thousand classes."""
    net = EfficientNetLite().eval()
    assert sum(weight.numel() for weight in net.parameters()) == 4_652_008
    with torch.no_grad():
        log_p = net(torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8))
    assert torch.allclose(log_p.exp().sum(-1), torch.ones(2))
    with pytest.raises(ValueError, match=r"round to 0\.\.255"):
        net(torch.zeros(1, 3, 32, 32))
    monkeypatch.setenv("TOKENSTEER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set TOKENSTEER_DATA"):
        load_efficientnet()


@pytest.mark.slow
def test_efficientnet():
    """Flat grey images and noise are not classified alike, and a picture and its mirror image are."""
    try:
        net = load_efficientnet()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    rows = torch.linspace(-1, 1, 64)
    disc = ((rows.square() + rows.add(0.2).square().unsqueeze(-1)) < 0.5) * torch.tensor([255.0, 130.0, 0.0]).view(
        3, 1, 1
    )
    images = torch.stack([disc, disc.flip(-1), torch.full((3, 64, 64), 128.0)]).byte()
    with torch.no_grad():
        log_p = net(images)
    assert log_p[0].argmax() == log_p[1].argmax()
    assert log_p[0].exp().max() > 0.1
    assert (log_p[0].exp() - log_p[2].exp()).abs().sum() > 0.5
