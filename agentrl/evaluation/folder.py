"""The folder of an evaluation: a run folder without updates, written chunk by chunk.

config.toml          the settings
evaluation.toml      the scope: tasks, trials, split, an endpoint, the identity of the policy
trajectories/        a Parquet file a chunk of tasks: test-000003.parquet has chunk 3, a row an episode
metrics.jsonl        a line a chunk: the mean over all chunks up to it; the last line has everything
summary.json         the result, once all chunks are there

A chunk is written when its last episode has ended, whole or not at all. The result is read from the chunks, in their
order: an evaluation that was killed and resumed has the same result as one that was not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from anyio import to_thread

from agentrl.credit import record_held_out
from agentrl.errors import UserError
from agentrl.evaluation.measurement import Evaluation, Trials, list_scored_rewards
from agentrl.evaluation.scope import EvaluationScope, read_scope, write_scope
from agentrl.evaluation.statistics import Estimate, estimate_mean
from agentrl.runs import reader
from agentrl.runs.atomic import raise_write_errors
from agentrl.runs.folder import RunFolder, name_run_folder, open_run_folder, read_run_settings
from agentrl.settings.loader import dump_toml, flatten
from agentrl.settings.schema import TrainConfig
from agentrl.types import Group, Trajectory

CHUNK = 16  # tasks in a file


@dataclass
class EvaluationFolder:
    """The folder of an evaluation, open for writing by this process alone. A failed write raises UserError."""

    run: RunFolder
    config: TrainConfig
    scope: EvaluationScope
    tasks: list[int]
    _begun: dict[int, dict[int, Group]] = field(default_factory=dict)  # groups of chunks that are not whole yet
    _whole: dict[int, list[Group]] = field(default_factory=dict)  # chunks that are, without tokens
    _logged: list[Group] = field(default_factory=list)  # those in metrics.jsonl

    @property
    def path(self) -> Path:
        return self.run.folder

    @property
    def complete(self) -> bool:
        return (self.path / "summary.json").is_file()

    def missing(self, *, retry_faults: bool = False) -> list[int]:
        """Read the chunks that are there, and list the tasks of all others.

        Args:
            retry_faults: chunks with an episode that ended in a fault count as missing. Chunks without any scored
                episode do in any case, until the evaluation is complete.
        """
        for chunk, tasks in enumerate(self._chunks):
            path = self._file(chunk)
            groups = self._read_chunk(path) if path.is_file() else []
            lost = not self.complete and not any(g.scored for g in groups)
            lost |= retry_faults and any(t.is_lost for g in groups for t in g)
            if [g.task for g in groups] == tasks and not lost:
                self._whole[chunk] = groups
        self.run.rewind(self._last, 0)
        self._log_whole()
        return [t for chunk, tasks in enumerate(self._chunks) if chunk not in self._whole for t in tasks]

    def _read_chunk(self, path: Path) -> list[Group]:
        try:
            return list(_read_groups(path))
        except UserError as error:
            raise UserError(
                f"{error}; to roll out its tasks again, remove it: rm {path}, and agentrl eval --resume {self.path}"
            ) from None

    @cached_property
    def _chunks(self) -> list[list[int]]:
        return [self.tasks[i : i + CHUNK] for i in range(0, len(self.tasks), CHUNK)]

    @property
    def _last(self) -> int:
        return (len(self.tasks) - 1) // CHUNK

    def _file(self, chunk: int) -> Path:
        return self.path / "trajectories" / f"{self.scope.split}-{chunk:06d}.parquet"

    def check_policy(self, identity: str) -> None:
        """Refuse a folder with episodes of another policy, by a UserError."""
        if self.scope.policy and self.scope.policy != identity:
            raise UserError(
                f"the evaluation in {str(self.path)!r} was started with other weights of {self.config.model!r} "
                f"(checksum {self.scope.policy}, now {identity}); give another --out"
            )
        self.scope = self.scope._replace(policy=identity)
        with raise_write_errors(self.path):
            write_scope(self.path, self.scope)

    async def add(self, group: Group) -> None:
        """Keep a task's group; its chunk is written when it is whole."""
        chunk = self.tasks.index(group.task) // CHUNK
        tasks, groups = self._chunks[chunk], self._begun.setdefault(chunk, {})
        groups[group.task] = group
        if len(groups) == len(tasks):
            whole = [groups[task] for task in tasks]
            del self._begun[chunk]
            await to_thread.run_sync(self._write, chunk, whole)
            self._whole[chunk] = [replace(g, trajectories=tuple(map(reader.strip_tokens, g))) for g in whole]
            self._log_whole()

    def _write(self, chunk: int, groups: Sequence[Group]) -> None:
        self.run.write_trajectories(chunk, record_held_out(groups), self.scope.split)

    def _log_whole(self) -> None:
        """Write a line for each chunk before which none is missing."""
        while (chunk := -(-len(self._logged) // CHUNK)) in self._whole:
            self._logged += self._whole[chunk]
            self.run.log({"step": chunk, **self._line(last=chunk == self._last)})

    def _line(self, last: bool) -> dict[str, float]:
        if not any(g.scored for g in self._logged):
            return {}
        if last:
            return self._evaluate().metrics()
        sampled, greedy = _split_trials(self._logged, self.scope.trials)
        return _reward_metrics("eval/", sampled) | _reward_metrics("eval/greedy_", greedy)

    def _evaluate(self) -> Evaluation:
        return Evaluation.of(self._logged, self.scope.trials, self.config.eval.pass_at)

    def finish(self) -> Evaluation:
        """Evaluate all chunks and write the summary.

        Raises:
            UserError: not one episode could be scored.
        """
        evaluation = self._evaluate()
        scope = {name: value for name, value in self.scope._asdict().items() if value != ""}
        settings = {"env": self.config.env["name"], "model": self.config.model, "seed": self.config.seed}
        settings |= {"pass_at": self.config.eval.pass_at}
        self.run.write_summary({"kind": "evaluation", **settings, "scope": scope, **evaluation.as_dict()})
        return evaluation

    def close(self) -> None:
        self.run.close()


def _split_trials(
    groups: Iterable[Group], trials: Trials
) -> tuple[list[Sequence[Trajectory]], list[Sequence[Trajectory]]]:
    """Split groups into their sampled members and the greedy one."""
    members = [g.trajectories for g in groups]
    return [m[: trials.sampled] for m in members], [m[trials.sampled :] for m in members]


def _reward_metrics(prefix: str, tasks: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    mean: Estimate = estimate_mean(rewards := list_scored_rewards(tasks))
    if not mean.tasks:
        return {}
    numbers = {"reward": mean.mean, "reward_stderr": mean.stderr, "reward_low": mean.low, "reward_high": mean.high}
    return {f"{prefix}{name}": v for name, v in (numbers | {"episodes": float(sum(map(len, rewards)))}).items()}


def _read_groups(path: Path) -> Iterable[Group]:
    """Read the groups of a file, without tokens and messages."""
    members: list[Trajectory] = []
    for row in reader.read_outlines(path):
        if members and (row["task"] != members[0].task or row["sample"] == 0):
            yield Group(members[0].task, tuple(members))
            members = []
        members.append(reader.build_outline(row))
    if members:
        yield Group(members[0].task, tuple(members))


def open_evaluation(
    out: str | None, config: TrainConfig, scope: EvaluationScope, tasks: Sequence[int], is_used: Callable[[str], bool]
) -> EvaluationFolder:
    """Make the folder, ``evals/DATE-TIME-ENV`` by default, or resume the evaluation in it.

    Args:
        is_used: returns True for a setting that evaluations use; those must be the same to resume.

    Raises:
        UserError: it cannot be written, another process uses it, or it holds something else.
    """
    path = Path(out) if out else name_run_folder("evals", config.env["name"])
    config_toml = dump_toml(config)
    before = read_scope(path)

    def check() -> None:
        if before is not None:
            _check_same(path, config_toml, before, scope, is_used)
        elif (path / "metrics.jsonl").exists() or (path / "config.toml").exists():
            raise UserError(f"{str(path)!r} holds a run already; give another --out")

    folder = open_run_folder(path, config_toml, check, "--out")
    if before is None:
        with raise_write_errors(path):
            write_scope(path, scope)
    return EvaluationFolder(folder, config, before or scope, list(tasks))


def _check_same(
    path: Path, config_toml: str, before: EvaluationScope, now: EvaluationScope, is_used: Callable[[str], bool]
) -> None:
    """Refuse a folder whose evaluation is of something else, or with other settings, by a UserError."""
    before_settings, settings = read_run_settings(path), flatten(tomllib.loads(config_toml))
    changes = {
        n: (before_settings.get(n), settings.get(n))
        for n in sorted(before_settings.keys() | settings.keys())
        if is_used(n)
    }
    changes |= {n: (getattr(before, n), getattr(now, n)) for n in EvaluationScope._fields if n != "policy"}
    other = [f"{n} {a!r} -> {b!r}" for n, (a, b) in changes.items() if a != b]
    if other:
        raise UserError(
            f"the evaluation in {str(path)!r} is another one: {'; '.join(other)}; give another --out, or resume "
            f"it: agentrl eval --resume {path}"
        )
