"""A run in which every episode earns the same: what the episodes did, and what to try."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl import registry
from agentrl.errors import UserError
from agentrl.types import CallRecord, Stop, Trajectory

MOST = 0.9  # share of the episodes that makes it the reason


@dataclass
class DeadEnd:
    """Counts of the episodes of steps in a row that all earned one reward.

    ``calling`` are episodes with a call, ``valid`` those with a call that ran; ``unread`` and ``refused`` are calls.
    """

    steps: int = 0
    episodes: int = 0
    calling: int = 0
    valid: int = 0
    unread: int = 0
    refused: int = 0
    cut: int = 0

    def add(self, episodes: Sequence[Trajectory]) -> None:
        """Count a step's episodes."""
        self.steps += 1
        self.episodes += len(episodes)
        for t in episodes:
            ran = [c for c in t.calls if c.status != "refused"]
            self.calling += bool(t.calls)
            self.valid += bool(ran)
            self.unread += sum(_is_unread(c) for c in t.calls)
            self.refused += sum(c.status == "refused" and not _is_unread(c) for c in t.calls)
            self.cut += t.stop is Stop.MAX_TOKENS


def _is_unread(call: CallRecord) -> bool:
    return call.status == "refused" and not call.name


def describe(reward: float, seen: DeadEnd, *, tools: bool, env: str, model: str, run: str) -> str:
    """Explain in a few sentences why nothing is learned, from what the episodes did, and name the ways out.

    Args:
        reward: that every episode earned.
        tools: whether the model is offered any.
        env, model, run: as the command line names them.
    """
    begin = f"every episode of {seen.steps} steps was worth {reward:g}: nothing is learned"
    if reward > 0:
        return f"{begin}. Try harder tasks, or a reward that tells good answers from better ones"
    why, ways = _reason(seen, tools, env, model)
    ways = [*_stranger(env, model), *ways, *_always(env, run)]
    return f"{begin}. {why}. Try: {'; '.join(f'({i}) {way}' for i, way in enumerate(ways, 1))}"


def _reason(seen: DeadEnd, tools: bool, env: str, model: str) -> tuple[str, list[str]]:
    """Say what the episodes have in common, and list what helps against that."""
    if seen.cut >= MOST * seen.episodes:
        return (
            f"{seen.cut} of {seen.episodes} episodes ran out of tokens before they ended",
            ["a higher --rollout.max_turn_tokens, or a prompt that asks to be brief"],
        )
    checks = f"agentrl check model {model}: can its calls be read?"
    if tools and not seen.calling:
        return f"Not one of {seen.episodes} episodes made a call, though tools are offered", [checks]
    if tools and not seen.valid:
        calls = seen.unread + seen.refused
        return (
            f"Not one of {calls} calls was valid: {seen.unread} could not be read, {seen.refused} were refused "
            "(no such tool, or wrong arguments)",
            [checks],
        )
    did = "No answer earned anything"
    if tools:
        did = f"{seen.valid} of {seen.episodes} episodes made valid calls, and none earned anything"
    return did, [f"agentrl play --env {env}: if your own right answer earns nothing either, the reward is wrong"]


def _stranger(env: str, model: str) -> list[str]:
    """Suggest another model, where this one says which environments it was made for, and this is none of them."""
    if model not in registry.available("model"):
        return []
    try:
        made_for = getattr(sys.modules[registry.load("model", model).__module__], "ENVIRONMENTS", ())
    except (UserError, AttributeError, KeyError):
        return []
    if not made_for or env in made_for:
        return []
    return [f"another --model: {model} knows {' and '.join(made_for)} only"]


def _always(env: str, run: str) -> list[str]:
    return [
        f"look at what it writes: agentrl view {run}",
        f"easier tasks first: agentrl list {env} shows the settings, and there is --rollout.curriculum",
        f"a model that was shown how: agentrl play --env {env} --save demos.jsonl writes one to fine-tune on",
    ]
