"""``agentrl export``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import UserError
from agentrl.settings.section import Section

TEXT = """\
  agentrl export runs/last --out my-model
  agentrl export runs/last --out my-model --push_to_hub me/my-model

Writes a plain model and its card: what was trained as an adapter is added to the weights it stood beside. Transformers
and vLLM load the folder as it is. MODEL is what --model takes.
"""


class _ExportOptions(Section):
    out: Path = Field(description="a folder that is empty, or not there yet")
    push_to_hub: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$", description="a name on the hub: USER/NAME")
    public: bool = Field(False, description="anybody may see it there")


def _run(arguments: Arguments[_ExportOptions]) -> int:
    (name,), options = arguments.names, arguments.options
    out = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{str(out)!r} exists and is not an empty folder")
    from agentrl.models import hub

    if options.push_to_hub:
        hub.check_push_token(options.push_to_hub)  # before the work
    from agentrl.models import lora, policy
    from agentrl.models.model_card import format_model_card

    loaded = policy.load_policy(name)
    plain = policy.Policy(lora.merge_adapter(loaded.model), loaded.tokenizer, loaded.source)
    try:
        plain.save(out)
        (out / "README.md").write_text(
            format_model_card(options.push_to_hub or out.name, loaded.source), encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}") from None
    print(f"{name} is in {out}, {sum(p.numel() for p in plain.model.parameters()):,} parameters")
    if options.push_to_hub:
        print(hub.push_to_hub(out, options.push_to_hub, private=not options.public))
    return 0


COMMAND = Command("export", "MODEL --out DIR", TEXT, _run, _ExportOptions, names=(1, 1))
