"""The rendering of a turn in its context: what stands behind it, and how templates are shown it."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import ContractError
from agentrl.renderer import AppendingRenderer, Renderer
from agentrl.rollout.token_context import TokenContext
from agentrl.types import JsonSchema, Message, Reply, join_thought


def render_behind(
    renderer: Renderer,
    prompt_ids: TokenContext,
    completion_ids: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[JsonSchema],
) -> Sequence[int]:
    """Render the tokens that messages put behind a turn.

    Raises:
        ContractError: the renderer would change tokens that are in the context.
    """
    if isinstance(renderer, AppendingRenderer):
        return renderer.render_appended(completion_ids, messages, tools=tools)
    token_ids = [*prompt_ids, *completion_ids]
    extended = renderer.bridge_to_next_turn(list(prompt_ids), completion_ids, messages, tools=tools)
    if extended[: len(token_ids)] != token_ids:
        raise ContractError("the renderer changed tokens that were already in the context")
    return extended[len(token_ids) :]


def write_turn(renderer: Renderer, reply: Reply, token_ids: Sequence[int]) -> Message:
    """Write a turn's message for a template: a call that could not be read stays text, as it cannot write one."""
    if not any(call.kind for call in reply.tool_calls):
        return reply.message()
    start = reply.text_spans[0][0] if reply.text_spans else 0
    stops = set(renderer.get_stop_token_ids())
    said = renderer.decode([i for i in token_ids[start:] if i not in stops]).strip()
    thought = reply.thought if start else ""
    return {"role": "assistant", "content": join_thought(thought, said) if thought else said}
