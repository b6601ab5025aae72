"""The learner's ranks: they are told where they meet, and begin again together where one ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import pytest

from agentrl.errors import UserError
from agentrl.launch import rank_group
from agentrl.launch.rank_group import RankGroup, describe_rank
from agentrl.launch.run_process import MachineLost, Write
from tests.helpers.run_processes import Script, ScriptedProcess

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REASON_S", "END_S", "AGAIN_S"):
        monkeypatch.setattr(rank_group, name, 0.02)


def ends(status: int) -> Script:
    return lambda process: process.end(status)


def runs(process: ScriptedProcess) -> None:
    """Run until it is ended."""


class Told:
    """Ranks, and what they and the group say."""

    def __init__(self, *processes: ScriptedProcess, max_restarts: int = 3, wait_s: float = 60.0) -> None:
        self.said: list[str] = []
        self.arguments = ["train"]
        self.group = RankGroup(
            processes,
            self._choose_arguments,
            {"KEY": "k"},
            max_restarts=max_restarts,
            wait_s=wait_s,
            relay=self.relay,
            say=self.said.append,
        )

    async def _choose_arguments(self) -> list[str]:
        return self.arguments

    def relay(self, name: str) -> Write:
        return lambda stream, data: self.said.append(f"{name} {stream} {data.decode()}")


def make(*scripts: Sequence[Script], **options: int) -> tuple[list[ScriptedProcess], Told]:
    processes = [ScriptedProcess(f"rank {n}", *own) for n, own in enumerate(scripts)]
    return processes, Told(*processes, **options)


async def test_the_run_ends_as_its_first_rank_does() -> None:
    def write_and_end(process: ScriptedProcess) -> None:
        process.write("step 1\n")
        process.end(0)

    processes, told = make([write_and_end], [ends(0)])
    assert await told.group.run() == 0
    assert told.said == ["rank 0 out step 1\n"]
    assert processes[1].starts == [(["train"], {"KEY": "k", **describe_rank(1, ["10.0.0.1"] * 2, 7001, 0)})]


async def test_a_last_line_that_is_not_ended_is_ended_for_it() -> None:
    def write_and_end(process: ScriptedProcess) -> None:
        process.write("Segmentation fault")
        process.end(0)

    _, told = make([write_and_end], [runs])
    assert await told.group.run() == 0
    assert told.said == ["rank 0 out Segmentation fault", "rank 0 out \n"]


async def test_a_rank_that_is_killed_begins_all_of_them_again() -> None:
    processes, told = make([runs, ends(0)], [ends(-9), ends(0)])
    assert await told.group.run() == 0
    assert told.said == [
        "rank 1 was killed by SIGKILL; the learner's processes begin again at the newest checkpoint (1 of 3 restarts)"
    ]
    assert processes[0].signals == [signal.SIGTERM]
    variables = [own for _, own in processes[0].starts]
    assert [v["TORCHELASTIC_RESTART_COUNT"] for v in variables] == ["0", "1"]
    assert [v["MASTER_PORT"] for v in variables] == ["7001", "7002"]


async def test_a_first_rank_that_hears_nothing_is_killed() -> None:
    processes, told = make([runs, ends(0)], [ends(-9), ends(0)])
    processes[0].obeys = False
    assert await told.group.run() == 0
    assert processes[0].kills >= 1


@pytest.mark.parametrize("others", [[ends(1)], [runs]])
async def test_a_mistake_is_not_made_again(others: list[Script]) -> None:
    _, told = make([ends(2)], others)
    assert await told.group.run() == 2
    assert told.said == []


async def test_a_first_rank_that_lost_another_one_begins_again() -> None:
    processes, told = make([ends(75), ends(0)], [runs, ends(0)])
    assert await told.group.run() == 0
    assert "rank 0 ended with status 75" in told.said[0]
    assert len(processes[1].starts) == 2


@pytest.mark.parametrize(
    ("first", "other", "name"),
    [(75, -9, "rank 1 was killed by SIGKILL"), (-9, 75, "rank 0 was killed by SIGKILL"), (1, 75, "rank 0 ended with")],
)
async def test_the_rank_that_is_named_is_the_one_that_was_killed(first: int, other: int, name: str) -> None:
    _, told = make([ends(first), ends(0)], [ends(other), ends(0)])
    assert await told.group.run() == 0
    assert told.said[0].startswith(name)


async def test_a_place_that_is_lost_as_ranks_start_leaves_none_of_them() -> None:
    def lose(process: ScriptedProcess) -> None:
        raise MachineLost("the node died")

    processes, told = make([runs, ends(0)], [lose, ends(0)])
    assert await told.group.run() == 0
    assert processes[0].kills == 2
    assert told.said[0].startswith("rank 1 is lost: the node died; ")


async def test_the_restarts_are_counted() -> None:
    _, told = make([ends(-11)] * 5, [runs] * 5, max_restarts=2)
    assert await told.group.run() == 139
    assert [s.partition(";")[2] for s in told.said[:2]] == [
        f" the learner's processes begin again at the newest checkpoint ({n} of 2 restarts)" for n in (1, 2)
    ]
    assert told.said[2:] == ["rank 0 was killed by SIGSEGV, after 2 restarts (--max_restarts)"]


async def test_a_lost_machine_begins_them_again_elsewhere() -> None:
    def lose(process: ScriptedProcess) -> None:
        process.lose("the node died")
        process.address = ""
        asyncio.get_running_loop().call_later(0.1, setattr, process, "address", "10.0.0.9")

    processes, told = make([runs, ends(0)], [lose, ends(0)])
    assert await told.group.run() == 0
    assert told.said[0].startswith("rank 1 is lost: the node died; ")
    assert processes[1].starts[1][1]["LOCAL_RANK"] == "0"


async def test_no_room_any_more_is_said() -> None:
    def lose(process: ScriptedProcess) -> None:
        process.lose("the node died")
        process.address = ""

    _, told = make([runs], [lose], wait_s=0)
    told.group._wait_s = 0.2
    with pytest.raises(UserError, match=r"there is no room for the learner's processes again, for 0.2 s"):
        await told.group.run()


async def test_the_user_s_signal_goes_to_the_first_rank_whose_status_it_is() -> None:
    processes, told = make([runs], [runs])
    running = asyncio.create_task(told.group.run())
    await processes[1].begun.wait()
    told.group.end(signal.SIGINT)
    assert await running == 130
    assert (processes[0].signals, processes[1].signals) == ([signal.SIGINT], [])


async def test_a_signal_while_servers_start_ends_it_at_once() -> None:
    processes, told = make([runs])
    waiting = asyncio.Event()

    async def wait_for_servers() -> list[str]:
        waiting.set()
        await asyncio.Event().wait()
        return []

    told.group._arguments = wait_for_servers
    running = asyncio.create_task(told.group.run())
    await waiting.wait()
    told.group.end(signal.SIGTERM)
    assert await running == 143
    assert processes[0].starts == []


async def test_a_signal_while_ranks_start_goes_to_the_first_one_as_soon_as_it_runs() -> None:
    processes, told = make([runs], [runs])
    reserve = processes[0].reserve_port

    async def reserve_and_end() -> int:
        told.group.end(signal.SIGINT)
        await asyncio.sleep(0.01)
        return await reserve()

    processes[0].reserve_port = reserve_and_end  # type: ignore[method-assign]
    assert await asyncio.wait_for(told.group.run(), 60) == 130
    assert processes[0].signals == [signal.SIGINT]


async def test_a_run_that_saves_to_begin_again_hears_no_second_signal() -> None:
    """It would end at once then."""
    processes, told = make([runs], [runs])
    processes[0].obeys = False
    running = asyncio.create_task(told.group.run())
    await processes[1].begun.wait()
    assert [told.group.renew(), told.group.renew()] == [True, False]
    told.group.end(signal.SIGINT)
    await asyncio.sleep(0.05)
    assert processes[0].signals == [signal.SIGTERM]
    processes[0].end(143)
    assert await running == 130


async def test_arguments_that_change_as_ranks_are_prepared_are_chosen_again() -> None:
    processes, told = make([ends(2)], [runs])
    processes[1].room.clear()
    running = asyncio.create_task(told.group.run())
    await asyncio.sleep(0.05)
    told.arguments = ["train", "--engine.urls", "http://other"]
    assert not told.group.renew()
    processes[1].room.set()
    assert await asyncio.wait_for(running, 60) == 2  # a mistake, of a run that nobody renewed
    assert [arguments for arguments, _ in processes[0].starts] == [told.arguments]
    assert processes[0].signals == []


async def test_arguments_that_change_as_ranks_start_begin_them_again() -> None:
    processes, told = make([runs, ends(0)], [runs], max_restarts=0)
    reserve = processes[0].reserve_port

    async def reserve_and_renew() -> int:
        if not processes[0].starts:
            told.group.renew()
        await asyncio.sleep(0.01)
        return await reserve()

    processes[0].reserve_port = reserve_and_renew  # type: ignore[method-assign]
    assert await asyncio.wait_for(told.group.run(), 60) == 0
    assert len(processes[0].starts) == 2


async def test_a_mistake_after_new_arguments_is_the_end() -> None:
    processes, told = make([runs], [runs])
    processes[0].obeys = False
    running = asyncio.create_task(told.group.run())
    await processes[1].begun.wait()
    told.group.renew()
    processes[0].end(2)
    assert await asyncio.wait_for(running, 60) == 2


async def test_another_rank_s_status_is_said_to_be_the_run_s() -> None:
    _, told = make([runs], [ends(2)])
    assert await told.group.run() == 2
    assert told.said == ["rank 1 ended with status 2, which is that of the run"]


async def test_new_arguments_begin_them_again_and_count_as_no_restart() -> None:
    processes, told = make([runs, ends(0)], [runs, ends(0)], max_restarts=0)
    running = asyncio.create_task(told.group.run())
    await processes[1].begun.wait()
    told.arguments = ["train", "--engine.urls", "http://other"]
    told.group.renew()
    assert await running == 0
    assert [arguments for arguments, _ in processes[1].starts] == [
        ["train"],
        ["train", "--engine.urls", "http://other"],
    ]
    assert told.said == []


def test_ranks_of_a_machine_are_neighbours() -> None:
    addresses = ["a", "a", "b", "b", "b"]
    told = [describe_rank(rank, addresses, 1, 0) for rank in range(5)]
    assert [t["LOCAL_RANK"] for t in told] == ["0", "1", "0", "1", "2"]
    assert [t["LOCAL_WORLD_SIZE"] for t in told] == ["2", "2", "3", "3", "3"]
    assert {t["MASTER_ADDR"] for t in told} == {"a"}


async def test_places_of_one_machine_get_ranks_next_to_each_other() -> None:
    processes, told = make([ends(0)], [ends(0)], [ends(0)])
    for process, address in zip(processes, "aba", strict=True):
        process.address = address
    assert await told.group.run() == 0
    assert [p.starts[0][1]["RANK"] for p in processes] == ["0", "2", "1"]
    assert [p.name for p in processes] == ["rank 0", "rank 2", "rank 1"]


async def test_a_rank_is_named_by_its_rank_of_this_start() -> None:
    def fail(process: ScriptedProcess) -> None:
        process.write("why\n")
        process.end(-9)

    processes, told = make([runs, ends(0)], [runs, ends(0)], [fail, ends(0)])
    for process, address in zip(processes, "aba", strict=True):
        process.address = address
    assert await told.group.run() == 0
    assert told.said[0] == "rank 1 out why\n"
    assert told.said[1].startswith("rank 1 was killed by SIGKILL; ")
