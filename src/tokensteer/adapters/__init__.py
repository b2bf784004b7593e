"""Foreign networks brought to the convention of a denoiser; what they need is imported when the first is loaded."""

from tokensteer.adapters.models import dream, llada, masked_lm, mdlm
from tokensteer.adapters.network import Network, module
from tokensteer.adapters.text import TextModel, chat, plain

__all__ = ["Network", "TextModel", "chat", "dream", "llada", "masked_lm", "mdlm", "module", "plain"]
