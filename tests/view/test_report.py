"""A run as one HTML file."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentrl import UserError
from agentrl.cli import main
from agentrl.credit import record_held_out
from agentrl.evaluation.scope import EvaluationScope
from agentrl.runs.folder import RunFolder
from agentrl.types import CallRecord, Fault, Group, Message
from agentrl.view.report import render_report
from agentrl.view.store import Store
from agentrl.view.svg_chart import Curve, draw_curves
from tests.helpers import runs
from tests.helpers.evaluations import evaluated

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\u202eevil"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def made(folder: Path) -> Tags:
    store = Store(folder)
    store.refresh()
    return Tags(render_report(store))


def test_a_report_answers_why_reward_stopped(tmp_path: Path) -> None:
    page = made(runs.broken(tmp_path / "run"))
    assert "reward is 0.60, and has been flat for" in page.text
    assert "the catalogue knows no item" in page.text
    assert "done and not done" in page.text
    assert "What does item" in page.text
    assert {"svg", "path", "article"} <= page.tags


def test_a_report_tells_settings_and_what_changed_on_held_out_tasks(tmp_path: Path) -> None:
    folder = runs.broken(tmp_path / "run", steps=6)
    for step, played in ((0, runs.wrong), (6, runs.solved)):
        groups = [Group(t, (played(t), runs.solved(t))) for t in range(50, 60)]
        RunFolder(folder).write_trajectories(step, record_held_out(groups), "test")
    page = made(folder)
    assert "Held-out tasks, step 0 and step 6" in page.text
    assert "0 broke, 10 fixed" in page.text
    assert "What do 50 hats cost?" in page.text
    assert "Expected: " in page.text
    assert "learner.lr" in page.text
    assert "1e-06" in page.text
    assert "learner.advantage" not in page.text  # the default


def test_a_report_needs_nothing_else_and_runs_nothing(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "tool_calls": [runs.call(EVIL, item=EVIL)]},
        {"role": "tool", "content": f"error: {EVIL}", "tool_call_id": "c0", "name": EVIL},
    ]
    bad = runs.played(7, said, 0.5, calls=[CallRecord(0, EVIL, "tool", 0.1)])  # type: ignore[arg-type]
    lost = runs.played(7, said, 0.5, fault=Fault("tool_timeout", EVIL))  # type: ignore[arg-type]
    folder = tmp_path / "<script>run"
    page = made(runs.of(folder, [bad, runs.solved(7), lost]))
    assert not page.tags & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    assert not {a for a in page.attributes if a.startswith("on")} | (page.attributes & {"src", "href", "style"})
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert "[ESC][31m[U+202E]evil" in page.text
    assert "\x1b" not in page.text


def test_thoughts_stand_apart(tmp_path: Path) -> None:
    said: list[Message] = [
        {"role": "user", "content": "<think>mine</think>"},
        {"role": "assistant", "content": "<think>\nsix <b>\n</think>\n\nIt is 6."},
    ]
    store = Store(runs.of(tmp_path / "run", [runs.played(7, said, 0.5), runs.solved(7)]))
    store.refresh()
    page = render_report(store)
    assert "<i class=dim>&lt;think&gt;\nsix &lt;b&gt;\n&lt;/think&gt;</i>\n\nIt is 6." in page
    assert "<i class=dim>&lt;think&gt;mine" not in page


def test_long_texts_are_cut(tmp_path: Path) -> None:
    said: list[Message] = [{"role": "user", "content": "x" * 10_000_000}, *[{"role": "user", "content": "y"}] * 60]  # type: ignore[list-item]
    long = replace(runs.wrong(7), messages=tuple(said))
    store = Store(runs.of(tmp_path / "run", [long, runs.solved(7)]))
    store.refresh()
    page = render_report(store)
    assert len(page) < 100_000
    assert "9,996,000 more characters" in page
    assert "21 more messages" in page


def test_the_command_writes_a_file_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.of(tmp_path / "run", [runs.solved(7), runs.wrong(7)])
    for _ in range(2):  # a report may be written anew
        assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    other = tmp_path / "mine.html"
    other.write_text("mine")
    assert main(["report", str(folder), "--out", str(other)]) == 2
    assert "exists and is no report of ours; give another --out" in capsys.readouterr().err
    assert main(["report", str(folder), "--uot", "x"]) == 2
    assert "uot: unknown setting; did you mean 'out'?" in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "no/such/x.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_run_without_a_step_has_no_report(tmp_path: Path) -> None:
    runs.start(tmp_path / "run")
    store = Store(tmp_path / "run")
    store.refresh()
    with pytest.raises(UserError, match="has no step yet: there is nothing to report"):
        render_report(store)


def test_plots_of_few_many_and_equal_values() -> None:
    assert draw_curves("none", [Curve("a", [], [])]) == ""
    one = draw_curves("one", [Curve("a", [3], [0.5])])
    assert one.count("<circle") == 1
    many = draw_curves("many", [Curve("a", range(100_000), [float(i % 997) for i in range(100_000)])])
    assert len(many) < 20_000
    for found in (one, many, draw_curves("flat", [Curve("<b>", [1, 2], [0.0, 0.0])])):
        numbers = [float(n) for n in re.findall(r'"(-?[\d.]+)"', found)]
        assert all(-1 <= n <= 500 for n in numbers)
        assert "nan" not in found
        assert "<b>" not in found.replace("<figcaption><b>", "")


def test_what_of_a_damaged_run_is_not_in_its_report_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.broken(tmp_path / "run")
    last = sorted((folder / "trajectories").glob("*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:200])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{damaged\n")
    (folder / "config.toml").write_text("a = = 3")
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().err
    page = Tags((folder / "report.html").read_text("utf-8"))
    for sentence in (f"{last.name} cannot be read: ", "1 line of metrics.jsonl", "config.toml is missing"):
        assert sentence in said
        assert sentence in page.text


async def test_a_damaged_scope_of_an_evaluation_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await evaluated(tmp_path / "a", EvaluationScope(tasks=5))
    (tmp_path / "a" / "evaluation.toml").write_text("x")
    assert main(["report", str(tmp_path / "a")]) == 0
    assert "evaluation.toml cannot be read: " in capsys.readouterr().err


def test_a_report_to_a_device_without_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs.broken(tmp_path / "run")), "--out", "/dev/zero"]) == 2
    assert "'/dev/zero' exists and is no report of ours; give another --out" in capsys.readouterr().err
