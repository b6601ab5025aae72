"""The batches of supervised fine-tuning: demonstrations, in place of groups that are rolled out.

They stand in the run folder as ``demonstrations.jsonl``, so that a run resumes on what it began with. Their order is
fixed by the seed: an epoch is a permutation of them all, as with a dataset's tasks, and step k takes what comes k-th.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import TaskSampler
from agentrl.errors import ConfigError, UserError
from agentrl.renderer.template import TemplateRenderer
from agentrl.resources import TrainingResources
from agentrl.rollout.demonstration import Demonstration
from agentrl.rollout.expert import play_expert
from agentrl.rollout.folding import is_summarized
from agentrl.rollout.scheduler import SchedulerState, StepBatch
from agentrl.runs.atomic import replace_atomically
from agentrl.settings.schema import RolloutConfig, TrainConfig
from agentrl.settings.sft import BY_DEFAULT, EXPERT
from agentrl.types import Group, JsonSchema, Message, Trajectory

FILE = "demonstrations.jsonl"


class BatchSource(Protocol):
    """The source of a run's batches: a `RolloutScheduler`, or demonstrations."""

    async def next_batch(self) -> StepBatch: ...
    def advance(self) -> None: ...
    async def drain(self) -> None: ...
    def state(self) -> SchedulerState: ...


@dataclass
class DemonstrationSource:
    """Batches of rendered demonstrations, each a group of its own; the state is the number of the step.

    Args:
        updates: steps so far.
    """

    episodes: Sequence[Trajectory]
    batch_size: int
    seed: int
    updates: int = 0

    async def next_batch(self) -> StepBatch:
        """Return the batch of the next step; the last one of an epoch goes on with the next epoch."""
        order = TaskSampler(len(self.episodes), self.seed, self.updates * self.batch_size)
        groups = [Group((t := self.episodes[i]).task, (t,)) for i in order.next_tasks(self.batch_size)]
        return StepBatch(groups, [], [0] * len(groups))

    def advance(self) -> None:
        """Count an update of the policy."""
        self.updates += 1

    async def drain(self) -> None:
        """Return at once: nothing is rolled out."""

    def state(self) -> SchedulerState:
        return SchedulerState(self.updates, (), {}, (), 0)


@asynccontextmanager
async def open_demonstrations(
    episodes: Sequence[Trajectory], config: TrainConfig, step: int
) -> AsyncIterator[DemonstrationSource]:
    """Open the source of batches after ``step`` updates."""
    yield DemonstrationSource(episodes, min(config.sft.batch_size, len(episodes)), config.seed, step)


def count_sft_steps(config: TrainConfig, spec: EnvSpec, given: Sequence[Demonstration]) -> TrainConfig:
    """Return the config with the steps and the expert's tasks that the settings come to.

    Raises:
        ConfigError: the expert has fewer tasks than it is asked to play.
    """
    sft, own = config.sft, config.sft.tasks or 0
    if EXPERT in sft.data:
        count = spec.count("train")
        if own and count is not None and own > count:
            raise ConfigError(f"sft.tasks {own}: env {spec.name!r} has {count} training tasks")
        if not own:
            own = BY_DEFAULT if config.epochs is not None else config.steps * sft.batch_size
            own = own if count is None else min(own, count)
    steps = config.steps
    if config.epochs is not None:
        steps = max(1, ceil(config.epochs * (own + len(given)) / max(1, min(sft.batch_size, own + len(given)))))
    return config.model_copy(
        update={"steps": steps, "epochs": None, "sft": sft.model_copy(update={"tasks": own or None})}
    )


