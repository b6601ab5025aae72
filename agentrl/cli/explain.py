"""``agentrl explain``."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import ConfigError, UserError

HELP = """usage: agentrl explain RUN EPISODE [TOKEN]

  agentrl explain runs/last train-3:17        # step 3, the 17th row (from 0) of its file; 3:17 is the same
  agentrl explain runs/last 3:17 150          # its token 150 (from 0)

An episode: what it earned, where its advantage comes from, what was masked and why, its tool calls. A token: who wrote
it, which version of the policy, its logprob, the ratio of the learner's probability to the engine's and what the
settings made of it, why it is masked or what it was trained with. `agentrl view` shows the names of episodes and the
numbers of tokens.
"""


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    if len(words) not in (2, 3):
        raise ConfigError(f"agentrl explain takes: RUN EPISODE [TOKEN]; not {' '.join(words)!r}")
    from agentrl.view import explain
    from agentrl.view.store import open_runs
    from agentrl.view.tokens import Texts

    stores = open_runs(words[:1])
    if len(stores) > 1:
        raise UserError(f"{words[0]!r} holds {len(stores)} runs; name one of them, such as {stores[0].folder}")
    store = stores[0]
    store.refresh()
    if len(words) == 2:
        told = explain.of_episode(store, words[1])
    else:
        told = explain.of_token(store, Texts(store), words[1], _number(words[2]))
    print("\n".join(told))
    return 0


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"TOKEN is the number of a token, from 0, not {text!r}")
    return int(text)
