"""What is said of a chat template: its limits, and what stands in the way."""

from __future__ import annotations

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
