"""The same core on every device: same laws, same weights for the same trajectories, same seed same samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from extended import MaskGITExtended
from torch import Tensor
from toys import Toy

import tokensteer as ts
from tokensteer import rewards
from tokensteer.testing import TableDenoiser, enumerate_steering, score

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# A noisy gradient makes heavy-tailed weights; clipping and many draws keep a z-score meaningful.
PROPOSALS = {"base": ts.FromModel(), "gradient": ts.Gradient(clip=0.3), "optimal": ts.Enumerated()}


def steering(device: str, sampler: str, proposal: str, dtype: torch.dtype, *, product: bool = False) -> ts.Steering:
    toy = Toy("B", dtype)

    def model(joint: str) -> ts.Diffusion:
        plain = toy.model(sampler, joint)
        denoiser = TableDenoiser(toy.joint(joint).to(device))
        return ts.Diffusion(denoiser, plain.kernel, plain.steps, plain.template.to(device))

    def reward(x: Tensor) -> Tensor:
        return toy.reward(x.cpu()).to(device)

    random = proposal == "gradient"  # one random twist among the three
    estimator = ts.Sampled() if random else ts.Exact()
    tilt = ts.Tilt(reward, toy.kl, ramp=toy.ramp(sampler), draws=32, estimator=estimator)
    target = ts.Product((model("p1"), model("p2")), (1.5, -0.5)) if product else model("p1")
    return ts.Steering(target, tilt, PROPOSALS[proposal])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("sampler", ["mdm", *(pytest.param(s, marks=pytest.mark.slow) for s in ("remdm", "lowconf"))])
@pytest.mark.parametrize("device", DEVICES)
def test_unbiased_and_reproducible(device: str, sampler: str, proposal: str, dtype: torch.dtype) -> None:
    path = steering(device, sampler, proposal, dtype)
    exact = enumerate_steering(steering("cpu", sampler, "base", torch.float64)).log_z
    runs = [
        ts.smc(path, 16, 300, generator=torch.Generator(device=device).manual_seed(3), resample=resample)
        for resample in (ts.resampling.systematic, ts.resampling.systematic, ts.resampling.ssp)
    ]
    assert torch.equal(runs[0].samples, runs[1].samples)
    assert torch.equal(runs[0].log_w, runs[1].log_w)
    for result in runs[1:]:
        ratio = (result.log_z - exact).exp()
        assert abs(float((ratio.mean() - 1) / (ratio.std() / math.sqrt(len(ratio))))) < 4


# A product that remasks aims at a corrected target, which is not what its transition proposes: it has no optimal one.
WEIGHED = [
    (sampler, proposal, product)
    for sampler in ("mdm", "remdm", "lowconf")
    for proposal in ("base", "optimal")
    for product in (False, True)
    if (sampler, proposal, product) != ("remdm", "optimal", True)
]
ELSEWHERE = [("cpu", torch.float32, 1e-4), *((d, torch.float64, 1e-10) for d in DEVICES if d != "cpu")]


@pytest.mark.parametrize(("sampler", "proposal", "product"), WEIGHED)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), ELSEWHERE)
def test_same_weights_as_in_double_precision_on_the_cpu(
    device: str, dtype: torch.dtype, tolerance: float, sampler: str, proposal: str, product: bool
) -> None:
    here = steering("cpu", sampler, proposal, torch.float64, product=product)
    there = steering(device, sampler, proposal, dtype, product=product)
    records = list(ts.sweep(here, 8, generator=torch.Generator().manual_seed(0), when=ts.triggers.never))
    paths = torch.stack([r.x[0] for r in records], 1)
    ours, theirs = score(here, paths).log_increment, score(there, paths.to(device)).log_increment.double().cpu()
    assert (ours - theirs).abs().max() < tolerance
    assert ours.std() > 0.01  # there is something to agree on


def parts(device: str) -> dict[str, ts.Steering]:
    """The other kernels, noises and constraints, one steering each."""
    toy = Toy("B", torch.float32)
    joint = toy.joint("p1").to(device)
    canvas = ts.template(toy.length, toy.mask_id).to(device)
    steps, tilt = ts.uniform_steps(3), ts.Tilt(lambda x: (x == 1).sum(-1).float(), draws=2)
    remasking = ts.Ancestral(toy.mask_id, sigma=ts.Cap(0.3))
    kernels = {
        "margin": ts.Ranked(toy.mask_id, confidence=ts.ranked.margin),
        "maskgit": ts.MaskGIT(toy.mask_id, temperature=1.0),
        "extended": MaskGITExtended(ts.MaskGIT(toy.mask_id)),
        "blocks": ts.Blocks(ts.MaskGIT(toy.mask_id, temperature=1.0), 1, 3, 3),
        "confidence": ts.ConfidenceRemask(remasking),
        "leap": ts.TauLeap(toy.mask_id),
        "events": ts.FirstHitting(toy.mask_id),
    }
    models = {name: ts.Diffusion(TableDenoiser(joint), kernel, steps, canvas) for name, kernel in kernels.items()}
    flat = ts.from_logits(lambda x, t: torch.zeros(len(x), 3, 4, device=device), 99)
    models["uniform"] = ts.Diffusion(flat, ts.uniform_noise(4), steps, torch.full_like(canvas, ts.NO_MASK))
    plain = ts.Diffusion(TableDenoiser(joint), remasking, steps, canvas)
    twos = rewards.contains([2], toy.tokens + 1)
    return {
        **{name: ts.Steering(model, tilt) for name, model in models.items()},
        "constrained": rewards.constrain(plain, twos, tilt),
        "templates": ts.Steering(replace(plain, template=canvas.repeat(2, 1)), tilt, ts.Gradient(clip=1.0)),
    }


@pytest.mark.parametrize("name", parts("cpu"))
@pytest.mark.parametrize("device", DEVICES)
def test_every_part_runs_there(device: str, name: str) -> None:
    path = parts(device)[name]
    runs = [
        ts.smc(path, 8, 4, when=ts.triggers.always, generator=torch.Generator(device=device).manual_seed(1))
        for _ in range(2)
    ]
    assert runs[0].samples.device.type == device
    assert torch.equal(runs[0].samples, runs[1].samples)
    assert torch.equal(runs[0].log_w, runs[1].log_w)
    assert runs[0].log_z.isfinite().all()
    if name == "constrained":
        assert (runs[0].samples == 2).any(-1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_wrapped_paths_run_there(device: str) -> None:
    generator = torch.Generator(device=device).manual_seed(0)
    path = steering(device, "mdm", "optimal", torch.float32)
    gradient = steering(device, "mdm", "gradient", torch.float32)
    assert gradient.twist is not None
    adaptive = replace(gradient, twist=replace(gradient.twist, ramp=ts.Adaptive()))
    for wrapped in (ts.Auxiliary(path), adaptive):
        assert ts.smc(wrapped, 8, 4, generator=generator).log_z.isfinite().all()
    for ancestor_sampling in (False, True):
        chain = ts.particle_gibbs(path, 2, 4, 3, ancestor_sampling=ancestor_sampling, generator=generator)
        assert chain.samples.device.type == device
