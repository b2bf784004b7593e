"""Mutants: one-line mistakes in the source, each of which named tests must notice. `make mutants` runs them all.

A mutant is a name and a file under src/tokensteer, an old text (-) that stands there once, the new one (+), and the
tests that must fail (?). Each is made in a copy of src, so that the working tree stays as it is. Name some to run
those alone: `python tools/mutants.py clip floor`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Mutant = namedtuple("Mutant", "name file old new tests")
TABLE = """
a past by weight and twist: core/particles/gibbs.py
- (log_p - evaluation.log_twist).double()
+ log_p.double()
? tests/particles/test_gibbs.py::test_a_new_past_has_its_law_at_every_time
rejuvenation without the change of the twist: core/particles/rejuvenation.py
- change = log_twist - evaluation.log_twist
+ change = 0.0 * log_twist
? tests/particles/test_rejuvenation.py::test_unbiased_by_many_small_populations
a segment without its own ratio: core/particles/rejuvenation.py
- own, others = segment.log_ratio + evaluation.log_twist,
+ own, others = 0.0 * segment.log_ratio + evaluation.log_twist,
? tests/particles/test_rejuvenation.py::test_the_present_segment_counts_with_its_own_ratio
segments not permuted: core/particles/rejuvenation.py
- x=self.x[rows], evaluation=self.evaluation.take(rows), log_ratio=self.log_ratio[rows]
+ x=self.x, evaluation=self.evaluation, log_ratio=self.log_ratio
? tests/particles/test_rejuvenation.py::test_unbiased
islands that keep their weights: core/particles/resampling.py
- torch.where(exchanged, shared - log_z.gather(-1, parents), 0.0)
+ torch.where(exchanged, shared * 0.0, 0.0)
? tests/particles/test_islands.py::test_unbiased
islands exchanged by their heaviest particle: core/particles/resampling.py
- parents, shared = resampler(log_z, generator)
+ parents, shared = resampler(grouped.amax(-1), generator)
? tests/particles/test_islands.py::test_unbiased
populations of unequal size as equals: core/particles/result.py
- share = weights(torch.zeros_like(log_z) if sizes is None else sizes.to(log_z).log())
+ share = weights(torch.zeros_like(log_z))
? tests/particles/test_merging.py::test_unequal_runs_count_by_their_particles
every new path of a repair taken: core/models/forward.py
- log_odds = torch.where(now == -math.inf, math.inf, log_other.sum(0) - now)
+ log_odds = torch.full_like(now, math.inf)
? tests/steering/test_repair.py::test_paths_keep_their_law_under_new_noise
a repair resumed one step beside: core/particles/resumed.py
- return self.path.steps[self.first + step.index]
+ return self.path.steps[step.index]
? tests/steering/test_repair.py::test_a_sweep_from_the_middle_keeps_exact_paths
fk one step beside its resampling: core/steering/methods.py
- if step.index and step.index % interval == 0
+ if step.index and (step.index - 1) % interval == 0
? tests/models/test_edges.py::test_fk_resamples_by_the_reward_of_that_very_step
cosine pace without its division: core/kernels/ranked.py
- math.sin(math.pi / 2 * step.s) / math.sin(math.pi / 2 * step.t)
+ math.sin(math.pi / 2 * step.s)
? tests/kernels/test_orders.py::test_the_cosine_pace_by_hand
noise annealed by t: core/kernels/maskgit.py
- self.temperature * step.s * memory
+ self.temperature * step.t * memory
? tests/kernels/test_orders.py::test_noise_is_annealed_by_the_time_that_a_step_leads_to
linear ramp constant: app/runs/choices.py
- "linear": ramps.linear
+ "linear": ramps.constant
? tests/app/test_cli.py::test_ramps_have_names
floor without kl: core/twists/tilt.py
- replace_neg_inf(r, self.floor * self.kl)
+ replace_neg_inf(r, self.floor)
? tests/twists/test_floor.py
window by t: core/kernels/masked.py
- step.s >= self.t_off
+ step.t >= self.t_off
? tests/kernels/test_orders.py::test_a_window_holds_only_steps_that_lie_within
balance without ends: train/objectives.py
- (1.0 - self.ends) * weight / weight.sum() + self.ends * last
+ weight / weight.sum()
? tests/train/test_learned.py::test_balance_by_hand
heads in half precision: core/categorical/fused.py
- if torch.is_autocast_enabled(states.device.type):
+ if False:
? tests/categorical/test_fused.py::test_a_head_is_multiplied_out_in_single_precision_under_autocast_too
terminal weight dropped: core/steering/steering.py
- Evaluation(self.twist.scale(0.0) * reward,
+ Evaluation(0.0 * reward,
? tests/exactness/test_golden.py::test_trajectories
twist redrawn: core/particles/loop.py
- change = log_ratio.double() - evaluation.log_twist
+ change = log_ratio.double() - path.evaluate(x, step.t, generator).log_twist
? tests/exactness/test_mutants.py::test_twists_that_are_not_carried
twists not permuted: core/particles/loop.py
- x, evaluation = x[rows], evaluation.take(rows)
+ x = x[rows]
? tests/exactness/test_identities.py::test_i1_weights_telescope_along_lineages
log p - log q dropped: core/particles/loop.py
- change = log_ratio.double() - evaluation.log_twist
+ change = -evaluation.log_twist
? tests/exactness/test_identities.py::test_i1_weights_telescope_along_lineages
resampling changes the mean weight: core/particles/resampling.py
- log_mean_weight(log_w).unsqueeze(-1).expand_as(log_w)
+ torch.zeros_like(log_w)
? tests/particles/test_resampling.py::test_children_carry_their_parents_weight_in_expectation
ess inverted: core/particles/resampling.py
- .square().sum(-1).reciprocal()
+ .square().sum(-1)
? tests/particles/test_resampling.py::test_ess
gradient by the ramp at t: core/proposals/gradient.py
- twist.aim(step.s, evaluation)
+ twist.aim(step.t, evaluation)
? tests/exactness/test_golden.py::test_trajectories
clip ignored: core/categorical/gradient_tilt.py
- most = math.inf if clip is None else clip
+ most = math.inf
? tests/categorical/test_gradient_tilt.py::test_a_tilt_is_kept_within_its_clip
sigma above its bound: core/kernels/masked.py
- if not 0 <= sigma <= bound + 1e-12:
+ if not 0 <= sigma:
? tests/models/test_errors.py
powers of a product swapped: core/categorical/product.py
- zip(log_measures, powers, strict=True)
+ zip(log_measures, powers[::-1], strict=True)
? tests/exactness/test_golden.py::test_product_conventions
"""


def read(table: str) -> list[Mutant]:
    lines = table.strip().split("\n")
    found = [lines[k : k + 4] for k in range(0, len(lines), 4)]
    assert all([line[:2] for line in four[1:]] == ["- ", "+ ", "? "] for four in found), "four lines for each mutant"
    return [Mutant(*four[0].split(": "), *(line[2:] for line in four[1:])) for four in found]


def pytest(source: Path, *tests: str) -> int:
    """The exit code of the tests, with the package that lies in `source`: 0 if all pass, 1 if some fail."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True).returncode


def try_out(mutant: Mutant) -> int:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__")))
        file = source / "tokensteer" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: {mutant.file} has the old text {text.count(mutant.old)} times, and not once")
        file.write_text(text.replace(mutant.old, mutant.new))
        return pytest(source, mutant.tests)


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in read(TABLE) if not words or any(word in mutant.name for word in words)]
    if not chosen:
        sys.exit(f"no mutant is called {' '.join(words)}")
    start, missed = time.monotonic(), 0
    if pytest(ROOT / "src", *sorted({mutant.tests for mutant in chosen})) != 0:
        sys.exit("the tests fail without any mutant, so that they say nothing of one: mend them first")
    for mutant in chosen:
        code = try_out(mutant)
        verdict = {0: "MISSED", 1: "caught"}.get(code, f"pytest ended with code {code}")
        missed += code != 1
        sys.stdout.write(f"{verdict:8}  {mutant.name}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} caught in {time.monotonic() - start:.0f} s\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
