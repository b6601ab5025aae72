"""Training: a run set up, its steps, and its summary."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from agentrl import aside, checkpoint, registry, tracking
from agentrl.aside import together
from agentrl.blocking import blocking_told
from agentrl.config import TrainConfig
from agentrl.curriculum import Curriculum
from agentrl.disk import check_room, room_warning
from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError
from agentrl.extras import check_extras
from agentrl.interruption import Interruption
from agentrl.layers import dump_toml, flatten
from agentrl.learner.ranks import Ranks, joined
from agentrl.measurement import Evaluation
from agentrl.policy import Policy, resolved
from agentrl.run import Run, create
from agentrl.session import check_processes, made_policy, opened
from agentrl.stream import Ahead
from agentrl.trainer import Trainer, made_learner
from agentrl.waits import stalls_told
from agentrl.watching import Watcher, told_on_signal


def train(
    env: str | type[Env],
    model: Any = "nano",
    *,
    tokenizer: Any = None,
    env_settings: Mapping[str, Any] | None = None,
    curriculum: Curriculum | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model on an environment; the summary that is in the run folder too.

    Args:
        env: a registered name, ``module:Class``, or an ``Env`` subclass.
        model: a name or folder, as ``--model`` takes it; or a loaded causal LM, with an adapter or without, which is
            trained in place.
        tokenizer: of a loaded model; found by its name by default.
        env_settings: the environment's own settings.
        curriculum: of the outcomes so far to the options of the next task's ``reset``.
        settings: as in a config file: ``steps=200, learner={"lr": 2e-6}, run={"dir": "runs/x"}``.

    Raises:
        UserError: a setting, the environment, a tool or the model is wrong; the sentence says what and the way out.
    """
    spec = EnvSpec(env, **(env_settings or {}))
    named = {"name": spec.name, **spec.settings}
    config, loaded = resolved({"env": named, **settings}, model, tokenizer)
    return run_config(config, spec.equipped(config.tools, config.tool), watcher or Watcher(), loaded, curriculum)


def run_config(
    config: TrainConfig,
    spec: EnvSpec,
    watcher: Watcher,
    loaded: Policy | None = None,
    curriculum: Curriculum | None = None,
) -> dict[str, Any]:
    check_extras(config)
    tracking.check(config.run.trackers)
    check_processes(config.engine, deterministic=config.deterministic)
    ranks = joined()
    try:
        if ranks.follows:
            return _follow(config, spec, loaded, ranks)
        stop = Interruption(watcher.interrupted)
        with stop.handled():
            return aside.run(_train, config, spec, watcher, loaded, _named(config, curriculum), ranks, stop)
    finally:
        if not ranks.follows:
            ranks.tell(None)
        ranks.leave()


def _follow(config: TrainConfig, spec: EnvSpec, loaded: Policy | None, ranks: Ranks) -> dict[str, Any]:
    """Run one of the learner's further processes: it only learns, once the first one has come as far as its learner."""
    policy = made_policy(config, loaded)
    if ranks.heard() is not None:
        made_learner(config, spec, policy, ranks).follow()
    return {}


def _named(config: TrainConfig, curriculum: Curriculum | None) -> Curriculum | None:
    if config.rollout.curriculum is not None:
        curriculum = registry.imported("rollout.curriculum", config.rollout.curriculum)
    return curriculum


