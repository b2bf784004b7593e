"""Foreign networks as denoisers: tiny random models of true architectures, saved to disk and loaded back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import tokensteer as ts
from tokensteer import testing
from tokensteer.core.embedded import Embedded

pytest.importorskip("transformers")
import checks
import hubs
import transformers
from transformers.models.esm import modeling_esm

torch.set_num_threads(1)
TEXTS = {"bert": "the movie was", "roberta": "the movie was", "esm": "LAG"}
MAKERS: dict[str, Callable[[Path], str]] = {"bert": hubs.bert, "roberta": hubs.roberta, "esm": hubs.esm}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hub")
    made = {name: make(root / name) for name, make in MAKERS.items()}
    made["esm-absolute"] = hubs.esm(root / "esm-absolute", "absolute")
    return made | {kind: hubs.with_code(root / kind, kind) for kind in hubs.FORWARD}


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


def text_of(model: ts.adapters.TextModel) -> str:
    return "LAG" if "Esm" in type(model.denoiser.network.net).__name__ else "the movie was"


def half_open(model: ts.adapters.TextModel, rows: int = 3) -> Tensor:
    canvas = model.template(text_of(model)).repeat(rows, 1)
    words = (~model.denoiser.network.forbidden).nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(1)
    tokens = words[torch.randint(len(words), canvas.shape, generator=generator)]
    opened = torch.rand(canvas.shape, generator=generator) < 0.4
    return torch.where((canvas == model.mask_id) & opened, tokens, canvas)


def test_is_a_denoiser(model: ts.adapters.TextModel) -> None:
    testing.assert_denoiser(model.diffusion(text_of(model), steps=4))


def test_ids_one_hots_and_embeddings_are_answered_as_the_network_itself_would(model: ts.adapters.TextModel) -> None:
    network, x = model.denoiser.network, half_open(model)
    assert isinstance(network, Embedded)
    own = network.own(x)
    for entered in (
        network(x),
        network(one_hot(x, own.shape[-1]).float()),
        network.of_embeddings(network.embedding[x]),
    ):
        torch.testing.assert_close(entered, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "esm", "esm-absolute", "mdlm", "dream"])
def test_gradient_is_that_of_finite_differences(
    kind: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exactly(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        cos, sin = (table.unsqueeze(unsqueeze_dim).double() for table in (cos, sin))
        return tuple(h * cos + rotated(h) * sin for h in (q, k))

    rotated = modeling_esm.rotate_half
    monkeypatch.setattr(modeling_esm, "apply_rotary_pos_emb", exactly)  # ESM's own rounds to float32
    model = load(kind, folders, dtype=torch.float64)
    x, allowed, generator = half_open(model, 1), ~model.denoiser.network.forbidden, torch.Generator().manual_seed(2)
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
    assert not model.denoiser.network.forbidden[x[:, free]].any()
    log_x0 = model.denoiser(diffusion.template[None], 1.0)
    assert (log_x0[..., model.denoiser.network.forbidden] == -torch.inf).all()
    torch.testing.assert_close(log_x0.exp().sum(-1), torch.ones(log_x0.shape[:2]))


def test_no_special_or_spare_token_is_allowed(folders: dict[str, str]) -> None:
    for kind, never in {
        "bert": {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"},
        "roberta": {"<s>", "<pad>", "</s>", "<unk>", "<mask>"},
        "esm": {"<cls>", "<pad>", "<eos>", "<unk>", "<null_1>", "<mask>"},
        "llada": {"<unk>", "<|user|>", "<|assistant|>", "<|mdm_mask|>"},
    }.items():
        model = load(kind, folders)
        forbidden = model.denoiser.network.forbidden.nonzero().squeeze(-1).tolist()
        words = set(model.tokenizer.convert_ids_to_tokens([i for i in forbidden if i < len(model.tokenizer)]))
        assert words == never, kind
        assert set(range(len(model.tokenizer), len(model.denoiser.network.embedding))) <= set(forbidden)


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
    network = model.denoiser.network
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
    network, x = model.denoiser.network, half_open(model)
    assert (network.of_embeddings(network.embedding[x]) == network(x)).all()


@pytest.mark.parametrize("kind", ["bert", "esm"])
def test_gradients_without_one_hots_are_those_with_them(kind: str, folders: dict[str, str]) -> None:
    """Straight-through proposals give the same weights, whether the network is entered or fed one-hots."""
    model = load(kind, folders)
    network = model.denoiser.network

    class Liking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.randn(len(network.embedding), 4, generator=torch.Generator().manual_seed(3))

        @property
        def embedding(self) -> Tensor:
            return self.table

        def of_embeddings(self, embedded: Tensor) -> Tensor:
            return embedded.sum(1).tanh().sum(-1)

        def forward(self, x: Tensor) -> Tensor:
            return self.of_embeddings(x @ self.table if x.is_floating_point() else self.table[x])

    liking, text = Liking(), text_of(model)
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


# ---- what is particular to each


def test_dream_logits_are_those_of_the_next_site(folders: dict[str, str]) -> None:
    model = load("dream", folders)
    network, x = model.denoiser.network, half_open(model)
    real = torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool)
    raw, shifted = network.net(input_ids=x, attention_mask=real).logits, network(x)
    assert (shifted[:, 1:] == raw[:, :-1].masked_fill(network.forbidden, -torch.inf)).all()
    assert (shifted[:, 0] == raw[:, 0].masked_fill(network.forbidden, -torch.inf)).all()


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
    assert words(model.template("the movie").tolist()) == ["[CLS]", "the", "movie", *["[MASK]"] * 6, "[SEP]"]
    assert model.decode(model.template("the movie was good")) == ["the movie was good"]


def test_blocks_start_behind_the_prompt(folders: dict[str, str]) -> None:
    kernel = load("llada", folders).diffusion(["the", "the movie was"], steps=6, block=2).kernel
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


def test_any_module_is_a_denoiser() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mix, self.head = nn.Embedding(6, 8), nn.Linear(24, 24), nn.Linear(8, 6)

        def forward(self, ids: Tensor, t: float | None = None) -> Tensor:
            h = self.words(ids) * (ids != 4).unsqueeze(-1)  # reads its ids elsewhere too
            h = h if t is None else h * (1 + t)
            return self.head(self.mix(h.flatten(1)).tanh().view_as(h))

    torch.manual_seed(0)
    net = Plain()
    for ignores_time in (True, False):
        denoiser = ts.adapters.module(net, net.words, mask_id=5, never=(4,), ignores_time=ignores_time)
        diffusion = ts.Diffusion(denoiser, ts.Ancestral(5), ts.uniform_steps(3), ts.template(3, 5))
        testing.assert_denoiser(diffusion)
        assert (denoiser(diffusion.template[None], 0.5)[..., 4] == -torch.inf).all()
    with pytest.raises(ValueError, match="no embedding layer"):
        ts.adapters.module(net, net.mix, mask_id=5)


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


def kin(vocab_size: int) -> dict[str, transformers.PretrainedConfig]:
    size = {"vocab_size": vocab_size, "max_position_embeddings": 18}
    distil = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    return {
        "distilbert": transformers.DistilBertConfig(**size, **distil),
        "albert": transformers.AlbertConfig(embedding_size=8, **size, **hubs.SHAPE),
        "electra": transformers.ElectraConfig(embedding_size=8, **size, **hubs.SHAPE),
        "deberta": transformers.DebertaV2Config(**size, **hubs.SHAPE),
        "mpnet": transformers.MPNetConfig(**size, **hubs.SHAPE),
    }


@pytest.mark.parametrize("name", kin(9))
def test_kin_of_bert(name: str, tmp_path: Path) -> None:
    words = hubs.tokenizer(hubs.SPECIAL)
    net = transformers.AutoModelForMaskedLM.from_config(kin(len(words))[name])
    model = ts.adapters.masked_lm(hubs.save(tmp_path / name, net, words), 10)
    testing.assert_denoiser(model.diffusion(["the ___", "the movie was ___"], steps=3))
