"""Published weights under the names of the transformers library.

HPSv2 is published with the names of open_clip, ImageReward with those of the first BLIP code. Both functions map the
tensors of a published file (`torch.load(file, weights_only=True)`, its "state_dict" if it has one) to a state for
`load_state_dict` of a CLIPModel or a BlipForImageTextRetrieval, which is then saved with `save_pretrained`.

Two settings of the configs are not in the files. OpenCLIP's ViT-H uses hidden_act="gelu", not "quick_gelu". The first
BLIP code normalises images with layer_norm_eps=1e-6 in its vision_config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_CLIP_NAMES = (  # regular expressions, in this order
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
_CLIP_TRANSPOSED = ("visual.proj", "text_projection")  # open_clip multiplies by these from the right
_BLIP_NAMES = (
    (r"^visual_encoder\.cls_token$", "vision_model.embeddings.class_embedding"),
    (r"^visual_encoder\.pos_embed$", "vision_model.embeddings.position_embedding"),
    (r"^visual_encoder\.patch_embed\.proj\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual_encoder\.norm\.", "vision_model.post_layernorm."),
    (r"^visual_encoder\.blocks\.", "vision_model.encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
)
_BLIP_PARTS = ("visual_encoder.", "text_encoder.", "vision_proj.", "text_proj.", "itm_head.")


def clip_layout(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file of open_clip, such as HPSv2's, under the names of CLIPModel."""
    if "visual.proj" not in published:
        raise ValueError("there is no visual.proj: give the tensors of a file of open_clip, its state_dict if any")
    state: dict[str, Tensor] = {}
    for name, tensor in published.items():
        place = _renamed(name, _CLIP_NAMES)
        if ".attn.in_proj_" in place:
            before, kind = place.split(".attn.in_proj_")
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                state[f"{before}.self_attn.{part}_proj.{kind}"] = rows.clone()
        elif name != "attn_mask":
            state[place] = tensor.T.contiguous() if name in _CLIP_TRANSPOSED else tensor
    return state


def blip_layout(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of BLIP in a file of ImageReward or of the first BLIP code, under the names of
    BlipForImageTextRetrieval. Decoders, queues and momentum copies are left out. ImageReward has no head for matching,
    and uses none: it is filled with zeros."""
    own = {name.removeprefix("blip."): tensor for name, tensor in published.items()}
    kept = {name: tensor for name, tensor in own.items() if name.startswith(_BLIP_PARTS)}
    for needed in ("visual_encoder.cls_token", "text_encoder.embeddings.word_embeddings.weight"):
        if needed not in kept:
            raise ValueError(f"there is no {needed}: give the tensors of a file of BLIP or ImageReward")
    words = kept["text_encoder.embeddings.word_embeddings.weight"]
    unused = {"itm_head.weight": words.new_zeros(2, words.shape[1]), "itm_head.bias": words.new_zeros(2)}
    return unused | {
        _renamed(name, _BLIP_NAMES) if name.startswith("visual_encoder.") else name: tensor
        for name, tensor in kept.items()
        if not name.endswith("position_ids")
    }


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, other in rules:
        name = re.sub(pattern, other, name)
    return name
