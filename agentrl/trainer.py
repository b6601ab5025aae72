"""A step of training: groups taken, advantages, one update, weights to the engine; and measuring in between."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import cos, pi
from typing import Any

import anyio
import torch
from anyio import to_thread
from anyio.abc import TaskGroup

from agentrl import checkpoint, metrics
from agentrl.alarms import Alarms
from agentrl.config import LearnerConfig, TrainConfig
from agentrl.credit import AdvantageRule, Credit, assign_credit, hold_out
from agentrl.critical_path import EPISODES
from agentrl.curriculum import Curriculum, CurriculumSampler, DifficultySampler
from agentrl.diagnosis import Diagnosis
from agentrl.disk import ELSEWHERE, free_bytes, in_words, until_written
from agentrl.engine import Sleeper
from agentrl.env import EnvSpec
from agentrl.episode_info import plain_info
from agentrl.errors import UserError
from agentrl.evaluation import held_out, measure
from agentrl.folder import reason
from agentrl.interruption import Interruption
from agentrl.lanes import IDLE, Lanes
from agentrl.learner.advantage import ADVANTAGES
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.objective import Objective
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.ranks import Ranks
from agentrl.learner.reduction import REDUCTIONS
from agentrl.learner.turn_advantage import CREDITS
from agentrl.measurement import Evaluation, Trials, first_fault, paired_difference
from agentrl.overlap import Overlap
from agentrl.policy import Policy
from agentrl.rollout import Rollout
from agentrl.run import Run
from agentrl.session import Session
from agentrl.stream import Ahead, Batch, Plan, Stream, stale, streaming
from agentrl.tasks import TaskSampler
from agentrl.timeline import Measured, Timeline
from agentrl.tracking import Tracking
from agentrl.trainer_state import TrainerState, set_trainer_state
from agentrl.types import Group, Message
from agentrl.waits import Wait
from agentrl.watching import Watcher

COUNTED = ("steps", "seconds", "cpu_seconds", "sampled_tokens", "episodes", "faults")
LONG = 1000  # tokens a row may have, from which on the product of its ratios says little
OBJECTIVE = tuple(f.name for f in fields(Objective))  # settings of the learner that say what is minimised


@dataclass(eq=False)
class _Beside:
    """An evaluation that runs beside the training, of the policy that `step` left."""

    step: int
    done: anyio.Event = field(default_factory=anyio.Event)


@dataclass
class Trainer:
    """One step after another, and what is kept between them."""

    session: Session
    run: Run
    watcher: Watcher
    curriculum: Curriculum | None
    ranks: Ranks
    trackers: Tracking
    stop: Interruption
    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    sampled_tokens: float = 0.0
    episodes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    at: int = 0  # the step that is being made or measured

    def __post_init__(self) -> None:
        config = self.session.config
        self.ranks.tell("ready")  # nothing has gone wrong so far: the others make their learners too
        self.learner = made_learner(config, self.session.spec, self.session.policy, self.ranks)
        self.rule = advantage_of(config.learner)
        self.time = Timeline()
        self.rollout = self._rollout("train", self.time.lanes)
        env = self.session.spec.make()
        self.tasks = _sampler(config, env.count("train"), self.curriculum)
        tools, name = bool(env.tool_list), str(config.env["name"])
        self.alarms = Alarms(tools, env=name, model=config.model, run=str(self.run.folder))
        self.diagnosis = Diagnosis(dict(env.reward_weights))
        self.measuring: Rollout | None = None
        self.overlap = Overlap()
        self.owed: int | None = None  # the step whose evaluation a signal cut short
        self.done = self.saved = 0  # the last step that was finished; that has a checkpoint
        self.missed: tuple[int, Stream, Evaluation] | None = None  # a checkpoint that could not be written
        self.resting = False  # the policy stands still, and the last step is on the disk
        self.saving = anyio.Lock(fast_acquire=True)  # held while a checkpoint is written
        self.needs = checkpoint.needs(self.session.policy.model, config)
        self._tell_rewards(self.at)
        self.beside: _Beside | None = None

    @property
    def progress(self) -> object:
        """Return what stands still where nothing goes on, in training and in measuring."""
        return self.rollout.progress, self.measuring and self.measuring.progress

    def waits(self) -> list[Wait]:
        return [*self.rollout.waits(), *(self.measuring.waits() if self.measuring else ())]

    async def save(self, step: int, stream: Stream, before: Evaluation) -> None:
        """Write a checkpoint. Where it cannot be written, that is told, and tried again after the next step."""
        self.time.at("checkpoint")
        await self._save(step, stream, before)
        self.time.at(IDLE)

    async def _save(self, step: int, stream: Stream, before: Evaluation) -> None:
        state = {
            "learner": self.learner.state(),
            "sampler": self.tasks.state(),
            "ahead": _bare(stream.state()),
            "forged": Counter(self.session.renderer.forged),
            "counted": {name: getattr(self, name) for name in COUNTED},
            "elapsed": self.time.elapsed,
            "evaluating": self.beside.step if self.beside else self.owed,
            "alarms": self.alarms,
            "diagnosis": self.diagnosis,
            "overlap": self.overlap,
            "before": before,
            "mark": self.run.mark(),
            "beside": self.run.marks_beside(),
            "rng": torch.get_rng_state(),
        }
        folder = self.run.folder / "checkpoints"
        async with self.saving:
            try:
                await to_thread.run_sync(checkpoint.save, folder, step, state, self.run.elsewhere_of("checkpoints"))
                self.saved, self.missed = step, None
            except OSError as error:
                self.missed = step, stream, before
                self.say(f"no checkpoint of step {step}: {reason(error)}; {checkpoint.standing(folder)}")

    async def save_at_signal(self, stream: Stream, before: Evaluation) -> None:
        """Wait for a signal; if the policy stands still then, write a checkpoint while the step goes on.

        The step may take longer than whoever sent the signal waits. A deterministic run is saved between steps alone.
        """
        await self.stop.event.wait()
        if self.resting and self.done > self.saved and not self.session.config.deterministic:
            await self._save(self.done, stream, before)
            if self.saved == self.done:
                self.say(f"step {self.done} is saved")

    @property
    def may_save_again(self) -> bool:
        """Return True if a checkpoint could not be written, and there is room for it now."""
        return self.missed is not None and free_bytes(self.run.folder) > self.needs.checkpoint

    async def write_model(self) -> None:
        """Write the policy, however long that has to be tried."""
        folder, size = self.run.folder, in_words(self.needs.model)
        make_room = partial(checkpoint.drop_older, folder / "checkpoints")
        advice = (
            f"The policy is kept in memory until then: free {size} on the disk of {str(folder)!r}, or have it written "
            f"elsewhere: ln -s /ANOTHER/DISK {folder / ELSEWHERE}. A signal (another one) gives it up"
        )
        write = partial(self.run.write_model, self.session.policy.save, make_room)
        self.time.at("checkpoint")
        await until_written(write, "the model is", advice, self.say)
        self.time.at(IDLE)
        if self.missed is not None:
            await self.save(*self.missed)

    async def keep(self, write: Callable[[], object], what: str) -> None:
        """Write something of a step; while the disk is full the run waits, until it is to end."""
        advice = f"The run waits: free some room on the disk of {str(self.run.folder)!r}, or end it"
        await until_written(write, what, advice, self.say, self.stop.event)

    async def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.learner.load(state["learner"])
        self.tasks.load(state["sampler"])
        for name, value in state["counted"].items():
            setattr(self, name, value)
        self.time = Timeline(state["elapsed"])
        self.rollout.lanes = self.time.lanes
        self.alarms, self.diagnosis = state["alarms"], state["diagnosis"]
        self.overlap = state["overlap"]
        self.session.renderer.forged.update(state["forged"])
        torch.set_rng_state(state["rng"])
        await self.session.engine.update_weights(self.session.policy.model, self.learner.version)

    def streaming(
        self, step: int, ahead: Ahead | None, stopping: Callable[[], bool] = lambda: False
    ) -> AbstractAsyncContextManager[Stream]:
        config, r = self.session.config, self.session.config.rollout
        exact = config.deterministic
        plan = Plan(
            r.tasks, r.group_size, r.max_staleness, r.min_group, r.redraw, r.dynamic, ordered=exact, steps=config.steps
        )
        return streaming(
            self.rollout,
            self.tasks,
            plan,
            seed=config.seed,
            step=step,
            ahead=ahead,
            watch=self.watcher.episode,
            stopping=stopping,
        )

    async def step(self, step: int, stream: Stream, *, pauses: bool = False) -> None:
        """Learn from the next batch. `pauses`: leave nothing in play, and begin nothing, as an evaluation follows."""
        config, engine, self.at = self.session.config, self.session.engine, step
        self.time.at(EPISODES)
        self.watcher.phase("rollout", config.rollout.tasks * config.rollout.group_size)
        self.resting = True
        taken = await stream.take()
        self.resting = False
        async with self.saving:  # a signal's checkpoint is being written
            pass
        groups = [*taken.groups, *taken.others]
        await self.evaluated()
        self.time.at("learn")
        self._check_alive(groups)
        self._tell(step, self.alarms.look(groups))
        self.overlap.train(t for g in taken.groups for t in g.trajectories[:1])
        if isinstance(engine, Sleeper) and not config.rollout.max_staleness:
            self.time.at("sync")
            await engine.sleep()
            self.time.at("learn")
        credit = self._assign_credit(taken)
        self.watcher.phase("learn", 0)
        self.learner.set_lr(_lr_share(step, config))
        ages = [age // config.learner.updates for age in stale(credit.learned, self.learner.version)]
        learned = await to_thread.run_sync(partial(self.learner.update, credit.samples(), credit.weights()))
        self._tell_rewards(step)
        self.time.at("sync")
        await engine.update_weights(self.session.policy.model, self.learner.version)
        if pauses:
            self.time.at(EPISODES)
            await stream.drain()
        elif not config.deterministic:
            stream.advance()
        self.time.at("write")
        values = {
            **metrics.of_groups(groups, config.rollout.min_group),
            **metrics.of_credit(credit),
            **metrics.of_ages(ages),
            "groups/redrawn": float(len(taken.others)),
            **learned,
            "lr": config.learner.lr * _lr_share(step, config),
            "policy_version": float(self.learner.version),
        }
        await self.keep(partial(self._write, step, credit), f"the episodes of step {step} are")
        values |= self._timed(step, "step", self.time.cut())
        values |= self._count(values, groups)
        values = metrics.with_logged(values, groups)
        await self.keep(partial(self.run.log, {"step": step, **values}), f"the metrics of step {step} are")
        self.run.write_tools(self.rollout.offered)
        self.trackers.log(step, values)
        self.trackers.episodes(step, [t for g in groups for t in g])
        self.watcher.step(step, values)
        self._tell(step, self.diagnosis.look(values, taken.groups))
        self.done = step
        self.time.at(IDLE)

    def measure_beside(self, step: int, wanted: int, tasks: TaskGroup) -> None:
        """Measure while the next batch is played. The next update waits for it, so that one policy is measured."""

        async def measure() -> None:
            with self.time.lanes.busy("evaluate"):
                await self._measure(step, wanted, Timeline(self.time.elapsed), watched=False)
            self.beside = None
            beside.done.set()

        self.beside = beside = _Beside(step)
        tasks.start_soon(measure)

    async def evaluated(self) -> None:
        """Wait for the evaluation that runs beside, if one does."""
        if self.beside is not None:
            self.time.at("evaluate")
            await self.beside.done.wait()

    async def measure(self, step: int, wanted: int) -> Evaluation:
        """Measure sampled and greedy reward on the same held-out tasks each time. Its time is in no step."""
        self._save_time(step)
        self.at = step
        compared = await self._measure(step, wanted, Timeline(self.time.elapsed))
        self.time.cut()
        return compared

    async def _measure(self, step: int, wanted: int, own: Timeline, *, watched: bool = True) -> Evaluation:
        own.at(EPISODES)
        self.measuring = rollout = self._rollout("test", own.lanes)
        config, trials = self.session.config, Trials(self.session.config.eval.trials)
        tasks = held_out(self.session.spec, wanted)
        if watched:
            self.watcher.phase("measure", trials.each * len(tasks))
        watch = self.watcher.episode if watched else None
        groups = await measure(rollout, tasks, trials, seed=config.seed, watch=watch)
        own.at("write")
        found = Evaluation.of(groups, trials, config.eval.pass_at)
        write = partial(self.run.write_trajectories, step, hold_out(groups), "test")
        await self.keep(write, f"the held-out episodes at step {step} are")
        values = {**found.metrics(), **self._timed(step, "evaluation", own.cut())}
        await self.keep(partial(self.run.log, {"step": step, **values}), f"the measurement at step {step} is")
        self.trackers.log(step, values)
        self.watcher.measured(step, found)
        self.overlap.hold_out(g.trajectories[0] for g in groups)
        self._tell(step, self.overlap.look())
        return found

    def summary(self, before: Evaluation, after: Evaluation | None) -> dict[str, Any]:
        session, config = self.session, self.session.config
        shown_before, shown_after = _telling(before, after)
        return {
            "env": session.spec.name,
            "model": config.model,
            "seed": config.seed,
            "steps": self.steps,
            "interrupted": after is None,
            "signal": self.stop.signal.name if self.stop.signal else None,
            "checkpoint": checkpoint.newest_step(self.run.folder / "checkpoints"),
            **_rewards("before", before),
            **_rewards("after", after),
            "before": before.as_dict(),
            "after": after.as_dict() if after else None,
            "difference": paired_difference(before, after) if after else None,
            "train_seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "sampled_tokens": int(self.sampled_tokens),
            "faults": self.faults,
            "prompts": self.overlap.counts(),
            "forged_control_tokens": dict(session.renderer.forged),
            "conversation_before": shown_before,
            "conversation_after": shown_after,
            "run_dir": str(self.run.folder),
            "model_dir": str(self.run.folder / "model"),
            "metrics": str(self.run.folder / "metrics.jsonl"),
        }

    def _tell_rewards(self, step: int) -> None:
        """Let reward functions know, from here on, of so many updates."""
        config = self.session.config
        count = self.session.spec.make().count("train")
        epoch = step * config.rollout.tasks / count if count else 0.0
        set_trainer_state(TrainerState(step, config.steps, epoch, config.run.save_every, config.eval.every))

    def _check_alive(self, groups: Sequence[Group]) -> None:
        if not any(g.scored for g in groups):
            played = [t for g in groups for t in g]
            raise UserError(f"not one of {len(played)} episodes could be scored. {first_fault(played)}")

    def _assign_credit(self, taken: Batch) -> Credit:
        """Make the step's ledger: all that is said of its episodes from here on is read from it."""
        c = self.session.config.learner
        return assign_credit(
            taken.groups,
            self.rule,
            reduce=lambda lengths: REDUCTIONS[c.loss](lengths, self.learner.settings.longest),
            mask_stops=frozenset(c.mask_stops),
            min_group=self.session.config.rollout.min_group,
            resampled=taken.others,
        )

    def _write(self, step: int, credit: Credit) -> None:
        old = iter(self.learner.old)
        rows = [[next(old, None) if e.weight is not None else None for e in own] for own in credit.entries]
        learned = [[None if values is None else values.tolist() for values in own] for own in rows]
        self.run.write_trajectories(step, credit, learned=learned)

    def say(self, text: str) -> None:
        """To whoever watches, and whoever looks later."""
        self._tell(self.at, [text])

    def _tell(self, step: int, sentences: Sequence[str]) -> None:
        for text in sentences:
            self.watcher.said(text)
            self.run.tell(step, text)

    def _rollout(self, split: str, lanes: Lanes) -> Rollout:
        rollout = self.session.rollout(split)
        rollout.lanes = lanes
        return rollout

    def _timed(self, step: int, kind: str, measured: Measured) -> dict[str, float]:
        """Draw a stretch of time, and return its numbers under the names that its row has."""
        self.run.draw(step, kind, measured.picture)
        if kind == "step":
            return {**measured.values, "step_time": measured.wall, "cpu_seconds": measured.cpu}
        values = {name if name.startswith("clock/") else f"eval/{name}": v for name, v in measured.values.items()}
        return {**values, "eval/runtime": measured.wall, "eval/cpu_seconds": measured.cpu}

    def _save_time(self, step: int) -> None:
        """Charge what was done since the last step, a checkpoint or the model's folder, to training."""
        measured = self.time.cut()
        self.seconds += measured.wall
        self.cpu_seconds += measured.cpu
        if measured.values.get("time/checkpoint"):
            self.run.draw(step, "save", measured.picture)

    def _count(self, values: Mapping[str, float], groups: Sequence[Group]) -> dict[str, float]:
        """Add a step to what the run counts; its episodes and its rate, and the run's episodes and tokens so far."""
        self.steps += 1
        self.seconds += values["step_time"]
        self.cpu_seconds += values["cpu_seconds"]
        self.sampled_tokens += values.get("sampled_tokens", 0.0)
        self.episodes += (episodes := sum(1 for g in groups for _ in g))
        tokens, self.rollout.tokens = self.rollout.tokens, 0  # of turns that ended in the step, whenever it learns them
        for name, n in values.items():
            if name.startswith("faults/"):
                kind = name.removeprefix("faults/")
                self.faults[kind] = self.faults.get(kind, 0) + int(n)
        return {
            "episodes": float(episodes),
            "tokens_per_second": tokens / max(values["step_time"], 1e-9),
            "total/episodes": float(self.episodes),
            "total/sampled_tokens": self.sampled_tokens,
        }


