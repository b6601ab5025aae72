"""vLLM servers as one engine: episodes stay with a server, and a lost one loses nothing.

These really run vLLM: `make vllm`.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import httpx2
import pytest
import torch
from transformers import AutoTokenizer

pytest.importorskip("vllm")

from agentrl.engines.server_keys import ServerAuth, find_server_key
from agentrl.engines.vllm import server_client, server_pool
from agentrl.engines.vllm.server_pool import ServerEngine
from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer, find_free_port
from agentrl.engines.vllm.weight_client import HttpTransferClient
from agentrl.errors import UserError
from agentrl.models.source import locate_model
from agentrl.renderer.stop_strings import StopStrings
from agentrl.renderer.structured_outputs import OutputGrammar
from agentrl.types import SamplingParams
from tests.engines.vllm.test_vllm_engine import PROMPTS, changed, generated, nano, until
from tests.helpers.processes import heed_interrupts, is_running, wait_for_end
from tests.helpers.tiny import disturbed, error, greedy, reference, together, updated_amid

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_thread")]
SERVING = ServerSettings(locate_model("nano"), max_context=512, capacity=16)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[VLLMServer]]:
    with VLLMServer(SERVING) as one, VLLMServer(SERVING) as two:
        yield [one.wait(), two.wait()]


@pytest.fixture
async def fleet(servers: list[VLLMServer]) -> AsyncIterator[ServerEngine]:
    async with ServerEngine([s.url for s in servers], nano(), capacity=16) as engine:
        yield engine


async def test_turns_are_the_models_own_on_every_server(fleet: ServerEngine) -> None:
    assert fleet.max_context == 512
    assert fleet.mismatch is not None
    assert fleet.mismatch.max < 1e-3
    found = await together(*(lambda p=p: fleet.generate(p, greedy(20), session=str(p)) for p in PROMPTS))
    for prompt, done in zip(PROMPTS, found, strict=True):
        assert list(done.token_ids) == generated(nano(), prompt, 20)
        assert (done.stop_reason, set(done.versions)) == ("length", {0})
    assert [len(r.sessions) for r in fleet.replicas] == [2, 2]
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=30, seed=4)
    done = await fleet.generate([5, 6, 7], params, session="a")
    assert error(nano(), [5, 6, 7], done, params) < 1e-4


@pytest.mark.parametrize(
    ("rules", "wanted"), [({"regex": "[0-9]{3}[ab]{2}!"}, r"[0-9]{3}[ab]{2}!"), ({"json": '{"enum": [7, 8]}'}, "[78]")]
)
async def test_a_turn_matches_what_it_must(fleet: ServerEngine, rules: dict[str, str], wanted: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(locate_model("nano"))
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    grammar = OutputGrammar(tokenizer, [end], rules)
    for seed in range(4):
        params = SamplingParams(max_tokens=40, stop_token_ids=(end,), seed=seed, grammar=grammar)
        done = await fleet.generate([5, 6, 7], params, session="a")
        text = tokenizer.decode(done.token_ids)
        assert re.fullmatch(wanted + r"(<\|im_end\|>)?", text)
        assert text.endswith("<|im_end|>") or done.stop_reason == "length"
        assert max(done.logprobs) <= 0.0


async def test_strings_end_a_turn_on_a_server(fleet: ServerEngine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(locate_model("nano"))
    plain = await fleet.generate([5, 6, 7], greedy(60), session="a")
    text = tokenizer.decode(plain.token_ids)
    word = text[10:13]
    stop = StopStrings((word,), tokenizer.decode)
    params = SamplingParams(temperature=0.0, max_tokens=60, stop=stop)
    done = await fleet.generate([5, 6, 7], params, session="a")
    assert done.stop_reason == "stop"
    assert list(done.token_ids) == list(plain.token_ids)[: len(done.token_ids)]
    said = tokenizer.decode(done.token_ids)
    assert word in said
    assert word not in tokenizer.decode(done.token_ids[:-1])


async def test_an_episode_stays_where_its_cache_is(fleet: ServerEngine) -> None:
    ids, reused = list(range(10, 200)), fleet.meter.reused
    for _ in range(3):
        done = await fleet.generate(ids, greedy(10), session="a")
        ids += [*done.token_ids, 5]
    assert sum("a" in r.sessions for r in fleet.replicas) == 1
    assert fleet.meter.reused - reused >= 2 * 160
    fleet.end_session("a")
    assert not any(r.sessions for r in fleet.replicas)


async def test_after_an_update_every_server_has_the_new_model(fleet: ServerEngine) -> None:
    model = nano()
    for version in (1, 2):
        await fleet.update_weights(changed(model), version)
        for each in fleet.replicas:
            for prompt in PROMPTS:
                done, _ = await each.generate(prompt, greedy(20))
                assert list(done.token_ids) == generated(model, prompt, 20)
                assert set(done.versions) == {version}


async def test_requests_that_run_go_on_with_the_new_weights(fleet: ServerEngine) -> None:
    old, new = nano(), changed(nano(), 0.05)
    context, params = [5, 6, 7], SamplingParams(max_tokens=400)

    calls = [
        lambda s=s: fleet.generate(context, SamplingParams(max_tokens=400, seed=s), session=str(s)) for s in range(4)
    ]
    for done in await updated_amid(fleet, calls, old, new):
        assert set(done.versions) == {0, 1}
        first, reported = done.versions.index(1), torch.tensor(done.logprobs)
        assert (reference(old, context, done, params)[:first] - reported[:first]).abs().max() < 1e-4
        assert (reference(new, context, done, params)[first:] - reported[first:]).abs().max() < 1e-4


async def test_a_server_answers_nobody_without_its_key(servers: list[VLLMServer]) -> None:
    auth = ServerAuth(servers[0].url)
    async with httpx2.AsyncClient(trust_env=False, base_url=servers[0].url) as http:
        for path in ("/v1/models", "/weight_info", "/load", "/metrics", "/openapi.json"):
            assert (await http.get(path)).status_code == 403, path
        for path in ("/pause", "/collective_rpc", "/update_weights", "/inference/v1/generate", "/v1/chat/completions"):
            assert (await http.post(path, json={"method": "get_max_adapter_rank"})).status_code == 403, path
        assert (await http.get("/load", auth=auth)).status_code == 200
        assert (await http.get("/load", auth=auth, headers={"Origin": servers[0].url})).status_code == 403
        assert (await http.get("/health")).status_code == 200


def test_a_servers_key_is_in_no_listing_of_processes(servers: list[VLLMServer]) -> None:
    words = Path(f"/proc/{servers[0].pid}/cmdline").read_bytes()
    key = find_server_key(servers[0].url)
    assert key
    assert key.encode() not in words


async def test_a_cancelled_request_is_taken_back(fleet: ServerEngine, servers: list[VLLMServer]) -> None:
    with anyio.move_on_after(0.2) as scope:
        await fleet.generate([1], greedy(500), session="a")
    assert scope.cancelled_caught
    async with httpx2.AsyncClient(trust_env=False) as http:
        for each in servers:
            with anyio.fail_after(60):
                while (await http.get(f"{each.url}/load", auth=ServerAuth(each.url))).json()["server_load"]:  # noqa: ASYNC110 - nobody tells
                    await anyio.sleep(0.05)


async def test_the_turns_of_a_hung_server_are_sampled_by_another(
    fleet: ServerEngine, servers: list[VLLMServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_client, "PING_S", 5.0)  # a busy machine is no lost server
    monkeypatch.setattr(server_pool, "CHECK_S", 0.5)
    core = engine_process(servers[0].pid)
    os.kill(core, signal.SIGSTOP)
    try:
        with anyio.fail_after(60):
            found = await together(*(lambda s=s: fleet.generate([7], greedy(30), session=s) for s in "abcd"))
        assert all(list(d.token_ids) == generated(nano(), [7], 30) for d in found)
        assert [r.up for r in fleet.replicas] == [False, True]
        assert fleet.replicas[0].status == "gives no sign of life"
    finally:
        os.kill(core, signal.SIGCONT)
    with anyio.fail_after(60):
        await until(lambda: fleet.replicas[0].up)


@pytest.mark.parametrize("stage", ["start_weight_update", "update_weights", "finish_weight_update"])
async def test_a_server_that_stops_in_the_middle_of_an_update_is_dropped_and_takes_part_again(
    servers: list[VLLMServer], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_client, "PING_S", 5.0)  # a busy machine is no lost server
    monkeypatch.setattr(server_pool, "CHECK_S", 0.5)
    core, model, send = engine_process(servers[0].pid), nano(), getattr(HttpTransferClient, stage)

    def stop(self: HttpTransferClient, *arguments: object) -> None:
        if str(self._http.base_url).rstrip("/") == servers[0].url:
            os.kill(core, signal.SIGSTOP)
        send(self, *arguments)

    urls = [s.url for s in servers]
    async with ServerEngine(urls, model, capacity=16, weight_sync_timeout_s=8.0) as engine:
        monkeypatch.setattr(HttpTransferClient, stage, stop)
        try:
            with anyio.fail_after(60):
                await engine.update_weights(changed(model), 1)
        finally:
            os.kill(core, signal.SIGCONT)
            monkeypatch.setattr(HttpTransferClient, stage, send)
        assert [r.version for r in engine.replicas] == [0, 1]
        assert f"did not finish /{stage} in 8.1 s" in engine.replicas[0].status
        with anyio.fail_after(60):
            await until(lambda: engine.replicas[0].up)
        for replica in engine.replicas:
            done, _ = await replica.generate([7], greedy(20))
            assert list(done.token_ids) == generated(model, [7], 20)
            assert set(done.versions) == {1}


@pytest.mark.long
async def test_a_killed_server_loses_nothing_and_takes_part_again_with_the_current_weights() -> None:
    port, model = find_free_port(), changed(nano(), 0.05)
    serving = ServerSettings(locate_model("nano"), max_context=512, capacity=16, port=port)
    with VLLMServer(SERVING) as survivor, VLLMServer(serving) as victim:
        pids = [engine_process(victim.wait().pid), victim.pid]
        async with ServerEngine([survivor.wait().url, victim.url], nano(), capacity=16) as engine:

            async def kill() -> None:
                os.kill(victim.pid, signal.SIGKILL)

            calls = [
                lambda s=s: engine.generate([5, 6], SamplingParams(max_tokens=300, seed=s), session=str(s))
                for s in range(8)
            ]
            undisturbed = await together(*calls)
            found = await disturbed(calls, kill)
            assert [d.token_ids for d in found] == [d.token_ids for d in undisturbed]
            assert [r.up for r in engine.replicas] == [True, False]
            await engine.update_weights(model, 1)
            with VLLMServer(serving) as again:
                again.wait()
                with anyio.fail_after(60):
                    await until(lambda: engine.replicas[1].up)
                with torch.no_grad():  # the learner is already at the next step: what comes back gets what was given
                    kept = [w.clone() for w in model.parameters()]
                    for weight in model.parameters():
                        weight.zero_()
                    for weight, value in zip(model.parameters(), kept, strict=True):
                        weight.copy_(value)
                done, _ = await engine.replicas[1].generate([7], greedy(20))
                assert list(done.token_ids) == generated(model, [7], 20)
                assert set(done.versions) == {1}
            survivor.close()
            engine._patience_s = 1.0
            with (
                anyio.fail_after(60),
                pytest.raises(UserError, match="no server is left, for 1 s: ") as told,
            ):
                await engine.generate([7], greedy(20), session="late")
            assert survivor.url in str(told.value)
    assert not any(is_running(pid) for pid in pids)


async def test_servers_that_cannot_be_used() -> None:
    with pytest.raises(UserError, match=r"127.0.0.1:\d+ does not answer .*agentrl serve --model"):
        async with ServerEngine([f"http://127.0.0.1:{find_free_port()}"], nano(), start_s=0.5):
            pass


async def test_another_model_is_noticed(servers: list[VLLMServer]) -> None:
    from tests.engines.vllm.test_vllm_engine import untied

    with pytest.raises(UserError, match=r"could not be given weights|computes something else"):
        async with ServerEngine([servers[0].url], untied(), start_s=5):
            pass


@pytest.mark.parametrize(
    "end", [*(pytest.param(s, marks=pytest.mark.long) for s in (signal.SIGINT, signal.SIGKILL)), signal.SIGTERM]
)
def test_the_command_prints_a_url_and_leaves_nothing_behind(end: signal.Signals) -> None:
    command = [sys.executable, "-m", "agentrl", "serve", "--model", "nano", "--max_model_len", "256"]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_interrupts
    )
    assert run.stdout is not None
    with run.stdout as said:
        url = said.readline().strip()
        assert httpx2.get(f"{url}/health", trust_env=False).status_code == 200
        children = descendants(run.pid)
        assert len(children) >= 2
        os.kill(run.pid, end)
        run.wait(120)
    for child in children:
        wait_for_end(child)


def descendants(pid: int) -> list[int]:
    own = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    return own + [d for c in own for d in descendants(c)]


def engine_process(pid: int) -> int:
    """The process with the model: the one below the server's that has it in memory."""
    return max(descendants(pid), key=lambda p: int(Path(f"/proc/{p}/statm").read_text().split()[1]))
