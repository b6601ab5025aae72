"""Fakes for tests: an engine that says a script, and a renderer whose tokens are bytes. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import anyio

from agentrl.renderer.call_formats import hermes
from agentrl.renderer.stop_strings import cut_at_stop
from agentrl.types import Completion, JsonSchema, Message, Reply, SamplingParams

STOP = 256  # ends a turn
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}  # begin one

Script = Sequence[str] | Callable[[str, int], str]


class ByteRenderer:
    """A renderer whose tokens are UTF-8 bytes; structure has ids above 255, which no text can spell."""

    def __init__(self) -> None:
        self.injection_attempts: Counter[str] = Counter()

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        turns = [i for m in messages for i in (ROLES[m["role"]], *m["content"].encode(), STOP)]
        return [*turns, ROLES["assistant"]]

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonSchema] = (),
    ) -> list[int]:
        return [*prompt_ids, *completion_ids, *self.render_appended(completion_ids, messages, tools=tools)]

    def render_appended(
        self, completion_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()
    ) -> list[int]:
        closing = [] if completion_ids and completion_ids[-1] == STOP else [STOP]
        return [*closing, *self.render_ids(messages)]

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[JsonSchema] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        return hermes.parse(cut_at_stop(decode_text(token_ids), stop))

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode_text(token_ids)

    def with_words(self, words: Mapping[str, Any]) -> ByteRenderer:
        return self  # it has no template

    def get_stop_token_ids(self) -> list[int]:
        return [STOP]


class ScriptedEngine:
    """An engine that says ``script[turn]``, or ``script(session, turn)``; past its end it repeats the last.

    Args:
        latency_s: how long each turn takes.
        logprob: what is reported for every token.
    """

    capacity = 1 << 30

    def __init__(self, script: Script, *, latency_s: float = 0.0, logprob: float = -0.5, max_context: int = 1 << 20):
        self.script, self.latency_s, self.logprob, self.max_context = script, latency_s, logprob, max_context
        self.version = 0
        self.turns: Counter[str] = Counter()
        self.ended: list[str] = []
        self.contexts: list[list[int]] = []  # of each call of `generate`

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        turn = self.turns[session]
        self.turns[session] += 1
        self.contexts.append(list(token_ids))
        await anyio.sleep(self.latency_s)
        text = self.script(session, turn) if callable(self.script) else self.script[min(turn, len(self.script) - 1)]
        ids = [*text.encode(), STOP][: params.max_tokens]
        n, stopped = len(ids), ids[-1] == STOP
        return Completion(tuple(ids), (self.logprob,) * n, (self.version,) * n, "stop" if stopped else "length")

    def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def update_weights(self, policy: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...


def decode_text(token_ids: Sequence[int]) -> str:
    """Decode byte tokens to text, structure left out."""
    return bytes(i for i in token_ids if i < 256).decode(errors="replace")


def call(name: str, /, **arguments: Any) -> str:
    """Write a tool call as the model does."""
    return f"{hermes.OPEN}{json.dumps({'name': name, 'arguments': arguments})}{hermes.CLOSE}"
