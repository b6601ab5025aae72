"""`agentrl check tool`: each defect is found by its name, and what is right is clean."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import pytest

from agentrl import Tool, ToolError, Toolset, UserError, tool
from agentrl.checks import Finding, check_tool
from agentrl.cli import main

_log: list[str] = []


class Notes(Toolset):
    """Notes of an episode's own: a toolset without a fault."""

    def __init__(self, pages: int = 3) -> None:
        self.pages = pages

    @asynccontextmanager
    async def open(self) -> AsyncIterator[dict[str, int]]:
        yield {"pages": self.pages}

    def begin(self) -> None:
        self.written: list[str] = []

    @tool
    async def note(self, text: str, times: Literal[1, 2] = 1) -> list[str]:
        """Write a line.

        Args:
            text: such as "hello".
            times: how often.
        """
        self.written += [text] * times
        return self.written


def found(given: Any, **settings: Any) -> dict[str, list[Finding]]:
    """Everything but what is fine, or was not tried, by its name."""
    by_name: dict[str, list[Finding]] = {}
    for finding in check_tool(given, tasks=2, **settings):
        if finding.verdict not in ("ok", "skip"):
            by_name.setdefault(finding.what, []).append(finding)
    return by_name


def only(given: Any, name: str, verdict: str = "fail") -> str:
    """The sentence on the one thing that is wrong."""
    everything = found(given)
    assert list(everything) == [name], everything
    assert {f.verdict for f in everything[name]} == {verdict}
    return everything[name][0].why


def test_the_calculator_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tool", "calculator"]) == 0
    assert "calculator: 9 ok, 0 to look at, 0 failed" in capsys.readouterr().out


def test_a_toolset_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "tool", f"{__name__}:Notes"]
    assert main([*words, "--tool.test_check_tool.pages", "2", "--tasks", "3"]) == 0
    assert "0 to look at, 0 failed" in capsys.readouterr().out
    assert main([*words, "--tool.test_check_tool.page", "2"]) == 2
    assert "did you mean 'pages'" in capsys.readouterr().err
    assert main([*words, "--tool.notes.pages", "2"]) == 2
    assert f"tool.notes: '{__name__}:Notes' is what is checked" in capsys.readouterr().err


def test_a_sync_tool_is_fine() -> None:
    @tool
    def slow(word: str) -> str:
        """Take its time.

        Args:
            word: any.
        """
        if len(word) > 6:
            time.sleep(0.15)
        return word

    assert found(slow) == {}


def test_no_description() -> None:
    @tool(timeout_s=500)
    def bare(word: str) -> str:
        return word

    everything = found(bare)
    assert [f.verdict for f in everything["tools"]] == ["warn", "warn"]
    assert "rollout.turn_timeout_s 120 is under the 500 s that tool 'bare' may take" in everything["deadlines"][0].why


def test_a_name_that_servers_refuse() -> None:
    @tool(name="my tool")
    def mine() -> str:
        """Say something."""
        return "something"

    assert "tool 'my tool': servers take names of 1 to 64 letters, digits, _ and -" in only(mine, "tools")


def test_a_long_schema() -> None:
    def mine(word: str) -> str:
        return word

    mine.__doc__ = "Say a word.\n\nArgs:\n    word: " + "any word " * 400
    assert "over 600: every prompt carries it" in only(tool(mine), "tools", "warn")


def test_what_it_raises_on_good_arguments() -> None:
    @tool
    def divide(by: int) -> float:
        """Divide 12.

        Args:
            by: a number.
        """
        return 12 / (0 if by > 50 else 1)

    everything = found(divide)
    assert "called with {'by': " in everything["good-arguments"][0].why
    assert "tool 'divide' raised ZeroDivisionError" in everything["good-arguments"][0].why


def test_what_it_raises_on_bad_arguments() -> None:
    @tool
    def head(text: str) -> str:
        """The first kilobyte of a text.

        Args:
            text: such as "hello".
        """
        if len(text) > 1000:
            raise MemoryError("too long")
        return text

    said = only(head, "bad-arguments")
    assert "raised MemoryError: too long" in said
    assert "raise ToolError for what the model did wrong" in said


def test_a_result_that_is_no_json() -> None:
    @tool
    def letters(word: str) -> Any:
        """The letters of a word.

        Args:
            word: any.
        """
        return set(word)

    everything = found(letters)
    assert "which is neither text nor JSON" in everything["good-arguments"][0].why
    assert "which is neither text nor JSON" in everything["contract"][0].why


