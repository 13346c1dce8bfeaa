"""`srun` and `mpirun` need no launcher: their copies of a program train one model, as one process does."""

import os

import pytest
from conftest import BACKEND
from support import launch
from support.clusters import ALONE, PROGRAM, check

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


@pytest.mark.exhaustive("jax", "tensorflow")
def test_copies_that_only_have_numbers_train_as_one_process(tmp_path, program):
    """With the variables that `srun` sets, as no SLURM is needed for them."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}  # for ports of its own
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here"}
    environments = [
        launch.variables(BACKEND, **ALONE, **step, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)
    ]
    printed = launch.workers(program, environments, str(tmp_path), start=launch.fork_with(BACKEND))
    check(tmp_path, "".join(printed), 2, "srun")
