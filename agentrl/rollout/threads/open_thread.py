"""A thread of an agent's episode while it grows, and where it comes from, as its requests tell it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from agentrl.rollout.token_context import TokenContext
from agentrl.types import JsonSchema, Message, Reply, Segment, Thread, ThreadRole

_TELLING = 12  # characters of a call's argument by which the conversation that it opens is known
_GOES_ON = (ThreadRole.MAIN, ThreadRole.COMPACTION, ThreadRole.REWRITE)


@dataclass(eq=False)
class OpenThread:
    """A context of an episode while it grows.

    Args:
        branch: 0 for the first conversation and its continuations; each fork, and each other conversation, is another.
        depth: turns of the conversation so far, those of the thread that it was forked from included.
        turns: the numbers of its own turns, in the order of the whole episode.
        source: the thread that it goes on from, or whose call opened it; None: of none.
        after: the number of the source's turn that it stands behind.
        begun: messages that it began with.
        was_offered: tools, in any of its conversation's requests so far.
        is_cut: its last turn ran out of tokens.
        folded: another conversation has its task, with another history: it is hardly gone on from.
    """

    branch: int
    tools: Sequence[JsonSchema]
    opened: bool  # by a conversation of its own, and not as a fork
    history: list[Message] = field(default_factory=list)  # as a template is given it
    messages: list[Message] = field(default_factory=list)  # the same, as they are shown
    segments: list[Segment] = field(default_factory=list)
    token_ids: TokenContext = field(default_factory=TokenContext)
    behind: int = 0  # tokens behind its prompt
    depth: int = 0
    turns: list[int] = field(default_factory=list)
    reply: Reply | None = None  # its last turn, read
    source: OpenThread | None = None
    after: int | None = None
    begun: int = 0
    was_offered: bool = False
    is_cut: bool = False
    folded: bool = False

    def append(self, segment: Segment) -> None:
        """Append tokens."""
        if segment.author != "prompt":
            self.behind += len(segment.token_ids)
        self.segments.append(segment)
        self.token_ids.extend(segment.token_ids)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages of others."""
        self.history.extend(messages)
        self.messages.extend(messages)

    def cut(self, messages: int, segments: int) -> None:
        """Take back what was appended behind so many messages and segments."""
        del self.history[messages:], self.messages[messages:]
        cut = sum(len(segment.token_ids) for segment in self.segments[segments:])
        self.token_ids = self.token_ids.take(len(self.token_ids) - cut)
        self.behind -= sum(len(s.token_ids) for s in self.segments[segments:] if s.author != "prompt")
        del self.segments[segments:]


def find_caller(threads: Sequence[OpenThread], messages: Sequence[Message]) -> OpenThread | None:
    """Find the thread whose turn opens another conversation: the one whose call has its words, or else the last.

    A thread whose task the conversation has too is marked as folded: it waits for nothing.

    Returns:
        A thread with a turn; one that waits for its calls where there is any. None: no thread has a turn.
    """
    waiting = [t for t in threads if not t.folded and t.turns and t.reply is not None and t.reply.tool_calls]
    for thread in waiting:
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(messages, thread.messages, strict=False))
        thread.folded = any(m["role"] == "user" for m, _ in alike)
    waiting = sorted((t for t in waiting if not t.folded), key=lambda t: -t.turns[-1])
    said = "\n".join(m["content"] for m in messages)
    for thread in waiting:
        arguments = [c.arguments for c in thread.reply.tool_calls] if thread.reply is not None else []
        if any(len(text) >= _TELLING and text in said for text in _list_texts(arguments)):
            return thread
    played = (t for t in threads if t.turns)
    return waiting[0] if waiting else max(played, key=lambda t: t.turns[-1], default=None)


def _list_texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, dict):
        yield from _list_texts(list(value.values()))
    elif isinstance(value, list):
        for one in value:
            yield from _list_texts(one)


