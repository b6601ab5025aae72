"""What an update did with the tokens of an episode, in plain numbers: corrected ratios, and the slope of the loss.

The learner computes with torch, which the view does not load: these are its formulas for lists of floats, at the first
update of a batch, when the policy is the one before it. ``tests/test_gradient.py`` compares them with the learner's own
for every loss, level and correction.
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
    """The learner's settings that say what becomes of a token; the names are theirs."""

    loss: str = "dapo"
    importance_level: str = "token"
    epsilon_high: float = 0.28
    correction: str = "token_truncate"
    correction_min: float | None = None
    correction_max: float | None = 2.0
    off_policy_threshold: float | None = None

    @classmethod
    def of(cls, store: Store) -> GradientSettings | None:
        """Read a run's; None where its config does not tell."""
        if store.setting("learner.correction") is None:
            return None
        known: dict[str, Any] = {name: store.setting(f"learner.{name}", None) for name in cls.__dataclass_fields__}
        unset = ("correction_min", "correction_max", "off_policy_threshold")
        return cls(**{name: value for name, value in known.items() if value is not None or name in unset})


def bounded_exp(nats: float) -> float:
    return exp(max(min(nats, FARTHEST), -FARTHEST))


def ratios(correction: str, differences: Sequence[float]) -> list[float]:
    """Compute the ratio that a correction looks at, for each trained token of an episode.

    Args:
        differences: the learner's logprob before the update less the engine's, of each trained token.
    """
    level = correction.partition("_")[0]
    if level == "token":
        return [bounded_exp(d) for d in differences]
    whole = sum(differences) if level == "sequence" else fmean(differences)
    return [bounded_exp(whole)] * len(differences)


def bound(rule: GradientSettings, ratio: float) -> float:
    """Cut a ratio to the correction's bounds; 0.0 where it is masked."""
    low, high = rule.correction_min, rule.correction_max
    if rule.correction.endswith("_mask"):
        return 0.0 if (low is not None and ratio < low) or (high is not None and ratio > high) else ratio
    ratio = ratio if low is None else max(ratio, low)
    return ratio if high is None else min(ratio, high)


def is_off_policy(rule: GradientSettings, differences: Sequence[float], advantage: float) -> bool:
    """Return True for a token to be punished in an episode that the policy has left."""
    threshold = rule.off_policy_threshold
    return threshold is not None and advantage < 0 and -fmean(differences) > threshold


def slopes(rule: GradientSettings, differences: Sequence[float], advantages: Sequence[float]) -> list[float]:
    """Compute d loss / d logprob of each trained token before its weight, without a KL term or an entropy bonus.

    Args:
        differences: as for ``ratios``.
        advantages: one a token.
    """
    corrected = [bound(rule, r) for r in ratios(rule.correction, differences)]
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
