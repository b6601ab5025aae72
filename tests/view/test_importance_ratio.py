"""The ratio of a token, and what a run's settings made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.runs.reader import parse_episode_id
from agentrl.types import Group, Segment
from agentrl.view import episode
from agentrl.view.explain import explain_episode, explain_token
from agentrl.view.store import Store
from agentrl.view.tokens import TokenTexts
from tests.helpers import runs


def opened(folder: Path, config: str) -> Store:
    (folder / "config.toml").write_text("[learner]\n" + config)
    store = Store(folder)
    store.refresh()
    return store


@pytest.mark.parametrize(
    ("settings", "nats", "sentences"),
    [
        (
            'importance_sampling_mode = "token_truncate"\nimportance_sampling_max = 2.0\nnum_iterations = 1\n',
            0.5,
            [
                "ratio 1.649: the learner gave it a logprob of -0.5 before the update",
                "in bounds: learner.importance_sampling_mode token_truncate "
                "weighs the token by it as it is, from 0 to 2",
                "not clipped: the clip bounds the change within a batch, and there was one update",
                "trained with advantage +1.5: made more likely",
            ],
        ),
        (
            'importance_sampling_mode = "token_truncate"\nimportance_sampling_max = 2.0\nnum_iterations = 3\n',
            1.0,
            [
                "ratio 2.718: the learner gave it a logprob of 0 before the update",
                "cut to 2: learner.importance_sampling_mode token_truncate weighs the token by it within 0 to 2",
                "not clipped in the first of 3 updates; whether it was in later ones is not kept",
                "trained with advantage +1.5: made more likely",
            ],
        ),
        (
            'importance_sampling_mode = "token_mask"\nimportance_sampling_min = 0.5\n',
            -1.0,
            [
                "ratio 0.3679: the learner gave it a logprob of -2 before the update",
                "not trained: learner.importance_sampling_mode token_mask "
                "leaves the token out, as it is not from 0.5 on",
            ],
        ),
        (
            'importance_sampling_mode = "sequence_mask"\nimportance_sampling_max = 2.0\n',
            0.5,
            [
                "ratio 1.649: the learner gave it a logprob of -0.5 before the update",
                "not trained: learner.importance_sampling_mode sequence_mask "
                "leaves the token out, as the episode's ratio, 2.718, "
                "is not from 0 to 2",
            ],
        ),
        (
            'importance_sampling_mode = "geometric_truncate"\nimportance_sampling_max = 2.0\n',
            0.5,
            [
                "ratio 1.649: the learner gave it a logprob of -0.5 before the update",
                "in bounds: learner.importance_sampling_mode geometric_truncate "
                "weighs the token by the episode's ratio, 1.649, "
                "as it is, from 0 to 2",
                "trained with advantage +1.5: made more likely",
            ],
        ),
        (
            'importance_sampling_mode = "token_truncate"\noff_policy_threshold = 0.2\n',
            0.0,
            [
                "ratio 1: the learner gave it a logprob of -1 before the update",
                "in bounds: learner.importance_sampling_mode token_truncate weighs the token by it as it is, from 0 on",
                "trained with advantage +1.5: made more likely",
            ],
        ),
    ],
)
def test_the_settings_say_what_became_of_a_ratio(
    tmp_path: Path, settings: str, nats: float, sentences: list[str]
) -> None:
    own = replace(runs.wrong(7), segments=(Segment("model", (5, 6), (-1.0, -1.0), (0, 0)),))
    run = runs.start(tmp_path / "run")
    left = [-1.0 + nats] * 2
    run.write_trajectories(1, runs.credited([Group(7, (own, runs.wrong(7)))], [(1.5, 0.0)]), learned=[[left, None]])
    store = opened(tmp_path / "run", settings)
    said = explain_token(store, TokenTexts(store), "1:0", 1)
    assert said[3:-1] == sentences
    assert explain_episode(store, "1:0")[6].startswith("the learner's probabilities over the engine's: ")


def test_an_episode_far_from_the_policy_is_told_as_left_out(tmp_path: Path) -> None:
    own = replace(runs.wrong(7), segments=(Segment("model", (5, 6), (-1.0, -1.0), (0, 0)),))
    run = runs.start(tmp_path / "run")
    credit = runs.credited([Group(7, (own, runs.wrong(7)))], [(-1.5, 0.0)])
    run.write_trajectories(1, credit, learned=[[[-1.5, -1.5], None]])
    store = opened(tmp_path / "run", 'importance_sampling_mode = "token_truncate"\noff_policy_threshold = 0.2\n')
    said = explain_token(store, TokenTexts(store), "1:0", 1)
    assert said[4] == "not trained: its episode is farther from the policy than learner.off_policy_threshold, 0.2"
    assert not [s for s in said if s.startswith("trained")]


def test_what_is_not_known_of_a_ratio_is_said(tmp_path: Path) -> None:
    own = replace(runs.wrong(7), segments=(Segment("model", (5, 6), (-1.0, -1.0), (0, 0)),))
    run = runs.start(tmp_path / "run")
    credit = runs.credited([Group(7, (own, own))], [(1.5, 1.5)])
    run.write_trajectories(1, credit, learned=[[[float("nan"), -1.0], None]])
    store = opened(tmp_path / "run", "")
    assert explain_token(store, TokenTexts(store), "1:0", 0)[3] == "ratio unknown: a logprob of the token is not finite"
    assert explain_token(store, TokenTexts(store), "1:1", 0)[3] == "ratio unknown: the learner's logprobs were not kept"
    row = episode.read_episode(store, parse_episode_id("1:0"))
    assert episode.describe_tokens(row, TokenTexts(store), 0)["log_ratios"] == [None, 0.0]
    old = dict(row, segments=[{k: v for k, v in s.items() if k != "learner_logprobs"} for s in row["segments"]])
    assert episode.describe_tokens(old, TokenTexts(store), 0)["log_ratios"] == [None, None]  # as an older run has them


def test_a_tokens_part_in_the_gradient_is_told(tmp_path: Path) -> None:
    """Advantage 1.5, ratio e^0.5 cut to 1.6, and one of four tokens in the step."""
    own = replace(runs.wrong(7), segments=(Segment("model", (5, 6), (-1.0, -1.0), (0, 0)),))
    run = runs.start(tmp_path / "run")
    credit = runs.credited([Group(7, (own, own))], [(1.5, -1.5)])
    run.write_trajectories(1, credit, learned=[[[-0.5, -1.0], [-0.5, -1.0]]])
    store = opened(
        tmp_path / "run", 'loss = "dapo"\nimportance_sampling_mode = "token_truncate"\nimportance_sampling_max = 1.6\n'
    )
    assert explain_token(store, TokenTexts(store), "1:0", 0)[-2] == (
        "the loss falls by 0.6 a nat of its logprob: 2.4 by the advantage and the correction, times its weight in the "
        "step's loss, 0.25 (learner.loss dapo)"
    )
    assert "falls by -0.375 a nat" in explain_token(store, TokenTexts(store), "1:1", 1)[-2]
