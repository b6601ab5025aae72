"""A dataset and reward functions as TRL has them, one turn, on the same path as everything else."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agentrl_envs import prompt_rows
from agentrl_envs.prompts import Prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import EnvSpec, Toolset, Trajectory, UserError, tool, train
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Stop

ROWS = [{"prompt": f"What is {n}+1?", "solution": str(n + 1), "level": n} for n in range(20)]


def chat(*roles: str, content: Any = "hi") -> list[dict[str, Any]]:
    return [{"prompt": [{"role": role, "content": content} for role in roles], "solution": "1"}] * 2


def exact(completions: list[str], solution: list[str], **_: Any) -> list[float]:
    return [float(c == s) for c, s in zip(completions, solution, strict=True)]


async def play(
    said: str = "1", task: int = 0, split: str = "train", timeout_s: float = 10, **settings: Any
) -> Trajectory:
    spec = EnvSpec(Prompts, **{"data": ROWS, "rewards": [exact], **settings})
    limits = EpisodeLimits(turn_timeout_s=timeout_s)
    async with spec.open():
        return await Rollout(spec, ScriptedEngine([said]), ByteRenderer(), limits=limits, split=split).episode(task)


async def refusal(**settings: Any) -> str:
    with pytest.raises(UserError) as raised:
        await play(**settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


async def test_one_turn_and_its_reward() -> None:
    t = await play("1")
    assert [(m["role"], m["content"]) for m in t.messages] == [("user", "What is 0+1?"), ("assistant", "1")]
    assert (t.stop, t.turns, t.reward, t.rewards) == (Stop.TERMINATED, 1, 1.0, {"exact": 1.0})
    assert (await play("2")).reward == 0.0
    assert (await play("1", system_prompt="Add.")).messages[0] == {"role": "system", "content": "Add."}


async def test_one_reward_function_needs_no_list() -> None:
    assert (await play("1", rewards=exact)).rewards == {"exact": 1.0}
    assert (await play("1", rewards="accuracy")).rewards.keys() == {"accuracy"}


async def test_the_last_tenth_is_held_out() -> None:
    spec = EnvSpec(Prompts, data=ROWS)
    async with spec.open():
        assert (spec.make().count("train"), spec.make().count("test")) == (18, 2)
    assert (await play("19", task=0, split="test")).reward == 1.0
    assert (await play("1", task=18)).reward == 1.0  # the next epoch
    t = await play("1", split="test", test_data=[{"prompt": "own", "solution": "1"}])
    assert t.messages[0]["content"] == "own"


@given(st.lists(st.integers(0, 30), min_size=2, max_size=120))
@settings(max_examples=60, deadline=None)
def test_all_copies_of_a_prompt_are_on_one_side(asked: list[int]) -> None:
    rows = [{"prompt": f"What is{'  ' * (place % 2)} {n}?"} for place, n in enumerate(asked)]
    sides = prompt_rows.hold_out_rows(rows, "prompt")
    train, test = ([" ".join(row["prompt"].split()) for row in sides[split]] for split in ("train", "test"))
    assert Counter(train + test) == Counter(f"What is {n}?" for n in asked)
    assert train
    assert test
    if len(set(asked)) > 1:
        assert not set(train) & set(test)
        assert len(test) <= max(1, len(asked) // 10) or len(set(test)) == 1
    if len(set(asked)) == len(asked):
        assert test == [f"What is {n}?" for n in asked[-max(1, len(asked) // 10) :]]


async def test_what_a_reward_function_is_given() -> None:
    given: list[dict[str, Any]] = []

    def look(trainer_state: Any, log_metric: Any, log_extra: Any, set_weight: Any, **columns: Any) -> list[float]:
        given.append(columns)
        return [1.0]

    await play("ok", task=3, rewards=[look])
    chat = [{"prompt": [{"role": "user", "content": "hi"}], "solution": "x"}] * 2
    t = await play("ok", data=chat, rewards=[look], system_prompt="Be kind.")
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant"]
    ids = [[*b"ok", 256]]
    assert given == [
        {"prompts": ["What is 3+1?"], "completions": ["ok"], "completion_ids": ids, "solution": ["4"], "level": [3]},
        {
            "prompts": [[{"role": "user", "content": "hi"}]],
            "completions": [[{"role": "assistant", "content": "ok"}]],
            "completion_ids": ids,
            "solution": ["x"],
        },
    ]


async def test_sync_async_and_none_are_all_the_same() -> None:
    async def slow(**_: Any) -> list[float | None]:
        await anyio.lowlevel.checkpoint()
        return [0.5]

    class Judge:
        async def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [2.0]

    def threaded(**_: Any) -> list[float]:
        return [float(threading.current_thread() is not threading.main_thread())]

    def none(**_: Any) -> list[None]:
        return [None]

    t = await play(rewards=[slow, Judge(), threaded, none], reward_weights=[1, 10, 100, 1000])
    assert t.rewards == {"slow": 0.5, "Judge": 2.0, "threaded": 1.0, "none": None}
    assert t.reward == 0.5 + 20 + 100
    assert (await play(rewards=[none])).reward is None


async def test_arrays_are_lists() -> None:
    import numpy as np

    def array(**_: Any) -> Any:
        return np.array([0.25])

    assert (await play(rewards=[array])).rewards == {"array": 0.25}


async def test_a_reward_that_hangs_is_given_up() -> None:
    release = threading.Event()

    def hang(**_: Any) -> list[float]:
        release.wait(60)
        return [1.0]

    try:
        t = await play(rewards=[hang], timeout_s=0.05)
    finally:
        release.set()
    assert t.fault is not None
    assert (t.fault.kind, t.reward) == ("turn_timeout", None)


async def test_a_reward_that_raises_is_a_fault_and_not_a_zero() -> None:
    def broken(**_: Any) -> list[float]:
        raise ConnectionError("judge is down")

    t = await play(rewards=[broken])
    assert t.fault is not None
    assert (t.fault.kind, t.reward) == ("env_score", None)
    assert "judge is down" in t.fault.message


@pytest.mark.parametrize("result", [1.0, [], [1.0, 2.0], None, "1", {0: 1.0}])
async def test_a_reward_that_returns_the_wrong_thing(result: Any) -> None:
    def odd(**_: Any) -> Any:
        return result

    assert "reward 'odd' returned " in await refusal(rewards=[odd])
    assert "it must return a list of 1 number" in await refusal(rewards=[odd])


async def test_a_reward_and_the_columns_that_do_not_fit() -> None:
    def wants(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [1.0]

    def narrow(completions: list[str]) -> list[float]:
        return [1.0]

    assert await refusal(rewards=[wants]) == (
        "reward 'wants': missing a required argument: 'answer'; it is called with solution, level, prompts, "
        "completions, completion_ids (take **columns too)"
    )
    assert "reward 'narrow': got an unexpected keyword argument" in await refusal(rewards=[narrow])


async def test_the_shipped_rewards_by_name() -> None:
    rewards = "accuracy, think_format, soft_overlong_punishment"
    t = await play("<think>0</think>\\boxed{1}", rewards=rewards, max_completion_len=30, soft_punish_cache=10)
    assert t.rewards == {"accuracy": 1.0, "think_format": 1.0, "soft_overlong_punishment": pytest.approx(-0.6)}
    assert len("<think>0</think>\\boxed{1}") + 1 == 26


async def test_a_reward_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "my_reward_file.py").write_text(
        "def brief(completions, **_):\n    return [1.0 / len(completions[0])]\n"
    )
    assert (await play("four", rewards=[f"{tmp_path}/my_reward_file.py:brief"])).rewards == {"brief": 0.25}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rewards": "acuracy"}, "no reward 'acuracy'; did you mean 'accuracy'? (or say module:function, "),
        ({"rewards": ["gone_module:f"]}, "reward 'gone_module:f': cannot import 'gone_module'"),
        ({"rewards": ["json:decoder"]}, "reward 'json:decoder' is <module"),
        ({"rewards": [exact, exact]}, "two rewards are called 'exact'"),
        ({"rewards": []}, "env.rewards is empty; name at least one, such as accuracy"),
        ({"reward_weights": [1.0, 2.0]}, "env.reward_weights has 2 weights for 1 rewards"),
        ({"soft_punish_cache": 0}, "env.soft_punish_cache is 1 to env.max_completion_len (512), not 0"),
        ({"soft_punish_cache": 600}, "env.soft_punish_cache is 1 to env.max_completion_len (512), not 600"),
        ({"data": 3}, "env.data must be a path, a dataset's name, or a sequence of rows; not 3"),
        ({"data": None}, "env.data must be a path, a dataset's name, or a sequence of rows; not None"),
        ({"data": {"dev": ROWS}}, "env.data has no split 'train'; known: dev"),
        ({"data": iter(ROWS)}, "which can be read only once; give the function that makes it, or an IterableDataset"),
        ({"streaming": True}, "env.streaming is for files, datasets of the hub and IterableDatasets; env.data lies in"),
        ({"shuffle_buffer": 9}, "env.shuffle_buffer is for a stream (env.streaming); other data is shuffled whole"),
        ({"shuffle_buffer": -1}, "env.shuffle_buffer is 0 or more, not -1"),
        ({"revision": "v1"}, "env.revision is for a dataset of the hub; env.data is [{"),
        ({"data_files": "x", "data": "rows.jsonl"}, "env.data_files is for a dataset of the hub"),
        ({"test_rows": 0}, "env.test_rows is 1 or more, not 0"),
        ({"test_rows": 20}, "env.test_rows 20 holds out all 20 rows of env.data"),
        ({"test_rows": 2, "test_data": ROWS}, "env.test_rows is for a stream, or rows of env.data; env.test_data is"),
        ({"test_split": "a", "test_data": ROWS}, "env.test_data and env.test_split say the same twice"),
        ({"test_data": {}}, "env.test_data is a dataset, or a dict of them by names but train; not {}"),
        ({"test_data": {"train": ROWS}}, "env.test_data is a dataset, or a dict of them by names but train"),
        ({"test_data": {"a": "gone.jsonl"}}, "no dataset 'gone.jsonl'"),
        ({"test_data": {"a": {"data": ROWS, "spilt": "x"}}}, "env.test_data.a has no setting 'spilt'; did you mean"),
        (
            {"solution_column": "answer"},
            "has no column 'answer'; known: level, prompt, solution (--env.solution_column",
        ),
        (
            {"data": [{"prompt": "a", "image": "b"}] * 2},
            "row 1 has an 'image': agentrl trains on text; leave the column",
        ),
        ({"data": chat("user", "assistant")}, "row 1: 'prompt' ends with a message of the assistant's, whose turn it"),
        (
            {"data": chat("developer")},
            "row 1: a message's role is one of system, user, assistant, tool; not 'developer'",
        ),
        (
            {"data": chat("user", content=3)},
            "row 1: the content of a message is a text, or a list of parts of text; not",
        ),
        (
            {"data": chat("user", content=[{"type": "image"}])},
            "row 1: the content of a message is a text, or a list of parts of text; not a part of the type 'image'",
        ),
        ({"data": chat("system", "user"), "system_prompt": "Be kind."}, "leave env.system_prompt out"),
        ({"data": []}, "has no rows"),
        ({"data": [{"prompt": "a"}]}, "env.data has 1 row; two are the least, one of which is held out"),
        ({"data": ["prompt", "prompt"]}, "a row is a dict with a 'prompt', not 'prompt'"),
        ({"data": [{"promt": "a"}] * 2}, "has no column 'prompt'; did you mean 'promt'? (--env.prompt_column NAME)"),
        ({"data": [{"prompt": "a"}, {"prompt": 3}]}, "row 2: 'prompt' must be a string or a list of messages, not 3"),
        ({"data": [{"prompt": "a"}, {"prompt": []}]}, "row 2: 'prompt' must be a string or a list of messages, not []"),
        ({"data": [{"prompt": "a"}, {"x": "a"}]}, "row 2: 'prompt' must be a string or a list of messages, not None"),
        ({"data": "gone.jsonl"}, "no dataset 'gone.jsonl': there is no such file (from /"),
        ({"data": "gone.parquet"}, "no dataset 'gone.parquet': there is no such file (from /"),
        ({"test_data": "gone.jsonl"}, "no dataset 'gone.jsonl'"),
    ],
)
async def test_a_users_mistakes_are_sentences(settings: dict[str, Any], sentence: str) -> None:
    assert sentence in await refusal(**settings)


async def test_without_data_it_says_how_to_give_it() -> None:
    with pytest.raises(UserError, match="data"):
        EnvSpec(Prompts)


# ---- with tools


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: another.
    """
    return a + b


