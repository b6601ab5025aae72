"""Stop strings: the tokens up to the one that completes a string are kept; the text before the string is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from agentrl import Env, EnvSpec, Reply, Step, Trajectory
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.models.policy import Policy, load_policy
from agentrl.renderer.stop_strings import StopStrings, cut_at_stop
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.rollout import Rollout
from agentrl.settings.loader import build_config
from agentrl.testing import ByteRenderer, ScriptedEngine, decode_text
from agentrl.types import Completion, SamplingParams, Stop


class Echo(Env):
    """Takes what it reads, and asks again."""

    max_turns = 3

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.read: list[Reply] = []
        return "Question", {}

    async def step(self, reply: Reply) -> Step:
        self.read.append(reply)
        return Step("Again", 0.0, False, False, {"read": [r.content for r in self.read]})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"one": 1.0}


def stop_at(*strings: str) -> StopStrings:
    return StopStrings(strings, decode_text)


def play(engine: Any, *strings: str, renderer: Any = None) -> Trajectory:
    renderer = renderer or ByteRenderer()
    rollout = Rollout(
        EnvSpec(Echo), engine, renderer, sampling=SamplingParams(stop=StopStrings(strings, renderer.decode))
    )
    return anyio.run(rollout.episode, 0)


def test_the_text_before_the_first_of_the_strings_is_read() -> None:
    assert cut_at_stop("a END b", ["END"]) == "a "
    assert cut_at_stop("a b", ["END"]) == "a b"
    assert cut_at_stop("a STOP b END", ["END", "STOP"]) == "a "


def test_a_string_is_completed_by_its_last_token() -> None:
    stop = stop_at("END", "é")
    assert not stop.is_completed([*b"say EN"])
    assert stop.is_completed([*b"say END"])
    assert stop.is_completed([*"caf\xe9".encode()])
    assert not stop.is_completed([*"caf\xe9".encode()][:-1])
    assert not stop.is_completed([*b"xEND"], start=2)  # the prompt's part of it counts for nothing


def test_an_engine_that_samples_past_the_string_is_cut_to_the_token() -> None:
    done = Completion((*b"say END more",), (-0.5,) * 12, (0,) * 12, "length")
    cut = stop_at("END").cut_completion(done)
    assert bytes(cut.token_ids) == b"say END"
    assert cut.stop_reason == "stop"
    assert len(cut.logprobs) == len(cut.versions) == 7
    assert stop_at("NONE").cut_completion(done) is done


def test_the_episode_goes_on_behind_it() -> None:
    trajectory = play(ScriptedEngine(["one END two", "three"]), "END")
    turns = [decode_text(s.token_ids) for s in trajectory.segments if s.author == "model"]
    assert turns[:2] == ["one END", "three"]
    assert trajectory.info["read"][:2] == ["one", "three"]
    assert [m["content"] for m in trajectory.messages if m["role"] == "assistant"] == ["one", "three", "three"]
    assert trajectory.stop is Stop.MAX_TURNS


@pytest.fixture(scope="module")
def nano() -> Policy:
    return load_policy("nano")


def test_the_embedded_engine_stops_where_a_string_is_complete_over_tokens_and_in_one(nano: Policy) -> None:
    renderer = TemplateRenderer(nano.tokenizer)
    prompt = renderer.render_ids([{"role": "user", "content": "What is 12 + 30 * 4?"}])
    params = SamplingParams(seed=3, max_tokens=40, temperature=1.5)

    def sample(*strings: str) -> Completion:
        stop = StopStrings(strings, renderer.decode) if strings else None
        more = SamplingParams(seed=params.seed, max_tokens=40, temperature=1.5, stop=stop)
        engine = TransformersEngine(nano.model)

        async def run() -> Completion:
            return await engine.generate(prompt, more, session="a")

        return anyio.run(run)

    whole = sample()
    text = renderer.decode(whole.token_ids)
    pieces = [renderer.decode([t]) for t in whole.token_ids]
    long = next(i for i, piece in enumerate(pieces) if i > 3 and len(piece) > 1 and piece.isascii())
    before = len("".join(pieces[:long]))
    spans = {text[before - 2 : before + 1], pieces[long][:1], pieces[long][-1:]}  # over two tokens; within one
    for string in spans:
        first = next(n for n in range(1, 41) if string in renderer.decode(whole.token_ids[:n]))
        done = sample(string, "never said")
        assert done.token_ids == whole.token_ids[:first]
        assert done.logprobs == whole.logprobs[:first]
        assert done.stop_reason == "stop"
        read = renderer.parse_response(done.token_ids, prompt_ids=prompt, stop=(string,)).content
        assert string not in read


def test_the_next_prompt_closes_a_turn_that_a_string_ended(nano: Policy) -> None:
    renderer = TemplateRenderer(nano.tokenizer)
    trajectory = play(TransformersEngine(nano.model), "1", "2", "a", "e", renderer=renderer)
    turns = [i for i, s in enumerate(trajectory.segments) if s.author == "model"]
    assert len(turns) == 3
    stops = renderer.get_stop_token_ids()
    for at in turns[:-1]:
        ended = trajectory.segments[at].token_ids[-1] in stops
        closing = [t for t in trajectory.segments[at + 1].token_ids if t in stops]
        assert len(closing) == (1 if ended else 2)  # the turn's own, and the question's
    assert any(trajectory.segments[at].token_ids[-1] not in stops for at in turns)


@pytest.mark.parametrize("given", ["END,STOP", ["END", "STOP"]])
def test_they_are_a_setting(given: Any) -> None:
    config = build_config(("test", {"env": "shop", "rollout": {"stop": given}}))
    assert config.rollout.stop == ("END", "STOP")


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="an empty string ends every turn"):
        build_config(("test", {"env": "shop", "rollout": {"stop": [""]}}))
