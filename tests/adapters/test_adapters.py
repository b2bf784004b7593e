"""Foreign networks as denoisers: tiny random models of true architectures, saved to disk and loaded back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from narrow import some, untyped
from torch import Tensor, nn
from torch.nn.functional import one_hot

import tokensteer as ts
from tokensteer import testing
from tokensteer.adapters.heads import choose_denoiser, headed
from tokensteer.adapters.network import Network
from tokensteer.core.models.denoiser import Embedded, FromHidden, FromLogits
from tokensteer.core.twists.straight_through import straight_through

pytest.importorskip("transformers")
import checks
import hubs
from hubs import transformers

torch.set_num_threads(1)
TEXTS = {"bert": "the movie was", "roberta": "the movie was", "esm": "LAG"}
MAKERS: dict[str, Callable[[Path], str]] = {"bert": hubs.bert, "roberta": hubs.roberta, "esm": hubs.esm}
HEADED = ["bert", "roberta", "mdlm", "llada", "dream"]  # networks that end in a linear layer; ESM adds a bias behind it
TOLD = """
    def get_output_embeddings(self):
        return self.head
"""
HEADS = {  # where their published code has its head
    "llada": TOLD,
    "dream": TOLD,
    "mdlm": """
    def post_init(self):
        self.backbone.output_layer = nn.ModuleDict({"linear": self._modules.pop("head")})
        super().post_init()

    @property
    def head(self):
        return self.backbone.output_layer.linear
""",
}


def with_head(folder: Path, kind: str, more: str = "") -> str:
    """hubs.with_code, its head where it is looked for, and more code of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hubs.FORWARD, kind, hubs.FORWARD[kind] + HEADS[kind] + more)
        return hubs.with_code(folder, kind)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hub")
    made = {name: make(root / name) for name, make in MAKERS.items()}
    made["esm-absolute"] = hubs.esm(root / "esm-absolute", "absolute")
    return made | {kind: with_head(root / kind, kind) for kind in hubs.FORWARD}


@pytest.fixture(scope="module", params=["bert", "roberta", "esm", "esm-absolute", "mdlm", "llada", "dream"])
def model(request: pytest.FixtureRequest, folders: dict[str, str]) -> ts.adapters.TextModel:
    return load(request.param, folders)


def load(kind: str, folders: dict[str, str], length: int = 10, dtype: torch.dtype = torch.float32):
    match kind:
        case "mdlm":
            return ts.adapters.mdlm(folders[kind], length, tokenizer=folders[kind], trust_remote_code=True, dtype=dtype)
        case "llada" | "dream":
            make = ts.adapters.llada if kind == "llada" else ts.adapters.dream
            return make(folders[kind], 6, trust_remote_code=True, dtype=dtype)
        case _:
            return ts.adapters.masked_lm(folders[kind], length, dtype=dtype)


def network_of(model: ts.adapters.TextModel) -> Network:
    denoiser = model.denoiser
    return untyped(denoiser.trunk if isinstance(denoiser, FromHidden) else denoiser).network


def text_of(model: ts.adapters.TextModel) -> str:
    return "LAG" if "Esm" in type(network_of(model).net).__name__ else "the movie was"


def half_open(model: ts.adapters.TextModel, rows: int = 3) -> Tensor:
    canvas = model.template(text_of(model)).repeat(rows, 1)
    words = (~network_of(model).forbidden).nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(1)
    tokens = words[torch.randint(len(words), canvas.shape, generator=generator)]
    opened = torch.rand(canvas.shape, generator=generator) < 0.4
    return torch.where((canvas == model.mask_id) & opened, tokens, canvas)


def test_is_a_denoiser(model: ts.adapters.TextModel) -> None:
    testing.assert_denoiser(model.diffusion(text_of(model), steps=4))


def test_ids_one_hots_and_embeddings_are_answered_as_the_network_itself_would(model: ts.adapters.TextModel) -> None:
    denoiser, x = model.denoiser, half_open(model)
    hidden = isinstance(denoiser, FromHidden)
    network, head = (denoiser.trunk, denoiser.head) if hidden else (denoiser.network, nn.Identity())
    assert isinstance(network, Embedded)
    own, ask = network_of(model).own(x), untyped(network)
    for entered in (
        ask(x),
        ask(one_hot(x, own.shape[-1]).float()),
        network.of_embeddings(network.embedding[x]),
    ):
        torch.testing.assert_close(head(entered), own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "esm", "esm-absolute", "mdlm", "dream"])
