"""Chat templates render as transformers renders them; one that would hang or fill the memory is refused."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from agentrl.errors import TemplateError
from agentrl.models.policy import load_tokenizer
from agentrl.renderer.chat_template import render_chat, render_template
from agentrl.renderer.template import TemplateRenderer
from tests.helpers.families import NAMES, family

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "2 < 3? é \ud83d"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "b"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["bare", "tools"])
def test_a_template_renders_as_transformers_renders_it(name: str, tools: list[Any]) -> None:
    tokenizer = family(name).tokenizer
    theirs = tokenizer.apply_chat_template(MESSAGES, tools=tools or None, tokenize=False, add_generation_prompt=True)
    assert render_chat(tokenizer, None, MESSAGES, tools, add_generation_prompt=True) == theirs


HOSTILE = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "text": "{{ 'x' * 10**10 }}",
    "width": "{{ '%1000000000d' % 1 }}{{ '%1000000000d' % 1 }}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "macro": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "raises": "{{ raise_exception('no') }}",
    "long": "x" * (2 << 20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_a_sentence(name: str) -> None:
    spent = time.process_time()
    with pytest.raises(TemplateError, match=r"."):
        render_template(HOSTILE[name], {"messages": []})
    assert time.process_time() - spent < 5  # of this process, whose event loop waits
    assert render_template("{{ 1 + 1 }}", {}) == "2"


def test_a_model_with_such_a_template_is_refused_by_name() -> None:
    with pytest.raises(TemplateError, match=r"the chat template of '.*' cannot render .*too much memory"):
        TemplateRenderer(load_tokenizer("nano"), HOSTILE["text"])


@pytest.mark.slow
def test_a_template_that_hangs_with_a_short_conversation_takes_the_time_of_one_rendering() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ n }}"
    with pytest.raises(TemplateError, match="too much time"):
        render_template(source, {"n": 0})
    began = time.process_time() + sum(os.times()[2:4])
    for n in range(20):
        with pytest.raises(TemplateError, match="too much time"):
            render_template(source, {"n": n})
    assert time.process_time() + sum(os.times()[2:4]) - began < 2


def render_often(source: str, count: int, values: dict[str, Any]) -> None:
    for _ in range(count):
        render_template(source, values)


def test_a_template_has_one_budget_of_characters_over_its_short_renderings() -> None:
    source = "{% for i in range(2000) %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}{# budget #}"
    messages = [{"role": "user", "content": "x" * 30}]
    with pytest.raises(TemplateError, match="it writes too much"):
        render_often(source, 20, {"messages": messages})


def test_a_long_conversation_is_in_no_budget() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{# long #}"
    messages = [{"role": "user", "content": "x" * 60_000}]
    for _ in range(20):
        assert len(render_template(source, {"messages": messages})) == 60_000


@pytest.mark.slow
def test_a_template_has_one_budget_of_time_over_its_short_renderings() -> None:
    source = "{% for i in range(n) %}{% for j in range(18000) %}{% endfor %}{% endfor %}{# budget #}"
    with pytest.raises(TemplateError, match="it takes too much time"):
        render_often(source, 500, {"n": 100})
