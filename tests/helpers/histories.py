"""A conversation told twice: turn by turn by our renderer, and as a whole by the template. The two are compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats.choice import Learnt, learn_call_format
from agentrl.renderer.chat_template import list_words, render_template
from agentrl.renderer.template import TemplateRenderer
from agentrl.renderer.thoughts import ThoughtMarks, Thoughts, find_opened, learn_thoughts
from tests.helpers.families import build_byte_level

BOS, EOS = "<s>", "</s>"
SYSTEM, ASKED, ANSWER, LATER = "Be brief.", "What is the weather in Paris?", "It is sunny in all three.", "And tomorrow?"
_CONTROL = re.compile(
    r"<\|[^<>|\s{}'\"]{1,40}\|?>|<[\w/]{1,24}\|>|<｜[^<>｜{}]{1,40}｜>|\[/?[A-Z][A-Z_]{3,}\]|</?(?:s|think|tool_call)>"
    r"|<(?:start|end)_of_\w+>|<\|\"\|>|\]<\][^\[\]<>]{1,20}\[>\[|<seed:\w+>|\[e~\[|\]~!?b[\[\]]|<SPECIAL_\d+>|</?assistant>|<sep>"
)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _tool(name: str, **properties: str) -> dict[str, Any]:
    kinds = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": f"It is {name}.", "parameters": parameters}}


TOOLS = [_tool("search", text="string", limit="integer"), _tool("weather", city="string")]


def _call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(number: int, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": content}


def make_conversation(*, parallel: bool, thought: bool, beside: bool) -> list[dict[str, Any]]:
    """Make the conversation: a call, parallel calls where the template takes them, an answer, a second user turn."""
    pair = [_call(1, "weather", city="Paris"), _call(2, "weather", city="Lyon")][: 2 if parallel else 1]
    answers = [_result(1, "weather", "21 degrees"), _result(2, "weather", "23 degrees")][: len(pair)]
    first = {"role": "assistant", "content": "Let me look." if beside else "", "tool_calls": [_call(0, "search", text="Paris, now", limit=3)]}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": ASKED},
        first,
        _result(0, "search", "sunny\nand warm"),
        {"role": "assistant", "content": "", "tool_calls": pair},
        *answers,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": LATER},
        {"role": "assistant", "content": "It will rain."},
    ]
    if thought:
        for number, message in enumerate(m for m in messages if m["role"] == "assistant"):
            message["thought"] = f"Step {number} is clear."
    return messages


@dataclass
class Comparison:
    """What was found: ``differs`` says where and how; ``dropped``: equal but for earlier thoughts, which it drops."""

    why: str = ""
    exact: int = 0
    dropped: int = 0
    differs: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.why:
            return "none"
        return "differs" if self.differs else "but for thoughts" if self.dropped else "exact"


class History:
    """The two tellings of one template."""

    def __init__(self, source: str, *, thoughts: bool = False) -> None:
        self.source = source
        self.tokenizer = _make_tokenizer(source)
        known = list_words(self.tokenizer, None)
        self.words = {word: True for word in ("enable_thinking", "thinking") if thoughts and word in known}
        self.renderer = TemplateRenderer(self.tokenizer, words=self.words)
        added = {t.content for t in self.tokenizer.added_tokens_decoder.values()}
        self.learnt: Learnt = learn_call_format(lambda m, t: self.render(m, tools=t), added)
        self.thoughts: Thoughts = learn_thoughts(lambda m, p: self.render(m, prompt=p))
        self.stops = {self.tokenizer.convert_ids_to_tokens(i) for i in self.renderer.get_stop_token_ids()}

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        values = {**self.words, **self.tokenizer.special_tokens_map, "messages": list(messages), "tools": list(tools) or None}
        return render_template(self.source, {**values, "add_generation_prompt": prompt})

    def write(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        turns = [self.learnt.style.put(m) for m in messages]
        put = [
            self.thoughts.put({k: v for k, v in m.items() if k != "thought"}, m["thought"], m["content"]) if m.get("thought") else m
            for m in turns
        ]
        return self.render(put, TOOLS, prompt=prompt)

    def shuts_thoughts(self) -> bool:
        """Return True if the prompt says that nothing is thought, whatever its words say."""
        return self.write(make_conversation(parallel=False, thought=False, beside=False)[:2], prompt=True).rstrip().endswith(self.thoughts.marks.ending)

    def writes_beside(self, thought: bool) -> bool:
        """Return True if the template writes the text beside a call."""
        turns = make_conversation(parallel=False, thought=thought, beside=True)[:3]
        try:
            text, written = str(turns[2]["content"]), self.write(turns)
            return text in written and written.rindex(text) < written.rindex("Paris, now")
        except TemplateError:
            return False

    def compare(self, messages: Sequence[dict[str, Any]]) -> Comparison:
        found = Comparison()
        self.head = self.header(messages[:2])
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        ids: list[int] = self.renderer.render_ids(messages[: places[0]], tools=TOOLS)  # type: ignore[arg-type]
        for at, following in zip(places, [*places[1:], None], strict=True):
            expected = self.write(messages[:at], prompt=True)
            self._note(found, f"prompt of turn {at}", ids, expected)
            if found.differs:
                return found
            sampled = self._sample(messages, at, expected)
            turn = self.renderer.encode_turn(sampled)
            self._check_read(found, messages[at], ids, turn, at)
            if following is None:
                break
            ids = self.renderer.bridge_to_next_turn(ids, turn, messages[at + 1 : following], tools=TOOLS)  # type: ignore[arg-type]
        return found

    def _sample(self, messages: Sequence[dict[str, Any]], at: int, prompt: str) -> str:
        """Return what the model would sample, to have the template write what it does."""
        written, thought = self.write(messages[: at + 1]), str(messages[at].get("thought") or "")
        rest = written[len(prompt) :] if written.startswith(prompt) else self._find_turn(written, prompt, _last_line(messages[at - 1]), thought)
        ends = [m.end() for m in re.finditer("|".join(map(re.escape, self.stops)), rest)]
        if ends:
            return rest[: ends[-1]]
        if at + 1 == len(messages):
            return rest
        following = self.write(messages[: at + 2])  # the token that begins the next turn ends this one
        following = following[: following.rindex(_first_line(messages[at + 1]))]
        following = following[following.rindex(rest.strip()[-8:]) :]
        return rest + next((m[0] for m in re.finditer("|".join(map(re.escape, self.stops)), following)), "")

    def _find_turn(self, written: str, prompt: str, last: str, thought: str) -> str:
        """Return the last turn where the prompt before it is written otherwise: behind the beginning of a turn."""
        opened, tail = find_opened(prompt, [self.thoughts.marks]), prompt[prompt.rindex(last) + len(last) :]
        behind = written[written.rindex(last) + len(last) :]
        cuts = sorted({len(tail), 0, *(m.start() for m in re.finditer(r"<|\s+", tail)), *(m.end() for m in re.finditer(r"\s", tail))})
        start = next(tail[:cut] for cut in reversed(cuts) if behind.startswith(tail[:cut]))
        rest = behind[len(start) :]
        if opened and not start.rstrip().endswith(opened[0].opening):
            mark, space = opened
            if mark.ending not in rest:
                return thought + space + mark.ending + (mark.lead or space) + rest
            return rest.lstrip().removeprefix(mark.opening)
        return rest

    def header(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return what the template writes to begin the model's turn."""
        closed, opened = self.write(messages), self.write(messages, prompt=True)
        return opened[len(_common(closed, opened)) :]

    def _note(self, found: Comparison, what: str, ids: Sequence[int], expected: str) -> None:
        own = self.renderer.decode(ids)
        if list(ids) == self.tokenizer.backend_tokenizer.encode(expected, add_special_tokens=False).ids:
            found.exact += 1
        elif self._equals_but_for_thoughts(own, expected):
            found.dropped += 1
        else:
            found.differs.append(f"{what}: {_show_difference(own, expected)}")

    def _equals_but_for_thoughts(self, own: str, expected: str) -> bool:
        """Return True if the template would have it like this, had it not dropped earlier thoughts."""
        opening, ending = (re.escape(mark) for mark in self.thoughts.marks[:2])
        pattern, last = "", 0
        header = re.escape(self.head)
        for gap in re.finditer(rf"\s*(?:{opening}(?:(?!{opening}).)*?)?{ending}\s*(?:{header})?", own, flags=re.S):
            kept = re.escape(gap[0].strip())
            pattern += re.escape(own[last : gap.start()]) + rf"\s*(?:{kept}|(?:{opening})?\s*(?:{ending})?)\s*"
            last = gap.end()
        return re.fullmatch(pattern + re.escape(own[last:]), expected, re.S) is not None

    def _check_read(self, found: Comparison, message: Mapping[str, Any], prompt: Sequence[int], turn: Sequence[int], at: int) -> None:
        reply = self.renderer.parse_response(turn, prompt_ids=list(prompt), tools=TOOLS)
        calls = [{"name": c.name, "arguments": dict(c.arguments)} for c in reply.tool_calls if c.error is None]
        wanted = [c["function"] for c in message.get("tool_calls", ())]
        if calls != wanted or len(reply.tool_calls) != len(wanted):
            found.differs.append(f"turn {at} is read as the calls {calls}")
        elif message["content"] not in (reply.text.strip(), reply.thought.strip()):
            found.differs.append(f"turn {at} is read as the text {reply.text!r}")
        elif message.get("thought") and message["thought"] in self.renderer.decode(turn) and reply.thought.strip() != message["thought"]:
            found.differs.append(f"turn {at} is read as the thought {reply.thought!r}")


