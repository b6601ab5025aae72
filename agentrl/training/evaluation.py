"""Evaluations of a training run: on the same held-out tasks before, between and after its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup

from agentrl.errors import UserError
from agentrl.evaluation.evaluate import evaluate_tasks, list_tasks
from agentrl.evaluation.measurement import Evaluation, Trials, summarize_pair
from agentrl.evaluation.sets import EvaluationSet
from agentrl.health.tool_use import ToolUse
from agentrl.resources import TrainingResources
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.critical_path import EPISODES
from agentrl.runtime.stalls import Wait
from agentrl.runtime.timeline import Timeline
from agentrl.training.best_policy import BestPolicy
from agentrl.training.recorder import Recorder
from agentrl.types import Group


@dataclass(eq=False)
class _Background:
    """An evaluation that runs while the next batch is rolled out, of the policy that `step` left."""

    step: int
    done: anyio.Event = field(default_factory=anyio.Event)


class _SetEvaluations:
    """The evaluations of the sets before the first step, and the latest ones."""

    def __init__(self) -> None:
        self.before: dict[str, Evaluation] = {}
        self.latest: dict[str, Evaluation] = {}

    def state(self) -> dict[str, Evaluation]:
        return dict(self.before)

    def load(self, state: Mapping[str, Evaluation]) -> None:
        self.before = dict(state)

    def add(self, name: str, evaluation: Evaluation, step: int) -> None:
        """Keep a set's evaluation of a step."""
        (self.latest if step else self.before)[name] = evaluation

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return each set as the summary holds it: before, after and the difference; null where one is missing."""
        names = [*self.before, *(n for n in self.latest if n not in self.before)]
        return {name: summarize_pair(self.before.get(name), self.latest.get(name)) for name in names}


class EvaluationSchedule:
    """Evaluates the policy when it is due: between two steps, or while the next batch is rolled out."""

    def __init__(
        self, resources: TrainingResources, sets: Sequence[EvaluationSet], recorder: Recorder, best: BestPolicy
    ) -> None:
        self.resources, self.recorder, self.config, self.best = resources, recorder, resources.config, best
        self._own = EvaluationSet(
            "test", resources.spec, "test", resources.config.eval.tasks, resources.config.eval.final_tasks
        )
        self._more, self.sets = sets, _SetEvaluations()
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

        The last step's is the one after training. Where the best model is kept, the last step is compared too, on the
        same tasks as the others.
        """
        every, control = self.config.eval.every, self.recorder.callback.control
        if control.should_training_stop or (step >= self.config.steps and not self.config.run.load_best):
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
        if stop.is_set or self.pauses_after(step) or step == self.config.steps:
            evaluation = None if stop.is_set else await stop.run_unless_set(self.run(step))
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

    async def run(self, step: int, *, final: bool = False) -> Evaluation:
        """Evaluate sampled and greedy reward on the same held-out tasks each time. Its time is in no step."""
        self.recorder.flush_timings(step)
        self.recorder.step = step
        evaluation = await self._run(step, Timeline(self.recorder.timeline.elapsed), final=final)
        self.recorder.timeline.cut()
        self.recorder.activity.cut()
        return evaluation

    async def _run_beside(self, background: _Background) -> None:
        timeline = self.recorder.timeline
        with timeline.lanes.busy("evaluate"):
            await self._run(background.step, Timeline(timeline.elapsed), watched=False)
        self._background = None
        background.done.set()

    async def _run(self, step: int, timeline: Timeline, *, watched: bool = True, final: bool = False) -> Evaluation:
        """Evaluate the run's own tasks, then its sets; one row of the metrics holds them all."""
        groups, evaluation = await self._evaluate(step, self._own, timeline, watched=watched, final=final)
        of_sets: dict[str, float] = {}
        for more in self._more:
            try:
                _, measured = await self._evaluate(step, more, timeline, watched=watched, final=final)
            except UserError as error:  # not one of its episodes could be scored
                self.recorder.say(f"eval.sets.{more.name} is left out at step {step}: {error}")
                continue
            of_sets |= measured.metrics(f"eval/{more.name}/")
            self.sets.add(more.name, measured, step)
        values = await self.recorder.record_evaluation(step, groups, evaluation, timeline, of_sets)
        if step == 0:
            self._say_tool_use(groups)
            self.best.check_metric(values)
        elif not final and (sentence := self.best.observe(step, values)):
            self.recorder.say(sentence)
        if self.best.stops:
            self.recorder.callback.control.should_training_stop = True
        return evaluation

    def _say_tool_use(self, groups: Sequence[Group]) -> None:
        """Say, before the first step, that the model talks past its tools."""
        use = ToolUse()
        for episode in (t for group in groups for t in group):
            use.add(episode)
        if self.resources.spec.tool_list() and (sentence := use.explain(self.config.model)):
            self.recorder.say(sentence)

    async def _evaluate(
        self, step: int, tasks_of: EvaluationSet, timeline: Timeline, *, watched: bool, final: bool
    ) -> tuple[list[Group], Evaluation]:
        timeline.at(EPISODES)
        self.rollout = rollout = self.resources.rollout(tasks_of.split, tasks_of.spec)
        rollout.lanes = timeline.lanes
        trials = Trials(self.config.eval.trials)
        tasks = list_tasks(tasks_of.spec, tasks_of.final_tasks if final else tasks_of.tasks, tasks_of.split)
        callback = self.recorder.callback
        if watched:
            callback.on_phase_begin("evaluate", trials.each * len(tasks))
        on_episode = callback.on_episode_end if watched else None
        groups = await evaluate_tasks(rollout, tasks, trials, seed=self.config.seed, on_episode=on_episode)
        timeline.at("write")
        await self.recorder.write_held_out(step, groups, tasks_of.name)
        return groups, Evaluation.of(groups, trials, self.config.eval.pass_at)
