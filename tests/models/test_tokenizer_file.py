"""A tokenizer's file is refused where texts would have no end, and the usual ones are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.models.source import locate_model
from agentrl.models.tokenizer_file import MAX_ADDED_TOKENS, MAX_TOKEN_CHARS, check_tokenizer

REPLACE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}
LLAMA = {  # Llama 2, and its kin
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}, {"Sequence": {}}], "pair": []},
    "model": {"type": "BPE", "vocab": {"a": 0}},
}


@pytest.mark.parametrize("tokenizer", [{}, LLAMA, {"normalizer": None, "model": {"vocab": [["a", -1.0]]}}])
def test_usual_tokenizers_pass(tokenizer: dict[str, Any]) -> None:
    check_tokenizer(tokenizer)


def test_ours_passes() -> None:
    check_tokenizer(json.loads(Path(locate_model("nano"), "tokenizer.json").read_text()))


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ({"normalizer": {"normalizers": [REPLACE] * 2}}, "its normalizer makes texts more than 64 times as long"),
        ({"decoder": {"decoders": [{"decoders": [REPLACE]}, REPLACE]}}, "its decoder makes texts"),
        ({"normalizer": {"normalizers": [{"type": "Prepend", "prepend": "a" * 2000}]}}, "its normalizer makes texts"),
        ({"post_processor": {"processors": [{"single": [{}] * 100}]}}, "its post_processor repeats a text"),
        ({"model": {"vocab": {"a" * (MAX_TOKEN_CHARS + 1): 0}}}, "a token has 10,001 characters"),
        ({"model": {"vocab": [["a" * (MAX_TOKEN_CHARS + 1), 0]]}}, "a token has 10,001 characters"),
        ({"added_tokens": [{}] * (MAX_ADDED_TOKENS + 1)}, "it adds 50,001 tokens to its vocabulary, more than 50,000"),
        ({"added_tokens": [7, {"content": "a" * (MAX_TOKEN_CHARS + 1)}]}, "a token has 10,001 characters"),
    ],
)
def test_texts_without_end_are_refused(tokenizer: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_tokenizer(tokenizer)
