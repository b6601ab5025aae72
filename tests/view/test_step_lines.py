"""Lines of a log by step, found as it grows; more of it is in the tests of timelines."""

from __future__ import annotations

from pathlib import Path

from agentrl.view.step_lines import StepLines


def test_a_line_is_read_by_its_step_and_kind(tmp_path: Path) -> None:
    log = tmp_path / "processes.jsonl"
    lines = StepLines(log)
    lines.refresh()
    assert (lines.steps(), lines.read(1, "step")) == ([], None)
    log.write_text(
        '{"step": 1, "kind": "step", "x": 1}\n{"step": 2, "kind": "step", "x":\n{"step": 3, "kind": "step", "x'
    )
    lines.refresh()
    assert lines.steps() == [1, 2]
    assert lines.read(1, "step") == {"step": 1, "kind": "step", "x": 1}
    assert lines.read(1, "save") is None
    assert lines.read(2, "step") is None
    log.unlink()
    assert lines.read(1, "step") is None
