"""Remote sandboxes: one an episode, begun at its first call, always closed. Here a folder and real commands."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from agentrl_tools.remote import CommandResult, Remote, SandboxSpec

from agentrl import ContractError, EnvSpec, InfraError, ToolEnv, ToolError, UserError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.tools.toolset import load_tool
from agentrl.types import Observation

HERE = f"{__name__}:Folder"


class Folder:
    """A sandbox that keeps the protocol and protects nobody: for the tests alone."""

    living: set[Folder] = set()
    made = most = 0
    start_s = 0.0
    failing = False

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.folder: Path | None = None

    async def start(self) -> None:
        await anyio.sleep(self.start_s)
        if self.failing:
            raise ConnectionError("nobody there")
        self.folder = Path(tempfile.mkdtemp())
        Folder.made += 1
        Folder.living.add(self)
        Folder.most = max(Folder.most, len(Folder.living))

    async def exec(self, command: str, timeout_s: float) -> CommandResult:
        assert self.folder is not None
        if not self.folder.exists():
            raise RuntimeError("the machine was taken away")
        with anyio.fail_after(timeout_s):
            done = await anyio.run_process(["sh", "-c", command], cwd=self.folder, check=False)
        return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())

    async def read(self, path: str) -> bytes:
        assert self.folder is not None
        return (self.folder / path).read_bytes()

    async def write(self, path: str, content: bytes) -> None:
        assert self.folder is not None
        (self.folder / path).write_bytes(content)

    async def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            Folder.living.discard(self)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"made": 0, "most": 0, "living": set(), "start_s": 0.0, "failing": False}.items():
        monkeypatch.setattr(Folder, name, value)
    yield
    assert Folder.living == set()


class Works(ToolEnv):
    tools: Sequence[Any] = (Remote(HERE, sandboxes=2, timeout_s=5.0),)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("work"), {}


async def played(script: Any, size: int, env: type[ToolEnv] = Works) -> Any:
    async with EnvSpec(env).open() as spec:
        return await Rollout(spec, ScriptedEngine(script), ByteRenderer()).group(0, size)


def results(trajectory: Any) -> list[str]:
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


async def test_each_episode_has_a_sandbox_of_its_own() -> None:
    script = [
        call("write_file", path="a.txt", text="one"),
        call("shell", command="cat a.txt && echo two >> a.txt; ls") + call("shell", command="echo no >&2; exit 3"),
        call("read_file", path="a.txt"),
        "done",
    ]
    group = await played(script, 4)
    for trajectory in group:
        said = results(trajectory)
        assert said == ["a.txt is written", "onea.txt", "[stderr]\nno\n[exit code 3]", "onetwo\n"]
    assert (Folder.made, Folder.most) == (4, 2)


async def test_an_episode_that_calls_nothing_starts_nothing() -> None:
    await played(["done"], 2)
    assert Folder.made == 0


async def test_two_calls_of_the_first_turn_share_one_sandbox() -> None:
    Folder.start_s = 0.1
    (one,) = await played([call("shell", command="touch a") + call("shell", command="sleep 0.2; ls"), "done"], 1)
    assert results(one) == ["[no output]", "a"]
    assert Folder.made == 1


async def test_a_start_that_fails_costs_the_episode() -> None:
    Folder.failing = True
    (one,) = await played([call("shell", command="ls"), "done"], 1)
    assert one.fault is not None
    assert one.fault.kind == "sandbox_gone"
    assert "the sandbox cannot be started: ConnectionError: nobody there" in one.fault.message


async def test_a_sandbox_that_is_taken_away_costs_the_episode() -> None:
    (one,) = await played([call("shell", command="rm -r $PWD"), call("shell", command="ls"), "done"], 1)
    assert one.fault is not None
    assert (one.fault.kind, one.fault.message) == (
        "sandbox_gone",
        "the sandbox is gone: RuntimeError: the machine was taken away",
    )


async def test_a_cancelled_episode_closes_its_sandbox() -> None:
    with anyio.move_on_after(0.5):
        await played([call("shell", command="sleep 30"), "done"], 2)
    assert Folder.made == 2


async def test_a_start_that_was_cancelled_is_closed_when_it_came() -> None:
    Folder.start_s = 0.4
    with anyio.move_on_after(0.1):
        await played([call("shell", command="ls"), "done"], 2)
    assert Folder.made == 2  # and the fixture finds none alive


async def test_who_finds_no_place_says_so() -> None:
    toolset = Remote(HERE, sandboxes=1, start_timeout_s=0.2)
    async with toolset.open() as shared:
        one, two = toolset.start_episode(shared), toolset.start_episode(shared)
        await one.shell.function(one, command="true")
        with pytest.raises(InfraError, match="all 1 sandboxes are taken"):
            await two.tool_list[0](command="true")
        await one.close()
        assert await two.tool_list[0](command="echo in") == "in"
        await two.close()


async def test_a_start_that_takes_too_long_is_a_fault() -> None:
    Folder.start_s = 0.5
    toolset = Remote(HERE, start_timeout_s=0.2)
    async with toolset.open() as shared:
        own = toolset.start_episode(shared)
        with pytest.raises(InfraError, match=r"did not start within 0.2 s"):
            await own.tool_list[0](command="true")
        await own.close()
    await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("shell", {"command": "sleep 9"}, "the command took over 0.3 s"),
        ("read_file", {"path": "gone"}, "No such file or directory"),
        ("read_file", {"path": "binary"}, "binary is not text: 2 bytes"),
        ("write_file", {"path": "no/folder", "text": ""}, "No such file or directory"),
    ],
)
async def test_the_model_s_mistakes_are_told_to_it(name: str, arguments: dict[str, str], words: str) -> None:
    toolset = Remote(HERE, timeout_s=0.3)
    async with toolset.open() as shared:
        own = toolset.start_episode(shared)
        tools = {t.name: t for t in own.tool_list}
        await tools["shell"](command=r"printf '\377\376' > binary")
        with pytest.raises(ToolError, match=words):
            await tools[name](**arguments)
        await own.close()


def test_wrong_settings_are_sentences() -> None:
    name = "agentrl_tools.remote:Remote"
    with pytest.raises(ContractError, match=r"needs a name: remote:KIND"):
        load_tool(name, {})
    with pytest.raises(ContractError, match="sandboxes 1 or more; not 60, 40, 900 and 0"):
        load_tool(name, {"kind": "e2b", "sandboxes": 0})

    async def opened(kind: str) -> None:
        async with Remote(kind).open():
            pass

    with pytest.raises(UserError, match="no kind 'e2c'; did you mean 'e2b'"):
        anyio.run(opened, "e2c")
    with pytest.raises(UserError, match="tool 'remote:gone:Box': cannot import 'gone'"):
        anyio.run(opened, "gone:Box")
