"""`python -m keras_shardopt.launch --nproc 2 train.py`: starts a program in several processes on any backend."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from keras_shardopt.backends import for_backend, jobs
from keras_shardopt.launch.job import Job, JobError
from keras_shardopt.launch.supervisor import Stopped

# For each backend, the module that starts processes.
_STARTERS = {name: f"keras_shardopt.launch.{name}" for name in ("tensorflow", "jax", "torch")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes of this machine, and restarts them up to `--max-restarts` times. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        _complete(given)
        least, job = _job(given)
        job.check()
        while True:
            starter = for_backend(_STARTERS)
            if starter is None:
                raise JobError("The Keras backend must be tensorflow, jax or torch. Set KERAS_BACKEND accordingly.")
            status = int(starter.start(job))
            if status == 0 or given.max_restarts == 0:
                return status
            given.max_restarts -= 1
            job = dataclasses.replace(job, nproc=max(least, job.nproc - 1))
            print(
                f"keras_shardopt.launch: starts again with {job.nproc} processes; restarts left: {given.max_restarts}.",
                file=sys.stderr,
                flush=True,
            )
    except Stopped as stopped:
        return 128 + stopped.number
    except JobError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _complete(given: argparse.Namespace) -> None:
    """Sets `--nnodes` and related arguments if a cluster's command, such as `srun`, started the launcher."""
    task = jobs.started_by() if given.nnodes is None else None
    if task is None:
        given.nnodes = given.nnodes or 1
        return
    if task.local_size > 1:
        raise JobError(
            "A cluster's command must start the launcher once on each machine. Received: "
            f"{task.local_size} launchers on this machine, started by `{task.command}`. Use `srun --ntasks-per-node=1`"
            ", or start the program itself: `srun -n 8 python train.py` needs no launcher."
        )
    given.nnodes, given.node_rank = task.size, task.rank
    try:
        given.coordinator = given.coordinator or f"{task.address}:{task.port}"
    except RuntimeError as error:
        raise JobError(f"{error} Or use `--coordinator`.") from error
    given.hosts = given.hosts or ",".join(task.hosts)


def _job(given: argparse.Namespace) -> tuple[int, Job]:
    """Returns the minimum of `--nproc`, which limits restarts with fewer processes, and the job of the first start."""
    least, _, most = given.nproc.rpartition(":")
    if not all(number.isdecimal() for number in (least or most, most)) or int(least or most) > int(most):
        raise JobError(f"`--nproc` must be a number, or a minimum and a maximum as in 2:3. Received: {given.nproc!r}.")
    if least and given.nnodes > 1:
        raise JobError(
            "With several machines, `--nproc` must be one number, the same on all machines. Received: --nproc "
            f"{given.nproc} with --nnodes {given.nnodes}. Use one number. If a PyTorch job must continue after it "
            "loses a machine, use `torchrun --nnodes 1:2`."
        )
    job = Job(
        program=["-m", *given.module] if given.module else given.program[given.program[:1] == ["--"] :],
        nproc=int(most),
        devices_per_process=given.devices_per_process,
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        coordinator=given.coordinator,
        hosts=[host for host in given.hosts.split(",") if host],
        log_dir=given.log_dir,
        watch=given.watch,
    )
    return int(least or most), job


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,  # otherwise argparse could take an argument of the program for an abbreviation
        prog="python -m keras_shardopt.launch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--nproc",
        default="1",
        metavar="N",
        help="The number of processes on this machine (default: 1). 2:3 starts 3, and restarts with 2 after a failure.",
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="JAX, TensorFlow: the number of GPUs of each process, or of CPU devices if there are no GPUs "
        "(default: an equal part of the GPUs, or one CPU device).",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="The maximum number of restarts after a process failed (default: 0).",
    )
    parser.add_argument(
        "--nnodes",
        type=int,
        metavar="N",
        help="The number of machines (default: 1, or the number of launchers if srun starts one on each machine).",
    )
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="I", help="The index of this machine, from 0 (default: 0)."
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="With several machines: an address of machine 0 and a free port there, the same on all machines.",
    )
    parser.add_argument(
        "--hosts",
        default="",
        metavar="HOST,...",
        help="TensorFlow with several machines: the addresses of all machines, ordered by --node-rank.",
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="A directory to which the output of each process is also appended, as rank-0.log and so on. Jobs that run"
        " at the same time need different directories.",
    )
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="Ends the job if a process makes no step in this time, and prints the stacks of all processes. The program"
        " needs `keras_shardopt.callbacks.Heartbeat()` among the callbacks of `fit`.",
    )
    parser.add_argument(
        "-m",
        nargs=argparse.REMAINDER,
        dest="module",
        metavar="MODULE ...",
        help="A module to run instead of a file, and its arguments.",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="train.py ...", help="The program to run, and its arguments."
    )
    return parser


_DESCRIPTION = """\
Starts a training program in several processes that train one model together.

The launcher uses the Keras backend of KERAS_BACKEND. `keras_shardopt.data_parallel()` in the program connects the
processes. Each printed line begins with the number of its process."""

_EXAMPLES = """\
examples:
  # two processes on this machine
  KERAS_BACKEND=torch python -m keras_shardopt.launch --nproc 2 train.py --epochs 3

  # three processes; up to two restarts after a failure, with at least two processes
  python -m keras_shardopt.launch --nproc 2:3 --max-restarts 2 train.py

  # two machines with eight processes each; on the second machine with --node-rank 1
  python -m keras_shardopt.launch --nnodes 2 --node-rank 0 --coordinator 10.0.0.1:29500 --nproc 8 train.py

The exit status is 0 if all processes succeed. Otherwise it is the status of the first process that failed, or 128 plus
the number of the signal that ended it or the launcher."""


if __name__ == "__main__":
    sys.exit(main())