def _sampler(config: TrainConfig, count: int | None, curriculum: Curriculum | None) -> TaskSampler:
    if curriculum is not None:
        return CurriculumSampler(count, config.seed, curriculum=curriculum)
    kind = {"order": TaskSampler, "difficulty": DifficultySampler}[config.rollout.sampler]
    return kind(count, config.seed)


def made_learner(config: TrainConfig, spec: EnvSpec, policy: Policy, ranks: Ranks) -> Learner:
    c, model = config.learner, policy.model
    optimizers = make_optimizers(model, c.optimizer, c.lr, c.weight_decay)
    turns = config.rollout.max_turns or spec.cls.max_turns
    longest = turns * config.rollout.max_turn_tokens
    if c.correction == "sequence_mask" and longest > LONG:
        warnings.warn(
            f"learner.correction sequence_mask leaves out whole rows, and ever more of them the longer they are "
            f"(here up to {longest:,} tokens): at a mismatch of 0.02 nats a token a tenth of those of 2,000; "
            "geometric_mask goes by the mean",
            stacklevel=2,
        )
    loss = LossSettings(
        **{name: getattr(c, name) for name in OBJECTIVE},
        temperature=config.rollout.temperature,
        max_grad_norm=c.max_grad_norm,
        updates=c.updates,
        packing=c.packing,
        token_budget=c.token_budget,
        threads=c.threads,
        longest=longest,
        ref_sync_steps=c.ref_sync_steps,
        gradient_checkpointing=c.gradient_checkpointing,
    )
    return Learner(model, optimizers, loss, ranks)


