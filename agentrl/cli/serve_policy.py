"""``agentrl serve-policy``."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import anyio
from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.cli.output import Console, print_line, show_loading
from agentrl.errors import ConfigError, UserError, suggest
from agentrl.runs.folder import RunFolder, name_run_folder, open_run_folder
from agentrl.runtime.door import LOCAL, TOKEN_HELP, Door, choose_token
from agentrl.runtime.threads import open_task_group, run_in_thread
from agentrl.settings.loader import dump_toml, flatten
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.tools.offered_tools import OfferedTools
from agentrl.types import Trajectory

if TYPE_CHECKING:
    from agentrl.gateway.policy_server import PolicyServer
    from agentrl.resources import Sampler
    from agentrl.rollout.episode import EpisodeContext

TEXT = """\
  agentrl serve-policy runs/last
  agentrl serve-policy runs/last --port 8001 --rollout.temperature 0.7
  agentrl serve-policy HuggingFaceTB/SmolLM2-135M-Instruct --engine vllm

Serves a policy for any client: OpenAI's chat completions and Responses, Anthropic's messages, with tools and streams.
The URL and the token are printed; the token is the API key. What a client says of its sampling is followed; what it
leaves out is that of --rollout. Every conversation is recorded, token by token: agentrl view FOLDER shows them, while
the server runs too. An API key TOKEN.NAME, or a header X-Session-ID, makes one episode of all that has the name.
"""
LOOPBACK = "127.0.0.1"
SETTINGS = ("dtype", "load", "call_format", "chat_template", "template", "seed", "engine", "rollout", "lora")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "max_tokens", "max_episode_tokens")
GRACE_S = 1  # seconds for what is being answered when the server ends
UNSCORED = "served"  # stands for an environment: nobody gave the task, and nobody scores it


class _ServePolicyOptions(Section):
    port: int = Field(0, ge=0, le=65535, description="to listen on; 0: a free one")
    host: str = Field(LOOPBACK, description="address to listen on; other than loopback: for other machines too")
    token: str | None = Field(None, description=TOKEN_HELP.replace("of the URL", "the API key"))
    out: str | None = Field(None, description="folder of what is recorded; served/DATE-TIME-MODEL by default")
    idle_s: float = Field(600.0, gt=0, description="seconds until a conversation that nobody goes on with is over")


def _run(arguments: Arguments[_ServePolicyOptions]) -> int:
    from agentrl.models.policy import build_model_config

    own, (source, given) = arguments.options, arguments.settings
    (model,) = arguments.names
    _check_settings(given)
    token = choose_token(own.token)
    if not token and own.host not in LOCAL:
        raise ConfigError(
            f"--host {own.host} lets other machines in: they need a token; leave --token out, or give one"
        )
    config = build_model_config(("serve-policy", {"env": UNSCORED, "model": model}), (source, given))
    console = Console(stderr=True)
    with closing(_listen(own.host, own.port)) as listener:
        with show_loading(console):
            try:
                import uvicorn  # noqa: F401

                from agentrl.resources import build_sampler  # brings torch
            except ImportError as error:
                raise UserError(
                    f"agentrl serve-policy needs the extra gateway: pip install 'agentrl-gym[gateway]' ({error})"
                ) from None
            sampler = build_sampler(config)
        folder = _open_folder(own.out, sampler.config)
        try:
            served = anyio.run(_serve, own, sampler, listener, token, folder)
        finally:
            folder.close()
    print_line(console, f"{served} conversations are in {folder.folder}: agentrl view {folder.folder}")
    return 0


def _check_settings(given: Mapping[str, Any]) -> None:
    """Refuse settings that would do nothing, by a ConfigError."""
    for name in flatten(given):
        head, _, rest = name.partition(".")
        if head not in SETTINGS or (head == "rollout" and rest not in SAMPLING):
            known = [s for s in SETTINGS if s != "rollout"] + [f"rollout.{s}" for s in SAMPLING]
            known += _ServePolicyOptions.model_fields
            raise ConfigError(f"{name} does nothing for a policy that is served{suggest(name, known)}")


def _listen(host: str, port: int) -> socket.socket:
    """Open a socket. Raises UserError: the address is none of this machine, or the port is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with closing(socket.socket(family, proto=socket.IPPROTO_TCP)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)
            return listener.dup()
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}; give another --port") from None


