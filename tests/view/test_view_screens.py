"""Every view and dialog of the page: on a phone as on a desk, with what somebody looks for in it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.credit import record_held_out
from agentrl.environments.task_sampler import HELD_OUT
from agentrl.evaluation.scope import EvaluationScope, write_scope
from agentrl.tools.offered_tools import OfferedTools
from agentrl.types import CallRecord, Group
from agentrl.view.escaping import escape_controls
from tests.helpers import runs
from tests.helpers.browsing import Page, Pages, text, until
from tests.helpers.sites import Site
from tests.view.test_threads import agents_episode

pytestmark = pytest.mark.browser
PHONE = {"width": 390, "height": 844}
SCREENS = {
    "overview": "/",
    "episodes": "/#/episodes",
    "episode": "/#/episodes?id=train-10:0",
    "tokens": "/#/episodes?id=train-10:2&mode=tokens&color=ratio",
    "threads": "/#/episodes?id=train-5:3",
    "threads' tokens": "/#/episodes?id=train-5:3&mode=tokens&token=8",
    "groups": "/#/groups?q=split%3Dtrain",
    "failures": "/#/failures",
    "heldout": "/#/heldout",
    "settings": "/#/settings",
    "processes": "/#/processes",
    "all settings": "/#/settings?only=all",
}
RAW = '<tool_call>{"name": "price", "arguments": {"item": hat}}</tool_call>'
WHY = "invalid JSON in the tool call: Expecting value at character 39"
PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of one item.\nMore.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string", "description": "its name"}}},
    },
}


def unread(task: int) -> Any:
    """It writes a call that is no JSON, and is told so."""
    said: Any = [
        {"role": "user", "content": f"What do {task} hats cost?"},
        {"role": "assistant", "content": "", "tool_calls": [runs.call("")]},
        {"role": "tool", "content": f"error: {WHY}", "tool_call_id": "c0"},
        {"role": "assistant", "content": "I do not know."},
    ]
    made = runs.played(task, said, 0.0, calls=[CallRecord(0, "", "parse", 0.0)], info=runs.right(task))
    turn = replace(runs.segment("model", RAW), author="model")
    return replace(made, segments=(made.segments[0], turn, *made.segments[2:]))


def written(folder: Path) -> Path:
    run = runs.start(folder)
    for step in range(1, 11):
        at = {"the engine": 4.0, "tool 'price'": 3.5, "the learner": 2.5}
        players = [["player", f"a-machine-of-a-long-name-{n}.cluster.example-1234{n}", 8, at] for n in range(3)]
        run.log_processes(step, {"seconds": 10.0, "processes": players})
        played = [Group(40, (agents_episode(), runs.wrong(7)))] if step == 5 else []
        runs.write(run, step, [Group(step, (unread(step), runs.wrong(step), runs.solved(step))), *played])
    for step, episode in ((0, runs.wrong), (10, runs.solved)):
        groups = [Group(task, (episode(task), episode(task))) for task in range(20, 24)]
        groups.append(Group(24, (runs.solved(24), runs.solved(24))))
        run.write_trajectories(step, record_held_out(groups), "test")
    offered = OfferedTools()
    offered.add([PRICE])
    run.write_tools(offered)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("runs")
    other = written(folder / "a-run-of-a-long-name-20261122-011801-math-tools")
    config = other / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", "lr = 0.005"))
    made = Site(written(folder / "run"), other)
    yield made
    made.close()


@pytest.fixture
def desk(pages: Pages, site: Site) -> Page:
    return pages(site)


@pytest.fixture
def phone(pages: Pages, site: Site) -> Page:
    return pages(site, viewport=PHONE, has_touch=True)


OUTSIDE = """() => {
  const scrolled = n => n && (getComputedStyle(n).overflowX !== "visible" ? n : scrolled(n.parentElement));
  return [...document.querySelectorAll("body *")].filter(n => {
    const box = n.getBoundingClientRect(), inner = scrolled(n.parentElement);
    return box.width && box.height && (box.right > innerWidth + 1 || box.left < -1)
      && (!inner || inner === document.querySelector("main") || inner === document.body);
  }).map(n => n.tagName + "." + n.className + " " + n.textContent.slice(0, 40));
}"""


@pytest.mark.parametrize("name", SCREENS)
def test_nothing_is_wider_than_a_phone(phone: Page, name: str) -> None:
    p = phone.open(SCREENS[name])
    p.wait_for_timeout(150)
    phone.shot(f"phone-{name}")
    assert p.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert p.evaluate("document.querySelector('main').scrollWidth") == PHONE["width"]
    assert p.evaluate(OUTSIDE) == []
    for button in ("#theme", "#help", "nav a[aria-current]"):
        box = p.locator(button).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]


def test_on_a_phone_an_answer_has_the_width_of_the_screen(phone: Page) -> None:
    p = phone.open("/#/heldout")
    p.wait_for_selector("[data-task] td.said")
    for selector in ("[data-task='20'] td.said", "[data-task='20'] td >> nth=3"):
        assert p.locator(selector).bounding_box()["width"] > PHONE["width"] / 2, selector


def test_on_a_phone_the_reward_is_seen_in_every_list(phone: Page) -> None:
    p = phone.open("/#/episodes?q=split%3Dtrain")
    p.wait_for_selector(".row[data-id] .tile")
    assert "reward" in text(p, ".head")
    for selector in (".row[data-id] .tile", ".row .question", ".row .expected"):
        box = p.locator(selector).first.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE["width"], selector
    p.locator(".row[data-id]").first.click()
    p.wait_for_selector(".facts")
    p.get_by_role("button", name="close").click()
    p.wait_for_selector(".row[data-id]")


@pytest.mark.parametrize("where", ["desk", "phone"])
def test_every_dialog_says_what_it_is_there_for(where: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(where)
    p = page.open("/#/episodes")
    p.click("#help")
    p.wait_for_selector("dialog[open]")
    keys = text(p, "dialog")
    for said in (
        "1 to 7",
        "overview, episodes, groups",
        "next and previous episode",
        "messages or tokens",
        "this list",
    ):
        assert said in keys
    assert p.locator("dialog dt").count() == p.locator("dialog dd").count() == 9
    inside(page, "dialog")
    page.shot(f"{where}-keys")
    p.get_by_role("button", name="close").click()
    p.locator("summary", has_text="fields").click()
    fields = text(p, ".fields .card")
    for said in ("step task sample reward", "question answer expected", "split stop fault", "failed solved faulted"):
        assert said in fields
    inside(page, ".fields .card")
    page.shot(f"{where}-fields")
    p = page.open("/")
    p.get_by_text("more curves").click()
    assert "turns/mean" in text(p, ".choices")
    inside(page, ".choices")
    assert "[object" not in keys + fields + text(p, "body")


def inside(page: Page, selector: str) -> None:
    box, width = page.page.locator(selector).bounding_box(), page.page.viewport_size["width"]
    assert 0 <= box["x"] < box["x"] + box["width"] <= width


@pytest.mark.parametrize("name", SCREENS)
def test_no_screen_shows_an_object_or_nothing_in_place_of_words(desk: Page, name: str) -> None:
    p = desk.open(SCREENS[name])
    p.wait_for_timeout(150)
    desk.shot(f"desk-{name}")
    said = text(p, "body")
    for wrong in ("[object", "undefined", "NaN"):
        assert wrong not in said


def test_a_list_tells_what_was_asked_said_and_expected(desk: Page) -> None:
    p = desk.open("/#/episodes?q=split%3Dtrain")
    p.wait_for_selector(".row .about")
    row = text(p, ".row[data-id='train-10:2']")
    assert "What do 10 hats cost?" in row
    assert "said The answer is 70." in row
    assert "expected 70" in row
    p.fill("#search", "expected=70")
    until(p, "document.querySelector('#counted').textContent.startsWith('3 episodes')")
    p = desk.open("/#/groups?q=split%3Dtrain")
    p.wait_for_selector(".row .about")
    assert "What do 10 hats cost?" in text(p, ".row >> nth=0")
    p = desk.open("/#/episodes?id=train-10:2")
    p.wait_for_selector(".facts")
    assert "70" in text(p, ".facts dt:text-is('expected') + dd")


def test_a_call_that_could_not_be_read_is_shown_as_it_was_written(desk: Page) -> None:
    p = desk.open("/#/episodes?id=train-10:0")
    p.wait_for_selector(".call")
    call = text(p, ".call")
    assert "(a call that could not be read)" in call
    assert RAW in call
    assert WHY in call
    assert "{}" not in call.replace(RAW, "")


@pytest.mark.parametrize("where", ["desk", "phone"])
def test_an_agents_episode_is_a_tree_in_the_order_of_time(where: str, request: pytest.FixtureRequest) -> None:
    p = request.getfixturevalue(where).open("/#/episodes?id=train-5:3")
    p.wait_for_selector(".tree")
    lines = [line.split("\n")[0] for line in p.locator(".thread-line").all_inner_texts()]
    assert lines == ["main", "sub-agent", "side call", "compaction"]
    assert p.locator("[data-line='0'] rect").count() == 2
    told = text(p, ".conversation")
    order = ["task", "ask", "help", "done", "told", "hm", "goes on with a shorter history", "known", "right"]
    assert [told.index(word, told.index("in the order of time")) for word in order] == sorted(
        told.index(word, told.index("in the order of time")) for word in order
    )
    inside_helper = p.locator("details[data-thread='1'] .message").all_inner_texts()
    assert ["done" in m for m in inside_helper] == [False, True]
    assert "behind turn 1 of main" in text(p, "details[data-thread='1'] > summary")
    title = p.locator("details[data-thread='2']")
    assert not title.locator(".message").first.is_visible()
    p.locator("[data-line='2']").click()
    until(p, "document.querySelector(\"details[data-thread='2']\").open")
    assert "seen, not trained" in title.inner_text()
    p = request.getfixturevalue(where).open("/#/episodes?id=train-5:3&mode=tokens&token=8")
    p.wait_for_selector(".explanation li")
    assert "a side call is seen and not learned from" in text(p, ".explanation")
    assert "side call: a side call, its answer too" in text(p, ".tokens")


def test_settings_and_what_differs_between_runs(desk: Page) -> None:
    p = desk.open("/#/settings")
    p.wait_for_selector("[data-setting]")
    named = p.locator("[data-setting]").evaluate_all("rows => rows.map(r => r.dataset.setting)")
    assert {"env.name", "model", "steps", "learner.lr"} <= set(named)
    assert "seed" not in named  # the default
    assert "0.001" in text(p, "[data-setting='learner.lr']")
    assert "1e-06" in text(p, "[data-setting='learner.lr']")
    p.get_by_role("link", name="what differs").click()
    until(p, "document.querySelectorAll('[data-setting]').length === 1")
    assert "0.005" in text(p, "[data-setting='learner.lr']")
    p.get_by_role("link", name="all", exact=True).click()
    p.wait_for_selector("[data-setting='seed']")
    assert "The price of one item." in text(p, ".tool summary")
    assert "item" in text(p, ".tool")
    assert "its name" in text(p, ".tool")


def test_held_out_tasks_stand_beside_themselves(desk: Page) -> None:
    p = desk.open("/#/heldout")
    p.wait_for_selector("[data-task]")
    said = text(p, ".heldout")
    assert "step 0 and step 10" in said
    assert "fixed 4" in said
    assert "still right 1" in said
    assert "it is better" in said or "no clear difference" in said
    row = text(p, "[data-task='20']")
    for part in ("fixed", "What do 20 hats cost?", "expected 140", "I do not know.", "The answer is 140."):
        assert part in row
    p.get_by_role("link", name="still right 1").click()
    until(p, "document.querySelectorAll('[data-task]').length === 1")
    p.locator("[data-task='24'] a").last.click()
    p.wait_for_selector(".pane h2")
    assert text(p, ".pane h2").startswith("test-10:")


def test_the_page_spells_out_the_same_characters_as_the_terminal(desk: Page) -> None:
    """All of Unicode that the interpreter knows, alone and in sequences of selectors."""
    p = desk.open("/")
    single = [c for code in range(0x110000) if unicodedata.category(c := chr(code)) not in ("Cn", "Cs", "Lo")]
    single += list("\u115f\u1160\u3164\uffa0\u4e00\uac00")
    pairs = ["\u2764\ufe0f", "\ufe0f\ufe0e", "1\ufe0f\u20e3", "a\ufe0f\ufe0f", "\ufe0e"]
    shown = p.evaluate(SHOWN, [json.dumps(f"a{c}b") for c in single] + [json.dumps(t) for t in pairs])
    expected = [escape_controls(f"a{c}b") for c in single] + [escape_controls(t) for t in pairs]
    assert [(s, e) for s, e in zip(shown, expected, strict=True) if s != e] == []
    halves = p.evaluate(SHOWN, [json.dumps("a\ud800b"), json.dumps("\udfff")])
    assert halves == ["a[U+D800]b", "[U+DFFF]"]


# A label stands for its character, and "\u00d7" in it for how often that is repeated.
SHOWN = """async texts => {
  const { visible } = await import("/static/dom.js");
  const told = node => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    const [label, times] = node.textContent.split("\\u00d7");
    return `[${label}]`.repeat(Number(times || 1));
  };
  return texts.map(text => [...visible(JSON.parse(text)).childNodes].map(told).join(""));
}"""


def test_two_evaluations_are_told_how_they_are_compared(pages: Pages, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, trials in ((a, 1), (b, 2)):
        run = runs.start(folder)
        write_scope(folder, EvaluationScope(tasks=2, sampled=trials, greedy=False))
        tasks = [Group(t, (runs.solved(t), runs.wrong(t))[:trials]) for t in (HELD_OUT, HELD_OUT + 1)]
        run.write_trajectories(0, record_held_out(tasks), "test")
    site = Site(a, b)
    try:
        page = pages(site, viewport=PHONE)
        p = page.open("/#/heldout")
        assert f"agentrl compare {a} {b}" in text(p, ".heldout")
        p = page.open("/#/settings")
        p.wait_for_selector("[data-setting='tasks']")
        named = p.locator("[data-setting]").evaluate_all("rows => rows.map(r => r.dataset.setting)")
        assert {"tasks", "split", "env.name"} <= set(named)
        assert not [name for name in named if name.startswith("learner.")]
        p = page.open("/#/episodes?run=1&id=test-0:3")
        p.wait_for_selector(".facts")
        assert "chunk 0 \u00b7 task 1 of split test \u00b7 trial 2 of 2" in text(p, ".pane")
        p = page.open("/#/?run=1")
        p.wait_for_selector(".findings li")
        assert "2 of 2 tasks are here" in text(p, ".findings")
        assert not p.locator("input[type=range]").is_visible()
        p.goto("about:blank")  # it asks no more
    finally:
        site.close()
