"""Meissonic: a small random transformer of its signature, with the parts of a tiny aMUSEd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

pytest.importorskip("diffusers")
import tiny_images

import tokensteer as ts
from tokensteer.adapters import ImageModel, powers_from_scale
from tokensteer.core.particles.result import pooled
from tokensteer.testing import assert_denoiser, enumerate_steering

torch.set_num_threads(1)
CODES, IDS, MASK = 13, 20, 19


@pytest.fixture(scope="module")
def parts() -> Any:
    return tiny_images.meissonic()


@pytest.fixture(scope="module")
def model(parts: Any) -> ImageModel:
    return ts.adapters.meissonic(parts, height=8, width=8, steps=4)


def canvases(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(CODES, (rows, 16), generator=generator)
    return torch.where(torch.rand(rows, 16, generator=generator) < 0.5, MASK, x)


def called(parts: Any, x: Tensor, prompts: list[str], timestep: int, halved: int = 2) -> Tensor:
    """What the published pipeline computes at one step: its arguments, by hand."""
    ids = parts.tokenizer(prompts, return_tensors="pt", padding="max_length", max_length=9)["input_ids"]
    with torch.no_grad():
        read = parts.text_encoder(ids, output_hidden_states=True)
        side = 4 // halved
        places = torch.tensor([[0, row, column] for row in range(side) for column in range(side)])
        return parts.transformer(
            hidden_states=x.view(-1, 4, 4),
            micro_conds=torch.tensor([[8.0, 8.0, 0.0, 0.0, 6.0]]).expand(len(x), -1),
            pooled_projections=read.text_embeds,
            encoder_hidden_states=read.hidden_states[-2],
            img_ids=places,
            txt_ids=torch.zeros(9, 3),
            timestep=torch.tensor([timestep]),
        )


@pytest.mark.parametrize("downsample", [True, False])
def test_computes_what_its_pipeline_does(downsample: bool) -> None:
    """At every step, whose timesteps count down, with and without guidance; the mask and spare ids get -inf."""
    parts = tiny_images.meissonic(downsample)
    model = ts.adapters.meissonic(parts, height=8, width=8, steps=4)
    x, context = canvases(2), model.context(["a c", None])
    rows = (*model.context("a c"), *model.context("d"))
    seen: list[Tensor] = []
    for t, timestep in ((1.0, 3), (0.75, 2), (0.5, 1), (0.25, 0)):
        expected = called(parts, x, ["a c", ""], timestep, 2 if downsample else 1).flatten(2).mT
        logits = model.denoiser.network(x, t, *context)
        torch.testing.assert_close(logits[..., :CODES], expected, atol=1e-5, rtol=1e-5)
        assert (logits[..., CODES:] == -torch.inf).all()
        c, u = called(parts, x[:1].repeat(2, 1), ["a c", "d"], timestep, 2 if downsample else 1).flatten(2).mT
        guided = model.guided(powers_from_scale(9.0)).network(x[:1], t, *rows)
        torch.testing.assert_close(guided[0, :, :CODES], u + 9 * (c - u), atol=1e-4, rtol=1e-4)
        seen.append(expected)
    assert (seen[0] - seen[1]).abs().max() > 0.01  # the time matters


def test_the_time_is_one_for_all_or_one_for_each(model: ImageModel) -> None:
    x, context = canvases(2), model.context(["a", "c"])
    each = model.network(x, torch.tensor([1.0, 0.25]), *context)
    for row, t in enumerate((1.0, 0.25)):
        torch.testing.assert_close(each[row], model.network(x, t, *context)[row])


def test_timesteps() -> None:
    t = torch.arange(48, 0, -1, dtype=torch.float64) / 48
    assert ts.adapters.counted_down(48)(t).tolist() == list(range(47, -1, -1))
    assert float(ts.adapters.masked_share(torch.tensor(1.0))) == pytest.approx(1000)
    assert float(ts.adapters.masked_share(torch.tensor(1 / 3))) == pytest.approx(500)


def test_one_hots_give_the_logits_of_their_ids_and_a_gradient(model: ImageModel) -> None:
    x, context = canvases(2), model.context(["a", "c d"])
    relaxed = one_hot(x, IDS).float().requires_grad_()
    logits = model.network(relaxed, 0.5, *context)
    torch.testing.assert_close(logits, model.network(x, 0.5, *context), atol=1e-5, rtol=1e-5)
    (slope,) = torch.autograd.grad(logits[..., :CODES].square().mean(), relaxed)
    assert slope.abs().max() > 0


def test_pixels_of_one_hots_are_those_of_ids_and_have_a_gradient(model: ImageModel) -> None:
    x = torch.randint(CODES, (3, 16), generator=torch.Generator().manual_seed(0))
    relaxed = one_hot(x, IDS).float().requires_grad_()
    pixels = model.pixels(relaxed)
    assert pixels.shape == (3, 3, 8, 8)
    torch.testing.assert_close(pixels, model.pixels(x), atol=1e-5, rtol=1e-5)
    assert torch.equal((pixels.detach() * 255).round().to(torch.uint8), model.decode(x))
    (slope,) = torch.autograd.grad(pixels.sum(), relaxed)
    assert slope[..., :CODES].abs().max() > 0
    assert slope[..., CODES:].abs().max() == 0


def test_is_a_denoiser_and_is_steered_by_its_pixels(model: ImageModel) -> None:
    assert_denoiser(model.diffusion("c d", steps=2), tolerance=1e-4)
    tilt = ts.Tilt(lambda x: model.pixels(x).mean((1, 2, 3)), kl=0.05, differentiable=True)
    diffusion = model.diffusion(["a", "c d"], powers=powers_from_scale(3.0), against="t", steps=4)
    generator = torch.Generator().manual_seed(0)
    steering = ts.Steering(diffusion, tilt, ts.Gradient())
    result = ts.smc(steering, num_particles=4, populations=2, generator=generator)
    assert (result.samples < CODES).all()


def test_each_population_has_its_prompt_and_the_product_is_exact() -> None:
    """Two codes, one row of two tokens: log Z of two prompts in one run against enumeration, and of a product."""
    parts = tiny_images.meissonic(downsample=False, codebook_size=2)
    with torch.no_grad():
        parts.transformer.double().mlm_layer.weight.mul_(0.1)  # else nearly all is one code
    model = ts.adapters.meissonic(parts, height=2, width=4, steps=2)
    kernel = ts.Ancestral(MASK)
    tilt = ts.Tilt(lambda x: (x == 0).sum(-1).double(), kl=0.5)
    generator = torch.Generator().manual_seed(0)

    def exact(target: Any, wish: ts.Tilt | None) -> float:
        return enumerate_steering(ts.Steering(target, wish)).log_z

    prompts = ["a", "c d t"]
    alone = [exact(model.diffusion(prompt, steps=2, kernel=kernel), tilt) for prompt in prompts]
    assert abs(alone[0] - alone[1]) > 0.01
    steering = ts.Steering(model.diffusion(prompts, steps=2, kernel=kernel), tilt)
    result = ts.smc(steering, num_particles=16, populations=400, generator=generator)
    for found, expected in zip(result.log_z.view(2, 200), alone, strict=True):
        log_z, error = pooled(found)
        assert abs(log_z - expected) < 4 * error
    target = model.product("a", powers_from_scale(2.0), against="d", steps=2, kernel=kernel)
    guided = ts.Steering(target, None, ts.Guided())
    log_z, error = pooled(ts.smc(guided, num_particles=16, populations=200, generator=generator).log_z)
    assert abs(log_z - exact(target, None)) < 4 * error


@pytest.mark.parametrize("how", ["network", "class", "place"])
def test_of_a_folder(parts: Any, model: ImageModel, tmp_path: Path, how: str) -> None:
    for name in ("transformer", "vqvae", "text_encoder", "tokenizer", "scheduler"):
        getattr(parts, name).save_pretrained(tmp_path / name)
    given = {"network": parts.transformer, "class": tiny_images.Meissonic, "place": "tiny_images:Meissonic"}[how]
    loaded = ts.adapters.meissonic(tmp_path, given, height=8, width=8, steps=4)
    x = canvases(2)
    expected = model.network(x, 0.5, *model.context(["a", None]))
    torch.testing.assert_close(loaded.network(x, 0.5, *loaded.context(["a", None])), expected)
    assert loaded.mask_id == MASK


def test_refuses(parts: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'pass transformer="src\.transformer:Transformer2DModel"'):
        ts.adapters.meissonic(tmp_path)
    for place in ("tiny_images:Nothing", "no_such_module:Meissonic", "tiny_images"):
        with pytest.raises(ValueError, match="write it as module:Class"):
            ts.adapters.meissonic(tmp_path, place)
    with pytest.raises(ValueError, match="no transformer that Meissonic can load"):
        ts.adapters.meissonic(tmp_path, tiny_images.Meissonic)
    with pytest.raises(ValueError, match="has no transformer: give a folder"):
        ts.adapters.meissonic(object())
    with pytest.raises(ValueError, match="parts that are loaded have their own"):
        ts.adapters.meissonic(parts, parts.transformer)
    with pytest.raises(ValueError, match="multiples of 4 pixels"):
        ts.adapters.meissonic(parts, height=8, width=6)
    with pytest.raises(ValueError, match="2 pixels to a token"):
        ts.adapters.meissonic(parts, height=8, width=7)
    with pytest.raises(ValueError, match="shorten the prompt"):
        ts.adapters.meissonic(parts, height=8, width=8).context("a c d t a c d t")
