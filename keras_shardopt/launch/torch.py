"""Starts PyTorch ranks with torchrun's environment variables, and serves the store (`TCPStore`) that connects ranks."""

from __future__ import annotations

import os

from torch import distributed as dist

from keras_shardopt.launch.job import Job, JobError
from keras_shardopt.launch.supervisor import supervise


def start(job: Job) -> int:
    """Runs this machine's processes of the job. Returns the exit status."""
    if job.devices_per_process not in (None, 1):
        raise JobError(
            f"On PyTorch each process has one device. Received: --devices-per-process {job.devices_per_process}. "
            "Remove this option, and start more processes."
        )
    host, _, port = (job.coordinator or "127.0.0.1:0").rpartition(":")
    if job.node_rank > 0:
        return supervise(job, environments(job, host, int(port)))
    try:
        # Serve the store in the launcher instead of rank 0, so other ranks can still use the store if rank 0 fails.
        store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise JobError(
            "`--coordinator` must name the machine with --node-rank 0, which is this one, and a free port. "
            f"Received: {job.coordinator}. PyTorch's error is: {str(error).partition(chr(10))[0]}"
        ) from error
    return supervise(job, environments(job, host, store.port))


def environments(job: Job, host: str, port: int) -> list[dict[str, str]]:
    """Returns the additional environment variables of each rank, with the address of the store."""
    common = {
        "KERAS_BACKEND": "torch",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # so rank 0 does not serve a store
        "WORLD_SIZE": str(job.num_processes),
        "LOCAL_WORLD_SIZE": str(job.nproc),
    }
    if job.nproc > 1:
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(local)} for local, rank in enumerate(job.ranks)]
