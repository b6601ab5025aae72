"""ToolEnv runs the calls of a turn; EnvSpec makes environments and checks their settings."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl import ContractError, Env, EnvSpec, InfraError, Reply, Tool, ToolEnv, ToolError, UserError, tool
from agentrl.settings.loader import build_config, dump_toml
from agentrl.types import ToolCall


@tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
async def refuse(word: str) -> str:
    """Say no."""
    raise ToolError(f"no {word} here")


@tool
async def wait(seconds: float) -> str:
    """Wait."""
    await anyio.sleep(seconds)
    return f"waited {seconds:g}"


class Counter(ToolEnv):
    system_prompt = "Count."
    tools: Sequence[Tool | str] = (add, refuse, wait)

    def __init__(self, start: int = 0) -> None:
        self.value = start  # and super().__init__() is forgotten

    @tool(name="count")
    async def move(self, by: int = 1) -> int:
        """Count on.

        Args:
            by: how far.
        """
        self.value += by
        return self.value


def asked(*calls: tuple[str, dict[str, Any]]) -> Reply:
    return Reply("", tuple(ToolCall(f"id{i}", name, arguments) for i, (name, arguments) in enumerate(calls)))


async def test_a_turn_without_calls_ends_the_episode() -> None:
    assert await Counter().step(Reply("done")) == ([], 0.0, True, False, {})


async def test_results_come_in_the_order_asked_whoever_is_first() -> None:
    env = Counter()
    reply = asked(("wait", {"seconds": 0.05}), ("add", {"a": 1, "b": 2}), ("wait", {"seconds": 0.02}))
    step = await env.step(reply)
    assert step.observation == [
        {"role": "tool", "content": "waited 0.05", "tool_call_id": "id0", "name": "wait"},
        {"role": "tool", "content": "3", "tool_call_id": "id1", "name": "add"},
        {"role": "tool", "content": "waited 0.02", "tool_call_id": "id2", "name": "wait"},
    ]
    assert not step.terminated
    assert [(c.turn, c.name, c.status) for c in env.call_records] == [
        (0, "add", "ok"),
        (0, "wait", "ok"),
        (0, "wait", "ok"),
    ]
    await env.step(asked(("add", {"a": 1, "b": 2})))
    assert env.call_records[-1].turn == 1


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (
            ToolCall("1", "ad", {"a": 1}),
            "unknown_tool",
            "error: unknown tool 'ad'; the tools are: count, add, refuse, wait",
        ),
        (ToolCall("1", "add", {"a": 1}), "arguments", "error: bad arguments for add: b: field required"),
        (ToolCall("1", "", error="invalid JSON in the tool call"), "parse", "error: invalid JSON in the tool call"),
        (ToolCall("1", "refuse", {"word": "tea"}), "tool", "error: no tea here"),
    ],
)
async def test_the_models_mistakes_become_messages(call: ToolCall, status: str, message: str) -> None:
    env = Counter()
    step = await env.step(Reply("", (call, ToolCall("2", "add", {"a": 1, "b": 1}))))
    assert [m["content"] for m in step.observation if isinstance(m, dict)] == [message, "2"]
    assert [c.status for c in env.call_records] == [status, "ok"]
    assert [m.get("is_error", False) for m in step.observation if isinstance(m, dict)] == [True, False]


async def test_a_method_is_a_tool_with_the_episodes_own_state() -> None:
    one, other = Counter(start=10), Counter()
    await one.step(asked(("count", {"by": 5})))
    await other.step(asked(("count", {})))
    assert (one.value, other.value) == (15, 1)
    assert "self" not in str(one.tool_list[0].parameters)


async def test_the_worlds_fault_ends_the_other_calls_and_is_told_as_it_is() -> None:
    @tool(timeout_s=0.02)
    async def broken() -> None:
        """Never."""
        await anyio.sleep(60)

    class Broken(Counter):
        tools = (broken, wait)

    env = Broken()
    with pytest.raises(InfraError) as raised:
        await env.step(asked(("wait", {"seconds": 60}), ("broken", {})))
    assert raised.value.kind == "tool_timeout"
    assert {c.name: c.status for c in env.call_records} == {"broken": "tool_timeout", "wait": "cancelled"}


async def test_a_tools_limit_holds_for_all_environments_of_a_run() -> None:
    at_once, most = 0, 0

    @tool(max_concurrency=3)
    async def scarce() -> str:
        """One of three."""
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await anyio.sleep(0.01)
        at_once -= 1
        return "ok"

    class Scarce(ToolEnv):
        tools = (scarce,)

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(Scarce().step, asked(("scarce", {}), ("scarce", {})))
    assert most == 3


def test_tools_are_objects_names_or_the_environments_own() -> None:
    class Named(ToolEnv):
        tools = ("calculator",)

    class Own(ToolEnv):
        def __init__(self) -> None:
            self.tools = [add]

    class Less(Counter):
        move = None  # type: ignore[assignment]

    assert [t.name for t in Named().tool_list] == ["calculator"]
    assert [t.name for t in Own().tool_list] == ["add"]
    assert [t.name for t in Less().tool_list] == ["add", "refuse", "wait"]
    assert ToolEnv().tool_list == ()


async def test_plain_functions_are_tools_beside_the_others() -> None:
    class Table:
        async def look_up(self, key: str) -> str:
            """Look a word up."""
            return key.upper()

    def power(base: int, exponent: int = 2) -> int:
        """Raise a number to a power.

        Args:
            base: the number.
            exponent: how often it is multiplied.
        """
        return int(base**exponent)

    class Plain(ToolEnv):
        tools = [power, "calculator", Table().look_up, add]

    env = Plain()
    assert [t.name for t in env.tool_list] == ["power", "calculator", "look_up", "add"]
    assert env.tool_list[0].parameters["properties"]["exponent"] == {
        "default": 2,
        "description": "how often it is multiplied.",
        "type": "integer",
    }
    step = await env.step(asked(("power", {"base": 3}), ("look_up", {"key": "ß"}), ("power", {"base": "three"})))
    texts = [m["content"] for m in step.observation if isinstance(m, dict)]
    assert texts[:2] == ["9", "SS"]
    assert texts[2].startswith("error: bad arguments for power: base: ")


def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


def lazily(a: int) -> Iterator[int]:
    yield a


async def lazily_async(a: int) -> AsyncIterator[int]:
    yield a


def untyped(a): ...  # type: ignore[no-untyped-def]
def starred(*a: int) -> None: ...
def unknown(a: Gone) -> None: ...  # type: ignore[name-defined] # noqa: F821


class Owner:
    def method(self, a: int) -> int:
        return a

    def __call__(self, a: int) -> int:
        return a


def test_tools_of_the_run_are_functions_or_names(tmp_path: Path) -> None:
    (tmp_path / "own_tools.py").write_text('def halve(n: int) -> float:\n    """Halve."""\n    return n / 2\n')
    config = build_config(("arguments", {"env": "math-tools", "tools": [multiply, f"{tmp_path}/own_tools.py:halve"]}))
    assert [t.name for t in EnvSpec.from_config(config).tool_list()] == ["calculator", "multiply", "halve"]
    assert tomllib.loads(dump_toml(config))["tools"] == [
        f"{__name__}:multiply",
        f"{tmp_path}/own_tools.py:halve",
    ]
    alone = build_config(("arguments", {"env": "math-tools", "tools": partial(multiply, b=2)}))
    assert [list(t.parameters["properties"]) for t in EnvSpec.from_config(alone).tool_list()[1:]] == [["a"]]
    assert dump_toml(alone).startswith("# given in Python, so not written here: tools (functools.partial")


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ((add, add), "Bad has two tools called 'add'; give one another name: agentrl.tool.name='NAME'..function"),
        ((add, partial(add.function, b=1)), "Bad has two tools called 'add'"),
        ((untyped,), "argument 'a' of tool 'untyped' has no type; write `a: str`, say"),
        ((starred,), r"tool 'starred' takes \*a: .*int.*; name each argument, with its type"),
        ((unknown,), "tool 'unknown': a type in its signature cannot be found: name 'Gone' is not defined"),
        ((lambda a: a,), "Bad.tools holds <function .* a lambda has no types; write a def with types and a docstring"),
        ((lazily,), "it yields; a tool returns one result"),
        ((lazily_async,), "it yields; a tool returns one result"),
        ((Owner.method,), "it is a method of a class; list that of an object, such as thing.method"),
        ((Owner(),), "it is an object; list one of its methods, such as thing.search"),
        ((Owner,), "Bad.tools holds <class .*Owner.*: list functions, toolsets or names of tools"),
        ((3,), "Bad.tools holds 3, which is no tool: list functions, toolsets or names of tools"),
        ((max,), "tool 'max' is written in C and has no signature; write a def with types around it"),
        (("calculater",), r"no tool 'calculater'; did you mean 'calculator'\?"),
    ],
)
def test_what_is_no_tool_is_refused(tools: Sequence[Any], sentence: str) -> None:
    class Bad(ToolEnv):
        pass

    Bad.tools = tools
    with pytest.raises(UserError, match=sentence):
        _ = Bad().tool_list


def test_a_tool_does_not_hide_what_an_environment_has() -> None:
    class Hiding(ToolEnv):
        @tool
        async def count(self, things: str) -> int:  # type: ignore[override]
            """Count."""
            return 3

    sentence = r"the tool Hiding.count hides Env.count; rename the method, and say @tool\(name='count'\)"
    with pytest.raises(ContractError, match=sentence):
        _ = Hiding().tool_list


def test_ask_begins_with_the_system_prompt_if_there_is_one() -> None:
    assert Counter().ask("?") == [{"role": "system", "content": "Count."}, {"role": "user", "content": "?"}]
    assert ToolEnv().ask("?") == [{"role": "user", "content": "?"}]


async def test_an_environment_without_its_methods_says_which() -> None:
    class Empty(Env): ...

    env = EnvSpec(Empty).make()
    with pytest.raises(ContractError, match="Empty has no method `reset`"):
        await env.reset(seed=0)
    with pytest.raises(ContractError, match="Empty has no method `step`"):
        await env.step(Reply(""))


class Configured(Env):
    def __init__(self, level: int, words: Sequence[str] | None = None, sizes: list[int] | None = None) -> None:
        self.level, self.words, self.sizes = level, words, sizes


def test_settings_are_converted_to_the_types_of_init() -> None:
    env = EnvSpec(Configured, level="3", words="a, b", sizes="1,2").make()
    assert isinstance(env, Configured)
    assert (env.level, env.words, env.sizes) == (3, ["a", "b"], [1, 2])
    assert env is not EnvSpec(Configured, level=3).make()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "env 'Configured' needs a value for --env.level"),
        ({"level": "high"}, "env.level of env 'Configured': input should be a valid integer.*, not 'high'"),
        ({"level": 1, "sizes": "1,x"}, "env.sizes.1 of env 'Configured': input should be a valid integer"),
        ({"level": 1, "word": "a"}, "env 'Configured' has no setting 'env.word'; did you mean 'words'?"),
    ],
)
def test_wrong_settings_are_told_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        EnvSpec(Configured, **settings)


@pytest.mark.parametrize("env", ["math-tool", "json:dumps", int, multiply])
def test_what_is_no_environment_is_refused(env: Any) -> None:
    with pytest.raises(UserError, match=r"no env 'math-tool'; did you mean|not a subclass of agentrl\.Env"):
        EnvSpec(env)


async def test_the_shared_part_is_made_once_and_closed() -> None:
    events: list[str] = []

    class Sharing(Env):
        def __init__(self, name: str = "db") -> None: ...

        @classmethod
        @asynccontextmanager
        async def open_shared(cls, **settings: Any) -> AsyncIterator[Mapping[str, str]]:
            events.append("open")
            yield settings
            events.append("close")

    spec = EnvSpec(Sharing, name="x")
    async with spec.open():
        assert spec.make().shared is spec.make().shared
        assert spec.make().shared == {"name": "x"}
    assert events == ["open", "close"]
