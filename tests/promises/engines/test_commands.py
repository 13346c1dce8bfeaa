"""`srun`, `mpirun` and `mpiexec` start copies of a program that train one model, as one process does."""

import os
import shutil
import subprocess
import sys

import pytest
from support import launch, pages
from support.clusters import ALONE, PROGRAM, check

pytestmark = pytest.mark.timeout(300)
COMMANDS = {
    "srun": ["srun", "--overcommit", "-N", "1", "-n", "{}"],
    "srun on two nodes": ["srun", "-N", "2", "-n", "{}"],
    "mpirun": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "{}"],
    "mpiexec": ["mpiexec.hydra", "-n", "{}"],
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("backend", pages.BACKENDS)
def test_copies_train_as_one_process(tmp_path, backend, command, size):
    start = [word.format(size) for word in COMMANDS[command]]
    if shutil.which(start[0]) is None:
        pytest.skip(f"{start[0]} is not installed; tests/tools/engines.sh installs it")
    if start[0] == "srun" and subprocess.run(["sinfo"], capture_output=True, timeout=60).returncode:
        pytest.skip("no SLURM controller answers; tests/tools/engines.sh starts one")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    line = [*start, sys.executable, "-u", str(program), str(tmp_path)]
    printed = launch.run(line, 200, {**os.environ, **launch.variables(backend, **ALONE)})
    check(tmp_path, printed, size, command.split()[0])
