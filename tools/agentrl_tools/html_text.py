"""HTML as text: what a reader would see, with a line for each block."""

from __future__ import annotations

import re
from contextlib import suppress
from html.parser import HTMLParser
from urllib.parse import urljoin

HIDDEN = {"script", "style", "noscript", "template", "svg", "iframe", "object"}
INLINE = {
    *("a", "abbr", "b", "cite", "code", "em", "font", "i", "img", "kbd", "mark", "q", "s", "small", "span", "strong"),
    *("sub", "sup", "time", "u", "var"),
}
CELLS = {"td", "th"}


def html_to_text(html: str, url: str | None = None) -> str:
    """Convert a page to text.

    Args:
        url: the page's own; then links are kept, as ``[words](URL)``.
    """
    page = _Page(url)
    with suppress(AssertionError):  # the parser's, of a declaration that is none: what comes before is the page
        page.feed(html)
        page.close()
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(page.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _join(url: str, link: str) -> str | None:
    try:
        return urljoin(url, link)
    except ValueError:  # such as http://[
        return None


class _Page(HTMLParser):
    def __init__(self, url: str | None) -> None:
        super().__init__(convert_charrefs=True)
        self.url, self.parts = url, list[str]()
        self._hidden: str | None = None  # the element that is being left out
        self._depth = 0  # of elements of that name inside it
        self._preformatted = 0
        self._links: list[str | None] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self._hidden is not None:
            self._depth += tag == self._hidden
        elif tag in HIDDEN:
            self._hidden, self._depth = tag, 1
        elif tag == "a":
            href = dict(attributes).get("href")
            link = _join(self.url, href) if self.url and href and not href.startswith(("#", "javascript:")) else None
            self._links.append(link)
            self.parts.append("[" if link else "")
        elif tag == "img":
            self.parts.append(dict(attributes).get("alt") or "")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag in CELLS:
            self.parts.append(" | ")
        elif tag not in INLINE:
            self.parts.append("\n")
            self._preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._hidden is not None:
            self._depth -= tag == self._hidden
            if self._depth == 0:
                self._hidden = None
        elif tag == "a":
            link = self._links.pop() if self._links else None
            self.parts.append(f"]({link})" if link else "")
        elif tag not in INLINE and tag not in CELLS:
            self.parts.append("\n")
            self._preformatted -= tag == "pre" and self._preformatted > 0

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in HIDDEN:
            self.handle_starttag(tag, attributes)

    def handle_data(self, data: str) -> None:
        if self._hidden is None:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))
