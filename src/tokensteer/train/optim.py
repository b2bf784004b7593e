"""AdamW with clipped gradients and averaged weights, and its checkpoints.

A checkpoint holds everything that changes in a run, the generator too: on a CPU, a run that was killed and resumed ends
with the same weights, bit for bit, as one that was not. Frozen weights are shared with the caller's network, neither
averaged nor written.

A checkpoint also records what the run was given: plan, seed, data and so on. Resuming with anything else is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tokensteer import tensorfile
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.train.frozen import changing, copy_sharing, fingerprint, frozen, restore


@dataclass(frozen=True, kw_only=True)
class Pace(ABC):
    """Settings of every training. With `seconds`, it ends then at the latest and the cosine follows the clock."""

    rate: float = 1e-3
    warmup: float = 0.02
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.99
    seconds: float | None = None
    report_every: int = 10
    save_every: int = 100

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_wholes(name, 1, report_every=self.report_every, save_every=self.save_every)
        check_numbers(name, "(0, inf)", rate=self.rate, seconds=self.seconds)
        check_numbers(name, "(0, inf]", clip=self.clip)
        check_numbers(name, "[0, inf)", weight_decay=self.weight_decay)
        check_numbers(name, "[0, 1)", warmup=self.warmup, average=self.average)

    @property
    @abstractmethod
    def total(self) -> int:
        """The number of rounds."""

    def done(self, step: int, seconds: float) -> float:
        """The share of the run that is over, 1 or more at the end."""
        return max(step / self.total, 0.0 if self.seconds is None else seconds / self.seconds)

    def rate_at(self, done: float) -> float:
        """A linear warm-up, then half a cosine down to 0."""
        if done < self.warmup:
            return self.rate * (done + 1.0 / self.total) / (self.warmup + 1.0 / self.total)
        return self.rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (done - self.warmup) / (1.0 - self.warmup))))


class RunningMean(nn.Module):
    """The exponential moving average of a network, as `module`. It shares the network's frozen parameters.

    After n updates the decay is min(decay, (1 + n)/(10 + n)): a short training would otherwise return weights close to
    the initial ones.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy_sharing(net, frozen(net)), decay
        self.n_averaged: Tensor
        self.register_buffer("n_averaged", torch.tensor(0))

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        """Average the weights of `net` in; the first time they are copied. Buffers are always copied."""
        mine, theirs = ([p for p in of.parameters() if p.requires_grad] for of in (self.module, net))
        n = int(self.n_averaged)
        if n:
            move = cast("Any", get_ema_multi_avg_fn(min(self.decay, (1 + n) / (10 + n))))
            move(mine, theirs, self.n_averaged)
        else:
            _copy(mine, theirs)
        _copy(self.module.buffers(), net.buffers())
        self.n_averaged += 1


def _copy(to: Iterable[Tensor], of: Iterable[Tensor]) -> None:
    for a, b in zip(to, of, strict=True):
        a.copy_(b)


def half_precision(device: torch.device) -> torch.autocast:
    """bf16 autocast on a GPU, nothing elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def same_draws(generator: Generator) -> Generator:
    """A copy of a generator, for measurements that must not advance the original."""
    return Generator(generator.device).set_state(generator.get_state())


# ---- what a run was given, as text that a checkpoint can hold


def described(thing: object) -> str:
    """The repr of a function, an objective or a reward without memory addresses, so that processes agree on it."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


def described_net(net: nn.Module) -> str:
    """The configuration of a network if it is a dataclass, else its class name."""
    config: object = getattr(net, "config", None)
    return repr(config) if is_dataclass(config) else type(net).__name__


def described_model(model: Diffusion) -> dict[str, Any]:
    """How a model samples, and a fingerprint of its weights if its denoiser exposes its network."""
    network: object = getattr(model.denoiser, "network", None)
    context = {"context": digest(*model.conditions)} if model.conditions else {}
    return context | {
        "path's steps": len(model.steps),
        "path's times": digest(torch.tensor([step.t for step in model.steps], dtype=torch.float64)),
        "kernel": described(model.kernel),
        "template": digest(model.template),
        "model's weights": fingerprint(network.parameters()) if isinstance(network, nn.Module) else None,
    }


def digest(*data: Tensor | None) -> str:
    """The shape of the first tensor, and a hash of all shapes and of up to 1024 rows of each tensor."""
    found = hashlib.sha256()
    for part in data:
        if part is None:
            found.update(b"none")
            continue
        rows = torch.linspace(0, max(0, len(part) - 1), min(1024, len(part)), device=part.device, dtype=torch.float64)
        some = part[rows.long()].cpu()
        numbers = some.double() if some.is_floating_point() else some.long()
        found.update(repr(tuple(part.shape)).encode() + numbers.contiguous().numpy().tobytes())
    return f"{tuple(data[0].shape) if data and data[0] is not None else ()} {found.hexdigest()[:16]}"


