"""`agentrl check env`: each defect is found by its name, and what is right is clean."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pexpect
import pytest
from agentrl_envs.rewards import extract_boxed, is_same_answer

from agentrl import (
    ContractError,
    Env,
    EnvSpec,
    Message,
    Reply,
    Step,
    ToolCall,
    ToolEnv,
    ToolError,
    Trajectory,
    UserError,
    tool,
)
from agentrl.checks import Finding, check_env, failures
from agentrl.checks.expert import check_expert
from agentrl.cli import main
from agentrl.types import ExpertTurn, Observation

Start = tuple[Observation, dict[str, Any]]
Options = Mapping[str, Any] | None
_seen: list[int] = []


def drawn(seed: int, options: Options) -> random.Random:
    return random.Random(f"{seed}/{(options or {}).get('split', 'train')}")


class Sound(ToolEnv):
    """What a word is worth, which only a tool knows: an environment without a fault."""

    system_prompt = r"Answer with \boxed{}."
    max_turns = 4

    async def reset(self, *, seed: int, options: Options = None) -> Start:
        rng = drawn(seed, options)
        letters = "abcdefgh" if (options or {}).get("split") != "test" else "stuvwxyz"
        self.worth = {"".join(rng.choices(letters, k=6)): rng.randint(1000, 9999) for _ in range(2)}
        return self.ask(f"What are {' and '.join(self.worth)} worth together?"), {}

    @tool
    async def worth_of(self, word: str) -> int:
        """What a word is worth.

        Args:
            word: one of the words.
        """
        if word not in self.worth:
            raise ToolError(f"no word {word!r}")
        return self.worth[word]

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and is_same_answer(answer, str(sum(self.worth.values()))))}


def found(cls: type[Env], *, tasks: int = 4, **settings: Any) -> dict[str, list[Finding]]:
    """Everything but what is fine, or was not tried, by its name."""
    by_name: dict[str, list[Finding]] = {}
    for finding in check_env(EnvSpec(cls, **settings), tasks=tasks):
        if finding.verdict not in ("ok", "skip"):
            by_name.setdefault(finding.what, []).append(finding)
    return by_name


def only(cls: type[Env], name: str, verdict: str = "fail", **settings: Any) -> str:
    """The sentence on the one thing that is wrong."""
    everything = found(cls, **settings)
    assert list(everything) == [name], everything
    assert {f.verdict for f in everything[name]} == {verdict}
    return everything[name][0].why


def test_what_is_right_is_clean() -> None:
    findings = check_env(Sound, tasks=4)
    assert [(f.what, f.verdict) for f in findings if f.verdict != "ok"] == [("expert", "skip")]
    assert len({f.what for f in findings}) >= 16


@pytest.mark.parametrize("name", ["math-tools", "shop"])
def test_the_built_in_environments_are_clean(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "env", name]) == 0
    said = capsys.readouterr().out
    assert f"{name}: 18 ok, 0 to look at, 0 failed" in said


@pytest.mark.slow
def test_prompts_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ({"prompt": f"What is {i} + {i * 7}?", "solution": str(1000 + i * 8)} for i in range(100))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["check", "env", "prompts", "--env.data", str(tmp_path / "rows.jsonl"), "--tasks", "4"]) == 0
    assert "0 to look at, 0 failed" in capsys.readouterr().out


def test_a_task_that_changes_each_time() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return await super().reset(seed=time.monotonic_ns(), options=options)

    said = found(Mine)["same-seed"][0].why
    assert "reset(seed=0) began with" in said
    assert "a second time; nothing of a task may come from time" in said


def test_a_task_of_pythons_own_dice() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return await super().reset(seed=seed + random.randint(0, 10**9), options=options)

    everything = found(Mine)
    assert "draw from random.Random(seed), not from random itself" in everything["same-seed"][0].why
    assert "drew from, or seeded, the module random;" in everything["global-rng"][0].why


def test_a_task_that_two_episodes_share() -> None:
    class Mine(Sound):
        at = 0

        async def reset(self, *, seed: int, options: Options = None) -> Start:
            Mine.at = seed
            await anyio.sleep(0.01)
            return await super().reset(seed=Mine.at, options=options)

    everything = found(Mine)
    assert "beside other episodes; keep what belongs to an episode on self" in everything["same-seed"][0].why
    assert "Mine.at was changed by an episode" in everything["state-kept"][0].why


def test_a_task_that_hangs_on_the_order_of_a_set() -> None:
    findings = check_env(Unsorted, tasks=4)
    (said,) = failures(findings)
    assert said.what == "same-seed-elsewhere"
    assert "in another process; nothing may hang on the order of a set" in said.why


class Unsorted(Sound):
    async def reset(self, *, seed: int, options: Options = None) -> Start:
        await super().reset(seed=seed, options=options)
        return self.ask(" ".join({*"abcdefghij", *self.worth})), {}


def test_a_seed_that_is_not_used() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return await super().reset(seed=0, options=options)

    assert "every seed gave the same task and the same end" in only(Mine, "seed-used")


def test_a_seed_that_only_hides_something() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            self.worth = {"this": drawn(seed, options).randint(1000, 9999)}
            return self.ask("What is this worth?"), {}

    assert "good where the seed decides what is hidden" in only(Mine, "seed-used", "warn")


def test_splits_that_overlap() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return await super().reset(seed=seed % 10)

    assert "10 of 16 test tasks are train tasks too (test 2000000006 is train 6)" in only(Mine, "splits-apart")


def test_the_framework_holds_out_the_integers_of_an_environment_that_reads_no_split() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return await super().reset(seed=seed)

    assert found(Mine) == {}


class Branched(Sound):
    """Sound, and it counts the words it was asked for; its clones share what `share` says."""

    async def reset(self, *, seed: int, options: Options = None) -> Start:
        self.asked: list[int] = []
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Reply) -> Step:
        step = await super().step(action)
        self.asked.append(len(self.asked))
        return step._replace(reward=float(len(self.asked)))

    def clone(self) -> Env:
        return copy.deepcopy(self)


@pytest.mark.slow
def test_branches_are_played_and_compared_with_the_same_turns_by_themselves() -> None:
    class Shallow(Branched):
        def clone(self) -> Env:
            return copy.copy(self)

    class Fresh(Branched):
        def clone(self) -> Env:
            return type(self)()

    (fine,) = [f for f in check_env(Branched, tasks=4) if f.what == "branches"]
    assert fine.verdict == "ok"
    said = only(Shallow, "branches")
    assert "a branch of task 0, and the same turns by themselves, differ in" in said
    assert "copy.deepcopy(self)" in said
    assert "AttributeError" in only(Fresh, "branches")


def test_an_attribute_of_the_class() -> None:
    class Mine(Sound):
        asked: list[str] = []

        @tool
        async def worth_of(self, word: str) -> str:
            """What a word is worth.

            Args:
                word: one of the words.
            """
            self.asked.append(word)
            return f"{word} was question {len(self.asked)}"

    everything = found(Mine)
    assert {"state-kept", "episodes-apart"} <= everything.keys()
    assert "Mine.asked was changed by an episode, and every later one sees it" in everything["state-kept"][0].why
    assert "played twice with the same calls, differs in message" in everything["episodes-apart"][0].why


def test_a_default_argument() -> None:
    class Mine(Sound):
        def __init__(self, seeds: list[int] = []) -> None:  # noqa: B006 - what a user does
            self.seeds = seeds

        async def reset(self, *, seed: int, options: Options = None) -> Start:
            self.seeds.append(seed)
            return await super().reset(seed=seed, options=options)

    assert "the defaults of Mine.__init__ was changed" in only(Mine, "state-kept")
    assert "a value of the settings was changed" in found(Mine, seeds=[1])["state-kept"][0].why


def test_a_global_of_the_module_may_be_a_cache() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            _seen.append(seed)
            return await super().reset(seed=seed, options=options)

    assert f"{__name__}._seen was changed by episodes" in only(Mine, "state-kept", "warn")


@pytest.mark.slow
def test_a_blocking_call_is_named() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            if seed == 1:
                time.sleep(0.15)  # noqa: ASYNC251 - what a user does
            return await super().reset(seed=seed, options=options)

    said = only(Mine, "blocking", tasks=2)
    assert "Mine.reset (test_check_env.py:" in said
    assert "make it await" in said


def test_an_info_that_is_no_json() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return (await super().reset(seed=seed, options=options))[0], {"when": {seed}}

    assert "info['when'] is {3}, which is no JSON" in only(Mine, "json", "warn").replace("{0}", "{3}")


def test_a_message_that_is_no_json() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            messages, info = await super().reset(seed=seed, options=options)
            messages[-1]["name"] = b"somebody"  # type: ignore[index,arg-type]
            return messages, info

    assert "a message of the user cannot be written as JSON" in only(Mine, "json")


def test_a_broken_contract() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return "a question"  # type: ignore[return-value]

    assert "Mine.reset must return (observation, info)" in only(Mine, "contract")


def test_a_step_reward_that_is_no_number() -> None:
    class Mine(Env):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return f"{(options or {})['split']} task {seed}", {}

        async def step(self, action: Reply) -> Step:
            return Step([], float("nan") if "4" in action.content else 0.0, True, False, {})

    assert "returned the reward nan, which is no finite number" in found(Mine)["contract"][0].why


def test_a_score_that_cannot_bear_odd_texts() -> None:
    class Mine(Sound):
        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            answer = extract_boxed(trajectory.answer) or "0"
            return {"correct": float(int(answer) == sum(self.worth.values()))}

    said = only(Mine, "survives")
    assert re.match(r"Mine.score of task \d raised ValueError: ", said)
    assert "what a model writes may be anything" in said


def test_a_tool_that_raises() -> None:
    class Mine(Sound):
        @tool
        async def worth_of(self, word: str) -> int:
            """What a word is worth.

            Args:
                word: one of the words.
            """
            return self.worth[word]

    assert "tool 'worth_of' raised KeyError" in only(Mine, "survives")


@pytest.mark.parametrize(
    ("score", "verdict", "who"),
    [
        (lambda text, worth: float(str(worth) not in text) / 2, "fail", "an empty answer is given 0.50 of 1"),
        (lambda text, worth: float("and" in text), "fail", "the question, repeated is given 1.00 of 1"),
        (
            lambda text, worth: float(r"\boxed{42}" in text),
            "fail",
            "every number of the question in a box is given 1.00",
        ),
        (lambda text, worth: 0.1, "warn", "an empty answer is given 0.10 of 1"),
    ],
)
def test_a_reward_for_nothing(score: Callable[[str, int], float], verdict: str, who: str) -> None:
    class Mine(Sound):
        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            return {"reward": score(trajectory.answer, sum(self.worth.values()))}

    everything = found(Mine)
    assert list(everything) == ["free-reward"]
    assert any(who in f.why and f.verdict == verdict for f in everything["free-reward"])


def test_the_best_reward_is_what_an_environment_says() -> None:
    class Mine(Sound):
        best_reward = 10.0

        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            return {"reward": 0.4}

    assert found(Mine) == {}


def test_rewards_under_other_names() -> None:
    class Mine(Sound):
        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            return {"correct": 0.0} if trajectory.calls else {"correct": 0.0, "lazy": 0.0}

    said = only(Mine, "reward-names")
    assert "named 'correct' in one episode and 'correct', 'lazy' in another: name all of them always" in said


def test_a_weight_of_no_reward() -> None:
    class Mine(Sound):
        reward_weights: Mapping[str, float] = {"corect": 2.0}

    assert "reward_weights weighs 'corect', which score never names" in only(Mine, "reward-names")


def test_close_without_reset() -> None:
    class Mine(Sound):
        async def close(self) -> None:
            self.worth.clear()

    assert "close() of an environment that was never reset raised AttributeError" in only(Mine, "closes")


def test_close_twice() -> None:
    class Mine(Sound):
        open = True

        async def close(self) -> None:
            if not self.open:
                raise OSError("it is closed")
            self.open = False

    assert "raised OSError: it is closed the second time" in only(Mine, "closes")


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_threads_left_open(released: threading.Event) -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            threading.Thread(target=released.wait, daemon=True).start()
            return await super().reset(seed=seed, options=options)

    said = found(Mine)["left-open"]
    assert "4 episodes left 4 threads open: close them in close()" in said[0].why
    assert "after all was closed there is more open than before" in said[1].why


def test_files_and_tasks_left_open() -> None:
    kept: list[Any] = []

    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            import asyncio

            kept.append(open("/dev/null"))  # noqa: SIM115, ASYNC230 - what a user does
            kept.append(asyncio.create_task(asyncio.sleep(100)))
            return await super().reset(seed=seed, options=options)

    said = found(Mine)["left-open"][0].why
    assert "left 4 asyncio tasks, 4 file descriptors open" in said
    [k.close() for k in kept if hasattr(k, "fileno")]


def test_tools_that_tell_nothing() -> None:
    class Mine(Sound):
        @tool(timeout_s=200)
        async def worth_of(self, word: str) -> int:
            return 1

    everything = found(Mine)
    assert [f.why.partition(":")[0] for f in everything["tools"]] == [
        "tool 'worth_of' has no description, and the model knows its name only",
        "argument 'word' of tool 'worth_of' has no description; write `word",
    ]
    assert "turn_timeout_s 120 is under the 200 s that tool 'worth_of' may take" in everything["deadlines"][0].why


def test_a_failure_is_status_1_and_a_wrong_name_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "env", f"{__name__}:Unsorted", "--tasks", "2"]) == 1
    assert "fail same-seed-elsewhere" in capsys.readouterr().out
    for words, sentence in (
        (["env", "shp"], "no env 'shp'; did you mean 'shop'"),
        (["env", "shop", "--env.latecy", "1"], "did you mean 'latency_s'"),
        (["env", "shop", "--learner.lr", "1"], "learner: agentrl check takes no such setting"),
        (["env", "shop", "--tasks", "0"], "--tasks: input should be greater than or equal to 1, not 0"),
        (["envs", "shop"], "did you mean 'env'"),
    ):
        assert main(["check", *words]) == 2
        assert sentence in capsys.readouterr().err


def test_an_environment_that_cannot_be_opened_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"needs a value for --env\.data"):
        check_env("prompts")

    class Mine(Sound):
        def __init__(self) -> None:
            raise ContractError("not here")

    with pytest.raises(ContractError, match="not here"):
        check_env(Mine)


async def test_in_a_notebook() -> None:
    assert not failures(check_env(Sound, tasks=1))


def test_on_a_terminal_findings_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", "agentrl", "check", "env", f"{__name__}:Unsorted", "--tasks", "2"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    terminal = pexpect.spawn(sys.executable, words, encoding="utf-8", timeout=60, dimensions=(60, 100))
    terminal.expect("ok.*same-seed")  # each finding as it comes
    terminal.expect("fail.*same-seed-elsewhere.*reset")
    terminal.expect("1 failed")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 1


def test_a_reset_that_raises_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "env", f"{__name__}:Broken"]) == 1
    out = capsys.readouterr()
    assert "Broken.reset of task 0 raised KeyError: 'no such column'" in out.out
    assert "0 ok, 0 to look at, 1 failed" in out.out
    assert "Traceback" not in out.out + out.err


class Broken(Sound):
    async def reset(self, *, seed: int, options: Options = None) -> Start:
        raise KeyError("no such column")


def test_a_reset_that_raises_for_some_seeds_is_a_finding_and_no_traceback() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            if seed % 2:
                raise KeyError("no such column")
            self.worth = {"this": 5}
            return self.ask("What is this worth?"), {}

    said = [f.why for f in found(Mine)["survives"]]
    assert any("KeyError" in why for why in said), said


def test_tasks_that_begin_alike_and_hide_other_answers_are_other_tasks() -> None:
    class Mine(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            rng = drawn(seed, options)
            self.worth = {rng.choice("ab"): rng.randint(1000, 9999)}
            return self.ask(f"What is {next(iter(self.worth))} worth?"), {}

    findings = check_env(Mine, tasks=4)
    (said,) = [f for f in findings if f.what == "splits-apart"]
    assert said.verdict == "ok", said
    assert "begin with the same words and hide something else" in said.why


def test_what_was_not_shown_is_skipped_and_not_ok() -> None:
    class Bare(Env):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            return [{"role": "user", "content": f"Say {seed}."}], {}

        async def step(self, reply: Reply) -> Step:
            return Step("", 0.0, True, False, {})

        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            return {"said": 0.0}

        def count(self, split: str) -> int:
            return 1

    verdicts = {f.what: f.verdict for f in check_env(Bare, tasks=4)}
    assert verdicts["seed-used"] == verdicts["tools"] == verdicts["deadlines"] == "skip"
    assert verdicts["same-seed-elsewhere"] == "skip"  # a class inside of a function


def test_what_does_not_fit_into_the_budget_is_skipped_and_said() -> None:
    class Slow(Sound):
        async def reset(self, *, seed: int, options: Options = None) -> Start:
            await anyio.sleep(0.4)
            return await super().reset(seed=seed, options=options)

    told: list[str] = []
    findings = check_env(Slow, tasks=8, budget_s=1.5, on_finding=lambda f: told.append(f.what))
    skipped = {f.what: f.why for f in findings if f.verdict == "skip"}
    assert told == [f.what for f in findings]
    assert skipped["begins"] == "stopped: the budget of 1.5 s was spent; raise budget_s"
    assert skipped["same-seed"] == "not tried: the budget of 1.5 s was spent; raise budget_s"
    assert "survives" in skipped
    assert not failures(findings)


@pytest.mark.slow
def test_policies_call_no_tool_that_writes_unless_it_is_named() -> None:
    _seen.clear()
    verdicts = {f.what: f for f in check_env(Ordering, tasks=1)}
    assert _seen == []
    assert "tool 'order' was not called" in verdicts["writes"].why
    check_env(Ordering, tasks=1, allow_writes=["order"])
    assert _seen
    _seen.clear()
    with pytest.raises(UserError, match="allow_writes: there is no tool 'odrer'; did you mean 'order'"):
        check_env(Ordering, tasks=1, allow_writes=["odrer"])


class Ordering(Sound):
    @tool(writes=True)
    async def order(self, word: str) -> str:
        """Order something.

        Args:
            word: one of the words.
        """
        _seen.append(1)
        return "ordered"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget_s", "0"], "--budget_s: input should be greater than or equal to 1, not 0"),
        (["--tasks", "1.5"], "--tasks: input should be a valid integer, got a number with a fractional part, not 1.5"),
        (["--budget", "9"], "budget: unknown setting; did you mean 'budget_s'"),
        (["--allow_writes", "order"], "allow_writes: there is no tool 'order'"),
    ],
)
def test_wrong_words_are_sentences(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "env", "math-tools", *words]) == 2
    assert said in capsys.readouterr().err


class Demonstrated(Sound):
    """The same, with an expert."""

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        told = yield [ToolCall.of("worth_of", word=word) for word in self.worth]
        yield f"\\boxed{{{sum(int(m['content']) for m in told)}}}"


def on_the_expert(cls: type[Env]) -> Finding:
    """The finding on the expert, out of no other check."""

    async def check() -> list[Finding]:
        async with EnvSpec(cls).open() as spec:
            return await check_expert(spec, range(3), [])

    (finding,) = anyio.run(check)
    return finding


def test_an_expert_is_played_and_what_it_earns_is_told() -> None:
    class Careless(Demonstrated):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            yield "no idea"

    class Broken(Demonstrated):
        async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
            yield None  # type: ignore[misc]

    class Unlucky(Demonstrated):
        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            if trajectory.calls:
                raise OSError("the judge is away")
            return {"correct": 0.0}

    class Writes(Demonstrated):
        @tool(writes=True)
        async def order(self, word: str) -> str:
            """Order a word.

            Args:
                word: one of the words.
            """
            return word

    good = on_the_expert(Demonstrated)
    assert (good.verdict, good.why) == ("ok", "it earns 1 on each of 3 tasks, in 2 turns")
    none = on_the_expert(Sound)
    assert none.verdict == "skip"
    assert none.why.startswith("it has none; an `async def expert(self)` would show")
    careless = on_the_expert(Careless)
    assert careless.verdict == "warn"
    assert re.fullmatch(r"it earned 0 on task \d+ \(terminated\); best_reward is 1", careless.why)
    broken = on_the_expert(Broken)
    assert broken.verdict == "fail"
    assert "Broken.expert of task 0 yielded None; it yields a text, a ToolCall" in broken.why
    assert "ended in a fault, and demonstrates nothing: env_score" in on_the_expert(Unlucky).why
    (unplayed,) = (f for f in check_env(Writes, tasks=2) if f.what == "expert")
    assert unplayed.verdict == "skip"
    assert "it was not played: tool 'order' was not called: it may change" in unplayed.why
