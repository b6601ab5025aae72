"""A conversation told twice: turn by turn by our renderer, and as a whole by the template. The two are compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats.choice import Learnt, learn_call_format
from agentrl.renderer.chat_template import find_shared_beginning, list_words, render_chat, render_template
from agentrl.renderer.template import TemplateRenderer
from agentrl.renderer.thoughts import ThoughtMarks, Thoughts, find_opened, learn_thoughts
from agentrl.settings.template import History as HistoryMode
from tests.helpers.families import build_byte_level

BOS, EOS = "<s>", "</s>"
SYSTEM, ASKED = "Be brief.", "What is the weather in Paris?"
ANSWER, LATER = "It is sunny in all three.", "And tomorrow?"
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
    first = {
        "role": "assistant",
        "content": "Let me look." if beside else "",
        "tool_calls": [_call(0, "search", text="Paris, now", limit=3)],
    }
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
    """A comparison's findings: ``differs`` says where and how; ``dropped``: equal but for earlier thoughts, which
    it drops; ``rewritten``: it rewrites what it wrote itself, and what is appended is equal.
    """

    why: str = ""
    exact: int = 0
    dropped: int = 0
    rewritten: int = 0
    anew: bool = False  # with template.history as_template
    differs: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        return [self.why] if self.why else self.differs

    @property
    def verdict(self) -> str:
        if self.why:
            return "no form"
        if self.differs or self.rewritten:
            return "differs" if self.differs else "appended"
        if self.anew:
            return "as template"
        return "but for thoughts" if self.dropped else "exact"


class History:
    """The two tellings of one template."""

    def __init__(self, source: str, *, thoughts: bool = False, mode: HistoryMode = "as_sampled") -> None:
        self.source = source
        self.tokenizer = _make_tokenizer(source)
        known = list_words(self.tokenizer, None)
        self.words: dict[str, Any] = {
            word: True for word in ("enable_thinking", "thinking") if thoughts and word in known
        }
        self.renderer = TemplateRenderer(self.tokenizer, words=self.words, history=mode)
        added = {t.content for t in self.tokenizer.added_tokens_decoder.values()}
        self.learnt: Learnt = learn_call_format(lambda m, t: self.render(m, tools=t), added)
        self.thoughts: Thoughts = learn_thoughts(lambda m, p: self.render(m, prompt=p))
        self.stops = {self.tokenizer.convert_ids_to_tokens(i) for i in self.renderer.get_stop_token_ids()}

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        return render_chat(self.tokenizer, None, messages, tools, add_generation_prompt=prompt, words=self.words)

    def write(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        turns = [self.learnt.style.put(m) for m in messages]
        put = [
            self.thoughts.put({k: v for k, v in m.items() if k != "thought"}, m["thought"], m["content"])
            if m.get("thought")
            else m
            for m in turns
        ]
        if self.learnt.shows_tools:
            return self.render(put, TOOLS, prompt=prompt)
        before, after = self.renderer.call_format.format_instructions()
        lines = "\n".join(json.dumps(t, ensure_ascii=False) for t in TOOLS)
        return self.render([put[0] | {"content": f"{SYSTEM}\n\n{before}{lines}{after}"}, *put[1:]], prompt=prompt)

    def shuts_thoughts(self) -> bool:
        """Return True if the prompt says that nothing is thought, whatever its words say."""
        return (
            self.write(make_conversation(parallel=False, thought=False, beside=False)[:2], prompt=True)
            .rstrip()
            .endswith(self.thoughts.marks.ending)
        )

    def writes_beside(self, thought: bool) -> bool:
        """Return True if the template writes the text beside a call."""
        turns = make_conversation(parallel=False, thought=thought, beside=True)[:3]
        try:
            text, written = str(turns[2]["content"]), self.write(turns)
            at, call = written.rfind(text), written.rfind("Paris, now")
            between = written[at:call] if 0 <= at < call else ""
            return bool(between) and not any(stop in between for stop in self.stops)
        except TemplateError:
            return False

    def compare(self, messages: Sequence[dict[str, Any]]) -> Comparison:
        """Compare the prompt of each of the model's turns, and what is read in each turn."""
        found = Comparison()
        self.head = self.header(messages[:2])
        ids: list[int] = self.renderer.render_ids(messages[:2], tools=TOOLS)  # type: ignore[arg-type]
        before, appended = "", self.renderer.decode(ids)
        for at in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
            expected = self.write(messages[:at], prompt=True)
            self._note(found, f"prompt of turn {at}", ids, expected, before, appended)
            if found.differs:
                return found
            turn = self.renderer.encode_turn(self._sample(messages, at, expected))
            self._check_read(found, messages[at], ids, turn, at)
            end = next((i for i, m in enumerate(messages) if i > at and m["role"] == "assistant"), len(messages))
            if end < len(messages):
                prompt = [*ids, *turn]
                past: Any = [_as_stored(m) for m in messages[: at + 1]]
                new: Any = messages[at + 1 : end]
                anew = self.renderer.rewrite_history(ids, turn, past, new, tools=TOOLS)
                if anew is not None:
                    ids, before, appended = [*anew.history, *anew.observation], "", ""
                    continue
                ids = self.renderer.bridge_to_next_turn(ids, turn, new, tools=TOOLS)
                before, appended = self.renderer.decode(prompt[:-1]), self.renderer.decode(ids[len(prompt) :])
        return found

    def _sample(self, messages: Sequence[dict[str, Any]], at: int, prompt: str) -> str:
        """Return what the model would sample, to have the template write what it does."""
        written, thought = self.write(messages[: at + 1]), str(messages[at].get("thought") or "")
        rest = (
            written[len(prompt) :]
            if written.startswith(prompt)
            else self._find_turn(written, prompt, _last_line(messages[at - 1]), thought)
        )
        said = [str(messages[at]["content"]), *re.findall("Paris, now|Paris|Lyon", rest)]
        if not any(said):
            raise TemplateError(f"it writes turn {at} without what was said")
        since = max(rest.rfind(text) for text in said if text)
        if stop := re.compile("|".join(map(re.escape, self.stops))).search(rest, since):
            return rest[: stop.end()]
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
        head = next((self.head[:cut] for cut in _list_cuts(self.head) if self.head[:cut] in behind), "")
        start = next(tail[:cut] for cut in _list_cuts(tail) if behind.startswith(tail[:cut]))
        if head and not start.endswith(head):  # what stands before it is written otherwise, too
            start = behind[: behind.index(head) + len(head)]
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
        return opened[len(find_shared_beginning(closed, opened)) :]

    def _note(
        self, found: Comparison, what: str, ids: Sequence[int], expected: str, before: str, appended: str
    ) -> None:
        own = self._end_alike(self.renderer.decode(ids))
        if list(ids) == self.tokenizer.backend_tokenizer.encode(expected, add_special_tokens=False).ids:
            found.exact += 1
        elif re.fullmatch(self._make_pattern(own), expected, re.S):
            found.dropped += 1
        elif expected.endswith(appended) and (
            found.rewritten or not re.match(self._make_pattern(before), expected, re.S)
        ):
            found.rewritten += 1
        else:
            marks = self.thoughts.marks
            shown = _show_difference(_cut_thoughts(own, marks), _cut_thoughts(expected, marks))
            found.differs.append(f"{what}: {shown}")

    def _make_pattern(self, own: str) -> str:
        """Make the pattern of what the template would write, did it keep or drop earlier thoughts."""
        opening, ending = (re.escape(mark) for mark in self.thoughts.marks[:2])
        pattern, last = "", 0
        header, mark = self.head, self.thoughts.marks.ending
        overlap = next((i for i in range(len(header), 0, -1) if mark.endswith(header[:i])), 0)  # a message of its own
        header = re.escape(header[overlap:])
        for gap in re.finditer(rf"\s*(?:{opening}(?:(?!{opening}).)*?)?{ending}\s*(?:{header})?", own, flags=re.S):
            kept = re.escape(gap[0].strip())
            pattern += re.escape(own[last : gap.start()]) + rf"\s*(?:{kept}|(?:{opening})?\s*(?:{ending})?)\s*"
            last = gap.end()
        return pattern + re.escape(own[last:])

    def _end_alike(self, text: str) -> str:
        """End all turns as earlier ones: some templates end the last one with a token of its own, which was sampled."""
        user, reply = {"role": "user", "content": "q"}, {"role": "assistant", "content": "qzsaidq"}
        last = self.render([user, reply]).rpartition("qzsaidq")[2]
        earlier = self.render([user, reply, user]).rpartition("qzsaidq")[2]
        if earlier.startswith(last) or not (own := _CONTROL.match(last)) or not (other := _CONTROL.match(earlier)):
            return text
        return text.replace(own[0], other[0])

    def _check_read(
        self, found: Comparison, message: Mapping[str, Any], prompt: Sequence[int], turn: Sequence[int], at: int
    ) -> None:
        reply = self.renderer.parse_response(turn, prompt_ids=list(prompt), tools=TOOLS)
        calls = [{"name": c.name, "arguments": dict(c.arguments)} for c in reply.tool_calls if c.error is None]
        wanted = [c["function"] for c in message.get("tool_calls", ())]
        if calls != wanted or len(reply.tool_calls) != len(wanted):
            found.differs.append(f"turn {at} is read as the calls {calls}")
        elif message["content"] not in (reply.text.strip(), reply.thought.strip()):
            found.differs.append(f"turn {at} is read as the text {reply.text!r}")
        elif (
            message.get("thought")
            and message["thought"] in self.renderer.decode(turn)
            and reply.thought.strip() != message["thought"]
        ):
            found.differs.append(f"turn {at} is read as the thought {reply.thought!r}")


