"""Cosine-scaled and reasoning-accuracy rewards beside what TRL 1.16 gives, and thoughts with marks of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.prompts import Prompts
from agentrl_envs.rewards import CosineScaled, ReasoningAccuracy, Regex, accuracy, exact, math, think_format

from agentrl import ContractError, EnvSpec, UserError
from agentrl.rewards.functions import resolve_rewards
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine

TRL: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "trl_rewards.json").read_text())


async def test_cosine_scaled_is_trls_number_by_number() -> None:
    for case in TRL["cosine_scaled"]:
        ids = [[1] * case["tokens"]] * 3
        reward = CosineScaled(**case["settings"])
        found = await reward(completions=TRL["answers"], solution=TRL["solutions"], completion_ids=ids)
        assert found == [None if r is None else pytest.approx(r, abs=1e-12) for r in case["rewards"]]
    assert len({tuple(c["rewards"]) for c in TRL["cosine_scaled"]}) > 10


async def test_reasoning_accuracy_is_trls_for_each_order_of_delimiters() -> None:
    for case in TRL["reasoning_accuracy"]:
        reward = ReasoningAccuracy(*([case["delimiters"]] if case["delimiters"] else []))
        solutions = [TRL["solutions"][0]] * len(TRL["texts"])
        assert await reward(completions=TRL["texts"], solution=solutions) == case["rewards"], case
    assert await ReasoningAccuracy()(completions=TRL["texts"][:4], solution=["see the figure"] * 4) == [None] * 4


MARKS = ("<reasoning>", "</reasoning>")
TEXTS = [
    r"<reasoning>\boxed{1}</reasoning>\boxed{2}",
    r"<reasoning>\boxed{2}</reasoning>\boxed{1}",
    r"<reasoning>\boxed{2}",
    r"\boxed{2}",
]


async def test_rewards_look_past_thoughts_with_other_marks() -> None:
    twos = ["2"] * 4
    assert accuracy(TEXTS, solution=twos, thought_marks=MARKS) == [1.0, 0.0, 0.0, 1.0]
    assert await math(TEXTS, solution=twos, thought_marks=MARKS) == [1.0, 0.0, 0.0, 1.0]
    assert exact(TEXTS, solution=[r"\boxed{2}"] * 4, thought_marks=MARKS) == [1.0, 0.0, 0.0, 1.0]
    assert await Regex("2")(TEXTS, thought_marks=MARKS) == [1.0, 0.0, 0.0, 1.0]
    assert think_format(TEXTS, thought_marks=MARKS) == [1.0, 1.0, 0.0, 0.0]
    assert think_format(TEXTS) == [0.0] * 4


async def test_the_environments_marks_are_those_of_its_rewards() -> None:
    rows = [{"prompt": f"{n}?", "solution": "2"} for n in range(4)]
    names = ["accuracy", "think_format", "cosine_scaled"]
    settings = {"cosine_scaled": {"max_len": 10_000}}
    spec = EnvSpec(Prompts, data=rows, rewards=names, reward_settings=settings, thought_marks=MARKS)
    async with spec.open():
        played = await Rollout(spec, ScriptedEngine([TEXTS[0]]), ByteRenderer()).episode(0)
    assert {name: round(value or 0.0, 2) for name, value in played.rewards.items()} == dict.fromkeys(names, 1.0)
    with pytest.raises(ContractError, match=r"env\.thought_marks is two different texts, such as .*\['a'\]"):
        EnvSpec(Prompts, data=rows, thought_marks=["a"]).make()
    with pytest.raises(ContractError, match=r"env\.thought_marks is two different texts, .*\['\|', '\|'\]"):
        EnvSpec(Prompts, data=rows, thought_marks=["|", "|"]).make()


def test_settings_that_make_no_sense_are_refused() -> None:
    assert set(resolve_rewards(["reasoning_accuracy"])) == {"reasoning_accuracy"}
    with pytest.raises(ContractError, match="max_len"):
        resolve_rewards(["cosine_scaled"])
    with pytest.raises(ContractError, match="max_len is 1 or more, not 0"):
        CosineScaled(max_len=0)
    with pytest.raises(ContractError, match="reasoning_delimiters are one text or more"):
        ReasoningAccuracy([])


def test_a_reward_without_its_extra_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.settings.registry.find_spec", lambda name: None if name == "math_verify" else name)
    for name in ("math", "cosine_scaled", "reasoning_accuracy"):
        with pytest.raises(UserError, match=rf"reward '{name}' needs the package math-verify: pip .*gym\[math\]'"):
            resolve_rewards([name], {"cosine_scaled": {"max_len": 1}} if name == "cosine_scaled" else None)
