"""The command line: one file a verb. Only here is anything printed, and only here does the process exit."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint

from agentrl import registry
from agentrl.cli.output import silence_when_closed
from agentrl.errors import Interrupted, UserError, nearest
from agentrl.interruption import as_ctrl_c
from agentrl.view.text import visible

VERBS = {  # the verb: its module, and what it does
    "train": ("training", "train a model on an environment"),
    "eval": ("evaluation", "measure a model on an environment's held-out tasks"),
    "compare": ("comparison", "compare evaluations task by task, with paired intervals"),
    "serve": ("serve", "start a vLLM server for --engine server"),
    "serve-tools": ("serve_tools", "serve tools to any MCP client"),
    "rescore": ("rescore", "score a run's stored episodes anew, offline"),
    "replay": ("replay", "play a stored episode again, from its record"),
    "view": ("view", "look at runs in a browser, also while they go on"),
    "report": ("report", "write a run as one HTML file to share"),
    "explain": ("explain", "why an episode or a token was trained as it was"),
    "list": ("catalog", "the environments, tools and models there are"),
    "export": ("export", "write a trained model as a plain one, adapters merged"),
    "check": ("check", "whether an environment, a tool or a model's chat template is sound"),
    "new": ("new", "write a package with an environment or a tool of your own"),
    "play": ("play", "sit in the model's chair, or watch one play"),
}
FOOTER = "\n\nagentrl VERB --help tells more. Begin with: agentrl train --env math-tools"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 2 for a user's mistake, 128 + n after signal n (Ctrl-C 130, SIGTERM 143)."""
    with silence_when_closed(), as_ctrl_c() as came:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        except UserError as error:
            print(f"agentrl: {visible(str(error))}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            by = error.signal if isinstance(error, Interrupted) else (came or [signal.SIGINT])[0]
            print("agentrl: interrupted" + f" by {by.name}" * (by != signal.SIGINT), file=sys.stderr)
            return 128 + by


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage() + FOOTER)
        return 0
    if words[0] in ("--version", "-V"):
        from agentrl import __version__

        print(f"agentrl {__version__}")
        return 0
    _quiet_threads()
    return _main_of(words[0])(words[1:])


def _usage() -> str:
    """The verbs here, and those that packages add under the entry-point group ``agentrl.commands``."""
    added = {name: _does(name, e) for name, e in registry.available("command").items() if name not in VERBS}
    verbs = {name: does for name, (_, does) in VERBS.items()} | added
    lines = "\n".join(f"  {name:<11} {does}" for name, does in verbs.items())
    return f"usage: agentrl {{{','.join(verbs)}}} ...\n\n{lines}"


def _does(name: str, entry: EntryPoint) -> str:
    """The first line of a package's own words on its command; where it has none, whose it is."""
    try:
        told = inspect.getdoc(registry.load("command", name))
    except Exception:  # a package that does not even import is no reason to withhold the help
        told = None
    first = (told or "").partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:] or f"from {entry.dist.name if entry.dist else entry.value}"


def _main_of(verb: str) -> Callable[[Sequence[str]], int]:
    """What runs a verb, given the words after it. Raises UserError for a word that is none."""
    if verb in VERBS:
        main_of_verb: Callable[[Sequence[str]], int] = importlib.import_module(f"agentrl.cli.{VERBS[verb][0]}").main
        return main_of_verb
    added = registry.available("command")
    if verb not in added:
        raise UserError(f"no command {verb!r}{nearest(verb, [*VERBS, *added])}")
    found: Callable[[Sequence[str]], int] = registry.load("command", verb)
    return found


def _quiet_threads() -> None:
    """Before torch is imported: idle OpenMP threads sleep instead of spinning on a core that others need."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