def compare_history(source: str) -> tuple[Comparison, ...]:
    """Compare the two tellings, without thoughts and with them where the template has a field for them."""
    try:
        history = History(source)
    except TemplateError as error:
        return (Comparison(why=f"it cannot be followed: {error}"),)
    if history.learnt.form is None or not history.renderer.takes_tools:
        return (Comparison(why=history.learnt.why or "it takes no results, or shows no tools"),)
    results = [_compare(history, thought=False)]
    if history.thoughts.field:
        thinking = History(source, thoughts=True)
        if not thinking.shuts_thoughts():
            results.append(_compare(thinking, thought=True))
    return tuple(results)


def _compare(history: History, *, thought: bool) -> Comparison:
    parallel = "two calls in one turn" not in history.learnt.limits
    try:
        return history.compare(make_conversation(parallel=parallel, thought=thought, beside=history.writes_beside(thought)))
    except TemplateError as error:
        return Comparison(differs=[f"refused: {error}"])


def _make_tokenizer(source: str) -> Any:
    values, named = {"bos_token": BOS, "eos_token": EOS, "add_generation_prompt": False}, False
    try:
        rendered = render_template(
            source, {**values, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
        )
    except TemplateError:
        rendered = ""
        try:
            render_template(source, {**values, "messages": [{"role": "user", "content": "q"}], "tools": TOOLS})
        except TemplateError:
            pass
        else:
            named = True
    control = dict.fromkeys([BOS, EOS, *_CONTROL.findall(source), *_CONTROL.findall(rendered)])
    ends = [m[0] for m in _CONTROL.finditer(rendered) if m.end() == len(rendered.rstrip())]
    bpe = build_byte_level([AddedToken(c, special=True, normalized=False) for c in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=ends[0] if ends else EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = {"default": CHATML, "tool_use": source} if named else source
    return tokenizer


def _first_line(message: Mapping[str, Any]) -> str:
    return str(message["content"]).split("\n")[0]


def _last_line(message: Mapping[str, Any]) -> str:
    return str(message["content"]).split("\n")[-1]


def _common(one: str, other: str) -> str:
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))]


def _show_difference(own: str, expected: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(own, expected, strict=False)) if a != b), min(len(own), len(expected)))
    start = max(at - 30, 0)
    return f"{own[start : at + 60]!r} instead of {expected[start : at + 60]!r}"
