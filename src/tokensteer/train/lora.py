"""Low-rank adapters: a proposal that is the model's network with W + scale · B·A in place of W, and learns A and B.

The base weights are in memory once. p is the network as it was, and knows nothing of the adapter; q is a second module
tree around the same weights. So there is no switch that could be left in the wrong position, and nothing that q learns
reaches p. B is zero at first: q begins as p.

Weights are shared, passes are not. Behind the first adapted layer the hidden states of p and q differ, so the two are
two passes through the network, and all of it is passed twice even if only its last layers have adapters. One pass for
both is what a new head on the states of p is for: see `NewHead`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer import tensorfile as stored
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.train.frozen import Net, copy_sharing, fingerprint

KIND = "LoRA"
# Their fast paths read the weights of these layers and never call them, so that an adapter would go unheard.
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def lora(
    net: Net,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    *,
    scale: float = 1.0,
    generator: Generator | None = None,
) -> Net:
    """`net` with an adapter, to be given to `fit_proposal`, while `net` itself goes on being the model.

    `targets` are the names of layers, or the ends of their names; by default all linear layers and convolutions. Both
    networks share the weights of `net`, which are frozen. Use `from_logits` for q: `from_hidden` reads the weight of
    a head and would miss its adapter, so that a proposal made that way is refused.
    """
    check_wholes("lora", 1, rank=rank)
    check_numbers("lora", "(0, inf)", scale=scale)
    names = _default(net) if targets is None else _found(net, targets)
    peft = _peft()
    exactly = "|".join(re.escape(name) for name in names)
    config = peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=exactly, lora_dropout=0.0)
    adapted = cast("Net", peft.inject_adapter_in_model(config, copy_sharing(net, net.parameters())))
    for name, value in adapter(adapted).items():
        value.data = value.data.to(torch.promote_types(value.dtype, torch.float32))  # half precision learns badly
        if "lora_A" in name:
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
    return adapted


def adapter(net: nn.Module) -> dict[str, nn.Parameter]:
    """What was added by `lora`, by name."""
    found = {name: value for name, value in net.named_parameters() if ".lora_" in f".{name}"}
    if not found:
        raise ValueError("this network has no adapter: make one by lora(net)")
    return found


def save_adapter(net: nn.Module, file: str | Path) -> None:
    """Write the adapter of a network alone, as safetensors."""
    tensors = adapter(net)
    config = cast("Any", net).peft_config["default"]
    names = [name for name in _modules(net) if re.fullmatch(config.target_modules, name)]
    header = {
        "adapter": KIND,
        "rank": config.r,
        "scale": config.lora_alpha / config.r,
        "targets": names,
        "base": fingerprint(_base(net)),
    }
    stored.write(Path(file), tensors, header)


def load_adapter(net: Net, file: str | Path) -> Net:
    """`net` with the adapter of a file, in eval mode: the weights of `net` are shared, as by `lora`."""
    tensors, header = stored.read(Path(file))
    if header.get("adapter") != KIND:
        raise ValueError(f"{file} holds no adapter: write one by save_adapter(net, file)")
    if header.get("base") != fingerprint(net.parameters()):
        raise ValueError(f"{file} was learned on another network: load it onto the weights that it was made for")
    try:
        adapted = lora(net, header["rank"], header["targets"], scale=header["scale"])
        mine = adapter(adapted)
        if {n: v.shape for n, v in tensors.items()} != {n: v.shape for n, v in mine.items()}:
            raise ValueError("it holds tensors of other names or shapes")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged ({error}): write it again by save_adapter(net, file)") from error
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(tensors[name])
    return adapted.eval()


def _base(net: nn.Module) -> list[Tensor]:
    added = {id(value) for value in adapter(net).values()}
    return [value for value in net.parameters() if id(value) not in added]


def _modules(net: nn.Module) -> dict[str, nn.Module]:
    return dict(cast("Any", net).named_modules())


def _layers(net: nn.Module) -> dict[str, nn.Module]:
    """The layers that are called, rather than read by a parent."""
    parents = [module for module in net.modules() if isinstance(module, _READS_WEIGHTS)]
    unheard = {id(child) for parent in parents for child in parent.children()}
    return {name: module for name, module in _modules(net).items() if name and id(module) not in unheard}


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
        raise ValueError(
            f"lora: the network has no layer called {missing} that is not read by its parent, but {list(layers)}"
        )
    return sorted({name for names in ends.values() for name in names})


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ImportError("adapters need peft: pip install 'tokensteer[hf]'") from error
