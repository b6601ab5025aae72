"""Measuring a policy on tasks: each sampled as in training, as often as is asked, and once greedily."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl import aside
from agentrl.aside import together
from agentrl.config import TrainConfig
from agentrl.env import Env, EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation_folder import EvaluationFolder, open_evaluation
from agentrl.evaluation_scope import Scope, check_heeded, check_split, checked_scope, heeds
from agentrl.layers import build, flatten
from agentrl.measurement import Evaluation, Measurement, Trials
from agentrl.policy import Policy, checksum, resolved
from agentrl.renderer.chat import ChatRenderer
from agentrl.rollout import Rollout, Watch
from agentrl.signature import checked_argument
from agentrl.tasks import task_integer
from agentrl.types import Group, Trajectory

KEY_ENV = "OPENAI_API_KEY"
Ended = Callable[[Group], Awaitable[None]]
Name = Annotated[str, Field(min_length=1)] | None


async def play(
    rollout: Rollout,
    tasks: Sequence[int],
    trials: Trials,
    ended: Ended,
    *,
    seed: int = 0,
    watch: Watch | None = None,
) -> None:
    """Play each task's trials: the sampled ones, then the greedy one, as one group.

    The randomness of a trial depends on the seed, the task and the trial's number alone. Tasks begin in order, as many
    at once as the engine has room for.

    Args:
        ended: awaited with each group as it ends.
    """
    sampled = replace(rollout, spare=0, branching=None)
    greedy = replace(sampled, sampling=replace(rollout.sampling, temperature=0.0))
    sampled.admission = greedy.admission = rollout.admission

    async def one(task: int) -> None:
        found: dict[bool, Group] = {}

        async def part(at: Rollout, size: int) -> None:
            found[at is greedy] = await at.group(task, size, seed=seed, watch=watch)

        async with together() as parts:
            if trials.sampled:
                parts.start_soon(part, sampled, trials.sampled)
            if trials.greedy:
                parts.start_soon(part, greedy, 1)
        members = [t for _, group in sorted(found.items()) for t in group]
        await ended(Group(task, tuple(members)))

    async with together() as players:
        for task in tasks:
            async with rollout.admission.place():  # whoever began before is in play
                pass
            players.start_soon(one, task)


async def measure(
    rollout: Rollout, tasks: Sequence[int], trials: Trials, *, seed: int = 0, watch: Watch | None = None
) -> list[Group]:
    """Play each task's trials; return the groups in the order of the tasks."""
    groups: dict[int, Group] = {}

    async def ended(group: Group) -> None:
        groups[group.task] = group

    await play(rollout, tasks, trials, ended, seed=seed, watch=watch)
    return [groups[task] for task in tasks]


def held_out(spec: EnvSpec, wanted: int, split: str = "test", first: int = 0) -> list[int]:
    """Return tasks of a split, from index ``first`` on: ``wanted`` of them, or as many as there are.

    Where the environment generates tasks, those of a split but ``train`` are integers on which no run trains.
    """
    count = spec.make().count(split)
    if count is not None and first >= count:
        raise UserError(f"split {split!r} of env {spec.name!r} has {count} tasks; there is none from {first} on")
    if count is None:
        task_integer(split, first + wanted - 1)  # refuses more than there are before they are listed
        return [task_integer(split, index) for index in range(first, first + wanted)]
    return list(range(first, min(first + wanted, count)))


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that plays episodes: rollouts by split, by what it is known again, and what there is to say of it."""

    rollout: Callable[[str], Rollout]
    identity: str
    notes: Sequence[str] = ()  # may grow as it plays


OpenPolicy = AbstractAsyncContextManager[EvaluatedPolicy]


@asynccontextmanager
async def with_model(
    config: TrainConfig, spec: EnvSpec, loaded: Policy | None = None
) -> AsyncIterator[EvaluatedPolicy]:
    """Play with a model of our own."""
    from agentrl.session import opened  # brings torch

    async with opened(config, spec, loaded) as session:
        yield EvaluatedPolicy(session.rollout, checksum(session.policy.model))


@asynccontextmanager
async def at_endpoint(
    config: TrainConfig, spec: EnvSpec, url: str, model: str | None = None, key_env: str = KEY_ENV
) -> AsyncIterator[EvaluatedPolicy]:
    """Play with a server's model, by OpenAI's chat completions; ``None``: the only one it has. No torch."""
    from agentrl.engines.endpoint import EndpointEngine

    engine = EndpointEngine(url, model, key_env=key_env, capacity=config.engine.capacity)
    async with spec.open(), engine:
        rollout_of = partial(Rollout.configured, config.rollout, spec, engine, ChatRenderer())
        yield EvaluatedPolicy(rollout_of, str(engine.model), engine.notes)


def choose_policy(
    config: TrainConfig, spec: EnvSpec, scope: Scope, loaded: Policy | None = None, key_env: str = KEY_ENV
) -> OpenPolicy:
    """Choose the policy that plays: an endpoint's model, or one of our own."""
    if not scope.endpoint:
        return with_model(config, spec, loaded)
    return at_endpoint(config, spec, scope.endpoint, None if config.model == scope.endpoint else config.model, key_env)


