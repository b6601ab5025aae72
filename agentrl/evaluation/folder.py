"""The folder of an evaluation: a run folder without updates, written chunk by chunk.

config.toml          the settings
evaluation.toml      what is evaluated: tasks, trials, split, an endpoint, by what the policy is known again
trajectories/        a Parquet file a chunk of tasks: test-000003.parquet has chunk 3, a row an episode
metrics.jsonl        a line a chunk: the mean over all chunks up to it; the last line has everything
summary.json         the result, once all chunks are there

A chunk is written when its last episode has ended, whole or not at all. The result is read from the chunks, in their
order: an evaluation that was killed and goes on ends with the one that it would have had.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from anyio import to_thread

from agentrl import run, stored
from agentrl.config import TrainConfig
from agentrl.credit import hold_out
from agentrl.errors import UserError
from agentrl.evaluation_scope import Scope, read_scope, write_scope
from agentrl.folder import writing
from agentrl.layers import dump_toml, flatten
from agentrl.measurement import Evaluation, Trials, rewards_of
from agentrl.run import Run
from agentrl.statistics import Estimate, estimate_mean
from agentrl.types import Group, Trajectory

CHUNK = 16  # tasks in a file


@dataclass
class EvaluationFolder:
    """Open for writing, for this process alone. Whatever cannot be written raises UserError."""

    run: Run
    config: TrainConfig
    scope: Scope
    tasks: list[int]
    _begun: dict[int, dict[int, Group]] = field(default_factory=dict)  # groups of chunks that are not whole yet
    _whole: dict[int, list[Group]] = field(default_factory=dict)  # chunks that are, without tokens
    _logged: list[Group] = field(default_factory=list)  # those that metrics.jsonl tells of

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
            groups = list(_read_groups(path)) if path.is_file() else []
            lost = not self.complete and not any(g.scored for g in groups)
            lost |= retry_faults and any(t.fault for g in groups for t in g)
            if [g.task for g in groups] == tasks and not lost:
                self._whole[chunk] = groups
        self.run.rewind(self._last, 0)
        self._log_whole()
        return [t for chunk, tasks in enumerate(self._chunks) if chunk not in self._whole for t in tasks]

    @cached_property
    def _chunks(self) -> list[list[int]]:
        return [self.tasks[i : i + CHUNK] for i in range(0, len(self.tasks), CHUNK)]

    @property
    def _last(self) -> int:
        return (len(self.tasks) - 1) // CHUNK

    def _file(self, chunk: int) -> Path:
        return self.path / "trajectories" / f"{self.scope.split}-{chunk:06d}.parquet"

    def check_policy(self, identity: str) -> None:
        """Refuse a folder whose episodes are another policy's, by a UserError."""
        if self.scope.policy and self.scope.policy != identity:
            raise UserError(
                f"the evaluation in {str(self.path)!r} was begun with other weights of {self.config.model!r} (checksum "
                f"{self.scope.policy}, now {identity}); give another --out"
            )
        self.scope = self.scope._replace(policy=identity)
        with writing(self.path):
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
            self._whole[chunk] = [replace(g, trajectories=tuple(map(stored.without_tokens, g))) for g in whole]
            self._log_whole()

    def _write(self, chunk: int, groups: Sequence[Group]) -> None:
        self.run.write_trajectories(chunk, hold_out(groups), self.scope.split)

    def _log_whole(self) -> None:
        """Write a line for each chunk before which none is missing."""
        while (chunk := -(-len(self._logged) // CHUNK)) in self._whole:
            self._logged += self._whole[chunk]
            self.run.log({"step": chunk, **self._line(last=chunk == self._last)})

    def _line(self, last: bool) -> dict[str, float]:
        if not any(g.scored for g in self._logged):
            return {}
        if last:
            return self._measured().metrics()
        sampled, greedy = _part(self._logged, self.scope.trials)
        return _brief("eval/", sampled) | _brief("eval/greedy_", greedy)

    def _measured(self) -> Evaluation:
        return Evaluation.of(self._logged, self.scope.trials, self.config.eval.pass_at)

    def finish(self) -> Evaluation:
        """Measure all chunks and write the summary.

        Raises:
            UserError: not one episode could be scored.
        """
        found = self._measured()
        scope = {name: value for name, value in self.scope._asdict().items() if value != ""}
        settings = {"env": self.config.env["name"], "model": self.config.model, "seed": self.config.seed}
        settings |= {"pass_at": self.config.eval.pass_at}
        self.run.write_summary({"kind": "evaluation", **settings, "scope": scope, **found.as_dict()})
        return found

    def close(self) -> None:
        self.run.close()


def _part(groups: Iterable[Group], trials: Trials) -> tuple[list[Sequence[Trajectory]], list[Sequence[Trajectory]]]:
    """Part groups into their sampled members and the greedy one."""
    members = [g.trajectories for g in groups]
    return [m[: trials.sampled] for m in members], [m[trials.sampled :] for m in members]


def _brief(prefix: str, tasks: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    mean: Estimate = estimate_mean(rewards := rewards_of(tasks))
    if not mean.tasks:
        return {}
    numbers = {"reward": mean.mean, "reward_stderr": mean.stderr, "reward_low": mean.low, "reward_high": mean.high}
    return {f"{prefix}{name}": v for name, v in (numbers | {"episodes": float(sum(map(len, rewards)))}).items()}


def _read_groups(path: Path) -> Iterable[Group]:
    """Read the groups of a file, without tokens and messages."""
    members: list[Trajectory] = []
    for row in stored.outlines(path):
        if members and (row["task"] != members[0].task or row["member"] == 0):
            yield Group(members[0].task, tuple(members))
            members = []
        members.append(stored.outline(row))
    if members:
        yield Group(members[0].task, tuple(members))


def open_evaluation(
    out: str | None, config: TrainConfig, scope: Scope, tasks: Sequence[int], heeded: Callable[[str], bool]
) -> EvaluationFolder:
    """Make the folder, ``evals/DATE-TIME-ENV`` by default, or go on with the evaluation that it holds.

    Args:
        heeded: tells of a setting's name whether evaluations heed it: those must be the same to go on.

    Raises:
        UserError: it cannot be written, another process is at it, or it holds something else.
    """
    path = Path(out) if out else run.new_folder("evals", config.env["name"])
    config_toml = dump_toml(config)
    before = read_scope(path)

    def check() -> None:
        if before is not None:
            _check_same(path, config_toml, before, scope, heeded)
        elif (path / "metrics.jsonl").exists() or (path / "config.toml").exists():
            raise UserError(f"{str(path)!r} holds a run already; give another --out")

    opened = run.open_folder(path, config_toml, check, "--out")
    if before is None:
        with writing(path):
            write_scope(path, scope)
    return EvaluationFolder(opened, config, before or scope, list(tasks))


def _check_same(path: Path, config_toml: str, before: Scope, now: Scope, heeded: Callable[[str], bool]) -> None:
    """Refuse a folder whose evaluation is of something else, or with other settings, by a UserError."""
    then, given = run.read_settings(path), flatten(tomllib.loads(config_toml))
    changes = {n: (then.get(n), given.get(n)) for n in sorted(then.keys() | given.keys()) if heeded(n)}
    changes |= {n: (getattr(before, n), getattr(now, n)) for n in Scope._fields if n != "policy"}
    other = [f"{n} {a!r} -> {b!r}" for n, (a, b) in changes.items() if a != b]
    if other:
        raise UserError(
            f"the evaluation in {str(path)!r} is another one: {'; '.join(other)}; give another --out, or go on "
            f"with it: agentrl eval --resume {path}"
        )
