"""A conversation to look at, in a model's tokens: a question, a call, its result, an answer and another question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream

from agentrl.errors import TemplateError
from agentrl.renderer.control_tokens import find_structural_tokens
from agentrl.renderer.template import TemplateRenderer
from agentrl.renderer.thoughts import find_opened
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
class Demonstration:
    """A conversation as a run would have it.

    Args:
        segments: the author and the tokens of each, in order.
        call: the text of the turn that calls, as the model writes it.
        problem: why the conversation goes no further; empty where it does.
    """

    segments: list[tuple[str, list[Token]]] = field(default_factory=list)
    call: str = ""
    problem: str = ""


def demonstrate(renderer: TemplateRenderer) -> Demonstration:
    """Render the conversation, and read its call back."""
    shown = Demonstration()
    thought = join_thought(_THOUGHT, "") if renderer.describe().thoughts.field else ""
    calling: Any = {"role": "assistant", "content": thought, "tool_calls": [_CALL]}
    parts: list[tuple[str, list[int]]] = []
    try:
        context = renderer.render_ids(_PROMPT, tools=[_TOOL])
        parts.append(("prompt", context))
        shown.call = _write_turn(renderer, _PROMPT, calling)
        reply = _take_turn(renderer, parts, shown.call, [*_PROMPT, calling], _RESULT)
        shown.problem = _compare(renderer.parse_response(reply, prompt_ids=context, tools=[_TOOL]))
        answer = _write_turn(renderer, [*_PROMPT, calling, _RESULT], _ANSWER)
        _take_turn(renderer, parts, answer, [*_PROMPT, calling, _RESULT, _ANSWER], _QUESTION)
    except TemplateError as error:
        shown.problem = shown.problem or str(error)
    shown.segments = _decode(renderer, parts)
    return shown


def _write_turn(renderer: TemplateRenderer, messages: list[Any], reply: Any) -> str:
    """Write what the model says as its template does; by its call format alone where that moves what is before.

    A thought that the prompt opens is ended, also by a template that has no field for one.
    """
    prompt: list[int] = []
    try:
        prompt = renderer.render_ids(messages, tools=[_TOOL])
        whole = renderer.render_closed_ids([*messages, reply], tools=[_TOOL])
        _, found, turn = renderer.decode(whole).partition(renderer.decode(prompt))
    except TemplateError:
        found = turn = ""
    if not found:
        calls = [renderer.call_format.format_call(c["function"]) for c in reply.get("tool_calls", ())]
        turn = "".join([reply["content"], *calls])
    marks = renderer.describe().thoughts.marks
    if find_opened(renderer.decode(prompt), [marks]) and marks.ending not in turn:
        return f"{_THOUGHT}\n{marks.ending}\n\n{turn}"
    return turn


def _take_turn(
    renderer: TemplateRenderer, parts: list[tuple[str, list[int]]], text: str, history: list[Any], message: Any
) -> list[int]:
    """Add a turn of the model's, up to the token that stops it, and what comes behind it. Return the turn's tokens."""
    begin = max(at for at, (author, _) in enumerate(parts) if author == "prompt")
    context = [i for _, ids in parts[begin:] for i in ids]
    stops = set(renderer.get_stop_token_ids())
    reply = renderer.encode_turn(text)
    end = next((at for at, i in enumerate(reply) if i in stops), None)
    if end is not None:
        reply = reply[: end + 1]
    parts.append(("model", reply))
    anew = renderer.rewrite_history(context, reply, history, [message], tools=[_TOOL])
    if anew is not None:
        parts.append(("prompt", anew.history))
        parts += [("env", anew.observation)] if anew.observation else []
        return reply
    length = len(context) + len(reply)
    after = renderer.bridge_to_next_turn(context, reply, [message], tools=[_TOOL])[length:]
    if end is None and after and after[0] in stops:  # the next turn's beginning ends this one
        reply.append(after.pop(0))
    parts.append(("env", after))
    return reply


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


def _decode(renderer: TemplateRenderer, parts: list[tuple[str, list[int]]]) -> list[tuple[str, list[Token]]]:
    control = set(find_structural_tokens(renderer.tokenizer).values())
    stream, backend = DecodeStream(skip_special_tokens=False), renderer.tokenizer.backend_tokenizer
    return [(author, [(stream.step(backend, i) or "", i in control) for i in ids]) for author, ids in parts]
