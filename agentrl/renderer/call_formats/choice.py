"""The choice of a model's call format: written siblings that read what its template writes, or a learnt grammar."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats import CallFormat, harmony, hermes
from agentrl.renderer.call_formats.learning import NotLearnt, learn_grammar
from agentrl.renderer.call_formats.probes import (
    AWKWARD,
    KINDS,
    NAMES,
    REPLY,
    STYLES,
    Call,
    Prober,
    Render,
    Style,
    is_shown,
    make_tools,
)
from agentrl.renderer.call_formats.reader import LearntFormat
from agentrl.renderer.call_formats.response_template import ResponseTemplateFormat
from agentrl.types import JsonSchema

_SIBLINGS: Sequence[CallFormat] = (hermes, harmony)


class Learnt(NamedTuple):
    """A call format with its proof, or the reason why there is none.

    ``limits`` are values that the template does not write so that they can be read back; ``style`` is the way in which
    it takes calls. Where it does not show tools, they are described in words, with a call of its own form.
    """

    form: CallFormat | None
    why: str = ""
    limits: tuple[str, ...] = ()
    style: Style = STYLES[0]
    shows_tools: bool = True


def learn_call_format(
    render: Render,
    marks: Collection[str] = (),
    own: CallFormat | None = None,
    response_template: Mapping[str, Any] | None = None,
) -> Learnt:
    """Learn how a template writes calls, and prove it by reading back what it writes on fresh values.

    Args:
        render: renders messages and tools with the template, bounded; raises TemplateError.
        marks: the tokenizer's added tokens.
        own: the one format to prove, instead of those that are written or learnt.
        response_template: the tokenizer's, for a form that cannot be learnt.
    """
    try:
        shown = is_shown(render, make_tools(keys={"qzkeyq": "string"}))
    except TemplateError as error:
        return Learnt(None, f"it takes no tools: {error}")
    reasons, refusals = list[str](), list[str]()
    for style in STYLES:
        prober, failure = Prober(render, style), ""
        try:
            for form in [own] if own else _list_candidates(prober, marks, response_template if shown else None):
                failure, limits = _try(prober, form)
                if not failure:
                    return Learnt(form, "", limits, style, shown)
        except NotLearnt as error:
            failure = str(error)
        except TemplateError as error:
            refusals.append(str(error))
            continue
        reasons.append(failure)
    return Learnt(None, (reasons + refusals)[0] if shown else "it shows no tools")


def _list_candidates(
    prober: Prober, marks: Collection[str], response_template: Mapping[str, Any] | None
) -> Iterator[CallFormat]:
    yield from _SIBLINGS
    try:
        yield LearntFormat(learn_grammar(prober, marks))
    except NotLearnt:
        if not response_template:
            raise
    if response_template:
        try:
            yield ResponseTemplateFormat(response_template)
        except ValueError as error:
            raise NotLearnt(f"the tokenizer's response_template: {error}") from None


def _try(prober: Prober, form: CallFormat) -> tuple[str, tuple[str, ...]]:
    """Return why a format does not read what the template writes, empty if it does; and what it cannot hold."""
    keys = {f"qz{kind}q": kind for kind in KINDS if kind != "null"}  # some templates know no such type
    tools = make_tools(keys=keys)
    limits = list[str]()
    for arguments in ({"qzstringq": "qzplainq"}, {}, {key: KINDS[kind][1] for key, kind in keys.items()}):
        calls = [{"name": NAMES[1], "arguments": arguments}]
        for content in ("", REPLY):
            if content and NAMES[1] not in prober.render_turn(calls, tools, content).text:
                limits = ["a text before calls"]
            elif failure := _compare(prober, form, calls, tools, content):
                return failure, ()
    pair = [{"name": n, "arguments": {"qzstringq": f"v{n}", "qzintegerq": 12 + i}} for i, n in enumerate(NAMES)]
    try:
        if NAMES[1] not in prober.render_turn(pair, tools).text:
            raise TemplateError("it leaves out all calls but the first")
        if failure := _compare(prober, form, pair, tools, ""):
            return failure, ()
    except TemplateError:
        limits.append("two calls in one turn")
    if _fails(prober, form, {"qznullq": None}, make_tools(keys={"qznullq": "null"})):
        limits.append("null")
    odd = [repr(text.replace("qz", "x")) for text in AWKWARD if _fails(prober, form, {"qzstringq": text}, tools)]
    return "", (*limits, *([f"texts such as {' or '.join(odd)}"] if odd else []))


def _fails(prober: Prober, form: CallFormat, arguments: dict[str, object], tools: Sequence[JsonSchema]) -> bool:
    try:
        return bool(_compare(prober, form, [{"name": NAMES[0], "arguments": arguments}], tools, ""))
    except TemplateError:
        return True


def _compare(prober: Prober, form: CallFormat, calls: Sequence[Call], tools: Sequence[JsonSchema], content: str) -> str:
    """Return what is wrong with reading back the calls that the template wrote; empty if nothing is."""
    text = prober.render_turn(calls, tools, content).text
    found = form.parse(text, tools=tools).tool_calls
    if len(found) != len(calls):
        return f"of {len(calls)} calls that it writes {len(found)} can be read"
    for call, read in zip(calls, found, strict=True):
        if read.error is not None:
            return f"a call that it writes cannot be read: {read.error}"
        if (read.name, dict(read.arguments)) != (call["name"], call["arguments"]):
            return f"a call that it writes is read as another: {read.name} {dict(read.arguments)}"
    return ""
