"""Panels of plugins: what a function returns is shown, and what it does wrong is said in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.view.panels import Curves, Table, compute_panel, load_panels, render_panel, to_json
from agentrl.view.store import Store, open_runs
from agentrl.view.svg_chart import Curve
from tests.helpers import runs
from tests.helpers.browsing import Page, chromium
from tests.helpers.sites import Site

CODE = '''
from agentrl.view.panels import Curves, Table
from agentrl.view.svg_chart import Curve


def tasks(store):
    """Count the episodes of each task."""
    counts = store.now.table["task"].value_counts().to_pylist()
    return Table("episodes by task", ["task", "<b>episodes</b>"], [[c["values"], c["counts"]] for c in counts])


def lengths(store):
    return Curves("reward again", [Curve("reward", *store.metrics.series("reward"))])


def broken(store):
    return 1 / 0


def wrong(store):
    return "<script>"


def nothing(store):
    return None
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"panels_of_{tmp_path.name}".replace("-", "_")
    Path(f"{name}.py").write_text(CODE)
    return ",".join(f"{name}.py:{function}" for function in ("tasks", "lengths", "broken", "wrong", "nothing"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    runs.broken(tmp_path / "run", steps=4)
    [opened] = open_runs([str(tmp_path / "run")])
    opened.refresh()
    return opened


def test_a_panel_is_a_table_or_curves_and_one_that_raises_says_so(plugin: str, store: Store) -> None:
    shown = [compute_panel(name, panel, store) for name, panel in load_panels(plugin.split(",")).items()]
    tasks, lengths, broken, wrong, nothing = shown
    assert isinstance(tasks, Table)
    assert sum(int(str(count)) for _, count in tasks.rows) == store.now.table.num_rows
    assert isinstance(lengths, Curves)
    assert to_json(lengths)["curves"][0]["xs"] == [1.0, 2.0, 3.0, 4.0]
    assert "ZeroDivisionError" in str(broken)
    assert "returned a str, and not a Table, Curves or None" in str(wrong)
    assert nothing is None


def test_a_panel_that_exits_says_so_and_nothing_else_ends(store: Store) -> None:
    def exits(_: Store) -> None:
        raise SystemExit(3)

    assert "SystemExit: 3" in str(compute_panel("exits", exits, store))


def test_what_a_panel_says_is_escaped_and_cut(store: Store) -> None:
    html = render_panel(Table("<i>", ["<b>"], [["<script>" + "x" * 9000], [None], [0.123456]]))
    assert "<script>" not in html
    assert "<i>" not in html
    assert len(html) < 2000
    assert "0.1235" in html
    many = to_json(Table("many", ["n"], [[n] for n in range(700)]))
    assert (len(many["rows"]), many["more"]) == (500, 200)


def test_panels_of_no_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells under 2 names"):
        Table("t", ["a", "b"], [[1]])
    with pytest.raises(ValueError, match="not one finite value for each of its steps"):
        Curves("t", [Curve("a", [1, 2], [0.0, float("nan")])])


def test_the_report_has_them(plugin: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(store.folder), "--panels", plugin]) == 0
    html = (store.folder / "report.html").read_text()
    assert "episodes by task" in html
    assert "&lt;b&gt;episodes" in html
    assert "ZeroDivisionError" in html
    assert main(["report", str(store.folder), "--panels", "no_such.py:panel"]) == 2
    assert "there is no file no_such.py" in capsys.readouterr().err


def test_the_page_is_sent_them_as_data(plugin: str, store: Store) -> None:
    site = Site(store.folder, panels=plugin)
    titles = [panel["title"] for panel in site.json("panels?run=0")]
    assert titles[:2] == ["episodes by task", "reward again"]
    assert all(title.startswith("panel ") for title in titles[2:])
    assert json.dumps(site.json("panels?run=0")).count("<script>") == 0
    assert site.close() == 0


@pytest.mark.browser
def test_the_page_shows_them(plugin: str, store: Store) -> None:
    site = Site(store.folder, panels=plugin)
    with chromium() as browser:
        for width in (1366, 390):
            page = Page(browser, site, viewport={"width": width, "height": 768})
            shown = page.open("/")
            shown.wait_for_selector("text=episodes by task")
            assert shown.locator("text=<b>episodes</b>").count() == 1
            assert shown.locator("figure[data-panel='reward again']").count() == 1
            shown.locator("text=episodes by task").scroll_into_view_if_needed()
            page.shot(f"panels-{width}")
            page.close()
    assert site.close() == 0
