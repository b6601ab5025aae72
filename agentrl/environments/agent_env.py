"""Environments of tasks that an agent plays with tools of its own: the task, its files, and the score."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.environments.env import Env, Shared
from agentrl.errors import ContractError
from agentrl.runtime.threads import run_in_thread
from agentrl.types import Reply, Step

_MOST_BYTES = 1 << 24  # of a file that is read back


class AgentEnv(Env[Shared]):
    """An environment that an agent plays (``--agent``): it has no tools, gives the task, and scores what came of it.

    ``reset`` returns the task's messages, and may set ``files`` (contents by name: ``{"src/app.py": "..."}``) and
    ``variables`` of the agent's environment. A command works in a folder of its own with these files in it, and
    `read_file` reads in ``score`` what it left there; a function and a service have them in their task.
    """

    files: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}
    work_folder: Path | None = None  # of the agent, once it has ended, until the episode is closed: a command's alone

    async def play(self, task: AgentTask) -> AgentEnding:
        """Play the episode, where the environment brings the agent itself: then ``--agent`` is left out (optional)."""
        raise ContractError(f"{type(self).__name__} has no method `play`; it is played by an agent: --agent")

    async def step(self, action: Reply) -> Step:
        return Step([], 0.0, True, False, {})

    async def read_file(self, name: str) -> str | None:
        """Read a file that the agent left; None where there is none, or it is a link, a device, or over 16 MiB."""
        if self.work_folder is None:
            return None
        return await run_in_thread(partial(_read_file, self.work_folder, _check_name(self, "read_file", name)))

    @classmethod
    def brings_agent(cls) -> bool:
        """Return True if the environment plays its episodes itself."""
        return cls.play is not AgentEnv.play


def check_task_files(env: AgentEnv) -> None:
    """Raise ContractError where an environment's ``files`` or ``variables`` are no such."""
    name = type(env).__name__
    for attribute in ("files", "variables"):
        value = getattr(env, attribute)
        if not isinstance(value, Mapping) or not all(isinstance(t, str) for pair in value.items() for t in pair):
            raise ContractError(f"{name}.{attribute} is {value!r:.120}; it is a dict of a text for each name")
    for file in env.files:
        _check_name(env, "files", file)
    for variable, text in env.variables.items():
        if not variable or "=" in variable or "\0" in variable + text:
            raise ContractError(f"{name}.variables has {variable!r:.80}, which is no variable of an environment")


def _check_name(env: AgentEnv, what: str, name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ContractError(
            f"{type(env).__name__}.{what}: {name!r:.80} is no file in the agent's folder; say it as 'src/app.py'"
        )
    return name


def _read_file(folder: Path, name: str) -> str | None:
    """Read a file below a folder; no link is followed on the way."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *folders, last = PurePosixPath(name).parts
        for part, flags in (*((f, os.O_DIRECTORY) for f in folders), (last, os.O_NONBLOCK)):
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=handle)
            os.close(handle)
            handle = inner
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            return None
        with os.fdopen(os.dup(handle), "rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)
