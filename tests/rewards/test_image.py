"""Published rewards on images, on tiny random networks of the true classes, saved to a folder and loaded back."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from narrow import untyped
from torch import Tensor, nn
from torch.nn import functional as F

import tokensteer as ts
from tokensteer.core.particles.result import pooled
from tokensteer.rewards import image, weighted
from tokensteer.rewards.image.pixels import CLIP_MEAN, CLIP_STD
from tokensteer.testing import enumerate_steering

pytest.importorskip("transformers")
import hubs
from hubs import transformers

torch.set_num_threads(1)
SIDE, WIDTH, SPACE = 8, 16, 12
VISION = {"image_size": SIDE, "patch_size": 4, "hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2}
TEXT = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CLIPModel with OpenCLIP's activation, and a tokenizer of the words a, c, d and t."""
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1, **{f"{word}</w>": i for i, word in enumerate("acdt", 2)}}
    tokenizer = transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=9)
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=TEXT | ends | {"vocab_size": 6, "max_position_embeddings": 9, "hidden_act": "gelu"},
        vision_config=VISION | {"num_hidden_layers": 2, "hidden_act": "gelu"},
        projection_dim=SPACE,
    )
    torch.manual_seed(0)
    return hubs.save(tmp_path_factory.mktemp("clip"), transformers.CLIPModel(config), tokenizer)


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = hubs.tokenizer(hubs.SPECIAL)
    ends = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    config = transformers.BlipConfig(
        text_config=TEXT | ends | {
            "vocab_size": len(tokenizer), "max_position_embeddings": 12, "encoder_hidden_size": WIDTH,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        vision_config=VISION | {"num_hidden_layers": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    net = transformers.BlipForImageTextRetrieval(config)
    return hubs.save(tmp_path_factory.mktemp("blip"), net, tokenizer)


def head_file(file: Path, width: int, prefix: str = "") -> nn.Sequential:
    """The published layers, small, with dropout as published: linear at places 0, 2, 4, 6 and 7."""
    torch.manual_seed(5)
    sizes = [width, 10, 8, 6, 4, 1]
    linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    drops = [nn.Dropout(0.2), nn.Dropout(0.2), nn.Dropout(0.1)]
    layers = nn.Sequential(linear[0], drops[0], linear[1], drops[1], linear[2], drops[2], linear[3], linear[4]).eval()
    torch.save({f"{prefix}layers.{name}": value for name, value in layers.state_dict().items()}, file)
    return layers


def images(rows: int, height: int = SIDE, width: int = SIDE) -> Tensor:
    return torch.rand(rows, 3, height, width, generator=torch.Generator().manual_seed(7))


def assert_slope(score: Any, at: Tensor, *context: Tensor) -> None:
    """The gradient is that of a small step."""
    at = at.clone().requires_grad_()
    (slope,) = torch.autograd.grad(score(at, *context).sum(), at)
    way = torch.randn(at.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ahead, behind = (score(at + sign * 3e-3 * way, *context).double().sum() for sign in (1, -1))
    assert float((slope * way).sum()) == pytest.approx(float(ahead - behind) / 6e-3, rel=2e-2, abs=1e-3)
    assert slope.abs().max() > 0


# ---- pixels


@pytest.mark.parametrize("shape", [(8, 8), (20, 20), (13, 29), (29, 13), (10, 14), (5, 6)])
def test_images_are_prepared_as_with_pillow(shape: tuple[int, int]) -> None:
    """The shorter side to 8, the middle cut out, normalised; up to the rounding of Pillow to bytes."""
    pillow = pytest.importorskip("PIL.Image")
    pixels = (images(1, *shape) * 255).round()
    picture = pillow.fromarray(pixels[0].permute(1, 2, 0).to(torch.uint8).numpy())
    height, width = (SIDE * side // min(shape) for side in shape)
    above, left = round((height - SIDE) / 2), round((width - SIDE) / 2)
    picture = picture.resize((width, height), pillow.BICUBIC).crop((left, above, left + SIDE, above + SIDE))
    shown = torch.tensor(list(picture.tobytes())).view(SIDE, SIDE, 3).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (CLIP_MEAN, CLIP_STD))
    found = image.Preparation(SIDE)(pixels / 255)
    assert found.shape == (1, 3, SIDE, SIDE)
    assert (found[0] - (shown - mean) / std).abs().max() < 1.5 / 255 / min(CLIP_STD)


def test_images_are_padded_where_they_were_in_training() -> None:
    wide = image.Preparation(SIDE, (0.0,) * 3, (1.0,) * 3, pad=True)(torch.ones(1, 3, 4, 16))
    assert wide[0, 0].mean(1).tolist() == pytest.approx([0, 0, 0, 1, 1, 0, 0, 0])
    tall = image.Preparation(SIDE, (0.0,) * 3, (1.0,) * 3, pad=True)(torch.ones(1, 3, 16, 4))
    assert torch.equal(tall, wide.mT)


def test_mean_and_std_are_those_of_the_folder(clip: str, tmp_path: Path) -> None:
    shutil.copytree(clip, tmp_path / "clip")
    file = tmp_path / "clip" / "preprocessor_config.json"
    file.write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.5]}')
    prepare = image.clip_score(tmp_path / "clip").prepare
    assert prepare == image.Preparation(SIDE, (0.5, 0.5, 0.5), (0.25, 0.5, 0.5))
    assert prepare(torch.full((1, 3, 8, 8), 0.75))[0, :, 0, 0].tolist() == [1.0, 0.5, 0.5]
    file.write_text("{")
    with pytest.raises(ValueError, match="fetch it again, or remove it"):
        image.clip_score(tmp_path / "clip")


# ---- CLIP and HPSv2


def test_clip_score_is_that_of_the_network(clip: str) -> None:
    """100 cosines of each image with its own prompt, as the forward pass of CLIPModel gives them."""
    score, pixels, prompts = image.clip_score(clip), images(3, 12, 12), ["a", "c d t", "t"]
    network, tokenizer = score.network, score.tokenizer
    read = tokenizer(prompts, padding="max_length", max_length=9, return_tensors="pt")
    with torch.no_grad():
        whole = network(pixel_values=score.prepare(pixels), **read).logits_per_image
    expected = 100 * whole.diagonal() / network.logit_scale.exp()
    rows = score.encode(prompts)
    torch.testing.assert_close(score(pixels, *rows), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(score(pixels, *score.encode(["a"] * 3)), expected)
    assert_slope(score, pixels, *rows)
    assert not any(weight.requires_grad for weight in network.parameters())


def open_clip(state: dict[str, Tensor], pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The forward pass of open_clip's ViT and text tower from its tensors: pre-norm blocks of MultiheadAttention."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def blocks(x: Tensor, prefix: str, mask: Tensor | None) -> Tensor:
        for place in range(2):
            name = f"{prefix}transformer.resblocks.{place}"
            attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            weights = {
                key.removeprefix(f"{name}.attn."): value
                for key, value in state.items()
                if key.startswith(f"{name}.attn.")
            }
            attention.load_state_dict(weights)
            y = norm(x, f"{name}.ln_1")
            x = x + attention(y, y, y, need_weights=False, attn_mask=mask)[0]
            y = F.linear(norm(x, f"{name}.ln_2"), state[f"{name}.mlp.c_fc.weight"], state[f"{name}.mlp.c_fc.bias"])
            x = x + F.linear(F.gelu(y), state[f"{name}.mlp.c_proj.weight"], state[f"{name}.mlp.c_proj.bias"])
        return x

    patches = F.conv2d(pixels, state["visual.conv1.weight"], stride=4).flatten(2).mT
    start = state["visual.class_embedding"].expand(len(pixels), 1, -1)
    seen = norm(torch.cat([start, patches], 1) + state["visual.positional_embedding"], "visual.ln_pre")
    seen = norm(blocks(seen, "visual.", None)[:, 0], "visual.ln_post") @ state["visual.proj"]
    read = state["token_embedding.weight"][ids] + state["positional_embedding"]
    causal = torch.full((ids.shape[1],) * 2, -math.inf).triu(1)
    read = norm(blocks(read, "", causal), "ln_final")
    ends = (ids == 1).int().argmax(1)
    return seen, read[torch.arange(len(ids)), ends] @ state["text_projection"]


def published_clip() -> dict[str, Tensor]:
    """Random tensors under the names of open_clip."""
    shapes = {
        "visual.class_embedding": (WIDTH,), "visual.positional_embedding": (5, WIDTH), "visual.proj": (WIDTH, SPACE),
        "visual.conv1.weight": (WIDTH, 3, 4, 4), "token_embedding.weight": (6, WIDTH),
        "positional_embedding": (9, WIDTH), "text_projection": (WIDTH, SPACE), "logit_scale": (),
    }  # fmt: skip
    norms = ["visual.ln_pre", "visual.ln_post", "ln_final"]
    for tower in ("visual.", ""):
        for place in range(2):
            name = f"{tower}transformer.resblocks.{place}"
            norms += [f"{name}.ln_1", f"{name}.ln_2"]
            for layer, (into, out) in {
                "attn.in_proj_": (WIDTH, 3 * WIDTH), "attn.out_proj.": (WIDTH, WIDTH),
                "mlp.c_fc.": (WIDTH, 24), "mlp.c_proj.": (24, WIDTH),
            }.items():  # fmt: skip
                shapes |= {f"{name}.{layer}weight": (out, into), f"{name}.{layer}bias": (out,)}
    shapes |= {f"{name}.{kind}": (WIDTH,) for name in norms for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(4)
    return {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_hpsv2_from_the_published_names(clip: str, tmp_path: Path) -> None:
    """Tensors named as in open_clip, renamed, saved, loaded: the cosines of open_clip's own forward pass."""
    published = published_clip()
    network = transformers.CLIPModel(transformers.CLIPConfig.from_pretrained(clip))
    network.load_state_dict(image.clip_layout(published))
    network.save_pretrained(tmp_path)
    transformers.CLIPTokenizer.from_pretrained(clip).save_pretrained(tmp_path)
    score, pixels, prompts = image.hpsv2(tmp_path), images(3, 12, 20), ["a c", "d", "t t t"]
    assert score.prepare.pad
    ids = score.tokenizer(prompts, padding="max_length", max_length=9, return_tensors="pt")["input_ids"]
    seen, read = open_clip(published, score.prepare(pixels), ids)
    expected = 100 * F.cosine_similarity(seen, read)
    torch.testing.assert_close(score(pixels, *score.encode(prompts)), expected, atol=2e-3, rtol=1e-4)
    with pytest.raises(ValueError, match=r"no visual\.proj"):
        image.clip_layout({"state_dict": torch.zeros(1)})


# ---- heads: Aesthetic and ImageReward


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_aesthetic_is_the_head_on_unit_vectors(clip: str, tmp_path: Path, suffix: str) -> None:
    layers = head_file(tmp_path / "head.pth", SPACE)
    if suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(torch.load(tmp_path / "head.pth"), tmp_path / "head.safetensors")
    score, pixels = image.aesthetic(clip, tmp_path / f"head{suffix}"), images(3, 10, 10)
    with torch.no_grad():
        vectors = score.network.get_image_features(pixel_values=score.prepare(pixels))
        vectors = vectors if isinstance(vectors, Tensor) else vectors.pooler_output  # by the version of transformers
        expected = layers(vectors / vectors.norm(dim=-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(score(pixels), expected, atol=1e-5, rtol=1e-5)
    assert_slope(score, pixels)


def test_image_reward_is_the_head_on_blip(blip: str, tmp_path: Path) -> None:
    """The first state of BLIP's own forward pass, through the head, standardised; padding counts for nothing."""
    layers = head_file(tmp_path / "ImageReward.pt", WIDTH, "mlp.")
    score, pixels = image.image_reward(blip, tmp_path / "ImageReward.pt"), images(2, 9, 9)
    prompts = ["the movie was good", "a long plot"]
    expected: list[Tensor] = []
    for row, prompt in enumerate(prompts):
        read = score.tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            seen = score.network(
                input_ids=read["input_ids"], attention_mask=read["attention_mask"],
                pixel_values=score.prepare(pixels[row : row + 1]),
            )  # fmt: skip
            expected.append((layers(seen.question_embeds[:, 0]).view(()) - 0.16717362830052426) / 1.0333394966054072)
    rows = score.encode(prompts)
    assert rows[0].shape == (2, 12)
    torch.testing.assert_close(score(pixels, *rows), torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert_slope(score, pixels, *rows)


def published_blip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of the first BLIP code, as ImageReward's file has them, with what is left out besides."""
    names = {
        "vision_model.embeddings.class_embedding": "cls_token",
        "vision_model.embeddings.position_embedding": "pos_embed",
        "vision_model.embeddings.patch_embedding.weight": "patch_embed.proj.weight",
        "vision_model.embeddings.patch_embedding.bias": "patch_embed.proj.bias",
        "vision_model.post_layernorm.weight": "norm.weight", "vision_model.post_layernorm.bias": "norm.bias",
    }  # fmt: skip
    layers = {
        "layer_norm1": "norm1", "layer_norm2": "norm2", "self_attn.qkv": "attn.qkv",
        "self_attn.projection": "attn.proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    }  # fmt: skip
    for place in range(2):
        for ours, theirs in layers.items():
            for kind in ("weight", "bias"):
                names[f"vision_model.encoder.layers.{place}.{ours}.{kind}"] = f"blocks.{place}.{theirs}.{kind}"
    renamed = {f"blip.visual_encoder.{names[k]}" if k in names else f"blip.{k}": v for k, v in state.items()}
    more = {"blip.text_encoder.embeddings.position_ids": torch.arange(12)[None], "blip.queue_ptr": torch.zeros(1)}
    return renamed | more | {"blip.visual_encoder_m.cls_token": torch.zeros(1), "mlp.layers.0.weight": torch.zeros(1)}


def test_blip_from_the_published_names(blip: str) -> None:
    network = transformers.BlipForImageTextRetrieval.from_pretrained(blip)
    state = network.state_dict()
    published = published_blip({name: value for name, value in state.items() if "itm_head" not in name})
    assert sum(name.startswith("blip.visual_encoder.") for name in published) == 6 + 2 * 12
    found = image.blip_layout(published)
    assert found.keys() == state.keys()
    assert all(torch.equal(value, found[name]) for name, value in state.items() if "itm_head" not in name)
    network.load_state_dict(found)  # the shapes of what was filled in are right, too
    with pytest.raises(ValueError, match=r"no visual_encoder\.cls_token"):
        image.blip_layout({})


# ---- as rewards


def decode(x: Tensor) -> Tensor:
    """Four tokens of two codes, and the mask, to images of 2 × 2 colours: ids or one-hots."""
    colours = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.3, 0.8], [0.0, 0.0, 0.0]])
    shown = x.float() @ colours if x.is_floating_point() else colours[x]
    return shown.mT.unflatten(-1, (2, 2))


def test_scores_steer_through_the_decoder(clip: str, tmp_path: Path) -> None:
    """One prompt for all, with gradients, and a weighted sum of two scores; ids and one-hots give the same."""
    head_file(tmp_path / "head.pth", SPACE)
    alike, beautiful = image.clip_score(clip), image.aesthetic(clip, tmp_path / "head.pth")
    reward = image.of_images(decode, alike, context=alike.encode("c t"))
    x = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    expected = alike(decode(x), *alike.encode(["c t"] * 3))
    torch.testing.assert_close(reward(x), expected)
    torch.testing.assert_close(reward(F.one_hot(x, 3).float()), expected, atol=1e-4, rtol=1e-4)
    other = reward(x, *alike.encode(["a", "a", "d"]))
    torch.testing.assert_close(other, alike(decode(x), *alike.encode(["a", "a", "d"])))
    both = weighted({reward: 1.0, image.of_images(decode, beautiful): 0.5})
    assert untyped(both).differentiable

    def logits(x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:2], 3)

    model = ts.Diffusion(
        ts.from_logits(logits, 2, ignores_time=True), ts.Ancestral(2), ts.uniform_steps(3), ts.template(4, 2)
    )
    generator = torch.Generator().manual_seed(0)
    tilt = ts.Tilt(both, kl=1.0, differentiable=True)
    result = ts.smc(ts.Steering(model, tilt, ts.Gradient()), num_particles=8, generator=generator)
    assert (result.samples < 2).all()


def test_each_population_has_its_prompt(clip: str) -> None:
    """The prompts of two populations through the tilt: log Z of either against enumeration."""
    score, prompts = image.clip_score(clip), ["a", "c d t"]

    def logits(x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:2], 3, dtype=torch.float64)

    canvas, denoiser = ts.template(4, 2), ts.from_logits(logits, 2, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(2), canvas.repeat(2, 1))
    exact: list[float] = []
    for prompt in prompts:
        reward = image.of_images(decode, score, context=score.encode(prompt))
        exact.append(enumerate_steering(ts.Steering(replace(model, template=canvas), ts.Tilt(reward, kl=20.0))).log_z)
    assert abs(exact[0] - exact[1]) > 0.1
    tilt = ts.Tilt(image.of_images(decode, score), kl=20.0, context=score.encode(prompts))
    result = ts.smc(
        ts.Steering(model, tilt), num_particles=16, populations=200, generator=torch.Generator().manual_seed(0)
    )
    for found, expected in zip(result.log_z.view(2, 100), exact, strict=True):
        log_z, error = pooled(found)
        assert abs(log_z - expected) < 4 * error


def test_functions_of_pil_images() -> None:
    pytest.importorskip("PIL")

    def redness(pictures: list[Any]) -> list[float]:
        assert {picture.size for picture in pictures} == {(2, 2)}
        return [picture.getpixel((1, 0))[0] / 255 for picture in pictures]

    reward = image.of_images(decode, image.of_pil(redness))
    assert not reward.differentiable
    assert reward(torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])).tolist() == pytest.approx([0.9, 0.1], abs=3e-3)
    with pytest.raises(ValueError, match="a number for each of 2 images"):
        image.of_pil(lambda pictures: [1.0])(images(2))


def test_refuses(clip: str, blip: str, tmp_path: Path) -> None:
    score = image.clip_score(clip)
    with pytest.raises(ValueError, match="takes 10 of 9 tokens: shorten it, or cut it off with truncate=True"):
        score.encode("a c d t a c d t")
    assert image.clip_score(clip, truncate=True).encode("a c d t a c d t")[0].shape == (1, SPACE)
    with pytest.raises(ValueError, match="there is no prompt"):
        score.encode([])
    with pytest.raises(ValueError, match="is no folder: give one with"):
        image.clip_score("laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
    with pytest.raises(ValueError, match="of the kind blip: give one of the kind clip"):
        image.clip_score(blip)
    with pytest.raises(ValueError, match="give the prompts of several populations to the tilt"):
        image.of_images(decode, score, context=score.encode(["a", "c"]))
    with pytest.raises(ValueError, match=r"give ImageModel\.pixels"):
        image.of_images(lambda x: decode(x).to(torch.uint8), score)(torch.zeros(1, 4, dtype=torch.int64))
    head_file(tmp_path / "head.pth", WIDTH)
    with pytest.raises(ValueError, match="a head from 12 numbers to one is needed"):
        image.aesthetic(clip, tmp_path / "head.pth")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        image.aesthetic(clip, tmp_path / "none.pth")
    torch.save({"layers.0.weight": torch.zeros(1, SPACE)}, tmp_path / "half.pth")
    with pytest.raises(ValueError, match="has no whole layer 0"):
        image.aesthetic(clip, tmp_path / "half.pth")
    (tmp_path / "broken.pth").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is damaged, or no file of tensors"):
        image.aesthetic(clip, tmp_path / "broken.pth")
