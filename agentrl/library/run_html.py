"""A run in a notebook: what it is, its rewards, and how to go on."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.view.escaping import escape_html
from agentrl.view.store import Store
from agentrl.view.svg_chart import Curve, draw_curves

STYLE = """<style>
.agentrl figure{margin:.5em 0;max-width:30em} .agentrl svg{width:100%} .agentrl path{fill:none;stroke-width:1.6}
.agentrl text{font:11px sans-serif;fill:currentColor;opacity:.7} .agentrl .grid{stroke:currentColor;opacity:.15}
.agentrl path.c0{stroke:#3b78c9} .agentrl path.c1{stroke:#2f9e63} .agentrl path.c2{stroke:#c9743b}
.agentrl circle.c1{fill:#2f9e63} .agentrl circle.c2{fill:#c9743b} .agentrl circle.c0{fill:#3b78c9}
.agentrl span.c0{color:#3b78c9} .agentrl span.c1{color:#2f9e63} .agentrl span.c2{color:#c9743b}
.agentrl figcaption span{margin-left:.8em} .agentrl table{font-variant-numeric:tabular-nums}
.agentrl .note{opacity:.75} .agentrl td,.agentrl th{text-align:right;padding:0 .6em}
</style>"""
CURVES = (("training", "reward"), ("held out", "eval/reward"), ("held out, greedy", "eval/greedy_reward"))


def format_run(store: Store, facts: Iterable[str]) -> str:
    """Format a run as a fragment of HTML: no scripts, everything escaped."""
    series = store.metrics.series
    curves = [Curve(label, *series(name), dots=name.startswith("eval/")) for label, name in CURVES]
    figure = draw_curves("reward", curves)
    facts = " &middot; ".join(escape_html(fact) for fact in facts)
    return (
        f'<div class="agentrl">{STYLE}<b>Run</b> <code>{escape_html(str(store.folder))}</code><br>{facts}{figure}</div>'
    )
