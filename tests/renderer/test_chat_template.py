"""Chat templates render as transformers renders them; one that would hang or fill the memory is refused."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from agentrl.cli import main
from agentrl.errors import ConfigError, TemplateError
from agentrl.models.policy import Policy, find_template, load_tokenizer
from agentrl.renderer.chat_template import describe_choice, render_chat, render_template
from agentrl.renderer.template import TemplateRenderer
from agentrl.resources import load_trainable_policy
from agentrl.settings.loader import build_config
from tests.helpers.families import NAMES, family
from tests.helpers.tiny import qwen3

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


# Several templates of one model, by name, as Hermes and Command-R have them

CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_USE = (  # it has tools, always
    "{{ '<|im_start|>system\n<tools>' }}{% for t in tools %}{{ t.function | tojson + '\n' }}{% endfor %}"
    "{{ '</tools><|im_end|>\n' }}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>tool\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    """{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) }}"""
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SEVERAL = {"default": CHATML, "tool_use": TOOL_USE, "rag": CHATML.replace("assistant\n", "assistant\nGrounded: ")}
ASKED: list[Any] = [{"role": "user", "content": "q"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}


def several(templates: dict[str, str] = SEVERAL) -> Any:
    tokenizer = copy.deepcopy(family("qwen3").tokenizer)
    tokenizer.chat_template = templates
    return tokenizer


def test_the_template_for_tools_is_taken_where_tools_are_offered() -> None:
    tokenizer = several()
    own = TemplateRenderer(tokenizer)
    assert own.takes_tools
    call: Any = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Any = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
    for messages, tools in ((ASKED, []), (ASKED, [TOOL]), ([*ASKED, called, result], [TOOL])):
        wanted = tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert own.render_ids(messages, tools=tools) == wanted
    prompt = own.render_ids(ASKED, tools=[TOOL])
    said = own.encode_turn('\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>')
    assert [(c.name, c.arguments) for c in own.parse_response(said, prompt_ids=prompt).tool_calls] == [
        ("add", {"a": 1})
    ]
    assert own.bridge_to_next_turn(prompt, said, [result], tools=[TOOL]) == wanted
    assert "tool_use is taken where tools are offered, and default elsewhere" in own.verdict()


def test_a_template_is_taken_by_its_name() -> None:
    tokenizer = several()
    own = TemplateRenderer(tokenizer, find_template(tokenizer, "rag"))
    wanted = tokenizer.apply_chat_template(
        ASKED, chat_template="rag", add_generation_prompt=True, return_dict=False, tokenize=True
    )
    assert own.render_ids(ASKED) == wanted
    assert "Of the model's templates (default, rag, tool_use) rag is taken (--chat_template)." in own.verdict()
    assert describe_choice(family("qwen3").tokenizer, None) == ""


def test_a_wrong_name_of_a_template_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'ragg' is no file, and none of the model's own.*did you mean 'rag'"):
        find_template(several(), "ragg")
    with pytest.raises(ConfigError, match="cannot read 'rag': No such file"):
        find_template(family("qwen3").tokenizer, "rag")
    with pytest.raises(ConfigError, match=r"cannot read 'other\.jinja': No such file"):
        find_template(several(), "other.jinja")
    (tmp_path / "other.jinja").write_text(CHATML)
    assert find_template(several(), str(tmp_path / "other.jinja")) == CHATML


def test_several_templates_without_a_default_are_a_sentence() -> None:
    tokenizer = several({"rag": SEVERAL["rag"], "tool_use": TOOL_USE})
    with pytest.raises(TemplateError, match=r"none is the default; take one with --chat_template NAME: rag, tool_use"):
        TemplateRenderer(tokenizer)
    assert TemplateRenderer(tokenizer, find_template(tokenizer, "rag")).render_ids(ASKED)


@pytest.mark.parametrize("form", ["list", "files"])
def test_a_folder_has_them_as_a_list_or_as_files(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    several().save_pretrained(tmp_path, save_jinja_files=form == "files")
    kept = json.loads((tmp_path / "tokenizer_config.json").read_text()).get("chat_template")
    assert isinstance(kept, list) == (form == "list")
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").exists() == (form == "files")
    assert load_tokenizer(str(tmp_path)).chat_template == SEVERAL
    assert main(["check", "model", str(tmp_path)]) == 0
    assert "tool_use is taken where tools are offered" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "model", str(tmp_path), "--chat_template", "rag"]) == 0
    assert "rag is taken" in capsys.readouterr().out
    assert main(["check", "model", str(tmp_path), "--chat_template", "ragg"]) == 2
    assert "did you mean 'rag'?" in capsys.readouterr().err


def test_the_trained_model_is_saved_with_the_template_that_was_taken(tmp_path: Path) -> None:
    """As the default, and by its name, so that the settings of its run still hold."""
    tokenizer = several()
    given = Policy(qwen3(vocab_size=len(tokenizer)), tokenizer, "")
    config = build_config(("test", {"env": "math-tools", "chat_template": "rag"}))
    load_trainable_policy(config, given).save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.chat_template == {"default": SEVERAL["rag"], "rag": SEVERAL["rag"]}
    assert find_template(again, "rag") == SEVERAL["rag"]
