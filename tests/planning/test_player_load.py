"""Players and their controller in a plan: how many are enough, and which number is too small."""

from __future__ import annotations

import pytest

from agentrl.cli.dispatch import main
from agentrl.planning.player_load import describe_player_load, measure_player_load
from agentrl.planning.workload import Workload


def test_long_contexts_and_many_turns_take_more_players() -> None:
    small = measure_player_load(Workload(512, 6_000, 2_000), 8, None, 73.0)
    large = measure_player_load(Workload(4_096, 32_000, 8_000), 16, 30, 60.0)
    assert small.players == 1
    assert large.players > 1
    assert large.controller < 0.05
    assert describe_player_load(small, 2).endswith("; 1 is enough")
    assert describe_player_load(large, 1).endswith(f"; 1 would be in the engine's way: --players {large.players}")
    assert describe_player_load(large, 0).endswith(f"; {large.players} are enough")


def test_a_plan_counts_them_where_there_are_players(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "1xh100", "--model", "nano", "--rollout.tasks_per_step", "4"]
    assert main(words) == 0
    assert "players:" not in capsys.readouterr().out
    assert main([*words, "--players", "2"]) == 0
    assert "players: " in capsys.readouterr().out
