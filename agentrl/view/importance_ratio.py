"""The importance ratio of a token: its probability by the learner before the update, over that by the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.view.gradient import (
    GradientSettings,
    bound_ratio,
    correction_ratios,
    exp_bounded,
    is_off_policy,
    logprob_gradients,
)
from agentrl.view.store import Store

Row = Mapping[str, Any]


def _episode_log_ratios(row: Row) -> list[float]:
    """Return the logarithm of the ratio of each trained token of an episode; empty if it was not trained."""
    return [d for s in row["segments"] for d in segment_log_ratios(s) if d is not None]


def segment_log_ratios(segment: Row) -> list[float | None]:
    """Return the logarithm of the ratio of each token; None if it was not trained, or a logprob is not finite."""
    pairs = zip(segment.get("learner_logprobs") or (), segment["logprobs"] or (), strict=False)
    return [p - q if p is not None and q is not None and isfinite(p - q) else None for p, q in pairs]


def explain_episode_ratios(row: Row) -> list[str]:
    """Return a sentence on the ratios of an episode, or none."""
    log_ratios = _episode_log_ratios(row)
    if not log_ratios:
        return []
    low, mean, high = (exp_bounded(reduce(log_ratios)) for reduce in (min, fmean, max))
    return [f"the learner's probabilities over the engine's: {low:.4g} to {high:.4g}, {mean:.4g} in the mean"]


class _TokenWeighting(NamedTuple):
    """The effect of the run's settings on a token, in sentences. ``trained``: it had a gradient nevertheless."""

    sentences: list[str]
    trained: bool = True


def explain_token_ratio(store: Store, row: Row, segment: Row, at: int, advantage: float) -> _TokenWeighting:
    """Explain a token of an episode that was learned from: its ratio, the correction, the clip."""
    if segment.get("learner_logprobs") is None:
        return _TokenWeighting(["ratio unknown: the learner's logprobs were not kept"])
    own = segment_log_ratios(segment)[at]
    if own is None:
        return _TokenWeighting(["ratio unknown: a logprob of the token is not finite"])
    logprob = segment["learner_logprobs"][at]
    sentence = f"ratio {exp_bounded(own):.4g}: the learner gave it a logprob of {logprob:.4g} before the update"
    rule = GradientSettings.of(store)
    if rule is None:
        return _TokenWeighting([sentence])
    if is_off_policy(rule, _episode_log_ratios(row), advantage):
        threshold = f"learner.off_policy_threshold, {rule.off_policy_threshold:g}"
        return _TokenWeighting(
            [sentence, f"not trained: its episode is farther from the policy than {threshold}"], trained=False
        )
    corrected = _explain_correction(rule, row, own)
    clipped = _explain_clip(store) if corrected.trained else []
    return _TokenWeighting([sentence, *corrected.sentences, *clipped], corrected.trained)


def _explain_correction(rule: GradientSettings, row: Row, own: float) -> _TokenWeighting:
    """Explain the effect of ``learner.importance_sampling_mode`` on a token; ``own`` is the logarithm of its ratio."""
    name, low, high = rule.importance_sampling_mode, rule.importance_sampling_min, rule.importance_sampling_max
    (value, *_) = correction_ratios(name, [own] if name.startswith("token") else _episode_log_ratios(row))
    of = "it" if name.startswith("token") else f"the episode's ratio, {value:.4g},"
    bounds = f"{low or 0:g} to {high:g}" if high is not None else f"{low or 0:g} on"
    cut = bound_ratio(rule, value)
    if cut == value:
        return _TokenWeighting(
            [f"in bounds: learner.importance_sampling_mode {name} weighs the token by {of} as it is, from {bounds}"]
        )
    if name.endswith("_mask"):
        why = f"not trained: learner.importance_sampling_mode {name} leaves the token out, as {of} is not from {bounds}"
        return _TokenWeighting([why], trained=False)
    return _TokenWeighting(
        [f"cut to {cut:g}: learner.importance_sampling_mode {name} weighs the token by {of} within {bounds}"]
    )


def explain_token_gradient(store: Store, row: Row, turns: Sequence[Row], number: int) -> list[str]:
    """Return a sentence on the gradient of a trained token's logprob at the first update, or none.

    Args:
        turns: the model's segments: their ``start``, ``length`` and ``advantage``.
        number: the token's place in the episode.
    """
    rule, own = GradientSettings.of(store), _episode_log_ratios(row)
    numbers = [i for t in turns for i in range(t["start"], t["start"] + t["length"])]
    known = rule is not None and store.setting("learner.loss") is not None and row.get("weight") is not None
    if rule is None or not known or len(own) != len(numbers):
        return []
    advantages = [t["advantage"] or 0.0 for t in turns for _ in range(t["length"])]
    slope = logprob_gradients(rule, own, advantages)[numbers.index(number)]
    return [
        f"the loss falls by {-slope * row['weight']:.3g} a nat of its logprob: {-slope:.4g} by the advantage and the "
        f"correction, times its weight in the step's loss, {row['weight']:.3g} (learner.loss {rule.loss})"
    ]


def _explain_clip(store: Store) -> list[str]:
    """Return a sentence on the clip, which bounds another ratio: to the policy before the update."""
    passes = store.setting("learner.num_iterations")
    if passes is None:
        return []
    cut = store.setting("learner.steps_per_generation") or 1
    if cut > 1:
        return [f"the clip bounds the change within a batch of {passes * cut} updates; what it was in them is not kept"]
    if passes == 1:
        return ["not clipped: the clip bounds the change within a batch, and there was one update"]
    return [f"not clipped in the first of {passes} updates; whether it was in later ones is not kept"]
