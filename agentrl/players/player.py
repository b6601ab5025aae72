"""A player: it joins a controller, rolls out the groups that it is leased, and sends them back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import anyio

import agentrl
from agentrl.engines.vllm.turn_servers import TurnServers
from agentrl.errors import ProcessLostError, UserError
from agentrl.gateway.gateway import Gateway
from agentrl.gateway.open_gateway import let_agents_play, open_gateway
from agentrl.players.connection import ConnectionEnded, Fields, FrameStream, KeyRefused, PlayerFrame, Shown, connect
from agentrl.players.controller import WIRE
from agentrl.players.group_bytes import pack_group
from agentrl.players.player_engine import build_engine
from agentrl.players.recipe import build_renderer, read_agent
from agentrl.players.shared_tools import set_breaker, share_tools
from agentrl.players.terms import build_rollout, open_spec, unpack_plain
from agentrl.players.told_lanes import describe_stretch
from agentrl.rewards.trainer_state import TrainerState, set_trainer_state
from agentrl.rollout.concurrency import ConcurrencyLimiter
from agentrl.rollout.rollout import Rollout, check_deadlines

PlayerKey = str | Callable[[], str]  # the key, or what looks it up, again for each try
BEAT_S, RETRY_S = 0.25, 1.0
_MOST_WAITS = 2_000  # that a beat tells


@dataclass
class GivenLimit(ConcurrencyLimiter):
    """Slots for as many episodes as the controller gives; it counts the turns' seconds, which that one follows."""

    given: int = 1
    turns: int = 0
    engine_s: float = 0.0
    other_s: float = 0.0

    @property
    def limit(self) -> int:
        return self.given

    def record_turn(self, engine_s: float, other_s: float, count: int = 1) -> None:
        self.turns += count
        self.engine_s, self.other_s = self.engine_s + count * engine_s, self.other_s + count * other_s

    def set_limit(self, given: int) -> None:
        """Give slots for so many episodes."""
        self.given = given
        self._wake_waiting()

    def take(self) -> Fields:
        """Return what was counted since the last time."""
        told = {"turns": self.turns, "engine_s": self.engine_s, "other_s": self.other_s}
        self.turns, self.engine_s, self.other_s = 0, 0.0, 0.0
        return told


@dataclass(eq=False)
class _Played:
    """The rollout of some terms, or why it could not be made; and how far its counters were told."""

    rollout: Rollout | None
    problem: UserError | None = None
    turns: int = 0
    tokens: int = 0
    cancelled: int = 0

    def take(self) -> Fields:
        """Return what was counted since the last time; nothing where that is nothing."""
        rollout = self.rollout
        if rollout is None:
            return {}
        told: Fields = {
            "turns": rollout.turns - self.turns,
            "tokens": rollout.tokens - self.tokens,
            "cancelled": rollout.cancelled - self.cancelled,
        }
        self.turns, self.tokens, self.cancelled = rollout.turns, rollout.tokens, rollout.cancelled
        if rollout.offered_tools.changed:
            told["offered"], rollout.offered_tools.changed = rollout.offered_tools.lists, False
        told |= describe_stretch(rollout.lanes.cut(), rollout.lanes.clock())
        return {name: value for name, value in told.items() if value}


