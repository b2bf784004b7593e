"""Image codes behind a text vocabulary: MMaDA and Lumina-DiMOO on a tiny Llama that attends both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
import hubs
import tiny_images

import tokensteer as ts
from tokensteer.adapters import CodeLayout, ImageModel, VocabularySlice, powers_from_weight
from tokensteer.adapters.text_and_image import LUMINA, MMADA
from tokensteer.core.particles.result import pooled
from tokensteer.testing import assert_denoiser, enumerate_steering

torch.set_num_threads(1)
SPECIAL = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
TOKENS = ("<|mask|>", "<t2i>", "<soi>", "<eoi>", "<line>", "<answer>", "</answer>", "<system>", "</system>")
MORE = ("<user>", "</user>", "<uncondition>", "Generate", "an", "image", ".")
CODES = 5


def tokenizer() -> Any:
    words = hubs.tokenizer(SPECIAL, (*TOKENS, *MORE))
    words.add_special_tokens({"additional_special_tokens": [*TOKENS, *MORE[:3]]})
    return words


WORDS = tokenizer()
IDS = {token: WORDS.convert_tokens_to_ids(token) for token in (*TOKENS, *SPECIAL.values(), "good", "bad", "long")}
MMADA_SMALL = CodeLayout((2, 3), len(WORDS), CODES, IDS["<|mask|>"], (IDS["<soi>"],), (IDS["<eoi>"],))
LUMINA_SMALL = CodeLayout(
    (2, 3), len(WORDS) + 1, CODES, IDS["<|mask|>"], (IDS["<answer>"], IDS["<soi>"]),
    (IDS["<eoi>"], IDS["</answer>"]), IDS["<line>"],
)  # fmt: skip


@pytest.fixture(scope="module")
def net() -> tiny_images.Llama:
    return tiny_images.Llama(len(WORDS) + 1 + CODES)


@pytest.fixture(scope="module", params=["mmada", "lumina"])
def model(request: pytest.FixtureRequest, net: tiny_images.Llama) -> ImageModel:
    return made(request.param, net)


def made(kind: str, net: tiny_images.Llama) -> ImageModel:
    if kind == "mmada":
        return ts.adapters.mmada(net, WORDS, layout=MMADA_SMALL, task=IDS["<t2i>"], text_length=8)
    vqvae = hubs.amused(codes=CODES).vqvae
    return ts.adapters.lumina_dimoo(
        net, WORDS, vqvae, height=4, width=6, layout=LUMINA_SMALL, text_length=16, system="Generate an image."
    )


def canvases(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(CODES, (rows, 6), generator=generator)
    return torch.where(torch.rand(rows, 6, generator=generator) < 0.5, CODES, x)


def by_hand(net: tiny_images.Llama, kind: str, text: str, x: Tensor) -> Tensor:
    """One canvas (6,), as the published samplers write it: the whole sequence, its logits, the slice."""
    words = [WORDS.convert_tokens_to_ids(word) for word in text.split()]
    offset = len(WORDS) + (kind == "lumina")
    codes = [IDS["<|mask|>"] if int(code) == CODES else offset + int(code) for code in x]
    if kind == "mmada":
        prompt = [IDS["<t2i>"], IDS["<bos>"], *words, IDS["<eos>"], IDS["<soi>"]]
        ids, places = [*prompt, *codes, IDS["<eoi>"]], [len(prompt) + k for k in range(6)]
    else:
        head = ["<system>", "Generate", "an", "image", ".", "</system>", "<user>"]
        words = [WORDS.convert_tokens_to_ids(word) for word in [*head, *text.split(), "</user>", "<answer>", "<soi>"]]
        line = IDS["<line>"]
        ids = [*words, *codes[:3], line, *codes[3:], line, IDS["<eoi>"], IDS["</answer>"]]
        places = [len(words) + k for k in (0, 1, 2, 4, 5, 6)]
    with torch.no_grad():
        return net(torch.tensor([ids])).logits[0, places, offset : offset + CODES]


@pytest.mark.parametrize("kind", ["mmada", "lumina"])
def test_logits_are_those_of_the_slice_at_the_codes(net: tiny_images.Llama, kind: str) -> None:
    """Prompts of different lengths in one batch, each as if it ran alone; none is the published one; mask gets -inf."""
    model, x = made(kind, net), canvases(4)
    texts = ["the long movie", "good", None, "bad"]
    logits = model.denoiser.network(x, *model.context(texts))
    assert logits.shape == (4, 6, CODES + 1)
    assert (logits[..., CODES] == -torch.inf).all()
    nothing = "" if kind == "mmada" else "<uncondition>"
    for row, text in enumerate(texts):
        expected = by_hand(net, kind, nothing if text is None else text, x[row])
        torch.testing.assert_close(logits[row, :, :CODES], expected, atol=1e-5, rtol=1e-5)
    guided = model.guided(powers_from_weight(3.5)).network(x[:1], *model.context("good"), *model.context(None))
    c, u = by_hand(net, kind, "good", x[0]), by_hand(net, kind, nothing, x[0])
    torch.testing.assert_close(guided[0, :, :CODES], 4.5 * c - 3.5 * u, atol=1e-4, rtol=1e-4)


def test_without_a_plain_head_logits_are_cut_out(net: tiny_images.Llama) -> None:
    layer, x = net.get_input_embeddings(), canvases(2)
    head = net.get_output_embeddings()
    sliced, whole = (
        VocabularySlice(net, lambda ids: net(ids).logits, MMADA_SMALL, layer, given) for given in (head, None)
    )
    prompts = whole.prompts([[IDS["good"]], [IDS["bad"], IDS["long"]]], 4)
    torch.testing.assert_close(sliced(x, prompts), whole(x, prompts))
    assert "forward" not in vars(head)


def test_one_hots_give_the_logits_of_their_ids_and_a_gradient(model: ImageModel, net: tiny_images.Llama) -> None:
    """The gradient agrees with a small step, in double precision; it flows through the slice of the table alone."""
    x, context = canvases(2), model.context(["good", "the plot"])
    try:
        net.double()
        relaxed = one_hot(x, CODES + 1).double().requires_grad_()
        logits = model.network(relaxed, *context)
        torch.testing.assert_close(logits, model.network(x, *context))
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

        def score(at: Tensor) -> Tensor:
            return (model.network(at, *context)[..., :CODES] * weight[..., :CODES]).sum()

        (slope,) = torch.autograd.grad(score(relaxed), relaxed)
        way = torch.randn(relaxed.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            apart = (score(relaxed + 1e-4 * way) - score(relaxed - 1e-4 * way)) / 2e-4
        torch.testing.assert_close((slope * way).sum(), apart, rtol=1e-3, atol=1e-3)  # Llama normalises in float32
    finally:
        net.float()


def test_is_a_denoiser_and_runs_through_smc(model: ImageModel) -> None:
    assert_denoiser(model.diffusion("good", steps=2), tolerance=1e-4)
    tilt = ts.Tilt(lambda x: x[..., 0].sum(-1) if x.is_floating_point() else (x == 0).sum(-1), 0.5, differentiable=True)
    diffusion = model.diffusion(["good", "a bad plot"], powers=powers_from_weight(2.0), steps=3)
    steering = ts.Steering(diffusion, tilt, ts.Gradient())
    result = ts.smc(steering, num_particles=4, populations=2, generator=torch.Generator().manual_seed(0))
    assert (result.samples < CODES).all()


def test_each_population_has_its_prompt_and_the_product_is_exact(net: tiny_images.Llama) -> None:
    """Two sites of five codes: log Z of two prompts of different lengths in one run against enumeration."""
    layout, generator = replace(MMADA_SMALL, grid=(1, 2)), torch.Generator().manual_seed(0)
    model = ts.adapters.mmada(net, WORDS, layout=layout, task=IDS["<t2i>"], text_length=8)
    settings: dict[str, Any] = {"steps": 2, "kernel": ts.Ancestral(CODES)}
    tilt = ts.Tilt(lambda x: (x == 0).sum(-1).double(), kl=0.5)
    prompts = ["good", "the bad plot"]
    exact = [enumerate_steering(ts.Steering(model.diffusion(text, **settings), tilt)).log_z for text in prompts]
    assert abs(exact[0] - exact[1]) > 0.01
    steering = ts.Steering(model.diffusion(prompts, **settings), tilt)
    result = ts.smc(steering, num_particles=16, populations=400, generator=generator)
    for found, expected in zip(result.log_z.view(2, 200), exact, strict=True):
        log_z, error = pooled(found)
        assert abs(log_z - expected) < 4 * error
    target = model.product("good", powers_from_weight(1.0), **settings)
    guided = ts.Steering(target, None, ts.Guided())
    log_z, error = pooled(ts.smc(guided, num_particles=16, populations=200, generator=generator).log_z)
    assert abs(log_z - enumerate_steering(ts.Steering(target, None)).log_z) < 4 * error


def test_images_are_decoded(net: tiny_images.Llama) -> None:
    model, x = made("lumina", net), torch.tensor([[0, 1, 2, 3, 4, 0]])
    assert model.decode(x).shape == (1, 3, 4, 6)
    torch.testing.assert_close(model.pixels(one_hot(x, CODES + 1).float()), model.pixels(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="has no decoder"):
        made("mmada", net).decode(x)


def test_published_layouts() -> None:
    """Ids and lengths as published: 1,024 codes behind 126,349 words, and 4,096 with an end of line to each row."""
    assert MMADA.sequence().shape == (1 + 1024 + 1,)
    assert MMADA.offset + MMADA.codes <= 134656  # the enlarged vocabulary
    sequence, sites = LUMINA.sequence(), LUMINA.sites()
    assert sequence.shape == (2 + 64 * 65 + 2,)
    assert sequence[:2].tolist() == [126354, 126349]
    assert sequence[-3:].tolist() == [126084, 126350, 126355]
    assert (sequence[sites] == 126336).all()
    assert int((sequence == 126336).sum()) == len(sites) == 4096
    assert len(WORDS) == MMADA_SMALL.offset


def test_refuses(net: tiny_images.Llama) -> None:
    with pytest.raises(ValueError, match=r"ids up to 134540: it is the layout of another model"):
        ts.adapters.mmada(net, WORDS, layout=MMADA)
    with pytest.raises(ValueError, match="is one of the codes"):
        replace(MMADA_SMALL, offset=0)
    with pytest.raises(ValueError, match="has no codes"):
        replace(MMADA_SMALL, grid=(0, 3))
    model = made("mmada", net)
    with pytest.raises(ValueError, match="takes 9 of 8 tokens: shorten it, or raise text_length"):
        model.context("good bad good bad good bad")
    with pytest.raises(ValueError, match="the mask or no token of the network"):
        model.context("<|mask|>")
    with pytest.raises(ValueError, match="cannot spell 'zebra'"):
        model.context("zebra")
    with pytest.raises(ValueError, match=r"one-hots \(P, 6, 6\)"):
        model.network(torch.zeros(1, 5, dtype=torch.int64), *model.context("good"))
    with pytest.raises(ValueError, match="multiples, got"):
        ts.adapters.lumina_dimoo(net, WORDS, height=40, layout=LUMINA_SMALL)
    with pytest.raises(ValueError, match="no token for the beginning or end"):
        ts.adapters.mmada(net, hubs.tokenizer({"unk": "<unk>"}), layout=MMADA_SMALL)
    shifted = VocabularySlice(
        net, lambda ids: net(ids).logits[:, 1:], MMADA_SMALL, net.get_input_embeddings(), net.get_output_embeddings()
    )
    with pytest.raises(ValueError, match="pass no head"):
        shifted(canvases(1), shifted.prompts([[IDS["good"]]], 1))
