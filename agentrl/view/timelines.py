"""The timelines of a run's steps: a line of ``timeline.jsonl`` each, read when it is asked for."""

from __future__ import annotations

from typing import Any

from agentrl.view.step_lines import StepLines

ORDER = (
    *("evaluate", "generate", "agent", "tools", "tool/", "env", "reward", "render", "learn", "sync", "write"),
    "checkpoint",
)


class Timelines(StepLines):
    """The pictures in the file."""

    def pictures(self, step: int) -> list[dict[str, Any]]:
        """Return a step's pictures: of the step, and of the evaluation and the checkpoint after it, with sorted lanes.

        Each has `kind`, `begin` (seconds since the run's start), `seconds`, `lanes` as [name, seconds, intervals] and
        `waited` as [begin, end, owner]. A line that cannot be read is left out.
        """
        pictures = []
        for kind in ("step", "evaluation", "save"):
            if (picture := _build_picture(self.read(step, kind))) is not None:
                pictures.append({"kind": kind, **picture})
        return pictures


def _build_picture(raw: Any) -> dict[str, Any] | None:
    try:
        lanes = {str(name): _pairs(intervals) for name, intervals in raw["lanes"].items()}
        busy = {str(name): float(seconds) for name, seconds in raw["busy"].items()}
        return {
            "begin": float(raw["begin"]),
            "seconds": float(raw["seconds"]),
            "lanes": [[name, busy[name], lanes[name]] for name in _sort_lanes(lanes)],
            "waited": [[float(a), float(b), str(owner)] for a, b, owner in raw["waited"]],
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _pairs(intervals: Any) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in intervals]


def _sort_lanes(lanes: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Return the names of lanes that are not empty, in the order of a step; others follow, idle is last."""

    def rank(name: str) -> tuple[int, str]:
        kind = "tool/" if name.startswith("tool/") else name
        return (ORDER.index(kind) if kind in ORDER else len(ORDER) + (name == "idle"), name)

    return sorted((name for name in lanes if lanes[name]), key=rank)
