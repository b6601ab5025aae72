"""The ratio of a token: the learner's probability of it before the update, over the engine's when it sampled it."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, isfinite
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.view.store import Store

Row = Mapping[str, Any]
FARTHEST = 80.0  # nats, beyond which a ratio is not told apart


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
    low, high = (_exp(bound(own)) for bound in (min, max))
    mean = _exp(fmean(own))
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
    said = f"ratio {_exp(own):.4g}: the learner gave it a logprob of {logprob:.4g} before the update"
    if left_out := _left_out(store, row, advantage):
        return Weighed([said, *left_out], trained=False)
    corrected = _corrected(store, row, own)
    clipped = _clipped(store) if corrected.trained else []
    return Weighed([said, *corrected.said, *clipped], corrected.trained)


def _corrected(store: Store, row: Row, own: float) -> Weighed:
    """By ``learner.correction``."""
    name = store.setting("learner.correction")
    if name is None:
        return Weighed([])
    level, _, bound = str(name).partition("_")
    whole = differences(row)
    value = _exp({"token": own, "sequence": sum(whole), "geometric": fmean(whole)}.get(level, own))
    low, high = (store.setting(f"learner.correction_{end}") for end in ("min", "max"))
    of = "it" if level == "token" else f"the episode's ratio, {value:.4g},"
    bounds = f"{low or 0:g} to {high:g}" if high is not None else f"{low or 0:g} on"
    if (low is None or value >= low) and (high is None or value <= high):
        return Weighed([f"in bounds: learner.correction {name} weighs the token by {of} as it is, from {bounds}"])
    if bound == "mask":
        why = f"not trained: learner.correction {name} leaves the token out, as {of} is not from {bounds}"
        return Weighed([why], trained=False)
    cut = low if low is not None and value < low else high
    return Weighed([f"cut to {cut:g}: learner.correction {name} weighs the token by {of} within {bounds}"])


def _left_out(store: Store, row: Row, advantage: float) -> list[str]:
    """Rows to be punished that the policy has left."""
    threshold = store.setting("learner.off_policy_threshold")
    if threshold is None or advantage >= 0 or -fmean(differences(row)) <= threshold:
        return []
    return [f"not trained: its episode is farther from the policy than learner.off_policy_threshold, {threshold:g}"]


def _clipped(store: Store) -> list[str]:
    """The clip is of another ratio, to the policy before the update."""
    updates = store.setting("learner.updates")
    if updates is None:
        return []
    if updates == 1:
        return ["not clipped: the clip bounds the change within a batch, and there was one update"]
    return [f"not clipped in the first of {updates} updates; whether it was in later ones is not kept"]


def _exp(value: float) -> float:
    return exp(max(min(value, FARTHEST), -FARTHEST))
