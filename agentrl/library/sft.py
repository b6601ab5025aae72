"""`agentrl.sft`: a warm start from Python, from demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from transformers import TrainerCallback

from agentrl.environments.env import Env
from agentrl.library.run import Run
from agentrl.library.train import run_settings
from agentrl.settings.sft import DEFAULTS, build_sft_layer
from agentrl.training.callbacks import Callback
from agentrl.training.schedules import OptimizerPair


def sft(
    env: str | type[Env],
    model: Any = "nano",
    data: str | PathLike[str] | Sequence[str | PathLike[str]] = "expert",
    *,
    rounds: int | None = None,
    tokenizer: Any = None,
    env_args: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | TrainerCallback] = (),
    optimizers: OptimizerPair = (None, None),
    verbose: bool = True,
    **settings: Any,
) -> Run:
    """Train a model on demonstrations of an environment, and return the run: a warm start for `agentrl.train`.

    Args:
        env: as `agentrl.train` takes it; the held-out tasks of it are evaluated before and after.
        model: as there.
        data: ``expert``, whom the environment brings; or files of conversations and run folders.
        rounds: instead of ``data``: so many batches are sampled from the model, and what earned enough of each is
            learned from (rejection sampling; ``learner={"advantage_args": {"min_reward": 0.5}}``).
        tokenizer, env_args, callbacks, optimizers, verbose: as there.
        settings: as in a config file: ``epochs=2, learner={"lr": 1e-4}, sft={"batch_size": 32}``.

    Raises:
        UserError: a setting, the data, the environment or the model is wrong; the sentence says what and the way out.
    """
    if rounds is None:
        names = [data] if isinstance(data, str | PathLike) else list(data)
        given = settings.get("sft")
        settings["sft"] = {**(given if isinstance(given, Mapping) else {}), "data": [str(name) for name in names]}
    return run_settings(
        env,
        model,
        settings,
        layers=[build_sft_layer(rounds)],
        defaults=DEFAULTS,
        tokenizer=tokenizer,
        env_args=env_args,
        callbacks=callbacks,
        optimizers=optimizers,
        verbose=verbose,
    )
