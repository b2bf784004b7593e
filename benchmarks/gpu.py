"""What a steered step costs on a GPU, in bare forward passes of the same network in the same mode.

python -m benchmarks.gpu --help
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tokensteer as ts
from benchmarks.nets import DenoiserNet, RewardNet

DESCRIPTION = """\
A transformer of MDLM's size (12 layers, 768 wide, 50,258 words, bf16, random weights) steered by SMC_base and SMC_grad.
A step is a whole one: prediction, M clean draws and their rewards, weights, resampling, move. It is compared with one
bare forward pass over the same rows, logits and all, in the same mode, eager or compiled. The grid is coarse enough
that nearly every particle changes at every step, so that nothing is gained from rows that are known already; --fine
shows what is gained where they are. Peak memory is what a run takes beyond the weights and one forward pass."""


@dataclass(frozen=True)
class Options:
    particles: int = 64
    """N, in one population."""
    length: int = 100
    """L, tokens in a sequence."""
    num_steps: int = 20
    """T, denoising steps."""
    draws: int = 4
    """M, clean samples for each estimate."""
    vocab: int = 50_258
    """V, the mask included."""
    layers: int = 12
    width: int = 768
    heads: int = 12
    grad: bool = False
    """Also SMC_grad, with a reward network of two layers."""
    base: bool = True
    """SMC_base, from logits and from hidden states."""
    compiled: bool = False
    """Also with the network compiled by torch.compile."""
    fine: bool = False
    """Also on a grid of as many steps as there are sites."""
    memory: str | None = None
    """The budget of chunks, such as 2GiB."""
    device: str = "cuda"
    repeats: int = 3


def timed(run: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """The best of a few runs in milliseconds, after one to warm up, and the peak of memory beyond what was there."""
    run()
    best, peak = float("inf"), 0.0
    for _ in range(repeats):
        _wait(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        run()
        _wait(device)
        best = min(best, 1e3 * (time.perf_counter() - start))
        if device.type == "cuda":
            peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    return best, peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trivial_reward(x: Tensor) -> Tensor:
    """Even tokens, counted."""
    return (x % 2 == 0).float().sum(-1) / x.shape[-1]


def networks(options: Options, device: torch.device) -> tuple[DenoiserNet, RewardNet]:
    torch.manual_seed(0)
    shape = options.vocab, options.length, options.width
    with torch.device(device):
        denoiser = DenoiserNet(*shape, options.layers, options.heads)
        reward = RewardNet(*shape, 2, options.heads)
    return denoiser.bfloat16().eval().requires_grad_(False), reward.bfloat16().eval().requires_grad_(False)


def model(options: Options, denoiser: ts.Denoiser, num_steps: int, sharing: bool, device: torch.device) -> ts.Diffusion:
    mask_id = options.vocab - 1
    canvas = ts.template(options.length, mask_id).to(device)
    return ts.Diffusion(denoiser, ts.Ancestral(mask_id), ts.uniform_steps(num_steps), canvas, sharing)


def bench(options: Options, console: Console) -> None:
    device = torch.device(options.device)
    net, reward_net = networks(options, device)
    mask_id = options.vocab - 1
    x = torch.randint(0, mask_id, (options.particles, options.length), device=device)
    generator = torch.Generator(device).manual_seed(0)
    tilt = ts.Tilt(trivial_reward, 0.1, draws=options.draws)
    size = f"N={options.particles}, L={options.length}, V={options.vocab}, M={options.draws}, T={options.num_steps}"
    parameters = sum(p.numel() for p in net.parameters()) / 1e6
    table = Table(
        "",
        "ms a step",
        "forward ms",
        "ratio",
        "extra GiB",
        "rows",
        title=f"{size}, {parameters:.0f}M, bf16",
        box=box.SIMPLE,
    )

    def add(name: str, steering: ts.Steering, forward: tuple[float, float], memory: str | None = None) -> None:
        results: list[ts.Result] = []

        def run() -> None:
            results.append(ts.smc(steering, options.particles, generator=generator, memory=memory))

        took, peak = timed(run, device, options.repeats)
        num_steps = len(steering.steps)
        asked = options.particles * num_steps
        table.add_row(
            name,
            f"{took / num_steps:.2f}",
            f"{forward[0]:.2f}",
            f"{took / num_steps / forward[0]:.2f}",
            f"{peak - forward[1]:.2f}",
            f"{results[-1].rows['denoiser'] / asked:.2f}",
        )

    with torch.no_grad():
        eager = timed(lambda: net(x), device, options.repeats + 2)
        logits = ts.from_logits(net, mask_id, ignores_time=True)
        hidden = ts.from_hidden(net.body, net.head, mask_id, ignores_time=True)
        for name, denoiser in (("logits", logits), ("hidden states", hidden)) if options.base else ():
            for sharing in (False, True):
                label = f"SMC_base, {name}, {'distinct rows' if sharing else 'all rows'}"
                path = ts.Steering(model(options, denoiser, options.num_steps, sharing, device), tilt)
                add(label, path, eager, options.memory)
        if options.fine:
            for sharing in (False, True):
                path = ts.Steering(model(options, hidden, options.length, sharing, device), tilt)
                add(f"as fine as its sites, {'distinct rows' if sharing else 'all rows'}", path, eager)
        if options.compiled:
            for mode, graphs in (("compiled", None), ("compiled, CUDA graphs", "reduce-overhead")):
                fast, body = torch.compile(net, mode=graphs), torch.compile(net.body, mode=graphs)
                forward = timed(lambda fast=fast: fast(x), device, options.repeats + 2)
                forms = {
                    "logits": ts.from_logits(lambda x, t, fast=fast: fast(x), mask_id),
                    "hidden states": ts.from_hidden(lambda x, t, body=body: body(x), net.head, mask_id),
                }
                for name, denoiser in forms.items():
                    path = ts.Steering(model(options, denoiser, options.num_steps, False, device), tilt)
                    add(f"{mode}, {name}", path, forward)
    if options.grad:
        soft = ts.Tilt(reward_net, 0.1, draws=options.draws, average=ts.mean, differentiable=True)
        for every in (1, 2):
            steps = model(options, hidden, options.num_steps, False, device)
            path = ts.Steering(steps, soft, ts.Gradient(clip=3.0, every=every))
            add(f"SMC_grad, gradient every {every}, {options.memory or 'no budget'}", path, eager, options.memory)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks.gpu", description=DESCRIPTION)
    console = Console(width=130)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    console.print(f"torch {torch.__version__}, {name}", highlight=False)
    bench(options, console)


if __name__ == "__main__":
    main()
