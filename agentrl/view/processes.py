"""The processes of a run, and who waits on whom: over some steps, and now."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.runtime.activity import OWN_WORK
from agentrl.settings.documents import parse_json, read_bounded
from agentrl.types import is_number
from agentrl.view.metrics_file import MetricsFile
from agentrl.view.run_messages import RunMessage
from agentrl.view.step_lines import StepLines

MOST_STEPS = 100  # that are summed
MOST_MESSAGES = 30
OLD_S = 10.0  # since the run told last what it is at: then it does not any more
_MOST_BYTES = 4 << 20  # of waits.json
_KINDS = ("learner", "rank", "server", "rollouts", "player")

_LANES = {
    "generate": "the engine",
    "env": "environments",
    "reward": "rewards",
    "agent": "agents",
    "queue": "episodes to begin",
}


@dataclass
class _Row:
    """A process over some steps."""

    seconds: dict[str, float] = field(default_factory=dict)
    groups: int = 0

    def add(self, seconds: Mapping[str, float], groups: int) -> None:
        self.groups += groups
        for what, own in seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + own


class Processes:
    """The processes of a run folder, read anew when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._waits = folder / "waits.json"
        self._lines = StepLines(folder / "processes.jsonl")

    def describe(
        self,
        metrics: MetricsFile,
        messages: Sequence[RunMessage],
        *,
        ended: bool,
        step: int | None,
        steps: int,
        demonstrates: bool = False,
    ) -> dict[str, Any]:
        """Describe who waited on whom in the ``steps`` steps up to ``step``, and now, if the run has not ended.

        Args:
            demonstrates: the run learns from demonstrations, and rolls nothing out.
        """
        self._lines.refresh()
        all_steps = sorted({*self._lines.steps(), *(int(line["step"]) for line in metrics.lines if _is_step(line))})
        shown = [s for s in all_steps if step is None or s <= step][-max(1, min(steps, MOST_STEPS)) :]
        rows, seconds = self._sum_rows(shown)
        learner, waited = _sum_learner(metrics, set(shown))
        if learner.seconds:
            rows["learner", ""] = learner
        state = {} if ended else self._read_waits()
        return {
            "steps": all_steps,
            "shown": [shown[0], shown[-1]] if shown else [],
            "recorded": bool(self._lines.steps()),
            "seconds": seconds,
            "sentence": describe_steps(shown, learner.seconds, waited, demonstrates=demonstrates),
            "now": str(state.get("sentence", "")),
            "age": _find_age(state),
            "rows": _describe_rows(rows, seconds, _list_present(state)),
            "messages": [[m.step, m.text] for m in messages if m.about][: -MOST_MESSAGES - 1 : -1],
        }

    def _sum_rows(self, steps: Sequence[int]) -> tuple[dict[tuple[str, str], _Row], float]:
        rows: dict[tuple[str, str], _Row] = {}
        seconds = 0.0
        for step in steps:
            try:
                line = self._lines.read(step, "step") or {"processes": [], "seconds": 0.0}
                read = [
                    (str(kind), str(name), int(groups), {str(what): float(own) for what, own in did.items()})
                    for kind, name, groups, did in line["processes"]
                ]
                seconds += float(line["seconds"])
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                continue
            for kind, name, groups, did in read:
                rows.setdefault((kind, name), _Row()).add(did, groups)
        return rows, seconds

    def _read_waits(self) -> dict[str, Any]:
        try:
            state = parse_json(read_bounded(self._waits, _MOST_BYTES))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}


def _find_age(state: Mapping[str, Any]) -> float:
    """Return how many seconds ago the run told last what it is at; 0 where that is now."""
    unix = state.get("unix")
    age = time.time() - float(unix) if is_number(unix) else 0.0
    return round(age) if age > OLD_S else 0


def _is_step(line: Mapping[str, Any]) -> bool:
    return "step_time" in line


def _sum_learner(metrics: MetricsFile, steps: set[int]) -> tuple[_Row, dict[str, float]]:
    """Sum what the learner did in some steps; and of its waiting for rollouts, what for."""
    row, waited = _Row(), _Row()
    for line in metrics.lines:
        if int(line["step"]) not in steps or not _is_step(line):
            continue
        for name, seconds in line.items():
            if name.startswith("wait/") and seconds:
                lane = name.removeprefix("wait/")
                row.add({OWN_WORK.get(lane, "rollouts"): seconds}, 0)
                if lane not in OWN_WORK:
                    waited.add({_name_lane(lane): seconds}, 0)
    return row, waited.seconds


def _name_lane(lane: str) -> str:
    return f"tool {lane.removeprefix('tool/')!r}" if lane.startswith("tool/") else _LANES.get(lane, lane)


def describe_steps(
    steps: Sequence[int], learner: Mapping[str, float], waited: Mapping[str, float], *, demonstrates: bool = False
) -> str:
    """Say in a sentence who waited on whom in some steps; empty where that is not known."""
    total = sum(learner.values())
    if not total or not steps:
        return ""
    when = f"In step {steps[0]}" if steps[0] == steps[-1] else f"In steps {steps[0]} to {steps[-1]}"
    rollouts, learns = learner.get("rollouts", 0.0) / total, learner.get("learns", 0.0) / total
    if demonstrates:
        return f"{when} the learner learned from demonstrations {_percent(learns)} of the time."
    if rollouts < 0.01:
        return (
            f"{when} rollouts waited for the learner: it learned {_percent(learns)} of the time, and waited for none."
        )
    causes = sorted(waited.items(), key=lambda item: -item[1])
    named = [f"{what} ({_percent(seconds / total)})" for what, seconds in causes[:3] if seconds >= 0.005 * total]
    of = f": for {' and '.join([', '.join(named[:-1]), named[-1]] if len(named) > 1 else named)}" if named else ""
    return (
        f"{when} the learner waited for rollouts {_percent(rollouts)} of the time{of}; it learned {_percent(learns)}."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _list_present(state: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Read what ``waits.json`` tells of each process; what cannot be read is left out."""
    present = {}
    processes = state.get("processes")
    for process in processes if isinstance(processes, list) else ():
        try:
            doing = [[str(what), float(count), float(age)] for what, (count, age) in process["doing"].items()]
            groups, oldest = int(process.get("groups", 0)), float(process.get("oldest_group", 0.0))
            present[str(process["kind"]), str(process["name"])] = {
                "doing": doing,
                "groups": groups,
                "oldest_group": oldest,
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
    return present


def _describe_rows(
    rows: Mapping[tuple[str, str], _Row], seconds: float, present: Mapping[tuple[str, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Describe each process: its shares of the seconds, how much of them it was there, and what it is at now."""

    def order(key: tuple[str, str]) -> tuple[Any, ...]:
        kind, name = key
        numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,12})", name)]
        return (_KINDS.index(kind) if kind in _KINDS else len(_KINDS), numbers)

    described = []
    for kind, name in sorted({*rows, *present}, key=order):
        row = rows.get((kind, name), _Row())
        own = sum(row.seconds.values())
        whole = own if kind == "learner" else max(seconds, own)
        did = sorted(row.seconds.items(), key=lambda item: -item[1])
        described.append(
            {
                "kind": kind,
                "name": name,
                "did": [[what, s / whole] for what, s in did if s > 0],
                "there": own / whole if whole else 0.0,
                "groups": row.groups,
                "now": present.get((kind, name)),
            }
        )
    return described
