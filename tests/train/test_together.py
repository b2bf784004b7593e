"""Two processes that train one proposal, by accelerate on a CPU: this file is also what each of them runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from learned_toys import B, Table, denoiser_of
from safetensors.torch import load_file, save_file
from toys import seeded

import tokensteer as ts
from tokensteer.train import ProposalPlan, fit_proposal
from tokensteer.train.frozen import changing
from tokensteer.train.optim import Optimiser

SECONDS = 120  # by when a deadlock is taken for one
ROUNDS = 5


class StoppedError(Exception):
    pass


def train(together: Any, seed: int, checkpoint: Path | None = None, until: int | None = None, **options):
    """A few rounds, broken off in the round `until`."""
    torch.manual_seed(seed)
    steering = ts.Steering(B.model("mdm"), B.tilt("mdm"))
    settings = {"paths": 8, "rate": 0.1, "save_every": 1, "report_every": 1, "replay": 1} | options

    def watch(progress) -> None:
        if progress.step == until:
            raise StoppedError

    return fit_proposal(
        steering,
        Table(4, B.length),
        denoiser_of,
        plan=ProposalPlan(**({"rounds": ROUNDS} | settings)),
        generator=seeded(1),
        checkpoint=checkpoint,
        watch=watch,
        together=together,
    )


def weights(learned) -> dict[str, torch.Tensor]:
    nets = {"net": learned.net, "baseline": learned.baseline}
    return {f"{part}.{name}": value for part, net in nets.items() for name, value in net.state_dict().items()}


class Spy:
    """An accelerator, and the gradients that it was given and gave back."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.gave, self.got = accelerator, [], []
        self.num_processes, self.process_index = accelerator.num_processes, accelerator.process_index

    def reduce(self, tensor: Any, reduction: str = "sum") -> Any:
        answer = self.accelerator.reduce(tensor, reduction)
        if tensor.dim() and reduction == "mean":
            self.gave.append(tensor.clone())
            self.got.append(answer.clone())
        return answer


def work(folder: Path) -> None:
    """What each process does, one thing after the other; what comes of it goes to files."""
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    def keep(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}-{rank}.safetensors")

    spy = Spy(accelerator)
    keep("one", weights(train(spy, seed=rank, rounds=1, average=0.0)))
    gradients = {f"gave.{i}": g for i, g in enumerate(spy.gave)} | {f"got.{i}": g for i, g in enumerate(spy.got)}
    keep("gradients", gradients)
    keep("whole", weights(train(accelerator, seed=rank)))
    file = folder / "half.safetensors"
    with pytest.raises(StoppedError):
        train(accelerator, rank, file, until=4)
    mine = file.with_stem(f"half-{rank}")
    if rank == 1:  # as if it had been killed before it wrote the last one
        mine.with_stem(f"{mine.stem}-earlier").replace(mine)
    accelerator.wait_for_everyone()
    keep("resumed", weights(train(accelerator, rank + 7, file)))
    timed = train(accelerator, rank, rounds=10**6, seconds=0.5, report_every=1)
    keep("timed", weights(timed) | {"rounds": torch.tensor(timed.history[-1].step)})
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def launch(folder: Path) -> None:
    """Two processes that do the work."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)


def both(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def both_end_with_the_same_weights(folder: Path) -> None:
    """Bit for bit, though they began with different ones and walked different paths."""
    first, second = both(folder, "whole")
    assert same(first, second)
    assert not same(first, weights(train(None, seed=0)))


def they_learn_from_the_mean_of_their_gradients(folder: Path) -> None:
    first, second = both(folder, "gradients")
    count = len(first) // 2
    assert count > 2
    for i in range(count):
        mean = (first[f"gave.{i}"] + second[f"gave.{i}"]) / 2
        torch.testing.assert_close(first[f"got.{i}"], mean)
        assert torch.equal(first[f"got.{i}"], second[f"got.{i}"])
    assert not torch.equal(first["gave.0"], second["gave.0"])


def an_update_is_made_with_that_mean(folder: Path) -> None:
    from tokensteer.train import OfState

    torch.manual_seed(0)  # the weights of the first process are those that all begin with
    net = torch.nn.ModuleDict({"net": Table(4, B.length), "baseline": OfState(4, B.length)})
    plan = ProposalPlan(1, rate=0.1)
    learning = Optimiser(net, replace(plan, average=0.0), {}, seeded(), faster=((net["baseline"], plan.baseline_rate),))
    gradients = both(folder, "gradients")[1]
    for i, parameter in enumerate(net.parameters()):
        parameter.grad = gradients[f"got.{i}"]
    learning.learn(plan.rate_at(0.0))
    found = both(folder, "one")[1]
    for name, value in changing(net).items():
        torch.testing.assert_close(found[name], value)


def killed_at_different_times_and_resumed(folder: Path) -> None:
    """One had written a checkpoint that the other had not: both go on from the one before."""
    first, second = both(folder, "resumed")
    assert same(first, second)
    assert same(first, both(folder, "whole")[0])


def the_clock_ends_both_at_once(folder: Path) -> None:
    first, second = both(folder, "timed")
    assert int(first["rounds"]) > 1
    assert same(first, second)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.slow
def test_two_processes_train_one_proposal(tmp_path) -> None:
    """One test, since starting the processes is most of it."""
    launch(tmp_path)
    both_end_with_the_same_weights(tmp_path)
    they_learn_from_the_mean_of_their_gradients(tmp_path)
    an_update_is_made_with_that_mean(tmp_path)
    killed_at_different_times_and_resumed(tmp_path)
    the_clock_ends_both_at_once(tmp_path)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
