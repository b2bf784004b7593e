"""Training of denoisers and classifiers: losses, and one compact trainer that can be killed and resumed."""

from tokensteer.train.fit import Fitted, Plan, Report, Watch, fit
from tokensteer.train.losses import (
    Loss,
    Predict,
    classifier_loss,
    masked_bound,
    masked_loss,
    strata,
    uniform_bound,
    uniform_loss,
)
from tokensteer.train.progress import shown

__all__ = [
    "Fitted",
    "Loss",
    "Plan",
    "Predict",
    "Report",
    "Watch",
    "classifier_loss",
    "fit",
    "masked_bound",
    "masked_loss",
    "shown",
    "strata",
    "uniform_bound",
    "uniform_loss",
]