class Optimiser:
    """AdamW for a network, with its average and its generator. The caller accumulates gradients; `learn` applies them.

    A checkpoint can be resumed only with the same plan, `given`, seed and kind of device.
    """

    def __init__(
        self,
        net: nn.Module,
        plan: Pace,
        given: Mapping[str, Any],
        generator: Generator,
        faster: Sequence[tuple[nn.Module, float]] = (),
    ) -> None:
        """`faster` are parts of the network and the factors by which their rate is higher."""
        every = {**asdict(plan), **given, "seed": generator.initial_seed(), "device": generator.device.type}
        self.given: dict[str, Any] = json.loads(json.dumps(every, default=_plain))  # as it is read again
        self.net, self.generator, self.clip = net, generator, plan.clip
        self.average = RunningMean(net, plan.average)
        self._frozen = fingerprint(frozen(net))
        apart = {id(p) for part, _ in faster for p in part.parameters()}
        groups = [([p for p in net.parameters() if id(p) not in apart], 1.0)]
        groups += [(list(part.parameters()), times) for part, times in faster]
        moved = [([p for p in params if p.requires_grad], times) for params, times in groups]
        named: list[dict[str, Any]] = [{"params": params, "times": times} for params, times in moved if params]
        self.optimiser = torch.optim.AdamW(named, 1e-3, weight_decay=plan.weight_decay)
        self.optimiser.zero_grad()

    def learn(self, rate: float) -> None:
        """Apply the accumulated gradients and clear them."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["times"]
        nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        self.optimiser.zero_grad()
        self.average.update(self.net)

    def save(
        self, file: Path, step: int, seconds: float, more: Mapping[str, Tensor] | None = None, **header: Any
    ) -> None:
        """Write a checkpoint, with tensors `more` and a header of the caller."""
        moments: dict[int, dict[str, Tensor]] = self.optimiser.state_dict()["state"]
        tensors = {f"net.{name}": value for name, value in changing(self.net).items()}
        tensors |= {f"average.{name}": value for name, value in changing(self.average).items()}
        tensors |= {f"moments.{i}.{name}": value for i, state in moments.items() for name, value in state.items()}
        tensors |= {f"more.{name}": value for name, value in (more or {}).items()}
        tensors["generator"] = self.generator.get_state()
        words = {"plan": self.given, "frozen": self._frozen, "step": step, "seconds": seconds, **header}
        tensorfile.write(file, tensors, words)

    def resume(self, file: Path | None) -> tuple[int, float, dict[str, Tensor], dict[str, Any]]:
        """Load a checkpoint if there is one: its step, its seconds, the caller's tensors and the header."""
        if file is None or not file.is_file():
            return 0, 0.0, {}, {}
        tensors, header = tensorfile.read(file)
        if header.get("frozen", fingerprint(())) != self._frozen:
            raise ValueError(f"{file} was learned on other frozen weights: load those, or delete it to begin anew")
        self._compare(file, header.get("plan"))

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}

        try:
            restore(changing(self.net), part("net."))
            restore(changing(self.average), part("average."))
        except ValueError as error:
            raise ValueError(f"{file} is a checkpoint of another network: delete it to begin anew") from error
        try:
            step, seconds = header["step"], header["seconds"]
            check_wholes("checkpoint", 0, step=step)
            check_numbers("checkpoint", "[0, inf)", seconds=seconds)
            self._restore_moments(part("moments."))
            self.generator.set_state(tensors["generator"])
            return int(step), float(seconds), part("more."), header
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it to begin anew") from error

    def _restore_moments(self, moments: Mapping[str, Tensor]) -> None:
        found: dict[int, dict[str, Tensor]] = {}
        for name, value in moments.items():
            index, _, what = name.partition(".")
            found.setdefault(int(index), {})[what] = value
        groups: Any = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": found, "param_groups": groups})

    def _compare(self, file: Path, before: object) -> None:
        """Raise ValueError if the run of a checkpoint was given something else."""
        was = cast("dict[str, Any]", before) if isinstance(before, dict) else {}
        differ = [name for name in {**was, **self.given} if was.get(name) != self.given.get(name)]
        if differ:
            changes = "; ".join(_change(name, was, self.given) for name in differ)
            raise ValueError(
                f"{file} is a checkpoint of another plan: {changes}. Give the same options to resume it, or delete it, "
                "or write to another folder, to begin anew"
            )


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as those of Python."""
    return value.item() if hasattr(value, "item") else str(value)


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any], most: int = 60) -> str:
    """The two values of a setting, in `most` characters each; long ones from about where they begin to differ."""
    one, other = (str(values[name]) if name in values else "not given" for values in (before, now))
    differ = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, differ - most // 2) if max(len(one), len(other)) > most else 0
    one, other = (("..." if start else "") + text[start : start + most] for text in (one, other))
    return f"{name} was {one} and is now {other}"
