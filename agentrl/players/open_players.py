"""The players of a run: the controller is opened, its own players are started, others may join."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import anyio

from agentrl.engines.server_keys import LOCAL, create_server_key, remove_server_key
from agentrl.errors import ConfigError, author_errors
from agentrl.gateway.open_gateway import AgentPlan
from agentrl.players.connection import KEY_ENV, Fields, open_listener
from agentrl.players.controller import Controller, open_controller
from agentrl.players.launchers import PlayerPlan
from agentrl.players.recipe import Recipe, describe_class, describe_tokenizer
from agentrl.renderer import Renderer
from agentrl.renderer.structured_outputs import OutputGrammar
from agentrl.rollout.engine_protocol import OpenEngine, TurnServing
from agentrl.settings.registry import load_entry
from agentrl.settings.schema import TrainConfig


def build_recipe(
    config: TrainConfig,
    engine: OpenEngine,
    renderer: Renderer,
    grammar: OutputGrammar | None,
    *,
    tokenizer: Any,
    template: str | None,
    end_tokens: tuple[int, ...],
    agent: AgentPlan | None = None,
) -> Recipe:
    """Build what players are told, of the parts that the run's own renderer is made of.

    Args:
        agent: that plays the episodes, in the players.
    """
    files, contents = describe_tokenizer(tokenizer)
    described = {
        "files": files,
        "name": str(tokenizer.name_or_path),
        "class": describe_class(tokenizer),
        "template": template,
        "end_tokens": list(end_tokens),
        "call_format": config.call_format,
        "words": config.template_words,
        "history": config.history,
        "structured_outputs": dict(config.rollout.structured_outputs),
    }
    fields = {
        "renderer": described,
        "engine": describe_engine(engine, elsewhere=config.players.host not in (None, *LOCAL)),
        "agent": None if agent is None else asdict(agent),
    }
    return Recipe(fields, renderer, contents, grammar)


def describe_engine(engine: OpenEngine, *, elsewhere: bool = False) -> Fields:
    """Describe how players reach an engine: servers by their addresses, any other one through the controller.

    Args:
        elsewhere: whether players may be on other machines, for which an address on loopback is none.
    """
    size = {"capacity": engine.capacity, "max_context": engine.max_context}
    servers = engine.describe_servers() if isinstance(engine, TurnServing) else None
    local = servers is not None and any(urlsplit(url).hostname in LOCAL for url in servers["urls"])
    if servers is not None and not (elsewhere and local):
        return {"kind": "servers", **servers, **size}
    return {"kind": "forwarded", **size}


@asynccontextmanager
async def open_players(config: TrainConfig, recipe: Recipe, engine: OpenEngine) -> AsyncIterator[Controller]:
    """Open the controller, and start the run's own players; all of them end with the block.

    Raises:
        UserError: the address cannot be listened on, or another machine could reach it without a key of the user's.
    """
    host = config.players.host or "127.0.0.1"
    listener = open_listener(host, config.players.port or 0)
    port = listener.getsockname()[1]
    try:
        key = _choose_key(host, port)
    except BaseException:
        listener.close()
        raise
    controller = Controller(recipe, engine, engine.capacity, key, timeout_s=config.players.timeout_s)
    try:
        async with open_controller(controller, listener), _launch(config, controller):
            try:
                yield controller
            finally:
                with anyio.CancelScope(shield=True):
                    await controller.close()  # players end by themselves then
    finally:
        with suppress(OSError):
            remove_server_key(port, key)


def _choose_key(host: str, port: int) -> str:
    if host not in LOCAL and not os.environ.get(KEY_ENV):
        raise ConfigError(
            f"players.host {host} lets other machines in: put a key of your own into ${KEY_ENV}, here and where "
            "players run; what is said is not encrypted: let a proxy or a tunnel do that"
        )
    return create_server_key(port, KEY_ENV)


def _launch(config: TrainConfig, controller: Controller) -> AbstractAsyncContextManager[object]:
    """Start the players that the settings ask for."""
    own = config.players
    if not own.count:
        return nullcontext()
    plan = PlayerPlan(
        own.count,
        (sys.executable, "-m", "agentrl", "player", controller.url, "--wait_s", "0"),
        {KEY_ENV: controller.key},
        controller.url,
        _say_through(controller),
        controller.fail,
    )
    launcher: Any = load_entry("player_launcher", own.launcher)
    with author_errors(f"launcher {own.launcher!r}"):
        launched: AbstractAsyncContextManager[object] = launcher(plan)
    return launched


def _say_through(controller: Controller) -> Callable[[str], None]:
    """Return what says a sentence to whoever listens to the controller at that time."""
    return lambda text: controller.on_message(text)
