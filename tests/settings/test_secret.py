"""Secrets: settings name them, files and screens never have them."""

import base64
import html
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from agentrl import Secret, UserError
from agentrl.environments.validation import as_messages
from agentrl.errors import ConfigError
from agentrl.runs.folder import create_run_folder
from agentrl.settings import secret
from agentrl.settings.loader import build_config, dump_toml
from agentrl.settings.secret import check_no_credentials, hide_credentials, scrub

KEY = "sk-7+4/\"x'=& 9"  # all that a URL, JSON or Python would quote


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_revealed", {})


def test_a_secret_is_shown_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_PASS", "hunter2hunter2")
    own = Secret("https://$SEARCH_PASS@example.org/?a=${SEARCH_PASS}&b=$5")
    assert str(own) == f"{own}" == "https://$SEARCH_PASS@example.org/?a=${SEARCH_PASS}&b=$5"
    assert repr(own) == "Secret('https://$SEARCH_PASS@example.org/?a=${SEARCH_PASS}&b=$5')"
    assert own.reveal() == "https://hunter2hunter2@example.org/?a=hunter2hunter2&b=$5"
    assert scrub("it said: hunter2hunter2!") == "it said: $SEARCH_PASS!"


def test_a_missing_variable_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", "x")
    monkeypatch.delenv("SEARCH_KYE", raising=False)
    with pytest.raises(UserError, match=r"no environment variable 'SEARCH_KYE'.*did you mean 'SEARCH_KEY'"):
        Secret("https://example.org/?key=$SEARCH_KYE").reveal()


def test_an_argument_of_that_type_takes_names_alone() -> None:
    adapter = TypeAdapter(Secret)
    assert adapter.validate_python("$MY_KEY") == Secret("$MY_KEY")
    assert adapter.dump_python(Secret("Bearer $MY_KEY")) == "Bearer $MY_KEY"
    for bad in ("sk-123456", 5, "$5"):
        with pytest.raises(ValidationError, match="put it into the environment variable"):
            adapter.validate_python(bad)


@pytest.mark.parametrize(
    "key", ["sk-1234567890", "a+b/c==&d?e#f", 'with"quote\\and', "ümlaut-key-value", "it's-a-secret"]
)
def test_all_spellings_are_scrubbed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from urllib.parse import quote, quote_plus

    monkeypatch.setenv("MY_API_KEY", key)
    lower = re.sub("%..", lambda byte: byte[0].lower(), quote(key))
    quoted = [quote(key, safe=""), quote(key), quote_plus(key), quote(quote(key, safe=""), safe=""), lower]
    for spelled in (key, *quoted, json.dumps(key)[1:-1], json.dumps(json.dumps(key)[1:-1])[1:-1], repr(key)[1:-1]):
        assert scrub(f"GET https://x/?key={spelled} failed") == "GET https://x/?key=$MY_API_KEY failed"
    assert scrub(f"<p>{html.escape(key)}</p>") == "<p>$MY_API_KEY</p>"


def test_a_value_that_is_no_text_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", os.fsdecode(b"no-\xff\xfe-utf-8"))
    assert scrub("?key=no-%FF%FE-utf-8") == "?key=$MY_API_KEY"


@pytest.mark.parametrize("user", ["", "u", "me", "you"])
def test_a_key_in_basic_authorization_is_scrubbed(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", key := "correct-horse-battery")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        sent = scrub(f"Authorization: Basic {encode(f'{user}:{key}'.encode()).decode()}\n")
        before, name, after = sent.partition("$MY_PASSWORD")
        assert name
        assert len(before.removeprefix("Authorization: Basic ")) <= 8
        assert len(after) <= 5  # bits of it at most, and the end


def test_words_and_numbers_and_paths_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "A_KEY": "short",
        "B_TOKEN": "1234567890",
        "C_KEY": "/home/me/key.pem",
        "D": "sk-1234567890",
    }.items():
        monkeypatch.setenv(name, value)
    text = "short 1234567890 /home/me/key.pem sk-1234567890"
    assert scrub(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:hunter2@example.org/mcp", "https://me:***@example.org/mcp"),
        ("mcp:https://example.org/mcp?key=abc123", "mcp:https://example.org/mcp?key=***"),
        ("https://example.org/?a=1&api_key=abc&b=2", "https://example.org/?a=1&api_key=***&b=2"),
        ("https://example.org/?access_token=abc#x", "https://example.org/?access_token=***#x"),
        ("mcp:server --api-key sk-12345678 --port 5", "mcp:server --api-key *** --port 5"),
        ("mcp:server --header 'Authorization: Bearer sk-12345678'", "mcp:server --header 'Authorization: Bearer ***'"),
        ("mcp:https://example.org/mcp?key=$MY_KEY", None),
        ("https://$USER:${PASS}@example.org/?key=${MY_KEY}", None),
        ("https://example.org/?monkey=1&page=2", None),
        ("mcp:server --token-file x --tokenizer qwen", None),
        ("Ask https://example.org/?key=abc for it.", None),  # a prompt, not an address
        ("search", None),
    ],
)
def test_keys_in_addresses_are_refused_without_being_said(text: str, shown: str | None) -> None:
    assert hide_credentials(text) == (shown or text)
    if shown is None:
        check_no_credentials({"tools": [text]})
        return
    with pytest.raises(ConfigError, match=r"^tools: .*\$NAME$") as refused:
        check_no_credentials({"tools": ["search", text]})
    assert "***" in str(refused.value)
    assert not any(key in str(refused.value) for key in ("hunter2", "abc", "sk-1"))


def test_a_header_is_a_name_or_refused() -> None:
    check_no_credentials({"tool.mcp.headers.Authorization": "Bearer $MY_KEY", "tool.mcp.headers.Accept": "text/html"})
    with pytest.raises(ConfigError, match=r"headers\.X-Api-Key"):
        check_no_credentials({"tool.mcp.headers.X-Api-Key": "abc"})


def test_a_run_keeps_the_name_and_never_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", KEY.replace(" ", ""))
    value = KEY.replace(" ", "")
    layer: Any = {"env": {"name": "math-tools"}, "tools": ["mcp:https://example.org/?key=$SEARCH_KEY"]}
    config = build_config(("test", layer))
    assert "key=$SEARCH_KEY" in dump_toml(config)
    run = create_run_folder(str(tmp_path / "run"), "math-tools", dump_toml(config))
    run.log_message(1, f"it said {value}")
    run.write_summary({"why": f"it said {value}"})
    run.log({"step": 1, "note": value})
    assert as_messages(f"you sent {value}") == [{"role": "user", "content": "you sent $SEARCH_KEY"}]
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert value not in file.read_text()
            assert json.dumps(value)[1:-1] not in file.read_text()
    with pytest.raises(ConfigError, match=r"tools: .*key=\*\*\*"):
        build_config(("test", {**layer, "tools": [f"mcp:https://example.org/?key={'v' * 9}"]}))
