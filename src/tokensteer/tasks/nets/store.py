"""Networks as files: weights as safetensors, with the configuration as JSON in the header of the same file.

Version 1 holds floating-point tensors, version 2 has 8-bit matrices. Files are written in the lowest version that can
hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tokensteer import tensorfile as stored
from tokensteer.tasks.nets import dilated, int8
from tokensteer.tasks.nets.classifiers import ConvClassifier, ConvConfig, PatchClassifier, PatchConfig
from tokensteer.tasks.nets.encoder import Encoder, EncoderConfig, EncoderReader, EncoderReaderConfig
from tokensteer.tasks.nets.fsq import FSQ, FSQConfig
from tokensteer.tasks.nets.grid_transformer import GridTransformer, GridTransformerConfig
from tokensteer.tasks.nets.image_classifiers import ConvMixer, MixerConfig, ResNet, ResNetConfig
from tokensteer.tasks.nets.image_text import ImageText, ImageTextConfig
from tokensteer.tasks.nets.readers import NgramConfig, NgramReader
from tokensteer.tasks.nets.text_encoder import TextEncoder, TextEncoderConfig
from tokensteer.tasks.nets.transformer import Transformer, TransformerConfig
from tokensteer.tasks.nets.unet import UNet, UNetConfig
from tokensteer.tasks.nets.value import Body, ValueConfig, ValueNet
from tokensteer.train.frozen import state

VERSION = 2
"""The newest version of the format that is read."""

Classifiers = ConvConfig | PatchConfig | NgramConfig | dilated.MotifConfig | dilated.WordsConfig
Images = FSQConfig | GridTransformerConfig | ResNetConfig | MixerConfig | ImageTextConfig
Encoders = EncoderConfig | EncoderReaderConfig | TextEncoderConfig
Config = Body | Classifiers | ValueConfig | Images | Encoders

_NETWORKS: dict[type[Config], Callable[[Any], nn.Module]] = {
    TransformerConfig: Transformer,
    UNetConfig: UNet,
    dilated.DilatedConfig: dilated.Dilated,
    ConvConfig: ConvClassifier,
    PatchConfig: PatchClassifier,
    NgramConfig: NgramReader,
    dilated.MotifConfig: dilated.MotifClassifier,
    dilated.WordsConfig: dilated.WordsClassifier,
    ValueConfig: ValueNet,
    FSQConfig: FSQ,
    GridTransformerConfig: GridTransformer,
    ResNetConfig: ResNet,
    MixerConfig: ConvMixer,
    ImageTextConfig: ImageText,
    EncoderConfig: Encoder,
    EncoderReaderConfig: EncoderReader,
    TextEncoderConfig: TextEncoder,
}


def build(config: Config) -> nn.Module:
    """A network with fresh weights."""
    return _NETWORKS[type(config)](config)


def save(net: nn.Module, file: str | Path, dtype: torch.dtype = torch.float32, without: Sequence[str] = ()) -> None:
    """Write weights and configuration; bfloat16 halves the file, and int8 halves it again (`tasks.nets.int8`). Tensors
    `without`, stored elsewhere, are left out."""
    config, whole = cast("Config", net.config), dtype == torch.int8
    header = {"version": 2 if whole else 1, "config": type(config).__name__, "values": asdict(config)}
    kept = {name: value.detach() for name, value in state(net).items() if name not in without}
    tensors = int8.quantise(kept) if whole else {name: value.to(dtype) for name, value in kept.items()}
    stored.write(Path(file), tensors, header)


def load(file: str | Path, device: torch.device | str = "cpu", rest: Path | None = None) -> nn.Module:
    """The network of a file, in float32 and evaluation mode, without gradients of its weights. Tensors that were left
    out are read from the file `rest`."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"no weights at {file}: train them, or give the folder that holds them")
    tensors, header = stored.read(Path(file))
    if header.get("version") not in range(1, VERSION + 1):
        raise ValueError(
            f"{file} was written in version {header.get('version')} of the format and this tokensteer reads up to "
            f"{VERSION}: train it again, or install the tokensteer that wrote it"
        )
    kinds = {config.__name__: config for config in _NETWORKS}
    if str(header.get("config")) not in kinds:
        raise ValueError(f"{file} holds no network that tokensteer knows, but {header.get('config')}")
    try:
        tensors = int8.dequantise(tensors)
        others = {} if rest is None or not rest.is_file() else int8.dequantise(stored.read(rest)[0])
        config = _config(kinds[header["config"]], header["values"], others | tensors)
        with _Blank():
            net = build(config)
        expected = {name: value.shape for name, value in state(net).items()}
        missing = set(expected) - set(tensors)
        tensors = {name: value for name, value in others.items() if name in missing} | tensors
        unlike = sorted(set(tensors) ^ set(expected)) or [n for n in expected if tensors[n].shape != expected[n]]
        if unlike:
            raise ValueError(f"{unlike[0]} is missing, unknown or of another shape")
        net.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(
            f"{file} does not hold the weights that its configuration asks for ({error}): train it again"
        ) from error
    return net.to(device).eval().requires_grad_(False)


class _Blank(TorchFunctionMode):
    """Leaves out `torch.nn.init` and `torch.randn`: weights that are overwritten need no values, and memory that is not
    written is not taken."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **given)


def _config(kind: type[Config], values: Any, tensors: Mapping[str, Tensor]) -> Config:
    """The configuration of a header. Raises ValueError if its sizes are larger than the file can hold."""
    most = max(1000, sum(value.numel() for value in tensors.values()))
    sizes = {**values, **values.get("body", {})}
    for name, value in sizes.items():
        limit = len(tensors) if name in ("depth", "blocks") else most
        for size in cast("list[object]", value) if isinstance(value, list) else [value]:
            if isinstance(size, int) and size > limit:
                raise ValueError(f"{name} is {size}, more than the file holds")
    return kind(**values)
