"""The page in a browser, as somebody sees it who watches a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.types import CallRecord, Fault, Group, Segment, Trajectory
from tests.helpers import runs
from tests.helpers.browsing import Page, Pages, text, until
from tests.helpers.sites import Site

pytestmark = pytest.mark.browser
BIG = 10_000_000
EVIL = (
    "<script>window.hurt=1</script><img src=x onerror='window.hurt=2'><b>bold</b> "
    "\x1b[31mred\x1b[0m \u202egnissem\u202c"
)


def hostile(folder: Path) -> Path:
    """Whatever a model or a tool may say, wherever it may stand."""
    call = runs.call(EVIL, item=EVIL)
    said: Any = [
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "tool_calls": [call]},
        {"role": "tool", "content": f"error: {EVIL}", "tool_call_id": "c0", "name": EVIL},
        {
            "role": "assistant",
            "content": "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 " + "e" + "\u0301" * 400,
        },
    ]
    bad = runs.played(7, said, 0.0, calls=[CallRecord(0, EVIL, "tool", 0.1)])
    lost = runs.played(7, said, 0.0, fault=Fault("tool_timeout", EVIL))
    long: Any = [
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "x\x1b y\u202e" * (BIG // 5), "name": "t"},
    ]
    tokens = (Segment("prompt", (5,)), Segment("env", (6,) * 200_000), Segment("model", (7,), (-1.0,), (0,)))
    short = runs.played(7, [{"role": "user", "content": "a"}], 1.0)
    large = Trajectory(7, tokens, tuple(long), short.stop, {"correct": 1.0})
    run = runs.start(folder)
    for step in range(1, 11):
        runs.write(run, step, [Group(7, (bad, bad, lost, runs.solved(7), *((large,) if step == 10 else ())))])
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("runs")
    made = Site(runs.broken(folder / "broken"), runs.broken(folder / "other", steps=20), hostile(folder / "hostile"))
    yield made
    made.close()


@pytest.fixture
def page(pages: Pages, site: Site) -> Page:
    return pages(site)


def test_parts_of_a_reward_are_shown_with_their_weights(browser: Any, tmp_path: Path) -> None:
    own = replace(runs.solved(7), rewards={"correct": 1.0, "constructor": 0.5}, weights={"correct": 2.0})
    site = Site(runs.of(tmp_path / "run", [own, runs.wrong(7)]))
    page = Page(browser, site)
    p = page.open("/#/episodes?id=train-1:0")
    p.wait_for_selector(".facts")
    assert "2.5 of correct 1 \u00d7 2, constructor 0.5" in text(p, ".facts")
    page.close()
    site.close()


def test_why_did_reward_stop_at_0_6_is_answered_by_what_a_newcomer_sees_first(page: Page) -> None:
    p = page.open()
    p.wait_for_selector(".findings li")
    said = text(p, ".findings")
    assert "reward is 0.60, and has been flat" in said
    assert "a call of tool catalogue failed: 40% of the episodes" in said
    assert "the catalogue knows no item" in said
    assert p.locator(".findings li").nth(1).bounding_box()["y"] < 768  # without scrolling
    page.shot("overview")
    p.locator(".findings li", has_text="catalogue failed").get_by_role("link").click()
    p.wait_for_selector(".row[data-id]")
    p.keyboard.press("j")
    p.keyboard.press("Enter")
    p.wait_for_selector(".message")
    assert "error: the catalogue knows no item" in text(p, ".conversation")
    assert "not trained: all 4 scored episodes of the group earned 0" in text(p, ".facts")
    page.shot("stuck")


def test_curves_of_several_runs_lie_over_each_other(page: Page) -> None:
    p = page.open()
    panel = p.locator('[data-panel="reward"]')
    assert panel.locator("path.line").count() == 3
    p.get_by_label("curves of other").uncheck()
    until(p, "document.querySelectorAll('[data-panel=reward] path.line').length === 2")
    p.get_by_text("more curves").click()
    p.get_by_role("checkbox", name="turns/mean").check()
    p.wait_for_selector('[data-panel="turns/mean"] path.line')
    p.get_by_label("smoothing").fill("0.8")
    p.wait_for_selector('[data-panel="reward"] path.raw')
    assert "hidden=1" in p.url
    panel.locator("svg").hover(position={"x": 200, "y": 60})
    assert "step" in text(p, '[data-panel="reward"] .tip')
    again = p.url.removeprefix(page.site.url)
    assert page.open(again).locator('[data-panel="turns/mean"]').count() == 1  # a link to it is enough
    panel.locator("svg").click(position={"x": 200, "y": 60})
    p.wait_for_selector(".row[data-id]")
    assert p.input_value("#search").startswith("step=")


def test_episodes_are_searched_ordered_and_opened_by_keys_alone(page: Page) -> None:
    p = page.open("/#/episodes")
    p.wait_for_selector(".row[data-id]")
    assert text(p, "#counted") == "1,280 episodes"
    p.keyboard.press("/")
    p.keyboard.type("failed calls>3 tool=catalogue")
    until(p, "document.querySelector('#counted').textContent.includes('of 1,280')")
    assert text(p, "#counted").startswith("512 episodes")
    p.keyboard.press("Enter")
    p.keyboard.press("j")
    p.keyboard.press("ArrowDown")
    p.keyboard.press("k")
    p.keyboard.press("Enter")
    p.wait_for_selector(".pane h2")
    first = text(p, ".pane h2")
    assert first == p.locator('.row[aria-selected="true"]').get_attribute("data-id")
    p.keyboard.press("j")
    until(p, f"document.querySelector('.pane h2')?.textContent !== {first!r}")
    p.keyboard.press("t")
    p.wait_for_selector(".tokens .tok")
    p.keyboard.press("c")
    until(p, "location.hash.includes('color=logprob')")
    p.keyboard.press("Escape")
    until(p, "!document.querySelector('.pane h2')")
    p.keyboard.press("?")
    p.wait_for_selector("dialog[open]")
    p.keyboard.press("Escape")
    p.keyboard.press("1")
    p.wait_for_selector(".findings")
    p.go_back()
    p.wait_for_selector(".row[data-id]")
    p.get_by_role("button", name="advantage").click()
    until(p, "location.hash.includes('sort=-advantage')")


def test_a_query_that_cannot_be_read_is_answered_with_a_sentence(page: Page) -> None:
    p = page.open("/#/episodes?q=rewrd%3C1")
    until(p, "document.querySelector('.wrong').textContent.includes('did you mean')")
    page.wrong.clear()  # the browser tells of the 400
    p.fill("#search", "reward<1")
    until(p, "document.querySelector('.wrong').textContent === ''")


def test_groups_stand_side_by_side(page: Page) -> None:
    p = page.open("/#/groups?q=solved")
    p.wait_for_selector(".row .member")
    assert p.locator(".row").first.locator(".member").count() == 4
    p.locator(".row .member").nth(2).click()
    p.wait_for_selector(".facts")
    opened = text(p, ".pane h2")
    p.keyboard.press("ArrowRight")
    until(p, f"document.querySelector('.pane h2')?.textContent !== {opened!r}")
    page.shot("groups")


def test_tokens_are_coloured_and_each_says_why(page: Page) -> None:
    p = page.open("/#/episodes?q=solved+advantage%3E0&mode=tokens")
    p.wait_for_selector(".row[data-id]")
    p.keyboard.press("j")
    p.keyboard.press("Enter")
    p.wait_for_selector(".tokens .tok.by-model")
    assert p.locator(".tok.by-prompt").count() > 5
    assert p.locator(".tok.by-env").count() >= 1
    for color, classes in (("logprob", "h"), ("ratio", "p"), ("advantage", "p"), ("staleness", "h")):
        p.locator(".colors").get_by_role("button", name=color).click()
        p.wait_for_selector(f".tokens .tok[class*=' {classes}']")
        assert p.locator(".tokens .off").count() > 5  # what the model did not write has no such number
        page.shot(f"tokens-{color}")
    p.locator(".colors").get_by_role("button", name="ratio").click()
    for shade in ("p4", "p3", "p1", "a0", "n1", "n3", "n4"):  # both ways from 1, on a scale of factors
        p.wait_for_selector(f".tokens .tok.{shade}")
    p.locator(".tokens .tok.p4").first.hover()
    assert "ratio 2.718" in p.locator(".tokens .tok.p4").first.get_attribute("title")
    p.locator(".tokens .tok.p4").first.click()
    until(p, "document.querySelector('.explanation').textContent.includes('ratio 2.718')")
    p.locator(".tokens .tok").last.click()
    until(p, "document.querySelector('.explanation').textContent.includes('written by the model')")
    assert "trained with advantage +" in text(p, ".explanation")
    p.keyboard.press("ArrowLeft")
    until(p, "document.querySelectorAll('.tok.chosen').length === 1")
    assert "token=" in p.url


def test_an_episode_that_was_not_trained_has_no_ratios(page: Page) -> None:
    p = page.open("/#/episodes?q=advantage%3D0+step%3D3&id=&mode=tokens&color=ratio")
    p.wait_for_selector(".row[data-id]")
    p.keyboard.press("j")
    p.keyboard.press("Enter")
    p.wait_for_selector(".tokens .tok.plain")
    assert p.locator(".tokens .tok:is(.a0, .p1, .p2, .p3, .p4, .n1, .n2, .n3, .n4)").count() == 0
    p.locator(".tokens .tok.plain").first.hover()
    assert "ratio none: not trained" in p.locator(".tokens .tok.plain").first.get_attribute("title")


def test_faults_tools_and_waits(page: Page) -> None:
    p = page.open("/#/failures?run=2")
    p.wait_for_selector("table")
    said = text(p, ".failures")
    assert "tool_timeout" in said
    assert "100 ms" in said
    page.shot("failures")
    p.get_by_role("link", name="tool_timeout", exact=True).first.click()
    p.wait_for_selector(".row[data-id]")
    assert text(p, "#counted").startswith("10 episodes")


@pytest.mark.parametrize("address", ["/#/?run=2", "/#/failures?run=2", "/#/groups?run=2&id=train-10:0"])
def test_what_others_wrote_is_inert_wherever_it_stands(page: Page, address: str) -> None:
    p = page.open(address)
    until(p, "document.querySelector('main').textContent.includes('U+202E')")
    assert p.evaluate("window.hurt") is None
    assert p.locator("main script, main img, main iframe, main b:text-is('bold')").count() == 0
    assert "<script>window.hurt=1</script>" in p.inner_text("main")
    assert "\x1b" not in p.inner_text("main")


def test_a_hostile_conversation_is_text(page: Page) -> None:
    p = page.open("/#/episodes?run=2&id=train-10:0")
    p.wait_for_selector(".message")
    assert p.evaluate("window.hurt") is None
    assert p.locator("main script, main img, .text b").count() == 0
    assert text(p, ".message >> nth=0").count("U+202E") == 1
    assert "ESC" in text(p, ".message >> nth=0")
    assert p.evaluate("getComputedStyle(document.querySelector('.piece')).unicodeBidi") == "isolate"
    box = p.locator(".message").last.bounding_box()
    assert box["height"] < 200  # a letter with 400 accents does not paint over others
    page.shot("hostile")
    p.keyboard.press("t")
    p.wait_for_selector(".tokens .tok")
    assert p.locator(".tokens script, .tokens img").count() == 0
    page.shot("hostile-tokens")


def test_ten_megabytes_do_not_freeze_the_page(page: Page) -> None:
    p = page.open("/#/episodes?run=2&id=train-10:4")
    p.wait_for_selector(".more button")
    assert "20,000 of 10,000,000 characters" in text(p, ".conversation")
    assert p.evaluate("document.querySelector('.conversation').textContent.length") < 200_000
    p.get_by_role("button", name="show more").click()
    until(p, "document.querySelector('.more').textContent.includes('40,000 of')")
    p.get_by_role("button", name="show all").click()
    until(p, "Number(document.querySelector('.more .dim').textContent.split(' ')[0].replaceAll(',', '')) > 200000")
    p.keyboard.press("t")  # in the middle of it
    p.wait_for_selector(".tokens .tok")
    assert p.locator(".tok").count() < 5_000
    assert "of 200,002 tokens" in text(p, ".conversation .more")


def test_a_run_that_goes_on_is_shown_as_it_goes(browser: Any, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", steps=3)
    runs.write(run, 1, [Group(7, (runs.solved(7), runs.wrong(7)))])
    site = Site(tmp_path / "run")
    page = Page(browser, site)
    p = page.open()
    until(p, "(document.querySelector('.run')?.textContent || '').includes('step 1 / 3')")
    assert "live" in text(p, ".run")
    runs.write(run, 2, [Group(8, (runs.solved(8), runs.solved(8)))])
    until(p, "(document.querySelector('.run')?.textContent || '').includes('step 2 / 3')")
    until(p, "document.querySelector('[data-panel=reward] svg').textContent.includes('2')")
    run.log_message(2, "nothing has gone on for 60 s: 7 episodes wait on tool 'search' \u202e (oldest 94 s)")
    until(p, "document.querySelector('.findings').textContent.includes('the run itself said (step 2)')")
    assert "7 episodes wait on tool 'search' U+202E (oldest 94 s)".replace("U", "[U").replace("E (", "E] (") in text(
        p, ".findings"
    )
    page.shot("told")
    p.keyboard.press("2")
    until(p, "document.querySelector('#counted').textContent === '4 episodes'")
    runs.write(run, 3, [Group(9, (runs.solved(9), runs.solved(9)))])
    until(p, "document.querySelector('#counted').textContent === '6 episodes'")
    assert p.locator(".row").first.get_attribute("data-id") == "train-3:0"
    run.write_summary({"steps": 3})
    p.keyboard.press("1")
    until(p, "(document.querySelector('.run')?.textContent || '').includes('ended')")
    site.close()
    until(p, "document.querySelector('#notice').textContent.includes('does not answer')")
    page.wrong.clear()  # the browser tells of the refused connection
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_day_and_by_night(browser: Any, site: Site, scheme: str) -> None:
    page = Page(browser, site, color_scheme=scheme)
    p = page.open("/#/episodes?run=0&id=train-30:0&mode=tokens")
    p.wait_for_selector(".tokens .tok.by-model")
    for selector in ("body", ".row .id", ".dim", ".tok.by-model", ".tok.by-prompt", ".tok.by-env", "nav a", ".bad"):
        assert p.evaluate(CONTRAST, selector) >= 4.5, selector
    for name, address in (
        ("overview", "/"),
        ("episode", "/#/episodes?run=0&id=train-30:2"),
        ("failures", "/#/failures?run=2"),
    ):
        page.open(address)
        p.wait_for_timeout(300)
        assert p.evaluate("document.documentElement.scrollWidth") <= 1366
        page.shot(f"{scheme}-{name}")
    p.click("#theme")
    assert p.evaluate("document.documentElement.dataset.theme") == {"light": "dark", "dark": "light"}[scheme]
    page.close()


CONTRAST = """selector => {
  const node = document.querySelector(selector);
  if (!node) return 21;
  const read = c => c.match(/[\\d.]+/g).map(Number);
  let behind = [];
  for (let n = node; n; n = n.parentElement) behind.push(read(getComputedStyle(n).backgroundColor));
  let back = [255, 255, 255];
  for (const [r, g, b, a = 1] of behind.reverse()) back = back.map((v, i) => v * (1 - a) + [r, g, b][i] * a);
  const light = c => {
    const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [a, b] = [light(read(getComputedStyle(node).color).slice(0, 3)), light(back)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""
