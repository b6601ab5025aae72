"""The checkpoints of a run: which parts they hold, and when they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import anyio
import torch
from anyio import TASK_STATUS_IGNORED, to_thread
from anyio.abc import TaskGroup, TaskStatus

from agentrl.errors import UserError
from agentrl.evaluation.measurement import Evaluation
from agentrl.learner.part_writer import PartError, PartWriter
from agentrl.resources import TrainingResources
from agentrl.rollout.scheduler import SchedulerState
from agentrl.runs.atomic import describe_os_error
from agentrl.runs.disk import OVERFLOW_LINK, format_bytes, free_bytes, retry_write
from agentrl.runs.episode_info import jsonable_info
from agentrl.runtime.lanes import IDLE
from agentrl.training import checkpoint
from agentrl.training.best_policy import BestPolicy
from agentrl.training.demonstrations import BatchSource
from agentrl.training.recorder import Recorder
from agentrl.types import Group

if TYPE_CHECKING:
    from agentrl.models.streamed_model import LayerSource


class _Part(Protocol):
    """A part of a run that a checkpoint holds."""

    def state(self) -> Any: ...
    def load(self, state: Any) -> None: ...


class Checkpointer:
    """Writes what a killed run resumes from: see `collect`.

    ``parts`` are by the name that their state has in a checkpoint; ``before`` is the evaluation before the first step.
    """

    def __init__(self, resources: TrainingResources, recorder: Recorder) -> None:
        self.resources, self.recorder = resources, recorder
        self.parts: dict[str, _Part] = {}
        self.lent: LayerSource | None = None  # who has the weights, where the policy is in shards alone
        self.part_writer: PartWriter | None = None  # in every process, where the learner is in shards
        self.scheduler: BatchSource | None = None
        self.before: Evaluation | None = None
        self.done = self.saved = 0  # the last step that was finished; that has a checkpoint
        self.needs = checkpoint.estimate_disk_needs(resources.policy.model, resources.config)
        self._missed: int | None = None  # the step whose checkpoint could not be written
        self._is_safe = False  # the policy stands still, and the last step is on the disk
        self._writing, self._at_signal = anyio.Lock(fast_acquire=True), anyio.Lock(fast_acquire=True)

    @property
    def folder(self) -> Path:
        return self.recorder.run.folder / "checkpoints"

    def collect(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the parts, groups that are rolled out, the folder's length, random state."""
        run = self.recorder.run
        return {
            **{name: part.state() for name, part in self.parts.items()},
            "scheduler": _reduce_info(self.scheduler.state()) if self.scheduler else None,
            "injection_attempts": Counter(self.resources.renderer.injection_attempts),
            "before": self.before,
            "mark": run.metrics_size(),
            "beside": run.log_sizes(),
            "rng": torch.get_rng_state(),
        }

    def load(self, step: int, state: Mapping[str, Any]) -> Evaluation:
        """Load every part but the scheduler, which opens with its own; return the evaluation before the first step."""
        try:
            for name, part in self.parts.items():
                part.load(state[name])
            self.resources.renderer.injection_attempts.update(state["injection_attempts"])
            torch.set_rng_state(state["rng"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # somebody else wrote it
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise UserError(f"the checkpoint of step {step} does not fit this run ({what}); begin anew") from error
        self.done = self.saved = step
        self.before = before = state["before"]
        return cast(Evaluation, before)

    async def save(self, step: int) -> None:
        """Write a checkpoint. Where it cannot be written, that is told, and tried again after the next step."""
        self.recorder.timeline.at("checkpoint")
        await self._save(step)
        self.recorder.timeline.at(IDLE)

    async def save_due(self, step: int, background: TaskGroup) -> None:
        """Write a checkpoint if it is due, if the run ends, or if one is missing for which there is room now.

        Of a learner in shards it is written in the background, while the next step goes on; but for the last one, and
        where a deterministic run has to stand still.
        """
        config, control = self.resources.config, self.recorder.callback.control
        due = control.should_save or bool(config.run.save_every and step % config.run.save_every == 0)
        ends = self.recorder.stop.is_set or control.should_training_stop or step == config.steps
        if not (due or ends or self._may_save_again):
            return
        if self.part_writer is None or ends or config.deterministic:
            await self.save(step)
            return
        self.recorder.timeline.at("checkpoint")
        await background.start(self._save, step)
        self.recorder.timeline.at(IDLE)

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Wait for the checkpoint that is being written when the block ends; after an error, while it gets further."""
        try:
            yield
        except BaseException:
            if self.part_writer is not None:
                self.part_writer.hurry()
            raise
        await self._join()

    async def _join(self) -> None:
        async with self._writing:
            pass

    @asynccontextmanager
    async def allow_at_signal(self) -> AsyncIterator[None]:
        """Let a signal write a checkpoint inside: the policy stands still. Leave once it is written."""
        self._is_safe = True
        try:
            yield
        finally:
            self._is_safe = False
        async with self._at_signal:
            pass

    async def save_at_signal(self) -> None:
        """Wait for a signal; if the policy stands still then, write a checkpoint while the step goes on.

        The step may take longer than whoever sent the signal waits. A deterministic run is saved between steps alone.
        """
        await self.recorder.stop.event.wait()
        if not self._is_safe or self.resources.config.deterministic:
            return
        async with self._at_signal:
            await self._join()
            if self.done > self.saved:
                await self._save(self.done)
                if self.saved == self.done:
                    self.recorder.say(f"step {self.done} is saved")

    def give_up(self) -> None:
        """Try no longer to write a checkpoint that could not be written."""
        self._missed = None

    async def write_model(self, best: BestPolicy) -> None:
        """Write the policy, or the best one where that is kept, however long that has to be tried."""
        run, size = self.recorder.run, format_bytes(self.needs.model)
        make_room = partial(checkpoint.drop_older, self.folder)
        advice = (
            f"The policy is kept in memory until then: free {size} on the disk of {str(run.folder)!r}, or have it "
            f"written elsewhere: ln -s /ANOTHER/DISK {run.folder / OVERFLOW_LINK}. A signal (another one) gives it up"
        )
        save = partial(self.resources.policy.save, source=self.lent)
        write = partial(run.write_model, save, make_room)
        self.recorder.timeline.at("checkpoint")
        with best.swapped_in():
            await retry_write(write, "the model is", advice, self.recorder.say)
        self.recorder.timeline.at(IDLE)
        if self._missed is not None:
            await self.save(self._missed)

    @property
    def _may_save_again(self) -> bool:
        return self._missed is not None and free_bytes(self.recorder.run.folder) > self.needs.checkpoint

    async def _save(self, step: int, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Write a checkpoint, one at a time. Begun is it once the training may go on."""
        async with self._writing:
            state, elsewhere = self.collect(), self.recorder.run.overflow_path("checkpoints")
            try:
                encoded = await to_thread.run_sync(checkpoint.encode_state, state)
                task_status.started()
                write = partial(checkpoint.save, self.folder, step, encoded, elsewhere, self.part_writer)
                written = await to_thread.run_sync(write)
            except OSError as error:
                self._missed = step
                why = error.strerror if isinstance(error, PartError) else describe_os_error(error)
                standing = checkpoint.describe_newest(self.folder)
                self.recorder.say(f"no checkpoint of step {step}: {why}; {standing}")
                return
            finally:
                if self.part_writer is not None:
                    self.part_writer.release()
            self.saved, self._missed = step, None
            self.recorder.callback.on_save(step, written)


def _reduce_info(state: SchedulerState) -> SchedulerState:
    """Reduce what resets told in ``info``, which may be anything, to JSON that a checkpoint can hold."""
    others = [Group(g.task, tuple(replace(t, info=jsonable_info(t.info)) for t in g)) for g in state.resampled]
    return state._replace(resampled=others)
