"""Processes that begin anew beside what those before them left in the store."""

import threading
import time

import pytest

from agentrl.errors import UserError
from agentrl.learner import attempt_store
from agentrl.learner.attempt_store import agree_on_attempt


class Memory:
    """A store, as torch's."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def agree(store: Memory, late: int | None = None) -> list[str]:
    """Let three processes agree, one of them a while after the others."""
    words = [""] * 3

    def run(rank: int) -> None:
        time.sleep(0.1 if rank == late else 0.0)
        words[rank] = agree_on_attempt(store, rank, 3, 10.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return words


@pytest.mark.parametrize("late", [0, 1, 2])
def test_each_attempt_has_a_word_of_its_own_whoever_comes_late(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_store, "POLL_S", 0.01)
    store = Memory()
    words = [agree(store, late) for _ in range(3)]
    assert all(len(set(own)) == 1 and own[0] for own in words)
    assert len({own[0] for own in words}) == 3


def test_who_did_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_store, "POLL_S", 0.01)
    with pytest.raises(UserError, match="rank 1 of the learner's 2 processes did not start"):
        agree_on_attempt(Memory(), 0, 2, 0.05)
    with pytest.raises(UserError, match="rank 0 of the learner's processes did not start, and rank 1 waits for it"):
        agree_on_attempt(Memory(), 1, 2, 0.05)
    left = Memory()
    left.set("agentrl/attempt", "old")
    with pytest.raises(UserError, match="rank 0 of the learner's processes did not start"):
        agree_on_attempt(left, 1, 2, 0.05)
