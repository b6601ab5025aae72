"""The evaluation of a policy on tasks: trials of each, sampled as in training, and a greedy one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.env import Env
from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import task_integer
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.folder import EvaluationFolder, open_evaluation
from agentrl.evaluation.measurement import Evaluation, Measurement, Trials
from agentrl.evaluation.scope import (
    EvaluationScope,
    build_scope,
    check_settings_used,
    check_split,
    is_setting_used,
    read_scope,
)
from agentrl.health.tool_use import ToolUse
from agentrl.models.policy import Policy, compute_checksum, resolve_settings
from agentrl.renderer.json_lines import ChatRenderer
from agentrl.rollout.rollout import EpisodeCallback, Rollout
from agentrl.runtime import threads
from agentrl.runtime.threads import open_task_group
from agentrl.settings.loader import build_config, flatten
from agentrl.settings.names.adoption import take_env_names
from agentrl.settings.schema import TrainConfig
from agentrl.settings.signature import convert_value
from agentrl.settings.template import HISTORY
from agentrl.types import Group, Trajectory

KEY_ENV = "OPENAI_API_KEY"
OnGroupEnd = Callable[[Group], Awaitable[None]]
Name = Annotated[str, Field(min_length=1)] | None


async def _roll_out_tasks(
    rollout: Rollout,
    tasks: Sequence[int],
    trials: Trials,
    ended: OnGroupEnd,
    *,
    seed: int = 0,
    on_episode: EpisodeCallback | None = None,
) -> None:
    """Roll out each task's trials, the sampled ones and then the greedy one, as one group.

    The randomness of a trial depends on the seed, the task and the trial's number alone. Tasks begin in order, as many
    at once as the engine has room for.

    Args:
        ended: awaited with each group as it ends.
    """
    sampled = replace(rollout, oversample=0, branching=None)
    greedy = replace(sampled, sampling=rollout.sampling.greedy())
    sampled.concurrency = greedy.concurrency = rollout.concurrency

    async def one(task: int) -> None:
        groups: dict[bool, Group] = {}

        async def part(at: Rollout, size: int) -> None:
            groups[at is greedy] = await at.group(task, size, seed=seed, on_episode=on_episode)

        async with open_task_group() as parts:
            if trials.sampled:
                parts.start_soon(part, sampled, trials.sampled)
            if trials.greedy:
                parts.start_soon(part, greedy, 1)
        members = [t for _, group in sorted(groups.items()) for t in group]
        await ended(Group(task, tuple(members)))

    async with open_task_group() as players:
        for task in tasks:
            async with rollout.concurrency.slot():  # those that began before are running
                pass
            players.start_soon(one, task)


async def evaluate_tasks(
    rollout: Rollout, tasks: Sequence[int], trials: Trials, *, seed: int = 0, on_episode: EpisodeCallback | None = None
) -> list[Group]:
    """Roll out each task's trials, and return the groups in the order of the tasks."""
    groups: dict[int, Group] = {}

    async def ended(group: Group) -> None:
        groups[group.task] = group

    await _roll_out_tasks(rollout, tasks, trials, ended, seed=seed, on_episode=on_episode)
    return [groups[task] for task in tasks]


