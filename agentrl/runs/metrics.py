"""Metrics of groups of trajectories, under the names that users of TRL know, and a few of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from agentrl.credit import Credit
from agentrl.errors import ContractError
from agentrl.spread import has_zero_variance
from agentrl.types import TOOL_ERRORS, CallRecord, Group, Trajectory

Metrics = dict[str, float]


def group_metrics(groups: Sequence[Group], min_group_size: int = 1) -> Metrics:
    """Compute the metrics of a batch of groups.

    Faulted episodes are counted, and are in no number about the policy; their tools' time-outs are about the tools.
    Those that provoked their fault are in the rewards, with the floor.
    """
    episodes = [t for g in groups for t in g]
    valid = [t for t in episodes if t.fault is None]
    provoked = count_provoked(episodes)
    kept = [g for g in groups if len(g.scored) >= min_group_size]
    spreads = [_std([t.reward for t in g.scored if t.reward is not None]) for g in kept]
    flat = sum(has_zero_variance(g.trajectories) for g in kept)
    return {
        **_rewards([t for t in episodes if not t.is_lost]),
        "reward_std": fmean(spreads) if spreads else 0.0,
        "frac_reward_zero_std": flat / len(kept) if kept else 0.0,
        "groups/rolled_out": float(len(groups)),
        "groups/kept": float(len(kept)),
        "groups/dropped": float(len(groups) - len(kept)),
        **_lengths(valid),
        **call_metrics(valid),
        **_by_tool(episodes),
        **_shares("stops", Counter(t.stop.value for t in valid), len(valid)),
        **{f"faults/{kind}": float(n) for kind, n in _count_faults(episodes).items()},
        **({"faults/provoked": float(provoked)} if provoked else {}),
    }


def demonstration_metrics(groups: Sequence[Group]) -> Metrics:
    """Compute the metrics of demonstrations: how long they are, and their calls. What they earned is no policy's."""
    episodes = [t for g in groups for t in g]
    return {**_lengths(episodes), "tools/call_frequency": call_metrics(episodes).get("tools/call_frequency", 0.0)}


def add_logged_metrics(values: Mapping[str, float], groups: Sequence[Group]) -> Metrics:
    """Return a step's numbers and, beside them, the mean of each that rewards or environments logged.

    Raises:
        ContractError: one of those has the name of a number of agentrl's, or of an evaluation's.
    """
    valid = [t for g in groups for t in g if t.fault is None]
    logged = {name: fmean(t.metrics[name] for t in valid if name in t.metrics) for t in valid for name in t.metrics}
    if taken := sorted(n for n in logged if n in values or n == "step" or n.startswith("eval/")):
        raise ContractError(f"log_metric({taken[0]!r}, ...): agentrl logs a number of that name itself; take another")
    return {**values, **logged}


def credit_metrics(credit: Credit) -> Metrics:
    """Count a step's episodes by outcome (``episodes/trained``, ``episodes/zero_advantage``, ...: they sum to all that
    were rolled out for it), and the groups that it learned from."""
    counts = {f"episodes/{outcome.replace(' ', '_')}": float(n) for outcome, n in credit.counts().items()}
    return {**counts, "groups/kept": float(len(credit.learned))}


def staleness_metrics(ages: Sequence[int]) -> Metrics:
    """Compute the staleness: updates between the sampling of tokens and the update that they train."""
    return {"staleness/mean": fmean(ages), "staleness/max": float(max(ages))} if ages else {}


def _rewards(valid: Sequence[Trajectory]) -> Metrics:
    rewards = [t.reward for t in valid if t.reward is not None]
    metrics: Metrics = {"reward": fmean(rewards)} if rewards else {}
    for name in dict.fromkeys(n for t in valid for n in t.rewards):
        values = [r for t in valid if (r := t.rewards.get(name)) is not None]
        if values:
            metrics |= {f"rewards/{name}/mean": fmean(values), f"rewards/{name}/std": _std(values)}
        if any(name in t.weights for t in valid):
            metrics[f"rewards/{name}/weight"] = fmean(t.weights.get(name, 1.0) for t in valid)
        if unscorable := sum(t.rewards.get(name, 0.0) is None for t in valid):
            metrics[f"rewards/{name}/unscorable"] = float(unscorable)  # episodes: it was None
    return metrics


def _lengths(valid: Sequence[Trajectory]) -> Metrics:
    if not valid:
        return {}
    lengths = [t.sampled_tokens for t in valid]  # of whole episodes; branches share tokens
    clipped = sum(t.stop == "max_tokens" for t in valid)
    whole = [n for n, t in zip(lengths, valid, strict=True) if t.stop != "max_tokens"]
    metrics: Metrics = {
        "num_tokens": float(sum(len(t.token_ids) for t in valid)),
        "sampled_tokens": float(sum(t.own_tokens for t in valid)),
        "turns/mean": fmean(t.turns for t in valid),
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": clipped / len(valid),
    }
    if whole:
        metrics["completions/mean_terminated_length"] = fmean(whole)
        metrics["completions/min_terminated_length"] = float(min(whole))
        metrics["completions/max_terminated_length"] = float(max(whole))
    return metrics


def call_metrics(valid: Sequence[Trajectory]) -> Metrics:
    """Count tool calls: how many an episode; the share of all calls that failed, and that share by `TOOL_ERRORS`."""
    calls = [c for t in valid for c in t.own_calls]
    if not calls:
        return {"tools/call_frequency": 0.0} if valid else {}
    bad, frequency = sum(c.status != "ok" for c in calls), fmean(len(t.calls) for t in valid)
    metrics: Metrics = {"tools/call_frequency": frequency, "tools/failure_frequency": bad / len(calls)}
    statuses = Counter(c.status for c in calls)
    metrics |= {f"tools/error/{kind}": statuses[kind] / len(calls) for kind in TOOL_ERRORS}
    return metrics


def _by_tool(episodes: Sequence[Trajectory]) -> Metrics:
    """Count each tool's calls, with their seconds. A name whose every call failed is one the model made up."""
    calls = [c for t in episodes for c in t.own_calls]
    by_name: dict[str, list[CallRecord]] = {c.name: [] for c in calls if not c.failed}
    for call in calls:
        if call.name in by_name:
            by_name[call.name].append(call)
    metrics: Metrics = {}
    for name, own in by_name.items():
        seconds = sorted(c.seconds for c in own)
        metrics |= {
            f"tools/{name}/calls": float(len(own)),
            f"tools/{name}/failures": float(sum(c.failed for c in own)),
            f"tools/{name}/timeouts": float(sum(c.status == "tool_timeout" for c in own)),
            f"tools/{name}/p50_s": seconds[len(seconds) // 2],
            f"tools/{name}/p95_s": seconds[int(len(seconds) * 0.95)],
        }
    return metrics


def _count_faults(episodes: Iterable[Trajectory]) -> Counter[str]:
    return Counter(t.fault.kind for t in episodes if t.fault is not None and t.is_lost)


def count_provoked(episodes: Iterable[Trajectory]) -> int:
    """Count the episodes that provoked a fault: a call of theirs failed and was told so, or it ended them."""
    return sum(
        (t.fault is not None and not t.is_lost) or any(c.status == "provoked" for c in t.calls) for t in episodes
    )


def _shares(prefix: str, counts: Mapping[str, int], total: int) -> Metrics:
    return {f"{prefix}/{name}": n / total for name, n in counts.items()}


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
