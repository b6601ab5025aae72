"""Why an episode or a token was trained as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from agentrl import UserError
from agentrl.credit import assign_credit, record_held_out
from agentrl.learner.advantages.group import grpo
from agentrl.runs.reader import build_trajectory, parse_episode_id
from agentrl.types import CallRecord, Group, Message, Stop, Trajectory
from agentrl.view import call_matching, episode
from agentrl.view.explain import explain_episode, explain_exclusion, explain_token
from agentrl.view.store import Store
from agentrl.view.tokens import TokenTexts
from tests.helpers import runs


def opened(folder: Path, config: str = "") -> Store:
    if config:
        (folder / "config.toml").write_text((folder / "config.toml").read_text() + config)
    store = Store(folder)
    store.refresh()
    return store


def run_of(folder: Path, *members: Trajectory, config: str = "") -> Store:
    return opened(runs.of(folder / "run", members), config)


def test_an_advantage_is_derived_from_the_group(tmp_path: Path) -> None:
    store = run_of(tmp_path, runs.solved(7), runs.wrong(7), runs.wrong(7), runs.wrong(7))
    said = explain_episode(store, "train-1:0")
    assert said[0] == "train-1:0 of run: step 1, task 7, sample 0 of 4"
    assert said[2] == "reward 1 of correct 1"
    assert said[3] == (
        "advantage +1.5 = (1 - 0.25) / (0.5 + 0.0001) (grpo); "
        "the group's 4 rewards are 1 0 0 0: mean 0.25, standard deviation 0.5"
    )
    assert said[4].startswith("trained: ")
    assert said[-1] == "turn 1: price ok, 0.010 s"
    assert explain_episode(store, "1:0") == said


@pytest.mark.parametrize(
    ("name", "stored", "told"),
    [
        ("dr_grpo", 0.75, "advantage +0.75 = 1 - 0.25 (dr_grpo)"),
        ("rloo", 1.0, "advantage +1 = 1 - 0, the mean of the others (rloo)"),
        ("batch", 1.2, "advantage +1.2 (batch): its distance from the group's mean, divided by the standard deviation"),
        ("mine.py:own", 0.3, "advantage +0.3 (mine.py:own): a rule of its own; the group's"),
    ],
)
def test_each_advantage_has_its_formula(tmp_path: Path, name: str, stored: float, told: str) -> None:
    run = runs.start(tmp_path / "run")
    (tmp_path / "run/config.toml").write_text(f'[learner]\nadvantage = "{name}"\n')
    members = (runs.solved(7), runs.wrong(7), runs.wrong(7), runs.wrong(7))
    run.write_trajectories(1, runs.credited([Group(7, members)], [(stored, 0.0, 0.0, 0.0)]))
    assert explain_episode(opened(tmp_path / "run"), "1:0")[3].startswith(told)


UNTRAINED: list[tuple[Sequence[Trajectory], str]] = [
    ((runs.wrong(7), runs.wrong(7)), "all 2 scored episodes of the group earned 0, so none was better"),
    ((runs.lost(7), runs.wrong(7), runs.solved(7)), "an infrastructure error ended it (tool_timeout)"),
    ((runs.solved(7), runs.lost(7)), "only 1 of the group's 2 episodes could be scored, too few"),
    ((runs.stuck(7), runs.solved(7)), "learner.mask_stop_reasons leaves out episodes that stop at max_turns"),
    ((replace(runs.solved(7), rewards={"correct": None}), runs.solved(7), runs.wrong(7)), "no reward applied"),
]


@pytest.mark.parametrize(("members", "why"), UNTRAINED)
def test_why_an_episode_was_not_trained(tmp_path: Path, members: Sequence[Trajectory], why: str) -> None:
    folder = runs.of(tmp_path / "run", members, mask_stop_reasons=frozenset({Stop.MAX_TURNS}))
    store = opened(folder, 'mask_stop_reasons = ["max_turns"]\n')
    assert f"not trained: {why}" in "\n".join(explain_episode(store, "1:0"))
    trained = [
        not explain_exclusion(store, episode.read_episode(store, parse_episode_id(f"1:{n}")), [])
        for n in range(len(members))
    ]
    assert sum(trained) == (
        2 if "infrastructure" in why or "no reward" in why else 1 if "mask_stop_reasons" in why else 0
    )


def test_a_resampled_group_is_told_apart(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    flat, good = Group(7, (runs.wrong(7),) * 2), Group(8, (runs.solved(8), runs.wrong(8)))
    run.write_trajectories(
        1, assign_credit([good], grpo, reduce=lambda lengths: [1.0] * len(lengths), resampled=[flat])
    )
    store = opened(tmp_path / "run")
    said = explain_episode(store, "1:2")
    assert "not trained: its group taught nothing" in "\n".join(said)
    assert said[3] == "advantage none"
    assert said[4].endswith("another was rolled out for it")


def test_a_term_that_acts_on_every_episode_is_told(tmp_path: Path) -> None:
    store = run_of(tmp_path, runs.wrong(7), runs.wrong(7), config="beta = 0.1\n")
    assert explain_episode(store, "1:0")[4].endswith("; learner.beta acted on it as on every scored episode")


def test_held_out_episodes_are_never_trained(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    run.write_trajectories(0, record_held_out([Group(7, (runs.solved(7), runs.wrong(7)))]), "test")
    assert "not trained: it measures held-out tasks" in explain_episode(opened(tmp_path / "run"), "test-0:1")


def test_a_token_is_told_from_its_author_to_its_advantage(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step in (1, 2, 3):
        runs.write(run, step, [Group(7, (runs.solved(7, version=1), runs.wrong(7)))])
    store = opened(tmp_path / "run")
    row = episode.read_episode(store, parse_episode_id("3:0"))
    prompt, _call, result, answer = episode.describe_segments(row)
    texts = TokenTexts(store)
    said = explain_token(store, texts, "3:0", answer["start"] + 1)
    assert said[0].startswith(f"token {answer['start'] + 1} of ")
    assert (
        said[1]
        == "written by the model, in turn 2, by version 1 of the policy (learned from at version 2: staleness 1)"
    )
    assert said[2] == "logprob -0.1: it was sampled with a probability of 0.905"
    assert said[3] == "ratio 0.9704: the learner gave it a logprob of -0.13 before the update"
    assert said[4].startswith("in bounds: learner.importance_sampling_mode token_truncate weighs the token by its")
    assert said[5] == "trained with advantage +0.707: made more likely"
    for part, who in ((prompt, "the prompt"), (result, "the environment")):
        masked = explain_token(store, texts, "3:0", part["start"])
        assert masked[1].startswith(f"written by {who}")
        assert masked[2] == "masked: it is read and never learned from"


def test_a_part_is_told_with_its_weight(tmp_path: Path) -> None:
    own = replace(runs.wrong(7), rewards={"correct": 1.0, "short": 0.5, "style": None}, weights={"short": 0.2})
    store = run_of(tmp_path, own, runs.wrong(7))
    assert explain_episode(store, "1:0")[2] == "reward 1.1 of correct 1, short 0.5 x 0.2, style none"


@pytest.mark.parametrize(
    ("name", "token", "sentence"),
    [
        ("last", 0, "an episode is SPLIT-STEP:ROW, such as train-3:17 or 3:17, not 'last'"),
        ("../x-1:0", 0, "an episode is SPLIT-STEP:ROW, such as train-3:17 or 3:17, not '../x-1:0'"),
        ("9:0", 0, "has no train-000009.parquet"),
        ("1:9", 0, "train-000001.parquet has the episodes 0 to 0, not 9"),
        ("1:0", 9999, "the episode has the tokens 0 to "),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, name: str, token: int, sentence: str) -> None:
    store = run_of(tmp_path, runs.solved(7))
    with pytest.raises(UserError) as told:
        explain_token(store, TokenTexts(store), name, token)
    assert sentence in str(told.value)


def test_records_find_their_calls_though_they_stand_in_another_order() -> None:
    names = {"a": "price", "b": "", "c": "price", "d": "lost"}
    calls = [call_matching.MessageCall(call_id, name, {}) for call_id, name in names.items()]
    records = [
        {"name": "", "status": "parse", "seconds": 0},
        {"name": "price", "status": "tool", "seconds": 1},
        {"name": "price", "status": "ok", "seconds": 2},
    ]
    assert call_matching.match_records(calls, ["b", "c"], records) == [records[2], records[0], records[1], None]


def test_messages_say_what_became_of_their_calls(tmp_path: Path) -> None:
    said = [
        {"role": "assistant", "content": "an example, from the prompt"},
        {"role": "user", "content": "What do hats cost?"},
        {"role": "assistant", "content": "", "tool_calls": [runs.call("price", 1, item="hat")]},
        {"role": "tool", "content": "error: closed", "tool_call_id": "c1", "name": "price"},
    ]
    made = runs.played(7, said, 0.0, calls=[CallRecord(0, "price", "tool", 0.5)], stop=Stop.MAX_TURNS)  # type: ignore[arg-type]
    whole = Trajectory(**{**{f: getattr(made, f) for f in made.__slots__}, "segments": made.segments[1:]})
    store = run_of(tmp_path, whole)
    told = episode.describe_messages(episode.read_episode(store, parse_episode_id("1:0")))
    assert [m.get("turn") for m in told] == [None, None, 0, None]
    assert told[2]["calls"][0] == {
        "name": "price",
        "arguments": {"text": '{"item": "hat"}', "length": 15},
        "status": "tool",
        "seconds": 0.5,
    }
    assert (told[3]["status"], told[3]["seconds"]) == ("tool", 0.5)


def test_a_call_that_could_not_be_read_is_shown_as_the_model_wrote_it(tmp_path: Path) -> None:
    """In any form: its place in the turn's tokens is kept with it. Where it is not, the whole turn is shown."""
    said: list[Any] = [
        {"role": "user", "content": "What do hats cost?"},
        {"role": "assistant", "content": "", "tool_calls": [runs.call("", 1), runs.call("", 2), runs.call("", 3)]},
        *({"role": "tool", "content": f"error: no call {n}", "tool_call_id": f"c{n}", "name": ""} for n in (1, 2, 3)),
    ]
    parts = ["I look. ", "[TOOL_CALLS] {a", " and ", "[TOOL_CALLS] {b"]
    ids = [runs.segment("model", part) for part in parts]
    ends = list(accumulate(len(s.token_ids) for s in ids))
    places = [(ends[2], ends[3]), (ends[0], ends[1]), None]  # they end in another order than they were written in
    records = [CallRecord(0, "", "parse", 0.0, place) for place in places]
    made = runs.played(7, said, 0.0, calls=records)
    turn = runs.segment("model", "".join(parts))
    assert turn.token_ids == tuple(i for s in ids for i in s.token_ids)
    store = run_of(tmp_path, replace(made, segments=(made.segments[0], turn, *made.segments[2:])))
    row = episode.read_episode(store, parse_episode_id("1:0"))
    assert [c.span for c in build_trajectory(row).calls] == places
    calls = episode.describe_messages(row, TokenTexts(store))[1]["calls"]
    assert [c["raw"] for c in calls] == ["".join(parts), "[TOOL_CALLS] {a", "[TOOL_CALLS] {b"]


