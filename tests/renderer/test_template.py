import json
from timeit import timeit
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from agentrl import EnvSpec
from agentrl.errors import TemplateError
from agentrl.renderer import Renderer
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ScriptedEngine
from agentrl.types import Completion, Message, strip_thoughts
from tests.helpers.families import GLM, HERMES_LLAMA, LLAMA31, NAMES, QWEN3, QWEN25, family
from tests.renderer.test_control_tokens import TOOL, decoded, renderer, result, results

quick = settings(max_examples=40, deadline=None, derandomize=True)
CLEAN = ["The", "answer", "is", "42;", "sum(x)", "=", "1.5", '{"ok":', "true},", "é", "東京?!"]


def clean_text(name: str, edges: bool = True) -> st.SearchStrategy[str]:
    """Words with white space between them, and round them where ``edges``."""
    space = st.sampled_from([" ", "  ", "\n", "\n\n", " \n", "\t"])
    word = st.sampled_from(CLEAN)
    inner = st.lists(st.one_of(word, space), max_size=8).map("".join)
    if name == "metaspace":  # it knows no character that it was not trained on, and no white space but a space
        inner = inner.map(lambda t: " ".join(t.replace("東京", "").replace("\t", " ").split("\n")))
    return inner if edges else inner.map(lambda t: f"I{t}.")


def render(name: str, messages: list[Message], tools: list[Any] | None, prompt: bool = True) -> str:
    text = family(name).tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    assert isinstance(text, str)
    return text


def encode(name: str, text: str) -> list[int]:
    ids: list[int] = family(name).tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def asked(content: str = "q") -> list[Message]:
    return [{"role": "system", "content": "Be brief."}, user(content)]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[str, list[Message], list[Any]]:
    name = draw(st.sampled_from(NAMES))
    messages = [user(draw(clean_text(name)))]
    if family(name).system and draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(clean_text(name))})
    return name, messages, [TOOL] * draw(st.integers(0, 2)) if family(name).native else []


# Clean text has the tokenizer's own ids


@quick
@given(prompts())
def test_a_clean_prompt_is_the_templates_own(drawn: tuple[str, list[Message], list[Any]]) -> None:
    name, messages, tools = drawn
    assert renderer(name).render_ids(messages, tools=tools) == encode(name, render(name, messages, tools or None))


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, list[list[Message]]]:
    """What the world says in each turn; the model's clean answers stand between."""
    name = draw(st.sampled_from([n for n in NAMES if family(n).keeps]))
    turns = [[user(draw(clean_text(name)))]]
    for _ in range(draw(st.integers(1, 3))):
        texts = draw(st.lists(clean_text(name), min_size=1, max_size=3))
        turns.append(results(*texts) if family(name).native and draw(st.booleans()) else [user(texts[0])])
    return name, turns


@quick
@given(histories(), st.data())
def test_turns_add_up_to_the_templates_own_history(drawn: tuple[str, list[list[Message]]], data: st.DataObject) -> None:
    name, (first, *later) = drawn
    tools = [TOOL] if family(name).native else []
    history = list(first)
    ids = renderer(name).render_ids(history, tools=tools)
    closer = encode(name, family(name).closer)[-1]
    for messages in later:
        history.append({"role": "assistant", "content": data.draw(clean_text(name, edges=False))})
        said = encode(name, render(name, history, tools or None, prompt=False))
        assert said[: len(ids)] == ids
        completion = said[len(ids) : said.index(closer, len(ids)) + 1]
        if data.draw(st.booleans()):  # cut short: the bridge closes the turn
            completion.pop()
        history += messages
        ids = renderer(name).bridge_to_next_turn(ids, completion, messages, tools=tools)
        assert ids == encode(name, render(name, history, tools or None))


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_results_of_one_turn_are_one_group(count: int) -> None:
    own = renderer("qwen3")
    text = decoded("qwen3", own.bridge_to_next_turn([], [], results(*map(str, range(count))), tools=[TOOL]))
    shown = "".join(f"\n<tool_response>\n{i}\n</tool_response>" for i in range(count))
    group = f"<|im_start|>user{shown}<|im_end|>\n" if count else ""
    assert text == f"<|im_end|>\n{group}<|im_start|>assistant\n"


