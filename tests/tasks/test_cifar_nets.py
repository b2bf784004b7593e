"""The networks of `cifar`: tokens of images and back, the class of a denoiser, 8-bit files."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from narrow import untyped
from torch.nn.functional import one_hot

from tokensteer import tensorfile
from tokensteer.tasks import nets
from tokensteer.tasks.nets import int8
from tokensteer.tasks.nets.fsq import Rounding
from tokensteer.tasks.nets.grid_transformer import Coarse, rotate, rotations

SMALL = nets.FSQConfig(8, (4, 3, 2), (8, 16), (1, 1), (8, 16), (1, 1))
GRID = nets.GridTransformerConfig(7, 4, 4, hidden=16, depth=3, heads=2, num_classes=10, skips=True)


def shaken(net: torch.nn.Module, size: float = 0.2) -> torch.nn.Module:
    """All weights in play: some start at zero."""
    for parameter in net.parameters():
        parameter.data += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return net.eval().requires_grad_(False)


def tokeniser() -> nets.FSQ:
    torch.manual_seed(0)
    net = nets.FSQ(SMALL)
    shaken(net, 0.1)
    return net


def images(rows: int = 5) -> torch.Tensor:
    return torch.rand(rows, 3, 8, 8, generator=torch.Generator().manual_seed(1))


# ---- finite scalar quantisation


@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (2,), (3, 2), (4, 3, 2)])
def test_codes_and_ids_are_a_bijection(levels):
    rounding = Rounding(levels)
    ids = torch.arange(math.prod(levels))
    codes = rounding.codes(ids)
    assert len(codes.unique(dim=0)) == len(ids)
    assert codes.abs().max() == 1
    u = (codes + 1) / 2 * (rounding.levels - 1)  # numbers far enough inside the bounds for atanh
    z = torch.atanh((2 * u / (rounding.levels - 1) - 1).clamp(-0.999, 0.999)) - rounding.shift
    assert torch.equal(rounding.ids(z), ids)
    torch.testing.assert_close(rounding(z), codes)


def test_every_level_is_reached_and_zero_lies_on_one():
    rounding = Rounding((8, 5))
    z = torch.linspace(-20, 20, 4001)[:, None].expand(-1, 2)
    found = rounding.bounded(z).round()
    assert [len(found[:, k].unique()) for k in (0, 1)] == [8, 5]
    at_zero = rounding.bounded(torch.zeros(2))
    torch.testing.assert_close(at_zero, at_zero.round(), atol=1e-3, rtol=0)


def test_rounding_passes_the_gradient_of_the_bound():
    rounding = Rounding((8, 5))
    z = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (through,) = torch.autograd.grad(rounding(z).sum(), z)
    (smooth,) = torch.autograd.grad((2 * rounding.bounded(z) / (rounding.levels - 1)).sum(), z)
    torch.testing.assert_close(through, smooth)
    assert through.abs().min() > 0


def test_images_become_ids_and_come_back():
    net = tokeniser()
    ids = net.encode(images())
    assert ids.shape == (5, SMALL.length)
    assert 0 <= ids.min() <= ids.max() < SMALL.num_codes
    assert len(ids.unique()) > 4, "all sites alike: the test would see nothing"
    torch.testing.assert_close(net.decode(ids), net(images()).clamp(0, 1))


@pytest.mark.parametrize("columns", [SMALL.num_codes, SMALL.num_codes + 1])
def test_one_hots_are_decoded_as_ids_with_gradients(columns):
    net = tokeniser()
    ids = net.encode(images())
    hot = one_hot(ids, columns).float().requires_grad_()
    found = net.decode(hot)
    torch.testing.assert_close(found, net.decode(ids), atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(found.square().sum(), hot)
    assert gradient[..., : SMALL.num_codes].abs().amax(-1).min() > 0
    if columns > SMALL.num_codes:
        assert not gradient[..., -1].any(), "the mask has no code"


def test_masked_sites_can_be_decoded():
    net, canvas = tokeniser(), torch.full((1, SMALL.length), SMALL.num_codes)
    torch.testing.assert_close(net.decode(canvas), net.decode(one_hot(canvas, SMALL.num_codes + 1).float()))


def test_the_tokeniser_learns_through_the_rounding():
    net = nets.FSQ(SMALL)
    shaken(net, 0.05)
    net.requires_grad_(True)
    net(images()).sub(images()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.encoder.parameters())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda net: net.encode(torch.zeros(1, 3, 9, 9)), "built for images"),
        (lambda net: net.decode(torch.zeros(1, 5, dtype=torch.long)), "16 sites"),
        (lambda net: net.decode(torch.zeros(1, 16, 7)), "24 or 25 columns"),
    ],
)
def test_shapes_that_do_not_fit(wrong, match):
    with pytest.raises(ValueError, match=match):
        wrong(tokeniser())


# ---- the class-conditional transformer


def grid() -> nets.GridTransformer:
    torch.manual_seed(0)
    net = nets.GridTransformer(GRID)
    shaken(net)
    return net


def some_ids(rows: int = 4) -> torch.Tensor:
    return torch.randint(7, (rows, 16), generator=torch.Generator().manual_seed(1))


def test_the_class_changes_the_prediction_row_by_row():
    net, x = grid(), some_ids()
    free = net(x)
    torch.testing.assert_close(net(x, torch.full((4,), 10)), free)
    torch.testing.assert_close(net(x, torch.full((4,), -1)), free)
    mixed = net(x, torch.tensor([10, 3, 4, 10]))
    torch.testing.assert_close(mixed[[0, 3]], free[[0, 3]])
    assert (mixed[[1, 2]] - free[[1, 2]]).abs().amax((1, 2)).min() > 1e-2
    same = net(x[:1].expand(2, -1), torch.tensor([3, 4]))
    assert (same[0] - same[1]).abs().max() > 1e-2


def test_classes_act_in_every_block():
    net = grid()
    for k, block in enumerate(net.blocks):
        assert untyped(block).modulation.table.weight.shape == (11, 6 * 16), k


def test_a_network_without_classes_refuses_them():
    net = nets.GridTransformer(nets.GridTransformerConfig(7, 4, 4, hidden=16, heads=2))
    with pytest.raises(ValueError, match="no classes"):
        net(some_ids(), torch.zeros(4, dtype=torch.long))


def test_attention_depends_on_distances_along_rows_and_columns():
    net = grid()
    net.places.data.zero_()  # so that sites are told apart by their distances alone
    right, below = torch.full((4, 4), 6), torch.full((4, 4), 6)
    right[0, :2], below[:2, 0] = torch.tensor([1, 2]), torch.tensor([1, 2])
    by_row, by_column = (net(x.reshape(1, -1))[0, 0] for x in (right, below))
    assert (by_row - by_column).abs().max() > 1e-3
    turns = rotations(4, 4, 8)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    scores = rotate(q.expand(16, 8), turns) @ rotate(k.expand(16, 8), turns).T
    torch.testing.assert_close(scores[0, 5], scores[5, 10])  # one down and one to the right, from two sites
    assert abs(scores[0, 1] - scores[0, 4]) > 1e-3


COARSE = replace(GRID, depth=4, coarse=2)


def test_coarse_blocks_see_squares():
    """What is joined comes back at its place, and a site's effect passes them to every other site."""
    coarse = Coarse(replace(COARSE, hidden=8))
    h = torch.randn(2, 16 + 3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        coarse.join.weight.copy_(torch.eye(8, 32))  # the first site of a square
        coarse.part.weight.copy_(torch.eye(32, 8))
    squares = coarse(h)
    torch.testing.assert_close(squares, h[:, [0, 2, 8, 10, 16, 17, 18]])
    again = coarse.back(squares, torch.zeros_like(h))
    torch.testing.assert_close(again[:, [0, 2, 8, 10, 16, 17, 18]], squares)
    assert again[:, [1, 3, 4, 15]].abs().max() == 0
    net = nets.GridTransformer(COARSE)
    flat = nets.GridTransformer(replace(COARSE, coarse=0))
    assert coarse.turns.shape == (2, 4, 2)
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in flat.parameters()) + 2 * 4 * 16**2
    shaken(net)
    x = some_ids(1)
    other = x.clone()
    other[0, 5] = (other[0, 5] + 1) % 6
    assert ((net(x) - net(other)).abs().amax(-1) > 1e-4).all()
    torch.testing.assert_close(net(one_hot(x, 7).float()), net(x), atol=1e-5, rtol=1e-4)


