"""What a steered step costs on a GPU, in bare forward passes of the same network in the same mode.

python -m benchmarks.gpu --help
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tokensteer as ts
from benchmarks.nets import DenoiserNet, RewardNet
from tokensteer.core.models.denoiser import Embedded

DESCRIPTION = """\
A transformer of MDLM's size (12 layers, 768 wide, 50,258 words, bf16, random weights) steered by SMC_base and SMC_grad.
A step is a whole one: prediction, M clean draws and their rewards, weights, resampling, move. It is compared with one
of as many bare forward passes over the same rows, logits and all, one after the other and in the same mode, eager or
compiled. The grid is coarse enough that nearly every particle changes at every step, so that nothing is gained from
rows that are known already; --fine shows what is gained where they are. Peak memory is what a run takes beyond the
weights and one forward pass."""


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
    compiled_step: bool = False
    """Also with all of a step of SMC_base compiled by torch.compile, in pieces: it breaks where random numbers are
    drawn."""
    captured: bool = False
    """Also with the whole run recorded as a CUDA graph, and the forward pass too."""
    fine: bool = False
    """Also on a grid of as many steps as there are sites."""
    memory: str | None = None
    """The budget of chunks, such as 2GiB."""
    device: str = "cuda"
    repeats: int = 10
    """Runs of each kind, of which the best counts: the speed of a host changes by half from one second to the next."""


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


def passes(forward: Callable[[], Any], count: int, device: torch.device, repeats: int) -> tuple[float, float]:
    """`timed` for one of so many forward passes that follow each other as those of a run do."""

    def run() -> None:
        for _ in range(count):
            forward()

    took, peak = timed(run, device, repeats)
    return took / count, peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reserved(device: torch.device) -> float:
    """GiB that torch holds on to."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) / 2**30


def _graph_of(run: Callable[[], Any]) -> Callable[[], None]:
    """The same as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _there_and_back(network: Embedded, x: Tensor) -> Tensor:
    """The gradient of what a network says in its embedded tokens: what one of SMC_grad's networks has to do."""
    entered = network.embedding.detach()[x].requires_grad_()
    answer = network.of_embeddings(entered)
    return torch.autograd.grad(answer, entered, torch.ones_like(answer))[0]


def _rows(sharing: bool) -> str:
    return "distinct rows" if sharing else "all rows"


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


class CompiledStep:
    """A path whose steps have gone through torch.compile, rewards and networks included."""

    def __init__(self, path: ts.Steering) -> None:
        self.path, self.evaluate, self.move = path, torch.compile(path.evaluate), torch.compile(path.move)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.path, name)


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

    def row(name: str, took: float, forward: tuple[float, float], extra: float, rows: float) -> None:
        table.add_row(name, *(f"{figure:.2f}" for figure in (took, forward[0], took / forward[0], extra, rows)))

    def add(
        name: str, steering: ts.Steering | CompiledStep, forward: tuple[float, float], record: bool = False
    ) -> None:
        results, held = list[ts.Result](), _reserved(device)
        if record and isinstance(steering, ts.Steering):
            go = ts.captured(ts.Method(steering), options.particles, memory=options.memory)
            held = _reserved(device) - held  # what a graph works in stays its own
        else:
            go = partial(ts.smc, cast(ts.FeynmanKac, steering), options.particles, memory=options.memory)
        took, peak = timed(lambda: results.append(go(generator=generator)), device, options.repeats)
        num_steps = len(steering.steps)
        extra, rows = (held if record else peak) - forward[1], results[-1].rows["denoiser"] / options.particles
        row(name + (", recorded" if record else ""), took / num_steps, forward, extra, rows / num_steps)

    def path(denoiser: ts.Denoiser, sharing: bool = False, num_steps: int = options.num_steps) -> ts.Steering:
        return ts.Steering(model(options, denoiser, num_steps, sharing, device), tilt)

    def one(forward: Callable[[], Any]) -> tuple[float, float]:
        return passes(forward, options.num_steps, device, options.repeats)

    with torch.no_grad():
        eager = one(lambda: net(x))
        forms = {
            "logits": ts.from_logits(net, mask_id, ignores_time=True),
            "hidden states": ts.from_hidden(net.body, net.head, mask_id, ignores_time=True),
        }
        for name, denoiser in forms.items() if options.base else ():
            for sharing in (False, True):
                add(f"SMC_base, {name}, {_rows(sharing)}", path(denoiser, sharing), eager)
        if options.fine:
            for sharing in (False, True):
                steering = path(forms["hidden states"], sharing, options.length)
                add(f"as fine as its sites, {_rows(sharing)}", steering, eager)
        launched = eager
        if options.captured:
            launched = one(_graph_of(lambda: net(x)))[0], eager[1]
        if options.captured and options.base:
            for name, denoiser in forms.items():
                add(f"SMC_base, {name}", path(denoiser), launched, record=True)
        if options.compiled_step:
            torch._dynamo.config.recompile_limit = 64  # the constants of a step change with time
            add("compiled step, logits", CompiledStep(path(forms["logits"])), eager)
        if options.compiled:
            for mode, graphs in (("compiled", None), ("compiled, CUDA graphs", "reduce-overhead")):
                fast, body = torch.compile(net, mode=graphs), torch.compile(net.body, mode=graphs)
                forward = one(lambda fast=fast: fast(x))
                graphed = forward
                if options.captured and graphs is None:
                    graphed = one(_graph_of(lambda fast=fast: fast(x)))[0], forward[1]
                compiled = {
                    "logits": ts.from_logits(lambda x, t, fast=fast: fast(x), mask_id),
                    "hidden states": ts.from_hidden(lambda x, t, body=body: body(x), net.head, mask_id),
                }
                for name, denoiser in compiled.items():
                    add(f"{mode}, {name}", path(denoiser), forward)
                    if options.captured and graphs is None:
                        add(f"{mode}, {name}", path(denoiser), graphed, record=True)
    if options.grad:
        drawn = torch.randint(0, mask_id, (options.draws * options.particles, options.length), device=device)
        took, peak = one(lambda: (_there_and_back(net.body, x), _there_and_back(reward_net, drawn)))
        row("networks of SMC_grad alone, there and back", took, eager, peak - eager[1], 1.0)
        soft = ts.Tilt(reward_net, 0.1, draws=options.draws, average=ts.estimators.mean, differentiable=True)
        for label, proposal in {
            "SMC_grad": ts.Gradient(clip=3.0),
            "SMC_grad, every 2nd step": ts.Gradient(clip=3.0, every=2),
            "SMC_grad, of one draw": ts.Gradient(clip=3.0, draws=1),
        }.items():
            steering = replace(path(forms["hidden states"]), twist=soft, proposal=proposal)
            for record in (False, True) if options.captured else (False,):
                add(f"{label}, {options.memory or 'no budget'}", steering, launched if record else eager, record)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks.gpu", description=DESCRIPTION)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a GPU; --device cpu shows the eager rows without one")
    console = Console(width=130)
    name = "CPU" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    console.print(f"torch {torch.__version__}, {name}", highlight=False)
    bench(options, console)


if __name__ == "__main__":
    main()
