"""Methods on a task with a hard constraint: the same methods, conditioned on it."""

from __future__ import annotations

from dataclasses import replace

from tokensteer.core.particles.result import Result
from tokensteer.core.proposals.enumerated import Enumerated
from tokensteer.core.proposals.proposal import of_kind
from tokensteer.core.steering.methods import Method
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.lookahead import Satisfies, constrain


def constrained(name: str, method: Method, rule: Automaton) -> Method:
    """The method with its proposal conditioned on the rule, and the look-ahead in its twist."""
    steering = method.steering
    if of_kind(steering.proposal, Enumerated):
        raise refused(name)
    return replace(method, steering=constrain(steering.model, rule, steering.twist, steering.proposal))  # pyright: ignore[reportArgumentType]


def refused(name: str) -> ValueError:
    return ValueError(f"{name} takes no constraints: choose another method, such as --method smc-base or smc-grad")


def own_reward(method: Method, result: Result) -> Result:
    """The result without the reward of a constraint alone, which is 0 for all samples."""
    twist = method.steering.twist
    alone = twist is not None and isinstance(twist.reward, Satisfies) and twist.reward.soft is None
    return replace(result, reward=None) if alone else result
