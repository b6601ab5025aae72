"""Demonstrations: conversations to imitate, and the episodes that they are in a model's tokens.

An expert played one, a person did, or they stand in a file. One is kept as a line of JSON, in the form that `agentrl
play --save` writes and that trainers read: ``{"messages": [...], "tools": [...], "task": 3, "rewards": {...}}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from agentrl.errors import TemplateError, UserError
from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.renderer.template import TemplateRenderer
from agentrl.renderer.written_conversation import UnreadableTurn, WrittenConversation
from agentrl.rollout.expert import ExpertEpisode
from agentrl.types import CallRecord, JsonSchema, Message, Segment, Stop, Trajectory, join_thought

NO_TASK = -1  # of a conversation that belongs to no task of the environment
_ROLES = ("system", "user", "assistant", "tool")
_WORTH = "demonstration"  # the reward of one that has none: it is 1
_ALIASES = {"developer": "system", "function": "tool", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Demonstration:
    """A conversation, and what it earned; ``rewards`` are empty where nobody said."""

    messages: tuple[Message, ...]
    tools: tuple[JsonSchema, ...] = ()
    task: int = NO_TASK
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None  # their weighted sum

    @classmethod
    def of_expert(cls, played: ExpertEpisode) -> Demonstration:
        """Return the demonstration that an expert's episode is."""
        return cls.of_trajectory(played.trajectory, played.tools)

    @classmethod
    def of_trajectory(cls, t: Trajectory, tools: Sequence[JsonSchema]) -> Demonstration:
        """Return the demonstration that an episode is."""
        return cls(t.messages, tuple(tools), t.task, dict(t.rewards), t.reward)

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Demonstration:
        """Read a row of a file: ``messages``, or ``prompt`` and ``completion``; ``tools``, ``task``, ``reward(s)``.

        Raises:
            UserError: it is no such row; the sentence ends one that names it.
        """
        messages = _read_messages(row)
        reward, rewards = row.get("reward"), row.get("rewards") or {}
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise UserError(f"its reward is {reward!r:.60}, no number")
        if not isinstance(rewards, Mapping):
            raise UserError(f"its rewards are {rewards!r:.60}; they are numbers by name")
        task = row.get("task")
        task = task if isinstance(task, int) and not isinstance(task, bool) else NO_TASK
        return cls(messages, _read_tools(row.get("tools")), task, dict(rewards), reward)

    def to_line(self) -> str:
        """Format it as a line of JSON, from which `parse` makes the same."""
        row = {"messages": self.messages, "tools": self.tools, "task": self.task}
        return json.dumps(row | {"rewards": dict(self.rewards), "reward": self.reward}, ensure_ascii=False)

    def to_trajectory(self, renderer: TemplateRenderer, most_tokens: int) -> Trajectory:
        """Render it for a model; its turns carry no logprobs, since no engine sampled them.

        Raises:
            UserError: it cannot be what the model says, or is too long; the sentence ends one that names it.
        """
        try:
            segments = _render(self.messages, self.tools, renderer)
        except TemplateError as error:
            raise UserError(f"the model's chat template cannot write it: {error}") from None
        tokens = sum(len(s.token_ids) for s in segments)
        if tokens > most_tokens:
            raise UserError(f"it has {tokens:,} tokens, and the model takes {most_tokens:,}")
        worth = {n: r for n, r in self.rewards.items() if r is not None}
        if worth and self.reward is not None and sum(worth.values()) != self.reward:
            worth = {"reward": self.reward}  # weighted otherwise than by 1
        if not worth:
            worth = {_WORTH if self.reward is None else "reward": 1.0 if self.reward is None else self.reward}
        return Trajectory(self.task, segments, self.messages, Stop.TERMINATED, worth, calls=_list_calls(self.messages))


def _render(
    messages: Sequence[Message], tools: Sequence[JsonSchema], renderer: TemplateRenderer
) -> tuple[Segment, ...]:
    """Render a conversation and read each of its turns back."""
    prompt = list(takewhile(lambda m: m["role"] != "assistant", messages))
    written = WrittenConversation(renderer, tools)
    written.begin(prompt)
    at, turns = len(prompt), 0
    while at < len(messages):
        turns += 1
        reply = messages[at]
        then = list(takewhile(lambda m: m["role"] != "assistant", messages[at + 1 :]))
        at += 1 + len(then)
        context = written.context
        try:
            turn = written.add_turn(reply, then if at < len(messages) else ())
            written.read_back(turn, context, reply)
        except UnreadableTurn as error:
            raise UserError(f"turn {turns}: {error}") from None
    return tuple(Segment(author, tuple(ids)) for author, ids in written.segments)


