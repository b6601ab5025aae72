"""All that agentrl imports, calls, starts and reads of vLLM is there, in each version of the window.

vLLM's source is read and not run: of the version that is installed, and of wheels on the index.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import agentrl
from agentrl.engines.server_keys import KEY_ENV
from agentrl.engines.vllm import launch, lora_sender, requests
from agentrl.engines.vllm.keyed_http import GENERATE
from agentrl.engines.vllm.lora_sender import RANKS
from agentrl.engines.vllm.server_process import ENTRY, ServerSettings
from agentrl.engines.vllm.tool_parsers import OWN
from agentrl.engines.vllm.weight_sender import PolicyWeights
from agentrl.models.source import locate_model
from agentrl.types import SamplingParams
from tests.helpers.tiny import qwen3
from tests.helpers.wheel_sources import Function, Sources, describe_misfit, read_installed, read_wheel

OWN_FOLDER = Path(agentrl.__file__).parent / "engines" / "vllm"
OWN_TREES = {path.stem: ast.parse(path.read_text()) for path in sorted(OWN_FOLDER.glob("*.py"))}
ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
READ = {  # what is read of what vLLM gives, class by class
    ASYNC_LLM: {"output_handler", "engine_core"},
    "vllm.v1.engine.core_client.MPClient": {"resources"},
    "vllm.v1.engine.core_client.BackgroundResources": {"ctx", "engine_manager"},
    "vllm.v1.engine.utils.CoreEngineProcManager": {"processes"},
    "vllm.outputs.RequestOutput": {"outputs", "num_cached_tokens", "finished"},
    "vllm.outputs.CompletionOutput": {"token_ids", "logprobs", "weight_versions", "routed_experts"},
    "vllm.outputs.WeightVersionSpan": {"version", "start", "end"},
    "vllm.logprobs.Logprob": {"logprob"},
    "vllm.sampling_params.RequestOutputKind": {"CUMULATIVE", "FINAL_ONLY"},
    "vllm.distributed.weight_transfer.base.WeightTransferEngine": {"model", "model_config"},
    "vllm.v1.worker.worker_base.WorkerBase": {"vllm_config", "add_lora"},
    "vllm.v1.worker.gpu_worker.Worker": {"_weight_update_active", "finish_weight_update"},
    "vllm.config.lora.LoRAConfig": {"max_lora_rank"},
    "vllm.tool_parsers.abstract_tool_parser.ToolParser": {
        "supports_required_and_named",
        "model_tokenizer",
        "prev_tool_call_arr",
        "streamed_args_for_tool",
    },
    f"{TOKENS}.GenerateRequest": {"token_ids", "sampling_params", "model"},
    f"{TOKENS}.GenerateTokensResponse": {"choices", "usage"},
    f"{TOKENS}.GenerateTokensChoice": {"token_ids", "logprobs", "weight_versions", "routed_experts"},
    f"{TOKENS}.GenerateLogProbs": {"content"},
    f"{TOKENS}.GenerateLogProbsContent": {"logprob"},
    "vllm.entrypoints.serve.engine.protocol.UsageInfo": {"prompt_tokens_details"},
    "vllm.entrypoints.serve.engine.protocol.PromptTokenUsageInfo": {"cached_tokens"},
    "vllm.entrypoints.serve.lora.protocol.LoadLoRAAdapterRequest": {"lora_name", "lora_path"},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("installed", marks=pytest.mark.vllm),
        *(pytest.param(f"{version}.0", marks=pytest.mark.slow) for version in launch.VERSIONS),
    ],
)
def vllm(request: pytest.FixtureRequest) -> Sources:
    """vLLM's source."""
    return read_installed("vllm") if request.param == "installed" else read_wheel("vllm", request.param)


def test_it_is_a_version_of_the_window_whose_own_pins_ours_admit(vllm: Sources) -> None:
    assert vllm.version.startswith(tuple(f"{version}." for version in launch.VERSIONS))
    project = tomllib.loads((OWN_FOLDER.parents[2] / "pyproject.toml").read_text())["project"]
    ours = {Requirement(line).name: Requirement(line).specifier for line in project["dependencies"]}
    theirs = [Requirement(line) for line in vllm.requires]
    (torch_pin,) = {s.version for r in theirs if r.name == "torch" and _applies(r) for s in r.specifier}
    assert torch_pin in ours["torch"]
    (lowest,) = {s.version for r in theirs if r.name == "transformers" for s in r.specifier if s.operator == ">="}
    assert lowest in ours["transformers"]


