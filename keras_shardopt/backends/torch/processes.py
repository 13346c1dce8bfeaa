"""The ranks of PyTorch jobs.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.utils.rng_utils.get_random_seed` - the seed given to `keras.utils.set_random_seed`, or None.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import keras
import torch
import torch.distributed as dist
from keras.src.utils import rng_utils

from keras_shardopt.backends import jobs
from keras_shardopt.backends.communicator import SingleReplica
from keras_shardopt.backends.keras_callers import caller_function
from keras_shardopt.backends.processes import Processes, World, seeding_without_tensorflow
from keras_shardopt.backends.torch.process_group import (
    close_group,
    gather_objects,
    job_of_environment,
    meet,
    naming_missing_ranks,
    open_group,
)
from keras_shardopt.backends.torch.runtime import runtime
from keras_shardopt.backends.torch.threads import equal_initial_weights


class TorchProcesses(Processes):
    """Sets up the ranks of a PyTorch job. Each replica is a process (rank) with its own data."""

    needs_initial_broadcast = True

    def versions(self) -> dict[str, str]:
        # Omit a suffix such as "+cu128", because builds for different devices are the same version.
        return {"PyTorch": str(torch.__version__).partition("+")[0]}

    def process(self) -> tuple[int, int]:
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(), dist.get_rank()
        return job_of_environment()

    def num_replicas(self) -> int:
        return int(runtime.communicator("").num_replicas)

    def barrier(self, purpose: str, seconds: float, advice: str) -> None:
        if not isinstance(runtime.communicator(""), SingleReplica):
            meet(purpose, seconds, advice)

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        if num_replicas != 1 and not (dist.is_available() and dist.is_initialized()):
            jobs.join("RANK", _variables_of)
        # Read the ranks in each scope, because a second scope can have fewer ranks.
        size, rank = self.process()
        if num_replicas not in (None, size):
            raise ValueError(
                "`num_replicas` must be the number of processes, because on PyTorch each replica is one process. "
                f"Received: num_replicas={num_replicas}, with {size} process(es). Start the program with: torchrun "
                f"--nproc-per-node {num_replicas} {sys.argv[0] or 'train.py'}"
            )
        with equal_initial_weights():
            yield from self._open(size, rank, timeout)

    def _open(self, size: int, rank: int, timeout: datetime.timedelta | None) -> Iterator[World]:
        if size == 1:
            yield World(persists=True, devices=[_device()])
            return
        running = dist.is_available() and dist.is_initialized()
        if running and timeout is not None:
            raise ValueError(
                "`timeout` must be set when the process group is opened. Received: "
                f"timeout={timeout.total_seconds():g} s, after the program opened the group. Use "
                "`torch.distributed.init_process_group(..., timeout=...)`, or let `data_parallel()` open the group."
            )
        device = None
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not running:
            open_group("gloo" if device is None else "nccl", rank, size, timeout)
        try:
            _agree_on_seed()
            yield World(size, rank, rank == 0, num_processes=size, process_id=rank, persists=True, devices=[_device()])
        finally:
            if not running:
                if runtime._ranks is not None:
                    runtime._ranks.forget_groups()
                close_group()
            if device is not None:
                torch.cuda.set_device(device)

    def gather_objects(self, value: Any) -> list[Any]:
        if not (dist.is_available() and dist.is_initialized()):
            return [value]
        return gather_objects(value, _CALLS.get(caller_function(), "exchanges values"))


processes = TorchProcesses()
_CALLS = {  # descriptions for announcements, by the name of the function that gathers objects
    "largest_difference": "compares weights",
    "check_agreement": "compares its trained variables before its first update",
    "_is_same_on_all": "compares its trained variables before its first update",
    "_check_same_on_all_processes": "calls `shard_data`",
    "_states_of_process_0": "begins to draw batches",
    "raise_together": "saves a model or a backup, in which all ranks take part",
    "from_rank_0": "asks rank 0 whether to save a model",
    "stored": "gathers divided optimizer state, as saving does",
    "check_start": "compares optimizer state before its first update",
    "on_epoch_end": "ends an epoch with a callback of all ranks",
    "on_train_begin": "looks for a backup",
    "_from_chief": "restores a backup",
    "_of_chief": "restores a backup",
    "restore_carried": "restores the state of each rank",
    "_all_replica_values": "gathers the state of each rank for a backup",
    "_check": "waits for a sharded checkpoint",
    "_fail": "waits for a sharded checkpoint",
    "_close_window": "compares the times of a `StepReport`",
    "own_parts": "saves a sharded checkpoint",
    "_rows_of": "saves a sharded checkpoint",
    "_watch": "begins a summary of each replica's gradients",
    "_means": "averages the weights of all ranks",
    "states": "gathers the weights of all ranks",
    "facts_of_all": "runs the doctor",
}


def _variables_of(task: jobs.Task) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a copy of the program."""
    return {
        "WORLD_SIZE": str(task.size),
        "RANK": str(task.rank),
        "LOCAL_WORLD_SIZE": str(task.local_size),
        "LOCAL_RANK": str(task.local_rank % max(1, torch.cuda.device_count())),  # 0 if SLURM gives each copy one GPU
        "MASTER_ADDR": task.address,
        "MASTER_PORT": str(task.port),
    }


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _agree_on_seed() -> None:
    """Make initial weights equal on all ranks from now on: if seeds differ, all ranks take rank 0's Keras seed."""
    seeds = gather_objects(rng_utils.get_random_seed(), "enters `data_parallel()`")
    if seeds[0] is None or any(seed != seeds[0] for seed in seeds):
        chosen = [random.randint(1, 10**9) if seeds[0] is None else seeds[0]]
        with naming_missing_ranks():
            dist.broadcast_object_list(chosen)
        with seeding_without_tensorflow():
            keras.utils.set_random_seed(chosen[0])