class Notes(Toolset):
    @tool
    async def note(self, text: str) -> str:
        """Write down."""
        return text


def call(**arguments: int) -> str:
    return f"Well. <tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


async def play_tools(script: Sequence[str], limits: EpisodeLimits | None = None, **settings: Any) -> Trajectory:
    spec = EnvSpec(Prompts, **{"data": ROWS, "rewards": [exact], **settings}).with_tools([add, Notes])
    async with spec.open():
        assert (spec.sample().max_turns, len(spec.tool_list())) == (8, 2)
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer(), limits=limits or EpisodeLimits())
        return await rollout.episode(0)


async def test_with_tools_an_episode_has_turns_until_one_calls_none() -> None:
    t = await play_tools([call(a=0, b=1), "1"])
    assert [m["role"] for m in t.messages] == ["user", "assistant", "tool", "assistant"]
    assert (t.stop, t.turns, t.reward, [c.status for c in t.calls]) == (Stop.TERMINATED, 2, 1.0, ["ok"])
    t = await play_tools([call(a=0, b=1)] * 9)
    assert (t.stop, t.turns, t.reward) == (Stop.MAX_TURNS, 8, 0.0)
    t = await play_tools([call(a=0, b=1)] * 9, EpisodeLimits(max_turns=3))
    assert (t.stop, t.turns) == (Stop.MAX_TURNS, 3)


