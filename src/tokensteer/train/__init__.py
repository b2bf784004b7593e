"""Training of denoisers, classifiers and proposals: losses, and trainers that can be killed and resumed."""

from tokensteer.train.baselines import OfState, OfTime, PerStep
from tokensteer.train.drakes import DrakesPlan, Tuned, Tuning, fit_drakes
from tokensteer.train.fit import Fitted, Plan, Report, Watch, fit
from tokensteer.train.heads import NewHead
from tokensteer.train.lora import load_adapter, lora, save_adapter
from tokensteer.train.losses import (
    Loss,
    Predict,
    classifier_loss,
    headed_loss,
    masked_bound,
    masked_loss,
    strata,
    uniform_bound,
    uniform_loss,
)
from tokensteer.train.objectives import Balance, Batch, Objective, PathVariance, Returns, StepVariance
from tokensteer.train.paths import Paths, Transitions, walk
from tokensteer.train.progress import shown
from tokensteer.train.proposal import Learned, Progress, ProposalPlan, fit_proposal

__all__ = [
    "Balance",
    "Batch",
    "DrakesPlan",
    "Fitted",
    "Learned",
    "Loss",
    "NewHead",
    "Objective",
    "OfState",
    "OfTime",
    "PathVariance",
    "Paths",
    "PerStep",
    "Plan",
    "Predict",
    "Progress",
    "ProposalPlan",
    "Report",
    "Returns",
    "StepVariance",
    "Transitions",
    "Tuned",
    "Tuning",
    "Watch",
    "classifier_loss",
    "fit",
    "fit_drakes",
    "fit_proposal",
    "headed_loss",
    "load_adapter",
    "lora",
    "masked_bound",
    "masked_loss",
    "save_adapter",
    "shown",
    "strata",
    "uniform_bound",
    "uniform_loss",
    "walk",
]
