"""Starts the workers of a multi-process test, with a time limit that kills them all.

Limits are written for a quiet machine. Where other jobs run at the same time, or the machine is a slow one, the same
work takes longer; `patient` measures by how much.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import metadata
from unittest import mock

from packaging.version import Version

TESTS = pathlib.Path(__file__).parents[1]
SCRIPTS = TESTS / "promises" / "processes"  # what runs in processes of its own


def _without_fusion_emitters():
    """The flag of XLA with which a program compiles in a fifth of the time.

    jaxlib 0.11.1 dropped the flag, and XLA aborts a process at a flag that it does not have.
    """
    try:
        has_flag = Version(metadata.version("jaxlib")) < Version("0.11.1")
    except metadata.PackageNotFoundError:  # TensorFlow reads XLA_FLAGS too; 2.21 has the flag
        has_flag = True
    return "--xla_cpu_use_fusion_emitters=false" if has_flag else ""


WITHOUT_FUSION_EMITTERS = _without_fusion_emitters()
# For XLA_FLAGS: programs of the same meaning, compiled in less time, and slower.
QUICKLY_COMPILED = (
    f"--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true {WITHOUT_FUSION_EMITTERS}"
)


_ROUNDS = 200_000  # a unit of work: as many rounds of a loop
_USUAL = 0.02  # seconds that they take on a quiet machine, generously
_MOST = 10.0
_LASTS = 5.0  # seconds until it is measured again

_measured = (-_LASTS, 1.0)


def patient(seconds):
    """A limit of that many seconds, or longer where a unit of work takes longer."""
    return seconds * slowness()


def slowness():
    """At least 1: how many times longer things take here and now, by a unit of work and by the jobs that wait."""
    global _measured
    when, found = _measured
    if time.monotonic() - when >= _LASTS:
        begin = time.perf_counter()
        for _ in range(_ROUNDS):
            pass
        work = (time.perf_counter() - begin) / _USUAL
        jobs = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
        found = min(max(1.0, work, jobs), _MOST)
        _measured = time.monotonic(), found
    return found


class WorkersFailed(AssertionError):
    """Some worker failed or none finished in time; holds what each of them printed."""


def torchrun(script, num_replicas, *arguments, timeout=150.0, environment=None):
    """Runs `tests/promises/processes/<script>` on that many ranks. Returns what rank 0 printed.

    The ranks get the variables that torchrun sets. Not by torchrun itself, which lets ranks live on when it is killed;
    the examples are started with it. They are forked from one process that has imported Keras and PyTorch, because
    importing these takes each of them longer than most checks do.

    Raises:
        WorkersFailed: with the output of all ranks.
    """
    (port,) = free_ports(1)
    environments = [
        variables(
            "torch",
            OMP_NUM_THREADS="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            WORLD_SIZE=str(num_replicas),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **(environment or {}),
        )
        for rank in range(num_replicas)
    ]
    return workers(script, environments, *arguments, timeout=timeout, start=fork_with("torch"))[0]


def jax_processes(script, num_processes, *arguments, num_devices=2, timeout=150.0, grace=10.0):
    """Runs `tests/promises/processes/<script>` in that many processes of one `jax.distributed` job.

    Each has some devices, and gets the job's address, the number of processes and its own number in the variables that
    Keras reads.
    """
    (port,) = free_ports(1)
    return workers(
        script,
        [
            variables(
                "jax",
                JAX_PLATFORMS="cpu",
                JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
                XLA_FLAGS=f"--xla_force_host_platform_device_count={num_devices} {QUICKLY_COMPILED}",
                KERAS_DISTRIBUTION_JOB_ADDRESSES=f"127.0.0.1:{port}",
                KERAS_DISTRIBUTION_NUM_PROCESSES=str(num_processes),
                KERAS_DISTRIBUTION_PROCESS_ID=str(process),
            )
            for process in range(num_processes)
        ],
        *arguments,
        timeout=timeout,
        grace=grace,
        start=fork_with("jax"),
    )


def tensorflow_workers(script, num_workers, *arguments, timeout=150.0, grace=10.0):
    """Runs `tests/promises/processes/<script>` on that many workers of a `MultiWorkerMirroredStrategy`."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
    tasks = [
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}} for worker in range(num_workers)
    ]
    environments = [variables("tensorflow", TF_CONFIG=json.dumps(task)) for task in tasks]
    start = fork_with("tensorflow")
    return workers(script, environments, *arguments, timeout=timeout, grace=grace, start=start)


def processes(backend, script, num_processes, *arguments, timeout=150.0):
    """Runs `tests/promises/processes/<script>` in that many processes of one job of the backend, with a device each."""
    if backend == "jax":
        return jax_processes(script, num_processes, *arguments, num_devices=1, timeout=timeout)
    run = {"torch": torchrun, "tensorflow": tensorflow_workers}[backend]
    return run(script, num_processes, *arguments, timeout=timeout)


