"""The run folder: everything a run leaves behind.

config.toml       its settings; `agentrl train runs/x/config.toml` repeats the run
metrics.jsonl     a line a step, and a line an evaluation
events.jsonl        messages about it: signs of trouble, stalls
algorithm.json    the loss, the advantage ... with their parameters and metrics, as the run began
timeline.jsonl    who was busy from when to when: a line a step, and a line an evaluation
processes.jsonl   what each process of the run was at, in seconds: a line a step
waits.json        who waits on whom now; of a run that has ended, as it was last seen
tools.json        the tools that were offered, as schemas
trajectories/     a Parquet file a step, a row an episode: `agentrl.runs.writer`
model/            the final policy, as from_pretrained takes it
summary.json      the rewards before and after
"""

from __future__ import annotations

import json
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from agentrl.credit import Credit
from agentrl.errors import UserError
from agentrl.runs.atomic import FolderLock, FolderWriteError, describe_os_error, raise_write_errors, replace_atomically
from agentrl.runs.disk import OVERFLOW_LINK, is_disk_full, link_folder
from agentrl.runs.writer import Learned, write_episodes
from agentrl.settings.documents import parse_json, read_bounded_lines, read_json, read_toml_table
from agentrl.settings.loader import flatten
from agentrl.settings.secret import scrub
from agentrl.settings.trust import remember_run
from agentrl.tools.offered_tools import OfferedTools
from agentrl.types import to_utf8

_OTHER_LOGS = ("events.jsonl", "timeline.jsonl", "processes.jsonl")  # beside the metrics; each line has its step
_CHANGEABLE = ("steps", "run", "eval")  # sections that may change when a run resumes
_ADDRESSES = ("engine.urls",)  # of what serves the same model: it may be started again elsewhere

LAUNCH_OPTIONS = "AGENTRL_LAUNCH_OPTIONS"  # of the command that started this process, as they are typed