class Slow(Toolset):
    """Its first call in an episode holds up the loop."""

    def begin(self) -> None:
        self.called = False

    @tool
    async def slow(self) -> str:
        """Take its time."""
        if not self.called:
            self.called = True
            time.sleep(0.2)  # noqa: ASYNC251 - what a user does
        return "done"


def test_an_async_tool_that_blocks() -> None:
    said = only(Slow, "blocking")
    assert "Slow.slow (test_check_tool.py:" in said
    assert "a sync tool, which runs in a thread" in said


@pytest.mark.slow  # each call holds on for seconds
def test_one_that_cannot_be_cancelled() -> None:
    @tool(timeout_s=0.1)
    async def stubborn() -> str:
        """Hold on."""
        end = time.monotonic() + 3.5
        while time.monotonic() < end:
            with contextlib.suppress(BaseException):
                await anyio.sleep(0.5)
        return "done"

    everything = found(stubborn)
    assert "tool 'stubborn' took over 0.1 s" in everything["good-arguments"][0].why
    assert "went on for over 2 s: it must let CancelledError pass" in everything["cancelled"][0].why


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.slow
def test_a_sync_one_that_goes_on(released: threading.Event) -> None:
    def wait() -> str:
        """Wait."""
        released.wait(4)
        return "done"

    everything = found(tool(timeout_s=0.2)(wait))
    assert "tool 'wait' took over 0.2 s" in everything["good-arguments"][0].why
    assert everything["cancelled"][0].verdict == "warn"
    assert "say @tool(process=True)" in everything["cancelled"][0].why


def test_a_toolset_whose_episodes_share_what_they_wrote() -> None:
    class Shared(Notes):
        def begin(self) -> None:
            self.written = everything

    everything: list[str] = []
    said = only(Shared, "episodes-apart")
    assert "played twice with the same calls, differs in message" in said


def test_a_tool_with_a_global() -> None:
    @tool
    async def remember(word: str) -> int:
        """Remember a word.

        Args:
            word: any.
        """
        if not word:
            raise ToolError("no word")
        _log.append(word)
        return len(_log)

    everything = found(remember)
    assert f"{__name__}._log was changed by episodes" in everything["state-kept"][0].why
    assert everything["episodes-apart"][0].verdict == "fail"


def test_wrong_names_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no tool 'calculater'; did you mean 'calculator'"):
        check_tool("calculater")
    assert isinstance(Notes(), Toolset)
    assert not isinstance(Notes(), Tool)


def test_a_tool_that_only_refuses_has_shown_nothing() -> None:
    @tool
    async def locked(key: str) -> str:
        """Open a door.

        Args:
            key: the right key.
        """
        raise ToolError("a wrong key")

    (said,) = [f.why for f in check_tool(locked, tasks=2) if (f.what, f.verdict) == ("good-arguments", "skip")]
    assert "nothing was shown: tool 'locked' refused all 16 calls, the first with 'a wrong key'" in said


def test_a_tool_is_sent_what_a_model_could_send() -> None:
    got: list[str] = []

    @tool
    async def keep(word: str) -> str:
        """Keep a word.

        Args:
            word: any.
        """
        got.append(word)
        return "kept"

    check_tool(keep, tasks=2)
    assert max(map(len, got)) <= 10_000
    for word in got:
        word.encode("utf-8")  # no half of a surrogate pair


def test_bad_calls_are_made_one_after_another_so_that_the_right_one_is_blamed() -> None:
    running: list[str] = []

    @tool
    async def fragile(word: str) -> str:
        """Break on long words.

        Args:
            word: such as "hello".
        """
        running.append(word)
        await anyio.sleep(0.001)
        alone = len(running) == 1
        running.remove(word)
        if len(word) > 1000:
            raise RuntimeError(f"broke alone: {alone}")
        return word

    assert "broke alone: True" in only(fragile, "bad-arguments")


def test_a_tool_that_writes_is_called_only_if_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _log.clear()
    words = ["check", "tool", f"{__name__}:publish", "--tasks", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert _log == []
    assert "skip writes" in out
    assert "it may change what is outside of the episode; where that is fine, --allow_writes publish" in out
    assert "ok   good-arguments" not in out
    main([*words, "--allow_writes", "publish"])
    assert _log
    _log.clear()


@tool(writes=True)
async def publish(text: str) -> str:
    """Publish a text.

    Args:
        text: such as "hello".
    """
    _log.append(text)
    return "published"
