"""The page of `agentrl check model`: a verdict, how the template writes, and a conversation token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentrl.cli.output import Console
from agentrl.renderer.description import Description
from agentrl.renderer.shown_conversation import ShownConversation, Token
from agentrl.view.escaping import escape_controls

STYLES = {"prompt": "blue", "model": "green", "env": "magenta"}
_SHOWN = 500  # tokens of a segment; its middle is left out beyond
_MARGIN = 9


def print_page(
    console: Console, name: str, found: Description, words: Mapping[str, str], shown: ShownConversation
) -> bool:
    """Print what was found out about a model's template. Return False if it cannot be trained over several turns."""
    obstacle = found.find_obstacle() or shown.problem
    limits = [] if obstacle else found.list_limits()
    console.print(Text(_format_verdict(name, obstacle, limits), style=_choose_style(obstacle, limits)))
    for limit in limits:
        console.print(Text("- ").append(limit))
    console.print()
    for title, text, example in _list_facts(found, words, shown):
        row = Table.grid(padding=(0, 2))
        row.add_column(width=_MARGIN)
        row.add_column(overflow="fold")
        cell: list[RenderableType] = [Text(text)]
        row.add_row(Text(title, style="bold"), Group(*cell, *([Padding(Text(example), (0, 2))] if example else [])))
        console.print(row)
    console.print()
    _print_conversation(console, shown)
    return not obstacle


def print_refusal(console: Console, name: str, why: str) -> None:
    """Print that a model cannot be trained at all."""
    console.print(Text(f"{name} cannot be trained: {why}", style="bold red"))


def _format_verdict(name: str, obstacle: str, limits: Sequence[str]) -> str:
    if obstacle:
        return f"{name} cannot be trained over more than one turn: {obstacle}"
    return f"{name} is trained with these limits:" if limits else f"{name} is trained as it is."


def _choose_style(obstacle: str, limits: Sequence[str]) -> str:
    return "bold red" if obstacle else "bold yellow" if limits else "bold green"


def _list_facts(
    found: Description, words: Mapping[str, str], shown: ShownConversation
) -> Iterator[tuple[str, str, str]]:
    """Yield a title, a sentence, and an example or none."""
    if found.choice:
        yield "template", found.choice, ""
    yield "calls", found.describe_calls(), escape_controls(shown.call.strip())
    yield "thoughts", found.describe_thoughts(), ""
    for turns in found.forgotten:
        yield "", found.describe_forgotten(turns), ""
    if found.opens_thought:
        yield "", "It opens a thought: a turn that never ends it has no answer.", ""
    if words:
        settings = (f"--template.{w}{f' {default}, by default' if default else ''}" for w, default in words.items())
        yield "words", "The template reads:", "\n".join(settings)
    else:
        yield "words", "The template reads no words beside the conversation.", ""
    yield "ends", f"A turn ends with {' or '.join(found.ends)}.", ""
    yield "fences", found.describe_fences(), ""
    verified = [turns for turns, why in found.appended.items() if not why]
    if verified:
        yield "turns", f"Appending {' and '.join(verified)} is verified: what is before stays as it is.", ""


def _print_conversation(console: Console, shown: ShownConversation) -> None:
    count = sum(len(tokens) for _, tokens in shown.segments)
    if not count:
        return
    separator = "·" if console.encoding.startswith("utf") else "|"
    title = Text(f"One conversation, {count} tokens: ")
    contexts = sum(author == "prompt" for author, _ in shown.segments)
    prompts = "the first prompt" if contexts == 1 else f"what each of {contexts} contexts begins with"
    for author, what in (("prompt", prompts), ("model", "sampled and trained"), ("env", "what comes after")):
        title.append(f"[{author}]", STYLES[author]).append(f" {what}{', ' if author != 'env' else ''}")
    console.print(title)
    for author, tokens in shown.segments:
        label = f"[{author}]"
        for line in _wrap(tokens, STYLES[author], separator, max(console.width - _MARGIN - 1, 20)):
            console.print(Text(f"{label:<{_MARGIN}}", style=STYLES[author]).append_text(line), soft_wrap=True)
            label = ""


def _wrap(tokens: Sequence[Token], style: str, separator: str, width: int) -> Iterator[Text]:
    """Yield lines of tokens; one ends behind a token with a line end, or where the next token has no room."""
    left_out = len(tokens) - _SHOWN
    line = Text()
    for at, (text, is_control) in enumerate(tokens):
        if left_out > 0 and _SHOWN // 2 <= at < _SHOWN // 2 + left_out:
            if at == _SHOWN // 2:
                yield line
                yield Text(f"... {left_out:,} tokens ...", style="dim")
                line = Text()
            continue
        token = escape_controls(text, newlines=False)
        if line and line.cell_len + cell_len(token) + 1 > width:
            yield line
            line = Text()
        line.append(token, f"bold {style}" if is_control else style).append(separator, "dim")
        if "\n" in text:
            yield line
            line = Text()
    if line:
        yield line
