"""`data_parallel()` in a process that a launcher started: it joins the job, raises, or warns."""

import json
import warnings

import pytest

import keras_shardopt as ks
from keras_shardopt.backends import jobs
from keras_shardopt.launch import jax as launch_jax
from keras_shardopt.launch import tensorflow as launch_tensorflow
from keras_shardopt.launch.job import Job


def cluster(kind="worker", number=2):
    workers = [f"127.0.0.1:{i}" for i in range(1, number + 1)]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": kind, "index": 0}})


JOBS = {
    "torch": {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    "jax": {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "127.0.0.1:1", "KERAS_DISTRIBUTION_NUM_PROCESSES": "2"},
    "tensorflow": {"TF_CONFIG": cluster()},
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for variable in [name for job in JOBS.values() for name in job] + [name for row in jobs._TASKS for name in row[:2]]:
        monkeypatch.delenv(variable, raising=False)


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def both_ways(mine, of_job):
    """What may be done where a launcher and its program have chosen different backends, first what the program says."""
    return f"Start the job with `KERAS_BACKEND={mine} python .*`, or set KERAS_BACKEND={of_job} in the program"


def test_a_job_that_another_backend_would_join_is_an_error(monkeypatch, backend):
    for other in set(JOBS) - {backend}:
        with monkeypatch.context() as patch:
            set_all(patch, JOBS[other])
            with pytest.raises(RuntimeError, match=f"for 2 processes of .* {both_ways(backend, other)}"):
                ks.data_parallel().__enter__()
    with ks.data_parallel(1) as replicas:  # nothing is left of the scopes before
        assert replicas.num_replicas == 1
    replicas.close()


@pytest.mark.neutral
@pytest.mark.parametrize("starter", [launch_jax, launch_tensorflow])
def test_a_program_that_changes_the_backend_of_the_launcher_is_told(monkeypatch, starter):
    """As Keras' guides do: `os.environ["KERAS_BACKEND"] = "torch"`, with the launcher on another backend."""
    given = starter.environments(Job(["train.py"], 2))[1]
    set_all(monkeypatch, given)
    with pytest.raises(RuntimeError, match=both_ways("torch", given["KERAS_BACKEND"])):
        ks.data_parallel().__enter__()


@pytest.mark.backends("jax")
def test_a_job_that_nobody_has_connected_is_an_error(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "2")  # enough on a TPU pod, where the program connects
    with pytest.raises(RuntimeError, match="Connect the processes as JAX does"):
        ks.data_parallel().__enter__()


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": ""},
        {"TF_CONFIG": cluster(number=1)},
        {"TF_CONFIG": cluster("evaluator")},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": "no JSON"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # a shell of `salloc`
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},  # task 0 warns
    ],
)
@pytest.mark.neutral
def test_what_is_no_job_of_several_processes_is_no_error(monkeypatch, variables):
    set_all(monkeypatch, variables)
    jobs.check_joined(1, "PyTorch")


@pytest.mark.neutral
@pytest.mark.parametrize("row", jobs._TASKS, ids=[row[0] for row in jobs._TASKS])
def test_copies_that_are_not_connected_are_warned_of_once(monkeypatch, row):
    size, rank, command = row
    set_all(monkeypatch, {size: "2", rank: "0"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ks.data_parallel():
            pass
    (warning,) = caught
    assert warning.filename == __file__
    assert f"started by `{command}` are not connected" in str(warning.message)
    assert "Received: 2 processes. Instead, start `python -m keras_shardopt.launch" in str(warning.message)
    jobs.check_joined(2, "PyTorch")  # as the program has connected them


@pytest.mark.neutral
def test_connected_processes_are_no_error(monkeypatch):
    set_all(monkeypatch, JOBS["torch"])
    jobs.check_joined(2, "PyTorch")
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=torch"):
        jobs.check_joined(1, "JAX")