def test_what_is_imported_is_there_and_takes_what_it_is_called_with(vllm: Sources) -> None:
    calls = 0
    has_m2n = "vllm.distributed.weight_transfer.m2n_source" in vllm.files  # which `has_m2n` looks for
    assert has_m2n == (not vllm.version.startswith("0.33."))
    for name, tree in OWN_TREES.items():
        if name == "m2n_sender" and not has_m2n:
            continue
        imported = dict(_imports(tree))
        for module, word in imported.values():
            assert vllm.find(module, word) or f"{module}.{word}" in vllm.files, f"{name}: {module} has no {word}"
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in imported:
                module, word = imported[call.func.id]
                found = vllm.find(module, word)
                assert found is not None
                assert not (why := _misfit(vllm, *found, call)), f"{name}: {module}.{word} {why}"
                calls += 1
    assert calls > 14


def test_the_engine_takes_what_is_asked_of_it(vllm: Sources) -> None:
    members, asked = vllm.members(ASYNC_LLM), dict(_engine_calls(OWN_TREES["engine"]))
    assert len(asked) > 14
    for name, call in asked.items():
        assert name in members, f"AsyncLLM has no {name}"
        method = members[name]
        assert isinstance(method, Function)
        assert not (why := describe_misfit(method, *call, bound=True)), f"AsyncLLM.{name} {why}"


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_there(vllm: Sources, kind: str) -> None:
    missing = READ[kind] - vllm.members(kind).keys()
    assert not missing


