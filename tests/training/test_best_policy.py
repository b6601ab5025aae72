"""Early stopping and the best model: by a metric of the evaluations, and the same after a kill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import Callback, Env, Reply, Step, UserError, train
from agentrl.evaluation.measurement import Evaluation
from agentrl.resources import TrainingResources
from agentrl.runs.folder import RunFolder
from agentrl.settings.evaluation import EvalConfig
from agentrl.settings.schema import TrainConfig
from agentrl.training.best_policy import BestPolicy

SMALL: dict[str, Any] = {
    "steps": 6,
    "rollout": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 12},
    "eval": {"every": 1, "tasks": 3, "final_tasks": 3},
    "learner": {"lr": 1e-3},
}


class Killed(Callback):
    """Ends the run in the middle of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")


class Length(Env):
    """Pay for long answers, by one turn of a few tokens: rewards differ, so that each step learns."""

    async def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"Say {seed}.", {}

    async def step(self, reply: Reply) -> Step:
        return Step("", len(reply.content) % 7 / 7, True, False, {})


class Weights(Callback):
    """Keeps the policy's weights as of each evaluation, and what is said."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, torch.Tensor]] = {}
        self.messages: list[str] = []

    def on_train_begin(self, resources: TrainingResources, run: RunFolder) -> None:
        self.model = resources.policy.model

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        self.by_step.setdefault(step, {n: p.detach().clone() for n, p in self.model.named_parameters()})

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def fixed(monkeypatch: pytest.MonkeyPatch, values: Mapping[int, float]) -> None:
    """Let each step's evaluation have a value that the test knows, under a name of its own."""
    observe = BestPolicy.observe

    def known(self: BestPolicy, step: int, found: Mapping[str, float]) -> str | None:
        return observe(self, step, {**found, "eval/reward": values[step]})

    monkeypatch.setattr(BestPolicy, "observe", known)


def evaluated(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "eval/reward" in row]


def compared(values: list[float], **settings: Any) -> BestPolicy:
    config = TrainConfig(env={"name": "x"}, eval=EvalConfig(**settings))
    best = BestPolicy(config, None)  # type: ignore[arg-type]
    for step, value in enumerate(values, 1):
        best.observe(step, {"eval/reward": value, "eval/loss": value})
        if best.stops:
            break
    return best


def test_patience_counts_the_evaluations_that_are_no_better() -> None:
    assert compared([0.1, 0.2, 0.2, 0.1], patience=2).stops
    assert not compared([0.1, 0.2, 0.1, 0.3], patience=2).stops
    assert compared([0.1, 0.2, 0.3], patience=1, min_delta=0.15).step == 1
    assert compared([0.1, 0.3, 0.2], patience=1, min_delta=0.15).waited == 1
    down = compared([3.0, 2.0, 1.0, 1.5], patience=1, metric="eval/loss", greater_is_better=False)
    assert (down.step, down.value, down.stops) == (3, 1.0, True)
    assert compared([0.5, float("nan"), float("nan")], patience=1).waited == 0  # what was not scored is not compared


def test_the_run_ends_early_with_the_best_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.5})
    seen, run = Weights(), tmp_path / "run"
    settings = SMALL | {"eval": SMALL["eval"] | {"patience": 2}}
    summary = train(Length, run={"dir": str(run), "load_best": True}, callbacks=[seen], **settings).summary
    assert (summary["steps"], summary["interrupted"]) == (4, False)
    assert summary["best"] == {"metric": "eval/reward", "step": 2, "value": 0.5, "stopped_early": True}
    assert evaluated(run) == [0, 1, 2, 3, 4, 4]  # the last one is of the best model
    assert any("was no better than 0.5 (step 2) in 2 evaluations: the run ends" in m for m in seen.messages)
    assert any("the model is that of step 2" in m for m in seen.messages)
    model = load_file(next((run / "model").glob("*.safetensors")))
    assert all(torch.equal(model[n], w) for n, w in seen.by_step[2].items() if n in model)
    assert any(not torch.equal(model[n], w) for n, w in seen.by_step[4].items() if n in model)
    assert all(torch.equal(p, seen.by_step[2][n]) for n, p in seen.model.named_parameters())  # in memory too


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("pause", marks=pytest.mark.long), "overlap"])
def test_a_killed_run_ends_early_where_it_would_have(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed(monkeypatch, {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.2, 6: 0.2})
    settings = SMALL | {"eval": SMALL["eval"] | {"patience": 3, "mode": mode}, "deterministic": mode == "pause"}
    ends = []
    for name, kills in (("whole", ()), ("broken", (3, 5))):
        run = {"dir": str(tmp_path / name), "save_every": 1, "resume": True, "load_best": True}
        for at in kills:
            with pytest.raises(ProcessLookupError):
                train(Length, run=run, callbacks=[Killed(at)], **settings)
        ends.append(train(Length, run=run, **settings).summary)
    assert [end["best"]["step"] for end in ends] == [2, 2]
    assert [end["best"]["stopped_early"] for end in ends] == [True, True]
    assert ends[0]["steps"] == ends[1]["steps"] == 5
    one, other = (load_file(next((tmp_path / n / "model").glob("*.safetensors"))) for n in ("whole", "broken"))
    assert mode == "overlap" or [n for n in one if not torch.equal(one[n], other[n])] == []
    again = train(Length, run=run, **settings).summary  # it has ended: nothing more is trained
    assert again["steps"] == 5
    assert mode == "overlap" or again["after"]["greedy"]["reward"] == ends[1]["after"]["greedy"]["reward"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"eval": {"every": 0, "patience": 2}}, "patience counts evaluations in mid-run, and every 0 makes none"),
        ({"eval": {"patience": 0}}, "greater than or equal to 1, not 0"),
        ({"eval": {"every": 1, "patience": 1, "min_delta": -1}}, "greater than or equal to 0, not -1"),
        ({"eval": {"min_delta": 0.1}}, "eval.min_delta is for eval.patience and run.load_best, and neither is set"),
        ({"run": {"load_best": True}, "eval": {"every": 0}}, "eval.every 0 makes none"),
        ({"run": {"load_best": True}, "steps": 5}, "eval.every 10 is over the 5 steps"),
        (SMALL | {"eval": {**SMALL["eval"], "patience": 1, "metric": "eval/rewrd"}}, "did you mean 'eval/reward'"),
    ],
)
def test_what_compares_nothing_is_refused(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    run = {"dir": str(tmp_path / "run"), **settings.get("run", {})}
    with pytest.raises(UserError, match=sentence):
        train("math-tools", **{**settings, "run": run})
