"""The text that names an agent: three forms, and a sentence for what is none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.agents.forms import AgentSandbox, parse_agent
from agentrl.agents.function_agent import FunctionAgent
from agentrl.agents.process_agent import ProcessAgent
from agentrl.agents.sandboxed_agent import SandboxedAgent
from agentrl.agents.service_agent import ServiceAgent
from agentrl.errors import ConfigError


def test_each_form_is_known(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    function = parse_agent(f"{tmp_path}/mine.py:solve")
    assert isinstance(function, FunctionAgent)
    assert function.target.endswith("mine.py:solve")
    assert isinstance(parse_agent("package.module:solve"), FunctionAgent)
    process = parse_agent("python 'my agent.py' --fast")
    assert isinstance(process, ProcessAgent)
    assert process.words == ["python", "my agent.py", "--fast"]
    service = parse_agent("http://127.0.0.1:9/run:once")
    assert isinstance(service, ServiceAgent)
    assert service.url == "http://127.0.0.1:9/run:once"


def test_a_command_alone_runs_in_a_sandbox() -> None:
    assert isinstance(parse_agent("python my_agent.py", sandbox=AgentSandbox()), SandboxedAgent)
    with pytest.raises(ConfigError, match="agent_sandbox is of a command"):
        parse_agent("package.module:solve", sandbox=AgentSandbox())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "agent '' is empty; an agent is FILE.py:FUNCTION"),
        ("nowhere.py:solve", "there is no file 'nowhere.py'"),
        ("no-such-command x", "there is no command 'no-such-command'; an agent is FILE.py:FUNCTION"),
        ("python 'open", "No closing quotation"),
        ("http://localhost:abc/run", "agent 'http://localhost:abc/run' is no URL: Port could not be cast"),
        ("http://localhost:999999999/run", "is no URL: Port out of range 0-65535"),
        ("http://[::1/run", "is no URL: Invalid IPv6 URL; an agent is FILE.py:FUNCTION"),
        ("https:///run", "is no URL: it names no host"),
        ("http://local\x01host/run", "is no URL: Invalid non-printable"),
    ],
)
def test_what_is_none_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_agent(text)
