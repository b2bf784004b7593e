"""Language models as masked diffusions: BERT and its relatives, MDLM, LLaDA and Dream.

A masked language model is a denoiser: it predicts log p(x_0 | x_t) at its masks and ignores the time. Special tokens,
spare ids and padding are never generated: their logits are -inf and the rest is normalised. Chat models may end their
answers early, so their end tokens are allowed.

LLaDA, Dream and MDLM come with their own code. This module follows its layout (mask ids, prompt formats, Dream's shift,
MDLM's timesteps) and is tested on small networks of the same layout, not on the published weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensteer.adapters.heads import choose_denoiser
from tokensteer.adapters.network import Forward, MaskDropout, Network, check_embeddings, ignores_padding
from tokensteer.adapters.text import Answered, Filled, Format, Prompt, TextModel, chat
from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.kernels.ranked import Ranked
from tokensteer.core.models.denoiser import Time
from tokensteer.hub import Source, named_modules, special_tokens, transformers

SPARE = re.compile(r"\[unused\d+\]|<unused\d+>|<null_\d+>|madeupword\d+|<extra_id_\d+>|<\|reserved_.*\|>")
ENDS = ("<|endoftext|>", "<|eot_id|>", "<|im_end|>")  # of answers and turns
LLADA_MASK, DREAM_MASK = 126336, 151666  # if neither config nor tokenizer has one


def masked_lm(
    name: str,
    length: int,
    *,
    mask_id: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> TextModel:
    """Any masked language model (BERT, RoBERTa, ESM, ...) of a folder or the hub, on canvases of `length` sites."""
    source = Source(name, trust_remote_code, allow_pickle, dtype, device)
    config = source.config()
    own = "AutoModelForMaskedLM" in (getattr(config, "auto_map", None) or {})
    known = own or type(config) in transformers().MODEL_FOR_MASKED_LM_MAPPING
    if not known or getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is a {config.model_type}, which is no masked language model: give one that reads both ways and "
            "fills in masks, such as BERT, RoBERTa or ESM (adapters.llada and adapters.dream load those two)"
        )
    tokenizer = source.tokenizer()
    mask_id = tokenizer.mask_token_id if mask_id is None else mask_id
    if mask_id is None:
        raise ValueError(f"the tokenizer of {name} has no mask token: give its id, mask_id=...")
    net = source.network("AutoModelForMaskedLM", config)
    layer, head = _ends(net)
    form = Filled(tokenizer, mask_id, _within(length, _limit(net, config), name))
    return _text_model(net, layer, head, with_attention, tokenizer, form, Ancestral(mask_id), config)


def mdlm(
    name: str = "kuleshov-group/mdlm-owt",
    length: int = 128,
    *,
    tokenizer: str = "gpt2",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> TextModel:
    """MDLM. Its mask is the last id of its vocabulary, its tokenizer another model's. It has no attention mask, so
    that texts of different lengths cannot share a batch."""
    source = Source(name, trust_remote_code, allow_pickle, dtype, device)
    words = Source(tokenizer, False, False, dtype, device).tokenizer()
    config = source.config()
    net = source.network("AutoModelForMaskedLM", config)
    mask_id = int(config.vocab_size) - 1
    layer, head = cast("Any", net).backbone.vocab_embed, named_modules(net).get("backbone.output_layer.linear")
    form = Filled(words, mask_id, _within(length, _limit(net, config), name))
    return _text_model(net, layer, head, without_time, words, form, Ancestral(mask_id), config, pads=False)


def llada(
    name: str = "GSAI-ML/LLaDA-8B-Instruct",
    length: int = 128,
    *,
    prompt: Prompt = chat,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> TextModel:
    """LLaDA. It answers in `length` tokens, the most confident sites first; with diffusion(..., block=32), block by
    block. For base models, which continue a text, pass prompt=plain."""
    source = Source(name, trust_remote_code, allow_pickle, dtype, device)
    return _answering(source, length, prompt, with_attention, LLADA_MASK)


def dream(
    name: str = "Dream-org/Dream-v0-Instruct-7B",
    length: int = 128,
    *,
    prompt: Prompt = chat,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> TextModel:
    """Dream: as `llada`, from a network whose logits at one site are those of the next."""
    source = Source(name, trust_remote_code, allow_pickle, dtype, device)
    return _answering(source, length, prompt, shifted, DREAM_MASK)


def _answering(source: Source, length: int, prompt: Prompt, call: Forward, mask_id: int) -> TextModel:
    config, tokenizer = source.config(), source.tokenizer()
    given = (getattr(config, "mask_token_id", None), tokenizer.mask_token_id, mask_id)
    mask_id = next(int(index) for index in given if index is not None)
    words = tokenizer.get_vocab()
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *(words.get(end) for end in ENDS)} - {None}
    form = Answered(tokenizer, mask_id, length, prompt, frozenset(ends))
    net = source.network("AutoModel", config)
    layer, head = _ends(net)
    return _text_model(net, layer, head, call, tokenizer, form, Ranked(mask_id), config, allowed=ends)


# ---- how networks are called


def with_attention(net: nn.Module, ids: Tensor, real: Tensor, t: Time | None) -> Tensor:
    """With an attention mask (P, L): BERT and its relatives, LLaDA."""
    return net(input_ids=ids, attention_mask=real.long()).logits


def shifted(net: nn.Module, ids: Tensor, real: Tensor, t: Time | None) -> Tensor:
    """Dream: attention by pairs (P, 1, L, L), and logits at site i are of the token at i + 1; the first site behind the
    padding keeps its own. Padding attends to itself: it would be NaN otherwise, and NaN spreads."""
    pairs = real[:, None, None, :] | torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    logits = net(input_ids=ids, attention_mask=pairs).logits
    follows = torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], 1)
    return torch.where(follows.unsqueeze(-1), logits.roll(1, 1), logits)


def without_time(net: nn.Module, ids: Tensor, real: Tensor, t: Time | None) -> Tensor:
    """MDLM: it requires a noise level, and ignores it."""
    output = net(ids, timesteps=torch.zeros(len(real), device=real.device))
    return output if isinstance(output, Tensor) else output.logits


# ---- vocabularies and canvases


def _ends(net: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The embedding layer and the head."""
    return cast("Any", net).get_input_embeddings(), cast("Any", net).get_output_embeddings()


