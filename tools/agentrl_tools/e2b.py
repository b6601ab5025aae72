"""E2B's sandboxes, through its own client library. The key is in E2B_API_KEY."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import anyio

from agentrl.errors import UserError
from agentrl_tools.remote import CommandResult, SandboxSpec

if TYPE_CHECKING:
    from e2b import AsyncSandbox


LATE_S = 3.0  # the service ends a command that takes too long; should it not, we do


class E2b:
    """One sandbox of E2B."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Check the library and the key. Raises UserError if one is missing."""
        try:
            import e2b  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"tool 'remote:e2b' needs the package e2b: pip install 'agentrl-gym[e2b]' ({error})"
            ) from None
        if not os.environ.get("E2B_API_KEY"):
            raise UserError("tool 'remote:e2b' needs a key: set E2B_API_KEY in the environment")
        self.spec = spec
        self._sandbox: AsyncSandbox | None = None

    async def start(self) -> None:
        from e2b import AsyncSandbox
        from e2b.exceptions import AuthenticationException, InvalidArgumentException

        try:
            self._sandbox = await AsyncSandbox.create(
                template=self.spec.template,
                timeout=self.spec.lifetime_s,
                allow_internet_access=self.spec.internet,
            )
        except (AuthenticationException, InvalidArgumentException) as error:  # of the key, of the template
            raise UserError(f"E2B starts no sandbox: {error}") from None

    async def exec(self, command: str, timeout_s: float) -> CommandResult:
        from e2b import CommandExitException, TimeoutException

        begun = anyio.current_time()
        try:
            with anyio.fail_after(timeout_s + LATE_S):
                done = await self._running.commands.run(command, timeout=timeout_s)
        except CommandExitException as error:
            return CommandResult(error.exit_code, error.stdout or "", error.stderr or "")
        except TimeoutException as error:  # also what it raises for a sandbox that went away
            if type(error) is TimeoutException and anyio.current_time() - begun >= timeout_s:
                raise TimeoutError(f"over {timeout_s:g} s") from None
            raise
        return CommandResult(done.exit_code, done.stdout, done.stderr)

    async def read(self, path: str) -> bytes:
        from e2b import InvalidArgumentException
        from e2b.exceptions import FileNotFoundException

        try:
            return bytes(await self._running.files.read(path, format="bytes"))
        except FileNotFoundException:
            raise FileNotFoundError(errno.ENOENT, f"there is no file {path}") from None
        except InvalidArgumentException as error:
            raise OSError(errno.EINVAL, f"{path}: {error}") from None

    async def write(self, path: str, content: bytes) -> None:
        from e2b import InvalidArgumentException, NotEnoughSpaceException

        try:
            await self._running.files.write(path, content)
        except (InvalidArgumentException, NotEnoughSpaceException) as error:
            raise OSError(errno.EINVAL, f"{path}: {error}") from None

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.kill()

    @property
    def _running(self) -> AsyncSandbox:
        if self._sandbox is None:
            raise RuntimeError("the sandbox was not started")
        return self._sandbox
