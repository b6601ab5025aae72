"""What goes with what, and that every setting is heeded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import ConfigError
from agentrl.settings.loader import build_config, list_settings, read_overrides
from agentrl.settings.schema import LearnerConfig
from agentrl.training.algorithm import OBJECTIVE
from agentrl.types import Stop


def test_lists_may_be_written_with_commas() -> None:
    words = ["--env", "shop", "--learner.mask_stop_reasons", "max_tokens, max_turns"]
    assert build_config(read_overrides(words)).learner.mask_stop_reasons == (Stop.MAX_TOKENS, Stop.MAX_TURNS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "server"], "engine server needs engine.urls"),
        (["--engine.urls", "http://127.0.0.1:1"], "engine.urls is for --engine server; engine auto talks to no"),
        (["--engine", "vllm", "--engine.urls", "http://127.0.0.1:1"], "engine vllm talks to no server"),
        (["--engine.update", "drain"], "engine.update is for the engines vllm and server"),
        (["--engine", "server", "--engine.urls", "http://a:1", "--engine.threads", "2"], "agentrl serve --threads N"),
        (["--engine", "server", "--engine.urls", "127.0.0.1:8000"], "such as http://127.0.0.1:8000, not '127.0.0.1:80"),
        (["--engine", "vlm"], "'transformers', 'vllm' or 'server', not 'vlm'"),
        (["--engine", "vllm", "--engine.update", "now"], "'in-flight' or 'drain', not 'now'"),
    ],
)
def test_what_an_engine_would_not_heed_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as told:
        build_config(read_overrides(["--env", "shop", *words]))
    assert message in str(told.value)


def test_servers_are_named_with_commas_between_them() -> None:
    config = build_config(
        read_overrides(["--env", "shop", "--engine", "server", "--engine.urls", "http://a:1, http://b:2"])
    )
    assert config.engine.urls == ("http://a:1", "http://b:2")


def test_every_setting_does_something() -> None:
    root = Path(agentrl.__file__).parent
    files = [p.read_text() for p in root.rglob("*.py") if p != root / "settings" / "schema.py"]
    source = "\n".join(text for text in files if "Config" in text or "config" in text)
    objective = {f"learner.{name}" for name in OBJECTIVE}  # handed on as they are
    unread = [name for name in list_settings() if not re.search(_read(name), source)]
    assert set(unread) <= objective
    source = (root / "learner" / "losses" / "objective.py").read_text() + (root / "learner" / "learner.py").read_text()
    assert [name for name in OBJECTIVE if not re.search(rf"\b(o|s)\.{name}\b", source)] == []


def _read(name: str) -> str:
    """How the source reads a setting: through its section, or the section's short name."""
    section, _, key = name.rpartition(".")
    short = {
        "": "config",
        "engine": "(engine|e)",
        "rollout": "(rollout|r|config)",
        "learner": "(learner|c)",
        "lora": "(lora|settings)",
        "run": "(run|config)",
    }
    owner = short.get(section, section)
    return rf"\b{owner}\.{key}\b"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": "sapo", "epsilon": 0.1}, "epsilon is for the losses dapo"),
        ({"loss": "cispo", "delta": 2.0}, "delta is for the losses dapo"),
        ({"loss": "cispo", "epsilon_high": 0.28}, "caps cispo's weights below 1; 5.0 is usual"),
        ({"loss": "vespo", "importance_sampling_mode": "sequence_mask"}, "vespo sums the corrections of tokens"),
        ({"ref_sync_steps": 5}, "which beta = 0 leaves out"),
        ({"importance_sampling_min": 3.0}, "importance_sampling_min 3.0 is over importance_sampling_max 2.0"),
        ({"loss": "dappo"}, "dappo"),
        ({"gamma": 0.9}, "gamma is for the advantages rebn, first_turn, gigpo; grpo is of whole episodes"),
        ({"advantage": "rebn", "step_weight": 0.5}, "step_weight is for the advantage gigpo, not rebn"),
    ],
)
def test_what_a_loss_would_not_heed_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_config(("test", {"env": "math-tools", "learner": settings}))


def test_cispo_has_a_cap_of_its_own() -> None:
    assert build_config(("test", {"env": "math-tools", "learner": {"loss": "cispo"}})).learner.epsilon_high == 5.0


def test_the_names_are_those_that_the_learner_knows() -> None:
    from typing import get_args

    from agentrl.learner.advantages import group, turn
    from agentrl.learner.losses import correction, losses
    from agentrl.learner.optimizers import OPTIMIZERS
    from agentrl.settings.schema import BY_TURN, CLIPPED, AdvantageName, ImportanceSamplingMode, LossName

    assert set(get_args(LossName)) == losses.LOSSES.keys()
    assert set(get_args(ImportanceSamplingMode)) == correction.CORRECTIONS.keys()
    assert set(CLIPPED) == losses.CLIPPED
    assert get_args(AdvantageName) == (*group.ADVANTAGES, *turn.TURN_ADVANTAGES)
    assert tuple(turn.TURN_ADVANTAGES) == BY_TURN
    assert set(get_args(LearnerConfig.model_fields["optimizer"].annotation)) == OPTIMIZERS.keys()


@pytest.mark.parametrize(("setting", "why"), [("max_staleness", "how old"), ("oversample", "which episodes end last")])
def test_what_hangs_on_the_clock_is_refused_where_the_run_is_to_be_the_same_each_time(setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"deterministic and rollout.{setting} do not go together: .*{why}"):
        build_config(("test", {"env": "math-tools", "deterministic": True, "rollout": {setting: 1}}))