async def test_rewards_of_a_prompt_of_messages_get_all_messages_since_as_trl_gives_them() -> None:
    given: list[Any] = []

    def look(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        given.extend([completions[0], completion_ids[0]])
        return [1.0]

    chat = [{"prompt": [{"role": "user", "content": "0+1?"}], "solution": "1"}] * 2
    t = await play_tools([call(a=0, b=1), "\\boxed{1}"], data=chat, rewards=[look, "accuracy"], system_prompt="Add.")
    calls, result, answer = given[0]
    assert calls["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 0, "b": 1}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "1")
    assert answer == {"role": "assistant", "content": "\\boxed{1}"}
    assert given[1] == t.token_ids[len(t.segments[0].token_ids) :]
    assert t.rewards["accuracy"] == 1.0
    await play_tools([call(a=0, b=1), "1"], rewards=[look])
    assert given[2] == "1"


async def test_without_tools_a_call_ends_the_episode_too() -> None:
    t = await play(call(a=0, b=1))
    assert (t.stop, t.turns, [m["role"] for m in t.messages]) == (Stop.TERMINATED, 1, ["user", "assistant"])


# ---- where the rows come from


@pytest.mark.parametrize("ending", ["jsonl", "json", "ndjson"])
async def test_lines_of_json(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    assert (await play("3", data=str(path), task=2)).reward == 1.0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": ', "rows.jsonl, line 2: not JSON: "),
        ("[1, 2]", "rows.jsonl, line 2: a row must be a JSON object, not [1, 2]"),
        ("\udcff", "rows.jsonl, line 2: not JSON: "),
    ],
)
async def test_a_bad_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f'{{"prompt": "a"}}\n{line}\n'.encode(errors="surrogateescape"))
    assert sentence in await refusal(data=str(path))


