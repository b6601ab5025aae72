"""The summary of a training run: before and after, what it cost, where everything is."""

from __future__ import annotations

from typing import Any

from agentrl.evaluation.measurement import Evaluation, summarize_pair
from agentrl.resources import TrainingResources
from agentrl.training import checkpoint
from agentrl.training.evaluation import EvaluationSchedule
from agentrl.training.recorder import Recorder


def summarize(
    resources: TrainingResources,
    recorder: Recorder,
    before: Evaluation,
    after: Evaluation | None,
    evaluations: EvaluationSchedule,
) -> dict[str, Any]:
    """Return what summary.json holds. ``after`` is None where the run was interrupted."""
    config, run, totals, stop = resources.config, recorder.run, recorder.totals, recorder.stop
    shown = _find_telling(before, after)
    shown_after = after is not None and shown in after.conversations
    return {
        "env": resources.spec.name,
        "model": config.model,
        "seed": config.seed,
        "steps": totals.steps,
        "interrupted": after is None,
        "signal": stop.signal.name if stop.signal else None,
        "checkpoint": checkpoint.newest_step(run.folder / "checkpoints"),
        **_name_rewards("before", before),
        **_name_rewards("after", after),
        **summarize_pair(before, after),
        "sets": evaluations.sets.summary(),
        "best": evaluations.best.summary(),
        "train_seconds": round(totals.seconds, 3),
        "cpu_seconds": round(totals.cpu_seconds, 3),
        "sampled_tokens": int(totals.sampled_tokens),
        "faults": totals.faults,
        "prompts": recorder.overlap.counts(),
        "forged_control_tokens": dict(resources.renderer.injection_attempts),
        "conversation_before": list(before.conversations[shown]),
        "conversation_after": list(after.conversations[shown]) if after and shown_after else [],
        "episode_before": f"test-0:{_row_of(before, shown)}",
        "episode_after": f"test-{totals.steps}:{_row_of(after, shown)}" if after and shown_after else None,
        "run_dir": str(run.folder),
        "model_dir": str(run.folder / "model"),
        "metrics": str(run.folder / "metrics.jsonl"),
    }


def _name_rewards(when: str, evaluation: Evaluation | None) -> dict[str, float | None]:
    return {
        f"reward_{when}": evaluation.sampled.reward if evaluation and evaluation.sampled else None,
        f"greedy_{when}": evaluation.greedy.reward if evaluation and evaluation.greedy else None,
    }


def _find_telling(before: Evaluation, after: Evaluation | None) -> int:
    """Return a task to show: one that was failed and is now solved, if there is any."""
    if after is None:
        first: int = next(iter(before.conversations))
        return first

    def gain(task: int) -> float:
        return (after.first_rewards.get(task) or 0.0) - (before.first_rewards.get(task) or 0.0)

    common = [task for task in before.conversations if task in after.conversations]
    return max(common or before.conversations, key=gain)


def _row_of(evaluation: Evaluation, task: int) -> int:
    """Return the row of a task's first trial in the file of an evaluation."""
    episodes = sum(m.episodes + m.faults + m.unscored for _, m in evaluation.parts)
    return list(evaluation.conversations).index(task) * (episodes // len(evaluation.conversations))
