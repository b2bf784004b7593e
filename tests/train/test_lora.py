"""Proposals that share the model's weights: adapters on its layers, and a new head on its hidden states."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checks import answer, trial
from narrow import some, untyped
from torch import Tensor, nn
from toys import Toy

import tokensteer as ts
from tokensteer import tensorfile as stored
from tokensteer.tasks.nets import Transformer, TransformerConfig, UNet, UNetConfig
from tokensteer.testing import enumerate_steering
from tokensteer.train import (
    DrakesPlan,
    NewHead,
    Plan,
    ProposalPlan,
    fit,
    fit_drakes,
    fit_proposal,
    load_adapter,
    lora,
    save_adapter,
)
from tokensteer.train.optim import Optimiser

torch.set_num_threads(1)

B = Toy("B")
VOCAB = B.tokens + 1


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0) -> Transformer:
    """A small transformer of no particular law: every weight is drawn."""
    torch.manual_seed(seed)
    net = Transformer(TransformerConfig(VOCAB, B.length, width=16, depth=1, heads=2))
    generator = seeded(seed)
    with torch.no_grad():
        for value in net.parameters():
            value.add_(0.3 * torch.randn(value.shape, generator=generator))
    return net.eval().requires_grad_(False)


def logits_of(net: nn.Module) -> ts.Denoiser:
    return ts.from_logits(net, B.mask_id, ignores_time=True)


def model_of(denoiser: ts.Denoiser, sampler: str = "mdm") -> ts.Diffusion:
    return replace(B.model(sampler), denoiser=denoiser)


TILT = ts.Tilt(B.reward, 1.0, estimator=ts.Exact())


def bytes_of(*nets: nn.Module) -> int:
    """The memory of all parameters, each counted once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for net in nets for p in net.parameters()}
    return sum(storages.values())


def perturbed(net: nn.Module, size: float = 0.05) -> None:
    """Something else than p, for tests that learn nothing; not so much else that a few weights decide everything."""
    with torch.no_grad():
        for value in net.parameters():
            if value.requires_grad:
                value.add_(size * torch.randn(value.shape, generator=seeded(5)))
    net.requires_grad_(False)


# ---- adapters


def adapted(*args, **options) -> nn.Module:
    pytest.importorskip("peft", reason="adapters need peft")
    return lora(*args, **{"generator": seeded(), **options})


def fitted(net: nn.Module, base: nn.Module, checkpoint=None, rounds: int = 6, watch=None, **options):
    torch.manual_seed(3)
    steering = ts.Steering(model_of(logits_of(base)), TILT)
    settings = {"paths": 16, "rate": 0.05, "save_every": 1, "report_every": 2} | options
    return fit_proposal(
        steering,
        net,
        logits_of,
        plan=ProposalPlan(rounds, **settings),
        generator=seeded(1),
        checkpoint=checkpoint,
        watch=watch,
    )


def test_an_adapter_never_reaches_the_model() -> None:
    net = network()
    clean = {name: value.clone() for name, value in net.state_dict().items()}
    before = net(B.states)
    q = adapted(net, 2)
    assert torch.equal(q(B.states), before)  # it begins as p
    learned = fitted(q, net, rounds=12, rate=0.02, average=0.5)
    assert torch.equal(net(B.states), before)
    assert clean.keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in clean.items())
    assert (learned.net(B.states) - before).abs().max() > 0.1
    assert learned.history[-1].loss < learned.history[0].loss


@pytest.mark.parametrize("sampler", ["mdm", "lowconf"])
def test_sampling_with_an_adapter_is_unbiased(sampler: str) -> None:
    net = network()
    q = adapted(net, 2)
    perturbed(q)
    steering = ts.Steering(model_of(logits_of(net), sampler), TILT, ts.Amortised(logits_of(q)))
    outcome = trial(steering, answer(steering.model, steering.twist))
    assert outcome.unbiased, str(outcome)


def test_there_is_one_copy_of_the_base(tmp_path) -> None:
    net = network()
    alone = bytes_of(net)
    q = adapted(net, 1, ["head"])
    added = bytes_of(net, q) - alone
    assert added == 4 * (net.config.width + VOCAB)
    learning = Optimiser(q, Plan(1, weight_decay=0.0, average=0.9), {}, seeded())
    assert bytes_of(net, q, learning.average) - alone == 2 * added
    learning.save(tmp_path / "c.safetensors", 0, 0.0)
    tensors, _ = stored.read(tmp_path / "c.safetensors")
    weights = [value for name, value in tensors.items() if name.startswith(("net.", "average.module"))]
    assert sum(4 * value.numel() for value in weights) == 2 * added
    learned = fitted(q, net, rounds=2)
    assert bytes_of(net, q, learned.net) - alone == 2 * added


