"""Who does not answer is named; who stood still itself blames nobody."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from agentrl.learner import roll_call
from agentrl.learner.roll_call import FAILED, RollCall


class Shelf:
    """A store in one process."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.broken = False

    def set(self, key: str, value: str) -> None:
        if self.broken:
            raise RuntimeError("Broken pipe")
        self.words[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.words for key in keys)

    def get(self, key: str) -> bytes:
        return self.words[key].encode()


def wait_for(event: threading.Event) -> bool:
    return event.wait(120)


def test_a_process_that_falls_silent_is_named_by_the_others() -> None:
    shelf, heard, said = Shelf(), threading.Event(), list[str]()

    def note(sentence: str) -> None:
        said.append(sentence)
        heard.set()

    shelf.words["agentrl/alive/2"] = "1"  # and nothing more
    calls = [RollCall(shelf, 0, 3, 0.5, note, beat_s=0.02), RollCall(shelf, 1, 3, 60.0, note, beat_s=0.02)]
    assert wait_for(heard)
    assert said[0].startswith("rank 2 of the learner's processes did not answer for 0.5 s (learner.rank_timeout_s)")
    assert "rank 1 " not in said[0]
    for call in calls:
        call.close()


def test_one_that_has_ended_well_or_has_not_come_yet_is_not_missed() -> None:
    shelf, said = Shelf(), list[str]()
    first = RollCall(shelf, 0, 3, 0.2, said.append, beat_s=0.02)
    second = RollCall(shelf, 1, 3, 0.2, said.append, beat_s=0.02)
    time.sleep(0.1)
    second.close()
    time.sleep(0.6)  # rank 2 never came
    assert shelf.words["agentrl/alive/1"] == "done"
    assert said == []
    first.close()


def test_one_that_ended_by_an_error_is_named_at_once_and_who_still_waits_for_it_ends() -> None:
    shelf, named, ended, told, said = Shelf(), threading.Event(), threading.Event(), list[str](), list[str]()

    def tell(sentence: str) -> None:
        told.append(sentence)
        named.set()

    def end(sentence: str) -> None:
        said.append(sentence)
        ended.set()

    failing = RollCall(shelf, 1, 2, 60.0, said.append, beat_s=0.02)
    failing.close(FAILED)
    patient = RollCall(shelf, 0, 2, 300.0, said.append, tell, beat_s=0.02)
    assert wait_for(named)
    patient.close()
    assert told == ["rank 1 of the learner's processes has ended by an error, which it tells"]
    assert said == []
    RollCall(shelf, 0, 2, 0.3, end, told.append, beat_s=0.02)
    assert wait_for(ended)
    assert said[0].startswith(
        "rank 1 of the learner's processes ended by an error, and this process waits for it; rank 0"
    )


def test_one_that_ends_without_a_last_word_is_named_as_silent() -> None:
    shelf = Shelf()
    call = RollCall(shelf, 1, 2, 60.0, lambda sentence: None, beat_s=0.02)
    call.close("")
    assert shelf.words.get("agentrl/alive/1") not in ("done", "failed")


@pytest.mark.parametrize("rank", [0, 1])
def test_without_torchruns_store_nobody_is_blamed(rank: int) -> None:
    shelf, said = Shelf(), list[str]()
    call = RollCall(shelf, rank, 2, 0.2, said.append, beat_s=0.02, is_store_of_first=False)
    shelf.broken = True
    call._thread.join(30)
    assert not call._thread.is_alive()
    time.sleep(0.6)
    assert said == []
    call.close()


class StuckShelf(Shelf):
    """A store whose process is stopped: a call does not return until the test is over."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.goes_on.wait(120)
        return False


@pytest.mark.parametrize("is_gone", [False, True])
def test_rank_0_is_named_where_its_store_is_silent_or_gone(is_gone: bool) -> None:
    shelf, heard, said = StuckShelf(), threading.Event(), list[str]()
    shelf.broken = is_gone

    def note(sentence: str) -> None:
        said.append(sentence)
        heard.set()

    call = RollCall(shelf, 1, 3, 0.3, note, beat_s=0.02)
    assert wait_for(heard)
    assert said[0].startswith("rank 0 of the learner's processes did not answer for 0.3 s")
    assert "rank 1 ends" in said[0]
    call._closed.set()
    shelf.goes_on.set()


def test_who_stood_still_itself_does_not_blame_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, said, looks, enough = StuckShelf(), list[str](), itertools.count(0, 1000), threading.Event()

    def look() -> float:
        now = next(looks)
        if now > 20_000:
            enough.set()
        return now

    monkeypatch.setattr(roll_call, "time", SimpleNamespace(monotonic=look))
    call = RollCall(shelf, 1, 2, 300.0, said.append, beat_s=0.02)
    assert wait_for(enough)
    call._closed.set()
    shelf.goes_on.set()
    assert said == []


def test_who_keeps_the_others_waiting_is_named_with_the_line_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, heard, said = Shelf(), threading.Event(), list[str]()

    def note(sentence: str) -> None:
        said.append(sentence)
        heard.set()

    places = {0: "waits", 1: "learner/losses.py:7 compute", 2: "waits"}
    monkeypatch.setattr(roll_call, "locate_thread", lambda worker: places[worker or 0])
    calls = [RollCall(shelf, rank, 3, 0.3, said.append, note, beat_s=0.02) for rank in range(3)]
    for rank, call in enumerate(calls):
        call.worker = rank
    assert wait_for(heard)
    time.sleep(0.5)
    for call in calls:
        listed = call.list_places()
        assert {rank: place.location for rank, place in listed.items()} == places
        assert [place.computes for place in listed.values()] == [False, True, False]
        assert all(0.3 < place.seconds < 60.0 for place in listed.values())
        call.close()
    assert {sentence.partition(" has waited for ")[0] for sentence in said} == {
        f"rank {rank} of the learner's processes" for rank in (0, 2)
    }
    assert len(said) == 2, "once each"
    assert "has waited for rank 1 for 0 s, which is at learner/losses.py:7 compute" in said[0]


def test_nobody_waits_while_the_first_process_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, said = Shelf(), list[str]()
    places = {0: "idle", 1: "idle"}
    monkeypatch.setattr(roll_call, "locate_thread", lambda worker: places[worker or 0])
    calls = [RollCall(shelf, rank, 2, 0.1, said.append, said.append, beat_s=0.02) for rank in range(2)]
    time.sleep(0.4)
    for call in calls:
        call.close()
    assert said == []
