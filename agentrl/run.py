"""The run folder: everything a run leaves behind.

config.toml       what it was made of; `agentrl train runs/x/config.toml` makes it again
metrics.jsonl     a line a step, and a line a measurement
told.jsonl        what was said of it: alarms, signs of trouble, stalls
timeline.jsonl    who was busy from when to when: a line a step, and a line a measurement
tools.json        the tools that were offered, as schemas
trajectories/     a Parquet file a step, a row an episode (schema below)
model/            the final policy, as from_pretrained takes it
summary.json      before and after
"""

from __future__ import annotations

import json
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.credit import Credit, EpisodeCredit
from agentrl.disk import ELSEWHERE, is_full, link
from agentrl.episode_info import expected_answer, last_answer, one_line, plain_info, question_of
from agentrl.errors import UserError
from agentrl.folder import Lock, Unwritable, put, reason, writing
from agentrl.layers import flatten
from agentrl.offered_tools import OfferedTools
from agentrl.types import Trajectory, utf8

SCHEMA_VERSION = "4"  # 3 had no info; 2 no credit and no weight; 1 no weights and no learner_logprobs
_NAMED = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))
_SEGMENT = pa.struct(
    [
        ("author", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),  # null where the model is not the author
        ("versions", pa.list_(pa.int32())),
        ("learner_logprobs", pa.list_(pa.float32())),  # before the update; null where it was not trained
    ]
)
_CALL = pa.struct([("turn", pa.int32()), ("name", pa.string()), ("status", pa.string()), ("seconds", pa.float64())])
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),
        ("task", pa.int64()),
        ("member", pa.int32()),
        ("reward", pa.float64()),  # null: not scored, or the world failed
        ("rewards", _NAMED),
        ("weights", _NAMED),  # of the parts; 1.0 for one that is not named
        ("step_rewards", pa.list_(pa.float64())),
        ("credit", pa.string()),  # trained, or why not: agentrl.credit
        ("advantage", pa.float64()),  # the mean of the turns' where each has its own; null: it has none
        ("advantages", pa.list_(pa.float64())),  # one a turn
        ("weight", pa.float64()),  # of each of its trained tokens in the loss; null: it is in no denominator
        ("stop", pa.string()),
        ("fault", pa.string()),  # its kind
        ("fault_message", pa.string()),
        ("segments", pa.list_(_SEGMENT)),
        ("messages", pa.string()),  # JSON
        ("calls", pa.list_(_CALL)),
        ("timings", _NAMED),  # seconds
        ("info", pa.string()),  # JSON: what reset and steps told, at most 8,000 characters
        ("question", pa.string()),  # what was asked last before the first turn, in one line of at most 200 characters
        ("answer", pa.string()),  # the end of what the model said last, likewise
        ("expected", pa.string()),  # the right answer, where info names it, likewise
        ("temperature", pa.float64()),  # it was sampled at; 0: greedy
    ],
    metadata={"agentrl_trajectories": SCHEMA_VERSION},
)


Learned = Sequence[float] | None  # one for each sampled token of an episode


