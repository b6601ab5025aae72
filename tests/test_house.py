"""The rooms: who may import whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_each_room_imports_only_from_those_below_it() -> None:
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    said = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert said.returncode == 0, said.stdout
    assert "3 kept, 0 broken" in said.stdout
