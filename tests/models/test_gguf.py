"""GGUF files are models like any other: loaded, trained, saved, and looked at before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentrl
from agentrl.errors import UserError
from agentrl.models import policy
from agentrl.models.gguf import check_gguf_file
from agentrl.models.source import find_source, resolve_dtype
from tests.helpers.gguf_file import write_gguf

pytest.importorskip("gguf")
IDS = torch.arange(5, 15)[None]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return path, write_gguf(path)


def test_a_gguf_file_is_the_model_that_was_written(file: tuple[Path, Any], tmp_path: Path) -> None:
    path, written = file
    loaded = policy.load_policy(str(path))
    torch.testing.assert_close(loaded.model(IDS).logits, written(IDS).logits, atol=1e-5, rtol=1e-5)
    nano = policy.load_tokenizer("nano")
    text = "<|im_start|>user\nWhat is 12 * 7?<|im_end|>\n"
    assert loaded.tokenizer.encode(text) == nano.encode(text)
    assert loaded.tokenizer.chat_template == nano.chat_template
    assert loaded.end_tokens == policy.load_end_tokens(str(path)) == (nano.eos_token_id,)
    loaded.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).logits, written(IDS).logits, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == nano.encode(text)
    assert resolve_dtype(find_source(str(path)), "auto") == "float32"


def test_its_folder_alone_is_no_model(file: tuple[Path, Any]) -> None:
    with pytest.raises(UserError, match=r"no config\.json.*give the file: .*small\.gguf"):
        policy.load_policy(str(file[0].parent))


@pytest.mark.slow
def test_a_gguf_file_is_trained_by_an_adapter_which_finds_it_again(file: tuple[Path, Any], tmp_path: Path) -> None:
    small: dict[str, Any] = {"steps": 1, "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 8}}
    small |= {"eval": {"every": 0, "final_tasks": 2}, "lora": {"rank": 2}, "run": {"dir": str(tmp_path / "run")}}
    run = agentrl.train("math-tools", str(file[0]), **small)
    assert run.config["model"] == str(file[0])
    loaded = policy.load_policy(str(run.folder))
    assert loaded.model.base_model.model.config.vocab_size == file[1].config.vocab_size


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"block_count": 10_000}, "llama.block_count is 10,000, and the weights hold"),
        ({"feed_forward_length": 1 << 30}, "llama.feed_forward_length is 1,073,741,824"),
        ({"embedding_length": 1 << 30}, "llama.embedding_length is 1,073,741,824"),
    ],
)
def test_a_file_that_describes_more_than_it_holds_is_refused(changed: dict[str, int], why: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", **changed)
    with pytest.raises(UserError, match=why):
        check_gguf_file(tmp_path / "odd.gguf")


def test_a_file_that_was_changed_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "changed.gguf"
    write_gguf(path)
    check_gguf_file(path)
    write_gguf(path, block_count=10_000)
    with pytest.raises(UserError, match="block_count is 10,000"):
        check_gguf_file(path)


@pytest.mark.parametrize("cut", [0, 3, 4, 100, 5_000, 60_000])
def test_a_file_that_is_cut_off_is_refused_in_a_sentence(file: tuple[Path, Any], cut: int, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(file[0].read_bytes()[:cut])
    with pytest.raises(UserError, match="is no GGUF file that can be read"):
        check_gguf_file(tmp_path / "cut.gguf")
