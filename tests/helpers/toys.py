"""The toys of golden.json as tokensteer objects. Everything here goes through the public API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tokensteer as ts
from tokensteer.testing import TableDenoiser, all_sequences

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())
CASES: dict[str, Any] = {case["id"]: case for case in GOLDEN["cases"]}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def case(number: int) -> dict[str, Any]:
    return next(c for name, c in CASES.items() if name.startswith(f"{number:02d}_"))


def numbers(values: object) -> Tensor:
    """Golden numbers as float64; null is -inf."""

    def filled(value: Any) -> Any:
        return [filled(v) for v in value] if isinstance(value, list) else -torch.inf if value is None else value

    return torch.tensor(filled(values), dtype=torch.float64)


@dataclass(frozen=True)
class Listed:
    """A schedule given as a list over equal steps."""

    values: tuple[float, ...]

    def alpha(self, t: float) -> float:
        return self.values[round(t * (len(self.values) - 1))]

    def derivative(self, t: float) -> float:
        raise NotImplementedError("a list has no derivative")


@dataclass(frozen=True)
class StateTable:
    """A denoiser given as a table over all states, (states, L, V) probabilities."""

    table: Tensor

    def __call__(self, x: Tensor, t: float) -> Tensor:
        ids = x.argmax(-1) if x.is_floating_point() else x
        vocab_size = self.table.shape[-1] + 1
        place = vocab_size ** torch.arange(ids.shape[1] - 1, -1, -1)
        log_p = self.table[(ids * place).sum(-1)].log()
        return torch.cat([log_p, torch.full_like(log_p[..., :1], -torch.inf)], -1)


def multilinear(table: Tensor, vocab_size: int, length: int):
    """A function of ids or one-hots from a table over all states, extended multilinearly."""
    grid = table.view([vocab_size] * length)

    def value(x: Tensor, t: float = 0.0) -> Tensor:
        if not x.is_floating_point():
            return grid[tuple(x.unbind(-1))]
        left = grid.expand(len(x), *grid.shape)
        for site in range(length):
            left = (left * x[:, site].view(len(x), vocab_size, *[1] * (left.dim() - 2))).sum(1)
        return left

    return value


FORMS = ("logs", "logits", "hidden")


def in_form(denoiser: ts.Denoiser, vocab_size: int, form: str) -> ts.Denoiser:
    """A denoiser of double precision that ignores time, in one of the `FORMS` that networks come in; the mask is last.

    Its logs are logits once they are shifted, and the mask gets one too: laws must be normalised, and the mask
    forbidden, by the library. Hidden states are the logits turned, so that there is something for the head to do.
    """
    if form == "logs":
        return denoiser
    last = torch.arange(vocab_size) == vocab_size - 1

    def logits(x: Tensor) -> Tensor:
        # exp(-1e4) is 0 too, and leaves no NaN in a matrix product.
        return denoiser(x, 0.0).clamp(min=-1e4).masked_fill(last, 1.0) + 0.5

    if form == "logits":
        return ts.from_logits(logits, vocab_size - 1, ignores_time=True)
    noise = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turn = torch.linalg.qr(noise).Q
    head = nn.Linear(vocab_size, vocab_size, bias=False, dtype=torch.float64).requires_grad_(False)
    head.weight.copy_(turn)
    return ts.from_hidden(lambda x: logits(x) @ turn, head, vocab_size - 1, ignores_time=True)


@dataclass(frozen=True)
class Toy:
    name: str
    dtype: torch.dtype = torch.float64
    form: str = "logs"

    @property
    def data(self) -> dict[str, Any]:
        return GOLDEN["toys"][self.name]

    @property
    def tokens(self) -> int:
        return self.data["V"]

    @property
    def length(self) -> int:
        return self.data["L"]

    @property
    def mask_id(self) -> int:
        return self.tokens

    @property
    def kl(self) -> float:
        return self.data["kl"]

    @cached_property
    def states(self) -> Tensor:
        return all_sequences(self.tokens + 1, self.length)

    @cached_property
    def clean(self) -> Tensor:
        return all_sequences(self.tokens, self.length)

    def joint(self, name: str) -> Tensor:
        return _table(self, name)

    def reward(self, x: Tensor) -> Tensor:
        return _table(self, "r")[tuple(x.unbind(-1))]

    def num_steps(self, sampler: str) -> int:
        return self.data["T_lowconf" if sampler == "lowconf" else "T"]

    def at(self, name: str, t: float) -> float:
        values = self.data[name]
        return values[round(t * (len(values) - 1))]

    def ramp(self, sampler: str):
        return lambda t: self.at("lam_lowconf" if sampler == "lowconf" else "lam", t)

    @cached_property
    def kernels(self) -> dict[str, ts.Kernel]:
        schedule = Listed(tuple(self.data["alpha"]))
        return {
            "mdm": ts.Ancestral(self.mask_id, schedule),
            "remdm": ts.Ancestral(self.mask_id, schedule, sigma=lambda step, bound: self.at("sigma", step.t)),
            "lowconf": ts.Ranked(
                self.mask_id, count=lambda step, masked: torch.full_like(masked, self.at("k_lowconf", step.t))
            ),
        }

    def model(self, sampler: str, joint: str = "p1") -> ts.Diffusion:
        return ts.Diffusion(
            in_form(TableDenoiser(self.joint(joint)), self.tokens + 1, self.form),
            self.kernels[sampler],
            ts.uniform_steps(self.num_steps(sampler)),
            ts.template(self.length, self.mask_id),
        )

    def product(self, sampler: str, a: float, b: float, **options: Any) -> ts.Product:
        """Without look-ahead, as the golden products are."""
        options = {"lookahead": False, **options}
        return ts.Product((self.model(sampler), self.model(sampler, "p2")), (a, b), **options)

    @property
    def soft_reward(self) -> Tensor:
        return _soft_reward(self)

    def tilt(self, sampler: str, **options: Any) -> ts.Tilt:
        """The golden twist: the soft reward as a known function, extended multilinearly for its gradient."""
        value = multilinear(self.soft_reward, self.tokens + 1, self.length)
        options = {"ramp": self.ramp(sampler), "estimator": ts.Value(value), **options}
        return ts.Tilt(self.reward, self.kl, **options)

    def amortised(self, **options: Any) -> ts.Amortised:
        table = StateTable(numbers(self.data["muq"]).to(self.dtype))
        return ts.Amortised(in_form(table, self.tokens + 1, self.form), **options)


@cache
def _table(toy: Toy, name: str) -> Tensor:
    """Numbers over all clean sequences, with an axis for each site."""
    return numbers(toy.data[name]).to(toy.dtype).view([toy.tokens] * toy.length)


@cache
def _soft_reward(toy: Toy) -> Tensor:
    """kl log E[exp(r/kl)] at every state, computed by the library."""
    tilt = ts.Tilt(toy.reward, toy.kl, estimator=ts.Exact())
    log_x0 = toy.model("mdm").predict(toy.states, 0.5).laws()
    return tilt.estimate(ts.NoisyState(toy.states, log_x0, 0.5, toy.mask_id), None)


@dataclass(frozen=True)
class Following:
    """A user's own proposal: the first model tilted by the multilinear gradient of any function of the state."""

    value: Any
    needs_gradient: bool = False
    meters: tuple[()] = ()

    def __call__(self, x: Tensor, evaluation: ts.Evaluation, step: ts.Step, model: ts.Model, twist: ts.Tilt | None):
        one_hots = torch.nn.functional.one_hot(x, model.vocab_size).to(model.dtype).requires_grad_()
        with torch.enable_grad():
            gradient = torch.autograd.grad(self.value(one_hots).sum(), one_hots)[0]
        return ts.FromModel()(x, evaluation, step, model, twist).tilt(gradient)
