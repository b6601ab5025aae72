"""Learning rates: transformers' schedules by name, and optimizers and schedulers of the user's own, also resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from agentrl import Callback, ContractError, UserError, train
from agentrl.errors import ConfigError
from agentrl.learner.optimizers import adopt_optimizer, make_optimizers
from agentrl.models.policy import load_policy
from agentrl.settings.learner import LRSchedulerName
from agentrl.settings.loader import build_config, read_overrides
from agentrl.training import checkpoint
from agentrl.training.schedules import check_optimizers, compute_lr_scale

SMALL: dict[str, Any] = {
    "steps": 4,
    "rollout": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 40},
    "eval": {"every": 0, "final_tasks": 1},
}
ARGS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
    "polynomial": {"power": 2.0},
}


class Killed(Callback):
    """Ends the run in the middle of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")


def config(**learner: Any) -> Any:
    return build_config(("test", {"env": "math-tools", "steps": 12, "learner": {"lr": 1e-3, **learner}}))


def rates(run: Path) -> list[float]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if "lr" in line]


def halved(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 0.5**epoch)


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=1e-2, momentum=0.9)


def test_the_names_are_those_of_transformers() -> None:
    others = {"reduce_lr_on_plateau", "greedy"}  # they want a metric with each step
    assert set(get_args(LRSchedulerName)) == {s.value for s in SchedulerType} - others


@pytest.mark.parametrize("name", get_args(LRSchedulerName))
@pytest.mark.parametrize("warmup", [0, 3])
def test_each_step_has_the_rate_that_transformers_trainer_has(name: str, warmup: int) -> None:
    own = ARGS.get(name, {})
    scale = compute_lr_scale(config(lr_scheduler=name, lr_scheduler_args=own, warmup_steps=warmup))
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    theirs = get_scheduler(
        "constant_with_warmup" if name == "constant" else name, optimizer, warmup, 12, dict(own) or None
    )
    for step in range(1, 13):
        assert scale(step) * 1e-3 == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_a_ratio_of_the_steps_is_a_warm_up_rounded_up() -> None:
    by_ratio, by_steps = (compute_lr_scale(config(**own)) for own in ({"warmup_ratio": 0.2}, {"warmup_steps": 3}))
    assert [by_ratio(s) for s in range(1, 13)] == [by_steps(s) for s in range(1, 13)]


