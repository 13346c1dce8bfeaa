"""Finds a job that makes no step. `callbacks.Heartbeat` in the program writes the files that are read here."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator

from keras_shardopt.backends import jobs
from keras_shardopt.launch.job import Job


class Watch:
    """Reads the files in which this machine's processes record their last step. Removes files of earlier jobs."""

    def __init__(self, directory: str, job: Job) -> None:
        self._files = {rank: pathlib.Path(directory, f"rank-{rank}.json") for rank in job.ranks}
        self._seconds = job.watch or float("inf")
        self._changes: dict[int, tuple[int, float]] = {}  # a file's time of change, and the clock then
        for file in self._files.values():
            file.unlink(missing_ok=True)
        self.environment = {jobs.HEARTBEATS: directory, "PYTHONFAULTHANDLER": "1"} if job.watch else {}

    def hung(self) -> str:
        """Returns the position of each process if one of them made no step for too long; otherwise ""."""
        for rank, file in self._files.items():
            with contextlib.suppress(FileNotFoundError):
                changed = file.stat().st_mtime_ns
                if self._changes.get(rank, (None, 0.0))[0] != changed:
                    self._changes[rank] = changed, time.monotonic()
        latest = time.monotonic() - self._seconds
        late = [rank for rank, (_, since) in self._changes.items() if since < latest]
        if all(self._position(rank)[2] == "ended" for rank in late):
            return ""
        places: dict[tuple[int, int, str], list[str]] = {}
        for rank in self._files:
            places.setdefault(self._position(rank), []).append(str(rank))
        found = [
            f"process{'es' if len(ranks) > 1 else ''} {', '.join(ranks)} in epoch {epoch}, step {step} ({phase})"
            for (epoch, step, phase), ranks in sorted(places.items())
        ]
        return f"no step for {self._seconds:g} s: {'; '.join(found)}."

    def _position(self, rank: int) -> tuple[int, int, str]:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # the file can be new and still empty
            beat = json.loads(self._files[rank].read_text())
            return beat["epoch"], beat["step"], beat["phase"]
        return 0, 0, "before `fit`"


@contextlib.contextmanager
def watching(job: Job) -> Iterator[Watch]:
    """Yields a `Watch`. The processes need its `environment`. Without `--watch`, its `hung` finds no process."""
    with tempfile.TemporaryDirectory() as directory:
        yield Watch(job.log_dir or directory, job)
