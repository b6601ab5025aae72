"""``agentrl train --launcher ...``: the command whose run is other processes, here or on a cluster."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli import serve
from agentrl.cli.arguments import Arguments
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.launch.run_process import RunPlan, Write
from agentrl.launch.supervisor import supervise
from agentrl.models.policy import build_model_config
from agentrl.runs.folder import name_run_folder
from agentrl.settings.catalogue import describe_algorithm
from agentrl.settings.loader import Layer, flatten
from agentrl.settings.schema import TrainConfig

if TYPE_CHECKING:
    from agentrl.cli.train import TrainOptions

_SOMEWHERE = "http://127.0.0.1:1"  # of servers that are not started yet
_DECODER = codecs.getincrementaldecoder("utf-8")
_LINE_END = re.compile(rb"[\r\n]")
_LONGEST_LINE = 1 << 16
_CHOSEN = ("model", "dtype", "host", "port", "api_key_env")  # of servers: by the run, or by where they are


def launch_run(
    arguments: Arguments[TrainOptions], launcher: str, build_layers: Callable[[Arguments[Any]], list[Layer]]
) -> int:
    """Start the processes of a run, show what the first of its ranks writes, and return the exit status of that one."""
    own = arguments.options
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"--launcher {launcher} starts the learner's processes itself, and this is one of "
            f"{os.environ['WORLD_SIZE']} that torchrun, srun or mpirun started: leave one of the two out"
        )
    servers = [("--servers", {"engine": {"name": "server", "urls": [_SOMEWHERE]}})] if own.servers else []
    _check(own, _list_given(arguments.layers))
    layers = build_layers(replace(arguments, files=[*arguments.files, *servers]))  # a run's old addresses do not matter
    with _standing_in(own.ranks):
        config = build_model_config(*layers, *servers)
    EnvSpec.from_config(config)
    describe_algorithm(config)
    plan = replace(_build_plan(arguments, config), given=_list_given(layers), options=_list_options(own))
    return supervise(plan, launcher, _relay, _say)


@contextmanager
def _standing_in(ranks: int) -> Iterator[None]:
    """Read settings as each of the ranks does, whose first one tells what it made of them."""
    before = {name: os.environ.pop(name, None) for name in ("WORLD_SIZE", "RANK")}
    os.environ.update(WORLD_SIZE=str(ranks), RANK="1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _list_given(layers: Sequence[Layer]) -> dict[str, object]:
    """List the settings that layers give, by their dotted names."""
    return {name: value for _, layer in layers for name, value in flatten(layer).items()}


def _list_options(own: TrainOptions) -> tuple[str, ...]:
    """List the launcher's options that were given, as they are typed."""
    given = own.model_dump(include=own.model_fields_set - {"resume", "trust"})
    return tuple(word for name, value in flatten(given).items() for word in (f"--{name}", _spell(value)))


def _check(own: TrainOptions, given: Mapping[str, object]) -> None:
    """Refuse what the launcher's servers do not go together with."""
    others = [n for n in ("engine", "engine.name", "engine.urls") if given.get(n, "server") not in ("auto", "server")]
    if own.servers and others:
        raise ConfigError(
            f"--servers {own.servers} starts the servers that the run samples from: leave out {others[0]}, "
            f"which is {given[others[0]]!r}"
        )
    if own.serve and not own.servers:
        raise ConfigError("--serve is of the servers that --servers starts, and there are none")
    if chosen := [name for name in _CHOSEN if name in own.serve]:
        raise ConfigError(f"--serve.{chosen[0]} is the run's own, or the launcher's choice: leave it out")


def _build_plan(arguments: Arguments[TrainOptions], config: TrainConfig) -> RunPlan:
    own = arguments.options
    folder = Path(config.run.dir) if config.run.dir else name_run_folder("runs", config.env["name"])
    resumes = ["--resume", str(folder)] if own.resume else []  # what runs/last is now: another run may move that link
    command = ["train", *(name for name, _ in arguments.files), *resumes, *(["--trust"] if own.trust else [])]
    command += [*arguments.setting_arguments, *([] if own.resume else ["--run.dir", str(folder.absolute())])]
    serving = _choose_serving(own, config)
    return RunPlan(
        tuple(command),
        tuple(serving),
        ranks=own.ranks,
        servers=own.servers,
        players=config.players.count,
        cpus=own.cpus,
        server_gpus=int(own.serve.get("tp", 1)) * int(own.serve.get("dp", 1)),
        require_gpus=own.require_gpus,
        max_restarts=own.max_restarts,
        wait_s=own.wait_s,
        folder=str(Path.cwd()),
    )


def _choose_serving(own: TrainOptions, config: TrainConfig) -> list[str]:
    """Choose the arguments of a server: the run's model and limits, and what the user adds. Raises ConfigError."""
    if not own.servers:
        return []
    from agentrl.engines.vllm.launchers import plan_servers

    _, _, _, *command = plan_servers(config, own.servers).command
    command += [word for name, value in flatten(own.serve).items() for word in (f"--{name}", _spell(value))]
    serve.COMMAND.parse(command[1:])
    return command


def _spell(value: object) -> str:
    """Spell a value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _relay(name: str) -> Write:
    """Return what shows the output of a process: the first rank's as it is, lines of others with their name."""
    return _Shown().write if name == "rank 0" else _NamedLines(name).write


class _Shown:
    """Text of a process, shown as it comes, in whatever parts."""

    def __init__(self) -> None:
        self._decoders = {name: _DECODER(errors="replace") for name in ("out", "err")}

    def write(self, stream: str, data: bytes) -> None:
        if text := self._decoders[stream].decode(data):
            out = sys.stdout if stream == "out" else sys.stderr
            out.write(text)
            out.flush()


class _NamedLines:
    """Whole lines of a process, each with its name before it; what a progress bar writes anew is a line too."""

    def __init__(self, name: str) -> None:
        self._name, self._left = name, {"out": b"", "err": b""}

    def write(self, stream: str, data: bytes) -> None:
        *lines, left = _LINE_END.split(self._left[stream] + data)
        if len(left) > _LONGEST_LINE:
            lines, left = [*lines, left], b""
        self._left[stream] = left
        for line in filter(None, lines):
            _say_line(f"[{self._name}] {line.decode(errors='replace')}")


def _say(sentence: str) -> None:
    _say_line(f"agentrl: {sentence}")


def _say_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
