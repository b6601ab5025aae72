"""A conversation to look at, in a model's tokens: a question, a call, its result, an answer and another question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream

from agentrl.errors import TemplateError
from agentrl.renderer.control_tokens import find_structural_tokens
from agentrl.renderer.template import TemplateRenderer
from agentrl.renderer.written_conversation import WrittenConversation
from agentrl.types import JsonSchema, Reply, join_thought

_THOUGHT = "I calculate."
_ARGUMENTS = {"expression": "17 * 3"}
_TOOL: JsonSchema = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_CALL: dict[str, Any] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "calculator", "arguments": _ARGUMENTS},
}
_PROMPT: list[Any] = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "What is 17 * 3?"},
]
_RESULT: Any = {"role": "tool", "content": "51", "tool_call_id": "call00000", "name": "calculator"}
_ANSWER: Any = {"role": "assistant", "content": "It is 51."}
_QUESTION: Any = {"role": "user", "content": "Thanks. And 17 * 4?"}


Token = tuple[str, bool]  # its text, and whether it is a control token


@dataclass(slots=True)
class ShownConversation:
    """A conversation as a run would have it.

    Args:
        segments: the author and the tokens of each, in order.
        call: the text of the turn that calls, as the model writes it.
        problem: why the conversation goes no further; empty where it does.
    """

    segments: list[tuple[str, list[Token]]] = field(default_factory=list)
    call: str = ""
    problem: str = ""


def show_conversation(renderer: TemplateRenderer) -> ShownConversation:
    """Render the conversation, and read its call back."""
    shown = ShownConversation()
    thought = join_thought(_THOUGHT, "") if renderer.describe().thoughts.field else ""
    calling: Any = {"role": "assistant", "content": thought, "tool_calls": [_CALL]}
    written = WrittenConversation(renderer, [_TOOL], _THOUGHT)
    try:
        written.begin(_PROMPT)
        context = written.context
        turn = written.add_turn(calling, [_RESULT])
        shown.call = renderer.decode(turn)
        shown.problem = _compare(renderer.parse_response(turn, prompt_ids=context, tools=[_TOOL]))
        written.add_turn(_ANSWER, [_QUESTION])
    except TemplateError as error:
        shown.problem = shown.problem or str(error)
    shown.segments = _decode(renderer, written.segments)
    return shown


def _compare(reply: Reply) -> str:
    """Return what is wrong with the call that was read back; empty if nothing is."""
    if len(reply.tool_calls) != 1:
        return f"of 1 call that it writes {len(reply.tool_calls)} can be read"
    (call,) = reply.tool_calls
    if call.error is not None:
        return f"the call that it writes cannot be read: {call.error}"
    if (call.name, dict(call.arguments)) != (_CALL["function"]["name"], _ARGUMENTS):
        return f"the call that it writes is read as another: {call.name} {dict(call.arguments)}"
    return ""


def _decode(renderer: TemplateRenderer, parts: Sequence[tuple[str, list[int]]]) -> list[tuple[str, list[Token]]]:
    control = set(find_structural_tokens(renderer.tokenizer).values())
    stream, backend = DecodeStream(skip_special_tokens=False), renderer.tokenizer.backend_tokenizer
    return [(author, [(stream.step(backend, i) or "", i in control) for i in ids]) for author, ids in parts]
