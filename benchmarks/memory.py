"""What steering holds beyond the network over a large vocabulary, on a CPU: the resident memory at the peak.

python -m benchmarks.memory --particles 16 --memory 1GiB
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import tokensteer as ts

HIDDEN, STEPS = 32, 4
KINDS = {
    "from_hidden": "a network that keeps hidden states and a head",
    "from_logits": "one that hands over its logits",
    "guided": "guidance between two networks of hidden states",
    "maskgit": "MaskGIT's order, with hidden states",
    "one_hots": "gradients of a network that takes one-hots",
    "uniform": "uniform noise, whose laws are spelt out",
}


def steer(kind: str, particles: int, length: int, vocab: int, memory: str) -> tuple[float, float]:
    """GiB at the peak above what there was before, and seconds of the processor; once in a process, for there is but
    one peak in it."""
    torch.manual_seed(0)
    mask = vocab - 1
    table = nn.Embedding(vocab, HIDDEN).requires_grad_(False)
    head = nn.Linear(HIDDEN, vocab, bias=False).requires_grad_(False)

    def network(x: Tensor) -> Tensor:
        return head(x @ table.weight if x.is_floating_point() else table(x))

    denoiser, kernel, canvas = ts.from_hidden(table, head, mask, ignores_time=True), ts.Ancestral(mask), mask
    if kind in ("from_logits", "one_hots"):
        denoiser = ts.from_logits(network, mask, ignores_time=True)
    if kind == "maskgit":
        kernel = ts.MaskGIT(mask)
    if kind == "uniform":
        denoiser, kernel, canvas = lambda x, t: network(x).log_softmax(-1), ts.uniform_noise(vocab), ts.NO_MASK
    model = ts.Diffusion(denoiser, kernel, ts.uniform_steps(STEPS), torch.full((length,), canvas))
    tilt = ts.Tilt(_fives, draws=4, differentiable=kind == "one_hots")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    method = (ts.smc_grad if kind == "one_hots" else ts.smc_base)(model, tilt)
    if kind == "guided":
        other = nn.Linear(HIDDEN, vocab, bias=False).requires_grad_(False)
        away = ts.from_hidden(table, other, mask, ignores_time=True)
        method = ts.smc_cfg(model, replace(model, denoiser=away), 1.5, tilt)
    method(particles, generator=torch.Generator().manual_seed(0), memory=memory)
    return (_peak() - before) / 2**30, resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _fives(x: Tensor) -> Tensor:
    """How often token 5 occurs, of ids or of one-hots."""
    return x[..., 5].sum(-1) if x.is_floating_point() else (x == 5).sum(-1).float()


def _peak() -> int:
    """Bytes this process has held at most. (`ru_maxrss` would count what its parent held when it was started.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--particles", type=int, default=16)
    words.add_argument("--length", type=int, default=1024, help="sites of a sequence")
    words.add_argument("--vocab", type=int, default=50258, help="words, the mask included")
    words.add_argument("--memory", default="1GiB", help="the budget that is given to smc")
    told = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    words.add_argument("--kind", choices=KINDS, nargs="+", default=["from_hidden", "from_logits", "guided"], help=told)
    given = words.parse_args()
    if len(given.kind) == 1:
        (kind,) = given.kind
        peak, seconds = steer(kind, given.particles, given.length, given.vocab, given.memory)
        sys.stdout.write(f"{kind:12} {peak:6.2f} GiB above what there was before, {seconds:.0f} CPU seconds\n")
        return
    sizes = given.particles, given.length, given.vocab
    whole = math.prod(sizes) * 4 / 2**30
    size = " × ".join(map(str, sizes))
    sys.stdout.write(f"{size}, float32: all logits are {whole:.2f} GiB; budget {given.memory}\n")
    sys.stdout.flush()
    options = [f"--{name}={getattr(given, name)}" for name in ("particles", "length", "vocab", "memory")]
    for kind in given.kind:  # each in a process of its own
        subprocess.run([sys.executable, "-m", "benchmarks.memory", "--kind", kind, *options], check=True)


if __name__ == "__main__":
    main()
