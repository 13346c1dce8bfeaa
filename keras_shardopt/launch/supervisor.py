"""Runs processes side by side: prefixes what they print, forwards signals, and ends all when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from keras_shardopt.launch.job import Job

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""The signals by which people, schedulers and terminals end a program. The processes do not get a terminal's."""

_SECONDS_TO_FAIL = 5.0
"""How long the others have to say what they miss of one that failed before they are ended, and then before a kill."""

_SECONDS_TO_END = 15.0
"""How long a process has to end after a signal that is handed on, before it is killed."""


def supervise(job: Job, environments: Sequence[dict[str, str]], about_aborts: str = "") -> int:
    """Runs the job's command once for each of these environments.

    Args:
        job: what is started.
        environments: of each process, the variables that it has in addition to this one's.
        about_aborts: what is said of a process that has aborted itself.

    Returns:
        0 if all end well, else the exit status of the first that failed; 128 and the number of a signal that ended it,
        or that this process got.
    """
    with _forwarded_signals() as received:
        processes: list[subprocess.Popen[bytes]] = []
        readers: list[threading.Thread] = []
        try:
            for rank, environment in zip(job.ranks, environments):
                # In a session of its own: Ctrl-C in a terminal reaches only this process, which forwards it once.
                process = subprocess.Popen(
                    job.command,
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                processes.append(process)
                for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    reader = threading.Thread(target=_copy, args=(stream, out, f"[{rank}] "), daemon=True)
                    reader.start()
                    readers.append(reader)
            return _wait(job, processes, received, about_aborts)
        finally:
            for process in processes:
                _signal(process, signal.SIGKILL)  # with what it has started
                process.wait()
            for reader in readers:
                reader.join(1.0)


def _wait(job: Job, processes: Sequence[subprocess.Popen[bytes]], received: list[int], about_aborts: str) -> int:
    failed: int | None = None
    limit, then, num_sent = float("inf"), signal.SIGKILL, 0
    while None in (statuses := [process.poll() for process in processes]):
        ended = [i for i, status in enumerate(statuses) if status]
        if len(received) > num_sent:
            number = received[0] if num_sent == 0 else signal.SIGKILL  # who asks twice waits no longer
            limit, then, num_sent = time.monotonic() + _SECONDS_TO_END, signal.SIGKILL, len(received)
            _signal_all(processes, number)
        elif ended and failed is None and not received:
            failed, limit, then = ended[0], time.monotonic() + _SECONDS_TO_FAIL, signal.SIGTERM
            _say_failed(job, failed, statuses, about_aborts)
        elif time.monotonic() > limit:
            _signal_all(processes, then)
            limit, then = time.monotonic() + _SECONDS_TO_FAIL, signal.SIGKILL
        time.sleep(0.05)
    if received:
        return 128 + received[0]
    if failed is None:
        failed = next((i for i, status in enumerate(statuses) if status), None)
        if failed is None:
            return 0
        _say_failed(job, failed, statuses, about_aborts)
    status = statuses[failed] or 0
    return status if status >= 0 else 128 - status


def _say_failed(job: Job, failed: int, statuses: Sequence[int | None], about_aborts: str) -> None:
    others = "; the others are ended" if None in statuses else ""
    more = about_aborts if statuses[failed] == -signal.SIGABRT else ""
    _say(f"process {job.ranks[failed]} ended with status {statuses[failed]}{others}.{more}")


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[int]]:
    """A block in which the signals that end a program are noted in a list; not one that is ignored, as with nohup."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        del frame
        received.append(number)

    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
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


_lock = threading.Lock()


def _copy(stream: IO[bytes] | None, out: IO[str], prefix: str) -> None:
    """Writes what comes line by line, each with a prefix; a progress bar begins its lines with a carriage return."""
    assert stream is not None
    rest = b""
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            _write(lines, out, prefix)
        _write([rest] if rest else [], out, prefix)


def _write(lines: Sequence[bytes], out: IO[str], prefix: str) -> None:
    if lines:
        text = "".join(f"{prefix}{line.decode(errors='replace')}\n" for line in lines)
        with _lock, contextlib.suppress(OSError, ValueError):
            out.write(text)
            out.flush()


def _say(words: str) -> None:
    with _lock:
        print(f"keras_shardopt.launch: {words}", file=sys.stderr, flush=True)
