"""The forms of an agent, by the text that names it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from agentrl.agents.agent import Agent
from agentrl.agents.function_agent import FunctionAgent
from agentrl.agents.process_agent import ProcessAgent
from agentrl.agents.sandboxed_agent import SandboxedAgent
from agentrl.agents.service_agent import ServiceAgent
from agentrl.errors import ConfigError
from agentrl.runtime.addresses import split_address

_FORMS = (
    "an agent is FILE.py:FUNCTION (an async function of a task), a command such as 'python my_agent.py', or the URL "
    "of a service"
)


@dataclass(frozen=True)
class AgentSandbox:
    """A sandbox for a command: what it reads further, and what it does not see."""

    readable: Sequence[str] = ()
    hidden: Sequence[str] = ()


def parse_agent(text: str, workers: int = 2, sandbox: AgentSandbox | None = None) -> Agent:
    """Return the agent that a text names, not yet started.

    Args:
        workers: processes that a function is called in.
        sandbox: that a command runs in; none by default.

    Raises:
        ConfigError: it is none of the forms, or there is no such file or command.
    """
    agent = _parse(text, workers)
    if sandbox is None:
        return agent
    if not isinstance(agent, ProcessAgent):
        raise ConfigError(f"agent_sandbox is of a command; {text!r} is none: it runs where you start it")
    return SandboxedAgent(agent.words, sandbox.readable, sandbox.hidden)


def _parse(text: str, workers: int) -> Agent:
    if text.lower().startswith(("http:", "https:")):
        _check_url(text)
        return ServiceAgent(text)
    target, colon, function = text.rpartition(":")
    if colon and function.isidentifier() and not any(c.isspace() for c in target):
        if target.endswith(".py") and not Path(target).is_file():
            raise ConfigError(f"agent {text!r}: there is no file {target!r}")
        return FunctionAgent(text, workers)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"agent {text!r}: {error}; {_FORMS}") from None
    if not words:
        raise ConfigError(f"agent {text!r} is empty; {_FORMS}")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"agent {text!r}: there is no command {words[0]!r}; {_FORMS}")
    return ProcessAgent(words)


def _check_url(text: str) -> None:
    """Raise ConfigError where nothing can be posted to a URL."""
    try:
        split_address(text)
        httpx2.URL(text)
    except (ValueError, httpx2.InvalidURL) as error:
        raise ConfigError(f"agent {text!r} is no URL: {error}; {_FORMS}") from None