@dataclass(frozen=True)
class RunFolder:
    """A run folder, open for writing. Every method that writes raises UserError if the disk is full or read-only."""

    folder: Path
    lock: FolderLock | None = None  # held as long as this is
    fallback: Path | None = None  # for the model and checkpoints, if the folder's disk is full
    unwritten: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)  # lines that wait for the next one

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a line to the metrics. A number that is not finite becomes null, as JSON has none."""
        self._append("metrics.jsonl", replace_non_finite(metrics))

    def log_message(self, step: int, text: str, about: str = "") -> None:
        """Append a sentence about the run, or a part of it; if the disk is full, together with the next one."""
        line = {"step": step, "text": text}
        self._append_when_possible("events.jsonl", {**line, "about": about} if about else line)

    def log_timeline(self, step: int, kind: str, picture: Mapping[str, Any]) -> None:
        """Append the timeline of a step, an evaluation or a save, which is its ``kind``."""
        self._append_when_possible("timeline.jsonl", {"step": step, "kind": kind, **picture})

    def log_processes(self, step: int, line: Mapping[str, Any]) -> None:
        """Append what each process was at in a step."""
        self._append_when_possible("processes.jsonl", {"step": step, "kind": "step", **replace_non_finite(line)})

    def write_waits(self, state: Mapping[str, Any]) -> None:
        """Write who waits on whom now; if the disk is full, at a later moment."""
        with (
            suppress(FolderWriteError),
            raise_write_errors(self.folder),
            replace_atomically(self.folder / "waits.json") as partial_path,
        ):
            partial_path.write_text(scrub(json.dumps(replace_non_finite(state))) + "\n", encoding="utf-8")

    def write_tools(self, offered: OfferedTools) -> None:
        """Write ``tools.json`` if there is a new list of tools; if the disk is full, at a later step."""
        if offered.changed:
            with (
                suppress(FolderWriteError),
                raise_write_errors(self.folder),
                replace_atomically(self.folder / "tools.json") as partial_path,
            ):
                partial_path.write_text(scrub(offered.dump()) + "\n", encoding="utf-8")
                offered.changed = False

    def write_algorithm(self, described: Mapping[str, Any]) -> list[str]:
        """Write ``algorithm.json``; return the kinds of entries that are not as they were when the run began."""
        path = self.folder / "algorithm.json"
        try:
            before = read_json(path)
        except (OSError, ValueError):
            before = {}
        now = json.loads(scrub(json.dumps(replace_non_finite(described))))
        before = before if isinstance(before, dict) else {}
        with raise_write_errors(self.folder), replace_atomically(path) as partial_path:
            partial_path.write_text(to_utf8(json.dumps(now, indent=2, ensure_ascii=False)) + "\n", encoding="utf-8")
        return [kind for kind in now if kind in before and before[kind] != now[kind]]

    def _append_when_possible(self, name: str, line: Mapping[str, Any]) -> None:
        lines = self.unwritten.setdefault(name, [])
        lines.append(line)
        with suppress(FolderWriteError):
            self._append(name, *lines)
            lines.clear()

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        """Append lines, all or none."""
        path = self.folder / name
        with raise_write_errors(self.folder):
            size = path.stat().st_size if path.exists() else 0
            try:
                with path.open("ab") as file:
                    file.write(scrub("".join(json.dumps(line) + "\n" for line in lines)).encode())
            except OSError:
                if path.exists():
                    os.truncate(path, size)  # a part of it may have been written
                raise

    def write_trajectories(self, step: int, credit: Credit, split: str = "train", learned: Learned = ()) -> None:
        """Write a step's episodes to one file.

        Args:
            credit: of each episode, as it was learned from.
            learned: for each member of each group what the learner knew of its sampled tokens; None for a member that
                did not go through the learner. By default none did.
        """
        target = self.folder / "trajectories" / f"{split}-{step:06d}.parquet"
        with raise_write_errors(self.folder), replace_atomically(target) as partial_path:
            write_episodes(partial_path, step, split, credit, learned)

    def overflow_path(self, name: str) -> Path | None:
        """Return where ``name`` goes if the run folder's disk is full; None if no such place is set."""
        link = self.folder / OVERFLOW_LINK
        root = link if link.is_dir() else self.fallback
        return root.resolve() / self.folder.resolve().name / name if root else None

    def close(self) -> None:
        """Release the folder to other processes."""
        if self.lock is not None:
            self.lock.close()

    def metrics_size(self) -> int:
        """Return the size of the metrics in bytes, which a checkpoint remembers."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0

    def log_sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the other logs, by file name."""
        paths = [self.folder / name for name in _OTHER_LOGS]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def rewind(self, step: int, metrics_size: int, log_sizes: Mapping[str, int] | None = None) -> None:
        """Remove everything after a step, so that a run that resumes there writes it again.

        Args:
            metrics_size: of the metrics, in bytes, as of the checkpoint.
            log_sizes: of the other logs, as `log_sizes` returned them. An evaluation of this very step may have ended
                after the checkpoint, and is repeated. By default its lines stay.
        """
        with raise_write_errors(self.folder):
            _truncate(self.folder / "metrics.jsonl", metrics_size)
            for log in (self.folder / name for name in _OTHER_LOGS):
                if log.exists():
                    if log_sizes is not None:
                        _truncate(log, log_sizes.get(log.name, 0))
                    kept = [line for line in read_lines(log) if line["step"] <= step]
                    with replace_atomically(log) as partial_path:
                        partial_path.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
            for file in (self.folder / "trajectories").glob("*-*.parquet"):
                if int(file.stem.rpartition("-")[2]) > step:
                    file.unlink()
            for file in (self.folder / "trajectories").glob(".*.part"):
                file.unlink()

    def last_step(self) -> int:
        """Return the last step in the metrics; 0 if they are empty."""
        return max((line["step"] for line in read_lines(self.folder / "metrics.jsonl")), default=0)

    def elapsed_s(self) -> float:
        """Return the run's age in seconds as of the last line of the metrics; 0 if no line has it."""
        ages = (line.get("clock/elapsed") for line in read_lines(self.folder / "metrics.jsonl"))
        return max((seconds for seconds in ages if isinstance(seconds, int | float)), default=0.0)

    def skip_evaluation(self, step: int, offset: int) -> int:
        """Return where the line at byte ``offset`` ends if it holds the evaluation of a step; ``offset`` if not."""
        metrics = self.folder / "metrics.jsonl"
        line = metrics.read_bytes()[offset:].partition(b"\n")[0] if metrics.exists() else b""
        try:
            values = parse_json(line)
        except ValueError:
            return offset
        is_evaluation = isinstance(values, dict) and values.get("step") == step and "eval/runtime" in values
        return offset + len(line) + 1 if is_evaluation else offset

    def remove_summary(self) -> None:
        """Remove ``summary.json``: a run that resumes has not ended, and ends with other numbers."""
        with raise_write_errors(self.folder):
            (self.folder / "summary.json").unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``; a number that is not finite becomes null, as in `log`."""
        text = to_utf8(scrub(json.dumps(replace_non_finite(summary), indent=2, ensure_ascii=False, allow_nan=False)))
        with raise_write_errors(self.folder), replace_atomically(self.folder / "summary.json") as partial_path:
            partial_path.write_text(text + "\n", encoding="utf-8")

    def write_model(self, save: Callable[[Path], None], make_room: Callable[[], bool] = lambda: False) -> Path:
        """Write the folder ``model`` by ``save``, and return its path. The old one stays until the new one is whole.

        A link ``model`` is followed.

        Args:
            make_room: is called if the disk is full, and returns True if another attempt is worth it. After that the
                model goes to ``overflow_path``.
        """
        target = self.folder / "model"
        with raise_write_errors(self.folder):
            try:
                return _write_folder(target.resolve() if target.is_symlink() else target, save)
            except OSError as error:
                if is_disk_full(error) and make_room():
                    return self.write_model(save)
                if (overflow := self.overflow_path("model")) is None:
                    raise
                link_folder(target, _write_folder(overflow, save))
                return overflow


def _write_folder(target: Path, save: Callable[[Path], None]) -> Path:
    """Replace a folder by one that ``save`` writes, once that is whole."""
    partial_path = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial_path, ignore_errors=True)
    try:
        partial_path.parent.mkdir(parents=True, exist_ok=True)
        save(partial_path)
    except OSError:
        shutil.rmtree(partial_path, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    partial_path.rename(target)
    return target


def replace_non_finite(value: Any) -> Any:
    """Copy a value with None for each number in it that is not finite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: replace_non_finite(own) for name, own in value.items()}
    return [replace_non_finite(own) for own in value] if isinstance(value, list | tuple) else value


