"""The job of this process, read from its launcher's environment variables.

To connect processes, a framework reads variables that the user or a launcher such as torchrun has set. Commands such as
`srun` start copies of a program, and set other variables. `join` derives the framework's variables from these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence

_BACKENDS = {
    "WORLD_SIZE": ("torch", "PyTorch"),
    "KERAS_DISTRIBUTION_NUM_PROCESSES": ("jax", "JAX"),
    "TF_CONFIG": ("tensorflow", "TensorFlow"),
}
"""Environment variables for the number of processes in a job, with the backend and framework that read each of them."""

_OPEN_MPI, _MVAPICH = "OMPI_COMM_WORLD", "MV2_COMM_WORLD"
_COMMANDS = (
    ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "", "FLUX_TASK_LOCAL_ID"),
    ("mpirun", *(f"{_OPEN_MPI}_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))),
    ("mpirun", *(f"{_MVAPICH}_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))),
    ("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    # Do not read SLURM_NTASKS: it is also set in a batch script, which is a single process.
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "", "SLURM_LOCALID"),
)
"""Commands that start copies of a program, with their environment variables: number of copies, index of this copy,
number of copies on this machine, index on this machine. The first match counts. `srun` comes last, because `mpirun` can
run inside a step of `srun`."""


HEARTBEATS = "KERAS_SHARDOPT_HEARTBEATS"
"""The environment variable for a directory of files. Each process writes its last step there, for the launcher."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One of the copies of a program that a command such as `srun` has started."""

    command: str
    size: int
    """The number of copies."""

    rank: int
    local_size: int
    """The number of copies on this machine."""

    local_rank: int
    hosts: Sequence[str]
    """The machine of each copy. The list is shorter if the command names only the first machine, or none."""

    port: int
    """The first of the `size` successive ports that this job uses on each machine."""

    @property
    def address(self) -> str:
        """The host of the first copy.

        Raises:
            RuntimeError: if the command does not name the host.
        """
        if not self.hosts:
            raise RuntimeError(
                f"Several machines need the address of the first machine, but `{self.command}` does not set this "
                f"address. Received: {self.size} processes, {self.local_size} on this machine. Set MASTER_ADDR and "
                "MASTER_PORT for all processes, as in `mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ...`."
            )
        return self.hosts[0]


def started_by() -> Task | None:
    """Return facts about the copies of this program that a command such as `srun` started. None for a single copy."""
    found = [row for row in _COMMANDS if _number(row[1]) > 1 and (row[0] != "srun" or _is_step())]
    if not found:
        return None
    command, size, rank = found[0][0], _number(found[0][1]), _number(found[0][2])
    local_size, local_rank = _number(found[0][3]), _number(found[0][4])
    hosts: list[str] = []
    job = os.environ.get("PMIX_NAMESPACE", _starter())
    if command == "flux run":
        local_size, job = size // _number("FLUX_JOB_NNODES", 1), os.environ.get("FLUX_JOB_ID", job)
    # `srun --mpi=pmi2` also sets PMI_SIZE. Unlike `mpiexec`, it sets no local size, and so is detected here.
    if found[-1][0] == "srun" and (command == "srun" or (command, local_size) == ("mpiexec", 0)):
        command, local_rank = "srun", _number("SLURM_LOCALID")
        hosts, local_size = _slurm_hosts(size, rank)
        job = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    local_size = local_size or 1
    if local_size == size:
        hosts = ["127.0.0.1"] * size
    elif command not in ("srun", "flux run") and "MASTER_PORT" not in os.environ:
        return Task(command, size, rank, local_size, local_rank, [], 0)  # port 0: machines cannot agree on a port
    given = os.environ.get("MASTER_ADDR")
    hosts = [given, *hosts[1:]] if given else hosts
    port = _number("MASTER_PORT", 20_000 + zlib.crc32(job.encode()) % 11_000)
    return Task(command, size, rank, local_size, local_rank, hosts, port)


def _starter() -> str:
    """Return the id of the process that started all copies of this program on this machine."""
    with contextlib.suppress(OSError, AttributeError):  # the parent of the session leader is `mpiexec`
        return _stat(os.getsid(0))[1]
    return str(os.getppid())


def _is_step() -> bool:
    """Return whether `srun` runs copies of this program. False in a batch script or a shell of `srun --pty bash`."""
    counts, here = _tasks_per_node(), os.environ.get("SLURM_GTIDS", "")
    if here and counts[_number("SLURM_NODEID") :][:1] not in ([], [here.count(",") + 1]):
        return False
    with contextlib.suppress(OSError, LookupError):
        task = os.environ["SLURM_TASK_PID"]
        has_terminal = _stat(task)[4] != "0"
        arguments = pathlib.Path("/proc", task, "cmdline").read_text().split("\0")[1:-1]
        return not has_terminal or not all(each.startswith("-") for each in arguments)
    return True


def _stat(process: object) -> list[str]:
    """Return fields of Linux' `/proc/<process>/stat`: state, parent, group, session, terminal, and more."""
    return pathlib.Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()


def _number(variable: str, default: int = 0) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default