def test_gradient_is_that_of_finite_differences(
    kind: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exactly(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        cos, sin = (table.unsqueeze(unsqueeze_dim).double() for table in (cos, sin))
        return tuple(h * cos + rotated(h) * sin for h in (q, k))

    modeling_esm = transformers.models.esm.modeling_esm
    rotated = modeling_esm.rotate_half
    monkeypatch.setattr(modeling_esm, "apply_rotary_pos_emb", exactly)  # ESM's own rounds to float32
    model = load(kind, folders, dtype=torch.float64)
    x, allowed, generator = half_open(model, 1), ~network_of(model).forbidden, torch.Generator().manual_seed(2)
    soft = 0.9 * one_hot(x, len(allowed)).double() + 0.1 / len(allowed)
    weight = torch.randn(*x.shape, int(allowed.sum()), generator=generator, dtype=torch.float64)

    def score(x: Tensor) -> Tensor:
        return (model.denoiser(x, 0.5)[..., allowed] * weight).mean()

    (slope,) = torch.autograd.grad(score(soft.requires_grad_()), soft)
    for _ in range(3):
        way = torch.randn(soft.shape, generator=generator, dtype=torch.float64) / soft.numel() ** 0.5
        with torch.no_grad():
            apart = (score(soft + 1e-6 * way) - score(soft - 1e-6 * way)) / 2e-6
        torch.testing.assert_close((slope * way).sum(), apart, rtol=1e-6, atol=1e-8)


def test_specials_are_never_sampled_and_prompts_are_kept(model: ts.adapters.TextModel) -> None:
    diffusion = model.diffusion(text_of(model), steps=5)
    x = ts.pretrained(diffusion)(256, generator=torch.Generator().manual_seed(0)).samples.flatten(0, -2)
    free = diffusion.template == model.mask_id
    assert (x[:, ~free] == diffusion.template[~free]).all()
    assert not network_of(model).forbidden[x[:, free]].any()
    log_x0 = model.denoiser(diffusion.template[None], 1.0)
    assert (log_x0[..., network_of(model).forbidden] == -torch.inf).all()
    torch.testing.assert_close(log_x0.exp().sum(-1), torch.ones(log_x0.shape[:2]))


def test_device_contexts_work_after_loading(folders: dict[str, str]) -> None:
    """transformers replaces torch.linspace while it loads, and torch might list what contexts affect just then."""
    device: Any = import_module("torch.utils._device")
    device._device_constructors.cache_clear()
    try:
        load("bert", folders)
        with torch.device("meta"):
            assert torch.linspace(0, 1, 3).device.type == "meta"
    finally:
        device._device_constructors.cache_clear()


def test_no_special_or_spare_token_is_allowed(folders: dict[str, str]) -> None:
    for kind, never in {
        "bert": {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"},
        "roberta": {"<s>", "<pad>", "</s>", "<unk>", "<mask>"},
        "esm": {"<cls>", "<pad>", "<eos>", "<unk>", "<null_1>", "<mask>"},
        "llada": {"<unk>", "<|user|>", "<|assistant|>", "<|mdm_mask|>"},
    }.items():
        model = load(kind, folders)
        forbidden = network_of(model).forbidden.nonzero().squeeze(-1).tolist()
        words = set(model.tokenizer.convert_ids_to_tokens([i for i in forbidden if i < len(model.tokenizer)]))
        assert words == never, kind
        assert set(range(len(model.tokenizer), len(network_of(model).embedding))) <= set(forbidden)


@pytest.mark.parametrize("kind", ["bert", "roberta", "esm", "esm-absolute", "llada", "dream"])
def test_padding_does_not_change_the_answer(kind: str, folders: dict[str, str]) -> None:
    model = load(kind, folders)
    short, long = ("L ___ G", "LAG ____ K") if "esm" in kind else ("the ___", "the movie was ____ long")
    if kind in ("llada", "dream"):
        short, long = "the movie", "the movie was bad because of a plot"
    both, alone = model.template([short, long]), model.template(short)
    assert model.pad_id is not None
    real = both[0] != model.pad_id
    assert real.sum() == len(alone) < both.shape[1]
    together, by_itself = model.denoiser(both, 0.5)[0, real], model.denoiser(alone[None], 0.5)[0]
    free = alone == model.mask_id
    torch.testing.assert_close(together[free], by_itself[free], atol=1e-5, rtol=1e-5)
    network = network_of(model)
    torch.testing.assert_close(network.of_embeddings(network.embedding[both]), network.own(both), atol=1e-5, rtol=1e-5)
    testing.assert_denoiser(model.diffusion([short, long], steps=4))
    x = ts.pretrained(model.diffusion([short, long], steps=4))(8, populations=2).samples
    assert (x[0][:, ~real] == model.pad_id).all()
    assert len(model.decode(x)) == 16


def test_half_precision_networks_have_laws_in_single(folders: dict[str, str]) -> None:
    model = load("bert", folders, dtype=torch.bfloat16)
    diffusion = model.diffusion("the movie was", steps=4)
    assert diffusion.dtype == torch.float32
    testing.assert_denoiser(diffusion, tolerance=0.2)
    assert isinstance(model.denoiser, FromHidden)
    x = half_open(model)
    for network in (network_of(model), model.denoiser.trunk):
        assert (network.of_embeddings(network.embedding[x]) == network(x)).all()


class Liking(nn.Module):
    """A reward that reads embeddings, ids and one-hots."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.randn(vocab_size, 4, generator=torch.Generator().manual_seed(3))

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return embedded.sum(1).tanh().sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_embeddings(x @ self.embedding if x.is_floating_point() else self.embedding[x])


@pytest.mark.parametrize("kind", ["bert", "esm", "mdlm"])
def test_gradients_without_one_hots_are_those_with_them(kind: str, folders: dict[str, str]) -> None:
    """Straight-through proposals give the same weights, whether the network is entered or fed one-hots."""
    model = load(kind, folders)
    network, text = network_of(model), text_of(model)
    liking = Liking(len(network.embedding))
    options = {"kl": 0.5, "draws": 3, "estimator": ts.Sampled(), "differentiable": True}
    canvas, kernel, steps = model.template(text), ts.Ancestral(model.mask_id), ts.uniform_steps(4)
    plain = ts.from_logits(lambda x: network(x), model.mask_id, ignores_time=True)
    runs = [
        ts.smc(
            ts.Steering(
                ts.Diffusion(denoiser, kernel, steps, canvas), ts.Tilt(reward, **options), ts.Gradient(clip=2.0)
            ),
            num_particles=8,
            generator=torch.Generator().manual_seed(0),
        )
        for denoiser, reward in ((model.denoiser, liking), (plain, lambda x: liking(x)))
    ]
    assert (runs[0].samples == runs[1].samples).all()
    torch.testing.assert_close(runs[0].log_z, runs[1].log_z, atol=1e-3, rtol=1e-3)


# ---- heads that are left out


def plain(model: ts.adapters.TextModel) -> FromLogits:
    """The same network by its logits."""
    return ts.from_logits(network_of(model), model.mask_id, ignores_time=True)


def texts_of(model: ts.adapters.TextModel) -> list[str]:
    """Two texts, one of them padded where that can be done."""
    return ["the movie", "the movie was good"] if model.pad_id is not None else ["the movie", "its plot"]


@pytest.mark.parametrize("kind", HEADED)
def test_heads_are_left_out_and_share_their_weight(kind: str, folders: dict[str, str]) -> None:
    model = load(kind, folders)
    denoiser, network = model.denoiser, network_of(model)
    assert isinstance(denoiser, FromHidden)
    assert isinstance(denoiser.trunk, Embedded)
    net = untyped(network.net)
    head = net.backbone.output_layer.linear if kind == "mdlm" else net.get_output_embeddings()
    assert denoiser.head.weight is head.weight
    assert denoiser.head.bias.data_ptr() != head.bias.data_ptr()
    assert (denoiser.head.bias == head.bias.masked_fill(network.forbidden, -torch.inf)).all()
    assert head.bias.isfinite().all()
    assert "forward" not in vars(head)


@pytest.mark.parametrize("kind", ["esm", "esm-absolute"])
def test_networks_with_more_behind_their_heads_are_taken_by_their_logits(kind: str, folders: dict[str, str]) -> None:
    assert isinstance(load(kind, folders).denoiser, FromLogits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "line",
    [
        "answer.logits = 1.01 * answer.logits",
        "answer.logits.mul_(1.01)",
        "answer.logits = 30 * torch.tanh(answer.logits / 30)",
        "answer.logits = answer.logits + 0.01",
        "answer.logits[..., 20:] = -torch.inf",
    ],
)
def test_a_little_behind_a_head_is_found_out(line: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The published LLaDA can scale its logits. What is so little that half precision might hide it counts as well."""
    code = f"""
    def _attend(self, h, mask, attend=_attend):
        answer = attend(self, h, mask)
        {line}
        return answer
"""
    scaled = ts.adapters.llada(with_head(tmp_path / "llada", "llada", code), 6, trust_remote_code=True, dtype=dtype)
    assert isinstance(scaled.denoiser, FromLogits)


def test_logits_in_single_precision_behind_a_head_in_half(tmp_path: Path) -> None:
    code = """
    def _attend(self, h, mask, attend=_attend):
        answer = attend(self, h, mask)
        answer.logits = answer.logits.float()
        return answer
"""
    folder = with_head(tmp_path / "llada", "llada", code)
    model = ts.adapters.llada(folder, 6, trust_remote_code=True, dtype=torch.bfloat16)
    assert isinstance(model.denoiser, FromHidden)
    testing.assert_denoiser(model.diffusion("the movie", steps=3), tolerance=0.2)


def test_without_a_head_that_is_known_logits_are_taken(tmp_path: Path) -> None:
    model = load("llada", {"llada": hubs.with_code(tmp_path / "llada", "llada")})
    assert isinstance(model.denoiser, FromLogits)
    model = load("mdlm", {"mdlm": hubs.with_code(tmp_path / "mdlm", "mdlm")})
    assert isinstance(model.denoiser, FromLogits)


@pytest.mark.parametrize("kind", HEADED)
def test_laws_are_those_of_the_logits(kind: str, folders: dict[str, str]) -> None:
    model = load(kind, folders)
    logits, forbidden = plain(model), network_of(model).forbidden
    for x in (half_open(model, 5), model.template(texts_of(model))):
        torch.testing.assert_close(model.denoiser(x, 0.5), logits(x, 0.5), atol=1e-5, rtol=1e-5)
        kept: Any
        kept, known = (denoiser.laws(x, 0.5) for denoiser in (model.denoiser, logits))
        assert kept.vocab_size == known.vocab_size == len(forbidden)
        assert kept.states.shape == (x.numel(), untyped(model.denoiser).head.in_features)
        index = torch.arange(x.numel())
        torch.testing.assert_close(kept.rows(index), known.rows(index), atol=1e-5, rtol=1e-5)
        tokens = torch.arange(x.numel()) % len(forbidden)
        torch.testing.assert_close(kept.entries(index, tokens), known.entries(index, tokens), atol=1e-5, rtol=1e-5)
        u = torch.linspace(0.0, 1.0, 1001, dtype=torch.float64)[1:].repeat(x.numel(), 1)
        drawn, log_p = kept.draw(index, u)
        assert not forbidden[drawn].any()
        assert log_p.isfinite().all()
        assert (kept.rows(index)[:, forbidden] == -torch.inf).all()


@pytest.mark.parametrize("kind", HEADED)
def test_samples_are_those_of_the_logits(kind: str, folders: dict[str, str]) -> None:
    model = load(kind, folders)
    tilt = ts.Tilt(Liking(len(network_of(model).forbidden)), kl=0.5, draws=2)
    diffusion = model.diffusion(texts_of(model), steps=5)
    results = [
        ts.smc_base(replace(diffusion, denoiser=denoiser), tilt)(
            16, populations=2, generator=torch.Generator().manual_seed(0)
        )
        for denoiser in (model.denoiser, plain(model))
    ]
    assert (results[0].samples == results[1].samples).all()
    assert not network_of(model).forbidden[results[0].samples[..., diffusion.template[1] == model.mask_id]].any()
    torch.testing.assert_close(results[0].log_z, results[1].log_z, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", HEADED)
def test_slopes_are_those_of_the_logits(kind: str, folders: dict[str, str]) -> None:
    model = load(kind, folders)
    tilt = ts.Tilt(
        Liking(len(network_of(model).forbidden)), kl=0.5, draws=3, estimator=ts.Sampled(), differentiable=True
    )
    diffusion = model.diffusion(texts_of(model), steps=5)
    x = diffusion.template.repeat_interleave(2, 0)
    runs, found = [], []
    for denoiser in (model.denoiser, plain(model)):
        own = replace(diffusion, denoiser=denoiser)
        noise = torch.Generator().manual_seed(0)
        found.append(straight_through(own, tilt, x, 0.5, x == model.mask_id, noise)[1:])
        runs.append(ts.smc_grad(own, tilt)(8, populations=2, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(found[0][0], found[1][0])
    for name in ("drawn", "entered", "expected"):
        ours, theirs = (getattr(slopes, name) for _, slopes in found)
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert found[0][1].entered.abs().sum() > 0
    assert (runs[0].samples == runs[1].samples).all()
    torch.testing.assert_close(runs[0].log_z, runs[1].log_z, atol=1e-4, rtol=1e-4)


def test_no_logits_are_ever_made_by_a_network_of_many_words(tmp_path: Path) -> None:
    words, vocab_size, particles = hubs.tokenizer(hubs.SPECIAL), 5000, 8
    config = transformers.BertConfig(vocab_size=vocab_size, max_position_embeddings=16, **hubs.SHAPE)
    model = ts.adapters.masked_lm(hubs.save(tmp_path / "bert", transformers.BertForMaskedLM(config), words), 12)
    tilt = ts.Tilt(Liking(vocab_size), kl=0.5, draws=2)
    diffusion, largest = replace(model.diffusion("the movie was", steps=4), sharing=False), []

    def watched(network: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def ask(x: Tensor) -> Tensor:
            with checks.Largest() as mode:
                answer = network(x)
            if len(x) == particles:  # not when a diffusion tries its denoiser on a row
                largest.append(max(mode.numel.values()))
            return answer

        return ask

    for denoiser in (
        replace(model.denoiser, trunk=watched(untyped(model.denoiser).trunk)),
        replace(plain(model), network=watched(network_of(model))),
    ):
        largest.clear()
        ts.smc_base(replace(diffusion, denoiser=denoiser), tilt)(particles, generator=torch.Generator().manual_seed(0))
        assert len(largest) == 4
        assert (max(largest) < particles * 12 * vocab_size) == isinstance(denoiser, FromHidden)


def test_a_head_comes_back_whatever_happens(folders: dict[str, str]) -> None:
    model = load("bert", folders)
    denoiser, x = untyped(model.denoiser), half_open(model)
    before = network_of(model).own(x)
    with pytest.raises(IndexError):
        denoiser.trunk(torch.full_like(x, 10**6))
    with pytest.raises(RuntimeError):
        denoiser.trunk(x.repeat(1, 9))  # more sites than it has positions for
    assert "forward" not in vars(denoiser.trunk.head)
    assert (network_of(model).own(x) == before).all()


# ---- what is particular to each


def test_dream_logits_are_those_of_the_next_site(folders: dict[str, str]) -> None:
    model = load("dream", folders)
    network, x = network_of(model), half_open(model)
    assert isinstance(model.denoiser, FromHidden)
    real = torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool)
    raw, shifted = network.net(input_ids=x, attention_mask=real).logits, network(x)
    assert (shifted[:, 1:] == raw[:, :-1].masked_fill(network.forbidden, -torch.inf)).all()
    assert (shifted[:, 0] == raw[:, 0].masked_fill(network.forbidden, -torch.inf)).all()
    torch.testing.assert_close(model.denoiser.head(model.denoiser.trunk(x)), shifted)


def test_chat_models_answer_in_their_format(folders: dict[str, str]) -> None:
    model = load("llada", folders)
    words = model.tokenizer.convert_ids_to_tokens
    canvas = model.template("the movie")
    assert words(canvas[:-6].tolist()) == ["<|user|>", "the", "movie", "<|eot_id|>", "<|assistant|>"]
    assert (canvas[-6:] == model.mask_id).all()
    assert words(model.mask_id) == "<|mdm_mask|>"
    answer = model.tokenizer.convert_tokens_to_ids(["good", "plot", "<|eot_id|>", "bad", "bad", "bad"])
    assert model.decode(torch.cat([canvas[:-6], torch.tensor(answer)])) == ["good plot"]
    base = ts.adapters.llada(folders["llada"], 6, prompt=ts.adapters.plain, trust_remote_code=True, dtype=torch.float32)
    assert words(base.template("the movie")[:2].tolist()) == ["the", "movie"]


def test_blanks_are_filled_in(folders: dict[str, str]) -> None:
    model = load("bert", folders)
    words = model.tokenizer.convert_ids_to_tokens
    assert words(model.template("the movie was ___ because [MASK]").tolist()) == [
        "[CLS]", "the", "movie", "was", *["[MASK]"] * 3, "because", "[MASK]", "[SEP]",
    ]  # fmt: skip
    assert words(model.template("the movie was ___2 because ____1").tolist()) == [
        "[CLS]", "the", "movie", "was", *["[MASK]"] * 2, "because", "[MASK]", "[SEP]",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="a blank of 99 of 10 sites: raise length"):
        model.template("the movie was ___99")
    assert words(model.template("the movie").tolist()) == ["[CLS]", "the", "movie", *["[MASK]"] * 6, "[SEP]"]
    assert model.decode(model.template("the movie was good")) == ["the movie was good"]


def test_words_that_would_be_lost_are_named(folders: dict[str, str]) -> None:
    model = load("bert", folders)
    with pytest.raises(ValueError, match="cannot spell 'zorgle', 'gnarp' in 'the plot was zorgle because gn"):
        model.template("the plot was zorgle because gnarp zorgle ___")
    assert model.tokenizer.unk_token_id in model.template("the [UNK] was")  # asked for by name
    with pytest.raises(ValueError, match="cannot spell 'lag'"):
        load("esm", folders).template("lag")
    for prompt in (ts.adapters.chat, ts.adapters.plain):
        answering = ts.adapters.llada(folders["llada"], 6, prompt=prompt, trust_remote_code=True)
        with pytest.raises(ValueError, match="cannot spell 'zorgle'"):
            answering.template("the zorgle")


def test_blocks_start_behind_the_prompt(folders: dict[str, str]) -> None:
    kernel = untyped(load("llada", folders).diffusion(["the", "the movie was"], steps=6, block=2).kernel)
    assert (kernel.start, kernel.number) == (6, 3)
    with pytest.raises(ValueError, match="use a multiple of 3"):
        load("llada", folders).diffusion("the", steps=4, block=2)


def test_blocks_are_steered_one_by_one_and_carry_their_weights(tmp_path: Path) -> None:
    """Block by block from left to right, and the whole vector Z·pi(x) against enumeration, as z-scores."""
    folder = hubs.with_code(tmp_path / "tiny", "llada", hubs.WORDS[:3])
    short = ts.adapters.llada(folder, 2, prompt=ts.adapters.plain, trust_remote_code=True, dtype=torch.float64)
    diffusion = short.diffusion("movie", steps=2, block=1)
    assert isinstance(diffusion.kernel, ts.Blocks)
    assert diffusion.kernel.number == 2
    liked = torch.randn(diffusion.vocab_size, generator=torch.Generator().manual_seed(5))

    def reward(x: Tensor) -> Tensor:
        return liked[x[:, -2]] * liked[x[:, -1]]

    path = ts.Steering(diffusion, ts.Tilt(reward, kl=0.7, draws=2))
    exact = testing.enumerate_steering(path)

    def without_mask(ids: Tensor) -> Tensor:
        return ids - (ids > short.mask_id).long()

    truth = checks.Answer(exact.log_z, exact.target.double(), without_mask(exact.states[exact.clean]))
    for result in checks.runs(path, 8, 4096, seed=0):
        trial = checks.judge(without_mask(result.samples), result.log_w.double(), truth)
        assert trial.unbiased, trial
    records = list(ts.sweep(path, num_particles=4, populations=2, generator=torch.Generator().manual_seed(0)))
    masked = [(record.x[..., -2:] == short.mask_id).flatten(0, -2).any(0).tolist() for record in records]
    assert masked[-2:] == [[False, True], [False, False]]


class Plain(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(6, 8), nn.Linear(24, 24), nn.Linear(8, 6, bias=bias)

    def hidden(self, ids: Tensor, t: float | Tensor | None = None) -> Tensor:
        h = self.words(ids) * (ids != 4).unsqueeze(-1)  # reads its ids elsewhere too
        h = h if t is None else h * (1 + (t[:, None, None] if isinstance(t, Tensor) else t))
        return self.mix(h.flatten(1)).tanh().view_as(h)

    def forward(self, ids: Tensor, t: float | Tensor | None = None) -> Tensor:
        return self.head(self.hidden(ids, t))


def test_any_module_is_a_denoiser() -> None:
    torch.manual_seed(0)
    net = Plain()
    for ignores_time in (True, False):
        for head in (None, net.head):
            denoiser = ts.adapters.module(net, net.words, mask_id=5, head=head, never=(4,), ignores_time=ignores_time)
            assert isinstance(denoiser, FromLogits if head is None else FromHidden)
            diffusion = ts.Diffusion(denoiser, ts.Ancestral(5), ts.uniform_steps(3), ts.template(3, 5))
            testing.assert_denoiser(diffusion)
            assert (denoiser(diffusion.template[None], 0.5)[..., 4] == -torch.inf).all()
    with pytest.raises(ValueError, match="no embedding layer"):
        ts.adapters.module(net, net.mix, mask_id=5)


@pytest.mark.parametrize("bias", [True, False])  # LLaDA and Dream have none
@pytest.mark.parametrize("never", [(), (4,)])
def test_a_module_and_its_head_are_the_same_denoiser(never: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    net, x = Plain(bias), torch.tensor([[5, 0, 1], [5, 5, 2]])
    for t in (None, 0.5, torch.tensor([0.2, 0.9])):
        make = {"mask_id": 5, "never": never, "ignores_time": t is None}
        logits, hidden = (ts.adapters.module(net, net.words, head=head, **make) for head in (None, net.head))
        torch.testing.assert_close(hidden(x, untyped(t)), logits(x, untyped(t)))
        head = untyped(hidden).head
        assert head.weight is net.head.weight
        assert (head is net.head) == (not never)


def test_a_head_is_tried_when_it_is_first_called() -> None:
    class Louder(Plain):
        def forward(self, ids: Tensor, t: float | None = None) -> Tensor:
            return 1.5 * super().forward(ids, t)

    class Biased(Plain):
        def forward(self, ids: Tensor, t: float | None = None) -> Tensor:
            return super().forward(ids, t) + torch.arange(6.0)

    class Twice(Plain):
        def forward(self, ids: Tensor, t: float | None = None) -> Tensor:
            self.head(torch.zeros(1, 8))
            return super().forward(ids, t)

    x = torch.tensor([[5, 0, 1], [5, 5, 2]])
    for kind in (Louder, Biased, Twice):
        net = kind()
        denoiser = ts.adapters.module(net, net.words, mask_id=5, head=net.head)
        for ask in (
            lambda d: d(x, 0.5),
            lambda d: d.laws(x, 0.5),
            lambda d: d.trunk.of_embeddings(d.trunk.embedding[x]),
        ):
            with pytest.raises(ValueError, match="name the linear layer that it ends in, or no head"):
                ask(denoiser)
        assert "forward" not in vars(net.head)
        with pytest.raises(ValueError, match="the denoiser fails"):
            ts.Diffusion(denoiser, ts.Ancestral(5), ts.uniform_steps(3), ts.template(3, 5))
    net = Plain()
    assert untyped(ts.adapters.module(net, net.words, mask_id=5, head=net.head)).trunk(x[:0]).shape == (0, 3, 8)
    with pytest.raises(ValueError, match="no plain linear head over 6 words"):
        ts.adapters.module(net, net.words, mask_id=5, head=net.mix)
    nn.utils.parametrizations.weight_norm(net.head)
    with pytest.raises(ValueError, match="no plain linear head"):
        ts.adapters.module(net, net.words, mask_id=5, head=net.head)
    net = Plain()
    net.head.forward = net.head.forward  # as those have it who move weights to and fro
    with pytest.raises(ValueError, match="no plain linear head"):
        ts.adapters.module(net, net.words, mask_id=5, head=net.head)


@pytest.mark.parametrize("behind", ["time", "shift", "share", "clamp"])
def test_what_is_nothing_at_the_start_is_found_out(behind: str) -> None:
    """A diffusion asks first at t = 1 and of masks alone, where many a factor is 1."""

    class Later(Plain):
        def forward(self, ids: Tensor, t: float | None = None) -> Tensor:
            logits, masked = super().forward(ids), (ids == 5).float().mean(-1)[:, None, None]
            return {
                "time": lambda: logits / some(t),
                "shift": lambda: logits - torch.tensor(t).log(),
                "share": lambda: logits * masked,
                "clamp": lambda: logits.clamp(-3, 3),
            }[behind]()

    net, timed = Later(), behind in ("time", "shift")
    denoiser = ts.adapters.module(net, net.words, mask_id=5, head=net.head, ignores_time=not timed)
    with pytest.raises(ValueError, match="name the linear layer that it ends in"):
        ts.Diffusion(denoiser, ts.Ancestral(5), ts.uniform_steps(3), ts.template(3, 5))


def test_a_head_is_followed_wherever_it_goes() -> None:
    torch.manual_seed(0)
    net, x = Plain(), torch.tensor([[5, 0, 1], [5, 5, 2]])
    logits, hidden = (ts.adapters.module(net, net.words, mask_id=5, never=(4,), head=head) for head in (None, net.head))
    hidden(x, 0.5)
    for change in (
        lambda: net.load_state_dict(Plain().state_dict(), assign=True),
        lambda: net.head.bias.data.add_(torch.arange(6.0)),
        lambda: net.double(),
    ):
        change()
        torch.testing.assert_close(hidden(x, 0.5), logits(x, 0.5))
    assert len(list(untyped(hidden).head.parameters())) == 2


def test_states_are_kept_where_logits_are_more() -> None:
    """A head that makes fewer numbers than it reads is no burden: its logits are taken as they are."""
    narrow = Plain()
    network = untyped(ts.adapters.module(narrow, narrow.words, mask_id=5)).network
    assert isinstance(choose_denoiser(network, narrow.head, torch.tensor([[5, 0, 1]])), FromLogits)
    assert isinstance(headed(network, narrow.head, ignores_time=True), FromHidden)


# ---- what is refused


def test_remote_code_never_runs_unasked(folders: dict[str, str]) -> None:
    loaders = {"mdlm": ts.adapters.mdlm, "llada": ts.adapters.llada, "dream": ts.adapters.dream}
    for kind, loader in loaders.items():
        mark = Path(folders[kind], "ran")
        mark.unlink(missing_ok=True)
        options = {"tokenizer": folders[kind]} if kind == "mdlm" else {}
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            loader(folders[kind], 6, **options)
        assert not mark.exists()
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        ts.adapters.masked_lm(folders["llada"], 6)


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = Path(hubs.bert(tmp_path / "bert"))
    net = transformers.BertForMaskedLM.from_pretrained(folder)
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="allow_pickle=True"):
        ts.adapters.masked_lm(str(folder), 8)
    ts.adapters.masked_lm(str(folder), 8, allow_pickle=True)


def test_errors_name_their_mend(tmp_path: Path, folders: dict[str, str]) -> None:
    def refused(match: str, name: str, length: int = 8) -> None:
        with pytest.raises(ValueError, match=match) as error:
            ts.adapters.masked_lm(name, length)
        assert "\n" not in str(error.value)

    refused("is no folder", str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    refused("holds no model", str(tmp_path / "empty"))
    words = hubs.tokenizer({"unk": "[UNK]", "pad": "[PAD]"})
    causal = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2))
    refused("no masked language model", hubs.save(tmp_path / "gpt2", causal, words))
    config = transformers.BertConfig(vocab_size=len(words), **hubs.SHAPE)
    refused("no mask token", hubs.save(tmp_path / "unmasked", transformers.BertForMaskedLM(config), words))
    words = hubs.tokenizer(hubs.SPECIAL)
    config = transformers.BertConfig(vocab_size=len(words), **hubs.SHAPE)
    judge = transformers.BertForSequenceClassification(config)
    refused("lacks weights", hubs.save(tmp_path / "judge", judge, words))
    refused("not within 1..16", folders["bert"], 17)
    refused("not within 1..16", folders["roberta"], 17)
    with pytest.raises(ValueError, match="raise length"):
        load("bert", folders).diffusion("the movie was good because of its plot and its end")
    with pytest.raises(ValueError, match="there is no text"):
        load("bert", folders).diffusion([])
    mixing = transformers.FNetConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, intermediate_size=24)
    folders = folders | {"fnet": hubs.save(tmp_path / "fnet", transformers.FNetForMaskedLM(mixing), words)}
    for kind in ("mdlm", "fnet"):  # one has no attention mask, the other mixes sites by Fourier transforms
        with pytest.raises(ValueError, match="run them apart"):
            load(kind, folders).diffusion(["the ___", "the movie ___"])
    with pytest.raises(ValueError, match="24 at most"):
        load("llada", folders).diffusion("the movie " * 20)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"tokensteer\[hf\]"):
        ts.adapters.masked_lm("bert-base-uncased", 8)


def test_transformers_is_imported_when_a_model_is_loaded() -> None:
    code = "import sys, tokensteer as ts; ts.adapters.masked_lm; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def kin(vocab_size: int) -> dict[str, Any]:
    size: dict[str, Any] = {"vocab_size": vocab_size, "max_position_embeddings": 18}
    distil: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    return {
        "distilbert": transformers.DistilBertConfig(**size, **distil),
        "albert": transformers.AlbertConfig(embedding_size=8, **size, **hubs.SHAPE),
        "electra": transformers.ElectraConfig(embedding_size=8, **size, **hubs.SHAPE),
        "deberta": transformers.DebertaV2Config(**size, **hubs.SHAPE),
        "mpnet": transformers.MPNetConfig(**size, **hubs.SHAPE),
    }


@pytest.mark.parametrize("name", ["distilbert", "albert", "electra", "deberta", "mpnet"])
def test_kin_of_bert(name: str, tmp_path: Path) -> None:
    words = hubs.tokenizer(hubs.SPECIAL)
    net = transformers.AutoModelForMaskedLM.from_config(kin(len(words))[name])
    model = ts.adapters.masked_lm(hubs.save(tmp_path / name, net, words), 10)
    assert isinstance(model.denoiser, FromHidden)
    testing.assert_denoiser(model.diffusion(["the ___", "the movie was ___"], steps=3))
