"""A command that plays an episode in a sandbox: the endpoint is all that it reaches, and programs all that it reads.

Its network is a loopback of its own. One port of that is opened inside, and handed out: what is said to it is passed on
to the gateway, and nothing else is there to be reached. It has processes, /tmp and /dev of its own, and none of the
run's environment.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import anyio
from anyio.abc import Process

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.process_agent import ProcessAgent, describe_status, name_files
from agentrl.errors import UserError

_ENTER = Path(__file__).with_name("enter_sandbox.py")
_INSIDE = "/tmp/.agentrl"  # folder of what we put there
_WORK = "/tmp/work"  # folder of the task's files
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
_ETC = (
    *(
        "alternatives",
        "ca-certificates",
        "hosts",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "localtime",
        "mime.types",
    ),
    *("nsswitch.conf", "passwd", "group", "pki", "protocols", "services", "ssl"),
)
_KEPT = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV")  # of the run's environment
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
_SIGNALLED = 128  # bubblewrap's exit status, and the number of the signal that ended the command
_CHUNK = 1 << 16


class SandboxedAgent(ProcessAgent):
    """An agent that is a command, in bubblewrap.

    Args:
        readable: further folders and files that it reads.
        hidden: folders that it does not see, though they may lie in one that it reads.
    """

    def __init__(self, words: Sequence[str], readable: Sequence[str] = (), hidden: Sequence[str] = ()) -> None:
        super().__init__(words)
        self.readable = [str(Path(path).absolute()) for path in readable]
        self.hidden = [str(Path(path).absolute()) for path in hidden]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Look whether bubblewrap works. Raises UserError: it does not, and why."""
        if shutil.which("bwrap") is None:
            raise UserError("agent_sandbox: bubblewrap is not installed (apt-get install bubblewrap)")
        if missing := [path for path in self.readable if not await anyio.Path(path).exists()]:
            raise UserError(f"agent_readable: there is no {missing[0]!r}")
        probe = await anyio.run_process([*self._wrap(""), "true"], check=False, env={})
        if probe.returncode:
            said = probe.stderr.decode(errors="replace").strip()
            raise UserError(f"agent_sandbox: bubblewrap does not work here ({said or probe.returncode})")
        async with super().open():
            yield self

    @asynccontextmanager
    async def start(
        self, task: AgentTask, file: str, environment: Mapping[str, str], folder: str
    ) -> AsyncIterator[Process]:
        gateway = urlsplit(task.base_url)
        host, port = str(gateway.hostname), int(gateway.port or 80)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        own = {name: os.environ[name] for name in _KEPT if name in os.environ}
        inside = {"HOME": "/tmp", "TMPDIR": "/tmp", "AGENTRL_TASK": f"{_INSIDE}/task.json"}
        enter = [sys.executable, "-I", "-S", f"{_INSIDE}/enter_sandbox.py", str(theirs.fileno()), str(port)]
        with ours, theirs:
            process = await anyio.open_process(
                [*self._wrap(file, folder), *enter, *name_files(self.words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**own, **environment, **inside},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            async with self.ending(process), _Relay(ours, host, port).open():
                yield process

    def describe(self, status: int, tail: str) -> AgentEnding:
        signalled = status - _SIGNALLED in set(signal.Signals)
        return describe_status(_SIGNALLED - status if signalled else status, tail)

    def _wrap(self, task_file: str, folder: str = "") -> list[str]:
        """Build the command of bubblewrap, before that of the agent."""
        readable = [
            p for p in (*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *self._list_programs()) if os.path.exists(p)
        ]
        links = [p for p in _SYSTEM if os.path.islink(p)]
        return [
            str(shutil.which("bwrap")),
            *_NAMESPACES,
            *("--die-with-parent", "--cap-drop", "ALL", "--hostname", "agent"),
            *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
            *(w for p in readable if p not in links for w in ("--ro-bind", p, p)),
            *(w for p in links for w in ("--symlink", os.readlink(p), p)),
            *(w for p in map(os.path.realpath, self.hidden) if _is_within(p, readable) for w in ("--tmpfs", p)),
            *("--ro-bind", str(_ENTER), f"{_INSIDE}/enter_sandbox.py"),
            *(("--ro-bind", task_file, f"{_INSIDE}/task.json") if task_file else ()),
            *(("--bind", folder, _WORK, "--chdir", _WORK) if folder else ("--chdir", "/tmp")),
            "--",
        ]

    def _list_programs(self) -> list[str]:
        """List what the command needs to read: its program with what that came with, its files, ours."""
        program = shutil.which(self.words[0]) or self.words[0]
        programs = [Path(path) for path in (program, os.path.realpath(program), sys.executable)]
        roots = [str(path.parent.parent) for path in programs if path.parent.name == "bin"]
        files = [str(Path(word).absolute()) for word in (program, *self.words[1:]) if os.path.exists(word)]
        files = [file for file in files if not any(Path(file).is_relative_to(root) for root in roots)]
        folders = [str(Path(file).parent) if os.path.isfile(file) else file for file in files]
        return sorted({p for p in [*roots, sys.base_prefix, *folders, *self.readable] if not _is_system(p)})


def _is_within(path: str, readable: Sequence[str]) -> bool:
    """Return True if a folder is there, and would be read."""
    return os.path.isdir(path) and any(Path(path).is_relative_to(os.path.realpath(p)) for p in readable)


def _is_system(path: str) -> bool:
    return path == "/" or any(Path(path).is_relative_to(p) for p in _SYSTEM)


class _Relay:
    """Passes on what is said to the port that a process in the sandbox hands out."""

    def __init__(self, channel: socket.socket, host: str, port: int) -> None:
        self.channel, self.host, self.port = channel, host, port
        self._lines: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        serving = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            for line in (serving, *self._lines):
                line.cancel()
            await asyncio.gather(serving, *self._lines, return_exceptions=True)

    async def _serve(self) -> None:
        await anyio.wait_readable(self.channel)
        _, handles, _, _ = socket.recv_fds(self.channel, 16, 1)
        if not handles:  # it ended before; its stderr says why
            return
        with socket.socket(fileno=handles[0]) as listener:
            listener.setblocking(False)
            server = await asyncio.start_server(self._connect, sock=listener)
            async with server:
                await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        assert line is not None
        self._lines.add(line)
        try:
            with suppress(OSError):
                there, gateway = await asyncio.open_connection(self.host, self.port)
                try:
                    await asyncio.gather(_pass_on(reader, gateway), _pass_on(there, writer))
                finally:
                    gateway.close()
        finally:
            self._lines.discard(line)
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read, to its end."""
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
