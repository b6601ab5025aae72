"""Numbers about groups of trajectories, under the names that users of TRL know, and a few of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from agentrl.credit import Credit
from agentrl.errors import ContractError
from agentrl.spread import is_flat
from agentrl.types import CallRecord, Group, Trajectory

Metrics = dict[str, float]


def of_groups(groups: Sequence[Group], min_group: int = 1) -> Metrics:
    """Everything about a batch of groups.

    Faulted episodes are counted, and are in no number about the policy; their tools' time-outs are about the tools.
    """
    everyone = [t for g in groups for t in g]
    fair = [t for t in everyone if t.fault is None]
    kept = [g for g in groups if len(g.scored) >= min_group]
    spreads = [_std([t.reward for t in g.scored if t.reward is not None]) for g in kept]
    flat = sum(is_flat(g.trajectories) for g in kept)
    return {
        **_rewards(fair),
        "reward_std": fmean(spreads) if spreads else 0.0,
        "frac_reward_zero_std": flat / len(kept) if kept else 0.0,
        "groups/played": float(len(groups)),
        "groups/kept": float(len(kept)),
        "groups/dropped": float(len(groups) - len(kept)),
        "groups/zero_variance": float(flat),
        **_lengths(fair),
        **of_calls(fair),
        **_by_tool(everyone),
        **_shares("stops", Counter(t.stop.value for t in fair), len(fair)),
        **{f"faults/{kind}": float(n) for kind, n in faults(everyone).items()},
    }


def with_logged(values: Mapping[str, float], groups: Sequence[Group]) -> Metrics:
    """Return a step's numbers and, beside them, the mean of each that rewards or environments logged.

    Raises:
        ContractError: one of those has the name of a number that is there already.
    """
    fair = [t for g in groups for t in g if t.fault is None]
    logged = {name: fmean(t.metrics[name] for t in fair if name in t.metrics) for t in fair for name in t.metrics}
    if taken := sorted(logged.keys() & values.keys()):
        raise ContractError(f"log_metric({taken[0]!r}, ...): agentrl logs a number of that name itself; take another")
    return {**values, **logged}


def of_credit(credit: Credit) -> Metrics:
    """Count a step's episodes by outcome (``episodes/trained``, ``episodes/zero_advantage``, ...: they sum to all that
    were rolled out for it), and the groups that it learned from."""
    counts = {f"episodes/{outcome.replace(' ', '_')}": float(n) for outcome, n in credit.counts().items()}
    return {**counts, "groups/kept": float(len(credit.learned))}


def of_ages(ages: Sequence[int]) -> Metrics:
    """Updates between the sampling of tokens and their being learned from."""
    return {"staleness/mean": fmean(ages), "staleness/max": float(max(ages))} if ages else {}


def _rewards(fair: Sequence[Trajectory]) -> Metrics:
    rewards = [t.reward for t in fair if t.reward is not None]
    found: Metrics = {"reward": fmean(rewards)} if rewards else {}
    for name in dict.fromkeys(n for t in fair for n in t.rewards):
        values = [r for t in fair if (r := t.rewards.get(name)) is not None]
        if values:
            found |= {f"rewards/{name}/mean": fmean(values), f"rewards/{name}/std": _std(values)}
        if unscorable := sum(t.rewards.get(name, 0.0) is None for t in fair):
            found[f"rewards/{name}/unscorable"] = float(unscorable)  # episodes: it was None
    return found


def _lengths(fair: Sequence[Trajectory]) -> Metrics:
    if not fair:
        return {}
    lengths = [t.sampled_tokens for t in fair]
    clipped = sum(t.stop == "max_tokens" for t in fair)
    whole = [n for n, t in zip(lengths, fair, strict=True) if t.stop != "max_tokens"]
    found: Metrics = {
        "num_tokens": float(sum(len(t.token_ids) for t in fair)),
        "sampled_tokens": float(sum(lengths)),
        "turns/mean": fmean(t.turns for t in fair),
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": clipped / len(fair),
    }
    if whole:
        found["completions/mean_terminated_length"] = fmean(whole)
        found["completions/min_terminated_length"] = float(min(whole))
        found["completions/max_terminated_length"] = float(max(whole))
    return found


def of_calls(fair: Sequence[Trajectory]) -> Metrics:
    """Tool calls: how many an episode, and how many of them no tool answered."""
    calls = [c for t in fair for c in t.calls]
    if not calls:
        return {"tools/call_frequency": 0.0} if fair else {}
    bad = sum(c.status != "ok" for c in calls)
    found: Metrics = {"tools/call_frequency": len(calls) / len(fair), "tools/failure_frequency": bad / len(calls)}
    # A call that could not be read has no name.
    found["parse_errors"] = float(sum(not c.name for c in calls))
    return found


def _by_tool(everyone: Sequence[Trajectory]) -> Metrics:
    """Each tool's calls, and how long they took. A name that was only ever refused is one the model invented."""
    calls = [c for t in everyone for c in t.calls]
    by_name: dict[str, list[CallRecord]] = {c.name: [] for c in calls if c.status != "refused"}
    for call in calls:
        if call.name in by_name:
            by_name[call.name].append(call)
    found: Metrics = {}
    for name, own in by_name.items():
        seconds = sorted(c.seconds for c in own)
        found |= {
            f"tools/{name}/calls": float(len(own)),
            f"tools/{name}/failures": float(sum(c.status == "refused" for c in own)),
            f"tools/{name}/timeouts": float(sum(c.status == "tool_timeout" for c in own)),
            f"tools/{name}/p50_s": seconds[len(seconds) // 2],
            f"tools/{name}/p95_s": seconds[int(len(seconds) * 0.95)],
        }
    return found


def faults(everyone: Iterable[Trajectory]) -> Counter[str]:
    return Counter(t.fault.kind for t in everyone if t.fault is not None)


def _shares(prefix: str, counts: Mapping[str, int], total: int) -> Metrics:
    return {f"{prefix}/{name}": n / total for name, n in counts.items()}


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
