"""Checks of rewards: untrained policies must not earn them, and each episode names the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentrl.checks.finding import Finding, fail, ok, warn
from agentrl.checks.harness import EpisodeHarness
from agentrl.checks.untrained_policies import UNTRAINED_POLICIES
from agentrl.types import Trajectory

FAIL, WARN = 0.2, 0.05  # of the best possible reward


async def check_free_reward(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Check the mean reward of each untrained policy, as a share of ``Env.best_reward``."""
    name = "free-reward"
    best = float(getattr(harness.spec.sample(), "best_reward", 1.0))
    means: dict[str, float] = {}
    for who, policy in UNTRAINED_POLICIES.items():
        played = await harness.play(policy, tasks, together=True)
        rewards = [t.reward for t in played if t is not None and t.reward is not None]
        if rewards:
            means[who] = fmean(rewards)
    if not means:
        return [fail(name, "no episode was given a reward; score must name one, and must not raise")]
    findings = [_too_good(name, who, mean, best) for who, mean in means.items() if mean > WARN * best]
    sentence = ", ".join(f"{who} {mean:.2f}" for who, mean in means.items())
    return findings or [ok(name, f"mean rewards of what nobody taught, of {best:g}: {sentence}")]


def _too_good(name: str, who: str, mean: float, best: float) -> Finding:
    sentence = f"{who} is given {mean:.2f} of {best:g} on average: a policy will learn that first; make the check exact"
    if mean <= FAIL * best:
        return warn(name, f"{sentence} (where it is meant to be so, set best_reward, or live with it)")
    return fail(name, f"{sentence} (where the best reward is another than {best:g}, set best_reward)")


def check_reward_names(played: Sequence[Trajectory]) -> list[Finding]:
    """Check that each episode has the same rewards by name, and that those with weights are among them."""
    name = "reward-names"
    scored = [t for t in played if t.fault is None]
    kinds = {tuple(sorted(t.rewards)) for t in scored}
    if len(kinds) > 1:
        one, other = sorted(kinds)[:2]
        way_out = "name all of them always; None says that one does not apply"
        return [fail(name, f"score named {_listed(one)} in one episode and {_listed(other)} in another: {way_out}")]
    known = {n for kind in kinds for n in kind}
    weights = {n for t in scored for n in t.weights}
    if kinds and weights - known:
        return [fail(name, f"reward_weights weighs {_listed(sorted(weights - known))}, which score never names")]
    return [ok(name, f"each episode's rewards: {_listed(sorted(known))}")]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
