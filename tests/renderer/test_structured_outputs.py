"""Grammars: every turn matches, and the learner's distribution is over the tokens that were allowed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.errors import ConfigError, UserError
from agentrl.models.policy import Policy, load_policy
from agentrl.renderer.structured_outputs import OutputGrammar
from agentrl.renderer.template import TemplateRenderer
from agentrl.settings import registry
from agentrl.settings.extras import check_extras
from agentrl.settings.loader import build_config
from agentrl.settings.schema import TrainConfig
from agentrl.types import Completion, Sample, SamplingParams
from tests.helpers.tiny import together
from tests.learner.test_sampling_rules import learn, own_logprobs

REGEX = r"-?[0-9]{1,4}( [a-z]{1,3})?"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def nano() -> Policy:
    return load_policy("nano")


def sample(nano: Policy, rules: dict[str, Any], count: int = 6, **more: Any) -> tuple[list[int], list[Completion]]:
    renderer = TemplateRenderer(nano.tokenizer)
    stops = renderer.get_stop_token_ids()
    prompt = renderer.render_ids([{"role": "user", "content": "What is 12 + 30 * 4?"}])
    grammar = OutputGrammar(nano.tokenizer, stops, rules)
    params = SamplingParams(**{"max_tokens": 60, "stop_token_ids": tuple(stops), "grammar": grammar, **more})
    engine = TransformersEngine(nano.model)

    async def run() -> list[Completion]:
        free = replace(params, grammar=None, max_tokens=5)  # beside turns that may be anything
        ways = [params] * count + [free]
        return await together(
            *(
                lambda n=n, way=way: engine.generate(prompt, replace(way, seed=n), session=str(n))
                for n, way in enumerate(ways)
            )
        )

    return prompt, anyio.run(run)[:-1]


def test_every_turn_matches_a_regular_expression(nano: Policy) -> None:
    renderer = TemplateRenderer(nano.tokenizer)
    _, turns = sample(nano, {"regex": REGEX}, temperature=2.0)
    for done in turns:
        assert done.stop_reason == "stop"
        assert re.fullmatch(REGEX, renderer.decode(done.token_ids[:-1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_turn_is_json_of_the_schema(nano: Policy, temperature: float) -> None:
    renderer = TemplateRenderer(nano.tokenizer)
    _, turns = sample(nano, {"json": json.dumps(SCHEMA)}, count=3, temperature=temperature)
    for done in turns:
        if done.stop_reason == "stop":
            value = json.loads(renderer.decode(done.token_ids[:-1]))
            assert value.keys() == {"answer", "sure"}
            assert type(value["answer"]) is int
    assert temperature == 0.0 or any(done.stop_reason == "stop" for done in turns)


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"top_p": 0.9, "temperature": 1.3}, marks=pytest.mark.slow)], ids=str
)
def test_the_learner_s_distribution_is_over_the_allowed_tokens(nano: Policy, more: dict[str, Any]) -> None:
    prompt, turns = sample(nano, {"regex": REGEX}, count=2, **more)
    rows = []
    for number, done in enumerate(turns):
        assert done.kept is not None
        n, m = len(prompt), len(done.token_ids)
        kept = [*[None] * n, *done.kept.sets()]
        logprobs = [*[0.0] * n, *done.logprobs]
        rows.append(
            Sample([*prompt, *done.token_ids], [0] * n + [1] * m, logprobs, [1.0 - 2 * (number % 2)] * (n + m), kept)
        )
    learner = learn(nano.model, rows, SamplingParams(**more))
    for old, row in zip(learner.old_logprobs, rows, strict=True):
        assert old is not None
        assert float((old - own_logprobs(row)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"regex": "[0-9"}, "regex: llguidance cannot follow it: .*unclosed character class"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"json": '{"type": "foo"}'}, "json: llguidance cannot follow it: Invalid type: foo"),
        ({"json": '{"$ref": "#/nope"}'}, "'/nope' does not exist"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_in_a_sentence(
    nano: Policy, rules: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        OutputGrammar(nano.tokenizer, [2], rules)
    assert "\n" not in str(raised.value)


def config(rules: Any, **more: Any) -> TrainConfig:
    return build_config(("test", {"env": "math-tools", "rollout": {"structured_outputs": rules}, **more}))


def test_they_are_a_setting_in_texts_or_tables() -> None:
    assert config({"regex": "a+"}).rollout.structured_outputs == {"regex": "a+"}
    as_table, as_text = config({"json": SCHEMA}), config({"json": json.dumps(SCHEMA)})
    assert as_table.rollout.structured_outputs == as_text.rollout.structured_outputs


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"choice": ["a"]}, "takes regex or json, one of them, not choice"),
        ({"regex": "a", "json": "{}"}, "not regex and json"),
        ({"regex": 12}, "regex: a text, not 12"),
        ({"json": "{"}, "json: a schema in JSON"),
        ({"json": "[1]"}, "a schema, which is a table"),
    ],
)
def test_other_rules_are_refused(rules: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(rules)


def test_without_the_package_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package llguidance: pip install .*structured"):
        check_extras(config({"regex": "a"}))
