"""Models as people have them: a revision, a type of weights, an attention, code of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.errors import ConfigError, UserError
from agentrl.library.run import Run
from agentrl.models import lora, policy
from agentrl.models.source import find_source, locate_model, resolve_dtype
from agentrl.settings.load import LoadConfig
from agentrl.settings.loader import build_config
from tests.helpers.own_model import write_own_model
from tests.helpers.tiny import qwen3


@pytest.fixture
def own_code(tmp_path: Path) -> str:
    return write_own_model(tmp_path / "own")


def test_a_model_s_own_code_runs_only_where_it_was_asked_for(own_code: str) -> None:
    with pytest.raises(UserError, match=r"cannot load model .*if you trust it, say load\.trust_remote_code true"):
        policy.load_policy(own_code)
    load = LoadConfig(trust_remote_code=True)
    model = policy.load_policy(own_code, load=load).model
    assert type(model).__name__ == "OwnModel"
    assert policy.load_tokenizer(own_code, load).chat_template


def test_a_folder_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the folder has no tokenizer; copy"):
        policy.load_policy(str(tmp_path))


def test_a_folder_cannot_recommend_that_its_code_runs(own_code: str) -> None:
    Path(own_code, "agentrl.toml").write_text("[load]\ntrust_remote_code = true\n")
    with pytest.raises(UserError, match=r"numbers alone, and not load\.trust_remote_code"):
        policy.build_model_config(("test", {"env": "math-tools", "model": own_code}))


def test_a_stranger_s_run_folder_cannot_run_a_model_s_code(own_code: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(own_code, run / "model")
    (run / "config.toml").write_text(
        'model = "x"\n[env]\nname = "math-tools"\n[load]\ntrust_remote_code = true\n', encoding="utf-8"
    )
    (run / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"load\.trust_remote_code = True"):
        _ = Run(run).model


@pytest.mark.parametrize(("stored", "dtype"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
@pytest.mark.parametrize("named", [True, False], ids=["config", "weights"])
def test_dtype_auto_is_the_one_that_weights_are_stored_in(
    tmp_path: Path, stored: torch.dtype, dtype: str, named: bool
) -> None:
    qwen3().to(stored).save_pretrained(tmp_path)
    if not named:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in config.items() if n != "dtype"}))
    assert resolve_dtype(find_source(str(tmp_path)), "auto") == dtype


def test_weights_in_half_precision_are_not_trained_by_auto(tmp_path: Path) -> None:
    qwen3().half().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="stored in float16, in which nothing is trained here; say dtype float32 or"):
        resolve_dtype(find_source(str(tmp_path)), "auto")


def test_a_run_with_dtype_auto_has_the_checkpoint_s_own(tmp_path: Path) -> None:
    shutil.copytree(locate_model("nano"), tmp_path / "nano")
    model = AutoModelForCausalLM.from_pretrained(locate_model("nano")).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "nano")
    assert policy.load_policy(str(tmp_path / "nano"), "auto").model.dtype == torch.bfloat16
    assert policy.load_policy(str(tmp_path / "nano")).model.dtype == torch.float32


def test_the_model_s_own_passes_have_the_attention_that_was_asked_for() -> None:
    for name in ("eager", "sdpa"):
        model = policy.load_policy("nano", load=LoadConfig(attn_implementation=name)).model
        assert model.config._attn_implementation == name
    with pytest.raises(UserError, match="cannot load model 'nano'"):
        policy.load_policy("nano", load=LoadConfig(attn_implementation="no_such_attention"))


def test_a_revision_is_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"load\.revision 'v2' is of a model of the hub; 'nano' is here, in '.*'"):
        policy.load_policy("nano", load=LoadConfig(revision="v2"))
    asked: list[dict[str, Any]] = []

    def refuse(*names: Any, **options: Any) -> Any:
        asked.append(options)
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(UserError, match="no network"):
        policy.load_policy("someone/model", load=LoadConfig(revision="v2"))
    assert asked == [{"revision": "v2", "trust_remote_code": False}]


def test_an_adapter_remembers_the_revision_of_its_base(tmp_path: Path) -> None:
    settings = build_config(("test", {"env": "math-tools", "lora": {"rank": 2}})).lora
    adapted = lora.add_adapter(policy.load_policy("nano").model, settings, "someone/model", "v2")
    policy.Policy(adapted, policy.load_tokenizer("nano"), "nano").save(tmp_path)
    assert policy.find_base(find_source(str(tmp_path)), LoadConfig()).options["revision"] == "v2"


def test_a_loaded_model_takes_no_settings_of_loading() -> None:
    with pytest.raises(ConfigError, match=r"load\.attn_implementation does nothing here: the model is loaded already"):
        agentrl.train("math-tools", policy.load_policy("nano").model, attn_implementation="eager")


@pytest.mark.parametrize(
    ("given", "load"),
    [
        ({"model_revision": "v2"}, {"revision": "v2"}),
        ({"model_init_kwargs": {"revision": "v2", "attn_implementation": "eager"}}, None),
        ({"trust_remote_code": True, "model_revision": "main"}, {"trust_remote_code": True}),
        ({"revision": "v2"}, {"revision": "v2"}),
    ],
)
def test_trl_s_and_vllm_s_names_are_taken(given: dict[str, Any], load: dict[str, Any] | None) -> None:
    config = build_config(("test", {"env": "math-tools", "model": "someone/model", **given}))
    assert config.load == LoadConfig(**(load or {"revision": "v2", "attn_implementation": "eager"}))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.gguf", "there is no such file .* OWNER/REPOSITORY/FILE.gguf"),
        ("./nowhere/model.gguf", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
    ],
)
def test_a_file_that_is_not_there_is_no_model(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        locate_model(name)
    assert locate_model("owner/repository/file.gguf") == "owner/repository/file.gguf"
