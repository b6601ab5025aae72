"""Plans of trainings: the published sizes of models, the learner's own memory, and arithmetic that can be looked up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from agentrl.cli.dispatch import main
from agentrl.errors import ConfigError, ContractError, UserError
from agentrl.learner.learner import LossSettings
from agentrl.planning.gpus import GPUS, Gpu, find_gpu, parse_cluster
from agentrl.planning.memory import GIB, Training, count_alone, count_sharded
from agentrl.planning.plan import Division, Planner, describe_plan
from agentrl.planning.sampling import plan_sampling
from agentrl.planning.shapes import build_meta_model, find_config, find_positions, list_shapes, measure_shape
from agentrl.planning.step_memory import make_rows, measure_passing, measure_step
from agentrl.planning.workload import Speed, Workload, calibrate, count_passes, read_measured
from agentrl.settings.loader import build_config
from tests.helpers.tiny import SHAPE

H100 = GPUS["h100"]
PUBLISHED = {  # billions of parameters, and of those that a token goes through: the models' own pages
    "Qwen/Qwen3-0.6B": (0.6, 0.6),
    "Qwen/Qwen3-1.7B": (1.7, 1.7),
    "Qwen/Qwen3-4B": (4.0, 4.0),
    "Qwen/Qwen3-8B": (8.2, 8.2),
    "Qwen/Qwen3-14B": (14.8, 14.8),
    "Qwen/Qwen3-32B": (32.8, 32.8),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen/Qwen3-235B-A22B": (235, 22),
}


def shape_of(name: str) -> Any:
    return measure_shape(build_meta_model(find_config(name), torch.bfloat16))


def config(**given: Any) -> Any:
    named = {name.replace("__", "."): value for name, value in given.items()}
    return build_config(("test", {"env": "math-tools", "dtype": "bfloat16", **named}))


def tiny(tmp_path: Path, **more: Any) -> str:
    """A model's config.json, of a size at which a plan takes no time."""
    Qwen3Config(**SHAPE | {"architectures": ["Qwen3ForCausalLM"]} | more).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_s_models_have_their_published_sizes(name: str) -> None:
    shape, (parameters, active) = shape_of(name), PUBLISHED[name]
    assert shape.parameters / 1e9 == pytest.approx(parameters, rel=0.02)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.02)
    assert PUBLISHED.keys() == list_shapes().keys()


def step(**settings: Any) -> Any:
    shape = Qwen3Config(**SHAPE | {"vocab_size": 5000, "num_hidden_layers": 4})
    rows = settings.pop("rows", make_rows(1024, 256, 128))
    settings = {"threads": 1, "max_tokens_per_microbatch": 1024, **settings}
    return measure_step(lambda: build_meta_model(shape, torch.bfloat16), LossSettings(**settings), "adamw", rows)


