"""``agentrl explain``."""

from __future__ import annotations

from agentrl.cli.arguments import Arguments, Command, NoOptions
from agentrl.errors import ConfigError, UserError

TEXT = """\
  agentrl explain runs/last train-3:17        # step 3, the 17th row (from 0) of its file; 3:17 is the same
  agentrl explain runs/last 3:17 150          # its token 150 (from 0)

Of an episode: what it earned, where its advantage comes from, what was masked and why, its tool calls. Of a token: who
wrote it, which version of the policy, its logprob, the ratio of the learner's probability to the engine's and what the
settings made of it, why it is masked or what it was trained with. `agentrl view` shows the names of episodes and the
numbers of tokens.
"""


def _run(arguments: Arguments[NoOptions]) -> int:
    from agentrl.runs.reader import parse_episode_id
    from agentrl.view import explain
    from agentrl.view.store import open_runs
    from agentrl.view.tokens import TokenTexts

    run, episode, *token = arguments.names
    stores = open_runs([run])
    if len(stores) > 1:
        raise UserError(f"{run!r} holds {len(stores)} runs; name one of them, such as {stores[0].folder}")
    store = stores[0]
    where = parse_episode_id(episode)
    store.read_step(where.split, where.step)
    if token:
        lines = explain.explain_token(store, TokenTexts(store), episode, _parse_number(token[0]))
    else:
        lines = explain.explain_episode(store, episode)
    print("\n".join(lines))
    return 0


def _parse_number(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"TOKEN is the number of a token, from 0, not {text!r}")
    return int(text)


COMMAND = Command("explain", "RUN EPISODE [TOKEN]", TEXT, _run, NoOptions, names=(2, 3))
