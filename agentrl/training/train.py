"""Training: a run is set up or resumed, trained, and summed up."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from agentrl.environments.curriculum import Curriculum
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.sets import build_sets, hold_open
from agentrl.learner.distributed import (
    ProcessGroup,
    explain_lost_processes,
    init_process_group,
    is_restarted,
)
from agentrl.learner.launch_environment import adopt_launcher
from agentrl.learner.optimizers import OptimizerSource
from agentrl.learner.packing_choice import FirstProcessEnded
from agentrl.learner.part_writer import PartCheck, check_parts
from agentrl.models.policy import Policy
from agentrl.resources import TrainingResources, check_engine_processes, load_trainable_policy, open_resources
from agentrl.rollout.demonstration import Demonstration
from agentrl.rollout.engine_protocol import MessageSender
from agentrl.runs import trackers
from agentrl.runs.disk import check_disk_space, prepare_fallback, warn_of_shortage
from agentrl.runs.folder import RunFolder, create_run_folder
from agentrl.runs.metric_catalogue import check_loss_metrics
from agentrl.runtime import threads
from agentrl.runtime.interruption import Interruption
from agentrl.runtime.loop_watchdog import watch_event_loop
from agentrl.runtime.stalls import watch_stalls
from agentrl.settings import registry
from agentrl.settings.catalogue import bind_choices, describe_algorithm
from agentrl.settings.extras import check_extras
from agentrl.settings.loader import dump_toml, flatten
from agentrl.settings.schema import TrainConfig
from agentrl.training import checkpoint
from agentrl.training.algorithm import build_learner, explain_bf16, explain_truncation
from agentrl.training.best_policy import BestPolicy
from agentrl.training.callbacks import Callback, report_waits
from agentrl.training.checkpointer import Checkpointer
from agentrl.training.demonstrations import collect_demonstrations, count_sft_steps
from agentrl.training.evaluation import EvaluationSchedule
from agentrl.training.loop import TrainingLoop
from agentrl.training.process_watch import watch_processes
from agentrl.training.recorder import Recorder
from agentrl.training.schedules import OptimizerPair, compute_lr_scale
from agentrl.training.stages import build_stages
from agentrl.training.step import Ready, Trainer
from agentrl.types import Trajectory


@dataclass(frozen=True)
class TrainingResult:
    """The end of a training: what summary.json holds, and the policy as it is now; None where nobody has it whole."""

    summary: dict[str, Any]
    policy: Policy | None


def run_config(
    config: TrainConfig,
    spec: EnvSpec,
    callback: Callback,
    loaded: Policy | None = None,
    curriculum: Curriculum | None = None,
    optimizers: OptimizerPair = (None, None),
    demonstrations: Sequence[Demonstration] = (),
) -> TrainingResult:
    """Train as a checked configuration says. Further processes of the learner return what the first one does."""
    adopt_launcher()
    check_extras(config)
    describe_algorithm(config)  # loads what the settings name, so that it is refused before a model is loaded
    check_loss_metrics(bind_choices("learner", config.learner)["loss"])
    build_stages(config, spec)  # refuses settings and environments that are none
    compute_lr_scale(config)  # refuses what no schedule can be made of
    trackers.check_trackers(config.run.trackers)
    check_engine_processes(config.engine, deterministic=config.deterministic)
    process_group, result = init_process_group(config.learner.rank_timeout_s), None
    if is_restarted() and config.run.dir is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"resume": True})})
    with process_group.joined():
        if process_group.is_worker:
            with explain_lost_processes():
                return _follow(config, spec, loaded, process_group, optimizers[0])
        try:
            stop = Interruption(callback.on_interrupt)
            with stop.install_handlers():
                chosen = _choose_curriculum(config, curriculum)
                with explain_lost_processes():
                    result = threads.run_sync(
                        _train, config, spec, callback, loaded, chosen, process_group, stop, optimizers, demonstrations
                    )
            return result
        finally:
            if process_group.is_in_step:  # else the others wait in something else, and would take this for that
                with suppress(RuntimeError):  # who is gone hears nothing
                    process_group.broadcast(None)
                    process_group.broadcast(result and result.summary)


def _count_steps(config: TrainConfig, spec: EnvSpec, demonstrations: Sequence[Demonstration]) -> TrainConfig:
    """Return the config with the steps that its epochs come to, the last one rounded up.

    Raises:
        ConfigError: the environment does not count its tasks.
    """
    if config.sft.data:
        return count_sft_steps(config, spec, demonstrations)
    if config.epochs is None:
        return config
    tasks = spec.count("train")
    if not tasks:
        why = "generates tasks without end" if tasks is None else "has no training task"
        raise ConfigError(f"epochs {config.epochs:g}: env {spec.name!r} {why}; give steps instead")
    steps = ceil(config.epochs * tasks / config.rollout.tasks_per_step)
    return config.model_copy(update={"steps": steps, "epochs": None})


def _follow(
    config: TrainConfig,
    spec: EnvSpec,
    loaded: Policy | None,
    process_group: ProcessGroup,
    optimizer: OptimizerSource | None,
) -> TrainingResult:
    """Run a further process of the learner: it only learns, once the first one has come as far as its learner.

    Raises:
        SystemExit: the first process ended by an error, which it tells.
    """
    policy = load_trainable_policy(config, loaded, follows=True)
    while isinstance(message := process_group.receive(), PartCheck):
        check_parts(process_group, message)
    if isinstance(message, Ready):
        keeps_whole = not message.reads_shards
        with suppress(FirstProcessEnded):
            build_learner(config, spec, policy, process_group, optimizer, keeps_whole=keeps_whole).run_worker()
    summary = process_group.receive()
    if summary is None:
        raise SystemExit(1)
    return TrainingResult(summary, policy if config.learner.sharding == "none" else None)


def _choose_curriculum(config: TrainConfig, curriculum: Curriculum | None) -> Curriculum | None:
    """Return the curriculum that the settings name, or the one given; None for none."""
    if config.rollout.curriculum is not None:
        curriculum = registry.import_object("rollout.curriculum", config.rollout.curriculum)
    if curriculum is not None and not callable(curriculum):
        raise ConfigError(f"the curriculum is a function of the outcomes so far, not {curriculum!r:.80}")
    return curriculum


async def _train(
    config: TrainConfig,
    spec: EnvSpec,
    callback: Callback,
    loaded: Policy | None,
    curriculum: Curriculum | None,
    process_group: ProcessGroup,
    stop: Interruption,
    optimizers: OptimizerPair,
    demonstrations: Sequence[Demonstration],
) -> TrainingResult:
    """Set a run up, or resume it; train; evaluate."""
    async with (
        stop.cancel_on_signal(),
        open_resources(config, spec, loaded, learns=True) as resources,
        AsyncExitStack() as stack,
    ):
        config = _count_steps(resources.config, spec, demonstrations)
        resources = replace(resources, config=config)
        stages, sets = build_stages(config, spec), build_sets(config, spec)
        await stack.enter_async_context(
            hold_open([*(stage.spec for stage in stages), *(own.spec for own in sets)], spec)
        )
        settings = dump_toml(config)
        run = _open_run(resources, settings)
        stack.callback(run.close)
        changed = run.write_algorithm(describe_algorithm(resources.config))
        begun, state = _read_checkpoint(run, config, process_group)
        callback.on_train_begin(resources, run)
        logging = stack.enter_context(_open_trackers(settings, config, run, callback, begun))
        recorder = Recorder(resources, run, callback, logging, stop, begun)
        shown = await _demonstrate(resources, recorder, demonstrations)
        trainer = Trainer(resources, recorder, curriculum, process_group, begun, stages, optimizers, shown)
        training = TrainingLoop(
            trainer,
            recorder,
            EvaluationSchedule(resources, sets, recorder, BestPolicy(config, trainer.learner)),
            Checkpointer(resources, recorder),
        )
        notes = explain_truncation(config, resources.engine), explain_bf16(config, resources.policy)
        shared = getattr(resources.engine, "gpu_share", None)
        for note in (*spec.tool_binding.notes, *notes, shared and str(shared)):
            if note:
                recorder.say(note)
        for kind in changed:
            recorder.say(f"the {kind.replace('_', ' ')} is not as it was when the run began: its code was changed")
        if isinstance(resources.engine, MessageSender):
            resources.engine.on_message = partial(recorder.say, about="servers")
        if resources.controller is not None:
            resources.controller.on_message = partial(recorder.say, about="players")
            url = resources.controller.shown_url
            recorder.say(f"players join at {url}: agentrl player {url}")
        stack.enter_context(watch_event_loop(recorder.say))
        await stack.enter_async_context(watch_stalls(training, config.rollout.stall_timeout_s, recorder.say))
        await stack.enter_async_context(report_waits(training, callback))
        await stack.enter_async_context(watch_processes(training, process_group))
        before = await (training.resume(begun, state) if state else training.start())
        needs = replace(training.checkpointer.needs, episodes=_estimate_episodes(run, config, begun))
        if warning := warn_of_shortage(run.folder, needs):
            recorder.say(warning)
        stop.begun = True
        try:
            await training.run_steps(state.get("scheduler"))
        except Exception as error:  # whoever sent the signal may have sent it to our children too
            if not stop.is_set:
                raise
            recorder.say(f"step {training.checkpointer.done + 1} did not end: {error}")
            training.checkpointer.give_up()
        summary = await training.finish(before)
        return TrainingResult(summary, resources.policy if trainer.learner.lent is None else None)


async def _demonstrate(
    resources: TrainingResources, recorder: Recorder, given: Sequence[Demonstration]
) -> Sequence[Trajectory]:
    """Return the demonstrations that the run learns from; none where it rolls out."""
    sft, callback = resources.config.sft, recorder.callback
    if not sft.data:
        return ()
    callback.on_phase_begin("demonstrate", sft.tasks or 0)
    return await collect_demonstrations(resources, recorder.run.folder, given, recorder.say, callback.on_episode_end)


def _open_run(resources: TrainingResources, settings: str) -> RunFolder:
    """Make the run folder, or open it, if there is room for what the run will write."""
    config = resources.config
    fallback = Path(config.run.fallback_dir) if config.run.fallback_dir else None
    if fallback:
        prepare_fallback(Path(config.run.dir or "runs"), fallback)
    check_disk_space(
        Path(config.run.dir or "runs"),
        checkpoint.estimate_disk_needs(resources.policy.model, config),
        config.run.save_every,
        fallback,
    )
    return create_run_folder(
        config.run.dir,
        resources.spec.name,
        settings,
        resume=config.run.resume,
        fallback=config.run.fallback_dir,
    )


def _open_trackers(
    settings: str, config: TrainConfig, run: RunFolder, callback: Callback, begun: int
) -> AbstractContextManager[trackers.Trackers]:
    named = {name: str(value) for name, value in flatten(tomllib.loads(settings)).items()}
    names, project = config.run.trackers, config.run.project
    return trackers.open_trackers(names, project, run.folder, named, callback.on_message, begun)


def _estimate_episodes(run: RunFolder, config: TrainConfig, begun: int) -> int:
    """Estimate the bytes of the episodes of the steps that are left, from those that are there."""
    files = sorted((run.folder / "trajectories").glob("*.parquet"), key=lambda f: f.stat().st_mtime)
    if not files:
        return 0
    size = files[-1].stat().st_size / max(pq.read_metadata(files[-1]).num_rows, 1)
    return int(size * config.rollout.tasks_per_step * config.rollout.group_size * (config.steps - begun))


def _read_checkpoint(run: RunFolder, config: TrainConfig, process_group: ProcessGroup) -> tuple[int, dict[str, Any]]:
    """Return the step to resume after and what its checkpoint holds; 0 and nothing where the run begins.

    Raises:
        UserError: the run has come further than to its first checkpoint, and there is none.
    """
    if not config.run.resume:
        return 0, {}
    in_shards = process_group.world_size > 1 and config.learner.sharding != "none"
    found = checkpoint.load(run.folder / "checkpoints", process_group, by_parts=in_shards)
    if found is None and (steps := run.last_step()) > config.run.save_every:
        raise UserError(
            f"the run in {str(run.folder)!r} has {steps} steps and no checkpoint to resume from; nothing is deleted: "
            "to begin anew, give another --run.dir"
        )
    return found or (0, {})
