"""The ratio of a token, and what a run's settings made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.runs.reader import parse_episode_id
from agentrl.runs.writer import LearnedTokens
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


OWN = replace(runs.wrong(7), segments=(Segment("model", (5, 6), (-1.0, -1.0), (0, 0)),))
BY = "(p_learner / p_engine of the token, cut to its bounds: min none, max 2)"


@pytest.mark.parametrize(
    ("settings", "nats", "correction", "sentences"),
    [
        (
            'importance_sampling_mode = "token_truncate"\nnum_iterations = 1\n',
            0.5,
            1.6487,
            [
                "ratio 1.649: the learner gave it a logprob of -0.5 before the update",
                "in bounds: learner.importance_sampling_mode token_truncate weighs the token by its ratio as it is "
                + BY,
                "not clipped: the clip bounds the change within a batch, and there was one update",
                "trained with advantage +1.5: made more likely",
            ],
        ),
        (
            'importance_sampling_mode = "token_truncate"\nnum_iterations = 3\n',
            1.0,
            2.0,
            [
                "ratio 2.718: the learner gave it a logprob of 0 before the update",
                "weighed by 2: learner.importance_sampling_mode token_truncate gives it that instead of its own ratio "
                + BY,
                "not clipped in the first of 3 updates; whether it was in later ones is not kept",
                "trained with advantage +1.5: made more likely",
            ],
        ),
        (
            'importance_sampling_mode = "token_mask"\nimportance_sampling_min = 0.5\n',
            -1.0,
            0.0,
            [
                "ratio 0.3679: the learner gave it a logprob of -2 before the update",
                "not trained: learner.importance_sampling_mode token_mask leaves the token out "
                "(p_learner / p_engine of the token, 0 outside of its bounds: min 0.5, max 2)",
            ],
        ),
    ],
)
def test_what_the_learner_recorded_says_what_became_of_a_ratio(
    tmp_path: Path, settings: str, nats: float, correction: float, sentences: list[str]
) -> None:
    run = runs.start(tmp_path / "run")
    tokens = LearnedTokens([-1.0 + nats] * 2, [-0.3 if correction else 0.0] * 2, [correction] * 2)
    run.write_trajectories(1, runs.credited([Group(7, (OWN, runs.wrong(7)))], [(1.5, 0.0)]), learned=[[tokens, None]])
    store = opened(tmp_path / "run", settings)
    said = [s for s in explain_token(store, TokenTexts(store), "1:0", 1) if not s.startswith("the loss falls")]
    assert sorted(said[3:-1]) == sorted(sentences)
    assert explain_episode(store, "1:0")[6].startswith("the learner's probabilities over the engine's: ")


def test_a_token_without_a_gradient_was_left_out(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    credit = runs.credited([Group(7, (OWN, runs.wrong(7)))], [(-1.5, 0.0)])
    run.write_trajectories(1, credit, learned=[[LearnedTokens([-1.5] * 2, [0.0] * 2, [0.6065] * 2), None]])
    store = opened(tmp_path / "run", "off_policy_threshold = 0.2\n")
    said = explain_token(store, TokenTexts(store), "1:0", 1)
    assert said[5] == "not trained: learner.off_policy_threshold 0.2 leaves it out, its gradient is 0"
    assert not [s for s in said if s.startswith("trained")]


def test_what_is_not_known_of_a_ratio_is_said(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    credit = runs.credited([Group(7, (OWN, OWN))], [(1.5, 1.5)])
    nan = float("nan")
    run.write_trajectories(1, credit, learned=[[LearnedTokens([nan, -1.0], [nan, 0.5], [1.0, 1.0]), None]])
    store = opened(tmp_path / "run", "")
    assert explain_token(store, TokenTexts(store), "1:0", 0)[3] == "ratio unknown: a logprob of the token is not finite"
    assert explain_token(store, TokenTexts(store), "1:1", 0)[3] == "ratio unknown: the learner's logprobs were not kept"
    row = episode.read_episode(store, parse_episode_id("1:0"))
    columns = episode.describe_tokens(row, TokenTexts(store), 0)
    assert (columns["log_ratios"], columns["gradients"]) == ([None, 0.0], [None, 0.5])
    new = ("learner_logprobs", "loss_gradients", "corrections")
    old = dict(row, segments=[{k: v for k, v in s.items() if k not in new} for s in row["segments"]])
    columns = episode.describe_tokens(old, TokenTexts(store), 0)  # as an older run has them
    assert (columns["log_ratios"], columns["gradients"]) == ([None, None], [None, None])


def test_a_tokens_part_in_the_gradient_is_the_recorded_one(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    credit = runs.credited([Group(7, (OWN, OWN))], [(1.5, -1.5)])
    tokens = LearnedTokens([-0.5, -1.0], [-0.6, 0.375], [1.6, 1.0])
    run.write_trajectories(1, credit, learned=[[tokens, tokens]])
    store = opened(tmp_path / "run", 'loss = "dapo"\nepsilon = 0.1\n')
    (said,) = (s for s in explain_token(store, TokenTexts(store), "1:0", 0) if s.startswith("the loss falls"))
    assert said == (
        "the loss falls by 0.6 a nat of its logprob: 2.4 by advantage and correction, times its weight in the "
        "step's loss, 0.25 (learner.loss dapo: -min(r A, clip(r, 1 - 0.1, 1 + 0.28) A))"
    )
    (said,) = (s for s in explain_token(store, TokenTexts(store), "1:1", 1) if s.startswith("the loss falls"))
    assert "falls by -0.375 a nat" in said


def test_a_run_of_somebody_elses_loss_is_explained_by_its_folder_alone(tmp_path: Path) -> None:
    """No module of that name is there; and a text in the folder can do nothing but be shown."""
    run = runs.start(tmp_path / "run")
    tokens = LearnedTokens([-1.0, -1.0], [-0.6, 0.375], [1.0, 1.0])
    run.write_trajectories(1, runs.credited([Group(7, (OWN, OWN))], [(1.5, -1.5)]), learned=[[tokens, tokens]])
    line = "soft cap {tau.__class__} {reward:>999999999} \x1b[2J"
    (tmp_path / "run/algorithm.json").write_text(
        json.dumps({k: {"name": "evil.py:mine", "explain": line} for k in ("loss", "advantage", "importance_sampling")})
    )
    store = opened(tmp_path / "run", 'loss = "evil.py:mine"\n')
    said = "\n".join(explain_token(store, TokenTexts(store), "1:0", 0))
    assert "learner.loss evil.py:mine: soft cap {tau.__class__}" in said
    assert "\x1b" not in said
    (tmp_path / "run/algorithm.json").unlink()
    store = opened(tmp_path / "run", 'loss = "evil.py:mine"\n')
    assert "(learner.loss evil.py:mine)" in "\n".join(explain_token(store, TokenTexts(store), "1:0", 0))
