"""A Llama in torch, with a cache of fixed size for writing many texts of the same prompt length at once.

GGUF files store the rows of query and key matrices so that the two numbers which rotary positions rotate together are
neighbours. They are rotated as they lie there, which gives the same products as the original order. The query heads
that share a key head are passed to attention as so many queries of that head: nothing is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.text.corpus import gguf
from tokensteer.tasks.text.corpus.byte_pairs import BytePairs


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    width: int
    depth: int
    heads: int
    key_heads: int
    inner: int
    longest: int = 2048
    base: float = 100_000.0
    epsilon: float = 1e-5

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.heads // self.key_heads


@dataclass(frozen=True)
class Cache:
    """Keys and values (depth, rows, key heads, length, head) of the tokens so far."""

    keys: Tensor
    values: Tensor


class Layer(nn.Module):
    """Attention and a gated MLP, each after a root-mean-square norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        small = config.key_heads * config.head
        self.attn_norm, self.ffn_norm = (nn.RMSNorm(config.width, config.epsilon) for _ in range(2))
        self.attn_q = nn.Linear(config.width, config.width, bias=False)
        self.attn_k, self.attn_v = (nn.Linear(config.width, small, bias=False) for _ in range(2))
        self.attn_output = nn.Linear(config.width, config.width, bias=False)
        self.ffn_gate, self.ffn_up = (nn.Linear(config.width, config.inner, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(config.inner, config.width, bias=False)

    def heads(self, h: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (P, heads, T, head), of h (P, T, width)."""
        rows, length, _ = h.shape
        seen = self.attn_norm(h)
        q, k, v = (
            part(seen).view(rows, length, -1, self.config.head).transpose(1, 2)
            for part in (self.attn_q, self.attn_k, self.attn_v)
        )
        return rotated(q, turn), rotated(k, turn), v

    def rest(self, h: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from its input (P, T, width) and what attention found, (P, heads, T, head)."""
        h = h + self.attn_output(mixed.transpose(1, 2).reshape(h.shape))
        seen = self.ffn_norm(h)
        return h + self.ffn_down(F.silu(self.ffn_gate(seen)) * self.ffn_up(seen))


class Llama(nn.Module):
    """Logits of the next token. Parameters have the names of GGUF files."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab_size, config.width)
        self.blk = nn.ModuleList(Layer(config) for _ in range(config.depth))
        self.output_norm = nn.RMSNorm(config.width, config.epsilon)
        rates = config.base ** (-torch.arange(0, config.head, 2).float() / config.head)
        angles = torch.arange(config.longest)[:, None] * rates
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @property
    def layers(self) -> list[Layer]:
        return [cast("Layer", layer) for layer in self.blk]

    def cache(self, rows: int, length: int) -> Cache:
        """An empty cache."""
        shape = (self.config.depth, rows, self.config.key_heads, length, self.config.head)
        return Cache(*(self.token_embd.weight.new_zeros(shape) for _ in range(2)))

    def forward(self, ids: Tensor, cache: Cache | None = None, first: int = 0) -> Tensor:
        """Normed hidden states (P, T, width) of texts (P, T) from their beginning. Keys and values are written to the
        rows of the cache from `first`."""
        length = ids.shape[1]
        turn = self.cos[:length], self.sin[:length]
        h = self.token_embd(ids)
        for place, layer in enumerate(self.layers):
            q, k, v = layer.heads(h, turn)
            if cache is not None:
                cache.keys[place, first : first + len(ids), :, :length] = k
                cache.values[place, first : first + len(ids), :, :length] = v
            k, v = (part.repeat_interleave(self.config.group, 1) for part in (k, v))
            h = layer.rest(h, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.output_norm(h)

    def next(self, ids: Tensor, cache: Cache, at: Tensor, bound: int) -> Tensor:
        """Normed hidden states (P, width) of one more token (P,) at position `at` (1,), less than `bound`. All shapes
        depend on `bound` alone, so that a CUDA graph can repeat it."""
        rows, config = len(ids), self.config
        turn = self.cos[at], self.sin[at]
        seen = (torch.arange(bound, device=ids.device) <= at).expand(rows, config.key_heads, config.group, bound)
        h = self.token_embd(ids).unsqueeze(1)
        for place, layer in enumerate(self.layers):
            q, k, v = layer.heads(h, turn)
            cache.keys[place].index_copy_(2, at, k)
            cache.values[place].index_copy_(2, at, v)
            keys, values = (part[place, :, :, :bound] for part in (cache.keys, cache.values))
            queries = q.reshape(rows, config.key_heads, config.group, config.head)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
            h = layer.rest(h, mixed.reshape(rows, config.heads, 1, config.head))
        return self.output_norm(h).squeeze(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V); the head is the table of tokens."""
        return F.linear(hidden, self.token_embd.weight)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Neighbouring numbers of x (P, heads, T, head) turned by angles with cosines and sines (T, head/2)."""
    pairs = x.float().view(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    cos, sin = turn
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def load(file: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[Llama, BytePairs]:
    """The model of a GGUF file and its tokenizer; in bfloat16 on a GPU unless another `dtype` is given."""
    stored = gguf.read(file)
    config = LlamaConfig(
        vocab_size=len(stored.tensors["token_embd.weight"]),
        width=stored.number("embedding_length"),
        depth=stored.number("block_count"),
        heads=stored.number("attention.head_count"),
        key_heads=stored.number("attention.head_count_kv"),
        inner=stored.number("feed_forward_length"),
        longest=min(2048, stored.number("context_length")),
        base=stored.number("rope.freq_base"),
        epsilon=stored.number("attention.layer_norm_rms_epsilon"),
    )
    with torch.device("meta"):
        expected = {name: value.shape for name, value in Llama(config).state_dict().items()}
    if {name: value.shape for name, value in stored.tensors.items()} != expected:
        raise ValueError(f"{file} is no Llama with a shared table of tokens: give SmolLM2's GGUF file")
    net = Llama(config)
    net.load_state_dict({name: torch.from_numpy(value) for name, value in stored.tensors.items()})  # pyright: ignore[reportUnknownMemberType]
    kind = torch.device(device).type
    wanted = (torch.bfloat16 if kind == "cuda" else torch.float32) if dtype is None else dtype
    net = net.to(device)
    for layer in (*net.layers, net.token_embd, net.output_norm):  # angles stay exact
        layer.to(wanted)
    return net.eval().requires_grad_(False), BytePairs.of(stored.metadata)
