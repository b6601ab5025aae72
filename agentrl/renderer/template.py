"""A renderer that follows any chat template token by token.

The template is the only authority on structure. It is rendered with placeholders for every text; what stands around
them is its own and may hold control tokens, what takes their place may not. What a turn appends is learnt once for
each shape of turn, on a short conversation, verified to leave the tokens before as they are, kept as a ``Frame``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from typing import Any

from agentrl.errors import TemplateError
from agentrl.renderer import placeholders, thoughts
from agentrl.renderer.call_formats import CallFormat, hermes
from agentrl.renderer.call_formats.choice import Learnt, learn_call_format
from agentrl.renderer.chat_template import check_words, describe_choice, list_templates, list_words, render_chat
from agentrl.renderer.control_tokens import Piece, SafeEncoder, find_structural_tokens
from agentrl.renderer.description import Description
from agentrl.renderer.frames import FrameLearner, Shape
from agentrl.renderer.headers import Headers, learn_headers
from agentrl.renderer.history import NewContext, say_alike
from agentrl.renderer.placeholders import Part, Rendering, TemplatedMessages, format_placeholder
from agentrl.renderer.plain_fences import Conversation, PlainFences, find_fences
from agentrl.renderer.probe_turns import PROBE_TOOL, REPLY, REPLY_TEXT, USER_TURN, make_probe_call, make_probe_result
from agentrl.renderer.role_fallbacks import append_system, fold_system, fold_tools
from agentrl.renderer.spans import place_reply
from agentrl.renderer.stop_strings import cut_at_stop
from agentrl.renderer.thoughts import (
    PLAIN,
    ThoughtMarks,
    find_opened,
    learn_thoughts,
    read_turn,
    write_thought,
)
from agentrl.renderer.turn_ends import cut_closing, learn_turn_ends, select_special
from agentrl.settings.template import History
from agentrl.types import JsonSchema, Message, Reply

_THOUGHT = "qzthoughtq"
_MOST_WORDINGS = 32  # renderers of other words that are kept
TAIL = 16  # tokens of a prompt that may hold the opening of a thought, and the white space behind it

_RESULT, _USER = ("tool", True, True), ("user", True, False)


class TemplateRenderer:
    """Renders for one tokenizer and its chat template.

    Args:
        tokenizer: a fast transformers tokenizer.
        chat_template: Jinja source instead of the tokenizer's own.
        end_tokens: ids that the model's configs name as ends of a turn, beside the template's and the tokenizer's own;
            those that are no special tokens are left out, since text spells them.
        call_format: how the model writes tool calls; learnt from the template by default.
        words: values of words that the template reads, such as ``enable_thinking``.
        history: what `rewrite_history` does with earlier turns.

    Raises:
        TemplateError: the tokenizer has no chat template, or one that cannot be followed.
        ConfigError: it reads no such word.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        end_tokens: Sequence[int] = (),
        call_format: CallFormat | None = None,
        words: Mapping[str, Any] = {},
        history: History = "as_sampled",
    ) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(f"the tokenizer {name!r} is a slow one, which gives no offsets; take its fast version")
        if not (chat_template or tokenizer.chat_template):
            raise TemplateError(
                f"the tokenizer {name!r} has no chat template; "
                "take an instruct model, or give a template with --chat_template FILE"
            )
        if not chat_template and (named := list_templates(tokenizer)) and "default" not in named:
            raise TemplateError(
                f"the tokenizer {name!r} has several chat templates, and none is the default; "
                f"take one with --chat_template NAME: {', '.join(sorted(named))}"
            )
        self.tokenizer, self._given_calls = tokenizer, call_format
        self.injection_attempts: Counter[str] = Counter()
        self.history = history
        self._template, self.words, self._end_tokens = chat_template, dict(words), tuple(end_tokens)
        check_words(words, self.list_words() if words else {})
        self._worded: dict[str, TemplateRenderer] = {}
        self._added = find_structural_tokens(tokenizer)
        self._ends = learn_turn_ends(self._apply, tokenizer, name, self._added, self._thoughts.marks.ending)
        self._stops = {**self._ends.stops, **select_special(tokenizer, end_tokens)}
        self._stops |= {self._added[s]: s for s in getattr(self.call_format, "stops", ()) if s in self._added}
        self._frames = FrameLearner(self._apply, self._added, self._ends.closing, self.call_format)
        self._encoder = SafeEncoder(tokenizer, anchor=self._ends.closer or next(iter(self._stops.values())))
        self._prompt = lru_cache(maxsize=512)(self._render_prompt)

    # -- the renderer's contract ---------------------------------------------------------------------------------

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        ids, attempts = self._prompt(json.dumps(messages), json.dumps(tools))
        self.injection_attempts.update(attempts)
        return list(ids)

    def render_closed_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        """Render a conversation whose last turn is ended, for a model that judges it."""
        ids, attempts = self._render_prompt(json.dumps(messages), json.dumps(tools), open_turn=False)
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
        return [*prompt_ids, *completion_ids, *self.render_appended(completion_ids, messages, tools=tools)]

    def render_appended(
        self, completion_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()
    ) -> list[int]:
        ids, attempts = self._render_behind(completion_ids, messages, tools)
        self.injection_attempts.update(attempts)
        return ids

    def rewrite_history(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonSchema] = (),
    ) -> NewContext | None:
        if self.history == "as_sampled":
            return None
        try:
            anew, found = self._render_conversation([*history, *messages], tools)
        except TemplateError as error:
            raise TemplateError(
                f"template.history as_template: {error}; what was sampled stays with --template.history as_sampled"
            ) from error
        try:
            appended, attempts = self._render_behind(completion_ids, messages, tools)
        except TemplateError:  # it only ever writes all anew
            self.injection_attempts.update(found)
            return NewContext(anew, [])
        if say_alike(self.decode(anew), self.decode([*prompt_ids, *completion_ids, *appended])):
            return None
        self.injection_attempts.update(attempts)
        return NewContext.split(anew, appended)

    def _render_behind(
        self, completion_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[JsonSchema]
    ) -> tuple[list[int], Counter[str]]:
        """Render what stands behind a turn: its end where it has none yet, messages, the next turn's beginning."""
        shape = tuple((m["role"], bool(m["content"]), bool(m.get("name"))) for m in messages)
        frame = self._frames.find(shape, native=bool(tools) and self._native)
        turn_suffix = frame.turn_suffix
        if completion_ids and (stop := self._stops.get(completion_ids[-1])):
            ending = stop if turn_suffix.startswith(stop) else self._ends.closer or stop
            _, end, rest = turn_suffix.partition(ending)
            turn_suffix = rest if end else turn_suffix
        own = [*placeholders.collect_texts(messages), *placeholders.collect_ids(messages, self._added)]
        texts = placeholders.fill_placeholders(frame.parts, own)
        return self._encode([Piece(turn_suffix), *texts], beginning=False)

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[JsonSchema] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        ids = list(token_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        prompt = self.decode(prompt_ids[-TAIL:]) if prompt_ids is not None else self._first_prompt
        opened = find_opened(prompt, self._marks)
        text = self.decode(ids)
        before = cut_at_stop(text, stop)
        if getattr(self.call_format, "owns_thoughts", False):
            reply = write_thought(self.call_format.parse(before, tools=tools, thinking=opened is not None))
        else:
            parse = partial(self.call_format.parse, tools=tools)
            reply = read_turn(before, parse, self._marks, opened, self._headers.cut)
        return place_reply(reply, text, ids, self.tokenizer.backend_tokenizer)

    def encode_turn(self, text: str) -> list[int]:
        """Encode a turn of the model's own, in which control tokens are what they are."""
        return self._encoder.encode([Piece(text)], beginning=False)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    @property
    def thought_marks(self) -> ThoughtMarks:
        """Return the marks of a thought as the template writes it."""
        return self._thoughts.marks

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Return the tokens that text must not spell, with their ids."""
        return self._added

    @property
    def takes_tools(self) -> bool:
        """Return True if the template shows tools, writes calls and takes results; else they are text of the turns."""
        return self._native and self._learnt.shows_tools

    def verdict(self) -> str:
        """Describe the template to a user, in short sentences."""
        return " ".join(self.describe().list_sentences())

    def describe(self) -> Description:
        """Find out what the template allows."""
        return Description(
            native=self._native,
            form=getattr(self.call_format, "name", ""),
            why=self._learnt.why,
            reads_calls=self._learnt.form is not None,
            shows_tools=self._learnt.shows_tools,
            unheld=self._learnt.limits,
            system=self._system,
            appended={"tool results": self._verify((_RESULT,)), "user turns": self._verify((_USER,))},
            choice=describe_choice(self.tokenizer, self._template),
            history=self.history,
            rewritten={"tool results": self._verify_rewriting("tool"), "user turns": self._verify_rewriting("user")},
            forgotten=[
                turns
                for turns, message in (("user turns", USER_TURN), ("tool results", make_probe_result(0)))
                if self._drops_thinking(message)
            ],
            thoughts=self._thoughts,
            opens_thought=self._opens_thought,
            fences=self._fences.fences,
            ends=list(self._stops.values()),
        )

    def with_words(self, words: Mapping[str, Any]) -> TemplateRenderer:
        """Return this renderer with more values for words of the template; it is made once for each such set.

        Raises:
            TemplateError: as the class.
        """
        if words.items() <= self.words.items():
            return self
        if (key := json.dumps(words, sort_keys=True, default=repr)) not in self._worded:
            if len(self._worded) >= _MOST_WORDINGS:
                self._worded.clear()
            other = TemplateRenderer(
                self.tokenizer,
                self._template,
                self._end_tokens,
                self._given_calls,
                {**self.words, **words},
                self.history,
            )
            other.injection_attempts = self.injection_attempts
            self._worded[key] = other
        return self._worded[key]

    def list_words(self) -> dict[str, str]:
        """List the words that the template reads, each with its default, as text; empty where it names none."""
        return list_words(self.tokenizer, self._template)

    # -- what kind of template it is -------------------------------------------------------------------------------

    def _apply(self, messages: Sequence[Rendering], tools: Sequence[JsonSchema] = (), *, prompt: bool = False) -> str:
        if any(m.get("tool_calls") for m in messages):
            messages = [self._learnt.style.put(m) for m in messages]
        return self._render(messages, tools, prompt=prompt)

    def _render(self, messages: Sequence[Any], tools: Sequence[JsonSchema] = (), *, prompt: bool = False) -> str:
        return render_chat(
            self.tokenizer, self._template, messages, tools, add_generation_prompt=prompt, words=self.words
        )

    @cached_property
    def _learnt(self) -> Learnt:
        """Return how the template writes calls, read off what it writes."""
        brought = None if self._template else getattr(self.tokenizer, "response_template", None)
        return learn_call_format(self._render, self._added, self._given_calls, brought)

    @cached_property
    def call_format(self) -> CallFormat:
        """Return the form in which the model writes calls."""
        return self._given_calls or self._learnt.form or hermes

    @cached_property
    def _thoughts(self) -> thoughts.Thoughts:
        return learn_thoughts(lambda messages, prompt: self._apply([dict(m) for m in messages], prompt=prompt))

    @cached_property
    def _marks(self) -> tuple[ThoughtMarks, ...]:
        """Return the marks of thoughts: the template's own, and those that a prompt may ask for in words."""
        return tuple(dict.fromkeys((self._thoughts.marks, PLAIN)))

    @cached_property
    def _headers(self) -> Headers:
        """Return what the template writes in a turn round the model's own words, which the model samples."""

        def read(text: str, prompt: str) -> Reply:
            while ending := next((s for s in self._stops.values() if text.rstrip().endswith(s)), ""):
                text = text.rstrip().removesuffix(ending)
            parse = partial(self.call_format.parse, tools=[PROBE_TOOL])
            return read_turn(text, parse, self._marks, find_opened(prompt, self._marks))

        def think(message: Rendering) -> Rendering:
            return self._thoughts.put(message, _THOUGHT, message["content"])

        return learn_headers(self._apply, read, think if self._thoughts.field else None)

    @cached_property
    def _first_prompt(self) -> str:
        """Return a first prompt. Behind a tool's answer another thought may be opened, so a turn is read by its own."""
        return self._apply([USER_TURN], prompt=True)

    @property
    def _opens_thought(self) -> bool:
        return find_opened(self._first_prompt, self._marks) is not None

    @cached_property
    def _native(self) -> bool:
        """Return True if the template writes calls in a form that can be read, and takes results."""
        if self._learnt.form is None:
            return False
        try:
            for count in (1, 2):  # some take one call a turn only
                self._frames.learn((_RESULT,) * count, [PROBE_TOOL])
        except TemplateError:
            return False
        return True

    @cached_property
    def _system(self) -> bool:
        """Return True if the template has a system role, and leaves it in place as the conversation goes on."""
        start: list[Rendering] = [{"role": "system", "content": format_placeholder(0)}, USER_TURN]
        try:
            prompt, later = self._apply(start), self._apply([*start, REPLY, USER_TURN])
            return any(
                isinstance(p, placeholders.Placeholder) for p in placeholders.split_rendering(prompt)
            ) and later.startswith(cut_closing(prompt, later, self._added))
        except TemplateError:
            return False

    @cached_property
    def _fences(self) -> PlainFences:
        """Return the fences that are plain text here, read off conversations of several shapes."""
        call, answer = REPLY | {"content": "", "tool_calls": [make_probe_call("probe", {"a": "b"})]}, REPLY
        system, result = {"role": "system", "content": "s"}, make_probe_result(0)
        conversations: list[list[Rendering]] = [
            [system, USER_TURN, answer, USER_TURN, answer, USER_TURN],
            [USER_TURN, call, result],
            [USER_TURN, call, result, answer, USER_TURN],
            [USER_TURN, call | {"tool_calls": call["tool_calls"] * 2}, result, result, USER_TURN],
        ]
        rendered = []
        for messages in conversations:
            for tools in ((),) if messages[0] is system else ((), (PROBE_TOOL,)):
                with suppress(TemplateError):  # a template need not take all
                    rendered.append(Conversation(self._split_prompt(messages, tools)[0], len(messages), bool(tools)))
        encoder, fences = self._encoder, find_fences(rendered, self._added)
        for mark in getattr(
            self.call_format, "marks", ()
        ):  # where a template's own rendering of calls cannot be followed
            if not any(f.startswith(mark) for f in fences) and not any(token in mark for token in self._added):
                fences.append(mark)
        return PlainFences(fences, encoder.replacement, ignore_case=encoder.ignores_case)

    def _drops_thinking(self, then: Rendering) -> bool:
        thought = self._thoughts.put(REPLY, _THOUGHT, REPLY_TEXT)
        try:
            return _THOUGHT not in self._apply([USER_TURN, thought, then], [PROBE_TOOL] if self._native else ())
        except TemplateError:
            return False  # it has no such turn

    def _verify(self, shape: Shape) -> str:
        """Return why turns of a shape cannot be appended; empty if they can."""
        try:
            self._frames.find(shape, native=self._native)
        except TemplateError as error:
            return str(error)
        return ""

    def _verify_rewriting(self, role: str) -> str:
        """Return why a conversation that goes on with a turn of a role cannot be rendered; empty if it can."""
        asked: Any = {"role": "user", "content": "q"}
        said: Any = {"role": "assistant", "content": REPLY_TEXT}
        if role == "tool":
            said |= {"content": "", "tool_calls": [make_probe_call("probe", {"a": "b"})]}
        try:
            self._render_conversation([asked, said, make_probe_result(0) if role == "tool" else asked], [PROBE_TOOL])
        except TemplateError as error:
            return str(error)
        return ""

    # -- the first prompt ------------------------------------------------------------------------------------------

    def _render_prompt(
        self, messages_json: str, tools_json: str, *, open_turn: bool = True
    ) -> tuple[tuple[int, ...], Counter[str]]:
        try:
            ids, attempts = self._render_conversation(json.loads(messages_json), json.loads(tools_json), open_turn)
        except TemplateError as error:
            raise TemplateError(
                f"{error}; change what the environment says first, or give another template with --chat_template FILE"
            ) from error
        return tuple(ids), attempts

    def _render_conversation(
        self, messages: Sequence[Any], tools: Sequence[Any], open_turn: bool = True
    ) -> tuple[list[int], Counter[str]]:
        try:
            parts, templated = self._split_prompt(messages, tools, open_turn=open_turn)
            texts = [text for text, _ in templated.texts[: 2 * len(messages) : 2]]
            placeholders.check_kept(parts, [{**m, "content": text} for m, text in zip(messages, texts, strict=True)])
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise TemplateError(f"the chat template cannot render the turns ({roles}): {error}") from error
        return self._encode(placeholders.fill_placeholders(parts, templated.texts), beginning=True)

    def _split_prompt(
        self, messages: Sequence[Any], tools: Sequence[Any], *, open_turn: bool = True
    ) -> tuple[list[Part], TemplatedMessages]:
        """Render a conversation with placeholders; return the parts, and the texts."""
        templated = TemplatedMessages(messages)
        native = self._native and bool(tools)
        shown = templated.schemas(tools) if native and self._learnt.shows_tools else []
        turns = templated.messages if native else fold_tools(templated.messages, self.call_format)
        if tools and not shown:
            before, after = self.call_format.format_instructions()
            lines = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
            turns = append_system(turns, before + templated.text(lines, "schema") + after)
        if not self._system:
            turns = fold_system(turns)
        put = self._thoughts.put
        turns = [put(t, t.pop("thought"), t["content"], t.pop("space")) if "thought" in t else t for t in turns]
        parts = placeholders.split_rendering(self._apply(turns, shown, prompt=open_turn))
        return parts, templated

    def _encode(self, pieces: Sequence[Piece], *, beginning: bool) -> tuple[list[int], Counter[str]]:
        """Encode pieces, no fence of others; return the ids, and the attempts to spell structure, by source."""
        pieces, fences = self._fences.break_in(pieces)
        ids, attempts = self._encoder.encode(pieces, beginning=beginning)
        return ids, attempts + fences
