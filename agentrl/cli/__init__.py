"""The command line: one file a verb, named as the verb.

Nothing is defined here: the modules ``list`` and ``eval`` hide the builtins of those names in this namespace.
"""

from agentrl.cli.dispatch import main

__all__ = ["main"]