def advantage_of(c: LearnerConfig) -> AdvantageRule:
    """The function that the settings name, with what they say of it."""
    if c.advantage in ADVANTAGES:
        return ADVANTAGES[c.advantage]
    more = {"step_weight": c.step_weight} if c.advantage == "gigpo" else {}
    return partial(CREDITS[c.advantage], gamma=c.gamma, **more)


def _lr_share(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate: a linear warm-up, then constant, or down to a tenth, straight or as a cosine."""
    c = config.learner
    if step <= c.warmup_steps:
        return step / (c.warmup_steps + 1)
    if c.schedule == "constant":
        return 1.0
    done = (step - 1 - c.warmup_steps) / max(config.steps - c.warmup_steps, 1)
    return max(0.1, 1.0 - done) if c.schedule == "linear" else 0.1 + 0.45 * (1 + cos(pi * done))


def _bare(ahead: Ahead) -> Ahead:
    """Reduce what resets told in ``info``, which may be anything, to JSON that a checkpoint can hold."""
    others = [Group(g.task, tuple(replace(t, info=plain_info(t.info)) for t in g)) for g in ahead.others]
    return ahead._replace(others=others)


def _rewards(when: str, found: Evaluation | None) -> dict[str, float | None]:
    return {
        f"reward_{when}": found.sampled.reward if found and found.sampled else None,
        f"greedy_{when}": found.greedy.reward if found and found.greedy else None,
    }


def _telling(before: Evaluation, after: Evaluation | None) -> tuple[list[Message], list[Message]]:
    """One task's conversation before and after: one that was failed and is now solved, if there is any."""
    if after is None:
        return list(next(iter(before.conversations.values()))), []

    def gain(task: int) -> float:
        return (after.first_rewards.get(task) or 0.0) - (before.first_rewards.get(task) or 0.0)

    task = max(before.conversations, key=gain)
    return list(before.conversations[task]), list(after.conversations[task])
