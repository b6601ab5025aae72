"""Choices of how weights go to servers: by a setting, by what they were started for, and by what the learner has."""

from __future__ import annotations

import pytest

from agentrl.engines.vllm import transfer_backend
from agentrl.engines.vllm.transfer_backend import choose_backend, find_setting_problem, plan_backend
from agentrl.errors import UserError

URL = "http://gpu7:8000"


@pytest.mark.parametrize("offered", ["memory", "nccl", "nccl_m2n", "gloo"])
def test_servers_are_given_weights_as_they_were_started_for(offered: str) -> None:
    assert choose_backend("auto", URL, offered, has_gpu=True) == offered
    assert choose_backend(offered, URL, offered, has_gpu=True) == offered


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"nccl: http://gpu7:8000 was started for memory; .* --backend nccl"):
        choose_backend("nccl", URL, "memory", has_gpu=True)
    with pytest.raises(UserError, match=r"between GPUs, and the learner has none; .* --backend memory"):
        choose_backend("auto", URL, "nccl", has_gpu=False)
    for setting, offered in (("ipc", "memory"), ("auto", "ipc")):
        with pytest.raises(UserError, match=r"vLLM in this process alone .--engine vllm."):
            choose_backend(setting, URL, offered, has_gpu=True)
    assert "set it to memory" in find_setting_problem("nccl", has_gpu=False, world_size=1)
    assert "set it to nccl" in find_setting_problem("nccl_m2n", has_gpu=True, world_size=1)
    assert "nccl-extensions" in find_setting_problem("nccl_m2n", has_gpu=True, world_size=2)


def test_servers_of_the_run_are_started_for_what_suits_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_backend("auto", has_gpu=False, world_size=1) == "memory"
    assert plan_backend("auto", has_gpu=True, world_size=1) == "nccl"
    assert plan_backend("auto", has_gpu=True, world_size=4) == "nccl"
    with pytest.raises(UserError, match=r"engine.weight_transfer nccl_m2n: it needs"):
        plan_backend("nccl_m2n", has_gpu=True, world_size=4)
    with pytest.raises(UserError, match="--engine vllm"):
        plan_backend("ipc", has_gpu=True, world_size=1)
    monkeypatch.setattr(transfer_backend, "has_m2n", lambda: True)
    assert plan_backend("auto", has_gpu=True, world_size=4) == "nccl_m2n"
    assert plan_backend("auto", has_gpu=True, world_size=1) == "nccl"
    assert plan_backend("nccl", has_gpu=True, world_size=4) == "nccl"
