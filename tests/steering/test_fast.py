"""The fast paths: the same law, and fewer rows."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from checks import Largest, answer, trial
from extended import MaskGITExtended
from narrow import some, untyped
from small_nets import KERNELS, Entered, Logit, Valued
from torch import Tensor, nn
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.core.categorical.forms import HiddenLogits
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.batching import Chunks, parse_memory
from tokensteer.testing import TableDenoiser, enumerate_steering, score

B = Toy("B")


class Net(nn.Module):
    """A small random network in double precision: a state per site from all tokens and their places, and a head."""

    def __init__(self, vocab: int = 4, length: int = 3, width: int = 5) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mix = nn.Linear(vocab * length, width * length, dtype=torch.float64)
            self.head = nn.Linear(width, vocab, dtype=torch.float64)
        self.vocab, self.rows, self.calls = vocab, 0, 0

    def hidden(self, x: Tensor) -> Tensor:
        self.rows, self.calls = self.rows + len(x), self.calls + 1
        hot = x if x.is_floating_point() else nn.functional.one_hot(x, self.vocab).double()
        return self.mix(hot.flatten(1)).view(*hot.shape[:2], -1).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def forms() -> dict[str, tuple[Net, ts.Denoiser]]:
    """The same denoiser in every form there is, each with its own counter."""
    nets = {name: Net().requires_grad_(False) for name in ("plain", "timed", "logits", "hidden")}
    logits = {name: ts.from_logits(nets[name], 3, ignores_time=True) for name in nets}
    return {
        "plain": (nets["plain"], lambda x, t: logits["plain"](x, t)),
        "timed": (nets["timed"], ts.from_logits(lambda x, t: nets["timed"](x), 3)),
        "logits": (nets["logits"], logits["logits"]),
        "hidden": (nets["hidden"], ts.from_hidden(nets["hidden"].hidden, nets["hidden"].head, 3, ignores_time=True)),
    }


def model_of(denoiser: ts.Denoiser, kernel: str = "mdm", sharing: bool = True, num_steps: int = 6) -> ts.Diffusion:
    grid = ts.uniform_steps(3 if kernel == "jumps" else num_steps)
    return ts.Diffusion(denoiser, KERNELS[kernel], grid, ts.template(3, 3), sharing)


def same(left: ts.Result, right: ts.Result) -> None:
    assert torch.equal(left.samples, right.samples)
    assert torch.allclose(left.log_w, right.log_w, atol=1e-12)
    assert torch.equal(left.ancestors, right.ancestors)


# ---- distinct rows


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "lowconf"])
@pytest.mark.parametrize("name", ["timed", "logits", "hidden"])
def test_every_form_makes_the_same_run(name: str, kernel: str) -> None:
    """Number for number: an estimate that draws nothing leaves the random numbers of the moves alone."""
    tilt = ts.Tilt(B.reward, B.kl, estimator=ts.Exact())
    results = []
    for form, sharing in itertools.product(("plain", name), (True, False)):
        model = model_of(forms()[form][1], kernel, sharing)
        results.append(ts.smc(ts.Steering(model, tilt), 16, 20, generator=seeded(1)))
    for result in results[1:]:
        same(results[0], result)


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient(clip=2.0)])
def test_rows_are_computed_once(proposal: ts.Proposal) -> None:
    """What is asked of the network is counted by hand from the records: new states, and none with nothing new."""
    net, denoiser = forms()["logits"]
    steering = ts.Steering(model_of(denoiser), ts.Tilt(B.reward, B.kl, draws=2), proposal)
    net.rows = net.calls = 0
    records = list(ts.sweep(steering, 8, 3, generator=seeded()))
    expected, before = 0, None
    for record in records[:-1]:
        x = record.x.flatten(0, 1)
        parents = None
        if before is not None:
            first = 8 * torch.arange(3).unsqueeze(-1)
            parents = before[(record.ancestors + first).flatten()]
        fresh = x if parents is None else x[(x != parents).any(-1)]
        expected += len(fresh) if proposal.needs_gradient else len({tuple(row.tolist()) for row in fresh})
        before = x
    assert net.rows == expected
    assert expected < 8 * 3 * 6
    assert net.calls <= 6


@pytest.mark.parametrize("estimator", [ts.Sampled(), ts.Sampled(seed=1)], ids=["fresh", "shared"])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_are_taken_once(every: int, estimator: ts.core.twists.tilt.Estimator) -> None:
    """Counted by hand: the pass back is for particles that have moved since theirs, and, if nothing about it is random,
    for one of each kind; in between, the pass forward is for new states."""
    net, denoiser = forms()["logits"]
    steering = ts.Steering(
        model_of(denoiser, num_steps=12),
        ts.Tilt(B.reward, B.kl, estimator=estimator),
        ts.Gradient(clip=2.0, every=every),
    )
    net.rows = 0
    records = list(ts.sweep(steering, 8, 3, generator=seeded()))
    expected, first = 0, 8 * torch.arange(3).unsqueeze(-1)
    before = followed = torch.full((24, 3), -1)  # the state of the parent, and that of its last gradient
    for step, record in enumerate(records[:-1]):
        x, parents = record.x.flatten(0, 1), (record.ancestors + first).flatten()
        before, followed = before[parents], followed[parents]
        new = (x != before).any(-1)
        if step % every == 0:
            new |= (x != followed).any(-1)
            followed = x
        shares = step % every != 0 or not estimator.random
        expected += len({tuple(row.tolist()) for row in x[new]}) if shares else int(new.sum())
        before = x
    assert net.rows == expected
    assert expected < 8 * 3 * 12


def test_estimates_that_still_hold_are_counted_as_saved() -> None:
    model = model_of(forms()["logits"][1])
    result = ts.smc(
        ts.Steering(model, ts.Tilt(B.reward, B.kl, draws=2)), 16, 4, when=ts.triggers.observe, generator=seeded()
    )
    assert result.saved["reward"] > 0
    # Nothing counts at the start of a linear ramp, and the end is judged without draws.
    assert result.rows["reward"] + result.saved["reward"] == 16 * 4 * (5 * 2 + 1)


def test_result_counts_rows_computed_and_saved(tmp_path: Any) -> None:
    net, denoiser = forms()["hidden"]
    steering = ts.Steering(model_of(denoiser), ts.Tilt(B.reward, B.kl))
    net.rows = 0
    result = ts.smc(steering, 16, 4, generator=seeded())
    assert result.rows["denoiser"] == net.rows
    assert result.rows["denoiser"] + result.saved["denoiser"] == 16 * 4 * 6
    assert f"({result.saved['denoiser']:,} saved)" in repr(result)
    result.save(tmp_path / "result.safetensors")
    assert ts.Result.load(tmp_path / "result.safetensors").saved == result.saved


def test_taking_particles_copies_no_laws() -> None:
    steering = ts.Steering(model_of(forms()["logits"][1]), ts.Tilt(B.reward, differentiable=False), ts.Gradient())
    evaluation = steering.evaluate(steering.start(8, None), 1.0, seeded())
    taken = evaluation.take(torch.tensor([1, 1, 0]))
    for ours, theirs in ((taken.prediction, evaluation.prediction), (taken.gradient, evaluation.gradient)):
        assert isinstance(ours, Prediction)
        assert isinstance(theirs, Prediction)
        assert ours.stores[0] is theirs.stores[0]


@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf", "entropy"])
@pytest.mark.parametrize(
    "proposal", [ts.FromModel(), ts.Gradient(clip=2.0), B.amortised()], ids=["base", "gradient", "amortised"]
)
@pytest.mark.slow
def test_unbiased_through_every_form(kernel: str, proposal: ts.Proposal) -> None:
    """Kept estimates, shared rows and joined stores: log Z and the whole vector Z·pi against enumeration."""
    name = "logits" if (kernel in ("mdm", "lowconf")) == proposal.needs_gradient else "hidden"  # each with both
    model = model_of(forms()[name][1], kernel)
    truth = answer(model, ts.Tilt(B.reward, 1.0))
    populations = 4096 if proposal.needs_gradient else 2048  # its tails are heavier
    outcome = trial(ts.Steering(model, ts.Tilt(B.reward, 1.0, draws=2), proposal), truth, 8, populations)
    assert outcome.unbiased, str(outcome)


def test_products_share_rows_too() -> None:
    nets = [forms()["hidden"] for _ in range(2)]
    models = [model_of(denoiser, "remdm") for _, denoiser in nets]
    tilt = ts.Tilt(B.reward, 1.0, estimator=ts.Exact())
    path = ts.Steering(ts.Product(models, (1.3, 0.4)), tilt, ts.Guided())
    for net, _ in nets:
        net.rows = 0
    result = ts.smc(path, 16, 4, generator=seeded())
    assert result.rows["denoiser"] == sum(net.rows for net, _ in nets)
    assert result.saved["denoiser"] > 0
    plain = [model_of(forms()["plain"][1], "remdm", sharing=False) for _ in range(2)]
    same(result, ts.smc(replace(path, model=ts.Product(plain, (1.3, 0.4))), 16, 4, generator=seeded()))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("first", "second"), [("logits", "logits"), ("logits", "hidden"), ("hidden", "hidden")])
def test_products_with_gradients_keep_what_each_model_said(first: str, second: str, every: int) -> None:
    """The first network is differentiated with one-hots, the others are asked as always."""
    tilt = ts.Tilt(B.reward, 1.0, estimator=ts.Exact())

    def run(*kinds: str, **options: bool) -> ts.Result:
        product = ts.Product([model_of(forms()[kind][1], "mdm", **options) for kind in kinds], (1.3, 0.4))
        steering = ts.Steering(product, tilt, ts.Gradient(ts.Guided(), every=every))
        return ts.smc(steering, 16, 4, generator=seeded())

    same(run(first, second), run("plain", "plain", sharing=False))


def test_rows_asked_for_are_computed_or_saved() -> None:
    steering = ts.Steering(model_of(forms()["logits"][1]), ts.Tilt(B.reward, 1.0, estimator=ts.Exact()), ts.Gradient())
    steering = replace(steering, model=replace(untyped(steering.model), steps=ts.uniform_steps(30)))
    result = ts.smc(steering, 2, generator=seeded())
    assert result.rows["denoiser"] + result.saved["denoiser"] == 2 * 30


# ---- lazy twists


def test_rewards_only_where_weights_are_looked_at() -> None:
    steering = ts.Steering(model_of(forms()["logits"][1]), ts.Tilt(B.reward, 1.0, draws=3))
    looks_twice = ts.smc(
        steering, 8, 2, when=ts.triggers.all_of(ts.triggers.every(2), ts.triggers.ess_below(0.5)), generator=seeded()
    )
    assert looks_twice.rows["reward"] == 8 * 2 * (2 * 3 + 1)  # before steps 2 and 4, and the end
    assert ts.smc(steering, 8, 2, when=ts.triggers.never, generator=seeded()).rows["reward"] == 8 * 2
    watched = ts.smc(steering, 8, 2, when=ts.triggers.observe, generator=seeded())
    assert not some(watched.mean_reward)[1:].isnan().any()
    assert (watched.ancestors == torch.arange(8)).all()


class Eager(ts.Steering):
    """Estimates at every step, whoever looks."""

    def evaluate(self, x: Tensor, t: float, generator: Any, parent: Any = None, weighed: bool = True) -> ts.Evaluation:
        return super().evaluate(x, t, generator, parent)


@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf"])
def test_lazy_twists_change_no_weight(kernel: str) -> None:
    parts = model_of(forms()["logits"][1], kernel), ts.Tilt(B.reward, B.kl, estimator=ts.Exact())
    when = ts.triggers.all_of(ts.triggers.every(2), ts.triggers.ess_below(0.9))
    eager = ts.smc(Eager(*parts), 16, 30, when=when, generator=seeded(2))
    result = ts.smc(ts.Steering(*parts), 16, 30, when=when, generator=seeded(2))
    assert torch.allclose(result.log_w, eager.log_w, atol=1e-9)
    assert torch.equal(result.samples, eager.samples)
    assert torch.allclose(result.ess[2::2], eager.ess[2::2])


@pytest.mark.parametrize("potential", [ts.potentials.difference, ts.potentials.maximum, ts.potentials.total])
@pytest.mark.parametrize("ramp", [ts.ramps.linear, ts.ramps.end, ts.Adaptive(0.8)], ids=["linear", "end", "adaptive"])
@pytest.mark.slow
def test_lazy_twists_are_unbiased(potential: Any, ramp: Any) -> None:
    model = model_of(forms()["hidden"][1])
    tilt = ts.Tilt(B.reward, 2.0, draws=2, potential=potential, ramp=ramp)
    populations = 4096 if potential is ts.potentials.total else 2048  # a sum of many rewards is steep
    truth = answer(model, ts.Tilt(B.reward, 2.0))
    outcome = trial(ts.Steering(model, tilt), truth, 8, populations, when=ts.triggers.every(3))
    assert outcome.unbiased, str(outcome)


# ---- memory


TOO_MUCH = torch.OutOfMemoryError("too much")
ELSEWHERE = RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")
TAKEN = RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
TRITON = RuntimeError("Triton Error [CUDA]: out of memory")


def the_real_one() -> Exception:
    """What torch says here when it is asked for more memory than there is."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    return caught.value


