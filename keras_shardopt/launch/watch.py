"""Finds a job that makes no step. `callbacks.Heartbeat` in the program writes the files that are read here."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator

from keras_shardopt.backends import jobs
from keras_shardopt.launch.job import Job

_MOST_SECONDS = 1.0
"""If more time passes between two calls of `hung`, the job was stopped (SIGSTOP), and the rest does not count."""


class Watch:
    """Reads the files in which this machine's processes record their last step. Removes files of earlier jobs.

    Without `--watch` there are no files.

    Args:
        job: the job to watch.
        directory: an absolute path, because a program can change its working directory. Empty without `--watch`.
        say: prints a line.
    """

    def __init__(self, job: Job, directory: str, say: Callable[[str], None]) -> None:
        self._files = {rank: pathlib.Path(directory, f"rank-{rank}.json") for rank in job.ranks if directory}
        self._seconds = self._remind_at = job.watch or float("inf")
        self._say = say
        self._clock, self._called = 0.0, time.monotonic()
        # By process: the time at which its file changed, `_clock` at that time, and the file's epoch, step and phase.
        self._beats: dict[int, tuple[int, float, tuple[int, int, str]]] = {}
        for file in self._files.values():
            file.unlink(missing_ok=True)
        # Set HEARTBEATS even to "", because a watched job that starts this job would otherwise pass on its directory.
        self.environment = {jobs.HEARTBEATS: directory, **({"PYTHONFAULTHANDLER": "1"} if directory else {})}

    def hung(self, running: Collection[int]) -> str:
        """Returns a text with each process's step if one of `running` made no step for too long; otherwise ""."""
        before, self._called = self._called, time.monotonic()
        self._clock += min(self._called - before, _MOST_SECONDS)
        for rank, file in self._files.items():
            try:
                beat = json.loads(file.read_text())
                changed = file.stat().st_mtime_ns  # read the time after the line, or a new line could get an old time
            except (OSError, ValueError):  # not in `fit` yet, an empty file on a full disk, or the user removed it
                self._beats.pop(rank, None)
                continue
            last = self._beats.get(rank)
            since = last[1] if last and last[0] == changed else self._clock
            self._beats[rank] = changed, since, (beat["epoch"], beat["step"], beat["phase"])
        if self._beats:
            self._remind_at = float("inf")
        elif self._clock > self._remind_at:
            self._remind_at = float("inf")
            self._say(
                f"no process has begun `fit` with a heartbeat in {self._seconds:g} s. `--watch` needs "
                "`keras_shardopt.callbacks.Heartbeat()` among the callbacks of `fit`."
            )
        latest = self._clock - self._seconds
        late = {rank for rank, (_, since, place) in self._beats.items() if since < latest and place[2] != "ended"}
        if late.isdisjoint(running):
            return ""
        places: dict[tuple[int, int, str], list[str]] = {}
        for rank in self._files:
            epoch, step, phase = self._beats[rank][2] if rank in self._beats else (0, 0, "before `fit`")
            places.setdefault((epoch, step, phase if rank in running else "exited"), []).append(str(rank))
        found = [
            f"process{'es' if len(ranks) > 1 else ''} {', '.join(ranks)} in epoch {epoch}, step {step} ({phase})"
            for (epoch, step, phase), ranks in sorted(places.items())
        ]
        return f"no step for {self._seconds:g} s: {'; '.join(found)}."


@contextlib.contextmanager
def watching(job: Job, say: Callable[[str], None]) -> Iterator[Watch]:
    """Yields a `Watch`. The processes need its `environment`. Without `--watch`, its `hung` finds no process."""
    if job.watch is None:
        yield Watch(job, "", say)
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Watch(job, os.path.abspath(job.log_dir or directory), say)
