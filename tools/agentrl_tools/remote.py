"""Sandboxes elsewhere, behind one small protocol: a shell and files for each episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import anyio

from agentrl import ContractError, InfraError, Tool, ToolError, Toolset, UserError, tool
from agentrl.errors import suggest
from agentrl.settings.registry import import_object
from agentrl.tools.toolset import fork_error

KINDS = {"e2b": "agentrl_tools.e2b:E2b"}
SPARE_S = 10.0  # beyond the deadlines inside a call: to tell which one passed


class CommandResult(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


class Sandbox(Protocol):
    """A machine of one episode's own. What it raises beside the errors named here means that it is gone."""

    async def start(self) -> None: ...

    async def exec(self, command: str, timeout_s: float) -> CommandResult:
        """Run a shell command. Raises TimeoutError: it took longer."""
        ...

    async def read(self, path: str) -> bytes:
        """Read a file. Raises OSError: there is none, or it cannot be read."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Make or replace a file, and the folders it is in. Raises OSError: it cannot be."""
        ...

    async def close(self) -> None:
        """End it, also when it was never started."""
        ...


@dataclass(frozen=True)
class SandboxSpec:
    """The wanted sandbox. ``lifetime_s``: when it ends by itself, should nobody be left to end it."""

    template: str | None = None
    lifetime_s: int = 900
    internet: bool = False


class Remote(Toolset):
    """A shell and files in a sandbox of a service, one for each episode, started at its first call.

    Args:
        kind: ``e2b``, or ``module:Class`` of a class that keeps `Sandbox`, made from a `SandboxSpec`.
        template: the service's name of what it starts from; its own default where none is given.
        internet: the sandbox may reach the internet.
        lifetime_s: when a sandbox ends by itself, should nobody be left to end it.
        timeout_s: of a command.
        start_timeout_s: of a sandbox's start, the wait for a slot included.
        sandboxes: how many at once; further episodes wait for a slot.
    """

    named_by = "kind"
    shared: _SandboxPool

    def __init__(
        self,
        kind: str,
        template: str | None = None,
        internet: bool = False,
        lifetime_s: int = 900,
        timeout_s: float = 60.0,
        start_timeout_s: float = 40.0,
        sandboxes: int = 16,
    ) -> None:
        if not timeout_s > 0 or not start_timeout_s > 0 or lifetime_s < 1 or sandboxes < 1:
            raise ContractError(
                "tool 'remote': timeout_s and start_timeout_s must be over 0, lifetime_s and sandboxes 1 or more; "
                f"not {timeout_s:g}, {start_timeout_s:g}, {lifetime_s} and {sandboxes}"
            )
        self.kind, self.spec = kind, SandboxSpec(template, lifetime_s, internet)
        self.timeout_s, self.start_timeout_s, self.sandboxes = timeout_s, start_timeout_s, sandboxes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[_SandboxPool]:
        sandboxes = _SandboxPool(_find_factory(self.kind), self.spec, self.start_timeout_s, self.sandboxes)
        sandboxes.make()  # a key that is missing is told now
        try:
            yield sandboxes
        finally:
            with anyio.CancelScope(shield=True):
                await sandboxes.close()

    def begin(self) -> None:
        self._started: Sandbox | None = None
        self._starting = anyio.Lock()

    def fork(self) -> Self:
        raise fork_error(self, "its files and processes are in a sandbox of the episode's own")

    async def close(self) -> None:
        if self._started is not None:
            await self.shared.give_back(self._started)

    @property
    def tool_list(self) -> Sequence[Tool]:
        longest_s = self.start_timeout_s + self.timeout_s + SPARE_S
        return [replace(t, timeout_s=longest_s) for t in super().tool_list]

    @tool
    async def shell(self, command: str) -> str:
        """Run a command in the sandbox's shell; what it wrote, and its exit code if that is not 0.

        Args:
            command: such as "ls -l && python run.py".
        """
        async with self._sandbox() as sandbox:
            try:
                done = await sandbox.exec(command, self.timeout_s)
            except TimeoutError:
                raise ToolError(f"the command took over {self.timeout_s:g} s") from None
        stderr = f"[stderr]\n{done.stderr.rstrip()}" if done.stderr.strip() else ""
        code = f"[exit code {done.exit_code}]" if done.exit_code else ""
        return "\n".join(part for part in (done.stdout.rstrip(), stderr, code) if part) or "[no output]"

    @tool
    async def read_file(self, path: str) -> str:
        """A file of the sandbox, as text.

        Args:
            path: of the file.
        """
        async with self._sandbox() as sandbox:
            content = await sandbox.read(path)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise ToolError(f"{path} is not text: {len(content)} bytes") from None

    @tool
    async def write_file(self, path: str, text: str) -> str:
        """Make a file in the sandbox, or replace it.

        Args:
            path: of the file; folders that are missing are made.
            text: all of its content.
        """
        async with self._sandbox() as sandbox:
            await sandbox.write(path, text.encode("utf-8", "replace"))
        return f"{path} is written"

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        """Yield the episode's own. Its errors are for the model to read, or an infrastructure error."""
        async with self._starting:
            self._started = self._started or await self.shared.take()
        try:
            yield self._started
        except (ToolError, UserError, InfraError):
            raise
        except TimeoutError as error:
            raise InfraError("sandbox_gone", f"the sandbox does not answer: {error}") from error
        except OSError as error:
            raise ToolError(error.strerror or str(error)) from None
        except Exception as error:
            raise InfraError("sandbox_gone", f"the sandbox is gone: {type(error).__name__}: {error}") from error


