"""A run's timelines as the page and the report show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from agentrl.runs.folder import RunFolder
from agentrl.runtime.critical_path import EPISODES
from agentrl.runtime.lanes import Track
from agentrl.runtime.timeline import Timeline
from agentrl.view.report import render_report
from agentrl.view.server import build_app
from agentrl.view.store import Store
from agentrl.view.svg_chart import draw_lanes
from agentrl.view.timelines import Timelines
from tests.helpers.runs import start


def picture(tool: str = "price") -> dict[str, Any]:
    """A step of ten seconds: three of a tool while others are sampled, then learning."""
    now = 0.0

    def clock() -> float:
        return now

    time = Timeline(0.0, clock, clock, clock)
    time.at(EPISODES)
    track = Track(time.lanes)
    track.enter("generate", 0.0)
    other = Track(time.lanes)
    other.enter("generate", 0.0)
    now = 2.0
    track.leave(now)
    track.enter("tools", now)
    track.call(tool)
    now = 5.0
    track.returned(tool)
    track.leave(now)
    time.lanes.ended(track)
    other.leave(now)
    time.at("learn")
    now = 10.0
    return time.cut().picture


def test_a_steps_picture_is_read_with_its_lanes_in_order(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.log_timeline(1, "step", picture())
    run.log_timeline(1, "evaluation", picture())
    found = Timelines(tmp_path / "timeline.jsonl")
    found.refresh()
    assert found.steps() == [1]
    step, evaluation = found.pictures(1)
    assert (step["kind"], evaluation["kind"], step["seconds"]) == ("step", "evaluation", 10.0)
    assert [(name, seconds) for name, seconds, _ in step["lanes"]] == [
        ("generate", 5.0),
        ("tools", 3.0),
        ("tool/price", 3.0),
        ("learn", 5.0),
    ]
    assert step["waited"] == [[0.0, 2.0, "generate"], [2.0, 5.0, "tool/price"], [5.0, 10.0, "learn"]]
    assert found.pictures(7) == []


def test_a_run_that_goes_on_adds_and_one_that_is_resumed_takes_back(tmp_path: Path) -> None:
    run, found = RunFolder(tmp_path), Timelines(tmp_path / "timeline.jsonl")
    found.refresh()
    assert found.steps() == []
    for step in (1, 2, 3):
        run.log_timeline(step, "step", picture())
        found.refresh()
        assert found.steps() == list(range(1, step + 1))
    (tmp_path / "metrics.jsonl").write_text("")
    run.rewind(1, 0)
    found.refresh()
    assert found.steps() == [1]
    run.log_timeline(2, "step", picture("search"))
    found.refresh()
    assert [name for name, _, _ in found.pictures(2)[0]["lanes"]][2] == "tool/search"


def test_what_is_half_written_or_no_picture_hides_no_other(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.log_timeline(1, "step", picture())
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"step": 2, "kind": "step", "begin": 1, "lanes": []}\nnonsense\n{"step": 3, "kind": "st')
    found = Timelines(tmp_path / "timeline.jsonl")
    found.refresh()
    assert found.steps() == [1, 2]
    assert found.pictures(2) == []
    assert len(found.pictures(1)) == 1


def test_the_page_and_the_report_show_it(tmp_path: Path) -> None:
    run = start(tmp_path / "run", steps=2)
    with TestClient(build_app([Store(run.folder)]), base_url="http://127.0.0.1") as client:
        assert client.get("/api/timeline").json() == {"step": 0, "steps": [], "pictures": []}
        for step in (1, 2):
            run.log_timeline(step, "step", picture())
        got = client.get("/api/timeline").json()
        assert (got["step"], got["steps"], len(got["pictures"])) == (2, [1, 2], 1)
        assert client.get("/api/timeline?step=1").json()["step"] == 1
        assert "timeline.js" in client.get("/static/overview.js").text


def test_names_of_tools_are_text(tmp_path: Path) -> None:
    drawn = draw_lanes("<b>", {**_read(tmp_path, "<script>")})
    assert "<script>" not in drawn
    assert "&lt;script&gt;" in drawn
    assert drawn.count("<rect") == 3 + 4  # what was waited for, and the lanes


def _read(folder: Path, tool: str) -> dict[str, Any]:
    RunFolder(folder).log_timeline(1, "step", picture(tool))
    found = Timelines(folder / "timeline.jsonl")
    found.refresh()
    return found.pictures(1)[0]


def test_the_report_has_a_usual_step_and_the_slowest(tmp_path: Path) -> None:
    run = start(tmp_path / "run", steps=3)
    for step in (1, 2, 3):
        run.log({"step": step, "step_time": float(step), "reward": 0.5})
        run.log_timeline(step, "step", picture())
    store = Store(run.folder)
    store.refresh()
    page = render_report(store)
    assert "a usual step, 2" in page
    assert "the slowest step, 3" in page
