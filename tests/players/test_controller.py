"""Players and their controller, with a scripted engine: the same groups as in one process, whoever comes and goes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from array import array
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

import agentrl
from agentrl import ContractError, Env, EnvSpec
from agentrl.environments.task_sampler import TaskSampler
from agentrl.errors import ConfigError, ProcessLostError, UserError
from agentrl.players import connection
from agentrl.players.connection import ConnectionEnded, ConnectionRefused, FrameStream, connect
from agentrl.players.controller import MOST_LOST, WIRE
from agentrl.players.engine_frames import describe_params
from agentrl.players.group_bytes import pack_group
from agentrl.players.leased_rollout import LeasedRollout
from agentrl.players.recipe import Recipe
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.scheduler import BatchPlan, open_scheduler
from agentrl.runtime.stalls import describe_waits
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Completion, Group, SamplingParams
from tests.engines.vllm.test_turn_servers import FakeServer, open_servers
from tests.helpers.players import BYTES, KEY, Count, Table, open_table, roll_out_here, without_times
from tests.rollout.test_scheduler import learned

pytestmark = pytest.mark.anyio
TASKS = list(range(12))


class HandMade:
    """A player by hand: it says what a test wants it to."""

    def __init__(self, connection: FrameStream) -> None:
        self.connection = connection
        self.leases: list[dict[str, Any]] = []

    @classmethod
    async def join(cls, table: Table, **hello: Any) -> HandMade:
        connection = await connect(table.controller.url, KEY)
        table.connections.append(connection)
        own = {"wire": WIRE, "agentrl": agentrl.__version__, "python": list(sys.version_info[:2])}
        connection.send("hello", **{"name": "by hand", **own, **hello})
        return cls(connection)

    async def take_lease(self) -> dict[str, Any]:
        while (frame := await self.connection.receive()).kind != "lease":
            pass
        self.leases.append(frame.fields)
        return frame.fields


async def test_two_players_roll_out_the_same_bits_as_one_process() -> None:
    async with open_table(2) as table:
        rollout = table.rollout()
        episodes: list[Any] = []
        groups = await rollout.batch(TASKS, 4, seed=3, on_episode=episodes.append)
    assert without_times(groups) == without_times(await roll_out_here(TASKS, 4, seed=3))
    assert len(episodes) == 48
    assert rollout.turns == table.controller.turns == 96
    assert rollout.tokens == sum(t.own_tokens for g in groups for t in g)
    assert not table.engine.turns.keys() - set(table.engine.ended), "a session was left open"


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_scheduler_does_not_know_who_plays(staleness: int) -> None:
    batches = {}
    for where in ("here", "players"):
        async with open_table(2) as table:
            rollout: Any = table.rollout()
            if where == "here":
                rollout = Rollout(rollout.spec, ScriptedEngine(table.engine.script), ByteRenderer())
            plan = BatchPlan(3, 2, max_staleness=staleness)
            async with open_scheduler(rollout, TaskSampler(50, seed=1), plan, seed=5) as scheduler:
                batches[where] = await learned(scheduler, rollout.engine, 4)
    for here, there in zip(batches["here"], batches["players"], strict=True):
        if staleness == 0:
            assert without_times(here.groups) == without_times(there.groups)
        assert max(there.staleness) <= staleness


async def test_a_player_that_is_gone_loses_its_groups_to_another_with_the_same_seeds() -> None:
    async with open_table() as table:
        rollout = table.rollout()
        playing = asyncio.create_task(rollout.batch(TASKS, 2, seed=3))
        lost = await HandMade.join(table)
        lease = await lost.take_lease()
        lost.connection.abort()
        table.join("the other")
        groups = await playing
    assert without_times(groups) == without_times(await roll_out_here(TASKS, 2, seed=3))
    assert lease["task"] in TASKS
    assert any("player by hand closed the connection, its" in text for text in table.said)


async def test_a_silent_player_is_lost_and_what_it_answers_later_is_dropped() -> None:
    async with open_table(timeout_s=2.0) as table:
        rollout = table.rollout()
        playing = asyncio.create_task(rollout.group(5, 2, seed=3))
        silent = await HandMade.join(table)
        lease = await silent.take_lease()
        (seat,) = table.controller.seats.values()
        seat.quiet = 60.0  # before its first turn it has more time: it imports what it plays
        silent.connection.send("beat", turns=1, engine_s=0.0, other_s=0.0)
        await table.wait_for(lambda: any("silent for 2 s" in text for text in table.said))
        table.controller.timeout_s = 3600.0
        table.join("the other")
        group = await playing
        header, body = pack_group(Group(5, ()))
        silent.connection.send("group", body, lease=lease["lease"], **header)
    assert without_times([group]) == without_times(await roll_out_here([5], 2, seed=3))


async def test_a_group_that_takes_one_player_after_the_other_ends_the_run_and_is_named() -> None:
    async with open_table() as table:
        rollout = table.rollout()
        playing = asyncio.create_task(rollout.group(5, 2, seed=3))
        in_order = await HandMade.join(table)
        await in_order.take_lease()
        in_order.connection.send("leaving", why="was ended by SIGTERM")  # which is no loss
        for number in range(MOST_LOST):
            await table.wait_for(lambda: not table.controller.seats)
            assert not playing.done(), f"after {number} losses"
            lost = await HandMade.join(table)
            await lost.take_lease()
            lost.connection.abort()
        with pytest.raises(ProcessLostError, match=r"20 players .* with the group of task 5: player by hand, "):
            await playing


async def test_a_player_that_is_sending_a_long_group_is_not_silent() -> None:
    async with open_table(timeout_s=3600.0) as table:
        slow = await HandMade.join(table)
        await table.wait_for(lambda: table.controller.seats)
        (seat,) = table.controller.seats.values()
        header, size = json.dumps({"t": "group", "lease": 4711}).encode(), 1 << 20
        writer = slow.connection._writer
        writer.write(struct.pack("<II", len(header), size) + header)
        seat.quiet = 1000.0

        def send_a_byte() -> bool:
            writer.write(b"x")
            return seat.quiet < 1000.0

        await table.wait_for(send_a_byte)
        assert table.controller.seats
        now = seat.connection.heard
        seat.heard = now - 1000.0
        seat.waits = [(0, "a tool", 1.0, None)]
        assert seat.sum_waits(now, "a lease")["a tool"].oldest == 1001.0
        assert [wait.what for wait in seat.list_waits(now, 0)] == ["a tool at player by hand"]


async def test_a_group_that_is_too_long_for_a_frame_ends_the_run_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MOST_BODY", 400)
    async with open_table(1) as table:
        with pytest.raises(UserError, match=r"a group of [\d,]+ bytes is too long to be sent .*, 400 at most"):
            await table.rollout().group(5, 4, seed=3)


async def test_the_second_of_two_answers_is_dropped() -> None:
    async with open_table() as table:
        playing = asyncio.create_task(table.rollout().group(5, 2, seed=3))
        twice = await HandMade.join(table)
        lease = (await twice.take_lease())["lease"]
        (own,) = await roll_out_here([5], 2, seed=3)
        header, body = pack_group(own)
        for _ in range(3):
            twice.connection.send("group", body, lease=lease, **header)
        twice.connection.send("group", body, lease=4711, **header)
        assert without_times([await playing]) == without_times([own])
        await table.wait_for(lambda: table.controller.book.dropped == 3)
        assert not table.controller.book.leases


async def test_a_wrong_key_is_refused_in_a_sentence() -> None:
    async with open_table() as table:
        with pytest.raises(ConnectionRefused, match="wants another key"):
            await connect(table.controller.url, "another")
        reader, writer = await asyncio.open_connection(*table.controller.url[7:].split(":"))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 404")
        writer.close()
        await writer.wait_closed()
        assert not table.controller.seats


async def test_what_is_no_http_ends_nothing() -> None:
    async with open_table(1) as table:
        _, writer = await asyncio.open_connection(*table.controller.url[7:].split(":"))
        writer.write(b"\x16\x03\x01 no http at all\r\n\r\n")
        broken = await HandMade.join(table, name="broken")
        broken.connection.send("lease")  # nothing that a player says
        await table.wait_for(lambda: any("player broken sent what it should not" in text for text in table.said))
        assert len(await table.rollout().batch([1, 2], 2)) == 2
        writer.close()
        await writer.wait_closed()


async def test_a_player_of_another_version_is_told_what_differs() -> None:
    async with open_table() as table:
        other = await HandMade.join(table, agentrl="0.0.9")
        frame = await other.connection.receive()
        assert frame.kind == "refused"
        assert frame.fields["why"].startswith("agentrl is 0.0.9 there and ")
        with pytest.raises(ConnectionEnded):
            await other.connection.receive()


async def test_a_broken_contract_ends_the_run_with_its_sentence() -> None:
    async with open_table(2) as table:
        with pytest.raises(ContractError, match="task 5 is broken"):
            await table.rollout(breaks=5).batch(TASKS, 2)
        rollout = table.rollout()
        rollout.spec.source = "tests.helpers.players:Missing"
        with pytest.raises(UserError, match="has no 'Missing'"):
            await rollout.group(1, 2)


async def test_a_failure_of_the_engine_ends_the_run() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, token_ids: Any, params: SamplingParams, *, session: str) -> Completion:
            raise FloatingPointError("the policy's logits are not finite")

    async with open_table() as table:
        table.controller.engine = Broken(["x"])
        table.join("one")
        with pytest.raises(FloatingPointError, match="not finite"):
            await table.rollout().group(1, 2)


async def test_turns_of_a_player_leave_a_server_that_the_run_has_lost() -> None:
    class Dropping(ScriptedEngine):
        up = [True, True]

        def describe_servers(self) -> None: ...

        def list_up(self) -> list[bool]:
            return list(self.up)

    hung, fine = FakeServer(hangs=True), FakeServer()
    async with open_table() as table, open_servers(hung, fine):
        engine = table.controller.engine = Dropping(["x"])
        servers = {"urls": [hung.url, fine.url], "keys": ["server-key"] * 2, "vocabulary": 512, "adapter": ""}
        described = {**table.controller.recipe.fields["engine"], "kind": "servers", **servers}
        table.controller.recipe = Recipe({"renderer": BYTES, "engine": described}, ByteRenderer())
        table.join("one")
        rollout = table.rollout()
        rollout.limits = replace(rollout.limits, max_tokens=2)  # which the server says
        playing = asyncio.create_task(rollout.group(1, 4, seed=3))
        await table.wait_for(lambda: hung.asked)
        engine.up = [False, True]
        with anyio.fail_after(300):
            assert len((await playing).scored) == 4
        assert fine.asked == 4


async def test_a_class_or_a_setting_of_this_process_is_refused_with_the_way_out() -> None:
    class Local(Env):
        pass

    async with open_table() as table:
        rollout = LeasedRollout(EnvSpec(Local), table.engine, ByteRenderer())
        rollout.controller = table.controller
        with pytest.raises(ConfigError, match=r"a class of this process.*file\.py:Class or module:Class"):
            await rollout.group(1, 2)
        rollout.spec = EnvSpec(Count, seconds=0.0)  # a module's class goes by its name
        rollout.spec.settings = {"seconds": lambda: 0.0}
        with pytest.raises(ConfigError, match=r"a setting is a builtins\.function, which cannot be sent to a player"):
            await rollout.group(1, 2)


async def test_a_group_that_nobody_wants_any_more_is_cancelled_at_its_player() -> None:
    async with open_table(1) as table:
        playing = asyncio.create_task(table.rollout(seconds=3600.0).group(1, 2))
        await table.wait_for(lambda: table.controller.turns or table.controller.list_waits(0))
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert not table.controller.book.leases
        assert len((await table.rollout().group(2, 2, seed=1)).scored) == 2  # its slots are free again


class Endless(ScriptedEngine):
    """An engine whose turns end where they are given up."""

    def __init__(self) -> None:
        super().__init__(["x"])
        self.running: set[str] = set()
        self.last: dict[str, str] = {}  # that was heard of a session

    async def generate(self, token_ids: Any, params: SamplingParams, *, session: str) -> Completion:
        self.contexts.append(list(token_ids))
        self.running.add(session)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.discard(session)
            self.last[session] = "given up"
        raise AssertionError

    def end_session(self, session: str) -> None:
        self.last[session] = "ended"


async def test_turns_of_episodes_that_are_cancelled_are_given_up_by_the_engine() -> None:
    async with open_table() as table:
        engine = table.controller.engine = Endless()
        table.join("one")
        playing = asyncio.create_task(table.rollout().group(1, 2))
        await table.wait_for(lambda: len(engine.running) == 2)
        playing.cancel()
        await table.wait_for(lambda: not engine.running and {*engine.last.values()} == {"ended"})
        (seat,) = table.controller.seats.values()
        await table.wait_for(lambda: not seat.tasks)


async def test_a_turn_that_is_forgotten_leaves_the_next_one_its_tokens() -> None:
    async with open_table() as table:
        engine = table.controller.engine = Endless()
        by_hand = await HandMade.join(table)
        params = describe_params(SamplingParams(max_tokens=1))
        asked = {"session": "a", "params": params}
        by_hand.connection.send("generate", (array("i", [1, 2]).tobytes(),), id=1, stands=0, **asked)
        by_hand.connection.send("forget", id=1)  # it has not even begun
        by_hand.connection.send("forget", id=4711)  # it has ended
        by_hand.connection.send("generate", (array("i", [3]).tobytes(),), id=2, stands=2, **asked)
        await table.wait_for(lambda: [1, 2, 3] in engine.contexts)
        by_hand.connection.send("generate", (array("i", [3]).tobytes(),), id=3, stands=9, **asked)
        await table.wait_for(lambda: any("goes on from 9 tokens that were not sent" in text for text in table.said))
        assert table.controller.broken is None


async def test_waits_name_the_player_and_what_its_episodes_wait_for() -> None:
    async with open_table(timeout_s=3600.0) as table:
        rollout = table.rollout(seconds=3600.0)
        playing = asyncio.create_task(rollout.group(1, 3))
        await table.wait_for(rollout.waits)
        assert "on a player, and none has joined: agentrl player http://127.0.0.1:" in describe_waits(rollout.waits())
        table.join("rack-3")
        await table.wait_for(lambda: "Count.step at player rack-3" in describe_waits(rollout.waits()))
        assert len(rollout.waits()) == 3
        playing.cancel()


async def test_an_address_that_other_machines_reach_is_told_where_the_run_listens_at_all() -> None:
    async with open_table(host="0.0.0.0") as table:
        assert table.controller.url.startswith("http://0.0.0.0:")
        port = table.controller.url.rpartition(":")[2]
        rollout = table.rollout()
        playing = asyncio.create_task(rollout.group(1, 2))
        await table.wait_for(rollout.waits)
        assert f"agentrl player http://{socket.gethostname()}:{port}" in describe_waits(rollout.waits())
        table.join("one")
        await playing


async def test_what_the_copies_of_a_rollout_wait_for_is_told_too() -> None:
    async with open_table(1) as table:
        rollout = table.rollout(seconds=3600.0)
        greedy = replace(rollout, sampling=rollout.sampling.greedy())  # as an evaluation plays
        playing = asyncio.create_task(greedy.group(1, 2))
        await table.wait_for(lambda: "Count.step at player" in describe_waits(rollout.waits()))
        playing.cancel()


async def test_each_player_is_listed_with_what_it_is_at_and_what_it_was_leased() -> None:
    async with open_table(2, capacity=1) as table:
        await table.wait_for(lambda: len(table.controller.seats) == 2)
        idle = table.controller.list_players("the learner")
        assert [(p.kind, p.doing["the learner"][0], p.groups, p.answered) for p in idle] == [("player", 1, 0, 0)] * 2
        next(iter(table.controller.seats.values())).groups = 1  # a turn would change how many may be in play
        playing = asyncio.create_task(table.rollout(seconds=3600.0).batch([1, 2], 8))

        def are_queued() -> bool:
            players = table.controller.list_players("the learner")
            return all({"Count.step", "a free slot"} == {*player.doing} for player in players)

        await table.wait_for(are_queued)
        await asyncio.sleep(0.05)
        players = table.controller.list_players("the learner")
        assert [player.groups for player in players] == [1, 1]
        assert all(0.0 < player.oldest_group < 60.0 for player in players)
        assert sum(player.answered for player in players) == 1
        for player in players:
            assert sum(number for number, _ in player.doing.values()) == 8
            assert player.doing["Count.step"].oldest > 0.0
        playing.cancel()


async def test_a_silent_player_is_listed_as_such_and_nonsense_of_one_ends_it_alone() -> None:
    async with open_table(timeout_s=3600.0) as table:
        by_hand = await HandMade.join(table)
        await table.wait_for(lambda: table.controller.seats)
        (seat,) = table.controller.seats.values()
        seat.heard = seat.connection.heard = seat.heard - 10.0
        ((player,)) = table.controller.list_players("the learner")
        assert player.doing["no sign of life"].oldest >= 10.0
        by_hand.connection.send("beat", waits=[], requests=[3, 1])
        await table.wait_for(lambda: table.controller.count_requests() == [3, 1])
        for nonsense in ({"waits": [[0, "a tool"]]}, {"queued": "many"}, {"requests": [None]}, {"waits": 7}):
            other = await HandMade.join(table, name="other")
            await table.wait_for(lambda: len(table.controller.seats) == 2)
            other.connection.send("beat", **nonsense)
            await table.wait_for(lambda: len(table.controller.seats) == 1)
            assert "player other sent what it should not" in table.said[-1]
        assert table.controller.broken is None


async def test_copies_of_a_rollout_are_terms_of_their_own() -> None:
    async with open_table(1) as table:
        rollout = table.rollout()
        greedy = replace(rollout, sampling=rollout.sampling.greedy(), split="test")
        first, second = await rollout.group(1, 2), await greedy.group(1, 2)
    assert [t.temperature for t in first] == [1.0, 1.0]
    assert [t.temperature for t in second] == [0.0, 0.0]


async def test_rollouts_of_the_same_terms_share_them_where_one_is_gone() -> None:
    async with open_table(1) as table:
        rollout = table.rollout()
        await rollout.group(1, 2)
        for _ in range(4):
            greedy = table.rollout()  # as each evaluation makes one
            greedy.sampling = greedy.sampling.greedy()
            await greedy.group(1, 2)
            assert greedy.turns == 4
            assert greedy.offered_tools.lists == rollout.offered_tools.lists != []
            del greedy
        assert len(table.controller._terms) == 2
        both = [replace(rollout, sampling=rollout.sampling.greedy(), turns=0) for _ in range(2)]
        await asyncio.gather(*(one.group(1, 2) for one in both))
        assert [one.turns for one in both] == [4, 4]
        assert (rollout.turns, len(table.controller._terms)) == (4, 3)


async def test_episodes_in_play_follow_the_engine_over_all_players() -> None:
    async with open_table(2, capacity=4) as table:
        await table.wait_for(lambda: len(table.controller.seats) == 2)
        table.engine.latency_s = 0.01
        await table.rollout().batch(TASKS * 2, 2, seed=3)
        limit = table.controller.concurrency.limit
        assert all(seat.share <= limit for seat in table.controller.seats.values())
        assert sum(seat.share for seat in table.controller.seats.values()) <= limit + 2
        assert all(seat.groups for seat in table.controller.seats.values())


async def test_options_and_messages_reach_the_environment_and_come_back() -> None:
    async with open_table(1) as table:
        group = await table.rollout().group(1, 2, options={"level": 3, "share": np.float32(0.5)})
    assert group.trajectories[0].info["options"]["level"] == 3
    assert group.trajectories[0].info["options"]["share"] == 0.5
    assert group.trajectories[0].info["seen"] == (1, {"x"})
