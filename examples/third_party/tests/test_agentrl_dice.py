"""The environment `dice` and the tool `roll`, as they are installed."""

import anyio
from agentrl_dice import Dice, roll, shown

from agentrl import EnvSpec, Trajectory
from agentrl.checks import check_env, check_tool
from agentrl.rollout.rollout import Rollout
from agentrl.settings import registry
from agentrl.testing import ByteRenderer, ScriptedEngine, call


def test_they_are_registered() -> None:
    assert registry.load_registered("env", "dice") is Dice
    assert registry.load_registered("tool", "roll") is roll


def test_they_keep_their_contracts() -> None:
    assert [f for f in check_env("dice", tasks=4) if f.verdict != "ok"] == []
    assert [f for f in check_tool("roll", tasks=4) if f.verdict != "ok"] == []


def test_only_what_the_die_shows_is_rewarded() -> None:
    async def go() -> list[Trajectory]:
        async with EnvSpec("dice").open() as spec:
            die = spec.make()
            assert isinstance(die, Dice)
            await die.reset(seed=0)
            answer = shown(die.sides, die.number)
            turns = [call("roll", sides=die.sides, number=die.number), rf"\boxed{{{answer}}}"]
            rollout = Rollout(spec, ScriptedEngine(turns), ByteRenderer())
            guess = Rollout(spec, ScriptedEngine([rf"\boxed{{{answer + 1}}}"]), ByteRenderer())
            return [await rollout.episode(0), await guess.episode(0)]

    assert [t.reward for t in anyio.run(go)] == [1.0, 0.0]