def compare_history(source: str) -> tuple[Comparison, ...]:
    """Compare the two tellings, without thoughts and with them where the template has a field for them."""
    try:
        history = History(source)
    except TemplateError as error:
        return (Comparison(why=f"it cannot be followed: {error}"),)
    if history.learnt.form is None:
        return (Comparison(why=history.learnt.why),)
    results = [_compare(history, thought=False)]
    if history.thoughts.field:
        thinking = History(source, thoughts=True)
        if not thinking.shuts_thoughts():
            results.append(_compare(thinking, thought=True))
    return tuple(
        _compare_anew(source, thought=bool(n)) or found if found.differs or found.rewritten else found
        for n, found in enumerate(results)
    )


def _compare_anew(source: str, *, thought: bool) -> Comparison | None:
    """Compare where the conversation is written anew each turn; None if that differs, too."""
    found = _compare(History(source, thoughts=thought, mode="as_template"), thought=thought)
    found.anew = True
    return None if found.differs or found.rewritten else found


def _compare(history: History, *, thought: bool) -> Comparison:
    parallel = "two calls in one turn" not in history.learnt.limits
    try:
        return history.compare(
            make_conversation(parallel=parallel, thought=thought, beside=history.writes_beside(thought))
        )
    except TemplateError as error:
        return Comparison(differs=[f"refused: {error}"])


