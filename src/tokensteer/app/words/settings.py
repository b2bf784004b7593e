"""What the values of settings mean, in words. Importing this module loads no torch."""

from __future__ import annotations

RARELY = "full at resampling"
"""The ramp of Feynman-Kac steering, which cannot be asked for by name."""
RAMPS = {
    "linear": "the share of the reward that counts rises evenly from 0 to 1",
    "constant": "the full reward counts from the start",
    "end": "the reward counts at the end only",
    "exponential": "the full reward counts after 14% of the time",
    RARELY: "the full reward counts at the steps that resample",
}
TRIGGERS = {
    "always": "resample at every step",
    "never": "never resample",
    "observe": "never resample, but compute the weights of every step",
}
ORDERS = {
    "random": "a step opens masked sites at random",
    "confident": "a step opens the masked sites whose likeliest token has the highest probability",
}
NOISES = {"fresh": "each estimate has draws of its own", "shared": "all estimates share their random numbers"}


def meaning(name: str, value: object) -> str:
    """A setting with what it means: "ess:0.5: resample where ESS < 0.5 N". Without known words, the value alone."""
    words = str(value)
    match name:
        case "ramp":
            said = RAMPS.get(words, "") or _ramp(words)
        case "trigger":
            said = TRIGGERS.get(words, "") or _trigger(words)
        case "order":
            said = ORDERS.get(words, "")
        case "noise":
            said = NOISES.get(words, "")
        case "smoothing" if value == 0:
            return "none, each estimate counts as it is"
        case "smoothing":
            return f"{float(words):.3g}: this share of a particle's last estimate stays in its next"
        case "draws" if value == 0:
            return "none, the estimate has a closed form"
        case "draws":
            return f"{words} clean {'sequence' if value == 1 else 'sequences'} for each estimate of the reward"
        case _:
            said = ""
    return f"{words}: {said}" if said else words


def _ramp(words: str) -> str:
    name, _, number = words.partition(":")
    if name == "clipped":
        return f"the full reward counts after {10 * float(number):g}% of the time"
    return f"chosen in the run, so that a step keeps {float(number):.0%} of the ESS" if name == "adaptive" else ""


def _trigger(words: str) -> str:
    name, *numbers = words.split(":")
    if name == "every":
        return "resample at every step" if numbers == ["1"] else f"resample every {numbers[0]} steps"
    if name != "ess":
        return ""
    looks = f", checked {numbers[1]} times in a run" if len(numbers) > 1 else ""
    return f"resample where ESS < {numbers[0]} N{looks}"
