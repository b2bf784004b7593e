"""Low-rank adapters: a proposal that is the model's network with W + scale · B·A in place of W, and trains A and B.

The base weights are in memory once. p is the unchanged network; q is a second module tree around the same weights, so
that no switch selects between them and training q does not change p. B is zero at first: q begins as p.

Weights are shared, passes are not: behind the first adapted layer the hidden states of p and q differ, so that p and q
take two passes through the network even if only its last layers have adapters. For one pass, see `NewHead`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, nn

from tokensteer import tensorfile
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.hub import named_modules
from tokensteer.train.frozen import Net, copy_sharing, fingerprint, restore

KIND = "LoRA"
# Their fast paths read the weights of these layers without calling them, so that an adapter would have no effect.
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def lora(
    net: Net,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    *,
    scale: float = 1.0,
    generator: Generator | None = None,
) -> Net:
    """A copy of `net` with an adapter, for `fit_proposal`; `net` itself stays the model.

    `targets` are the names of layers, or the ends of their names; by default all linear layers and convolutions. Both
    networks share the weights of `net`, which are frozen. Use `from_logits` for q: `from_hidden` reads the weight of
    a head and would miss its adapter, so it raises on an adapted head.
    """
    check_wholes("lora", 1, rank=rank)
    check_numbers("lora", "(0, inf)", scale=scale)
    names = _default(net) if targets is None else _found(net, targets)
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise ImportError("adapters need peft: pip install 'tokensteer[hf]'") from error
    exactly = "|".join(re.escape(name) for name in names)
    config = peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=exactly, lora_dropout=0.0)
    adapted = cast("Net", peft.inject_adapter_in_model(config, copy_sharing(net, net.parameters())))
    for name, value in adapter(adapted).items():
        value.data = value.data.to(torch.promote_types(value.dtype, torch.float32))  # half precision trains badly
        if "lora_A" in name:
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
    return adapted


def adapter(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that `lora` added, by name. Raises ValueError if there are none."""
    found = {name: value for name, value in net.named_parameters() if ".lora_" in f".{name}"}
    if not found:
        raise ValueError("this network has no adapter: make one by lora(net)")
    return found


def save_adapter(net: nn.Module, file: str | Path) -> None:
    """Write the adapter of a network, without the base weights, as safetensors."""
    tensors = adapter(net)
    config = cast("Any", net).peft_config["default"]
    added = {id(value) for value in tensors.values()}
    header = {
        "adapter": KIND,
        "rank": config.r,
        "scale": config.lora_alpha / config.r,
        "targets": [name for name in named_modules(net) if re.fullmatch(config.target_modules, name)],
        "base": fingerprint(value for value in net.parameters() if id(value) not in added),
    }
    tensorfile.write(Path(file), tensors, header)


def load_adapter(net: Net, file: str | Path) -> Net:
    """`net` with the adapter of a file, in eval mode. The weights of `net` are shared, as by `lora`."""
    tensors, header = tensorfile.read(Path(file))
    if header.get("adapter") != KIND:
        raise ValueError(f"{file} holds no adapter: write one by save_adapter(net, file)")
    if header.get("base") != fingerprint(net.parameters()):
        raise ValueError(f"{file} was learned on another network: load it onto the weights that it was made for")
    try:
        adapted = lora(net, header["rank"], header["targets"], scale=header["scale"])
        restore(adapter(adapted), tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged ({error}): write it again by save_adapter(net, file)") from error
    return adapted.eval()


def _layers(net: nn.Module) -> dict[str, nn.Module]:
    """The layers that are called, rather than read by their parent."""
    parents = [module for module in net.modules() if isinstance(module, _READS_WEIGHTS)]
    uncalled = {id(child) for parent in parents for child in parent.children()}
    return {name: module for name, module in named_modules(net).items() if name and id(module) not in uncalled}


def _default(net: nn.Module) -> list[str]:
    names = [
        name
        for name, layer in _layers(net).items()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    ]
    if not names:
        raise ValueError("lora: the network has no linear layer and no convolution that is called: name your targets")
    return names


def _found(net: nn.Module, targets: Sequence[str]) -> list[str]:
    layers = _layers(net)
    ends = {target: [name for name in layers if f".{name}".endswith(f".{target}")] for target in targets}
    missing = [target for target, names in ends.items() if not names]
    if missing or not targets:
        raise ValueError(f"lora: the network has no layer called {missing} (of those it calls, {list(layers)})")
    return sorted({name for names in ends.values() for name in names})
