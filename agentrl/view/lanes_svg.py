"""A step's lanes as SVG, for a page without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from agentrl.view.text import visible

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 460, 104, 46, 17, 6, 20
COLORS = {"generate": 0, "tools": 1, "tool/": 1, "env": 2, "learn": 3, "reward": 4, "evaluate": 4, "render": 5}
OTHERS = 5


def color(owner: str) -> str:
    """Name the class of an owner's colour; what is idle or queues has none."""
    if owner in ("idle", "queue"):
        return "none"
    return f"c{COLORS.get('tool/' if owner.startswith('tool/') else owner, OTHERS)}"


def draw_lanes(title: str, picture: Mapping[str, Any]) -> str:
    """Return a figure: what was waited for, then a row a lane, over the seconds of the step."""
    wall = picture["seconds"] or 1.0
    waited = [(a, b, owner) for a, b, owner in picture["waited"]]
    rows = [("waited for", None, waited)]
    rows += [(name, seconds, [(a, b, name) for a, b in its]) for name, seconds, its in picture["lanes"]]
    height = TOP + ROW * len(rows) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / wall
    parts = []
    for i, (name, seconds, bars) in enumerate(rows):
        y = TOP + ROW * i
        parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{_words(name[:18])}</text>')
        parts += [_bar(LEFT + a * scale, y + 2, (b - a) * scale, owner, b - a) for a, b, owner in bars]
        if seconds is not None:
            parts.append(f'<text x="{WIDTH - RIGHT + 5}" y="{y + 11}">{seconds:.2f} s</text>')
    foot = height - 6
    parts.append(f'<text x="{LEFT}" y="{foot}">0</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{foot}" text-anchor="end">{wall:.2f} s</text>')
    box = f'class="lanes" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_words(title)}"'
    return f"<figure><figcaption><b>{_words(title)}</b></figcaption><svg {box}>{''.join(parts)}</svg></figure>"


def _bar(x: float, y: float, width: float, owner: str, seconds: float) -> str:
    box = f'x="{x:.1f}" y="{y}" width="{max(width, 0.4):.2f}" height="{ROW - 5}"'
    return f'<rect class="{color(owner)}" {box}><title>{_words(owner)} {seconds:.3f} s</title></rect>'


def _words(text: str) -> str:
    return escape(visible(text))
