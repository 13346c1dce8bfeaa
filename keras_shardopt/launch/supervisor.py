"""Runs processes in parallel, forwards signals, and ends all processes if one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from keras_shardopt.launch.job import Job
from keras_shardopt.launch.output import Output
from keras_shardopt.launch.watch import Watch, watching

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a program. The launcher forwards them, because a terminal sends them only to the launcher."""

_SECONDS_TO_FAIL = 5.0
"""After a process fails, the other processes get this time before SIGTERM, and again before SIGKILL."""

_SECONDS_TO_END = 15.0
"""After a forwarded signal, a process gets this time to end before it is killed."""


class Stopped(Exception):
    """Raised after the launcher has received the signal `number` and ended the job."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def supervise(job: Job, environments: Sequence[dict[str, str]], about_aborts: str = "") -> int:
    """Runs the job's command once per environment.

    Args:
        job: the job to run.
        environments: the additional environment variables of each process.
        about_aborts: an explanation to print if a process aborts (SIGABRT).

    Returns:
        0 if all succeed; otherwise the exit status of the first that failed, or 128 plus the number of its signal.

    Raises:
        Stopped: if this process received a signal of `ENDING`; all processes have then ended.
    """
    output = Output(job.ranks[0], job.log_dir)
    with watching(job, output.say) as watch, _forwarded_signals() as received:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, environment in zip(job.ranks, environments):
                # Use a separate session, so Ctrl-C in a terminal reaches only the launcher, which forwards the signal.
                process = subprocess.Popen(
                    job.command,
                    env={**os.environ, **environment, **watch.environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                processes.append(process)
                output.copy(rank, process.stdout, process.stderr)
            failed, hung = _wait(job, processes, received, output, watch)
        finally:
            for process in processes:
                _signal(process, signal.SIGKILL)  # also ends its child processes
                process.wait()
            output.join()
        if received:
            how, status = _ending(-received[0], None)
            output.say(f"the launcher {how}. Exit status: {status}.")
            raise Stopped(received[0])
    if hung:
        output.say(f"{hung} Exit status: {128 + signal.SIGABRT}.")
        return 128 + signal.SIGABRT
    if failed is None:
        return 0
    how, status = _ending(processes[failed].returncode, output.raised.get(job.ranks[failed]))
    advice = about_aborts if status == 128 + signal.SIGABRT else ""
    output.say(f"process {job.ranks[failed]} {how}.{advice} Exit status: {status}.")
    return status


def _wait(
    job: Job, processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int], output: Output, watch: Watch
) -> tuple[int | None, str]:
    """Waits until all processes end, and ends them if a process fails or hangs.

    Returns the index of the failed process or None, and after a hang a text with the steps of all, otherwise "".
    """
    failed: int | None = None
    hung = ""
    limit, then, num_sent = float("inf"), signal.SIGKILL, 0
    while True:
        statuses = [process.poll() for process in processes]
        if failed is None and not received and not hung:
            # If several processes failed since the last poll, choose the process with the earliest traceback.
            ended = [i for i, status in enumerate(statuses) if status]
            failed = min(ended, key=lambda i: output.raised.get(job.ranks[i], _NEVER), default=None)
            if failed is not None and None in statuses:
                limit, then = time.monotonic() + _SECONDS_TO_FAIL, signal.SIGTERM
                output.say(f"process {job.ranks[failed]} failed; the other processes end after {_SECONDS_TO_FAIL:g} s.")
            running = [rank for rank, status in zip(job.ranks, statuses) if status is None]
            if failed is None and running and (hung := watch.hung(running)):
                output.say(f"{hung} The stacks of all processes follow.")
                for process in processes:
                    process.send_signal(signal.SIGABRT)  # Python's `faulthandler` prints the stacks
                limit, then = time.monotonic() + _SECONDS_TO_FAIL, signal.SIGKILL
        if None not in statuses:
            return failed, hung
        if len(received) > num_sent:
            number = received[0] if num_sent == 0 else signal.SIGKILL  # a second signal kills at once
            limit, then, num_sent = time.monotonic() + _SECONDS_TO_END, signal.SIGKILL, len(received)
            _signal_all(processes, number)
        elif time.monotonic() > limit:
            _signal_all(processes, then)
            limit, then = time.monotonic() + _SECONDS_TO_FAIL, signal.SIGKILL
        time.sleep(0.05)


_NEVER = (float("inf"), "")


def _ending(returncode: int, raised: tuple[float, str] | None) -> tuple[str, int]:
    """Returns words for messages about how a process ended, such as "was ended by SIGTERM", and its exit status."""
    if returncode < 0:
        name = next((each.name for each in signal.Signals if each == -returncode), f"signal {-returncode}")
        return f"was ended by {name}", 128 - returncode
    if raised is not None and returncode == 1:  # Python's exit status after an uncaught error
        return f"raised {raised[1][:_MOST_LETTERS].rstrip('.')}", returncode
    return "failed", returncode


_MOST_LETTERS = 300


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[int]]:
    """Yields a list that collects the numbers of received signals in `ENDING`. Signals ignored before stay ignored."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        del frame
        received.append(number)

    caught = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            _signal(process, number)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