def test_adapters_as_files(tmp_path) -> None:
    net, file = network(), tmp_path / "adapter.safetensors"
    q = adapted(net, 3, scale=0.5)
    perturbed(q)
    save_adapter(q, file)
    assert all("lora_" in name for name in stored.read(file)[0])
    again = load_adapter(net, file)
    assert torch.equal(again(B.states), q(B.states))
    assert bytes_of(net, again) == bytes_of(net, q)
    with pytest.raises(ValueError, match="another network"):
        load_adapter(network(1), file)
    with pytest.raises(ValueError, match="no adapter"):
        save_adapter(net, file)
    stored.write(tmp_path / "other.safetensors", {"a": torch.zeros(1)}, {"version": 1})
    with pytest.raises(ValueError, match="holds no adapter"):
        load_adapter(net, tmp_path / "other.safetensors")


def test_killed_and_resumed_with_an_adapter(tmp_path) -> None:
    file = tmp_path / "half.safetensors"
    whole = fitted(adapted(network(), 2), network())

    class KilledError(Exception):
        pass

    def dies(progress) -> None:
        if progress.step == 4:
            raise KilledError

    with pytest.raises(KilledError):
        fitted(adapted(network(), 2), network(), file, watch=dies)
    resumed = fitted(adapted(network(), 2), network(), file)
    assert all(torch.equal(a, b) for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True))
    with pytest.raises(ValueError, match="other frozen weights"):
        fitted(adapted(network(1), 2), network(1), file)


