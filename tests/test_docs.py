"""The documentation: its commands run, or would; its snippets run; what it says the program says, the program says."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.agents.forms import parse_agent
from agentrl.cli import check as check_verb
from agentrl.cli import (
    compare,
    export,
    from_trl,
    main,
    play,
    replay,
    rescore,
    serve,
    serve_policy,
    serve_tools,
    sft,
    train,
    view,
)
from agentrl.cli import eval as eval_verb
from agentrl.cli.dispatch import VERBS
from agentrl.engines.vllm.launchers import ServerPlan, launch_servers
from agentrl.environments.env import ToolEnv
from agentrl.environments.spec import EnvSpec
from agentrl.launch.run_process import RunPlan
from agentrl.models.policy import build_model_config
from agentrl.models.source import locate_model
from agentrl.runs import trackers
from agentrl.settings import registry
from agentrl.settings.loader import build_config, list_settings, read_toml
from agentrl.settings.schema import TrainConfig
from agentrl.tools.toolset import load_tool
from tests import desk
from tests.helpers import pages
from tests.helpers.pages import ROOT, Command, Fence

REAL = ("smollm2-135m", "gemma3-270m")  # tests/envs/test_packaged_models.py has them; here nano stands for them
COMMANDS = [c._replace(words=tuple("nano" if w in REAL else w for w in c.words)) for c in pages.every_command()]
OURS = [c for c in COMMANDS if c.words[0] == "agentrl"]
OTHERS = [c for c in COMMANDS if c.words[0] != "agentrl"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def _id(found: Command | Fence) -> str:
    return f"{found.page}:{found.line}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return desk.laid_out(tmp_path_factory.mktemp("docs") / "desk")


@pytest.fixture(scope="session")
def plugins(folder: Path) -> list[str]:
    return desk.plugins(folder)


@pytest.fixture
def at_desk(folder: Path, plugins: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the folder of files that the pages name, with the plugins of `agentrl new`; what it imports is forgotten."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*plugins, *sys.path])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for file in folder.glob("*.py"):  # another test may have one of that name
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def _made(folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        desk.small_run("mine", "math-tools")
        for copy in ("a", "b"):
            shutil.copytree("runs/mine", f"runs/{copy}")
            desk.small_evaluation(copy)
    finally:
        os.chdir(before)


@pytest.fixture
def with_runs(at_desk: Path, _made: None) -> Path:
    desk.point_last()
    return at_desk


# -- commands of ours: each one's words are good ------------------------------------------------------------------


def _found(spec: Any) -> None:
    """The environment is made of its settings, and its tools are there."""
    env = spec.make()
    if isinstance(env, ToolEnv):
        spec.tool_binding.list_patterns(env)


def _found_agent(config: TrainConfig) -> None:
    """The agent is of one of the forms; its file is there."""
    if config.agent is not None:
        parse_agent(config.agent)


def _train(words: Sequence[str]) -> None:
    _check_run(build_model_config(*train.build_layers(train.COMMAND.parse(words))))


def _sft(words: Sequence[str]) -> None:
    config = sft.build_sft_config(sft.COMMAND.parse(words))
    _check_run(config)
    assert all(name == "expert" or Path(name).exists() for name in config.sft.data)


def _check_run(config: TrainConfig) -> None:
    _found(EnvSpec.from_config(config))
    trackers.check_trackers(config.run.trackers)
    _found_agent(config)
    if config.rollout.curriculum:
        registry.import_object("rollout.curriculum", config.rollout.curriculum)


def _eval(words: Sequence[str]) -> None:
    if "--resume" not in words:
        scope, layers = eval_verb._read(eval_verb.COMMAND.parse(words))
        config = build_config(*layers) if scope.endpoint else build_model_config(*layers)
        _found(EnvSpec.from_config(config))
        _found_agent(config)


def _play(words: Sequence[str]) -> None:
    arguments = play.COMMAND.parse(words)
    _found(EnvSpec.from_config(play._read(arguments)))
    assert arguments.options.script is None or arguments.options.script.is_file()


def _check(words: Sequence[str]) -> None:
    arguments = check_verb.COMMAND.parse(words)
    kind, name = arguments.names
    if kind == "env":
        _found(EnvSpec.from_config(check_verb._build_config(name, arguments)))
    elif kind == "agent":
        parse_agent(name)
    elif kind == "tool":
        load_tool(name, check_verb._build_config("none", arguments).tool.get(name.partition(":")[0]))
    else:
        locate_model(name)


def _serve_tools(words: Sequence[str]) -> None:
    arguments = serve_tools.COMMAND.parse(words)
    for name in arguments.names[0].split(","):
        load_tool(name, arguments.options.tool.get(name.partition(":")[0]))


READ: dict[str, Callable[[Sequence[str]], object]] = {  # a verb's words are read, names are found; nothing is loaded
    "train": _train,
    "sft": _sft,
    "eval": _eval,
    "play": _play,
    "check": _check,
    "serve": lambda words: locate_model(serve.COMMAND.parse(words).options.model),
    "serve-policy": lambda words: locate_model(serve_policy.COMMAND.parse(words).names[0]),
    "serve-tools": _serve_tools,
    "view": view.COMMAND.parse,
    "from-trl": from_trl.COMMAND.parse,
    "compare": compare.COMMAND.parse,
    "export": export.COMMAND.parse,
    "replay": replay.COMMAND.parse,
    "rescore": rescore.COMMAND.parse,
}


@pytest.mark.parametrize("command", [c for c in OURS if c.words[1] in READ and "--help" not in c.words], ids=_id)
def test_a_command_is_understood(command: Command, with_runs: Path) -> None:
    READ[command.words[1]](command.words[2:])


def test_every_command_has_a_rule() -> None:
    for command in OURS:
        assert command.words[1] in {*VERBS, "env", "index"}, command
    for command in OTHERS:
        assert _rule(command), f"{_id(command)}: no rule of this test knows {command}"


# -- commands of ours: they run, but for what is said -------------------------------------------------------------

SMALL_TRAIN = [
    "--steps",
    "1",
    "--rollout.tasks_per_step",
    "2",
    "--rollout.group_size",
    "2",
    "--rollout.max_tokens",
    "64",
]
SMALL_TRAIN += ["--eval.every", "0", "--eval.final_tasks", "2"]
CANNOT = {  # what is in a command: why it is not run here
    r"--push_to_hub": "sends a model to the hub",
    r"(--model|check model) (?!nano|runs/|NAME)[\w-]+/[\w.-]+": "needs a model of the hub",
    r"--endpoint ": "needs a server of chat completions; tests/engines/test_openai_endpoint.py has one",
    r"--engine (vllm|server|launched)|^agentrl serve ": "needs vLLM: make vllm",
    r"^agentrl player |--players.host": "plays for a run; tests/players has them",
    r"--launcher |--ranks ": "starts processes of a run; tests/launch has them",
    r"^agentrl serve-policy ": "serves until it is ended; tests/cli/test_serve_policy.py does so",
    r"^agentrl serve-tools ": "serves until it is ended; tests/cli/test_serve_tools.py does so",
    r"^agentrl view ": "serves until it is ended; tests/view/test_server.py does so",
    r"^agentrl play (?!.*--script)": "waits for a person; tests/cli/test_play.py has one",
    r"reward-model:": "needs a reward model; tests/rewards/test_reward_model.py has one",
    r"mcp:http": "needs a server; tests/builtin_tools/test_mcp.py has one",
    r"--tools remote:": "needs a service; tests/builtin_tools/test_e2b.py has one",
    r"^agentrl env ": "makes a venv; tests/envs/test_verifiers_packages.py does so",
    r"--env verifiers:": "needs a venv; tests/envs/test_verifiers_packages.py makes one",
    r"--(engine|env) openenv": "needs a server; tests/envs/test_openenv.py has one",
}
QUICK = {
    "list",
    "index",
    "report",
    "explain",
    "rescore",
    "compare",
    "new",
    "play",
    "export",
    "from-trl",
}  # a second at most


def _cannot(command: Command) -> str | None:
    return next((why for pattern, why in CANNOT.items() if re.search(pattern, str(command))), None)


def _marked(number: int, command: Command) -> Any:
    """Mark what takes seconds: as slow what people meet first, and of the others one in six; as long the rest."""
    quick = command.words[1] in QUICK or "--help" in command.words or _cannot(command) is not None
    quick = quick and "runs/symbols" not in command.words
    first = "README" in str(command.page) or "quickstart" in str(command.page) or number % 6 == 0
    seldom = pytest.mark.slow if first else pytest.mark.long
    return pytest.param(command, id=_id(command), marks=() if quick else seldom)


def _globbed(word: str) -> list[str]:
    """As a shell does."""
    return [str(p) for p in sorted(Path().glob(word))] if word.startswith("notes/") else [word]


def _shortened(given: Sequence[str]) -> list[str]:
    """The same command, of little work."""
    words = [w for word in given for w in _globbed(word)]
    verb = words[0]
    if "--help" in words:
        return words
    if verb == "train" and "--resume" in words:
        return [*words, "--steps", "2", "--eval.final_tasks", "2"]
    if verb == "train" and "stages.toml" in words:  # its steps are the stages'
        stages = Path("stages.toml").read_text(encoding="utf-8")
        Path("stages.toml").write_text(re.sub(r"^steps = \d+", "steps = 1", stages, flags=re.M), encoding="utf-8")
        return [*words, *SMALL_TRAIN[2:]]
    if verb == "train":
        evaluates = ["--eval.every", "1", "--eval.tasks", "2"] if "--eval.patience" in words else []
        return [*words, *SMALL_TRAIN, *evaluates]
    if verb == "sft" and "--resume" not in words:
        return [*words, *(("--steps", "1") if "--steps" in words else ()), "--eval.final_tasks", "2"]
    few = (verb == "eval" and "--resume" not in words) or words[:2] in (["check", "env"], ["check", "tool"])
    return [*words, *(("--tasks", "2") if few else ())]


@pytest.mark.parametrize("command", [_marked(n, c) for n, c in enumerate(OURS)])
def test_a_command_runs(command: Command, with_runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if (why := _cannot(command)) is not None:
        pytest.skip(why)
    words = _shortened(command.words[1:])
    if "runs/symbols" in words and not Path("runs/symbols").exists():
        desk.small_run("symbols", "prompts", data="rows.jsonl")
    if "downloaded/run" in words and not Path("downloaded/run").exists():
        shutil.copytree("runs/mine", "downloaded/run")
    if words[0] == "new":  # where nothing of that name is there yet
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.startswith(str(with_runs))])
    for flag in ("--out", "--run.dir", "--functions"):  # what the command before, or the last test, has made
        if flag in words and "--resume" not in words:
            _remove(Path(words[words.index(flag) + 1]))
    assert main(words) == 0


def _remove(path: Path) -> None:
    assert not path.is_absolute()
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


# -- commands of others: what they name is there ------------------------------------------------------------------


def _make(words: Sequence[str]) -> None:
    for target in (w for w in words if "=" not in w):
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.M), f"no target {target!r}"


def _pip(words: Sequence[str]) -> None:
    packages = [w for w in words[1:] if not w.startswith("-")]
    for package in packages:
        name, _, extras = package.rstrip("]").partition("[")
        if name in (".", PROJECT["name"]):
            for extra in filter(None, extras.split(",")):
                assert extra in EXTRAS, f"no extra {extra!r}"
        elif name == "agentrl-crates":
            assert extras == "test"
        else:  # what the Makefile installs, or a tracker
            pinned = package.replace("torch==", "TORCH ?= ")
            assert pinned in MAKEFILE or package in ("tensorboard", "bfcl-eval"), package


def _python(words: Sequence[str]) -> None:
    if words[0] == "-m":
        assert words[1] in ("venv", "build"), words
        return
    source = (ROOT / words[0]).read_text(encoding="utf-8")
    for flag in (w for w in words[1:] if w.startswith("--")):
        assert f'"{flag}"' in source, f"{words[0]} has no {flag}"


def _torchrun(words: Sequence[str]) -> None:
    assert words[0] == "--nproc_per_node"
    assert words[2:4] == ("-m", "agentrl")
    READ[words[4]](words[5:])


def _exact(*accepted: str) -> Callable[[Sequence[str]], None]:
    def rule(words: Sequence[str]) -> None:
        assert " ".join(words) in accepted

    return rule


RULES: dict[str, Callable[[Sequence[str]], None]] = {
    "make": _make,
    "pip": _pip,
    "python": _python,
    "python3": _python,
    "torchrun": _torchrun,
    "source": _exact(".venv/bin/activate"),
    "kill": _exact("-USR1 PID"),
    "export": _exact("E2B_API_KEY=...", "VLLM_API_KEY=...", "AGENTRL_PLAYER_KEY=..."),
}


def _rule(command: Command) -> Callable[[Sequence[str]], None] | None:
    return RULES.get(command.words[0])


@pytest.mark.parametrize("command", [c for c in OTHERS if _rule(c)], ids=_id)
def test_what_another_command_names_is_there(command: Command, with_runs: Path) -> None:
    RULES[command.words[0]](command.words[1:])


# -- snippets -----------------------------------------------------------------------------------------------------

SNIPPETS: dict[str, list[Fence]] = {}
for _fence in pages.every_fence("python"):
    SNIPPETS.setdefault(_fence.page, []).append(_fence)


def _slow(page: str) -> Any:
    trains = any(re.search(r"\b(train|evaluate|check_env)\(", f.text) for f in SNIPPETS[page] if not f.skipped)
    return pytest.param(page, id=page, marks=pytest.mark.slow if trains else ())


@pytest.fixture
def small_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """``train`` and ``evaluate`` check what they are given, and do a step of it, with nano."""
    real_train, real_evaluate = agentrl.train, agentrl.evaluate

    own = set(inspect.signature(real_train).parameters) - {"env", "model", "settings"}

    def train(env: Any, model: Any = "nano", **given: Any) -> Any:
        settings = {name: value for name, value in given.items() if name not in own}
        config = build_model_config(("arguments", {**settings, "env": {"name": "of the snippet"}, "model": model}))
        rollout = {**config.rollout.model_dump(exclude_unset=True), **desk.SMALL["rollout"]}
        return real_train(env, **{**given, **desk.SMALL, "rollout": rollout, "steps": 1})

    monkeypatch.setattr(agentrl, "train", train, raising=False)
    monkeypatch.setattr(agentrl, "evaluate", lambda *a, **k: real_evaluate(*a, **{**k, "tasks": 2}), raising=False)


@pytest.mark.parametrize("page", [_slow(p) for p in SNIPPETS])
def test_the_snippets_of_a_page_run(page: str, with_runs: Path, small_training: None) -> None:
    """One after the other, with what those before them have made."""
    names: dict[str, Any] = {"__name__": "snippet"}
    ran = 0
    for fence in SNIPPETS[page]:
        code = compile("\n" * (fence.line - 1) + fence.text, page, "exec")
        if not fence.skipped:
            exec(fence.before, names)
            exec(code, names)
            ran += 1
    if not ran:
        pytest.skip("; ".join(f.skipped or "" for f in SNIPPETS[page]))


@pytest.mark.parametrize("fence", pages.every_fence("toml"), ids=_id)
def test_settings_and_metadata_can_be_read(fence: Fence, at_desk: Path) -> None:
    found = tomllib.loads(fence.text)
    if "project" not in found:
        Path("shown.toml").write_text(fence.text, encoding="utf-8")
        _found(EnvSpec.from_config(build_config(read_toml(Path("shown.toml")))))


def test_no_code_is_in_a_language_that_nothing_looks_at() -> None:
    assert {f.language for p in pages.PAGES for f in pages.fences(p)} <= {"bash", "python", "toml", ""}
    assert all(p.read_text(encoding="utf-8").count("\n```") % 2 == 0 for p in pages.PAGES)


# -- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in pages.links(page):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in pages.anchors(target), f"{link}: no such heading"


def test_the_map_has_every_page() -> None:
    index = ROOT / "docs/index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in pages.links(index)}
    assert not [p.name for p in pages.PAGES if p.parent.name == "docs" and p != index and p.resolve() not in linked]


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    known = {*list_settings(), *(f"run.{name}" for name in [*dir(agentrl.Run), *agentrl.Run.__annotations__])}
    for name in re.findall(r"`(?:--)?((?:engine|rollout|learner|lora|eval|run)\.[a-z_]+)\b", pages.text(page)):
        assert name in known or name.endswith(".py"), name


def test_the_readme_names_every_extra() -> None:
    install = pages.text(ROOT / "README.md").partition("## Install")[2]
    told = {e for names in re.findall(r"\.\[([\w,-]+)\]", install) for e in names.split(",")}
    assert told == EXTRAS.keys() - {"test", "test-vllm", "test-versions", "bench"}


# -- what the program says ----------------------------------------------------------------------------------------


@cache
def _sentences() -> list[re.Pattern[str]]:
    """Every text in the source of some length, with anything where a value stands."""
    found = []
    for path in (p for room in ("agentrl", "envs", "tools") for p in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            else:
                continue
            if sum(len(str(p).strip()) for p in parts if p) >= 14:
                pattern = "".join(".*" if p is None else re.escape(str(p)) for p in parts)
                found.append(re.compile(pattern, re.S))
    return found


QUOTED = re.findall(r"^> (.+)$", pages.text(ROOT / "docs/troubleshooting.md"), re.M)


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda q: q[:40])
def test_a_quoted_message_is_the_program_s_own(quoted: str) -> None:
    assert any(p.fullmatch(quoted) for p in _sentences())


# -- names of TRL -------------------------------------------------------------------------------------------------

NAMES = pages.rows(ROOT / "docs/from-trl.md", "| TRL's `GRPOConfig`")


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row[0])
def test_what_stands_for_a_name_of_trl_is_there(row: list[str]) -> None:
    _, ours, _, default = row
    if ours.startswith("nothing to set"):
        return
    name = re.findall(r"`([\w.]+)`", ours)[0]
    if name.startswith("env."):
        assert f"{name.removeprefix('env.')}:" in (ROOT / "envs/agentrl_envs/prompts.py").read_text(encoding="utf-8")
        return
    assert str(list_settings()[name].default) == default


def test_names_of_trl_are_trl_s() -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("needs trl: the extra bench")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig
    fields = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    for theirs, _, default, _ in NAMES:
        found = fields[theirs.strip("`")]
        assert str(getattr(found, "value", found)) == default, theirs


# -- docs/extend.md: what its package registers is what runs --------------------------------------------------------


@pytest.mark.slow
def test_everything_of_the_page_on_extending_takes_part_in_one_run(with_runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--learner.loss", "soft", "--learner.advantage", "ranks", "--engine", "counting", "--run.metrics", "words")
    more = ("--run.callbacks", "best", "--engine.args.every", "3", "--run.save_every", "1", "--run.dir", str(folder))
    assert main(["train", "--env", "quiz:sums", *words, *more, *SMALL_TRAIN]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("words/mean" in row for row in rows)
    assert any("eval/words/mean" in row for row in rows)
    [path] = (folder / "checkpoints").glob("*/state.json")
    assert b"since" in path.read_bytes()
    assert main(["report", str(folder)]) == 0
    assert "hardest tasks" in (folder / "report.html").read_text()


async def test_the_launcher_of_the_page_on_extending_starts_servers(at_desk: Path) -> None:
    command = (sys.executable, "-c", "print('http://127.0.0.1:1', flush=True); import time; time.sleep(60)")
    async with launch_servers("queue", ServerPlan(1, command)) as urls:
        assert urls == ["http://127.0.0.1:1"]


async def test_the_launcher_of_runs_of_the_page_on_extending_finds_places(at_desk: Path) -> None:
    place: Any = registry.load_entry("run_launcher", "polite.py:polite")
    async with place(RunPlan(("train",), ranks=2), print) as placement:
        assert [process.name for process in placement.processes] == ["rank 0", "rank 1"]
        assert placement.environment == {"OMP_NUM_THREADS": "1"}
