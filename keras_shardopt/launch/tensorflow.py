"""Workers of TensorFlow: `TF_CONFIG`, from which `data_parallel` makes a `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import json

from keras_shardopt.launch.job import Job, JobError, free_ports, visible_gpus
from keras_shardopt.launch.supervisor import supervise

DEVICES = "KERAS_SHARDOPT_DEVICES_PER_PROCESS"
"""The variable that says how many CPU devices a process has; TensorFlow has none for that."""


def start(job: Job) -> int:
    """Runs the job's processes of this machine to their end. Returns the exit status."""
    return supervise(job, environments(job))


def environments(job: Job) -> list[dict[str, str]]:
    """The variables that each process has in addition to this one's."""
    gpus = visible_gpus(job)
    common = {"KERAS_BACKEND": "tensorflow"}
    if job.devices_per_process is not None:
        common[DEVICES] = str(job.devices_per_process)
    workers = _addresses(job) if job.num_processes > 1 else []
    found = []
    for rank, mine in zip(job.ranks, gpus):
        each = dict(common)
        if workers:
            each["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        if mine is not None:
            each["CUDA_VISIBLE_DEVICES"] = mine
        found.append(each)
    return found


def _addresses(job: Job) -> list[str]:
    """Of all workers: each listens at a port of its own."""
    if job.nnodes == 1:
        return [f"127.0.0.1:{port}" for port in free_ports(job.nproc)]
    if len(job.hosts) != job.nnodes:
        raise JobError(
            "On TensorFlow each worker must know the address of every other: `--hosts HOST,HOST,...`, the machines in "
            f"their order, equal on all. Received: {len(job.hosts)} hosts, with --nnodes {job.nnodes}."
        )
    first = int(str(job.coordinator).rpartition(":")[2])
    return [f"{host}:{first + i}" for host in job.hosts for i in range(job.nproc)]
