"""``agentrl export``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ConfigError, UserError

HELP = """usage: agentrl export MODEL --out DIR

  agentrl export runs/last --out my-model

Writes a plain model: what was trained as an adapter is added to the weights it stood beside. Transformers and vLLM
load the folder as it is. MODEL is what --model takes.
"""


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    if len(words) != 3 or words[1] != "--out":
        raise ConfigError(f"agentrl export takes: MODEL --out DIR; not {' '.join(words)!r}")
    name, out = words[0], Path(words[2])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{str(out)!r} exists and is not an empty folder")
    from agentrl import lora, policy

    loaded = policy.load(name)
    plain = policy.Policy(lora.merged(loaded.model), loaded.tokenizer, loaded.source)
    try:
        plain.save(out)
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}") from None
    print(f"{name} is in {out}, {sum(p.numel() for p in plain.model.parameters()):,} parameters")
    return 0
