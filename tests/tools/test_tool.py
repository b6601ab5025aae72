"""A tool: its schema, its arguments, its result as text, and what happens when it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import anyio
import pydantic
import pytest
from anyio import lowlevel

from agentrl import ContractError, InfraError, Tool, ToolError, UserError, tool
from agentrl.tools.tool import wrap_function


class Point(pydantic.BaseModel):
    x: int
    y: int = 0


@tool
async def distance(start: Point, goal: Point, metric: Literal["l1", "l2"] = "l2") -> float:
    """Distance between two points.

    Straight, or along the axes.

    Args:
        start: where to begin.
        metric: how to measure.
    """
    assert isinstance(start, Point)
    dx, dy = goal.x - start.x, goal.y - start.y
    return float(abs(dx) + abs(dy)) if metric == "l1" else float((dx * dx + dy * dy) ** 0.5)


def test_the_schema_is_the_openai_one_and_holds_no_generated_titles() -> None:
    function = distance.schema["function"]
    assert distance.schema["type"] == "function"
    assert function["name"] == "distance"
    assert function["description"] == "Distance between two points.\n\nStraight, or along the axes."
    parameters = function["parameters"]
    assert parameters["required"] == ["start", "goal"]
    assert parameters["properties"]["metric"]["enum"] == ["l1", "l2"]
    assert parameters["properties"]["start"]["description"] == "where to begin."
    assert "title" not in str(parameters)


def test_an_argument_called_title_stays() -> None:
    @tool
    def book(title: str) -> str:
        return title

    assert book.parameters["required"] == list(book.parameters["properties"]) == ["title"]


async def test_arguments_are_checked_converted_and_handed_over() -> None:
    arguments = distance.check({"start": {"x": 0}, "goal": {"x": "3", "y": 4}})
    assert await distance(**arguments) == "5.0"


def test_bad_arguments_are_told_to_the_model_each_by_name() -> None:
    with pytest.raises(ToolError) as raised:
        distance.check({"start": {"x": "left"}, "metric": "l3", "speed": 1})
    assert str(raised.value).startswith("bad arguments for distance: ")
    for word in ("start.x: ", "goal: ", "metric: ", "speed: "):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        (3, "3"),
        (True, "true"),
        (None, "null"),
        ({"städte": ["Köln"]}, '{"städte": ["Köln"]}'),
        (Point(x=1), '{"x": 1, "y": 0}'),
    ],
)
async def test_a_result_becomes_text(result: Any, text: str) -> None:
    @tool
    async def give() -> Any:
        return result

    assert await give() == text


@dataclass
class Plain:
    x: int = 0


@pytest.mark.parametrize("result", [b"bytes", {1, 2}, Plain(), [Plain()], {(1, 2): 3}, object()])
async def test_a_result_that_is_no_json_is_the_authors_mistake(result: Any) -> None:
    @tool(retries=3)
    async def give() -> Any:
        return result

    with pytest.raises(ContractError, match=r"tool 'give' returned .* which is neither text nor JSON; return a str"):
        await give()


async def test_a_long_result_is_cut_and_says_so() -> None:
    @tool(max_chars=10)
    def long() -> str:
        return "0123456789abc"

    assert await long() == "0123456789 [cut: 3 more characters]"


async def test_sync_functions_run_off_the_event_loop() -> None:
    @tool
    def where() -> int:
        return threading.get_ident()

    assert int(await where()) != threading.get_ident()


async def test_a_partial_and_a_callable_object_may_be_async_too() -> None:
    class Greeter:
        async def __call__(self, name: str) -> str:
            return f"hello {name}"

    assert await tool(name="greet")(Greeter().__call__)(name="Ada") == "hello Ada"


class Flaky:
    """Fails ``failures`` times, then answers."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    async def call(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "ok"


async def test_what_the_world_does_wrong_is_tried_again() -> None:
    flaky = Flaky(2, OSError("gone"))
    assert await tool(retries=2)(flaky.call)() == "ok"
    assert flaky.calls == 3


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("no route"), "tool_error", "tool 'call' raised OSError: no route .*raise agentrl.ToolError for what"),
        (TimeoutError("read"), "tool_error", "tool 'call' raised TimeoutError: read"),
        (InfraError("sandbox_gone", "it died"), "sandbox_gone", "it died"),
    ],
)
async def test_past_its_retries_it_is_the_worlds_fault(error: Exception, kind: str, message: str) -> None:
    flaky = Flaky(9, error)
    with pytest.raises(InfraError, match=message) as raised:
        await tool(retries=1)(flaky.call)()
    assert raised.value.kind == kind
    assert flaky.calls == 2


@pytest.mark.parametrize("error", [ToolError("no such city"), ContractError("yours")])
async def test_a_no_and_a_broken_contract_are_not_tried_again(error: Exception) -> None:
    flaky = Flaky(9, error)
    with pytest.raises((ToolError, UserError), match=str(error)):
        await tool(retries=5)(flaky.call)()
    assert flaky.calls == 1


