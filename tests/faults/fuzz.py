"""Random configurations of all parts on tiny models, and what must hold of each of them.

A configuration comes from a seed and an index alone, so that a failure is run again by

    python -m tests.faults.fuzz --seed SEED --only INDEX

Outcomes: it ran and every invariant held; it was refused by one of the known `REFUSALS`; or it is a finding. Tiny
configurations are also compared with enumeration: the mean of exp(log_z) over many populations has a z-score.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

import tokensteer as ts
from tests.faults.chains import judge_chain
from tests.faults.choices import Choices
from tests.faults.exactness import Scores
from tests.faults.invariants import (
    check_path,
    check_plain,
    check_result,
    check_sequences,
    check_stored,
    check_weights,
    checked,
    demand,
    same,
)
from tests.faults.models import draw_model
from tests.faults.runs import OTHERS, Plan, draw_plan
from tests.faults.spoils import is_ours, spoil, spoil_options
from tests.faults.steerings import Aim, draw_steering

torch.set_num_threads(1)  # many small operations: more threads only wait for one another

RUNS = 6  # configurations that share a steering, which takes as long to make as a run does
SPOILED = 0.15  # the share of configurations with a wrong value
JUDGED = (0.6, 0.6)  # of steerings with mild rewards, and of their runs: those that are compared with enumeration

Made = dict[str, Any]
"""The choices of a configuration by name."""


def proposes(kind: str) -> Callable[[Made], bool]:
    """Whether a part of the proposal is of this kind."""
    return lambda made: kind in (made.get("proposal"), made.get("second member"), made.get("gradient base"))


def samples_by(*samplers: str) -> Callable[[Made], bool]:
    return lambda made: made.get("sampler") in samplers


def constrained(made: Made) -> bool:
    return "rule" in made


# Configurations that the library refuses, and rightly, with what must be true of them. Any other refusal is a finding.
REFUSALS: dict[str, Callable[[Made], bool]] = {
    # The estimate is random, or the potential remembers: those of a spoiled steering, or beside a learned twist.
    r"Enumerated needs a log-twist that x_s alone determines": proposes("Enumerated"),
    r"constraints need a masked process": constrained,  # whose sites move whatever their tokens
    r"Product: kernel_powers is for Ancestral": lambda made: made.get("any convention", False),
    r"Auxiliary needs a proposal whose weight depends on x_t alone": samples_by("Auxiliary"),
    r"Rejuvenated\.back is \d+ and the path has \d+ steps": lambda made: made.get("back", 0) > 1,
    r"particle Gibbs cannot pin a kernel with a memory": samples_by("particle_gibbs", "repair"),
    r"the kernel (is )?\w+,? (which opens sites by their tokens|masks open sites again)": samples_by("repair"),
    # A gradient pass stores log-probabilities.
    r"OtherHead reads hidden states, and the model stores none": proposes("OtherHead"),
    # Rewards of -inf, constraints and tokens without mass that few particles do not meet.
    r"a population has died, and no trajectory can be picked": lambda made: (
        made.get("sampler") == "particle_gibbs" and (constrained(made) or "-inf" in made or not made["full"])
    ),
    r"split Gibbs sampling needs": samples_by("SplitGibbs"),
    r"constrain: this tilt has a log_lookahead already": lambda made: "learned" in made and constrained(made),
    r"a pattern that cannot be met: no sequence": constrained,  # by the template
    r"the look-ahead of a constraint differs between \d+ templates": lambda made: (
        constrained(made) and proposes("Enumerated")(made) and made["templates"] > 1
    ),
    r"MaskGITExtended only weighs moves that it drew itself": lambda made: made["kernel"] == "MaskGITExtended",
    # A mixture of two gradients.
    r"the parts of a proposal share one network of their own and one gradient": lambda made: made.get("mixture", False),
}
# Right only where networks rule tokens out: what has no probability now may have some later, and q need not know.
REFUSED_WITHOUT_SUPPORT = r"the proposal has no mass at a trajectory that the target can take"


class RefusedError(Exception):
    """A wrong value was refused by the library in its own words."""


@dataclass
class Report:
    """What came of the configurations so far."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    findings: list[str] = field(default_factory=list[str])
    scores: Scores = field(default_factory=Scores)

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self.outcomes.items()))
        return f"{counts}; {self.scores}"


def refusal(error: Exception, choices: Choices) -> str | None:
    """The pattern of a known refusal that an error is, raised by a statement of ours."""
    if isinstance(error, FloatingPointError) and re.search(REFUSED_WITHOUT_SUPPORT, str(error)):
        return None if choices.made.get("full", True) else REFUSED_WITHOUT_SUPPORT
    if not isinstance(error, ValueError | TypeError):
        return None
    return next(
        (known for known, is_so in REFUSALS.items() if re.search(known, str(error)) and is_so(choices.made)), None
    )


def run_other(plan: Plan, seed: int) -> torch.Tensor:
    """Samples (S, B, L) of a sampler that is not `smc`, checked."""
    steering, options = plan.aim.steering, plan.options
    generator = torch.Generator().manual_seed(seed)
    particles, populations = max(2, options["num_particles"]), options["populations"]
    match plan.sampler:
        case "particle_gibbs":
            ancestors = seed % 2 == 0
            chain = ts.particle_gibbs(
                steering,
                1,
                particles,
                populations,
                when=options["when"],
                ancestor_sampling=ancestors,
                generator=generator,
            )
        case "repair":
            start = plan.run(seed).samples[:, 0]
            share = (0.3, 1.0)[seed % 2]
            chain = ts.repair(start, steering, share=share, sweeps=1, num_particles=particles, generator=generator)
            demand(torch.equal(chain.samples[0], start), "a chain starts at what it was given")
        case _:
            result = ts.SplitGibbs(2, 2, 3)(steering, particles, populations, generator=generator)
            check_result(result, plan.aim)
            return result.samples
    check_result(chain.result, plan.aim)
    check_sequences(chain.samples.transpose(0, 1), plan.aim)
    return chain.samples


