"""Conversations as an agent sends them: which turn a request goes on from, whatever its client made of the history.

A request holds the whole conversation each time. It goes on from the turn whose conversation, reply included, begins
it. Two messages are the same where their words and calls are: ids, thoughts that were dropped, spaces at the ends, the
way arguments are written as JSON, and a text that is cut into parts or marked for a cache are the client's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from agentrl.types import Message, strip_thoughts

Digest = bytes
_EMPTY = b""
_RECENT = 4  # requests whose messages are held: those of sub-agents take turns


@dataclass
class TurnEnd:
    """A turn that was sampled: the end of a conversation.

    Args:
        thread: the number of the thread that it is in.
        turn: its own number in the episode.
        end, messages: tokens and messages of the thread, this turn's included.
        sampled: how many of the tokens are its own.
        depth: turns of the conversation, this one included.
        extended: a later turn of its thread goes on from it.
    """

    thread: int
    turn: int
    end: int
    messages: int
    sampled: int
    depth: int
    extended: bool = False


@dataclass
class TurnTree:
    """The turns of an episode, by the conversations that they end."""

    _turns: dict[Digest, TurnEnd] = field(default_factory=dict)
    _recent: list[_Digested] = field(default_factory=list)  # requests, the last one last

    def digest(self, messages: Sequence[Mapping[str, Any]], speaker: bytes = _EMPTY) -> list[Digest]:
        """Return a digest of the first message, of the first two, and so on.

        What a recent request began with as well is compared, which is a tenth of the work, and not digested again.

        Args:
            speaker: of the conversation: none goes on from another one's, though they say the same.
        """
        own = [r for r in self._recent if r.speaker == speaker]
        known, same = max(((r.count_common(messages), r) for r in own), key=_first, default=(0, None))
        digests = same.digests[:known] if same is not None else []
        digest = digests[-1] if digests else speaker
        for message in messages[known:]:
            digest = extend_digest(digest, message)
            digests.append(digest)
        if same is not None and known == len(same.digests):  # it is the beginning of this one
            self._recent.remove(same)
        self._recent = [*self._recent[1 - _RECENT :], _Digested(messages, digests, speaker)]
        return digests

    def add(self, conversation: Digest, reply: Mapping[str, Any], turn: TurnEnd) -> None:
        """Add a turn: the reply to a conversation. Of two that are the same, the later one is gone on from."""
        self._turns[extend_digest(conversation, reply)] = turn

    def find(self, digests: Sequence[Digest]) -> tuple[TurnEnd | None, int]:
        """Find the last turn whose conversation begins that of a request, and how many of its messages that is."""
        for number in range(len(digests) - 1, 0, -1):
            if (turn := self._turns.get(digests[number - 1])) is not None:
                return turn, number
        return None, 0


@dataclass(eq=False)
class _Digested:
    """The messages of a request, and the digests of their beginnings."""

    messages: Sequence[Mapping[str, Any]]
    digests: list[Digest]
    speaker: bytes

    def count_common(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return how many messages both begin with."""
        for number, (one, other) in enumerate(zip(self.messages, messages, strict=False)):
            if one != other:
                return number
        return min(len(self.messages), len(messages))


def _first(pair: tuple[int, _Digested]) -> int:
    return pair[0]


def extend_digest(digest: Digest, message: Mapping[str, Any]) -> Digest:
    """Return the digest of a conversation and a message behind it."""
    return blake2b(digest + _canonicalize(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _canonicalize(message: Mapping[str, Any]) -> str:
    """Return what makes a message the same one: its role, its words, its calls."""
    role, content = message["role"], message.get("content")
    try:
        content = _join_text(content)
    except ValueError:  # refused where it is read
        content = repr(content)
    if role != "assistant":
        return json.dumps(["system" if role == "developer" else role, content])
    calls = [
        [call["function"]["name"], _canonicalize_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps(["assistant", strip_thoughts(content).strip(), calls])


def same_arguments(one: object, other: object) -> bool:
    """Return True if the arguments of two calls are the same, as text or as an object."""
    return _canonicalize_arguments(one) == _canonicalize_arguments(other)


def _canonicalize_arguments(arguments: object) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    try:
        given = json.loads(text or "{}", parse_float=_read_float)
    except (ValueError, RecursionError):
        return text.strip()
    return json.dumps(given or {}, sort_keys=True)


def _read_float(text: str) -> float:
    """Read a number; a whole one as JavaScript writes it, which has no other."""
    number = float(text)
    return int(number) if number.is_integer() else number


def to_message(given: Mapping[str, Any], names: Mapping[str, str]) -> Message:
    """Return a message of a request as the renderer takes one: text alone, arguments read.

    Args:
        names: of the tools that were called, by the ids of their calls.

    Raises:
        ValueError: it has what no renderer here takes, in words for the client.
    """
    role: Any = given.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"a message of role {role!r}; there are system, user, assistant and tool")
    message: Message = {"role": role, "content": _join_text(given.get("content"))}
    if role == "tool" and isinstance(given.get("tool_call_id"), str):
        message["tool_call_id"] = given["tool_call_id"]
        name = given.get("name") or names.get(given["tool_call_id"])
        if isinstance(name, str):
            message["name"] = name
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_read_call(call) for call in calls]
    return message


def _read_call(call: Mapping[str, Any]) -> Any:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # as it was sampled, and can be read by nobody
            arguments = {"arguments": arguments}
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": arguments},
    }


def _join_text(content: object) -> str:
    """Join the text of a content: a string, nothing, or parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"a content that is {type(content).__name__}, neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"a content part of type {kind!r}; this policy reads text alone")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(texts)
