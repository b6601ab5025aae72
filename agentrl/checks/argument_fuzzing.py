"""Random arguments for a tool, drawn from its JSON schema: conforming ones, and wrong ones."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.types import JsonSchema

_MAX_DEPTH = 6  # of a schema that refers to itself
HUGE = 10_000  # characters; a turn may have them


def draw_arguments(schema: JsonSchema, rng: random.Random, words: Sequence[str] = ()) -> dict[str, Any]:
    """Draw arguments that conform to the schema. ``words``: texts that strings are drawn from, beside nonsense."""
    arguments = _Draw(schema, rng, words).value(schema, 0)
    return arguments if isinstance(arguments, dict) else {}


def draw_wrong_arguments(schema: JsonSchema, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield arguments that a model might give by mistake: too few, too many, of other types, huge, deeply nested."""
    good = draw_arguments(schema, rng)
    yield {}
    yield {**good, "no_such_argument": 1}
    nested: Any = []
    for _ in range(40):
        nested = [nested]
    for name in schema.get("properties", {}):
        values: tuple[Any, ...] = (None, True, -1, 10**30, 1e308, "", "x" * HUGE, [], {"a": [1]}, nested)
        for value in values:
            yield {**good, name: value}


class _Draw:
    def __init__(self, root: JsonSchema, rng: random.Random, words: Sequence[str]) -> None:
        self.root, self.rng, self.words = root, rng, words

    def value(self, schema: Any, depth: int) -> Any:
        schema = self._plain(schema)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self.rng.choice(schema["enum"])
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            simple = [o for o in options if self._plain(o).get("type") in ("null", "string", "integer", "number")]
            return self.value(self.rng.choice(simple if depth > _MAX_DEPTH and simple else options), depth + 1)
        return self._typed(schema, depth)

    def _plain(self, schema: Any) -> Mapping[str, Any]:
        """Follow references, and merge the schemas that ``allOf`` lists."""
        plain = schema if isinstance(schema, dict) else {}
        while "$ref" in plain:
            target: Any = self.root
            for part in str(plain["$ref"]).removeprefix("#/").split("/"):
                target = target[part]
            plain = {**target, **{k: v for k, v in plain.items() if k != "$ref"}}
        for part in plain.get("allOf", ()):
            plain = {**plain, **self._plain(part)}
        return plain

    def _typed(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = self.rng.choice(kind)
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "integer":
                return self._integer(schema)
            case "number":
                return self._number(schema)
            case "boolean":
                return self.rng.random() < 0.5
            case "null":
                return None
        return self._string(schema)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        names = [n for n in properties if n in required or (depth < _MAX_DEPTH and self.rng.random() < 0.5)]
        value = {n: self.value(properties[n], depth + 1) for n in names}
        if isinstance(schema.get("additionalProperties"), dict) and depth < _MAX_DEPTH:
            value[self._string({})] = self.value(schema["additionalProperties"], depth + 1)
        return value

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first = [self.value(s, depth + 1) for s in schema.get("prefixItems", ())]
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", least + 3), least if depth > _MAX_DEPTH else least + 3)
        rest = max(self.rng.randint(least, max(least, most)) - len(first), 0)
        items = schema.get("items")
        return first + ([self.value(items, depth + 1) for _ in range(rest)] if isinstance(items, dict) else [])

    def _integer(self, schema: Mapping[str, Any]) -> int:
        low, high = self._bounds(schema, 1)
        step = int(schema.get("multipleOf", 1)) or 1
        return self.rng.randint(-(-int(low) // step), max(-(-int(low) // step), int(high) // step)) * step

    def _number(self, schema: Mapping[str, Any]) -> float:
        low, high = self._bounds(schema, 1e-6)
        return self.rng.choice([float(low), float(high), self.rng.uniform(low, high)])

    def _bounds(self, schema: Mapping[str, Any], least: float) -> tuple[float, float]:
        low = schema.get("minimum", schema["exclusiveMinimum"] + least if "exclusiveMinimum" in schema else None)
        high = schema.get("maximum", schema["exclusiveMaximum"] - least if "exclusiveMaximum" in schema else None)
        wide = self.rng.choice([3, 100, 10**6])
        if low is None:
            low = high - wide if high is not None else -wide
        return low, high if high is not None else low + 2 * wide

    def _string(self, schema: Mapping[str, Any]) -> str:
        text: str = self.rng.choice(self._choices(schema))
        text += "x" * (schema.get("minLength", 0) - len(text))
        most: int = schema.get("maxLength", len(text))
        return text[:most]

    def _choices(self, schema: Mapping[str, Any]) -> Sequence[str]:
        """Return nonsense, or the examples of the argument's own description, or the words."""
        letters = string.ascii_letters + string.digits + " +-*/()=.,'\"{}<>_%\n"
        nonsense = ["".join(self.rng.choices(letters, k=self.rng.randint(0, 12)))]
        described = str(schema.get("description", ""))
        examples = [*map(str, schema.get("examples", ())), *_QUOTED.findall(described)]
        kinds = [k for k in (examples, extract_words(described), self.words) if k]
        return self.rng.choice(kinds) if kinds and self.rng.random() < 0.8 else nonsense


_QUOTED = re.compile(r'"([^"]{1,80})"')


def extract_words(text: str) -> list[str]:
    """List the quoted texts, words and numbers of a text."""
    return [*_QUOTED.findall(text), *re.findall(r"[\w.]*\w", text)][:200]
