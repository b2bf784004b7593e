"""BERT classifiers from ONNX files: weights are read from the graph, dequantised, and loaded into the torch network.

Exporters keep the names of biases and norms but not of matrices. So a matrix is found by its bias: the bias is added to
a product, and the product's second factor is the matrix. Unlike the file, the torch network has gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tokensteer.hub import transformers
from tokensteer.rewards.text.onnx_file import read


class Node(Protocol):
    """The members of an ONNX node that are read, also of one of the onnx library."""

    op_type: str
    input: Sequence[str]
    output: Sequence[str]
    attribute: Sequence[Any]


_BETWEEN = ("Mul", "Cast")  # nodes between an integer product and its bias


def bert_from_onnx(file: str | Path, labels: Sequence[str], heads: int | None = None) -> Any:
    """A BertForSequenceClassification with the weights of a file. `labels` name its outputs in order; `heads` is the
    number of attention heads, by default one for each 64 dimensions as in Google's BERTs."""
    nodes, stored = read(Path(file))
    try:
        return bert_from_graph(nodes, stored, labels, heads)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def bert_from_graph(
    nodes: Iterable[Node], stored: Mapping[str, Tensor], labels: Sequence[str], heads: int | None = None
) -> Any:
    """The same from the nodes of a graph and its stored tensors by name."""
    weights, library = graph_weights(list(nodes), stored), transformers()
    words = weights.get("bert.embeddings.word_embeddings.weight")
    if words is None or "classifier.bias" not in weights:
        raise ValueError(f"no BERT classifier: it has no {'bert.embeddings' if words is None else 'classifier.bias'}")
    if len(weights["classifier.bias"]) != len(labels):
        outputs = len(weights["classifier.bias"])
        raise ValueError(f"the classifier has {outputs} outputs, and {len(labels)} labels were given: name each output")
    vocab_size, width = words.shape
    layers = {match[1] for name in weights if (match := re.match(r"bert\.encoder\.layer\.(\d+)\.", name))}
    config = library.BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=max(1, width // 64) if heads is None else heads,
        intermediate_size=len(weights["bert.encoder.layer.0.intermediate.dense.bias"]),
        max_position_embeddings=len(weights["bert.embeddings.position_embeddings.weight"]),
        type_vocab_size=len(weights["bert.embeddings.token_type_embeddings.weight"]),
        id2label=dict(enumerate(labels)),
        label2id={label: k for k, label in enumerate(labels)},
    )
    network = library.BertForSequenceClassification(config)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"the file has not all weights of a BERT classifier: {text}") from error
    return network.eval().requires_grad_(False)


def graph_weights(nodes: Sequence[Node], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights by their names in torch."""
    made_by = {name: node for node in nodes for name in node.output}
    named = {name: value for name, value in stored.items() if value.is_floating_point() and name[:1].isalpha()}
    weights = {name: value for name, value in named.items() if name.endswith(("LayerNorm.weight", ".bias"))}
    for name in {re.sub("_quantized$", "", name) for name in stored}:
        if "_embeddings.weight" in name and not name.endswith(("_scale", "_zero_point")):
            weights[name] = _value(name, stored)
    for node in nodes:
        if node.op_type in ("Add", "Gemm"):
            for bias in (name for name in node.input if name.endswith(".bias") and name in weights):
                product = node if node.op_type == "Gemm" else _product([i for i in node.input if i != bias], made_by)
                if product is not None:
                    weights[re.sub("bias$", "weight", bias)] = _matrix(product, stored)
    return weights


def _product(inputs: Sequence[str], made_by: Mapping[str, Node]) -> Node | None:
    """The product that one of the inputs is computed from."""
    for name in inputs:
        node = made_by.get(name)
        if node is not None and node.op_type in ("MatMul", "MatMulInteger"):
            return node
        if node is not None and node.op_type in _BETWEEN:
            return _product(node.input, made_by)
    return None


def _matrix(product: Node, stored: Mapping[str, Tensor]) -> Tensor:
    """The second factor in torch's layout (out, in)."""
    value = _value(re.sub("_quantized$", "", product.input[1]), stored)
    upright = any(attribute.name == "transB" and attribute.i for attribute in product.attribute)
    return value if upright else value.T.contiguous()


def _value(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """(quantised - zero) · scale, or the stored tensor if it is not quantised."""
    if name in stored:
        return stored[name].float()
    quantised, zero, scale = (stored[f"{name}_{part}"].float() for part in ("quantized", "zero_point", "scale"))
    return (quantised - zero) * scale