def test_turns_of_the_same_words_have_each_their_own_answers(tmp_path: Path) -> None:
    """Their calls have the same ids, as an id is made of the turn's words."""
    said: list[Message] = [{"role": "user", "content": "What do hats cost?"}]
    for answer in ("error: closed", "7"):
        said.append({"role": "assistant", "content": "", "tool_calls": [runs.call("price", item="hat")]})  # type: ignore[list-item]
        said.append({"role": "tool", "content": answer, "tool_call_id": "c0", "name": "price"})
    said.append({"role": "tool", "content": "of another day", "tool_call_id": "c9", "name": "price"})
    records = [CallRecord(0, "price", "tool", 0.5), CallRecord(1, "price", "ok", 0.25)]
    same = [CallRecord(1, "price", "ok", 0.125), CallRecord(1, "price", "tool", 0.75)]
    store = run_of(
        tmp_path, runs.played(7, said, 0.0, calls=records), runs.played(7, said, 0.0, calls=records[:1] + same)
    )
    told = episode.describe_messages(episode.read_episode(store, parse_episode_id("1:0")))
    assert [told[n].get("status") or told[n]["calls"][0]["status"] for n in (1, 2, 3, 4)] == ["tool"] * 2 + ["ok"] * 2
    assert [told[n]["seconds"] for n in (2, 4)] == [0.5, 0.25]
    assert "status" not in told[5]
    told = episode.describe_messages(episode.read_episode(store, parse_episode_id("1:1")))
    assert (told[3]["calls"][0]["status"], told[3]["calls"][0]["seconds"]) == (
        "ok",
        0.125,
    )  # its own answer is no error