@pytest.mark.parametrize("cuda", [False, True])
def test_engine_arguments_flags_and_sampling_parameters_are_there(
    vllm: Sources, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    known = vllm.fields("vllm.engine.arg_utils.AsyncEngineArgs")
    arguments = launch.build_engine_arguments(
        "model",
        torch.float32,
        max_context=64,
        capacity=4,
        cache_bytes=1,
        backend="memory",
        rank=8,
        return_routed_experts=True,
    )
    assert requests.RETURN_FLAG in arguments
    assert not arguments.keys() - known
    sampling = SamplingParams(routed_experts_start=3)
    assert not {*requests.build_sampling_params(sampling), *requests.build_text_params(sampling)} - vllm.fields(
        "vllm.sampling_params.SamplingParams"
    )
    entry = vllm.tree(ENTRY)
    assert entry is not None
    assert 'if __name__ == "__main__"' in vllm.files[ENTRY]
    frontend = next(
        vllm.fields(f"{module}.FrontendArgs") for module, text in vllm.files.items() if "\nclass FrontendArgs" in text
    )
    settings = ServerSettings(locate_model("nano"), dtype=torch.bfloat16, lora_rank=8, tool_parser=OWN, fp32_head=True)
    flags = [word[2:] for word in settings.build_flags(8000) if word.startswith("--")]
    assert "middleware" in flags
    assert len(flags) > 20
    for flag in flags:
        name = flag.replace("-", "_")
        assert name in known | frontend or name.removeprefix("no_") in known | frontend, f"there is no --{flag}"


def test_paths_of_the_server_take_what_is_sent(vllm: Sources) -> None:
    routes = dict(_routes(vllm))
    sent = {p: w for module in ("server_client", "weight_client") for p, w in _requests_of(OWN_TREES[module])}
    assert {"/pause", "/update_weights"} <= sent.keys()
    sent[GENERATE] = set(json.loads(requests.write_request([1], SamplingParams(), adapter="a")))
    assert sent[GENERATE] == {"token_ids", "sampling_params", "model"}
    for path, words in sent.items():
        assert path in routes, f"the server has no {path}"
        module, handler = routes[path]
        assert not words - _words_of(vllm, module, handler), f"{path} does not read all of {sorted(words)}"
    assert "/health" in routes


def test_environment_variables_are_read(vllm: Sources) -> None:
    text = "".join(path.read_text() for path in OWN_FOLDER.glob("*.py"))
    named = set(re.findall(r'"(VLLM_[A-Z0-9_]+)"', text)) | {KEY_ENV}
    assert len(named) > 7
    assert not {name for name in named if f'"{name}"' not in vllm.files["vllm.envs"]}


def test_ranks_of_adapters_are_those_that_it_has(vllm: Sources) -> None:
    found = vllm.find("vllm.config.lora", "MaxLoRARanks")
    assert found is not None
    assert isinstance(found[1], ast.Assign)
    assert isinstance(found[1].value, ast.Subscript)
    assert ast.literal_eval(found[1].value.slice) == RANKS
    assert lora_sender.choose_max_rank(9) == 16


def test_the_senders_of_gpus_find_in_our_weights_what_they_read(vllm: Sources) -> None:
    weights = PolicyWeights(qwen3())
    read = set()
    for backend in ("ipc", "nccl"):
        tree = vllm.tree(f"vllm.distributed.weight_transfer.{backend}_engine")
        assert tree is not None
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("source", "self.source"):
                read.add(node.attr)
        assert not {name for name in read if not hasattr(weights, name)}
    assert "metadata" in read
    assert weights.metadata() == weights.metadata  # 0.32 calls it, 0.33 reads it
    assert weights.owned_names(0) == [name for name, _ in weights.iter_full()] == [p.name for p in weights.metadata]


def test_what_it_calls_of_ours_has_the_same_parameters(vllm: Sources) -> None:
    bases = {
        ("weight_receiver", "_MemoryReceiver"): "vllm.distributed.weight_transfer.base.WeightTransferEngine",
        ("tool_parser_plugin", "AgentrlToolParser"): "vllm.tool_parsers.abstract_tool_parser.ToolParser",
    }
    for (module, name), base in bases.items():
        members = vllm.members(base)
        (own,) = (n for n in OWN_TREES[module].body if isinstance(n, ast.ClassDef) and n.name == name)
        methods = {n.name: n for n in own.body if isinstance(n, Function)}
        abstract = {n for n, m in members.items() if isinstance(m, Function) and "abstractmethod" in _decorators(m)}
        assert not abstract - methods.keys()
        for word, method in methods.items():
            if isinstance(theirs := members.get(word), Function):
                assert [a.arg for a in method.args.args] == [a.arg for a in theirs.args.args], f"{name}.{word}"


# -- what agentrl does ---------------------------------------------------------------------------------------------


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what a module imports of vLLM: its name here, its module and its name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                yield alias.asname or alias.name, (node.module or "", alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if "." in alias.name and alias.name.startswith("vllm"):
                    module, _, word = alias.name.rpartition(".")
                    yield alias.name, (module, word)


def _arguments(call: ast.Call) -> tuple[int, set[str]]:
    return len(call.args), {k.arg for k in call.keywords if k.arg is not None}


def _engine_calls(tree: ast.Module) -> Iterator[tuple[str, tuple[int, set[str]]]]:
    """Yield the calls of the AsyncLLM, and those that its client makes by their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value)
            if of in ("self._llm", "llm", "engine._llm", "AsyncLLM"):
                yield node.func.attr, _arguments(node)
            if of == "self" and node.func.attr == "_call":
                assert isinstance(node.args[0], ast.Constant)
                yield str(node.args[0].value), (len(node.args) - 1, set())


def _requests_of(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Yield the paths that are asked, each with the words that are sent."""
    local = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        paths = [a.value for a in call.args if isinstance(a, ast.Constant) and re.match(r"/\w", str(a.value))]
        bodies: list[ast.expr] = [k.value for k in call.keywords if k.arg in ("json", "params")] + call.args[1:]
        bodies = [local.get(b.id, b) if isinstance(b, ast.Name) else b for b in bodies]
        words = {
            str(key.value)
            for body in bodies
            if isinstance(body, ast.Dict)
            for key in body.keys
            if isinstance(key, ast.Constant)
        }
        yield from ((str(path), words) for path in paths)


# -- what vLLM has -------------------------------------------------------------------------------------------------


def _misfit(vllm: Sources, module: str, found: ast.AST, call: ast.Call) -> str:
    """Say why a function or a class cannot be called so; nothing if it can."""
    positional, keywords = _arguments(call)
    if isinstance(found, Function):
        return describe_misfit(found, positional, keywords, bound=False)
    if not isinstance(found, ast.ClassDef):
        return ""
    dotted = f"{module}.{found.name}"
    init = vllm.members(dotted).get("__init__")
    if isinstance(init, Function):
        return describe_misfit(init, positional, keywords, bound=True)
    fields = vllm.fields(dotted)
    unknown = keywords - fields
    return f"has no {', '.join(sorted(unknown))}" if unknown or positional > len(fields) else ""


def _routes(vllm: Sources) -> Iterator[tuple[str, tuple[str, Function]]]:
    """Yield the paths of its servers, each with its function."""
    for module, text in vllm.files.items():
        if module.startswith("vllm.entrypoints") and "router" in text:
            tree = vllm.tree(module)
            assert tree is not None
            for node in ast.walk(tree):
                for decorator in node.decorator_list if isinstance(node, Function) else ():
                    assert isinstance(node, Function)
                    path = decorator.args[0] if isinstance(decorator, ast.Call) and decorator.args else None
                    if isinstance(path, ast.Constant) and str(path.value).startswith("/"):
                        yield str(path.value), (module, node)


def _words_of(vllm: Sources, module: str, handler: Function) -> set[str]:
    """List the words that a handler reads: its parameters, the fields of its models, what it gets from a body."""
    words = {a.arg for a in (*handler.args.args, *handler.args.kwonlyargs)}
    words |= {n.value for n in ast.walk(handler) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    for argument in handler.args.args:
        for node in ast.walk(argument.annotation) if argument.annotation else ():
            found = vllm.find(module, node.id) if isinstance(node, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                words |= vllm.fields(f"{found[0]}.{found[1].name}")
    return words


def _decorators(function: Function) -> set[str]:
    return {ast.unparse(d) for d in function.decorator_list}


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
