"""Choose the scale of a stored proposal on held-out paths, and write it to its card.

    python tools/choose_scale.py mnist --goal 4 --device cuda

`tokensteer train TASK --proposal` does this for what it trains; this is for proposals of earlier versions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from tokensteer.core.proposals.amortised import OtherHead
from tokensteer.files import write_json
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import SHIPPED, Setup, read_card, weights_file
from tokensteer.tasks.common.training import Training


def main(task: tyro.conf.Positional[str], goal: int | None = None, device: str = "cpu", out: Path = SHIPPED) -> None:
    proposal = TASKS[task].proposal
    assert proposal is not None, "the task has no learned proposal"
    course = proposal(goal, SHIPPED)
    made = course.make(Setup(course.config.num_steps, course.goal, course.config.kl, device=device))
    assert made.learned is not None
    q = made.learned().q
    assert not isinstance(q, OtherHead), f"the proposal of {task} is a head on the model's states and has no scale"
    entries = course.held_out_entries(made, q, course.config.plan, Training(out, device))
    name = weights_file(SHIPPED, task, "proposal", course.goal).with_suffix(".json").name
    write_json(out / name, read_card(SHIPPED / name) | entries)
    sys.stdout.write(f"{task} {entries['scale']} {entries['scales']}\n")


if __name__ == "__main__":
    tyro.cli(main)
