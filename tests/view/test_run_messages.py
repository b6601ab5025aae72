"""What a run said of itself, read back."""

from __future__ import annotations

from pathlib import Path

from agentrl.types import Group
from agentrl.view.findings import MESSAGES
from agentrl.view.report import render_report
from agentrl.view.run_cache import RunCache
from agentrl.view.run_messages import RunMessage, RunMessages
from agentrl.view.store import Store
from tests.helpers import runs

STALL = "nothing has gone on for 60 s: 7 episodes wait on tool 'search' (oldest {} s)"


def look(folder: Path) -> RunCache:
    store = Store(folder)
    store.refresh()
    return RunCache(store)


def said(found: RunCache) -> list[tuple[str, str]]:
    return [(f.text, f.query) for f in found.findings() if f.kind == "said"]


def test_lines_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    told = RunMessages(path)
    assert not told.refresh()
    path.write_bytes(
        b'{"step": 1, "text": "a"}\nno\n[1]\n{"step": "x", "text": "b"}\n\xff\n{"step": 2, "text": "c"}\n{"st'
    )
    assert told.refresh()
    assert told.all == [RunMessage(1, "a"), RunMessage(2, "c")]
    assert not told.refresh()
    path.write_text('{"step": 1, "text": "a"}\n')  # a run that goes on from step 1 takes the rest back
    assert told.refresh()
    assert told.all == [RunMessage(1, "a")]


def test_what_the_run_said_stands_out_with_its_step(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    run.log_message(0, "the event loop was held up")
    found = look(tmp_path / "run")
    assert said(found) == [("the run itself said (step 0): the event loop was held up", "")]
    runs.write(run, 1, [Group(7, (runs.solved(7), runs.wrong(7)))])
    found.store.refresh()
    before = found.store.now.version
    run.log_message(1, STALL.format(94))
    found.store.refresh()
    assert found.store.now.version > before  # the page asks again
    assert said(found)[0] == (f"the run itself said (step 1): {STALL.format(94)}", "step=1")
    page = render_report(found.store)
    assert "the run itself said (step 1): nothing has gone on for 60 s" in page
    run.rewind(0, 0)
    found.store.refresh()
    assert [text for text, _ in said(found)] == ["the run itself said (step 0): the event loop was held up"]


def test_what_is_said_again_and_again_is_one_sentence(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step, seconds in ((3, 60), (3, 120), (5, 75)):
        run.log_message(step, STALL.format(seconds))
    assert said(look(tmp_path / "run")) == [(f"the run itself said (3 times, last at step 5): {STALL.format(75)}", "")]
    for letter in "abcdefghij":
        run.log_message(6, f"sign {letter}")
    texts = [text for text, _ in said(look(tmp_path / "run"))]
    assert len(texts) == MESSAGES + 1
    assert texts[-1] == "3 earlier things that the run itself said are in events.jsonl"


def test_words_of_others_are_spelled_out(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    runs.write(run, 1, [Group(7, (runs.solved(7), runs.wrong(7)))])
    run.log_message(1, "turns look like calls: \x1b[31m\u202e<script>alert(1)</script>" + "x" * 5000)
    found = look(tmp_path / "run")
    (text, _), *_others = said(found)
    assert "[ESC][31m[U+202E]<script>" in text
    assert len(text) < 1_400  # 1,200 of what was said, and what is around it
    assert "<script>alert" not in render_report(found.store)
