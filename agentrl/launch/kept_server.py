"""A vLLM server of a run that is kept running: where it ends, it is started again, by the same address if it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import anyio

from agentrl.errors import UserError
from agentrl.launch.endings import describe_ending
from agentrl.launch.run_process import PlaceLost, RunProcess, Write

MOST_QUICK = 3  # ends in a row without an answer, after which a server is left out
PAUSE_S = 1.0


class KeptServer:
    """A server, and the address that it has answered at.

    Args:
        words: of ``agentrl serve``, but for where it listens.
        elsewhere: whether other machines ask it, so that it listens at its machine's address for those.
        write: takes what it writes to stderr.
        say: takes a sentence for whoever looks at the run.
        on_answer: called when it answers, also at another address than before.
    """

    def __init__(
        self,
        process: RunProcess,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        elsewhere: bool,
        write: Write,
        say: Callable[[str], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._process, self._words, self._environment = process, tuple(words), environment
        self._elsewhere, self._write, self._say, self._on_answer = elsewhere, write, say, on_answer
        self._address, self._port = "", 0
        self._line, self._settled = b"", anyio.Event()
        self.url, self.answers = "", False

    async def keep(self) -> None:
        """Run the server, and again where it ends, until this is cancelled.

        Raises:
            UserError: it has never answered; what it wrote stands above.
        """
        quick = 0
        while True:
            try:
                how = describe_ending(await self._run())
            except PlaceLost as lost:
                how = describe_ending(lost)
            if not self.url:
                raise UserError(f"{self._process.name} {how} before it answered; what it wrote stands above")
            quick = 0 if self.answers else quick + 1
            self.answers = False
            await self._clear()
            if quick == MOST_QUICK:
                break
            if self._settled.is_set():  # else whoever waits goes on waiting
                self._settled = anyio.Event()
            self._say(f"{self._process.name} {how}; it is started again")
            await anyio.sleep(PAUSE_S)
        self._say(f"{self._process.name} ended {MOST_QUICK} times before it answered; the run goes on without it")
        self._settled.set()

    async def settle(self) -> None:
        """Wait until it answers, or is left out."""
        await self._settled.wait()

    async def _run(self) -> int:
        """Start it where it was, or at a new place; return its exit status."""
        address = await self._process.locate()
        if address != self._address:
            self._address, self._port = address, await self._process.reserve_port()
        where = ["--port", str(self._port), *(["--host", address] if self._elsewhere else [])]
        await self._process.start([*self._words, *where], self._environment)
        self._line = b""
        return await self._process.follow(self._hear)

    def _hear(self, stream: str, data: bytes) -> None:
        """Look for the line that it prints when it answers."""
        if stream == "err":
            self._write(stream, data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"http") and not self.answers:
                self.answers, self.url = True, line.decode().strip()
                self._settled.set()
                self._on_answer()

    async def _clear(self) -> None:
        """End what the last one has left behind, so that its port is free."""
        try:
            await self._process.kill()
        except PlaceLost:
            return
