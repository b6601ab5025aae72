"""Who types the model's turns: a person at a terminal, or a file of lines."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import anyio

from agentrl.chair import Turn, Wire
from agentrl.cli.table import Table
from agentrl.errors import UserError
from agentrl.typed import Call, calls_in, message

HELP = """  text                     ends the turn; \\ at a line's end goes on in the next
  tool(a=1, b="x")         adds a call to the turn; several with ; between
  /call TOOL {"a": 1}      the same, arguments as JSON, nothing checked
  (an empty line)          sends the calls
  /say TEXT                text that looks like something else; /say alone says nothing at all
  /undo  /tools  /quit     take the last call back; the tools again; leave
"""


class Left(Exception):
    """The chair was left before the episode's end."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


class Person:
    """Reads lines from standard input, without a thread that would hold it when the episode is over."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._rest = b""
        self._ended = False

    async def take(self, turn: Turn) -> Wire:
        """The lines of one turn, read until it ends. Raises Left."""
        calls: list[Call] = []
        self.table.hint("type /help for what you can type" if len(turn.messages) == len(turn.new) else "")
        while True:
            line = await self._text(calls)
            try:
                if (done := self._heed(line, turn, calls)) is not None:
                    return done
            except UserError as error:
                self._mistaken(str(error))

    def _heed(self, line: str, turn: Turn, calls: list[Call]) -> Wire | None:
        """What a line does; the turn, where it ends it."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "/help":
                self.table.hint(HELP)
            case "/tools":
                self.table.show_tools(turn.tools)
            case "/undo":
                self.table.hint(f"took back {calls.pop()[0]}" if calls else "there is no call to take back")
            case "/quit":
                raise Left("left the chair; nothing was scored")
            case "/say":
                return message(rest, calls)
            case "":
                return message("", calls) if calls else None
            case _:
                return self._said(line, turn, calls)
        return None

    def _said(self, line: str, turn: Turn, calls: list[Call]) -> Wire | None:
        if line.startswith("/") and not line.startswith("/call"):
            raise UserError(f"no command {line.split()[0]!r}; /help shows them, /say TEXT says it as text")
        if found := calls_in(line, turn.tools):
            calls += found
            self.table.hint(f"{len(calls)} call{'s' * (len(calls) > 1)} in this turn; an empty line sends")
            return None
        return message(line, calls)

    def _mistaken(self, sentence: str) -> None:
        self.table.hint(sentence)

    async def _text(self, calls: list[Call]) -> str:
        """A line; those that end with a backslash go on in the next."""
        self.table.ask()
        line = await self._line(calls)
        while line.endswith("\\") and not line.endswith("\\\\"):
            line = line[:-1] + "\n" + await self._line(calls)
        return line

    async def _line(self, calls: list[Call]) -> str:
        while b"\n" not in self._rest and not self._ended:
            read = await self._read()
            self._ended, self._rest = not read, self._rest + read
        if self._ended and not self._rest:
            raise Left("the input is over; nothing was scored")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    async def _read(self) -> bytes:
        where = sys.stdin.fileno()
        with suppress(PermissionError):  # epoll refuses what is always ready: a file, /dev/null
            await anyio.wait_readable(where)
        return os.read(where, 1 << 16)


class Script(Person):
    """Lines from a file: what a person would type. A mistake in it ends the play."""

    def __init__(self, path: Path, table: Table) -> None:
        super().__init__(table)
        self.path, self._number = path, 0
        try:
            self._lines = iter(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the script {str(path)!r}: {getattr(error, 'strerror', error)}") from None

    def _mistaken(self, sentence: str) -> None:
        raise UserError(f"{self.path}, line {self._number}: {sentence}")

    async def _line(self, calls: list[Call]) -> str:
        line = next(self._lines, None)
        self._number += line is not None
        if line is None and not calls:
            raise Left(f"{self.path} ended after {self._number} lines, before the episode did", status=1)
        line = line or ""  # at the end: the calls are sent
        self.table.echo(line)
        return line
