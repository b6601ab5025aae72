"""`agentrl play`: by hand at a terminal, by a script, with an endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from agentrl.cli import main
from tests.helpers.endpoints import Answer, called, said, serving

PLAY = ["-m", "agentrl", "play", "--env", "shop", "--task", "3"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def scripted(*lines: str, words: tuple[str, ...] = ("--env", "shop")) -> int:
    Path("turns.txt").write_text("\n".join(lines))
    return main(["play", *words, "--script", "turns.txt"])


def test_a_script_plays_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--env", "shop", "--task", "0", "--save", "made.jsonl")
    # 12 shirts and 13 shoes, by hand: look both up, then answer.
    assert scripted('price(item="shirt"); price("shoe")', "", "/say nothing", words=words) == 0
    first = capsys.readouterr().out
    assert "What do 12 shirts and 13 shoes cost?" in first
    assert "price(item: string)    The price of one piece of an item." in first
    prices = [int(line.split()[-1]) for line in first.splitlines() if line.startswith("tool price ")]
    answer = 12 * prices[0] + 13 * prices[1]
    lines = ("price(item='shirt')", "price(item='shoe')", "", f"They cost \\boxed{{{answer}}}.")
    assert scripted(*lines, words=words) == 0
    said = capsys.readouterr().out
    assert "reward     correct 1" in said
    assert "total      1, which is what a model would have got   (2 turns, terminated)" in said
    lost, won = (json.loads(line) for line in Path("made.jsonl").read_text().splitlines())
    assert (lost["reward"], won["reward"]) == (0.0, 1.0)
    assert [m["role"] for m in won["messages"]] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert won["messages"][2]["tool_calls"][0]["function"] == {"name": "price", "arguments": {"item": "shirt"}}
    assert [t["function"]["name"] for t in won["tools"]] == ["price", "calculator"]
    assert (won["env"], won["split"], won["task"]) == ("shop", "train", 0)


def test_what_a_model_may_do_wrong_may_be_done_here(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ('/call no_such {"a": 1}', '/call price {"itm": 3}', "", "/say price(1)")
    assert scripted(*lines) == 0
    shown = capsys.readouterr().out
    assert "error: unknown tool 'no_such'; the tools are: price, calculator" in shown
    assert "error: bad arguments for price: item: field required" in shown
    assert "correct 0" in shown


def test_calls_at_the_end_of_a_script_are_sent_and_then_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert scripted('price("pen")', "/undo", 'price("lamp")', "/tools") == 1
    shown = capsys.readouterr().out
    assert "took back price" in shown
    assert "tool price " in shown
    assert "turns.txt ended after 4 lines, before the episode did" in shown


def test_text_may_have_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert scripted("one \\", "two", words=("--env", "shop", "--save", "made.jsonl")) == 0
    assert json.loads(Path("made.jsonl").read_text())["messages"][-1]["content"] == "one \ntwo"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("prise(1)", "line 1: no tool 'prise'; did you mean 'price'? (/call makes the call all the same"),
        ("price(1, 2)", "price takes 1 arguments: item"),
        ("price(item=lamp)", "item must be a plain value, such as 3"),
        ("price(item='a'", "is no call: write price("),
        ("price(**{'item': 1})", "name each argument of price: item"),
        ('/call price {"a"', "the arguments of 'price' are no JSON"),
        ("/call price [1]", "a name, and a JSON object"),
        ("/halp", "no command '/halp'; /help shows them"),
    ],
)
def test_a_mistaken_line_is_a_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripted(line) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--env", "shp"], "no env 'shp'; did you mean 'shop'"),
        (["--env", "shop", "--task", "x"], "--task: input should be a valid integer, unable to parse"),
        (["--env", "shop", "--split", "tset"], "did you mean 'test'"),
        (["--env", "shop", "--script", "gone.txt"], "cannot read the script 'gone.txt': No such file or directory"),
        (["--env", "shop", "--model", "nano"], "--model is for --endpoint; without it you are the model"),
        (["--env", "shop", "--script", "a", "--endpoint", "http://b"], "do not go together"),
        (["--env", "shop", "--endpoint", "http://127.0.0.1:9/v1"], "no server answers at http://127.0.0.1:9/v1"),
        (["--env", "shop", "--leaner.lr", "3"], "leaner.lr: unknown setting; did you mean 'learner.lr'"),
    ],
)
def test_what_cannot_be_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_task_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "solution": "b"}\n' * 10)
    assert scripted("b", words=("--env", "prompts", "--env.data", "rows.jsonl", "--task", "9")) == 2
    assert "split 'train' of env 'prompts' has 9 tasks, 0 to 8; not 9" in capsys.readouterr().err


def test_what_a_tool_says_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil.py").write_text(
        "from agentrl import ToolEnv, tool\n\n\nclass Evil(ToolEnv):\n"
        "    async def reset(self, *, seed, options=None):\n"
        "        return self.ask('[bold red]ask[/] \\x1b]0;title\\x07 \\u202edesrever'), {}\n\n"
        "    @tool\n    async def look(self) -> str:\n        '''Look.'''\n        return '[/nothing] \\x1b[2J'\n"
    )
    assert scripted("look()", "", "done", words=("--env", "evil.py:Evil")) == 0
    shown = capsys.readouterr().out
    assert "[bold red]ask[/] [ESC]]0;title[BEL] [U+202E]desrever" in shown
    assert "[/nothing] [ESC][2J" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_the_worlds_failure_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken_world.py").write_text(
        "from agentrl import Env\n\n\nclass Broken(Env):\n"
        "    async def reset(self, *, seed, options=None):\n        return 'hello', {}\n\n"
        "    async def step(self, action):\n        raise OSError('the disk is full')\n"
    )
    assert scripted("hi", words=("--env", "broken_world.py:Broken")) == 0
    shown = capsys.readouterr().out
    assert "fault      env_step:" in shown
    assert "the disk is full" in shown
    assert "infrastructure error: such an episode is counted, and not trained" in shown


def test_an_endpoint_plays_and_one_watches(capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[Answer] = [called("price", '{"item": "lamp"}'), said(r"It is \boxed{7}.")]
    with serving(lambda asked: turns.pop(0), models=("m",)) as server:
        assert main(["play", "--env", "shop", "--endpoint", server.url, "--model", "m", "--save", "made.jsonl"]) == 0
    shown = capsys.readouterr().out
    order = ["What do", 'call       price({"item": "lamp"})', "tool price", r"assistant  It is \boxed{7}.", "correct 0"]
    places = [shown.index(part) for part in order]
    assert places == sorted(places)
    assert json.loads(Path("made.jsonl").read_text())["reward"] == 0.0


def test_a_person_at_a_terminal() -> None:
    terminal = pexpect.spawn(sys.executable, PLAY, encoding="utf-8", timeout=60, dimensions=(40, 200))
    terminal.expect(r"calculator\(expression: string\)")
    terminal.expect("> ")
    terminal.sendline("/help")
    terminal.expect("an empty line")
    terminal.sendline('prise(item="lamp")')
    terminal.expect("did you mean 'price'")
    terminal.sendline('price(item="lamp")')
    terminal.expect("1 call in this turn")
    terminal.sendline("")
    terminal.expect(r"tool price\S* .*\d+")
    terminal.sendline(r"\boxed{1}")
    terminal.expect("which is what a model would have got")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.parametrize(("key", "status"), [("c", 130), ("d", 0)])
def test_leaving_is_clean(key: str, status: int) -> None:
    terminal = pexpect.spawn(sys.executable, PLAY, encoding="utf-8", timeout=60)
    terminal.expect("/help")
    terminal.expect("> ")
    terminal.sendcontrol(key)
    terminal.expect("interrupted" if key == "c" else "the input is over; nothing was scored")
    terminal.expect(pexpect.EOF)
    assert "Traceback" not in terminal.before
    terminal.close()
    assert terminal.exitstatus == status


def test_lines_from_a_pipe_and_from_a_file() -> None:
    text = "price('lamp')\n\n\\boxed{1}"
    piped = subprocess.run([sys.executable, *PLAY], input=text, capture_output=True, text=True, check=True)
    Path("lines").write_text(text)
    with open("lines") as file:
        read = subprocess.run([sys.executable, *PLAY], stdin=file, capture_output=True, text=True, check=True)
    assert piped.stdout == read.stdout
    assert "total      0" in read.stdout


def test_nobody_at_the_keyboard() -> None:
    done = subprocess.run(
        [sys.executable, *PLAY], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "the input is over; nothing was scored" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_expert_of_an_environment_plays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["play", "--env", "shop", "--task", "0", "--expert", "--save", "made.jsonl"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert 'call       price({"item": "shirt"})' in shown
    assert shown.count("That costs") == 1  # each message once
    assert "which is what a model would have got" in shown
    (line,) = Path("made.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == 1.0
    assert json.loads(line)["messages"][-1]["role"] == "assistant"


def test_an_expert_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("silent.py").write_text(
        "from agentrl import Env, Step\n\n\nclass Silent(Env):\n"
        "    async def reset(self, *, seed, options=None):\n        return 'Say.', {}\n"
    )
    assert main(["play", "--env", "silent.py:Silent", "--expert"]) == 2
    assert "Silent has no expert: write `async def expert(self)`" in capsys.readouterr().err
    assert main(["play", "--env", "shop", "--expert", "--script", "turns.txt"]) == 2
    assert "--script and --expert do not go together" in capsys.readouterr().err
    assert main(["list", "shop"]) == 0
    assert "expert: Look up the prices" in capsys.readouterr().out
    assert main(["list", "silent.py:Silent"]) == 0
    assert "expert: none" in capsys.readouterr().out
