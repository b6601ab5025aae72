"""The ratio of a token: the learner's probability of it before the update, over the engine's when it sampled it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.view.gradient import GradientSettings, bound, bounded_exp, is_off_policy, ratios, slopes
from agentrl.view.store import Store

Row = Mapping[str, Any]


def differences(row: Row) -> list[float]:
    """The logarithms of the ratios of an episode's trained tokens, in order; empty where it was not trained."""
    return [d for s in row["segments"] for d in of_segment(s) if d is not None]


def of_segment(segment: Row) -> list[float | None]:
    """One a token: None where it was not trained, or a logprob is not finite."""
    pairs = zip(segment.get("learner_logprobs") or (), segment["logprobs"] or (), strict=False)
    return [p - q if p is not None and q is not None and isfinite(p - q) else None for p, q in pairs]


def of_episode(row: Row) -> list[str]:
    """A sentence, or none."""
    own = differences(row)
    if not own:
        return []
    low, mean, high = (bounded_exp(of(own)) for of in (min, fmean, max))
    return [f"the learner's probabilities over the engine's: {low:.4g} to {high:.4g}, {mean:.4g} in the mean"]


class Weighed(NamedTuple):
    """What the run's settings made of a token: sentences, and whether it was trained nevertheless."""

    said: list[str]
    trained: bool = True


def of_token(store: Store, row: Row, segment: Row, at: int, advantage: float) -> Weighed:
    """Of a token of an episode that was learned from: its ratio, the correction, the clip."""
    if segment.get("learner_logprobs") is None:
        return Weighed(["ratio unknown: the learner's logprobs were not kept"])
    own = of_segment(segment)[at]
    if own is None:
        return Weighed(["ratio unknown: a logprob of the token is not finite"])
    logprob = segment["learner_logprobs"][at]
    said = f"ratio {bounded_exp(own):.4g}: the learner gave it a logprob of {logprob:.4g} before the update"
    rule = GradientSettings.of(store)
    if rule is None:
        return Weighed([said])
    if is_off_policy(rule, differences(row), advantage):
        threshold = f"learner.off_policy_threshold, {rule.off_policy_threshold:g}"
        return Weighed([said, f"not trained: its episode is farther from the policy than {threshold}"], trained=False)
    corrected = _corrected(rule, row, own)
    clipped = _clipped(store) if corrected.trained else []
    return Weighed([said, *corrected.said, *clipped], corrected.trained)


def _corrected(rule: GradientSettings, row: Row, own: float) -> Weighed:
    """Explain what ``learner.correction`` made of a token, whose logarithm of the ratio is ``own``."""
    name, low, high = rule.correction, rule.correction_min, rule.correction_max
    (value, *_) = ratios(name, [own] if name.startswith("token") else differences(row))
    of = "it" if name.startswith("token") else f"the episode's ratio, {value:.4g},"
    bounds = f"{low or 0:g} to {high:g}" if high is not None else f"{low or 0:g} on"
    cut = bound(rule, value)
    if cut == value:
        return Weighed([f"in bounds: learner.correction {name} weighs the token by {of} as it is, from {bounds}"])
    if name.endswith("_mask"):
        why = f"not trained: learner.correction {name} leaves the token out, as {of} is not from {bounds}"
        return Weighed([why], trained=False)
    return Weighed([f"cut to {cut:g}: learner.correction {name} weighs the token by {of} within {bounds}"])


def slope_of(store: Store, row: Row, turns: Sequence[Row], number: int) -> list[str]:
    """Say what the first update did with a trained token's logprob: advantage, corrected ratio and weight in one.

    Args:
        turns: the model's segments: their ``start``, ``length`` and ``advantage``.
        number: the token's place in the episode.
    """
    rule, own = GradientSettings.of(store), differences(row)
    numbers = [i for t in turns for i in range(t["start"], t["start"] + t["length"])]
    told = rule is not None and store.setting("learner.loss") is not None and row.get("weight") is not None
    if rule is None or not told or len(own) != len(numbers):
        return []
    advantages = [t["advantage"] or 0.0 for t in turns for _ in range(t["length"])]
    slope = slopes(rule, own, advantages)[numbers.index(number)]
    return [
        f"the loss falls by {-slope * row['weight']:.3g} a nat of its logprob: {-slope:.4g} by the advantage and the "
        f"correction, times its weight in the step's loss, {row['weight']:.3g} (learner.loss {rule.loss})"
    ]


def _clipped(store: Store) -> list[str]:
    """The clip is of another ratio, to the policy before the update."""
    updates = store.setting("learner.updates")
    if updates is None:
        return []
    if updates == 1:
        return ["not clipped: the clip bounds the change within a batch, and there was one update"]
    return [f"not clipped in the first of {updates} updates; whether it was in later ones is not kept"]
