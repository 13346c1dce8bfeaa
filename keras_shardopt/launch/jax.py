"""Starts JAX processes. Process 0 serves JAX's coordinator, and `data_parallel` connects each process to it."""

from __future__ import annotations

import os

from keras_shardopt.backends import jobs
from keras_shardopt.launch.job import Job, free_ports, visible_gpus
from keras_shardopt.launch.supervisor import supervise


def start(job: Job) -> int:
    """Runs this machine's processes of the job. Returns the exit status."""
    found = environments(job)
    # If a process is missing, JAX aborts the other processes without a clear message, so print an explanation.
    coordinator = found[0].get("KERAS_DISTRIBUTION_JOB_ADDRESSES")
    advice = f" JAX aborts if process 0 ({coordinator}) does not answer or another is missing." if coordinator else ""
    return supervise(job, found, advice)


def environments(job: Job) -> list[dict[str, str]]:
    """Returns the additional environment variables of each process."""
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
            **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}),
            **jobs.all_gpus_for_jax(jobs.visible_gpus() if devices is None else devices.split(",")),
        }
        for rank, devices in zip(job.ranks, gpus)
    ]
