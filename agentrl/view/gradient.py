"""The gradient of the loss in the tokens of an episode, in plain numbers: corrected ratios, and slopes.

The learner computes with torch, which the view does not load: these are its formulas for lists of floats, at the first
update of a batch, when the policy is the one before it. ``tests/view/test_gradient.py`` compares them with the
learner's own for every loss, level and correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Any

from agentrl.view.store import Store

FARTHEST = 80.0  # nats, beyond which a ratio is not told apart
LEAST, MOST = log(1e-8), 20.0  # where vespo's logarithms end


@dataclass(frozen=True)
class GradientSettings:
    """The learner's settings that decide the gradient of a token, under their own names."""

    loss: str = "dapo"
    importance_level: str = "token"
    epsilon_high: float = 0.28
    importance_sampling_mode: str = "token_truncate"
    importance_sampling_min: float | None = None
    importance_sampling_max: float | None = 2.0
    off_policy_threshold: float | None = None

    @classmethod
    def of(cls, store: Store) -> GradientSettings | None:
        """Read the settings of a run; None if its config does not have them."""
        if store.setting("learner.importance_sampling_mode") is None:
            return None
        known: dict[str, Any] = {name: store.setting(f"learner.{name}", None) for name in cls.__dataclass_fields__}
        unset = ("importance_sampling_min", "importance_sampling_max", "off_policy_threshold")
        return cls(**{name: value for name, value in known.items() if value is not None or name in unset})


def exp_bounded(nats: float) -> float:
    """Compute an exponential, of an argument cut to what can be told apart."""
    return exp(max(min(nats, FARTHEST), -FARTHEST))


def correction_ratios(correction: str, differences: Sequence[float]) -> list[float]:
    """Compute the ratio that the correction bounds, for each trained token of an episode.

    Args:
        differences: the learner's logprob before the update less the engine's, of each trained token.
    """
    level = correction.partition("_")[0]
    if level == "token":
        return [exp_bounded(d) for d in differences]
    whole = sum(differences) if level == "sequence" else fmean(differences)
    return [exp_bounded(whole)] * len(differences)


def bound_ratio(rule: GradientSettings, ratio: float) -> float:
    """Return a ratio cut to the correction's bounds; 0.0 if it is masked."""
    low, high = rule.importance_sampling_min, rule.importance_sampling_max
    if rule.importance_sampling_mode.endswith("_mask"):
        return 0.0 if (low is not None and ratio < low) or (high is not None and ratio > high) else ratio
    ratio = ratio if low is None else max(ratio, low)
    return ratio if high is None else min(ratio, high)


def is_off_policy(rule: GradientSettings, differences: Sequence[float], advantage: float) -> bool:
    """Return True for a token with a negative advantage in an episode that is far from the policy."""
    threshold = rule.off_policy_threshold
    return threshold is not None and advantage < 0 and -fmean(differences) > threshold


def logprob_gradients(rule: GradientSettings, differences: Sequence[float], advantages: Sequence[float]) -> list[float]:
    """Compute d loss / d logprob of each trained token before its weight, without a KL term or an entropy bonus.

    Args:
        differences: as for ``correction_ratios``.
        advantages: one a token.
    """
    corrected = [bound_ratio(rule, r) for r in correction_ratios(rule.importance_sampling_mode, differences)]
    kept = [not is_off_policy(rule, differences, a) for a in advantages]
    if rule.loss == "vespo":
        return [-_gamma_weight(corrected, a) * a * k for a, k in zip(advantages, kept, strict=True)]
    cap = min(1.0, rule.epsilon_high) if rule.loss == "cispo" else 1.0
    own = [-cap * a * r * k for a, r, k in zip(advantages, corrected, kept, strict=True)]
    if rule.importance_level == "sequence" and rule.loss != "cispo":  # its tokens have one ratio, and share its slope
        return [fmean(own)] * len(own)
    return own


def _gamma_weight(corrected: Sequence[float], advantage: float) -> float:
    logs = [min(max(log(r), LEAST), MOST) if r > 0 else LEAST for r in corrected]
    s = min(max(sum(logs), LEAST), MOST)
    k, lam = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return exp(max(lam + k * s - lam * exp(s), -700.0))
