"""A run that is supervised: servers first, then the ranks that sample from them, wherever both are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from agentrl.engines.server_keys import KEY_ENV
from agentrl.errors import ContractError, UserError
from agentrl.launch import kept_server, rank_group
from agentrl.launch.run_process import Placement, RunPlan, Say
from agentrl.launch.supervisor import supervise
from agentrl.runs.folder import LAUNCH_OPTIONS
from tests.helpers.run_processes import ScriptedProcess
from tests.launch.test_kept_server import answers, dies

PLAN = RunPlan(
    ("train", "--env", "math-tools"),
    ("serve", "--model", "nano"),
    ranks=2,
    servers=1,
    options=("--ranks", "2", "--servers", "1"),
)
Processes = tuple[ScriptedProcess, ScriptedProcess, ScriptedProcess]
made: list[Processes] = []
prepare: list[Callable[[ScriptedProcess, ScriptedProcess, ScriptedProcess], None]] = []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in ((rank_group, ("REASON_S", "END_S", "AGAIN_S")), (kept_server, ("PAUSE_S",))):
        for name in names:
            monkeypatch.setattr(module, name, 0.02)
    made.clear()
    prepare.clear()


@asynccontextmanager
async def start(plan: RunPlan, say: Say) -> AsyncIterator[Placement]:
    """Give scripted processes."""
    processes = ScriptedProcess("rank 0"), ScriptedProcess("rank 1"), ScriptedProcess("server 1")
    prepare[0](*processes)
    made.append(processes)
    yield Placement(processes, ("--more", "1"), {"NODE": "n"}, spans_machines=True)


def run(launcher: str = f"{__name__}:start") -> tuple[int, list[str]]:
    said: list[str] = []
    return supervise(PLAN, launcher, lambda name: lambda stream, data: None, said.append), said


def test_ranks_sample_from_the_servers_and_share_a_key_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_ENV, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")

    def script(first: ScriptedProcess, other: ScriptedProcess, server: ScriptedProcess) -> None:
        server.scripts = [answers]
        first.scripts, other.scripts = [lambda p: p.end(0)], [lambda p: p.end(0)]

    prepare.append(script)
    assert run() == (0, [])
    ((first, _, server),) = made
    ((arguments, variables),) = first.starts
    assert variables[LAUNCH_OPTIONS] == "--ranks 2 --servers 1"
    assert arguments == [*PLAN.arguments, "--more", "1", "--engine", "server", "--engine.urls", "http://10.0.0.1:7001"]
    assert (variables["NODE"], variables["NCCL_DEBUG"], variables["WORLD_SIZE"]) == ("n", "INFO", "2")
    assert len(variables[KEY_ENV]) > 30
    assert variables[KEY_ENV] == server.starts[0][1][KEY_ENV]


def test_a_server_that_moves_lets_the_ranks_begin_again_with_its_address() -> None:
    def script(first: ScriptedProcess, other: ScriptedProcess, server: ScriptedProcess) -> None:
        def move(_process: ScriptedProcess) -> None:
            server.address = "10.0.0.2"
            server.lose("the node died")

        server.scripts = [answers, answers]
        first.scripts = [lambda p: None, lambda p: p.end(0)]
        other.scripts = [move, lambda p: p.end(0)]

    prepare.append(script)
    status, said = run()
    assert status == 0
    assert said == [
        "server 1 is lost: the node died; it is started again",
        "a server answers at another address: the run saves, and begins again with that one",
    ]
    ((first, _, _),) = made
    assert [arguments[-1] for arguments, _ in first.starts] == ["http://10.0.0.1:7001", "http://10.0.0.2:7002"]


def test_ranks_that_wait_for_a_server_say_so() -> None:
    def script(first: ScriptedProcess, other: ScriptedProcess, server: ScriptedProcess) -> None:
        def fail(process: ScriptedProcess) -> None:
            server.end(-9)
            process.end(75)

        def answer_late(process: ScriptedProcess) -> None:
            asyncio.get_running_loop().call_later(0.5, kill_and_answer, process)

        def kill_and_answer(process: ScriptedProcess) -> None:
            process.scripts.append(answers)
            process.end(-9)

        server.scripts = [answers, answer_late]
        first.scripts = [fail, lambda p: p.end(0)]

    prepare.append(script)
    status, said = run()
    assert status == 0
    assert said.count("the learner's processes wait for server 1 to answer") == 1


def test_a_run_without_any_server_left_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(first: ScriptedProcess, other: ScriptedProcess, server: ScriptedProcess) -> None:
        def fail(process: ScriptedProcess) -> None:
            server.end(-9)
            process.end(75)

        server.scripts = [answers, dies, dies, dies]
        first.scripts = [fail]

    prepare.append(script)
    with pytest.raises(UserError, match="no server of the run starts any more; what they wrote stands above"):
        run()


def test_a_server_that_never_answers_ends_the_run() -> None:
    prepare.append(lambda first, other, server: server.scripts.append(lambda p: p.end(2)))
    with pytest.raises(UserError, match="server 1 ended with status 2 before it answered"):
        run()


def broken(plan: RunPlan, say: Say) -> object:
    """Raise what an author's code may."""
    raise KeyError("queue")


def test_a_launcher_that_raises_is_named() -> None:
    with pytest.raises(ContractError, match=r"launcher 'tests\.launch\.test_supervisor:broken'"):
        run(f"{__name__}:broken")


@asynccontextmanager
async def lost(plan: RunPlan, say: Say) -> AsyncIterator[Placement]:
    """Fail where the places are found."""
    raise KeyError("queue")
    yield Placement([])


@asynccontextmanager
async def short(plan: RunPlan, say: Say) -> AsyncIterator[Placement]:
    """Find a place for one rank alone."""
    yield Placement([ScriptedProcess("rank 0")])


@asynccontextmanager
async def wordless(plan: RunPlan, say: Say) -> AsyncIterator[None]:
    """Give nothing."""
    yield


def uncontextual(plan: RunPlan, say: Say) -> object:
    """Return what is no context manager."""
    return 3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lost", "raised KeyError: 'queue'"),
        ("short", r": its Placement has 1 processes, and plan.list_names\(\) 3"),
        ("wordless", ": its block gives None, which is no Placement"),
        ("uncontextual", r"raised TypeError: '(builtins\.)?int' object"),
    ],
)
def test_a_launcher_that_finds_no_places_is_told_why(name: str, sentence: str) -> None:
    with pytest.raises(ContractError, match=rf"launcher 'tests\.launch\.test_supervisor:{name}' ?{sentence}"):
        run(f"{__name__}:{name}")