@dataclass
class Small:
    """A network that runs out of memory when it is given more than `most` rows."""

    net: Net
    most: int
    error: Exception = TOO_MUCH
    sizes: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise self.error
        return self.net(x)


@pytest.mark.parametrize(
    "error",
    [TOO_MUCH, ELSEWHERE, TAKEN, CUBLAS, TRITON, the_real_one(), MemoryError()],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient()])
def test_running_out_of_memory_halves_the_chunk(proposal: ts.Proposal, error: Exception) -> None:
    tilt = ts.Tilt(B.reward, B.kl, estimator=ts.Exact())
    small = Small(Net().requires_grad_(False), 5, error)
    model = model_of(ts.from_logits(small, 3, ignores_time=True))
    with pytest.warns(UserWarning, match="out of memory with .* rows at once: going on with fewer") as seen:
        result = ts.smc(ts.Steering(model, tilt, proposal), 16, 4, generator=seeded())
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was learned is kept
        small.sizes.clear()
        ts.smc(ts.Steering(model, tilt, proposal), 16, 4, generator=seeded())
    assert max(small.sizes) <= 5
    roomy = model_of(ts.from_logits(Small(small.net, 1000), 3, ignores_time=True))
    same(result, ts.smc(ts.Steering(roomy, tilt, proposal), 16, 4, generator=seeded()))
    small.most = 0
    with pytest.raises(type(error)) as caught:
        model.predict(torch.full((4, 3), 3), 1.0)
    assert "One row alone does not fit" in caught.value.__notes__[-1]
    small.error = RuntimeError("shapes do not fit")  # any other error is told at once
    small.sizes.clear()
    with pytest.raises(RuntimeError, match="do not fit"):
        model.predict(torch.full((4, 3), 3), 1.0)
    assert len(small.sizes) == 1