@dataclass(frozen=True)
class Run:
    """A run folder, open for writing. Whatever writes raises UserError where the disk is full, or cannot be written."""

    folder: Path
    lock: Lock | None = None  # held as long as this is
    fallback: Path | None = None  # for the model and checkpoints, if the folder's disk is full
    unwritten: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # lines that wait for the next one

    def log(self, metrics: dict[str, Any]) -> None:
        """A line; a number that is not finite is null, as JSON has none."""
        finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in metrics.items()}
        self._add("metrics.jsonl", finite)

    def tell(self, step: int, text: str) -> None:
        """Add a sentence about the run for later; where the disk is full, with the next one."""
        self._add_when_there_is_room("told.jsonl", {"step": step, "text": text})

    def draw(self, step: int, kind: str, picture: Mapping[str, Any]) -> None:
        """Add a stretch of the run's time: ``kind`` is step, evaluation or save."""
        self._add_when_there_is_room("timeline.jsonl", {"step": step, "kind": kind, **picture})

    def write_tools(self, offered: OfferedTools) -> None:
        """Write ``tools.json`` where there is a new list of tools; where the disk is full, at a later step."""
        if offered.changed:
            with suppress(Unwritable), writing(self.folder), put(self.folder / "tools.json") as aside:
                aside.write_text(offered.dump() + "\n", encoding="utf-8")
                offered.changed = False

    def _add_when_there_is_room(self, name: str, line: Mapping[str, Any]) -> None:
        lines = self.unwritten.setdefault(name, [])
        lines.append(line)
        with suppress(Unwritable):
            self._add(name, *lines)
            lines.clear()

    def _add(self, name: str, *lines: Mapping[str, Any]) -> None:
        """Append lines; where the disk has no room, append nothing."""
        path = self.folder / name
        with writing(self.folder):
            size = path.stat().st_size if path.exists() else 0
            try:
                with path.open("ab") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            except OSError:
                if path.exists():
                    os.truncate(path, size)  # what of it had room
                raise

    def write_trajectories(
        self, step: int, credit: Credit, split: str = "train", learned: Sequence[Sequence[Learned]] = ()
    ) -> None:
        """Write a step's episodes, one file.

        Args:
            credit: of each episode, as it was learned from.
            learned: for each member of each group the learner's logprobs of its sampled tokens, before the update; None
                where it did not go through the learner. By default none did.
        """
        own = learned or [[None] * len(entries) for entries in credit.entries]
        rows = [
            _row(step, split, member, entry, logprobs)
            for entries, its in zip(credit.entries, own, strict=True)
            for member, (entry, logprobs) in enumerate(zip(entries, its, strict=True))
        ]
        target = self.folder / "trajectories" / f"{split}-{step:06d}.parquet"
        with writing(self.folder), put(target) as aside:
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), aside, compression="zstd")

    def elsewhere_of(self, name: str) -> Path | None:
        """Return where ``name`` goes if the run folder's disk is full; None where nothing is told of that."""
        told = self.folder / ELSEWHERE
        root = told if told.is_dir() else self.fallback
        return root.resolve() / self.folder.resolve().name / name if root else None

    def close(self) -> None:
        """Others may be at the folder."""
        if self.lock is not None:
            self.lock.close()

    def mark(self) -> int:
        """How far the metrics have come, in bytes: where a checkpoint stands."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0

    def marks_beside(self) -> dict[str, int]:
        """Measure how far the files beside the metrics have come, in bytes."""
        paths = [self.folder / name for name in BESIDE]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def rewind(self, step: int, mark: int, beside: Mapping[str, int] | None = None) -> None:
        """Forget what came after a step: a run that goes on from there says it again.

        Args:
            beside: how far the files beside the metrics had come, as `marks_beside` has it: an evaluation of this very
                step may have ended after the checkpoint, and is made again. By default its lines stay.
        """
        with writing(self.folder):
            _cut(self.folder / "metrics.jsonl", mark)
            for told in (self.folder / name for name in BESIDE):
                if told.exists():
                    if beside is not None:
                        _cut(told, beside.get(told.name, 0))
                    kept = [line for line in _whole(told) if line["step"] <= step]
                    with put(told) as aside:
                        aside.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
            for file in (self.folder / "trajectories").glob("*-*.parquet"):
                if int(file.stem.rpartition("-")[2]) > step:
                    file.unlink()
            for file in (self.folder / "trajectories").glob(".*.part"):
                file.unlink()

    def steps(self) -> int:
        """The last one that it tells of; 0 where there is none."""
        return max((line["step"] for line in _whole(self.folder / "metrics.jsonl")), default=0)

    def write_summary(self, summary: dict[str, Any]) -> None:
        text = utf8(json.dumps(summary, indent=2, ensure_ascii=False))
        with writing(self.folder), put(self.folder / "summary.json") as aside:
            aside.write_text(text + "\n", encoding="utf-8")

    def write_model(self, save: Callable[[Path], None], make_room: Callable[[], bool] = lambda: False) -> Path:
        """Write the folder ``model`` as ``save`` makes it, and return where it is; the old one stays until it is whole.

        A link ``model`` is followed.

        Args:
            make_room: is called where the disk is full; returns whether another attempt is worth it. After that the
                model is written to where ``elsewhere_of`` says.
        """
        target = self.folder / "model"
        with writing(self.folder):
            try:
                return _write_folder(target.resolve() if target.is_symlink() else target, save)
            except OSError as error:
                if is_full(error) and make_room():
                    return self.write_model(save)
                if (elsewhere := self.elsewhere_of("model")) is None:
                    raise
                link(target, _write_folder(elsewhere, save))
                return elsewhere


def _write_folder(target: Path, save: Callable[[Path], None]) -> Path:
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        save(aside)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    return target


def _cut(metrics: Path, mark: int) -> None:
    """To ``mark`` bytes; after a power cut there may be fewer: whole lines, then."""
    if not metrics.exists():
        return
    if metrics.stat().st_size < mark:
        mark = metrics.read_bytes().rfind(b"\n") + 1
    os.truncate(metrics, mark)


def _whole(file: Path) -> list[dict[str, Any]]:
    """Its lines but for those that are half-written."""
    found = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict) and "step" in line]


def create(folder: str | None, env: str, config_toml: str, *, resume: bool = False, fallback: str | None = None) -> Run:
    """Make the folder, ``runs/DATE-TIME-ENV`` by default, and point ``runs/last`` to it.

    Args:
        resume: a run that the folder holds already goes on.
        fallback: a folder for checkpoints and the model where the run folder's disk is full.

    Raises:
        UserError: it cannot be written, another process is at it, or it holds a run already, of other settings.
    """
    path = Path(folder) if folder else new_folder("runs", env)
    run = open_folder(path, config_toml, partial(_check_free, path, config_toml, resume), "--run.dir")
    return replace(run, fallback=Path(fallback) if fallback else None)


def new_folder(parent: str, env: str) -> Path:
    """Make up the name ``PARENT/DATE-TIME-ENV`` of a folder that does not exist."""
    word = "".join(c if c.isalnum() or c in "-_." else "-" for c in env)
    return _unused(Path(parent) / f"{time.strftime('%Y%m%d-%H%M%S')}-{word}")


def open_folder(path: Path, config_toml: str, check: Callable[[], object], option: str) -> Run:
    """Make a folder, lock it, check what it holds, write ``config.toml``, and point ``last`` beside it to it.

    Raises:
        UserError: it cannot be written (``option`` names the setting to change), another process is at it, or
            ``check`` raises one.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = Lock(path)
        try:
            check()
        except UserError:
            lock.close()
            raise
        with put(path / "config.toml") as aside:
            aside.write_text(config_toml, encoding="utf-8")
        (path / "trajectories").mkdir(exist_ok=True)
        _point_last(path)
    except OSError as error:
        raise UserError(f"cannot write the run folder {str(path)!r}: {reason(error)}; give another {option}") from None
    return Run(path, lock)