async def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert (await play("3", data=str(path), task=2)).reward == 1.0
    path.write_text("no table")
    assert "rows.parquet is no Parquet file" in await refusal(data=str(path))


async def test_a_dataset_and_any_sequence_of_rows() -> None:
    datasets = pytest.importorskip("datasets")
    data: Sequence[Any]
    for data in (datasets.Dataset.from_list(ROWS), tuple(ROWS)):
        assert (await play("3", data=data, task=2)).reward == 1.0
    other = datasets.Dataset.from_list(ROWS).rename_column("prompt", "question")
    assert (await play("3", data=other, task=2, prompt_column="question")).reward == 1.0


async def test_a_list_of_objects_is_read_as_lines_are(tmp_path: Path) -> None:
    for indent in (None, 1):
        (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=indent))
        assert (await play("3", data=str(tmp_path / "rows.json"), task=2)).reward == 1.0
    (tmp_path / "rows.json").write_text("[1]")
    assert "rows.json, item 1: a row must be a JSON object, not 1" in await refusal(data=f"{tmp_path}/rows.json")


async def test_a_data_frame_and_a_dict_of_splits() -> None:
    datasets = pytest.importorskip("datasets")
    assert (await play("3", data=pytest.importorskip("pandas").DataFrame(ROWS), task=2)).reward == 1.0
    data = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "dev": datasets.Dataset.from_list(ROWS[7:])}
    )
    assert (await play("8", data=data, test_split="dev", split="test")).reward == 1.0


