"""Processes of a run that run nothing: a test says what each one writes, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from agentrl.launch.run_process import MachineLost, Write

Script = Callable[["ScriptedProcess"], None]  # what happens as it starts


class ScriptedProcess:
    """A process whose starts follow scripts, one after the other; then it runs until it is ended.

    Args:
        address: of its machine; a test may change it, or clear `room`, so that it is looked for.
        obeys: ends by a signal.
    """

    def __init__(self, name: str, *scripts: Script, address: str = "10.0.0.1", obeys: bool = True) -> None:
        self.name, self.address, self.obeys = name, address, obeys
        self.scripts = list(scripts)
        self.starts: list[tuple[list[str], dict[str, str]]] = []
        self.signals: list[int] = []
        self.ports = 0
        self.kills = 0
        self.begun = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()
        self._written: list[bytes] = []
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def write(self, text: str) -> None:
        self._written.append(text.encode())

    def end(self, status: int) -> None:
        if not self._end.done():
            self._end.set_result(status)

    def lose(self, why: str) -> None:
        if not self._end.done():
            self._end.set_exception(MachineLost(why))

    async def locate(self) -> str:
        await self.room.wait()
        if not self.address:
            raise MachineLost("no room")
        return self.address

    async def reserve_port(self) -> int:
        self.ports += 1
        return 7000 + self.ports

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.starts.append(([*arguments], {**environment}))
        self._written, self._end = [], asyncio.get_running_loop().create_future()
        self.begun.set()
        if self.scripts:
            self.scripts.pop(0)(self)

    async def follow(self, write: Write) -> int:
        for text in self._written:
            write("out", text)
        return await self._end

    async def send_signal(self, number: int) -> None:
        self.signals.append(int(number))
        if self.obeys:
            self.end(128 + number)

    async def kill(self) -> None:
        self.kills += 1
        self.end(-9)