def list_tasks(spec: EnvSpec, limit: int, split: str = "test", first: int = 0) -> list[int]:
    """Return tasks of a split, from index ``first`` on: at most ``limit``.

    Where the environment generates tasks, those of a split but ``train`` are integers on which no run trains.
    """
    count = spec.count(split)
    if count is not None and first >= count:
        raise UserError(f"split {split!r} of env {spec.name!r} has {count} tasks; there is none from {first} on")
    if count is None:
        task_integer(split, first + limit - 1)  # refuses more than there are before they are listed
        return [task_integer(split, index) for index in range(first, first + limit)]
    return list(range(first, min(first + limit, count)))


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy to evaluate: its rollouts by split, an identity to recognize it by, and notes about it."""

    rollout: Callable[[str], Rollout]
    identity: str
    notes: Sequence[str] = ()  # may grow during the evaluation


OpenPolicy = AbstractAsyncContextManager[EvaluatedPolicy]


@asynccontextmanager
async def _open_model(
    config: TrainConfig, spec: EnvSpec, loaded: Policy | None = None
) -> AsyncIterator[EvaluatedPolicy]:
    """Open a model that runs here."""
    from agentrl.resources import open_resources  # brings torch

    async with open_resources(config, spec, loaded) as session:
        yield EvaluatedPolicy(session.rollout, compute_checksum(session.policy.model), spec.tool_binding.notes)


@asynccontextmanager
async def _open_endpoint(
    config: TrainConfig, spec: EnvSpec, url: str, model: str | None = None, key_env: str = KEY_ENV
) -> AsyncIterator[EvaluatedPolicy]:
    """Open a server's model by OpenAI's chat completions; ``None``: the only one it has. It needs no torch."""
    from agentrl.engines.openai_endpoint import EndpointEngine

    if config.template.get(HISTORY) == "as_sampled":
        raise ConfigError(
            "template.history as_sampled: a server renders each conversation anew, as its template has it; leave the "
            "setting out, or evaluate the model here with --model"
        )
    if config.rollout.context != "whole":  # the conversation that a server is sent has no tokens to count
        raise ConfigError(
            f"rollout.context {config.rollout.context}: a server's contexts cannot be folded, as their tokens are not "
            "known; leave the setting out, or evaluate the model here with --model"
        )
    engine = EndpointEngine(url, model, key_env=key_env, capacity=config.engine.max_num_seqs)
    async with spec.open(), engine:
        engine.notes[:0] = spec.tool_binding.notes
        rollout_of = partial(Rollout.from_config, config.rollout, spec, engine, ChatRenderer(config.template_words))
        yield EvaluatedPolicy(rollout_of, str(engine.model), engine.notes)


def open_policy(
    config: TrainConfig, spec: EnvSpec, scope: EvaluationScope, loaded: Policy | None = None, key_env: str = KEY_ENV
) -> OpenPolicy:
    """Open the policy to evaluate: an endpoint's model, or one that runs here."""
    if not scope.endpoint:
        return _open_model(config, spec, loaded)
    return _open_endpoint(
        config, spec, scope.endpoint, None if config.model == scope.endpoint else config.model, key_env
    )


def pin_model(config: TrainConfig, scope: EvaluationScope, named: bool) -> TrainConfig:
    """Name the model so that it stays the same one: not by ``runs/last``, nor by the default of a training."""
    if scope.endpoint and not named:
        return config.model_copy(update={"model": scope.endpoint})
    path = Path(config.model)
    if not scope.endpoint and path.is_symlink():
        return config.model_copy(update={"model": str(path.parent / path.readlink())})
    return config


class EvaluationListener:
    """A listener to an evaluation that does nothing; the command line's progress bar is one that does."""

    def started(self, folder: EvaluationFolder, episodes: int, missing: int) -> None: ...
    def ended(self, trajectory: Trajectory) -> None: ...
    def said(self, text: str) -> None: ...


async def run_evaluation(
    config: TrainConfig,
    spec: EnvSpec,
    scope: EvaluationScope,
    playing: OpenPolicy,
    *,
    out: str | None = None,
    retry_faults: bool = False,
    listener: EvaluationListener | None = None,
) -> tuple[Evaluation, EvaluationFolder]:
    """Roll out the episodes that the folder lacks, write them chunk by chunk, and evaluate all of them."""
    listener, trials = listener or EvaluationListener(), scope.trials
    if retry_faults and (out is None or read_scope(Path(out)) is None):
        raise ConfigError("retry_faults does nothing in a new folder: name one that holds an evaluation with faults")
    async with spec.open():  # `Env.count` may read what is shared
        tasks = list_tasks(spec, scope.tasks, scope.split, scope.first)
        folder = open_evaluation(out, config, scope._replace(tasks=len(tasks)), tasks, partial(is_setting_used, scope))
        try:
            missing = folder.missing(retry_faults=retry_faults)
            listener.started(folder, len(tasks) * trials.each, len(missing) * trials.each)
            if missing:
                await _roll_out_missing(folder, missing, scope, playing, config.seed, listener)
            return folder.finish(), folder
        finally:
            folder.close()


