"""The threads of an episode: their names, and where each comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.runs.reader import Row, build_threads
from agentrl.types import Thread, ThreadRole

_ORIGINS = {  # with a parent, and without
    ThreadRole.MAIN: ("the episode's first conversation",) * 2,
    ThreadRole.SUB_AGENT: ("a conversation of its own, opened by {parent}", "a conversation of its own"),
    ThreadRole.FORK: ("another way on from {parent}", "another way on"),
    ThreadRole.COMPACTION: ("goes on for {parent}, with a shorter history", "goes on with a shorter history"),
    ThreadRole.REWRITE: ("goes on for {parent}, with its history written anew", "goes on with another history"),
    ThreadRole.SIDE_CALL: ("one turn on its own, beside {parent}", "one turn on its own"),
}
NOT_TRAINED = (
    "not trained: a side call is seen and not learned from: one turn on its own, without the tools that the other "
    "threads are offered, such as a title, does not serve the task"
)


def read_threads(row: Row) -> tuple[Thread, ...]:
    """Read the threads of an episode; none where it is one conversation, or where they are damaged."""
    try:
        return build_threads(row)
    except (ValueError, KeyError, TypeError):
        return ()


def name_threads(threads: Sequence[Thread]) -> list[str]:
    """Name each thread by its role; those that share one are numbered."""
    many, seen = Counter(t.role for t in threads), Counter[str]()
    names = []
    for thread in threads:
        seen[thread.role] += 1
        names.append(f"{thread.role.value} {seen[thread.role]}" if many[thread.role] > 1 else thread.role.value)
    return names


def explain_thread(threads: Sequence[Thread], number: int) -> str:
    """Explain in a sentence which thread one is, and where it comes from."""
    thread, names = threads[number], name_threads(threads)
    known, alone = _ORIGINS[thread.role]
    origin = alone
    if thread.parent is not None:
        behind = f" behind turn {thread.after + 1}" if thread.after is not None else ""
        origin = known.format(parent=f"thread {thread.parent + 1} ({names[thread.parent]}){behind}")
    return f"in thread {number + 1} of {len(threads)}, {names[number]}: {origin}"


def number_turns(threads: Sequence[Thread]) -> list[int]:
    """List the numbers, in the order of time, of the turns as they stand in the row."""
    return [turn for thread in threads if thread.trained for turn in thread.turns]
