"""Toolsets: what a run opens once, what each episode has of its own, and where the tools come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agentrl import ContractError, Env, EnvSpec, ToolEnv, Toolset, UserError, tool
from agentrl.environments.tool_binding import ToolBinding
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation

told: list[str] = []


class Notes(Toolset):
    """A notebook of its own for each episode, on a shelf that all share.

    Args:
        cover: what is written on it.
    """

    named_by = "cover"

    def __init__(self, cover: str = "plain", pages: int = 3) -> None:
        self.cover, self.pages = cover, pages

    @asynccontextmanager
    async def open(self) -> AsyncIterator[list[str]]:
        told.append(f"open {self.cover}")
        yield told
        told.append(f"shut {self.cover}")

    def begin(self) -> None:
        self.written: list[str] = []

    async def close(self) -> None:
        self.shared.append(f"closed with {len(self.written)}")

    @tool
    async def note(self, text: str) -> str:
        """Write a line."""
        self.written.append(text)
        return f"{self.cover}: {' '.join(self.written)}"


class Writes(ToolEnv):
    tools: Sequence[Any] = (Notes,)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("write"), {}


@pytest.fixture(autouse=True)
def silence() -> None:
    told.clear()


async def play(spec: EnvSpec, *script: str, group: int = 2) -> list[str]:
    """What the tools said."""
    async with spec.open():
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer())
        played = await rollout.group(0, group, seed=1)
    return [m["content"] for t in played for m in t.messages if m["role"] == "tool"]


def test_a_run_opens_it_once_and_each_episode_has_its_own() -> None:
    said = anyio.run(play, EnvSpec(Writes), call("note", text="a"), call("note", text="b"), "done")
    assert said == ["plain: a", "plain: a b"] * 2
    assert told == ["open plain", "closed with 2", "closed with 2", "shut plain"]


def test_a_run_may_add_tools_and_set_them() -> None:
    here = f"{__name__}:Notes"
    spec = EnvSpec("math-tools").with_tools([here], {"test_toolset": {"pages": 4}})
    said = anyio.run(play, spec, call("note", text="a") + call("calculator", expression="1+1"), "done")
    assert said == ["plain: a", "2"] * 2


def test_patterns_of_the_same_settings_share_what_is_open() -> None:
    class Two(Writes):
        tools = (Notes(), Notes("red"), Notes("plain"))

    with pytest.raises(ContractError, match="Two has two tools called 'note'"):
        anyio.run(play, EnvSpec(Two), "done")
    assert [t for t in told if t.startswith("open")] == ["open plain", "open red"]


@pytest.mark.parametrize(
    ("tools", "settings", "sentence"),
    [
        (["calculater"], {}, "no tool 'calculater'; did you mean 'calculator'"),
        (["calculator"], {"calculator": {"speed": 1}}, "tool 'calculator' has no settings; speed was given"),
        (
            [f"{__name__}:Notes"],
            {"test_toolset": {"page": 1}},
            "has no setting 'tool.test_toolset.page'; did you mean 'pages'",
        ),
        ([f"{__name__}:Notes"], {"test_toolset": {"pages": "x"}}, r"tool.test_toolset.pages of tool .*, not 'x'"),
        ([f"{__name__}:play"], {}, r"tool 'play' takes \*script: 'str'; name each argument"),
    ],
)
def test_a_wrong_name_or_setting_is_a_sentence(tools: list[str], settings: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        EnvSpec(Writes).with_tools(tools, settings)


def test_settings_of_a_tool_that_is_not_there_are_refused() -> None:
    with pytest.raises(
        ContractError, match=r"tool.calculater: MathTools has no tool of that name; did you mean 'calculator'"
    ):
        anyio.run(play, EnvSpec("math-tools").with_tools([], {"calculater": {"a": 1}}), "done")


def test_only_a_tool_env_takes_tools() -> None:
    with pytest.raises(ContractError, match="takes no tools"):
        EnvSpec(Env).with_tools(["calculator"])


def test_a_toolset_that_was_not_opened_says_how() -> None:
    with pytest.raises(ContractError, match=r"uses the toolset Notes, which is not open: make the environment by"):
        _ = Writes().tool_list
    assert ToolBinding()._shared == {}
