"""A bounded worker answers, and is the one that ends where an answer takes too much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.runtime.bounded_worker import AnswerError, BeyondBounds, BoundedWorkers

PROGRAM = """
import os
def answer(question):
    what = question["do"]
    if what == "add":
        yield str(sum(question["numbers"])).encode()
        yield b"more"
    elif what == "raise":
        raise ValueError("no such thing")
    elif what == "memory":
        yield bytes(1 << 31)
    elif what == "time":
        while True: pass
    elif what == "die":
        os._exit(3)
    elif what == "forge":
        for number in range(3, 64):
            try:
                os.write(number, b"E" + len(b"soon").to_bytes(8, "big") + b"soon")
            except OSError:
                pass
        yield b""
    elif what == "print":
        print("noise", flush=True)
        yield b"quiet"
"""


@pytest.fixture
def workers(tmp_path: Path) -> BoundedWorkers:
    (tmp_path / "program.py").write_text(PROGRAM)
    return BoundedWorkers(tmp_path / "program.py", "answer", memory_bytes=256 << 20, cpu_s=1)


def test_answers_come_in_pieces_and_a_process_answers_again(workers: BoundedWorkers) -> None:
    for n in range(3):
        assert list(workers.ask({"do": "add", "numbers": [n, 1]})) == [str(n + 1).encode(), b"more"]
    assert len(workers._idle) == 1
    workers.close()
    assert list(workers.ask({"do": "print"})) == [b"quiet"]  # what the code prints goes nowhere


def test_an_exception_of_the_answer_has_its_kind_and_its_words(workers: BoundedWorkers) -> None:
    with pytest.raises(AnswerError, match="no such thing") as raised:
        list(workers.ask({"do": "raise"}))
    assert raised.value.kind == "ValueError"
    assert len(workers._idle) == 1  # it answers again


def test_the_processor_time_of_an_answer_is_told(workers: BoundedWorkers) -> None:
    spent: list[float] = []
    list(workers.ask({"do": "add", "numbers": [1]}, spent.append))
    with pytest.raises(AnswerError):
        list(workers.ask({"do": "raise"}, spent.append))
    with pytest.raises(BeyondBounds):
        list(workers.ask({"do": "die"}, spent.append))
    assert all(0 <= seconds < 1 for seconds in spent[:2])
    assert spent[2] == 1.0  # all that it may


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize("what", ["forge", "memory", "time", "die"])
def test_an_answer_beyond_the_bounds_ends_its_process_alone(workers: BoundedWorkers, what: str) -> None:
    with pytest.raises(BeyondBounds):
        list(workers.ask({"do": what}))
    assert list(workers.ask({"do": "add", "numbers": []})) == [b"0", b"more"]


def test_an_answer_that_is_left_is_not_mixed_up_with_the_next(workers: BoundedWorkers) -> None:
    pieces = workers.ask({"do": "add", "numbers": [1]})
    assert next(pieces) == b"1"
    del pieces
    assert next(iter(workers.ask({"do": "add", "numbers": [5]}))) == b"5"
