"""A loop of one's own: batches for `async for` and `for`, whose tokens carry the version of the weights."""

from __future__ import annotations

import ast
import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import ContractError, Env, UserError, assign_credit, open_rollouts
from agentrl.rollout.scheduler import StepBatch
from agentrl.types import Observation, Reply, Step, Trajectory
from tests.helpers.pages import ROOT

SMALL: dict[str, Any] = {"steps": 3, "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 32}}
EXAMPLE = ROOT / "examples" / "own_loop.py"


def versions(batch: StepBatch) -> set[int]:
    return {v for g in batch.groups for t in g for s in t.segments for v in s.versions or ()}


def test_a_loop_has_as_many_batches_as_steps_each_sampled_from_the_weights_before_it() -> None:
    seen, tasks = [], []
    with open_rollouts("math-tools", **SMALL) as rollouts:
        for batch in rollouts:
            seen.append(versions(batch))
            tasks += [g.task for g in batch.groups]
            assert [len(g.trajectories) for g in batch.groups] == [2, 2]
            rollouts.update_weights()
        assert rollouts.tokenizer.decode([1])
    assert seen == [{0}, {1}, {2}]
    assert len(set(tasks)) == 6


def test_new_weights_are_what_the_next_batch_is_sampled_from() -> None:
    with open_rollouts("math-tools", **SMALL) as rollouts:
        before = next(rollouts)
        with torch.no_grad():
            for p in rollouts.model.parameters():
                p.zero_()  # every token is as likely as any other
        rollouts.update_weights(7)
        after = next(rollouts)
    assert (versions(before), versions(after)) == ({0}, {7})
    uniform = -torch.tensor(float(rollouts.model.config.vocab_size)).log().item()
    logprobs = [p for g in after.groups for t in g for s in t.segments for p in s.logprobs or ()]
    assert logprobs == pytest.approx([uniform] * len(logprobs), abs=1e-4)


def test_batches_without_an_update_between_them_are_of_the_same_weights() -> None:
    with open_rollouts("math-tools", **SMALL) as rollouts:
        assert [versions(batch) for batch in rollouts] == [{0}, {0}, {0}]


@pytest.mark.anyio
@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_async_form_goes_as_far_ahead_as_staleness_allows(staleness: int) -> None:
    settings = {**SMALL, "rollout": SMALL["rollout"] | {"max_staleness": staleness}}
    number = 0
    async with open_rollouts("math-tools", **settings) as rollouts:
        async for batch in rollouts:
            assert min(versions(batch)) >= number - staleness
            await rollouts.update_weights()
            number += 1
    assert number == 3


def test_credit_without_a_reduction_weighs_every_token_alike() -> None:
    with open_rollouts("math-tools", **SMALL) as rollouts:
        credit = assign_credit(next(rollouts).groups, lambda groups: [[1.0] * len(g) for g in groups])
    lengths = [sum(row.loss_mask) for row in credit.samples()]
    assert sum(w * n for w, n in zip(credit.weights(), lengths, strict=True)) == pytest.approx(1.0)
    assert len(set(credit.weights())) == 1


@pytest.mark.parametrize("setting", ["learner", "run", "eval"])
def test_a_setting_of_what_is_yours_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting} does nothing with open_rollouts"):
        open_rollouts("math-tools", **{setting: {}})  # type: ignore[arg-type]


class Broken(Env):
    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return 3, {}  # type: ignore[return-value]

    async def step(self, reply: Reply) -> Step:
        raise AssertionError

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"right": 1.0}


def test_a_broken_environment_ends_the_loop_with_its_sentence() -> None:
    with pytest.raises(ContractError, match="Broken"), open_rollouts(Broken, **SMALL) as rollouts:
        next(rollouts)


def test_a_loop_is_left_by_a_break_and_by_ctrl_c() -> None:
    with open_rollouts("math-tools", **SMALL) as rollouts:
        for _ in rollouts:
            break
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def interrupt() -> None:
    with open_rollouts("math-tools", **SMALL) as rollouts:
        next(rollouts)
        raise KeyboardInterrupt


def test_the_example_is_a_loop_of_at_most_fifteen_lines(capsys: pytest.CaptureFixture[str]) -> None:
    [main] = [n for n in ast.parse(EXAMPLE.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    [loop] = [n for n in main.body if isinstance(n, ast.With)]
    assert (loop.end_lineno or 0) - loop.lineno + 1 <= 15


@pytest.mark.long
def test_the_example_reaches_nine_tenths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it by `make long ARGS=seeds`; less than half of its steps come to six tenths."""
    monkeypatch.chdir(tmp_path)
    main, is_whole = runpy.run_path(str(EXAMPLE))["main"], "AGENTRL_SEEDS" in os.environ
    assert main() >= 0.9 if is_whole else main(16, 128) >= 0.6
