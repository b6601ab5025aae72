"""The loop of a training run: sample, advantages, update, sync; evaluations and checkpoints in between."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio.abc import TaskGroup

from agentrl.evaluation.measurement import Evaluation
from agentrl.rollout.scheduler import SchedulerState
from agentrl.runs.folder import RunFolder
from agentrl.runtime.stalls import Wait
from agentrl.runtime.threads import open_task_group
from agentrl.settings.schema import TrainConfig
from agentrl.training import checkpoint
from agentrl.training.checkpointer import Checkpointer
from agentrl.training.evaluation import EvaluationSchedule
from agentrl.training.recorder import Recorder
from agentrl.training.stages import Stage
from agentrl.training.step import Trainer
from agentrl.training.summary import summarize


@dataclass
class TrainingLoop:
    """A run and its parts."""

    trainer: Trainer
    recorder: Recorder
    evaluations: EvaluationSchedule
    checkpointer: Checkpointer

    def __post_init__(self) -> None:
        self.config, self.stop = self.evaluations.config, self.recorder.stop
        self.control = self.recorder.callback.control
        self.checkpointer.lent = self.trainer.learner.lent
        self.checkpointer.part_writer = self.trainer.learner.part_writer
        self.checkpointer.parts = {
            "learner": self.trainer.learner,
            "schedule": self.trainer.schedule,
            "task_sampler": self.trainer.tasks,
            "recorder": self.recorder,
            "evaluations": self.evaluations,
            "callbacks": self.recorder.callback,
            "best": self.evaluations.best,
            "sets": self.evaluations.sets,
        }

    @property
    def progress(self) -> object:
        """Return a value that stands still where nothing goes on, in training and in evaluating."""
        return self.trainer.rollout.progress, self.evaluations.progress

    def waits(self) -> list[Wait]:
        return [*self.trainer.rollout.waits(), *self.evaluations.waits()]

    async def start(self) -> Evaluation:
        """Begin with an evaluation. What an earlier process left without a checkpoint is taken back."""
        run = self.recorder.run
        if run.metrics_size():
            self.recorder.callback.on_message(f"no checkpoint in {run.folder} yet: beginning anew")
        run.rewind(-1, 0)
        self.recorder.callback.state()  # one that no checkpoint can hold is refused now, not at the first checkpoint
        self.checkpointer.before = before = await self.evaluations.run(0, final=True)
        return before

    async def resume(self, step: int, state: dict[str, Any]) -> Evaluation:
        """Load a checkpoint into every part, and its weights into the engine; return the evaluation before step 1."""
        run, resources = self.recorder.run, self.trainer.resources
        _rewind(run, self.config, step, state)
        checkpoint.prune(run.folder / "checkpoints", step)
        self.recorder.step = step
        before = self.checkpointer.load(step, state)
        self.trainer.tell_rewards(step)
        await resources.engine.update_weights(resources.policy.model, self.trainer.learner.version)
        self.recorder.callback.on_message(f"going on after step {step} of {run.folder}")
        return before

    async def run_steps(self, ahead: SchedulerState | None) -> None:
        """Train until the last step, or the first signal, with the loss and the advantage that the settings name.

        ``ahead``: what a checkpoint holds of the scheduler.
        """
        async with open_task_group() as background:
            background.start_soon(self.checkpointer.save_at_signal)
            self.evaluations.start_owed(background)
            async with self.checkpointer.joined():
                await self._run_stages(ahead, background)
            background.cancel_scope.cancel()  # an evaluation that a stopped run makes when it resumes

    async def _run_stages(self, ahead: SchedulerState | None, background: TaskGroup) -> None:
        for stage in self.trainer.stages:
            done = self.checkpointer.done
            if stage.last <= done or self._is_ending():
                continue
            if stage.first > done:
                self._enter(stage)
            await self._run_stage(stage, ahead if stage.first <= done else None, background)

    def _enter(self, stage: Stage) -> None:
        self.trainer.enter(stage)
        self.checkpointer.parts["task_sampler"] = self.trainer.tasks

    async def _run_stage(self, stage: Stage, ahead: SchedulerState | None, background: TaskGroup) -> None:
        trainer, evaluations, checkpointer = self.trainer, self.evaluations, self.checkpointer
        first = checkpointer.done + 1
        async with trainer.open_scheduler(checkpointer.done, ahead, self._is_ending) as scheduler:
            checkpointer.scheduler = scheduler
            for step in range(first, stage.last + 1):
                if self._is_ending():
                    break
                self.control.begin_step()
                self.recorder.callback.on_step_begin(step)
                async with checkpointer.allow_at_signal():
                    batch = await trainer.sample(step, scheduler)  # groups of episodes
                await evaluations.join()
                if evaluations.best.stops:  # by an evaluation in the background
                    await checkpointer.save(checkpointer.done)
                    break
                credit = await trainer.assign_credit(step, batch)  # their advantages
                update = await trainer.update(step, credit)  # the loss, and an optimizer step
                await trainer.sync_weights()  # to the engine
                pauses = evaluations.pauses_after(step)
                await trainer.advance(scheduler, pauses=pauses)
                await trainer.record(step, batch, credit, update)
                checkpointer.done = step
                await evaluations.run_due(step, background)
                if pauses and not self.config.deterministic and not self._is_ending():
                    scheduler.advance()
                await checkpointer.save_due(step, background)
                if self.config.deterministic:  # a checkpoint stands between two steps, with nothing begun
                    scheduler.advance()

    def _is_ending(self) -> bool:
        """Return True if no step follows: a signal came, a callback wants the end, or ``eval.patience`` is used up."""
        return self.stop.is_set or self.control.should_training_stop or self.evaluations.best.stops

    async def finish(self, before: Evaluation) -> dict[str, Any]:
        """Write the model, evaluate it, and return the summary, which is in the run folder too."""
        best, resources, step = self.evaluations.best, self.evaluations.resources, self.checkpointer.done
        await self.checkpointer.write_model(best)
        after = None
        if sentence := best.restore():
            self.recorder.say(sentence)
            await resources.engine.update_weights(resources.policy.model, self.trainer.learner.version)
        if not self.stop.is_set:
            after = await self.stop.run_unless_set(self.evaluations.run(step, final=True))
        summary = summarize(resources, self.recorder, before, after, self.evaluations)
        await self.recorder.write_with_retry(partial(self.recorder.run.write_summary, summary), "the summary is")
        self.recorder.callback.on_train_end(summary)
        return summary


def _rewind(run: RunFolder, config: TrainConfig, begun: int, state: dict[str, Any]) -> None:
    """Take back what the run tells of after its checkpoint, which is then as late as the last line that stays.

    The evaluation after the last step stays where further steps follow: it is one between steps now. Where none follows
    it is made again.
    """
    mark, beside = state["mark"], state["beside"]
    compares = config.run.load_best or config.eval.patience  # the last step has an evaluation of its own beside it
    if config.steps > begun and state["evaluations"] is None and not compares:
        after = run.skip_evaluation(begun, mark)
        mark, beside = after, beside if after == mark else None
    run.rewind(begun, mark, beside)
    run.remove_summary()
    state["recorder"]["elapsed"] = max(state["recorder"]["elapsed"], run.elapsed_s())
