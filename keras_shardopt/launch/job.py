"""What is started: how many processes, on which machine of how many, and what each of them sees."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import random
import re
import socket
import sys
from collections.abc import Sequence


class JobError(ValueError):
    """Arguments that cannot be started, in words for the command line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that this machine starts of a program."""

    program: Sequence[str]
    """The script and its arguments; or "-m", a module and its arguments."""

    nproc: int
    """How many processes each machine starts."""

    devices_per_process: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    """Host and port at which the processes of all machines find each other; on machine 0."""

    hosts: Sequence[str] = ()
    """The addresses of all machines, in their order."""

    @property
    def num_processes(self) -> int:
        """Those of all machines."""
        return self.nnodes * self.nproc

    @property
    def ranks(self) -> range:
        """The numbers of the processes that this machine starts."""
        return range(self.node_rank * self.nproc, (self.node_rank + 1) * self.nproc)

    @property
    def command(self) -> list[str]:
        """What each process runs."""
        return [sys.executable, "-u", *self.program]

    def check(self) -> None:
        """Raises JobError where the arguments do not go together."""
        for name, value in (("nproc", self.nproc), ("nnodes", self.nnodes)):
            if value < 1:
                raise JobError(f"`--{name}` must be at least 1. Received: {value}.")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise JobError(f"`--devices-per-process` must be at least 1. Received: {self.devices_per_process}.")
        if not 0 <= self.node_rank < self.nnodes:
            raise JobError(
                f"`--node-rank` must be the number of this machine, from 0 to {self.nnodes - 1}. "
                f"Received: {self.node_rank}, with --nnodes {self.nnodes}."
            )
        if self.nnodes > 1 and not re.fullmatch(r".+:\d+", self.coordinator or ""):
            raise JobError(
                "Several machines need `--coordinator HOST:PORT`, equal on all of them: an address of machine 0 and a "
                f"port that is free there. Received: {self.coordinator!r}, with --nnodes {self.nnodes}."
            )
        if not self.program:
            raise JobError(
                "A program must be named. Received: none. Write it behind the options: `--nproc 2 train.py`."
            )
        if self.program[0] != "-m" and not pathlib.Path(self.program[0]).is_file():
            raise JobError(f"The program must be a file, or a module after -m. Received: {self.program[0]!r}.")


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now.

    Not those that the system gives to whoever asks for any: between here and the moment in which a process of the job
    listens, some other connection could get it.
    """
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
    """For each process that this machine starts, the GPUs that it sees, as CUDA_VISIBLE_DEVICES; None: as it is.

    Raises:
        JobError: if there are too few.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    files = sorted(int(file.name[6:]) for file in pathlib.Path("/dev").glob("nvidia[0-9]*"))
    all_gpus = [str(number) for number in files]
    if given is not None:  # where CUDA ends at the first that is none, as -1
        all_gpus = list(itertools.takewhile(lambda each: each and each[0] != "-", map(str.strip, given.split(","))))
    if not all_gpus or job.nproc == 1:
        return [None] * job.nproc
    each = job.devices_per_process or len(all_gpus) // job.nproc
    if each == 0 or each * job.nproc > len(all_gpus):
        raise JobError(
            f"{job.nproc} processes with {max(each, 1)} GPUs each need {max(each, 1) * job.nproc}. Received: "
            f"{len(all_gpus)} GPUs ({','.join(all_gpus)}). Start fewer processes, or set CUDA_VISIBLE_DEVICES= to use "
            "the CPU."
        )
    return [",".join(all_gpus[i * each : (i + 1) * each]) for i in range(job.nproc)]
