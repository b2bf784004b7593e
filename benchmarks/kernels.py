"""What drawing tokens costs on a GPU: the kernels of `fused` beside memory speed, cuBLAS and the plain ways.

python -m benchmarks.kernels
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tokensteer.core.categorical.fused import LogitRows

VOCAB, HIDDEN, DRAWS, MASK = 50258, 768, 4, 50257
BANDWIDTH = 4.8e12  # bytes per second of an H200, by its datasheet


def measure(work: Callable[[], object], repeats: int = 15) -> tuple[float, float, float]:
    """Median milliseconds of the device and of the host, and MiB at the peak beyond what was there before."""
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    times: list[float] = []
    host: list[float] = []
    for _ in range(repeats):
        torch.cuda._sleep(1_000_000)  # the launches queue up behind this, so that the time is the device's alone
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        clock = time.perf_counter()
        work()
        host.append((time.perf_counter() - clock) * 1e3)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), statistics.median(host), peak


def multinomial(logits: Tensor) -> tuple[Tensor, Tensor]:
    p = logits.float().softmax(-1)
    tokens = torch.multinomial(p, DRAWS, replacement=True)
    return tokens, p.gather(1, tokens).log()


def gumbel(logits: Tensor) -> list[Tensor]:
    """One noise tensor for each draw, as published code does it."""
    log_p = logits.float().log_softmax(-1)
    return [(log_p - torch.rand_like(log_p).log_().neg_().log_()).argmax(-1) for _ in range(DRAWS)]


def say(what: str, work: Callable[[], object], floor: float | None = None) -> float:
    milliseconds, host, peak = measure(work)
    share = "" if floor is None else f"{floor / milliseconds:8.0%}"
    sys.stdout.write(f"  {what:<58}{milliseconds:9.3f} ms{host:9.3f} ms{peak:10.0f} MiB{share}\n")
    sys.stdout.flush()
    return milliseconds


def compare(K: int) -> None:
    device = torch.device("cuda")
    g = torch.Generator(device).manual_seed(0)
    rows = torch.arange(K, device=device)
    half = torch.where(torch.rand(K, device=device, generator=g) < 0.5, -1, rows)
    u = 1.0 - torch.rand(K, DRAWS, device=device, dtype=torch.float64, generator=g)
    states = torch.randn(K, HIDDEN, device=device, generator=g).bfloat16()
    weight = (3 * torch.randn(VOCAB, HIDDEN, device=device, generator=g) / HIDDEN**0.5).bfloat16()
    logits = states @ weight.T
    tokens = LogitRows(logits, rows, MASK).draw(u)[0][:, 0]

    sys.stdout.write(f"K = {K}, V = {VOCAB}, H = {HIDDEN}, bfloat16, M = {DRAWS}\n")
    sys.stdout.write(" from logits (device, host, peak beyond the inputs, share of memory speed)\n")
    floor = logits.numel() * 2 / BANDWIDTH * 1e3
    sys.stdout.write(f"  {'one pass at memory speed':<58}{floor:9.3f} ms\n")
    say("draw_from_logits", lambda: LogitRows(logits, rows, MASK).draw(u), floor)
    say("draw_from_logits, half the rows skipped", lambda: LogitRows(logits, half, MASK).draw(u), floor / 2)
    say("log_prob_from_logits", lambda: LogitRows(logits, rows, MASK).log_prob(tokens), floor)
    say("float softmax + multinomial", lambda: multinomial(logits), floor)
    say("float log-softmax + 4 Gumbel draws", lambda: gumbel(logits), floor)

    sys.stdout.write(" from a head (last: share of the speed of cuBLAS)\n")
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -VOCAB % 64))
    product = say("cuBLAS matmul alone", lambda: states @ weight.T)
    say(f"cuBLAS matmul alone, V padded to {len(padded)}", lambda: states @ padded.T, product)
    say("cuBLAS matmul + draw_from_logits", lambda: LogitRows(states @ weight.T, rows, MASK).draw(u), product)
    say(
        f"cuBLAS matmul, V padded to {len(padded)}, + draw_from_logits",
        lambda: LogitRows((states @ padded.T)[:, :VOCAB], rows, MASK).draw(u),
        product,
    )
    say("draw_from_head", lambda: LogitRows(states, rows, MASK, weight).draw(u), product)
    say(
        "draw_from_head, half the rows skipped",
        lambda: LogitRows(states, half, MASK, weight).draw(u),
        product / 2,
    )
    say("log_prob_from_head", lambda: LogitRows(states, rows, MASK, weight).log_prob(tokens), product)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels needs a GPU")
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for K in (6400, 16384):
        compare(K)


if __name__ == "__main__":
    main()