def test_a_gradient_that_runs_out_of_memory_draws_the_same_again() -> None:
    """On the way back, when clean sequences have been drawn already."""

    class Narrow(torch.autograd.Function):
        most = 1000

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if len(g) > Narrow.most:
                raise torch.OutOfMemoryError
            return g

    net = Net().requires_grad_(False)
    model = model_of(ts.from_logits(lambda x: Narrow.apply(net(x)), 3, ignores_time=True))
    tilt = ts.Tilt(lambda x: x.float()[..., 0].sum(-1) if x.dim() == 3 else (x == 0).float().sum(-1), B.kl, draws=2)
    steering = ts.Steering(model, replace(tilt, differentiable=True), ts.Gradient())
    roomy = ts.smc(steering, 16, 4, generator=seeded())
    Narrow.most = 5
    with pytest.warns(UserWarning, match="going on with fewer"):
        same(roomy, ts.smc(steering, 16, 4, generator=seeded()))


def test_means_over_laws_are_taken_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steering = ts.Steering(
        model_of(forms()["hidden"][1]),
        ts.Tilt(lambda x: x[..., 0].sum(-1) if x.is_floating_point() else (x == 0).float().sum(-1), 1.0,
                estimator=ts.SoftInput(), differentiable=True),
    )  # fmt: skip
    whole, sizes, dense = ts.smc(steering, 8, 2, generator=seeded()), [], SiteDistributions.dense

    def watched(self: SiteDistributions) -> Tensor:
        sizes.append(len(self.index))
        return dense(self)

    monkeypatch.setattr(SiteDistributions, "dense", watched)
    monkeypatch.setattr("tokensteer.core.categorical.forms.WORKING", 16 * 4 * 3 * 2)  # the laws of two rows
    same(whole, ts.smc(steering, 8, 2, generator=seeded()))
    assert max(sizes) == 2


