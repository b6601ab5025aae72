"""Intervals for means over tasks, for differences between two policies, and pass@k beside pass^k.

The trials of a task are alike, so a task is one observation, however often it is tried: every interval is over tasks
(clusters). All of them are 95 % intervals in closed form, and none needs more than numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Tasks = Sequence[Sequence[float]] | Floats  # the rewards of each task's trials


class Estimate(NamedTuple):
    """A mean over tasks and its 95 % interval. Without tasks all of it is nan."""

    mean: float
    low: float
    high: float
    stderr: float  # from the spread between tasks
    tasks: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, 0)


def estimate_mean(tasks: Tasks) -> Estimate:
    """Estimate the mean reward of a task; each task weighs the same, however many of its trials were scored.

    Wilson's interval with an effective number of tasks: the mean ``m`` has the variance ``v`` that the tasks' means
    show, a proportion of as many tasks as ``m (1 - m) / v`` would have the same, and its interval is taken (Korn and
    Graubard 1998; Franco et al. 2019 compare it with others). Rewards outside 0..1 are scaled by their own range. Of
    one trial a task, right or wrong, that is Wilson's interval itself.
    """
    rewards, lengths = _flatten(tasks)
    if not len(lengths):
        return NOTHING
    low, high = min(0.0, float(rewards.min())), max(1.0, float(rewards.max()))
    means = _means(rewards, lengths)
    mean, variance, scale = float(means.mean()), _variance(rewards, lengths, means), high - low
    at = (mean - low) / scale
    effective, quantile = _effective_tasks(at, variance / scale**2, len(means))
    if len(rewards) == len(means) and bool(((rewards == low) | (rewards == high)).all()):
        effective, quantile = float(len(means)), Z
    first, last = _wilson(at, effective, quantile)
    return Estimate(mean, low + scale * first, low + scale * last, math.sqrt(variance), len(means))


def _flatten(tasks: Tasks) -> tuple[Floats, Counts]:
    """Return the rewards of all tasks in a row, and how many are each task's; tasks without any are left out."""
    tried = [np.asarray(rewards, dtype=float) for rewards in tasks if len(rewards)]
    return np.concatenate([np.empty(0), *tried]), np.array([len(rewards) for rewards in tried], dtype=np.int64)


def _means(rewards: Floats, lengths: Counts) -> Floats:
    return np.asarray(np.add.reduceat(rewards, np.cumsum(lengths) - lengths) / lengths)


def _variance(rewards: Floats, lengths: Counts, means: Floats) -> float:
    """Estimate the variance of the tasks' mean by their spread, or by the trials' within tasks if that is more."""
    count = len(means)
    if count < 2:
        return 0.0
    between = float(means.var(ddof=1)) / count
    within = _means((rewards - np.repeat(means, lengths)) ** 2, lengths) / np.maximum(lengths - 1, 1)
    return max(between, float(within.sum()) / count**2)


def _effective_tasks(at: float, variance: float, count: int) -> tuple[float, float]:
    """Return how many single tries would vary as much, and the quantile to use with it."""
    alike = at * (1.0 - at)
    if count < 2:
        return 0.0, Z
    if variance < 1e-18 or alike < 1e-12:  # no spread to estimate from: as many as there are tasks
        return float(count), Z
    return alike / variance, t_quantile(count - 1)


def _wilson(at: float, count: float, quantile: float) -> tuple[float, float]:
    """Compute Wilson's score interval (1927) of a proportion ``at`` among ``count``."""
    if count <= 0.0:
        return 0.0, 1.0
    more = quantile**2 / count
    centre = (at + more / 2) / (1 + more)
    half = math.sqrt(more * (at * (1 - at) + more / 4)) / (1 + more)
    return max(0.0, min(centre - half, at)), min(1.0, max(centre + half, at))


