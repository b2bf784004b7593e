"""Repair leaves the target unchanged, for any denoiser: exact paths stay exact paths, and chains forget their start."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pinned_sweeps import exact_paths, largest_z
from torch import Tensor
from toys import StateTable, Toy, seeded

import tokensteer as ts
from tokensteer.core.models.forward import ForwardPaths
from tokensteer.core.particles.gibbs import Pinned, pick
from tokensteer.core.particles.resumed import Resumed
from tokensteer.testing import enumerate_steering

TOY = Toy("B")


def inconsistent(timed: bool = False) -> ts.Diffusion:
    """A denoiser whose conditionals belong to no joint distribution."""
    table = (torch.randn(4**3, 3, 3, generator=seeded(5), dtype=torch.float64)).softmax(-1)
    now, later = StateTable(table), StateTable(table.flip(-1))

    def denoiser(x: Tensor, t: float) -> Tensor:
        return (later if timed and t > 0.6 else now)(x, t)

    return replace(TOY.model("mdm"), denoiser=denoiser)


def tilted(model: ts.Model, proposal: ts.Proposal | None = None, **options) -> ts.Steering:
    tilt = replace(TOY.tilt("mdm"), kl=2.0, **options)
    return ts.Steering(model, tilt, proposal or ts.FromModel())


MODELS = {
    "consistent": TOY.model("mdm"),
    "inconsistent": inconsistent(),
    "timed": inconsistent(timed=True),
    "tau-leap": replace(inconsistent(), kernel=ts.TauLeap(TOY.mask_id)),
}


@pytest.mark.parametrize("name", MODELS)
def test_paths_keep_their_law_under_new_noise(name: str) -> None:
    steering, count = tilted(MODELS[name]), 6000
    paths = exact_paths(steering, count, seeded(1))
    forward = ForwardPaths.of(steering.model)
    after, _, accepted = forward.renoise(paths, forward.log_ratios(paths), seeded(2))
    exact = enumerate_steering(steering)
    law = (exact.log_law + exact.log_value).softmax(-1)  # of a path of the target, at each time
    for time in range(1, len(paths)):
        assert largest_z(paths[time], exact.states, law[time]) < 4.5
        assert largest_z(after[time], exact.states, law[time]) < 4.5, time
    assert torch.equal(paths[-1], after[-1])
    assert 0.3 < accepted.double().mean() < 0.95


def test_a_consistent_denoiser_accepts_if_sites_open_one_at_a_time() -> None:
    model = replace(TOY.model("mdm"), steps=ts.uniform_steps(400), kernel=ts.Ancestral(TOY.mask_id))
    chain = ts.repair(TOY.clean, tilted(model), sweeps=1, num_particles=2, share=0.02, generator=seeded())
    assert chain.accepted.all()


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_sweep_from_the_middle_keeps_exact_paths(first: int) -> None:
    steering, generator = tilted(inconsistent(), estimator=ts.Sampled(), draws=2), seeded(4)
    paths = exact_paths(steering, 4000, generator)
    pinned = Pinned(Resumed(steering, first, paths[first]), paths[first:])
    records = list(ts.sweep(pinned, 3, 4000, resample=pinned.resample, when=ts.triggers.always, generator=generator))
    after, exact = pick(records, generator), enumerate_steering(steering)
    assert torch.equal(after[0], paths[first])
    assert [step.index for step in pinned.steps] == list(range(4 - first))
    assert largest_z(after[-1], exact.states[exact.clean], exact.target) < 4.5
    assert (after[-1] != paths[-1]).any()


SETTINGS = [
    ("inconsistent", {"estimator": ts.Sampled(), "draws": 2}, None, 0.5),
    ("inconsistent", {}, ts.Gradient(), 0.25),
    ("timed", {"potential": ts.potentials.maximum}, None, 0.5),
    ("consistent", {}, None, 1.0),
]


def exact_draws(target: Tensor, count: int = 4000) -> Tensor:
    return TOY.clean[torch.multinomial(target, count, True, generator=seeded(3))]


@pytest.mark.parametrize(("name", "twist", "proposal", "share"), SETTINGS)
def test_chains_keep_the_target(name: str, twist: dict, proposal, share: float) -> None:
    steering = tilted(MODELS[name], proposal, **twist)
    target = enumerate_steering(steering).target
    chain = ts.repair(exact_draws(target), steering, share=share, sweeps=8, num_particles=4, generator=seeded(6))
    assert chain.samples.shape == (9, 4000, 3)
    assert largest_z(chain.samples[-1], TOY.clean, target) < 4.5
    assert chain.changed[-1].mean() > 0.15
    assert chain.reward is not None
    assert torch.equal(chain.reward[-1], TOY.reward(chain.samples[-1]))
    assert torch.equal(TOY.reward(chain.best()), chain.reward.amax(0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("inconsistent", 0.5), ("timed", 0.5), ("consistent", 1.0)])
def test_chains_reach_the_target_from_one_sequence(name: str, share: float) -> None:
    steering = tilted(MODELS[name], estimator=ts.Sampled(), draws=2)
    target, start = enumerate_steering(steering).target, TOY.clean[-1].expand(4000, -1)
    chain = ts.repair(start, steering, share=share, sweeps=60, num_particles=4, generator=seeded(6))
    assert largest_z(chain.samples[-1], TOY.clean, target) < 4.5


def test_products_and_models_without_a_tilt() -> None:
    product = TOY.product("mdm", 1.5, -0.5, lookahead=True, convention=ts.kernel_powers)
    raised = TOY.product("mdm", 1.5, 0.5, lookahead=True, convention=ts.kernel_powers)
    for model, proposal in ((product, ts.Guided()), (raised, ts.Guided()), (inconsistent(), ts.FromModel())):
        steering = ts.Steering(model, None, proposal)
        exact = enumerate_steering(steering)
        chain = ts.repair(
            exact_draws(exact.target), steering, share=0.5, sweeps=6, num_particles=4, generator=seeded(7)
        )
        assert largest_z(chain.samples[-1], TOY.clean, exact.target) < 4.5
        assert chain.reward is None
        with pytest.raises(ValueError, match="no best sample"):
            chain.best()


@pytest.mark.fast
def test_noise_taken_unseen_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the Metropolis-Hastings correction an inconsistent denoiser gives another distribution."""
    steering = tilted(inconsistent())
    target = enumerate_steering(steering).target

    def z_score() -> float:
        chain = ts.repair(exact_draws(target), steering, share=0.5, sweeps=4, num_particles=4, generator=seeded(6))
        return largest_z(chain.samples[-1], TOY.clean, target)

    assert z_score() < 4.5
    renoise = ForwardPaths.renoise
    unseen = lambda self, path, log_ratio, generator: renoise(self, path, log_ratio - torch.inf, generator)  # noqa: E731
    monkeypatch.setattr(ForwardPaths, "renoise", unseen)
    assert z_score() > 8