@lru_cache(maxsize=1)
def shared_steering(seed: int, group: int) -> tuple[Choices, Aim | Exception]:
    """The steering of a group of configurations, or what was raised when it was made."""
    choices = Choices(seed, group, "steering")
    try:
        aim = draw_steering(choices, draw_model(choices), choices.often("mild", 0.5))
        if "mild" in choices.made and choices.often("enumerated", JUDGED[0]):
            choices.pick("row", *range(len(aim.made.canvas)))
        return choices, aim
    except Exception as error:
        return choices, error


def check(choices: Choices, report: Report) -> None:
    """Run one configuration and check all that must hold of it."""
    earlier, aim = shared_steering(choices.seed, choices.index // RUNS)
    choices.made |= earlier.made
    if isinstance(aim, Exception):
        raise aim
    judged = "row" in choices.made and choices.often("judged", JUDGED[1])
    plan = draw_plan(choices, aim)
    seed = choices.random.getrandbits(31)
    if plan.sampler in OTHERS:
        first = run_other(plan, seed)
        if choices.index % 5 == 0:
            demand(torch.equal(first, run_other(plan, seed)), "the same seed gives the same samples")
        if judged and plan.sampler == "particle_gibbs":
            judge_chain(report.scores, choices, plan, choices.made["row"], seed)
        return
    records = list[ts.Record]()
    result = plan.run(seed, on_step=records.append, resample=checked(plan.options["resample"]))
    check_result(result, aim)
    check_weights(records, plan)
    check_plain(result, plan)
    check_path(records, plan)
    match choices.random.randrange(14):  # each of these runs it once more, or takes as long
        case 0:
            demand(same(result, plan.run(seed)), "the same seed gives the same samples")
        case 1:
            check_stored(result)
        case 2 if plan.memory is not None:
            demand(same(result, plan.run(seed, memory=None), exactly=False), "a memory limit changes nothing")
        case 3 if aim.reward is not None and not aim.differentiable:
            with aim.reward.plain():
                demand(same(result, plan.run(seed), exactly=False), "the type of equal rewards changes nothing")
        case _:
            pass
    if judged:
        report.scores.judge(choices, plan, choices.made["row"], seed)


def check_spoiled(choices: Choices) -> None:
    """Run a configuration with one wrong value: it may be harmless, else the library must say so itself."""
    earlier, aim = shared_steering(choices.seed, choices.index // RUNS)
    choices.made |= earlier.made
    if isinstance(aim, Exception):
        raise aim
    options: dict[str, Any] = {"num_particles": 3, "populations": aim.steering.model.populations}
    try:
        if choices.often("spoil options", 0.3):
            steering, options = aim.steering, spoil_options(choices, options)
        else:
            steering = spoil(choices, aim)
        result = ts.smc(steering, **{"generator": torch.Generator().manual_seed(0), **options})
    except Exception as error:
        if is_ours(error):
            raise RefusedError from error
        raise
    demand(not (result.log_w.isnan() | (result.log_w == math.inf)).any(), "log-weights are finite or -inf")
    demand((result.samples != steering.model.kernel.mask_id).all(), "no mask is left")


def examine(seed: int, index: int, report: Report) -> None:
    choices = Choices(seed, index)
    try:
        if choices.often("spoiled", SPOILED):
            check_spoiled(choices)
        else:
            check(choices, report)
        report.outcomes["ran"] += 1
    except RefusedError:
        report.outcomes["refused (a wrong value)"] += 1
    except Exception as error:
        known = refusal(error, choices)
        if known is not None:
            report.outcomes[f"refused ({known})"] += 1
            return
        report.outcomes["found"] += 1
        where = "".join(traceback.format_exception(error)[-3:])
        again = f"python -m tests.faults.fuzz --seed {seed} --only {index}"
        report.findings.append(f"{type(error).__name__}: {error}\n  {choices}\n  {again}\n{where}")


def fuzz(seed: int, indices: Iterable[int], progress: bool = False) -> Report:
    report, began = Report(), time.monotonic()
    for done, index in enumerate(indices, 1):
        known = len(report.findings) + len(report.scores.wrong)
        examine(seed, index, report)
        if progress and len(report.findings) + len(report.scores.wrong) > known:
            sys.stderr.write(f"a finding at {index}\n{(report.findings + report.scores.wrong)[-1]}\n")
        if progress and done % 1000 == 0:
            sys.stderr.write(f"{done} in {time.monotonic() - began:.0f} s: {report}\n")
    report.findings += report.scores.findings()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the index to begin with")
    parser.add_argument("--only", type=int, help="one configuration by its index")
    options = parser.parse_args()
    indices = range(options.first, options.first + options.count) if options.only is None else [options.only]
    report = fuzz(options.seed, indices, progress=options.only is None)
    sys.stdout.write("\n".join([*report.findings, f"seed {options.seed}: {report}"]) + "\n")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
