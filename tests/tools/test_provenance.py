"""Whose fault a failed tool call is, as the model, the counts and the circuit breaker see it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agentrl import ContractError, InfraError, Tool, ToolError, Toolset, tool
from agentrl.tools.call import call_tool
from agentrl.tools.provenance import DOWN, CallHistory

HEALTHY = {"query": "tea"}


def make(health_check: Any = None, **settings: Any) -> Tool:
    """Make a tool that fails where it is asked to, and not for tea."""

    @tool(health_check=health_check, **settings)
    async def search(query: str) -> str:
        """Search."""
        if query == "slow":
            await anyio.sleep(60)
        if query == "refuse":
            raise ToolError("no")
        if query != "tea":
            raise InfraError("search_down", f"secret-host: {query}")
        return "found"

    return search


async def test_a_request_that_fails_where_the_health_check_passes_is_refused() -> None:
    with pytest.raises(ToolError, match=r"^tool 'search' failed on this request \(search_down\)$") as refused:
        await call_tool(make(HEALTHY), {"query": "crash"}, 1)
    assert refused.value.kind == "provoked"
    assert isinstance(refused.value.__cause__, InfraError)


async def test_a_time_out_is_told_as_one() -> None:
    with pytest.raises(ToolError, match=r"took over 0\.02 s"):
        await call_tool(make(HEALTHY, timeout_s=0.02), {"query": "slow"}, 1)


async def test_a_failure_is_the_worlds_where_the_health_check_fails() -> None:
    with pytest.raises(InfraError, match="secret-host") as fault:
        await call_tool(make({"query": "other"}), {"query": "crash"}, 1)
    assert fault.value.provoked is False


async def test_a_health_check_may_be_a_function_and_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.tools.provenance.CHECK_S", 0.02)
    asked = []

    async def ask() -> None:
        asked.append(1)

    with pytest.raises(ToolError):
        await call_tool(make(ask), {"query": "crash"}, 1)
    assert asked == [1]
    with pytest.raises(InfraError):
        await call_tool(make(anyio.sleep_forever, name="other"), {"query": "crash"}, 1)


async def test_many_failures_at_once_are_one_health_check() -> None:
    asked = []

    async def ask() -> None:
        asked.append(1)
        await anyio.sleep(0.02)

    searching = make(ask)

    async def fail(episode: int) -> None:
        with pytest.raises(ToolError):
            await call_tool(searching, {"query": "crash"}, episode)

    async with anyio.create_task_group() as tasks:
        for episode in range(20):
            tasks.start_soon(fail, episode)
    assert len(asked) <= 2


async def test_without_a_health_check_the_other_episodes_are_the_evidence() -> None:
    searching = make()
    with pytest.raises(InfraError):  # nobody knows yet
        await call_tool(searching, {"query": "crash"}, 1)
    await call_tool(searching, {"query": "tea"}, 1)
    with pytest.raises(InfraError):  # it has worked for the same episode only
        await call_tool(searching, {"query": "crash"}, 1)
    await call_tool(searching, {"query": "tea"}, 2)
    with pytest.raises(ToolError):
        await call_tool(searching, {"query": "crash"}, 1)
    for episode in range(3, 3 + DOWN):
        with pytest.raises((ToolError, InfraError)):
            await call_tool(searching, {"query": "crash"}, episode)
    with pytest.raises(InfraError):  # too many others in a row: it is down
        await call_tool(searching, {"query": "crash"}, 1)
    with pytest.raises(ToolError, match="no"):  # an answer, whatever it says
        await call_tool(searching, {"query": "refuse"}, 99)
    with pytest.raises(ToolError):
        await call_tool(searching, {"query": "crash"}, 1)


def test_an_episode_that_fails_again_and_again_does_not_take_the_tool_down() -> None:
    history = CallHistory()
    history.record(1, succeeded=True)
    for _ in range(5 * DOWN):
        history.record(2, succeeded=False)
    assert history.works_for_others(2)
    assert history.works_for_others(3)


async def test_outside_of_an_episode_nothing_is_provoked() -> None:
    with pytest.raises(InfraError):
        await call_tool(make(HEALTHY), {"query": "crash"})


async def test_requests_that_crash_it_do_not_open_the_breaker_for_others() -> None:
    searching = make(HEALTHY, max_consecutive_failures=2)
    for episode in range(6):
        with pytest.raises(ToolError, match="failed on this request"):
            await call_tool(searching, {"query": "crash"}, episode)
    assert await call_tool(searching, {"query": "tea"}, 9) == "found"


async def test_what_its_author_says_of_a_failure_is_taken() -> None:
    @tool(health_check=HEALTHY)
    async def search(query: str) -> str:
        """Search."""
        raise InfraError("index", "it is being written", provoked=query != "tea")

    with pytest.raises(InfraError):
        await call_tool(search, {"query": "tea"}, 1)
    with pytest.raises(ToolError):
        await call_tool(search, {"query": "crash"}, 1)


def test_a_fault_keeps_its_provenance_across_processes() -> None:
    fault = pickle.loads(pickle.dumps(InfraError("gone", "it is gone", provoked=True)))
    assert (fault.kind, str(fault), fault.provoked) == ("gone", "it is gone", True)


class Machine(Toolset):
    """Each episode has a machine that a command may end."""

    def __init__(self, alive: bool = True) -> None:
        self.alive = alive
        self.closed: list[int] = []

    @asynccontextmanager
    async def open(self) -> Any:
        yield None

    def begin(self) -> None:
        self.ended = False

    async def health_check(self) -> None:
        if not self.alive or self.ended:
            raise OSError("no machines")

    async def close(self) -> None:
        self.closed.append(1)

    @tool
    async def shell(self, command: str) -> str:
        """Run.

        Args:
            command: to run.
        """
        self.ended = self.ended or command == "kill"
        if self.ended:
            raise InfraError("sandbox_gone", "the machine is gone")
        return command


@pytest.mark.parametrize(("alive", "error"), [(True, ToolError), (False, InfraError)])
async def test_the_health_check_of_a_toolset_is_asked_of_a_fresh_one(alive: bool, error: type[Exception]) -> None:
    machine = Machine(alive).start_episode(None)
    (shell,) = machine.checked_tools()
    assert await call_tool(shell, {"command": "ls"}, 1) == "ls"
    with pytest.raises(error):
        await call_tool(shell, {"command": "kill"}, 1)
    with pytest.raises(error):  # it stays dead, and the model reads so
        await call_tool(shell, {"command": "ls"}, 1)
    assert machine.closed == [1, 1]  # the fresh ones


def test_a_method_has_no_health_check_of_its_own() -> None:
    with pytest.raises(ContractError, match="health_check is for functions"):

        class Odd(Toolset):
            @tool(health_check={"x": 1})
            async def one(self, x: int) -> Mapping[str, int]:
                """One."""
                return {}


@tool(process=True)
def obey(text: str) -> str:
    """Do what a model wrote, which may take its process over."""
    if text == "blame":
        raise ContractError("you are wrong")
    return text


async def test_a_process_that_obeyed_a_model_ends_no_run_by_a_sentence() -> None:
    with pytest.raises(ContractError, match="you are wrong"):  # of the author's, for all we know
        await call_tool(obey, {"text": "blame"}, 1)
    assert await call_tool(obey, {"text": "tea"}, 2) == "tea"
    with pytest.raises(ContractError, match="you are wrong"):
        await call_tool(obey, {"text": "blame"}, 2)  # none but its own call went well
    with pytest.raises(ToolError, match=r"^tool 'obey' failed on this request \(tool_contract\)$") as refused:
        await call_tool(obey, {"text": "blame"}, 3)
    assert refused.value.kind == "provoked"
    assert "you are wrong" in str(refused.value.__cause__)
