"""The same resets in another process, where strings hash to other numbers: a task that depends on set order shows.

python -m agentrl.checks.other_process < REQUEST.json > OPENINGS.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from agentrl.checks.harness import open_harness
from agentrl.environments.spec import EnvSpec
from agentrl.settings import registry
from agentrl.settings.values import find_import_name

HASH_SEEDS = ("1", "2", "3")
TIMEOUT_S = 120.0


def _find_import_name(spec: EnvSpec) -> str | None:
    """Return a name by which another process finds the class; None if it is inside a function, or in a script."""
    if ":" in spec.name or spec.name in registry.list_registered("env"):
        return spec.name
    return find_import_name(spec.cls)


def format_request(spec: EnvSpec, tasks: Sequence[int]) -> str | None:
    """Format the request to the other process as JSON; return None if it cannot be written as JSON."""
    name, binding = _find_import_name(spec), spec.tool_binding
    request = {"path": sys.path, "env": name, "settings": spec.settings, "tasks": list(tasks)}
    try:
        tools = {"tools": list(binding.extra_tools), "tool": binding.settings}
        return json.dumps({**request, **tools}) if name is not None else None
    except (TypeError, ValueError):  # settings that are objects
        return None


async def run_openings(request: str) -> list[list[str]] | str:
    """Return the openings of the tasks for each hash seed, or the error as text."""
    results: list[list[str] | str] = [[]] * len(HASH_SEEDS)

    async def one(index: int) -> None:
        results[index] = await _run_process(request, HASH_SEEDS[index])

    async with anyio.create_task_group() as processes:
        for index in range(len(HASH_SEEDS)):
            processes.start_soon(one, index)
    return next((r for r in results if isinstance(r, str)), [r for r in results if isinstance(r, list)])


async def _run_process(request: str, hash_seed: str) -> list[str] | str:
    command = [sys.executable, "-m", "agentrl.checks.other_process"]
    paths = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    with anyio.move_on_after(TIMEOUT_S):
        process = await anyio.run_process(command, input=request.encode(), check=False, env=environment)
        if process.returncode == 0:
            openings: list[str] = json.loads(process.stdout)
            return openings
        return (process.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    return f"it took over {TIMEOUT_S:g} s"


def _main() -> None:
    """Answer a request, in the other process. What the environment prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request: dict[str, Any] = json.load(sys.stdin)
    sys.path[:] = request["path"]

    async def go() -> list[str]:
        spec = EnvSpec(request["env"], **request["settings"]).with_tools(request["tools"], request["tool"])
        async with open_harness(spec) as harness:
            return await harness.openings(request["tasks"])

    with out:
        json.dump(anyio.run(go), out)


if __name__ == "__main__":
    _main()
