"""Masked image models: aMUSEd on tiny networks of diffusers' own classes, and networks vit(code, labels, drop)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from narrow import untyped
from torch import Tensor, nn
from torch.nn.functional import one_hot

import tokensteer as ts
from tokensteer.adapters import ImageModel, powers_from_scale, powers_from_weight
from tokensteer.core.particles.result import pooled
from tokensteer.testing import assert_denoiser, enumerate_steering

torch.set_num_threads(1)
CODES, IDS, MASK = 13, 20, 19  # of the tiny aMUSEd


@pytest.fixture(scope="module")
def pipeline() -> Any:
    pytest.importorskip("diffusers")
    import hubs

    return hubs.amused()


@pytest.fixture(scope="module")
def amused(pipeline: Any) -> ImageModel:
    return ts.adapters.amused(pipeline)


def partly_masked(rows: int, codes: int, mask_id: int, length: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(codes, (rows, length), generator=generator)
    return torch.where(torch.rand(rows, length, generator=generator) < 0.5, mask_id, x)


# ---- aMUSEd


class Calls:
    """What a pipeline gives its network and its scheduler, and what the network returns, while it samples one image."""

    def __init__(self, pipeline: Any, prompt: str, steps: int, **settings: Any) -> None:
        self.given: list[tuple[Tensor, dict[str, Tensor]]] = []
        self.stepped: list[Tensor] = []
        step = pipeline.scheduler.step

        def watched(model_output: Tensor, **more: Any) -> Any:
            self.stepped.append(model_output.clone())
            return step(model_output=model_output, **more)

        def noted(net: nn.Module, ids: tuple[Tensor], named: dict[str, Tensor]) -> None:
            self.given.append((ids[0].clone(), named))

        handle = pipeline.transformer.register_forward_pre_hook(noted, with_kwargs=True)
        pipeline.scheduler.step = watched
        try:
            settings |= {"output_type": "latent", "generator": torch.Generator().manual_seed(1)}
            pipeline(prompt, num_inference_steps=steps, **settings)
        finally:
            handle.remove()
            del pipeline.scheduler.step


@pytest.mark.parametrize("against", [None, "d d"], ids=["no prompt", "negative prompt"])
def test_amused_computes_what_its_pipeline_does(pipeline, amused, against):
    """The same ids, context and guided logits, at every step of a run of the pipeline."""
    calls = Calls(pipeline, "a c t", 3, guidance_scale=4.0, negative_prompt=against)
    named = ("encoder_hidden_states", "pooled_text_emb", "micro_conds")
    guided = amused.guided(powers_from_scale(4.0))
    rows = (*amused.context("a c t"), *amused.context(against))
    assert len(calls.given) == 3
    for (ids, context), logits in zip(calls.given, calls.stepped, strict=True):
        for ours, name in zip(amused.context([against, "a c t"]), named, strict=True):
            assert torch.allclose(ours, context[name], atol=1e-6)
        x = ids[:1].flatten(1)
        expected = logits.flatten(2).mT
        assert torch.allclose(guided.network(x, *rows)[..., :CODES], expected, rtol=1e-4, atol=1e-4)
        assert torch.allclose(guided(x, 0.5, *rows)[..., :CODES], expected.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_amused_without_guidance(pipeline, amused):
    calls = Calls(pipeline, "c", 1, guidance_scale=1.0, height=16, micro_conditioning_aesthetic_score=3)
    wide = ts.adapters.amused(pipeline, height=16, aesthetic_score=3)
    assert wide.network.grid == (8, 4)
    x = calls.given[0][0].flatten(1)
    assert torch.equal(x[0], wide.template())
    logits = wide.network(x, *wide.context("c"))[..., :CODES]
    assert torch.allclose(logits, calls.stepped[0].flatten(2).mT, atol=1e-5)


def test_amused_generates_codes_alone(amused):
    """The network reads 20 ids and writes 13; the mask and the spare ids are never generated."""
    x = partly_masked(3, CODES, MASK)
    context = amused.context(["a", None, "c d"])
    log_p = amused.denoiser.network(x, *context)
    assert log_p.shape == (3, 16, IDS)
    assert (log_p[..., CODES:] == -torch.inf).all()
    assert torch.allclose(log_p[2:], amused.network(x[2:], *amused.context("c d")), atol=1e-5)
    assert_denoiser(amused.diffusion("c d", steps=3), tolerance=1e-4)
    result = ts.smc(ts.Steering(amused.diffusion(["a", "c d"], steps=3), None), num_particles=4, populations=2)
    assert (result.samples < CODES).all()


def test_amused_takes_one_hots(amused):
    """They give the logits of their ids, and a gradient that a small step agrees with."""
    x, context = partly_masked(2, CODES, MASK), amused.context(["a", "c"])
    relaxed = one_hot(x, IDS).float().requires_grad_()
    logits = amused.network(relaxed, *context)
    assert torch.allclose(logits, amused.network(x, *context), atol=1e-5)
    net, length = amused.network.net, 1e-4
    try:
        net.double()
        exact, wide = relaxed.detach().double().requires_grad_(), [part.double() for part in context]
        value = amused.network(exact, *wide)[..., :CODES].square().mean()
        (slope,) = torch.autograd.grad(value, exact)
        direction = torch.randn(exact.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            ahead, behind = (
                amused.network(exact + sign * length * direction, *wide)[..., :CODES].square().mean()
                for sign in (1, -1)
            )
    finally:
        net.float()
    assert float(slope.abs().max()) > 0
    assert float((ahead - behind) / (2 * length)) == pytest.approx(float((slope * direction).sum()), rel=1e-3)


def test_amused_of_a_folder(pipeline, amused, tmp_path):
    """Saved and loaded, without the pipeline class: the same logits and the same images."""
    pipeline.save_pretrained(tmp_path / "model")
    loaded = ts.adapters.amused(tmp_path / "model")
    x = partly_masked(2, CODES, MASK)
    context = loaded.context(["a c", None])
    assert torch.allclose(loaded.network(x, *context), amused.network(x, *context), atol=1e-6)
    assert not any(weight.requires_grad for weight in untyped(loaded.network).net.parameters())
    with pytest.raises(ValueError, match="no transformer that UVit2DModel can load"):
        ts.adapters.amused(tmp_path)


def test_amused_decodes_as_its_pipeline_does(pipeline, amused):
    ids, pixels = (
        pipeline("a", num_inference_steps=2, output_type=kind, generator=torch.Generator().manual_seed(4)).images
        for kind in ("latent", "np")
    )
    images = amused.decode(ids.flatten(1))
    assert images.dtype == torch.uint8
    expected = (torch.from_numpy(pixels).permute(0, 3, 1, 2) * 255).round()
    assert (images - expected).abs().max() <= 1  # of 255, by rounding


def test_amused_refuses(pipeline):
    with pytest.raises(ValueError, match="height and width must be multiples"):
        ts.adapters.amused(pipeline, width=15)
    with pytest.raises(ValueError, match="shorten the prompt"):
        ts.adapters.amused(pipeline).context(["a c d t a c d t"])
    parts = {name: getattr(pipeline, name) for name in ("transformer", "vqvae", "text_encoder", "tokenizer")}
    with pytest.raises(ValueError, match="has no scheduler"):
        ts.adapters.amused(SimpleNamespace(**parts))
    for wrong in (3, 20):
        scheduler = SimpleNamespace(config=SimpleNamespace(mask_token_id=wrong))
        with pytest.raises(ValueError, match="different models"):
            ts.adapters.amused(SimpleNamespace(**parts, scheduler=scheduler))


# ---- networks called vit(code, labels, drop)


class Vit(nn.Module):
    """The signature of Halton-MaskGIT: ids (P, h, w), classes (P,), and whether to drop them (P,)."""

    def __init__(self, codes: int = 3, classes: int = 4, sites: int = 4, columns: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes = classes
        self.tok_emb = nn.Embedding(codes + 1, 8)
        self.cls_emb = nn.Embedding(classes + 1, 8)
        self.pos_emb = nn.Parameter(torch.randn(sites, 8))
        self.mix = nn.Linear(8 * sites, 8 * sites)
        self.head = nn.Linear(8, codes + 1 if columns is None else columns)

    def forward(self, code: Tensor, labels: Tensor, drop: Tensor) -> Tensor:
        assert code.dim() == 3
        assert drop.dtype == torch.bool
        y = self.cls_emb(torch.where(drop, self.classes, labels)).unsqueeze(1)
        x = self.tok_emb(code.flatten(1)) + self.pos_emb + y
        return self.head(x + self.mix(x.flatten(1)).tanh().view_as(x))


def maskgit(**sizes: Any) -> tuple[Vit, ImageModel]:
    vit = Vit(**sizes).double().requires_grad_(False)
    return vit, ts.adapters.halton_maskgit(vit, mask_id=3, grid=(2, 2), classes=4, layer=vit.tok_emb)


@pytest.mark.parametrize("columns", [None, 3], ids=["with a column for the mask", "codes alone"])
def test_halton_maskgit(columns):
    """Classes and dropped classes, row by row, against the network itself."""
    vit, model = maskgit(columns=columns)
    x = partly_masked(3, 3, 3, 4)
    labels, drop = torch.tensor([1, 2, 0]), torch.tensor([False, False, True])
    logits = model.denoiser.network(x, *model.context([1, 2, None]))
    assert logits.shape == (3, 4, 4)
    assert torch.equal(logits[..., :3], vit(x.view(3, 2, 2), labels, drop)[..., :3])
    assert torch.allclose(model.network(one_hot(x, 4).double(), *model.context([1, 2, None])), logits)
    assert_denoiser(model.diffusion(2, steps=3))


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_conventions_of_guidance(weight):
    """(1 + w)·c - w·u and u + s·(c - u) are one for s = 1 + w."""
    vit, model = maskgit()
    x = partly_masked(2, 3, 3, 4)
    labels, drop = torch.tensor([2, 2]), torch.tensor([False, False])
    c, u = vit(x.view(2, 2, 2), labels, drop)[..., :3], vit(x.view(2, 2, 2), labels, ~drop)[..., :3]
    assert powers_from_weight(weight) == powers_from_scale(1 + weight)
    rows = [part.expand(2) for part in (*model.context(2), *model.context(None))]
    logits = model.guided(powers_from_weight(weight)).network(x, *rows)[..., :3]
    assert torch.allclose(logits, (1 + weight) * c - weight * u)
    assert torch.allclose(logits, u + (1 + weight) * (c - u))


def test_guidance_as_a_target_is_the_product():
    """Against the enumerated product of the two models, made by hand; and two classes at once, sampled."""
    vit, model = maskgit()

    def alone(label: int, dropped: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: vit(
            x.view(-1, 2, 2), torch.full((len(x),), label), torch.full((len(x),), dropped, dtype=torch.bool)
        )

    def by_hand(label: int) -> float:
        denoisers = (ts.from_logits(alone(*given), 3, ignores_time=True) for given in ((label, False), (0, True)))
        one, other = (ts.Diffusion(d, model.kernel, ts.uniform_steps(2), ts.template(4, 3)) for d in denoisers)
        return enumerate_steering(ts.Steering(ts.Product([one, other], [1.75, -0.75]), None)).log_z

    exact = [by_hand(label) for label in (1, 3)]
    alone_too = model.product(1, powers_from_scale(1.75), steps=2)
    assert enumerate_steering(ts.Steering(alone_too, None)).log_z == pytest.approx(exact[0])
    target = model.product([1, 3], powers_from_scale(1.75), steps=2)
    generator = torch.Generator().manual_seed(0)
    result = ts.smc(ts.Steering(target, None, ts.Guided()), num_particles=32, populations=400, generator=generator)
    for found, expected in zip(result.log_z.view(2, 200), exact, strict=True):
        log_z, error = pooled(found)
        assert abs(log_z - expected) < 4 * error


def test_the_guided_sampler_can_be_tilted():
    """It is one model of its own: log Z without a reward is 0, and a reward goes on top."""
    _, model = maskgit()
    base = model.diffusion(1, powers=powers_from_scale(3.0), steps=2)
    assert enumerate_steering(ts.Steering(base, None)).log_z == pytest.approx(0.0, abs=1e-12)
    tilt = ts.Tilt(lambda x: (x == 0).sum(-1).double(), kl=0.5)
    result = ts.smc(ts.Steering(base, tilt, ts.Gradient()), num_particles=8, generator=torch.Generator().manual_seed(0))
    assert result.samples.shape == (1, 8, 4)


def test_each_population_has_its_condition():
    """Two classes and one negative class, in one guided run, against runs of their own."""
    _, model = maskgit()
    settings: dict[str, Any] = {"powers": powers_from_scale(3.0), "against": 2, "steps": 2}
    tilt = ts.Tilt(lambda x: (x == 0).sum(-1).double(), kl=0.5)
    exact = [enumerate_steering(ts.Steering(model.diffusion(label, **settings), tilt)).log_z for label in (0, 3)]
    steering = ts.Steering(model.diffusion([0, 3], **settings), tilt)
    result = ts.smc(steering, num_particles=32, populations=400, generator=torch.Generator().manual_seed(0))
    assert abs(exact[0] - exact[1]) > 0.01
    for found, expected in zip(result.log_z.view(2, 200), exact, strict=True):
        log_z, error = pooled(found)
        assert abs(log_z - expected) < 4 * error
    with pytest.raises(ValueError, match="contexts of 2 and 3 rows"):
        model.diffusion([0, 1, 2], powers=(2.0, -1.0), against=[0, 1])


def test_image_models_refuse():
    vit, model = maskgit()
    with pytest.raises(ValueError, match="no class 4: classes are numbers from 0 to 3"):
        model.context(4)
    with pytest.raises(ValueError, match="a list of several"):
        model.context([])
    with pytest.raises(ValueError, match="has no decoder"):
        model.decode(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 sites, and a grid of 2 × 2 has 4"):
        model.network(torch.zeros(1, 3, dtype=torch.int64), *model.context(1))
    blind = ts.adapters.halton_maskgit(vit, mask_id=3, grid=(2, 2))
    with pytest.raises(ValueError, match=r"name it as layer=\.\.\."):
        blind.network(torch.zeros(1, 4, 4), *blind.context(0))
    with pytest.raises(ValueError, match=r"expected \(1, 4, K\) with K <= 3"):
        ts.adapters.halton_maskgit(vit, mask_id=2, grid=(2, 2)).network(model.template()[None], *model.context(0))


def test_images_are_decoded_to_bytes():
    vit, _ = maskgit()
    pixels = torch.tensor([-0.2, 0.0, 0.5, 1.3])
    model = ts.adapters.halton_maskgit(
        vit, mask_id=3, grid=(2, 2), decoder=lambda ids: pixels[ids].unsqueeze(1).expand(-1, 3, -1, -1)
    )
    images = model.decode(torch.tensor([[[0, 1, 2, 3]], [[3, 3, 3, 3]]]))
    assert images.shape == (2, 3, 2, 2)
    assert images[0, 0].tolist() == [[0, 0], [128, 255]]
