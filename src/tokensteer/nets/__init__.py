"""The small networks this project trains itself: denoisers, classifiers, a value, and how they are stored."""

from tokensteer.nets.classifiers import ConvClassifier, ConvConfig, PatchClassifier, PatchConfig
from tokensteer.nets.readers import AttentiveConfig, AttentiveReader, NgramConfig, NgramReader
from tokensteer.nets.store import load, save
from tokensteer.nets.transformer import Transformer, TransformerConfig, Trunk
from tokensteer.nets.unet import UNet, UNetConfig
from tokensteer.nets.value import ValueConfig, ValueNet

__all__ = [
    "AttentiveConfig",
    "AttentiveReader",
    "ConvClassifier",
    "ConvConfig",
    "NgramConfig",
    "NgramReader",
    "PatchClassifier",
    "PatchConfig",
    "Transformer",
    "TransformerConfig",
    "Trunk",
    "UNet",
    "UNetConfig",
    "ValueConfig",
    "ValueNet",
    "load",
    "save",
]