def test_the_command_line_sets_what_a_scheduler_takes() -> None:
    words = ["--env", "math-tools", "--learner.lr_scheduler", "cosine_with_min_lr", "--learner.betas", "0.9,0.95"]
    read = build_config(read_overrides([*words, "--learner.lr_scheduler_args.min_lr_rate", "0.1"]))
    assert read.learner.lr_scheduler_args == {"min_lr_rate": 0.1}
    assert read.learner.betas == (0.9, 0.95)
    assert compute_lr_scale(read)(100) == pytest.approx(0.1, abs=1e-2)


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "warmup_steps 2 and warmup_ratio 0.1 say the same twice"),
        ({"warmup_ratio": 1.5}, "less than or equal to 1, not 1.5"),
        ({"betas": [0.9, 1.0]}, "betas are two numbers from 0 to below 1, not 1.0"),
        ({"betas": "0.9"}, "learner.betas"),
        ({"adam_epsilon": 0}, "greater than 0, not 0"),
        ({"lr_scheduler": "reduce_lr_on_plateau"}, "not 'reduce_lr_on_plateau'"),
        ({"lr_scheduler": "cosine_with_min_lr"}, "lr_scheduler_args of cosine_with_min_lr: .*min_lr.*given: none"),
        ({"lr_scheduler": "linear", "lr_scheduler_args": {"power": 2}}, "unexpected keyword.*given: power = 2"),
        (
            {"lr_scheduler": "constant", "lr_scheduler_args": {"power": 2}},
            "of constant: it has no settings",
        ),
    ],
)
def test_what_no_schedule_can_be_made_of_is_refused(learner: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        train("math-tools", run={"dir": str(tmp_path / "run")}, learner=learner, steps=1)
    assert not (tmp_path / "run").exists()


def test_betas_and_epsilon_reach_adamw() -> None:
    seen: list[dict[str, Any]] = []
    model = load_policy("nano").model
    for name in ("adamw", "muon"):
        seen += [
            g for o in make_optimizers(model, name, 1e-3, betas=(0.8, 0.9), adam_epsilon=1e-6) for g in o.param_groups
        ]
    assert [(g["betas"], g["eps"]) for g in seen if "betas" in g] == [((0.8, 0.9), 1e-6)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [(sgd, halved), *(pytest.param(p, marks=pytest.mark.long) for p in ((sgd, None), (None, halved)))],
    ids=["both", "optimizer", "scheduler"],
)
def test_a_run_with_an_optimizer_of_ones_own_resumes_to_the_bit(pair: Any, tmp_path: Path) -> None:
    whole, broken, exact = tmp_path / "whole", tmp_path / "broken", SMALL | {"deterministic": True}
    train("math-tools", run={"dir": str(whole), "save_every": 2}, optimizers=pair, **exact)
    again = {"dir": str(broken), "save_every": 2, "resume": True}
    with pytest.raises(ProcessLookupError):
        train("math-tools", run=again, optimizers=pair, callbacks=[Killed(3)], **exact)
    train("math-tools", run=again, optimizers=pair, **exact)
    assert rates(whole) == rates(broken)
    if pair[1] is not None:
        assert rates(whole) == pytest.approx([rates(whole)[0] * 0.5**i for i in range(4)])
    one, other = (load_file(next((run / "model").glob("*.safetensors"))) for run in (whole, broken))
    assert [n for n in one if not torch.equal(one[n], other[n])] == []
    wrong = {"run": {**again, "dir": str(whole)}, **exact, "steps": 5}
    with pytest.raises(UserError, match=r"resume with the same|pass it again"):
        train("math-tools", **wrong)


@pytest.mark.slow
def test_objects_step_the_model_they_were_made_for(tmp_path: Path) -> None:
    loaded = load_policy("nano")
    optimizer = AdamW(loaded.model.parameters(), lr=1e-3)
    before = {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
    pair = (optimizer, halved(optimizer))
    run = {"dir": str(tmp_path / "run")}
    train("math-tools", loaded.model, tokenizer=loaded.tokenizer, run=run, optimizers=pair, **SMALL)
    assert any(not torch.equal(p, before[n]) for n, p in loaded.model.named_parameters())
    assert rates(tmp_path / "run") == [1e-3, 5e-4, 2.5e-4, 1.25e-4]


@pytest.mark.slow
def test_half_precision_is_stepped_in_single_precision(tmp_path: Path) -> None:
    """A step of 1e-5 on weights of about 1 is lost to bfloat16, but for the copy beside it."""
    pair = (lambda parameters: SGD(parameters, lr=1e-5), None)
    settings = SMALL | {"dtype": "bfloat16", "steps": 1}
    train("math-tools", run={"dir": str(tmp_path / "run"), "save_every": 1}, optimizers=pair, **settings)
    found = checkpoint.load(tmp_path / "run/checkpoints")
    assert found is not None
    _, state = found
    assert {m.dtype for m in state["learner"]["masters"]} == {torch.float32}


@pytest.mark.slow
def test_what_steps_nothing_here_is_refused(tmp_path: Path) -> None:
    other = torch.nn.Linear(2, 2)
    optimizer = SGD(other.parameters(), lr=1.0)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((optimizer, None), {}, "2 of the 2 parameters of this SGD are not trained here"),
        ((lambda p: p, None), {}, "the function returned"),
        (("adamw", None), {}, "not 'adamw'"),
        ((None, "linear"), {}, "not 'linear'"),
        ((None, halved(optimizer)), {}, "the scheduler of another optimizer"),
        ((sgd, ReduceLROnPlateau), {}, "ReduceLROnPlateau wants a metric"),
        (optimizer, {}, r"optimizers is a pair"),
        ((sgd, None), {"learner": {"lr": 1e-3}}, "learner.lr does nothing where optimizers= brings the optimizer"),
        ((sgd, None), {"learning_rate": 1e-3}, "learner.lr does nothing where optimizers= brings the optimizer"),
        ((None, halved), {"learner": {"warmup_steps": 1}}, "learner.warmup_steps does nothing .* the scheduler"),
    ]
    for number, (pair, more, sentence) in enumerate(cases):
        with pytest.raises(UserError, match=sentence):
            train("math-tools", run={"dir": str(tmp_path / f"{number}")}, optimizers=pair, **{**SMALL, **more})


def test_a_stages_rate_beside_a_scheduler_and_a_function_that_raises_are_told_before_the_first_step() -> None:
    def wrong(*_: Any) -> Any:
        raise KeyError("gone")

    staged = {"stages": [{"steps": 1}, {"steps": 1, "learner": {"lr": 0.5}}]}
    with pytest.raises(ConfigError, match=r"a stage's learner\.lr does nothing where optimizers= brings the scheduler"):
        check_optimizers((None, wrong), staged)
    check_optimizers((wrong, None), staged)
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ContractError, match=r"optimizers\[0\] raised KeyError: 'gone'"):
        adopt_optimizer(layer, wrong)