def estimate_difference(before: Tasks, after: Tasks) -> Estimate:
    """Estimate how much more ``after`` earns than ``before`` on the same tasks, in the same order.

    Paired: Student's interval of the tasks' differences, with two tasks added, one won and one lost by as much as tasks
    differ at all (Bonett and Price 2012, for proportions). Without these, four tasks won and none lost would be called
    a difference, and tasks that do not differ would have an interval of no width.
    """
    both = [(b, a) for b, a in zip(before, after, strict=True) if len(b) and len(a)]
    if not both:
        return NOTHING
    earlier, later = _flatten([b for b, _ in both]), _flatten([a for _, a in both])
    changes = _means(*later) - _means(*earlier)
    count, mean, widest = len(changes), float(changes.mean()), _range(earlier[0], later[0])
    moved = changes[np.abs(changes) > 1e-12]
    step = math.sqrt(float((moved**2).mean())) if len(moved) else widest
    adjusted = np.concatenate([changes, [step, -step]])
    half = t_quantile(count + 1) * float(adjusted.std(ddof=1)) / math.sqrt(count + 2)
    centre = float(adjusted.mean())
    stderr = float(changes.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    low, high = max(-widest, min(centre - half, mean)), min(widest, max(centre + half, mean))
    return Estimate(mean, low, high, stderr, count)


def _range(*sides: Floats) -> float:
    """Return by how much two rewards can differ, as far as the rewards tell: 1 or more."""
    return max(1.0, *(float(r.max()) for r in sides)) - min(0.0, *(float(r.min()) for r in sides))


def estimate_unpaired_difference(before: Estimate, after: Estimate) -> Estimate:
    """Estimate the difference of two means of other tasks each, from their own intervals (Newcombe 1998, method 10)."""
    change = after.mean - before.mean
    low = change - math.hypot(after.mean - after.low, before.high - before.mean)
    high = change + math.hypot(after.high - after.mean, before.mean - before.low)
    stderr = math.hypot(before.stderr, after.stderr)
    return Estimate(change, low, high, stderr, min(before.tasks, after.tasks))


def pass_at_k(trials: int, passed: int, k: int) -> float:
    """Return the chance that one of ``k`` trials passes, unbiased, from ``passed`` of ``trials`` (Chen et al. 2021)."""
    return 1.0 - math.comb(trials - passed, k) / math.comb(trials, k)


def pass_hat_k(trials: int, passed: int, k: int) -> float:
    """Return the chance that all ``k`` trials pass, unbiased, from ``passed`` of ``trials`` (tau-bench 2024)."""
    return math.comb(passed, k) / math.comb(trials, k)


def is_pass(reward: float, pass_at: float = 1.0) -> bool:
    """Return True if a reward is ``pass_at`` or more, up to the rounding of a weighted sum."""
    return reward >= pass_at - 1e-9


def is_right(rewards: Sequence[float], pass_at: float = 1.0) -> bool:
    """Return True if more than half of a task's trials pass: what is fixed, or broke, goes by this alone."""
    return 2 * sum(is_pass(r, pass_at) for r in rewards) > len(rewards)


class PassRate(NamedTuple):
    """pass@k and pass^k over the tasks that have ``k`` scored trials."""

    k: int
    any: Estimate  # pass@k
    all: Estimate  # pass^k


def estimate_passes(tasks: Tasks, pass_at: float = 1.0) -> list[PassRate]:
    """Estimate pass@k and pass^k for k = 1, 2, 4 ... and the most trials that a task has."""
    counts = [(len(rewards), sum(is_pass(r, pass_at) for r in rewards)) for rewards in tasks]
    most = max((n for n, _ in counts), default=0)
    sizes = sorted({2**i for i in range(most.bit_length())} | {most}) if most else []
    return [
        PassRate(
            k,
            estimate_mean([[pass_at_k(n, c, k)] for n, c in counts if n >= k]),
            estimate_mean([[pass_hat_k(n, c, k)] for n, c in counts if n >= k]),
        )
        for k in sizes
    ]


def t_quantile(freedom: int) -> float:
    """Return how many standard errors either way hold 95 % of Student's distribution.

    Exact for 1 and 2 degrees of freedom; from 3 on Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5), which
    is at most 0.004 off.
    """
    outside, n, z = 1.0 - LEVEL, float(freedom), Z
    if n == 1:
        return 1.0 / math.tan(outside * math.pi / 2)
    if n == 2:
        return math.sqrt(2.0 / (outside * (2.0 - outside)) - 2.0)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum((term / n ** (i + 1) for i, term in enumerate(terms)), 0.0)
