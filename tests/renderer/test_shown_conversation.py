"""A conversation that is shown: its tokens are a run's, by their authors, and its call is read back."""

from __future__ import annotations

import pytest

from agentrl.renderer.shown_conversation import show_conversation
from agentrl.renderer.template import TemplateRenderer
from tests.helpers.families import family, plain_family


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma"])
def test_a_conversation_has_two_turns_of_the_model_and_what_comes_behind_them(name: str) -> None:
    shown = show_conversation(family(name).renderer())
    assert shown.problem == ""
    assert [author for author, _ in shown.segments] == ["prompt", "model", "env", "model", "env"]
    prompt, call, result, answer, question = ("".join(text for text, _ in tokens) for _, tokens in shown.segments)
    assert "17 * 3?" in prompt
    assert "calculator" in call
    assert "17 * 3" in call
    assert "51" in result
    assert "It is 51." in answer
    assert "17 * 4?" in question


def test_control_tokens_are_known_and_a_stop_is_the_models() -> None:
    segments = show_conversation(family("glm4.5").renderer()).segments
    assert segments[1][1][-1] == ("<|observation|>", True)  # its turns end with the beginning of the next
    assert ("<think>", True) in segments[1][1]


def test_a_thought_that_the_prompt_opens_is_ended_where_the_template_has_no_field_for_it() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    shown = show_conversation(TemplateRenderer(family("qwen2.5").tokenizer, source))
    assert shown.problem == ""
    call = "".join(text for text, _ in shown.segments[1][1])
    assert call.index("</think>") < call.index("<tool_call>")


def test_a_turn_is_over_at_its_first_stop() -> None:
    """A model is stopped there: what the template writes behind it is no token of the model's."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'assistant' %}<|end|>"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = family("qwen2.5").renderer().tokenizer
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    shown = show_conversation(TemplateRenderer(tokenizer, source))
    assert shown.problem == ""
    assert [text for text, _ in shown.segments[1][1]].count("<|im_end|>") == 0
    assert shown.segments[1][1][-1] == ("<|end|>", True)
    assert shown.segments[2][1][0] == ("<|im_end|>", True)


def test_a_template_that_rewrites_what_was_before_shows_how_far_it_comes() -> None:
    source = "{% for m in messages %}{{ m.role }} {{ loop.revindex }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    shown = show_conversation(TemplateRenderer(plain_family("vicuna").tokenizer, source))
    assert "rewrites the turns before" in shown.problem
    assert [author for author, _ in shown.segments] == ["prompt", "model"]
