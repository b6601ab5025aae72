"""``agentrl export``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from agentrl.cli.words import flags
from agentrl.config import Section
from agentrl.errors import ConfigError, UserError

HELP = """usage: agentrl export MODEL --out DIR [--push_to_hub USER/NAME [--public true]]

  agentrl export runs/last --out my-model
  agentrl export runs/last --out my-model --push_to_hub me/my-model

Writes a plain model and its card: what was trained as an adapter is added to the weights it stood beside. Transformers
and vLLM load the folder as it is. MODEL is what --model takes.
"""


class Settings(Section):
    out: Annotated[Path, BeforeValidator(str)] = Field(description="a folder that is empty, or not there yet")
    push_to_hub: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$", description="a name on the hub: USER/NAME")
    public: bool = Field(False, description="whether anybody may see it there")


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        fields = Settings.model_fields.items()
        print(HELP + "\n" + "\n".join(f"  --{name:<12} {field.description}" for name, field in fields))
        return 0
    if words[0].startswith("-"):
        raise ConfigError(f"agentrl export takes: MODEL --out DIR; not {' '.join(words)!r}")
    name, settings = words[0], flags(words[1:], Settings)
    out = settings.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{str(out)!r} exists and is not an empty folder")
    from agentrl import hub

    if settings.push_to_hub:
        hub.may_push(settings.push_to_hub)  # said before the work
    from agentrl import lora, policy
    from agentrl.card import card

    loaded = policy.load(name)
    plain = policy.Policy(lora.merged(loaded.model), loaded.tokenizer, loaded.source)
    try:
        plain.save(out)
        (out / "README.md").write_text(card(settings.push_to_hub or out.name, loaded.source), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}") from None
    print(f"{name} is in {out}, {sum(p.numel() for p in plain.model.parameters()):,} parameters")
    if settings.push_to_hub:
        print(hub.push(out, settings.push_to_hub, private=not settings.public))
    return 0
