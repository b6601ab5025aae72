"""The input for the model's turns: lines that a person types at a terminal, or lines of a file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import anyio

from agentrl.cli.transcript import Transcript
from agentrl.errors import UserError
from agentrl.play.human_engine import Turn, WireMessage
from agentrl.play.typed_calls import TypedCall, build_message, parse_calls

HELP = """  text                     ends the turn; \\ at a line's end goes on in the next
  tool(a=1, b="x")         adds a call to the turn; several with ; between
  /call TOOL {"a": 1}      the same, arguments as JSON, nothing checked
  (an empty line)          sends the calls
  /say TEXT                text that looks like something else; /say alone says nothing at all
  /undo  /tools  /quit     take the last call back; the tools again; leave
"""


class UserQuit(Exception):
    """The person, or the script, stopped before the episode's end."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


class TerminalInput:
    """Lines from standard input, read without a thread that would hold it after the episode."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self._rest = b""
        self._ended = False

    async def take(self, turn: Turn) -> WireMessage:
        """Read the lines of one turn until it ends. Raises UserQuit."""
        calls: list[TypedCall] = []
        self.transcript.hint("type /help for what you can type" if len(turn.messages) == len(turn.new) else "")
        while True:
            line = await self._read_entry(calls)
            try:
                if (done := self._act_on(line, turn, calls)) is not None:
                    return done
            except UserError as error:
                self._report_mistake(str(error))

    def _act_on(self, line: str, turn: Turn, calls: list[TypedCall]) -> WireMessage | None:
        """Act on a line; return the turn if the line ends one."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "/help":
                self.transcript.hint(HELP)
            case "/tools":
                self.transcript.show_tools(turn.tools)
            case "/undo":
                self.transcript.hint(f"took back {calls.pop()[0]}" if calls else "there is no call to take back")
            case "/quit":
                raise UserQuit("you quit; nothing was scored")
            case "/say":
                return build_message(rest, calls)
            case "":
                return build_message("", calls) if calls else None
            case _:
                return self._read_reply(line, turn, calls)
        return None

    def _read_reply(self, line: str, turn: Turn, calls: list[TypedCall]) -> WireMessage | None:
        if line.startswith("/") and not line.startswith("/call"):
            raise UserError(f"no command {line.split()[0]!r}; /help shows them, /say TEXT says it as text")
        if new_calls := parse_calls(line, turn.tools):
            calls += new_calls
            self.transcript.hint(f"{len(calls)} call{'s' * (len(calls) > 1)} in this turn; an empty line sends")
            return None
        return build_message(line, calls)

    def _report_mistake(self, sentence: str) -> None:
        self.transcript.hint(sentence)

    async def _read_entry(self, calls: list[TypedCall]) -> str:
        """Read a line; one that ends with a backslash continues in the next."""
        self.transcript.ask()
        line = await self._read_line(calls)
        while line.endswith("\\") and not line.endswith("\\\\"):
            line = line[:-1] + "\n" + await self._read_line(calls)
        return line

    async def _read_line(self, calls: list[TypedCall]) -> str:
        while b"\n" not in self._rest and not self._ended:
            read = await self._read()
            self._ended, self._rest = not read, self._rest + read
        if self._ended and not self._rest:
            raise UserQuit("the input is over; nothing was scored")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    async def _read(self) -> bytes:
        where = sys.stdin.fileno()
        with suppress(PermissionError):  # epoll refuses what is always ready: a file, /dev/null
            await anyio.wait_readable(where)
        return os.read(where, 1 << 16)


class ScriptInput(TerminalInput):
    """Lines from a file, as a person would type them. A mistake in it ends the episode."""

    def __init__(self, path: Path, transcript: Transcript) -> None:
        super().__init__(transcript)
        self.path, self._number = path, 0
        try:
            self._lines = iter(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the script {str(path)!r}: {getattr(error, 'strerror', error)}") from None

    def _report_mistake(self, sentence: str) -> None:
        raise UserError(f"{self.path}, line {self._number}: {sentence}")

    async def _read_line(self, calls: list[TypedCall]) -> str:
        line = next(self._lines, None)
        self._number += line is not None
        if line is None and not calls:
            raise UserQuit(f"{self.path} ended after {self._number} lines, before the episode did", status=1)
        line = line or ""  # at the end: the calls are sent
        self.transcript.echo(line)
        return line
