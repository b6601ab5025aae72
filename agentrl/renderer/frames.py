"""Frames: what a template appends to a model's turn, learnt once for each shape of turns on a short conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.errors import TemplateError
from agentrl.renderer import placeholders
from agentrl.renderer.call_formats import CallFormat
from agentrl.renderer.placeholders import Part, Rendering, TemplatedMessages
from agentrl.renderer.probe_turns import PROBE_TOOL, REPLY, REPLY_TEXT, USER_TURN, Render, make_probe_call
from agentrl.renderer.role_fallbacks import fold_tools
from agentrl.renderer.turn_ends import cut_closing
from agentrl.types import JsonSchema

Shape = tuple[tuple[str, bool, bool], ...]  # of each message: its role, whether it has a content and a name


@dataclass(frozen=True, slots=True)
class Frame:
    """The text that the template appends to a model's turn: its rest, messages, the next turn's beginning."""

    turn_suffix: str  # up to the first text: "<|im_end|>\n<|im_start|>user\n"
    parts: tuple[Part, ...]


class FrameLearner:
    """Learns the frames of a template, verified to leave the tokens before as they are.

    Args:
        added: the tokens that are structure, by their text.
        closing: the text behind a model's turn.
        call_format: the form of its calls.
    """

    def __init__(self, render: Render, added: Mapping[str, int], closing: str, call_format: CallFormat) -> None:
        self._render, self._added, self._closing, self._call_format = render, added, closing, call_format
        self._learnt: dict[tuple[Shape, bool], Frame] = {}

    def find(self, shape: Shape, *, native: bool) -> Frame:
        """Return the frame of a shape, learnt at the first time.

        Args:
            native: tools are offered, and the template writes calls and results itself.

        Raises:
            TemplateError: turns of that shape cannot be appended.
        """
        if (key := (shape, native)) not in self._learnt:
            try:
                self._learnt[key] = self._learn_stable(shape) if native else self.learn(shape, (), native=False)
            except TemplateError as error:
                roles = ", ".join(role for role, _, _ in shape)
                raise TemplateError(
                    f"the chat template cannot append the turns ({roles}) to a conversation: {error}; "
                    "give a template that only appends with --chat_template FILE"
                ) from error
        return self._learnt[key]

    def _learn_stable(self, shape: Shape) -> Frame:
        """Learn a frame; where the template would move the tools, as Mistral's do, they stay where they were shown."""
        try:
            return self.learn(shape, [PROBE_TOOL])
        except TemplateError:
            return self.learn(shape, ())

    def learn(self, shape: Shape, tools: Sequence[JsonSchema], *, native: bool = True) -> Frame:
        """Learn a frame behind a text, or behind calls. Raises TemplateError: it cannot be."""
        messages = [{"role": r, "content": "t" * full, "name": "n" * named} for r, full, named in shape]
        turns = TemplatedMessages(messages).messages
        new = turns if native else fold_tools(turns, self._call_format)
        calls = [make_probe_call(m.get("name", "t"), {"a": REPLY_TEXT}, i) for i, m in enumerate(turns)]
        errors: list[TemplateError] = []
        asking = REPLY | {"tool_calls": calls}
        stop = next(iter(getattr(self._call_format, "stops", ())), self._closing)
        # results stand behind calls, in some templates behind calls without a text, where a turn may have another end
        replies = [(REPLY, self._closing)]
        behind = [(asking, self._closing), (asking | {"content": ""}, stop)]
        for reply, closing in behind + replies if native and "tool" in {r for r, _, _ in shape} else replies + behind:
            try:
                parts = placeholders.split_rendering(closing + self._render_appended(reply, new, tools))
                placeholders.check_kept(parts, messages)
                parts = placeholders.split_ids(parts, messages)
                return Frame(str(parts[0]), tuple(parts[1:]))
            except TemplateError as error:
                errors.append(error)
        raise errors[0]

    def _render_appended(self, reply: Rendering, new: Sequence[Rendering], tools: Sequence[JsonSchema]) -> str:
        """Return the text that the template adds behind the model's turn. Raises if it rewrites the turns before."""
        before = self._render([USER_TURN], tools)
        after = self._render([USER_TURN, reply, *new], tools, prompt=True)
        last, appended = (t.rpartition(REPLY_TEXT)[2] for t in (self._render([USER_TURN, reply], tools), after))
        closing = cut_closing(last, appended, self._added)
        cut_closing(before, after, self._added)
        if not appended.startswith(closing):
            raise TemplateError("it rewrites the turns before")
        return appended[len(closing) :]
