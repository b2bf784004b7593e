"""Particle Gibbs leaves the target unchanged: exact draws stay exact draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import uniform_toys as uniform
from extended import MaskGITExtended
from pinned_sweeps import exact_paths, largest_z, one_sweep
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.core.particles.gibbs import Pinned, pick
from tokensteer.testing import enumerate_steering

POPULATIONS = 4000


TWISTS = {"exact": {}, "random": {"estimator": ts.Sampled(), "draws": 2}, "max": {"potential": ts.potentials.maximum}}


PINNED = [
    ("mdm", ts.FromModel(), "exact", ts.triggers.always),
    ("mdm", ts.Gradient(), "exact", ts.triggers.ess_below(0.7)),
    ("remdm", ts.FromModel(), "exact", ts.triggers.ess_below(0.7)),
    ("remdm", ts.Gradient(), "exact", ts.triggers.always),
    ("lowconf", ts.Gradient(), "exact", ts.triggers.always),
    ("mdm", ts.FromModel(), "random", ts.triggers.always),
]
# A potential with a memory cannot change its past.
REMEMBERING = ("mdm", ts.FromModel(), "max", ts.triggers.every(2))


@pytest.mark.parametrize(
    ("sampler", "proposal", "twist", "when", "ancestor_sampling"),
    [*((*setting, sampled) for setting in PINNED for sampled in (False, True)), (*REMEMBERING, False)],
)
def test_exact_draws_stay_exact_draws(sampler, proposal, twist, when, ancestor_sampling: bool) -> None:
    toy = Toy("B")
    # A gentler tilt than the toy's, which leaves hardly anything but its best sequence.
    tilt = replace(toy.tilt(sampler), kl=2.0, **TWISTS[twist])
    steering = ts.Steering(toy.model(sampler), tilt, proposal)
    z, moved = one_sweep(steering, Pinned, when, POPULATIONS, ancestor_sampling=ancestor_sampling)
    assert z < 4.5
    assert moved > 0.2


@pytest.mark.fast
def test_a_new_past_has_its_law_at_every_time() -> None:
    """Under uniform noise any state can lead to any other, so that the pinned particle may take any past. A past
    that is drawn by weight without dividing its twist out is wrong at every time, most of all on the way."""
    toy = Toy("B")
    steering = ts.Steering(uniform.model(toy), uniform.known_tilt(toy, kl=1.0, ramp=ts.ramps.constant))
    generator, count = seeded(12), 4000
    paths = exact_paths(steering, count, generator)
    pinned = Pinned(steering, paths, ancestor_sampling=True)
    records = list(ts.sweep(pinned, 8, count, resample=pinned.resample, when=ts.triggers.always, generator=generator))
    after, exact = pick(records, generator), enumerate_steering(steering)
    law = (exact.log_law + exact.log_value).softmax(-1)  # of a path of the target, at each time
    for time in range(len(paths)):
        assert largest_z(paths[time], exact.states, law[time]) < 4.5
        assert largest_z(after[time], exact.states, law[time]) < 4.5, time
    assert (after[1] != paths[1]).any(-1).double().mean() > 0.5


@pytest.mark.slow
def test_from_a_poor_start_to_the_target() -> None:
    """Sweeps with few particles wash out the bias of picking from one small run."""
    toy = Toy("B")
    steering = ts.Steering(toy.model("mdm"), ts.Tilt(toy.reward, 1.0, draws=2))
    target = enumerate_steering(steering).target
    chain = ts.particle_gibbs(steering, 12, 4, 6000, generator=seeded(2))
    assert chain.samples.shape == (13, 6000, 3)
    assert largest_z(chain.samples[0], toy.clean, target) > 6  # one run of four particles is biased
    assert largest_z(chain.samples[-1], toy.clean, target) < 4.5
    assert chain.result.rows["denoiser"] + chain.result.saved["denoiser"] == 13 * 4 * 6000 * 4


class Comb(Pinned):
    """The bug that is refused: a systematic comb with the first child simply overwritten."""

    def resample(self, log_w, generator):
        ancestors, after = ts.resampling.systematic(log_w, generator)
        return torch.cat([torch.zeros_like(ancestors[:, :1]), ancestors[:, 1:]], 1), after


def test_a_pinned_comb_would_be_wrong() -> None:
    toy = Toy("B")
    steering = ts.Steering(toy.model("mdm"), replace(toy.tilt("mdm"), kl=2.0))
    assert one_sweep(steering, Comb, ts.triggers.always, 60_000)[0] > 4.5


CANNOT_BE_PINNED = {
    "noise": (ts.MaskGIT(2, temperature=1.0), "with a memory"),
    "blocks of it": (ts.Blocks(ts.MaskGIT(2, temperature=1.0), 1, 2, 2), "with a memory"),
    "carried": (ts.ConfidenceRemask(ts.Ancestral(2, sigma=ts.Cap(0.3))), "with a memory"),
    "clock": (ts.TimedFirstHitting(2), "with a memory"),
    "extended": (MaskGITExtended(ts.MaskGIT(2)), "did not draw: MaskGITExtended only weighs .* Use MaskGIT"),
    "blocks of that": (ts.Blocks(MaskGITExtended(ts.MaskGIT(2)), 1, 2, 2), "did not draw"),
}


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient()])
@pytest.mark.parametrize("name", CANNOT_BE_PINNED)
def test_what_cannot_be_pinned_is_refused_before_anything_runs(name: str, proposal: ts.Proposal) -> None:
    toy, (kernel, says) = Toy("A"), CANNOT_BE_PINNED[name]
    model = replace(toy.model("mdm"), kernel=kernel, steps=ts.uniform_steps(2))
    path = ts.Steering(model, toy.tilt("mdm", ramp=ts.ramps.linear), proposal)
    before = model.meter.rows
    with pytest.raises(ValueError, match=says):
        ts.particle_gibbs(path, 1, 100, generator=seeded())
    assert model.meter.rows - before == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resample": ts.resampling.systematic}, "iid multinomial"),
        ({"num_particles": 1}, "num_particles must be at least 2, got 1: one of them is pinned"),
        ({"sweeps": 0}, "sweeps must be at least 1"),
    ],
)
def test_refused_with_the_reason(options: dict, says: str) -> None:
    toy = Toy("A")
    with pytest.raises(ValueError, match=says):
        ts.particle_gibbs(
            ts.Steering(toy.model("mdm"), toy.tilt("mdm")), **{"sweeps": 1, "num_particles": 4, **options}
        )
