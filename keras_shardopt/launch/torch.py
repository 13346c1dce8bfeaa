"""Ranks of PyTorch: the variables that torchrun sets, and the store in which the ranks find each other."""

from __future__ import annotations

import os

from torch import distributed as dist

from keras_shardopt.launch.job import Job, JobError
from keras_shardopt.launch.supervisor import supervise


def start(job: Job) -> int:
    """Runs the job's processes of this machine to their end. Returns the exit status."""
    if job.devices_per_process not in (None, 1):
        raise JobError(
            "On PyTorch each process has one device. "
            f"Received: --devices-per-process {job.devices_per_process}. Leave it out, and start more processes."
        )
    host, _, port = (job.coordinator or "127.0.0.1:0").rpartition(":")
    if job.node_rank > 0:
        return supervise(job, environments(job, host, int(port)))
    try:
        # Not in rank 0, so that the others can say which rank is missing when that one ends.
        store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise JobError(
            "`--coordinator` must name this machine, with --node-rank 0, and a port that is free. "
            f"Received: {job.coordinator}. PyTorch's error is: {str(error).partition(chr(10))[0]}"
        ) from error
    return supervise(job, environments(job, host, store.port))


def environments(job: Job, host: str, port: int) -> list[dict[str, str]]:
    """The variables that each rank has in addition to those of this process, with the address of the store."""
    common = {
        "KERAS_BACKEND": "torch",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 serves none
        "WORLD_SIZE": str(job.num_processes),
        "LOCAL_WORLD_SIZE": str(job.nproc),
    }
    if job.nproc > 1:
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(local)} for local, rank in enumerate(job.ranks)]
