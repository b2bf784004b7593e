"""What steering holds beyond the network over a large vocabulary, on a CPU: the resident memory at the peak.

python -m benchmarks.memory --particles 16 --memory 1GiB
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import tokensteer as ts

LENGTH, VOCAB, HIDDEN, STEPS = 1024, 50258, 32, 4
MASK = VOCAB - 1


def steer(kind: str, particles: int, memory: str) -> tuple[float, float]:
    """GiB at the peak above what there was before, and seconds of the processor; once in a process, for there is but
    one peak in it."""
    torch.manual_seed(0)
    table = nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)
    head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    hidden = ts.from_hidden(table, head, MASK, ignores_time=True)
    logits = ts.from_logits(lambda x: head(table(x)), MASK, ignores_time=True)
    denoiser = logits if kind == "from_logits" else hidden
    model = ts.Diffusion(denoiser, ts.Ancestral(MASK), ts.uniform_steps(STEPS), ts.template(LENGTH, MASK))
    tilt = ts.Tilt(lambda x: (x == 5).sum(-1).float(), draws=4)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    method = ts.smc_base(model, tilt)
    if kind == "guided":
        other = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
        away = ts.from_hidden(table, other, MASK, ignores_time=True)
        method = ts.cfg(model, replace(model, denoiser=away), 1.5, tilt)
    method(particles, generator=torch.Generator().manual_seed(0), memory=memory)
    return (_peak() - before) / 2**30, resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _peak() -> int:
    """Bytes this process has held at most. (`ru_maxrss` would count what its parent held when it was started.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--particles", type=int, default=16)
    words.add_argument("--memory", default="1GiB", help="the budget that is given to smc")
    kinds = ("from_hidden", "from_logits", "guided")
    words.add_argument("--kind", choices=kinds, help="all, each in a process of its own, unless given")
    given = words.parse_args()
    if given.kind:
        peak, seconds = steer(given.kind, given.particles, given.memory)
        sys.stdout.write(f"{given.kind:12} {peak:6.2f} GiB above what there was before, {seconds:.0f} CPU seconds\n")
        return
    whole = given.particles * LENGTH * VOCAB * 4 / 2**30
    size = f"{given.particles} × {LENGTH} × {VOCAB}"
    sys.stdout.write(f"{size}, float32: all logits are {whole:.2f} GiB; budget {given.memory}\n")
    sys.stdout.flush()
    for kind in kinds:
        again = [sys.executable, "-m", "benchmarks.memory", "--kind", kind]
        subprocess.run([*again, "--particles", str(given.particles), "--memory", given.memory], check=True)


if __name__ == "__main__":
    main()
