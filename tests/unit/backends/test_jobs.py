"""`data_parallel()` in a process that a launcher or a cluster's command started: it joins the job, or raises."""

import json
import os
import pathlib

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
    for name in list(os.environ):
        if name.startswith(("JAX_LOCAL", "SLURM", "OMPI", "MV2", "PMI", "MPI", "FLUX", "MASTER")):
            monkeypatch.delenv(name)
    for name in [*(name for job in JOBS.values() for name in job), *JOINED]:
        monkeypatch.setenv(name, "")  # so that the variables that a test sets are gone after it
        monkeypatch.delenv(name)
    monkeypatch.setattr(jobs, "joined", [])


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
            with pytest.raises(
                RuntimeError, match=f"describes a job of 2 processes for .* {both_ways(backend, other)}"
            ):
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
    with pytest.raises(RuntimeError, match="Connect the processes with the functions of JAX"):
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
    ],
)
@pytest.mark.neutral
def test_what_is_no_job_of_several_processes_is_no_error(monkeypatch, variables):
    set_all(monkeypatch, variables)
    assert jobs.started_by() is None
    jobs.check_joined(1, "PyTorch")


SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "gpu09",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "PMIX_NAMESPACE": "26017793",
}
STARTED = {
    "srun": (SRUN, (3, 2, 1, 0), ["gpu07", "gpu07", "gpu09"]),
    "mpirun": (MPIRUN, (4, 3, 4, 3), ["127.0.0.1"] * 4),
    "mpiexec": (
        {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
        (2, 1, 2, 1),
        ["127.0.0.1"] * 2,
    ),
    "flux run": (
        {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1", "FLUX_JOB_NNODES": "2", "FLUX_TASK_LOCAL_ID": "1"},
        (4, 1, 2, 1),
        [],
    ),
}


@pytest.mark.neutral
@pytest.mark.parametrize("command", STARTED)
def test_a_copy_knows_its_place(monkeypatch, command):
    variables, numbers, hosts = STARTED[command]
    set_all(monkeypatch, variables)
    task = jobs.started_by()
    assert (task.size, task.rank, task.local_size, task.local_rank) == numbers
    assert (task.command, task.hosts) == (command, hosts)
    assert 20_000 <= task.port < 32_000


@pytest.mark.neutral
def test_mpirun_inside_a_step_of_srun_counts(monkeypatch):
    set_all(monkeypatch, {**SRUN, **MPIRUN})
    assert jobs.started_by().rank == 3
    # All copies must find the same command, also those whose numbers are those of the step by chance.
    set_all(monkeypatch, {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"})
    assert jobs.started_by().command == "mpirun"


@pytest.mark.neutral
def test_srun_sets_the_variables_of_mpiexec_too(monkeypatch):
    set_all(monkeypatch, {**SRUN, "PMI_SIZE": "3", "PMI_RANK": "2"})  # `srun --mpi=pmi2`
    assert (jobs.started_by().command, jobs.started_by().hosts) == ("srun", STARTED["srun"][2])


@pytest.mark.neutral
@pytest.mark.parametrize("ids, is_step", [("2", True), ("0", True), ("0,1", False), ("", True)])
def test_a_batch_script_that_was_sent_from_a_step_is_not_in_it(monkeypatch, ids, is_step):
    set_all(monkeypatch, {**SRUN, "SLURM_GTIDS": ids})  # one task on this machine
    assert (jobs.started_by() is not None) == is_step


@pytest.mark.neutral
def test_a_shell_on_a_terminal_is_no_copy_of_a_program(monkeypatch):
    set_all(monkeypatch, {**SRUN, "SLURM_TASK_PID": str(os.getpid())})
    stat = ["S", "1", "1", "1", "34816"]  # a pseudo-terminal
    monkeypatch.setattr(jobs, "_stat", lambda process: stat)
    arguments = iter(["bash\0-l\0", "python\0train.py\0", "bash\0"])
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self: next(arguments))
    assert jobs.started_by() is None
    assert jobs.started_by().command == "srun"
    stat[4] = "0"
    assert jobs.started_by().command == "srun"


@pytest.mark.neutral
def test_jax_uses_all_gpus_of_a_copy(monkeypatch):
    assert jobs.all_gpus_for_jax(["2", "3"]) == {"JAX_LOCAL_DEVICE_IDS": "0,1"}
    assert jobs.all_gpus_for_jax([]) == {}
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "1")
    assert jobs.all_gpus_for_jax(["2", "3"]) == {"JAX_LOCAL_DEVICE_IDS": "1"}


@pytest.mark.neutral
def test_other_steps_and_jobs_use_other_ports(monkeypatch):
    set_all(monkeypatch, SRUN)
    ports = set()
    for job in range(3):
        for step in range(3):
            set_all(monkeypatch, {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            ports.add(jobs.started_by().port)
    assert len(ports) == 9
    set_all(monkeypatch, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (jobs.started_by().address, jobs.started_by().port) == ("10.0.0.1", 29500)


@pytest.mark.neutral
def test_tasks_that_do_not_fill_one_machine_after_the_other_have_no_known_machines(monkeypatch):
    cyclic = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    set_all(monkeypatch, {**SRUN, **cyclic})
    assert jobs.started_by().hosts == ["gpu07"]
    set_all(monkeypatch, {"SLURM_PROCID": "2"})
    assert jobs.started_by().hosts == ["gpu07", "gpu07", "gpu09", "gpu09"]


@pytest.mark.neutral
@pytest.mark.parametrize(
    "nodes, names",
    [
        ("vm", ["vm"]),
        ("a1,b-2", ["a1", "b-2"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("gpu[01-03,07]-ib,login", ["gpu01-ib", "gpu02-ib", "gpu03-ib", "gpu07-ib", "login"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("", []),
    ],
)
def test_a_list_of_machines_is_expanded(nodes, names):
    assert jobs.expanded(nodes) == names


JOINED = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "KERAS_DISTRIBUTION_PROCESS_ID", "WORLD_SIZE")


def of_torch(task):
    return {"WORLD_SIZE": str(task.size), "RANK": str(task.rank), "MASTER_ADDR": task.address}


@pytest.mark.neutral
def test_what_the_user_or_a_launcher_has_set_stays(monkeypatch):
    set_all(monkeypatch, {**SRUN, "MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "3"})
    jobs.join("RANK", of_torch)
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["2", "3", "10.0.0.1"]
    assert jobs.joined == ["srun"]
    set_all(monkeypatch, {"RANK": "7", "WORLD_SIZE": "8"})  # torchrun, which each task has started
    jobs.join("RANK", of_torch)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("7", "8")


@pytest.mark.neutral
def test_contradictions_raise(monkeypatch):
    set_all(monkeypatch, {**SRUN, "WORLD_SIZE": "8"})
    with pytest.raises(
        RuntimeError, match=r"`srun` has started. Received: WORLD_SIZE=8, and 3 processes. Unset WORLD_SIZE"
    ):
        jobs.join("RANK", of_torch)
    assert "RANK" not in os.environ


@pytest.mark.neutral
def test_several_machines_of_mpirun_need_an_address(monkeypatch):
    set_all(monkeypatch, {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    with pytest.raises(
        RuntimeError, match="`mpirun` does not set.*4 processes, 2 on this machine.* -x MASTER_ADDR=node1"
    ):
        jobs.join("RANK", of_torch)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with pytest.raises(RuntimeError, match="-x MASTER_PORT=29500"):  # each machine would choose another
        jobs.join("RANK", of_torch)
    monkeypatch.setenv("MASTER_PORT", "29500")
    jobs.join("RANK", of_torch)
    assert os.environ["RANK"] == "3"


@pytest.mark.backends("tensorflow")
def test_tensorflow_needs_all_addresses(monkeypatch):
    set_all(monkeypatch, {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1"})
    with pytest.raises(RuntimeError, match="addresses of all other processes.*4 processes, 2 on this machine"):
        ks.data_parallel().__enter__()


class ToldError(Exception):
    """Holds what a backend is told of its job."""


def test_each_backend_is_told_the_place_of_a_copy_among_those_of_all_machines(monkeypatch, backend):
    workers = ["gpu07:29500", "gpu07:29501", "gpu09:29502"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 2}}
    expected = {
        "torch": {
            "WORLD_SIZE": "3",
            "RANK": "2",
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "gpu07",
            "MASTER_PORT": "29500",
        },
        "jax": {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": "gpu07:29500",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
            "KERAS_DISTRIBUTION_PROCESS_ID": "2",
        },
        "tensorflow": {"TF_CONFIG": json.dumps(config)},
    }

    def join(own_rank, variables):
        raise ToldError(variables(jobs.started_by()))

    set_all(monkeypatch, {**SRUN, "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"})
    monkeypatch.setattr(jobs, "join", join)
    with pytest.raises(ToldError) as told:
        ks.data_parallel().__enter__()
    assert told.value.args == (expected[backend],)


def test_one_replica_is_a_job_of_its_own(monkeypatch):
    set_all(monkeypatch, SRUN)
    with ks.data_parallel(1) as replicas:
        assert (replicas.num_replicas, replicas.num_processes) == (1, 1)
        assert "srun" not in repr(replicas)
    replicas.close()
    assert not jobs.joined


@pytest.mark.neutral
@pytest.mark.parametrize(
    "given, more, mine",
    [
        ("0,1,2,3", {}, "2,3"),
        ("0,1,2,3", {"SLURM_GPUS_PER_TASK": "4"}, "0,1,2,3"),
        ("5", {}, "5"),  # SLURM has given one to each
        ("", {}, ""),
    ],
)
def test_copies_on_a_machine_share_its_gpus(monkeypatch, given, more, mine):
    set_all(monkeypatch, {**MPIRUN, **more, "CUDA_VISIBLE_DEVICES": given})
    set_all(monkeypatch, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    jobs.own_gpus(jobs.started_by())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mine


@pytest.mark.neutral
def test_connected_processes_are_no_error(monkeypatch):
    set_all(monkeypatch, JOBS["torch"])
    jobs.check_joined(2, "PyTorch")
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=torch"):
        jobs.check_joined(1, "JAX")
