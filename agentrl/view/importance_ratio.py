"""The importance ratio of a token, and its part in the gradient of the loss: what the learner recorded, in words.

The ratio is the token's probability by the learner before the update, over that by the engine. The weight that the
importance-sampling rule gave it, and d loss / d logprob, are the learner's own numbers: no formula is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, isclose, isfinite
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.view.escaping import escape_controls
from agentrl.view.store import Store

Row = Mapping[str, Any]
FARTHEST = 80.0  # nats, beyond which a ratio is not told apart


def _episode_log_ratios(row: Row) -> list[float]:
    """Return the logarithm of the ratio of each trained token of an episode; empty if it was not trained."""
    return [d for s in row["segments"] for d in segment_log_ratios(s) if d is not None]


def segment_log_ratios(segment: Row) -> list[float | None]:
    """Return the logarithm of the ratio of each token; None if it was not trained, or a logprob is not finite."""
    pairs = zip(segment.get("learner_logprobs") or (), segment["logprobs"] or (), strict=False)
    return [p - q if p is not None and q is not None and isfinite(p - q) else None for p, q in pairs]


def _exp_bounded(nats: float) -> float:
    """Compute an exponential, of an argument cut to what can be told apart."""
    return exp(max(min(nats, FARTHEST), -FARTHEST))


def explain_episode_ratios(row: Row) -> list[str]:
    """Return a sentence on the ratios of an episode, or none."""
    log_ratios = _episode_log_ratios(row)
    if not log_ratios:
        return []
    low, mean, high = (_exp_bounded(reduce(log_ratios)) for reduce in (min, fmean, max))
    return [f"the learner's probabilities over the engine's: {low:.4g} to {high:.4g}, {mean:.4g} in the mean"]


def segment_gradients(segment: Row) -> list[float | None]:
    """Return d loss / d logprob of each token; None if it was not trained, or is not finite."""
    return [g if g is not None and isfinite(g) else None for g in segment.get("loss_gradients") or ()]


class _TokenWeighting(NamedTuple):
    """The effect of the run's settings on a token, in sentences. ``trained``: it had a gradient nevertheless."""

    sentences: list[str]
    trained: bool = True


def explain_token_ratio(store: Store, segment: Row, at: int, advantage: float) -> _TokenWeighting:
    """Explain a token of an episode that was learned from: its ratio, the correction, the clip."""
    if segment.get("learner_logprobs") is None:
        return _TokenWeighting(["ratio unknown: the learner's logprobs were not kept"])
    log_ratio = segment_log_ratios(segment)[at]
    if log_ratio is None:
        return _TokenWeighting(["ratio unknown: a logprob of the token is not finite"])
    ratio, logprob = _exp_bounded(log_ratio), segment["learner_logprobs"][at]
    sentence = f"ratio {ratio:.4g}: the learner gave it a logprob of {logprob:.4g} before the update"
    gradient, correction = _entry_at(segment, "loss_gradients", at), _entry_at(segment, "corrections", at)
    if correction is None:
        return _TokenWeighting([sentence])
    corrected = _explain_correction(store, ratio, correction)
    if corrected.trained and gradient == 0.0 and advantage:
        return _TokenWeighting([sentence, *corrected.sentences, _explain_no_gradient(store)], trained=False)
    clipped = _explain_clip(store) if corrected.trained else []
    return _TokenWeighting([sentence, *corrected.sentences, *clipped], corrected.trained)


def _entry_at(segment: Row, column: str, at: int) -> float | None:
    values = segment.get(column)
    return None if values is None else values[at]


def _explain_correction(store: Store, ratio: float, weight: float) -> _TokenWeighting:
    """Explain the weight that ``learner.importance_sampling_mode`` gave a token."""
    rule = store.entry("importance_sampling")
    setting = f"learner.importance_sampling_mode {escape_controls(rule.name)}"
    line = f" ({escape_controls(rule.explain)})" if rule.explain else ""
    if weight == 0.0:
        return _TokenWeighting([f"not trained: {setting} leaves the token out{line}"], trained=False)
    if isclose(weight, ratio, rel_tol=1e-4):
        return _TokenWeighting([f"in bounds: {setting} weighs the token by its ratio as it is{line}"])
    return _TokenWeighting([f"weighed by {weight:.4g}: {setting} gives it that instead of its own ratio{line}"])


def _explain_no_gradient(store: Store) -> str:
    """Name the settings that may have taken a token's gradient away."""
    values = {name: store.setting(f"learner.{name}") for name in ("off_policy_threshold", "top_entropy_quantile")}
    causes = [f"learner.{name} {v:g}" for name, v in values.items() if isinstance(v, int | float) and v != 1.0]
    return f"not trained: {' or '.join(causes) or 'the loss'} leaves it out, its gradient is 0"


def explain_token_gradient(store: Store, row: Row, segment: Row, at: int) -> list[str]:
    """Return a sentence on the gradient of a trained token's logprob at the first update, or none."""
    gradients = segment_gradients(segment)
    gradient, weight = gradients[at] if gradients else None, row.get("weight")
    if gradient is None or not weight:
        return []
    loss = store.entry("loss")
    line = f": {escape_controls(loss.explain)}" if loss.explain else ""
    terms = "advantage, correction and KL term" if store.setting("learner.beta") else "advantage and correction"
    return [
        f"the loss falls by {-gradient:.3g} a nat of its logprob: {-gradient / weight:.4g} by {terms}, "
        f"times its weight in the step's loss, {weight:.3g} (learner.loss {escape_controls(loss.name)}{line})"
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
