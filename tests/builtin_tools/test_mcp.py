"""MCP servers' tools: real processes and real HTTP; what they cost when they fail, and whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from agentrl_tools.mcp import Mcp

from agentrl import ContractError, EnvSpec, InfraError, Tool, ToolEnv, ToolError, UserError
from agentrl.cli import main
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.tools.toolset import load_tool
from agentrl.types import Observation, Trajectory

TRICKS = str(Path(__file__).parents[1] / "helpers" / "mcp_tricks.py")
COMMAND = f"{sys.executable} {TRICKS}"


@asynccontextmanager
async def using(server: str = COMMAND, **settings: Any) -> AsyncIterator[dict[str, Tool]]:
    """The tools of one episode."""
    toolset = Mcp(server, **settings)
    async with toolset.open() as shared:
        own = toolset.start_episode(shared)
        yield {t.name: t for t in own.tool_list}
        await own.close()


def alive(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")
    except (FileNotFoundError, ProcessLookupError):
        return False


async def kill(pid: int) -> None:
    """What is sent to a process that just died was on its way too; so until its end has been heard of."""
    os.kill(pid, signal.SIGKILL)
    while alive(pid):  # noqa: ASYNC110
        await anyio.sleep(0.01)
    await anyio.sleep(0.1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def listening(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)


@contextmanager
def over_http(port: int) -> Any:
    """The server as a process, once it listens."""
    process = subprocess.Popen([sys.executable, TRICKS, "--http", str(port)], stderr=subprocess.DEVNULL)
    try:
        listening(process, port)
        yield process
    finally:
        process.kill()
        process.wait()


async def fault_of(tool: Tool, **arguments: Any) -> InfraError:
    with pytest.raises(InfraError) as raised:
        await tool(**arguments)
    return raised.value


async def test_tools_come_with_names_schemas_and_results() -> None:
    async with using() as tools:
        add = tools["add"]
        assert (add.name, add.description) == ("add", "Add two numbers.")
        assert add.parameters["properties"]["b"]["minimum"] == 0
        assert add.parameters["required"] == ["a"]
        assert await add(a=2, b=3) == "5"
        assert await tools["point"](at={"x": 1}) == '{\n  "x": 2,\n  "y": 0\n}'
        assert await tools["picture"]() == "[image: image/png, 10 bytes, not shown]"
        with pytest.raises(ToolError, match="not today"):
            await tools["refuse"](why="not today")
        pid = int(await tools["pid"]())
        assert alive(pid)
    assert not alive(pid)


async def test_wrong_arguments_are_told_one_by_one() -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("add", {}, "bad arguments for add: a: field required"),
        ("add", {"a": "x"}, "a: 'x' is not of type 'integer'"),
        ("add", {"a": 1, "b": -1}, "b: -1 is less than the minimum of 0"),
        ("point", {"at": {"y": "u"}}, "at.y: 'u' is not of type 'integer'; at.x: field required"),
    ]
    async with using() as tools:
        for name, arguments, words in wrong:
            with pytest.raises(ToolError) as raised:
                tools[name].check(arguments)
            assert words in str(raised.value)


def test_a_check_calls_only_what_the_server_says_is_read_only(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "tool", f"mcp:{COMMAND}", "--tool.mcp.only", '["add", "hold"]', "--tasks", "2"]
    main(words)
    out = capsys.readouterr().out
    assert "skip writes               tool 'hold' was not called" in out
    assert "ok   good-arguments       tool 'add' answered 16 calls" in out
    assert "tool 'hold' answered" not in out
    main([*words, "--allow_writes", "hold"])
    assert "tool 'hold' answered 16 calls" in capsys.readouterr().out


async def test_names_may_be_chosen_and_prefixed() -> None:
    async with using(only=["add", "pid"], prefix="my_") as tools:
        assert list(tools) == ["my_add", "my_pid"]
        assert await tools["my_add"](a=1) == "1"
    with pytest.raises(UserError, match="has no tool 'ad'; did you mean 'add'"):
        async with using(only=["ad"]):
            pass


async def test_a_command_is_given_only_the_variables_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    async with using() as tools:
        assert await tools["environment"](name="TOKEN") == "none"
    async with using(env=["TOKEN"]) as tools:
        assert await tools["environment"](name="TOKEN") == "secret"
    with pytest.raises(UserError, match=r"no environment variable 'TOKENS', which tool\.mcp\.env names"):
        async with using(env=["TOKENS"]):
            pass


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ("no-such-command --flag", "cannot be started: there is no command 'no-such-command' that can be run"),
        (f"{COMMAND} --broken", "cannot be started: it ended; its last words:\n(.*\n)*RuntimeError: no database"),
        (f"{COMMAND} --mute", r"it has not answered for 2 s \(tool.mcp.start_timeout_s\); its last words:\nI am not"),
        ("cat", "cannot be started: "),
        ("echo hello", "it ended; on stdout it wrote 'hello', which is no MCP message"),
        ("http://127.0.0.1:9/mcp", "cannot be started: nothing answers at http://127.0.0.1:9/mcp"),
        ("python 'x", 'cannot read the command "python \'x": No closing quotation'),
        ("", "the command is empty"),
    ],
)
async def test_a_server_that_cannot_be_started_is_a_sentence(server: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        async with using(server, start_timeout_s=2 if "--mute" in server else 60.0):
            pass


def test_a_url_that_is_no_mcp_server_is_a_sentence(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        listening(process, port)

        async def attempt() -> None:
            async with using(f"http://127.0.0.1:{port}/mcp", start_timeout_s=5.0):
                pass

        try:
            with pytest.raises(UserError, match="cannot be started"):
                anyio.run(attempt)
        finally:
            process.kill()


async def test_noise_on_stdout_does_no_harm() -> None:
    async with using(f"{COMMAND} --banner") as tools:
        assert await tools["add"](a=1) == "1"


LAX = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "lax", "version": "1"}}
    elif asked["method"] == "tools/list":
        result = {"tools": [{"name": "say", "inputSchema": {"type": "object"}}]}
    elif asked["method"] == "tools/call":
        words = asked["params"]["arguments"]["words"]
        result = {"content": [{"type": "text", "text": words}]}
    else:
        if "id" in asked:  # it knows no other request, and says so
            refusal = {"code": -32601, "message": "?"}
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": refusal}), flush=True)
        continue
    fails = asked.get("params", {}).get("arguments") == {"words": "fail"}
    answer = {"error": {"code": -32000, "message": "no"}} if fails else {"result": result}
    said = json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer})
    print(said.replace("\\\\ud83d\\\\ude00", "\\\\ud83d"), flush=True)
"""


