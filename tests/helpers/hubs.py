"""Tiny random models of true architectures, saved to a folder as the hub would serve them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

transformers: Any = import_module("transformers")  # to read its types takes pyright a third of its time
WORDS = ["the", "movie", "was", "good", "bad", "long", "because", "of", "a", "plot", "and", "its", "end", "##s", "##er"]
SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def tokenizer(special: dict[str, str], extra: tuple[str, ...] = (), known: Sequence[str] = WORDS) -> Any:
    """Words split at spaces; sentences stand between the tokens for classes and separation, where there are any."""
    vocab = {word: i for i, word in enumerate(dict.fromkeys([*special.values(), *extra, *known]))}
    words = Tokenizer(models.WordPiece(vocab, unk_token=special["unk"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if "cls" in special:
        ends = [(special[name], vocab[special[name]]) for name in ("cls", "sep")]
        words.post_processor = processors.TemplateProcessing(
            single=f"{special['cls']} $A {special['sep']}", special_tokens=ends
        )
    names = {f"{name}_token": word for name, word in special.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def save(folder: Path, net: Any, words: Any) -> str:
    """The folder of a model whose weights are large enough to matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    net.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def bert(folder: Path, positions: int = 16) -> str:
    words = tokenizer(SPECIAL, ("[unused0]",))
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=positions, **SHAPE)
    return save(folder, transformers.BertForMaskedLM(config), words)


def roberta(folder: Path) -> str:
    words = tokenizer({"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"} | {
        "cls": "<s>", "sep": "</s>"
    })  # fmt: skip
    config = transformers.RobertaConfig(vocab_size=len(words) + 2, max_position_embeddings=18, **SHAPE)
    return save(folder, transformers.RobertaForMaskedLM(config), words)


def esm(folder: Path, positions: str = "rotary") -> str:
    folder.mkdir()
    proteins = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWC", "<null_1>", "<mask>"]
    (folder / "vocab.txt").write_text("\n".join(proteins))
    words = transformers.EsmTokenizer(str(folder / "vocab.txt"))
    config = transformers.EsmConfig(
        vocab_size=len(proteins), pad_token_id=1, mask_token_id=len(proteins) - 1, token_dropout=True,
        position_embedding_type=positions, max_position_embeddings=18, emb_layer_norm_before=False, **SHAPE,
    )  # fmt: skip
    return save(folder, transformers.EsmForMaskedLM(config), words)


CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|eot_id|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CODE = """
import torch, pathlib
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig
from transformers.modeling_outputs import MaskedLMOutput

pathlib.Path({marker!r}).touch()


class Config(PretrainedConfig):
    model_type = "tiny-{kind}"


class Layer(nn.Module):
    "An embedding layer that is no nn.Embedding, as MDLM's."

    def __init__(self, words, width):
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(words, width))

    def forward(self, x):
        return self.embedding[x]


class Backbone(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.vocab_embed = Layer(words, width)


class Net(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        words, width = config.vocab_size, 16
        if {hooked}:
            self.backbone = Backbone(words, width)
        else:
            self.wte = nn.Embedding(words, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, words)
        self.post_init()

    def get_input_embeddings(self):
        return self.backbone.vocab_embed if {hooked} else self.wte

    def _attend(self, h, mask):
        # What is far is seen less, whatever the place: as with rotary positions, only differences matter.
        place = torch.arange(h.shape[1])
        far = (place[:, None] - place[None, :]).to(h.dtype)
        scores = self.q(h) @ self.k(h).mT / 4 - 0.1 * far.abs() + 0.05 * far
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return MaskedLMOutput(logits=self.head(h + scores.softmax(-1) @ self.v(h)))

{forward}
"""
FORWARD = {
    "llada": """
    def forward(self, input_ids=None, attention_mask=None):
        h = self.wte(input_ids)
        assert attention_mask.shape == h.shape[:2]
        return self._attend(h, attention_mask.bool()[:, None, :])
""",
    "dream": """
    def forward(self, input_ids=None, attention_mask=None):
        h = self.wte(input_ids)
        assert attention_mask.shape == (len(h), 1, h.shape[1], h.shape[1])
        return self._attend(h, attention_mask[:, 0])
""",
    "mdlm": """
    def forward(self, input_ids=None, timesteps=None):
        assert timesteps.shape == input_ids.shape[:1]
        return self._attend(self.backbone.vocab_embed(input_ids), None)
""",
}


