"""Foreign networks as denoisers. Optional dependencies are imported when a model is loaded."""

from tokensteer.adapters.amused import amused
from tokensteer.adapters.grid import TokenGrid
from tokensteer.adapters.halton import halton_maskgit
from tokensteer.adapters.heads import module
from tokensteer.adapters.images import ImageModel, powers_from_scale, powers_from_weight
from tokensteer.adapters.meissonic import counted_down, masked_share, meissonic
from tokensteer.adapters.models import dream, llada, masked_lm, mdlm
from tokensteer.adapters.network import Network
from tokensteer.adapters.placed import placed
from tokensteer.adapters.text import TextModel, chat, plain
from tokensteer.adapters.text_and_image import lumina_dimoo, mmada
from tokensteer.adapters.text_to_image import vq_decoder
from tokensteer.adapters.vocabulary_slice import CodeLayout, VocabularySlice

__all__ = [
    "CodeLayout",
    "ImageModel",
    "Network",
    "TextModel",
    "TokenGrid",
    "VocabularySlice",
    "amused",
    "chat",
    "counted_down",
    "dream",
    "halton_maskgit",
    "llada",
    "lumina_dimoo",
    "masked_lm",
    "masked_share",
    "mdlm",
    "meissonic",
    "mmada",
    "module",
    "placed",
    "plain",
    "powers_from_scale",
    "powers_from_weight",
    "vq_decoder",
]
