"""``agentrl check model``: can this model's chat template be followed, token by token?"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import ConfigError

HELP = """usage: agentrl check model NAME [--chat_template FILE]

  agentrl check model nano
  agentrl check model Qwen/Qwen3-0.6B

Says how tools are told to the model, which turns can be appended without changing a token before them, whether the
template drops earlier thinking, and which tokens end a turn.
"""


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    if words[0] != "model" or len(words) not in (2, 4) or (len(words) == 4 and words[2] != "--chat_template"):
        raise ConfigError(f"agentrl check takes: model NAME [--chat_template FILE]; not {' '.join(words)!r}")
    from agentrl import policy
    from agentrl.renderer.template import TemplateRenderer

    tokenizer = policy.load_tokenizer(words[1])
    renderer = TemplateRenderer(tokenizer, policy.read_template(words[3] if len(words) == 4 else None))
    print("\n".join(f"{sentence.rstrip('.')}." for sentence in renderer.verdict().split(". ")))
    return 0