MASKGIT = {
    "plain": ts.MaskGIT(3),
    "noisy": ts.MaskGIT(3, temperature=1.0),
    "extended": MaskGITExtended(ts.MaskGIT(3)),
}


KEPT = {"new_empty", "index_put_", "view", "detach", "slice", "alias"}  # what is there for good, and looks at it


def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws of one row of three sites and four words at once."""
    monkeypatch.setattr("tokensteer.core.categorical.forms.WORKING", 16 * 4 * 3)
    monkeypatch.setattr("tokensteer.core.numerics.draws.WORKING", 32 * 4 * 3)
    monkeypatch.setattr("tokensteer.core.categorical.fused.BUDGET", 32 * 4 * 3 + 128 * 2 * 3)


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient()], ids=["base", "gradient"])
@pytest.mark.parametrize("kernel", MASKGIT)
def test_ranks_are_found_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, kernel: str, proposal: ts.Proposal
) -> None:
    """Nothing is made that is as large as the laws of all particles, but for what is kept of networks; and nothing
    changes."""
    model = replace(model_of(forms()["hidden"][1], sharing=False, num_steps=3), kernel=MASKGIT[kernel])
    steering = ts.Steering(model, ts.Tilt(B.reward, B.kl, estimator=ts.Sampled(seed=1)), proposal)
    whole = ts.smc(steering, 16, generator=seeded())
    in_small_pieces(monkeypatch)
    with Largest() as mode:
        same(whole, ts.smc(steering, 16, memory="1KiB", generator=seeded()))
    large = {name for name, numel in mode.numel.items() if numel >= 16 * 3 * 4}
    assert large <= KEPT


def test_a_reward_may_answer_in_its_own_memory() -> None:
    memory = torch.empty(64, dtype=torch.float64)

    def reward(x: Tensor) -> Tensor:
        return memory[: len(x)].copy_(B.reward(x))

    steering = ts.Steering(model_of(forms()["logits"][1]), ts.Tilt(reward, B.kl))
    first = ts.smc(steering, 16, generator=seeded(0))
    said = some(first.reward).clone()
    ts.smc(steering, 16, generator=seeded(1))
    assert torch.equal(some(first.reward), said)


def test_a_table_is_tilted_by_what_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ts.measure.Table(torch.randn(5, 3, 4, dtype=torch.float64, generator=seeded()).log_softmax(-1))
    for shape in ((5, 3, 4), (1, 3, 4), (4,)):
        h = torch.randn(*shape, dtype=torch.float64, generator=seeded(1))
        right = (table.log_p + h).log_softmax(-1)
        assert torch.allclose(table.tilt(h).log_p, right)
        with monkeypatch.context() as small:
            in_small_pieces(small)
            assert torch.allclose(table.tilt(h).log_p, right)


@pytest.mark.parametrize("leaps", [False, True], ids=["exact", "leaps"])
def test_uniform_noise_is_taken_away_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, leaps: bool) -> None:
    kernel, net = (ts.UniformLeap if leaps else ts.Interpolating)((0.25,) * 4), Net().requires_grad_(False)
    canvas = torch.full((3,), ts.NO_MASK)
    model = ts.Diffusion(lambda x, t: net(x).log_softmax(-1), kernel, ts.uniform_steps(4), canvas)
    tilt = ts.Tilt(lambda x: x[..., 0].sum(-1) if x.is_floating_point() else (x == 0).double().sum(-1), 1.0,
                   estimator=ts.SoftInput(), differentiable=True)  # fmt: skip
    for proposal in (ts.FromModel(), ts.Gradient()):
        steering = ts.Steering(model, tilt, proposal)
        whole = ts.smc(steering, 8, 2, generator=seeded())
        with monkeypatch.context() as small:
            in_small_pieces(small)
            with Largest() as mode:
                same(whole, ts.smc(steering, 8, 2, memory="1KiB", generator=seeded()))
        large = {name for name, numel in mode.numel.items() if numel >= 8 * 2 * 3 * 4}
        assert large <= KEPT


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient()])
def test_a_memory_budget_changes_nothing_but_the_chunks(proposal: ts.Proposal) -> None:
    net, denoiser = forms()["logits"]
    steering = ts.Steering(model_of(denoiser), ts.Tilt(B.reward, B.kl, estimator=ts.Exact()), proposal)
    free = ts.smc(steering, 16, 4, generator=seeded())
    calls, net.calls = net.calls, 0
    tight = ts.smc(steering, 16, 4, memory="1KiB", generator=seeded())
    assert net.calls > calls
    same(free, tight)
    if isinstance(proposal, ts.Gradient):  # which cannot do without what it knows
        assert tight.rows == free.rows


def test_answers_that_do_not_fit_are_not_kept() -> None:
    """The networks are asked again instead. Estimates are kept, noise and all, so that the samples are the same."""
    for kind in ("logits", "hidden"):
        model = model_of(forms()[kind][1])
        path = ts.Steering(model, ts.Tilt(B.reward, B.kl, draws=3))
        answers = model.predict(torch.tensor([[0, 3, 3], [3, 3, 3]]), 1.0).nbytes
        width = 4 if kind == "logits" else 5
        assert answers == 2 * 3 * width * 8
        free, roomy, tight = (
            ts.smc(path, 16, 4, memory=memory, generator=seeded()) for memory in (None, 3 * 64 * 3 * width * 8, 1000)
        )
        same(free, roomy)
        same(free, tight)
        assert free.rows == roomy.rows
        assert tight.rows["reward"] == free.rows["reward"]
        assert tight.rows["denoiser"] > free.rows["denoiser"]
        assert sum((tight.rows["denoiser"], tight.saved["denoiser"])) == free.rows["denoiser"] + free.saved["denoiser"]


@pytest.mark.parametrize("kernel", [ts.Blocks(ts.Ancestral(3), 1, 3, 9), ts.MaskGIT(3, temperature=0.0)])
def test_a_kernel_that_could_remember_and_does_not_is_no_reason_to_keep_answers(kernel: ts.Kernel) -> None:
    model = replace(model_of(forms()["logits"][1], num_steps=9), kernel=kernel)
    path = ts.Steering(model, ts.Tilt(B.reward, B.kl, draws=3))
    free, tight = (ts.smc(path, 16, 4, memory=memory, generator=seeded()) for memory in (None, 1000))
    same(free, tight)
    assert tight.rows["denoiser"] > free.rows["denoiser"]


def test_what_fewer_rows_do_not_help_is_not_learned() -> None:
    """A reward is asked within what the denoiser keeps: if that is too much, the denoiser's rows are to be fewer."""
    inner, outer, sizes = Chunks(), Chunks(), list[int]()

    def differentiate(part: slice) -> int:
        rows = len(range(64)[part])

        def reward(few: slice) -> int:
            if rows > 20:
                raise TOO_MUCH
            sizes.append(len(range(rows)[few]))
            return sizes[-1]

        return sum(inner.stretches(reward, rows, 1, torch.device("cpu")))

    with pytest.warns(UserWarning, match="out of memory"):
        assert sum(outer.stretches(differentiate, 64, 2, torch.device("cpu"))) == 64
    assert sizes == [16] * 4
    assert inner.most == {}


