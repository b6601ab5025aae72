"""Settings: later layers win, a round trip through TOML, and every mistake one sentence that names its source."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, UserError
from agentrl.settings.catalogue import bind_choices
from agentrl.settings.loader import build_config, dump_toml, read_overrides, read_toml
from agentrl.types import Stop


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_name_is_all_it_takes() -> None:
    config = build_config(("x", {"env": "shop"}))
    assert config.env == {"name": "shop"}
    assert (config.model, config.learner.lr, config.rollout.group_size) == ("nano", 1e-6, 8)


def test_later_layers_win_setting_by_setting(tmp_path: Path) -> None:
    toml = 'env = "shop"\nsteps = 5\n[learner]\nlr = 1e-3\nloss = "grpo"\n[engine]\nmax_num_seqs = 4\n'
    config = build_config(
        ("recommended", {"learner": {"lr": 1.0, "warmup_steps": 2}}),
        read_toml(file(tmp_path, toml)),
        read_overrides(["--learner.lr", "2e-6", "--steps=7", "--engine", "transformers"]),
    )
    assert (config.learner.lr, config.learner.warmup_steps, config.learner.loss) == (2e-6, 2, "grpo")
    assert (config.steps, config.engine.max_num_seqs) == (7, 4)


def test_another_environment_drops_the_first_ones_settings(tmp_path: Path) -> None:
    first = read_toml(file(tmp_path, '[env]\nlevel = 2\nname = "math-tools"\n'))
    assert build_config(first).env == {"name": "math-tools", "level": 2}
    assert build_config(first, read_overrides(["--env", "shop"])).env == {"name": "shop"}
    assert build_config(first, read_overrides(["--env.jitter", "1", "--env", "shop"])).env == {
        "name": "shop",
        "jitter": 1,
    }
    assert build_config(first, read_overrides(["--env", "math-tools"])).env == {"name": "math-tools", "level": 2}
    nameless = ("file", {"env": {"level": 3}})
    assert build_config(nameless, read_overrides(["--env", "math-tools"])).env == {"name": "math-tools", "level": 3}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--steps", "3"], {"steps": 3}),
        (["--learner.lr=2e-6"], {"learner": {"lr": 2e-6}}),
        (["--env", "shop", "--env.jitter", "0.5"], {"env": {"name": "shop", "jitter": 0.5}}),
        (["--env.x", "true"], {"env": {"x": True}}),
        (["--env.x", "[1, 2]"], {"env": {"x": [1, 2]}}),
        (["--env.x", '"7"'], {"env": {"x": "7"}}),
        (["--env.x", "-1"], {"env": {"x": -1}}),
        (["--env.x=--odd"], {"env": {"x": "--odd"}}),
        (["--env.x", "a,b"], {"env": {"x": "a,b"}}),
        (["--run.dir", "2026-11-20"], {"run": {"dir": "2026-11-20"}}),  # a date is text
        (["--model", "Qwen/Qwen3-0.6B"], {"model": "Qwen/Qwen3-0.6B"}),
        (["--steps", "3", "--steps", "4"], {"steps": 4}),
    ],
)
def test_overrides_are_read_as_toml_reads_values(words: list[str], settings: dict[str, Any]) -> None:
    assert read_overrides(words) == ("command line", settings)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["steps", "3"], "unexpected argument 'steps'; settings look like --learner.lr 1e-6"),
        (["--steps"], "--steps has no value"),
        (["--steps", "--seed", "3"], "--steps has no value"),
        (["--env.a", "1", "--env.a.b", "2"], r"env.a.b: 'a' was given a value of its own \[command line\]"),
    ],
)
def test_what_is_no_override_is_told(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_overrides(words)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("learner.learning_rte = 1", "learner.learning_rte: unknown setting; did you mean 'learner.lr'?"),
        ("learner.learning_rate = 1", "learner.learning_rate: unknown setting; did you mean 'learner.lr'?"),
        ("num_generation = 8", "num_generation: unknown setting; did you mean 'rollout.group_size'?"),
        ("num_generations = 1", "rollout.group_size: input should be greater than or equal to 2, not 1"),
        ("min_tokens = 9", "min_tokens: not here: the learner has no counterpart of it"),
        ("learner.warmup_step = 1", "learner.warmup_step: unknown setting; did you mean 'learner.warmup_steps'?"),
        ("rollout.tasks = 1", "rollout.tasks: unknown setting; did you mean 'rollout.tasks_per_step'?"),
        ("rollout.lr = 1", "rollout.lr: unknown setting; did you mean 'learner.lr'?"),
        ("stepz = 1", "stepz: unknown setting; did you mean 'steps'?"),
        ("zzzzzzz = 1", "zzzzzzz: unknown setting; agentrl train --help tells of them all"),
        ("learner = 3", "learner: unknown setting; did you mean 'learner.lr'?"),
        ("model.name = 'x'", "model.name: unknown setting"),
        ("steps = 'many'", "steps: input should be a valid integer, unable to parse.*, not 'many'"),
        ("steps = 0", "steps: input should be greater than or equal to 1, not 0"),
        ("steps = 1.5", "steps: .*, not 1.5"),
        ("model = 3", "model: input should be a valid string, not 3"),
        ("learner.lr = nan", "learner.lr: input should be a finite number, not nan"),
        (
            "learner.loss = 'ppo'",
            "learner.loss: no loss 'ppo'; known: bnpo, cispo, dapo, ",
        ),
        ("learner.mask_stop_reasons = ['tired']", "learner.mask_stop_reasons.0: input should be 'terminated', "),
        ("rollout.temperature = 0", "rollout.temperature: input should be greater than 0, not 0"),
        ("rollout.min_group_size = 9", "rollout: min_group_size 9 is over group_size 8: every group is dropped"),
        ("rollout.turn_timeout_s = 601", "rollout: turn_timeout_s is over episode_timeout_s; deadlines nest"),
        ("env = 3", "env: env needs a name, not 3"),
        ("env.level = 3", "env: env needs a name"),
    ],
)
def test_every_mistake_is_one_sentence_with_its_source(tmp_path: Path, toml: str, sentence: str) -> None:
    path = file(tmp_path, toml)
    base = [] if toml.startswith("env") else [("base", {"env": "shop"})]
    with pytest.raises(ConfigError) as raised:
        build_config(*base, read_toml(path))
    assert re.match(sentence.replace("?", r"\?"), str(raised.value)), str(raised.value)
    assert str(raised.value).endswith(f"[{path}]")
    assert "\n" not in str(raised.value)


def test_the_source_is_the_layer_that_said_it(tmp_path: Path) -> None:
    path = file(tmp_path, "env = 'shop'\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"steps: .* not -1 \[command line\]"):
        build_config(read_toml(path), read_overrides(["--steps", "-1"]))
    with pytest.raises(ConfigError, match=r"env.a.b: 'a' was given a value of its own \[command line\]"):
        build_config(("file", {"env": {"name": "x", "a": 1}}), read_overrides(["--env.a.b", "2"]))
    with pytest.raises(ConfigError, match=r"env.name: 'env' was given a value of its own \[command line\]"):
        build_config(("file", {"env": 3}), read_overrides(["--env", "shop"]))


def test_without_an_environment_it_says_where_the_names_are() -> None:
    with pytest.raises(UserError, match=r"no environment; say --env NAME \(agentrl list shows the names\)"):
        build_config(("x", {"steps": 3}))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config file '.*gone.toml'"):
        read_toml(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"run.toml is no valid TOML: .*line 2"):
        read_toml(file(tmp_path, "steps = 1\nsteps 3"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.toml is no valid TOML"):
        read_toml(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_toml(tmp_path)


VALUES = st.one_of(
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
)


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda k: k != "name"), VALUES, max_size=4),
    st.floats(1e-9, 1.0),
    st.integers(1, 10**6),
    st.lists(st.sampled_from(Stop), unique=True),
    st.one_of(st.none(), st.text(min_size=1, max_size=12)),
)
def test_a_config_survives_its_file(
    own: dict[str, Any], lr: float, steps: int, stops: list[Stop], folder: str | None
) -> None:
    learner = {"lr": lr, "mask_stop_reasons": [s.value for s in stops]}
    settings = {"env": {"name": "shop", **own}, "learner": learner, "steps": steps, "run": {"dir": folder}}
    config = build_config(("x", settings))
    assert config.learner.mask_stop_reasons == tuple(stops)
    assert build_config(("file", tomllib.loads(dump_toml(config)))) == config


def test_tables_of_an_environment_are_saved_too() -> None:
    own = {"make": {"is_slippery": False}, "config": {"datasets": [{"name": "sum", "config": {"terms": 3}}]}}
    config = build_config(("test", {"env": {"name": "gym:FrozenLake-v1", **own}}))
    assert build_config(("file", tomllib.loads(dump_toml(config)))) == config


@pytest.mark.parametrize("none", [None, "none"])
def test_a_bound_that_is_taken_away_stays_away_in_the_file(none: str | None) -> None:
    config = build_config(("test", {"env": "math-tools", "learner": {"importance_sampling_max": none}}))
    again = build_config(("file", tomllib.loads(dump_toml(config))))
    assert bind_choices("learner", again.learner)["importance_sampling"].parameters["importance_sampling_max"] is None
    assert dump_toml(again) == dump_toml(config)


@pytest.mark.parametrize("value", [math.inf, [1.5, math.inf], {"a": {"b": [1, "c"]}}])
def test_parameters_of_entries_survive_the_file(value: Any) -> None:
    config = build_config(("test", {"env": "math-tools", "learner": {"loss": "x:y", "loss_args": {"tau": value}}}))
    assert build_config(("file", tomllib.loads(dump_toml(config)))) == config


@pytest.mark.parametrize("value", [None, object(), b"", {1, 2}, [None], {"a": None}])
def test_parameters_that_no_file_can_hold_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tau: .* cannot be written to config\.toml"):
        build_config(("test", {"env": "math-tools", "learner": {"loss": "x:y", "loss_args": {"tau": value}}}))


def test_rows_and_functions_are_no_settings_and_are_named_in_a_comment() -> None:
    given = {"data": [{"prompt": "one"}, {"prompt": "two"}], "rewards": [len], "prompt_column": "prompt"}
    written = dump_toml(build_config(("test", {"env": {"name": "prompts", **given}})))
    assert "not written here: env.data, env.rewards" in written
    assert tomllib.loads(written)["env"] == {"name": "prompts", "prompt_column": "prompt"}


@pytest.mark.parametrize("learner", [{"loss": "cispo"}, {"loss": "vespo"}, {"advantage": "gigpo", "gamma": 0.9}, {}])
def test_a_saved_config_has_every_setting_and_is_taken_again(learner: dict[str, Any]) -> None:
    config = build_config(("test", {"env": "math-tools", "learner": learner}))
    assert build_config(("file", tomllib.loads(dump_toml(config)))) == config
