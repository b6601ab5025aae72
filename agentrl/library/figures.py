"""Numbers as the verbs print them: a mean or a difference with its 95 % interval, shares, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.evaluation.measurement import Measurement
from agentrl.evaluation.statistics import Estimate


def format_mean(mean: Estimate) -> str:
    """Write ``0.938 (0.902-0.961)``."""
    separator = " to " if mean.low < 0 else "-"
    return f"{mean.mean:.3f} ({mean.low:.3f}{separator}{mean.high:.3f})"


def format_difference(difference: Estimate) -> str:
    """Write ``+0.727 (+0.670 to +0.784)``."""
    return f"{difference.mean:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"


def format_share(share: float | None) -> str:
    """Write a share in percent; ``-`` where there is nothing to share."""
    return "-" if share is None else f"{share:.0%}"


def describe_lost_episodes(measured: Sequence[Measurement | None]) -> list[str]:
    """Say which episodes are in no mean, and why; nothing where all are."""
    known = [m for m in measured if m is not None]
    episodes = sum(m.episodes + m.faults + m.unscored for m in known)
    kinds: dict[str, int] = {}
    for m in known:
        for kind, count in m.faults_by_kind.items():
            kinds[kind] = kinds.get(kind, 0) + count
    sentences = []
    if faults := sum(kinds.values()):
        sentences.append(
            f"{faults} of {episodes:,} episodes ended in an infrastructure fault ({_format_counts(kinds)}): "
            "they are no failures of the model, and in no mean"
        )
    if unscored := sum(m.unscored for m in known):
        sentences.append(f"{unscored} of {episodes:,} episodes had no reward that applied: they are in no mean")
    return sentences


def _format_counts(counts: Mapping[str, int]) -> str:
    """Write ``tool_timeout 2, env_step 1``, the most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda c: (-c[1], c[0])))
