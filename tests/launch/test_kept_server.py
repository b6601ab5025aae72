"""A server of a run is started again where it was, or somewhere else."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import UserError
from agentrl.launch import kept_server
from agentrl.launch.kept_server import KeptServer
from tests.helpers.run_processes import Script, ScriptedProcess

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_server, "PAUSE_S", 0.01)


def answers(process: ScriptedProcess) -> None:
    """Print the URL, in two parts; run until it is ended."""
    arguments = process.starts[-1][0]
    process.write("htt")
    process.write(f"p://{process.address}:{arguments[arguments.index('--port') + 1]}\nmore\n")


def dies(process: ScriptedProcess) -> None:
    process.end(-9)


class Kept:
    def __init__(self, *scripts: Script, spans_machines: bool = True, wait_s: float = 60.0) -> None:
        self.process = ScriptedProcess("server 1", *scripts)
        self.said: list[str] = []
        self.shown = b""
        self.answered, self.left_out = asyncio.Semaphore(0), asyncio.Event()
        self.server = KeptServer(
            self.process,
            ["serve", "--model", "nano"],
            {"KEY": "k"},
            spans_machines=spans_machines,
            wait_s=wait_s,
            write=self._show,
            say=self._say,
            on_answer=self.answered.release,
        )

    def _show(self, stream: str, data: bytes) -> None:
        self.shown += data

    def _say(self, sentence: str) -> None:
        self.said.append(sentence)
        if "without it" in sentence:
            self.left_out.set()


async def test_it_is_started_again_at_its_address() -> None:
    kept = Kept(answers, dies, answers)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.answered.acquire()
    assert kept.server.url == "http://10.0.0.1:7001"
    kept.process.end(-9)
    await kept.answered.acquire()
    keeping.cancel()
    assert [arguments for arguments, _ in kept.process.starts] == [
        ["serve", "--model", "nano", "--port", port, "--host", "10.0.0.1"]
        for port in ("7001", "7001", "7002")  # somebody may have taken the port of one that did not answer
    ]
    assert kept.said == ["server 1 was killed by SIGKILL; it is started again"] * 2
    assert kept.process.kills == 2  # what it left behind


async def test_what_it_writes_is_shown_but_for_its_address() -> None:
    def log(process: ScriptedProcess) -> None:
        process.write("INFO loading\n")
        answers(process)
        process.write("INFO: GET /health\nhttp://else")

    kept = Kept(log)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.answered.acquire()
    keeping.cancel()
    assert kept.server.url == "http://10.0.0.1:7001"
    assert kept.shown == b"INFO loading\nmore\nINFO: GET /health\n"


async def test_one_that_cannot_be_started_again_has_ended_once_more() -> None:
    def refuse(process: ScriptedProcess) -> None:
        raise UserError("server 1 cannot be started: no such folder")

    kept = Kept(answers, refuse, answers)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.answered.acquire()
    kept.process.end(-9)
    await kept.answered.acquire()
    keeping.cancel()
    assert kept.said[-1] == "server 1 did not start (server 1 cannot be started: no such folder); it is started again"


async def test_nobody_waits_for_one_that_waits_for_room_but_it_is_there_when_it_has_some() -> None:
    kept = Kept(answers, answers, wait_s=0.05)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.answered.acquire()
    kept.process.room.clear()
    kept.process.lose("the node died")
    await asyncio.wait_for(kept.left_out.wait(), 60)
    await kept.server.settle()
    assert not kept.server.answers
    assert kept.said[-1] == "there is no room for server 1, for 0.05 s; the run goes on without it until there is"
    kept.process.address = "10.0.0.2"
    kept.process.room.set()
    await kept.answered.acquire()
    assert kept.server.url == "http://10.0.0.2:7002"
    keeping.cancel()


async def test_on_this_machine_alone_it_listens_on_loopback() -> None:
    kept = Kept(answers, spans_machines=False)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.answered.acquire()
    keeping.cancel()
    assert "--host" not in kept.process.starts[0][0]


async def test_where_its_machine_is_lost_it_has_another_address() -> None:
    kept = Kept(answers, answers)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.answered.acquire()
    kept.process.address = "10.0.0.2"
    kept.process.lose("the node died")
    await kept.answered.acquire()
    keeping.cancel()
    assert kept.server.url == "http://10.0.0.2:7002"
    assert kept.said == ["server 1 is lost: the node died; it is started again"]


async def test_one_that_never_answered_ends_the_run() -> None:
    kept = Kept(lambda process: process.end(2))
    with pytest.raises(UserError, match="server 1 ended with status 2 before it answered; what it wrote stands above"):
        await kept.server.keep()


async def test_one_that_does_not_start_any_more_is_left_out() -> None:
    kept = Kept(answers, dies, dies, dies)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.answered.acquire()
    kept.process.end(-9)
    await asyncio.wait_for(kept.left_out.wait(), 60)
    assert kept.said[-1] == "server 1 ended 3 times before it answered; the run goes on without it"
    assert len(kept.process.starts) == 4
    await keeping
    await kept.server.settle()  # nobody waits for it
    assert not kept.server.answers


async def test_whoever_waits_for_it_goes_on_when_it_answers_again() -> None:
    kept = Kept(answers, lambda process: None)
    keeping = asyncio.create_task(kept.server.keep())
    await kept.server.settle()
    kept.process.begun.clear()
    kept.process.end(-9)
    await kept.process.begun.wait()
    waiting = asyncio.create_task(kept.server.settle())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    kept.process.scripts.append(answers)
    kept.process.end(-9)
    await waiting
    assert kept.server.answers
    keeping.cancel()
