"""Networks as files: weights as safetensors, the configuration as JSON in the file's own header.

One file is either there or not, and its weights cannot be paired with the wrong configuration.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import get_args

import torch

from tokensteer import stored
from tokensteer.nets.classifiers import ConvClassifier, ConvConfig, PatchClassifier, PatchConfig
from tokensteer.nets.dilated import (
    Dilated,
    DilatedConfig,
    MotifClassifier,
    MotifConfig,
    WordsClassifier,
    WordsConfig,
)
from tokensteer.nets.transformer import Transformer, TransformerConfig
from tokensteer.nets.unet import UNet, UNetConfig
from tokensteer.nets.value import ValueConfig, ValueNet

VERSION = 1

Net = Transformer | UNet | Dilated | ConvClassifier | PatchClassifier | MotifClassifier | WordsClassifier | ValueNet
Config = (
    TransformerConfig | UNetConfig | DilatedConfig | ConvConfig | PatchConfig | MotifConfig | WordsConfig | ValueConfig
)

_CONFIGS: tuple[type[Config], ...] = get_args(Config)


def build(config: Config) -> Net:
    """A fresh network."""
    match config:
        case TransformerConfig():
            return Transformer(config)
        case UNetConfig():
            return UNet(config)
        case DilatedConfig():
            return Dilated(config)
        case MotifConfig():
            return MotifClassifier(config)
        case WordsConfig():
            return WordsClassifier(config)
        case ConvConfig():
            return ConvClassifier(config)
        case PatchConfig():
            return PatchClassifier(config)
        case ValueConfig():
            return ValueNet(config)


def save(net: Net, file: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write weights and configuration; bfloat16 halves the file."""
    header = {"version": VERSION, "config": type(net.config).__name__, "values": asdict(net.config)}
    stored.write(Path(file), {name: value.to(dtype) for name, value in net.state_dict().items()}, header)


def load(file: str | Path, device: torch.device | str = "cpu") -> Net:
    """The network of a file, in float32, ready to be used: not in training, and its weights ask for no gradients."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"no weights at {file}: train them, or give the folder that holds them")
    tensors, header = stored.read(Path(file))
    if header.get("version") != VERSION:
        raise ValueError(
            f"{file} was written in version {header.get('version')} of the format and this tokensteer reads "
            f"{VERSION}: train it again, or install the tokensteer that wrote it"
        )
    kinds = {config.__name__: config for config in _CONFIGS}
    if header.get("config") not in kinds:
        raise ValueError(f"{file} holds no network that tokensteer knows, but {header.get('config')}")
    try:
        net = build(kinds[header["config"]](**header["values"]))
        net.load_state_dict({name: value.float() for name, value in tensors.items()})
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{file} does not hold the weights that its configuration asks for: train it again") from error
    return net.to(device).eval().requires_grad_(False)
