"""The description of a job: program, number of processes, machines, and devices of each process."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
import socket
import sys
from collections.abc import Sequence

from keras_shardopt.backends import jobs


class JobError(ValueError):
    """Raised for invalid arguments of the command line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A program, and the processes in which this machine runs it."""

    program: Sequence[str]
    """The script and its arguments. For a module: "-m", its name and its arguments."""

    nproc: int
    """The number of processes per machine."""

    devices_per_process: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    """The host and port on machine 0 that all processes connect to."""

    hosts: Sequence[str] = ()
    """The addresses of all machines, ordered by `node_rank`."""

    log_dir: str | None = None
    """A directory for the output of each process."""

    watch: float | None = None
    """The seconds without a step after which the job is ended."""

    @property
    def num_processes(self) -> int:
        """The number of processes on all machines together."""
        return self.nnodes * self.nproc

    @property
    def ranks(self) -> range:
        """The ranks (numbers within the job) of the processes that this machine starts."""
        return range(self.node_rank * self.nproc, (self.node_rank + 1) * self.nproc)

    @property
    def command(self) -> list[str]:
        """The command line of each process."""
        return [sys.executable, "-u", *self.program]

    def check(self) -> None:
        """Raises JobError if the arguments are invalid or contradict each other."""
        for name, value in (("nproc", self.nproc), ("nnodes", self.nnodes)):
            if value < 1:
                raise JobError(f"`--{name}` must be at least 1. Received: {value}.")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise JobError(f"`--devices-per-process` must be at least 1. Received: {self.devices_per_process}.")
        if not 0 <= self.node_rank < self.nnodes:
            raise JobError(
                f"`--node-rank` must be the index of this machine, from 0 to {self.nnodes - 1}. "
                f"Received: {self.node_rank}, with --nnodes {self.nnodes}."
            )
        if self.nnodes > 1 and not re.fullmatch(r".+:\d+", self.coordinator or ""):
            raise JobError(
                "Several machines need `--coordinator HOST:PORT`, the same on all machines: an address and a free port "
                f"of machine 0. Received: {self.coordinator!r}, with --nnodes {self.nnodes}."
            )
        if self.watch is not None and not 0 < self.watch < float("inf"):
            raise JobError(f"`--watch` must be a number of seconds above 0. Received: {self.watch:g}.")
        if self.log_dir is not None:
            try:
                pathlib.Path(self.log_dir).mkdir(parents=True, exist_ok=True)
                for rank in self.ranks:
                    with open(pathlib.Path(self.log_dir, f"rank-{rank}.log"), "a"):
                        pass
            except OSError as error:
                raise JobError(f"`--log-dir` must be a writable directory, or a new one. Received: {error}.") from error
        if not self.program:
            raise JobError("A program to run must follow the options, as in `--nproc 2 train.py`.")
        if self.program[0] != "-m" and not pathlib.Path(self.program[0]).is_file():
            raise JobError(f"The program must be a file, or a module after -m. Received: {self.program[0]!r}.")


def free_ports(number: int) -> list[int]:
    """Returns `number` free ports between 20000 and 32000, below the range of ports that systems assign themselves."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise JobError(f"No {number} ports between 20000 and 32000 are free on this machine.")


def visible_gpus(job: Job) -> list[str | None]:
    """Returns CUDA_VISIBLE_DEVICES for each process of this machine, or None to leave the variable unchanged."""
    all_gpus = jobs.visible_gpus()
    if not all_gpus or job.nproc == 1:
        return [None] * job.nproc
    each = job.devices_per_process or len(all_gpus) // job.nproc
    if each == 0 or each * job.nproc > len(all_gpus):
        raise JobError(
            f"{job.nproc} processes with {max(each, 1)} GPUs each need {max(each, 1) * job.nproc} GPUs. Received: "
            f"{len(all_gpus)} GPUs ({','.join(all_gpus)}). Start fewer processes, or use the CPU: set "
            "CUDA_VISIBLE_DEVICES to an empty value."
        )
    return [",".join(all_gpus[i * each : (i + 1) * each]) for i in range(job.nproc)]