def pin_model(config: TrainConfig, scope: Scope, named: bool) -> TrainConfig:
    """Name the model so that it is the same one later: not by ``runs/last``, nor by the default of a training."""
    if scope.endpoint and not named:
        return config.model_copy(update={"model": scope.endpoint})
    path = Path(config.model)
    if not scope.endpoint and path.is_symlink():
        return config.model_copy(update={"model": str(path.parent / path.readlink())})
    return config


class Listener:
    """A listener to an evaluation that does nothing; the command line's progress bar is one that does."""

    def started(self, folder: EvaluationFolder, episodes: int, missing: int) -> None: ...
    def ended(self, trajectory: Trajectory) -> None: ...
    def said(self, text: str) -> None: ...


async def run_evaluation(
    config: TrainConfig,
    spec: EnvSpec,
    scope: Scope,
    playing: OpenPolicy,
    *,
    out: str | None = None,
    retry_faults: bool = False,
    listener: Listener | None = None,
) -> tuple[Evaluation, EvaluationFolder]:
    """Play what the folder does not hold yet, write it there chunk by chunk, and measure what is there then."""
    listener, trials = listener or Listener(), scope.trials
    tasks = held_out(spec, scope.tasks, scope.split, scope.first)
    folder = open_evaluation(out, config, scope._replace(tasks=len(tasks)), tasks, partial(heeds, scope))
    try:
        missing = folder.missing(retry_faults=retry_faults)
        listener.started(folder, len(tasks) * trials.each, len(missing) * trials.each)
        if missing:
            async with playing as player:
                folder.check_policy(player.identity)
                rollout = player.rollout(scope.split)
                await play(rollout, missing, trials, folder.add, seed=config.seed, watch=listener.ended)
                folder.run.write_tools(rollout.offered)
                for note in player.notes:
                    folder.run.tell(0, note)
                    listener.said(note)
        return folder.finish(), folder
    finally:
        folder.close()


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
    """Measure a model on ``tasks`` tasks of an environment, and keep every episode in a folder.

    Args:
        env: a registered name, ``module:Class``, or an ``Env`` subclass.
        model: a name or folder, as ``--model`` takes it; nano by default; or a loaded causal LM. With an endpoint, a
            name that it knows.
        tokenizer: of a loaded model; found by its name by default.
        trials: how often each task is sampled.
        greedy: each task once, greedily, instead.
        pass_at: the reward from which on a trial passes, for pass@k and pass^k.
        endpoint: a server that speaks OpenAI's chat completions; its key is in the environment variable ``key_env``.
        out: the folder, ``evals/DATE-TIME-ENV`` by default; ``Measurement.folder`` names it. One that was killed goes
            on from what is there.
        retry_faults: tasks with an episode that ended in a fault are played again, with those beside them.
        settings: sections and keys as in a config file: ``rollout={"max_turn_tokens": 64}``, ``env_settings={...}``.
    """
    spec = EnvSpec(env, **checked_argument("env_settings", settings.pop("env_settings", {}), dict[str, Any]))
    greedy, retry_faults = (
        checked_argument(name, value, bool) for name, value in (("greedy", greedy), ("retry_faults", retry_faults))
    )
    trials = checked_argument("trials", trials, int)
    folder = checked_argument("out", str(out) if isinstance(out, Path) else out, Name)
    endpoint = checked_argument("endpoint", endpoint, Name)
    check_split(split)
    _check_used(settings, greedy, trials, endpoint, key_env)
    scope = checked_scope(
        split=split,
        first=first,
        tasks=tasks,
        sampled=0 if greedy else max(trials, 0),
        greedy=greedy,
        endpoint=endpoint or "",
    )
    check_heeded(list(flatten(settings)), scope)
    settings["env"] = {"name": spec.name, **spec.settings}
    settings["eval"] = {"trials": trials, "pass_at": pass_at}
    if endpoint is None:
        config, loaded = resolved(settings, model or "nano", tokenizer)
    else:
        config, loaded = build(("arguments", {**settings, **({"model": model} if model else {})})), None
    config = pin_model(config, scope, model is not None)
    playing = choose_policy(config, spec.equipped(config.tools, config.tool), scope, loaded, key_env)

    async def go() -> Measurement:
        found, kept = await run_evaluation(config, spec, scope, playing, out=folder, retry_faults=retry_faults)
        return replace(found.first, folder=str(kept.path))

    return aside.run(go)


def _check_used(settings: Mapping[str, Any], greedy: bool, trials: int, endpoint: str | None, key_env: str) -> None:
    """Raises ConfigError where an argument would do nothing, or is given twice."""
    if "eval" in settings:
        raise ConfigError("eval: an evaluation takes trials and pass_at as arguments of their own")
    if greedy and trials != 1:
        raise ConfigError(f"trials {trials} does nothing with greedy: each task is played once, the same each time")
    check_key(key_env, endpoint)


def check_key(key_env: str, endpoint: str | None, option: str = "key_env") -> None:
    """Raises ConfigError where a key is named and no endpoint."""
    if key_env != KEY_ENV and not endpoint:
        raise ConfigError(f"{option} does nothing without an endpoint: it names the variable that holds its key")