async def test_a_try_that_takes_too_long_is_given_up_and_repeated() -> None:
    begun: list[float] = []

    @tool(timeout_s=0.05, retries=1)
    async def slow() -> None:
        begun.append(anyio.current_time())
        await anyio.sleep(60)

    with pytest.raises(InfraError, match=r"tool 'slow' took over 0.05 s") as raised:
        await slow()
    assert raised.value.kind == "tool_timeout"
    assert len(begun) == 2


async def test_a_blocked_thread_is_left_behind() -> None:
    release = threading.Event()

    @tool(timeout_s=0.05)
    def stuck() -> None:
        release.wait(60)

    started = time.perf_counter()
    try:
        with pytest.raises(InfraError, match="took over"):
            await stuck()
        assert time.perf_counter() - started < 5
        assert all(t.daemon for t in threading.enumerate() if t.name == "agentrl function")  # the process may end
    finally:
        release.set()


async def test_a_tool_that_ignores_its_cancellation_is_left_behind() -> None:
    release, ignored = anyio.Event(), 0

    @tool(timeout_s=0.02)
    async def stubborn() -> str:
        nonlocal ignored
        while not release.is_set():
            try:
                await release.wait()
            except BaseException:
                ignored += 1
        return "too late"

    with anyio.fail_after(60), pytest.raises(InfraError, match="took over"):
        await stubborn()
    assert ignored == 1
    release.set()
    await lowlevel.checkpoint()


async def test_a_cancelled_caller_cancels_the_tool() -> None:
    ended: list[str] = []

    @tool
    async def patient() -> None:
        try:
            await anyio.sleep(60)
        finally:
            ended.append("cleaned up")

    with anyio.move_on_after(0.05) as scope:
        await patient()
    assert scope.cancelled_caught
    assert ended == ["cleaned up"]


async def test_a_tool_that_cancels_itself_is_a_fault_and_not_an_empty_result() -> None:
    @tool
    async def odd() -> str:
        raise anyio.get_cancelled_exc_class()

    with pytest.raises(InfraError, match="it cancelled itself"):
        await odd()


async def test_what_wrong_arguments_make_a_plain_function_raise_is_told_to_the_model() -> None:
    def divide(a: float, b: float) -> float:
        """Divide."""
        if b == 7:
            raise OSError("no route")
        return a / b

    plain = wrap_function(divide, "tools")
    with pytest.raises(ToolError, match="ZeroDivisionError: float division by zero"):
        await plain(a=1.0, b=0.0)
    with pytest.raises(InfraError, match="no route"):
        await plain(a=1.0, b=7.0)
    with pytest.raises(InfraError, match="ZeroDivisionError"):
        await tool(divide)(a=1.0, b=0.0)
    own = tool(model_errors=(OSError,))(divide)
    with pytest.raises(ToolError, match="OSError: no route"):
        await own(a=1.0, b=7.0)


async def test_a_partial_hides_what_it_binds_from_the_model() -> None:
    def search(query: str, key: str, limit: int = 3) -> str:
        """Search."""
        return f"{query} {key} {limit}"

    plain = wrap_function(partial(search, key="SECRET"), "tools")
    assert (plain.name, plain.description) == ("search", "Search.")
    assert "SECRET" not in str(plain.schema)
    assert set(plain.parameters["properties"]) == {"query", "limit"}
    assert await plain(**plain.check({"query": "tea", "limit": 1})) == "tea SECRET 1"
    with pytest.raises(ToolError, match="key: extra inputs are not permitted"):
        plain.check({"query": "tea", "key": "mine"})


def no_type(city) -> None: ...  # type: ignore[no-untyped-def]
def no_json(lock: Annotated[threading.Event, "not data"]) -> None: ...


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (no_type, "argument 'city' of tool 'no_type' has no type"),
        (no_json, "tool 'no_json' has an argument of a type that JSON cannot hold"),
    ],
)
def test_a_function_that_makes_no_schema_is_refused(function: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        tool(function)


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"timeout_s": -1}, {"retries": -1}, {"max_concurrency": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"timeout_s must be over 0, retries 0 or more, max_concurrency 1 or more"):
        tool(**settings)(Flaky(0, OSError()).call)


def test_a_tool_may_have_another_name_than_its_function() -> None:
    found = tool(name="where", timeout_s=2, max_concurrency=3)(Flaky(0, OSError()).call)
    assert isinstance(found, Tool)
    assert (found.name, found.timeout_s, found.max_concurrency) == ("where", 2, 3)


async def test_a_tool_may_bring_its_own_check() -> None:
    async def shout(**arguments: Any) -> str:
        return str(arguments)

    def check(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [(name, "not a word") for name, value in arguments.items() if not isinstance(value, str)]

    own = Tool("shout", "", {"type": "object"}, check, shout)
    assert own.check({"self": "a", "name": "b"}) == {"self": "a", "name": "b"}
    assert await own(**{"self": "a", "name": "b"}) == "{'self': 'a', 'name': 'b'}"
    with pytest.raises(ToolError, match=r"^bad arguments for shout: a: not a word; b: not a word$"):
        own.check({"a": 1, "b": 2, "c": "c"})
