"""MCP servers that mean harm: each ends in a sentence or an answer, and none holds up the event loop."""

from __future__ import annotations

import resource
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from agentrl_tools import mcp_transport, schema
from agentrl_tools.mcp import Mcp

from agentrl import InfraError, Tool, UserError
from agentrl.runtime.loop_watchdog import watch_event_loop
from agentrl.tools.call import call_tool

SERVER = Path(__file__).parent.parent / "helpers/hostile_mcp.py"


@asynccontextmanager
async def using(trick: str) -> AsyncIterator[Sequence[Tool]]:
    toolset = Mcp(f"{sys.executable} {SERVER} {trick}", timeout_s=20.0)
    async with toolset.open() as shared:
        episode = toolset.start_episode(shared)
        yield episode.tool_list
        await episode.close()


@asynccontextmanager
async def turning() -> AsyncIterator[None]:
    """Fail where the event loop is held up by any code at all."""
    told: list[str] = []
    with watch_event_loop(told.append, 1.0, whose=("/",)):
        yield
        await anyio.sleep(0.5)
    assert told == []


@pytest.mark.parametrize(
    ("trick", "sentence"),
    [
        ("endless", r"lists its tools on over 100 pages, without an end"),
        ("crowd", r"lists over 10,000 tools"),
        ("many", r"has 2,000 tools, of 500 that an environment may have: name those it needs in tool\.mcp\.only"),
        ("name", r"a name has 1 to 128 characters that can be printed"),
        ("deep", r"its schema is nested deeper than 64 levels: leave it out \(only=\.\.\.\)"),
        ("abyss", r"it wrote a message that cannot be read"),
        ("wide", r"its schema has over 64,000 characters"),
    ],
)
async def test_a_list_without_bounds_is_a_sentence(trick: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        async with using(trick):
            pass
    assert len(str(refused.value)) < 1000


async def test_a_long_description_is_cut() -> None:
    async with using("words") as (run,):
        assert len(run.description) < 8_100
        assert run.description.endswith("[cut]")


@pytest.mark.parametrize("trick", ["pattern", "self", "laughs"])
async def test_a_schema_whose_check_does_not_end_holds_up_nobody(trick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "CHECK_S", 1.0)
    async with using(trick) as (run,), turning():
        for _ in range(3):
            assert await call_tool(run, {"a": "a" * 40 + "!"}, 1) == "ran"


@pytest.mark.slow
async def test_a_line_that_does_not_end_ends_the_session_and_fills_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with using("line") as (run,):
        with pytest.raises(InfraError, match="it wrote a message of over 8 MiB"):
            await run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


async def test_a_huge_reply_is_cut() -> None:
    async with using("reply") as (run,):
        assert len(await run()) < run.max_chars + 100


async def test_kinds_that_are_no_text_are_named() -> None:
    async with using("kinds") as (run,):
        assert (await run()).splitlines() == [
            "[image: image/png, 3000 bytes, not shown]",
            "[audio: audio/wav, 3 bytes, not shown]",
            "[resource: etc, file:///etc/passwd]",
            "[resource: file:///x, not shown]",
        ]


async def test_a_kind_that_nobody_knows_is_an_error_of_the_call() -> None:
    async with using("unknown") as (run,):
        with pytest.raises(InfraError):
            await run()


def test_a_line_is_bounded_however_it_comes_in() -> None:
    reader = mcp_transport.BoundedLines()
    block = b"x" * (mcp_transport.MAX_MESSAGE // 2)
    assert reader.decode(block + b"\n" + block) + reader.decode(b"\n" + block)
    with pytest.raises(ConnectionError):
        reader.decode(block + b"xx")
