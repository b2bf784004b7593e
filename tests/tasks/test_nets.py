"""The networks: ids and one-hots, gradients, conditioning, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from narrow import untyped
from torch.nn.functional import one_hot

import tokensteer as ts
from tokensteer import tensorfile as stored
from tokensteer.tasks import nets
from tokensteer.tasks.nets.store import VERSION, Config, build
from tokensteer.testing import assert_denoiser

VOCAB, SIDE = 3, 4
DENOISERS: list[Config] = [
    nets.TransformerConfig(VOCAB, SIDE * SIDE, width=16, depth=2, heads=2),
    nets.UNetConfig(VOCAB, SIDE, SIDE, channels=(8, 16), blocks=1, groups=4),
]
TIMED = list(DENOISERS)
DENOISERS += [nets.GridTransformerConfig(VOCAB, SIDE, SIDE, hidden=16, depth=2, heads=2, num_classes=3)]
CLASSIFIERS: list[Config] = [
    nets.ConvConfig(VOCAB, SIDE, SIDE, num_classes=5, channels=(8, 8), groups=4),
    nets.PatchConfig(VOCAB, SIDE, SIDE, num_classes=5, patch=2, hidden=16, depth=2, heads=2),
]
EVERY = DENOISERS + CLASSIFIERS


def shaken(config: Config):
    """A network whose weights are all in play: some start at zero."""
    torch.manual_seed(0)
    net = build(config)
    for parameter in net.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return net


def some_ids(rows: int = 6) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, SIDE * SIDE), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", EVERY, ids=lambda c: type(c).__name__)
def test_ids_and_one_hots_give_the_same_answer(config):
    net, x = shaken(config), some_ids()
    torch.testing.assert_close(net(x), net(one_hot(x, VOCAB).float()), atol=1e-5, rtol=0)
    assert net(x).std(0).max() > 1e-2, "all rows alike: the test would see nothing"


@pytest.mark.parametrize("config", EVERY, ids=lambda c: type(c).__name__)
def test_gradients_are_finite_differences(config):
    net = shaken(config).double()
    x = one_hot(some_ids(1), VOCAB).double().requires_grad_()
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def value(x: torch.Tensor) -> torch.Tensor:
        return net(x)[..., 0].square().sum()

    (gradient,) = torch.autograd.grad(value(x), x)
    step = 1e-5 * direction
    difference = (value(x + step) - value(x - step)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), difference.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("config", DENOISERS, ids=lambda c: type(c).__name__)
def test_forward_is_the_head_of_hidden(config):
    net, x = untyped(shaken(config)), some_ids()
    assert isinstance(net.head, torch.nn.Linear)
    assert torch.equal(net(x), net.head(net.hidden(x)))


@pytest.mark.parametrize("config", DENOISERS, ids=lambda c: type(c).__name__)
def test_keeps_the_contract_of_a_denoiser(config):
    net = shaken(config).requires_grad_(False)
    denoiser = ts.from_logits(net, 2, ignores_time=True)
    template = ts.template(SIDE * SIDE, 2)
    assert_denoiser(ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(4), template))


@pytest.mark.parametrize("config", DENOISERS, ids=lambda c: type(c).__name__)
def test_a_blank_canvas_does_not_look_alike_everywhere(config):
    answer = shaken(config)(torch.full((1, SIDE * SIDE), 2))
    assert answer[0].std(0).min() > 1e-2


@pytest.mark.parametrize("config", TIMED, ids=lambda c: type(c).__name__)
def test_time_and_class(config):
    net, x = shaken(replace(config, timed=True, num_classes=4)), some_ids(2)
    free = net(x, 0.3)
    torch.testing.assert_close(free, net(x, torch.tensor([0.3, 0.3]), torch.tensor([-1, -1])))
    assert not torch.allclose(free, net(x, 0.7))
    mixed = net(x, 0.3, torch.tensor([-1, 2]))
    torch.testing.assert_close(mixed[0], free[0])
    assert not torch.allclose(mixed[1], free[1])
    with pytest.raises(ValueError, match="network\\(x, t\\)"):
        net(x)
    with pytest.raises(ValueError, match="knows no classes"):
        shaken(config)(x, None, torch.tensor([0, 0]))


@pytest.mark.parametrize("config", EVERY, ids=lambda c: type(c).__name__)
def test_comes_back_from_its_file(config, tmp_path):
    net, file, x = untyped(shaken(config)), tmp_path / "new" / "net.safetensors", some_ids()
    nets.save(net, file)
    again = nets.load(file)
    assert again.config == config
    assert torch.equal(again(x), net.requires_grad_(False)(x))  # weights that learn may be rounded otherwise
    assert not any(p.requires_grad for p in again.parameters())
    nets.save(net, file, torch.bfloat16)
    assert torch.equal(untyped(nets.load(file)).head.weight, net.head.weight.bfloat16().float())
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_files_that_cannot_be_read_say_so_in_one_line(tmp_path):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    nets.save(shaken(CLASSIFIERS[0]), good)
    tensors, header = stored.read(good)

    def refused(match: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=match) as caught:
            nets.load(bad)
        assert "\n" not in str(caught.value)
        assert str(bad) in str(caught.value)

    refused("no weights at", FileNotFoundError)
    bad.write_bytes(good.read_bytes()[:-100])
    refused("damaged")
    bad.write_text("hello")
    refused("damaged")
    stored.write(bad, tensors, {**header, "version": VERSION + 1})
    refused("version 3")
    stored.write(bad, tensors, {**header, "config": "Other"})
    refused("no network that tokensteer knows")
    stored.write(bad, tensors, {**header, "values": {**header["values"], "channels": [16, 16]}})
    refused("does not hold the weights")
    stored.write(bad, tensors, {**header, "values": {**header["values"], "colour": 1}})
    refused("does not hold the weights")
    from safetensors.torch import save_file

    save_file(tensors, bad)
    refused("no header")
    assert json.loads(json.dumps(header)) == header


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nets.TransformerConfig(3, 4, width=10, heads=4), "multiple"),
        (lambda: nets.UNetConfig(3, 6, 6, channels=(8, 8, 8)), "halved"),
        (lambda: nets.UNetConfig(3, 8, 8, channels=(12,)), "groups"),
        (lambda: nets.PatchConfig(3, 8, 8, 10, patch=3), "patches"),
        (lambda: nets.GridTransformerConfig(3, 4, 4, hidden=20, heads=2), "multiple"),
        (lambda: nets.FSQConfig(side=9), "patches of 2"),
        (lambda: nets.FSQConfig(levels=(8, 1)), "2 or more"),
        (lambda: nets.FSQConfig(decoder_channels=(8, 8, 8)), "decoder_channels must have 2 numbers"),
        (lambda: nets.FSQConfig(levels=(300, 300)), "65536"),
        (lambda: nets.FSQConfig(encoder_blocks=(1, 2, 3)), "2 numbers"),
        (lambda: nets.FSQConfig(decoder_channels=(12, 16)), "8 groups"),
        (lambda: shaken(DENOISERS[2])(torch.zeros(1, 5, dtype=torch.long)), "16 sites"),
        (lambda: shaken(DENOISERS[0])(torch.zeros(1, 5, dtype=torch.long)), "length 16"),
        (lambda: shaken(DENOISERS[1])(torch.zeros(1, 5, dtype=torch.long)), "4 x 4"),
    ],
)
def test_sizes_that_do_not_fit(make, match):
    with pytest.raises(ValueError, match=match):
        make()


SMALL = (
    nets.TransformerConfig(3, 2, width=4, depth=1, heads=2, num_classes=1),
    nets.UNetConfig(3, 4, 4, channels=(8,), num_classes=1),
    nets.DilatedConfig(3, 8, width=8, num_classes=1),
    nets.ConvConfig(3, 4, 4, 2, channels=(8,)),
    nets.PatchConfig(3, 4, 4, 2),
    nets.NgramConfig(3, 2),
    nets.MotifConfig(3, 64, 2),
    nets.WordsConfig(3, 20, 2),
    nets.ValueConfig("transformer", {"vocab_size": 3, "length": 2}),
    nets.GridTransformerConfig(3, 2, 2, hidden=8, depth=1, heads=2, num_classes=1),
    nets.FSQConfig(4, (3, 2), (8, 8), (1, 1), (8, 8), (1, 1)),
)


@pytest.mark.parametrize("config", SMALL, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1, 2.5, "2"])
def test_sizes_of_networks_are_checked(config, bad):
    for name, value in vars(config).items():
        if isinstance(value, bool) or not isinstance(value, int | float | tuple):
            continue
        with pytest.raises(ValueError, match=rf"{type(config).__name__}\.{name} must"):
            replace(config, **{name: (bad,) if isinstance(value, tuple) else bad})
        if isinstance(value, tuple):
            with pytest.raises(ValueError, match=f"{name} must hold at least one"):
                replace(config, **{name: ()})


@pytest.mark.parametrize("config", SMALL, ids=lambda config: type(config).__name__)
def test_a_file_of_another_size_is_refused_before_memory_is_asked_for(config, tmp_path):
    file = tmp_path / "net.safetensors"
    nets.save(build(config), file)
    tensors, header = stored.read(file)
    changed = header["values"] | header["values"].get("body", {})
    for name, size in changed.items():
        if isinstance(size, int) and not isinstance(size, bool) and name in ("vocab_size", "length", "width", "depth"):
            for huge in (size * 10**6, 10**30):
                values = {**header["values"], name: huge}
                if name in header["values"].get("body", {}):
                    values = {**header["values"], "body": {**header["values"]["body"], name: huge}}
                stored.write(file, tensors, {**header, "values": values})
                with pytest.raises(ValueError, match=r"net\.safetensors does not hold"):
                    nets.load(file)