def test_results_written_as_json() -> None:
    text = decoded(
        "hermes-llama", renderer("hermes-llama").bridge_to_next_turn([], [], results('a "b"\n'), tools=[TOOL])
    )
    assert 'ipython<|end_header_id|>\n\n"a \\"b\\"\\n"<|eot_id|>' in text


def test_contents_that_a_template_trims() -> None:
    own = renderer("gemma")
    text = decoded("gemma", own.bridge_to_next_turn([], [], [user("  two words \n")]))
    assert text == "<end_of_turn>\n<start_of_turn>user\ntwo words<end_of_turn>\n<start_of_turn>model\n"
    prompt = own.render_ids([{"role": "system", "content": " s "}, user(" q ")])
    assert decoded("gemma", prompt) == "<bos><start_of_turn>user\ns \n\n q<end_of_turn>\n<start_of_turn>model\n"


# Turns that do or do not end with a stop token


@pytest.mark.parametrize("name", [n for n in NAMES if family(n).closer])
def test_a_closed_turn_is_not_closed_again(name: str) -> None:
    own = renderer(name)
    closer, *others = own.get_stop_token_ids()
    said = encode(name, "answer")
    closed = own.bridge_to_next_turn([], [*said, closer], [user("next")])
    assert own.bridge_to_next_turn([], said, [user("next")]) == closed
    assert closed.count(closer) == (1 if name == "mistral" else 2)  # after the user's turn too
    for stop in others:
        assert own.bridge_to_next_turn([], [*said, stop], [user("next")]) == [*said, stop, *closed[len(said) + 1 :]]


@pytest.mark.parametrize(("name", "end"), [("qwen3", "<|endoftext|>"), ("llama3.1", "<|eom_id|>")])
def test_a_turn_ends_with_the_tokens_that_the_model_ships_as_ends_too(name: str, end: str) -> None:
    tokenizer = family(name).tokenizer
    ends = tokenizer.convert_tokens_to_ids([end, family(name).closer])
    plain, own = renderer(name), TemplateRenderer(tokenizer, end_tokens=[*ends, 5, 10**6])
    assert ends[0] not in plain.get_stop_token_ids()
    assert set(own.get_stop_token_ids()) == {*plain.get_stop_token_ids(), ends[0]}  # 5 is text, and 10**6 nothing
    said = encode(name, "answer")
    closed = own.bridge_to_next_turn([], [*said, ends[1]], [user("next")])
    assert own.bridge_to_next_turn([], [*said, ends[0]], [user("next")]) == [*said, ends[0], *closed[len(said) + 1 :]]
    assert own.parse_response([*said, ends[0]]).content == plain.parse_response(said).content


def test_turns_that_end_with_the_next_ones_beginning() -> None:
    own, tokenizer = renderer("glm4.5"), family("glm4.5").tokenizer
    watch, ask, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|observation|>", "<|user|>", "<|endoftext|>"))
    assert set(own.get_stop_token_ids()) == {watch, ask, end}
    said = own.bridge_to_next_turn([], [5], [user("hi")])
    assert decoded("glm4.5", said[1:]) == "<|user|>\nhi<|assistant|>"
    assert own.bridge_to_next_turn([], [5, ask], [user("hi")]) == said
    assert own.bridge_to_next_turn([], [5, watch], [user("hi")]) == [5, watch, *said[1:]]
    assert own.bridge_to_next_turn([], [5, end], [user("hi")]) == [5, end, *said[1:]]


# Tools: the template's own form, or described


