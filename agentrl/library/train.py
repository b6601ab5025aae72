"""`agentrl.train`: train from Python, in a script or a notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from agentrl.environments.curriculum import Curriculum
from agentrl.environments.env import Env
from agentrl.environments.spec import EnvSpec
from agentrl.learner.launch_environment import adopt_launcher
from agentrl.library.demonstrations import read_demonstrations
from agentrl.library.notebook import NotebookTable, in_notebook
from agentrl.library.progress import PlainLines, write_line
from agentrl.library.run import Run
from agentrl.library.trainer_callbacks import adapt_callbacks
from agentrl.models.policy import resolve_settings
from agentrl.settings.loader import Layer
from agentrl.settings.names.adoption import take_env_names
from agentrl.settings.signature import convert_value
from agentrl.training.callbacks import Callback, Callbacks, load_callbacks
from agentrl.training.schedules import OptimizerPair, check_optimizers
from agentrl.training.train import run_config


def train(
    env: str | type[Env],
    model: Any = "nano",
    *,
    tokenizer: Any = None,
    env_args: Mapping[str, Any] | None = None,
    curriculum: Curriculum | None = None,
    callbacks: Sequence[Callback | TrainerCallback] = (),
    optimizers: OptimizerPair = (None, None),
    verbose: bool = True,
    **settings: Any,
) -> Run:
    """Train a model on an environment, and return the run. Ctrl-C, or a notebook's interrupt, saves and returns it.

    Args:
        env: a registered name, ``module:Class``, or an ``Env`` subclass.
        model: a name or folder, as ``--model`` takes it; or a loaded causal LM, with an adapter or without, which is
            trained in place.
        tokenizer: of a loaded model; found by its name by default.
        env_args: the environment's own settings.
        curriculum: of the outcomes so far to the options of the next task's ``reset``.
        callbacks: hear what happens, and may end the run: of ``agentrl.Callback``, or of transformers.
        optimizers: a torch optimizer and a scheduler of the learning rate, as transformers' Trainer takes them, instead
            of those that the settings name; each an object, None, or a function: of the list of trained parameters to
            an optimizer, of the optimizer to a scheduler. A scheduler is stepped once a step of training.
        verbose: show the progress: a line a step on stdout, in a notebook a live table.
        settings: as in a config file: ``steps=200, learner={"lr": 2e-6}, run={"dir": "runs/x"}``.

    Raises:
        UserError: a setting, the environment, a tool or the model is wrong; the sentence says what and the way out.
    """
    return run_settings(
        env,
        model,
        settings,
        tokenizer=tokenizer,
        env_args=env_args,
        curriculum=curriculum,
        callbacks=callbacks,
        optimizers=optimizers,
        verbose=verbose,
    )


def run_settings(
    env: str | type[Env],
    model: Any,
    settings: Mapping[str, Any],
    *,
    layers: Sequence[Layer] = (),
    defaults: Layer | None = None,
    tokenizer: Any = None,
    env_args: Mapping[str, Any] | None = None,
    curriculum: Curriculum | None = None,
    callbacks: Sequence[Callback | TrainerCallback] = (),
    optimizers: OptimizerPair = (None, None),
    verbose: bool = True,
) -> Run:
    """Run what the settings say, over ``layers``, over what the model recommends, over ``defaults``; return the run.

    The other arguments are those of `train`.
    """
    adopt_launcher()
    named_otherwise, settings = take_env_names(settings)
    own = convert_value("env_args", {} if env_args is None else env_args, dict[str, Any])
    spec = EnvSpec(env, **named_otherwise, **own)
    spec.check_run_settings(settings)
    verbose = convert_value("verbose", verbose, bool)
    named = {"name": spec.name, **spec.settings}
    config, loaded = resolve_settings({"env": named, **settings}, model, tokenizer, layers=layers, defaults=defaults)
    check_optimizers(optimizers, settings)
    by_name = load_callbacks(config.run.callbacks)
    callback = Callbacks([*adapt_callbacks(callbacks), *by_name, *_open_progress(verbose)], by_name)
    spec = spec.with_tools(config.tools, config.tool)
    shown = [] if config.run.resume else read_demonstrations(config, spec)
    result = run_config(config, spec, callback, loaded, curriculum, optimizers, shown)
    return Run(result.summary["run_dir"], result.policy)


def _open_progress(verbose: bool) -> list[Callback]:
    """Return the callback that shows a training; none in further processes of the learner."""
    if not verbose or int(os.environ.get("RANK", "0")):
        return []
    return [NotebookTable() if in_notebook() else PlainLines(write_line)]
