"""Stored states: what they hold, that storing them changes nothing, and that they come back from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrow import some
from safetensors.torch import load_file, save_file
from toys import Toy, seeded

import tokensteer as ts

TOY = Toy("C")
PROMPT = ts.template(TOY.length, TOY.mask_id, [2], at=[1])


def steering(sampler: str = "mdm") -> ts.Steering:
    model = replace(TOY.model(sampler), template=PROMPT)
    return ts.Steering(model, ts.Tilt(TOY.reward, TOY.kl))


def run(keep_states: bool | int, sampler: str = "mdm", populations: int = 3) -> ts.Result:
    when = ts.triggers.always
    return ts.smc(steering(sampler), 8, populations, when=when, generator=seeded(), keep_states=keep_states)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """The same values and types; NaN is the same as NaN."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def parents_of(result: ts.Result) -> torch.Tensor:
    """The states before each step of the parents of all particles, (T, K, N, L)."""
    states = some(result.states)
    index = result.ancestors[1:, : states.shape[1]].unsqueeze(-1).expand_as(states[1:])
    return states[:-1].gather(2, index)


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_states_are_those_of_the_records(sampler: str) -> None:
    seen: list[ts.Record] = []
    result = ts.smc(steering(sampler), 8, 3, generator=seeded(), on_step=seen.append, keep_states=True)
    assert torch.equal(some(result.states).long(), torch.stack([record.x for record in seen]))
    assert torch.equal(some(result.states_log_w), torch.stack([record.log_w for record in seen]))
    assert torch.equal(some(result.states)[-1].long(), result.samples)
    assert torch.equal(some(result.states_log_w)[-1], result.log_w)
    assert some(result.states).dtype == torch.uint8


@pytest.mark.parametrize("keep_states", [True, 2])
def test_storing_states_changes_nothing(keep_states: bool | int) -> None:
    without, with_states = run(False), run(keep_states)
    assert without.states is None
    assert without.states_log_w is None
    for name, value in vars(without).items():
        if isinstance(value, torch.Tensor):
            assert_same(value, getattr(with_states, name))
    assert torch.equal(without.sample(5), with_states.sample(5))
    assert (without.rows, without.saved) == (with_states.rows, with_states.saved)


def test_all_sites_open_and_the_prompt_stays() -> None:
    states = some(run(True).states)
    masked = states == TOY.mask_id
    assert torch.equal(masked[0, 0, 0], PROMPT == TOY.mask_id)
    assert not masked[-1].any()
    assert (states[..., 1] == 2).all()


def test_open_sites_agree_with_those_of_the_parent() -> None:
    result = run(True)
    before, after = parents_of(result), some(result.states)[1:]
    assert (before != some(result.states)[:-1]).any(), "resampling must have moved particles for this to mean anything"
    assert ((before == after) | (before == TOY.mask_id)).all()
    remasked = run(True, "remdm")
    before, after = parents_of(remasked), some(remasked.states)[1:]
    assert ((before != TOY.mask_id) & (after == TOY.mask_id)).any()


def test_a_number_keeps_the_first_populations() -> None:
    whole, part = run(True), run(2)
    assert torch.equal(some(part.states), some(whole.states)[:, :2])
    assert torch.equal(some(part.states_log_w), some(whole.states_log_w)[:, :2])
    assert some(run(99).states).shape[1] == 3
    assert run(0).states is None


@pytest.mark.parametrize("keep_states", [-1, 1.5, "two"])
def test_a_number_of_populations_is_whole(keep_states: int) -> None:
    with pytest.raises(ValueError, match="keep_states must be"):
        run(keep_states)


def test_methods_and_particle_gibbs_keep_states() -> None:
    method = ts.smc_base(steering().model.base, ts.Tilt(TOY.reward, TOY.kl))
    assert some(method(4, 2, generator=seeded(), keep_states=1).states).shape[1:] == (1, 4, TOY.length)
    chain = ts.particle_gibbs(steering(), 2, 4, 2, generator=seeded(), keep_states=True)
    assert torch.equal(some(chain.result.states)[-1].long(), chain.result.samples)


@pytest.mark.parametrize(
    ("top", "kind"), [(255, torch.uint8), (256, torch.int16), (32767, torch.int16), (32768, torch.int32)]
)
def test_states_take_the_smallest_type(top: int, kind: torch.dtype) -> None:
    from tokensteer.core.particles.result import narrowed

    tokens = torch.tensor([[0, top]])
    assert narrowed(tokens).dtype == kind
    assert torch.equal(narrowed(tokens).long(), tokens)


# ---- files


@pytest.mark.parametrize("keep_states", [False, True, 2])
def test_results_come_back_with_and_without_states(keep_states: bool | int, tmp_path: Path) -> None:
    file, result = tmp_path / "result.safetensors", run(keep_states)
    result.save(file)
    back = ts.Result.load(file)
    for name, value in vars(result).items():
        if isinstance(value, torch.Tensor):
            assert_same(value, getattr(back, name))
    assert (back.states is None) == (not keep_states)


def test_files_from_before_there_were_states_open(tmp_path: Path) -> None:
    file, result = tmp_path / "result.safetensors", run(True)
    result.save(file)
    old = {name: value for name, value in load_file(str(file)).items() if not name.startswith("states")}
    save_file(old, str(file))
    back = ts.Result.load(file)
    assert torch.equal(back.samples, result.samples)
    assert back.states is None
    assert back.states_log_w is None


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda t: t.pop("states_log_w"), "only one of"),
        (lambda t: t.pop("states"), "only one of"),
        (lambda t: t.update(states=t["states"][:, :, :-1].contiguous()), "shape"),
        (lambda t: t.update(states=t["states"].repeat(1, 2, 1, 1)), "shape"),
        (lambda t: t.update(states_log_w=t["states_log_w"][1:].contiguous()), "shape"),
        (lambda t: t.update(states=t["states"].float()), "type"),
        (lambda t: t.update(states=-t["states"].short()), "do not end in its samples"),
        (lambda t: t.update(states=t["states"].flip(0).contiguous()), "do not end in its samples"),
    ],
)
def test_damaged_states_are_refused(harm, says: str, tmp_path: Path) -> None:
    file = tmp_path / "result.safetensors"
    run(True).save(file)
    tensors = load_file(str(file))
    harm(tensors)
    save_file(tensors, str(file))
    with pytest.raises(ValueError, match=f"damaged Result.*{says}"):
        ts.Result.load(file)