def _limit(net: nn.Module, config: Any) -> int:
    """The longest canvas. RoBERTa and its relatives count positions from padding_idx + 1."""
    for name, layer in named_modules(net).items():
        if name.endswith("position_embeddings") and isinstance(layer, nn.Embedding):
            return layer.num_embeddings - (0 if layer.padding_idx is None else layer.padding_idx + 1)
    known = (getattr(config, name, None) for name in ("max_position_embeddings", "model_length", "max_sequence_length"))
    return next((int(limit) for limit in known if limit), 2**31)


def _never(tokenizer: Any, vocab_size: int, allowed: Collection[int]) -> set[int]:
    """Ids that are not text: special tokens, spare ones, and those that the tokenizer does not have."""
    words = cast("dict[str, int]", tokenizer.get_vocab())
    spare = {index for word, index in words.items() if SPARE.fullmatch(word)}
    unknown = set(range(vocab_size)) - set(words.values())
    return {i for i in {*tokenizer.all_special_ids, *spare, *unknown} if i < vocab_size} - set(allowed)


def _padding(tokenizer: Any, never: Collection[int], mask_id: int) -> int | None:
    """An id used for padding only: the tokenizer's, or, where that also ends answers, one that it does not have."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id in never:
        return int(tokenizer.pad_token_id)
    return next(iter(sorted(set(never) - set(tokenizer.get_vocab().values()) - {mask_id})), None)


def _within(length: int, limit: int, name: str) -> int:
    if not 0 < length <= limit:
        raise ValueError(f"length {length} is not within 1..{limit}, the sites that {name} reads: lower it")
    return length


def _text_model(
    net: nn.Module,
    layer: nn.Module,
    head: nn.Module | None,
    call: Forward,
    tokenizer: Any,
    form: Format,
    kernel: Kernel,
    config: Any,
    *,
    allowed: Collection[int] = (),
    pads: bool = True,
) -> TextModel:
    mask_id, vocab_size = kernel.mask_id, next(layer.parameters()).shape[0]
    never = _never(tokenizer, vocab_size, allowed) | {mask_id}
    pad_id = _padding(tokenizer, never, mask_id) if pads else None
    word = next(index for index in range(vocab_size) if index not in never)
    prepare = MaskDropout(mask_id, word) if getattr(config, "token_dropout", False) else None
    network = Network(net, layer, call, mask_id=mask_id, pad_id=pad_id, never=never, prepare=prepare)
    device, (before, behind) = network.forbidden.device, special_tokens(tokenizer)
    row = torch.tensor([*before, word, mask_id, word, *behind], device=device)
    check_embeddings(network, row[None])
    if pad_id is not None and not ignores_padding(network, row, form.stack([row, row.repeat(2)], pad_id)[0]):
        pad_id = network.pad_id = None
    denoiser = choose_denoiser(network, head, row[None])
    return TextModel(denoiser, tokenizer, mask_id, pad_id, form, kernel, _limit(net, config), device)
