"""E2B's own client library against its service, spoken by a local server: real HTTP, real commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

pytest.importorskip("e2b")

from agentrl_tools.e2b import E2b
from agentrl_tools.remote import CommandResult, Remote, SandboxSpec

from agentrl import InfraError, Tool, ToolError, UserError
from tests.helpers.e2b_service import KEY, Service, e2b_service


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with e2b_service(tmp_path) as started:
        monkeypatch.setenv("E2B_API_URL", started.url)
        monkeypatch.setenv("E2B_SANDBOX_URL", started.url)
        monkeypatch.setenv("E2B_API_KEY", KEY)
        yield started


async def test_a_sandbox_from_start_to_end(service: Service) -> None:
    sandbox = E2b(SandboxSpec(template="mine", lifetime_s=120))
    await sandbox.start()
    assert len(service.running) == 1
    wanted = service.wanted[0]
    assert (wanted["templateID"], wanted["timeout"]) == ("mine", 120)
    assert wanted["allow_internet_access"] is False
    await sandbox.write("work/a.txt", "h\u00e9llo\n".encode())
    assert await sandbox.read("work/a.txt") == "h\u00e9llo\n".encode()
    assert await sandbox.exec("cat work/a.txt", 10.0) == CommandResult(0, "h\u00e9llo\n", "")
    assert await sandbox.exec("echo no >&2; exit 3", 10.0) == CommandResult(3, "", "no\n")
    await sandbox.close()
    assert service.running == set()


async def test_what_the_model_did_wrong_is_told_to_it(service: Service) -> None:
    toolset = Remote("e2b", timeout_s=1.0)
    async with toolset.open() as shared:
        own = toolset.start_episode(shared)
        tools: dict[str, Tool] = {t.name: t for t in own.tool_list}
        assert await tools["write_file"](path="a/b.txt", text="x") == "a/b.txt is written"
        with pytest.raises(ToolError, match=r"there is no file gone\.txt"):
            await tools["read_file"](path="gone.txt")
        with pytest.raises(ToolError, match="path is a directory"):
            await tools["write_file"](path="a", text="x")
        with pytest.raises(ToolError, match="the command took over 1 s"):
            await tools["shell"](command="sleep 30")
        service.late_s = 60.0  # nobody ends it there
        with pytest.raises(ToolError, match="the command took over 1 s"):
            await tools["shell"](command="sleep 5")
        assert await tools["shell"](command="ls a") == "b.txt"
        await own.close()
    assert service.running == set()


async def test_a_sandbox_that_went_away_is_the_world_s_fault(service: Service) -> None:
    toolset = Remote("e2b", timeout_s=5.0)
    async with toolset.open() as shared:
        own = toolset.start_episode(shared)
        tools: dict[str, Tool] = {t.name: t for t in own.tool_list}
        await tools["shell"](command="true")
        service.running.clear()
        for call in (tools["shell"](command="sleep 0.2"), tools["read_file"](path="a")):
            with pytest.raises(InfraError) as fault:
                await call
            assert fault.value.kind == "sandbox_gone"
        await own.close()


async def test_a_start_that_fails_is_a_fault_and_a_wrong_key_the_user_s(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_MAX_RETRIES", "0")
    service.refusing = 99
    toolset = Remote("e2b")
    async with toolset.open() as shared:
        with pytest.raises(InfraError, match="no machine is free"):
            await toolset.start_episode(shared).tool_list[0](command="true")
        monkeypatch.setenv("E2B_API_KEY", KEY[:-1] + "1")
        with pytest.raises(UserError, match=r"E2B starts no sandbox: .*no such key"):
            await toolset.start_episode(shared).tool_list[0](command="true")
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(UserError, match="needs a key: set E2B_API_KEY"):
        async with toolset.open():
            pass


async def test_a_start_that_was_cancelled_leaves_no_sandbox(service: Service) -> None:
    toolset = Remote("e2b")
    service.gate.clear()
    async with toolset.open() as shared:
        own = toolset.start_episode(shared)
        with anyio.move_on_after(0.3):
            await own.tool_list[0](command="true")
        assert len(service.wanted) == 1
        service.gate.set()
        await own.close()
    assert len(service.wanted) == 1
    assert service.running == set()