def _truncate(log: Path, size: int) -> None:
    """Cut a log to ``size`` bytes. After a power failure it may be shorter: then to its last whole line."""
    if not log.exists():
        return
    if log.stat().st_size < size:
        size = log.read_bytes().rfind(b"\n") + 1
    os.truncate(log, size)


def read_lines(log: Path) -> list[dict[str, Any]]:
    """Read a log's lines but for those that are half-written."""
    lines = []
    for text in read_bounded_lines(log) if log.exists() else ():
        try:
            lines.append(parse_json(text))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def create_run_folder(
    folder: str | None, env: str, config_toml: str, *, resume: bool = False, fallback: str | None = None
) -> RunFolder:
    """Make the folder, ``runs/DATE-TIME-ENV`` by default, and point ``runs/last`` to it.

    Args:
        resume: resume the run that the folder holds already.
        fallback: a folder for checkpoints and the model if the run folder's disk is full.

    Raises:
        UserError: it cannot be written, another process uses it, or it holds a run with other settings.
    """
    path, config_toml = Path(folder) if folder else name_run_folder("runs", env), scrub(config_toml)
    run = open_run_folder(path, config_toml, partial(_check_free, path, config_toml, resume), "--run.dir")
    return replace(run, fallback=Path(fallback) if fallback else None)