def calls(*names: str) -> Message:
    tool_calls: Any = [
        {"id": f"id {i}", "type": "function", "function": {"name": n, "arguments": {"query": "x"}}}
        for i, n in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_shown_and_example_calls_can_be_read(name: str) -> None:
    own = renderer(name)
    ids = own.render_ids([*asked(), calls("search"), result("r")], tools=[TOOL])
    text = decoded(name, ids)
    assert "search" in text
    said = text[text.index('{"name": "search", "parameters": {"q') :] if name == "llama3.1" else text
    found = own.call_format.parse(said, tools=[TOOL]).tool_calls
    assert any(c.name == "search" and c.arguments == {"query": "x"} for c in found)


def test_native_example_calls_are_the_templates_own() -> None:
    messages = [user("q"), calls("search", "search"), *results("a", "b")]
    ids = renderer("qwen3").render_ids(messages, tools=[TOOL])
    assert ids == encode("qwen3", render("qwen3", messages, [TOOL]))


def test_described_tools() -> None:
    own = renderer("gemma")
    text = decoded("gemma", own.render_ids(asked("How many?"), tools=[TOOL]))
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\n\nYou may call tools.")
    assert json.dumps(TOOL) in text
    assert text.endswith("How many?<end_of_turn>\n<start_of_turn>model\n")
    messages = [*results("1", "2"), user("go on")]
    text = decoded("gemma", own.bridge_to_next_turn([], [], messages, tools=[TOOL]))
    shown = "".join(f"<tool_response>\n{i}\n</tool_response>\n" for i in (1, 2))
    assert text == f"<end_of_turn>\n<start_of_turn>user\n{shown}go on<end_of_turn>\n<start_of_turn>model\n"


def test_a_template_that_takes_results_only_after_calls() -> None:
    strict = QWEN25.replace(
        '{%- elif message.role == "tool" %}',
        '{%- elif message.role == "tool" %}{%- if not messages[loop.index0 - 1].tool_calls and '
        'messages[loop.index0 - 1].role != "tool" %}{{ raise_exception("no call before the result") }}{%- endif %}',
    )
    own = TemplateRenderer(family("qwen2.5").tokenizer, strict)
    assert "own form" in own.verdict()
    messages = results("1", "2")
    expected = renderer("qwen2.5").bridge_to_next_turn([], [], messages, tools=[TOOL])
    assert own.bridge_to_next_turn([], [], messages, tools=[TOOL]) == expected


# What was sampled


@pytest.mark.parametrize("name", NAMES)
def test_a_response_is_read_without_its_stop_tokens(name: str) -> None:
    own = renderer(name)
    call = own.call_format.format_call({"name": "search", "arguments": {"query": "a . b , c"}})
    said = "" if name == "llama3.1" else "hm."  # its calls stand alone
    for stop in own.get_stop_token_ids():
        reply = own.parse_response([*encode(name, f"{said} {call}"), stop])
        assert reply.content.lstrip() == said
        assert [(c.name, c.arguments) for c in reply.tool_calls] == [("search", {"query": "a . b , c"})]


def test_a_thought_that_the_prompt_opened() -> None:
    opened = QWEN3.replace(
        "'<|im_start|>assistant\\n' }}\n    {%- if enable", "'<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable"
    )
    own = TemplateRenderer(family("qwen3").tokenizer, opened)
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert own.parse_response(encode("qwen3", call)).tool_calls == ()
    assert len(own.parse_response(encode("qwen3", f"{call}</think>{call}")).tool_calls) == 1
    text = decoded("qwen3", own.bridge_to_next_turn([], [], results("r"), tools=[TOOL]))
    assert text.endswith("<|im_start|>assistant\n<think>\n")


def thinker() -> TemplateRenderer:
    """Opens a thought behind a question; behind a tool's answer it does what DeepSeek's does, and opens none."""
    start = "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}"
    assert start in QWEN3
    source = QWEN3.replace(start, start + "{%- if messages[-1].role != 'tool' %}{{- '<think>\\n' }}{%- endif %}")
    return TemplateRenderer(family("qwen3").tokenizer, source)


def test_a_thought_that_the_prompt_opened_and_the_model_never_ended_is_no_answer() -> None:
    own = thinker()
    prompt = own.render_ids([user("q")])
    assert decoded("qwen3", prompt).endswith("assistant\n<think>\n")
    for said, content, answer in (
        ("it may be 4", "<think>\nit may be 4", ""),
        ("it may be 4</think>5", "<think>\nit may be 4</think>5", "5"),
        ("4</think>5<think>6", "<think>\n4</think>5<think>6", "5"),
    ):
        reply = own.parse_response(encode("qwen3", said), prompt_ids=prompt)
        assert (reply.content, strip_thoughts(reply.content)) == (content, answer)


@pytest.mark.parametrize(("said", "reward"), [("\\boxed{4}", 0.0), ("hm</think>\\boxed{4}", 1.0)])
async def test_what_is_only_thought_is_not_paid(said: str, reward: float) -> None:
    class Says(ScriptedEngine):
        async def generate(self, token_ids: Any, params: Any, *, session: str) -> Completion:
            ids = (*encode("qwen3", said), params.stop_token_ids[0])
            return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")

    rows = [{"prompt": f"2+{n}", "solution": "4"} for n in (2, 3)]
    async with EnvSpec("prompts", data=rows, rewards=["accuracy"]).open() as spec:
        t = await Rollout(spec, Says([""]), thinker()).episode(0)
    assert (t.reward, t.answer) == (reward, "\\boxed{4}" if reward else "")


def test_a_turn_is_read_by_its_own_prompt() -> None:
    own = thinker()
    prompt = own.bridge_to_next_turn([], [], results("r"), tools=[TOOL])
    assert decoded("qwen3", prompt).endswith("<|im_start|>assistant\n")
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    reply = own.parse_response(encode("qwen3", f"42 {call}"), prompt_ids=prompt)
    assert (reply.content, len(reply.tool_calls)) == ("42", 1)
    forged = own.render_ids([user("open it: <think>")])
    assert own.parse_response(encode("qwen3", "4"), prompt_ids=forged[:-2]).content == "4"  # no thought is opened there


# Templates that cannot be followed


def sentence(error: pytest.ExceptionInfo[TemplateError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_no_template() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=family("nano").tokenizer.backend_tokenizer)
    with pytest.raises(TemplateError) as error:
        TemplateRenderer(bare)
    assert "--chat_template FILE" in sentence(error)


def test_a_slow_tokenizer() -> None:
    with pytest.raises(TemplateError) as error:
        TemplateRenderer(ByT5Tokenizer(), "{{ messages }}")
    assert "fast version" in sentence(error)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.role if m.role == 'user' else m.content }}<|im_end|>{% endfor %}", "loses"),
        ("{% for m in messages %}{{ m.content | e }}<|im_end|>{% endfor %}", "alters"),
        ("{{ messages | length }}{% for m in messages %}" + TURN + "{% endfor %}", "rewrites"),
        ("{% for m in messages[-1:] %}" + TURN + "{% endfor %}", "rewrites"),
        ("{{ raise_exception('two turns only') if messages | length > 2 }}" + LOOP, "two turns only"),
    ],
)
def test_templates_that_cannot_be_followed(template: str, why: str) -> None:
    own = TemplateRenderer(family("nano").tokenizer, template)
    with pytest.raises(TemplateError) as error:
        own.bridge_to_next_turn([], [], [user("next")])
    assert why in sentence(error)
    assert "--chat_template FILE" in sentence(error)
    assert why in own.verdict()


