"""What a worker says of an agent's error: a line that is the same for the same mistake."""

from agentrl.agents.worker import describe_error


def test_an_error_is_its_type_and_its_first_line() -> None:
    assert describe_error(ValueError("one\ntwo")) == "ValueError: one"
    assert describe_error(KeyError()) == "KeyError"
    assert len(describe_error(ValueError("x" * 1000))) < 250
