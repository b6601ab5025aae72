"""Two processes of the learner, two vLLM servers and two players, one of each killed on the way: the usual reward.

These really run vLLM: `make long ARGS=vllm`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
from agentrl.models.source import locate_model
from tests.helpers.fleet import SETTINGS, FleetRun, find_child, kill

pytestmark = [pytest.mark.vllm, pytest.mark.long]
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 3 -m agentrl train --steps 60"


def test_one_of_each_is_killed_and_the_run_comes_to_the_usual_reward(tmp_path: Path) -> None:
    one, two = (VLLMServer(ServerSettings(locate_model("nano"))) for _ in range(2))
    with one.wait(), two.wait():
        servers = ["--engine", "server", "--engine.urls", f"{one.url},{two.url}"]
        run = FleetRun([*TORCHRUN.split(), *SETTINGS.split(), *servers], tmp_path)
        again: VLLMServer | None = None
        try:
            run.wait_for_steps(2)
            kill(two.pid)
            two.close()
            again = VLLMServer(ServerSettings(locate_model("nano"), port=two.port))
            run.wait_for_steps(5)
            kill(find_child(run.find_rank(0), "player"))
            run.wait_for_text(f"{two.url} is back")  # it starts for a minute: there are steps enough for that
            kill(run.find_rank(1))
            run.end_well()
        finally:
            run.process.kill()
            if again is not None:
                again.close()
    told = run.read_log()
    assert "going on after step" in told
    assert "of the run ended with status -9; another one is started" in told
