"""Settings that contradict each other are refused, and every setting is heeded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import ConfigError, UserError
from agentrl.settings.catalogue import CHOICES, bind_choices, find_entries
from agentrl.settings.loader import build_config, list_settings, read_overrides
from agentrl.training.algorithm import OBJECTIVE
from agentrl.types import Stop


def test_lists_may_be_written_with_commas() -> None:
    words = ["--env", "shop", "--learner.mask_stop_reasons", "max_tokens, max_turns"]
    assert build_config(read_overrides(words)).learner.mask_stop_reasons == (Stop.MAX_TOKENS, Stop.MAX_TURNS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "server"], "engine 'server' needs a value for --engine.urls [command line]"),
        (["--engine.urls", "http://127.0.0.1:1"], "engine.urls is for the engine server; auto has no such parameter"),
        (["--engine", "vllm", "--engine.urls", "http://127.0.0.1:1"], "server; vllm has no such parameter"),
        (["--engine.update", "drain"], "engine.update is for the engines vllm, server, launched; auto"),
        (["--engine", "server", "--engine.urls", "http://a:1", "--engine.threads", "2"], "engine.threads is for the"),
        (["--engine", "server", "--engine.urls", "127.0.0.1:8000"], "such as http://127.0.0.1:8000, not '127.0.0.1:80"),
        (
            ["--engine", "server", "--engine.urls", "http://127.0.0.1:99999"],
            "not 'http://127.0.0.1:99999' (Port out of",
        ),
        (["--engine", "server", "--engine.urls", "http://a:1,http://[::1"], "not 'http://[::1' (Invalid IPv6 URL)"),
        (["--engine", "vlm"], "engine.name: no engine 'vlm'; did you mean 'vllm'? (or say module:function), not 'vlm'"),
        (["--engine", "vllm", "--engine.update", "now"], "'in-flight' or 'drain', not 'now'"),
        (["--engine", "vllm", "--engine.args.update", "now"], "engine.args.update of engine 'vllm': input should be"),
        (
            ["--engine", "transformers", "--engine.threads", "0"],
            "engine.threads of engine 'transformers'",
        ),
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


def test_the_port_of_a_server_may_be_a_variable() -> None:
    config = build_config(read_overrides(["--env", "shop", "--engine", "server", "--engine.urls", "http://a:$PORT"]))
    assert config.engine.urls == ("http://a:$PORT",)


def test_every_setting_does_something() -> None:
    root = Path(agentrl.__file__).parent
    files = [p.read_text() for p in root.rglob("*.py") if p != root / "settings" / "schema.py"]
    source = "\n".join(text for text in files if "Config" in text or "config" in text)
    objective = {f"learner.{name}" for name in OBJECTIVE}  # handed on as they are
    unread = [name for name in list_settings() if not re.search(_read(name), source)]
    by_entries = {name for name in list_settings() if find_entries(*name.rpartition(".")[::2])}
    by_entries |= {f"{c.section}.{part}" for c in CHOICES for part in (c.name, c.arguments)}
    assert set(unread) <= objective | by_entries
    source = (root / "learner" / "losses" / "objective.py").read_text() + (root / "learner" / "learner.py").read_text()
    assert [name for name in OBJECTIVE if not re.search(rf"\b(o|s)\.{name}\b", source)] == []


def _read(name: str) -> str:
    """Return the pattern by which the source reads a setting: through its section, or the section's short name."""
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
        (
            {"loss": "sapo", "epsilon": 0.1},
            "learner.epsilon is for the losses dapo, grpo, bnpo, dr_grpo, luspo; sapo",
        ),
        ({"loss": "cispo", "delta": 2.0}, "learner.delta is for the losses dapo"),
        ({"loss": "cispo", "epsilon_high": 0.28}, "caps cispo's weights below 1; 5.0 is usual"),
        ({"loss": "vespo", "importance_sampling_mode": "sequence_mask"}, "vespo sums the corrections of tokens"),
        ({"ref_sync_steps": 5}, "which beta = 0 leaves out"),
        ({"importance_sampling_min": 3.0}, "importance_sampling_min 3.0 is over importance_sampling_max 2.0"),
        ({"loss": "gprs"}, "learner.loss: no loss 'gprs'; did you mean 'grpo'? (or say module:function), not 'gprs'"),
        ({"loss": ":mine"}, "learner.loss: no loss ':mine'"),
        ({"gamma": 0.9}, "learner.gamma is for the advantages rebn, first_turn, gigpo; grpo has no such parameter"),
        ({"advantage": "rebn", "step_weight": 0.5}, "learner.step_weight is for the advantage gigpo; rebn has no such"),
        ({"epsilon": -1}, "learner.epsilon of loss 'dapo': input should be greater than 0, not -1.0 [test]"),
        ({"epsilon": True}, "learner.epsilon: input should be a valid number, not True [test]"),
        ({"epsilon": "x"}, "learner.epsilon: input should be a valid number, unable to parse string as a number"),
        ({"loss_args": {"epsilon": "x"}}, "learner.loss_args.epsilon of loss 'dapo': input should be a valid number"),
        (
            {"loss_args": {"epsilom": 1}},
            "loss 'dapo' has no setting 'learner.loss_args.epsilom'; did you mean 'eps",
        ),
        (
            {"epsilon": 0.1, "loss_args": {"epsilon": 0.1}},
            "epsilon is given twice: learner.epsilon and learner.loss_args.epsilon",
        ),
        ({"optimizer": "sgd"}, "no optimizer 'sgd'; known: adamw, adamw_8bit, muon"),
        ({"betas": [0.9, 1.5]}, "betas are two numbers from 0 to below 1, not 1.5"),
        ({"optimizer_args": {"momentum": 0.9}}, "optimizer 'adamw' has no setting 'learner.optimizer_args.momentum'"),
    ],
)
def test_what_a_loss_would_not_heed_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_config(("test", {"env": "math-tools", "learner": settings}))