def _list_calls(messages: Sequence[Message]) -> tuple[CallRecord, ...]:
    """List the calls of a conversation; that they took no time is so: nothing was called here."""
    failed = {m.get("tool_call_id") for m in messages if m["role"] == "tool" and m.get("is_error")}
    turns = [m for m in messages if m["role"] == "assistant"]
    return tuple(
        CallRecord(turn, c["function"]["name"], "tool" if c["id"] in failed else "ok", 0.0)
        for turn, m in enumerate(turns)
        for c in m.get("tool_calls", ())
    )


# -- rows of files -------------------------------------------------------------------------------------------------


def _read_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    given = row.get("messages", row.get("conversations"))
    if given is None and "prompt" in row and "completion" in row:
        given = [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]
    if not isinstance(given, list | tuple) or not given:
        raise UserError("it has no messages; a row has `messages`, or `prompt` and `completion`")
    messages = [_read_message(number, m) for number, m in enumerate(given, 1)]
    if messages[0]["role"] == "assistant":
        raise UserError("its first message is the assistant's; a prompt comes before it")
    if not any(m["role"] == "assistant" for m in messages):
        raise UserError("it has no message of the assistant's, so there is nothing to learn from it")
    _link_calls(messages)
    return tuple(messages)


def _as_messages(value: object, role: str) -> list[Any]:
    return (
        [{"role": role, "content": value}] if isinstance(value, str) else list(value) if isinstance(value, list) else []
    )


def _read_message(number: int, given: object) -> Any:
    if not isinstance(given, Mapping):
        raise UserError(f"message {number} is {given!r:.60}; a message is an object with role and content")
    role = given.get("role", given.get("from"))
    role = _ALIASES.get(str(role), role)
    if role not in _ROLES:
        raise UserError(f"message {number} has the role {role!r:.40}; the roles are {', '.join(_ROLES)}")
    content = given.get("content", given.get("value"))
    if isinstance(content, list):  # parts, as OpenAI's API has them
        if not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
            raise UserError(f"message {number} has parts that are no texts; a demonstration is text")
        content = "".join(p["text"] for p in content)
    if not isinstance(content, str | None):
        raise UserError(f"message {number} has the content {content!r:.60}; it is a text")
    thought = given.get("reasoning_content") or given.get("thinking")
    content = join_thought(thought, content or "") if isinstance(thought, str) and thought else content or ""
    message: dict[str, Any] = {"role": role, "content": content}
    message |= {n: given[n] for n in ("name", "tool_call_id", "is_error") if given.get(n) is not None}
    if calls := given.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise UserError(f"message {number}: tool_calls are a list, of a message of the assistant's")
        message["tool_calls"] = [_read_call(number, i, c) for i, c in enumerate(calls)]
    return message


def _read_call(number: int, index: int, given: object) -> dict[str, Any]:
    function = given.get("function", given) if isinstance(given, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI's API has them
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise UserError(f"message {number}: the arguments of {name!r:.40} are no JSON: {arguments!r:.60}") from None
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise UserError(f"message {number}: a call has a name and arguments, not {given!r:.80}")
    call_id = given.get("id") if isinstance(given, Mapping) else None
    own = call_id or make_call_id(json.dumps([number, name, dict(arguments)], sort_keys=True), index)
    return {"id": str(own), "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _link_calls(messages: Sequence[Any]) -> None:
    """Give each tool's answer the id and the name of its call, in their order, where it has none.

    Raises:
        UserError: an answer belongs to no call.
    """
    open_calls: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            open_calls = list(message.get("tool_calls", ()))
        if message["role"] != "tool":
            continue
        own = next((c for c in open_calls if message.get("tool_call_id") in (None, c["id"])), None)
        if own is None:
            raise UserError(f"message {number} is a tool's, and answers no call of the turn before it")
        open_calls.remove(own)
        message["tool_call_id"], message["name"] = own["id"], own["function"]["name"]


def _read_tools(given: object) -> tuple[JsonSchema, ...]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise UserError(f"its tools are no JSON: {given!r:.60}") from None
    if not given:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(t, Mapping) for t in given):
        raise UserError(f"its tools are {given!r:.60}; they are a list of JSON schemas")
    schemas = [dict(t) if "function" in t else {"type": "function", "function": dict(t)} for t in given]
    for schema in schemas:
        if not isinstance(schema["function"], Mapping) or not isinstance(schema["function"].get("name"), str):
            raise UserError(f"a tool of its is {schema!r:.80}; it has a function with a name and parameters")
    return tuple(schemas)
