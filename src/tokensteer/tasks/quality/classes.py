"""Metrics of generated images from the class probabilities of any classifier.

Log-probabilities (P, K) are computed once, for example by `tasks.common.metrics.in_parts(classifier, images)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensteer.tasks.common.metrics import Measured, measured


def class_score(log_p: Tensor, parts: int = 10) -> Measured:
    """exp of the mean divergence of p(y | x) from p(y), between 1 and K: the Inception score (Salimans et al., 2016)
    if the classifier is Inception, an Inception-like one otherwise.

    The mean and standard error over `parts` of the images, in order. Published figures have the standard deviation over
    ten parts, √10 times the error here. The score rises with the number of images in a part.
    """
    if log_p.dim() != 2 or not 1 <= parts <= len(log_p):
        raise ValueError(
            f"log-probabilities must be (P, K) with P >= {parts}, one image for each part, got {tuple(log_p.shape)}"
        )
    return measured(torch.stack([_score(part) for part in log_p.double().log_softmax(-1).tensor_split(parts)]))


def _score(log_p: Tensor) -> Tensor:
    p = log_p.exp()
    return (torch.xlogy(p, p).sum(-1).mean() - torch.xlogy(p.mean(0), p.mean(0)).sum()).exp()


def class_accuracy(log_p: Tensor, labels: Tensor) -> Measured:
    """The share of images whose most likely class is the one that they were generated for, (P,)."""
    if len(log_p) != len(labels):
        raise ValueError(f"there are {len(log_p)} images and {len(labels)} labels: give one label to each image")
    return measured((log_p.argmax(-1) == labels.to(log_p.device)).double())
