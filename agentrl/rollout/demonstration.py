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
from agentrl.renderer.template import TemplateRenderer
from agentrl.renderer.written_conversation import UnreadableTurn, WrittenConversation
from agentrl.rollout.conversation_rows import read_messages, read_schemas
from agentrl.rollout.expert import ExpertEpisode
from agentrl.types import CallRecord, JsonSchema, Message, Segment, Stop, ThreadRole, Trajectory

NO_TASK = -1  # of a conversation that belongs to no task of the environment
_WORTH = "demonstration"  # the reward of one that has none: it is 1


@dataclass(frozen=True)
class Demonstration:
    """A conversation, and what it earned; ``rewards`` are empty where nobody said."""

    messages: tuple[Message, ...]
    tools: tuple[JsonSchema, ...] = ()
    task: int = NO_TASK
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None  # their weighted sum

    @classmethod
    def list_of_expert(cls, played: ExpertEpisode) -> list[Demonstration]:
        """List the demonstrations that an expert's episode is."""
        return cls.list_of_trajectory(played.trajectory, played.tools)

    @classmethod
    def list_of_trajectory(cls, t: Trajectory, tools: Sequence[JsonSchema]) -> list[Demonstration]:
        """List the demonstrations that an episode is: its conversation, or each context of one that was folded.

        A turn that ran out of tokens is left out: nobody would learn from it where a turn ends.
        """
        folded = len(t.threads) > 1 and all(thread.role is ThreadRole.COMPACTION for thread in t.threads[1:])
        contexts = [thread.messages for thread in t.threads] if folded else [t.messages]
        if t.stop is Stop.MAX_TOKENS and [m["role"] for m in contexts[-1][-1:]] == ["assistant"]:
            contexts[-1] = contexts[-1][:-1]
        spoken = [messages for messages in contexts if any(m["role"] == "assistant" for m in messages)]
        return [cls(messages, tuple(tools), t.task, dict(t.rewards), t.reward) for messages in spoken]

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Demonstration:
        """Read a row of a file: ``messages``, or ``prompt`` and ``completion``; ``tools``, ``task``, ``reward(s)``.

        Raises:
            UserError: it is no such row; the sentence ends one that names it.
        """
        messages = read_messages(row)
        reward, rewards = row.get("reward"), row.get("rewards") or {}
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise UserError(f"its reward is {reward!r:.60}, no number")
        if not isinstance(rewards, Mapping):
            raise UserError(f"its rewards are {rewards!r:.60}; they are numbers by name")
        task = row.get("task")
        task = task if isinstance(task, int) and not isinstance(task, bool) else NO_TASK
        return cls(messages, read_schemas(row.get("tools")), task, dict(rewards), reward)

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
