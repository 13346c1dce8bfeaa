"""Starts TensorFlow workers with `TF_CONFIG`, from which `data_parallel` creates a `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import json

from keras_shardopt.launch.job import Job, JobError, free_ports, visible_gpus
from keras_shardopt.launch.supervisor import supervise

DEVICES = "KERAS_SHARDOPT_DEVICES_PER_PROCESS"
"""The environment variable for the number of CPU devices of a process. TensorFlow has no variable for that."""


def start(job: Job) -> int:
    """Runs this machine's processes of the job. Returns the exit status."""
    return supervise(job, environments(job))


def environments(job: Job) -> list[dict[str, str]]:
    """Returns the additional environment variables of each process."""
    gpus = visible_gpus(job)
    common = {"KERAS_BACKEND": "tensorflow"}
    if job.devices_per_process is not None:
        common[DEVICES] = str(job.devices_per_process)
    workers = _addresses(job) if job.num_processes > 1 else []
    found = []
    for rank, devices in zip(job.ranks, gpus):
        each = dict(common)
        if workers:
            each["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        if devices is not None:
            each["CUDA_VISIBLE_DEVICES"] = devices
        found.append(each)
    return found


def _addresses(job: Job) -> list[str]:
    if job.nnodes == 1:
        return [f"127.0.0.1:{port}" for port in free_ports(job.nproc)]
    if len(job.hosts) != job.nnodes:
        raise JobError(
            "On TensorFlow each worker needs the addresses of all machines: `--hosts HOST,HOST,...`, ordered by "
            f"--node-rank, the same on all machines. Received: {len(job.hosts)} hosts, with --nnodes {job.nnodes}."
        )
    first = int(str(job.coordinator).rpartition(":")[2])
    return [f"{host}:{first + i}" for host in job.hosts for i in range(job.nproc)]
