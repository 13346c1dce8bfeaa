"""Starts the workers of a multi-process test, with a time limit that kills them all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).parents[1]


class WorkersFailed(AssertionError):
    """Some worker failed or none finished in time; holds what each of them printed."""


def torchrun(script, num_replicas, *arguments, timeout=150.0, environment=None):
    """Runs `tests/multiprocess/<script>` on that many ranks. Returns what rank 0 printed.

    The ranks get the variables that torchrun sets. Not by torchrun itself, which lets ranks live on when it is killed;
    the examples are started with it.

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
    return workers(script, environments, *arguments, timeout=timeout)[0]


def jax_processes(script, num_processes, *arguments, num_devices=2, timeout=150.0, grace=10.0):
    """Runs `tests/multiprocess/<script>` in that many processes of one `jax.distributed` job, each with some devices.

    Each gets the job's address, the number of processes and its own number in the variables that Keras reads.
    """
    (port,) = free_ports(1)
    return workers(
        script,
        [
            variables(
                "jax",
                JAX_PLATFORMS="cpu",
                JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
                XLA_FLAGS=f"--xla_force_host_platform_device_count={num_devices}",
                KERAS_DISTRIBUTION_JOB_ADDRESSES=f"127.0.0.1:{port}",
                KERAS_DISTRIBUTION_NUM_PROCESSES=str(num_processes),
                KERAS_DISTRIBUTION_PROCESS_ID=str(process),
            )
            for process in range(num_processes)
        ],
        *arguments,
        timeout=timeout,
        grace=grace,
    )


def tensorflow_workers(script, num_workers, *arguments, timeout=150.0, grace=10.0):
    """Runs `tests/multiprocess/<script>` on that many workers of a `MultiWorkerMirroredStrategy`."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
    tasks = [
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}} for worker in range(num_workers)
    ]
    environments = [variables("tensorflow", TF_CONFIG=json.dumps(task)) for task in tasks]
    return workers(script, environments, *arguments, timeout=timeout, grace=grace)


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


def workers(script, environments, *arguments, timeout=150.0, grace=10.0):
    """Runs a script once per environment, all at a time. Returns what each of them printed.

    When one fails, the others have `grace` seconds to fail too, and when the time is up all are killed.

    Raises:
        WorkersFailed: with the output of all workers.
    """
    command = [sys.executable, "-u", str(TESTS / "multiprocess" / script), *map(str, arguments)]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in environments]
        processes = []
        for output, environment in zip(outputs, environments):
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(_signal, process, signal.SIGKILL)
            processes.append(process)
        limit = time.monotonic() + timeout
        failed = False
        while any(process.poll() is None for process in processes) and time.monotonic() < limit:
            if not failed and any(process.returncode for process in processes):
                failed, limit = True, min(limit, time.monotonic() + grace)
            time.sleep(0.05)
        late = [i for i, process in enumerate(processes) if process.poll() is None]
        for i in late:
            _signal(processes[i], signal.SIGABRT)  # it writes its stack first (faulthandler), then dies
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        printed = []
        for output in outputs:
            output.seek(0)
            printed.append(output.read())
    if any(process.returncode for process in processes):
        what = f"not finished after {timeout} s: {late}" if late and not failed else "failed"
        parts = [
            f"--- worker {i}, exit status {process.returncode}{', killed' if i in late else ''}\n{text}"
            for i, (process, text) in enumerate(zip(processes, printed))
        ]
        raise WorkersFailed(f"{what}: {' '.join(command)}\n" + "\n".join(parts))
    return printed


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
        output, _ = process.communicate(timeout=timeout)
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