@dataclass
class Player:
    """A player that has joined; `run` returns when the run is over, or the connection."""

    connection: FrameStream
    welcome: PlayerFrame
    say: Callable[[str], None]
    ended: str = ""  # why the controller ended it
    groups: int = 0  # that it has sent back
    _played: dict[int, _Played] = field(default_factory=dict)  # by the number of the terms
    _leases: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)  # episodes that ended, by lease
    _asked: dict[int, asyncio.Future[PlayerFrame]] = field(default_factory=dict)
    _specs: Fields = field(default_factory=dict)
    _attempts: Counter[str] = field(default_factory=Counter)
    _gateway: Gateway | None = None  # where an agent plays
    _numbers: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        fields = self.welcome.fields
        self.slots = GivenLimit(1)
        self.renderer, self.grammar = build_renderer(fields["renderer"], self.welcome.body)
        self.engine = build_engine(fields["engine"], self.connection, self._ask)
        self._work: asyncio.Queue[PlayerFrame | None] = asyncio.Queue()
        self._patience_s = max(60.0, 2 * float(fields["timeout_s"]))

    async def run(self) -> None:
        """Roll out what is leased, until the run is over, or this process is told to end.

        Raises:
            ConnectionEnded: the controller is gone.
        """
        share_tools(self.connection, self._ask)
        async with AsyncExitStack() as held, self.engine:
            receiving, beating = asyncio.create_task(self._receive()), asyncio.create_task(self._beat())
            try:
                await self._open_gateway(held)
                while (frame := await self._work.get()) is not None:
                    if frame.kind == "terms":
                        await self._open_terms(held, frame.fields["number"], frame.fields["terms"])
                    else:
                        self._start(frame.fields)
            finally:
                beating.cancel()
                await _end_tasks([*self._leases.values(), beating])
                if self.ended:
                    receiving.cancel()
                await asyncio.wait({receiving})
            if not receiving.cancelled():
                receiving.result()

    def leave(self, why: str) -> None:
        """Hand all leases back, and end."""
        self.ended = self.ended or f"was ended by {why}"
        self.connection.send("leaving", why=self.ended)
        self._work.put_nowait(None)

    # -- what the controller says ------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Take in frames: leases go in line, answers to whoever waits for them."""
        try:
            while not self.ended:
                frame = await asyncio.wait_for(self.connection.receive(), self._patience_s)
                self._handle(frame)
        except (ConnectionEnded, TimeoutError) as error:
            lost = error if isinstance(error, ConnectionEnded) else ConnectionEnded("gives no sign of life")
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(lost)
            if not self.ended:
                raise lost from None
        finally:
            self._work.put_nowait(None)

    def _handle(self, frame: PlayerFrame) -> None:
        fields = frame.fields
        if frame.kind in ("completion", "granted"):
            asked = self._asked.pop(fields["id"], None)
            if asked is not None and not asked.done():
                asked.set_result(frame)
            elif frame.kind == "granted":  # to a call that was cancelled meanwhile
                self.connection.send("release", tool=fields["tool"])
        elif frame.kind in ("lease", "terms"):
            self._work.put_nowait(frame)
        elif frame.kind == "share":
            self.slots.set_limit(int(fields["episodes"]))
        elif frame.kind == "cancel":
            if (task := self._leases.get(fields["lease"])) is not None:
                task.cancel()
        elif frame.kind == "servers" and isinstance(self.engine, TurnServers):
            self.engine.set_up(fields["up"])
        elif frame.kind == "state":
            set_trainer_state(TrainerState(**fields["state"]))
        elif frame.kind == "breaker":
            set_breaker(fields)
        elif frame.kind == "end":
            self.ended = str(fields["why"])

    async def _ask(self, question: str, body: Sequence[bytes] = (), **fields: Any) -> PlayerFrame:
        """Send a question, and return the frame that answers it."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.connection.send(question, body, id=number, **fields)
        try:
            frame: PlayerFrame = await answer
            return frame
        except asyncio.CancelledError:
            self.connection.send("forget", id=number)  # or the engine would sample on for nobody
            raise
        finally:
            self._asked.pop(number, None)

    # -- what is played ----------------------------------------------------------------------------------------------

    async def _open_gateway(self, held: AsyncExitStack) -> None:
        """Open the endpoint of an agent, and start it, where one plays. Raises UserError: there is none here."""
        try:
            agent = read_agent(self.welcome.fields.get("agent"))
            self._gateway = await held.enter_async_context(open_gateway(agent))
        except UserError as error:
            self.leave(str(error))
            raise

    async def _open_terms(self, held: AsyncExitStack, number: int, terms: Shown) -> None:
        """Make the rollout of some terms; the environment is opened once."""
        try:
            key = json.dumps(terms["env"], sort_keys=True)
            if key not in self._specs:
                self._specs[key] = await held.enter_async_context(open_spec(terms["env"]))
            rollout = build_rollout(terms, self._specs[key], self.engine, self.renderer, self.grammar)
            check_deadlines(rollout.spec, rollout.limits.turn_timeout_s)
        except UserError as error:
            self._played[number] = _Played(None, error)
            return
        rollout.concurrency = self.slots
        let_agents_play(rollout, self._gateway)
        self._played[number] = _Played(rollout)

    def _start(self, fields: Shown) -> None:
        number = fields["lease"]
        task = self._leases[number] = asyncio.create_task(self._play(number, self._played[fields["terms"]], fields))
        task.add_done_callback(lambda _: self._leases.pop(number, None))

    async def _play(self, number: int, played: _Played, fields: Shown) -> None:
        """Roll out a group and send it back; or what ended it, where that is to end the run."""
        self._counts[number] = 0
        try:
            if played.rollout is None:
                raise played.problem or UserError("the environment cannot be opened")
            group = await played.rollout.group(
                fields["task"],
                fields["size"],
                seed=fields["seed"],
                first=fields["first"],
                options=unpack_plain(fields["options"]) if "options" in fields else None,
                on_episode=lambda _: self._count(number),
            )
            header, body = pack_group(group)
            self.connection.send("group", body, lease=number, **header, **self._take_news())
            self.groups += 1
            await self.connection.drain()
        except ConnectionEnded:
            pass  # another player is leased the group
        except UserError as error:
            self.connection.send("failed", lease=number, error=type(error).__name__, text=str(error))
        except Exception:
            self.connection.send("failed", lease=number, error="", text=traceback.format_exc(limit=-8))
        finally:
            del self._counts[number]

    def _count(self, lease: int) -> None:
        self._counts[lease] += 1

    # -- what is told ------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Tell that this player is alive, what has happened, and what its episodes wait for."""
        while True:
            waits = [
                [number, wait.what, wait.seconds, wait.limit]
                for number, played in self._played.items()
                for wait in (played.rollout.waits() if played.rollout is not None else ())
            ]
            self.connection.send(
                "beat", waits=_shorten(waits), queued=self.slots.queued, **self._take_news(), **self._count_requests()
            )
            await asyncio.sleep(BEAT_S)

    def _count_requests(self) -> Fields:
        """Return how many turns each server is asked for; nothing where the controller asks them."""
        return {"requests": self.engine.count_requests()} if isinstance(self.engine, TurnServers) else {}

    def _take_news(self) -> Fields:
        """Return what has happened since it was last told."""
        news = self.slots.take()
        rollouts = [[number, told] for number, played in self._played.items() if (told := played.take())]
        attempts = Counter(self.renderer.injection_attempts)
        if (new := attempts - self._attempts) and rollouts:
            rollouts[0][1]["attempts"] = dict(new)  # type: ignore[index]
            self._attempts = attempts
        return {**news, "rollouts": rollouts, "ended": [list(item) for item in self._counts.items() if item[1]]}


