"""A step of training: sample, advantages, update, weights to the engine. The loop that makes them is in `train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from math import ceil
from typing import NamedTuple

from anyio import to_thread

from agentrl.credit import BatchCut, Credit, assign_credit
from agentrl.environments.curriculum import Curriculum
from agentrl.errors import UserError
from agentrl.evaluation.measurement import describe_first_fault
from agentrl.learner.activation_memory import MOST
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.losses.reduction import PER_UPDATE, reduce_rows
from agentrl.resources import TrainingResources
from agentrl.rewards.trainer_state import TrainerState, set_trainer_state
from agentrl.rollout.engine_protocol import ShardReader, Sleeper
from agentrl.rollout.scheduler import (
    BatchPlan,
    SchedulerState,
    StepBatch,
    compute_staleness,
    open_scheduler,
)
from agentrl.runs import metrics
from agentrl.runtime.critical_path import EPISODES
from agentrl.runtime.lanes import IDLE
from agentrl.training.algorithm import build_learner, build_loss_settings, build_task_sampler, choose_advantage
from agentrl.training.demonstrations import BatchSource, open_demonstrations
from agentrl.training.recorder import Recorder
from agentrl.training.schedules import OptimizerPair, build_schedule
from agentrl.training.stages import Stage, find_stage
from agentrl.types import Trajectory


class Ready(NamedTuple):
    """The first process's word to the others that nothing has gone wrong so far: they make their learners too."""

    reads_shards: bool  # its engine does, so that nobody has the policy whole


