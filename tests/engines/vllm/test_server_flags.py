"""Flags of vLLM's server go through by name; those that agentrl sets, and those that vLLM has not, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.serve import COMMAND
from agentrl.engines.server_keys import format_url
from agentrl.engines.vllm.server_flags import OWN, check_flags, format_flag, list_installed_flags, read_flags
from agentrl.errors import ConfigError

KNOWN = {"enforce_eager": True, "enable_log_deltas": True, "kv_cache_dtype": False, "model": False}


def parse(*words: str) -> dict[str, Any]:
    return COMMAND.parse(["--model", "nano", *words]).options.vllm


def format_flags(flags: dict[str, Any]) -> list[str]:
    return [word for name, value in check_flags(flags, KNOWN).items() for word in format_flag(name, value)]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--vllm.kv_cache_dtype fp8", ["--kv-cache-dtype", "fp8"]),
        ("--vllm.enforce-eager --tp 2", ["--enforce-eager"]),
        ("--vllm.enforce_eager false", ["--no-enforce-eager"]),
        (
            "--vllm.kv-cache-dtype=fp8 --vllm.no-enable-log-deltas",
            ["--kv-cache-dtype", "fp8", "--no-enable-log-deltas"],
        ),
        ('--vllm.kv_cache_dtype {"a"=1}', ["--kv-cache-dtype", '{"a": 1}']),
    ],
)
def test_flags_reach_vllm_by_name(words: str, flags: list[str]) -> None:
    assert sorted(format_flags(parse(*words.split()))) == sorted(flags)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--vllm.enforce_eagr", "no such flag; did you mean 'enforce_eager'"),
        ("--vllm.qqqq 3", r"no such flag \(vllm serve"),
        ("--vllm.max-model-len 5", r"--vllm\.max-model-len: agentrl sets it \(--max_model_len\)"),
        ("--vllm.tensor_parallel_size 2", r"agentrl sets it \(--tp\)"),
        ("--vllm.enforce_eager 3", "is a switch: true or false, not 3"),
        ("--vllm.kv_cache_dtype", "has no value"),
    ],
)
def test_others_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_flags(parse(*words.split()), KNOWN)


def test_names_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "entrypoints" / "x").mkdir(parents=True)
    (tmp_path / "engine" / "arg_utils.py").write_text("class EngineArgs:\n    a: int = 1\n    b: bool = False\n")
    (tmp_path / "entrypoints" / "x" / "cli_args.py").write_text("class FrontendArgs:\n    c: bool | None = None\n")
    assert read_flags(tmp_path) == {"a": False, "b": True, "c": True}


@pytest.mark.vllm
def test_all_flags_that_agentrl_sets_are_vllms() -> None:
    pytest.importorskip("vllm")
    known = list_installed_flags()
    assert len(known) > 200
    assert (known["enforce_eager"], known["kv_cache_dtype"]) == (True, False)
    assert not OWN.keys() - known.keys() - {"model_tag"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--host 0.0.0.0", r"other machines replace the weights: set \$VLLM_API_KEY"),
        ("--host 10.0.0.5 --api_key_env OTHER", r"\$OTHER is not set"),
        ("--gpu_share 1.5", "less than 1"),
        ("--tp 0", "greater than or equal to 1"),
    ],
)
def test_a_door_without_a_key_is_not_opened(words: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=sentence):
        COMMAND(["--model", "nano", *words.split()])


def test_an_address_is_one_that_others_can_call() -> None:
    assert format_url("10.0.0.5", 8000) == "http://10.0.0.5:8000"
    assert format_url("::1", 8000) == "http://[::1]:8000"
    assert "0.0.0.0" not in format_url("0.0.0.0", 8000)
