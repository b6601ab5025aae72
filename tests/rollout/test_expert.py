"""An environment's expert plays its episodes; each slip of an expert is one clear sentence."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

import anyio
import pytest

from agentrl import ContractError, Env, EnvSpec, InfraError, Message, Reply, Step, ToolCall, ToolEnv, ToolError, tool
from agentrl.errors import NoExpertError
from agentrl.rollout.demonstration import Demonstration
from agentrl.rollout.expert import ExpertEpisode, play_expert
from agentrl.rollout.folding import REQUEST
from agentrl.settings.schema import RolloutConfig
from agentrl.types import ExpertTurn, Stop, ThreadRole


class Sums(ToolEnv):
    """Asks for a sum, which a tool knows."""

    closed: list[str] = []

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: a number.
            b: another one.
        """
        if a < 0:
            raise ToolError("a is negative")
        return a + b

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.task = seed
        return self.ask(f"{seed} + 1?"), {}

    async def score(self, trajectory: Any) -> dict[str, float]:
        return {"right": float(trajectory.answer == str(self.task + 1))}


def play(cls: type[Env], tasks: Sequence[int] = (3,), **limits: Any) -> list[ExpertEpisode]:
    async def run() -> list[ExpertEpisode]:
        spec = EnvSpec(cls)
        async with spec.open():
            return await play_expert(spec, tasks, RolloutConfig(**limits))

    return anyio.run(run)


def sentence(cls: type[Env], **limits: Any) -> str:
    with pytest.raises(ContractError) as told:
        play(cls, **limits)
    return str(told.value)


def test_an_expert_yields_its_turns_and_is_given_the_answers() -> None:
    class Good(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            try:
                failed = yield Reply("Let me see.", (ToolCall.of("add", a=-1, b=1),))
                assert failed[0]["is_error"]
                assert failed[0]["content"] == "error: a is negative"
                both = yield [ToolCall.of("add", a=self.task, b=1), ToolCall.of("add", a=1, b=1)]
                assert both[0]["tool_call_id"] != both[1]["tool_call_id"]
                yield both[0]["content"]
            finally:
                self.closed.append("closed")

    Sums.closed.clear()
    played = play(Good, range(70))
    assert [p.trajectory.task for p in played] == list(range(70))
    assert {p.trajectory.reward for p in played} == {1.0}
    assert len(Sums.closed) == 70
    first = played[3]
    assert [t["function"]["name"] for t in first.tools] == ["add"]
    assert "".join(m["role"][0] for m in first.trajectory.messages) == "uatatta"
    assert first.trajectory.messages[1]["content"] == "Let me see."
    assert first.trajectory.messages[3]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3, "b": 1}}
    assert first.trajectory.messages[-1]["content"] == "4"
    assert [c.status for c in first.trajectory.calls] == ["tool", "ok", "ok"]
    again = play(Good)[0].trajectory
    assert again.messages == first.trajectory.messages  # the ids too


def test_a_plain_generator_plays_a_sync_environment_in_its_thread() -> None:
    class Plain(Env):
        sync = True

        def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
            self.task = seed
            return f"{seed}", {}

        def step(self, action: Reply) -> Step:  # type: ignore[override]
            return Step("again", float(action.content == str(self.task)), action.content == "end", False, {})

        def expert(self) -> Generator[ExpertTurn, list[Message], None]:  # type: ignore[override]
            side_by_side.wait(60)
            told = yield str(self.task)
            assert told == [{"role": "user", "content": "again"}]
            yield "end"

    side_by_side = threading.Barrier(4)  # none goes on before four of the episodes' threads are here
    played = play(Plain, range(20))
    assert [p.trajectory.reward for p in played] == [1.0] * 20

    class Short(Plain):
        def expert(self) -> Generator[ExpertTurn, list[Message], None]:  # type: ignore[override]
            yield "1"

    assert "Short.expert of task 3 ended after 1 turn, and the episode went on" in sentence(Short)


