"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway.dialects.dialect import (
    Conversation,
    Decode,
    Dialect,
    format_event,
    function_tool,
    read_list,
    read_object,
)
from agentrl.rollout.threads.forest import SampledTurn
from agentrl.types import JsonSchema

INVALID = "invalid_arguments"  # of an input that is no object: the text that the model wrote
_PARALLEL: Sequence[Mapping[str, bool]] = ({}, {"disable_parallel_tool_use": False})
_STOPS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class Messages(Dialect):
    """A request of ``/v1/messages``."""

    name = "Anthropic's messages"
    sampling = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "thinking", "output_config")
    unfollowed = {"tool_choice": [{"type": kind, **more} for kind in ("auto", "none") for more in _PARALLEL]}

    def read_options(self) -> None:
        super().read_options()
        self.tells_thoughts = read_object(self.body, "thinking").get("type") not in (None, "disabled")

    def read_messages(self) -> Conversation:
        messages: Conversation = []
        if system := _join_text(self.body.get("system") or ""):
            messages.append({"role": "system", "content": system})
        for message in read_list(self.body, "messages"):
            role, content = message.get("role"), message.get("content")
            if role not in ("user", "assistant"):
                raise ValueError(f"messages: one of role {role!r:.80}; there are user and assistant")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else read_list(message, "content")
            messages += (_read_assistant if role == "assistant" else _read_user)(blocks)
        return messages

    def read_tools(self) -> list[JsonSchema]:
        if read_object(self.body, "tool_choice").get("type") == "none":
            return []
        tools = read_list(self.body, "tools")
        return [function_tool(t.get("name"), t.get("description"), t.get("input_schema")) for t in tools]

    def format_answer(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> dict[str, Any]:
        (turn,) = turns
        stopped = self._find_stop(turn, decode)
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._format_content(turn),
            "stop_reason": _STOPS[turn.finish_reason] if stopped is None else "stop_sequence",
            "stop_sequence": stopped,
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.token_ids)},
        }

    def format_events(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> Iterator[bytes]:
        whole = self.format_answer(number, model, turns, decode)

        usage = {**whole["usage"], "output_tokens": 0}
        going_on = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**whole, "content": [], **going_on, "usage": usage})
        for index, block in enumerate(whole["content"]):
            if block["type"] == "tool_use":
                begun, delta = {**block, "input": {}}, {"type": "input_json_delta"}
                delta["partial_json"] = json.dumps(block["input"])
            else:
                kind = block["type"]  # text, thinking
                begun, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
            yield _event("content_block_start", index=index, content_block=begun)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
        yield _event("message_stop")

    def _find_stop(self, turn: SampledTurn, decode: Decode) -> str | None:
        """Find the text of the request that ended a turn: one that its last token completes."""
        texts = self.body.get("stop_sequences")
        if turn.finish_reason != "stop" or not isinstance(texts, list):
            return None
        whole, before = decode(turn.token_ids), decode(turn.token_ids[:-1])
        found = [t for t in texts if isinstance(t, str) and t and t in whole and t not in before]
        return min(found, key=whole.find, default=None)

    def _format_content(self, turn: SampledTurn) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        thought = turn.message.get("reasoning_content")
        if thought and self.tells_thoughts:
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if content := turn.message.get("content"):
            blocks.append({"type": "text", "text": content})
        for call in turn.message.get("tool_calls", ()):
            function = call["function"]
            given = _read_object(function["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
        return blocks

    @staticmethod
    def format_error(kind: str, sentence: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": "invalid_request_error", "message": sentence, "code": kind}}


def _event(kind: str, **more: Any) -> bytes:
    return format_event({"type": kind, **more}, kind)


def _read_assistant(blocks: Sequence[Mapping[str, Any]]) -> Conversation:
    """Read a turn of the assistant's: text and calls; what it thought is the client's to send or not."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if block.get("type") == "text":
            message["content"] += str(block.get("text", ""))
        elif block.get("type") == "tool_use":
            given = block.get("input") or {}
            text = given[INVALID] if isinstance(given, dict) and given.keys() == {INVALID} else json.dumps(given)
            function = {"name": block.get("name"), "arguments": text}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return [message]


def _read_user(blocks: Sequence[Mapping[str, Any]]) -> Conversation:
    """Read a turn of the user's: what tools answered, a message each, and what is said behind that."""
    told = [
        {"role": "tool", "tool_call_id": b.get("tool_use_id"), "content": _join_text(b.get("content") or "")}
        for b in blocks
        if b.get("type") == "tool_result"
    ]
    said = [dict(b) for b in blocks if b.get("type") != "tool_result"]
    return [*told, *([{"role": "user", "content": said}] if said else [])]


def _join_text(content: object) -> str:
    """Join blocks of text. Raises ValueError: one is another thing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{content!r:.80} is neither text nor a list of blocks")
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else block
            raise ValueError(f"a block of type {kind!r}; this policy reads text alone")
    return "\n".join(str(block.get("text", "")) for block in content)


def _read_object(arguments: str) -> dict[str, Any]:
    """Read a call's arguments; what is no object keeps its text."""
    try:
        given = json.loads(arguments or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {INVALID: arguments}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
