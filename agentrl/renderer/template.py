"""A renderer that follows any chat template token by token.

The template is the only authority on structure. It is rendered with placeholders for every text; what stands around
them is its own and may hold control tokens, what takes their place may not. What a turn appends is learnt once for
each shape of turn, on a short conversation, verified to leave the tokens before as they are, kept as a ``Frame``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from agentrl.errors import TemplateError
from agentrl.renderer import placeholders
from agentrl.renderer.call_formats import CallFormat, hermes
from agentrl.renderer.control_tokens import Piece, SafeEncoder, find_structural_tokens
from agentrl.renderer.placeholders import Part, Rendering, TemplatedMessages, format_placeholder
from agentrl.renderer.role_fallbacks import append_system, fold_system, fold_tools
from agentrl.types import THOUGHT_MARKS, JsonSchema, Message, Reply

_REPLY_TEXT, _THOUGHT = "qzsaidq", "qzthoughtq"  # letters pass every filter of a template unchanged
_USER_TURN: Rendering = {"role": "user", "content": "q"}
_REPLY: Rendering = {"role": "assistant", "content": _REPLY_TEXT}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "d", "parameters": _PARAMETERS}}

TAIL = 16  # tokens of a prompt that may hold the opening of a thought, and the white space behind it

Shape = tuple[tuple[str, bool, bool], ...]  # of each message: its role, whether it has a content and a name
_RESULT, _USER = ("tool", True, True), ("user", True, False)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The text that the template appends to a model's turn: its rest, messages, the next turn's beginning."""

    turn_suffix: str  # up to the first text: "<|im_end|>\n<|im_start|>user\n"
    parts: tuple[Part, ...]