def test_templates_that_cannot_be_run() -> None:
    tokenizer = family("nano").tokenizer
    upper = LOOP.replace("m.content", "m.content | upper")
    for template in ("{% for m in messages %}", "{{ raise_exception('no') }}", "{{ messages[7].content.x.y }}", upper):
        with pytest.raises(TemplateError, match="cannot render a user and an assistant turn"):
            TemplateRenderer(tokenizer, template)


def test_prompts_that_a_template_refuses() -> None:
    with pytest.raises(TemplateError) as error:
        renderer("gemma").render_ids([user("a"), user("b")])
    assert "(user, user)" in sentence(error)
    assert "must alternate" in sentence(error)


def test_tools_that_move_stay_where_they_were_shown() -> None:
    """Mistral shows tools before the last user turn, wherever that is."""
    own = renderer("mistral")
    assert "[AVAILABLE_TOOLS]" in decoded("mistral", own.render_ids([user("q")], tools=[TOOL]))
    text = decoded("mistral", own.bridge_to_next_turn([], [], [user("next")], tools=[TOOL]))
    assert text.split() == ["</s>[INST]", "next[/INST]"]
    assert "Appending tool results is verified. Appending user turns is verified" in own.verdict()


def test_a_mapping_of_templates() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=family("nano").tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = {"default": QWEN25, "tool_use": QWEN3}
    own = TemplateRenderer(tokenizer)
    assert "# Tools" in tokenizer.decode(own.render_ids([user("q")], tools=[TOOL]))


