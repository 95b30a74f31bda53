"""What torchrun and srun say about a process, and what is refused before anything can hang."""

from __future__ import annotations

import os

import pytest

from phalanx.errors import InputError
from phalanx.launch.environment import Launched, check_alone, launched, run_name

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}


def test_nobody_started_us():
    assert launched({}) is None
    assert launched(BATCH) is None, "a batch script is not a task of srun"


def test_torchrun():
    assert launched(TORCHRUN) == Launched(by="torchrun", rank=5, local_rank=2, num_ranks=6, num_nodes=2)


def test_srun():
    assert launched(SRUN) == Launched(by="srun", rank=3, local_rank=1, num_ranks=4, num_nodes=2)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE, LOCAL_RANK is not"),
        ({**TORCHRUN, "MASTER_PORT": None}, "MASTER_PORT is not"),
        ({**TORCHRUN, "WORLD_SIZE": "six"}, "WORLD_SIZE is 'six'"),
        ({**TORCHRUN, "RANK": "6"}, "rank 6 of 6 processes"),
        ({**SRUN, "SLURM_NTASKS": None}, "SLURM_NTASKS is not"),
    ],
)
def test_broken_environments_are_named(environ: dict[str, str | None], message: str):
    with pytest.raises(InputError, match=message):
        launched({name: value for name, value in environ.items() if value is not None})


def test_number_of_processes():
    found = Launched(by="torchrun", rank=0, local_rank=0, num_ranks=6, num_nodes=1)
    found.check_num_ranks(6)
    found.check_multiple(3)
    with pytest.raises(InputError, match=r"needs a multiple of 4 processes, got 6 .*\n.*torchrun --nproc-per-node 4 "):
        found.check_multiple(4)
    with pytest.raises(InputError, match=r"started 6 processes, the layout needs 8\n.*--nproc-per-node 8 "):
        found.check_num_ranks(8)


def test_too_few_tasks_of_srun_name_the_batch_line():
    found = Launched(by="srun", rank=0, local_rank=0, num_ranks=1, num_nodes=1)
    with pytest.raises(InputError, match=r"Slurm started 1 task, the layout needs 2\n.*#SBATCH --ntasks=2"):
        found.check_num_ranks(2)


@pytest.mark.parametrize("environ", [{}, BATCH], ids=["alone", "batch"])
def test_a_job_of_one_task_may_start_all_ranks_itself(environ: dict[str, str]):
    check_alone(8, 8, environ)
    with pytest.raises(InputError, match="the layout has 9 ranks, a node 8 devices"):
        check_alone(9, 8, environ)


@pytest.mark.parametrize(
    "change",
    [{"SLURM_NTASKS_PER_NODE": "2"}, {"SLURM_NTASKS": "4"}, {"SLURM_NNODES": "2", "SLURM_NTASKS": "2"}],
)
def test_job_whose_tasks_would_stay_idle_is_refused(change: dict[str, str]):
    with pytest.raises(
        InputError, match=r"Slurm started \d tasks? .*the layout needs 2(.|\n)*#SBATCH --ntasks=2.*srun"
    ):
        check_alone(2, 8, BATCH | change)


def test_plan_for_several_nodes_does_not_start_on_one():
    with pytest.raises(InputError, match="the layout has 32 ranks, a node 8 devices"):
        check_alone(32, 8, {})


def test_every_rank_comes_to_the_same_folder_name():
    one_node = Launched(by="torchrun", rank=0, local_rank=0, num_ranks=2, num_nodes=1)
    assert run_name(one_node, "tiny", {}) == run_name(one_node, "tiny", {})
    assert run_name(one_node, "tiny", {}).startswith("tiny-2")
    assert run_name(one_node, "tiny", SRUN) == "tiny-slurm-77.0"
    with pytest.raises(InputError, match="--run-dir"):
        run_name(Launched(by="torchrun", rank=0, local_rank=0, num_ranks=2, num_nodes=2), "tiny", {})


def test_environment_is_read_from_this_process_by_default(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = launched()
    assert found is not None
    assert found.rank == 5
