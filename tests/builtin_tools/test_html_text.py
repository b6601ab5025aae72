"""HTML as text."""

from __future__ import annotations

import pytest
from agentrl_tools.html_text import html_to_text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>one <b>bold</b>\n  word</p><p>two</p>", "one bold word\n\ntwo"),
        ("<ul><li>a<li>b</ul>", "- a\n- b"),
        ("<table><tr><td>1</td><td>2</td></tr></table>", "| 1 | 2"),
        ("a &amp; b &lt;c&gt; &eacute;", "a & b <c> é"),
        ("x<script>if (a < b) alert('</p>')</script>y<style>p{}</style>z", "xyz"),
        ("a<svg><svg><text>no</text></svg>no</svg>b", "ab"),
        ("<pre>  keep\n  lines</pre>", "keep\nlines"),
        ("<img alt='a cat' src=x><br/>end", "a cat\nend"),
        ("<p>unclosed <i>tags", "unclosed tags"),
        ("</div></p>stray", "stray"),
        ("<!-- hidden --><!doctype html>seen", "seen"),
        ("", ""),
    ],
)
def test_a_page_is_what_a_reader_sees(html: str, text: str) -> None:
    assert html_to_text(html) == text


def test_links_are_whole() -> None:
    html = '<a href="/b?c">there</a> <a href="#x">here</a> <a>none</a> <a href="javascript:x()">no</a>'
    assert html_to_text(html, "https://a.org/d/") == "[there](https://a.org/b?c) here none no"
    assert html_to_text(html) == "there here none no"


def test_a_link_or_a_declaration_that_is_none_does_no_harm() -> None:
    assert html_to_text('<p>a <a href="http://[">b</a>', "https://a.org/") == "a b"
    assert html_to_text("<p>a<![odd[b") in ("a", "a<![odd[b")
