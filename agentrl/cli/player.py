"""``agentrl player``."""

from __future__ import annotations

import os
import sys

import anyio
from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.engines.server_keys import find_server_key
from agentrl.errors import UserError
from agentrl.settings.section import Section
from agentrl.view.escaping import escape_controls

TEXT = """\
  agentrl player http://127.0.0.1:7000
  AGENTRL_PLAYER_KEY=... agentrl player https://controller.example.org --name rack-3

Rolls out groups for a run that listens for players: agentrl train ... --players.port 7000. The run says which tasks,
and has the policy; environments, tools and rewards are imported here, by the names that the run has for them, from the
folder that the player is started in. It may start before the run, and join at any time; Ctrl-C or SIGTERM hands its
groups to the other players.
"""


class _PlayerOptions(Section):
    name: str | None = Field(
        None, description="that the run's messages call it by; the machine's and a number by default"
    )
    wait_s: float = Field(600.0, ge=0, description="seconds to try for where no run answers; 0: not, nor join again")


def _run(arguments: Arguments[_PlayerOptions]) -> int:
    from agentrl.players.connection import KEY_ENV, split_url
    from agentrl.players.player import choose_name, play

    (url,) = arguments.names
    own = arguments.options
    split_url(url)  # which may refuse it
    given = os.environ.get(KEY_ENV)
    if not (given or find_server_key(url, KEY_ENV)):
        raise UserError(
            f"there is no key for {url}: put the run's into the environment variable {KEY_ENV} (on the run's own "
            "machine its user needs none, once the run has begun)"
        )
    key = given or (lambda: find_server_key(url, KEY_ENV) or "")  # a run that begins again draws another one
    by = anyio.run(play, url, key, own.name or choose_name(), own.wait_s, _say)
    return 128 + by if by else 0  # whoever started it knows a run's end from its own


def _say(text: str) -> None:
    print(f"agentrl: {escape_controls(text)}", file=sys.stderr, flush=True)


COMMAND = Command("player", "URL [--name NAME] [--wait_s N]", TEXT, _run, _PlayerOptions, names=(1, 1))
