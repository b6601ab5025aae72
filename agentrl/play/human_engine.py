"""An engine whose turns a person, a script or an endpoint takes, with every message shown.

It continues conversations of ``renderer.chat``, so the rollout plays as it does with a model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.renderer.json_lines import decode_conversation, encode_lines
from agentrl.rollout.engine_protocol import Engine
from agentrl.types import Completion, JsonSchema, SamplingParams

WireMessage = dict[str, Any]  # a message as the API has it: a call's arguments are JSON in a string


@dataclass(frozen=True)
class Turn:
    """The tools, all messages, and those that are new since the last turn."""

    tools: Sequence[JsonSchema]
    messages: Sequence[WireMessage]
    new: Sequence[WireMessage]


class HumanEngine:
    """An engine for one episode at a time.

    Args:
        show: called before each turn; for an `ObservedEngine` after it too.
        take: returns the assistant's message.
    """

    capacity = 1
    max_context = 1 << 40  # bytes

    def __init__(self, show: Callable[[Turn], None], take: Callable[[Turn], Awaitable[WireMessage]]) -> None:
        self.show, self.take = show, take
        self._seen = 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        tools, messages = decode_conversation(token_ids)
        turn = Turn(tools, messages, messages[self._seen :])
        self.show(turn)
        ids = encode_lines([await self.take(turn)])
        self._seen = len(messages) + 1
        return Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), "stop")

    def end_session(self, session: str) -> None: ...

    async def update_weights(self, policy: Any, version: int) -> None: ...

    async def close(self) -> None: ...


class ObservedEngine(HumanEngine):
    """An engine of such conversations that shows every turn."""

    def __init__(self, show: Callable[[Turn], None], engine: Engine) -> None:
        self.show, self.engine = show, engine
        self._seen = 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        tools, messages = decode_conversation(token_ids)
        self.show(Turn(tools, messages, messages[self._seen :]))
        done = await self.engine.generate(token_ids, params, session=session)
        _, messages = decode_conversation([*token_ids, *done.token_ids])
        self.show(Turn(tools, messages, messages[-1:]))
        self._seen = len(messages)
        return done

    def end_session(self, session: str) -> None:
        self.engine.end_session(session)