async def _train(
    config: TrainConfig,
    spec: EnvSpec,
    watcher: Watcher,
    loaded: Policy | None,
    curriculum: Curriculum | None,
    ranks: Ranks,
    stop: Interruption,
) -> dict[str, Any]:
    async with stop.heeded(), opened(config, spec, loaded) as session, AsyncExitStack() as watched:
        needs = checkpoint.needs(session.policy.model, config)
        fallback = Path(config.run.fallback_dir) if config.run.fallback_dir else None
        check_room(Path(config.run.dir or "runs"), needs, config.run.save_every, fallback)
        written = dump_toml(session.config)
        run = create(config.run.dir, spec.name, written, resume=config.run.resume, fallback=config.run.fallback_dir)
        watched.callback(run.close)
        begun, state = _found(run, config)
        watcher.started(session, run)
        named = {name: str(value) for name, value in flatten(tomllib.loads(written)).items()}
        trackers = watched.enter_context(
            tracking.tracking(config.run.trackers, config.run.project, run.folder, named, watcher.said, begun)
        )
        training = Trainer(session, run, watcher, curriculum, ranks, trackers, stop, at=begun)
        watched.enter_context(blocking_told(training.say))
        await watched.enter_async_context(stalls_told(training, config.rollout.stall_s, training.say))
        await watched.enter_async_context(told_on_signal(training, watcher))
        if not state:
            if run.mark():
                watcher.said(f"no checkpoint in {run.folder} yet: beginning anew")
            run.rewind(-1, 0)
            before = await training.measure(0, config.eval.final_tasks)
        else:
            run.rewind(begun, state["mark"], state["beside"])
            checkpoint.tidy(run.folder / "checkpoints", begun)
            before = state["before"]
            training.at = training.done = training.saved = begun
            await training.load(state)
            watcher.said(f"going on after step {begun} of {run.folder}")
        if warning := room_warning(run.folder, replace(needs, episodes=_episode_bytes(run, config, begun))):
            training.say(warning)
        stop.begun = True
        try:
            await _steps(training, before, state.get("ahead"), state.get("evaluating"))
        except Exception as error:  # whoever sent the signal may have sent it to our children too
            if not stop.is_set:
                raise
            training.say(f"step {training.done + 1} did not end: {error}")
            training.missed = None
        await training.write_model()
        after = None if stop.is_set else await stop.unless(training.measure(config.steps, config.eval.final_tasks))
        summary = training.summary(before, after)
        await training.keep(partial(run.write_summary, summary), "the summary is")
        return summary


async def _steps(training: Trainer, before: Evaluation, ahead: Ahead | None, evaluating: int | None) -> None:
    """Train until the last step, or the first signal. ``evaluating``: the step whose evaluation is still to be made."""
    config, stop, begun = training.session.config, training.stop, training.done
    streaming = training.streaming(begun, ahead, lambda: stop.is_set)
    async with streaming as stream, together() as beside:
        beside.start_soon(training.save_at_signal, stream, before)
        if evaluating is not None:
            training.measure_beside(evaluating, config.eval.tasks, beside)
        for step in range(begun + 1, config.steps + 1):
            if stop.is_set:
                break
            measures = bool(config.eval.every) and step % config.eval.every == 0 and step < config.steps
            pauses = measures and config.eval.mode == "pause"
            await training.step(step, stream, pauses=pauses)
            if measures and not pauses and not stop.is_set:
                training.measure_beside(step, config.eval.tasks, beside)
            elif measures:
                measured = None if stop.is_set else await stop.unless(training.measure(step, config.eval.tasks))
                training.owed = step if measured is None else None
            if pauses and not config.deterministic:
                stream.advance()
            due = config.run.save_every and step % config.run.save_every == 0
            if due or stop.is_set or step == config.steps or training.may_save_again:
                await training.save(step, stream, before)
            if config.deterministic:  # a checkpoint stands between two steps, with nothing begun
                stream.advance()
        beside.cancel_scope.cancel()  # an evaluation that a stopped run makes when it goes on


def _episode_bytes(run: Run, config: TrainConfig, begun: int) -> int:
    """Estimate what the episodes of the steps that are left take, from those that are there."""
    files = sorted((run.folder / "trajectories").glob("*.parquet"), key=lambda f: f.stat().st_mtime)
    if not files:
        return 0
    size = files[-1].stat().st_size / max(pq.read_metadata(files[-1]).num_rows, 1)
    return int(size * config.rollout.tasks * config.rollout.group_size * (config.steps - begun))


def _found(run: Run, config: TrainConfig) -> tuple[int, dict[str, Any]]:
    """The step to go on after and what its checkpoint holds: 0 and nothing where the run begins.

    Raises:
        UserError: the run has come further than to its first checkpoint, and there is none.
    """
    if not config.run.resume:
        return 0, {}
    found = checkpoint.load(run.folder / "checkpoints")
    if found is None and (steps := run.steps()) > config.run.save_every:
        raise UserError(
            f"the run in {str(run.folder)!r} has {steps} steps and no checkpoint to go on from; what is there is kept: "
            "to begin anew, give another --run.dir"
        )
    return found or (0, {})