async def collect_demonstrations(
    resources: TrainingResources,
    folder: Path,
    given: Sequence[Demonstration],
    say: Callable[[str], None],
    on_episode: Callable[[Trajectory], None],
) -> list[Trajectory]:
    """Return the demonstrations of a run in the model's tokens, and keep them in its folder.

    Those that earned too little, that a fault of the world's ended, or that the model could not say, are left out; it
    is told how many, and why.

    Args:
        folder: the run's; a run that resumes has them there.
        given: those of files and run folders.
        on_episode: called with each episode that the expert has played.

    Raises:
        UserError: none is left.
    """
    path = folder / FILE
    if resources.config.run.resume and path.is_file():
        kept = [Demonstration.parse(row) for row in _read_rows(path)]
    else:
        kept = [*given]
        if EXPERT in resources.config.sft.data:
            kept += await _play(resources, on_episode)
        kept = _drop_bad(kept, _find_least(resources), say)
        with replace_atomically(path) as partial_path:
            partial_path.write_text("".join(d.to_line() + "\n" for d in kept), encoding="utf-8")
    return _render(kept, resources, say)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    from agentrl.settings.documents import parse_json

    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def _play(resources: TrainingResources, on_episode: Callable[[Trajectory], None]) -> list[Demonstration]:
    config, spec = resources.config, resources.spec
    order = TaskSampler(spec.count("train"), config.seed)
    played = await play_expert(
        spec,
        order.next_tasks(config.sft.tasks or BY_DEFAULT),
        config.rollout,
        words=config.template_words,
        measure=partial(_count_tokens, resources.renderer),
        on_episode=on_episode,
    )
    sound = [one for one in played if one.trajectory.fault is None]
    return [demonstration for one in sound for demonstration in Demonstration.list_of_expert(one)]


def _count_tokens(renderer: TemplateRenderer, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> int:
    return len(renderer.render_ids(messages, tools=tools))


def _find_least(resources: TrainingResources) -> float:
    least = resources.config.sft.min_reward
    return resources.spec.sample().best_reward if least is None else least


def _drop_bad(demonstrations: Sequence[Demonstration], least: float, say: Callable[[str], None]) -> list[Demonstration]:
    """Leave out those that earned less than ``least``; one whose reward nobody knows stays."""
    kept = [d for d in demonstrations if d.reward is None or d.reward >= least]
    if bad := len(demonstrations) - len(kept):
        say(
            f"{bad} of {len(demonstrations)} demonstrations earned less than {least:g} and are left out: sft.min_reward"
        )
    return kept


def _render(
    demonstrations: Sequence[Demonstration], resources: TrainingResources, say: Callable[[str], None]
) -> list[Trajectory]:
    """Render demonstrations; say how many the model could not say, and why."""
    episodes: list[Trajectory] = []
    why: Counter[str] = Counter()
    for number, one in enumerate(demonstrations, 1):
        try:
            episodes.append(one.to_trajectory(resources.renderer, resources.engine.max_context))
        except UserError as error:
            why[f"number {number}: {error}" if not why else "more"] += 1
    first = next(iter(why), "")
    if not episodes:
        what = (
            f"none of {len(demonstrations)} demonstrations can be learned from"
            if demonstrations
            else ("there is no demonstration to learn from")
        )
        raise UserError(f"{what}{f'; {first}' if first else ': --sft.data, --sft.min_reward, --sft.where'}")
    if why:
        say(f"{why.total()} of {len(demonstrations)} demonstrations are left out, such as {first}")
    turns, tokens = sum(t.turns for t in episodes), sum(t.sampled_tokens for t in episodes)
    say(f"{len(episodes)} demonstrations, {turns} turns, {tokens:,} tokens to learn")
    for note in (_explain_rest(len(episodes), resources.config), *_explain_lengths(episodes, resources.config.rollout)):
        if note:
            say(note)
    return episodes


def _explain_rest(count: int, config: TrainConfig) -> str:
    """Say how many demonstrations no step takes; empty where each is taken, as where contexts are whole.

    An expert's episode is as many demonstrations as it has contexts, which nobody knows before it has played.
    """
    size = min(config.sft.batch_size, count)
    if config.steps * size >= count:
        return ""
    steps = f"{config.steps} step{'s' * (config.steps != 1)} of {size}"
    return f"{steps} learn {config.steps * size} of them; one pass is --steps {ceil(count / size)}"


def _explain_lengths(episodes: Sequence[Trajectory], rollout: RolloutConfig) -> list[str]:
    """Say how many have turns, or a summary, longer than those that are sampled; none where all are short enough."""
    turns, summaries = list[int](), list[int]()
    for t in episodes:
        lengths = [len(s.token_ids) for s in t.segments if s.author == "model"]
        if rollout.context != "whole" and is_summarized(t.messages):
            summaries.append(lengths.pop())
        turns.append(max(lengths, default=0))
    return [
        f"{longer} of them have {what} of up to {max(lengths)} tokens, and one that is sampled ends after {limit}: "
        f"--rollout.{name} {max(lengths)}"
        for what, lengths, limit, name in (
            ("turns", turns, rollout.max_tokens, "max_tokens"),
            ("summaries", summaries, rollout.summary_tokens, "summary_tokens"),
        )
        if (longer := sum(n > limit for n in lengths))
    ]