def test_a_network_of_the_proposal_is_asked_again_too() -> None:
    own = ts.Amortised(forms()["logits"][1])
    path = ts.Steering(model_of(forms()["hidden"][1]), ts.Tilt(B.reward, B.kl, draws=3), own)
    free, tight = (ts.smc(path, 16, 4, memory=memory, generator=seeded()) for memory in (None, 1000))
    same(free, tight)
    assert tight.rows["proposal"] > free.rows["proposal"]


def test_many_prompts_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A steering is tried out before it runs, and that must not spell out all laws of all prompts at once."""
    spelt = []
    rows = HiddenLogits.rows

    def watched(self: HiddenLogits, index: Tensor) -> Tensor:
        spelt.append(len(index))
        return rows(self, index)

    monkeypatch.setattr(HiddenLogits, "rows", watched)
    monkeypatch.setattr("tokensteer.core.categorical.forms.WORKING", 16 * 4 * 3)  # three laws
    prompts = torch.tensor([[k % 3, 3, 3] for k in range(10)])
    model = replace(model_of(forms()["hidden"][1]), template=prompts)
    spelt.clear()
    ts.Steering(model, ts.Tilt(B.reward, 1.0))
    assert spelt
    assert max(spelt) <= 3


def test_a_budget_ends_with_its_run() -> None:
    steering = ts.Steering(model_of(forms()["logits"][1]), ts.Tilt(B.reward, B.kl))
    ts.smc(steering, 4, memory="1MiB", generator=seeded())
    assert steering.model.base.chunks.memory is None
    assert some(steering.twist).chunks.memory is None


def test_what_a_way_back_cannot_hold_a_way_forward_may() -> None:
    """A chunk is learned for each use of a network: they are told by their guess of what a row takes."""
    chunks = Chunks(memory=1000)

    def scarce(part: slice) -> int:
        if part.stop - part.start > 25:
            raise torch.OutOfMemoryError
        return part.stop - part.start

    with pytest.warns(UserWarning, match="going on with fewer"):
        chunks.stretches(scarce, 100, 10, torch.device("cpu"))
    assert chunks.size(10, torch.device("cpu")) == 25
    assert chunks.size(5, torch.device("cpu")) == 200


def test_on_a_cpu_the_activations_of_a_first_chunk_are_counted() -> None:
    """A process that takes too much is killed there. The guess of a byte a row is 400 times too low."""
    chunks, given, weight = Chunks(memory=64_000), list[int](), torch.ones(100, requires_grad=True)

    def differentiate(part: slice) -> None:
        given.append(len(range(1000)[part]))
        hidden = torch.ones(given[-1], 1) * weight
        torch.autograd.backward(hidden.exp().sum())

    for _ in range(2):
        chunks.stretches(differentiate, 1000, 1, torch.device("cpu"), backward=True)
    assert given[0] == 32  # counted once, of a chunk that is small whatever the network is
    assert sum(given) == 2000
    assert 100 < max(given) <= 160
    assert 400 <= chunks.counted[1] < 420
    given.clear()
    chunks.stretches(differentiate, 1000, 2, torch.device("cpu"))
    assert given == [1000]  # without a backward pass the guess counts


@dataclass(frozen=True)
class Watched:
    """A denoiser that knows how many of its answers are still held when it is asked again."""

    denoiser: Any
    ignores_time: bool
    given: list[Any] = field(default_factory=list[Any])
    held: list[int] = field(default_factory=list[int])

    def __call__(self, x: Tensor, t: float) -> Tensor:
        return self.denoiser(x, t)

    def laws(self, x: Tensor, t: float) -> Any:
        self.held.append(sum(answer() is not None for answer in self.given))
        answer = self.denoiser.laws(x, t)
        self.given.append(weakref.ref(answer))
        return answer


@pytest.mark.parametrize("progress", [False, True])
def test_what_a_network_said_is_let_go_before_it_is_asked_again(progress: bool) -> None:
    """At 64 × 1024 × 50,258 the logits of one step are 6 GiB: two steps' must not be there at once."""
    watched = Watched(forms()["logits"][1], ignores_time=False)
    steering = ts.Steering(model_of(watched, sharing=False), ts.Tilt(B.reward, B.kl))
    watched.given.clear()
    watched.held.clear()
    ts.smc(steering, 8, generator=seeded(), progress=progress)
    assert watched.held == [0] * 6


