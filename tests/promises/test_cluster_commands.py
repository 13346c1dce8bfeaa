"""`srun` and `mpirun` need no launcher: their copies of a program train one model, as one process does."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import BACKEND
from support import launch, problem

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]

PROGRAM = """
import pathlib, sys
import keras_shardopt as ks
import numpy as np
from support import problem

with ks.data_parallel() as replicas:
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
model.fit(*problem.data(), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
np.savez(pathlib.Path(sys.argv[1]) / f"{replicas.process_id}.npz", *model.get_weights())
print(repr(replicas), flush=True)
"""
ALONE = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def check(folder, printed, size, command):
    for rank in range(size):
        assert f"{size} replicas, process {rank} of {size}, devices cpu" in printed, printed
    assert printed.count(f", started by {command}>") == size
    for rank in range(size):
        with np.load(folder / f"{rank}.npz") as found:
            weights = [found[name] for name in found.files]
        assert problem.relative_difference(weights, problem.trained_in_numpy()) <= 3 * problem.TOLERANCE


def test_copies_that_only_have_numbers_train_as_one_process(tmp_path, program):
    """With the variables that `srun` sets, as no SLURM is needed for them."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}  # for ports of its own
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here"}
    environments = [
        launch.variables(BACKEND, **ALONE, **step, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)
    ]
    printed = launch.workers(program, environments, str(tmp_path), start=launch.fork_with(BACKEND))
    check(tmp_path, "".join(printed), 2, "srun")


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("command", ["srun", "srun on two nodes", "mpirun", "mpiexec"])
def test_real_commands_start_it(tmp_path, program, command, size):
    """`tests/tools/engines.sh` installs them."""
    start = {
        "srun": ["srun", "--overcommit", "-N", "1", "-n", str(size)],
        "srun on two nodes": ["srun", "-N", "2", "-n", str(size)],
        "mpirun": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", str(size)],
        "mpiexec": ["mpiexec.hydra", "-n", str(size)],
    }[command]
    if shutil.which(start[0]) is None:
        pytest.skip(f"{start[0]} is not installed")
    if start[0] == "srun" and subprocess.run(["sinfo"], capture_output=True, timeout=60).returncode:
        pytest.skip("no SLURM controller answers")
    line = [*start, sys.executable, "-u", str(program), str(tmp_path)]
    check(
        tmp_path, launch.run(line, 200, {**os.environ, **launch.variables(BACKEND, **ALONE)}), size, command.split()[0]
    )
