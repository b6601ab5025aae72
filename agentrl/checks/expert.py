"""The check of an environment's expert: it plays, and what it earns is told."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.checks.finding import Finding, fail, ok, skip, warn
from agentrl.checks.harness import LIMITS
from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import describe_task
from agentrl.errors import NoExpertError, UserError
from agentrl.rollout.expert import play_expert
from agentrl.settings.schema import RolloutConfig
from agentrl.types import Trajectory

EXPERT = "expert"


async def check_expert(spec: EnvSpec, tasks: Sequence[int], refused: Sequence[str]) -> list[Finding]:
    """Play the expert, and say what it earns: less than the best reward is to be looked at.

    Args:
        refused: why tools may not be called, a sentence each; where there is one, the expert does not play.
    """
    if not spec.has_expert:
        return [skip(EXPERT, "it has none; an `async def expert(self)` would show a model how to begin")]
    if refused:
        return [skip(EXPERT, f"it was not played: {refused[0]}")]
    limits = RolloutConfig(turn_timeout_s=LIMITS.turn_timeout_s, episode_timeout_s=LIMITS.episode_timeout_s)
    try:
        played = [e.trajectory for e in await play_expert(spec, tasks, limits)]
    except NoExpertError as none:
        return [skip(EXPERT, str(none))]
    except UserError as error:
        return [fail(EXPERT, str(error))]
    return [_judge(played, spec.sample().best_reward)]


def _judge(played: Sequence[Trajectory], best: float) -> Finding:
    for t in played:
        task = describe_task(t.task, "train")
        if t.fault is not None:
            return warn(EXPERT, f"{task} ended in a fault, and demonstrates nothing: {t.fault.kind}: {t.fault.message}")
        if t.reward is None or t.reward < best - 1e-6:
            earned = "nothing" if t.reward is None else f"{t.reward:g}"
            return warn(EXPERT, f"it earned {earned} on {task} ({t.stop.value}); best_reward is {best:g}")
    turns = sorted({t.turns for t in played})
    took = f"{turns[0]} to {turns[-1]} turns" if len(turns) > 1 else f"{turns[0]} turn{'s' * (turns[0] != 1)}"
    return ok(EXPERT, f"it earns {best:g} on each of {len(played)} tasks, in {took}")