class _SandboxPool:
    """Those of a run. Each is closed once it was begun to start, whoever is cancelled meanwhile."""

    def __init__(
        self, make: Callable[[SandboxSpec], Sandbox], spec: SandboxSpec, start_timeout_s: float, size: int
    ) -> None:
        self._make, self.spec, self.start_timeout_s, self.size = make, spec, start_timeout_s, size
        self._slots = anyio.Semaphore(size)
        self._starts: dict[Sandbox, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def make(self) -> Sandbox:
        return self._make(self.spec)

    async def take(self) -> Sandbox:
        """Start a sandbox. Raises InfraError ``sandbox_gone``: none can be started, or no slot became free."""
        begun = anyio.current_time()
        try:
            with anyio.fail_after(self.start_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise InfraError("sandbox_gone", f"all {self.size} sandboxes are taken") from None
        sandbox = self.make()
        start = self._starts[sandbox] = asyncio.create_task(sandbox.start())
        left_s = max(self.start_timeout_s - (anyio.current_time() - begun), 0.0)
        try:
            await asyncio.wait({start}, timeout=left_s)
            if not start.done():
                raise InfraError("sandbox_gone", f"the sandbox did not start within {self.start_timeout_s:g} s")
            start.result()
        except BaseException as error:
            self._abandon(sandbox)
            if isinstance(error, Exception) and not isinstance(error, UserError | InfraError):
                words = f"the sandbox cannot be started: {type(error).__name__}: {error}"
                raise InfraError("sandbox_gone", words) from error
            raise
        return sandbox

    async def give_back(self, sandbox: Sandbox) -> None:
        await asyncio.wait({self._abandon(sandbox)})

    async def close(self) -> None:
        for sandbox in list(self._starts):
            self._abandon(sandbox)
        while self._closing:
            await asyncio.wait(self._closing)

    def _abandon(self, sandbox: Sandbox) -> asyncio.Task[None]:
        """Close it in a task of its own: a start that is on its way is awaited, or nobody could end what it began."""
        closing = asyncio.create_task(self._end(sandbox, self._starts.pop(sandbox)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _end(self, sandbox: Sandbox, start: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait({start}, timeout=self.start_timeout_s)
            start.cancel()
            with anyio.move_on_after(SPARE_S):
                await sandbox.close()
        except Exception:
            pass  # it ends by itself, after its lifetime
        finally:
            self._slots.release()


def _find_factory(kind: str) -> Callable[[SandboxSpec], Sandbox]:
    """Find the class of a kind. Raises UserError if there is none."""
    if kind not in KINDS and ":" not in kind:
        raise UserError(f"tool 'remote': no kind {kind!r}{suggest(kind, KINDS)} (or say remote:module:Class)")
    made: Callable[[SandboxSpec], Sandbox] = import_object(f"tool 'remote:{kind}'", KINDS.get(kind, kind))
    return made