def name_run_folder(parent: str, env: str) -> Path:
    """Return ``PARENT/DATE-TIME-ENV``, a path that does not exist."""
    word = "".join(c if c.isalnum() or c in "-_." else "-" for c in env)
    return _unused(Path(parent) / f"{time.strftime('%Y%m%d-%H%M%S')}-{word}")


def open_run_folder(path: Path, config_toml: str, check: Callable[[], object], option: str) -> RunFolder:
    """Make a folder, lock it, check its content, write ``config.toml``, and point the link ``last`` beside it to it.

    Raises:
        UserError: it cannot be written (``option`` names the setting to change), another process uses it, or ``check``
            raises one.
    """
    config_toml = scrub(config_toml)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path)
        try:
            check()
        except UserError:
            lock.close()
            raise
        with replace_atomically(path / "config.toml") as partial_path:
            partial_path.write_text(config_toml, encoding="utf-8")
        remember_run(tomllib.loads(config_toml))
        (path / "trajectories").mkdir(exist_ok=True)
        _point_last(path)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {str(path)!r}: {describe_os_error(error)}; give another {option}"
        ) from None
    return RunFolder(path, lock)


def spell_resume(run: object) -> str:
    """Spell the command that resumes a run: by the launcher that this process was started by, if so."""
    return " ".join(filter(None, ["agentrl train", os.environ.get(LAUNCH_OPTIONS), f"--resume {run}"]))


def _check_free(path: Path, config_toml: str, resume: bool) -> None:
    """Raise UserError if the folder holds a run, unless that is to resume with the same settings."""
    if not (path / "metrics.jsonl").exists() and not (path / "config.toml").exists():
        return
    if not resume:
        raise UserError(
            f"run folder {str(path)!r} holds a run already; give another --run.dir, or resume it: {spell_resume(path)}"
        )
    before, now = read_run_settings(path), flatten(tomllib.loads(config_toml))
    named = (before.keys() | now.keys()) - {*_ADDRESSES}
    names = sorted(n for n in named if n.partition(".")[0] not in _CHANGEABLE)
    other = [f"{n} {before.get(n)!r} -> {now.get(n)!r}" for n in names if before.get(n) != now.get(n)]
    if other:
        raise UserError(
            f"the run in {str(path)!r} has other settings: {'; '.join(other)}; to start a new run from its model: "
            f"--model {path} and another --run.dir"
        )
    last, steps = RunFolder(path).last_step(), now.get("steps")
    if steps is not None and steps < last:
        raise UserError(
            f"the run in {str(path)!r} is at step {last} already: --steps {steps} is before that; give {last} or more"
        )


def read_run_settings(path: Path) -> dict[str, Any]:
    """Read a run's settings by dotted names. Raises UserError: its config.toml is missing, or no TOML."""
    try:
        return flatten(read_toml_table(path / "config.toml"))
    except (FileNotFoundError, ValueError):
        raise UserError(
            f"the run in {str(path)!r} cannot resume: its config.toml is missing or damaged; give another --run.dir"
        ) from None


def _unused(path: Path) -> Path:
    """Number the path if it exists: two runs may start in one second."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _point_last(path: Path) -> None:
    """Point the link ``last`` beside the run folder to it, if the file system has links."""
    link, new_link = path.parent / "last", path.parent / f".last-{os.getpid()}"
    if link.is_symlink() or not link.exists():
        try:
            new_link.symlink_to(path.name, target_is_directory=True)
            new_link.replace(link)
        except OSError:
            new_link.unlink(missing_ok=True)