def program(backend, text, *arguments, environment, timeout=100.0):
    """Runs a program's text in a process that has done nothing yet but import Keras. Returns what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "program.py"
        file.write_text(text)
        return workers(file, [environment], *arguments, timeout=timeout, start=fork_with(backend))[0]


def free_ports(number):
    """Ports on the loopback device that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def variables(backend, **more):
    """The environment of a worker."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    # Without the programs that the tests have compiled: what several processes do is their own.
    mine = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return {
        **mine,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Inside the test's limit, so that a worker that waits for ever still says where.
        "PYTHONFAULTHANDLER": "1",
        **more,
    }


def workers(script, environments, *arguments, timeout=150.0, grace=10.0, start=None):
    """Runs a script once per environment, all at a time. Returns what each of them printed.

    When one fails, the others have `grace` seconds to fail too, and when the time is up all are killed; both are longer
    on a busy machine. `start` makes a
    process of a script, its arguments, its environment and the file for what it prints; by default a new interpreter.

    Raises:
        WorkersFailed: with the output of all workers.
    """
    start = start or _Interpreter
    command = [str(SCRIPTS / script), *map(str, arguments)]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.NamedTemporaryFile("w+")) for _ in environments]
        processes = []
        for output, environment in zip(outputs, environments):
            process = start(command, environment, output.name)
            stack.callback(process.wait)
            stack.callback(_signal, process, signal.SIGKILL)
            processes.append(process)
        limit = time.monotonic() + patient(timeout)
        failed = False
        while any(process.exit_status is None for process in processes) and time.monotonic() < limit:
            if not failed and any(process.exit_status for process in processes):
                failed, limit = True, min(limit, time.monotonic() + patient(grace))
            time.sleep(0.05)
        late = [i for i, process in enumerate(processes) if process.exit_status is None]
        for i in late:
            _signal(processes[i], signal.SIGABRT)  # it writes its stack first (faulthandler), then dies
        for process in processes:
            process.wait(5)
        printed = []
        for output in outputs:
            output.seek(0)
            printed.append(output.read())
    if any(process.exit_status for process in processes):
        what = f"not finished after {timeout} s: {late}" if late and not failed else "failed"
        parts = [
            f"--- worker {i}, exit status {process.exit_status}{', killed' if i in late else ''}\n{text}"
            for i, (process, text) in enumerate(zip(processes, printed))
        ]
        raise WorkersFailed(f"{what}: {' '.join(command)}\n" + "\n".join(parts))
    return printed


class _Interpreter:
    """A process of its own."""

    def __init__(self, command, environment, output):
        with open(output, "w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-u", *command],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def exit_status(self):
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout=None):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


class _Fork:
    """A process that has imported already what `_server` of this backend has."""

    def __init__(self, backend, command, environment, output):
        self._process = _server(backend).Process(target=_be_worker, args=(command, environment, output))
        self._process.start()
        self.pid = self._process.pid

    @property
    def exit_status(self):
        """None while it runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)


def fork_with(backend):
    """Makes processes that have imported Keras and this framework; for `workers`. One framework per test process."""
    return functools.partial(_Fork, backend)


# Imports alone: they start no threads, as the first operation does, which forks would lack. What is not there is left
# out; TensorFlow is what `keras.utils.set_random_seed` imports on every backend.
_IMPORTED = {
    "torch": ["keras", "torch", "torch.distributed", "torch._dynamo", "tensorflow"],  # _dynamo is for the first step
    "jax": ["keras", "jax", "tensorflow"],
    "tensorflow": ["keras", "tensorflow"],
}


@functools.cache
def _server(backend):
    assert multiprocessing.forkserver._forkserver._forkserver_pid is None, "there is one server, of another backend"
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_IMPORTED[backend])
    # One thread of NumPy's own; and JAX reads the platform while it is imported.
    with mock.patch.dict(os.environ, variables(backend, OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu")):
        multiprocessing.forkserver.ensure_running()
    return server


def _be_worker(command, environment, output):
    """What a fork does: it becomes what a new interpreter would be that runs the script.

    Only that the order of sets of strings is the same in all forks of a server.
    """
    os.setsid()
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    if "jax" in sys.modules:  # which has read those of the server
        for name, value in environment.items():
            if name.startswith("JAX_CPU_") or name == "JAX_COMPILATION_CACHE_DIR":
                sys.modules["jax"].config.update(name.lower(), value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own does so by itself
    gc.freeze()  # what was imported is there to stay, and need not be looked through
    sys.argv = command
    sys.path.insert(0, str(pathlib.Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # as JAX's, which tells the other processes; `multiprocessing` leaves them out


def run(command, timeout, environment):
    """Runs a command and everything it starts; kills them all when the time is up. Returns its output."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=patient(timeout))
    except subprocess.TimeoutExpired:
        # Every process of the session writes its stack first (faulthandler), then dies.
        _signal(process, signal.SIGABRT)
        try:
            output, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            output, _ = process.communicate()
        raise WorkersFailed(f"not finished after {timeout} s: {' '.join(command)}\n{output}") from None
    finally:
        _signal(process, signal.SIGKILL)
    if process.returncode:
        raise WorkersFailed(f"exit status {process.returncode}: {' '.join(command)}\n{output}")
    return output


def _signal(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