async def test_an_answer_that_is_lax_json_loses_no_connection(tmp_path: Path) -> None:
    (tmp_path / "lax.py").write_text(LAX)
    async with using(f"{sys.executable} {tmp_path / 'lax.py'}", timeout_s=20.0) as tools:
        assert await tools["say"](words="\N{GRINNING FACE}") == "?"  # cut in the middle, in UTF-16
        assert await tools["say"](words="tea") == "tea"


async def test_an_error_with_the_number_of_a_lost_connection_is_the_servers(tmp_path: Path) -> None:
    (tmp_path / "lax.py").write_text(LAX)
    server = f"{sys.executable} {tmp_path / 'lax.py'}"
    async with using(server, timeout_s=20.0) as tools, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(partial(tools["say"], words="tea"))
        for _ in range(5):
            fault = await fault_of(tools["say"], words="fail")
            assert (fault.kind, fault.provoked) == ("mcp_error", None)


async def test_a_call_that_takes_too_long_is_cancelled_there_too() -> None:
    async with using(timeout_s=0.5) as tools:
        fault = await fault_of(tools["wait"], seconds=60)
        assert fault.kind == "tool_timeout"
        assert await tools["hold"](word="and on") == "cancelled and on"


@pytest.mark.slow
async def test_a_server_that_answers_nothing_is_started_again() -> None:
    async with using(timeout_s=60.0, start_timeout_s=8.0) as tools:
        first = await tools["pid"]()
        with anyio.move_on_after(0.3):
            await tools["block"](seconds=60)
        fault = await fault_of(tools["add"], a=1)
        assert str(fault).endswith("it has not answered anything for 8 s")
        assert await tools["pid"]() != first


async def test_who_calls_while_it_is_started_again_waits() -> None:
    async with using(timeout_s=10.0) as tools:
        pid = int(await tools["pid"]())
        await kill(pid)
        assert int(await tools["pid"]()) != pid


async def test_a_server_that_does_not_come_back_is_a_fault_that_says_why(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(Path(TRICKS).read_text())  # noqa: ASYNC240
    async with using(f"{sys.executable} {script}", timeout_s=2.0) as tools:
        script.write_text("raise RuntimeError('moved out')")
        assert (await fault_of(tools["die"])).kind == "mcp_gone"
        fault = await fault_of(tools["add"], a=1)
    assert fault.kind == "mcp_gone"
    assert "moved out" in str(fault)


async def test_http_calls_that_fail_do_not_disturb_others() -> None:
    port = free_port()
    with over_http(port) as process:
        async with using(f"http://127.0.0.1:{port}/mcp", timeout_s=8.0) as tools:
            assert await tools["add"](a=2, b=3) == "5"
            faults: list[InfraError] = []

            async def wait() -> None:
                faults.append(await fault_of(tools["wait"], seconds=30))

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(wait)
                await anyio.sleep(0.5)
                process.kill()
                process.wait()
            assert [f.kind for f in faults] == ["mcp_gone"] * 3
            with over_http(port):
                assert await tools["add"](a=1, b=1) == "2"


async def test_many_calls_at_once() -> None:
    said: dict[int, str] = {}
    async with using() as tools:

        async def add(n: int) -> None:
            said[n] = await tools["add"](a=n, b=1)

        async with anyio.create_task_group() as tasks:
            for n in range(200):
                tasks.start_soon(add, n)
    assert said == {n: str(n + 1) for n in range(200)}


class Calls(ToolEnv):
    """What the script says is called; the reward is the number of results."""

    tools: Sequence[Any] = ()

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("go"), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"results": float(sum(m["role"] == "tool" for m in trajectory.messages))}


