"""A player builds of what it is told: the run's own renderer, of the tokenizer's files, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.nano import path as nano
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.errors import UserError
from agentrl.players.recipe import build_renderer, describe_class, describe_tokenizer
from agentrl.types import Message

MESSAGES: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, <|im_end|> 東京?"},
]
BUILD = """
import json, sys
from pathlib import Path
from agentrl.players.recipe import build_renderer

folder = Path(sys.argv[1])
renderer, _ = build_renderer(json.loads((folder / "told.json").read_text()), (folder / "body").read_bytes())
print(json.dumps({"ids": renderer.render_ids(json.loads(sys.argv[2])), "torch": "torch" in sys.modules}))
"""


def tell(tokenizer: Any, **other: Any) -> tuple[dict[str, Any], bytes]:
    files, contents = describe_tokenizer(tokenizer)
    told = {"files": files, "name": str(nano()), "class": describe_class(tokenizer), "template": None, "end_tokens": []}
    rest = {"call_format": "auto", "words": {}, "history": "as_sampled", "structured_outputs": {}}
    return json.loads(json.dumps({**told, **rest, **other})), b"".join(contents)


def test_a_player_renders_as_the_run_does_and_never_loads_torch(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(nano())
    told, body = tell(tokenizer)
    (tmp_path / "told.json").write_text(json.dumps(told))
    (tmp_path / "body").write_bytes(body)
    command = [sys.executable, "-c", BUILD, str(tmp_path), json.dumps(MESSAGES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    here, _ = build_renderer(told, body)
    assert json.loads(done.stdout) == {"ids": here.render_ids(MESSAGES), "torch": False}


@pytest.mark.parametrize("name", ["", "transformers.no.such:Class", "os:system", "transformers.utils:NoSuchClass"])
def test_a_class_that_is_not_there_is_found_by_the_files(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(nano())
    renderer, _ = build_renderer(*tell(tokenizer, **{"class": name}))
    assert renderer.render_ids(MESSAGES) == build_renderer(*tell(tokenizer))[0].render_ids(MESSAGES)


def test_the_class_of_a_tokenizer_of_ones_own_is_not_named() -> None:
    mine = type("Mine", (PreTrainedTokenizerFast,), {"__module__": __name__})
    assert describe_class(mine(tokenizer_file=str(Path(nano()) / "tokenizer.json"))) == ""
    assert describe_class(AutoTokenizer.from_pretrained(nano())).startswith("transformers.")


def test_a_file_outside_of_the_folder_is_refused() -> None:
    told, body = tell(AutoTokenizer.from_pretrained(nano()))
    told["files"][0][0] = "../../outside.json"
    with pytest.raises(UserError, match="a file of the tokenizer with the name"):
        build_renderer(told, body)
