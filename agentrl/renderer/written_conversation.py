"""A conversation that somebody wrote, in a model's tokens: each turn as the model would have sampled it.

    prompt      what the template writes before the first turn
    model       a turn, with the token that stops it
    env         what the template writes behind it

It goes the way of a rollout: prompts, observations and histories are rendered by the same methods of the renderer, and
a turn is proven by reading it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unicodedata import normalize

from agentrl.errors import TemplateError, UserError
from agentrl.renderer.template import TemplateRenderer
from agentrl.renderer.thoughts import find_opened
from agentrl.types import THOUGHT_MARKS, Author, JsonSchema, Message, Reply, strip_thoughts

_NEXT: Message = {"role": "user", "content": "And then?"}  # behind the last turn, so that the template ends it


class UnreadableTurn(UserError):
    """A turn that the model could not have said so: read back, it is another one."""


@dataclass
class WrittenConversation:
    """The tokens of a conversation so far, by author; the last segment before a turn ends where the model goes on.

    Args:
        thought: what the model thinks where the template opened a thought, and the turn has none.
    """

    renderer: TemplateRenderer
    tools: Sequence[JsonSchema] = ()
    thought: str = ""
    segments: list[tuple[Author, list[int]]] = field(default_factory=list)
    history: list[Message] = field(default_factory=list)

    def begin(self, prompt: Sequence[Message]) -> None:
        """Render the messages before the first turn. Raises TemplateError."""
        self.history = list(prompt)
        self.segments = [("prompt", self.renderer.render_ids(prompt, tools=self.tools))]

    @property
    def context(self) -> list[int]:
        """Return the tokens that the model goes on from."""
        begin = max(at for at, (author, _) in enumerate(self.segments) if author == "prompt")
        return [i for _, ids in self.segments[begin:] for i in ids]

    def add_turn(self, reply: Message, then: Sequence[Message] = ()) -> list[int]:
        """Add a turn of the model's, up to the token that stops it, and the messages that answer it.

        Returns:
            The turn's tokens.

        Raises:
            TemplateError: the template cannot write what comes behind it.
        """
        context = self.context
        turn, ended = self._encode(reply, context)
        self.segments.append(("model", turn))
        self.history += [reply, *then]
        if then:
            self._observe(context, turn, then, ended=ended)
        elif not ended:
            turn.append(self._find_end(context, turn))
        return turn

    def read_back(self, turn: Sequence[int], prompt: Sequence[int], reply: Message) -> Reply:
        """Read a turn as a rollout does. Raises UnreadableTurn if it is not what was written."""
        self._refuse_control_tokens(reply)
        read = self.renderer.parse_response(turn, prompt_ids=prompt, tools=self.tools)
        for call in read.tool_calls:
            if call.error is not None:
                raise UnreadableTurn(f"its call of {call.name or 'a tool'} cannot be read back: {call.error}")
        asked, found = _list_calls(reply), [(c.name, dict(c.arguments)) for c in read.tool_calls]
        if asked != found:
            raise UnreadableTurn(f"its calls {_shorten(asked)} are read back as {_shorten(found)}")
        said, heard = strip_thoughts(reply["content"]).strip(), read.text.strip()
        if _fold(said) != _fold(heard):
            raise UnreadableTurn(f"its text {_shorten(said)} is read back as {_shorten(heard)}")
        return read

    def _refuse_control_tokens(self, reply: Message) -> None:
        """Raise UnreadableTurn for a text that spells a control token: the model would be taught to write it."""
        texts = json.dumps([reply["content"], _list_calls(reply)], ensure_ascii=False)
        marks = self.renderer.thought_marks
        allowed = {marks.opening, marks.ending, *THOUGHT_MARKS}
        for token in self.renderer.control_tokens:
            if token.strip() and token in texts and token not in allowed:
                raise UnreadableTurn(f"its text spells the control token {token!r}")

    def _encode(self, reply: Message, context: list[int]) -> tuple[list[int], bool]:
        """Encode a turn up to its first stop token; return whether there is one."""
        stops = set(self.renderer.get_stop_token_ids())
        turn = self.renderer.encode_turn(self._write(reply, context))
        end = next((at for at, i in enumerate(turn) if i in stops), None)
        return (turn, False) if end is None else (turn[: end + 1], True)

    def _write(self, reply: Message, context: list[int]) -> str:
        """Write a turn as the template does; by the call format alone where the template moves what is before it.

        A thought that the prompt opens is ended, also by a template that has no field for one.
        """
        renderer, turn, found = self.renderer, "", ""
        before = renderer.decode(context)
        try:
            prompt = renderer.decode(renderer.render_ids(self.history, tools=self.tools))
            whole = renderer.render_closed_ids([*self.history, reply], tools=self.tools)
            _, found, turn = renderer.decode(whole).partition(prompt)
        except TemplateError:
            pass
        if not found:
            calls = [renderer.call_format.format_call(c["function"]) for c in reply.get("tool_calls", ())]
            turn = "".join([reply["content"], *calls])
        marks = renderer.thought_marks
        if find_opened(before, [marks]):
            before, opened, rest = turn.partition(marks.opening)
            turn = rest if opened and not before.strip() else turn
            if marks.ending not in turn:
                turn = f"{self.thought}\n{marks.ending}\n\n{turn}"
        return turn

    def _observe(self, context: list[int], turn: list[int], then: Sequence[Message], *, ended: bool) -> None:
        anew = self.renderer.rewrite_history(
            context, turn, self.history[: len(self.history) - len(then)], then, tools=self.tools
        )
        if anew is not None:
            if not ended:
                turn.append(self._find_end(context, turn))
            self.segments.append(("prompt", list(anew.history)))
            self.segments += [("env", list(anew.observation))] if anew.observation else []
            return
        length = len(context) + len(turn)
        after = self.renderer.bridge_to_next_turn(context, turn, then, tools=self.tools)[length:]
        if not ended and after and after[0] in self.renderer.get_stop_token_ids():  # what is behind ends this one
            turn.append(after.pop(0))
        self.segments.append(("env", after))

    def _find_end(self, context: list[int], turn: list[int]) -> int:
        """Find the token that ends a turn: what the template writes behind one, or else its first stop token."""
        stops = self.renderer.get_stop_token_ids()
        try:
            length = len(context) + len(turn)
            after = self.renderer.bridge_to_next_turn(context, turn, [_NEXT], tools=self.tools)[length:]
        except TemplateError:
            return stops[0]
        return after[0] if after and after[0] in stops else stops[0]


def _fold(text: str) -> str:
    """Return a text without what a tokenizer's normalizer may change: its case, and forms of one character."""
    return normalize("NFKC", text).casefold()


def _list_calls(reply: Message) -> list[tuple[str, dict[str, Any]]]:
    calls: Sequence[Mapping[str, Any]] = reply.get("tool_calls", ())
    return [(c["function"]["name"], dict(c["function"]["arguments"])) for c in calls]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