def with_code(folder: Path, kind: str, known: Sequence[str] = WORDS) -> str:
    """A stand-in with the layout of LLaDA, Dream or MDLM: code beside the weights, which leaves a mark when it runs."""
    folder.mkdir()
    code = CODE.format(marker=str(folder / "ran"), kind=kind, hooked=kind == "mdlm", forward=FORWARD[kind])
    (folder / "modeling.py").write_text(code)
    special = {"unk": "<unk>"} if kind == "mdlm" else {"unk": "<unk>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"}
    words = tokenizer(
        special, () if kind == "mdlm" else ("<|eot_id|>", "<|user|>", "<|assistant|>", "<|mdm_mask|>"), known
    )
    if kind != "mdlm":
        words.add_special_tokens({"additional_special_tokens": ["<|eot_id|>", "<|user|>", "<|assistant|>"]})
        words.chat_template = CHAT
    vocab_size = len(words) + (1 if kind == "mdlm" else 3)
    places = {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Net", "AutoModelForMaskedLM": "modeling.Net"}
    config = {"model_type": f"tiny-{kind}", "auto_map": places, "vocab_size": vocab_size, "model_length": 24}
    if kind != "mdlm":
        config |= {"mask_token_id": words.convert_tokens_to_ids("<|mdm_mask|>"), "max_sequence_length": 24}
    (folder / "config.json").write_text(json.dumps(config))
    words.save_pretrained(folder)
    net = transformers.AutoModel.from_config(
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
    )
    path = save(folder, net, words)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "ran").unlink()
    return path


def amused(codes: int = 13, ids: int = 20, mask_id: int = 19, side: int = 4) -> Any:
    """An AmusedPipeline of tiny random networks of its own classes: images of 2·side pixels, prompts of up to seven
    of the words a, c, d and t. As in the published one, the network reads more ids than it writes."""
    diffusers: Any = import_module("diffusers")
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    transformer = diffusers.UVit2DModel(
        vocab_size=ids, codebook_size=codes, sample_size=side, cond_embed_dim=12, micro_cond_encode_dim=4,
        micro_cond_embed_dim=20, encoder_hidden_size=16, in_channels=8, block_out_channels=8, num_res_blocks=1,
        downsample=True, upsample=True, block_num_heads=1, num_attention_heads=1, **size,
    )  # fmt: skip
    vqvae = diffusers.VQModel(
        block_out_channels=[8, 8], down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=8, norm_num_groups=4, num_vq_embeddings=codes, mid_block_add_attention=False,
        lookup_from_codebook=True,
    )  # fmt: skip
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1, **{f"{word}</w>": i for i, word in enumerate("acdt", 2)}}
    tokenizer = transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=9)
    text = transformers.CLIPTextConfig(
        vocab_size=len(words), bos_token_id=0, eos_token_id=1, pad_token_id=1, max_position_embeddings=9,
        projection_dim=12, num_attention_heads=2, **(size | {"num_hidden_layers": 3}),
    )  # fmt: skip
    text_encoder = transformers.CLIPTextModelWithProjection(text)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for net in (transformer, text_encoder):
            for weight in net.parameters():
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    scheduler = diffusers.AmusedScheduler(mask_token_id=mask_id)
    pipeline = diffusers.AmusedPipeline(
        vqvae=vqvae.eval(), tokenizer=tokenizer, text_encoder=text_encoder.eval(), transformer=transformer.eval(),
        scheduler=scheduler,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
