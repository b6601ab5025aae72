"""Descriptions of chat templates, in words for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.renderer.plain_fences import OTHER
from agentrl.renderer.thoughts import Thoughts
from agentrl.settings.template import History


@dataclass(frozen=True, slots=True)
class Description:
    """The findings about a chat template.

    Args:
        native: it writes calls that can be read, and takes results.
        form: the name of its call format.
        why: why there is no call format of its own, if there is a reason to name.
        reads_calls: it writes calls that can be read.
        shows_tools: it shows tools.
        unheld: what its calls cannot hold.
        system: it has a system role.
        appended: why turns of a kind cannot be appended, by the kind; empty where they can.
        forgotten: the kinds of turns behind which it drops earlier thoughts.
        fences: in plain text.
        ends: the tokens that end a turn.
        choice: which of the model's templates are taken; empty where it has one.
        history: what becomes of earlier turns, as `template.history` says.
        rewritten: why a conversation that goes on with turns of a kind cannot be rendered anew; empty where it can.
    """

    native: bool
    form: str
    why: str
    reads_calls: bool
    shows_tools: bool
    unheld: Sequence[str]
    system: bool
    appended: Mapping[str, str]
    forgotten: Sequence[str]
    thoughts: Thoughts
    opens_thought: bool
    fences: Sequence[str]
    ends: Sequence[str]
    choice: str = ""
    history: History = "as_sampled"
    rewritten: Mapping[str, str] = field(default_factory=dict)

    def list_sentences(self) -> list[str]:
        """List the sentences of a verdict."""
        return [
            *([self.choice] if self.choice else []),
            self.describe_calls(),
            *([] if self.system else ["The system prompt goes in front of the first user turn."]),
            *(
                f"Appending {turns} fails: {why}.{self._describe_rewriting(turns)}"
                if why
                else f"Appending {turns} is verified."
                for turns, why in self.appended.items()
            ),
            *(self.describe_forgotten(turns) for turns in self.forgotten),
            *(["It opens a thought: a turn that never ends it has no answer."] if self.opens_thought else []),
            self.describe_fences(),
            f"A turn ends with {' or '.join(self.ends)}.",
        ]

    def list_limits(self) -> list[str]:
        """List in sentences what cannot be as the model's own template would have it."""
        calls = [] if self.native and self.shows_tools and not self.unheld else [self.describe_calls()]
        system = (
            [] if self.system else ["It has no system role: the system prompt goes in front of the first user turn."]
        )
        kept = [] if self.history == "as_template" else self.forgotten
        return [*calls, *system, *(self.describe_forgotten(turns) for turns in kept)]

    def find_obstacle(self) -> str:
        """Return why an episode cannot go on behind its first turn; empty where it can."""
        for turns, why in self.appended.items():
            if why and not (self.history == "as_template" and not self.rewritten.get(turns, why)):
                return f"{why}.{self._describe_rewriting(turns)}".removesuffix(".")
        return ""

    def describe_calls(self) -> str:
        named = f" ({self.form})" if self.form else ""
        if not self.native:
            why = f" ({self.why})" if self.why else ""
            if self.reads_calls:
                return f"The template takes no results{why}, so tools, calls and results are text of its form{named}."
            known = f"writes no tool calls that can be read{why}" if self.shows_tools else "knows no tools"
            form = f", and calls are in the form {self.form}" if self.form else ""
            return f"The template {known}: tools are described in the system prompt{form}."
        unread = f" It cannot hold {', '.join(self.unheld)}." if self.unheld else ""
        shown = "" if self.shows_tools else " It shows no tools: they are described in the system prompt."
        return f"Tool calls are in the template's own form{named}.{unread}{shown}"

    def describe_thoughts(self) -> str:
        """Describe the marks of a thought, and the field of a message that the template reads it from."""
        marks, field = self.thoughts.marks, self.thoughts.field
        written = f"{marks.opening} ... {marks.ending}".replace("\n", "\\n")
        if not field:
            return f"{written} in the text; the template has no field for them."
        where = "blocks of the content" if field == "content" else f"the field {field}"
        return f"{written}, which the template writes from {where}."

    def describe_forgotten(self, turns: str) -> str:
        if self.history == "as_template":
            return (
                f"The template drops earlier thinking before {turns}: there the episode goes on in another context, "
                "without it (template.history as_template)."
            )
        return (
            f"The template would drop earlier thinking before {turns}; what was sampled stays in the context "
            "(--template.history as_template goes on in another one, without it)."
        )

    def _describe_rewriting(self, turns: str) -> str:
        """Describe the way out of turns that cannot be appended, if there is one."""
        if self.rewritten.get(turns, "not tried"):
            return ""
        if self.history == "as_template":
            return f" Each of the {turns} begins another context, rendered anew."
        return " With --template.history as_template another context begins there, rendered anew."

    def describe_fences(self) -> str:
        fences = ", ".join(repr(fence) if "\n" in fence else fence for fence in self.fences)
        if not fences:
            return "All that stands round a text is control tokens."
        return f"Plain text stands round a text, and is broken where others write it: {fences.replace(OTHER, '...')}."
