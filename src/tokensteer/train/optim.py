"""What every training has in common: AdamW, clipped gradients, an average of the weights, and checkpoints.

All that changes in a run is in its checkpoint, the generator too, so that a run that was killed and resumed ends with
the same weights, bit for bit on a CPU, as one that was not. What is frozen does not change: it is neither averaged nor
written, and there is one copy of it.

A checkpoint also says what the run was given: its plan, the seed of its generator, its data and so on. A run that was
given anything else does not go on from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tokensteer import tensorfile as stored
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.train.frozen import changing, copy_sharing, fingerprint, frozen, restore


class Resumed(NamedTuple):
    """What a caller had put into a checkpoint, nothing if there was none."""

    tensors: dict[str, Tensor]
    header: dict[str, Any]


class RunningMean(nn.Module):
    """The exponential moving average of a network as `module`, whose frozen parameters are those of the network.

    After n updates it keeps a share min(decay, (1 + n)/(10 + n)) of itself: a short training would otherwise return
    weights that have hardly left the start.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy_sharing(net, frozen(net)), decay
        self.n_averaged: Tensor
        self.register_buffer("n_averaged", torch.tensor(0))

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        """One more: the first is taken as it is. Buffers are always those of the newest."""
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


# ---- what a run was given, in words that a checkpoint can hold


def described(thing: object) -> str:
    """A function, an objective or a reward by its name and fields, the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


def described_net(net: nn.Module) -> str:
    """The class of a network, or all of its configuration if that is a dataclass."""
    config: object = getattr(net, "config", None)
    return repr(config) if is_dataclass(config) else type(net).__name__


def digest(*data: Tensor | None) -> str:
    """By what data is known again: its shape, and a digest of up to 1024 of its rows."""
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


def same_draws(generator: Generator) -> Generator:
    """Another generator in the same state, so that measuring moves nobody's."""
    return Generator(generator.device).set_state(generator.get_state())


class Optimiser:
    """A network, its average, its optimiser and its generator. `plan`, the seed and the device are what a checkpoint
    must agree with to be gone on from. Gradients are gathered by the caller; `learn` applies them."""

    def __init__(
        self,
        net: nn.Module,
        plan: Mapping[str, Any],
        generator: Generator,
        weight_decay: float,
        clip: float,
        average: float,
        faster: Sequence[tuple[nn.Module, float]] = (),
    ) -> None:
        """`faster` are parts of the network that learn at so many times the rate of the rest."""
        about = {"seed": generator.initial_seed(), "device": generator.device.type}
        self.plan: dict[str, Any] = json.loads(json.dumps({**plan, **about}, default=_plain))  # as it is read again
        self.net, self.generator, self.clip = net, generator, clip
        self.average = RunningMean(net, average)
        self._frozen = fingerprint(frozen(net))
        apart = {id(p) for part, _ in faster for p in part.parameters()}
        groups: list[tuple[list[nn.Parameter], float]] = [([p for p in net.parameters() if id(p) not in apart], 1.0)]
        groups += [(list(part.parameters()), times) for part, times in faster]
        moved = [([p for p in params if p.requires_grad], times) for params, times in groups]
        named: list[dict[str, Any]] = [{"params": params, "times": times} for params, times in moved if params]
        self.optimiser = torch.optim.AdamW(named, 1e-3, weight_decay=weight_decay)
        self.optimiser.zero_grad()

    def learn(self, rate: float) -> None:
        """One step along the gradients that were gathered, which are then forgotten."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["times"]
        nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        self.optimiser.zero_grad()
        self.average.update(self.net)

    def save(
        self, file: Path, step: int, seconds: float, more: Mapping[str, Tensor] | None = None, **header: Any
    ) -> None:
        """Everything, with tensors and words of the caller's own."""
        moments: dict[int, dict[str, Tensor]] = self.optimiser.state_dict()["state"]
        tensors = {f"net.{name}": value for name, value in changing(self.net).items()}
        tensors |= {f"average.{name}": value for name, value in changing(self.average).items()}
        tensors |= {f"moments.{i}.{name}": value for i, state in moments.items() for name, value in state.items()}
        tensors |= {f"more.{name}": value for name, value in (more or {}).items()}
        tensors["generator"] = self.generator.get_state()
        words = {"plan": self.plan, "frozen": self._frozen, "step": step, "seconds": seconds, **header}
        stored.write(file, tensors, words)

    def resume(self, file: Path | None) -> tuple[int, float, Resumed]:
        """Go on from a checkpoint if there is one: the step and the seconds that went before, and what was the
        caller's own."""
        if file is None or not file.is_file():
            return 0, 0.0, Resumed({}, {})
        tensors, header = stored.read(file)
        if header.get("frozen", fingerprint(())) != self._frozen:
            raise ValueError(f"{file} was learned on other frozen weights: load those, or delete it to begin anew")
        self._compare(file, header.get("plan"))

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}

        try:
            restore(self.net, part("net."))
            restore(self.average, part("average."))
        except ValueError as error:
            raise ValueError(f"{file} is a checkpoint of another network: delete it to begin anew") from error
        try:
            step, seconds = header["step"], header["seconds"]
            check_wholes("checkpoint", 0, step=step)
            check_numbers("checkpoint", "[0, inf)", seconds=seconds)
            self._take_up(part("moments."), tensors["generator"])
            return int(step), float(seconds), Resumed(part("more."), header)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it to begin anew") from error

    def _take_up(self, moments: Mapping[str, Tensor], generator: Tensor) -> None:
        """The state of the optimiser and of the generator."""
        found: dict[int, dict[str, Tensor]] = {}
        for name, value in moments.items():
            index, _, what = name.partition(".")
            found.setdefault(int(index), {})[what] = value
        groups: Any = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": found, "param_groups": groups})
        self.generator.set_state(generator)

    def _compare(self, file: Path, before: object) -> None:
        """Raise ValueError if the run of a checkpoint was given something else."""
        was = cast("dict[str, Any]", before) if isinstance(before, dict) else {}
        differ = [name for name in {**was, **self.plan} if was.get(name) != self.plan.get(name)]
        if differ:
            told = "; ".join(_told_apart(name, was, self.plan) for name in differ)
            raise ValueError(
                f"{file} is a checkpoint of another plan: {told}. Give the same options to go on with it, or delete "
                "it, or write to another folder, to begin anew"
            )


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as those of Python."""
    return value.item() if hasattr(value, "item") else str(value)


def _told_apart(name: str, before: Mapping[str, Any], now: Mapping[str, Any], most: int = 60) -> str:
    """What something was and is; of long values what follows the part that they have in common."""
    one, other = (str(values[name]) if name in values else "not given" for values in (before, now))
    differ = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, differ - most // 2) if max(len(one), len(other)) > most else 0
    one, other = (("..." if start else "") + said[start : start + most] for said in (one, other))
    return f"{name} was {one} and is now {other}"
