"""Training: a run set up, its steps, and its summary."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from anyio import to_thread

from agentrl import aside, checkpoint, registry, tracking
from agentrl.aside import together
from agentrl.blocking import blocking_told
from agentrl.config import TrainConfig
from agentrl.curriculum import Curriculum
from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError
from agentrl.lanes import IDLE
from agentrl.layers import dump_toml
from agentrl.learner.ranks import Ranks, joined
from agentrl.policy import Policy, resolved
from agentrl.run import Run, create, flat
from agentrl.session import made_policy, opened
from agentrl.trainer import Trainer, made_learner
from agentrl.waits import stalls_told
from agentrl.watching import Watcher, interrupts, told_on_signal


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
    ranks = joined()
    try:
        if ranks.follows:
            return _follow(config, spec, loaded, ranks)
        return aside.run(_train, config, spec, watcher, loaded, _named(config, curriculum), ranks)
    finally:
        if not ranks.follows:
            ranks.tell(None)
        ranks.leave()


def _follow(config: TrainConfig, spec: EnvSpec, loaded: Policy | None, ranks: Ranks) -> dict[str, Any]:
    """One of the learner's further processes: it only learns."""
    policy = made_policy(config, loaded)
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
) -> dict[str, Any]:
    async with opened(config, spec, loaded) as session, interrupts(watcher) as stop, AsyncExitStack() as watched:
        tracking.check(config.run.trackers)
        written = dump_toml(session.config)
        run = create(config.run.dir, spec.name, written, resume=config.run.resume)
        watched.callback(run.close)
        begun, state = _found(run, config)
        watcher.started(session, run)
        named = {name: str(value) for name, value in flat(tomllib.loads(written)).items()}
        trackers = watched.enter_context(
            tracking.tracking(config.run.trackers, config.run.project, run.folder, named, watcher.said, begun)
        )
        training = Trainer(session, run, watcher, curriculum, ranks, trackers, at=begun)
        watched.enter_context(blocking_told(training.say))
        await watched.enter_async_context(stalls_told(training, config.rollout.stall_s, training.say))
        await watched.enter_async_context(told_on_signal(training, watcher))
        if not state:
            if run.mark():
                watcher.said(f"no checkpoint in {run.folder} yet: beginning anew")
            run.rewind(-1, 0)
            before = await training.measure(0, config.eval.final_tasks)
        else:
            run.rewind(begun, state["mark"])
            checkpoint.tidy(run.folder / "checkpoints", begun)
            before = state["before"]
            training.at = begun
            await training.load(state)
            watcher.said(f"going on after step {begun} of {run.folder}")
        streaming = training.streaming(begun, state.get("ahead"), stop.is_set)
        async with streaming as stream, together() as beside:
            if (step := state.get("evaluating")) is not None:
                training.measure_beside(step, config.eval.tasks, beside)
            for step in range(begun + 1, config.steps + 1):
                if stop.is_set():
                    break
                measures = bool(config.eval.every) and step % config.eval.every == 0 and step < config.steps
                pauses = measures and config.eval.mode == "pause"
                await training.step(step, stream, pauses=pauses)
                if measures and not stop.is_set():
                    if pauses:
                        await training.measure(step, config.eval.tasks)
                    else:
                        training.measure_beside(step, config.eval.tasks, beside)
                if pauses and not config.deterministic:
                    stream.advance()
                due = config.run.save_every and step % config.run.save_every == 0
                if due or stop.is_set() or step == config.steps:
                    await training.save(step, stream, before)
                if config.deterministic:  # a checkpoint stands between two steps, with nothing begun
                    stream.advance()
            beside.cancel_scope.cancel()  # an evaluation that a stopped run makes when it goes on
        training.time.at("checkpoint")
        await to_thread.run_sync(run.write_model, session.policy.save)
        training.time.at(IDLE)
        after = None if stop.is_set() else await training.measure(config.steps, config.eval.final_tasks)
        summary = training.summary(before, after)
        run.write_summary(summary)
        return summary


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
