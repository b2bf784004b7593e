"""Rewards on text: tiny random networks of the true architectures, a small WordPiece vocabulary, exact answers."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import onnx_writer
import pytest
import torch
from checks import answer, trial
from narrow import untyped
from torch.nn.functional import one_hot

import tokensteer as ts
from tokensteer.core.models.denoiser import Embedded
from tokensteer.core.twists.straight_through import takes_embeddings
from tokensteer.rewards import both, constrain, log_product, product, weighted
from tokensteer.rewards.text import (
    bert_from_graph,
    bert_from_onnx,
    classifier,
    decoder,
    finds,
    forbidden,
    likelihood,
    load_tokenizer,
    matching,
    mentions,
    of_text,
    omits,
    required,
    spellings,
    word_count,
)
from tokensteer.rewards.text.onnx_file import Node
from tokensteer.testing import TableDenoiser, all_sequences, assert_reward

torch.set_num_threads(1)
hf = pytest.importorskip("transformers")

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "go", "good", "bad", "movie", "##od", "##ness", ".", "the"]
PAD, CLS, SEP, MASK = 0, 2, 3, 4
V = len(VOCAB)
LABELS = ("dull", "fine", "great")


def wordpiece(vocab: list[str]):
    return hf.BertTokenizer(vocab={token: k for k, token in enumerate(vocab)})


def bert(vocab_size: int = V, **options):
    torch.manual_seed(1)
    config = hf.BertConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        initializer_range=0.5,
        id2label=dict(enumerate(LABELS)),
        label2id={label: k for k, label in enumerate(LABELS)},
        **options,
    )
    return hf.BertForSequenceClassification(config).eval()


def gpt2(vocab_size: int = V):
    torch.manual_seed(2)
    config = hf.GPT2Config(
        vocab_size=vocab_size, n_embd=16, n_layer=2, n_head=2, n_positions=12, initializer_range=0.5,
        bos_token_id=CLS, eos_token_id=SEP,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return wordpiece(VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    bert().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def random_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, V, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- strings

LETTERS = "ab "


def spell(ids: torch.Tensor) -> list[str]:
    return ["".join(LETTERS[k] for k in row) for row in ids.tolist()]


def test_of_text_asks_once_for_each_text():
    asked: list[list[str]] = []

    def length(texts: list[str]) -> list[int]:
        asked.append(texts)
        return [len(text) for text in texts]

    reward = of_text(length, lambda ids: [text.strip() for text in spell(ids)])
    x = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 1, 2], [0, 0, 0]])
    assert reward(x).tolist() == [2.0, 2.0, 2.0, 3.0]
    assert sorted(asked[0]) == ["aaa", "ab"]
    assert not reward.differentiable
    assert_reward(reward, 3, 5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda texts: [math.nan if text == "ab" else 0.0 for text in texts], "nan for the text 'ab'"),
        (lambda texts: [math.inf for _ in texts], "inf for the text"),
        (lambda texts: torch.zeros(len(texts), 1), r"shape \(2,\), got \(2, 1\)"),
    ],
)
def test_of_text_says_what_is_wrong(function, message):
    with pytest.raises(ValueError, match=message):
        of_text(function, spell)(torch.tensor([[0, 0], [0, 1]]))
    with pytest.raises(ValueError, match="takes ids"):
        of_text(function, spell)(torch.zeros(1, 2, 3))


def test_functions_of_texts():
    texts = ["Good movie.", "goodness, a movie", "don ' t go", "", "don't GO  there now"]
    assert list(mentions(["good", "movie"])(texts)) == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert list(mentions("don't")(texts)) == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert list(mentions(["go there"])(texts)) == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert list(omits(["good", "go"])(["good go GOOD", "goodness"])) == [-3.0, 0.0]
    assert list(finds("o{2}d.?n")(texts)) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert list(word_count(2, 3)(texts)) == [0.0, 0.0, -1.0, -2.0, -1.0]
    with pytest.raises(ValueError, match="is no regular expression"):
        finds("(")
    with pytest.raises(ValueError, match="most must be at least 3"):
        word_count(3, 2)
    with pytest.raises(ValueError, match="no empty one"):
        mentions([" "])


def letters_model() -> ts.Diffusion:
    joint = torch.rand([3] * 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.05
    denoiser = TableDenoiser(joint / joint.sum())
    return ts.Diffusion(denoiser, ts.Ancestral(3), ts.uniform_steps(3), ts.template(3, 3))


def test_smc_with_a_string_reward_is_unbiased():
    reward = of_text(lambda texts: [text.count("ab") - 0.5 * text.count(" ") for text in texts], spell)
    model, tilt = letters_model(), ts.Tilt(reward, kl=0.5, draws=2)
    outcome = trial(ts.Steering(model, tilt), answer(model, tilt))
    assert outcome.unbiased, outcome


# ---- sums and products


def test_sums_and_products(folder, tokenizer):
    a, b = (classifier(folder, label, tokenizer) for label in ("dull", "great"))
    x = random_ids(4, 5)
    total = weighted({a: 2.0, b: -0.5})
    assert torch.allclose(total(x), 2.0 * a(x) - 0.5 * b(x))
    assert total.differentiable
    assert isinstance(total, Embedded)
    assert total.embedding.shape == (V, 32)
    assert torch.allclose(total.of_embeddings(total.embedding[x]), total(x), atol=1e-5)
    assert_reward(total, V, 5, mask_id=MASK, differentiable=True)
    text = of_text(word_count(1, 2), decoder(tokenizer))
    mixed = weighted({a: 1.0, text: 1.0})
    assert not mixed.differentiable
    assert not isinstance(mixed, Embedded)
    assert torch.allclose(mixed(x), a(x) + text(x))


def test_products_of_values():
    def first(x):
        return (x[..., 0, 1] if x.is_floating_point() else (x[:, 0] == 1).double()).double()

    def small(x):
        return torch.full((len(x),), 1e-200, dtype=torch.float64)

    def smaller(x):
        return torch.full((len(x),), 1e-190, dtype=torch.float64)

    x = torch.tensor([[0, 1], [1, 1]])
    assert product({first: 1.0, small: 1.0, smaller: 1.0})(x).tolist() == [0.0, 0.0]
    logs = log_product({first: 1.0, small: 1.0, smaller: 2.0})(x)
    assert logs[0] == -math.inf
    assert float(logs[1]) == pytest.approx(-580 * math.log(10))
    hot = one_hot(x, 2).double().requires_grad_()
    (gradient,) = torch.autograd.grad(log_product({first: 1.0, small: 1.0})(hot)[1], hot)
    assert gradient.isfinite().all()
    for bad in ({}, {first: 0.0}, {first: math.nan}):
        with pytest.raises(ValueError, match=r"at least one reward|leave the reward out"):
            weighted(bad)


# ---- classifiers


def test_classifier_sees_what_it_was_trained_on(folder, tokenizer):
    reward = untyped(classifier(folder, "great", tokenizer))
    assert reward.differentiable
    network = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = ["good movie", "the bad movie ."]
    read = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = network(**read).logits.log_softmax(-1)[:, 2]
    # The canvas has padding at its end, and special tokens come before it.
    x = torch.tensor([[6, 8, PAD, PAD], [12, 7, 8, 11]])
    assert torch.allclose(reward(x), expected, atol=1e-5)
    assert torch.allclose(reward.of_embeddings(reward.embedding[x]), expected, atol=1e-5)
    assert torch.allclose(classifier(folder, 2, tokenizer)(x), expected, atol=1e-5)
    # One that has special tokens of its own is read the same.
    around = torch.tensor([[CLS, 6, 8, SEP, PAD, PAD], [CLS, 12, 7, 8, 11, SEP]])
    assert torch.allclose(reward(around), expected, atol=1e-5)
    assert torch.allclose(reward.of_embeddings(reward.embedding[around]), expected, atol=1e-5)
    assert torch.allclose(reward(one_hot(around, V).float()), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_ids_one_hots_and_laws(kind, tokenizer):
    torch.manual_seed(4)
    small = {"vocab_size": V, "num_labels": 3, "max_position_embeddings": 14, "initializer_range": 0.5}
    if kind == "bert":
        network = bert()
    elif kind == "distilbert":
        network = hf.DistilBertForSequenceClassification(
            hf.DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=24, **small)
        )
    else:
        config = hf.RobertaConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, pad_token_id=0, **small
        )
        network = hf.RobertaForSequenceClassification(config)
    reward = classifier(network, 1, tokenizer, own=tokenizer)
    assert reward.differentiable
    assert_reward(reward, V, 5, mask_id=MASK, differentiable=True)


@pytest.mark.parametrize("kind", ["classifier", "likelihood", "weighted", "product", "log_product"])
def test_gradient_is_that_of_finite_differences(kind, tokenizer):
    judge = classifier(bert().double(), "fine", tokenizer, own=tokenizer)
    fluent = likelihood(gpt2().double(), tokenizer, own=tokenizer)
    other = classifier(bert().double(), "dull", tokenizer, own=tokenizer)
    reward = {
        "classifier": judge,
        "likelihood": fluent,
        "weighted": weighted({judge: 0.7, fluent: 2.0}),
        "product": product({judge: 1.0, fluent: 3.0}),
        "log_product": log_product({Positive(judge): 0.5, Positive(other): 2.0}),
    }[kind]
    assert reward.differentiable
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, V, generator=generator, dtype=torch.float64).softmax(-1).requires_grad_()
    (gradient,) = torch.autograd.grad(reward(x).sum(), x)
    for _ in range(5):
        way = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            # The error falls with the square of the step: 1e-5 would leave as much of it as the test allows.
            slope = (reward(x + 1e-6 * way) - reward(x - 1e-6 * way)).sum() / 2e-6
        assert float((gradient * way).sum()) == pytest.approx(float(slope), rel=1e-6)


class Positive:
    """exp of a reward, as a user would write it."""

    differentiable = True

    def __init__(self, reward) -> None:
        self.reward = reward

    def __call__(self, x):
        return self.reward(x).exp()


def test_straight_through_needs_no_one_hots(folder, tokenizer):
    reward = classifier(folder, "great", tokenizer)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(V, 8)
            self.head = torch.nn.Linear(8, V)

        @property
        def embedding(self):
            return self.table.weight

        def of_embeddings(self, embedded):
            return self.head(embedded + embedded.mean(1, keepdim=True))

        def forward(self, x):
            return self.of_embeddings(x @ self.table.weight if x.is_floating_point() else self.table(x))

    torch.manual_seed(0)
    denoiser = ts.from_logits(Net().eval(), MASK, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(MASK), ts.uniform_steps(3), ts.template(4, MASK))
    tilt = ts.Tilt(reward, kl=0.5, differentiable=reward.differentiable)
    assert takes_embeddings(model, tilt)
    plain = ts.Tilt(lambda x: reward(x), kl=0.5, differentiable=True)
    runs = [
        ts.smc(ts.Steering(model, twist, ts.Gradient()), 4, generator=torch.Generator().manual_seed(1))
        for twist in (tilt, plain)
    ]
    assert torch.equal(runs[0].samples, runs[1].samples)
    assert torch.allclose(runs[0].log_w, runs[1].log_w, atol=1e-4)


def test_another_vocabulary_is_read_anew(tmp_path, tokenizer):
    others = [*VOCAB[:5], "movie", "bad", "the", ".", "good", "##ness", "a"]
    own, network = wordpiece(others), bert(len(others))
    network.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    reward = classifier(tmp_path, "fine", tokenizer)
    assert not reward.differentiable
    x = torch.tensor([[12, 6, 8, PAD], [5, 9, 10, 11]])  # the second is "go ##od ##ness ."
    with torch.no_grad():
        read = own(["the good movie", "goodness."], padding=True, return_tensors="pt")
        expected = network(**read).logits.log_softmax(-1)[:, 1]
    assert torch.allclose(reward(x), expected, atol=1e-5)
    assert_reward(reward, V, 5, mask_id=MASK)


def test_what_looks_for_its_last_token_among_ids_is_read_anew(tokenizer):
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=12, num_labels=2, pad_token_id=PAD,
        initializer_range=0.5,
    )  # fmt: skip
    reward = classifier(hf.GPT2ForSequenceClassification(config), 1, tokenizer, own=tokenizer)
    assert not reward.differentiable
    assert_reward(reward, V, 5, mask_id=MASK)


def test_labels_that_do_not_exclude_each_other(tokenizer):
    x = random_ids(3, 4)
    one, many = (bert(problem_type=kind) for kind in (None, "multi_label_classification"))
    rewards = [classifier(network, "fine", tokenizer, own=tokenizer) for network in (one, many)]
    assert (rewards[0](x) != rewards[1](x)).all()
    alone = hf.BertForSequenceClassification(hf.BertConfig(**{**one.config.to_dict(), "num_labels": 1}))
    with pytest.raises(ValueError, match="single output"):
        classifier(alone, 0, tokenizer, own=tokenizer)


def test_a_mask_that_the_classifier_has_no_row_for(tokenizer):
    reward = untyped(classifier(bert(), "fine", tokenizer, own=tokenizer, vocab_size=V + 1))
    assert len(reward.embedding) == V + 1
    assert_reward(reward, V + 1, 4, mask_id=V, differentiable=True)


def test_errors_of_classifiers(tmp_path, folder, tokenizer):
    with pytest.raises(ValueError, match="no label 'toxic': its labels are 'dull', 'fine', 'great'"):
        classifier(folder, "toxic", tokenizer)
    with pytest.raises(ValueError, match="no label 3"):
        classifier(folder, 3, tokenizer)
    with pytest.raises(ValueError, match="own="):
        classifier(bert(), 0, tokenizer)
    with pytest.raises(ValueError, match="11 tokens is 13 with special tokens, and the network reads 12"):
        classifier(folder, 0, tokenizer)(random_ids(1, 11))
    with pytest.raises(ValueError, match="holds no model that transformers knows"):
        classifier(tmp_path, 0, tokenizer)
    hf.BertModel(bert().config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks weights \(classifier.bias"):
        classifier(tmp_path, 0, tokenizer)


def test_pickles_and_foreign_code_are_refused(tmp_path, tokenizer):
    network = bert()
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled.*allow_pickle=True"):
        classifier(tmp_path, 0, tokenizer, own=tokenizer)
    x = random_ids(2, 4)
    allowed = classifier(tmp_path, 0, tokenizer, own=tokenizer, allow_pickle=True)
    assert torch.allclose(allowed(x), classifier(network, 0, tokenizer, own=tokenizer)(x))
    marker = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    names = {"AutoConfig": "code.Config", "AutoModelForSequenceClassification": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": names}))
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="trust_remote_code"):
        classifier(tmp_path, 0, tokenizer, own=tokenizer)
    assert not marker.exists()


def test_missing_libraries(monkeypatch, folder, tokenizer):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"tokensteer\[hf\]"):
        classifier(folder, 0, tokenizer)


# ---- likelihood


def test_likelihood_in_its_own_vocabulary(tokenizer):
    network = gpt2()
    reward = likelihood(network, tokenizer, own=tokenizer)
    x = torch.tensor([[6, 8, PAD, PAD], [12, 7, 8, 11]])
    with torch.no_grad():
        log_p = network(x).logits.log_softmax(-1)
    # This tokenizer has no token for the beginning, so that the first one is given.
    assert float(reward(x)[0]) == pytest.approx(float(log_p[0, 0, 8]), abs=1e-5)
    second = (log_p[1, 0, 7] + log_p[1, 1, 8] + log_p[1, 2, 11]) / 3
    assert float(reward(x)[1]) == pytest.approx(float(second), abs=1e-5)
    assert reward(torch.full((1, 3), PAD)).tolist() == [-math.inf]
    assert_reward(reward, V, 4, mask_id=MASK, differentiable=True)
    with pytest.raises(ValueError, match="13 tokens is 13 with special tokens, and the network reads 12"):
        reward(random_ids(1, 13))


def test_likelihood_with_a_beginning_and_in_another_vocabulary(tokenizer):
    others = [*VOCAB[:5], "movie", "bad", "the", ".", "good", "##ness", "a"]
    own, network = wordpiece(others), gpt2(len(others))
    own.bos_token = "[CLS]"
    reward = likelihood(network, tokenizer, own=own)
    assert not reward.differentiable
    x = torch.tensor([[12, 6, 8, PAD], [8, PAD, PAD, PAD], [PAD, PAD, PAD, PAD]])
    with torch.no_grad():
        log_p = network(torch.tensor([[CLS, 7, 9, 5]])).logits.log_softmax(-1)[0]
    whole = (log_p[0, 7] + log_p[1, 9] + log_p[2, 5]) / 3
    expected = [float(whole), float(log_p[0, 5]), -math.inf]
    assert reward(x).tolist() == pytest.approx(expected, abs=1e-5)
    direct = likelihood(network, own, own=own)
    assert float(direct(torch.tensor([[7, 9, 5]]))) == pytest.approx(float(whole), abs=1e-5)


# ---- hard constraints


def test_spellings(tokenizer):
    assert spellings(tokenizer)[4:] == ["", " go", " good", " bad", " movie", "od", "ness", ".", " the"]
    assert len(spellings(tokenizer, V + 2)) == V + 2


@pytest.mark.parametrize("word", ["good", "Goodness", "go", "the movie", "movie."])
def test_words_are_found_however_they_are_spelt(word, tokenizer):
    x = all_sequences(V, 3)
    x = x[(x > MASK).all(-1) | (x[:, 0] == PAD)]
    texts = tokenizer.batch_decode(x, skip_special_tokens=True)
    has = torch.tensor(mentions(word)(texts)) == 1
    assert has.any()
    assert torch.equal(required([word], tokenizer).accepts(x), has)
    assert torch.equal(forbidden([word, "bad"], tokenizer).accepts(x), torch.tensor(omits([word, "bad"])(texts)) == 0)


@pytest.mark.parametrize(("kind", "space"), [("ByteLevel", "Ġ"), ("Metaspace", "▁")])
def test_tokens_that_begin_with_a_space(kind, space):
    core = pytest.importorskip("tokenizers")
    words = ["<|end|>", "good", " good", " Go", "od", "ness", " ", "!", " a", "a"]
    vocab = {word.replace(" ", space): k for k, word in enumerate(words)}
    backend = core.Tokenizer(core.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = getattr(core.decoders, kind)()
    spaced = hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    assert spellings(spaced)[1:] == words[1:]
    x = all_sequences(10, 3)
    texts = spaced.batch_decode(x, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert torch.equal(required("good", spaced).accepts(x), torch.tensor(mentions("good")(texts)) == 1)


def test_patterns_on_text(tokenizer):
    x = all_sequences(V, 3)
    x = x[(x > MASK).all(-1)]
    pattern = "(the )?(good|bad).*[.]"
    has = [re.fullmatch(pattern, text) is not None for text in tokenizer.batch_decode(x)]
    assert any(has)
    assert matching(pattern, tokenizer).accepts(x).tolist() == has


def text_model(length: int, vocab_size: int) -> ts.Diffusion:
    """Any joint law; the mask is the last token."""
    law = torch.rand([vocab_size - 1] * length, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.05
    denoiser, mask_id = TableDenoiser(law / law.sum()), vocab_size - 1
    return ts.Diffusion(denoiser, ts.Ancestral(mask_id), ts.uniform_steps(2), ts.template(length, mask_id))


def test_smc_with_a_required_word_is_unbiased_and_always_has_it():
    tokenizer, model = wordpiece([*VOCAB[:4], *VOCAB[5:], "[MASK]"]), text_model(2, V)
    rule = both(required("good", tokenizer), forbidden("bad", tokenizer))
    reward = of_text(lambda texts: [0.3 * text.count("o") for text in texts], decoder(tokenizer))
    path = constrain(model, rule, ts.Tilt(reward, kl=0.5))
    truth = answer(model, path.twist)
    outcome = trial(path, truth, populations=2048)
    assert outcome.unbiased, outcome
    result = ts.smc(path, 64, generator=torch.Generator().manual_seed(0))
    texts = tokenizer.batch_decode(result.samples.flatten(0, 1))
    assert set(mentions("good")(texts)) == {1.0}
    assert set(omits("bad")(texts)) == {0.0}
    assert len(set(texts)) > 5


def test_errors_of_constraints(tokenizer):
    with pytest.raises(ValueError, match="cannot spell the word 'excellent'"):
        required(["good", "excellent"], tokenizer)
    with pytest.raises(ValueError, match="cannot be met"):
        matching("(good){2}", wordpiece([*VOCAB[:5], "good", "bad"]))
    with pytest.raises(ValueError, match="unknown token 'z' at position 2 of 'goz'"):
        matching("goz", tokenizer)
    with pytest.raises(ValueError, match="cannot be met: no sequence of length 2"):
        constrain(text_model(2, V), required(["good", "bad", "movie"], tokenizer))


# ---- ONNX


def quantised(network) -> tuple[list, dict[str, torch.Tensor]]:
    """The graph of an exporter, as far as weights go: named biases, nameless matrices (in, out) in int8."""
    nodes, stored = [], {}

    def quantise(name, value, kind):
        low, high, info = float(value.min()), float(value.max()), torch.iinfo(kind)
        scale = (high - low) / 255
        zero = round(-low / scale) + info.min
        stored[f"{name}_quantized"] = ((value / scale).round() + zero).clamp(info.min, info.max).to(kind)
        stored[f"{name}_scale"] = torch.tensor(scale)
        stored[f"{name}_zero_point"] = torch.tensor(zero, dtype=kind)

    def node(kind, inputs, output):
        nodes.append(Node(kind, inputs, [output]))

    for k, (name, value) in enumerate(network.state_dict().items()):
        if "LayerNorm" in name or name.endswith("bias"):
            stored[name] = value
        elif "embeddings" in name:
            quantise(name, value, torch.uint8)
        else:
            inner = f"onnx::MatMul_{k}"
            quantise(inner, value.T.contiguous(), torch.int8)
            node("MatMulInteger", ["x", f"{inner}_quantized", "z", f"{inner}_zero_point"], f"{k}_product")
            node("Cast", [f"{k}_product"], f"{k}_cast")
            node("Mul", [f"{k}_cast", f"{inner}_scale"], f"{k}_scaled")
            node("Add", [re.sub("weight$", "bias", name), f"{k}_scaled"], f"{k}_sum")
    return nodes, stored


def assert_same_network(read, network, tokenizer) -> None:
    for name, value in network.state_dict().items():
        assert torch.allclose(read.state_dict()[name], value, atol=0.02), name
    x = random_ids(2, 4)
    rewards = [classifier(net, "fine", tokenizer, own=tokenizer)(x) for net in (network, read)]
    assert torch.allclose(rewards[0], rewards[1], atol=0.2)


def test_bert_from_a_graph(tokenizer):
    network = bert()
    nodes, stored = quantised(network)
    assert_same_network(bert_from_graph(nodes, stored, LABELS, heads=2), network, tokenizer)
    with pytest.raises(ValueError, match="3 outputs, and 2 labels"):
        bert_from_graph(nodes, stored, LABELS[:2])
    with pytest.raises(ValueError, match=r"not all weights .*bert\.pooler\.dense\.weight"):
        bert_from_graph([n for n in nodes if "bert.pooler.dense.bias" not in n.input], stored, LABELS, heads=2)
    with pytest.raises(ValueError, match=r"no BERT classifier: it has no bert\.embeddings"):
        bert_from_graph([], {}, LABELS)


def test_bert_from_an_onnx_file(tmp_path, tokenizer):
    network, file = bert(), tmp_path / "bert.onnx"
    onnx_writer.write(file, *quantised(network))
    assert_same_network(bert_from_onnx(file, LABELS, heads=2), network, tokenizer)
    with pytest.raises(ValueError, match=r"bert\.onnx: the classifier has 3 outputs, and 2 labels"):
        bert_from_onnx(file, LABELS[:2])
    with pytest.raises(FileNotFoundError, match=r"no ONNX file at .*none\.onnx"):
        bert_from_onnx(tmp_path / "none.onnx", LABELS)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"bert\.onnx is damaged"):
        bert_from_onnx(file, LABELS)


REAL = os.environ.get("TOKENSTEER_TOXICITY", "")  # a folder with the ONNX file and its vocab.txt


@pytest.mark.skipif(not REAL, reason="TOKENSTEER_TOXICITY names no folder with the ONNX file and vocab.txt")
def test_real_toxicity_model():
    network = bert_from_onnx(next(Path(REAL).glob("*.onnx")), ("clean", "toxic"))
    own = wordpiece((Path(REAL) / "vocab.txt").read_text().split("\n")[:-1])
    reward = classifier(network, "toxic", own, own=own)
    texts = ["you are a stupid idiot", "thank you for your kind help"]
    x = own(texts, add_special_tokens=False, padding=True, return_tensors="pt").input_ids
    rude, kind = reward(x).exp().tolist()
    assert rude > 0.8
    assert kind < 0.2
    assert_reward(reward, len(own), 8, mask_id=own.mask_token_id, differentiable=True)


def test_tokenizers_from_disk(folder, tokenizer):
    assert load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()
