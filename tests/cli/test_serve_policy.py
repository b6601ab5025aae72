"""``agentrl serve-policy``: a policy behind a URL and a token, whose conversations are there to look at afterwards."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI

from agentrl.cli import main
from agentrl.runs import reader

SERVE = [sys.executable, "-m", "agentrl", "serve-policy"]


@contextmanager
def served(folder: Path, *words: str, token: str = "sesame") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve nano, and yield its URL and the process, which SIGINT ends."""
    command = [*SERVE, "nano", "--out", str(folder), "--token", token, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = ""
        try:
            for line in process.stdout:
                said += line
                if found := re.search(r"OPENAI_BASE_URL=(\S+)", line):
                    yield found[1], process
                    break
            else:
                raise AssertionError(said)
            process.send_signal(signal.SIGINT)
            said += process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert "agentrl view" in said


def test_a_client_talks_to_a_policy_and_what_it_said_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "served"
    with served(folder, "--rollout.temperature", "0.5") as (url, _):
        client = OpenAI(base_url=url, api_key="sesame")
        first = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "What is 2 + 3?"}])
        message = first.choices[0].message
        client.chat.completions.create(
            model="any",
            messages=[
                {"role": "user", "content": "What is 2 + 3?"},
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": "And 2 + 4?"},
            ],
            temperature=0,
        )
        with pytest.raises(AuthenticationError, match="wants its token"):
            OpenAI(base_url=url, api_key="other").models.list()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {"kind": "served", "model": "nano", "conversations": 1, "requests": 2}
    row = reader.read_row(folder, reader.parse_episode_id("served-0:0"))
    conversation = reader.build_trajectory(row)
    assert (conversation.turns, conversation.temperature, row["credit"], row["reward"]) == (2, 0.0, "served", None)
    assert conversation.messages[1]["content"] == message.content
    assert main(["explain", str(folder), "served-0:0"]) == 0
    assert "it is a conversation of a client" in capsys.readouterr().out


def test_without_a_token_it_says_what_a_key_does(tmp_path: Path) -> None:
    with served(tmp_path / "served", token="") as (url, process):
        assert process.stdout is not None
        assert OpenAI(base_url=url, api_key="mine").models.list().data[0].id == "nano"
        lines = [process.stdout.readline() for _ in range(2)]
    assert "ANTHROPIC_API_KEY=WORD" in lines[0]
    assert lines[1] == "any WORD will do; requests with the same one are one episode\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nano", "--learner.lr", "1"], "learner.lr does nothing for a policy that is served"),
        (["nano", "--rollout.group_size", "4"], "rollout.group_size does nothing for a policy that is served"),
        (["nano", "--prot", "3"], "prot does nothing for a policy that is served; did you mean 'port'?"),
        (["nano", "--host", "0.0.0.0", "--token", ""], "--host 0.0.0.0 lets other machines in"),
        (["nano", "--host", "192.0.2.7"], "cannot listen on 192.0.2.7"),
        (["nao"], "no model 'nao'; did you mean 'nano'?"),
        (["nano", "--token", "a b"], "a token has letters, digits"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve-policy", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "served").exists()


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert main(["serve-policy", "nano", "--out", str(tmp_path)]) == 2
    assert "holds a run already; give another --out" in capsys.readouterr().err
    assert (tmp_path / "config.toml").read_text() == ""