BESIDE = ("told.jsonl", "timeline.jsonl")  # lines with a step, beside the metrics
FREE = ("steps", "run", "eval")  # what may be other when a run goes on


def _check_free(path: Path, config_toml: str, resume: bool) -> None:
    """Raises UserError where the folder holds a run, unless that is to go on, with the same settings."""
    if not (path / "metrics.jsonl").exists() and not (path / "config.toml").exists():
        return
    if not resume:
        raise UserError(
            f"run folder {str(path)!r} holds a run already; give another --run.dir, or let it go on: "
            f"agentrl train --resume {path}"
        )
    before, now = read_settings(path), flatten(tomllib.loads(config_toml))
    names = sorted(n for n in before.keys() | now.keys() if n.partition(".")[0] not in FREE)
    other = [f"{n} {before.get(n)!r} -> {now.get(n)!r}" for n in names if before.get(n) != now.get(n)]
    if other:
        raise UserError(
            f"the run in {str(path)!r} has other settings: {'; '.join(other)}; to begin anew from its model: "
            f"--model {path} and another --run.dir"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """Read a run's settings, by dotted names. Raises UserError: its config.toml is not there, or no TOML."""
    try:
        return flatten(tomllib.loads((path / "config.toml").read_text("utf-8")))
    except (FileNotFoundError, ValueError):
        raise UserError(
            f"the run in {str(path)!r} cannot go on: its config.toml is missing or damaged; give another --run.dir"
        ) from None


def _unused(path: Path) -> Path:
    """Two runs may start in one second."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _point_last(path: Path) -> None:
    """``last`` beside the run folder; where links are not to be had, the name is simply not there."""
    link, aside = path.parent / "last", path.parent / f".last-{os.getpid()}"
    if link.is_symlink() or not link.exists():
        try:
            aside.symlink_to(path.name, target_is_directory=True)
            aside.replace(link)
        except OSError:
            aside.unlink(missing_ok=True)


def _row(step: int, split: str, member: int, entry: EpisodeCredit, learned: Learned) -> dict[str, Any]:
    t = entry.trajectory
    return {
        "step": step,
        "split": split,
        "task": t.task,
        "member": member,
        "reward": t.reward,
        "rewards": _named(t.rewards.items()),
        "weights": _named(t.weights.items()),
        "step_rewards": list(t.step_rewards),
        "credit": entry.outcome,
        "advantage": entry.mean_advantage,
        "advantages": entry.by_turn(),
        "weight": entry.weight,
        "stop": t.stop.value,
        "fault": t.fault.kind if t.fault else None,
        "fault_message": utf8(t.fault.message) if t.fault else None,
        "segments": _segments(t, learned),
        "messages": utf8(json.dumps(t.messages, ensure_ascii=False)),
        "calls": [{"turn": c.turn, "name": utf8(c.name), "status": c.status, "seconds": c.seconds} for c in t.calls],
        "timings": _named(t.timings.items()),
        "info": json.dumps(plain_info(t.info), ensure_ascii=False),
        "question": one_line(question_of(t.messages, t.turns)),
        "answer": one_line(last_answer(t), end=True),
        "expected": one_line(expected_answer(t.info), end=True),
        "temperature": t.temperature,
    }


def _segments(trajectory: Trajectory, learned: Learned) -> list[dict[str, Any]]:
    """``learned`` is cut where the model's segments end."""
    left = None if learned is None else iter(learned)
    return [
        {
            "author": s.author,
            "token_ids": s.token_ids,
            "logprobs": s.logprobs,
            "versions": s.versions,
            "learner_logprobs": None if left is None or s.author != "model" else list(islice(left, len(s.token_ids))),
        }
        for s in trajectory.segments
    ]


def _named(items: Iterable[tuple[str, float | None]]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in items]