def _open_folder(out: str | None, config: TrainConfig) -> RunFolder:
    """Make the folder for what is recorded. Raises UserError: it cannot be written, or holds something."""
    from pathlib import Path

    path = Path(out) if out else name_run_folder("served", Path(config.model).resolve().name)

    def check() -> None:
        if (path / "config.toml").exists():
            raise UserError(f"{str(path)!r} holds a run already; give another --out")

    return open_run_folder(path, dump_toml(config), check, "--out")


async def _serve(
    own: _ServePolicyOptions, sampler: Sampler, listener: socket.socket, token: str, folder: RunFolder
) -> int:
    """Serve until Ctrl-C or SIGTERM; return how many conversations were recorded."""
    import uvicorn

    from agentrl.gateway.policy_server import PolicyServer
    from agentrl.runtime.loopback_server import LoopbackServer

    async with sampler.engine:
        context = _build_context(sampler)
        recorder = _Recorder(folder, context.offered_tools)
        server = PolicyServer(
            context,
            recorder.record,
            token,
            model=sampler.config.model,
            idle_s=own.idle_s,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        local = own.host in LOCAL
        door = Door(cast(Any, server.build_app()), "", hint="", hosts=LOCAL if local else (), same_origin=False)
        web = LoopbackServer(
            uvicorn.Config(
                cast(Any, door),
                log_level="warning",
                lifespan="off",
                timeout_keep_alive=600,
                timeout_graceful_shutdown=2 * GRACE_S,
            )
        )
        async with open_task_group() as tasks:
            tasks.start_soon(_end_at_signal, web, server)
            tasks.start_soon(server.watch)
            _print_address(own.host, listener, token, folder)
            await web.serve(sockets=[listener])
            tasks.cancel_scope.cancel()
        await server.end_all()
        recorder.finish(server)
    return server.recorded


def _build_context(sampler: Sampler) -> EpisodeContext:
    from dataclasses import replace

    from agentrl.environments.env import Env
    from agentrl.environments.spec import EnvSpec
    from agentrl.rollout.rollout import Rollout

    rollout = Rollout.from_config(sampler.config.rollout, EnvSpec(Env), sampler.engine, sampler.renderer, UNSCORED)
    rollout.sampling = replace(rollout.sampling, grammar=sampler.grammar, seed=sampler.config.seed)
    return rollout


async def _end_at_signal(web: Any, server: PolicyServer) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            web.should_exit = True
            await anyio.sleep(GRACE_S)
            server.stop()


def _print_address(host: str, listener: socket.socket, token: str, folder: RunFolder) -> None:
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}"
    shown = token or "WORD"
    told = "" if token else "any WORD will do; requests with the same one are one episode\n"
    print(
        f"OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={shown}\n"
        f"ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY={shown}\n{told}"
        f"recorded in {folder.folder}; Ctrl-C ends it",
        flush=True,
    )


class _Recorder:
    """Writes conversations into a folder, a file each time."""

    def __init__(self, folder: RunFolder, offered_tools: OfferedTools) -> None:
        self.folder, self.offered_tools = folder, offered_tools
        self.files, self.began = 0, time.monotonic()

    async def record(self, conversations: Sequence[Trajectory]) -> None:
        """Write conversations. Raises UserError: the disk is full or read-only."""
        from agentrl.credit import record_served

        step = self.files
        await run_in_thread(lambda: self.folder.write_trajectories(step, record_served(conversations), UNSCORED))
        self.folder.log({"step": step, "clock/elapsed": time.monotonic() - self.began})
        self.folder.write_tools(self.offered_tools)
        self.files += 1  # what failed is written again

    def finish(self, server: PolicyServer) -> None:
        """Write the summary."""
        self.folder.write_summary(
            {"kind": UNSCORED, "model": server.model, "conversations": server.recorded, "requests": server.answered}
        )


COMMAND = Command(
    "serve-policy",
    "MODEL [--port N] [--host HOST] [--token T] [--out DIR] [--SETTING VALUE ...]",
    TEXT,
    _run,
    _ServePolicyOptions,
    names=(1, 1),
    settings=lambda name: name.partition(".")[0] in SETTINGS[:-2] or name.removeprefix("rollout.") in SAMPLING,
)