def test_a_new_network_predicts_as_if_it_had_no_coarse_blocks():
    torch.manual_seed(0)
    net = nets.GridTransformer(COARSE)
    flat = nets.GridTransformer(replace(COARSE, coarse=0))
    flat.load_state_dict(net.state_dict(), strict=False)
    torch.testing.assert_close(net(some_ids()), flat(some_ids()))


@pytest.mark.parametrize(("changes", "says"), [({"depth": 3}, "as many must come"), ({"width": 5}, "even numbers")])
def test_grids_that_have_no_coarse_blocks(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(COARSE, **changes)


def test_dropout_is_of_training_alone():
    net = nets.GridTransformer(nets.GridTransformerConfig(7, 4, 4, hidden=16, depth=1, heads=2, dropout=0.5))
    shaken(net)
    x = some_ids()
    assert torch.equal(net(x), net(x))
    net.train()
    assert not torch.equal(net(x), net(x))


# ---- 8-bit files


@pytest.mark.parametrize("net", [grid(), tokeniser()], ids=["GridTransformer", "FSQ"])
def test_int8_files_are_small_and_close(net, tmp_path):
    file, whole = tmp_path / "int8.safetensors", tmp_path / "float32.safetensors"
    nets.save(net, file, torch.int8)
    nets.save(net, whole)
    again, before = nets.load(file), net.state_dict()
    for name, value in again.state_dict().items():
        error = (value - before[name]).abs()
        if value.dim() > 1:
            most = before[name].flatten(1).abs().amax(1) / 254
            assert (error.flatten(1).amax(1) <= most * 1.001).all(), name
        else:
            assert (error <= before[name].abs() / 128).all(), name
    tensors, header = tensorfile.read(file)
    assert header["version"] == 2
    assert {value.dtype for name, value in tensors.items() if value.dim() > 1} == {torch.int8}
    assert tensorfile.read(whole)[1]["version"] == 1, "older versions of tokensteer read it"


def test_int8_halves_bfloat16(tmp_path):
    net = nets.GridTransformer(nets.GridTransformerConfig(101, 8, 8, hidden=128, depth=2, heads=2))
    sizes: list[int] = []
    for dtype in (torch.int8, torch.bfloat16):
        nets.save(net, tmp_path / "net.safetensors", dtype)
        sizes.append((tmp_path / "net.safetensors").stat().st_size)
    assert sizes[0] < 0.55 * sizes[1]


def test_int8_keeps_zeros_and_signs():
    value = torch.tensor([[0.0, 0.0], [1.0, -1.0], [1e-30, -127e-30]])
    found = int8.dequantise(int8.quantise({"a": value}))["a"]
    torch.testing.assert_close(found, value)
