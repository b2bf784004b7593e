"""MPRA-DragoNN (Movva et al., 2019): the activity of 145 letters in a reporter assay, as an independent metric.

Its convolutional model was published with Keras. Put its `pretrained.hdf5` into the folder of data as
`mpra_dragonn/pretrained.hdf5`, and then

    python -m tokensteer.tasks.dna.dragonn

writes `mpra_dragonn.safetensors` to the folder of data, once, which needs h5py (the extra `bio`). Activity differs from
accessibility and correlates with it little: it is reported, and nothing is steered by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer import tensorfile as stored
from tokensteer.tasks.common.command import run_command
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.common.training import say

KERAS = Path("mpra_dragonn") / "pretrained.hdf5"
FILE = "mpra_dragonn.safetensors"
LENGTH, FILTERS, KERNEL, LAYERS = 145, 120, 5, 3
OUTPUTS = tuple(
    f"{cell} {promoter} {which}"
    for cell in ("K562", "HepG2")
    for promoter in ("minP", "SV40P")
    for which in ("replicate 1", "replicate 2", "pooled")
)


class DragoNN(nn.Module):
    """The twelve `OUTPUTS`, (P, 12), of the middle 145 letters of ids (P, L) in 0..3."""

    def __init__(self) -> None:
        super().__init__()
        inputs = (4, *(FILTERS,) * (LAYERS - 1))
        self.convs = nn.ModuleList(nn.Conv1d(channels, FILTERS, KERNEL) for channels in inputs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(FILTERS, eps=1e-3) for _ in inputs)
        self.dense = nn.Linear(FILTERS * (LENGTH - LAYERS * (KERNEL - 1)), len(OUTPUTS))

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] < LENGTH:
            raise ValueError(f"MPRA-DragoNN reads {LENGTH} letters, got {ids.shape[1]}")
        before = (ids.shape[1] - LENGTH) // 2
        h = F.one_hot(ids[:, before : before + LENGTH].long(), 4).transpose(1, 2).float()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = norm(F.relu(conv(h)))
        return self.dense(h.transpose(1, 2).flatten(1))  # Keras keeps channels last


def activity(net: DragoNN, ids: Tensor, cell: str) -> Tensor:
    """The pooled activity in a cell type, (P,), averaged over promoters."""
    which = [i for i, name in enumerate(OUTPUTS) if name.startswith(f"{cell} ") and name.endswith("pooled")]
    return net(ids)[:, which].mean(-1)


def covers(cell: str) -> bool:
    return any(name.startswith(f"{cell} ") for name in OUTPUTS)


def find(device: str = "cpu") -> DragoNN | None:
    """The network, None if its file is not in the folder of data."""
    file = data_folder() / FILE
    return _with(stored.read(file)[0]).to(device) if file.is_file() else None


def _with(tensors: Mapping[str, Tensor]) -> DragoNN:
    net = DragoNN()
    net.load_state_dict(tensors, strict=False)  # Keras does not count batches
    return net.eval().requires_grad_(False)


def from_keras(arrays: Mapping[str, Any]) -> DragoNN:
    """The network from arrays by their names in Keras, such as "conv1d_1/kernel:0". Keras has convolutions as (sites,
    channels in, channels out) and dense layers as (in, out)."""

    def tensor(name: str) -> Tensor:
        return torch.as_tensor(arrays[name]).float()

    tensors: dict[str, Tensor] = {"dense.weight": tensor("dense_1/kernel:0").T, "dense.bias": tensor("dense_1/bias:0")}
    names = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    for k in range(LAYERS):
        tensors[f"convs.{k}.weight"] = tensor(f"conv1d_{k + 1}/kernel:0").permute(2, 1, 0)
        tensors[f"convs.{k}.bias"] = tensor(f"conv1d_{k + 1}/bias:0")
        for ours, theirs in names.items():
            tensors[f"norms.{k}.{ours}"] = tensor(f"batch_normalization_{k + 1}/{theirs}:0")
    return _with(tensors)


def read_keras(file: Path) -> dict[str, Any]:
    """The arrays of a Keras file of weights by name, without the first, doubled part of the name."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: put MPRA-DragoNN's pretrained.hdf5 there, or give --keras FILE")
    try:
        import h5py  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ValueError("reading a Keras file needs h5py: pip install 'tokensteer[bio]'") from error
    arrays: dict[str, Any] = {}

    def keep(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name.split("/", 1)[1]] = item[()]  # pyright: ignore[reportUnknownMemberType]

    with h5py.File(file) as keras:
        keras.visititems(keep)  # pyright: ignore[reportUnknownMemberType]
    return arrays


def convert(keras: Path | None = None, out: Path | None = None) -> None:
    """Convert MPRA-DragoNN.

    Args:
        keras: the Keras file of weights, mpra_dragonn/pretrained.hdf5 in the folder of data if not given
        out: the file that is written, mpra_dragonn.safetensors in the folder of data if not given
    """
    about = {"what": "MPRA-DragoNN, convolutional model, MIT licence", "outputs": list(OUTPUTS)}
    file = data_folder() / FILE if out is None else out
    arrays = read_keras(data_folder() / KERAS if keras is None else keras)
    stored.write(file, from_keras(arrays).state_dict(), about)
    say(f"written: {file}")


def main(arguments: Sequence[str] | None = None) -> None:
    run_command("dna.dragonn", convert, arguments)


if __name__ == "__main__":
    main()
