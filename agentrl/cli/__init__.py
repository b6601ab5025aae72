"""The command line: one file a verb. Only here is anything printed, and only here does the process exit."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from agentrl.errors import UserError, nearest

VERBS = {  # the verb: its module, and what it does
    "train": ("training", "train a model on an environment"),
    "eval": ("evaluation", "measure a model on an environment's held-out tasks"),
    "serve": ("serve", "start a vLLM server for --engine server"),
    "view": ("view", "look at runs in a browser, also while they go on"),
    "report": ("report", "write a run as one HTML file to share"),
    "explain": ("explain", "why an episode or a token was trained as it was"),
    "list": ("catalog", "the environments, tools and models there are"),
    "export": ("export", "write a trained model as a plain one, adapters merged"),
    "check": ("check", "whether a model's chat template can be followed"),
}
USAGE = (
    "usage: agentrl {" + ",".join(VERBS) + "} ...\n\n" + "\n".join(f"  {v:<7} {does}" for v, (_, does) in VERBS.items())
)
FOOTER = "\n\nagentrl VERB --help tells more. Begin with: agentrl train --env math-tools"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE + FOOTER)
        return 0
    if words[0] in ("--version", "-V"):
        from agentrl import __version__

        print(f"agentrl {__version__}")
        return 0
    _quiet_threads()
    try:
        if words[0] not in VERBS:
            raise UserError(f"no command {words[0]!r}{nearest(words[0], VERBS)}")
        status: int = importlib.import_module(f"agentrl.cli.{VERBS[words[0]][0]}").main(words[1:])
        return status
    except UserError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("agentrl: interrupted", file=sys.stderr)
        return 130


def _quiet_threads() -> None:
    """Before torch is imported: idle OpenMP threads sleep instead of spinning on a core that others need."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
