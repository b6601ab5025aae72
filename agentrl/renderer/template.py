"""Any chat template, followed token by token.

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
from agentrl.renderer import hermes, slots
from agentrl.renderer.plain import with_system, without_system, without_tools
from agentrl.renderer.slots import Hidden, Part, Rendering, placeholder
from agentrl.renderer.untrusted import Piece, SafeEncoder, structural
from agentrl.types import THOUGHT_MARKS, JsonSchema, Message, Reply

_SAID, _THOUGHT = "qzsaidq", "qzthoughtq"  # letters pass every filter of a template unchanged
_ASKED: Rendering = {"role": "user", "content": "q"}
_REPLY: Rendering = {"role": "assistant", "content": _SAID}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "d", "parameters": _PARAMETERS}}

TAIL = 16  # tokens of a prompt that may hold what opens a thought, and the white space behind it

Shape = tuple[tuple[str, bool, bool], ...]  # of each message: its role, whether it has a content and a name
_RESULT, _USER = ("tool", True, True), ("user", True, False)


@dataclass(frozen=True, slots=True)
class Frame:
    """What the template appends to a model's turn: the rest of that turn, messages, the next turn's beginning."""

    lead: str  # up to the first text: "<|im_end|>\n<|im_start|>user\n"
    parts: tuple[Part, ...]


class TemplateRenderer:
    """Renders for one tokenizer and its chat template.

    Args:
        tokenizer: a fast transformers tokenizer.
        chat_template: Jinja source instead of the tokenizer's own.
        end_tokens: ids that the model's configs name as ends of a turn, beside the template's and the tokenizer's own;
            those that are no special tokens are left out, since text spells them.

    Raises:
        TemplateError: the tokenizer has no chat template, or one that cannot be followed.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None, end_tokens: Sequence[int] = ()) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(f"the tokenizer {name!r} is a slow one, which gives no offsets; take its fast version")
        if not (chat_template or tokenizer.chat_template):
            raise TemplateError(
                f"the tokenizer {name!r} has no chat template; "
                "take an instruct model, or give a template with --chat_template FILE"
            )
        self.tokenizer = tokenizer
        self.forged: Counter[str] = Counter()
        self._template = chat_template
        self._added = structural(tokenizer)
        self._frames: dict[tuple[Shape, bool], Frame] = {}
        self._closing = self._find_closing()
        self._closer = self._first_added(self._closing)
        self._stops = self._find_stops() | _special(tokenizer, end_tokens)
        self._encoder = SafeEncoder(tokenizer, anchor=self._closer or next(iter(self._stops.values())))
        self._prompt = lru_cache(maxsize=512)(self._render_prompt)

    # -- the renderer's contract ---------------------------------------------------------------------------------

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        ids, forged = self._prompt(json.dumps(messages), json.dumps(tools))
        self.forged.update(forged)
        return list(ids)

    def render_closed_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation whose last turn is ended: what a model that judges it reads."""
        ids, forged = self._render_prompt(json.dumps(messages), "[]", open_turn=False)
        self.forged.update(forged)
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
        lead = frame.lead
        if completion_ids and (stop := self._stops.get(completion_ids[-1])):
            _, found, rest = lead.partition(self._closer or stop)
            lead = rest if found else lead
        said = slots.fill(frame.parts, slots.texts_of(messages))
        ids, forged = self._encoder.encode([Piece(lead), *said], beginning=False)
        self.forged.update(forged)
        return [*prompt_ids, *completion_ids, *ids]

    def parse_response(self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] | None = None) -> Reply:
        ids = list(token_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        opened = self._opening_of(self._decode(prompt_ids[-TAIL:])) if prompt_ids is not None else self._opens_thought
        reply = hermes.parse(self._decode(ids), thinking=bool(opened))
        return replace(reply, content=opened + reply.content) if opened else reply

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def verdict(self) -> str:
        """What a user should know about this template, in short sentences."""
        return " ".join(
            [
                "Tool calls are in the template's own form."
                if self._native
                else "The template writes no Hermes tool calls, so tools are described in the system prompt.",
                *([] if self._system else ["The system prompt goes in front of the first user turn."]),
                self._verified("tool results", (_RESULT,)),
                self._verified("user turns", (_USER,)),
                *(
                    f"The template would drop earlier thinking before {turn}; what was sampled stays in the context."
                    for turn, message in (("user turns", _ASKED), ("tool results", _result(0)))
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
        """What the template puts after the model's own text: ``<|im_end|>\n``."""
        try:
            turns = self._apply([_ASKED, _REPLY])
            if _SAID not in turns:
                raise TemplateError("it loses or alters the model's text")
        except TemplateError as error:
            raise TemplateError(
                f"the chat template cannot render a user and an assistant turn: {error}; "
                "give another one with --chat_template FILE"
            ) from error
        return turns.rpartition(_SAID)[2]

    def _find_stops(self) -> dict[int, str]:
        """The tokens that end the model's turn when sampled.

        Some templates end no turn (GLM's): there the model is stopped by the token that begins the next one.
        """
        stops = [self._closer]
        for message in () if self._closer else (_ASKED, _result(0)):
            try:
                stops.append(self._first_added(self._apply([_ASKED, _REPLY, message]).rpartition(_SAID)[2]))
            except TemplateError:
                continue  # no such role
        stops.append(self.tokenizer.eos_token)
        found = {self._added[s]: s for s in stops if s in self._added}
        if not found:
            raise TemplateError("no token ends a turn, neither the template's nor the tokenizer's; set eos_token")
        return found

    def _first_added(self, text: str) -> str:
        return min(((text.index(t), -len(t), t) for t in self._added if t in text), default=(0, 0, ""))[2]

    @cached_property
    def _opens_thought(self) -> str:
        """Return the thought that the template opens in a first prompt: ``<think>`` and the space behind it, or none.

        Behind a tool's answer it may be otherwise (DeepSeek's opens none there), so a turn is read by its own prompt.
        """
        return self._opening_of(self._apply([_ASKED], prompt=True))

    def _opening_of(self, prompt: str) -> str:
        mark = THOUGHT_MARKS[0]
        said = prompt.rstrip()
        return prompt[len(said) - len(mark) :] if said.endswith(mark) else ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _native(self) -> bool:
        """Whether the template shows tools, writes calls in the form our parser reads, and takes results."""
        tools = [_PROBE_TOOL]
        called = {"role": "assistant", "content": "", "tool_calls": [_message_call("probe", {"a": "b"})]}
        try:
            shown = self._apply([_ASKED], tools, prompt=True) != self._apply([_ASKED], prompt=True)
            text = self._apply([_ASKED, called, _result(0)], tools)
            for count in (1, 2):  # some take one call a turn only
                self._learn_frame((_RESULT,) * count, tools)
        except TemplateError:
            return False
        calls = hermes.parse(text).tool_calls
        return shown and any(c.name == "probe" and c.arguments == {"a": "b"} for c in calls)

    @cached_property
    def _system(self) -> bool:
        """Whether the template has a system role, and leaves it where it is when the conversation goes on."""
        start: list[Rendering] = [{"role": "system", "content": placeholder(0)}, _ASKED]
        try:
            prompt, later = self._apply(start), self._apply([*start, _REPLY, _ASKED])
            return any(isinstance(p, slots.Slot) for p in slots.parse(prompt)) and later.startswith(prompt)
        except TemplateError:
            return False

    def _drops_thinking(self, then: Rendering) -> bool:
        thought = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID}"}
        try:
            return _THOUGHT not in self._apply([_ASKED, thought, then], [_PROBE_TOOL] if self._native else ())
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
        hidden = Hidden(messages)
        turns, shown = hidden.messages, [hidden.value(t) for t in tools] if self._native else []
        if not shown:
            turns = without_tools(turns)
        if tools and not shown:
            before, after = hermes.instructions()
            lines = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
            turns = with_system(turns, before + hidden.text(lines, "schema") + after)
        if not self._system:
            turns = without_system(turns)
        try:
            parts = slots.parse(self._apply(turns, shown, prompt=open_turn))
            _check_kept(parts, messages)
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise TemplateError(
                f"the chat template cannot render the turns ({roles}): {error}; "
                "change what the environment says first, or give another template with --chat_template FILE"
            ) from error
        ids, forged = self._encoder.encode(slots.fill(parts, hidden.texts), beginning=True)
        return tuple(ids), forged

    # -- later turns -------------------------------------------------------------------------------------------------

    def _frame(self, shape: Shape, tools: bool) -> Frame:
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

    def _learn_frame(self, shape: Shape, tools: Sequence[JsonSchema]) -> Frame:
        messages = [{"role": r, "content": "t" * full, "name": "n" * named} for r, full, named in shape]
        turns = Hidden(messages).messages
        new = turns if tools else without_tools(turns)
        calls = [_message_call(m.get("name", "t"), {"a": _SAID}, i) for i, m in enumerate(turns)]
        errors: list[TemplateError] = []
        for reply in (_REPLY, _REPLY | {"tool_calls": calls}):  # some insist on calls before results
            try:
                parts = slots.parse(self._closing + self._appended(reply, new, tools))
                _check_kept(parts, messages)
                return Frame(str(parts[0]), tuple(parts[1:]))
            except TemplateError as error:
                errors.append(error)
        raise errors[0]

    def _appended(self, reply: Rendering, new: Sequence[Rendering], tools: Sequence[JsonSchema]) -> str:
        """What the template adds behind the model's turn, once it is seen to keep what stood there before."""
        asked = self._apply([_ASKED], tools)
        after = self._apply([_ASKED, reply, *new], tools, prompt=True)
        closing, appended = (t.rpartition(_SAID)[2] for t in (self._apply([_ASKED, reply], tools), after))
        if not (after.startswith(asked) and appended.startswith(closing)):
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
    """Every content must have come out, but for what some templates leave out on purpose beside a call."""
    kept = {part.index for part in parts if isinstance(part, slots.Slot)}
    for index, message in enumerate(messages):
        if message["content"] and 2 * index not in kept and not message.get("tool_calls"):
            raise TemplateError(f"it loses the text of the role {message['role']!r}")