def playing(*tools: Any) -> type[ToolEnv]:
    return type("Playing", (Calls,), {"tools": tools})


async def test_a_server_killed_in_mid_call_costs_those_episodes_and_nothing_else() -> None:
    env = playing(Mcp(COMMAND, timeout_s=20.0), "calculator")
    waits, adds, sums = (
        call("wait", seconds=30),
        call("add", a=1, b=1),
        call("calculator", expression="1+1"),
    )

    def script(session: str, turn: int) -> str:
        task = int(session.partition("-")[0])
        return [[waits, "done"], [adds, "done"], [sums, "done"]][task][min(turn, 1)]

    async with EnvSpec(env).open() as spec:
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer())
        pid = int(await spec.make().tool_list[3]())
        groups: dict[int, Any] = {}

        async def play(task: int) -> None:
            groups[task] = await rollout.group(task, 8)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play, 0)
            await anyio.sleep(0.5)  # all eight wait in the server
            assert {w.what for w in rollout.waits()} == {"tool 'wait'"}
            await kill(pid)
            tasks.start_soon(play, 1)
            tasks.start_soon(play, 2)
    assert [t.fault.kind for t in groups[0]] == ["mcp_gone"] * 8
    assert len(groups[0].scored) == 0
    for later in (1, 2):
        assert [(t.fault, t.reward) for t in groups[later]] == [(None, 1.0)] * 8


async def test_a_request_that_crashes_the_server_is_an_error_to_read() -> None:
    script = [call("die"), call("add", a=1, b=1), "done"]
    async with EnvSpec(playing(Mcp(COMMAND, timeout_s=30.0))).open() as spec:
        t = await Rollout(spec, ScriptedEngine(script), ByteRenderer()).episode(0)
    assert t.fault is None
    assert [c.status for c in t.calls] == ["provoked", "ok"]
    assert t.messages[2]["content"] == "error: tool 'die' failed on this request (mcp_gone)"


@pytest.mark.slow
async def test_a_server_that_is_crashed_again_and_again_is_no_accident() -> None:
    script = [call("die"), "done"]
    async with EnvSpec(playing(Mcp(COMMAND, timeout_s=30.0))).open() as spec:
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer())
        statuses = [{c.status for t in await rollout.group(task, 2) for c in t.calls} for task in range(5)]
    assert statuses[0] == {"mcp_gone"}
    assert statuses[-1] == {"provoked"}


async def test_each_episode_may_have_a_server_of_its_own() -> None:
    env = playing(Mcp(COMMAND, per_episode=True, sessions=2, timeout_s=30.0))
    script = [call("hold", word="a") + call("pid"), call("hold", word="b"), "done"]
    async with EnvSpec(env).open() as spec:
        played = await Rollout(spec, ScriptedEngine(script), ByteRenderer()).group(0, 3)
    said = [[m["content"] for m in t.messages if m["role"] == "tool"] for t in played]
    assert [(s[0], s[2]) for s in said] == [("a", "a b")] * 3
    pids = {int(s[1]) for s in said}
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


async def test_an_episode_whose_own_server_died_is_over() -> None:
    async with using(per_episode=True, timeout_s=5.0) as tools:
        await tools["hold"](word="a")
        assert (await fault_of(tools["die"])).kind == "mcp_gone"
        assert (await fault_of(tools["hold"], word="b")).kind == "mcp_gone"


@pytest.mark.slow
async def test_an_episode_that_finds_no_free_server_says_so() -> None:
    toolset = Mcp(COMMAND, per_episode=True, sessions=1, timeout_s=6.0)
    async with toolset.open() as shared:
        one, two = toolset.start_episode(shared), toolset.start_episode(shared)
        assert await one.tool_list[0](a=1) == "1"
        fault = await fault_of(two.tool_list[0], a=1)
        assert "all 1 sessions of the MCP server" in str(fault)
        await one.close()
        assert await two.tool_list[0](a=2) == "2"
        await two.close()


def test_nothing_is_left_running_after_an_interrupt(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import anyio, signal, sys\n"
        "from agentrl_tools.mcp import Mcp\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "async def main():\n"
        f"    toolset = Mcp({COMMAND!r}, timeout_s=60)\n"
        "    async with toolset.open() as shared:\n"
        "        tools = {t.name: t for t in toolset.start_episode(shared).tool_list}\n"
        "        print(await tools['pid'](), flush=True)\n"
        "        await tools['wait'](seconds=50)\n"
        "anyio.run(main)\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert not alive(pid)


def test_settings_are_checked() -> None:
    here = "agentrl_tools.mcp:Mcp"
    with pytest.raises(ContractError, match="sessions 1 or more; not 30, 0"):
        load_tool(here, {"server": "x", "sessions": 0})
    with pytest.raises(ContractError, match=r"has no setting 'tool\.mcp\.onyl'; did you mean 'only'"):
        load_tool(here, {"server": "x", "onyl": "add"})
    toolset = load_tool(here, {"server": "x", "only": "add, pid"})
    assert isinstance(toolset, Mcp)
    assert toolset.only == ("add", "pid")