def watched_run(path: ts.Steering, when: Any, sharing: bool) -> list[ts.Record]:
    path = replace(path, model=replace(untyped(path.model), sharing=sharing))
    return list(ts.sweep(path, 2, generator=seeded(4), when=when))


@pytest.mark.parametrize(
    "proposal", [ts.FromModel(), ts.Gradient(clip=1.0), ts.Gradient(clip=1.0, every=3)], ids=["base", "grad", "every 3"]
)
@pytest.mark.parametrize("kind", ["total", "maximum", "adaptive", "difference"])
def test_what_rests_does_so_whoever_has_moved(kind: str, proposal: ts.Proposal) -> None:
    """Two particles on a fine grid: at most steps nobody moves, and all estimates are known. They must not count where
    none is wanted: weights and ramps are those of a run that keeps nothing, number for number."""
    options = {
        "adaptive": {"ramp": ts.Adaptive(0.9)},
        "total": {"potential": ts.potentials.total},
        "maximum": {"potential": ts.potentials.maximum},
    }
    tilt = ts.Tilt(B.reward, 1.0, estimator=ts.Exact(), **options.get(kind, {}))
    if kind in ("total", "maximum"):  # as in Feynman-Kac steering, the reward counts at some steps only
        tilt = replace(tilt, ramp=lambda t: float(round(30 * t) % 5 == 0 and t < 1))
    path = ts.Steering(model_of(forms()["logits"][1], num_steps=30), tilt, proposal)
    kept, anew = (watched_run(path, ts.triggers.every(10), sharing) for sharing in (True, False))
    assert any(torch.equal(a.x, b.x) for a, b in itertools.pairwise(kept[12:]))
    for ours, theirs in zip(kept, anew, strict=True):
        assert torch.equal(ours.x, theirs.x)
        assert torch.allclose(ours.log_w, theirs.log_w, atol=1e-9)
        looked = theirs.step is None or theirs.step.s == 0 or (theirs.step.index + 1) % 10 == 0
        if kind == "difference" and not looked:  # all there at every step, or none
            assert (ours.evaluation.reward is None) == (proposal != ts.Gradient(clip=1.0))
        ramps = [record.evaluation.ramp for record in (ours, theirs)]
        assert (ramps[0] is None) == (ramps[1] is None)
        assert ramps[0] is None or torch.allclose(ramps[0], some(ramps[1]), atol=1e-9)
    assert (kept[-2].evaluation.ramp is not None) == (kind == "adaptive")


@pytest.mark.parametrize(
    ("words", "size"), [("8GiB", 2**33), ("1.5 MB", 1_500_000), ("100", 100), (7, 7), (1e9, 10**9), ("1TiB", 2**40)]
)
def test_memory_is_read_as_people_write_it(words: str | int, size: int) -> None:
    assert parse_memory(words) == size


@pytest.mark.parametrize("words", ["much", "8 apples", "-1", 0, "0GiB", "", "1.2.3GiB", b"8GiB", True, math.inf])
def test_memory_that_cannot_be_read(words: str | int) -> None:
    with pytest.raises(ValueError, match="memory must"):
        parse_memory(words)