# The verdict


def test_verdicts() -> None:
    verdicts = {name: renderer(name).verdict() for name in NAMES}
    for name, verdict in verdicts.items():
        assert ("own form" in verdict) == family(name).native
        assert ("described in the system prompt" in verdict) != family(name).native
        assert ("in front of the first user turn" in verdict) != family(name).system
        assert "Appending tool results is verified. Appending user turns is verified." in verdict
        assert ("drop earlier thinking before user turns" in verdict) == (name in ("qwen3", "glm4.5"))
        assert "thinking before tool results" not in verdict
    assert verdicts["qwen2.5"].endswith("A turn ends with <|im_end|>.")
    assert verdicts["gemma"].endswith("A turn ends with <end_of_turn> or <eos>.")


# Cost


def test_the_next_turn_costs_little() -> None:
    own: Renderer = renderer("qwen3")
    prompt, messages = list(range(300)), results("The answer is 42.")
    seconds = min(
        timeit(lambda: own.bridge_to_next_turn(prompt, [5, 6], messages, tools=[TOOL]), number=20) / 20
        for _ in range(5)
    )
    assert seconds < 2e-3  # about 5e-5 on a quiet machine


def test_the_templates_are_what_they_claim() -> None:
    assert "raise_exception" in LLAMA31
    assert "<tool_call>" in HERMES_LLAMA
    assert "<|observation|>" in GLM


# Ids of calls, order of keys, other ways to write a text

SHOWN = (
    "{{ (tools | default([], true)) | tojson(ensure_ascii=true, sort_keys=true) }}{% for m in messages %}<|im_start|>"
    "{{ m.role }}{{ ' ' + m.tool_call_id if m.role == 'tool' else '' }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.id }}[ARGS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_result_has_the_id_that_the_model_gave_its_call() -> None:
    own = TemplateRenderer(family("qwen2.5").tokenizer, SHOWN)
    turn = own.encode_turn('<tool_call>mineABC12[ARGS]search[ARGS]{"n": 1}</tool_call><|im_end|>')
    (call,) = own.parse_response(turn, tools=[TOOL]).tool_calls
    assert (call.id, call.name, call.error) == ("mineABC12", "search", None)
    for call_id, written in ((call.id, "tool mineABC12\n"), ("a\n<b>", "tool call00000\n")):
        answer: Message = {"role": "tool", "content": "r", "tool_call_id": call_id, "name": "search"}
        assert written in own.decode(own.bridge_to_next_turn([], turn, [answer], tools=[TOOL]))


def test_an_id_that_the_model_gives_twice_is_no_id() -> None:
    own = TemplateRenderer(family("qwen2.5").tokenizer, SHOWN)
    turn = own.encode_turn('<tool_call>mineABC12[ARGS]search[ARGS]{"n": 1}</tool_call>' * 2)
    first, second = own.parse_response(turn, tools=[TOOL]).tool_calls
    assert first.id == "mineABC12"
    assert second.id not in ("", "mineABC12")


def test_schemas_are_as_a_template_writes_them_that_sorts_keys_and_escapes() -> None:
    own = TemplateRenderer(family("qwen2.5").tokenizer, SHOWN)
    kinds = {key: {"type": "string", "description": f"é {key}"} for key in ("zeta", "Alpha", "beta")}
    tool = {"type": "function", "function": {"name": "n", "description": "東", "parameters": {"properties": kinds}}}
    prompt = own.decode(own.render_ids([user("q")], tools=[tool]))
    assert own.takes_tools
    assert "\\u00e9 zeta" in prompt
    assert prompt.index("beta") < prompt.index("zeta")
    assert json.loads(prompt.partition("<|im_start|>")[0]) == [tool]
