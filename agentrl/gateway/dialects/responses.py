"""OpenAI's Responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.gateway.dialects.dialect import (
    Conversation,
    Decode,
    Dialect,
    format_event,
    function_tool,
    read_list,
)
from agentrl.rollout.threads.forest import SampledTurn
from agentrl.types import JsonSchema


class Responses(Dialect):
    """A request of ``/v1/responses``. ``previous_response_id`` goes on from an answer of the same episode."""

    name = "OpenAI's Responses"
    sampling = ("temperature", "top_p", "max_output_tokens", "text", "reasoning", "top_logprobs")
    unfollowed = {"tool_choice": ("auto", "none"), "parallel_tool_calls": (True,)}

    def read_messages(self) -> Conversation:
        messages: Conversation = []
        if instructions := self.body.get("instructions"):
            messages.append({"role": "system", "content": instructions})
        previous = self.body.get("previous_response_id")
        if previous is not None:
            if not isinstance(previous, str) or previous not in self.past:
                raise ValueError(f"previous_response_id: {previous!r} is no answer of this episode")
            messages += [dict(m) for m in self.past[previous]]
        given = self.body.get("input")
        if isinstance(given, str):
            return [*messages, {"role": "user", "content": given}]
        for item in read_list(self.body, "input"):
            self._read_item(item, messages)
        return messages

    def _read_item(self, item: dict[str, Any], messages: Conversation) -> None:
        """Append an item; the calls of a turn, and what it said, are one message."""
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind in ("message", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            last = messages[-1]
            if kind == "message":
                last["content"] = (last["content"] or "") + _join_text(item.get("content"))
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                last["tool_calls"] = [*last.get("tool_calls", ()), call]
        elif kind != "reasoning":
            raise ValueError(f"input: an item of type {kind!r}; there are messages, function calls and their outputs")

    def read_tools(self) -> list[JsonSchema]:
        if self.body.get("tool_choice") == "none":
            return []
        tools = read_list(self.body, "tools")
        for tool in tools:
            if tool.get("type") != "function":
                raise ValueError(f"tools: one of type {tool.get('type')!r}; there are functions alone")
        return [function_tool(t.get("name"), t.get("description"), t.get("parameters")) for t in tools]

    def format_answer(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> dict[str, Any]:
        (turn,) = turns
        begun = self._begin(number, model)
        own = self.messages[1:] if self.body.get("instructions") else self.messages  # those are of this request alone
        self.past[begun["id"]] = [*own, turn.message]
        cut = turn.finish_reason == "length"
        sampled = len(turn.token_ids)
        return begun | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _format_output(number, turn),
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.prompt_tokens + sampled,
            },
        }

    def format_events(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> Iterator[bytes]:
        whole = self.format_answer(number, model, turns, decode)
        for place, event in enumerate(self._list_events(whole, self._begin(number, model))):
            yield format_event({"sequence_number": place, **event}, event["type"])

    def _list_events(self, whole: dict[str, Any], begun: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(whole["output"]):
            where: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
            added = {"type": "response.output_item.added", "output_index": index}
            if item["type"] == "message":
                part, at = item["content"][0], {**where, "content_index": 0}
                said = {"text": part["text"], "logprobs": []}
                yield {**added, "item": {**item, "content": []}}
                yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
                yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
                yield {"type": "response.output_text.done", **at, **said}
                yield {"type": "response.content_part.done", **at, "part": part}
            elif item["type"] == "function_call":
                told = {"name": item["name"], "arguments": item["arguments"]}
                yield {**added, "item": {**item, "arguments": ""}}
                yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **where, **told}
            else:
                yield {**added, "item": item}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        last = "response.incomplete" if whole["incomplete_details"] else "response.completed"
        yield {"type": last, "response": whole}

    def _begin(self, number: int, model: str) -> dict[str, Any]:
        return {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.get("instructions"),
            "metadata": {},
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": self.body.get("previous_response_id"),
            "temperature": None,
            "tool_choice": self.body.get("tool_choice") or "auto",
            "tools": self.body.get("tools") or [],
            "top_p": None,
            "usage": None,
        }


def _format_output(number: int, turn: SampledTurn) -> list[dict[str, Any]]:
    """Format a turn as items: what was thought, what was said, the calls."""
    items: list[dict[str, Any]] = []
    if thought := turn.message.get("reasoning_content"):
        items.append(
            {"id": f"rs_{number}", "type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]}
        )
    calls = turn.message.get("tool_calls", ())
    if turn.message.get("content") or not calls:
        part: dict[str, Any] = {
            "type": "output_text",
            "text": turn.message.get("content") or "",
            "annotations": [],
            "logprobs": [],
        }
        said = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        items.append(said)
    items += [
        {
            "id": f"fc_{number}_{index}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        for index, call in enumerate(calls)
    ]
    return items


def _join_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
