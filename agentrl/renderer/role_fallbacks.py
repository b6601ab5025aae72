"""Turns for templates that lack tools, a tool role or a system role: the missing part is written as text."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.renderer.call_formats import CallFormat, hermes
from agentrl.renderer.placeholders import Rendering


def fold_tools(turns: Sequence[Rendering], call_format: CallFormat = hermes) -> list[Rendering]:
    """Write calls as text of the assistant; results, with the user's turn that follows them, as one user turn."""
    plain: list[Rendering] = []
    after_result = False
    for turn in turns:
        message = {"role": "user" if turn["role"] == "tool" else turn["role"], "content": _text(turn, call_format)}
        message |= {key: turn[key] for key in ("thought", "space") if key in turn}
        if after_result and message["role"] == "user":
            plain[-1]["content"] += "\n" + message["content"]
        else:
            plain.append(message)
        after_result = turn["role"] == "tool"
    return plain


def append_system(turns: Sequence[Rendering], text: str) -> list[Rendering]:
    """Append a text to the system prompt, or add it as one."""
    if turns and turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def fold_system(turns: Sequence[Rendering]) -> list[Rendering]:
    """Move the system prompt into the first user turn, in front."""
    if not turns or turns[0]["role"] != "system":
        return list(turns)
    if len(turns) == 1 or turns[1]["role"] != "user":
        return [turns[0] | {"role": "user"}, *turns[1:]]
    return [turns[1] | {"content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}, *turns[2:]]


def _text(turn: Rendering, call_format: CallFormat) -> str:
    content: str = turn["content"]
    if turn["role"] == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    calls = [call_format.format_call(c["function"]) for c in turn.get("tool_calls", ())]
    return "\n".join([*([content] if content else []), *calls])
