"""The same resets in another process, where strings hash to other numbers: what hangs on the order of a set shows.

python -m agentrl.inspection.elsewhere ASKED.json SAID.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from agentrl import registry
from agentrl.env import EnvSpec
from agentrl.inspection.plays import Plays

HASH_SEEDS = ("1", "2", "3")
TIMEOUT_S = 120.0


def importable(spec: EnvSpec) -> str | None:
    """A name by which another process finds the class; ``None`` where it is inside a function, or in a script."""
    if ":" in spec.name or spec.name in registry.available("env"):
        return spec.name
    module, name = spec.cls.__module__, spec.cls.__qualname__
    return None if module == "__main__" or "<" in name else f"{module}:{name}"


def question(spec: EnvSpec, tasks: Sequence[int]) -> str | None:
    """What to ask the other process; ``None`` where it cannot be written down."""
    asked: dict[str, Any] = {"path": sys.path, "env": importable(spec), "settings": spec.settings, "tasks": list(tasks)}
    asked |= {"tools": list(spec.kit.more), "tool": spec.kit.settings}
    try:
        return json.dumps(asked) if asked["env"] is not None else None
    except (TypeError, ValueError):  # settings that are objects
        return None


async def openings(asked: str) -> list[list[str]] | str:
    """The openings of the tasks, once a hash seed; or why there are none."""
    found: list[list[str] | str] = [[]] * len(HASH_SEEDS)

    async def one(place: int) -> None:
        found[place] = await _openings(asked, HASH_SEEDS[place])

    async with anyio.create_task_group() as processes:
        for place in range(len(HASH_SEEDS)):
            processes.start_soon(one, place)
    return next((f for f in found if isinstance(f, str)), [f for f in found if isinstance(f, list)])


async def _openings(asked: str, hash_seed: str) -> list[str] | str:
    command = [sys.executable, "-m", "agentrl.inspection.elsewhere"]
    paths = os.pathsep.join(p for p in sys.path if p)
    surroundings = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    with anyio.move_on_after(TIMEOUT_S):
        process = await anyio.run_process(command, input=asked.encode(), check=False, env=surroundings)
        if process.returncode == 0:
            found: list[str] = json.loads(process.stdout)
            return found
        return (process.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    return f"it took over {TIMEOUT_S:g} s"


def main() -> None:
    """In the other process. What the environment prints goes to stderr."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    question: dict[str, Any] = json.load(sys.stdin)
    sys.path[:] = question["path"]

    async def go() -> list[str]:
        spec = EnvSpec(question["env"], **question["settings"]).equipped(question["tools"], question["tool"])
        async with spec.open():
            return await Plays(spec).openings(question["tasks"])

    with said:
        json.dump(anyio.run(go), said)


if __name__ == "__main__":
    main()