def test_which_layers_are_adapted() -> None:
    def names(net: nn.Module) -> set[str]:
        return {name.partition(".lora_A")[0] for name, _ in net.named_parameters() if ".lora_A" in name}

    net = network()
    every = {"blocks.0.qkv", "blocks.0.out", "blocks.0.up", "blocks.0.down", "head"}
    assert names(adapted(net)) == every
    assert names(adapted(net, targets=["qkv", "head"])) == {"blocks.0.qkv", "head"}
    image = UNet(UNetConfig(3, 8, 8, (8, 16), blocks=1)).eval()
    x = torch.randint(0, 3, (2, 64), generator=seeded())
    q = adapted(image, 2)
    assert any(isinstance(layer, nn.Conv2d) for name, layer in image.named_modules() if name in names(q))
    assert torch.equal(q(x), image(x))
    perturbed(q)
    assert not torch.equal(q(x), image(x))
    # Layers whose weights are read by their parent would never hear of an adapter.
    foreign = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 4))
    assert names(adapted(foreign)) == {"1"}
    with pytest.raises(ValueError, match="no layer called"):
        adapted(foreign, targets=["linear1"])
    with pytest.raises(ValueError, match="no linear layer"):
        adapted(nn.Sequential(nn.LayerNorm(3)))
    with pytest.raises(ValueError, match="rank"):
        lora(net, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_precision(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to(dtype)
    q = adapted(net, 2)
    x = torch.ones(2, 4, dtype=dtype)
    assert q(x).dtype == dtype
    assert torch.equal(q(x), net(x))
    assert {p.dtype for p in q.parameters() if p.requires_grad} == {torch.promote_types(dtype, torch.float32)}


def test_without_peft_the_mend_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'tokensteer\[hf\]'"):
        lora(network())


def test_an_adapted_head_is_called_and_not_read() -> None:
    """The weight of an adapted layer is that of the base: who reads it samples from another law than was learned."""
    net = network()
    q = untyped(adapted(net, 2, ["head"]))
    with pytest.raises(ValueError, match="from_logits"):
        ts.Amortised(ts.from_hidden(q.hidden, q.head, B.mask_id, ignores_time=True))
    with pytest.raises(ValueError, match="from_logits"):
        ts.OtherHead(q.head)
    trunk = untyped(adapted(net, 2, ["qkv"]))
    perturbed(trunk)
    steering = ts.Steering(model_of(logits_of(net)), TILT)
    laws = [
        enumerate_steering(replace(steering, proposal=ts.Amortised(denoiser)))
        for denoiser in (logits_of(trunk), ts.from_hidden(trunk.hidden, trunk.head, B.mask_id, ignores_time=True))
    ]
    for a, b in zip(laws[0].moves, laws[1].moves, strict=True):
        torch.testing.assert_close(a.log_q, b.log_q)


def test_an_adapter_is_tuned_through_the_sampler() -> None:
    net = network()
    before = net(B.states)
    model, worth = model_of(logits_of(net)), torch.tensor([0.0, 1.0, 0.5, 0.0])
    learned = fit_drakes(
        model, lambda x: (x.float() * worth).sum((-2, -1)), adapted(net, 2), logits_of,
        plan=DrakesPlan(20, rate=0.02, kl=0.1, average=0.5), generator=seeded(),
    )  # fmt: skip
    assert torch.equal(net(B.states), before)
    assert learned.history[-1].reward > learned.history[0].reward
    assert untyped(learned.net).tokens.weight is net.tokens.weight


def test_tied_weights_are_written_once(tmp_path) -> None:
    """A network whose head is its embedding can be trained, killed and resumed."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    def loss(net: nn.Module, ids: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        return net(ids).square().mean()

    nets = []
    for file in (None, tmp_path / "c.safetensors"):
        torch.manual_seed(0)
        plan = Plan(4, 2, save_every=1)
        nets.append(fit(Tied(), loss, B.clean, plan=plan, generator=seeded(), checkpoint=file).net)
    torch.manual_seed(1)
    nets.append(fit(Tied(), loss, B.clean, plan=plan, generator=seeded(), checkpoint=file).net)
    assert torch.equal(nets[0].table.weight, nets[1].table.weight)
    assert torch.equal(nets[0].table.weight, nets[2].table.weight)
    assert nets[2].head.weight is nets[2].table.weight


# ---- heads


class Counted(nn.Module):
    """The trunk of a transformer, and how many rows it was asked about."""

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        self.net, self.rows = net, 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return self.net.hidden(x)


def headed(net: Transformer, trunk: nn.Module | None = None):
    return ts.from_hidden(net.hidden if trunk is None else trunk, net.head, B.mask_id, ignores_time=True)


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
@pytest.mark.parametrize("width", [0, 8])
def test_a_head_on_kept_states_is_the_denoiser_that_was_trained(sampler: str, width: int) -> None:
    net = network()
    p = headed(net)
    head = NewHead(net.head, width)
    tilt = TILT
    fresh = enumerate_steering(ts.Steering(model_of(p, sampler), tilt, head.proposal()))
    for moves in fresh.moves:
        torch.testing.assert_close(moves.log_q, moves.log_p)  # it begins as p
    perturbed(head)
    one_pass = enumerate_steering(ts.Steering(model_of(p, sampler), tilt, head.proposal()))
    two_passes = enumerate_steering(ts.Steering(model_of(p, sampler), tilt, ts.Amortised(head.on(p))))
    for a, b in zip(one_pass.moves, two_passes.moves, strict=True):
        torch.testing.assert_close(a.log_q, b.log_q)
        torch.testing.assert_close(a.log_p, b.log_p)
    assert max(float((m.log_p - m.log_q).abs().max()) for m in one_pass.moves) > 0.1


def test_one_pass_of_the_trunk_for_p_and_q() -> None:
    net = network()
    head = NewHead(net.head, 8)
    perturbed(head)
    asked, results = [], []
    for q in ("base", "head", "amortised"):
        trunk = Counted(net)
        p = headed(net, trunk)
        proposal = {"base": ts.FromModel(), "head": head.proposal(), "amortised": ts.Amortised(head.on(p))}[q]
        steering = ts.Steering(model_of(p), TILT, proposal)
        trunk.rows = 0
        results.append(ts.smc(steering, 16, 8, generator=seeded()))
        asked.append((trunk.rows, results[-1].rows["denoiser"], results[-1].rows.get("proposal", 0)))
    (_, base, _), (once, rows, of_head), (twice, _, of_amortised) = asked
    assert base == asked[0][0]
    assert once == rows
    assert of_head == 0
    assert of_amortised > 0
    assert twice == asked[2][1] + of_amortised
    # The same law and the same seed: the same samples but for rounding, whichever way it was computed.
    assert (results[1].samples == results[2].samples).double().mean() > 0.99


def on(p: ts.Denoiser) -> Callable[[nn.Module], ts.Denoiser]:
    return lambda head: untyped(head).on(p)


@pytest.mark.parametrize("sampler", ["mdm", "lowconf"])
def test_sampling_with_another_head_is_unbiased(sampler: str) -> None:
    net = network()
    head = NewHead(net.head, 8)
    perturbed(head)
    steering = ts.Steering(model_of(headed(net), sampler), TILT, head.proposal())
    outcome = trial(steering, answer(steering.model, steering.twist))
    assert outcome.unbiased, str(outcome)


def test_a_head_learns_and_the_trunk_does_not() -> None:
    torch.manual_seed(0)
    net = network()
    for value in net.parameters():
        value.requires_grad_(True)  # even a trunk that could learn
    before = {name: value.clone() for name, value in net.state_dict().items()}
    p, tilt = headed(net), TILT
    steering = ts.Steering(model_of(p), tilt)
    plan = ProposalPlan(25, paths=64, rate=0.1, average=0.8)
    learned = fit_proposal(steering, NewHead(net.head, 16), on(p), plan=plan, generator=seeded(1))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(value.grad is None for value in net.parameters())

    def last_ess(proposal: ts.Proposal) -> float:
        result = ts.smc(ts.Steering(model_of(p), tilt, proposal), 64, 50, when=ts.triggers.never, generator=seeded(2))
        return float(result.ess[-1].mean())

    assert last_ess(untyped(learned.net).proposal()) > 1.1 * last_ess(ts.FromModel())


def test_a_head_with_words_that_are_never_said_can_learn() -> None:
    net = network()
    never = next(word for word in range(net.head.out_features) if word != B.mask_id)
    net.head.bias.data[never] = -torch.inf
    p, plan = headed(net), ProposalPlan(5, paths=16, rate=0.05, average=0.9)
    steering = ts.Steering(model_of(p), TILT)
    learned = fit_proposal(steering, NewHead(net.head, 8), on(p), plan=plan, generator=seeded(1))
    head = untyped(learned.net)
    assert not torch.equal(head.last.weight, net.head.weight)
    assert torch.equal(head.last.bias, net.head.bias)
    result = ts.smc(replace(steering, proposal=head.proposal()), 64, generator=seeded())
    assert result.log_z.isfinite().all()
    assert not (result.samples == never).any()


def test_a_frozen_head_is_the_models_own() -> None:
    net = network()
    p, plan = headed(net), ProposalPlan(5, paths=16, rate=0.05, average=0.9)
    steering = ts.Steering(model_of(p), TILT)
    head = NewHead(net.head, 4, frozen=True)
    learned = untyped(fit_proposal(steering, head, on(p), plan=plan, generator=seeded(1)).net)
    assert torch.equal(learned.last.weight, net.head.weight)
    assert learned.change.up.weight.abs().max() > 0
    assert {name.split(".")[0] for name, value in head.named_parameters() if value.requires_grad} == {"change"}
    with pytest.raises(ValueError, match="learns nothing: give a width"):
        NewHead(net.head, frozen=True)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_heads_and_adapters_on_every_device(device: str) -> None:
    net, here = network().to(device), torch.Generator(device).manual_seed(0)
    p, plan = headed(net), ProposalPlan(2, paths=8)

    def reward(x: Tensor) -> Tensor:
        return B.reward(x.cpu()).to(x.device)

    template = ts.template(B.length, B.mask_id).to(device)
    model = replace(B.model("mdm"), denoiser=p, template=template)  # both at once: one alone is elsewhere
    steering = ts.Steering(model, ts.Tilt(reward, 1.0))
    learned = fit_proposal(steering, NewHead(net.head, 8), on(p), plan=plan, generator=here)
    result = ts.smc(replace(steering, proposal=untyped(learned.net).proposal()), 8, generator=here)
    assert result.log_z.isfinite().all()
    q = adapted(net, 2, generator=here)
    result = ts.smc_amot(model, some(steering.twist), fit_proposal(
        steering, q, logits_of, plan=plan, generator=here
    ).denoiser)(8, generator=here)  # fmt: skip
    assert result.log_z.isfinite().all()


def test_exact_answers_of_a_network_that_could_learn() -> None:
    net = network().requires_grad_(True)
    exact = enumerate_steering(ts.Steering(model_of(headed(net)), TILT, NewHead(net.head).proposal()))
    assert not exact.target.requires_grad
    assert float(exact.target.sum()) == pytest.approx(1, abs=1e-5)


def test_what_another_head_cannot_do() -> None:
    net = network()
    tilt = TILT
    with pytest.raises(ValueError, match="from_hidden"):
        ts.Steering(model_of(logits_of(net)), tilt, ts.OtherHead(net.head))
    with pytest.raises(ValueError, match="7 tokens"):
        ts.Steering(model_of(headed(net)), tilt, ts.OtherHead(nn.Linear(16, 7)))
