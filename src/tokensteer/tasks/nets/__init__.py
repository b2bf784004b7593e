"""The small networks that this project trains: denoisers, pairs of classifiers, values, and their files."""

from tokensteer.tasks.nets.classifiers import ConvClassifier, ConvConfig, PatchClassifier, PatchConfig
from tokensteer.tasks.nets.dilated import (
    Dilated,
    DilatedConfig,
    MotifClassifier,
    MotifConfig,
    WordsClassifier,
    WordsConfig,
)
from tokensteer.tasks.nets.readers import AttentiveConfig, AttentiveReader, NgramConfig, NgramReader
from tokensteer.tasks.nets.store import load, save
from tokensteer.tasks.nets.transformer import Transformer, TransformerConfig, Trunk
from tokensteer.tasks.nets.unet import UNet, UNetConfig
from tokensteer.tasks.nets.value import ValueConfig, ValueNet

__all__ = [
    "AttentiveConfig",
    "AttentiveReader",
    "ConvClassifier",
    "ConvConfig",
    "Dilated",
    "DilatedConfig",
    "MotifClassifier",
    "MotifConfig",
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
    "WordsClassifier",
    "WordsConfig",
    "load",
    "save",
]
