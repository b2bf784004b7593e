"""Foreign networks as denoisers. Optional dependencies are imported when a model is loaded."""

from tokensteer.adapters.amused import amused
from tokensteer.adapters.grid import TokenGrid
from tokensteer.adapters.halton import halton_maskgit
from tokensteer.adapters.heads import module
from tokensteer.adapters.images import ImageModel, powers_from_scale, powers_from_weight
from tokensteer.adapters.models import dream, llada, masked_lm, mdlm
from tokensteer.adapters.network import Network
from tokensteer.adapters.placed import placed
from tokensteer.adapters.text import TextModel, chat, plain

__all__ = [
    "ImageModel",
    "Network",
    "TextModel",
    "TokenGrid",
    "amused",
    "chat",
    "dream",
    "halton_maskgit",
    "llada",
    "masked_lm",
    "mdlm",
    "module",
    "placed",
    "plain",
    "powers_from_scale",
    "powers_from_weight",
]
