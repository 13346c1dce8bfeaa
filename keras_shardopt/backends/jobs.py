"""The job of this process, from the environment variables of its launcher."""

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
"""The variables with the number of processes that train together, and the backend that reads each of them."""

_TASKS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),  # SLURM_NTASKS is set in a batch script, too, which is one task
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),  # Open MPI
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun"),  # MVAPICH
    ("PMI_SIZE", "PMI_RANK", "mpiexec"),  # MPICH, Intel MPI
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run"),
)
"""The variables with the number of copies of a program and the number of this one, and the command that starts them."""


def check_joined(num_processes: int, framework: str) -> None:
    """Checks that `data_parallel()` has connected this process to the others that its launcher started.

    Copies that `srun` or `mpirun` started may be independent of each other. The first one warns.

    Args:
        num_processes: how many processes are connected.
        framework: the name of the framework that runs Keras.

    Raises:
        RuntimeError: if the environment names a job of several processes.
    """
    if num_processes > 1:
        return
    for variable, (backend, reader) in _BACKENDS.items():
        size = _size_of(variable)
        if size < 2:
            continue
        own = next((name for name, other in _BACKENDS.values() if other == framework), None)
        start = f"Start the job with `KERAS_BACKEND={own} python -m keras_shardopt.launch`, or set" if own else "Set"
        fix = f"{start} KERAS_BACKEND={backend} in the program, too."
        if reader == framework:
            fix = f"Connect the processes as {framework} does, before `data_parallel()`."
        raise RuntimeError(
            "`data_parallel()` must connect all processes of a job, or each trains a model apart. "
            f"Received: {variable} for {size} processes of {reader}, and one process that runs {framework} by itself. "
            f"{fix} To train in one process, unset {variable}."
        )
    found = started_by()
    if found is not None and found[2] == 0:
        command, size, _ = found
        warn(
            f"Processes that `{command}` starts are not connected: each is replica 0 of 1, trains on all data and "
            f"writes all files. Received: {size} processes. In place of them, start `python -m keras_shardopt.launch "
            "--nproc N train.py` once on each machine (`--nnodes`). If they are independent, filter this warning."
        )


def started_by() -> tuple[str, int, int] | None:
    """The command that started several copies of this program, how many, and which of them this is."""
    for size, rank, command in _TASKS:
        if _size_of(size) > 1:
            return command, _size_of(size), int(os.environ.get(rank) or 0)
    return None


def _size_of(variable: str) -> int:
    value = os.environ.get(variable, "")
    if variable != "TF_CONFIG":
        return int(value) if value.isdecimal() else 0
    # TensorFlow itself reports errors in it.
    with contextlib.suppress(ValueError, LookupError, AttributeError, TypeError):
        config = json.loads(value)
        if config["task"]["type"] in ("chief", "worker"):  # evaluators and parameter servers do not train
            return sum(len(config["cluster"].get(kind, ())) for kind in ("chief", "worker"))
    return 0