def _slurm_hosts(size: int, rank: int) -> tuple[list[str], int]:
    """Return the machine of each task in this SLURM step (perhaps only of the first), and the tasks on this machine."""
    nodes = expanded(os.environ.get("SLURM_STEP_NODELIST", ""))
    counts = _tasks_per_node()
    hosts = [node for node, count in zip(nodes, counts) for _ in range(count)]
    # By default, SLURM assigns tasks in blocks. Otherwise only the first task is certain to be on the first machine.
    is_block = len(hosts) == size and hosts[rank] == os.environ.get("SLURMD_NODENAME", hosts[rank])
    # Test the name of SLURM's distribution too, because the test above can differ between tasks. But accept any name
    # if each machine has one task, because SLURM can name the distribution "cyclic" then.
    is_block &= max(counts, default=1) == 1 or os.environ.get("SLURM_DISTRIBUTION", "block").startswith("block")
    node = _number("SLURM_NODEID")
    return hosts if is_block else nodes[:1], counts[node] if node < len(counts) else 1


def _tasks_per_node() -> list[int]:
    """Return the number of tasks of this SLURM step on each machine."""
    return [
        int(count)
        for entry in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")
        for count, times in re.findall(r"^(\d+)(?:\(x(\d+)\))?$", entry)
        for _ in range(int(times or 1))
    ]


def expanded(nodes: str) -> list[str]:
    """Return the host names in a SLURM node list: "gpu[1-2,07]" gives gpu1, gpu2 and gpu07."""
    names = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        found = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            found = [name + part for name in found for part in ([text] if text else _in_ranges(ranges))]
        names += found
    return names


def _in_ranges(ranges: str) -> list[str]:
    numbers = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return numbers


joined: list[str] = []
"""The command that started the copies connected by `join`. Empty if `join` connected none."""


def join(own_rank: str, variables: Callable[[Task], Mapping[str, str]]) -> None:
    """Set the environment variables that connect the copies of this program, unless a launcher has set them.

    `own_rank` is the variable in which launchers of this backend set the index of a process. `variables` returns the
    variables to set for a copy. A variable that the user has set keeps its value.

    Raises:
        RuntimeError: if the machine of the first copy is unknown, or the user's variables contradict the command.
    """
    task = started_by()
    if task is None or own_rank in os.environ:
        return
    found = variables(task)
    (size,) = (name for name in _BACKENDS if name in found)
    if _size_of(size) not in (0, task.size):
        raise RuntimeError(
            f"{size} must be the number of processes that `{task.command}` has started. Received: "
            f"{size}={os.environ[size]}, and {task.size} processes. Unset {size}, because `data_parallel()` sets it."
        )
    for name, value in found.items():
        os.environ.setdefault(name, value)
    joined[:] = [task.command]


def alone() -> dict[str, str]:
    """Return the environment variables of this process, without the variables that make a process part of a job."""
    of_jobs = {*_BACKENDS, *(row[1] for row in _COMMANDS)}
    found = {name: value for name, value in os.environ.items() if name not in of_jobs}
    return {name: value for name, value in found.items() if not name.startswith("KERAS_DISTRIBUTION_")}


def own_gpus(task: Task) -> None:
    """Restrict this copy of the program to its share of the machine's GPUs, unless SLURM has divided the GPUs."""
    if {"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"} & os.environ.keys():
        return
    gpus = visible_gpus()
    each = len(gpus) // task.local_size
    if task.local_size > 1 and each:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[task.local_rank * each : (task.local_rank + 1) * each])


def all_gpus_for_jax(gpus: Sequence[str]) -> dict[str, str]:
    """Return the variable that makes JAX use all these GPUs. Under `srun` and Open MPI, JAX would use only one."""
    given = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    return {"JAX_LOCAL_DEVICE_IDS": given or ",".join(map(str, range(len(gpus))))} if gpus else {}


def visible_gpus() -> list[str]:
    """Return the GPUs that CUDA gives to this process, in the format of CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:  # drop the first invalid GPU and all after it, as CUDA does
        return list(itertools.takewhile(lambda each: each and each[0] != "-", map(str.strip, given.split(","))))
    return [str(number) for number in sorted(int(file.name[6:]) for file in pathlib.Path("/dev").glob("nvidia[0-9]*"))]


def check_joined(num_processes: int, framework: str) -> None:
    """Raise RuntimeError unless `data_parallel()` has connected this process to the other processes of its job."""
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
            fix = f"Connect the processes with the functions of {framework} before `data_parallel()`."
        raise RuntimeError(
            "`data_parallel()` must connect all processes of a job, or each process trains a separate model. The "
            f"variable {variable} describes a job of {size} processes for {reader}, but this process runs {framework} "
            f"alone. {fix} To train in one process, unset {variable}."
        )


def _size_of(variable: str) -> int:
    if variable != "TF_CONFIG":
        return _number(variable)
    # Ignore errors in TF_CONFIG, because TensorFlow reports them.
    with contextlib.suppress(ValueError, LookupError, AttributeError, TypeError):
        config = json.loads(os.environ.get(variable, ""))
        if config["task"]["type"] in ("chief", "worker"):  # evaluators and parameter servers do not train
            return sum(len(config["cluster"].get(kind, ())) for kind in ("chief", "worker"))
    return 0
