"""A plan of a training: does it fit, how GPUs are divided between learner and vLLM, what a step takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.errors import ConfigError, UserError
from agentrl.learner.learner import LossSettings
from agentrl.models import lora
from agentrl.models.lm_head import NotProven
from agentrl.planning.gpus import Cluster, Gpu
from agentrl.planning.memory import APART, GIB, GRADIENT, MASTER, LearnerMemory, Training, count_alone, count_sharded
from agentrl.planning.player_load import describe_player_load, measure_player_load
from agentrl.planning.sampling import VLLM_SHARE, Sampling, plan_sampling
from agentrl.planning.shapes import Shape, build_meta_model, find_config, find_positions, measure_shape
from agentrl.planning.step_memory import make_rows, measure_passing
from agentrl.planning.workload import Speed, Workload, count_passes
from agentrl.settings.schema import TrainConfig

TOKENS = 8192  # of a micro-batch where no setting says how many
HOST_GB_S = 25.0  # between a GPU and its machine's memory
FLOAT32 = 15  # times as long as in bfloat16 products in single precision take
WAKE_S = 1.0  # of a vLLM that slept, beside what is copied


@dataclass(frozen=True)
class Division:
    """GPUs divided between learner and vLLM; ``shared``: one GPU does both in turn.

    Times are seconds of a step; ``learn_flops``: operations of learning in it. ``memory_limit``: bytes of a GPU that
    the learner may take while it learns.
    """

    learners: int
    shared: bool
    memory: LearnerMemory
    sampling: Sampling | None
    learn_flops: float
    learn_s: float
    sync_s: float
    generate_s: float
    memory_limit: float
    overlaps: bool = False

    @property
    def fits(self) -> bool:
        """Return True if everybody has the memory that they need."""
        return self.sampling is not None and self.memory.peak <= self.memory_limit

    @property
    def step_s(self) -> float:
        """Return the seconds of a step, as the settings are."""
        return self.overlapped_s if self.overlaps else self.generate_s + self.learn_s + self.sync_s

    @property
    def overlapped_s(self) -> float:
        """Return the seconds of a step where sampling and learning go on at the same time."""
        return max(self.generate_s, self.learn_s) + self.sync_s


@dataclass(frozen=True)
class TrainingPlan:
    """All that is said of a training.

    Args:
        division: the quickest that fits; the one that lacks least memory where none does.
        ways: settings that would make it fit, each tried; empty where it does.
    """

    config: TrainConfig
    cluster: Cluster
    shape: Shape
    training: Training
    work: Workload
    speed: Speed
    division: Division
    tokens: int
    ways: list[str] = field(default_factory=list)


class Planner:
    """Plans one model's training on any GPUs.

    Args:
        config: of the run: model, learner, engine.

    Raises:
        UserError: the model is not known.
    """

    def __init__(self, config: TrainConfig, work: Workload, speed: Speed | None = None) -> None:
        self.config, self.work, self.speed = config, work, speed or Speed()
        self.model_config: PretrainedConfig = find_config(config.model, config.load)
        self.dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self.shape = measure_shape(build_meta_model(self.model_config, self.dtype))
        most = find_positions(self.model_config)
        if most is not None and work.context > most:
            raise ConfigError(f"--context {work.context}: {config.model} has {most:,} positions")

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch: a row longer than that goes alone."""
        return self.config.learner.max_tokens_per_microbatch or TOKENS

    def build_policy(self) -> PreTrainedModel:
        """Build the policy without values, with its adapter."""
        model = build_meta_model(self.model_config, self.dtype)
        if self.config.lora.rank is None:
            return model
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's own business, of tensors without values
            wrapped: PreTrainedModel = lora.add_adapter(model, self.config.lora, self.config.model)
        return wrapped

    def measure_training(self) -> Training:
        """Measure what an update takes, from the learner's own on tensors without values.

        Raises:
            UserError: the model's own code cannot go without values.
        """
        c, policy = self.config.learner, self.build_policy()
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in policy.parameters() if not p.requires_grad)
        settings = LossSettings(
            max_tokens_per_microbatch=self.tokens,
            gradient_checkpointing=c.gradient_checkpointing,
            threads=1,
            router_aux_loss_coef=0.0 if self.shape.has_experts else None,
            entropy_coef=c.entropy_coef,
        )
        rows = make_rows(self.tokens, self.work.context, self.work.sampled)
        optimizer = "adamw" if c.optimizer not in ("adamw", "muon") else c.optimizer
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # of a learner that would do otherwise than with values
                passing = measure_passing(self.build_policy, settings, optimizer, rows)
        except (RuntimeError, NotImplementedError, UserWarning, NotProven) as error:  # it wants values, say
            adapter = ", with an adapter" if self.config.lora.rank else ""
            raise UserError(
                f"model {self.config.model}{adapter}: its update cannot be gone through without values: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return Training(
            trained,
            frozen,
            self.dtype.itemsize,
            c.optimizer,
            passing,
            has_reference=bool(c.beta),
            offloads=c.optimizer_offload,
            offloads_shards=c.param_offload,
            quantized=bool(self.config.lora.quantize),
        )

    def plan(self, cluster: Cluster, samplers: int | None = None) -> TrainingPlan:
        """Plan for some GPUs.

        Args:
            samplers: of them, that vLLM has to itself; by default the number that makes a step quickest.

        Raises:
            UserError: there are fewer GPUs than that.
        """
        training = self.measure_training()
        best = self._choose(cluster, training, samplers)
        made = TrainingPlan(self.config, cluster, self.shape, training, self.work, self.speed, best, self.tokens)
        return made if best.fits else replace(made, ways=list(self._find_ways(cluster, samplers)))

    def _choose(self, cluster: Cluster, training: Training, samplers: int | None) -> Division:
        """Choose the quickest division that fits; where none does, the one that is nearest to it."""
        made = [self.divide(cluster, training, learners) for learners in self._list_learners(cluster, samplers)]
        fitting = [d for d in made if d.fits]
        if fitting:
            return min(fitting, key=lambda d: d.step_s)
        return min(made, key=lambda d: (d.sampling is None, round(d.memory.peak / d.memory_limit, 1), d.step_s))

    def _list_learners(self, cluster: Cluster, samplers: int | None) -> list[int]:
        """List how many GPUs may learn: 0 where the only one does both."""
        if self.config.learner.param_offload and cluster.count - (samplers or 1) < 2:
            raise UserError(
                f"learner.param_offload is of shards, which two learners or more have; of {cluster.count} GPU"
                f"{'s' * (cluster.count > 1)} there are fewer. Leave it out, or plan for more GPUs"
            )
        if samplers is not None:
            if not 1 <= samplers < cluster.count:
                raise UserError(
                    f"--samplers {samplers}: of {cluster.count} GPUs vLLM may have 1 to {cluster.count - 1} to itself"
                    if cluster.count > 1
                    else "--samplers: the only GPU is learner's and vLLM's in turn; leave it out"
                )
            return [cluster.count - samplers]
        if cluster.count == 1:
            return [0]
        whole = cluster.gpu.a_machine if cluster.count > 2 * cluster.gpu.a_machine else 1
        fewest = 2 if self.config.learner.param_offload else 1
        return [n for n in range(whole, cluster.count, whole) if n >= fewest]

    def divide(self, cluster: Cluster, training: Training, learners: int) -> Division:
        """Work out a division: memory of everybody, seconds of a step."""
        gpu, c = cluster.gpu, self.config
        usable = gpu.memory_gib * GIB * (1 - APART)
        shared = learners == 0
        learners = max(learners, 1)
        sharding = "none" if c.learner.optimizer == "adamw_8bit" or c.lora.quantize else c.learner.sharding
        shards = {"full": learners, "hybrid": min(learners, gpu.a_machine), "none": 1}[sharding]
        memory = count_alone(training) if shards == 1 else count_sharded(training, self.shape, shards)
        room = usable - memory.sampling if shared else gpu.memory_gib * GIB * VLLM_SHARE
        if shared and (share := getattr(c.engine, "gpu_share", None)) is not None:
            room = min(room, share * gpu.memory_gib * GIB)
        samplers = 1 if shared else cluster.count - learners
        sampling = plan_sampling(
            *(samplers, gpu, self.shape, self.work, self.speed),
            itemsize=self.dtype.itemsize, most_rows=c.engine.max_num_seqs, room=room,
        )  # fmt: skip
        passes = count_passes(c.learner)
        flops = self.work.learn_flops(self.shape, checkpointing=c.learner.gradient_checkpointing, passes=passes)
        learn_s = flops / (learners * count_tflops(c, gpu) * 1e12 * self.speed.of_learning(self.shape))
        if memory.away:
            learn_s += 2 * memory.away / (HOST_GB_S * 1e9)
        if memory.host:
            learn_s += self._count_host_traffic(training, memory, learners, shards) / (HOST_GB_S * 1e9)
        sync_s = self._time_sync(cluster, learners, sampling, shared=shared) if sampling else 0.0
        generate_s = sampling.seconds(self.work) if sampling else 0.0
        overlaps = not shared and c.rollout.max_staleness > 0
        return Division(learners, shared, memory, sampling, flops, learn_s, sync_s, generate_s, usable, overlaps)

    def _count_host_traffic(self, training: Training, memory: LearnerMemory, learners: int, shards: int) -> float:
        """Count the bytes of a step between a GPU and the CPU: shards for both passes, gradients, the update."""
        rounds = -(-self.work.episodes * self.work.context // (self.tokens * learners))
        shard = (training.trained + training.frozen) * MASTER / shards
        return rounds * (2 * shard + training.trained * GRADIENT / shards) + 2 * memory.host

    def _time_sync(self, cluster: Cluster, learners: int, sampling: Sampling, *, shared: bool) -> float:
        """Work out how long new weights take to every replica, each learner sending its part."""
        gpu, sent = cluster.gpu, self.shape.parameters * self.dtype.itemsize
        if self.config.lora.rank is not None and not shared:
            sent = sent // 100  # an adapter alone
        if shared:
            return WAKE_S + 2 * sent / (gpu.bandwidth_gb_s * 1e9)
        way = gpu.link_gb_s if cluster.count <= gpu.a_machine else gpu.network_gb_s
        return sampling.replicas * sent / (learners * way * 1e9)

    # -- what would make it fit ------------------------------------------------------------------------------------

    def _find_ways(self, cluster: Cluster, samplers: int | None) -> Iterator[str]:
        """Try settings one by one, and all of them together; yield those with which it fits."""
        c = self.config
        tries: list[tuple[str, dict[str, object]]] = []
        if not c.learner.gradient_checkpointing:
            tries.append(("--learner.gradient_checkpointing true", {"learner.gradient_checkpointing": True}))
        if cluster.count == 1 and not c.learner.optimizer_offload and not c.rollout.max_staleness:
            tries.append(("--learner.optimizer_offload true", {"learner.optimizer_offload": True}))
        in_shards = cluster.count - (samplers or 1) >= 2 and c.learner.sharding != "none"
        if in_shards and not c.learner.param_offload:
            tries.append(("--learner.param_offload true", {"learner.param_offload": True}))
        if c.dtype == "float32":
            tries.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
        if c.lora.rank is None:
            if c.learner.optimizer == "adamw" and cluster.count == 1:  # it cannot be cut into shards
                tries.append(("--learner.optimizer adamw_8bit", {"learner.optimizer": "adamw_8bit"}))
            tries.append(("--lora.rank 16", {"lora.rank": 16}))
        cheap = [t for t in tries if "lora.rank" not in t[1]]
        together = (" ".join(name for name, _ in cheap), {k: v for _, given in cheap for k, v in given.items()})
        found = [name for name, given in tries if self._with(given).fits_on(cluster, samplers)]
        if not found and len(cheap) > 1 and self._with(together[1]).fits_on(cluster, samplers):
            found.append(together[0])
        if not found and c.lora.rank is None:
            both = {**together[1], "lora.rank": 16}
            if self._with(both).fits_on(cluster, samplers):
                found.append(f"{together[0]} --lora.rank 16".strip())
        yield from found
        training = self.measure_training()
        for count in (cluster.count * 2**power for power in range(1, 7)):
            more = replace(cluster, count=count)
            if self._choose(more, training, None).fits:
                yield f"--gpus {count}x{cluster.name}"
                break

    def fits_on(self, cluster: Cluster, samplers: int | None) -> bool:
        """Return True if the training fits, and that can be told."""
        try:
            return self._choose(cluster, self.measure_training(), samplers).fits
        except UserError:
            return False

    def _with(self, settings: dict[str, object]) -> Planner:
        """Return a planner whose settings are these ones."""
        config = self.config
        for path, value in settings.items():
            section, _, name = path.rpartition(".")
            if section:
                part = getattr(config, section).model_copy(update={name: value})
                config = config.model_copy(update={section: part})
            else:
                config = config.model_copy(update={name: value})
        return Planner(config, self.work, self.speed)


def count_tflops(config: TrainConfig, gpu: Gpu) -> float:
    """Count the products of a GPU in the precision that the learner multiplies in, TFLOP/s."""
    return gpu.tflops / FLOAT32 if config.dtype == "float32" and not config.learner.bf16 else gpu.tflops


def describe_plan(plan: TrainingPlan) -> str:
    """Format a plan as the lines of the command."""
    d, gpu, shape = plan.division, plan.cluster.gpu, plan.shape
    size = f"{shape.parameters / 1e9:.1f} billion parameters"
    if shape.has_experts:
        size += f", {shape.active / 1e9:.1f} of a token"
    dtype = "bfloat16" if plan.training.itemsize == 2 else "float32"
    trained = "" if not plan.training.frozen else f"; {plan.training.trained / 1e6:.0f} million of them trained"
    lines = [
        f"{plan.config.model} on {plan.cluster} ({gpu.memory_gib:g} GiB each): {size}{trained}, {dtype}",
        f"a step: {plan.work.episodes:,} episodes of {plan.work.context:,} tokens, {plan.work.sampled:,} sampled",
        "",
        *_format_table(plan),
        "",
        *_format_memory(plan),
        "",
    ]
    if d.fits:
        lines.append(f"it fits; a step takes {_format_seconds(d.step_s)}{_say_overlap(d)}")
    else:
        lines.append("it does not fit: " + _say_lack(plan))
        lines += [f"it would with {way}" for way in plan.ways] or ["no setting was found that makes it fit"]
    if plan.config.players.are_used and d.generate_s > 0:
        rollout = plan.config.rollout
        load = measure_player_load(plan.work, rollout.group_size, rollout.max_turns, d.generate_s)
        lines.append(describe_player_load(load, plan.config.players.count))
    if d.sampling and d.sampling.limited:
        lines.append(f"vLLM has room for more rows than engine.max_num_seqs {plan.config.engine.max_num_seqs}")
    says = plan.speed.measured or (
        f"assumed: {plan.speed.of_learning(shape):.0%} of {count_tflops(plan.config, gpu):.0f} TFLOP/s learning, "
        f"{plan.speed.read:.0%} of "
        f"{gpu.bandwidth_gb_s:g} GB/s sampling; --calibrate RUN takes a run's own"
    )
    return "\n".join([*lines, f"{says}. Prefixes that rows share are counted for each"])


def _format_table(plan: TrainingPlan) -> list[str]:
    d = plan.division
    rows = [("", "GPUs", "GiB of each", "seconds", "")]
    if d.sampling is not None:
        s = d.sampling
        says = f"{s.rows} rows each, {_round(s.rate)} tokens/s"
        name = f"vLLM, {s.replicas} of tensor parallel size {s.size}"
        rows.append((name, str(s.gpus), f"{s.used / GIB:.0f}", _format_number(d.generate_s), says))
    else:
        rows.append(("vLLM", "", "", "", "has no room for the weights and a few rows"))
    name = "learner, on the same one" if d.shared else f"learner, {d.learners} shards" if d.learners > 1 else "learner"
    says = f"{d.learn_flops:.1e} operations"
    rows.append((name, str(d.learners), f"{d.memory.peak / GIB:.0f}", _format_number(d.learn_s), says))
    sent = "waking, weights" if d.shared else "weights to vLLM"
    rows.append((sent, "", "", _format_number(d.sync_s), ""))
    first, *widths = (max(len(row[i]) for row in rows) for i in range(4))
    return [
        "  ".join([f"{name:<{first}}", *(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)), says]).rstrip()
        for name, *cells, says in rows
    ]


