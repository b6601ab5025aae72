"""The explanation of a run in which every episode earns the same: what the episodes did, and what to try."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import UserError
from agentrl.settings import registry
from agentrl.types import CallRecord, Stop, Trajectory

_MOST = 0.9  # share of the episodes that makes it the reason


@dataclass
class DeadEnd:
    """Counts over the episodes of steps in a row that all earned one reward.

    ``calling`` are episodes with a call, ``ran`` those with a call that ran; ``unparsed`` and ``failed`` are calls.
    """

    steps: int = 0
    episodes: int = 0
    calling: int = 0
    ran: int = 0
    unparsed: int = 0
    failed: int = 0
    cut: int = 0

    def add(self, episodes: Sequence[Trajectory]) -> None:
        """Count a step's episodes."""
        self.steps += 1
        self.episodes += len(episodes)
        for t in episodes:
            ran = [c for c in t.calls if not c.failed]
            self.calling += bool(t.calls)
            self.ran += bool(ran)
            self.unparsed += sum(_is_unparsed(c) for c in t.calls)
            self.failed += sum(c.failed and not _is_unparsed(c) for c in t.calls)
            self.cut += t.stop is Stop.MAX_TOKENS


def _is_unparsed(call: CallRecord) -> bool:
    return call.status == "parse"


def explain_dead_end(reward: float, counts: DeadEnd, *, tools: bool, env: str, model: str, run: str) -> str:
    """Explain in a few sentences why nothing is learned, and name the ways out.

    Args:
        reward: that every episode earned.
        tools: the model is offered tools.
        env, model, run: as the command line names them.
    """
    begin = f"every episode of {counts.steps} steps was worth {reward:g}: nothing is learned"
    if reward > 0:
        return f"{begin}. Try harder tasks, or a reward that tells good answers from better ones"
    why, ways = _reason(counts, tools, env, model)
    ways = [*_suggest_model(env, model), *ways, *_general_advice(env, run)]
    return f"{begin}. {why}. Try: {'; '.join(f'({i}) {way}' for i, way in enumerate(ways, 1))}"


def _reason(counts: DeadEnd, tools: bool, env: str, model: str) -> tuple[str, list[str]]:
    """Return what the episodes have in common, and a list of what helps against that."""
    if counts.cut >= _MOST * counts.episodes:
        return (
            f"{counts.cut} of {counts.episodes} episodes ran out of tokens before they ended",
            ["a higher --rollout.max_tokens, or a prompt that asks to be brief"],
        )
    checks = f"agentrl check model {model}: can its calls be read?"
    if tools and not counts.calling:
        return f"Not one of {counts.episodes} episodes made a call, though tools are offered", [checks]
    if tools and not counts.ran:
        calls = counts.unparsed + counts.failed
        return (
            f"Not one of {calls} calls succeeded: {counts.unparsed} could not be parsed, {counts.failed} failed "
            "(unknown tool, or wrong arguments)",
            [checks],
        )
    outcome = "No answer earned anything"
    if tools:
        outcome = f"{counts.ran} of {counts.episodes} episodes made a call that succeeded, and none earned anything"
    return outcome, [f"agentrl play --env {env}: if your own right answer earns nothing either, the reward is wrong"]


def _suggest_model(env: str, model: str) -> list[str]:
    """Suggest another model if this one names the environments it was made for, and this is none of them."""
    if model not in registry.list_registered("model"):
        return []
    try:
        made_for = getattr(sys.modules[registry.load_registered("model", model).__module__], "ENVIRONMENTS", ())
    except (UserError, AttributeError, KeyError):
        return []
    if not made_for or env in made_for:
        return []
    return [f"another --model: {model} knows {' and '.join(made_for)} only"]


def _general_advice(env: str, run: str) -> list[str]:
    return [
        f"look at what it writes: agentrl view {run}",
        f"easier tasks first: agentrl list {env} shows the settings, and there is --rollout.curriculum",
        f"a model that was shown how: agentrl play --env {env} --save demos.jsonl writes one to fine-tune on",
    ]
