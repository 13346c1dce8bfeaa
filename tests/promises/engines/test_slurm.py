"""The batch scripts of `examples/slurm`, on a SLURM of two nodes that `tests/tools/engines.sh` starts."""

import os
import pathlib
import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from support import launch, pages

pytestmark = pytest.mark.timeout(400)
EXAMPLES = pages.ROOT / "examples" / "slurm"


def slurm(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(autouse=True)
def controller():
    try:
        slurm("sinfo")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no SLURM controller answers: {error}")
    yield
    slurm("scancel", "--user", str(os.getuid()), "--signal=KILL")
    slurm("scancel", "--user", str(os.getuid()))


def submit(script, folder, backend, *options, **environment):
    """Submits a batch script with CPUs of this machine. Returns the id of the job."""
    bin_ = str(pathlib.Path(sys.executable).parent)
    given = {**os.environ, **launch.variables(backend, XLA_FLAGS="", JAX_PLATFORMS="cpu", **environment)}
    given |= {"RESULT": str(folder / "result"), "PATH": os.pathsep.join([bin_, os.environ["PATH"]])}
    command = ["sbatch", "--parsable", "--overcommit", f"--output={folder}/%A-%a.out", *options, str(EXAMPLES / script)]
    done = subprocess.run(command, env=given, cwd=pages.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def printed(folder):
    return "".join(file.read_text() for file in sorted(folder.glob("*.out")))


def wait_for(condition, folder, seconds=150):
    limit = time.monotonic() + launch.patient(seconds)
    while not (found := condition()):
        assert time.monotonic() < limit, f"{slurm('squeue')}\n{printed(folder)}"
        time.sleep(0.5)
    return found


def weights(folder):
    return keras.saving.load_model(folder / "model.keras", compile=False).get_weights()


def alone(backend, folder, *options):
    """The weights that one process of the program has at the end."""
    environment = launch.variables(backend, OMP_NUM_THREADS="1", XLA_FLAGS="", JAX_PLATFORMS="cpu")
    command = [sys.executable, str(EXAMPLES / "train.py"), "--folder", str(folder / "alone"), *options]
    launch.run(command, 100, environment)
    return weights(folder / "alone")


@pytest.mark.parametrize("backend", pages.BACKENDS)
def test_a_preempted_job_continues_as_if_nothing_had_happened(backend, tmp_path):
    finished = re.compile(r"^(\d+) replicas, first epoch (\d+)$", re.MULTILINE)
    options = "--epochs 12 --pause 0.5"
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    submit("several_nodes.sbatch", uninterrupted, backend, "--ntasks-per-node=1", OPTIONS="--epochs 12")
    assert wait_for(lambda: finished.findall(printed(uninterrupted)), uninterrupted) == [("2", "0")]

    script = ("several_nodes.sbatch", tmp_path, backend, "--ntasks-per-node=1", "--exclusive", "--partition=main")
    job = submit(*script, OPTIONS=options)
    wait_for(lambda: (tmp_path / "result" / "backup" / "backup.npz").exists(), tmp_path)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null"]
    slurm(*urgent, "--wrap", "sleep 1")
    wait_for(lambda: "PENDING BeginTime" in slurm("squeue", "--noheader", "--format=%T %r", f"--jobs={job}"), tmp_path)
    assert "interrupted" in printed(tmp_path) and not (tmp_path / "result" / "model.keras").exists()
    slurm("scontrol", "update", f"jobid={job}", "starttime=now")  # SLURM waits for two minutes
    ((replicas, epoch),) = wait_for(lambda: finished.findall(printed(tmp_path)), tmp_path)
    assert replicas == "2" and 0 < int(epoch) < 12

    expected = weights(uninterrupted / "result")
    for mine, theirs in zip(weights(tmp_path / "result"), expected):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(alone(backend, tmp_path), expected):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("script, rates", [("one_node.sbatch", ["0.05"]), ("sweep.sbatch", ["0.1", "0.05", "0.02"])])
def test_jobs_of_an_array_train_beside_each_other(script, rates, tmp_path):
    submit(script, tmp_path, "torch", OPTIONS="--epochs 2")
    result = tmp_path / "result"
    folders = [result] if len(rates) == 1 else [result / str(i) for i in range(len(rates))]
    wait_for(lambda: printed(tmp_path).count("2 replicas, first epoch 0") == len(folders), tmp_path)
    for rate, folder in zip(rates, folders):
        expected = alone("torch", tmp_path / rate, "--epochs", "2", "--learning-rate", rate)
        for mine, theirs in zip(weights(folder), expected):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("backend", pages.BACKENDS)
def test_the_doctor_examines_the_tasks_of_srun(backend):
    given = {**os.environ, **launch.variables(backend, XLA_FLAGS="", JAX_PLATFORMS="cpu")}
    command = ["srun", "--overcommit", "--nodes=2", "--ntasks=2", sys.executable, "-m", "keras_shardopt.doctor"]
    done = subprocess.run(command, env=given, cwd=pages.ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    framework = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}[backend]
    assert done.stdout.count(f"keras_shardopt doctor: 2 processes, 2 replicas, {framework}\n") == 1
    assert "error: 0," in done.stdout
