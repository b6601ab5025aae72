"""Grammars: turns that match a regular expression or a JSON schema, token by token. llguidance reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigError, UserError
from agentrl.settings.registry import check_package

SETTING = "rollout.structured_outputs"


class OutputGrammar:
    """The texts that a turn may be: an end-of-turn token is allowed where the text is one of them.

    Args:
        tokenizer: a fast transformers tokenizer.
        stop_token_ids: tokens that end a turn.
        rules: ``regex``, or ``json``, a schema, as vLLM's structured outputs have them.

    Raises:
        UserError: llguidance is not installed, or the rules are none that it can follow.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], rules: Mapping[str, str]) -> None:
        check_package(SETTING, "llguidance", "structured")
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        self.rules = rules
        ((kind, rule),) = rules.items()
        try:
            source = LLMatcher.grammar_from_regex(rule) if kind == "regex" else LLMatcher.grammar_from_json_schema(rule)
            problem = LLMatcher.validate_grammar(source)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ConfigError(f"{SETTING}.{kind}: llguidance cannot follow it: {_shorten(problem)}")
        self._first = LLMatcher(from_tokenizer(tokenizer, eos_token=list(stop_token_ids)), source)
        if self._first.is_error():
            raise ConfigError(f"{SETTING}.{kind}: llguidance cannot follow it: {_shorten(self._first.get_error())}")

    def start(self) -> TurnGrammar:
        """Return the grammar at the beginning of a turn."""
        return TurnGrammar(self._first.deep_copy())


class TurnGrammar:
    """A grammar within a turn."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def compute_allowed(self) -> bytes:
        """Compute which tokens may come next, a bit each, the lowest first.

        Raises:
            UserError: none may, or the grammar became too complex.
        """
        bits: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error() or not any(bits):
            reason = _shorten(self._matcher.get_error()) or "no token of the model's continues the text"
            raise UserError(f"{SETTING}: a turn cannot go on: {reason}")
        return bits

    def accept(self, token: int) -> None:
        """Go on behind a sampled token."""
        self._matcher.consume_token(token)


def _shorten(problem: str) -> str:
    """Return the lines of a message that say something, in one."""
    lines = (line.strip() for line in problem.splitlines())
    return " ".join(line for line in lines if line.strip("^ ") and " | " not in line)[:300]
