"""The page of who waits on whom, as somebody sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.runs.folder import RunFolder
from tests.helpers.browsing import Page, Pages, text, until
from tests.helpers.sites import Site
from tests.view.test_processes import HOSTILE, record, tell

pytestmark = pytest.mark.browser
PHONE = {"width": 390, "height": 844}


def present(name: str, what: str, number: int, oldest: float) -> dict[str, Any]:
    return {"kind": "player", "name": name, "doing": {what: [number, oldest]}, "groups": 4, "oldest_group": 120.4}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = record(tmp_path / "run", steps=12)
    run.log_message(2, f"player {HOSTILE} is gone, its 2 groups go to others", "players")
    at = {f"tool '{HOSTILE}'": 5.0, "no sign of life": 1.0, "new weights": 1.0, "a free slot": 1.0, "Shop.score": 2.0}
    run.log_processes(
        13,
        {
            "seconds": 10.0,
            "processes": [["player", HOSTILE, 3, at], ["server", "http://10.0.0.7:8000", 0, {"lost": 9}]],
        },
    )
    return run


@pytest.fixture
def site(run: RunFolder) -> Iterator[Site]:
    made = Site(run.folder)
    yield made
    made.close()


def test_the_page_begins_with_the_sentence_that_matters_now_and_goes_on_with_the_run(
    run: RunFolder, pages: Pages, site: Site
) -> None:
    tell(run, sentence="The learner waits for rollouts (95 s): 3 episodes wait on tool 'search' at player rack-2.")
    desk = pages(site)
    p = desk.open("/#/processes")
    p.wait_for_selector(".process")
    assert text(p, ".sentence").startswith("The learner waits for rollouts (95 s): 3 episodes wait on tool 'search'")
    assert "In steps 4 to 13 the learner waited for rollouts" in text(p, ".processes")
    desk.shot("processes-now")
    processes = [present("rack-2", "tool 'search'", 3, 94.0), present("rack-10", "the learner", 1, 0.0)]
    tell(run, sentence="Rollouts wait for the learner.", processes=processes)
    until(p, "document.querySelector('.sentence').textContent.includes('Rollouts wait for the learner')")
    assert text(p, "[data-name=rack-2] .present") == (
        "now 3 on tool 'search', oldest 94 s · 4 groups leased, the oldest for 2 min"
    )
    assert "now waits for the learner" in text(p, "[data-name=rack-10] .present")
    tell(run, unix=time.time() - 7200, sentence="Rollouts wait for the learner.", processes=processes)
    until(p, "document.querySelector('.sentence').textContent.includes('as it was 2 h ago')")
    assert text(p, "[data-name=rack-2] .present").startswith("then 3 on tool")
    run.write_summary({})
    until(p, "!document.querySelector('.present')")
    assert text(p, ".sentence").startswith("In steps 4 to 13 the learner waited")


def test_the_steps_that_are_shown_are_chosen_and_kept_in_the_address(pages: Pages, site: Site) -> None:
    p = pages(site).open("/")
    p.keyboard.press("7")
    p.wait_for_selector(".process")
    assert "steps 4 to 13" in text(p, ".processes .bar")
    p.get_by_label("how many steps").select_option("1")
    until(p, "document.querySelector('.processes .bar b').textContent === 'step 13'")
    assert p.locator("[data-name=rack-2]").count() == 0, "it was not there in that step"
    p.get_by_role("button", name="step before").click()
    until(p, "document.querySelector('.processes .bar b').textContent === 'step 12'")
    assert "at=12" in p.url
    assert "steps=1" in p.url
    assert "there 50 % of the time" in text(p, "[data-name=rack-2]")
    assert [*p.locator(".name").all_inner_texts()] == ["the learner", "player rack-2", "player rack-10"]
    assert (
        text(p, ".kind-learner .sums")
        .replace("\n", " ")
        .startswith("waits for rollouts 70 % learns 20 % new weights 5 %")
    )
    p.reload()
    p.wait_for_selector(".process")
    assert text(p, ".processes .bar b") == "step 12"


@pytest.mark.parametrize("viewport", [PHONE, {"width": 1366, "height": 768}])
def test_names_of_others_are_text(pages: Pages, site: Site, run: RunFolder, viewport: dict[str, int]) -> None:
    tell(run, sentence=f"3 episodes wait on {HOSTILE}", processes=[present(HOSTILE, HOSTILE, 3, 94.0)])
    page = pages(site, viewport=viewport)
    p = page.open("/#/processes?steps=1")
    p.wait_for_selector(".present")
    page.shot(f"processes-hostile-{viewport['width']}")
    assert p.locator("img").count() == 0
    for selector in (".sentence", ".kind-player .name", ".kind-player .sums", ".present", ".came"):
        shown = text(p, selector)
        assert "<img src=x onerror=alert(1)>" in shown
        assert "U+202E" in shown
        assert "ESC" in shown
    assert "[object" not in text(p, "body")
    assert p.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_a_run_of_an_older_version_says_that_it_tells_less(pages: Pages, tmp_path: Path) -> None:
    folder = record(tmp_path / "old").folder
    (folder / "processes.jsonl").unlink()
    site = Site(folder)
    try:
        p = pages(site).open("/#/processes")
        p.wait_for_selector(".process")
        assert "This run has no processes.jsonl: an older version wrote it" in text(p, ".processes")
        assert p.locator(".process").count() == 1
    finally:
        site.close()


def test_of_many_players_some_are_shown_and_the_others_on_demand(pages: Pages, tmp_path: Path) -> None:
    run = record(tmp_path / "wide", steps=1)
    rows = [["player", f"rack-{n}", 1, {"the engine": 9.0}] for n in range(100)]
    run.log_processes(2, {"seconds": 10.0, "processes": rows})
    site = Site(run.folder)
    try:
        page: Page = pages(site)
        p = page.open("/#/processes?steps=1")
        p.wait_for_selector(".process")
        assert p.locator(".process").count() == 40
        p.get_by_role("button", name="show 60 more").click()
        assert p.locator(".process").count() == 100
    finally:
        site.close()
