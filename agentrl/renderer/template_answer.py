"""The answers of a bounded worker that renders chat templates: one piece, the text, or the words as JSON.

A question has ``template``, Jinja's source, and ``values``, what it gets; without those, it asks for the words that the
template reads, each with its default. The surroundings are those of transformers'
``render_jinja_template``: a sandbox in which nothing can be changed, with ``tojson``, ``raise_exception`` and
``strftime_now``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST = 16 << 20  # characters


class _Generation(jinja2.ext.Extension):
    """The tag ``generation``, by which a template marks what the model writes; here its body is all there is to it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


def answer_question(question: dict[str, Any]) -> Iterator[bytes]:
    """Yield the rendered text, or the words. Raises what the template raises."""
    if "values" not in question:
        yield json.dumps(_list_words(question["template"])).encode()
        return
    text = _compile(question["template"]).render(**question["values"])
    if len(text) > _LONGEST:
        raise MemoryError
    yield text.encode("utf-8", "surrogatepass")


def _list_words(source: str) -> dict[str, Any]:
    """Return the words that a template reads and does not make, each with the default that it gives it, as text."""
    environment = _build_environment()
    tree = environment.parse(source)
    names = meta.find_undeclared_variables(tree) - environment.globals.keys() - _find_made(tree)
    words = dict.fromkeys(sorted(names), "")
    for word, default in _find_defaults(tree):
        if word in words:
            words[word] = words[word] or default
    return words


def _find_made(tree: nodes.Template) -> set[str]:
    """Return the words that a template sets to something of its own, and not to their defaults alone."""
    fallbacks: set[int] = set()  # the assignments that give a word its default
    for node in tree.find_all(nodes.If):
        if tested := _tested(node.test):
            inner = [n for part in (*node.body, *node.else_) for n in (part, *part.find_all(nodes.Assign))]
            fallbacks |= {id(n) for n in inner if isinstance(n, nodes.Assign) and _target(n) == tested[0]}
    return {
        _target(made)
        for made in tree.find_all(nodes.Assign)
        if id(made) not in fallbacks
        and _target(made) not in {name.name for name in made.node.find_all(nodes.Name)}
        and not (isinstance(made.node, nodes.Name) and made.node.name == _target(made))
    } | {block.target.name for block in tree.find_all(nodes.AssignBlock) if isinstance(block.target, nodes.Name)}


def _target(made: nodes.Assign) -> str:
    return made.target.name if isinstance(made.target, nodes.Name) else ""


def _find_defaults(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    """Yield words with their defaults: ``x | default(1)``, ``x if x is defined else 1``, ``set x`` if it is not."""
    for node in tree.find_all((nodes.Filter, nodes.CondExpr, nodes.If)):
        if isinstance(node, nodes.Filter) and node.name in ("default", "d") and isinstance(node.node, nodes.Name):
            yield node.node.name, _format(node.args[0] if node.args else None)
        elif isinstance(node, nodes.CondExpr) and (tested := _tested(node.test)):
            yield tested[0], _format(node.expr2 if tested[1] else node.expr1)
        elif isinstance(node, nodes.If) and (tested := _tested(node.test)):
            body = node.else_ if tested[1] else node.body
            yield from (
                (tested[0], _format(n.node)) for n in body if isinstance(n, nodes.Assign) and _target(n) == tested[0]
            )


def _tested(test: nodes.Node) -> tuple[str, bool] | None:
    """Return the word that a test is about, and whether the test holds where it is defined."""
    holds = True
    while isinstance(test, nodes.Not):
        test, holds = test.node, not holds
    if isinstance(test, nodes.Test) and test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name):
        return test.node.name, holds == (test.name == "defined")
    return None


def _format(value: nodes.Node | None) -> str:
    try:
        return json.dumps(value.as_const()) if isinstance(value, nodes.Expr) else ""
    except (nodes.Impossible, TypeError, ValueError):
        return ""


def _build_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _format_now
    return environment


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return _build_environment().from_string(source)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)