class TemplateRenderer:
    """Renders for one tokenizer and its chat template.

    Args:
        tokenizer: a fast transformers tokenizer.
        chat_template: Jinja source instead of the tokenizer's own.
        end_tokens: ids that the model's configs name as ends of a turn, beside the template's and the tokenizer's own;
            those that are no special tokens are left out, since text spells them.
        call_format: how the model writes tool calls.

    Raises:
        TemplateError: the tokenizer has no chat template, or one that cannot be followed.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        end_tokens: Sequence[int] = (),
        call_format: CallFormat = hermes,
    ) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(f"the tokenizer {name!r} is a slow one, which gives no offsets; take its fast version")
        if not (chat_template or tokenizer.chat_template):
            raise TemplateError(
                f"the tokenizer {name!r} has no chat template; "
                "take an instruct model, or give a template with --chat_template FILE"
            )
        self.tokenizer, self._calls = tokenizer, call_format
        self.injection_attempts: Counter[str] = Counter()
        self._template = chat_template
        self._added = find_structural_tokens(tokenizer)
        self._frames: dict[tuple[Shape, bool], _Frame] = {}
        self._closing = self._find_closing()
        self._closer = self._first_added(self._closing)
        self._stops = self._find_stops() | _special(tokenizer, end_tokens)
        self._encoder = SafeEncoder(tokenizer, anchor=self._closer or next(iter(self._stops.values())))
        self._prompt = lru_cache(maxsize=512)(self._render_prompt)

    # -- the renderer's contract ---------------------------------------------------------------------------------

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        ids, attempts = self._prompt(json.dumps(messages), json.dumps(tools))
        self.injection_attempts.update(attempts)
        return list(ids)

    def render_closed_ids(self, messages: Sequence[Message]) -> list[int]:
        """Render a conversation whose last turn is ended, for a model that judges it."""
        ids, attempts = self._render_prompt(json.dumps(messages), "[]", open_turn=False)
        self.injection_attempts.update(attempts)
        return list(ids)

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonSchema] = (),
    ) -> list[int]:
        shape = tuple((m["role"], bool(m["content"]), bool(m.get("name"))) for m in messages)
        frame = self._frame(shape, bool(tools))
        turn_suffix = frame.turn_suffix
        if completion_ids and (stop := self._stops.get(completion_ids[-1])):
            _, end, rest = turn_suffix.partition(self._closer or stop)
            turn_suffix = rest if end else turn_suffix
        texts = placeholders.fill_placeholders(frame.parts, placeholders.collect_texts(messages))
        ids, attempts = self._encoder.encode([Piece(turn_suffix), *texts], beginning=False)
        self.injection_attempts.update(attempts)
        return [*prompt_ids, *completion_ids, *ids]

    def parse_response(self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] | None = None) -> Reply:
        ids = list(token_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        opened = self._opening_of(self._decode(prompt_ids[-TAIL:])) if prompt_ids is not None else self._opens_thought
        reply = self._calls.parse(self._decode(ids), thinking=bool(opened))
        return replace(reply, content=opened + reply.content) if opened else reply

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def verdict(self) -> str:
        """Describe the template to a user, in short sentences."""
        return " ".join(
            [
                "Tool calls are in the template's own form."
                if self._native
                else "The template writes no tool calls of this form, so tools are described in the system prompt.",
                *([] if self._system else ["The system prompt goes in front of the first user turn."]),
                self._verified("tool results", (_RESULT,)),
                self._verified("user turns", (_USER,)),
                *(
                    f"The template would drop earlier thinking before {turn}; what was sampled stays in the context."
                    for turn, message in (("user turns", _USER_TURN), ("tool results", _result(0)))
                    if self._drops_thinking(message)
                ),
                *(["It opens a thought: a turn that never ends it has no answer."] if self._opens_thought else []),
                f"A turn ends with {' or '.join(self._stops.values())}.",
            ]
        )

    # -- what kind of template it is -------------------------------------------------------------------------------

    def _apply(self, messages: Sequence[Rendering], tools: Sequence[JsonSchema] = (), *, prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # the template is somebody's program
            raise TemplateError(str(error) or type(error).__name__) from error
        return text

    def _find_closing(self) -> str:
        """Return the text that the template puts after the model's own: ``<|im_end|>\n``."""
        try:
            turns = self._apply([_USER_TURN, _REPLY])
            if _REPLY_TEXT not in turns:
                raise TemplateError("it loses or alters the model's text")
        except TemplateError as error:
            raise TemplateError(
                f"the chat template cannot render a user and an assistant turn: {error}; "
                "give another one with --chat_template FILE"
            ) from error
        return turns.rpartition(_REPLY_TEXT)[2]

    def _find_stops(self) -> dict[int, str]:
        """Return the tokens that end the model's turn when sampled, by id.

        Some templates end no turn (GLM's): there the model is stopped by the token that begins the next one.
        """
        stops = [self._closer]
        for message in () if self._closer else (_USER_TURN, _result(0)):
            try:
                stops.append(self._first_added(self._apply([_USER_TURN, _REPLY, message]).rpartition(_REPLY_TEXT)[2]))
            except TemplateError:
                continue  # no such role
        stops.append(self.tokenizer.eos_token)
        ids = {self._added[s]: s for s in stops if s in self._added}
        if not ids:
            raise TemplateError("no token ends a turn, neither the template's nor the tokenizer's; set eos_token")
        return ids

    def _first_added(self, text: str) -> str:
        return min(((text.index(t), -len(t), t) for t in self._added if t in text), default=(0, 0, ""))[2]

    @cached_property
    def _opens_thought(self) -> str:
        """Return the thought that the template opens in a first prompt: ``<think>`` and the space behind it, or none.

        Behind a tool's answer it may be otherwise (DeepSeek's opens none there), so a turn is read by its own prompt.
        """
        return self._opening_of(self._apply([_USER_TURN], prompt=True))

    def _opening_of(self, prompt: str) -> str:
        mark = THOUGHT_MARKS[0]
        stripped = prompt.rstrip()
        return prompt[len(stripped) - len(mark) :] if stripped.endswith(mark) else ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _native(self) -> bool:
        """Return True if the template shows tools, writes calls in the form our parser reads, and takes results."""
        tools = [_PROBE_TOOL]
        turn = {"role": "assistant", "content": "", "tool_calls": [_message_call("probe", {"a": "b"})]}
        try:
            shown = self._apply([_USER_TURN], tools, prompt=True) != self._apply([_USER_TURN], prompt=True)
            text = self._apply([_USER_TURN, turn, _result(0)], tools)
            for count in (1, 2):  # some take one call a turn only
                self._learn_frame((_RESULT,) * count, tools)
        except TemplateError:
            return False
        calls = self._calls.parse(text).tool_calls
        return shown and any(c.name == "probe" and c.arguments == {"a": "b"} for c in calls)

    @cached_property
    def _system(self) -> bool:
        """Return True if the template has a system role, and leaves it in place as the conversation goes on."""
        start: list[Rendering] = [{"role": "system", "content": format_placeholder(0)}, _USER_TURN]
        try:
            prompt, later = self._apply(start), self._apply([*start, _REPLY, _USER_TURN])
            return any(
                isinstance(p, placeholders.Placeholder) for p in placeholders.split_rendering(prompt)
            ) and later.startswith(prompt)
        except TemplateError:
            return False

    def _drops_thinking(self, then: Rendering) -> bool:
        thought = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY_TEXT}"}
        try:
            return _THOUGHT not in self._apply([_USER_TURN, thought, then], [_PROBE_TOOL] if self._native else ())
        except TemplateError:
            return False  # it has no such turn

    def _verified(self, what: str, shape: Shape) -> str:
        try:
            self._frame(shape, tools=True)
            return f"Appending {what} is verified."
        except TemplateError as error:
            return f"Appending {what} fails: {error}."

    # -- the first prompt ------------------------------------------------------------------------------------------

    def _render_prompt(
        self, messages_json: str, tools_json: str, *, open_turn: bool = True
    ) -> tuple[tuple[int, ...], Counter[str]]:
        messages, tools = json.loads(messages_json), json.loads(tools_json)
        templated = TemplatedMessages(messages)
        turns, shown = templated.messages, [templated.value(t) for t in tools] if self._native else []
        if not shown:
            turns = fold_tools(turns, self._calls)
        if tools and not shown:
            before, after = self._calls.format_instructions()
            lines = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
            turns = append_system(turns, before + templated.text(lines, "schema") + after)
        if not self._system:
            turns = fold_system(turns)
        try:
            parts = placeholders.split_rendering(self._apply(turns, shown, prompt=open_turn))
            _check_kept(parts, messages)
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise TemplateError(
                f"the chat template cannot render the turns ({roles}): {error}; "
                "change what the environment says first, or give another template with --chat_template FILE"
            ) from error
        ids, attempts = self._encoder.encode(placeholders.fill_placeholders(parts, templated.texts), beginning=True)
        return tuple(ids), attempts

    # -- later turns -------------------------------------------------------------------------------------------------

    def _frame(self, shape: Shape, tools: bool) -> _Frame:
        if (key := (shape, tools)) not in self._frames:
            try:
                self._frames[key] = self._learn_frame(shape, [_PROBE_TOOL] if tools and self._native else ())
            except TemplateError as error:
                roles = ", ".join(role for role, _, _ in shape)
                raise TemplateError(
                    f"the chat template cannot append the turns ({roles}) to a conversation: {error}; "
                    "give a template that only appends with --chat_template FILE"
                ) from error
        return self._frames[key]

    def _learn_frame(self, shape: Shape, tools: Sequence[JsonSchema]) -> _Frame:
        messages = [{"role": r, "content": "t" * full, "name": "n" * named} for r, full, named in shape]
        turns = TemplatedMessages(messages).messages
        new = turns if tools else fold_tools(turns, self._calls)
        calls = [_message_call(m.get("name", "t"), {"a": _REPLY_TEXT}, i) for i, m in enumerate(turns)]
        errors: list[TemplateError] = []
        for reply in (_REPLY, _REPLY | {"tool_calls": calls}):  # some insist on calls before results
            try:
                parts = placeholders.split_rendering(self._closing + self._appended(reply, new, tools))
                _check_kept(parts, messages)
                return _Frame(str(parts[0]), tuple(parts[1:]))
            except TemplateError as error:
                errors.append(error)
        raise errors[0]

    def _appended(self, reply: Rendering, new: Sequence[Rendering], tools: Sequence[JsonSchema]) -> str:
        """Return the text that the template adds behind the model's turn. Raises if it rewrites the turns before."""
        before = self._apply([_USER_TURN], tools)
        after = self._apply([_USER_TURN, reply, *new], tools, prompt=True)
        closing, appended = (t.rpartition(_REPLY_TEXT)[2] for t in (self._apply([_USER_TURN, reply], tools), after))
        if not (after.startswith(before) and appended.startswith(closing)):
            raise TemplateError("it rewrites the turns before")
        return appended[len(closing) :]


def _special(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """Return the special tokens among ids: a config may say 2 by default, where 2 is a letter or ``<tool_call>``."""
    added = tokenizer.added_tokens_decoder
    return {i: added[i].content for i in ids if i in added and added[i].special}


def _message_call(name: str, arguments: dict[str, Any], index: int = 0) -> Rendering:
    return {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(index: int) -> Rendering:
    return {"role": "tool", "content": "r", "tool_call_id": f"call{index:05d}", "name": "probe"}


def _check_kept(parts: Sequence[Part], messages: Sequence[Any]) -> None:
    """Raise if a message's text is lost, but for texts beside a call, which some templates leave out on purpose."""
    kept = {part.index for part in parts if isinstance(part, placeholders.Placeholder)}
    for index, message in enumerate(messages):
        if message["content"] and 2 * index not in kept and not message.get("tool_calls"):
            raise TemplateError(f"it loses the text of the role {message['role']!r}")