def test_a_template_stays() -> None:
    canvas = torch.stack([ts.template(3, TOY.mask_id, [token], at=[1]) for token in (0, 2)])
    steering = tilted(replace(inconsistent(), template=canvas))
    x = torch.tensor([[0, 0, 1], [1, 0, 1], [1, 2, 1], [0, 2, 2]])
    chain = ts.repair(x, steering, share=0.7, sweeps=20, generator=seeded())
    assert (chain.samples[..., 1] == x[:, 1]).all()
    assert (chain.changed[-10:].amax(0) > 0).all()
    assert chain.changed[0].sum() == 0


def test_a_sequence_of_no_mass_is_left_for_one_with_some() -> None:
    def hard(x: Tensor) -> Tensor:
        return torch.where((x == 0).any(-1), 0.0, -math.inf)

    steering = ts.Steering(TOY.model("mdm"), ts.Tilt(hard))
    chain = ts.repair(torch.tensor([2, 2, 2]), steering, share=0.5, sweeps=30, generator=seeded())
    assert chain.reward is not None
    assert chain.reward[0, 0] == -math.inf
    found = (chain.reward[:, 0] == 0).int()
    assert found[-1]
    assert (found.diff() >= 0).all()  # and never given up again


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ([0, 0], "x has 2 sites and the model 3"),
        ([0, 3, 0], r"x holds 1 masks \(3\) and must be clean: fill them by smc"),
        ([0, 0, 7], r"ids must lie in \[0, 4\), got 0 to 7"),
        ([1, 0, 0], r"x\[0\] has token 1 at site 0, where the template fixes 0: change x"),
        ([0.0, 0.0, 0.0], r"int64 ids, \(L,\) or \(B, L\), got torch.float32 \(3,\)"),
        ([], "must be a tensor of int64 ids"),
        ("ACG", "got str"),
    ],
)
def test_sequences_are_checked(x: list, says: str) -> None:
    steering = tilted(replace(TOY.model("mdm"), template=ts.template(3, 3, [0])))
    with pytest.raises(ValueError, match=says):
        ts.repair(x if isinstance(x, str) else torch.tensor(x), steering)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"share": 0.0}, r"share must lie in \(0, 1\], got 0"),
        ({"sweeps": 0}, "sweeps must be at least 1"),
        ({"num_particles": 1}, "one of them is pinned"),
    ],
)
def test_options_are_checked(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ts.repair(TOY.clean, tilted(TOY.model("mdm")), **options)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (ts.Ranked(3), "kernel is Ranked, which opens sites by their tokens .* Ancestral kernel without remasking"),
        (ts.MaskGIT(3), "kernel is MaskGIT"),
        (ts.Ancestral(3, sigma=ts.Cap(0.2)), "masks open sites again, .* or use particle_gibbs"),
    ],
)
def test_other_kernels_are_refused(kernel: ts.Kernel, says: str) -> None:
    model = replace(TOY.model("mdm"), kernel=kernel)
    with pytest.raises(ValueError, match=says):
        ts.repair(TOY.clean, ts.Steering(model, ts.Tilt(TOY.reward)))
