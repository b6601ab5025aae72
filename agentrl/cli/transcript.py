"""The transcript of an episode that somebody plays: conversation, tools, rewards. Others' text is shown inertly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from agentrl.cli.output import Console
from agentrl.cli.summary import STYLES
from agentrl.play.human_engine import Turn, WireMessage
from agentrl.play.typed_calls import format_signature
from agentrl.types import JsonSchema, Trajectory
from agentrl.view.escaping import escape_controls

PROMPT = "> "


class Transcript:
    """A transcript on the terminal; each message is printed once."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.tools: Sequence[JsonSchema] = ()

    def show(self, turn: Turn) -> None:
        """Print the new messages; at the first turn the tools too."""
        first = len(turn.messages) == len(turn.new)
        for message in turn.new:
            self._message(message)
        if first and turn.tools:
            self.show_tools(turn.tools)
        self.tools = turn.tools

    def show_tools(self, tools: Sequence[JsonSchema]) -> None:
        for tool in tools:
            about = tool["function"].get("description", "").partition("\n")[0]
            self._line("tool", f"{format_signature(tool)}    {about}", "dim")

    def _message(self, message: WireMessage) -> None:
        if message.get("content") or not message.get("tool_calls"):
            name = f" {message['name']}" if message.get("name") else ""
            self._line(f"{message['role']}{name}", message.get("content") or "", STYLES.get(message["role"], ""))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            self._line("call", f"{function.get('name')}({function.get('arguments')})", "cyan")

    def _line(self, who: str, text: str, style: str = "") -> None:
        label = Text(f"{escape_controls(who, newlines=False):<10} ", style="bold dim")
        self.console.print(label.append(Text(escape_controls(text).replace("\n", "\n" + " " * 11), style=style)))

    def hint(self, text: str) -> None:
        if text:
            self.console.print(Text(escape_controls(text), style="yellow"))

    def ask(self) -> None:
        self.console.print(Text(PROMPT, style="bold"), end="")

    def echo(self, line: str) -> None:
        """Print a line that nobody typed."""
        self.console.print(Text(escape_controls(line, newlines=False)))

    def end(self, trajectory: Trajectory) -> None:
        """Print the environment's last messages, and the rewards."""
        for message in _after_the_last_turn(trajectory.messages):
            self._message(dict(message))
        self.console.print()
        if trajectory.fault is not None:
            self._line("fault", f"{trajectory.fault.kind}: {trajectory.fault.message}", "bold red")
            self._line("", "infrastructure error: such an episode is counted, and not trained")
            return
        for name, value in trajectory.rewards.items():
            weight = trajectory.weights.get(name, 1.0)
            counts = "" if weight == 1.0 else f"   (weight {weight:g})"
            self._line("reward", f"{name} {'does not apply' if value is None else f'{value:g}'}{counts}")
        if any(trajectory.step_rewards):
            self._line("steps", " ".join(f"{r:g}" for r in trajectory.step_rewards))
        total = "none: it would be in no mean" if trajectory.reward is None else f"{trajectory.reward:g}"
        turns = f"{trajectory.turns} turn{'s' * (trajectory.turns != 1)}, {trajectory.stop.value}"
        self._line("total", f"{total}, which is what a model would have got   ({turns})", "bold green")


def _after_the_last_turn(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
    return messages[last + 1 :]
