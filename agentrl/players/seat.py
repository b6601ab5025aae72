"""A player as the controller has it: its connection, what it was told, and what it last said of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.players.connection import FrameStream
from agentrl.players.engine_door import EngineDoor
from agentrl.runtime.activity import ActivityCount, sum_waits
from agentrl.runtime.stalls import Wait

SILENT_S = 3.0  # since the last beat: then it gives no sign of life


@dataclass(eq=False)
class PlayerSeat:
    """A player that has joined.

    Args:
        number: of the run's players, in the order in which they joined.
        name: that sentences call it by.
        door: to the run's engine; None where it samples elsewhere.
    """

    number: int
    name: str
    connection: FrameStream
    door: EngineDoor | None
    heard: float  # when a whole frame of it last came
    quiet: float = 0.0  # seconds since, as far as this process was there to hear it
    share: int = 0  # episodes that it may have in play
    terms: set[int] = field(default_factory=set)  # that it has been told
    servers: Sequence[bool] = ()  # which ones are up, as it was last told
    state: object = None  # of the training, that it was last told
    waits: Sequence[tuple[int, str, float, float | None]] = ()  # terms, what for, seconds, limit
    queued: int = 0  # episodes that wait for a slot there
    requests: Sequence[int] = ()  # that each server is asked for turns by it
    turns: int = 0
    groups: int = 0  # that it has answered
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # turns that it has asked for

    def hear(self, now: float, fields: Mapping[str, Any]) -> None:
        """Take in what its last beat says of it."""
        if "waits" in fields:
            self.waits = [
                (int(terms), str(what), float(seconds), None if limit is None else float(limit))
                for terms, what, seconds, limit in fields["waits"]
            ]
        self.queued = int(fields.get("queued", self.queued))
        self.requests = [int(count) for count in fields.get("requests", self.requests)]
        self.turns += fields.get("turns", 0)

    def _measure_silence(self, now: float) -> float:
        """Return the seconds in which nothing of it arrived; a long frame may take a while."""
        return now - max(self.heard, self.connection.heard)

    def sum_waits(self, now: float, idle: str) -> dict[str, ActivityCount]:
        """Sum what its episodes wait for, of all terms."""
        if (silence := self._measure_silence(now)) > SILENT_S:
            return {"no sign of life": ActivityCount(1, silence)}
        waits = (Wait(what, seconds + now - self.heard) for _, what, seconds, _ in self.waits)
        return sum_waits(waits, self.queued, idle)

    def list_waits(self, now: float, terms: int) -> list[Wait]:
        """List what its episodes wait for, with its name."""
        if (silence := self._measure_silence(now)) > SILENT_S:
            held = sum(wait[0] == terms for wait in self.waits) or 1
            return [Wait(f"player {self.name}, which gives no sign of life", silence)] * held
        return [
            Wait(f"{what} at player {self.name}", seconds + now - self.heard, limit)
            for number, what, seconds, limit in self.waits
            if number == terms
        ]

    async def close(self, why: str, *, at_once: bool = False) -> None:
        """Tell it that it is over, and close the connection."""
        tasks = {*self.tasks.values()} - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.door is not None:
            self.door.close()
        if at_once:
            self.connection.abort()
            return
        self.connection.send("end", why=why)
        await self.connection.close()
