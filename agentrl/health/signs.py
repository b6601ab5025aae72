"""Signs that a training goes wrong, from its own numbers, in sentences: the value, the likely cause, what to try.

The limits and the rules stand here alone. ``monitor`` reports them while a run goes on; the page and the report show
those that hold now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import fmean, median
from types import MappingProxyType

WINDOW = 10  # steps that are looked at together
LIMITS: Mapping[str, float] = MappingProxyType(
    {
        "flat_groups": 0.8,  # share of the groups whose members all earned the same
        "gradient_jump": 10.0,  # times its median
        "kl": 1.0,  # nats a token from the reference
        "mismatch": 0.1,  # nats a token between the engine's logprobs and the learner's
        "entropy_left": 0.1,  # of what it was at first
        "entropy_solved": 0.9,  # reward from which on little entropy is as it should be
        "stuck": 0.01,  # gain of reward from one window to the next
        "cut_short": 0.2,  # share of the episodes that ran out of tokens
        "cut_short_rising": 1.5,  # times what it was at first; a model that is always cut by a fifth is reported once
        "cut_short_always": 0.5,  # share from which on it is reported anyhow
        "out_of_turns": 0.3,  # share of the episodes
        "one_part": 0.95,  # share of the reward's spread that one of its parts makes
        "lost_groups": 0.2,  # share of the groups that faults took
        "faults_risen": 3.0,  # times their share at first
        "lost_episodes": 0.02,  # share of the episodes, on the page
        "held_out_gap": 0.1,  # of the training reward, by which the held-out reward is lower
        "held_out_gap_least": 0.05,  # by which it is lower at least
    }
)
Values = Mapping[str, float]


@dataclass(frozen=True)
class History:
    """The metrics of a run's steps, in order.

    Args:
        values: one a step; of a long run the first ``WINDOW`` and the last 2 ``WINDOW`` are enough.
        steps: how many steps there were.
        weights: of the reward components; 1.0 for one that is not named.
    """

    values: Sequence[Values]
    steps: int
    weights: Values = field(default_factory=dict)

    def late(self, name: str, count: int = WINDOW) -> float | None:
        """Return the mean of a number over the last steps; None where there are too few."""
        values = [v[name] for v in self.values[-count:] if name in v]
        return fmean(values) if len(values) >= count and self.steps >= count else None

    def early(self, name: str) -> float | None:
        """Return the mean over the first steps, once they are long gone."""
        values = [v[name] for v in self.values[:WINDOW] if name in v]
        return fmean(values) if values and self.steps >= 2 * WINDOW else None

    def stuck(self) -> bool:
        """Return True where the reward does not rise any more."""
        now = self.late("reward")
        before = [v["reward"] for v in self.values[-2 * WINDOW : -WINDOW] if "reward" in v]
        return now is not None and bool(before) and self.steps >= 2 * WINDOW and now - fmean(before) < LIMITS["stuck"]


def _flat_groups(h: History) -> str | None:
    share = h.late("frac_reward_zero_std")
    if share is None or share < LIMITS["flat_groups"]:
        return None
    reward = h.late("reward") or 0.0
    way = "harder tasks" if reward > 0.5 else "easier tasks, a reward component for part of the way"
    return (
        f"{share:.0%} of the groups of {WINDOW} steps had zero variance (one reward for all samples): try "
        f"{way}, --rollout.sampler difficulty, or a larger --rollout.group_size"
    )


def _nothing_finite(h: History) -> str | None:
    last = h.values[-1]
    if not last.get("forwarded_rows") or isfinite(last.get("grad_norm", inf)):
        return None
    return (
        "the gradient is not finite, so the step changed nothing: try a lower --learner.lr, --dtype float32, or look "
        "for a division by zero, or a log of it, in a loss of your own"
    )


def _exploding(h: History) -> str | None:
    norms = [v["grad_norm"] for v in h.values[-2 * WINDOW :] if "grad_norm" in v]
    if len(norms) < WINDOW or norms[-1] < LIMITS["gradient_jump"] * median(norms) or norms[-1] < 1.0:
        return None
    return (
        f"the gradient's norm is {norms[-1]:.3g}, {norms[-1] / max(median(norms), 1e-9):.0f} times its median: try a "
        "lower --learner.lr, or --learner.warmup_steps"
    )


def _far_from_reference(h: History) -> str | None:
    kl = h.late("kl", 3)
    if kl is None or kl < LIMITS["kl"]:
        return None
    return (
        f"the policy is {kl:.2g} nats a token from its reference: try a lower --learner.lr, or a higher --learner.beta"
    )


def _engine_differs(h: History) -> str | None:
    off = h.late("sampling/sampling_logp_difference/mean", 3)
    if off is None or off < LIMITS["mismatch"]:
        return None
    return (
        f"the engine's logprobs differ from the learner's by {off:.2g} nats a token: with staleness that is the "
        "policy's own change (--rollout.max_staleness lower, --learner.lr lower); without, the two compute different "
        "things: try --dtype float32, or --learner.importance_sampling_mode sequence_mask"
    )


def _entropy_gone(h: History) -> str | None:
    now, first, reward = h.late("entropy"), h.early("entropy"), h.late("reward") or 0.0
    if now is None or first is None or now > LIMITS["entropy_left"] * first:
        return None
    if not h.stuck() or reward > LIMITS["entropy_solved"]:
        return None
    return (
        f"the entropy fell from {first:.3g} to {now:.3g} nats a token, and the reward stopped at "
        f"{reward:.2f}: the policy tries nothing new; try --learner.epsilon_high 0.3, "
        "--learner.entropy_coef 0.001, or a lower --learner.lr"
    )


def _cut_short(h: History) -> str | None:
    now = h.late("completions/clipped_ratio", 5)
    first = h.early("completions/clipped_ratio") or 0.0
    if now is None or now < LIMITS["cut_short"]:
        return None
    rising = h.steps < 2 * WINDOW or now >= LIMITS["cut_short_rising"] * first
    if not rising and now < LIMITS["cut_short_always"]:
        return None
    return (
        f"{now:.0%} of the episodes ran out of tokens: try a higher --rollout.max_tokens, "
        "--learner.mask_stop_reasons max_tokens, or a reward for being brief"
    )


def _out_of_turns(h: History) -> str | None:
    now = h.late("stops/max_turns", 5)
    if now is None or now < LIMITS["out_of_turns"]:
        return None
    return f"{now:.0%} of the episodes ran out of turns: try a higher --rollout.max_turns, or look at what they do last"


def _one_part_rules(h: History) -> str | None:
    names = [n[len("rewards/") : -len("/std")] for n in h.values[-1] if n.startswith("rewards/") and n.endswith("/std")]
    counted = {n: abs(h.weights.get(n, 1.0)) * (h.late(f"rewards/{n}/std", 5) or 0.0) for n in names}
    counted = {n: spread for n, spread in counted.items() if h.weights.get(n, 1.0)}
    if len(counted) < 2 or h.steps < WINDOW or sum(counted.values()) == 0:
        return None
    name, spread = max(counted.items(), key=lambda item: item[1])
    share = spread / sum(counted.values())
    if share < LIMITS["one_part"]:
        return None
    others = ", ".join(repr(n) for n in counted if n != name)
    return (
        f"{share:.0%} of the reward's spread is its component {name!r}: "
        f"nothing is learned from {others} beside it; change the weights"
    )


def _faulting(h: History) -> str | None:
    last = h.values[-5:]
    lost = sum(v.get("groups/dropped", 0.0) for v in last)
    played = sum(v.get("groups/rolled_out", v.get("groups/kept", 0.0) + v.get("groups/dropped", 0.0)) for v in last)
    if h.steps < 5 or not played or lost / played < LIMITS["lost_groups"]:
        return None
    return (
        f"{lost / played:.0%} of the groups were lost: too few of their episodes could be scored, for faults or for "
        "want of a reward; agentrl view shows which; see also --rollout.min_group_size"
    )


def _faulting_more(h: History) -> str | None:
    now, first = _share_of_faults(h.values[-WINDOW:]), _share_of_faults(h.values[:WINDOW])
    if h.steps < 2 * WINDOW or now < LIMITS["lost_episodes"] or now < LIMITS["faults_risen"] * first:
        return None
    provoked = _share_of_faults(h.values[-WINDOW:], ("faults/provoked",))
    return (
        f"faults went from {first:.1%} to {now:.1%} of the episodes in {h.steps} steps; {provoked:.1%} provoked "
        "theirs, which earns an error to read, or the floor: the policy may be learning to fail; look at them "
        "(agentrl view, faulted), raise ToolError for what a request causes, and give the tool or the environment a "
        "health_check (docs/faults.md)"
    )


def _share_of_faults(values: Sequence[Values], names: Sequence[str] = ()) -> float:
    """Return the share of the episodes that ended in a fault, or provoked one; 0.0 where nothing is known."""
    faults = sum(n for v in values for name, n in v.items() if (name in names if names else name.startswith("faults/")))
    return faults / max(sum(v.get("episodes", 0.0) for v in values), 1.0)


def _unscorable(h: History) -> str | None:
    counts = {
        n[len("rewards/") : -len("/unscorable")]: v
        for n, v in h.values[-1].items()
        if n.startswith("rewards/") and n.endswith("/unscorable") and v
    }
    if not counts:
        return None
    names = ", ".join(f"{name!r} in {count:.0f} episodes" for name, count in sorted(counts.items()))
    return (
        f"a reward was None, so is in no mean ({names} of this step): where it was meant to apply, those solutions "
        "cannot be read; the reward math reads those that take algebra"
    )


_RULES: Mapping[str, Callable[[History], str | None]] = {
    "flat_groups": _flat_groups,
    "nothing_finite": _nothing_finite,
    "exploding": _exploding,
    "far_from_reference": _far_from_reference,
    "engine_differs": _engine_differs,
    "entropy_gone": _entropy_gone,
    "cut_short": _cut_short,
    "out_of_turns": _out_of_turns,
    "one_part_rules": _one_part_rules,
    "faulting": _faulting,
    "faulting_more": _faulting_more,
    "unscorable": _unscorable,
}


def find_signs(history: History) -> dict[str, str]:
    """Return the sentence of each rule that holds at the last step, by the rule's name."""
    if not history.values:
        return {}
    return {name: text for name, rule in _RULES.items() if (text := rule(history)) is not None}
