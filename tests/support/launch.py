"""Starts the ranks of a multi-process test, with a time limit that kills them all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

TESTS = pathlib.Path(__file__).parents[1]


class WorkersFailed(AssertionError):
    """Some worker failed or none finished in time; holds what each of them printed."""


def torchrun(script, num_replicas, *arguments, timeout=150.0, environment=None):
    """Runs `tests/multiprocess/<script>` on that many ranks. Returns what rank 0 printed.

    Raises:
        WorkersFailed: with the output of all ranks.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_replicas)]
    command += [str(TESTS / "multiprocess" / script), *map(str, arguments)]
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "KERAS_BACKEND": "torch",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Inside the test's limit, so that a rank that waits for ever still says where.
        "PYTHONFAULTHANDLER": "1",
        **(environment or {}),
    }
    return run(command, timeout, variables)


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
