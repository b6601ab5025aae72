"""What stands out in a run, in sentences."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentrl.health.monitor import HealthMonitor
from agentrl.types import CallRecord, Group
from agentrl.view.findings import RunFinding, find_flat_groups, find_in_training, find_present_signs, select_recent
from agentrl.view.index import as_floats
from agentrl.view.metrics_file import MetricsFile
from agentrl.view.reward_costs import estimate_costs
from agentrl.view.run_cache import RunCache
from agentrl.view.store import Store
from agentrl.view.tool_errors import count_tool_errors, read_failed_conversations
from agentrl.view.trend import find_trend
from tests.helpers import runs


def look(folder: Path) -> RunCache:
    store = Store(folder)
    store.refresh()
    return RunCache(store)


def noisy(values: list[float], noise: float = 0.03) -> list[float]:
    random = Random(1)
    return [v + random.gauss(0, noise) for v in values]


def test_a_curve_that_stopped_is_flat_since_then() -> None:
    found = find_trend(range(1, 61), noisy([min(0.6, 0.03 * s) for s in range(1, 61)]))
    assert found.word == "flat"
    assert 17 <= found.since <= 26  # it stops rising at 20
    assert found.level == pytest.approx(0.6, abs=0.03)


def test_curves_that_rise_fall_and_are_too_short() -> None:
    rising = find_trend(range(40), noisy([0.02 * s for s in range(40)]))
    falling = find_trend(range(60), noisy([0.03 * s if s < 30 else 0.9 - 0.02 * (s - 30) for s in range(60)]))
    assert (rising.word, falling.word) == ("rising", "falling")
    assert 25 <= falling.since <= 35
    assert find_trend(range(40), [0.5] * 40)[:2] == ("flat", 0)
    assert find_trend([1, 2], [0.1, 0.3])[:3] == ("short", 1, 0.3)
    assert find_trend([], []).word == "short"


def test_why_did_reward_stop_at_0_6(tmp_path: Path) -> None:
    found = look(runs.broken(tmp_path / "run")).findings()
    said = "\n".join(f.text for f in found)
    assert found[0].kind == "bad"
    assert found[0].text.startswith("reward is 0.6")
    assert re.search(r"has been flat for [23]\d steps, since step (8|9|10|11|12|13);", found[0].text)
    lost = (
        r"stopped at max_turns: 40% of the episodes; they earn 0.00, the others (1.00|0.9\d), which costs 0.(40|39) of"
    )
    assert re.search(lost, said)
    assert "a call of tool catalogue failed: 40% of the episodes" in said
    assert re.search(r"says most often \(100%\): .the catalogue knows no item '\w+': items are given by number.", said)
    assert "catalogue failed" in found[1].text
    assert "in 40% all failed" in said


def test_each_sentence_finds_the_episodes_it_is_about(tmp_path: Path) -> None:
    run = look(runs.broken(tmp_path / "run"))
    for found in run.findings():
        if found.query:
            _, rows = run.search.rows(found.query)
            assert len(rows), found


def test_what_a_kind_of_episodes_costs_is_what_reward_would_gain(tmp_path: Path) -> None:
    lately = select_recent(look(runs.broken(tmp_path / "run")).store.now.table, 30)
    rewards = as_floats(lately["reward"])
    by_query = {c.query: c for c in estimate_costs(lately, rewards)}
    lost = by_query["stop=max_turns"]
    assert lost.cost == pytest.approx(1.0 - rewards.mean())
    assert by_query["failed_tool=catalogue"].cost == pytest.approx(lost.cost)


def test_faults_are_told_with_what_they_said(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step in range(1, 11):
        runs.write(run, step, [Group(step, (runs.solved(step), runs.lost(step), runs.wrong(step)))])
    (found,) = [f for f in look(tmp_path / "run").findings() if "infrastructure errors" in f.text]
    assert (
        "ended 10 episodes (33.3%), which are not trained: tool_timeout, \u201cprice took more than 30 s\u201d"
        in found.text
    )
    assert found.query.endswith("fault=tool_timeout")


def test_a_run_that_is_well_is_told_so(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step in range(1, 21):
        members = tuple(runs.solved(step) if i < 19 else runs.wrong(step) for i in range(20))
        runs.write(run, step, [Group(step, members)])
    found = look(tmp_path / "run").findings()
    assert found[0].kind == "good"
    assert "close to 1, the most an episode earned" in found[0].text


@pytest.mark.parametrize(
    ("name", "values", "word"),
    [
        ("entropy", [1.0] * 10 + [0.01] * 20, "entropy fell from 1 to 0.01"),
        ("completions/clipped_ratio", [0.3] * 9, "30% of the episodes ran out of tokens"),
        ("sampling/sampling_logp_difference/mean", [0.2] * 9, "logprobs differ"),
        ("kl", [3.0] * 9, "3 nats a token from its reference"),
    ],
)
def test_numbers_that_are_not_as_they_should_be(tmp_path: Path, name: str, values: list[float], word: str) -> None:
    run = runs.start(tmp_path / "run")
    for step, value in enumerate(values, 1):
        run.log({"step": step, "reward": 0.5, name: value})
    assert any(word in f.text and f.kind == "bad" for f in look(tmp_path / "run").findings())


def test_the_page_says_of_any_numbers_what_the_run_itself_says(tmp_path: Path) -> None:
    """The same rules and limits: whatever holds at the last step, and nothing else."""
    random = Random(0)
    names = ("entropy", "kl", "grad_norm", "completions/clipped_ratio", "stops/max_turns", "reward")
    mismatch = "sampling/sampling_logp_difference/mean"
    seen: set[str] = set()
    for number in range(60):
        run, high = runs.start(tmp_path / str(number)), {name: random.choice([0.05, 0.3, 1.5]) for name in names}
        lines = [
            {name: random.random() * top for name, top in high.items()} | {mismatch: random.choice([0.04, 0.09, 0.11])}
            for _ in range(random.choice([4, 12, 30]))
        ]
        for step, line in enumerate(lines, 1):
            run.log({"step": step, **line})
        curves = MetricsFile(tmp_path / str(number) / "metrics.jsonl")
        curves.refresh()
        monitor = HealthMonitor()
        for line in lines[:-1]:
            monitor.check_step(line, [])
        monitor._last_seen.clear()
        expected = monitor.check_step(lines[-1], [])
        assert [f.text for f in find_present_signs(curves)] == expected
        seen |= {text[:12] for text in expected}
    assert len(seen) >= 5


def test_a_sign_that_still_holds_is_not_told_twice(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    monitor = HealthMonitor()
    for step in range(1, 30):
        run.log({"step": step, "reward": 0.5, "kl": 2.0 + step})
        for text in monitor.check_step({"reward": 0.5, "kl": 2.0 + step}, []):
            run.log_message(step, text)
    texts = [f.text for f in look(tmp_path / "run").findings() if "nats a token from its reference" in f.text]
    assert len(texts) == 1
    assert "30 nats" in texts[0]


def test_a_gap_between_training_and_held_out_tasks_is_told(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    run.log({"step": 0, "eval/reward": 0.2})
    for step in range(1, 11):
        run.log({"step": step, "reward": 0.9})
    run.log({"step": 10, "eval/reward": 0.3})
    assert (
        RunFinding("bad", "held-out reward is 0.30 at step 10, training reward 0.90", "split=test failed")
        in look(tmp_path / "run").findings()
    )


def test_nothing_yet_is_nothing_to_say(tmp_path: Path) -> None:
    runs.start(tmp_path / "run")
    assert look(tmp_path / "run").findings() == []
    assert find_in_training(MetricsFile(tmp_path / "none"), Store(tmp_path).now.table, {}) == []


def test_refusals_alike_but_for_names_and_numbers_are_counted_together() -> None:
    def said(text: str, tool: str = "price") -> str:
        return json.dumps([{"role": "tool", "content": text, "name": tool}])

    found = count_tool_errors(
        [
            said("error: no 'hat' on 3 shelves"),
            said("error: no 'cup' on 12 shelves"),
            said("error: closed"),
            said("7"),
            "no",
        ]
    )
    assert found == {"price": (3, 2, "no 'hat' on 3 shelves")}


def test_a_good_answer_that_begins_as_a_refusal_does_is_counted_as_none(tmp_path: Path) -> None:
    answer: dict[str, Any] = {"role": "tool", "content": "error: disk full", "tool_call_id": "c0", "name": "price"}
    said: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [runs.call("price")]}, answer]
    failure = [*said[:1], {**answer, "content": "error: closed", "is_error": True}]
    good = runs.played(1, said, 0.0, calls=[CallRecord(0, "price", "ok", 0.0)])
    both = [CallRecord(0, "price", "ok", 0.0), CallRecord(1, "price", "tool", 0.0)]
    mixed = runs.played(1, [*said, *failure], 0.0, calls=both)
    run = runs.start(tmp_path / "run")
    runs.write(run, 1, [Group(1, (good, mixed))])
    assert count_tool_errors(read_failed_conversations(Store(tmp_path / "run"), [1])) == {"price": (1, 1, "closed")}


def test_hostile_words_of_tools_are_spelled_out(tmp_path: Path) -> None:
    bad = "error: \x1b[31m\u202eevil"
    said = [
        {"role": "assistant", "content": "", "tool_calls": [runs.call("price")]},
        {"role": "tool", "content": bad, "tool_call_id": "c0", "name": "price"},
    ]
    run = runs.start(tmp_path / "run")
    for step in range(1, 11):
        failed = runs.played(step, said, 0.0, calls=[CallRecord(0, "price", "tool", 0.0)])  # type: ignore[arg-type]
        runs.write(run, step, [Group(step, (failed, failed, runs.solved(step), runs.solved(step)))])
    told = "\n".join(f.text for f in look(tmp_path / "run").findings())
    assert "[ESC][31m[U+202E]evil" in told
    assert "\x1b" not in told


def test_a_group_whose_rewards_differ_by_rounding_is_flat(tmp_path: Path) -> None:
    """Beside one of which nobody is scored, which is not."""
    run = runs.start(tmp_path / "run")
    same = [Group(t, (runs.rewarded(t, 0.1 + 0.2), runs.rewarded(t, 0.3))) for t in range(7)]
    runs.write(run, 1, [*same, Group(8, (runs.lost(8), runs.lost(8)))])
    store = Store(tmp_path / "run")
    store.refresh()
    (found,) = find_flat_groups(store.now.table, "step>=1")
    assert found.text.startswith("88% of the groups have zero variance")
