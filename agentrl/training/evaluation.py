"""Evaluations of a training run: on the same held-out tasks before, between and after its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from agentrl.evaluation.evaluate import evaluate_tasks, list_tasks
from agentrl.evaluation.measurement import Evaluation, Trials
from agentrl.resources import TrainingResources
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.critical_path import EPISODES
from agentrl.runtime.stalls import Wait
from agentrl.runtime.timeline import Timeline
from agentrl.training.recorder import Recorder


@dataclass(eq=False)
class _Background:
    """An evaluation that runs while the next batch is rolled out, of the policy that `step` left."""

    step: int
    done: anyio.Event = field(default_factory=anyio.Event)


class EvaluationSchedule:
    """Evaluates the policy when it is due: between two steps, or while the next batch is rolled out."""

    def __init__(self, resources: TrainingResources, recorder: Recorder) -> None:
        self.resources, self.recorder, self.config = resources, recorder, resources.config
        self.rollout: Rollout | None = None  # of the last evaluation
        self.owed: int | None = None  # the step whose evaluation a signal cut short
        self._background: _Background | None = None

    def state(self) -> int | None:
        """Return the step whose evaluation has not ended."""
        return self._background.step if self._background else self.owed

    def load(self, state: int | None) -> None:
        self.owed = state

    @property
    def progress(self) -> object:
        """Return a value that stands still where no evaluation goes on."""
        return self.rollout and self.rollout.progress

    def waits(self) -> list[Wait]:
        return self.rollout.waits() if self.rollout else []

    def is_due(self, step: int) -> bool:
        """Return True if an evaluation follows the step, as the settings or a callback want it.

        The last step's is the one after training.
        """
        every, control = self.config.eval.every, self.recorder.callback.control
        if step >= self.config.steps or control.should_training_stop:
            return False
        return control.should_evaluate or (bool(every) and step % every == 0)

    def pauses_after(self, step: int) -> bool:
        """Return True if nothing else is rolled out while the policy of `step` is evaluated."""
        return self.is_due(step) and self.config.eval.mode == "pause"

    async def run_due(self, step: int, background: TaskGroup) -> None:
        """Evaluate if it is due: now, or in the background. A signal leaves it owed."""
        stop = self.recorder.stop
        if not self.is_due(step):
            return
        if stop.is_set or self.pauses_after(step):
            evaluation = None if stop.is_set else await stop.run_unless_set(self.run(step, self.config.eval.tasks))
            self.owed = step if evaluation is None else None
        else:
            self._start(step, background)

    def start_owed(self, background: TaskGroup) -> None:
        """Begin the evaluation that a killed or interrupted run still owes."""
        if self.owed is not None:
            self._start(self.owed, background)
            self.owed = None

    def _start(self, step: int, background: TaskGroup) -> None:
        """Evaluate while the next batch is rolled out. The next update waits for it, so that one policy is measured."""
        self._background = _Background(step)
        background.start_soon(self._run_beside, self._background)

    async def join(self) -> None:
        """Wait for the evaluation in the background, if there is one."""
        if self._background is not None:
            self.recorder.timeline.at("evaluate")
            await self._background.done.wait()

    async def run(self, step: int, tasks: int) -> Evaluation:
        """Evaluate sampled and greedy reward on the same held-out tasks each time. Its time is in no step."""
        self.recorder.flush_timings(step)
        self.recorder.step = step
        evaluation = await self._run(step, tasks, Timeline(self.recorder.timeline.elapsed))
        self.recorder.timeline.cut()
        return evaluation

    async def _run_beside(self, background: _Background) -> None:
        timeline = self.recorder.timeline
        with timeline.lanes.busy("evaluate"):
            await self._run(background.step, self.config.eval.tasks, Timeline(timeline.elapsed), watched=False)
        self._background = None
        background.done.set()

    async def _run(self, step: int, count: int, timeline: Timeline, *, watched: bool = True) -> Evaluation:
        timeline.at(EPISODES)
        self.rollout = rollout = self.resources.rollout("test")
        rollout.lanes = timeline.lanes
        trials, tasks = Trials(self.config.eval.trials), list_tasks(self.resources.spec, count)
        callback = self.recorder.callback
        if watched:
            callback.on_phase_begin("evaluate", trials.each * len(tasks))
        on_episode = callback.on_episode_end if watched else None
        groups = await evaluate_tasks(rollout, tasks, trials, seed=self.config.seed, on_episode=on_episode)
        timeline.at("write")
        await self.recorder.write_held_out(step, groups)
        evaluation = Evaluation.of(groups, trials, self.config.eval.pass_at)
        await self.recorder.record_evaluation(step, groups, evaluation, timeline)
        return evaluation