def test_an_update_without_values_keeps_14_bytes_a_parameter_and_takes_20() -> None:
    model = build_meta_model(Qwen3Config(**SHAPE | {"vocab_size": 5000, "num_hidden_layers": 4}), torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    short = step(rows=make_rows(1, 16, 4))
    assert short.kept == pytest.approx(14 * parameters, rel=0.01)
    assert 20 <= short.peak / parameters < 24


def test_what_passes_grows_with_tokens_and_shrinks_with_checkpointing() -> None:
    one, two = step(), step(rows=make_rows(2048, 256, 128), max_tokens_per_microbatch=2048)
    assert two.passing == pytest.approx(2 * one.passing, rel=0.1)
    assert two.kept == pytest.approx(one.kept, rel=0.01)
    assert step(gradient_checkpointing=True).passing < 0.85 * one.passing


def test_the_kept_bytes_alone_are_those_of_the_learner() -> None:
    measured = step()
    model = build_meta_model(Qwen3Config(**SHAPE | {"vocab_size": 5000, "num_hidden_layers": 4}), torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    alone = count_alone(Training(parameters, 0, 2, "adamw", measured.passing))
    assert alone.sampling == pytest.approx(measured.kept, rel=0.01)
    assert alone.peak == pytest.approx(measured.peak, rel=0.15)
    assert count_alone(Training(parameters, 0, 2, "adamw", 0, offloads=True)).sampling == 2 * parameters


def test_shards_of_8b_on_8_gpus_leave_room_for_vllm_at_a_share_of_4_tenths() -> None:
    shape = shape_of("Qwen/Qwen3-8B")
    passing = measure_passing(
        lambda: build_meta_model(find_config("Qwen/Qwen3-8B"), torch.bfloat16),
        LossSettings(threads=1, max_tokens_per_microbatch=8192, gradient_checkpointing=True),
        "adamw",
        make_rows(8192, 2048, 700),
    )
    one = count_sharded(Training(shape.parameters, 0, 2, "adamw", passing), shape, 8)
    assert one.peak <= 80 * GIB
    assert one.sampling + 0.4 * 80 * GIB <= 80 * GIB
    kept = one.kept["weights"] + one.kept["optimizer"] + one.learning["gradients"]
    assert kept == pytest.approx(16 * shape.parameters / 8)
    assert 1 * GIB < passing < 5 * GIB


def test_offloaded_shards_are_in_the_memory_of_the_machine() -> None:
    shape = shape_of("Qwen/Qwen3-8B")
    here = count_sharded(Training(shape.parameters, 0, 2, "adamw", 1e9), shape, 2)
    away = count_sharded(Training(shape.parameters, 0, 2, "adamw", 1e9, offloads_shards=True), shape, 2)
    assert away.sampling == 0
    assert away.host == pytest.approx(16 * shape.parameters / 2)
    assert here.peak - away.peak == pytest.approx(away.host)


def test_times_are_those_of_the_paper_plan() -> None:
    """Generating 73 s with 4 GPUs, learning 139 s with 4: 8B, 512 episodes of 6,000 tokens, 2,000 sampled."""
    shape, work = shape_of("Qwen/Qwen3-8B"), Workload(512, 6000, 2000)
    flops = work.learn_flops(shape, checkpointing=True)
    assert flops / (4 * 400e12) == pytest.approx(139, rel=0.02)
    one = Workload(128, 6000, 2000)
    sampling = plan_sampling(1, H100, shape, one, Speed(), itemsize=2, most_rows=256, room=H100.memory_gib * 0.9e9)
    assert sampling is not None
    assert sampling.seconds(one) == pytest.approx(73, rel=0.05)
    one, shape = Workload(256, 32000, 8000), shape_of("qwen3-235b-a22b")
    large = plan_sampling(16, H100, shape, one, Speed(), itemsize=2, most_rows=512, room=H100.memory_gib * 0.9e9)
    assert large is not None
    assert large.size == 16
    assert large.seconds(one) == pytest.approx(350 / 0.9**4, rel=0.07)


def divide(planner: Planner, gpus: str, learners: int, **training: Any) -> Division:
    parameters = planner.shape.parameters
    known = Training(
        **{"trained": parameters, "frozen": 0, "itemsize": 2, "optimizer": "adamw", "passing": 1e9, **training}
    )
    return planner.divide(parse_cluster(gpus), known, learners)


def test_a_division_says_who_has_too_little() -> None:
    planner = Planner(config(model="qwen3-8b"), Workload(512, 6000, 2000))
    away = Planner(config(model="qwen3-8b", learner__param_offload=True), planner.work)
    slower = divide(away, "8xh100", 4, offloads_shards=True)
    assert slower.memory.peak < divide(planner, "8xh100", 4).memory.peak
    assert slower.learn_s > 1.1 * divide(planner, "8xh100", 4).learn_s
    assert divide(planner, "8xh100", 4).fits
    assert not divide(planner, "8xl4", 4).fits
    assert divide(planner, "8xl4", 4).sampling is not None
    alone = divide(planner, "1xh100", 0)
    assert alone.shared
    assert alone.sampling is None
    adapter = divide(planner, "1xh100", 0, trained=40_000_000, frozen=planner.shape.parameters)
    assert adapter.fits
    assert adapter.sampling is not None
    overlapping = Planner(config(model="qwen3-8b", rollout__max_staleness=1), Workload(512, 6000, 2000))
    assert divide(overlapping, "8xh100", 4).step_s < divide(planner, "8xh100", 4).step_s


def test_precision_is_time_and_a_base_in_4_bits_is_room() -> None:
    work = Workload(512, 6000, 2000)
    half, single, mixed = (
        divide(Planner(config(model="qwen3-8b", **given), work), "8xh100", 4).learn_s
        for given in ({}, {"dtype": "float32"}, {"dtype": "float32", "learner__bf16": True})
    )
    assert single == pytest.approx(15 * half)
    assert mixed == half
    base = {"trained": 10_000_000, "frozen": 8_000_000_000, "itemsize": 2, "optimizer": "adamw", "passing": 0.0}
    plain, quantized = (count_alone(Training(**base, quantized=q)).kept["weights"] for q in (False, True))  # type: ignore[arg-type]
    assert 3 < plain / quantized < 4
    shape = Planner(config(model="qwen3-8b"), work).shape
    plain, quantized = (count_sharded(Training(**base, quantized=q), shape, 4).kept["weights"] for q in (False, True))  # type: ignore[arg-type]
    assert 3 < plain / quantized < 4


def test_a_share_that_is_set_bounds_vllm_on_a_shared_gpu() -> None:
    work = Workload(512, 6000, 2000)
    rows = []
    for share in (0.3, 0.6):
        planner = Planner(config(model="qwen3-1.7b", engine__gpu_share=share, engine__name="vllm"), work)
        made = divide(planner, "1xh100", 0)
        assert made.sampling is not None
        rows.append(made.sampling.rows)
    assert rows[0] < rows[1]


def test_what_does_not_fit_has_ways_out_that_do(tmp_path: Path) -> None:
    """On a GPU made for it: weights of 2 bytes fit, what the optimizer keeps does not."""
    model = tiny(tmp_path, vocab_size=200_000, hidden_size=64, max_position_embeddings=4096)
    planner = Planner(config(model=model, learner__max_tokens_per_microbatch=512), Workload(16, 512, 128))
    small = parse_cluster("tests.planning.test_plan:SMALL")
    plan = planner.plan(small)
    assert not plan.division.fits
    assert "--learner.optimizer adamw_8bit" in plan.ways
    text = describe_plan(plan)
    assert "it does not fit: " in text
    assert "it would with --learner.optimizer adamw_8bit" in text
    assert planner._with({"learner.optimizer": "adamw_8bit"}).plan(small).division.fits


SMALL = Gpu(memory_gib=0.45, tflops=1, bandwidth_gb_s=10)


@pytest.mark.parametrize("learner", [{}, {"learner__num_iterations": 2, "learner__beta": 0.1}])
def test_a_calibrated_plan_takes_the_time_that_the_run_took(learner: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(tmp_path)
    rows = [
        {"time/learn": 9.0, "time/generate": 9.0, "num_tokens": 10, "sampled_tokens": 4},  # the first, left out
        {"time/learn": 2.0, "time/generate": 5.0, "num_tokens": 12_800, "sampled_tokens": 4_800},
        {"eval/reward": 1.0},
        {"time/learn": 4.0, "time/generate": 7.0, "num_tokens": 12_800, "sampled_tokens": 4_800},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"time/le')
    measured = read_measured(tmp_path, 64)
    assert (measured.learn_s, measured.generate_s) == (3.0, 6.0)
    work = measured.workload()
    assert work == Workload(64, 200, 75)
    ran = config(model=model, **learner)
    speed = calibrate(
        measured, measure_shape(build_meta_model(find_config(model), torch.bfloat16)), tflops=H100.tflops,
        bandwidth=H100.bandwidth_gb_s, itemsize=2, gpus=1, rows=128, checkpointing=False,
        passes=count_passes(ran.learner),
    )  # fmt: skip
    made = divide(Planner(ran, work, speed), "1xh100", 0)
    assert made.learn_s == pytest.approx(3.0, rel=0.01)
    assert made.generate_s == pytest.approx(6.0, rel=0.01)
    assert f"measured in {tmp_path}" in speed.measured


def test_operations_are_those_of_all_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "1xh100", "--model", tiny(tmp_path), "--context", "128"]
    counted = []
    for given in ([], ["--learner.num_iterations", "4"], ["--learner.num_iterations", "3", "--learner.beta", "0.1"]):
        assert main([*words, *given]) == 0
        counted.append(float(capsys.readouterr().out.partition(" operations")[0].rpartition(" ")[2]))
    assert [several / counted[0] for several in counted] == pytest.approx([1, 4, 3 + 1 / 3], rel=0.05)


def test_a_run_without_steps_calibrates_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics can be read there"):
        read_measured(tmp_path, 8)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="no two finished steps"):
        read_measured(tmp_path, 8)


def test_gpus_are_named_counted_and_open() -> None:
    cluster = parse_cluster("8xH100")
    assert (cluster.count, cluster.gpu) == (8, H100)
    assert parse_cluster("a100").count == 1
    assert find_gpu("tests.planning.test_plan:SMALL") is SMALL
    with pytest.raises(UserError, match=r"no GPU 'h10'; did you mean .*h100.*; or module:attribute"):
        parse_cluster("8xh10")
    with pytest.raises(UserError, match="--gpus is such as 8xh100, not '0xh100'"):
        parse_cluster("0xh100")
    with pytest.raises(ContractError, match=r"is an agentrl\.planning\.gpus\.Gpu, not"):
        find_gpu("tests.planning.test_plan:tiny")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "nobody/has-this"], "no config.json could be read"),
        (["--model", "qwen3-8b", "--context", "100", "--sampled", "100"], "--sampled 100 is of the --context 100"),
        (["--model", "qwen3-8b", "--context", "50000"], "--context 50000: qwen3-8b has 40,960 positions"),
        (["--learner.param_offload", "true", "--samplers", "7"], "of 8 GPUs there are fewer. Leave it out, or plan"),
        (["--samplers", "8"], "--samplers 8: of 8 GPUs vLLM may have 1 to 7 to itself"),
        (["--calibrate", "nowhere"], "nowhere"),
        (["--learner.lr", "x"], "learner.lr"),
    ],
)
def test_wrong_words_are_a_sentence(
    words: Sequence[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--model" in words else ["--model", tiny(tmp_path, max_position_embeddings=8192)]
    assert main(["plan", "--gpus", "8xh100", *given, *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ({"model_type": "bloom", "n_layer": 2, "n_head": 4}, "it does not use transformers' attention interface"),
        ({"model_type": "t5", "num_layers": 2, "num_heads": 4}, "model type 't5' is no causal language model"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "a plan needs num_attention_heads, which a config of model"),
    ],
)
def test_a_model_that_is_no_usual_transformer_is_a_sentence(
    described: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 1000, **described}))
    assert main(["plan", "--gpus", "1xh100", "--model", str(tmp_path), "--context", "64"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_model_without_positions_has_room_for_any_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom", "n_layer": 2, "vocab_size": 1000}))
    assert find_positions(find_config(str(tmp_path))) is None
    assert Planner(config(model=str(tmp_path)), Workload(8, 1_000_000, 1000)).work.context == 1_000_000
    assert find_positions(find_config("qwen3-8b")) == 40_960


def test_the_command_prints_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "8xh100", "--model", tiny(tmp_path, max_position_embeddings=8192), "--dtype", "bfloat16"]
    assert main([*words, "--context", "512", "--learner.max_tokens_per_microbatch", "512", "--samplers", "3"]) == 0
    said = capsys.readouterr().out
    assert "a step: 128 episodes of 512 tokens, 170 sampled" in said
    assert "learner, 5 shards" in said
    assert "it fits; a step takes" in said
    assert "with --rollout.max_staleness 1" in said


def test_a_context_over_the_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--context 300: .* has 256 positions"):
        Planner(config(model=tiny(tmp_path)), Workload(8, 300, 100))
