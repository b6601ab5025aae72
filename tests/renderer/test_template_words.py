import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import EnvSpec
from agentrl.errors import ConfigError
from agentrl.models.policy import Policy, load_tokenizer
from agentrl.renderer.chat_template import list_words, set_defaults
from agentrl.renderer.json_lines import ChatRenderer, decode_words
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.rollout import Rollout
from agentrl.settings.loader import build_config, dump_toml, read_overrides
from agentrl.testing import ScriptedEngine
from tests.helpers.families import GLM, LLAMA31, QWEN3, family

ASKED: Any = [{"role": "user", "content": "q"}]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def rendered(template: str | None, **words: Any) -> str:
    tokenizer = family("qwen3").tokenizer
    return str(tokenizer.decode(TemplateRenderer(tokenizer, template, words=words).render_ids(ASKED)))


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "glm4.5"])
def test_a_word_does_what_it_does_in_transformers(name: str, value: bool) -> None:
    tokenizer = family(name).tokenizer
    theirs = tokenizer.apply_chat_template(ASKED, tokenize=True, add_generation_prompt=True, enable_thinking=value)
    own = TemplateRenderer(tokenizer, words={"enable_thinking": value})
    assert own.render_ids(ASKED) == list(getattr(theirs, "input_ids", theirs))
    assert family(name).renderer().with_words({"enable_thinking": value}).render_ids(ASKED) == own.render_ids(ASKED)


def test_the_words_are_those_that_the_template_reads_and_does_not_make() -> None:
    tokenizer = family("qwen3").tokenizer
    assert list_words(tokenizer, QWEN3) == {"enable_thinking": ""}
    assert list_words(tokenizer, GLM) == {"enable_thinking": ""}
    assert list_words(tokenizer, LLAMA31)["tools_in_user_message"] == "true"
    source = (
        "{% set made = messages[0].role %}{{ made }}{% if a is not defined %}{% set a = 3 %}{% endif %}{{ a }}"
        "{{ b | default('x') }}{% set c = c if c is defined else true %}{{ c }}"
        "{% for m in messages %}{{ m }}{% endfor %}"
        "{{ strftime_now('%d') }}{{ bos_token }}{{ namespace(x=1).x }}{{ d }}"
    )
    assert list_words(tokenizer, source) == {"a": "3", "b": '"x"', "c": "true", "d": ""}
    assert list_words(tokenizer, "{{ messages }}") == {}


@pytest.mark.parametrize(
    ("word", "hint"),
    [("enable_thinkin", "did you mean 'enable_thinking'"), ("effort", "known: enable_thinking"), ("messages", "known")],
)
def test_a_word_that_the_template_does_not_read_is_refused(word: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"template\.{word}: the chat template reads no such word.*{hint}"):
        rendered(None, **{word: 1})


def test_settings_take_words_and_keep_them() -> None:
    config = build_config(read_overrides(["--env", "shop", "--template.enable_thinking", "false", "--template.a", "x"]))
    assert config.template == {"enable_thinking": False, "a": "x"}
    assert "enable_thinking = false" in dump_toml(config)
    assert build_config(("TRL", {"env": "shop", "chat_template_kwargs": {"a": 1}})).template == {"a": 1}


@pytest.mark.parametrize("value", [False, True, None, 3, 0.5, 'it\'s "a"\n{{ b }} é', ["a", 1], {"a": {"b": [True]}}])
def test_a_model_is_saved_with_the_words_it_was_trained_with(value: Any, tmp_path: Path) -> None:
    template = "{{ word | tojson }}" + TURNS
    tokenizer = family("nano").tokenizer
    saved = Policy(_Weights(), tokenizer, "", set_defaults(template, {"word": value}))
    saved.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    again = load_tokenizer(str(tmp_path))
    for other in (None, "given"):
        words = {} if other is None else {"word": other}
        theirs = again.apply_chat_template(ASKED, tokenize=False, **words)
        assert str(theirs).startswith(
            json.dumps(value if other is None else other, ensure_ascii=False) + "<|im_start|>"
        )
    assert tokenizer.chat_template != again.chat_template


class _Weights:
    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


async def test_an_environment_says_words_for_an_episode() -> None:
    rows = [{"prompt": str(n), "solution": "4", "chat_template_kwargs": {"enable_thinking": n == 1}} for n in (0, 1)]
    own = family("qwen3").renderer()
    async with EnvSpec("prompts", data=rows, test_data=rows, rewards=["accuracy"]).open() as spec:
        texts = []
        for task in (0, 1):
            t = await Rollout(spec, ScriptedEngine(["4"]), own).episode(task)
            texts.append(family("qwen3").tokenizer.decode(t.segments[0].token_ids))
    assert [text.endswith("<think>\n\n</think>\n\n") for text in texts] == [True, False]
    assert own.words == {}


def test_a_server_gets_the_words() -> None:
    own = ChatRenderer({"a": 1}).with_words({"b": False})
    assert decode_words(own.render_ids(ASKED)) == {"a": 1, "b": False}
    assert decode_words(ChatRenderer().render_ids(ASKED)) == {}


def test_a_template_that_ends_a_conversation_with_its_eos_can_be_followed() -> None:
    """Phi's: behind the last turn stands the eos, which is not there once another turn follows."""
    phi = TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    tokenizer = family("qwen3").tokenizer
    own = TemplateRenderer(tokenizer, phi)
    assert "Appending user turns is verified." in own.verdict()
    said = tokenizer.encode("4<|im_end|>")
    ids = own.bridge_to_next_turn(own.render_ids(ASKED), said, ASKED)
    history = [*ASKED, {"role": "assistant", "content": "4"}, *ASKED]
    theirs = tokenizer.apply_chat_template(history, chat_template=phi, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == theirs


def test_a_template_whose_last_turn_ends_otherwise_can_be_followed() -> None:
    """gpt-oss': the last turn ends with <|return|>, those before with <|end|>, which ends thoughts as well."""
    ends = "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
    source = TURNS.replace("<|im_end|>\n", ends) + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = family("qwen3").tokenizer
    own = TemplateRenderer(tokenizer, source)
    assert "Appending user turns is verified." in own.verdict()
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") in own.get_stop_token_ids()
    text = tokenizer.decode(own.bridge_to_next_turn([], tokenizer.encode("4<|endoftext|>"), ASKED))
    assert text == "4<|endoftext|><|im_start|>user\nq<|im_end|><|im_start|>assistant\n"
