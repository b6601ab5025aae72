"""The recipe of a player's rollouts: how it makes the renderer and reaches the engine. It is told as the player joins.

Of the tokenizer a player is sent the files, so that it needs no model, and no name on a hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.errors import UserError
from agentrl.gateway.open_gateway import AgentPlan
from agentrl.models.call_formats import build_call_format
from agentrl.renderer import Renderer
from agentrl.renderer.structured_outputs import OutputGrammar
from agentrl.settings.registry import import_object

_LARGEST = 256 << 20  # bytes of a tokenizer
_LIBRARY = "transformers."


@dataclass(frozen=True)
class Recipe:
    """The recipe: what a player is told, and what the controller itself has of it.

    Args:
        fields: of the welcome: ``renderer``, ``engine`` and ``agent``, as plain data.
        body: the bytes behind it: the tokenizer's files.
        renderer: the run's own.
        grammar: of every turn, where the run has one.
    """

    fields: Mapping[str, Any]
    renderer: Renderer
    body: Sequence[bytes] = ()
    grammar: OutputGrammar | None = field(default=None)


def read_agent(described: Mapping[str, Any] | None) -> AgentPlan | None:
    """Return the agent that a welcome describes; None where the episodes are the framework's own."""
    if described is None:
        return None
    lists = {name: tuple(described[name]) for name in ("readable", "hidden")}
    return AgentPlan(**{**described, **lists})


def describe_tokenizer(tokenizer: Any) -> tuple[list[tuple[str, int]], list[bytes]]:
    """Return the names and sizes of a tokenizer's files, and their contents. Raises UserError: it is too large."""
    with TemporaryDirectory(prefix="agentrl-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(f for f in Path(folder).rglob("*") if f.is_file())
        contents = [f.read_bytes() for f in files]
        names = [str(f.relative_to(folder)) for f in files]
    if sum(map(len, contents)) > _LARGEST:
        raise UserError(f"the tokenizer has {sum(map(len, contents)):,} bytes, more than a player is sent")
    return [(name, len(content)) for name, content in zip(names, contents, strict=True)], contents


def build_renderer(described: Mapping[str, Any], body: bytes) -> tuple[Renderer, OutputGrammar | None]:
    """Build the renderer that a welcome describes, and the grammar of every turn, where there is one.

    Raises:
        UserError: something that it names cannot be imported here.
    """
    if "import" in described:
        renderer: Renderer = import_object("renderer", described["import"])()
        return renderer, None
    from agentrl.renderer.template import TemplateRenderer

    with TemporaryDirectory(prefix="agentrl-tokenizer-") as folder:
        at = 0
        for name, size in described["files"]:
            path = (Path(folder) / name).resolve()
            if Path(folder).resolve() not in path.parents:
                raise UserError(f"the controller sent a file of the tokenizer with the name {name!r:.80}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body[at : at + size])
            at += size
        tokenizer = _load_tokenizer(described["class"], folder)
    tokenizer.name_or_path = described["name"]
    template = TemplateRenderer(
        tokenizer,
        described["template"],
        described["end_tokens"],
        build_call_format(described["call_format"]),
        described["words"],
        described["history"],
    )
    rules = described["structured_outputs"]
    grammar = OutputGrammar(tokenizer, template.get_stop_token_ids(), rules) if rules else None
    return template, grammar


def describe_class(tokenizer: Any) -> str:
    """Return where a tokenizer's class is imported from; empty where it is none of transformers'."""
    cls = type(tokenizer)
    return f"{cls.__module__}:{cls.__qualname__}" if cls.__module__.startswith(_LIBRARY) else ""


def _load_tokenizer(name: str, folder: str) -> Any:
    """Load a tokenizer from its files; of a class of transformers, without torch, whose import takes a second."""
    module, _, cls = name.partition(":")
    if module.startswith(_LIBRARY):
        with suppress(ImportError, AttributeError):  # of another version of transformers
            return getattr(import_module(module), cls).from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