async def _roll_out_missing(
    folder: EvaluationFolder,
    missing: Sequence[int],
    scope: EvaluationScope,
    playing: OpenPolicy,
    seed: int,
    listener: EvaluationListener,
) -> None:
    async with playing as player:
        folder.check_policy(player.identity)
        rollout = player.rollout(scope.split)
        use = ToolUse()

        def on_episode(episode: Trajectory) -> None:
            use.add(episode)
            listener.ended(episode)

        await _roll_out_tasks(rollout, missing, scope.trials, folder.add, seed=seed, on_episode=on_episode)
        folder.run.write_tools(rollout.offered_tools)
        past_tools = use.explain(folder.config.model) if any(rollout.offered_tools.lists) else None
        for note in [*player.notes, *([past_tools] if past_tools else [])]:
            folder.run.log_message(0, note)
            listener.said(note)


def evaluate(
    env: str | type[Env],
    model: Any = None,
    *,
    tokenizer: Any = None,
    tasks: int = 256,
    trials: int = 1,
    first: int = 0,
    split: str = "test",
    greedy: bool = False,
    pass_at: float = 1.0,
    endpoint: str | None = None,
    key_env: str = KEY_ENV,
    out: str | Path | None = None,
    retry_faults: bool = False,
    **settings: Any,
) -> Measurement:
    """Evaluate a model on ``tasks`` tasks of an environment, and keep every episode in a folder.

    Args:
        env: a registered name, ``module:Class``, or an ``Env`` subclass.
        model: a name or folder, as ``--model`` takes it; nano by default; or a loaded causal LM. With an endpoint, a
            name that it knows.
        tokenizer: of a loaded model; found by its name by default.
        trials: samples of each task.
        greedy: each task once, greedily, instead.
        pass_at: the reward from which on a trial passes, for pass@k and pass^k.
        endpoint: a server that speaks OpenAI's chat completions; its key is in the environment variable ``key_env``.
        out: the folder, ``evals/DATE-TIME-ENV`` by default; ``Measurement.folder`` names it. One that was killed is
            resumed.
        retry_faults: roll out tasks again if an episode of them ended in a fault, with those beside them.
        settings: sections and keys as in a config file: ``rollout={"max_tokens": 64}``, ``env_args={...}``.
    """
    named_otherwise, settings = take_env_names(settings)
    own = convert_value("env_args", settings.pop("env_args", {}), dict[str, Any])
    spec = EnvSpec(env, **named_otherwise, **own)
    spec.check_run_settings(settings)
    greedy, retry_faults = (
        convert_value(name, value, bool) for name, value in (("greedy", greedy), ("retry_faults", retry_faults))
    )
    trials = convert_value("trials", trials, int)
    folder = convert_value("out", str(out) if isinstance(out, Path) else out, Name)
    endpoint = convert_value("endpoint", endpoint, Name)
    check_split(spec, split)
    _check_used(settings, greedy, trials, endpoint, key_env)
    scope = build_scope(
        split=split,
        first=first,
        tasks=tasks,
        sampled=0 if greedy else max(trials, 0),
        greedy=greedy,
        endpoint=endpoint or "",
    )
    check_settings_used(list(flatten(settings)), scope)
    settings["env"] = {"name": spec.name, **spec.settings}
    settings["eval"] = {"trials": trials, "pass_at": pass_at}
    if endpoint is None:
        config, loaded = resolve_settings(settings, model or "nano", tokenizer)
    else:
        config, loaded = build_config(("arguments", {**settings, **({"model": model} if model else {})})), None
    config = pin_model(config, scope, model is not None)
    playing = open_policy(config, spec.with_tools(config.tools, config.tool), scope, loaded, key_env)

    async def go() -> Measurement:
        evaluation, stored = await run_evaluation(config, spec, scope, playing, out=folder, retry_faults=retry_faults)
        return replace(evaluation.first, folder=str(stored.path))

    return threads.run_sync(go)


def _check_used(settings: Mapping[str, Any], greedy: bool, trials: int, endpoint: str | None, key_env: str) -> None:
    """Refuse an argument that would do nothing, or is given twice, by a ConfigError."""
    if "eval" in settings:
        raise ConfigError("eval: an evaluation takes trials and pass_at as arguments of their own")
    if greedy and trials != 1:
        raise ConfigError(f"trials {trials} does nothing with greedy: each task is rolled out once, the same each time")
    check_key(key_env != KEY_ENV, endpoint)


def check_key(given: bool, endpoint: str | None, option: str = "key_env") -> None:
    """Refuse a key without an endpoint, by a ConfigError."""
    if given and not endpoint:
        raise ConfigError(f"{option} does nothing without an endpoint: it names the variable that holds its key")
