"""Methods in a line each, for the command line and for readers of a report (docs/methods.md has more). Importing this
module loads no torch."""

from __future__ import annotations

DESCRIBED = {
    "auto": "SMC whose proposal, trigger and number of particles pilots choose within a budget. Samples the target.",
    "pretrained": "The model alone, without steering.",
    "best-of-n": "Independent samples of the model, weighted by the reward at the end. Samples the target as N grows.",
    "svdd": "In every step one particle survives, drawn by weight, and has N children. Not the target.",
    "svdd-argmax": "In every step the heaviest particle survives. An optimiser: it has no target.",
    "nested-svdd": "SVDD in groups of up to four, with SMC between the groups. Samples the target as N grows.",
    "fk-difference": "Feynman-Kac steering: weights are differences of rewards, resampled five times in a run. "
    "Samples the target as N grows.",
    "fk-max": "Feynman-Kac steering by the highest reward so far; the last weight corrects for it.",
    "fk-sum": "Feynman-Kac steering by the sum of rewards; the last weight corrects for it.",
    "prop-grad": "Classifier guidance: the reward's gradient tilts the model's predictions. Without weights, biased.",
    "cfg": "Classifier-free guidance without weights. Biased.",
    "smc-cfg": "Classifier-free guidance with the weights that make it exact as N grows.",
    "drakes": "The model fine-tuned by the gradient of the reward. Without weights, biased.",
    "drakes-kl": "The model fine-tuned by the gradient of the reward with a KL penalty. Without weights, biased.",
    "sgdd": "Split Gibbs sampling with uniform noise, at the cost of plain sampling. Chains without weights.",
    "sgdd-long": "Split Gibbs sampling with uniform noise, as long as its authors run it. Chains without weights.",
    "smc-base": "SMC with the model as proposal. Samples the target as N grows.",
    "smc-grad": "SMC whose proposal is tilted by the gradient of the reward. Samples the target as N grows.",
    "smc-enumerated": "SMC with the locally optimal proposal, by enumeration. Samples the target as N grows.",
    "prop-amot": "The learned proposal alone. Without weights, biased.",
    "smc-amot": "SMC with a learned proposal. Samples the target as N grows.",
    "smc-learned": "SMC with a learned proposal and a learned twist. Samples the target as N grows.",
    "particle-gibbs": "SMC, then three sweeps that keep one particle pinned. Samples the target as N or sweeps grow.",
}
USUAL = ("pretrained", "best-of-n", "smc-base", "smc-grad", "smc-amot", "svdd", "fk-difference")
"""The methods that a report of many shows first, in order of preference."""
