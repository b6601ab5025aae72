"""What is said of a chat template: its limits, and what stands in the way."""

from __future__ import annotations

from agentrl.renderer.template import TemplateRenderer
from tests.helpers.families import family


def test_a_template_without_limits_has_none() -> None:
    found = family("nano").renderer().describe()
    assert found.list_limits() == []
    assert found.find_obstacle() == ""
    assert "has no field for them" in found.describe_thoughts()


def test_limits_are_sentences() -> None:
    limits = "\n".join(family("gemma").renderer().describe().list_limits())
    assert "tools are described in the system prompt" in limits
    assert "It has no system role" in limits


def test_thoughts_are_described_by_their_marks_and_their_field() -> None:
    found = family("qwen3").renderer().describe()
    assert "drop earlier thinking" in "\n".join(found.list_limits())
    assert "from the field reasoning_content" in found.describe_thoughts()


def test_dropped_thoughts_are_no_limit_where_the_template_is_followed() -> None:
    own = TemplateRenderer(family("qwen3").tokenizer, history="as_template")
    assert own.describe().list_limits() == []
    assert "goes on in another context, without it" in own.verdict()


def test_a_template_that_nothing_can_be_appended_to_is_no_obstacle_where_it_is_followed() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ('!' if loop.last else '') + '\\n' + m.content }}"
        "{{ '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    obstacle = TemplateRenderer(family("qwen3").tokenizer, source).describe().find_obstacle()
    assert "With --template.history as_template another context begins there, rendered anew" in obstacle
    found = TemplateRenderer(family("qwen3").tokenizer, source, history="as_template").describe()
    assert found.find_obstacle() == ""
    assert "user turns begins another context" in " ".join(found.list_sentences())