async def test_a_split_a_revision_and_files_are_those_of_load_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, asked = pytest.importorskip("datasets"), list[Any]()

    def load(*names: Any, **more: Any) -> Any:
        asked.append((*names, more))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    spec = EnvSpec(
        Prompts, data="org/sums:hard", split="train[:50%]", revision="v2", data_files="a*.json", test_split="dev"
    )
    async with spec.open():
        more = {"revision": "v2", "streaming": False, "data_files": "a*.json"}
        assert asked == [
            ("org/sums", "hard", {"split": split, **more}) for split in ("dev", "train[:50%]")
        ] or asked == [("org/sums", "hard", {"split": split, **more}) for split in ("train[:50%]", "dev")]


async def test_several_datasets_by_name_are_splits_and_the_test_together() -> None:
    spec = EnvSpec(Prompts, data=ROWS, rewards=[exact], test_data={"small": ROWS[:2], "big": {"data": ROWS[10:]}})
    assert spec.list_splits() == ("train", "test", "small", "big")
    async with spec.open():
        assert [spec.count(split) for split in spec.list_splits()] == [20, 12, 2, 10]
        for split, task, answer in (("small", 1, "2"), ("big", 0, "11"), ("test", 2, "11"), ("test", 11, "20")):
            rollout = Rollout(spec, ScriptedEngine([answer]), ByteRenderer(), split=split)
            assert (await rollout.episode(task)).reward == 1.0
    own = EnvSpec(Prompts, data=ROWS, test_data={"test": ROWS[:1], "other": ROWS[1:]})
    async with own.open():
        assert (own.list_splits(), own.count("test")) == (("train", "test", "other"), 1)


async def test_a_split_of_what_has_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"env\.split is for a dataset that has splits; env\.data is"):
        async with EnvSpec(Prompts, data=ROWS, split="dev").open():
            pass


# ---- what the columns are called


async def test_columns_have_names_of_their_own_also_inside_a_column() -> None:
    rows = [{"question": "0+1?", "reward_model": {"style": "rule", "ground_truth": "1"}}] * 2
    named: dict[str, Any] = {"prompt_column": "question", "solution_column": "reward_model.ground_truth"}
    assert (await play("1", data=rows, **named)).reward == 1.0
    nested = [{"task": {"ask": "0+1?"}, "solution": "1"}] * 2
    assert (await play("1", data=nested, prompt_column="task.ask")).messages[0]["content"] == "0+1?"


