"""srun and mpirun start one training of several processes, as torchrun does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from agentrl import UserError
from agentrl.cli import main
from agentrl.cli import train as cli_train
from agentrl.learner.launch_environment import adopt_launcher, read_first_host
from agentrl.settings.schema import TrainConfig

SRUN = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "4711",
}


def test_a_task_of_srun_is_a_process_of_the_training() -> None:
    environment = dict(SRUN)
    adopt_launcher(environment)
    said = {name: environment[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    assert said == {
        **{"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu007"}
    }
    assert environment["MASTER_PORT"] == "24711"


def test_each_task_of_srun_reads_batches_of_other_libraries_for_all_and_the_first_one_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[TrainConfig] = []

    def run_training(config: TrainConfig) -> int:
        ran.append(config)
        return 0

    monkeypatch.setattr(cli_train, "run_training", run_training)
    words = ["train", "--env", "math-tools", "--per_device_train_batch_size", "4", "--num_generations", "4"]
    for rank in ("0", "1"):
        with monkeypatch.context() as patch:
            for name, value in {**SRUN, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": rank}.items():
                patch.setenv(name, value)
            for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                patch.setenv(name, "")  # so that it is as before afterwards
                patch.delenv(name)
            assert main(words) == 0
            assert main([*words, "--ranks", "2"]) == 2
        err = capsys.readouterr().err
        assert "one of 8 that torchrun, srun or mpirun started" in err
        assert ("tasks_per_step = 8 here" in err) is (rank == "0")
    assert [config.rollout.tasks_per_step for config in ran] == [8, 8]


def test_what_torchrun_says_stays_and_one_task_is_alone() -> None:
    for environment in ({**SRUN, "WORLD_SIZE": "2", "RANK": "0"}, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, {}):
        before = dict(environment)
        adopt_launcher(environment)
        assert environment == before


def test_an_allocation_without_srun_is_no_training_of_many() -> None:
    environment = {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "8"}  # no rank
    adopt_launcher(environment)
    assert "WORLD_SIZE" not in environment


def test_mpirun_has_to_be_told_where_the_processes_meet() -> None:
    environment = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(UserError, match=r"mpirun started 4 processes, .* where they meet: set MASTER_ADDR"):
        adopt_launcher(dict(environment))
    environment |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    adopt_launcher(environment)
    assert (environment["WORLD_SIZE"], environment["RANK"]) == ("4", "1")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        *(("gpu[007-010,12],login1", "gpu007"), ("gpu[3,5]", "gpu3"), ("a1,a2", "a1"), ("n-[1-2]-x", "n-1-x")),
        *(("host.cluster", "host.cluster"), ("", "")),
    ],
)
def test_the_first_of_slurm_s_nodes(nodes: str, host: str) -> None:
    assert read_first_host(nodes) == host


SCRIPT = """
from agentrl.learner.distributed import init_process_group
from agentrl.learner.launch_environment import adopt_launcher
adopt_launcher()
group = init_process_group()
print(group.rank, group.world_size, group.local_size, group.all_gather(group.rank))
group.destroy()
"""


@pytest.mark.slow
def test_two_tasks_meet() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
    tasks = []
    for rank in ("0", "1"):
        said = {**os.environ, **own, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "MASTER_PORT": str(port)}
        tasks.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env=said, stdout=subprocess.PIPE, text=True))
    assert [task.communicate(timeout=120)[0].strip() for task in tasks] == ["0 2 2 [0, 1]", "1 2 2 [0, 1]"]
