"""Small random networks of the layout of published text-to-image models, written from their public configuration."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import hubs
import torch
from torch import Tensor, nn

diffusers: Any = import_module("diffusers")


class Embed(nn.Module):
    """Where aMUSEd and Meissonic have their table of token embeddings."""

    def __init__(self, ids: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(ids, width)


class Meissonic(diffusers.ModelMixin, diffusers.ConfigMixin):  # pyright: ignore[reportGeneralTypeIssues]
    """The signature of Meissonic's transformer: ids (P, h, w) to logits (P, K, h, w), halved in between or not."""

    config_name = "config.json"

    @import_module("diffusers.configuration_utils").register_to_config
    def __init__(
        self, vocab_size: int = 20, codebook_size: int = 13, downsample: bool = True, joint_attention_dim: int = 16,
        pooled_projection_dim: int = 12, width: int = 16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = Embed(vocab_size, width)
        self.halved = 2 if downsample else 1
        self.down = nn.Conv2d(width, width, self.halved, self.halved)
        self.up = nn.ConvTranspose2d(width, width, self.halved, self.halved)
        self.context_embedder = nn.Linear(joint_attention_dim, width)
        self.cond_embed = nn.Linear(pooled_projection_dim + 5, width)
        self.places, self.clock = nn.Linear(3, width), nn.Linear(2, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.mlm_layer = nn.Conv2d(width, codebook_size, 1)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, pooled_projections: Tensor, timestep: Tensor,
        img_ids: Tensor, txt_ids: Tensor, micro_conds: Tensor,
    ) -> Tensor:  # fmt: skip
        x = self.embed.embeddings(hidden_states).permute(0, 3, 1, 2)
        y = self.down(x)
        height, width = y.shape[-2:]
        assert img_ids.shape == (height * width, 3)  # else rotary positions do not fit
        assert txt_ids.shape == (encoder_hidden_states.shape[1], 3)
        states = torch.cat([self.context_embedder(encoder_hidden_states), y.flatten(2).mT], 1)
        states = states + self.places(torch.cat([txt_ids, img_ids.to(txt_ids.dtype)]) / 4)
        time = timestep.to(x.dtype)[:, None] * 1000 / 7000
        time = self.clock(torch.cat([time.sin(), time.cos()], -1))
        pooled = self.cond_embed(torch.cat([pooled_projections, micro_conds.to(x.dtype) / 10], -1))
        states = states + (time + pooled)[:, None]
        mixed = states + (self.q(states) @ self.k(states).mT / 4).softmax(-1) @ self.v(states)
        mixed = mixed[:, encoder_hidden_states.shape[1] :].mT.unflatten(-1, (height, width))
        return self.mlm_layer(x + self.up(mixed))


def meissonic(downsample: bool = True, **sizes: int) -> Any:
    """Meissonic's parts: its own transformer, and the rest as aMUSEd's."""
    parts = hubs.amused()
    torch.manual_seed(1)
    transformer = Meissonic(downsample=downsample, **sizes)
    with torch.no_grad():
        for weight in transformer.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    names = ("vqvae", "text_encoder", "tokenizer", "scheduler")
    return SimpleNamespace(transformer=transformer.eval(), **{name: getattr(parts, name) for name in names})


class Llama(nn.Module):
    """A Llama that attends both ways, as LLaDA, called as MMaDA (net(ids)) and Lumina-DiMOO (net(ids, infer=True))."""

    def __init__(self, words: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        config = hubs.transformers.LlamaConfig(
            vocab_size=words, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
            attn_implementation="eager",
        )  # fmt: skip
        self.llama: Any = hubs.transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for weight in self.llama.parameters():
                weight.add_(0.3 * torch.randn(weight.shape))

    def get_input_embeddings(self) -> Any:
        return self.llama.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.llama.get_output_embeddings()

    def forward(self, ids: Tensor, infer: bool = False) -> Any:
        everywhere = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1], dtype=self.llama.dtype)
        return self.llama(input_ids=ids, attention_mask=everywhere, use_cache=False)
