"""`agentrl check model` prints a page that fits, with every author marked, and ends with a status that says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli import main
from tests.helpers.families import family, plain_family

REWRITES = "{% for m in messages %}{{ m.role }} {{ loop.revindex }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def save(folder: Path, name: str) -> str:
    tokenizer = plain_family(name).tokenizer if name == "vicuna" else family(name).tokenizer
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_has_a_verdict_and_a_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["check", "model", save(tmp_path, "qwen3"), "--template.enable_thinking", "false"]) == 0
    said = capsys.readouterr().out
    assert "is trained with these limits:" in " ".join(said.split())
    assert "--template.enable_thinking" in said
    assert [line.split("]")[0] for line in said.splitlines() if line.startswith("[")] == [
        *("[prompt", "[model", "[env", "[model", "[env"),
    ]
    assert all(len(line) <= width for line in said.splitlines())
    assert "\x1b" not in said


def test_a_word_that_the_template_does_not_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model", save(tmp_path, "qwen3"), "--template.enable_thinkin", "false"]) == 2
    assert "did you mean 'enable_thinking'" in capsys.readouterr().err


def test_a_model_without_a_second_turn_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jinja").write_text(REWRITES)
    name = save(tmp_path / "model", "vicuna")
    assert main(["check", "model", name, "--chat_template", str(tmp_path / "t.jinja")]) == 1
    assert "cannot be trained over more than one turn" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no \x1b[31m') }}")
    assert main(["check", "model", name, "--chat_template", str(tmp_path / "t.jinja")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot be trained: " in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("generation_config.json", '{"eos_token_id": {"a": 1}}', "eos_token_id is {'a': 1}, and should be a number"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', "eos_token_id is ['a']"),
        ("config.json", '{"model_type": "llama", "quantization_config": false}', "quantization_config is False"),
        ("config.json", '{"model_type": 3}', "model_type is 3, and should be a text"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is 3"),
    ],
)
def test_a_field_of_a_wrong_type_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, what: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / file).write_text(content)
    assert main(["check", "model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{file}: " in said
    assert what in said


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_alone_gets_a_page() -> None:
    code = "import sys; from agentrl.cli import main; sys.exit(main(['check', 'model', 'nano']))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False, timeout=300)
    assert told.returncode == 0, told.stderr
    assert b"[model]" in told.stdout
