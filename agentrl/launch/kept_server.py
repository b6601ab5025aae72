"""A vLLM server of a run that is kept running: where it ends, it is started again, by the same address if it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import anyio

from agentrl.errors import UserError
from agentrl.launch.endings import describe_ending
from agentrl.launch.run_process import MachineLost, RunProcess, Say, Write, follow_lines

MOST_QUICK = 3  # ends in a row without an answer, after which a server is left out
PAUSE_S = 1.0


class KeptServer:
    """A server, and the address that it has answered at.

    Args:
        arguments: of ``agentrl serve``, but for where it listens.
        spans_machines: whether other machines ask it, so that it listens at its machine's address for those.
        wait_s: how long others wait for it where it waits for room again.
        write: takes what it writes, but for its address.
        say: takes a sentence for whoever looks at the run.
        on_answer: called when it answers, also at another address than before.
    """

    def __init__(
        self,
        process: RunProcess,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        spans_machines: bool,
        wait_s: float,
        write: Write,
        say: Say,
        on_answer: Callable[[], None],
    ) -> None:
        self._process, self._arguments, self._environment = process, tuple(arguments), environment
        self._spans_machines, self._wait_s = spans_machines, wait_s
        self._write, self._say, self._on_answer = write, say, on_answer
        self._address, self._port = "", 0
        self._line, self._settled = b"", anyio.Event()
        self.url, self.answers = "", False

    @property
    def name(self) -> str:
        return self._process.name

    async def keep(self) -> None:
        """Run the server, and again where it ends, until this is cancelled.

        Raises:
            UserError: it has never answered; what it wrote stands above.
        """
        quick = 0
        while True:
            ending = await self._run()
            if not self.url:
                raise UserError(f"{self.name} {ending} before it answered; what it wrote stands above")
            quick = 0 if self.answers else quick + 1
            self.answers = False
            await self._clear()
            if quick == MOST_QUICK:
                break
            if self._settled.is_set():  # else whoever waits goes on waiting
                self._settled = anyio.Event()
            self._say(f"{self.name} {ending}; it is started again")
            await anyio.sleep(PAUSE_S)
            if quick:
                self._port = 0  # somebody may have taken it
        self._say(f"{self.name} ended {MOST_QUICK} times before it answered; the run goes on without it")
        self._settled.set()

    @property
    def is_settled(self) -> bool:
        return self._settled.is_set()

    async def settle(self) -> None:
        """Wait until it answers, is left out, or waits for room itself."""
        while not self._settled.is_set():
            await self._settled.wait()

    async def _run(self) -> str:
        """Start it where it was, or at a new place; return how it ended.

        Raises:
            UserError: it cannot be started, and it has never answered.
        """
        try:
            await self._start(await self._find_place())
            return describe_ending(await follow_lines(self._process, self._hear))
        except MachineLost as lost:
            return describe_ending(lost)
        except UserError as error:
            if not self.url:
                raise
            return f"did not start ({error})"

    async def _find_place(self) -> str:
        """Return the address of its machine. Whoever waits for a server goes on where it waits for room itself."""
        with anyio.move_on_after(self._wait_s if self.url else None):
            return await self._process.locate()
        self._say(
            f"there is no room for {self.name}, for {self._wait_s:g} s; the run goes on without it until there is"
        )
        self._settled.set()
        return await self._process.locate()

    async def _start(self, address: str) -> None:
        if address != self._address or not self._port:
            self._address, self._port = address, await self._process.reserve_port()
        where = ["--port", str(self._port), *(["--host", address] if self._spans_machines else [])]
        self._line = b""
        await self._process.start([*self._arguments, *where], self._environment)

    def _hear(self, stream: str, data: bytes) -> None:
        """Look for the line that it prints when it answers; hand on all others."""
        if stream == "err":
            self._write(stream, data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"http") and not self.answers:
                self._answer(line.decode().strip())
            else:
                self._write(stream, line + b"\n")

    def _answer(self, url: str) -> None:
        self.answers, self.url = True, url
        self._settled.set()
        self._on_answer()

    async def _clear(self) -> None:
        """End what the last one has left behind, so that its port is free."""
        try:
            await self._process.kill()
        except MachineLost:
            return
