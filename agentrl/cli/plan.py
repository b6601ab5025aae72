"""``agentrl plan``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import ConfigError
from agentrl.settings.section import Section

TEXT = """\
  agentrl plan --gpus 8xh100 --model Qwen/Qwen3-8B --dtype bfloat16
  agentrl plan run.toml --gpus 8xh100 --samplers 4 --context 6000 --sampled 2000
  agentrl plan run.toml --gpus 64xh100 --calibrate runs/last

Says of a training, before it is begun: does it fit, how the GPUs are divided between learner and vLLM, what a step
takes, and which setting would make it fit. It needs no GPU and no weights: the learner's own update runs on tensors
that have shapes alone. Times are arithmetic; --calibrate takes the speed of a run that was made on such a GPU.
"""


class _PlanOptions(Section):
    gpus: str = Field(description="how many of which kind, such as 8xh100; or module:attribute, a Gpu with its figures")
    samplers: int | None = Field(None, ge=1, description="GPUs of vLLM alone; by default those of the quickest step")
    context: int | None = Field(
        None, ge=2, description="tokens of an episode when it ends; 6000 if it has such positions, or the run's"
    )
    sampled: int | None = Field(None, ge=1, description="those of them that are sampled; a third, or the run's")
    calibrate: Path | None = Field(None, description="a run folder: its tokens, and its speed on one such GPU")
    calibrate_gpus: int = Field(1, ge=1, description="GPUs that learned in that run, and as many that sampled")


def _run(arguments: Arguments[_PlanOptions]) -> int:
    from agentrl.planning.gpus import parse_cluster
    from agentrl.planning.plan import Planner, count_tflops, describe_plan
    from agentrl.planning.shapes import build_meta_model, find_config, find_positions, measure_shape
    from agentrl.planning.workload import Workload, calibrate, count_passes, read_measured
    from agentrl.settings.loader import build_config, read_toml

    options = arguments.options
    config = build_config(("agentrl plan", {"env": "math-tools"}), *arguments.layers)
    cluster = parse_cluster(options.gpus)
    work = Workload(config.rollout.tasks_per_step * config.rollout.group_size, 6000, 2000)
    speed = None
    if options.calibrate is not None:
        import torch

        ran = build_config(read_toml(options.calibrate / "config.toml"))
        measured = read_measured(options.calibrate, ran.rollout.tasks_per_step * ran.rollout.group_size)
        dtype = torch.float32 if ran.dtype == "float32" else torch.bfloat16
        speed = calibrate(
            measured,
            measure_shape(build_meta_model(find_config(ran.model, ran.load), dtype)),
            tflops=count_tflops(ran, cluster.gpu),
            bandwidth=cluster.gpu.bandwidth_gb_s,
            itemsize=dtype.itemsize,
            gpus=options.calibrate_gpus,
            rows=ran.engine.max_num_seqs,
            checkpointing=ran.learner.gradient_checkpointing,
            passes=count_passes(ran.learner),
        )
        own = measured.workload()
        work = Workload(work.episodes, own.context, own.sampled)
    positions = find_positions(find_config(config.model, config.load))
    context = options.context or min(work.context, positions or work.context)
    sampled = options.sampled or (work.sampled if context == work.context else max(context // 3, 1))
    if sampled >= context:
        raise ConfigError(f"--sampled {sampled} is of the --context {context} tokens of an episode: give fewer")
    work = Workload(work.episodes, context, sampled)
    print(describe_plan(Planner(config, work, speed).plan(cluster, options.samplers)))
    return 0


SHOWN = ("model", "dtype", "rollout.tasks_per_step", "rollout.group_size", "engine.max_num_seqs", "lora.rank")


COMMAND = Command(
    "plan",
    "[FILE.toml] --gpus COUNTxKIND [--samplers N] [--SETTING VALUE ...]",
    TEXT,
    _run,
    _PlanOptions,
    settings=lambda name: name in SHOWN or name.startswith("learner.gradient"),
    footer="Any setting of agentrl train.",
)