async def test_a_chat_for_supervised_training_is_a_prompt_and_its_completion() -> None:
    given: list[Any] = []

    def look(completion: list[Any], **_: Any) -> list[float]:
        given.extend(completion)
        return [1.0]

    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": None},
                {"role": "user", "content": "Again.", "name": None},
                {"role": "assistant", "content": "hi"},
            ]
        }
    ] * 2
    t = await play("x", data=rows, prompt_column="messages", rewards=[look])
    assert t.messages[:3] == (
        {"role": "user", "content": "Say hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Again."},
    )
    assert given == [[{"role": "assistant", "content": "hi"}]]


# ---- streams


async def test_a_stream_holds_out_its_first_rows_and_what_asks_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*ROWS, ROWS[1], *ROWS[5:7]]))
    settings: dict[str, Any] = {"data": str(path), "streaming": True, "test_rows": 3, "shuffle_buffer": 0}
    asked = [(await play("1", task=task, **settings)).messages[0]["content"] for task in (0, 1, 16, 17, 18, 19)]
    assert asked == [f"What is {n}+1?" for n in (3, 4, 19, 5, 6, 3)]
    assert (await play("1", task=0, split="test", **settings)).reward == 1.0
    assert (await play("4", task=2**32, **settings)).reward == 1.0  # run 1 has integers of its own
    spec = EnvSpec(Prompts, **settings)
    async with spec.open():
        assert [spec.count(split) for split in ("train", "test")] == [None, 3]


async def test_an_iterable_dataset_and_a_function_are_streams() -> None:
    datasets = pytest.importorskip("datasets")
    iterable = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    data: Any
    for data in (iterable, datasets.IterableDatasetDict({"train": iterable}), lambda: iter(ROWS)):
        t = await play("6", data=data, test_rows=5, shuffle_buffer=0)
        assert t.reward == 1.0
    spec = EnvSpec(Prompts, data=iterable, test_rows=5)
    async with spec.open():
        shuffled = [(await spec.shared.row("train", task))["level"] for task in range(15)]
    assert sorted(shuffled) == list(range(5, 20)) != shuffled
    t = await play("1", data=iterable, test_data=iterable, test_rows=2, split="test")
    assert t.reward == 1.0


async def test_a_short_stream_is_held_out_as_other_data_is() -> None:
    assert (await play("19", data=lambda: iter(ROWS), split="test")).reward == 1.0
    assert "has no rows" in await refusal(data=lambda: iter([]))


async def test_a_bad_row_of_a_stream_ends_the_run_with_its_number_once_it_is_asked_for() -> None:
    rows = [*ROWS, {"prompt": 3}]
    settings: dict[str, Any] = {"data": lambda: iter(rows), "test_rows": 3, "shuffle_buffer": 0}
    assert (await play("20", task=16, **settings)).reward == 1.0
    assert await refusal(task=17, **settings) == (
        "row 21 of the stream: 'prompt' must be a string or a list of messages, not 3"
    )


@pytest.mark.slow
def test_a_run_over_a_stream_that_is_resumed_reads_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"Say {n}.", "solution": str(n)}) for n in range(40)))

    def run(steps: int, **more: Any) -> list[str]:
        folder = tmp_path / "run"
        train(
            "prompts",
            env_args={"data": str(path), "streaming": True, "test_rows": 4, "shuffle_buffer": 0},
            steps=steps,
            rollout={"tasks_per_step": 2, "group_size": 2, "max_tokens": 8},
            eval={"every": 0, "final_tasks": 2},
            run={"dir": str(folder), "save_every": 1, **more},
        )
        rows = [row for file in sorted((folder / "trajectories").glob("*.parquet")) for row in _asked(file)]
        return list(dict.fromkeys(rows))

    assert run(2) == ["Say 4.", "Say 5.", "Say 6.", "Say 7."]
    assert run(3, resume=True)[-2:] == ["Say 8.", "Say 9."]


def _asked(file: Path) -> list[str]:
    rows = [row for row in pq.read_table(file).to_pylist() if row["split"] == "train"]
    return [json.loads(row["messages"])[0]["content"] for row in sorted(rows, key=lambda row: row["task"])]