def _as_stored(message: Mapping[str, Any]) -> Any:
    """Return a message as an episode keeps it, its thought in its content."""
    kept = {k: v for k, v in message.items() if k != "thought"}
    thought = message.get("thought")
    return kept | {"content": f"<think>\n{thought}\n</think>\n\n{message['content']}"} if thought else kept


def _make_tokenizer(source: str) -> Any:
    values, named = {"bos_token": BOS, "eos_token": EOS, "add_generation_prompt": False}, False
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    try:
        rendered = render_template(source, {**values, "messages": turns, "tools": None})
        longer = render_template(source, {**values, "messages": [*turns, turns[0]], "tools": None})
    except TemplateError:
        rendered = longer = ""
        try:
            render_template(source, {**values, "messages": [{"role": "user", "content": "q"}], "tools": TOOLS})
        except TemplateError:
            pass
        else:
            named = True
    control = dict.fromkeys(
        [BOS, EOS, *_CONTROL.findall(source), *_CONTROL.findall(CHATML), *_CONTROL.findall(longer + rendered)]
    )
    ends = [m[0] for m in _CONTROL.finditer(rendered) if m.end() == len(rendered.rstrip())]
    ends += [c for c in control if "eos" in c]
    bpe = build_byte_level([AddedToken(c, special=True, normalized=False) for c in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=ends[0] if ends else EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = {"default": CHATML, "tool_use": source} if named else source
    return tokenizer


def _list_cuts(text: str) -> list[int]:
    """List where a text may be cut, the last first: beside tags and white space."""
    inner = (place for m in re.finditer(r"<|\s", text) for place in (m.start(), m.end() if m[0] != "<" else m.start()))
    return sorted({len(text), 0, *inner}, reverse=True)


def _first_line(message: Mapping[str, Any]) -> str:
    return str(message["content"]).split("\n")[0]


def _last_line(message: Mapping[str, Any]) -> str:
    return str(message["content"]).split("\n")[-1]


def _cut_thoughts(text: str, marks: ThoughtMarks) -> str:
    opening, ending = re.escape(marks.opening), re.escape(marks.ending)
    return re.sub(rf"\s*(?:{opening}(?:(?!{opening}).)*?)?{ending}\s*", "", text, flags=re.S)


def _show_difference(own: str, expected: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(own, expected, strict=False)) if a != b), min(len(own), len(expected)))
    start = max(at - 30, 0)
    return f"{own[start : at + 60]!r} instead of {expected[start : at + 60]!r}"
