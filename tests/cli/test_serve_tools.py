"""``agentrl serve-tools``: our tools as an MCP server, and back again, the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anyio
import pytest
from agentrl_tools.calculator import calculator
from agentrl_tools.mcp import Mcp

from agentrl import InfraError, Tool, ToolError, UserError
from agentrl.cli import main

SERVE = [sys.executable, "-m", "agentrl", "serve-tools"]
TOOLS = '''
from contextlib import asynccontextmanager
import subprocess
from agentrl import Toolset, InfraError, tool

print("imported")

class Counter(Toolset):
    """Counts."""

    def __init__(self, step: int = 1) -> None:
        self.step = step

    @asynccontextmanager
    async def open(self):
        print("opened")
        yield "shared"
        print("shut")

    def begin(self):
        self.count = 0

    async def close(self):
        print("closed at", self.count)

    @tool
    async def up(self, times: int = 1) -> int:
        """Count up.

        Args:
            times: how often.
        """
        print("counting")
        subprocess.run(["sh", "-c", "cat; echo noise"], check=True)
        self.count += times * self.step
        return self.count

    @tool
    async def fails(self, kind: str) -> str:
        """Fail."""
        if kind == "odd":
            raise InfraError("odd/\x1b[31m", "y" * 9000)
        if kind == "fault":
            raise InfraError("sandbox_gone", "it is away")
        return {1}
'''


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    path = tmp_path / "served_tools.py"
    path.write_text(TOOLS)
    return path


async def used(server: str, env: Sequence[str] = ()) -> list[str]:
    """What the tools say to an agentrl that uses them through MCP."""
    toolset, said = Mcp(server, env=env, timeout_s=20.0), []
    async with toolset.open() as shared:
        tools = {t.name: t for t in toolset.start_episode(shared).tool_list}
        assert tools["calculator"].schema == calculator.schema
        said.append(await tools["calculator"](expression="6*7"))
        said.append(await refusal(tools["calculator"], expression="1/0"))
        said.append(await refusal(tools["calculator"], expression=3))
        for times in (1, 2):
            said.append(await tools["up"](times=times))
        for kind in ("fault", "set", "odd"):
            with pytest.raises(InfraError) as fault:
                await tools["fails"](kind=kind)
            said.append(fault.value.kind)
    return said


async def refusal(tool: Tool, **arguments: object) -> str:
    with pytest.raises(ToolError) as raised:
        await tool(**arguments)
    return str(raised.value)


EXPECTED = [
    "42",
    "division by zero",
    "bad arguments for calculator: expression: input should be a valid string",
    "10",
    "30",
    "sandbox_gone",
    "mcp_error",
    "mcp_error",
]


def test_over_stdio_and_back(tools_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tools_file.parent)
    server = [*SERVE, "calculator,served_tools:Counter", "--tool.served_tools.step", "10"]
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    assert anyio.run(used, " ".join(server), ["PYTHONPATH"]) == EXPECTED


@contextmanager
def served(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over HTTP, and its URL."""
    process = subprocess.Popen([*SERVE, *words, "--http", "0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process, process.stderr.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_over_http_and_back(tools_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tools_file.parent)
    with served("calculator,served_tools:Counter", "--tool.served_tools.step", "10") as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/mcp\?token=[\w-]{32}", url)
        assert anyio.run(used, url) == EXPECTED
        process.send_signal(signal.SIGTERM)
        _, heard = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "Traceback" not in heard


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_told_though_the_client_is_there(sign: signal.Signals, tools_file: Path) -> None:
    command = [*SERVE, f"{tools_file}:Counter"]
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); os.execv(sys.argv[1], sys.argv[1:])"  # noqa: E501
    with subprocess.Popen(
        [sys.executable, "-c", heed, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        process.stdout.readline()  # it answers: so it has begun
        process.send_signal(sign)
        assert process.wait(timeout=120) == 0
        assert process.stdout.read() == ""
        assert process.stderr is not None
        assert process.stderr.read().split("\n")[:4] == ["imported", "opened", "closed at 0", "shut"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["calculater"], "no tool 'calculater'; did you mean 'calculator'"),
        (["--http", "1"], "agentrl serve-tools takes: NAME[,NAME...]"),
        (["calculator", "--http", "x"], "--http: input should be a valid integer"),
        (["calculator", "--prot", "1"], "prot: unknown setting; known: http, token, tool"),
        (["calculator", "--token", "a"], "--token does nothing without --http"),
        (["calculator", "--http", "0", "--token", "a b"], "a token has letters, digits"),
        (["calculator,calculator"], "two tools are called 'calculator'"),
        (["calculator", "--tool.calculater.x", "1"], "tool.calculater: no tool of that name is served; did you mean"),
    ],
)
def test_mistakes_are_sentences(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-tools", *words]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""


@pytest.mark.parametrize("shown", ["", "?token=wrong"])
def test_a_client_without_the_token_is_told_so(shown: str) -> None:
    with served("calculator") as (_, url):
        bare = url.partition("?")[0]
        with pytest.raises(HTTPError, match="403") as refused:
            urlopen(Request(bare + shown, data=b"{}", method="POST"), timeout=120)
        assert b"use the whole URL that agentrl serve-tools printed" in refused.value.read()
        refused.value.close()
        with pytest.raises(HTTPError, match="403") as refused:
            urlopen(Request(url, data=b"{}", headers={"Origin": "http://evil.example"}, method="POST"), timeout=120)
        refused.value.close()


@pytest.mark.parametrize("way", ["url", "header"])
def test_agentrl_shows_a_token_that_its_settings_name(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(toolset: Mcp) -> str:
        async with toolset.open() as shared:
            (own,) = toolset.start_episode(shared).tool_list
            return str(await own(expression="6*7"))

    with served("calculator", "--token", "a-token-of-mine") as (_, url):
        bare, headers = url.partition("?")[0], {"Authorization": "Bearer $OF_TOOLS"}
        toolset = Mcp(f"{bare}?token=$OF_TOOLS") if way == "url" else Mcp(bare, headers=headers)
        monkeypatch.delenv("OF_TOOLS", raising=False)
        with pytest.raises(UserError, match="no environment variable 'OF_TOOLS'"):
            anyio.run(call, toolset)
        monkeypatch.setenv("OF_TOOLS", "a-token-of-mine")
        assert anyio.run(call, toolset) == "42"


def test_a_token_of_ones_own_and_none() -> None:
    with served("calculator", "--token", "mine") as (_, url):
        assert url.endswith("/mcp?token=mine")
    with served("calculator", "--token", "") as (_, url):
        assert url.endswith("/mcp")


def test_a_port_that_is_taken_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with served("calculator") as (_, url):
        port = re.findall(r":(\d+)/", url)[0]
        assert main(["serve-tools", "calculator", "--http", port]) == 2
    assert f"cannot listen on port {port}: Address already in use" in capsys.readouterr().err


def test_help_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-tools", "--help"]) == 0
    assert "agentrl serve-tools calculator" in capsys.readouterr().out
