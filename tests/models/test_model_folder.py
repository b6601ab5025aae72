"""A model's folder is looked at before a library loads it: what could run something, or fill the memory, is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl import UserError
from agentrl.models.model_folder import check_model_folder, read_stored_dtype

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 1}


def make(folder: Path, config: Any = CONFIG, *, weights: bool = True) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        save_file({"embed": torch.zeros(16, 8), "layer": torch.zeros(8, 8)}, folder / "model.safetensors")
    return folder


def test_a_usual_folder_passes(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (tmp_path / "README.md").write_text("of any size")
    check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "config.json: it is no object"),
        ("{", "config.json: Expecting property name"),
        ("[" * 100_000, "config.json: it is nested more than 100 deep"),
        (CONFIG | {"vocab_size": 1 << 40}, "describes a matrix of vocab_size x 8 = 8,796,093,022,208 numbers"),
        (CONFIG | {"num_hidden_layers": 10**9}, "describes num_hidden_layers 1,000,000,000, and the weights beside it"),
        (CONFIG | {"hidden_size": 1 << 20}, r"describes a matrix of .* numbers"),
        (CONFIG | {"text_config": {"num_local_experts": 10**6}}, "describes 1,000,000 experts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        check_model_folder(make(tmp_path, config))


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json", "tokenizer.json"])
def test_files_without_end_are_refused(name: str, tmp_path: Path) -> None:
    make(tmp_path)
    with (tmp_path / name).open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(UserError, match=rf"{name}: it is larger than \d+ MiB"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "second.safetensors"])
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="it is no regular file"):
        check_model_folder(tmp_path)


def test_a_link_that_leads_nowhere_or_to_itself_is_told(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(UserError, match=r"loop\.json cannot be read: Too many levels of symbolic links"):
        check_model_folder(tmp_path)


def test_pickles_are_refused_where_no_safetensors_are_beside_them(tmp_path: Path) -> None:
    make(tmp_path, weights=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match=r"its weights are pickles \(pytorch_model.bin\), which may run anything"):
        check_model_folder(tmp_path)
    make(tmp_path)
    check_model_folder(tmp_path)


def test_weights_of_holes_are_refused_without_a_config_too(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "config.json").unlink()
    os.truncate(tmp_path / "model.safetensors", 40 << 30)
    with pytest.raises(UserError, match=r"its weights cannot be read: model.safetensors"):
        check_model_folder(tmp_path)


def test_the_type_that_most_numbers_have(tmp_path: Path) -> None:
    assert read_stored_dtype(tmp_path) == "float32"
    save_file({"a": torch.zeros(9, dtype=torch.bfloat16), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert read_stored_dtype(tmp_path) == "bfloat16"
