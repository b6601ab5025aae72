"""The controller: it leases groups to the players that have joined, and answers each lease exactly once. No torch.

A player that is gone, or silent for ``timeout_s``, loses its leases to the others, with the same seeds; what it answers
later is dropped. How many episodes are in play at once follows the engine, as in one process; each player has its part.
The scheduler, the run folder and the policy know nothing of players: a lease is one call of `roll_out`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, zip_longest
from math import ceil
from typing import Any, Protocol

import agentrl
from agentrl.engines.server_keys import format_url
from agentrl.environments.task_sampler import describe_task
from agentrl.errors import ConfigError, ContractError, ProcessLostError, TemplateError, UserError
from agentrl.players.connection import ConnectionEnded, Fields, FrameStream, PlayerFrame, Shown, accept, start_server
from agentrl.players.engine_door import EngineDoor, Turn
from agentrl.players.leases import Lease, LeaseBook
from agentrl.players.recipe import Recipe
from agentrl.players.seat import PlayerSeat
from agentrl.players.shared_tools import ToolLimits
from agentrl.rewards.trainer_state import TrainerState, get_trainer_state
from agentrl.rollout.concurrency import ConcurrencyLimiter
from agentrl.rollout.engine_protocol import Engine, TurnServing
from agentrl.runtime.activity import ProcessActivity
from agentrl.runtime.stalls import Wait

WIRE = 1  # the version of what is said
LOOK_S, HELLO_S = 1.0, 30.0
SHARE_STEP = 1 / 16  # of its episodes in play, by which a player's part has to grow before it is told
LOADING_S = 120.0  # of silence before its first turn, while it imports what it plays
MOST_LOST = 20  # players in a row, with the same group; of 1,000 in a storm of kills innocent ones come to 6
_ERRORS = {cls.__name__: cls for cls in (UserError, ConfigError, ContractError, ProcessLostError, TemplateError)}


class Listener(Protocol):
    """A rollout that hears what players tell of its episodes."""

    def hear(self, fields: Shown) -> None: ...


@dataclass(eq=False)
class Terms:
    """The terms of leases, their number, and who hears of their episodes."""

    number: int
    described: Shown
    listener: weakref.ref[Listener]
    offered: Sequence[Any] = ()  # lists of tools, which a player tells once


@dataclass
class Controller:
    """Leases groups to players. Use it by `open_controller`.

    Args:
        recipe: what a player is told as it joins.
        engine: the run's, which players reach through this; None where they sample elsewhere.
        key: that who joins has to show.
        url: where players join.
        shown_url: the same for sentences, as other machines reach it.
        timeout_s: silence after which a player is lost.
        on_message: hears of players that come and go.
    """

    recipe: Recipe
    engine: Engine | None
    capacity: int
    key: str
    url: str = ""
    shown_url: str = ""
    timeout_s: float = 30.0
    on_message: Callable[[str], None] = lambda text: None
    seats: dict[int, PlayerSeat] = field(default_factory=dict)
    book: LeaseBook = field(default_factory=LeaseBook)
    limits: ToolLimits = field(default_factory=ToolLimits)
    turns: int = 0  # that have ended, of all players
    joined: int = 0  # players, over the whole run
    broken: BaseException | None = None  # what ends the run
    _terms: dict[int, Terms] = field(default_factory=dict)
    _answers: dict[int, asyncio.Future[tuple[Fields, bytes]]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=count)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.concurrency = ConcurrencyLimiter(self.capacity)
        self._clock = asyncio.get_running_loop().time

    # -- what a rollout asks for -------------------------------------------------------------------------------------

    def add_terms(self, described: Shown, listener: Listener) -> int:
        """Return the number of the terms of a rollout's leases: of one that had the same and is gone, if there was one.

        Each evaluation has rollouts of its own, and each player keeps what it made of the terms of a number.
        """
        for terms in self._terms.values():
            if terms.described == described and terms.listener() in (None, listener):
                terms.listener = weakref.ref(listener)
                listener.hear({"offered": terms.offered})
                return terms.number
        terms = Terms(next(self._numbers), described, weakref.ref(listener))
        self._terms[terms.number] = terms
        return terms.number

    async def roll_out(self, terms: int, episodes: int, fields: Shown) -> tuple[Fields, bytes]:
        """Lease a group to a player; return its answer, once: the header, and the bytes of `pack_group`.

        Raises:
            UserError: an environment, a tool or a reward broke its contract there.
        """
        if self.broken is not None:
            raise self.broken
        lease = Lease(next(self._numbers), terms, episodes, fields, self._clock())
        answer = self._answers[lease.number] = asyncio.get_running_loop().create_future()
        self.book.add(lease)
        self._deal()
        try:
            header, body = await answer
            return header, body
        finally:
            if answer.done() and not answer.cancelled():
                answer.exception()  # is read, also where this was cancelled at the same moment
            del self._answers[lease.number]
            holder = self.book.remove(lease.number)
            if holder in self.seats:
                self.seats[holder].connection.send("cancel", lease=lease.number)

    def list_waits(self, terms: int) -> list[Wait]:
        """List what the episodes of a rollout wait for, and at which player."""
        now = self._clock()
        waits = [wait for seat in self.seats.values() for wait in seat.list_waits(now, terms)]
        where = (
            "a player that has room"
            if self.seats
            else f"a player, and none has joined: agentrl player {self.shown_url}"
        )
        waiting = [lease for lease in self.book.list_waiting() if lease.terms == terms]
        return waits + [Wait(where, now - lease.since) for lease in waiting if not waits]

    def list_players(self, idle: str) -> list[ProcessActivity]:
        """List what each player is at now; ``idle``: what one without an episode waits for."""
        now, players = self._clock(), []
        for number, seat in self.seats.items():
            groups, since = self.book.count_groups(number)
            age, doing = now - since if groups else 0.0, seat.sum_waits(now, idle)
            players.append(ProcessActivity("player", seat.name, doing, groups, age, seat.groups))
        return players

    def count_requests(self) -> list[int]:
        """Count the turns that players ask each server for, in the order of the servers."""
        return [sum(own) for own in zip_longest(*(seat.requests for seat in self.seats.values()), fillvalue=0)]

    def fail(self, error: BaseException) -> None:
        """End the run: whoever waits for a group gets the error."""
        self.broken = self.broken or error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    # -- players -----------------------------------------------------------------------------------------------------

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve whoever connects, until it is gone."""
        connection = await accept(reader, writer, self.key)
        if connection is None:
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(connection)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # of this program: it would be told nowhere else
            self.fail(error)
        finally:
            self._connections.discard(task)

    async def _serve(self, connection: FrameStream) -> None:
        try:
            hello = await asyncio.wait_for(connection.receive(), HELLO_S)
        except (ConnectionEnded, TimeoutError):
            return await connection.close()
        if reason := _find_difference(hello):
            connection.send("refused", why=reason)
            self.on_message(f"a player was refused: {reason}")
            return await connection.close()
        seat = self._seat(hello, connection)
        why, at_once, lost = "is gone", False, True
        try:
            while True:
                frame = await connection.receive()
                seat.heard, seat.quiet = self._clock(), 0.0
                if frame.kind == "leaving":
                    why, lost = str(frame.fields["why"]), False
                    break
                self._handle(seat, frame)
        except ConnectionEnded as error:
            why = str(error)
        except (KeyError, TypeError, ValueError) as error:
            why, at_once = f"sent what it should not ({type(error).__name__}: {error})", True
        finally:
            await self._unseat(seat, why, at_once=at_once, lost=lost)

    def _seat(self, hello: PlayerFrame, connection: FrameStream) -> PlayerSeat:
        number = self.joined = self.joined + 1
        taken = {seat.name for seat in self.seats.values()}
        name = str(hello.fields["name"])[:80]
        name = name if name not in taken else f"{name}-{number}"
        door = None
        if self.engine is not None:
            door = EngineDoor(self.engine, self.recipe.renderer, str(number), self.recipe.grammar)
        seat = self.seats[number] = PlayerSeat(number, name, connection, door, self._clock())
        connection.send("welcome", self.recipe.body, name=name, timeout_s=self.timeout_s, **self.recipe.fields)
        self._tell_servers(seat)
        self.on_message(f"player {name} has joined; there {_count(len(self.seats), 'player')}")
        self._share()
        return seat

    async def _unseat(self, seat: PlayerSeat, why: str, *, at_once: bool = False, lost: bool = True) -> None:
        if self.seats.pop(seat.number, None) is None:
            return
        returned = self.book.give_back(seat.number, lost=lost)
        self.limits.drop_player(seat.number)
        groups = _describe_returned(len(returned))
        self.on_message(f"player {seat.name} {why}{groups}; there {_count(len(self.seats), 'player')} left")
        if suspects := [lease for lease in returned if lease.returned >= MOST_LOST]:
            self.fail(self._accuse(suspects, seat.name, why))
        self._share()
        await seat.close(why, at_once=at_once)

    def _accuse(self, suspects: Sequence[Lease], player: str, why: str) -> ProcessLostError:
        """Build the error of groups that took one player after the other with them."""
        tasks = [describe_task(lease.fields["task"], self._terms[lease.terms].described["split"]) for lease in suspects]
        others = f" and {len(tasks) - 3} others" if len(tasks) > 3 else ""
        return ProcessLostError(
            f"{MOST_LOST} players were lost, one after the other, with the group of {', '.join(tasks[:3])}{others}: "
            f"player {player}, the last of them, {why}. Memory, or a crash of a library that the environment, a tool "
            "or a reward calls, may end a process: agentrl eval --first plays a task alone"
        )

    def _handle(self, seat: PlayerSeat, frame: PlayerFrame) -> None:
        """Act on a frame of a player."""
        fields = frame.fields
        if frame.kind == "generate":
            self._generate(seat, frame)
        elif frame.kind == "forget":
            if (task := seat.tasks.get(fields["id"])) is not None:
                task.cancel()
        elif frame.kind == "group":
            self._hear(seat, fields)
            self._answer(seat, fields, frame.body)
        elif frame.kind == "beat":
            self._hear(seat, fields)
        elif frame.kind == "failed":
            self._hear_failure(seat, fields)
        elif frame.kind == "end_session" and seat.door is not None:
            seat.door.end_session(fields["session"])
        elif frame.kind == "acquire":
            grant = partial(seat.connection.send, "granted", id=fields["id"], tool=fields["tool"])
            self.limits.acquire(fields["tool"], int(fields["limit"]), seat.number, grant)
        elif frame.kind == "release":
            self.limits.release(fields["tool"], seat.number)
        elif frame.kind == "breaker":
            for other in self.seats.values():
                if other is not seat:
                    other.connection.send("breaker", **fields)
        else:
            raise ValueError(f"a frame of kind {frame.kind!r:.40}")

    def _answer(self, seat: PlayerSeat, fields: Fields, body: bytes) -> None:
        if self.book.answer(fields["lease"], seat.number):
            seat.groups += 1
            answer = self._answers[fields["lease"]]
            if not answer.done():
                answer.set_result((fields, body))
        self._deal()

    def _hear_failure(self, seat: PlayerSeat, fields: Shown) -> None:
        """End the run by what ended a player's group, unless the lease is another player's by now."""
        if self.book.answer(fields["lease"], seat.number):
            kind, text = _ERRORS.get(fields["error"]), str(fields["text"])
            error = RuntimeError(f"player {seat.name}: {text}") if kind is None else kind(text)
            answer = self._answers[fields["lease"]]
            if not answer.done():
                answer.set_exception(error)

    def _hear(self, seat: PlayerSeat, fields: Shown) -> None:
        """Take in what happened at a player since it last told."""
        seat.hear(self._clock(), fields)
        turns = fields.get("turns", 0)
        self.turns += turns
        if turns:
            self.concurrency.record_turn(fields["engine_s"] / turns, fields["other_s"] / turns, turns)
            self._share()
        for number, told in fields.get("rollouts", ()):
            if (terms := self._terms.get(number)) is not None:
                terms.offered = told.get("offered", terms.offered)
                if (listener := terms.listener()) is not None:
                    listener.hear(told)
        for number, ended in fields.get("ended", ()):
            self.book.note_ended(number, seat.number, ended)
        self._deal()

    def _generate(self, seat: PlayerSeat, frame: PlayerFrame) -> None:
        number = frame.fields["id"]
        if seat.door is None or number in seat.tasks:
            raise ValueError("a turn where it has an engine of its own, or one asked for twice")
        task = seat.tasks[number] = asyncio.create_task(self._sample(seat, number, seat.door.begin_turn(frame)))
        task.add_done_callback(lambda _: seat.tasks.pop(number))

    async def _sample(self, seat: PlayerSeat, number: int, turn: Turn) -> None:
        try:
            fields, body = await turn()
        except Exception as error:  # of the engine, which is ours: it ends the run
            self.fail(error)
        else:
            seat.connection.send("completion", body, id=number, **fields)

    # -- who does what -----------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Divide the episodes that may be in play among the players; tell whose part shrinks, or grows by much."""
        if self.seats:
            share = ceil(min(self.concurrency.limit, 1 << 30) / len(self.seats))
            for seat in self.seats.values():
                if not seat.share <= share <= seat.share * (1 + SHARE_STEP):
                    seat.share = share
                    seat.connection.send("share", episodes=share)
        self._deal()

    def _deal(self) -> None:
        """Lease the oldest groups to the players with the fewest episodes in play, as far as they have room."""
        counts = {number: self.book.count_episodes(number) for number in self.seats}
        while counts and (lease := self.book.peek()) is not None:
            number = min(counts, key=counts.__getitem__)
            seat = self.seats[number]
            if counts[number] >= seat.share:
                return
            counts[number] += lease.episodes
            self._lend(lease, seat)

    def _lend(self, lease: Lease, seat: PlayerSeat) -> None:
        self.book.lend(lease, seat.number, self._clock())
        if lease.terms not in seat.terms:
            seat.terms.add(lease.terms)
            seat.connection.send("terms", number=lease.terms, terms=self._terms[lease.terms].described)
        if (state := get_trainer_state()) is not seat.state:
            seat.state = state
            seat.connection.send("state", state=_describe_state(state))
        seat.connection.send("lease", lease=lease.number, terms=lease.terms, **lease.fields)

    def _tell_servers(self, seat: PlayerSeat) -> None:
        """Tell a player which servers are up, where that has changed."""
        if isinstance(self.engine, TurnServing) and (up := self.engine.list_up()) != seat.servers:
            seat.servers = up
            seat.connection.send("servers", up=up)

    async def watch(self) -> None:
        """Beat, so that players know that this is alive; lose those that are silent."""
        while True:
            begun = self._clock()
            await asyncio.sleep(LOOK_S)
            passed = min(self._clock() - begun, 2 * LOOK_S)  # a process that was stopped itself heard nobody
            for seat in list(self.seats.values()):
                part = seat.connection.heard > max(seat.heard, begun)  # of a frame that is on its way
                seat.quiet = 0.0 if part else seat.quiet + passed
                seat.connection.send("beat")
                self._tell_servers(seat)
                limit = self.timeout_s if seat.turns else max(self.timeout_s, LOADING_S)
                if seat.quiet >= limit:
                    await self._unseat(seat, f"has been silent for {limit:g} s", at_once=True)
            self._deal()

    def hear_end(self, task: asyncio.Task[None]) -> None:
        """End the run by what ended a task of this controller."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def close(self) -> None:
        """Tell all players that the run is over."""
        while self.seats:
            _, seat = self.seats.popitem()
            await seat.close("the run is over")
        for task in list(self._connections):
            task.cancel()


@asynccontextmanager
async def open_controller(controller: Controller, listener: socket.socket) -> AsyncIterator[Controller]:
    """Let players join until the block ends; they end then."""
    host, port = listener.getsockname()[:2]
    controller.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    controller.shown_url = format_url(host, port)
    server = await start_server(listener, controller.accept)
    watch = asyncio.create_task(controller.watch())
    watch.add_done_callback(controller.hear_end)
    try:
        yield controller
    finally:
        watch.cancel()
        server.close()
        await controller.close()


def _find_difference(hello: PlayerFrame) -> str:
    """Return a sentence on what a player has in another version; empty where it fits."""
    if hello.kind != "hello":
        return "it does not say which version it has"
    own = {"wire": WIRE, "agentrl": agentrl.__version__, "python": list(sys.version_info[:2])}
    for name, value in own.items():
        if (other := hello.fields.get(name)) != value:
            shown = [".".join(map(str, v)) if isinstance(v, list) else v for v in (other, value)]
            what = "the protocol's version" if name == "wire" else name
            return f"{what} is {shown[0]!s:.40} there and {shown[1]} here; install the same on both"
    return ""


def _describe_state(state: TrainerState) -> Fields:
    return asdict(state)


def _count(number: int, what: str) -> str:
    return f"is 1 {what}" if number == 1 else f"are {number} {what}s"


def _describe_returned(groups: int) -> str:
    if groups < 2:
        return ", its group goes to another" if groups else ""
    return f", its {groups} groups go to others"
