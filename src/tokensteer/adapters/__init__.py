"""Foreign networks as denoisers. Optional dependencies are imported when a model is loaded."""

from tokensteer.adapters.heads import module
from tokensteer.adapters.models import dream, llada, masked_lm, mdlm
from tokensteer.adapters.network import Network
from tokensteer.adapters.text import TextModel, chat, plain

__all__ = ["Network", "TextModel", "chat", "dream", "llada", "masked_lm", "mdlm", "module", "plain"]
