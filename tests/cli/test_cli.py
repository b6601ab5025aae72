"""The command line: what works, and that every mistake of a user ends in a sentence."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agentrl.cli import main

SMALL = [
    *("--steps", "2", "--rollout.tasks_per_step", "2", "--rollout.group_size", "2"),
    *("--eval.final_tasks", "4", "--eval.every", "0"),
]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must fail: status 2, one sentence on stderr, no traceback."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("agentrl: ")
    assert "Traceback" not in said.err + said.out
    return said.err


def test_without_words_it_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(verb in said for verb in ("train", "eval", "list"))


def test_packages_may_add_verbs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    greeting = "def main(words):\n    'Say hello.'\n    print('hello', *words)\n    return 3\n"
    (tmp_path / "greeting.py").write_text(greeting)
    added = {n: EntryPoint(n, f"{n}ing:main", "agentrl.commands") for n in ("greet", "break", "train")}
    monkeypatch.setattr("agentrl.settings.registry.list_registered", lambda kind: added if kind == "command" else {})
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "greet       say hello" in said
    assert "break       from breaking:main" in said
    assert main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert "did you mean 'greet'?" in refused(capsys, "greed")
    assert "command 'break': cannot import 'breaking'" in refused(capsys, "break")
    assert "usage: agentrl train" in (main(["train", "--help"]), capsys.readouterr().out)[1]  # ours stays ours


def test_help_of_train_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.settings.loader import list_settings

    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in list_settings() if f"--{name}" not in said] == []


def test_list_shows_what_is_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out.splitlines()
    for name in ("math-tools", "shop", "prompts", "calculator", "nano"):
        (line,) = (line for line in said if line.split()[1:2] == [name])  # a line each where it is no terminal
        assert line.endswith("(agentrl-gym)")


def test_list_shows_the_settings_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "shop"]) == 0
    assert "--env.latency_s" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["calculator", "nano"])
def test_list_shows_tools_and_models(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["list", name]) == 0
    assert name in capsys.readouterr().out


def test_check_tells_whether_a_template_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model", "nano"]) == 0
    said = capsys.readouterr().out
    assert "nano is trained as it is." in said
    assert "Appending tool results and user turns is verified" in said
    assert "<|im_end|>" in said


def test_check_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert "agentrl check takes: {env,tool,model,agent} NAME" in refused(capsys, "check", "nano")
    assert "cannot read 'gone.jinja'" in refused(capsys, "check", "model", "nano", "--chat_template", "gone.jinja")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'train'" in refused(capsys, "trian")


def test_unknown_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no env 'math_tool'; did you mean 'math-tools'?" in refused(capsys, "train", "--env", "math_tool")


def test_no_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no environment" in refused(capsys, "train")


def test_bad_toml(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("env = [")
    assert "run.toml is no valid TOML" in refused(capsys, "train", "run.toml")


def test_missing_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no config file 'gone.toml'" in refused(capsys, "train", "gone.toml")


def test_unknown_key_in_a_file_names_the_file_and_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('env = "math-tools"\n[learner]\nlearning_rte = 1.0\n')
    said = refused(capsys, "train", "run.toml")
    assert "learner.learning_rte: unknown setting; did you mean 'learner.lr'? [run.toml]" in said


def test_unknown_key_of_an_env(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--env", "math-tools", "--env.levle", "2")
    assert "has no setting 'env.levle'; did you mean 'level'?" in said


def test_wrong_type(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--env", "math-tools", "--learner.lr", "fast")
    assert "learner.lr" in said
    assert "'fast'" in said


def test_wrong_value_of_an_env(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--env", "math-tools", "--env.level", "9", *SMALL)
    assert "level is 1 to 4, not 9" in said


def test_a_value_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--seed has no value" in refused(capsys, "train", "--env", "math-tools", "--seed")


def test_a_word_that_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unexpected argument 'math-tools'; did you mean --env math-tools?" in refused(capsys, "train", "math-tools")


def test_an_engine_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--env", "math-tools", "--engine", "vlm")
    assert "engine.name" in said
    assert "'vlm'" in said


def test_missing_dataset_column(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"promt": "a", "solution": "b"}\n' * 3)
    said = refused(capsys, "train", "--env", "prompts", "--env.data", "rows.jsonl", *SMALL)
    assert "no column 'prompt'; did you mean 'promt'?" in said


def test_missing_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--env", "prompts", "--env.data", "gone.jsonl", *SMALL)
    assert "no dataset 'gone.jsonl'" in said


def test_prompts_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--env.data" in refused(capsys, "train", "--env", "prompts", *SMALL)


def write_env(body: str) -> str:
    """An environment in a file; its name for ``--env``."""
    lines = "import agentrl\nfrom agentrl import ToolEnv, tool\n\n" + textwrap.dedent(body)
    name = f"mine{next(_numbers)}"  # a module of that name is imported once in a process
    Path(f"{name}.py").write_text(lines)
    return f"{name}.py:Mine"


_numbers = itertools.count()


def test_an_env_that_returns_the_wrong_thing(capsys: pytest.CaptureFixture[str]) -> None:
    env = write_env("""
        class Mine(ToolEnv):
            async def reset(self, *, seed, options=None):
                return "a question"
    """)
    said = refused(capsys, "train", "--env", env, *SMALL)
    assert "Mine.reset must return (observation, info)" in said
    assert "'a question'" in said


def test_a_tool_with_an_unserialisable_result(capsys: pytest.CaptureFixture[str]) -> None:
    env = write_env("""
        @tool
        async def calculator(expression: str) -> object:
            return object()

        class Mine(ToolEnv):
            system_prompt = "Answer with \\\\boxed{}."
            tools = [calculator]

            async def reset(self, *, seed, options=None):
                return self.ask(f"What is {seed % 97}*{seed % 89}?"), {}

            async def score(self, trajectory):
                return {"correct": 0.0}
    """)
    more = ("--rollout.group_size", "8", "--eval.final_tasks", "32")
    said = refused(capsys, "train", "--env", env, *SMALL, *more)
    assert "tool 'calculator' returned <object object" in said
    assert "neither text nor JSON" in said


def test_an_env_that_always_fails_tells_the_first_fault(capsys: pytest.CaptureFixture[str]) -> None:
    env = write_env("""
        class Mine(ToolEnv):
            async def reset(self, *, seed, options=None):
                raise OSError("the database is gone")
    """)
    said = capsys.readouterr()
    assert main(["train", "--env", env, *SMALL]) == 2
    said = capsys.readouterr()
    assert "not one of 4 episodes could be scored" in said.err
    assert "the database is gone" in said.err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--env", "math-tools", "--model", "runs/gone")
    assert "no model 'runs/gone'" in said
    assert "no model 'nanoo'; did you mean 'nano'?" in refused(capsys, "check", "model", "nanoo")


def test_a_model_without_a_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    from agentrl_envs import nano

    shutil.copytree(nano.path(), "bare")
    Path("bare/chat_template.jinja").unlink()
    config = json.loads(Path("bare/tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    Path("bare/tokenizer_config.json").write_text(json.dumps(config))
    assert "has no chat template" in refused(capsys, "train", "--env", "math-tools", "--model", "bare", *SMALL)


def test_an_unwritable_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("in the way")
    said = refused(capsys, "train", "--env", "math-tools", "--run.dir", "file/run", *SMALL)
    assert "cannot write the run folder 'file/run'" in said


def test_train_then_eval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "math-tools", "--run.dir", "runs/one", "--seed", "3", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "reward, sampled" in said
    assert "one conversation after" in said
    summary = json.loads(Path("runs/one/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["seed"] == 3
    assert {"reward_before", "reward_after", "greedy_before", "greedy_after"} <= summary.keys()
    assert summary["cpu_seconds"] > 0
    assert main(["eval", "--env", "math-tools", "--model", "runs/last", "--tasks", "4", "--first", "100"]) == 0
    assert "tasks 100 to 103" in capsys.readouterr().out


def test_a_run_folder_is_not_written_twice(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/metrics.jsonl").write_text("")
    said = refused(capsys, "train", "--env", "math-tools", "--run.dir", "runs/one", *SMALL)
    assert "holds a run already" in said


@pytest.mark.slow
def test_the_frozen_config_makes_the_run_again() -> None:
    assert main(["train", "--env", "math-tools", "--run.dir", "runs/one", *SMALL]) == 0
    assert main(["train", "runs/one/config.toml", "--run.dir", "runs/two"]) == 0
    one, two = (Path(f"runs/{n}/config.toml").read_text().replace(f"runs/{n}", "") for n in ("one", "two"))
    assert one == two


def test_eval_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "eval", "--env", "math-tools", "--split", "tset")
    assert "--split is train or test, not 'tset'; did you mean 'test'?" in said
    said = refused(capsys, "eval", "--env", "math-tools", "--tasks", "0")
    assert "--tasks: input should be greater than or equal to 1, not 0" in said


def test_ctrl_c_finishes_the_step_and_leaves_a_run_that_loads(tmp_path: Path) -> None:
    words = ["train", "--env", "math-tools", "--run.dir", "runs/cut", "--steps", "1000"]
    words += [
        "--rollout.tasks_per_step",
        "2",
        "--rollout.group_size",
        "2",
        "--eval.final_tasks",
        "4",
        "--eval.every",
        "0",
    ]
    process = subprocess.Popen([sys.executable, "-m", "agentrl", *words], stdout=subprocess.PIPE, text=True)
    metrics = Path("runs/cut/metrics.jsonl")
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finishing this step" in said
    summary = json.loads(Path("runs/cut/summary.json").read_text())
    assert summary["interrupted"] is True
    assert 0 < summary["steps"] < 1000
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "runs/cut/model")


@pytest.mark.slow
def test_ctrl_c_twice_leaves_at_once() -> None:
    env = write_env("""
        import anyio

        class Mine(ToolEnv):
            async def reset(self, *, seed, options=None):
                if options["split"] == "train":
                    print("resetting", flush=True)
                    await anyio.sleep(100)
                return self.ask("1 + 1?"), {}

            async def score(self, trajectory):
                return {"right": 1.0}
    """)
    words = [sys.executable, "-m", "agentrl", "train", "--env", env, *SMALL]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    while "resetting" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nano", "--prot", "8000"], "prot: unknown setting; did you mean 'port'?"),
        (
            ["--model", "nano", "--port", "99999"],
            "agentrl: --port: input should be less than or equal to 65535",
        ),
        (["--port", "8000"], "agentrl: --model is missing: "),
        (["--model", "nanno"], "no model 'nanno'; did you mean 'nano'?"),
    ],
)
def test_serve_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in refused(capsys, "serve", *words)


def test_serve_and_the_engine_say_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.engines.vllm.launch import is_installed

    if is_installed():
        pytest.skip("vLLM is installed")
    assert "pip install 'agentrl-gym[vllm]'" in refused(capsys, "serve", "--model", "nano")
    assert "vLLM is not installed" in refused(capsys, "train", "--env", "math-tools", "--engine", "vllm", *SMALL)


def test_help_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--backend" in capsys.readouterr().out
