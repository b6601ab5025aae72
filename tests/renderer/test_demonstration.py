"""A conversation that is shown: its tokens are a run's, by their authors, and its call is read back."""

from __future__ import annotations

import pytest

from agentrl.renderer.demonstration import demonstrate
from agentrl.renderer.template import TemplateRenderer
from tests.helpers.families import family, plain_family


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma"])
def test_a_conversation_has_two_turns_of_the_model_and_what_comes_behind_them(name: str) -> None:
    shown = demonstrate(family(name).renderer())
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
    segments = demonstrate(family("glm4.5").renderer()).segments
    assert segments[1][1][-1] == ("<|observation|>", True)  # its turns end with the beginning of the next
    assert ("<think>", True) in segments[1][1]


def test_a_template_that_rewrites_what_was_before_shows_how_far_it_comes() -> None:
    source = "{% for m in messages %}{{ m.role }} {{ loop.revindex }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    shown = demonstrate(TemplateRenderer(plain_family("vicuna").tokenizer, source))
    assert "rewrites the turns before" in shown.problem
    assert [author for author, _ in shown.segments] == ["prompt", "model"]
