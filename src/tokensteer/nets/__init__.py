"""The small networks this project trains itself: two denoisers, two classifiers, and how they are stored."""

from tokensteer.nets.classifiers import ConvClassifier, ConvConfig, PatchClassifier, PatchConfig
from tokensteer.nets.store import load, save
from tokensteer.nets.transformer import Transformer, TransformerConfig
from tokensteer.nets.unet import UNet, UNetConfig

__all__ = [
    "ConvClassifier",
    "ConvConfig",
    "PatchClassifier",
    "PatchConfig",
    "Transformer",
    "TransformerConfig",
    "UNet",
    "UNetConfig",
    "load",
    "save",
]
