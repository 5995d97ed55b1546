"""Estimators of the sequential KL from sampled continuations: their exact mean and variance (arXiv:2606.09124, §6)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from theory.regularized import kl, log_ratio
from theory.tree import FloatArray, TokenTree

Estimator = Literal["window mean", "sum", "sum of exact KL", "sum of k3"]
ESTIMATORS: tuple[Estimator, ...] = ("window mean", "sum", "sum of exact KL", "sum of k3")


class Moments(NamedTuple):
    """Mean and variance of an estimator over the continuations of every edge, (E,) each, nats and nats²."""

    mean: FloatArray
    variance: FloatArray


def estimates(
    tree: TokenTree, behavior: FloatArray, policy: FloatArray, estimator: Estimator, discount: float = 1.0
) -> FloatArray:
    """What each response, as the one continuation of each of its tokens, says about the sequential KL, (R, T) nats.

    sum: Σ_{l>0} γ^l log μ/π, the unbiased one; window mean: its undiscounted mean over the T − t tokens ahead (the
    paper's, zero at the last token; `discount` is not read); sum of exact KL: the same sum of KL(μ ‖ π) in the contexts
    it visits, which takes whole distributions instead of one log-probability a token; sum of k3: of log μ/π + π/μ − 1,
    which has the same mean and is never negative. The policies must write every token now and then.
    """
    terms = log_ratio(behavior, policy)
    if estimator == "sum of exact KL":
        terms = kl(tree, behavior, policy)[tree.source]
    elif estimator == "sum of k3":
        terms = terms + np.expm1(-terms)
    responses = tree.responses
    along = responses.gather(terms)
    if estimator != "window mean":
        return responses.future(along, discount)
    ahead = responses.lengths[:, None] - 1 - np.arange(along.shape[1])
    return np.asarray(responses.future(along) / np.maximum(ahead, 1))


def moments(tree: TokenTree, behavior: FloatArray, values: FloatArray) -> Moments:
    """Mean and variance of `values` (R, T) when the behavior policy continues each edge, by full enumeration."""
    responses = tree.responses
    mean = responses.mean_given_edge(behavior, values)
    # Deviations first: the difference of two large second moments would lose the digits of a small variance.
    return Moments(mean, responses.mean_given_edge(behavior, (values - responses.gather(mean)) ** 2))


def rms_error(found: Moments, exact: FloatArray, rollouts: int) -> FloatArray:
    """Root mean square error, (E,) nats, of the mean over `rollouts` independent continuations."""
    return np.sqrt((found.mean - exact) ** 2 + found.variance / rollouts)