def describe_threads(
    played: Sequence[OpenThread], answering: OpenThread, side_calls: Collection[int]
) -> tuple[Thread, ...]:
    """Describe threads in their order; none where there is one alone, which is the episode's conversation.

    Args:
        played: the threads that have a turn.
        answering: the one whose last turn is the episode's answer.
        side_calls: the places of those that are a side call.
    """
    if len(played) == 1 and not side_calls:
        return ()
    begins_alike = (t is answering or _count_shared(answering, t) > 0 for t in played)
    main = next((i for i, alike in enumerate(begins_alike) if alike and i not in side_calls), None)
    places, earlier = {thread: number for number, thread in enumerate(played)}, _EarlierThreads()
    described: list[Thread] = []
    for number, thread in enumerate(played):
        source: OpenThread | None
        role, source, after = ThreadRole.MAIN, None, None
        if number in side_calls:
            role, source, after = ThreadRole.SIDE_CALL, thread.source, thread.after
        elif number != main:
            role, source, after = earlier.find_role(thread)
        while source is not None and places.get(source) in side_calls:  # it opens nothing
            after, source = source.after, source.source
        parent = places.get(source) if source is not None else None
        if parent is not None and parent >= number:
            parent = None
        shared = _count_shared(thread, played[parent]) if parent is not None else 0
        after = after if parent is not None else None
        described.append(Thread(role, parent, after, tuple(thread.turns), shared, tuple(thread.messages)))
        if role is not ThreadRole.SIDE_CALL:
            earlier.add(number, thread, role)
    return tuple(described)


class _EarlierThreads:
    """The threads before one that are no side calls, and their places, by hashes of their first messages.

    To compare a thread with all of them takes seconds where there are thousands.
    """

    def __init__(self) -> None:
        self.begun = defaultdict[int, list[OpenThread]](list)  # by all that each began with
        self.tasks = defaultdict[int, list[tuple[int, OpenThread]]](list)  # by those up to its task
        self.going_on = defaultdict[int, list[tuple[int, OpenThread]]](list)  # by the first, of some roles

    def add(self, place: int, thread: OpenThread, role: ThreadRole) -> None:
        """Add the next one."""
        messages = thread.messages
        self.begun[_hash_beginning(messages[: thread.begun])].append(thread)
        if task := _count_to_task(messages):
            self.tasks[_hash_beginning(messages[:task])].append((place, thread))
        if role in _GOES_ON:
            self.going_on[_hash_beginning(messages[:1])].append((place, thread))

    def find_role(self, thread: OpenThread) -> tuple[ThreadRole, OpenThread | None, int | None]:
        """Find how a thread beside the main one comes to be, from which one, and behind which of its turns."""
        if not thread.opened:
            rewritten = thread.source is not None and thread.branch == thread.source.branch
            return ThreadRole.REWRITE if rewritten else ThreadRole.FORK, thread.source, thread.after
        begins = thread.messages[: thread.begun]
        for other in self.begun.get(_hash_beginning(begins), ()):
            if thread.begun == other.begun == _count_shared(thread, other):
                return ThreadRole.FORK, other, None
        task = _count_to_task(begins)
        same_task = self.tasks.get(_hash_beginning(begins[:task]), ()) if task else ()
        alike = self.going_on.get(_hash_beginning(begins[:1]), ())
        found = [_find_last(same_task, thread, task), _find_last(alike, thread, 1)]
        if (last := max((f for f in found if f is not None), default=None, key=lambda f: f[0])) is not None:
            _, other = last
            shorter = thread.begun < len(other.messages)
            return ThreadRole.COMPACTION if shorter else ThreadRole.REWRITE, other, other.turns[-1]
        return ThreadRole.SUB_AGENT, thread.source, thread.after


def _find_last(
    threads: Sequence[tuple[int, OpenThread]], thread: OpenThread, messages: int
) -> tuple[int, OpenThread] | None:
    """Find the last thread that ended before another one began, of those with as many of its messages."""
    for place, other in reversed(threads):  # nobody went on from it
        if other.turns[-1] < thread.turns[0] and _count_shared(thread, other) >= messages:
            return place, other
    return None


def _count_to_task(messages: Sequence[Message]) -> int:
    """Count the messages up to the first of a user; 0: there is none."""
    return next((number for number, m in enumerate(messages, 1) if m["role"] == "user"), 0)


def _hash_beginning(messages: Sequence[Message]) -> int:
    return hash(tuple((m["role"], m["content"]) for m in messages))


def _count_shared(thread: OpenThread, other: OpenThread) -> int:
    """Count the first messages, of those that it began with, that the other has too."""
    pairs = zip(thread.messages[: thread.begun], other.messages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
