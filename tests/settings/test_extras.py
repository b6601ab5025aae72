"""Packages beyond the plain install are asked for before a run does anything."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl import cli


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [
        ("--env prompts --env.data {data} --env.rewards math", "math_verify", "math"),
        ("--env prompts --env.data {data} --run.trackers tensorboard", "accelerate", "track"),
        ("--env math-tools --learner.optimizer adamw_8bit", "bitsandbytes", "quant"),
        ("--env math-tools --lora.rank 4", "peft", "lora"),
        ("--env gym:FrozenLake-v1", "gymnasium", "gym"),
        ("--env textarena:Wordle-v0", "textarena", "textarena"),
        ("--env reasoning-gym:chain_sum", "reasoning_gym", "reasoning-gym"),
        ("--env openenv:http://127.0.0.1:9", "websockets", "openenv"),
        ("--env shop --tools mcp:server", "mcp", "mcp"),
    ],
)
def test_what_a_run_needs_is_asked_for_before_the_first_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    missing: str,
    extra: str,
) -> None:
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"prompt": f"{n}?", "solution": "1"}) + "\n" for n in range(20)))
    monkeypatch.setattr(
        "agentrl.settings.registry.find_spec", lambda name: None if name == missing else find_spec(name)
    )
    code = cli.main(["train", *words.format(data=data).split(), "--run.dir", str(run)])
    assert code == 2
    assert f"pip install 'agentrl-gym[{extra}]'" in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()
