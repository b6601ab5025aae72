"""The threads of an episode as a tree, with what was said in each, for the page."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from agentrl.runs.reader import Row
from agentrl.view import episode
from agentrl.view.threads import name_threads, read_threads
from agentrl.view.tokens import TokenTexts


def describe_tree(row: Row, texts: TokenTexts | None = None) -> list[dict[str, Any]]:
    """Describe each thread with its messages behind those that it shares with its parent; empty without threads.

    Turns are numbered in the order of time over the episode. ``begun`` counts the messages before the first own turn,
    of those that are described.
    """
    threads, sizes, described = read_threads(row), _count_tokens(row), list[dict[str, Any]]()
    own = [len(t.turns) if t.trained else 0 for t in threads]
    starts = accumulate(own, initial=0)
    for thread, name, size, count, start in zip(threads, name_threads(threads), sizes, own, starts, strict=False):
        turns = episode.list_turns(thread, start)
        messages = episode.describe_turns(row, list(thread.messages), turns, texts)[thread.shared :]
        begun = next((i for i, m in enumerate(messages) if m.get("turn") is not None), len(messages))
        described.append(
            {
                "name": name,
                "role": thread.role.value,
                "parent": thread.parent,
                "after": thread.after,
                "turns": list(thread.turns),
                "trained": thread.trained,
                "shared": thread.shared,
                "begun": begun,
                "messages": messages,
                "tokens": size[0],
                "sampled": size[1] if count else None,
            }
        )
    return described


def _count_tokens(row: Row) -> list[tuple[int, int]]:
    """Count the tokens of each context, and those that were sampled in it."""
    sizes: list[tuple[int, int]] = []
    for segment in row["segments"]:
        if segment["author"] == "prompt" or not sizes:
            sizes.append((0, 0))
        count = len(segment["token_ids"])
        total, sampled = sizes[-1]
        sizes[-1] = total + count, sampled + count * (segment["author"] == "model")
    return sizes
