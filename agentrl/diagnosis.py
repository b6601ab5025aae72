"""Signs that a training goes wrong, from its own numbers, in words: what is seen, what it may come of, what to try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from agentrl.types import Group, final_text

WINDOW = 10  # steps that are looked at together
Values = Mapping[str, float]


@dataclass
class Diagnosis:
    """Looks at each step; tells each sign once, and again where it came back after it was gone for long.

    Args:
        weights: of the reward's parts; 1.0 for one that is not named.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)  # one a step; the first WINDOW, and the last 2 WINDOW
    _seen: dict[str, int] = field(default_factory=dict)  # the step a sign was last there
    _step: int = 0

    def look(self, values: Values, groups: Sequence[Group]) -> list[str]:
        """What is new, in sentences."""
        self._step += 1
        self.history.append({k: v for k, v in values.items() if v == v})
        del self.history[WINDOW : -2 * WINDOW]
        new = []
        for name, sign in SIGNS.items():
            if (text := sign(self)) is not None:
                if self._step - self._seen.get(name, -10 * WINDOW) > 2 * WINDOW:
                    new.append(text)
                self._seen[name] = self._step
        if (text := same_answers(groups)) is not None:
            if "same answers" not in self._seen:
                new.append(text)
            self._seen["same answers"] = self._step
        return new

    def late(self, name: str, count: int = WINDOW) -> float | None:
        """The mean of a number over the last steps; ``None`` where there are too few."""
        found = [v[name] for v in self.history[-count:] if name in v]
        return fmean(found) if len(found) >= count and self._step >= count else None

    def early(self, name: str) -> float | None:
        """Over the first steps, once they are long gone."""
        found = [v[name] for v in self.history[:WINDOW] if name in v]
        return fmean(found) if found and self._step >= 2 * WINDOW else None

    def stuck(self) -> bool:
        """The reward does not rise any more, and could."""
        now = self.late("reward")
        before = [v["reward"] for v in self.history[-2 * WINDOW : -WINDOW] if "reward" in v]
        return now is not None and bool(before) and self._step >= 2 * WINDOW and now - fmean(before) < 0.01


def flat_groups(d: Diagnosis) -> str | None:
    share = d.late("frac_reward_zero_std")
    if share is None or share < 0.8:
        return None
    reward = d.late("reward") or 0.0
    way = "harder tasks" if reward > 0.5 else "easier tasks, a part of the reward for part of the way"
    return (
        f"{share:.0%} of the groups of {WINDOW} steps had one reward for all their members, and taught nothing: try "
        f"{way}, --rollout.sampler difficulty, or a larger --rollout.group_size"
    )


def exploding(d: Diagnosis) -> str | None:
    norms = [v["grad_norm"] for v in d.history[-2 * WINDOW :] if "grad_norm" in v]
    if len(norms) < WINDOW or norms[-1] < 10 * median(norms) or norms[-1] < 1.0:
        return None
    return (
        f"the gradient's norm is {norms[-1]:.3g}, {norms[-1] / median(norms):.0f} times its median: try a lower "
        "--learner.lr, or --learner.warmup_steps"
    )


def far_from_reference(d: Diagnosis) -> str | None:
    kl = d.late("kl", 3)
    if kl is None or kl < 1.0:
        return None
    return (
        f"the policy is {kl:.2g} nats a token from its reference: try a lower --learner.lr, or a higher --learner.beta"
    )


def engine_differs(d: Diagnosis) -> str | None:
    off = d.late("sampling/sampling_logp_difference/mean", 3)
    if off is None or off < 0.1:
        return None
    return (
        f"the engine's logprobs differ from the learner's by {off:.2g} nats a token: with staleness that is the "
        "policy's own change (--rollout.max_staleness lower, --learner.lr lower); without, the two compute different "
        "things: try --dtype float32, or --learner.correction sequence_mask"
    )


def entropy_gone(d: Diagnosis) -> str | None:
    now, first = d.late("entropy"), d.early("entropy")
    if now is None or first is None or now > 0.1 * first or not d.stuck() or (d.late("reward") or 0.0) > 0.9:
        return None
    return (
        f"the entropy fell from {first:.3g} to {now:.3g} nats a token, and the reward stopped at "
        f"{d.late('reward'):.2f}: the policy tries nothing new; try --learner.epsilon_high 0.3, "
        "--learner.entropy_coef 0.001, or a lower --learner.lr"
    )


def cut_short(d: Diagnosis) -> str | None:
    now = d.late("completions/clipped_ratio", 5)
    first = d.early("completions/clipped_ratio") or 0.0
    if now is None or now < 0.2 or (d._step >= 2 * WINDOW and now < 1.5 * first and now < 0.5):
        return None
    return (
        f"{now:.0%} of the episodes ran out of tokens: try a higher --rollout.max_turn_tokens, "
        "--learner.mask_stops max_tokens, or a reward for being brief"
    )


def out_of_turns(d: Diagnosis) -> str | None:
    now = d.late("stops/max_turns", 5)
    if now is None or now < 0.3:
        return None
    return f"{now:.0%} of the episodes ran out of turns: try a higher --rollout.max_turns, or look at what they do last"


def one_part_rules(d: Diagnosis) -> str | None:
    names = [n.split("/")[1] for n in d.history[-1] if n.startswith("rewards/") and n.endswith("/std")]
    counted = {n: abs(d.weights.get(n, 1.0)) * (d.late(f"rewards/{n}/std", 5) or 0.0) for n in names}
    counted = {n: spread for n, spread in counted.items() if d.weights.get(n, 1.0)}
    if len(counted) < 2 or d._step < WINDOW or sum(counted.values()) == 0:
        return None
    name, spread = max(counted.items(), key=lambda item: item[1])
    share = spread / sum(counted.values())
    if share < 0.95:
        return None
    others = ", ".join(repr(n) for n in counted if n != name)
    return f"{share:.0%} of the reward's spread is its part {name!r}: {others} teach nothing beside it; weigh them anew"


def faulting(d: Diagnosis) -> str | None:
    played = d.history[-1].get("groups/kept", 0.0) + d.history[-1].get("groups/dropped", 0.0)
    lost = d.late("groups/dropped", 5)
    if lost is None or not played or lost / played < 0.2:
        return None
    return (
        f"{lost / played:.0%} of the groups were lost to faults: agentrl view shows which; see also --rollout.min_group"
    )


SIGNS: Mapping[str, Callable[[Diagnosis], str | None]] = {
    f.__name__: f
    for f in (
        flat_groups,
        exploding,
        far_from_reference,
        engine_differs,
        entropy_gone,
        cut_short,
        out_of_turns,
        one_part_rules,
        faulting,
    )
}


def same_answers(groups: Sequence[Group]) -> str | None:
    """Winners of different tasks that all say the same: a reward that can be had without the task."""
    rewards = [t.reward for g in groups for t in g if t.reward is not None]
    if not rewards or max(rewards) == min(rewards):
        return None
    best = max(rewards)
    said = Counter(
        text for g in groups for text in {final_text(t.messages).strip() for t in g if t.reward == best} if text
    )
    winners = sum(1 for g in groups if any(t.reward == best for t in g))
    if not said or winners < 8:
        return None
    text, count = said.most_common(1)[0]
    if count < winners / 2:
        return None
    return (
        f"the winners of {count} of {winners} tasks say the same, {text[:60]!r}: can the reward be had without the "
        "task? docs/rewards.md tells of gaming"
    )
