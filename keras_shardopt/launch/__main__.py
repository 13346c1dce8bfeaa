"""`python -m keras_shardopt.launch --nproc 2 train.py`: starts what the Keras backend needs for several processes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from keras_shardopt.backends import for_backend
from keras_shardopt.launch.job import Job, JobError
from keras_shardopt.launch.supervisor import ENDING

# By backend, what starts its processes: torchrun on PyTorch.
_STARTERS = {name: f"keras_shardopt.launch.{name}" for name in ("tensorflow", "jax", "torch")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes of this machine, and again where that is asked for. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        least, job = _job(given)
        job.check()
        while True:
            starter = for_backend(_STARTERS)
            if starter is None:
                raise JobError("The Keras backend must be tensorflow, jax or torch. Set KERAS_BACKEND to one of them.")
            status = int(starter.start(job))
            if status in (0, *(128 + number for number in ENDING)) or given.max_restarts == 0:
                return status
            given.max_restarts -= 1
            job = dataclasses.replace(job, nproc=max(least, job.nproc - 1))
            print(
                f"keras_shardopt.launch: starts again with {job.nproc} processes; restarts left: {given.max_restarts}.",
                file=sys.stderr,
                flush=True,
            )
    except JobError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _job(given: argparse.Namespace) -> tuple[int, Job]:
    """The least number of processes to go on with, and what is started at first."""
    least, _, most = given.nproc.rpartition(":")
    if not all(number.isdecimal() for number in (least or most, most)) or int(least or most) > int(most):
        raise JobError(
            f"`--nproc` must be a number, or two as in 2:3: the least and the most. Received: {given.nproc!r}."
        )
    if least and given.nnodes > 1:
        raise JobError(
            "With several machines each must start as many processes as the others. Received: "
            f"--nproc {given.nproc} with --nnodes {given.nnodes}. Use one number; on PyTorch `torchrun --nnodes 1:2` "
            "goes on without a machine."
        )
    job = Job(
        program=["-m", *given.module] if given.module else given.program[given.program[:1] == ["--"] :],
        nproc=int(most),
        devices_per_process=given.devices_per_process,
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        coordinator=given.coordinator,
        hosts=[host for host in given.hosts.split(",") if host],
    )
    return int(least or most), job


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,  # of the program's own arguments
        prog="python -m keras_shardopt.launch",
        description="Starts a training program in several processes: what the Keras backend needs for that.",
    )
    parser.add_argument(
        "--nproc", default="1", metavar="N", help="processes of each machine; 2:3 goes on with 2 after a death"
    )
    parser.add_argument(
        "--devices-per-process", type=int, metavar="N", help="CPU devices, or GPUs, of each (not PyTorch)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="how often to start again after a failure"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines")
    parser.add_argument("--node-rank", type=int, default=0, metavar="I", help="which of them this is, from 0")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="an address of machine 0, for several machines")
    parser.add_argument("--hosts", default="", metavar="HOST,...", help="addresses of all machines (TensorFlow)")
    parser.add_argument(
        "-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE ...", help="a module, not a file"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="train.py ...", help="the program and its arguments"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
