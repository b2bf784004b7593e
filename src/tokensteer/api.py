"""Every public name, gathered in one place. `tokensteer` hands them on, and loads this module when first asked."""

import tokensteer.adapters as adapters
import tokensteer.testing as testing
from tokensteer.app.runs.folder import Run, open_run
from tokensteer.core.categorical.sites import Tokens, tokens_of
from tokensteer.core.kernels.blocks import Blocks
from tokensteer.core.kernels.jumps import (
    FirstHitting,
    OneSite,
    TauLeap,
    TimedFirstHitting,
    UniformLeap,
    event_steps,
    leap,
)
from tokensteer.core.kernels.kernel import NO_MASK, Kernel
from tokensteer.core.kernels.masked import Ancestral, Cap, ConfidenceRemask, Rescale, Window, no_remasking, remdm_loop
from tokensteer.core.kernels.maskgit import MaskGIT, MaskGITExtended, RankedReveal
from tokensteer.core.kernels.measure import Listed, Reveal, Table
from tokensteer.core.kernels.noise import Interpolating, uniform_noise
from tokensteer.core.kernels.ranked import (
    LowConfidence,
    Ranked,
    Ranking,
    cosine_count,
    evenly,
    fixed,
    margin,
    max_probability,
    negative_entropy,
)
from tokensteer.core.kernels.rates import hazard, masked_rate, next_opening, opening_times, uniform_rate
from tokensteer.core.kernels.schedule import (
    Cosine,
    Geometric,
    Linear,
    LogLinear,
    Loop,
    Polynomial,
    Schedule,
    cosine_steps,
    uniform_steps,
)
from tokensteer.core.models.denoiser import Denoiser, carry_over, from_hidden, from_logits
from tokensteer.core.models.diffusion import Diffusion, Model
from tokensteer.core.models.product import Product, denoiser_powers, guided, kernel_powers, paper_powers
from tokensteer.core.models.template import padded, template
from tokensteer.core.particles.auxiliary import ResampleFirst
from tokensteer.core.particles.gibbs import Chain, particle_gibbs, pick
from tokensteer.core.particles.loop import smc, sweep
from tokensteer.core.particles.path import Evaluation, FeynmanKac, Measure, Record, Step
from tokensteer.core.particles.resampling import (
    ess,
    heaviest,
    multinomial,
    nested,
    one_survivor,
    partial,
    residual,
    ssp,
    stratified,
    systematic,
)
from tokensteer.core.particles.result import Result
from tokensteer.core.particles.triggers import all_of, always, any_of, ess_below, every, never, watching
from tokensteer.core.proposals.amortised import Amortised, OtherHead
from tokensteer.core.proposals.enumerated import Enumerated
from tokensteer.core.proposals.gradient import Gradient
from tokensteer.core.proposals.proposal import FromModel, Guided, Optimal, Proposal
from tokensteer.core.steering.cuda_graph import Recorded, recorded
from tokensteer.core.steering.methods import (
    Method,
    best_of_n,
    cfg,
    fk_steering,
    greedy_svdd,
    nested_svdd,
    pretrained,
    product,
    prop_amot,
    prop_grad,
    smc_amot,
    smc_base,
    smc_grad,
    svdd,
)
from tokensteer.core.steering.planner import Plan, adapted_ramp, plan
from tokensteer.core.steering.split_gibbs import SplitGibbs
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.estimators import (
    Exact,
    Look,
    Relaxed,
    Sampled,
    SoftInput,
    Value,
    log_mean_exp,
    log_mean_exp_outside,
    mean,
)
from tokensteer.core.twists.learned import LearnedTwist
from tokensteer.core.twists.potentials import difference, maximum, total
from tokensteer.core.twists.ramps import Adaptive, clipped_ramp, constant_ramp, end_ramp, exponential_ramp, linear_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.testing.jump_paths import JumpPaths, balance_log_weight, jump_paths, reversed_rate, tilt_log_weight

__all__ = [
    "NO_MASK",
    "Adaptive",
    "Amortised",
    "Ancestral",
    "Blocks",
    "Cap",
    "Chain",
    "ConfidenceRemask",
    "Cosine",
    "Denoiser",
    "Diffusion",
    "Enumerated",
    "Evaluation",
    "Exact",
    "FeynmanKac",
    "FirstHitting",
    "FromModel",
    "Geometric",
    "Gradient",
    "Guided",
    "Interpolating",
    "JumpPaths",
    "Kernel",
    "LearnedTwist",
    "Linear",
    "Listed",
    "LogLinear",
    "Look",
    "Loop",
    "LowConfidence",
    "MaskGIT",
    "MaskGITExtended",
    "Measure",
    "Method",
    "Model",
    "OneSite",
    "Optimal",
    "OtherHead",
    "Plan",
    "Polynomial",
    "Product",
    "Proposal",
    "Ranked",
    "RankedReveal",
    "Ranking",
    "Record",
    "Recorded",
    "Relaxed",
    "ResampleFirst",
    "Rescale",
    "Result",
    "Reveal",
    "Run",
    "Sampled",
    "Schedule",
    "SoftInput",
    "SplitGibbs",
    "Steering",
    "Step",
    "Table",
    "TauLeap",
    "Tilt",
    "TimedFirstHitting",
    "Tokens",
    "UniformLeap",
    "Value",
    "Window",
    "adapted_ramp",
    "adapters",
    "all_of",
    "always",
    "any_of",
    "balance_log_weight",
    "best_of_n",
    "carry_over",
    "cfg",
    "clipped_ramp",
    "constant_ramp",
    "cosine_count",
    "cosine_steps",
    "denoiser_powers",
    "difference",
    "end_ramp",
    "ess",
    "ess_below",
    "evenly",
    "event_steps",
    "every",
    "exponential_ramp",
    "fixed",
    "fk_steering",
    "from_hidden",
    "from_logits",
    "greedy_svdd",
    "guided",
    "hazard",
    "heaviest",
    "jump_paths",
    "kernel_powers",
    "leap",
    "linear_ramp",
    "log_mean_exp",
    "log_mean_exp_outside",
    "margin",
    "masked_rate",
    "max_probability",
    "maximum",
    "mean",
    "multinomial",
    "negative_entropy",
    "nested",
    "nested_svdd",
    "never",
    "next_opening",
    "no_remasking",
    "one_survivor",
    "open_run",
    "opening_times",
    "padded",
    "paper_powers",
    "partial",
    "particle_gibbs",
    "pick",
    "plan",
    "pretrained",
    "product",
    "prop_amot",
    "prop_grad",
    "recorded",
    "remdm_loop",
    "residual",
    "reversed_rate",
    "smc",
    "smc_amot",
    "smc_base",
    "smc_grad",
    "ssp",
    "stratified",
    "svdd",
    "sweep",
    "systematic",
    "template",
    "testing",
    "tilt_log_weight",
    "tokens_of",
    "total",
    "uniform_noise",
    "uniform_rate",
    "uniform_steps",
    "watching",
]