# ---- populations of different lengths


def test_padded_templates_run_as_their_own_populations() -> None:
    """Each population follows the law of its own length, and padding never moves."""
    pad, mask = 2, 3
    joints = {n: torch.rand(*(2,) * n, generator=seeded(n), dtype=torch.float64) for n in (2, 3)}
    tables = {n: TableDenoiser(joint / joint.sum()) for n, joint in joints.items()}

    def denoiser(x: Tensor, t: float) -> Tensor:
        """Two models in one: rows are told by their padding, which is looked past."""
        log_p = torch.full((*x.shape, 4), -torch.inf, dtype=torch.float64)
        log_p[..., 0] = 0.0
        for n, table in tables.items():
            own = (x != pad).sum(-1) == n
            said = table(torch.where(x[own][:, :n] == mask, 2, x[own][:, :n]), t)[..., :2]
            log_p[own.nonzero(), torch.arange(n), :2] = said
        return log_p

    def reward(x: Tensor) -> Tensor:
        return ((x == 1) & (x != pad)).sum(-1).double()

    canvas = ts.padded([ts.template(2, mask), ts.template(3, mask)], pad)
    assert canvas.tolist() == [[3, 3, 2], [3, 3, 3]]
    model = ts.Diffusion(denoiser, ts.Ancestral(mask), ts.uniform_steps(4), canvas)
    result = ts.smc(ts.Steering(model, ts.Tilt(reward, 1.0)), 8, 2 * 4000, generator=seeded())
    assert (result.samples.view(2, -1, 3)[0, :, 2] == pad).all()
    for row, n in enumerate((2, 3)):
        alone = ts.Diffusion(tables[n], ts.Ancestral(2), ts.uniform_steps(4), ts.template(n, 2))
        exact = enumerate_steering(ts.Steering(alone, ts.Tilt(reward, 1.0))).log_z
        ratio = (result.log_z.view(2, -1)[row] - exact).exp()
        assert abs(float((ratio.mean() - 1) / ratio.std() * len(ratio) ** 0.5)) < 4
    with pytest.raises(ValueError, match="holds 2, the padding itself"):
        ts.padded([torch.tensor([2, 3])], pad)


# ---- gradients without one-hots


def entered(form: str, kernel: str) -> tuple[ts.Steering, ts.Steering]:
    """The same steering with networks that are entered, and with plain functions of ids and one-hots."""
    reward = Valued(1).requires_grad_(False)
    trunk, logits = Entered(4).requires_grad_(False), Logit(4).requires_grad_(False)
    hidden = ts.from_hidden(trunk, trunk.head, 3, ignores_time=True)
    denoiser = hidden if form == "hidden" else ts.from_logits(logits, 3, ignores_time=True)
    plain = ts.from_logits(lambda x: trunk.head(trunk(x)), 3, ignores_time=True)
    options = {"kl": 1.0, "draws": 3, "estimator": ts.Sampled(), "differentiable": True}
    parts = (denoiser, ts.Tilt(reward, **options)), (plain, ts.Tilt(lambda x: reward(x), **options))
    fast, slow = (ts.Steering(model_of(d, kernel), tilt, ts.Gradient(clip=2.0)) for d, tilt in parts)
    return fast, slow


@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf", "entropy"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_gradients_through_embeddings_are_those_of_one_hots(form: str, kernel: str) -> None:
    fast, slow = entered(form, kernel)
    x = torch.tensor([[3, 3, 3], [0, 3, 3], [3, 1, 2], [2, 2, 3], [0, 1, 2]])
    quick, plain = (path.evaluate(x, 0.5, seeded(4)) for path in (fast, slow))
    assert torch.allclose(some(quick.reward), some(plain.reward))
    movable = (x == 3) | (kernel == "remdm")
    ours, theirs = (untyped(evaluation.gradient).laws().at(movable) for evaluation in (quick, plain))
    assert torch.allclose(ours, theirs, atol=1e-12)
    same(*(ts.smc(path, 8, 5, generator=seeded(5)) for path in (fast, slow)))


