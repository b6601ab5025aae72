"""Scripts and configurations as TOML: what it says, and that agentrl takes it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.migration.config_files import read_config_file
from agentrl.migration.document import format_plan
from agentrl.migration.functions import write_functions
from agentrl.migration.plan import Plan
from agentrl.migration.script import read_script
from agentrl.settings.loader import build_config

HEAD = """\
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward as acc, get_soft_overlong_punishment
WORDS = re.compile("yes|no")

def reward(completions, **columns):
    return [float(bool(WORDS.search(c))) for c in completions]

data = load_dataset("json", data_files="rows.jsonl", split="train")
"""
TAIL = "\nGRPOTrainer('nano', reward, args=GRPOConfig(max_steps=3{config}), train_dataset=data{trainer}).train()\n"


def migrate(tmp_path: Path, text: str) -> tuple[dict[str, Any], str, Plan]:
    """The TOML of a script, its text, and the plan."""
    path = tmp_path / "train.py"
    path.write_text(text)
    plan = read_script(path)
    toml = format_plan(plan)
    return tomllib.loads(toml), toml, plan


def script(config: str = "", trainer: str = "") -> str:
    comma = ", " if config else ""
    other = ", " if trainer else ""
    return HEAD + TAIL.format(config=comma + config, trainer=other + trainer)


def test_the_settings_of_a_script_and_trl_s_defaults_that_matter_are_written(tmp_path: Path) -> None:
    settings, toml, _ = migrate(
        tmp_path,
        script("learning_rate=1e-5, per_device_train_batch_size=16, loss_type='grpo', output_dir='out', bf16=False"),
    )
    config = build_config(("toml", settings))
    assert (config.learner.lr, config.learner.loss, config.rollout.tasks_per_step) == (1e-5, "grpo", 2)
    assert (config.steps, config.seed, config.learner.lr_scheduler, config.dtype) == (3, 42, "linear", "float32")
    assert (config.learner.epsilon_high, config.eval.every) == (0.2, 0)
    assert settings["env"] == {"name": "prompts", "data": "rows.jsonl", "rewards": [f"{tmp_path}/train.py:reward"]}
    assert "lr = 1e-05  # learning_rate\n" in toml
    assert "seed = 42  # TRL's default: seed\n" in toml
    assert "gradient_checkpointing" not in toml


def test_what_has_no_counterpart_is_named_with_its_reason(tmp_path: Path) -> None:
    _, toml, _ = migrate(tmp_path, script("use_liger_kernel=True, log_completions=True, nonsense=1"))
    assert "# Not here: use_liger_kernel" in toml
    assert "# Nothing to set: log_completions: every completion is kept" in toml
    assert "nonsense: TRL 1.16 has no such name, nor has agentrl" in toml


def test_bf16_is_trl_s_default(tmp_path: Path) -> None:
    assert migrate(tmp_path, script())[0]["learner"]["bf16"] is True
    assert "bf16" not in migrate(tmp_path, script("fp16=True"))[0].get("learner", {})
    assert migrate(tmp_path, script("model_init_kwargs={'dtype': 'float32'}"))[0]["dtype"] == "float32"


def test_rewards_are_named_wherever_they_come_from(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("def good(completions, **_): return [1.0] * len(completions)\n")
    text = HEAD + (
        "from more import good as g\nimport somewhere.far as far\n"
        "made = far.make(3)\n"
        "funcs = [reward, g, far.away, made, 'org/model']\nfuncs.append(acc)\n"
        "funcs.extend([get_soft_overlong_punishment(100, soft_punish_cache=20)])\n"
        "GRPOTrainer(model='nano', reward_funcs=funcs, args=GRPOConfig(max_steps=1), train_dataset=data)\n"
    )
    settings, _, plan = migrate(tmp_path, text)
    here = f"{tmp_path}/train.py"
    names = [f"{here}:reward", f"{tmp_path}/more.py:good", "somewhere.far:away", f"{here}:made"]
    assert settings["env"]["rewards"] == [*names, "reward-model:org/model", "math", "soft_overlong_punishment"]
    assert (settings["env"]["max_completion_len"], settings["env"]["soft_punish_cache"]) == (100, 20)
    assert plan.functions == ["reward", "made"]


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ("callbacks=[C()]", "callbacks are for Python: agentrl.train(..., callbacks=...)"),
        ("optimizers=(o, s)", "optimizers are for Python"),
        ("environment_factory=E", "environment_factory: an environment is a class here"),
        ("rollout_func=f", "rollout_func: the rollout is agentrl's own"),
        ("reward_processing_classes=[t]", "a reward model's tokenizer is loaded by its name"),
        ("peft_config=get_peft_config(a)", "peft_config = get_peft_config(a) is known only once the script runs"),
        ("**more", "line 12: **more is known only once the script runs; it is left out"),
    ],
)
def test_what_a_person_has_to_do_is_said(tmp_path: Path, trainer: str, sentence: str) -> None:
    assert any(sentence in word for word in migrate(tmp_path, script(trainer=trainer))[2].todo)


def test_an_adapter_has_peft_s_defaults_where_the_script_says_nothing(tmp_path: Path) -> None:
    lora = migrate(tmp_path, script(trainer="peft_config=LoraConfig(r=4)"))[0]["lora"]
    assert lora == {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    toml = migrate(tmp_path, script(trainer="peft_config=LoraConfig(lora_dropout=0.1)"))[1]
    assert "# Not here: lora_dropout: adapters have no dropout" in toml


def test_tools_are_named(tmp_path: Path) -> None:
    text = (
        HEAD
        + "def add(a: int, b: int) -> int:\n    'Add.'\n    return a + b\n"
        + TAIL.format(config="", trainer=", tools=[add]")
    )
    assert migrate(tmp_path, text)[0]["tools"] == [f"{tmp_path}/train.py:add"]


@pytest.mark.parametrize(
    ("made", "data"),
    [
        ("load_dataset('json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})['train']", "a.jsonl"),
        ("load_dataset('parquet', data_files=['a.parquet'], split='train')", "a.parquet"),
        ("load_dataset('org/name', split='train')", "org/name"),
        ("load_dataset('org/name', 'main', split='train')", "org/name:main"),
        ("load_dataset('org/name', name='main')['train'].shuffle(seed=1)", "org/name:main"),
        ("load_dataset('org/name', split='train').train_test_split(test_size=0.1)['train']", "org/name"),
        ("load_dataset('org/name', split='train').map(lambda row: row)", "TODO.jsonl"),
        ("load_dataset('csv', data_files='a.csv', split='train')", "csv"),
        ("load_dataset('json', data_files='a.jsonl', split='train[:10]')", "json"),
        ("load_dataset('org/name', data_dir='a')", "TODO.jsonl"),
        ("Dataset.from_list([{'prompt': 'a'}])", "TODO.jsonl"),
        ("rows", "TODO.jsonl"),
    ],
)
def test_a_dataset_is_a_file_or_a_name_or_left_to_do(tmp_path: Path, made: str, data: str) -> None:
    text = HEAD + f"data = {made}\n" + TAIL.format(config="", trainer="")
    settings, _, plan = migrate(tmp_path, text)
    assert settings["env"]["data"] == data
    assert any(word.startswith("env.data: line ") for word in plan.todo) == (data == "TODO.jsonl")


def test_a_column_that_is_renamed_to_prompt_is_the_prompt_column(tmp_path: Path) -> None:
    text = HEAD + "data = data.rename_column('question', 'prompt')\n" + TAIL.format(config="", trainer="")
    assert migrate(tmp_path, text)[0]["env"]["prompt_column"] == "question"


def test_a_split_a_revision_files_and_a_stream_are_settings_of_the_environment(tmp_path: Path) -> None:
    made = "load_dataset('csv', data_files=['a.csv', 'b.csv'], split='train[:9]', revision='v2', streaming=True)"
    text = HEAD + f"data = {made}\n" + TAIL.format(config="", trainer="")
    env = migrate(tmp_path, text)[0]["env"]
    assert (env["data"], env["data_files"], env["split"]) == ("csv", ["a.csv", "b.csv"], "train[:9]")
    assert (env["revision"], env["streaming"]) == ("v2", True)


def test_an_eval_dataset_is_a_split_or_a_file(tmp_path: Path) -> None:
    of_hub = HEAD + "data = load_dataset('org/name')\n"
    one = migrate(tmp_path, of_hub + TAIL.format(config="", trainer=", eval_dataset=data['test']"))[0]["env"]
    assert (one["data"], one["test_split"]) == ("org/name", "test")
    files = HEAD + "more = load_dataset('json', data_files='b.jsonl')['train']\n"
    other = migrate(tmp_path, files + TAIL.format(config="", trainer=", eval_dataset=more"))[0]["env"]
    assert (other["data"], other["test_data"]) == ("rows.jsonl", "b.jsonl")


def test_without_max_steps_a_script_trains_for_trl_s_epochs(tmp_path: Path) -> None:
    assert migrate(tmp_path, script().replace("max_steps=3", ""))[0]["epochs"] == 3.0
    assert migrate(tmp_path, script().replace("max_steps=3", "num_train_epochs=1"))[0]["epochs"] == 1.0


def test_a_script_that_trains_as_it_is_imported_is_said_so_and_its_functions_can_be_taken_out(tmp_path: Path) -> None:
    _, _, plan = migrate(tmp_path, script())
    assert "would start the training of line 12" in plan.todo[0]
    file = tmp_path / "functions.py"
    write_functions(tmp_path / "train.py", plan.functions, file)
    plan.move_functions(tmp_path / "train.py", file)
    assert plan.todo == []
    assert tomllib.loads(format_plan(plan))["env"]["rewards"] == [f"{file}:reward"]
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert names["reward"](["yes", "well"]) == [1.0, 0.0]
    assert "GRPO" not in file.read_text()
    with pytest.raises(UserError, match="is there already"):
        write_functions(tmp_path / "train.py", plan.functions, file)


def test_a_script_with_a_guard_may_be_imported(tmp_path: Path) -> None:
    guarded = HEAD + 'if __name__ == "__main__":' + TAIL.format(config="", trainer="").replace("\n", "\n    ")
    assert migrate(tmp_path, guarded)[2].todo == []
    called = HEAD + "def main():" + TAIL.format(config="", trainer="").replace("\n", "\n    ") + "\nmain()\n"
    assert "would start the training" in migrate(tmp_path, called)[2].todo[0]


def test_a_config_is_changed_after_it_is_made_and_built_of_a_dict(tmp_path: Path) -> None:
    text = HEAD + (
        "base = {'learning_rate': 1e-4, 'max_steps': 5}\n"
        "args = GRPOConfig('out', **base, num_iterations=2)\n"
        "args.temperature = 0.7\n"
        "kwargs = {'reward_funcs': reward, 'train_dataset': data}\n"
        "class Mine(GRPOTrainer): ...\n"
        "Mine(model=AutoModelForCausalLM.from_pretrained('nano', dtype=torch.bfloat16), args=args, **kwargs)\n"
    )
    settings, _, plan = migrate(tmp_path, text)
    assert settings["learner"]["lr"] == 1e-4
    assert (settings["steps"], settings["rollout"]["temperature"], settings["model"]) == (3, 0.7, "nano")
    assert (settings["run"]["dir"], settings["dtype"]) == ("out", "bfloat16")
    assert "Mine overrides methods of GRPOTrainer" in plan.todo[0]


def test_a_config_from_the_command_line_says_where_its_fields_go(tmp_path: Path) -> None:
    text = HEAD + (
        "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n"
        "a, args, m = parser.parse_args_and_config()\n"
        "GRPOTrainer(m.model_name_or_path, reward, args, data)\n"
    )
    settings, _, plan = migrate(tmp_path, text)
    assert settings["model"] == "./TODO"
    assert any("the fields of GRPOConfig come from the command line" in word for word in plan.todo)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("print 'hello'\n", "line 1 is no Python 3"),
        ("x = (\n", "is no Python 3"),
        ("x = 1\n", "makes no GRPOTrainer"),
        (
            "from trl import SFTTrainer\nSFTTrainer(model='x')\n",
            "line 2 makes a SFTTrainer; agentrl trains as",
        ),
        ("x = " + "(" * 3000 + ")" * 3000, "is no Python 3"),
        ("#" * 2_000_001, "is no script: it has 2,000,001 bytes"),
        ("a\0b", "is no Python 3"),
    ],
)
def test_what_is_no_script_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        migrate(tmp_path, text)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_comments_stay_comments_whatever_a_script_says(tmp_path: Path) -> None:
    settings, _, _ = migrate(tmp_path, script("run_name='a\\nsteps = 9', top_p='x\\u2028y\\n[env]'"))
    assert settings["steps"] == 3


# -- configurations -----------------------------------------------------------------------------------------------


def read(tmp_path: Path, name: str, text: str) -> tuple[dict[str, Any], Plan]:
    path = tmp_path / name
    path.write_text(text)
    plan = Plan(name)
    read_config_file(path, plan)
    return tomllib.loads(format_plan(plan)), plan


def test_the_yaml_of_trl_grpo_is_read(tmp_path: Path) -> None:
    settings, plan = read(
        tmp_path,
        "grpo.yaml",
        "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: org/data\ndataset_config: main\n"
        "reward_funcs: [accuracy_reward, my_lib.rewards.custom]\nlearning_rate: 1e-5\nmax_steps: 10\n"
        "use_peft: true\nlora_r: 8\nbf16: true\ndtype: float32\nnum_generation: 4\n",
    )
    assert (settings["model"], settings["steps"], settings["dtype"]) == ("Qwen/Qwen3-0.6B", 10, "float32")
    assert settings["learner"]["bf16"] is True
    assert settings["env"]["data"] == "org/data:main"
    assert settings["env"]["rewards"] == ["math", "my_lib.rewards:custom"]
    assert settings["learner"]["lr"] == 1e-5
    assert settings["lora"] == {"rank": 8, "alpha": 32}
    assert [t for t in plan.todo if "num_generation:" in t]


def test_a_yaml_without_model_rewards_and_data_leaves_them_to_do(tmp_path: Path) -> None:
    settings, plan = read(tmp_path, "grpo.yaml", "max_steps: 3\n")
    assert (settings["model"], settings["env"]["data"]) == ("./TODO", "TODO.jsonl")
    assert len(plan.todo) == 3


def test_deepspeed_s_file_is_translated_where_there_is_a_counterpart(tmp_path: Path) -> None:
    settings, plan = read(
        tmp_path,
        "ds.json",
        '{"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,'
        '"bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 2e-6, "betas": [0.9, 0.95]}},'
        '"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7}},'
        '"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}',
    )
    assert settings["rollout"]["tasks_per_step"] == 4
    learner = settings["learner"]
    assert (learner["max_grad_norm"], learner["lr"], learner["betas"]) == (0.5, 2e-6, [0.9, 0.95])
    assert (learner["lr_scheduler"], learner["warmup_steps"], learner["bf16"]) == ("linear", 7, True)
    assert learner["sharding"] == "full"
    assert not plan.notes


def test_a_script_s_deepspeed_file_is_read_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": 0.25}')
    settings, toml, _ = migrate(tmp_path, script("deepspeed='ds.json'"))
    assert settings["learner"]["max_grad_norm"] == 0.25
    assert settings["learner"]["sharding"] == "full"
    assert "ZeRO stage 2" in toml
    assert "# Not here: deepspeed = 'gone.json'" in migrate(tmp_path, script("deepspeed='gone.json'"))[1]


def test_accelerate_s_processes_and_precision_are_read(tmp_path: Path) -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\n"
        "deepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: 2\n  offload_optimizer_device: cpu\n"
    )
    settings, plan = read(tmp_path, "accelerate.yaml", text)
    assert settings["rollout"]["tasks_per_step"] == 8
    assert any("torchrun --nproc_per_node 4 -m agentrl train" in note for note in plan.notes)
    assert settings["learner"]["sharding"] == "full"
    assert any("offload_optimizer (cpu): " in note and "learner.optimizer_offload" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("zero", "sharding"),
    [
        ('{"stage": 0}', "none"),
        ('{"stage": 1}', "full"),
        ('{"stage": 3, "zero_hpz_partition_size": 8}', "hybrid"),
        ('{"stage": "auto"}', None),
        ('{"stage": 3, "offload_param": {"device": "nvme"}}', "full"),
    ],
)
def test_zero_s_stages_are_shards(tmp_path: Path, zero: str, sharding: str | None) -> None:
    settings, plan = read(tmp_path, "ds.json", f'{{"zero_optimization": {zero}}}')
    assert settings.get("learner", {}).get("sharding") == sharding
    assert [note for note in plan.notes if "offload_param (nvme) has no counterpart" in note] == plan.notes


def test_a_stage_that_there_is_not_is_left_to_do(tmp_path: Path) -> None:
    settings, plan = read(tmp_path, "ds.json", '{"zero_optimization": {"stage": 7}}')
    assert "sharding" not in settings.get("learner", {})
    assert any("ZeRO stage 7: ZeRO has stages 0 to 3" in todo for todo in plan.todo)


@pytest.mark.parametrize(
    ("fsdp", "sharding"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", "full"),
        ("fsdp_sharding_strategy: 4", "hybrid"),
        ("fsdp_sharding_strategy: NO_SHARD", "none"),
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: true", "full"),
        ("fsdp_reshard_after_forward: HYBRID_SHARD", "hybrid"),
    ],
)
def test_fsdp_s_strategies_are_shards(tmp_path: Path, fsdp: str, sharding: str) -> None:
    text = f"fsdp_config:\n  {fsdp}\n  fsdp_activation_checkpointing: true\n  fsdp_offload_params: true\n"
    settings, plan = read(tmp_path, "accelerate.yaml", f"distributed_type: FSDP\nnum_processes: 4\n{text}")
    assert settings["learner"]["sharding"] == sharding
    assert settings["learner"]["gradient_checkpointing"] is True
    assert any("fsdp_offload_params: where several GPUs" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", "- 1\n- 2\n", "holds no table of settings, but [1, 2]"),
        ("a.yaml", "a: [1\n", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "cannot be read"),
        ("a.yaml", "1: 2", "holds no table of settings"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        read(tmp_path, name, text)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
