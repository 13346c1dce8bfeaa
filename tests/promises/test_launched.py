"""`python -m keras_shardopt.launch` starts the README's program, unchanged, in several processes of each backend."""

import os
import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from conftest import BACKEND
from support import launch, pages, problem

import keras_shardopt  # noqa: F401 - with it the files of the program load

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]

BEFORE = """
import pathlib, sys
import keras, numpy as np
from support import problem

build_model = problem.model
x, y = problem.data()
keras.utils.set_random_seed(5)
"""

AFTER = """
folder = pathlib.Path(sys.argv[1])
ks.save_model(model, folder / "model.keras")
print(ks.__name__, "has trained", flush=True)
"""


def launched(program, *arguments, options=()):
    """What the launcher prints of a program in several processes."""
    command = [sys.executable, "-m", "keras_shardopt.launch", *options, str(program), *map(str, arguments)]
    return launch.run(command, 200, launch.variables(BACKEND, OMP_NUM_THREADS="1", XLA_FLAGS=""))


def test_the_program_of_the_readme_trains_as_one_process(tmp_path):
    (readme,) = [block.code for block in pages.blocks(pages.README) if "with ks.data_parallel()" in block.code]
    program = tmp_path / "train.py"
    program.write_text(BEFORE + readme + AFTER)
    devices = [] if BACKEND == "torch" else ["--devices-per-process", "2"]
    printed = launched(program, tmp_path, options=["--nproc", "2", *devices])
    for rank in range(2):
        assert len(re.findall(rf"\[{rank}\] keras_shardopt has trained", printed)) == 1, printed
    found = keras.saving.load_model(tmp_path / "model.keras").get_weights()
    model = problem.model()
    x, y = problem.data()
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    keras.utils.set_random_seed(5)
    model.fit(x, y, batch_size=64, verbose=0)
    # Five updates of Adam move a weight by 0.005, so one rounding of what is below 1 is allowed, too.
    movement = max(float(np.max(np.abs(w - s))) for w, s in zip(model.get_weights(), problem.start_weights()))
    for one, other in zip(found, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=problem.TOLERANCE * movement + 2.0**-24)


@pytest.mark.exhaustive()
def test_a_job_that_loses_a_process_goes_on_with_fewer(tmp_path):
    options = ["--nproc", "2:3", "--max-restarts", "1"]
    printed = launched(launch.SCRIPTS / "machine_program.py", tmp_path, "dies", 2, 1, options=options)
    assert "begins with epoch 0 on 3 replicas" in printed and "begins with epoch 1 on 2 replicas" in printed, printed
    model = problem.model()
    model.compile(problem.sgd_momentum(), "mse")
    x, y = problem.data()
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    found = list(np.load(tmp_path / "values.npz").values())[:4]
    assert problem.relative_difference(found, model.get_weights()) <= problem.TOLERANCE
    died, resumed = (float((tmp_path / name).read_text()) for name in ("died", "resumed"))
    print(f"{BACKEND}: {resumed - died:.1f} s from a death to the next update, {os.getloadavg()[0]:.1f} jobs")
    assert resumed - died < launch.patient(60)


ALONE = """
import keras_shardopt as ks
print("before", flush=True)
with ks.data_parallel(timeout=1):
    pass
"""
ALONE_IN = {
    "torch": {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{0}"},
    "jax": {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "127.0.0.1:{0}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": "0",
    },
    "tensorflow": {
        "TF_CONFIG": '{{"cluster": {{"worker": ["127.0.0.1:{0}", "127.0.0.1:{1}"]}}, '
        '"task": {{"type": "worker", "index": 0}}}}'
    },
}


def test_the_timeout_bounds_the_wait_for_processes_that_are_not_started():
    ports = launch.free_ports(2)
    job = {name: value.format(*ports) for name, value in ALONE_IN[BACKEND].items()}
    begin = time.monotonic()
    # PyTorch raises. JAX aborts, and TensorFlow cannot be interrupted.
    said = {"torch": "All 2 ranks must be started", "jax": "DEADLINE_EXCEEDED", "tensorflow": "in _make_workers_str"}
    with pytest.raises(launch.WorkersFailed, match=f"before\n(.|\n)*{said[BACKEND]}"):
        launch.program(BACKEND, ALONE, environment=launch.variables(BACKEND, **job), timeout=60)
    assert time.monotonic() - begin < launch.patient(20)


RAISES = """
import sys, time
import keras_shardopt as ks
with ks.data_parallel() as replicas:
    pass
if replicas.process_id == int(sys.argv[1]):
    raise ZeroDivisionError("on purpose")
time.sleep(600)
"""


@pytest.mark.exhaustive()
@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_raises_ends_the_job(tmp_path, which):
    program = tmp_path / "raises.py"
    program.write_text(RAISES)
    begin = time.monotonic()
    with pytest.raises(launch.WorkersFailed, match=r"exit status [1-9]\d*: (.|\n)*on purpose"):
        launched(program, which, options=["--nproc", "2"])
    assert time.monotonic() - begin < launch.patient(60)
    left = subprocess.run(["pgrep", "-f", str(program)], capture_output=True, text=True).stdout
    assert not left, left