def test_rewards_are_differentiated_a_few_at_a_time() -> None:
    """Draws of one particle stay together, for their average; particles need not, and all is the same."""
    sizes: list[int] = []

    class Small(Valued):
        most = 10**6

        def of_embeddings(self, embedded: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                sizes.append(len(embedded))
                if len(embedded) > self.most:
                    raise TOO_MUCH
            return super().of_embeddings(embedded)

    fast, _ = entered("hidden", "mdm")
    reward = Small(1).requires_grad_(False)
    path = replace(fast, twist=replace(some(fast.twist), reward=reward))
    whole = ts.smc(fast, 8, 5, generator=seeded(5))
    same(whole, ts.smc(path, 8, 5, generator=seeded(5)))
    assert max(sizes) > 8 * 3
    sizes.clear()
    row = 128 * 3 * 3 * 5 * 8  # layers, draws, sites, width and bytes of a particle
    tight = ts.smc(path, 8, 5, memory=4 * row, generator=seeded(5))
    same(whole, tight)
    assert max(sizes) == 4 * 3
    assert tight.rows == whole.rows
    sizes.clear()
    reward.most = 5 * 3
    with pytest.warns(UserWarning, match="out of memory"):
        same(whole, ts.smc(path, 8, 5, generator=seeded(5)))
    assert min(sizes) >= 3


def test_straight_through_is_the_gradient_of_the_mean_draw() -> None:
    """With a linear reward the estimate's gradient does not depend on what was drawn: it is that of r(mu(x))."""
    weights = torch.randn(3, 4, generator=seeded(1), dtype=torch.float64)

    def linear(x: Tensor) -> Tensor:
        hot = x if x.is_floating_point() else nn.functional.one_hot(x, 4).double()
        return (hot * weights).sum((-1, -2))

    options = {"kl": 1.0, "average": ts.estimators.mean, "differentiable": True}
    model = model_of(ts.from_logits(Logit(4).requires_grad_(False), 3, ignores_time=True))
    straight = ts.Steering(model, ts.Tilt(linear, draws=2, estimator=ts.Sampled(), **options), ts.Gradient())
    soft = ts.Steering(model, ts.Tilt(linear, estimator=ts.SoftInput(), **options), ts.Gradient())
    x = torch.tensor([[3, 3, 3], [0, 3, 3], [2, 2, 3]])
    ours, theirs = (untyped(path.evaluate(x, 0.5, seeded()).gradient).laws().dense() for path in (straight, soft))
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf"])
def test_straight_through_is_unbiased(kernel: str) -> None:
    fast, _ = entered("hidden", kernel)
    outcome = trial(fast, answer(fast.model, fast.twist), 8)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf"])
@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.slow
def test_gradients_may_be_older_than_the_state(kernel: str, embedded: bool) -> None:
    """Any q is right: log Z and every state against enumeration, with fewer rewards."""
    path = entered("hidden", kernel)[not embedded]
    rare = replace(path, proposal=ts.Gradient(clip=2.0, every=3))
    outcome = trial(rare, answer(path.model, path.twist), 8, when=ts.triggers.every(2))
    assert outcome.unbiased, str(outcome)
    often, seldom = (ts.smc(p, 8, 5, when=ts.triggers.every(4), generator=seeded()) for p in (path, rare))
    assert seldom.rows["reward"] < often.rows["reward"]
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        ts.Gradient(every=0)


@pytest.mark.parametrize(("embedded", "every"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf"])
@pytest.mark.slow
def test_gradients_may_have_draws_of_their_own(kernel: str, embedded: bool, every: int) -> None:
    """Any q is right: the estimates are then made for themselves, and only where weights are looked at."""
    path = entered("hidden", kernel)[not embedded]
    alone = replace(path, proposal=ts.Gradient(clip=2.0, draws=1, every=every))
    outcome = trial(alone, answer(path.model, path.twist), 8, when=ts.triggers.every(2))
    assert outcome.unbiased, str(outcome)
    many, few = (ts.smc(p, 8, 5, when=ts.triggers.every(4), generator=seeded()) for p in (path, alone))
    assert few.rows["reward"] < many.rows["reward"]


def test_draws_of_a_gradient_that_cannot_be() -> None:
    path = entered("hidden", "mdm")[0]
    for draws in (0, 1.5, "2", True):
        with pytest.raises(ValueError, match=r"draws must be (a whole number|at least 1), got"):
            ts.Gradient(draws=untyped(draws))
    for draws in (1, some(path.twist).draws):
        with pytest.raises(ValueError, match="SoftInput draws none"):
            replace(path, twist=replace(some(path.twist), estimator=ts.SoftInput()), proposal=ts.Gradient(draws=draws))


def test_as_many_draws_as_the_estimate_has_are_its_own() -> None:
    path = entered("hidden", "mdm")[0]
    same(*(ts.smc(replace(path, proposal=ts.Gradient(draws=m)), 8, 5, generator=seeded()) for m in (None, 3)))


def test_the_ratio_of_a_base_proposal_is_computed_and_not_assumed() -> None:
    """A steering whose p is not its q is found out, though the proposal says that it is the model."""
    steering = ts.Steering(model_of(forms()["plain"][1]))

    class Other(ts.Steering):
        def log_p(self, y: Tensor, x: Tensor, evaluation: Any, step: Any, q: Any) -> Tensor:
            return super().log_p(y, x, evaluation, step, q) - 1.0

    x = torch.full((1, 7, 3), 3)
    x[:, -1] = torch.tensor([0, 1, 2])
    right, wrong = (score(path, x).log_increment for path in (steering, Other(steering.model)))
    assert torch.allclose(right - wrong, torch.ones_like(right))


def test_a_proposal_is_asked_once_about_each_state():
    """Its network, like the model's, sees distinct rows, and none that has not changed."""
    asked = []
    inner = B.amortised().denoiser

    def network(x, t):
        asked.append(len(x))
        return inner(x, t)

    network.ignores_time = True
    steering = ts.Steering(B.model("mdm"), B.tilt("mdm"), ts.Amortised(network))
    asked.clear()
    result = ts.smc(steering, 64, generator=torch.Generator().manual_seed(0))
    assert result.rows["proposal"] == sum(asked)
    assert sum(asked) < 64 * len(steering.steps) / 2
    assert result.rows["proposal"] + result.saved["proposal"] == 64 * len(steering.steps)
    plain = ts.Steering(B.model("mdm"), B.tilt("mdm"), ts.Amortised(inner))
    again = ts.smc(plain, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(result.samples, again.samples)
    assert torch.equal(result.log_w, again.log_w)