@pytest.mark.parametrize(
    "wrong", [None, 3, [], ["text"], [ToolCall.of("add", a=1, b=2), "text"], {"role": "assistant"}]
)
def test_what_is_no_turn_is_named(wrong: Any) -> None:
    class Wrong(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            yield wrong

    told = sentence(Wrong)
    assert told.startswith(f"Wrong.expert of task 3 yielded {wrong!r:.80}; it yields a text, a ToolCall")


def test_a_call_that_no_model_could_make_is_named() -> None:
    class Unknown(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            yield ToolCall.of("ad", a=1, b=2)

    class NoJson(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            yield ToolCall.of("add", a={1, 2})

    assert "Unknown.expert of task 3 called 'ad'; the tools are: add" in sentence(Unknown)
    assert "the arguments of 'add' are no JSON: Object of type set" in sentence(NoJson)


def test_an_expert_that_does_not_play_on_or_does_not_end_is_named() -> None:
    class Silent(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            for turn in list[str]():
                yield turn

    class Endless(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            while True:
                yield ToolCall.of("add", a=1, b=2)

    class Hangs(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            await anyio.sleep(60)
            yield ""

    class Raises(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            yield ToolCall.of("add", a=1, b=2)
            raise KeyError("rows")

    class NoYield(Sums):
        async def expert(self) -> Any:  # type: ignore[override]
            return "4"

    class Plain(Sums):
        def expert(self) -> Any:
            yield "4"

    class Listed(Sums):
        def expert(self) -> Any:
            return ["4"]

    assert "Silent.expert of task 3 yielded nothing" in sentence(Silent)
    assert "took all 4 turns and did not end the episode, which earned 0.0" in sentence(Endless, max_turns=4)
    assert "Hangs.expert of task 3 took over 0.2 s for a turn" in sentence(Hangs, turn_timeout_s=0.2)
    assert "Raises.expert of task 3 raised KeyError: 'rows' (test_expert.py, line " in sentence(Raises)
    assert "NoYield.expert of task 3 has no `yield`" in sentence(NoYield)
    assert "Plain.expert of task 3 must be `async def`" in sentence(Plain)
    assert "Listed.expert of task 3 returned ['4']; it must be a generator" in sentence(Listed)
    assert sentence(Sums).startswith("Sums has no expert: write `async def expert(self)`")


def test_a_fault_of_the_world_is_no_mistake_of_the_expert() -> None:
    class Down(Sums):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            if self.task == 4:
                raise InfraError("no_database", "it is gone")
            yield str(self.task + 1)

    fine, lost = (p.trajectory for p in play(Down, (3, 4)))
    assert (fine.reward, fine.stop) == (1.0, Stop.TERMINATED)
    assert lost.reward is None
    assert lost.fault is not None
    assert lost.fault.kind == "no_database"


class Summing(Sums):
    """An expert that adds twice, and writes what it has so far where its context is folded."""

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        for _ in range(2):
            self.heard = yield ToolCall.of("add", a=self.task, b=1)
        yield str(self.task + 1)

    async def summarize(self, messages: list[Message]) -> str:
        return f"It is {messages[-1]['content']}."


def play_folded(cls: type[Env], **limits: Any) -> list[ExpertEpisode]:
    async def run() -> list[ExpertEpisode]:
        config = RolloutConfig(context="fold", context_budget=2, **limits)
        async with EnvSpec(cls).open() as spec:
            return await play_expert(spec, [3], config, measure=lambda messages, tools: len(messages))

    return anyio.run(run)


def test_an_expert_writes_summaries_where_contexts_are_folded() -> None:
    (played,) = play_folded(Summing)
    episode = played.trajectory
    assert (episode.reward, episode.turns, [t.role for t in episode.threads]) == (
        1.0,
        5,
        [ThreadRole.MAIN, ThreadRole.COMPACTION, ThreadRole.COMPACTION],
    )
    contexts = [one.messages for one in Demonstration.list_of_expert(played)]
    assert [c[-1]["content"] for c in contexts] == ["It is 4.", "It is 4.", "4"]
    assert [len(c[-2].get("tool_calls", ())) for c in contexts] == [0, 0, 0]
    assert all(c[-2]["content"].endswith(REQUEST) for c in contexts[:2])
    assert all("It is 4." in c[0]["content"] for c in contexts[1:])
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_contexts_stay_whole_where_nobody_counts_tokens() -> None:
    async def run() -> list[ExpertEpisode]:
        async with EnvSpec(Summing).open() as spec:
            return await play_expert(spec, [3], RolloutConfig(context="fold", context_budget=2))

    (played,) = anyio.run(run)
    assert not played.trajectory.threads
    assert len(Demonstration.list_of_expert(played)) == 1


def test_a_plain_summary_of_a_sync_environment_runs_in_its_thread() -> None:
    class Plain(Summing):
        sync = True

        def summarize(self, messages: list[Message]) -> str:  # type: ignore[override]
            return f"{threading.current_thread() is threading.main_thread()}: {messages[-1]['content']}"

    (played,) = play_folded(Plain)
    assert played.trajectory.threads[0].messages[-1]["content"] == "False: 4"


def test_an_expert_without_summaries_is_a_sentence() -> None:
    class Silent(Summing):
        summarize = Env.summarize

    with pytest.raises(NoExpertError, match="Silent has no `summarize`"):
        play_folded(Silent)


@pytest.mark.parametrize("wrong", [None, "", " ", 7])
def test_what_is_no_summary_is_named(wrong: Any) -> None:
    class Wrong(Summing):
        async def summarize(self, messages: list[Message]) -> Any:
            return wrong

    with pytest.raises(ContractError, match=r"Wrong\.summarize of .*task 3 returned .*; it returns the text"):
        play_folded(Wrong)


def test_a_summary_that_raises_is_named() -> None:
    class Broken(Summing):
        async def summarize(self, messages: list[Message]) -> str:
            raise KeyError("page")

    with pytest.raises(ContractError, match=r"Broken\.summarize of .*task 3 raised KeyError: 'page'"):
        play_folded(Broken)


def test_a_plain_summary_of_an_async_environment_is_named() -> None:
    class Plain(Summing):
        def summarize(self, messages: list[Message]) -> Any:
            return "It is 4."

    with pytest.raises(ContractError, match=r"Plain\.summarize of .*task 3 must be `async def`"):
        play_folded(Plain)


def test_a_summary_that_takes_too_long_is_named() -> None:
    class Slow(Summing):
        async def summarize(self, messages: list[Message]) -> str:
            await anyio.sleep(600)
            return "It is 4."

    with pytest.raises(ContractError, match=r"Slow\.summarize of .*task 3 took over 0\.5 s for a summary"):
        play_folded(Slow, turn_timeout_s=0.5)
