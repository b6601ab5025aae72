"""Call formats by name: one of anybody's reads the model's calls, and writes those that a template cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agentrl import Reply, call_format
from agentrl.cli import main
from agentrl.errors import ConfigError, ContractError, UserError
from agentrl.models.call_formats import build_call_format
from agentrl.renderer.call_formats import hermes
from agentrl.renderer.template import TemplateRenderer
from agentrl.settings.loader import build_config, read_overrides
from agentrl.types import JsonSchema, ToolCall
from tests.helpers.families import family

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@call_format(explain="CALL name(argument)")
class Plain:
    """Writes CALL name(argument)."""

    def parse(self, text: str, *, tools: Sequence[JsonSchema] = (), thinking: bool = False) -> Reply:
        calls = re.findall(r"CALL (\w+)\((.*?)\)", text)
        return Reply(text, tuple(ToolCall(str(i), name, {"a": value}) for i, (name, value) in enumerate(calls)))

    def format_call(self, call: Mapping[str, object]) -> str:
        return f"CALL {call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"

    def format_instructions(self) -> tuple[str, str]:
        return "TOOLS:\n", "\nWrite CALL name(argument)."


def test_a_format_is_learnt_where_none_is_named() -> None:
    assert build_call_format("hermes") is hermes
    assert build_config(read_overrides(["--env", "shop"])).call_format == "auto"
    assert build_call_format("auto") is None


def test_one_of_ones_own_reads_writes_and_instructs() -> None:
    tokenizer = family("qwen3").tokenizer
    plain = build_call_format(f"{__name__}:Plain")
    renderer = TemplateRenderer(tokenizer, call_format=plain)
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": "1"}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "a", "name": "add"},
    ]
    text = tokenizer.decode(renderer.render_ids(messages, tools=[TOOL]))  # type: ignore[arg-type]
    assert "Write CALL name(argument)." in text
    assert 'CALL add({"a": "1"})' in text
    assert "<tool_call>" not in text
    reply = renderer.parse_response(tokenizer.encode("x CALL add(7)"))
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("add", {"a": "7"})]
    assert "writes no tool calls that can be read" in renderer.verdict()


def test_what_is_no_call_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no call format 'hermse'; did you mean 'hermes'"):
        build_config(read_overrides(["--env", "shop", "--call_format", "hermse"]))
    monkeypatch.chdir(tmp_path)
    Path("formats_of_mine.py").write_text("class Half:\n    def parse(self, text): ...\n")
    with pytest.raises(ContractError, match="which has no format_call"):
        build_call_format("formats_of_mine.py:Half")
    with pytest.raises(UserError, match="has no 'Whole'"):
        build_call_format("formats_of_mine.py:Whole")


def test_check_model_takes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model", "nano", "--call_format", f"{__name__}:Plain"]) == 1  # it reads no names of arguments
    assert "the call that it writes is read as another" in " ".join(capsys.readouterr().out.split())
    assert main(["list", "call_formats"]) == 0
    assert "hermes" in capsys.readouterr().out