def test_a_parameter_has_the_default_of_its_entry() -> None:
    def cap(**settings: Any) -> object:
        learner = build_config(("test", {"env": "math-tools", "learner": settings})).learner
        return bind_choices("learner", learner)["loss"].parameters["epsilon_high"]

    assert (cap(), cap(loss="cispo"), cap(loss="cispo", epsilon_high=3.0)) == (0.28, 5.0, 3.0)
    assert cap(loss="cispo", loss_args={"epsilon_high": 4.0}) == 4.0
    assert list_settings()["learner.epsilon"].default == 0.2


def test_parameters_stay_behind_where_another_entry_is_chosen() -> None:
    first = ("file", {"env": "math-tools", "learner": {"loss": "my.losses:mine", "loss_args": {"tau": 0.5}}})
    assert build_config(first).learner.loss_args == {"tau": 0.5}
    assert build_config(first, ("line", {"learner": {"loss": "sapo"}})).learner.loss_args == {}


def test_what_others_wrote_is_not_loaded_by_a_config() -> None:
    config = build_config(("test", {"env": "math-tools", "learner": {"loss": "no_such_module:mine", "epsilon": 0.1}}))
    with pytest.raises(UserError, match="loss 'no_such_module:mine': cannot import 'no_such_module'"):
        bind_choices("learner", config.learner)


def test_no_name_of_agentrl_loads_torch() -> None:
    code = (
        "import sys; from agentrl.settings.catalogue import CHOICES, list_own_entries\n"
        "assert all(list(list_own_entries(c.kind)) for c in CHOICES); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(("setting", "why"), [("max_staleness", "how old"), ("oversample", "which episodes end last")])
def test_what_hangs_on_the_clock_is_refused_where_the_run_is_to_be_the_same_each_time(setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"deterministic and rollout.{setting} do not go together: .*{why}"):
        build_config(("test", {"env": "math-tools", "deterministic": True, "rollout": {setting: 1}}))


def plain(t: Any, log_ratio: Any) -> Any:
    return -t.advantages * log_ratio


def test_in_python_an_entry_may_be_the_function() -> None:
    settings = {"env": {"name": "shop"}, "learner": {"loss": plain}}
    name = build_config(("arguments", settings)).learner.loss
    assert name == f"{__name__}:plain"
    with pytest.raises(ConfigError, match=r"learner.loss: input should be a name, or a function defined at the top"):
        build_config(("arguments", {"env": {"name": "shop"}, "learner": {"loss": lambda t, log_ratio: log_ratio}}))


def test_a_loop_of_one_s_own_takes_any_function_as_the_loss() -> None:
    assert agentrl.LossSettings(loss=lambda t, log_ratio: log_ratio).loss_entry.what == "loss '<lambda>'"


def test_none_unsets_the_trackers_of_a_file() -> None:
    file = ("run.toml", {"env": "math-tools", "run": {"trackers": ["wandb"]}})
    assert build_config(file).run.trackers == ("wandb",)
    assert build_config(file, read_overrides(["--run.trackers", "none"])).run.trackers == ()
