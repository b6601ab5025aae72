"""Turns for templates that lack something: tools, a tool role, a system role. What they lack is said in text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.renderer.hermes import CLOSE, OPEN
from agentrl.renderer.slots import Rendering


def without_tools(turns: Sequence[Rendering]) -> list[Rendering]:
    """Calls as text of the assistant; results, with the user's turn that follows them, as one user turn."""
    plain: list[Rendering] = []
    after_result = False
    for turn in turns:
        said = {"role": "user" if turn["role"] == "tool" else turn["role"], "content": _text(turn)}
        if after_result and said["role"] == "user":
            plain[-1]["content"] += "\n" + said["content"]
        else:
            plain.append(said)
        after_result = turn["role"] == "tool"
    return plain


def with_system(turns: Sequence[Rendering], text: str) -> list[Rendering]:
    """The text at the end of the system prompt, or as one."""
    if turns and turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def without_system(turns: Sequence[Rendering]) -> list[Rendering]:
    """The system prompt in front of the first user turn."""
    if not turns or turns[0]["role"] != "system":
        return list(turns)
    if len(turns) == 1 or turns[1]["role"] != "user":
        return [turns[0] | {"role": "user"}, *turns[1:]]
    return [turns[1] | {"content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}, *turns[2:]]


def _text(turn: Rendering) -> str:
    content: str = turn["content"]
    if turn["role"] == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    calls = [json.dumps(c["function"], ensure_ascii=False) for c in turn.get("tool_calls", ())]
    return "\n".join([*([content] if content else []), *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)])
