"""Two small transformers with random weights, and a wrapper that counts what networks are asked and how long they take.

What a network has learned does not change what it costs, so nothing is trained here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, scaled_dot_product_attention


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised first and added to what came in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Body(nn.Module):
    """Token and place embeddings and a stack of blocks: ids (P, L) or one-hots (P, L, V) to (P, L, dim)."""

    def __init__(self, vocab: int, length: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(vocab, dim))
        self.places = nn.Parameter(torch.randn(length, dim))
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_embeddings(x @ self.tokens if x.is_floating_point() else embedding(x, self.tokens))

    @property
    def embedding(self) -> Tensor:
        return self.tokens

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.norm(self.blocks(embedded + self.places))


class DenoiserNet(nn.Module):
    """Logits over the vocabulary at each site, (P, L, V). It ignores time, as most masked diffusion models do."""

    def __init__(self, vocab: int, length: int, dim: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.body, self.head = Body(vocab, length, dim, layers, heads), nn.Linear(dim, vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class RewardNet(nn.Module):
    """One number for each sequence, (P,), spread out enough for weights to differ."""

    def __init__(self, vocab: int, length: int, dim: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.body, self.head = Body(vocab, length, dim, layers, heads), nn.Linear(dim, 1)
        self.scale = float(length) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self._value(self.body(x))

    @property
    def embedding(self) -> Tensor:
        return self.body.tokens

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self._value(self.body.of_embeddings(embedded))

    def _value(self, states: Tensor) -> Tensor:
        return self.scale * self.head(states.mean(-2)).squeeze(-1)


def networks(vocab: int, length: int, seed: int = 0) -> tuple[DenoiserNet, RewardNet]:
    """Both networks, the same for the same seed, frozen and ready to be asked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        denoiser, reward = DenoiserNet(vocab, length), RewardNet(vocab, length)
    return denoiser.eval().requires_grad_(False), reward.eval().requires_grad_(False)


class Timed:
    """A network with a clock: rows and calls, CPU and wall seconds inside it, forward and backward.

    The backward pass through the network starts where the gradient of its answer is known and ends where that of its
    input is; two hooks see both moments. On a CPU the nodes between them run one after the other.
    """

    def __init__(self, network: Callable[[Tensor], Tensor]) -> None:
        self.network = network
        self.reset()

    def reset(self) -> None:
        self.rows, self.calls, self.cpu, self.wall = 0, 0, 0.0, 0.0
        self._since = (0.0, 0.0)

    def _enter(self, gradient: Tensor | None = None) -> None:
        self._since = (time.process_time(), time.perf_counter())

    def _leave(self, gradient: Tensor | None = None) -> None:
        self.cpu += time.process_time() - self._since[0]
        self.wall += time.perf_counter() - self._since[1]

    @property
    def embedding(self) -> Tensor:
        return self.network.embedding  # type: ignore[attr-defined]

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self._timed(self.network.of_embeddings, embedded)  # type: ignore[attr-defined]

    def __call__(self, x: Tensor) -> Tensor:
        return self._timed(self.network, x)

    def _timed(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.rows += len(x)
        self.calls += 1
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._leave)
        self._enter()
        answer = network(x)
        self._leave()
        if answer.requires_grad:
            answer.register_hook(self._enter)
        return answer