def _format_memory(plan: TrainingPlan) -> list[str]:
    memory = plan.division.memory
    kept = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.kept.items())
    if memory.host:
        kept = f"nothing between updates; {memory.host / GIB:.1f} of its machine's memory"
    learning = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.learning.items())
    away = f" ({memory.away / GIB:.1f} on the CPU while vLLM samples)" if memory.away else ""
    row = max(plan.tokens, plan.work.context)
    return [
        f"a GPU of the learner, GiB: {kept}{away}",
        f"in an update: {learning}, with {row:,} tokens at once",
    ]


def _say_overlap(division: Division) -> str:
    if division.shared or division.overlaps:
        return ""
    return f"; {_format_seconds(division.overlapped_s)} with --rollout.max_staleness 1"


def _say_lack(plan: TrainingPlan) -> str:
    d, gib = plan.division, plan.cluster.gpu.memory_gib
    if d.memory.peak > d.memory_limit:
        return f"the learner needs {d.memory.peak / GIB:.0f} GiB of a GPU that has {d.memory_limit / GIB:.0f} for it"
    if d.shared:
        return f"beside the learner's {d.memory.sampling / GIB:.0f} GiB, {gib:g} GiB leave too little for vLLM"
    return f"vLLM has no room for the weights and a few rows of {plan.work.context:,} tokens"


def _format_seconds(seconds: float) -> str:
    """Format a duration for a sentence."""
    return f"{_format_number(seconds)} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _format_number(number: float) -> str:
    """Format a number by two digits that say something."""
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"


def _round(number: float) -> str:
    digits = max(len(str(int(number))) - 2, 0)
    return f"{round(number, -digits):,.0f}"
