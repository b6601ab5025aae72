"""The record of a run: what a step did goes to the run folder, trackers, callbacks and the signs of its health."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from agentrl.credit import Credit, record_held_out
from agentrl.environments.spec import EnvSpec
from agentrl.evaluation.measurement import Evaluation
from agentrl.health.monitor import HealthMonitor
from agentrl.resources import TrainingResources
from agentrl.rewards.trainer_state import HISTORY
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.scheduler import StepBatch
from agentrl.runs import metrics
from agentrl.runs.disk import retry_write
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_functions import MetricFunctions
from agentrl.runs.overlap import PromptOverlap
from agentrl.runs.trackers import Trackers
from agentrl.runs.writer import LearnedTokens
from agentrl.runtime.activity import ActivityLog
from agentrl.runtime.interruption import Interruption
from agentrl.runtime.timeline import MeasuredStretch, Timeline
from agentrl.training.callbacks import Callback
from agentrl.types import Group


@dataclass
class _RunTotals:
    """Counts over a whole run, with what came before a kill."""

    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    sampled_tokens: float = 0.0
    episodes: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def add(self, values: Mapping[str, float], episodes: int) -> None:
        """Add the row of a step."""
        self.steps += 1
        self.seconds += values["step_time"]
        self.cpu_seconds += values["cpu_seconds"]
        self.sampled_tokens += values.get("sampled_tokens", 0.0)
        self.episodes += episodes
        for name, count in values.items():
            if name.startswith("faults/"):
                kind = name.removeprefix("faults/")
                self.faults[kind] = self.faults.get(kind, 0) + int(count)


class Recorder:
    """Writes what a run does and says. `step` is the one that is being made or measured."""

    def __init__(
        self,
        resources: TrainingResources,
        run: RunFolder,
        callback: Callback,
        trackers: Trackers,
        stop: Interruption,
        step: int,
    ) -> None:
        config, spec = resources.config, resources.spec
        self.run, self.callback, self.trackers, self.stop, self.step = run, callback, trackers, stop, step
        self.metric_functions = MetricFunctions(config.run.metrics)
        self.demonstrates = bool(config.sft.data)
        self.trials, self.min_group_size = config.eval.trials, config.rollout.min_group_size
        name, folder = str(config.env["name"]), str(run.folder)
        weights = dict(spec.sample().reward_weights)
        self.health = HealthMonitor(bool(spec.tool_list()), name, config.model, folder, weights)
        self.overlap, self.totals, self.timeline = PromptOverlap(), _RunTotals(), Timeline()
        self.activity = ActivityLog()  # of all processes
        self.history: deque[dict[str, float]] = deque(maxlen=HISTORY)  # rows of the latest steps

    def watch_env(self, spec: EnvSpec) -> None:
        """Let the signs of trouble be of this environment: that of the stage that begins."""
        self.health.tools, self.health.env = bool(spec.tool_list()), spec.name
        self.health.weights = dict(spec.sample().reward_weights)

    def state(self) -> dict[str, Any]:
        return {
            "totals": asdict(self.totals),
            "elapsed": self.timeline.elapsed,
            "health": self.health,
            "overlap": self.overlap,
            "history": list(self.history),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.totals, self.timeline = _RunTotals(**state["totals"]), Timeline(state["elapsed"])
        self.health, self.overlap = state["health"], state["overlap"]
        self.history.extend(state["history"])

    def say(self, text: str, about: str = "") -> None:
        """Tell a sentence about the present step to the callbacks, and keep it in the run folder.

        Args:
            about: players or servers, whose coming and going it tells.
        """
        self._tell(self.step, [text], about)

    def check_health(self, step: int, batch: StepBatch) -> None:
        """Sound the alarms that a step's episodes give cause for, before anything is learnt from them."""
        if not self.demonstrates:
            self._tell(step, self.health.check_episodes([*batch.groups, *batch.resampled]))
        self.overlap.add_trained(t for g in batch.groups for t in g.trajectories[:1])

    async def record_step(
        self, step: int, batch: StepBatch, credit: Credit, update: Mapping[str, float], rollout: Rollout
    ) -> None:
        """Write a step's metrics, once its episodes are written, and tell of it. ``update``: the learner's metrics."""
        groups = [*batch.groups, *batch.resampled]
        if self.demonstrates:
            values = {**metrics.demonstration_metrics(groups), **update}
        else:
            values = {
                **metrics.group_metrics(groups, self.min_group_size),
                **metrics.credit_metrics(credit),
                "groups/resampled": float(len(batch.resampled)),
                **update,
            }
        values |= self._log_timeline(step, "step", self.timeline.cut())
        self.run.log_processes(step, self.activity.cut())
        values |= self._update_totals(values, groups, rollout)
        values = metrics.add_logged_metrics(values, groups)
        values |= self.metric_functions.compute([t for g in groups for t in g], values)
        await self.write_with_retry(partial(self.run.log, {"step": step, **values}), f"the metrics of step {step} are")
        self.history.append({"step": step, **values})
        self.run.write_tools(rollout.offered_tools)
        self.trackers.log(step, values)
        self.trackers.episodes(step, [t for g in groups for t in g])
        self.callback.on_step_end(step, {**values})
        self.callback.on_log(step, {**values})
        self._tell(step, self.health.check_step(values, () if self.demonstrates else batch.groups))

    async def write_episodes(self, step: int, credit: Credit, learned: Sequence[torch.Tensor | None]) -> None:
        """Write a step's episodes with their credit, and `Learner.learned` of each trained row."""
        rows = iter(learned)
        by_group = [[next(rows, None) if e.weight is not None else None for e in own] for own in credit.entries]
        lists = [[None if t is None else LearnedTokens(*t.T.tolist()) for t in own] for own in by_group]
        write = partial(self.run.write_trajectories, step, credit, learned=lists)
        await self.write_with_retry(write, f"the episodes of step {step} are")

    async def record_evaluation(
        self,
        step: int,
        groups: Sequence[Group],
        evaluation: Evaluation,
        timeline: Timeline,
        of_sets: Mapping[str, float],
    ) -> dict[str, float]:
        """Write the metrics of an evaluation whose episodes are written, and tell of it; return them."""
        values = {**evaluation.metrics(), **of_sets, **self._log_timeline(step, "evaluation", timeline.cut())}
        sampled = [t for g in groups for t in g.trajectories[: self.trials]]
        values |= self.metric_functions.compute(sampled, values, "eval/")
        log = partial(self.run.log, {"step": step, **values})
        await self.write_with_retry(log, f"the evaluation at step {step} is")
        self.trackers.log(step, values)
        self.callback.on_log(step, {**values})
        self.callback.on_evaluate(step, evaluation)
        self.overlap.add_held_out(g.trajectories[0] for g in groups)
        self._tell(step, self.overlap.new_warnings())
        return values

    async def write_held_out(self, step: int, groups: Sequence[Group], split: str = "test") -> None:
        """Write the episodes of an evaluation."""
        write = partial(self.run.write_trajectories, step, record_held_out(groups), split)
        await self.write_with_retry(write, f"the held-out episodes at step {step} are")

    async def write_with_retry(self, write: Callable[[], object], what: str) -> None:
        """Write something of a step; while the disk is full the run waits, until it is to end."""
        advice = f"The run waits: free some room on the disk of {str(self.run.folder)!r}, or end it"
        await retry_write(write, what, advice, self.say, self.stop.event)

    def flush_timings(self, step: int) -> None:
        """Charge to training what was done since the last step: a checkpoint, or the model's folder."""
        measured = self.timeline.cut()
        self.activity.cut()
        self.totals.seconds += measured.wall
        self.totals.cpu_seconds += measured.cpu
        if measured.values.get("time/checkpoint"):
            self.run.log_timeline(step, "save", measured.picture)

    def _tell(self, step: int, sentences: Sequence[str], about: str = "") -> None:
        for text in sentences:
            self.callback.on_message(text)
            self.run.log_message(step, text, about)

    def _log_timeline(self, step: int, kind: str, measured: MeasuredStretch) -> dict[str, float]:
        """Draw a stretch of time, and return its numbers under the names that its row has."""
        self.run.log_timeline(step, kind, measured.picture)
        if kind == "step":
            return {**measured.values, "step_time": measured.wall, "cpu_seconds": measured.cpu}
        values = {name if name.startswith("clock/") else f"eval/{name}": v for name, v in measured.values.items()}
        return {**values, "eval/runtime": measured.wall, "eval/cpu_seconds": measured.cpu}

    def _update_totals(
        self, values: Mapping[str, float], groups: Sequence[Group], rollout: Rollout
    ) -> dict[str, float]:
        """Add a step to the totals; return its episodes, its rate and the totals so far."""
        self.totals.add(values, episodes := sum(1 for g in groups for _ in g))
        cancelled, rollout.cancelled = rollout.cancelled, 0
        tokens, rollout.tokens = rollout.tokens, 0  # of turns that ended in the step, whenever it learns them
        return {
            "episodes": float(episodes),
            **({"oversample/cancelled": float(cancelled)} if rollout.oversample else {}),
            "tokens_per_second": tokens / max(values["step_time"], 1e-9),
            "total/episodes": float(self.totals.episodes),
            "total/sampled_tokens": self.totals.sampled_tokens,
        }
