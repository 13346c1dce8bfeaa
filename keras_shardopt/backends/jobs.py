"""The job of this process, read from its launcher's environment variables."""

from __future__ import annotations

import contextlib
import json
import os

from keras_shardopt.backends.user_warnings import warn

_BACKENDS = {
    "WORLD_SIZE": ("torch", "PyTorch"),
    "KERAS_DISTRIBUTION_NUM_PROCESSES": ("jax", "JAX"),
    "TF_CONFIG": ("tensorflow", "TensorFlow"),
}
"""For each environment variable with the number of processes to connect, the backend and framework that read it."""

_TASKS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),  # not SLURM_NTASKS: a batch script of one task has it too
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),  # Open MPI
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun"),  # MVAPICH
    ("PMI_SIZE", "PMI_RANK", "mpiexec"),  # MPICH, Intel MPI
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run"),
)
"""Each launcher's variables with the number of copies of the program and the index of this copy, and its command."""


def check_joined(num_processes: int, framework: str) -> None:
    """Raise RuntimeError unless `data_parallel()` has connected this process to the others of its job.

    Copies of a program started by `srun` or `mpirun` can be independent jobs. For them, the first copy only warns.
    """
    if num_processes > 1:
        return
    for variable, (backend, reader) in _BACKENDS.items():
        size = _size_of(variable)
        if size < 2:
            continue
        own = next((name for name, other in _BACKENDS.values() if other == framework), None)
        start = f"Start the job with `KERAS_BACKEND={own} python -m keras_shardopt.launch`, or set" if own else "Set"
        fix = f"{start} KERAS_BACKEND={backend} in the program."
        if reader == framework:
            fix = f"Connect the processes as {framework} does, before `data_parallel()`."
        raise RuntimeError(
            "`data_parallel()` must connect all processes of a job, or each trains a separate model. "
            f"Received: {variable} for {size} processes of {reader}, and one unconnected process of {framework}. "
            f"{fix} To train in one process, unset {variable}."
        )
    found = started_by()
    if found is not None and found[2] == 0:
        command, size, _ = found
        warn(
            f"Processes started by `{command}` are not connected: each is replica 0 of 1, trains on all data and "
            f"writes all files. Received: {size} processes. Instead, start `python -m keras_shardopt.launch --nproc N "
            "train.py` once on each machine (`--nnodes`). If they are independent, filter this warning."
        )


def started_by() -> tuple[str, int, int] | None:
    """Return the command that started several copies of this program, their number, and this copy's index."""
    for size, rank, command in _TASKS:
        if _size_of(size) > 1:
            return command, _size_of(size), int(os.environ.get(rank) or 0)
    return None


def _size_of(variable: str) -> int:
    value = os.environ.get(variable, "")
    if variable != "TF_CONFIG":
        return int(value) if value.isdecimal() else 0
    # Ignore errors in TF_CONFIG, because TensorFlow reports them.
    with contextlib.suppress(ValueError, LookupError, AttributeError, TypeError):
        config = json.loads(value)
        if config["task"]["type"] in ("chief", "worker"):  # evaluators and parameter servers do not train
            return sum(len(config["cluster"].get(kind, ())) for kind in ("chief", "worker"))
    return 0