def _shorten(waits: list[list[Any]]) -> list[list[Any]]:
    """Return the longest waits alone, where there are very many."""
    return sorted(waits, key=lambda wait: -wait[2])[:_MOST_WAITS]


async def _end_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def join(
    url: str, key: PlayerKey, name: str, wait_s: float, say: Callable[[str], None], *, again: bool = False
) -> Player:
    """Join a controller, which may have to be waited for: a player may start before the run.

    Args:
        key: one that is refused is wrong; one that is looked up is refused until the run that began again has its own.
        again: this player has been in the run before, so that the address and the key are right.

    Raises:
        UserError: nobody answers for so long, or the controller refuses this player.
        ProcessLostError: nobody answers any more.
    """
    clock = asyncio.get_running_loop().time
    begun, told = clock(), False
    while True:
        try:
            connection = await connect(url, key if isinstance(key, str) else key())
            connection.send(
                "hello", name=name, wire=WIRE, agentrl=agentrl.__version__, python=list(sys.version_info[:2])
            )
            with anyio.fail_after(60.0):  # asyncio.wait_for may lose a cancellation that comes with the answer
                welcome = await connection.receive()
        except (OSError, ConnectionEnded, TimeoutError, KeyRefused) as error:
            refused, over = isinstance(error, KeyRefused), clock() - begun >= wait_s
            if refused and (over or isinstance(key, str)):
                raise
            if over and again:
                raise ProcessLostError(f"the run at {url} has not answered for {wait_s:g} s ({error})") from None
            if over:
                raise UserError(
                    f"no run answers at {url} for {wait_s:g} s ({error}): start it with --players.port, or "
                    "give another --wait_s"
                ) from None
            if not told:
                what = f"{url} wants another key" if refused else f"nobody answers at {url} yet"
                say(f"{what}; trying for {wait_s:g} s")
                told = True
            await asyncio.sleep(min(RETRY_S, wait_s))
            continue
        if welcome.kind == "welcome":
            try:
                return Player(connection, welcome, say)
            except Exception:
                await connection.close()
                raise
        await connection.close()
        raise UserError(f"{url} refuses this player: {welcome.fields.get('why', welcome.kind)}")


@dataclass
class _Ending:
    """A signal's wish that a player ends: one that has joined hands its leases on, another ends at once."""

    by: signal.Signals | None = None
    _joining: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _player: Player | None = None

    def listen(self) -> None:
        """Listen to SIGTERM and Ctrl-C, from before this player joins."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread, say
                loop.add_signal_handler(number, self._end, signal.Signals(number))

    def _end(self, by: signal.Signals) -> None:
        self.by = by
        if self._player is None:
            self._joining.cancel()
        else:
            self._player.leave(by.name)

    async def join(self, *arguments: Any, again: bool) -> Player | None:
        """Return the player that `join` does; None where it is told to end meanwhile, or was before."""
        self._player = None
        if self.by:
            return None
        with anyio.CancelScope() as self._joining:
            self._player = await join(*arguments, again=again)
        if self.by and self._player is not None:  # it had joined in that very moment
            self._player.leave(self.by.name)
        return self._player


async def play(url: str, key: PlayerKey, name: str, wait_s: float, say: Callable[[str], None]) -> signal.Signals | None:
    """Join a run and play until it is over, again where the connection is lost; return the signal that ended it before.

    Raises:
        UserError: nobody answers, or the controller refuses this player.
        ProcessLostError: the connection is lost for ``wait_s`` seconds, or at all where that is 0: whoever started this
            player starts another one.
    """
    groups, joined, ending = 0, False, _Ending()
    ending.listen()
    while True:
        player = await ending.join(url, key, name, wait_s, say, again=joined)
        if player is None:
            assert ending.by is not None
            say(f"was ended by {ending.by.name}; {groups} groups were played")
            return ending.by
        joined = True
        say(f"player {player.welcome.fields['name']} has joined {url}")
        try:
            await player.run()
            say(f"{player.ended}; {groups + player.groups} groups were played")
            return ending.by
        except ConnectionEnded as error:
            groups += player.groups
            if not wait_s:
                raise ProcessLostError(f"{url} {error}") from None
            say(f"{url} {error}")
        finally:
            await player.connection.close()


def choose_name() -> str:
    """Return a player's name: the machine's, and the process's number."""
    return f"{socket.gethostname()}-{os.getpid()}"
