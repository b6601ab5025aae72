"""A browser that looks at ``agentrl view``, and what goes wrong on a page."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.sites import Site

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SHOTS = os.environ.get("AGENTRL_SHOTS")  # a folder for screenshots, to be looked at


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium; skip where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here: make browser installs it")
    with api.sync_playwright() as started:
        made = started.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield made
        made.close()


class Page:
    """A page, and what went wrong on it."""

    def __init__(self, browser: Any, site: Site, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1366, "height": 768}, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.site = site
        self.wrong: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.wrong.append(str(e)))
        self.page.on("request", lambda r: None if r.url.startswith(site.url) else self.elsewhere.append(r.url))

    def open(self, address: str = "/") -> Any:
        self.page.goto("about:blank")  # another address of the same page would not load it anew
        whole = f"{self.site.url}/?token={self.site.token}{address.removeprefix('/')}"
        self.page.goto(whole, wait_until="domcontentloaded")
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def shot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=f"{SHOTS}/{name}.png")

    def close(self) -> None:
        self.context.close()
        assert self.elsewhere == []
        assert self.wrong == []


Pages = Callable[..., Page]  # opens a page of a site; it is closed when the test ends


def until(page: Any, holds: str) -> None:
    """Until a JavaScript expression holds; the page's policy forbids playwright's own waiting, which is eval."""
    end = time.monotonic() + 60
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        page.wait_for_timeout(20)


def text(page: Any, selector: str) -> str:
    return str(page.inner_text(selector))
