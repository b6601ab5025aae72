"""vLLM's reader of tool calls that is agentrl's own: what a model is trained with, read by the same code when served.

`agentrl serve` names this module as ``--tool-parser-plugin``; vLLM imports it in its server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
)
from vllm.entrypoints.generate.base.protocol import ToolCall as VLLMToolCall
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from agentrl.engines.vllm.tool_parsers import OWN
from agentrl.renderer.call_formats import hermes
from agentrl.renderer.template import TemplateRenderer
from agentrl.types import Reply, ToolCall

_OPENINGS, _HELD_BACK = "<[{", 32  # what a call may begin with, and how much of its beginning is not streamed yet


class AgentrlToolParser(ToolParser):  # type: ignore[misc]
    """Reads calls in the form of the model's own chat template."""

    supports_required_and_named = False  # a required call is read in that form too

    @cached_property
    def _renderer(self) -> TemplateRenderer:
        return TemplateRenderer(self.model_tokenizer)

    def adjust_request(self, request: Any) -> Any:
        """Keep control tokens in the text: some forms are made of them."""
        request = super().adjust_request(request)
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Read a whole turn.

        A call that cannot be read stays in the content, as it was written, if a client can read it there (Hermes); else
        it is a call whose arguments are no JSON, so that the client's own error path runs.
        """
        reply = self._read(model_output, request)
        sound = all(call.error is None for call in reply.tool_calls)
        if not reply.tool_calls or (not sound and hermes.parse(model_output).tool_calls):
            content = reply.content if sound else self._strip(model_output)
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=content)
        calls = [
            VLLMToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=_write(call)))
            for call in reply.tool_calls
        ]
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=reply.content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Give the calls that are complete by now, each whole, and the text before them."""
        reply = self._read(current_text, request)
        complete = [call for call in reply.tool_calls if call.error is None]
        new = [
            DeltaToolCall(
                index=number,
                id=call.id,
                type="function",
                function=DeltaFunctionCall(name=call.name, arguments=_write(call)),
            )
            for number, call in enumerate(complete)
            if number >= len(self.prev_tool_call_arr)
        ]
        self.prev_tool_call_arr = [{"name": c.name, "arguments": dict(c.arguments)} for c in complete]
        self.streamed_args_for_tool = [_write(call) for call in complete]
        text = "" if reply.tool_calls else _hold_back(reply.content)
        text = text.removeprefix(self._streamed) if text.startswith(self._streamed) else ""
        self._streamed += text
        if not new and not text:
            return None
        return DeltaMessage(content=text or None, tool_calls=new)

    prev_tool_call_arr: list[dict[str, Any]]
    _streamed = ""

    def _read(self, text: str, request: Any) -> Reply:
        ids = self.model_tokenizer.encode(text, add_special_tokens=False)
        return self._renderer.parse_response(ids, tools=[tool.model_dump() for tool in request.tools or ()])

    def _strip(self, text: str) -> str:
        """Return a turn without the token that ended it."""
        ids = self.model_tokenizer.encode(text, add_special_tokens=False)
        while ids and ids[-1] in self._renderer.get_stop_token_ids():
            ids.pop()
        whole: str = self.model_tokenizer.decode(ids, skip_special_tokens=False)
        return whole


def _write(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False) if call.error is None else call.error


def _hold_back(text: str) -> str:
    """Return the text that cannot be the beginning of a call."""
    at = max(text.rfind(mark) for mark in _OPENINGS)
    return text[:at] if at >= 0 and len(text) - at < _HELD_BACK else text


ToolParserManager.register_module(OWN, module=AgentrlToolParser)
