"""TRL's losses, gradients and metrics, number by number, for any file of the golden form: --golden FILE."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learner.losses.objective import Objective, compute_policy_loss

GOLDEN = Path(__file__).parent / "golden" / "trl_losses.json"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = Path(metafunc.config.getoption("--golden") or GOLDEN)
    golden = json.loads(path.read_text())
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("inputs", [golden["inputs"]], ids=[path.stem])
        metafunc.parametrize(("case", "wanted"), golden["cases"].items(), ids=list(golden["cases"]))


def described(case: str, inputs: dict[str, Any]) -> Objective:
    """A case's name as an objective: LOSS|LEVEL|CORRECTION|WHAT ELSE."""
    loss, *words = case.split("|")
    high = inputs["epsilon_high_cispo"] if loss == "cispo" else inputs["epsilon_high"]
    mode = "token_truncate" if loss == "vespo" else "sequence_mask"  # TRL's default
    o = Objective(
        loss, epsilon=inputs["epsilon"], epsilon_high=high, importance_sampling_mode=mode, importance_sampling_max=3.0
    )
    for word in words:
        o = replace(o, **_setting(word))
    return o


def _setting(word: str) -> dict[str, Any]:
    if word in ("token", "sequence"):
        return {"importance_level": word}
    if word.endswith(("_mask", "_truncate")):
        return {"importance_sampling_mode": word}
    if word == "nobias":
        return {"use_bias_correction_kl": False}
    if word.startswith("clip"):
        low, high = word.removeprefix("clip").split("-")
        return {"importance_sampling_min": float(low), "importance_sampling_max": float(high)}
    names = {
        "beta": "beta",
        "delta": "delta",
        "opsm": "off_policy_threshold",
        "topent": "top_entropy_quantile",
        "entcoef": "entropy_coef",
    }
    name = next(n for n in names if word.startswith(n))
    return {names[name]: float(word.removeprefix(name))}


def test_the_losses_gradients_and_metrics_of_trl(case: str, wanted: dict[str, Any], inputs: dict[str, Any]) -> None:
    def tensor(name: str) -> Tensor:
        return torch.tensor(inputs[name], dtype=torch.float64)

    logp = tensor("logp").requires_grad_()
    share = inputs["num_processes"] * inputs["steps_per_generation"] / inputs["grad_accum"]
    loss, told = compute_policy_loss(
        described(case, inputs),
        logp=logp,
        **{name: tensor(name) for name in ("old", "sampling", "ref", "entropy", "advantages")},
        **{name: tensor(name) for name in ("completion_mask", "tool_mask")},
        tokens_in_step=inputs["num_items_in_batch"] / share,
        micro_batches=inputs["grad_accum"],
        longest=inputs["max_completion_length"],
    )
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(wanted["loss"], abs=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor(wanted["grad_logp"], dtype=torch.float64), atol=1e-6, rtol=0)
    for name, value in wanted["metrics"].items():
        assert told[name] == pytest.approx(value, abs=1e-6), name
