"""A dialect's contract: a request in it, read as a conversation and tools; and the answer, whole or as events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

from agentrl.rollout.threads.forest import SampledTurn
from agentrl.types import JsonSchema

Decode = Callable[[Sequence[int]], str]
Conversation = list[dict[str, Any]]  # messages, in the shape of OpenAI's chat completions


class Dialect(ABC):
    """One request in a dialect. ``streams``: its client wants events.

    Args:
        body: of the request.
        past: conversations that earlier answers of the episode ended, by those answers' ids.

    Raises:
        ValueError: the request is not what clients of the dialect send, in words for them.
    """

    name: ClassVar[str]  # for people
    sampling: ClassVar[Sequence[str]]  # settings that a client may send, and the run decides
    unfollowed: ClassVar[Mapping[str, Sequence[object]]] = {}  # those that nothing follows, but for these values

    def __init__(self, body: Mapping[str, Any], past: MutableMapping[str, Conversation]) -> None:
        self.body, self.past = body, past
        self.read_options()
        self.messages = self.read_messages()
        self.tools = self.read_tools()

    def read_options(self) -> None:
        """Read what decides how the answer is written: what is wrong with that is said before a turn is sampled."""
        self.streams = bool(self.body.get("stream"))

    @abstractmethod
    def read_messages(self) -> Conversation:
        """Return the conversation, in the shape of OpenAI's chat completions."""

    @abstractmethod
    def read_tools(self) -> list[JsonSchema]:
        """Return the tools that are offered, in the same shape."""

    @abstractmethod
    def format_answer(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> dict[str, Any]:
        """Format the answer."""

    @abstractmethod
    def format_events(self, number: int, model: str, turns: Sequence[SampledTurn], decode: Decode) -> Iterator[bytes]:
        """Format the same as server-sent events: a turn is sampled whole, and told in pieces."""

    @property
    def count(self) -> int:
        """Return how many turns are asked for. Raises ValueError: that is no number."""
        return 1

    @property
    def overridden(self) -> list[str]:
        """List the settings of the request that the run's own stand for."""
        return [name for name in self.sampling if self.body.get(name) is not None] + self.ignored

    @property
    def ignored(self) -> list[str]:
        """List the settings of the request that nothing follows."""
        given = {name: self.body.get(name) for name in self.unfollowed}
        return [name for name, value in given.items() if value is not None and value not in self.unfollowed[name]]

    @staticmethod
    def format_error(kind: str, sentence: str) -> dict[str, Any]:
        """Format what is wrong with a request."""
        return {"error": {"message": sentence, "type": "invalid_request_error", "code": kind, "param": None}}


def read_list(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Read a list of objects; none where there is nothing. Raises ValueError: it is another thing."""
    given = body.get(name)
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError(f"{name}: a list of objects")
    return given


def read_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read an object; an empty one where there is nothing. Raises ValueError: it is another thing."""
    given = body.get(name)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"{name}: {given!r:.80} is no object")
    return given


def format_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Format a server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode()


def function_tool(name: object, description: object, parameters: object) -> JsonSchema:
    """Return a tool in the shape of OpenAI's chat completions. Raises ValueError: it has no name."""
    if not isinstance(name, str):
        raise ValueError("tools: each has a name")
    function: JsonSchema = {"name": name, "parameters": parameters or {"type": "object", "properties": {}}}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}
