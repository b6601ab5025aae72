"""Call formats learnt from templates that nobody has seen: invented grammars, each in a line or two of Jinja."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from agentrl.renderer.call_formats import hermes
from agentrl.renderer.call_formats.choice import Learnt, learn_call_format
from agentrl.renderer.call_formats.reader import LearntFormat
from agentrl.renderer.chat_template import render_template
from agentrl.renderer.template import TemplateRenderer
from agentrl.types import Message, ToolCall
from tests.helpers.families import family

TURNS = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% if m.tool_calls %}CALLS{% endif %}[end]\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}"
PAIRS = "{% for k, v in f.arguments.items() %}PAIR{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"

GRAMMARS: dict[str, str] = {
    "tags": EACH.replace("CALL", '<call>{"tool": "{{ f.name }}", "with": {{ f.arguments | tojson }}}</call>'),
    "hermes": EACH.replace(
        "CALL", '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n'
    ),
    "list": "<all>{{ '[' }}"
    + EACH.replace(
        "CALL",
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{{ '' if loop.last else ', ' }}",
    )
    + "{{ ']' }}</all>",
    "named key": EACH.replace("CALL", '<do>{"{{ f.name }}": {{ f.arguments | tojson }}}</do>'),
    "text in JSON": EACH.replace(
        "CALL", '<f>{"function": {"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson | tojson }}}}</f>'
    ),
    "heads": EACH.replace("CALL", "<|call|>{{ f.name }}<|id|>{{ c.id }}<|args|>{{ f.arguments | tojson }}"),
    "counted": "<|calls|>"
    + EACH.replace("CALL", "<|one|>fn.{{ f.name }}:{{ loop.index0 }}<|a|>{{ f.arguments | tojson }}<|z|>")
    + "<|over|>",
    "xml": EACH.replace(
        "CALL", f"<use {{{{ f.name }}}}>\n{PAIRS.replace('PAIR', f'<p {{{{ k }}}}>{VALUE}</p>' + chr(10))}</use>\n"
    ),
    "typed xml": EACH.replace(
        "CALL",
        '<go name="{{ f.name }}">'
        + PAIRS.replace("PAIR", '<v key="{{ k }}" text="{{ v is string }}">' + VALUE + "</v>")
        + "</go>",
    ),
    "python": "<py>["
    + EACH.replace(
        "CALL",
        "{{ f.name }}("
        + PAIRS.replace("PAIR", "{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}")
        + "){{ '' if loop.last else ', ' }}",
    )
    + "]</py>",
    "own quotes": EACH.replace(
        "CALL",
        "<!go>{{ f.name }}{{ '{' }}"
        + PAIRS.replace(
            "PAIR", "{{ k }}:{{ '<%>' ~ v ~ '<%>' if v is string else v | tojson }}{{ '' if loop.last else ',' }}"
        )
        + "{{ '}' }}<go!>",
    ),
    "bare": '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}',
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
            },
        },
    }
    for name in ("search", "add")
]


@cache
def learn(grammar: str, *, text_arguments: bool = False) -> Learnt:
    source = TURNS.replace("CALLS", grammar)
    if text_arguments:
        source = source.replace("f.arguments | tojson", "(f.arguments + '')")

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        return render_template(source, {"messages": list(messages), "tools": list(tools) or None})

    return learn_call_format(render)


def show(calls: Sequence[ToolCall]) -> list[Any]:
    return [c.error or (c.name, dict(c.arguments)) for c in calls]


@pytest.mark.parametrize("name", GRAMMARS)
def test_an_invented_form_is_learnt_written_and_read(name: str) -> None:
    learnt = learn(GRAMMARS[name])
    assert learnt.form is not None, learnt.why
    assert (learnt.form is hermes) == (name == "hermes")
    arguments = {"text": "a word", "n": 7, "o": {"k": [1, None, "v"]}}
    calls = [{"name": "search", "arguments": arguments}, {"name": "add", "arguments": {}}]
    text = "\n".join(map(learnt.form.format_call, calls[:1] if name == "bare" else calls))
    reply = learnt.form.parse(text if name == "bare" else f"Let me see. {text}", tools=TOOLS)
    assert show(reply.tool_calls) == [(c["name"], c["arguments"]) for c in (calls[:1] if name == "bare" else calls)]
    assert reply.content == ("" if name == "bare" else "Let me see.")
    assert all(c.span is not None for c in reply.tool_calls)


def test_arguments_that_a_template_takes_as_text() -> None:
    learnt = learn(GRAMMARS["tags"], text_arguments=True)
    assert learnt.form is not None
    assert learnt.style.text_arguments


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("", "writes no tool calls"),
        (EACH.replace("CALL", "<c>{{ f.name }}</c>"), "leaves out names or arguments"),
        (EACH.replace("CALL", "{{ f.name }} {{ f.arguments.values() | join(' ') }}"), "leaves out"),
        (EACH.replace("CALL", "<c>{{ f.arguments | tojson }}{{ f.name }}</c>"), "cannot be followed"),
        (EACH.replace("CALL", "<c>{{ f.name }} " + PAIRS.replace("PAIR", "{{ k }} {{ v }} ") + "</c>"), "white space"),
        (
            EACH.replace("CALL", '<c>{"name": "{{ f.name }}", "arguments": {"a": 1}}</c>'),
            "leaves out names or arguments",
        ),
    ],
)
def test_a_form_that_cannot_be_followed_is_not_used(grammar: str, why: str) -> None:
    learnt = learn(grammar)
    assert learnt.form is None
    assert why in learnt.why


def test_an_id_and_a_number_are_each_call_s_own() -> None:
    calls = [{"name": "search", "arguments": {"n": i}} for i in range(2)]
    listed, counted = learn(GRAMMARS["list"]).form, learn(GRAMMARS["counted"]).form
    assert isinstance(listed, LearntFormat)
    assert isinstance(counted, LearntFormat)
    ids = re.findall(r'"id": "([a-zA-Z0-9]{9})"', listed.format_calls(calls))
    assert len(set(ids)) == 2
    assert '"id": "mineABC12"' in listed.format_call({**calls[0], "id": "mineABC12"})
    written = counted.format_calls(calls)
    assert re.findall(r"fn\.search:(\d)", written) == ["0", "1"]
    assert [c.id for c in counted.parse(written, tools=TOOLS).tool_calls] == ["fn.search:0", "fn.search:1"]


def test_a_template_that_shows_no_tools_is_followed_in_its_own_form() -> None:
    source = TURNS.removeprefix("{{ tools | tojson if tools else '' }}").replace("CALLS", GRAMMARS["heads"])
    own = TemplateRenderer(family("qwen2.5").tokenizer, source.replace("[end]", "<|im_end|>"))
    prompt = own.tokenizer.decode(own.render_ids([{"role": "user", "content": "q"}], tools=TOOLS))
    assert "<|call|>TOOL<|id|>" in prompt
    assert "<tool_call>" not in prompt
    assert "described in the system prompt" in own.verdict()


def test_a_token_that_ends_turns_with_calls_alone_is_a_stop() -> None:
    source = TURNS.replace("CALLS{% endif %}[end]", "CALLS<|box_end|>{% else %}<|im_end|>{% endif %}")
    own = TemplateRenderer(family("qwen2.5").tokenizer, source.replace("CALLS", GRAMMARS["counted"]))
    ends = [own.tokenizer.convert_tokens_to_ids(t) for t in ("<|box_end|>", "<|im_end|>")]
    assert set(ends) <= set(own.get_stop_token_ids())
    result: Message = {"role": "tool", "content": "RESULT", "tool_call_id": "1", "name": "search"}
    ids = own.bridge_to_next_turn([], [ends[0]], [result], tools=TOOLS)
    assert own.tokenizer.decode(ids).startswith("<|box_end|>[tool]RESULT")


def test_a_template_that_shows_no_tools_has_no_form() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    learnt = learn_call_format(lambda messages, tools: render_template(source, {"messages": list(messages)}))
    assert (learnt.form, learnt.why) == (None, "it shows no tools")


@pytest.mark.parametrize("name", [n for n in GRAMMARS if n not in ("bare", "list", "python")])
def test_a_bad_call_spoils_no_neighbour(name: str) -> None:
    form = learn(GRAMMARS[name]).form
    assert form is not None
    good = form.format_call({"name": "search", "arguments": {"text": "x", "n": 1}})
    for cut in range(1, len(good)):
        reply = form.parse(f"{good}\n{good[:cut]}\n{good}", tools=TOOLS)
        assert show(reply.tool_calls)[0] == ("search", {"text": "x", "n": 1})
        assert show(reply.tool_calls)[-1] == ("search", {"text": "x", "n": 1})
        assert len(reply.tool_calls) <= 3


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_long_hostile_text_is_read_in_little_time(name: str) -> None:
    form = learn(GRAMMARS[name]).form
    assert form is not None
    good = form.format_call({"name": "search", "arguments": {"text": "x", "n": 1}})
    for piece in (good[: len(good) // 2], good[:-3], '{"', "<", "[[", good):
        form.parse(piece * (20_000 // len(piece)), tools=TOOLS)


def test_text_of_an_xml_value_is_typed_by_the_schema() -> None:
    form = learn(GRAMMARS["xml"]).form
    assert form is not None
    text = "<use search>\n<p text>7</p>\n<p n>7</p>\n<p o>{'a': None}</p>\n</use>"
    assert show(form.parse(text, tools=TOOLS).tool_calls) == [("search", {"text": "7", "n": 7, "o": {"a": None}})]
    wrong = form.parse("<use search>\n<p n>seven</p>\n</use>", tools=TOOLS).tool_calls
    assert show(wrong) == [("search", {"n": "seven"})]  # whoever checks the arguments says what is wrong
    with pytest.raises(ValueError, match="cannot hold </p>"):
        form.format_call({"name": "search", "arguments": {"text": "a</p>b"}})


def test_calls_in_thoughts_are_thoughts() -> None:
    form = learn(GRAMMARS["xml"]).form
    assert form is not None
    call = form.format_call({"name": "add", "arguments": {}})
    assert form.parse(f"<think>{call}</think>").tool_calls == ()
    assert form.parse(f"{call}</think>", thinking=True).tool_calls == ()
    assert len(form.parse(f"<think></think>{call}").tool_calls) == 1
    json.dumps(form.parse(call).message())
