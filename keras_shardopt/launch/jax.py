"""Processes of JAX: a coordinator in process 0, whose address `data_parallel` and `keras.distribution` read."""

from __future__ import annotations

import os

from keras_shardopt.launch.job import Job, free_ports, visible_gpus
from keras_shardopt.launch.supervisor import supervise


def start(job: Job) -> int:
    """Runs the job's processes of this machine to their end. Returns the exit status."""
    found = environments(job)
    # Its own last words name the task that is missing, or no more than a service.
    coordinator = found[0].get("KERAS_DISTRIBUTION_JOB_ADDRESSES")
    advice = f" JAX aborts where process 0 ({coordinator}) does not answer, or misses another." if coordinator else ""
    return supervise(job, found, advice)


def environments(job: Job) -> list[dict[str, str]]:
    """The variables that each process has in addition to this one's."""
    gpus = visible_gpus(job)
    common = {"KERAS_BACKEND": "jax"}
    if job.num_processes > 1:
        common |= {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": job.coordinator or f"127.0.0.1:{free_ports(1)[0]}",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(job.num_processes),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": os.environ.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo"),
        }
    if job.devices_per_process is not None:
        common["JAX_NUM_CPU_DEVICES"] = str(job.devices_per_process)
    return [
        {
            **common,
            **({"KERAS_DISTRIBUTION_PROCESS_ID": str(rank)} if job.num_processes > 1 else {}),
            **({} if mine is None else {"CUDA_VISIBLE_DEVICES": mine}),
        }
        for rank, mine in zip(job.ranks, gpus)
    ]
