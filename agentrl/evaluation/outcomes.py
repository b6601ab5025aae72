"""The outcome of each task in an evaluation, or in one of a training run's own, read from the run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import ConfigError, UserError, describe_missing_run
from agentrl.evaluation.scope import read_scope
from agentrl.evaluation.statistics import Estimate, estimate_mean, is_pass
from agentrl.runs import reader
from agentrl.runs.reader import EpisodeId, Row
from agentrl.settings.loader import flatten, read_toml

COLUMNS = ("task", "sample", "reward", "fault", "messages", "temperature")


class _TaskOutcome(NamedTuple):
    """A task's trials: the rewards of those that were scored, their names, and a digest of the prompt."""

    rewards: tuple[float, ...]
    episodes: tuple[str, ...]  # as ``agentrl explain`` takes them
    prompt_digest: str

    def episode(self, pass_at: float, passed: bool) -> str:
        """Name a trial that passed, or one that did not."""
        own = (e for r, e in zip(self.rewards, self.episodes, strict=True) if is_pass(r, pass_at) is passed)
        return next(own, self.episodes[0])


@dataclass(frozen=True)
class EvaluationOutcomes:
    """The tasks of one evaluation, sampled or greedy."""

    label: str  # the folder, with @STEP where it has several evaluations
    folder: Path
    split: str
    greedy: bool
    settings: Mapping[str, Any]  # by dotted names
    tasks: Mapping[int, _TaskOutcome]  # that have a scored trial
    lost: int  # tasks that have none
    left_out: Sequence[str] = ()  # damaged episodes, each with the reason

    @property
    def mean(self) -> Estimate:
        return estimate_mean([o.rewards for o in self.tasks.values()])

    @property
    def trials(self) -> int:
        return max((len(o.rewards) for o in self.tasks.values()), default=0)


def read_outcomes(name: str, *, greedy: bool = False, split: str | None = None) -> EvaluationOutcomes:
    """Read an evaluation's folder; of a training run's evaluations the last, or the one that ``RUN@STEP`` names.

    Raises:
        UserError: it is no run folder, or holds no such evaluation.
    """
    folder, step = locate_evaluation(name)
    scope = read_scope(folder)
    if scope is not None and step is not None:
        raise ConfigError(f"{name!r}: {str(folder)!r} is one evaluation; @STEP is for a training run's")
    split = split or (scope.split if scope else "test")
    files = reader.list_files(folder, [split])
    if scope is None:
        step = files[-1][1] if step is None else step
        files = [f for f in files if f[1] == step]
        if not files:
            steps = ", ".join(str(s) for s in list_evaluated_steps(folder, split))
            raise UserError(f"{str(folder)!r} was not evaluated at step {step}; it was at {steps}")
    return _gather(f"{folder}@{step}" if scope is None else str(folder), folder, split, greedy, files)


def locate_evaluation(name: str) -> tuple[Path, int | None]:
    """Split ``RUN`` or ``RUN@STEP``. Raises UserError: there is no such run folder."""
    path, at, step = name.rpartition("@")
    folder, number = (
        (Path(name), None) if Path(name).is_dir() or not at or not step.isdecimal() else (Path(path), int(step))
    )
    if not (folder / "config.toml").is_file():
        raise UserError(describe_missing_run(folder))
    return folder, number


def list_evaluated_steps(folder: Path, split: str = "test") -> list[int]:
    """List the steps at which a training run was evaluated."""
    return [step for _, step, _ in reader.list_files(folder, [split])]


def _gather(
    label: str, folder: Path, split: str, greedy: bool, files: Sequence[tuple[str, int, Path]]
) -> EvaluationOutcomes:
    rewards: dict[int, list[float]] = {}
    episodes: dict[int, list[str]] = {}
    digests: dict[int, str] = {}
    left_out: list[str] = []
    for place, row in _rows(files, left_out):
        if _is_greedy(row) is greedy:
            task = row["task"]
            if task not in digests:
                if (digest := _digest(row["messages"])) is None:
                    left_out.append(f"{place}: its messages cannot be read")
                    continue
                digests[task] = digest
            own = rewards.setdefault(task, [])
            if row["reward"] is not None:
                own.append(row["reward"])
                episodes.setdefault(task, []).append(str(place))
    if not rewards:
        raise UserError(f"{label} has no {'greedy' if greedy else 'sampled'} trials of split {split}")
    tasks = {t: _TaskOutcome(tuple(r), tuple(episodes[t]), digests[t]) for t, r in rewards.items() if r}
    settings = flatten(read_toml(folder / "config.toml")[1])
    return EvaluationOutcomes(label, folder, split, greedy, settings, tasks, len(rewards) - len(tasks), left_out)


def _rows(files: Sequence[tuple[str, int, Path]], left_out: list[str]) -> Iterator[tuple[EpisodeId, Row]]:
    for split, step, path in files:
        damaged: dict[int, str] = {}
        for number, row in reader.read_rows(path, COLUMNS, damaged):
            yield EpisodeId(split, step, number), row
        left_out += [f"{EpisodeId(split, step, number)}: {why}" for number, why in damaged.items()]


def _is_greedy(row: Row) -> bool:
    """Return True for a greedy trial, by its temperature; older runs have none, and two members: sampled, greedy."""
    temperature = row.get("temperature")
    return bool(row["sample"] == 1 if temperature is None else temperature == 0.0)


def _digest(messages: str) -> str | None:
    """Hash the messages before the first turn, but for the system's; None if they cannot be read."""
    prompt = []
    try:
        conversation = reader.parse_messages(messages)
    except ValueError:
        return None
    for message in conversation:
        if message["role"] == "assistant":
            break
        if message["role"] != "system":
            prompt.append(message)
    return hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=8).hexdigest()
