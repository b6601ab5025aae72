"""``agentrl new``: a package of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl import new
from agentrl.errors import ConfigError, nearest
from agentrl.layers import read_overrides
from agentrl.new import Kind

HELP = """usage: agentrl new {env,tool} NAME [--out DIR]

  agentrl new env crates        writes agentrl-crates/: a small environment with a tool of its own, tests, a README
  agentrl new tool weather-report

The package installs, registers under NAME, passes its tests and `agentrl check`. Then change it.
"""
KINDS: dict[str, Kind] = {"env": "env", "tool": "tool"}


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    if words[0] not in KINDS or len(words) < 2 or words[1].startswith("-"):
        hint = nearest(words[0], KINDS) if words[0] not in KINDS else ""
        raise ConfigError(f"agentrl new takes: env NAME, or tool NAME; not {' '.join(words)!r}{hint}")
    _, given = read_overrides(words[2:])
    for name in given.keys() - {"out"}:
        raise ConfigError(f"{name}: agentrl new takes no such setting{nearest(name, ['out'])}")
    kind, name = KINDS[words[0]], words[1]
    folder = new.write(kind, name, Path(str(given["out"])) if "out" in given else None)
    steps = (f"pip install -e '{folder}[test]'", f"agentrl check {kind} {name}", f"pytest {folder}")
    print(f"{folder} is there. Then:\n\n  " + "\n  ".join(steps))
    return 0
