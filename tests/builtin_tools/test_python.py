"""The tool python: in an episode, with and without state, in each sandbox."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from agentrl_tools.python import Python, format_result
from agentrl_tools.sandbox.fork_server_client import CodeResult, ForkServerClient

from agentrl import EnvSpec, InfraError, ToolEnv, ToolError, UserError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation


class Codes(ToolEnv):
    tools = ("python",)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("compute"), {}


async def said(spec: EnvSpec, *script: str, group: int = 2) -> list[list[str]]:
    """What the tools said, episode by episode."""
    async with spec.open():
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer())
        played = await rollout.group(0, group, seed=1)
    assert all(t.fault is None for t in played), [t.fault for t in played]
    return [[m["content"] for m in t.messages if m["role"] == "tool"] for t in played]


async def called(python: Python, *codes: str) -> list[str]:
    """The answers, or what the tool refused."""
    async with python.open() as shared:
        episode = python.start_episode(shared)
        answers = []
        for code in codes:
            try:
                answers.append(await episode.tool_list[0](code=code))
            except ToolError as refusal:
                answers.append(f"error: {refusal}")
        await episode.close()
        return answers


def test_an_agent_runs_code() -> None:
    code = "import math\nprint(math.factorial(20))"
    found = anyio.run(said, EnvSpec(Codes), call("python", code=code), call("python", code="1/0"), "done")
    assert [turns[0] for turns in found] == ["2432902008176640000"] * 2
    assert found[0][1].startswith("error: Traceback")
    assert found[0][1].endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("sandbox", ["auto", "monty"])
def test_variables_last_as_long_as_an_episode_where_they_shall(sandbox: str) -> None:
    turns = (call("python", code="x = 2"), call("python", code="x + 1"), "done")
    keeps = EnvSpec(Codes).with_tools((), {"python": {"state": True, "sandbox": sandbox}})
    forgets = EnvSpec(Codes).with_tools((), {"python": {"sandbox": sandbox}})
    assert anyio.run(said, keeps, *turns) == [["", "3"]] * 2
    assert all("NameError" in found[1] for found in anyio.run(said, forgets, *turns))


def test_calls_of_one_turn_do_not_get_mixed_up() -> None:
    both = "".join(call("python", code=f"x = {n}; x") for n in range(5))
    spec = EnvSpec(Codes).with_tools((), {"python": {"state": True}})
    assert anyio.run(said, spec, both, "done") == [["0", "1", "2", "3", "4"]] * 2


@pytest.mark.parametrize("sandbox", ["auto", "monty"])
def test_code_that_takes_too_long_is_the_models_mistake(sandbox: Any) -> None:
    python = Python(sandbox=sandbox, state=True, timeout_s=0.5)
    late, gone = anyio.run(called, python, "x = 1\nwhile True: pass", "x")
    assert late == "error: it took over 0.5 s and was stopped, and its variables are gone"
    assert "NameError" in gone


def test_packages_that_are_installed_can_be_used() -> None:
    codes = ("import numpy as np; print(np.arange(4).sum())", "import sympy as s; s.integrate(s.Symbol('x') ** 2)")
    assert anyio.run(called, Python(), *codes) == ["6", "x**3/3"]


def test_a_call_that_breaks_the_interpreter_is_told_so() -> None:
    crash, left, long = anyio.run(
        called, Python(), "import ctypes; ctypes.string_at(0)", "import os; os._exit(3)", "#" * 20_001
    )
    assert crash == "error: the interpreter was ended by SIGSEGV"
    assert left == ""
    assert long == "error: the code has 20001 characters; 20000 are the most"


def test_another_interpreter_may_be_given() -> None:
    (version,) = anyio.run(called, Python(interpreter=sys.executable), "import sys; sys.version_info[:2]")
    assert version == str(sys.version_info[:2])


def test_the_models_mistake_and_the_worlds_are_two_things() -> None:
    assert format_result(CodeResult("ok", "a\n", 3), 1.0) == "a\n[3 more bytes left out]"
    with pytest.raises(ToolError, match=r"^NameError$"):
        format_result(CodeResult("raised", "NameError\n", 0), 1.0)

    async def killed() -> None:
        python = Python(state=True)
        async with python.open() as shared:
            episode = python.start_episode(shared)
            run = episode.tool_list[0]
            await run(code="x = 1")
            assert isinstance(shared.light, ForkServerClient)
            assert shared.light.process is not None
            shared.light.process.kill()
            await asyncio.sleep(0.2)
            await run(code="x")

    with pytest.raises(InfraError, match="the sandbox was started again, and the episode's variables are lost"):
        anyio.run(killed)


def test_monty_that_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(UserError, match=r"needs the package pydantic-monty: pip install 'agentrl-gym\[monty\]'"):
        anyio.run(called, Python(sandbox="monty"), "1")


def test_seccomp_that_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl_tools.sandbox import filters

    filters.compile_filter.cache_clear()
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(UserError, match=r"the sandbox needs pyseccomp and libseccomp .* pip install 'agentrl-gym"):
        anyio.run(called, Python(), "1")
    filters.compile_filter.cache_clear()