def test_tokens_are_shown_as_they_are_read_together(tmp_path: Path) -> None:
    store = run_of(tmp_path, runs.solved(7))
    text = "añ 日本 <|im_end|>\nx \U0001f600."
    ids = runs.tokenizer().encode(text, add_special_tokens=False).ids
    assert "".join(TokenTexts(store).decode(ids)) == text
    assert "" in TokenTexts(store).decode(ids)  # a character of several tokens is with the last of them
    assert "".join(TokenTexts(store).decode([*ids, 165])).startswith(text)  # a character that never ends


def test_without_a_tokenizer_tokens_are_their_ids(tmp_path: Path) -> None:
    store = run_of(tmp_path, runs.solved(7))
    (store.folder / "config.toml").write_text('model = "nobody/nothing-of-the-kind"\n')
    texts = TokenTexts(store)
    assert texts.decode([3, 4]) == ["\u20393\u203a", "\u20394\u203a"]
    assert texts.why.startswith("no tokenizer.json beside the run's model")
    (store.folder / "model").mkdir()
    (store.folder / "model/tokenizer.json").write_text("{")
    assert TokenTexts(store).decode([3]) == ["\u20393\u203a"]


def test_a_terminal_is_not_written_to_by_a_model(tmp_path: Path) -> None:
    bad = runs.played(7, [{"role": "user", "content": "x"}], 1.0, calls=[CallRecord(0, "\x1b[2J\u202e", "tool", 0.1)])
    said = "\n".join(explain_episode(run_of(tmp_path, bad), "1:0"))
    assert "[ESC][2J[U+202E] tool, 0.100 s" in said
    assert "\x1b" not in said


def test_a_history_that_was_written_anew_is_called_so(tmp_path: Path) -> None:
    first = runs.solved(7)
    several = replace(first, segments=(*first.segments, *first.segments))  # the same again, in a second context
    store = run_of(tmp_path, several, runs.wrong(7))
    sentences = "\n".join(explain_episode(store, "1:0"))
    assert f"in {several.turns} turns and 2 contexts: each begins with the history" in sentences
    texts, at = TokenTexts(store), len(first.token_ids)
    assert explain_token(store, texts, "1:0", 0)[1].startswith("written by the prompt")
    assert explain_token(store, texts, "1:0", at)[1].endswith("context 2 begins with it")
    described = episode.describe_segments(episode.read_episode(store, parse_episode_id("1:0")))
    assert [s.get("context") for s in described if s["author"] == "prompt"] == [None, 2]
