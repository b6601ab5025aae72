"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.gateway.dialects.dialect import Conversation, Decode, Dialect, format_event, read_list, read_object
from agentrl.rollout.threads.forest import SampledTurn
from agentrl.types import JsonSchema

MOST = 128  # turns of a request


class ChatCompletions(Dialect):
    """A request of ``/v1/chat/completions``."""

    name = "OpenAI's chat completions"
    sampling = (
        *("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "presence_penalty"),
        *("frequency_penalty", "top_k", "min_p", "repetition_penalty", "response_format", "reasoning_effort"),
    )
    unfollowed = {
        "top_logprobs": (0,),
        "logit_bias": ({},),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,),
    }

    def read_options(self) -> None:
        super().read_options()
        self.counts_tokens = bool(read_object(self.body, "stream_options").get("include_usage"))

    def read_messages(self) -> Conversation:
        messages = self.body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError("messages: a list of objects, each with a role")
        return messages

    def read_tools(self) -> list[JsonSchema]:
        tools = read_list(self.body, "tools")
        if not all(isinstance(tool.get("function"), dict) for tool in tools):
            raise ValueError("tools: each is {'type': 'function', 'function': {...}}")
        return tools if self.body.get("tool_choice") != "none" else []

    @property
    def count(self) -> int:
        count = 1 if self.body.get("n") is None else self.body["n"]
        if not isinstance(count, int) or not 1 <= count <= MOST:
            raise ValueError(f"n: {count!r} is no number from 1 to {MOST}")
        return count

    def format_answer(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": turn.message,
                "finish_reason": turn.finish_reason,
                "logprobs": self._format_logprobs(turn, decode),
            }
            for index, turn in enumerate(turns)
        ]
        return self._begin(number, model, "chat.completion") | {"choices": choices, "usage": _count_tokens(turns)}

    def format_events(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> Iterator[bytes]:
        begun = self._begin(number, model, "chat.completion.chunk")
        for index, turn in enumerate(turns):
            said = {"index": index, "finish_reason": None, "logprobs": None}
            deltas: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}]
            if thought := turn.message.get("reasoning_content"):
                deltas.append({"delta": {"reasoning_content": thought}})
            if content := turn.message.get("content"):
                deltas.append({"delta": {"content": content}})
            told = deltas[-1]
            for place, call in enumerate(turn.message.get("tool_calls", ())):
                deltas.append({"delta": {"tool_calls": [{"index": place, **call}]}})
                told = told if content else deltas[-1]
            told["logprobs"] = self._format_logprobs(turn, decode)
            deltas.append({"delta": {}, "finish_reason": turn.finish_reason})
            for delta in deltas:
                yield format_event(begun | {"choices": [said | delta]})
        if self.counts_tokens:
            yield format_event(begun | {"choices": [], "usage": _count_tokens(turns)})
        yield b"data: [DONE]\n\n"

    def _begin(self, number: int, model: str, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}

    def _format_logprobs(self, turn: SampledTurn, decode: Decode) -> dict[str, Any] | None:
        """Format the logprobs of all sampled tokens, those of calls and thoughts too, where they are asked for."""
        if not self.body.get("logprobs"):
            return None
        entries = []
        for token, logprob in zip(turn.token_ids, turn.logprobs, strict=True):
            text = decode([token])
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}


def _count_tokens(turns: Sequence[SampledTurn]) -> dict[str, int]:
    prompt, sampled = turns[0].prompt_tokens, sum(len(t.token_ids) for t in turns)  # it is the same one
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