class Trainer:
    """The algorithm, step by step. It holds the learner, the task sampler and the rollout of training."""

    def __init__(
        self,
        resources: TrainingResources,
        recorder: Recorder,
        curriculum: Curriculum | None,
        process_group: ProcessGroup,
        step: int,
        stages: Sequence[Stage],
        optimizers: OptimizerPair = (None, None),
        demonstrations: Sequence[Trajectory] = (),
    ) -> None:
        self.demonstrations = demonstrations
        self.recorder, self.stages, self._curriculum, self._lr = (
            recorder,
            stages,
            curriculum,
            resources.config.learner.lr,
        )
        optimizer, scheduler = optimizers
        reads_shards = isinstance(resources.engine, ShardReader)
        process_group.broadcast(Ready(reads_shards))
        self.learner = build_learner(
            *(resources.config, resources.spec, resources.policy, process_group, optimizer),
            keeps_whole=not reads_shards,
        )
        if isinstance(resources.engine, ShardReader) and self.learner.lent is not None:
            resources.engine.read_shards(self.learner.lent)
        self.schedule = build_schedule(resources.config, self.learner, scheduler)
        self.resources = resources
        self._set_stage(find_stage(stages, step))
        self.tell_rewards(step)

    def enter(self, stage: Stage) -> None:
        """Begin a stage, with tasks, rollouts and an objective of its own."""
        self._set_stage(stage)
        if stage.resets_optimizer:
            self.learner.reset_optimizers()
        if len(self.stages) > 1:
            self.recorder.step = stage.first
            self.recorder.say(f"{stage} of {len(self.stages)} begins: steps {stage.first} to {stage.last}")

    def _set_stage(self, stage: Stage) -> None:
        self.stage, self.config = stage, stage.config
        self.resources = replace(self.resources, config=stage.config, spec=stage.spec)
        self.learner.settings = build_loss_settings(stage.config, stage.spec)
        self.advantage = choose_advantage(stage.config.learner)
        self.count = stage.spec.count("train")
        self.tasks = build_task_sampler(stage.config, self.count, self._curriculum)
        self.rollout = self.resources.rollout("train")
        self.recorder.watch_env(stage.spec)

    def open_scheduler(
        self, step: int, ahead: SchedulerState | None, stopping: Callable[[], bool]
    ) -> AbstractAsyncContextManager[BatchSource]:
        """Roll out groups as far ahead of the learner as staleness allows, after ``step`` updates; or demonstrate."""
        if self.demonstrations:
            return open_demonstrations(self.demonstrations, self.config, step)
        self.rollout.lanes = self.recorder.timeline.lanes
        on_episode = self.recorder.callback.on_episode_end
        return open_scheduler(
            self.rollout,
            self.tasks,
            replace(BatchPlan.from_config(self.config), steps=self.stage.last),
            seed=self.config.seed,
            step=step,
            state=ahead,
            on_episode=on_episode,
            stopping=stopping,
        )

    async def sample(self, step: int, scheduler: BatchSource) -> StepBatch:
        """Wait for the next batch of groups: sampled from the engine, tools run, rewards scored."""
        self.recorder.step = step
        self.recorder.timeline.at(EPISODES)
        r = self.config.rollout
        self.recorder.callback.on_phase_begin("rollout", r.tasks_per_step * r.group_size)
        return await scheduler.next_batch()

    async def assign_credit(self, step: int, batch: StepBatch) -> Credit:
        """Compute the advantages of a batch, once: what is said of its episodes from here on is read from this ledger.

        Raises:
            UserError: not one episode could be scored. The episodes are kept, to be looked at.
        """
        self.recorder.timeline.at("learn")
        c, loss = self.config.learner, self.learner.settings.loss_entry.entry
        credit = assign_credit(
            batch.groups,
            self.advantage,
            reduce=partial(reduce_rows, loss, longest=self.learner.settings.longest),
            mask_stop_reasons=frozenset(c.mask_stop_reasons),
            min_group_size=1 if self.demonstrations else self.config.rollout.min_group_size,
            resampled=batch.resampled,
            cut=BatchCut(c.steps_per_generation, f"{self.config.seed}-{step}", loss.reduction in PER_UPDATE),
        )
        groups = [*batch.groups, *batch.resampled]
        if not any(g.scored for g in groups):
            await self.recorder.write_episodes(step, credit, ())
            episodes = [t for g in groups for t in g]
            raise UserError(f"not one of {len(episodes)} episodes could be scored. {describe_first_fault(episodes)}")
        self.recorder.check_health(step, batch)
        return credit

    async def update(self, step: int, credit: Credit) -> dict[str, float]:
        """Take an optimizer step on the credited rows, in a thread; return the learner's metrics."""
        if isinstance(self.resources.engine, Sleeper) and not self.config.rollout.max_staleness:
            self.recorder.timeline.at("sync")
            await self.resources.engine.sleep()
            self.recorder.timeline.at("learn")
        self.recorder.callback.on_phase_begin("learn", 0)
        self.schedule.before(step, self.config.learner.lr / self._lr)
        lr = self.learner.train_state.lrs[0][0]
        scored = [e.trajectory for e in credit.rows if e.trained_tokens]
        each = self.config.learner.num_iterations * self.config.learner.steps_per_generation
        ages = [ceil(age / each) for age in compute_staleness(scored, self.learner.version)]
        rows = credit.samples(), credit.weights(), credit.updates()
        known = self.learner.affordable_tokens
        learned = await to_thread.run_sync(partial(self.learner.update, *rows))
        if known is None and (count := self.learner.affordable_tokens) is not None and count < MOST:
            self.recorder.say(
                f"micro-batches have at most {count:,} tokens, which this machine's memory has room for; "
                "learner.max_tokens_per_microbatch sets another number"
            )
        self.schedule.after()
        self.tell_rewards(step)
        version = float(self.learner.version)
        return {
            **metrics.staleness_metrics(ages),
            **learned,
            "lr": lr,
            "policy_version": version,
            **({"stage": float(self.stage.number)} if len(self.stages) > 1 else {}),
        }

    async def sync_weights(self) -> None:
        """Give the engine the weights that the update left."""
        self.recorder.timeline.at("sync")
        await self.resources.engine.update_weights(self.resources.policy.model, self.learner.version)

    async def advance(self, scheduler: BatchSource, *, pauses: bool) -> None:
        """Let the scheduler begin groups with the new weights; or end those it began, if an evaluation pauses it."""
        if pauses:
            self.recorder.timeline.at(EPISODES)
            await scheduler.drain()
        elif not self.config.deterministic:  # a checkpoint stands between two steps there, with nothing begun
            scheduler.advance()

    async def record(self, step: int, batch: StepBatch, credit: Credit, update: dict[str, float]) -> None:
        """Write the step: its episodes with their credit, then its metrics."""
        self.recorder.timeline.at("write")
        await self.recorder.write_episodes(step, credit, self.learner.learned)
        await self.recorder.record_step(step, batch, credit, update, self.rollout)
        self.tell_rewards(step)  # of the row too
        self.recorder.timeline.at(IDLE)

    def tell_rewards(self, step: int) -> None:
        """Let reward functions know, from here on, of so many updates, and of the rows of the metrics so far."""
        config = self.config
        epoch = step * config.rollout.tasks_per_step / self.count if self.count else 0.0
        history = tuple(self.recorder.history)
        state = TrainerState(step, config.steps, epoch, config.run.save_every, config.eval.every, log_history=history)
        set_trainer_state(state)
